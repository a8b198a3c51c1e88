"""What makes the tokens of a prompt spread: how its entropy moves with repetition, with random tokens, with length."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.states import STATES, States, in_convention
from lit_layers.analyses.summary import summarize, summarize_over_layers
from lit_layers.analyses.token_jacobians import check_choice
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.entropy import Normalization, spectrum
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.records import Record

Study = Literal["repetition", "randomness", "length"]
STUDIES: tuple[Study, ...] = ("repetition", "randomness", "length")
NORMALIZATIONS: tuple[Normalization, ...] = ("raw", "maxEntropy")
SHORTEST = 8  # of the lengths that are chosen by themselves

Key = tuple[str, float, Normalization, int]  # study, its level, normalization, first tokens left out


@dataclass(kw_only=True)
class PromptStudies(DividedAnalysis):
    """`prompt_entropy` of changed prompts at every layer, and its mean over layers 1..L (no layer), by tag `study`.

    "repetition": each token becomes, with probability `p`, one token that is drawn once from the prompt. "randomness":
    it becomes any token of the vocabulary but the special ones. "length": the first tokens of the prompt alone, as many
    as the tag `length` says; a prompt with fewer is left out. At p = 0 nothing is changed: the control. The tokens
    changed at one p are among those changed at a higher one.

    Values and tags `normalization` and `drop_first` are as in `Representation`. What prompt i becomes depends on (seed,
    study, i) alone. The model runs in float32 or wider.

    Source: Skean et al., arXiv 2502.02013, section 5 and appendix F.

    Args:
        batches: texts as token ids.
        p: probabilities.
        lengths: numbers of tokens; None: 8, 16, 32, ... as far as prompts go.
        studies: some of the three.
        special_tokens: not to be drawn, beside those that the model's config names.
    """

    batches: Batches
    name: str = "prompt_studies"
    studies: tuple[Study, ...] = STUDIES
    p: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    lengths: tuple[int, ...] | None = None
    special_tokens: tuple[int, ...] = ()
    drop_first: tuple[int, ...] = (0, 1)
    states: States = "resid"
    seed: int = 0

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options(model)

    def parts(self, model: LayeredModel) -> Iterator[tuple[int, Batch]]:
        self._check_options(model)
        first = 0
        for batch in self.batches:
            yield first, batch
            first += len(batch["input_ids"])

    def of_part(self, model: LayeredModel, part: tuple[int, Batch]) -> dict[Key, Tensor]:
        """Values (layers + 1, prompts)."""
        first, batch = part
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        found: dict[Key, Tensor] = {}
        for study in self.studies:
            for level, changed in self._changed(model, study, ids, mask, first):
                found |= {(study, level, *kind): values for kind, values in self._entropies(model, changed).items()}
        return found

    def combine(self, model: LayeredModel, found: list[dict[Key, Tensor]]) -> Iterable[Record]:
        groups: dict[Key, list[Tensor]] = {}
        for part in found:
            for key, values in part.items():
                groups.setdefault(key, []).append(values)
        self._check_lengths({level for study, level, *_ in groups if study == "length"})
        for study, level, normalization, dropped in sorted(groups, key=_place):
            values = torch.cat(groups[study, level, normalization, dropped], dim=1)
            tags: dict[str, Any] = {"study": study, ("length" if study == "length" else "p"): level}
            tags |= {"normalization": normalization, "drop_first": dropped}
            tags |= {"states": self.states} if self.states != "resid" else {}
            if bool(values.isnan().all()):
                continue  # of one token, say, or of two without the first
            for layer, row in enumerate(values):
                yield from summarize("prompt_entropy", row, layer=layer, tags=tags)
            yield from summarize_over_layers("prompt_entropy", values[1:], tags=tags)

    def _changed(
        self, model: LayeredModel, study: Study, ids: Tensor, mask: Tensor, first: int
    ) -> Iterator[tuple[float, Batch]]:
        """The batch at every level of a study."""
        if study == "length":
            counts = mask.sum(-1)
            for length in self.lengths or _powers(int(counts.max())):
                rows = (counts >= length).nonzero().squeeze(-1).tolist()
                if rows:
                    cut = torch.stack([ids[row][mask[row]][:length] for row in rows])
                    yield length, {"input_ids": cut, "attention_mask": torch.ones_like(cut)}
            return
        drawn, others = torch.full(ids.shape, np.inf, dtype=torch.float64), ids.clone()
        allowed = self._ordinary(model) if study == "randomness" else np.empty(0)
        for row in range(len(ids)):
            draw, real = np.random.default_rng([self.seed, STUDIES.index(study), first + row]), ids[row][mask[row]]
            drawn[row, mask[row]] = torch.from_numpy(draw.random(len(real)))
            if study == "repetition":
                others[row, mask[row]] = real[int(draw.integers(len(real)))]
            else:
                others[row, mask[row]] = torch.from_numpy(draw.choice(allowed, len(real)))
        for p in self.p:
            yield p, {"input_ids": torch.where(drawn < p, others, ids), "attention_mask": mask.long()}

    def _entropies(self, model: LayeredModel, batch: Batch) -> dict[tuple[Normalization, int], Tensor]:
        found: dict[tuple[Normalization, int], list[Tensor]] = {}

        def look(layer: int, hidden: Tensor, mask: Tensor) -> None:
            hidden = in_convention(model, self.states, layer, hidden)
            for dropped in self.drop_first:
                sets, single = spectrum(hidden, mask, drop_first=dropped), mask.sum(-1) - dropped < 2
                for normalization in NORMALIZATIONS:
                    values = sets.entropy(normalization=normalization, undefined="nan").cpu()
                    found.setdefault((normalization, dropped), []).append(values.masked_fill(single.cpu(), torch.nan))

        model.pass_states(batch, look)
        return {kind: torch.stack(values) for kind, values in found.items()}

    def _ordinary(self, model: LayeredModel) -> np.ndarray:
        """The numbers of the vocabulary's tokens without the special ones."""
        special = set(self.special_tokens)
        for name, value in vars(model.model.config).items():
            if name.endswith("_token_id") and value is not None:
                special |= set(value) if isinstance(value, list | tuple) else {value}
        size = model.vocab_size or model.model.config.vocab_size
        ordinary = np.array(sorted(set(range(size)) - special), dtype=np.int64)
        if not len(ordinary):
            raise InputError(f"{self.name}: expected some tokens beside special_tokens, the vocabulary has {size}")
        return ordinary

    def _check_lengths(self, found: set[float]) -> None:
        if "length" in self.studies and (missing := sorted(set(self.lengths or ()) - found)):
            raise InputError(f"{self.name}: no prompt has {int(missing[0])} tokens, which lengths asks for")

    def _check_options(self, model: LayeredModel) -> None:
        if model.family.sees_images:
            raise InputError(f"{self.name}: expected a model of text, got {type(model.model).__name__}")
        check_choice(self.name, "states", self.states, STATES)
        for study in self.studies:
            check_choice(self.name, "studies", study, STUDIES)
        for option in ("studies", "p", "drop_first"):
            if not getattr(self, option) or len(set(getattr(self, option))) < len(getattr(self, option)):
                raise InputError(f"{self.name}: expected {option} to be different values, got {getattr(self, option)}")
        if any(not 0 <= p <= 1 for p in self.p):
            raise InputError(f"{self.name}: expected each p to be within 0 and 1, got {list(self.p)}")
        if min(self.drop_first) < 0:
            raise InputError(f"{self.name}: expected drop_first of at least 0, got {list(self.drop_first)}")
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            raise InputError(f"{self.name}: expected lengths of at least 1, got {list(self.lengths)}")
        if self.seed < 0:
            raise InputError(f"{self.name}: expected seed of at least 0, got {self.seed}")


def _powers(most: int) -> list[int]:
    lengths = []
    while (length := SHORTEST * 2 ** len(lengths)) <= most:
        lengths.append(length)
    return lengths


def _place(key: Key) -> tuple:
    study, level, normalization, dropped = key
    return STUDIES.index(study), level, dropped, NORMALIZATIONS.index(normalization)  # pyright: ignore[reportArgumentType]
