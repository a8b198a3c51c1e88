"""Attentive probes of every layer: which class a probe reads that chooses among a row's tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_layers.analyses.base import Analysis
from lit_layers.analyses.probes.label_probe import LabelProbe, label_scores
from lit_layers.analyses.states import at_least_float32
from lit_layers.analyses.statistics import TagDict, complete, left_out, with_a_value
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.probes.attentive import fit_attentive_probe
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import Part, Work, passes_of
from lit_layers.records import Record

_OPTIONS = ("num_heads", "steps", "batch_size", "lr", "weight_decay", "seed")


@dataclass(kw_only=True)
class AttentiveProbe(Analysis):
    """A probe per layer, 0 to L, of the `labels` of texts or images, that attends to tokens with learned queries.

    Beside `LabelProbe`, whose feature is one vector of a row, it shows what stands at tokens that differ from row to
    row. Per layer: `accuracy`, `log_loss` (nats) and `macro_f1` on the test rows, and for the same rows what the class
    frequencies in training give (`reference="majority"`). Rows, duplicates and intervals are those of `LabelProbe`. All
    tokens are attended to, of an image the class token and patches. A layer at which fewer than half of all rows
    have finite states has no probe; rows whose states are not finite at another layer are left out of all, and
    counted in `num_undefined`.

    One layer's states are in memory at a time (10,000 images x 65 tokens x 192 x 4 B = 0.5 GB), and each layer is a
    pass over the rows, after one that looks for what is not finite. The model runs in float32 or wider.

    Source: as of `lit_layers.functional.fit_attentive_probe`; layer by layer in Skean et al., Layer by Layer, arXiv
    2502.02013, figure 14.

    Args:
        train: labelled rows that the probes are fitted to.
        test: labelled rows that they are scored on.
        num_heads: queries, each over a slice of the width; it divides the width.
        steps: of AdamW for each layer.
        seed: of the probes' first weights and of the order of rows.
    """

    LEAST: ClassVar = {"num_heads": 1, "steps": 1, "batch_size": 1, "weight_decay": 0, "seed": 0}
    POSITIVE = ("lr",)

    train: Batches
    test: Batches
    name: str = "attentive_probe"
    num_heads: int = 4
    steps: int = 500
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if model.dim % self.num_heads:
            raise InputError(
                f"{self.name}: expected num_heads that divides the model's width {model.dim}, got {self.num_heads}"
            )

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._rows.problem(model)

    @property
    def _rows(self) -> LabelProbe:
        """Whose rows, labels and references these are."""
        return LabelProbe(name=self.name, train=self.train, test=self.test)

    def work(self, model: LayeredModel) -> Work | None:
        train, test = (passes_of(model, batches, kept=False) for batches in (self.train, self.test))
        if train is None or test is None:
            return None
        whole = train + test
        layers, tokens = model.num_layers + 1, train.tokens // max(1, train.texts)
        flop = (
            3 * 2 * 2 * model.dim**2 * layers * self.steps * self.batch_size * tokens
        )  # keys and values, three passes
        passes = tuple(part._replace(count=part.count * (layers + 1)) for part in whole.parts)
        held = 4.0 * whole.tokens * model.dim
        return Work(
            texts=whole.texts,
            tokens=whole.tokens,
            parts=(*passes, Part("products", flop, (model.dim,))),
            device=whole.device,
            host=held,
            at_most=whole.at_most,
        )

    def run(self, model: LayeredModel) -> Iterable[Record]:
        self.check_options(model)
        view = at_least_float32(model)
        yield from with_a_value(self.name, self._records(view))

    def _records(self, view: LayeredModel) -> Iterator[Record]:
        problem = self._rows.problem(view)
        train, test = (self._finite(view, split) for split in ("train", "test"))
        train = train[:, problem.kept]
        layers, kept = complete(torch.cat([train, test], dim=1))
        in_train, in_test = kept.split([len(problem.train), len(problem.test)])
        if len(problem.train[in_train].unique()) < 2 or not in_test.any():
            return
        problem = problem.left(in_train, in_test)
        yield from self._rows.majority(problem)
        tags: TagDict = {**left_out("", ~kept)}
        for layer in layers.nonzero()[:, 0].tolist():
            states, mask = self._states(view, "train", layer)
            rows = problem.kept.nonzero()[:, 0][in_train]
            probe = fit_attentive_probe(
                states[rows],
                mask[rows],
                problem.train.to(states.device),
                num_classes=problem.num_classes,
                **{option: getattr(self, option) for option in _OPTIONS},
            )
            states, mask = self._states(view, "test", layer)
            log_proba = probe.log_proba(states[in_test], mask[in_test]).cpu()
            yield from label_scores(problem, log_proba, tags, layer)

    def _finite(self, view: LayeredModel, split: Literal["train", "test"]) -> Tensor:
        """Which rows have finite states at all their real tokens, (layers + 1, rows)."""
        parts = []
        for batch in getattr(self, split):
            trajectory = view.trajectory(batch)
            parts.append((trajectory.hidden.isfinite().all(-1) | ~trajectory.mask).all(-1).cpu())
        return torch.cat(parts, dim=1)

    def _states(self, view: LayeredModel, split: Literal["train", "test"], layer: int) -> tuple[Tensor, Tensor]:
        """States (rows, tokens, dim) and mask (rows, tokens) of a split, shorter texts with padding behind them."""
        states: list[Tensor] = []
        masks: list[Tensor] = []
        for batch in getattr(self, split):
            trajectory = view.trajectory(batch)
            states += trajectory.hidden[layer].clone()
            masks += trajectory.mask
        return pad_sequence(states, batch_first=True), pad_sequence(masks, batch_first=True)
