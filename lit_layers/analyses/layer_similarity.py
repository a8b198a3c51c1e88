"""How alike the states of different layers are, and which layers form the middle of the model."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.states import STATES, States, in_convention
from lit_layers.analyses.summary import complete, gap, left_out, mean_of_defined, summarize
from lit_layers.analyses.token_jacobians import check_choice, check_counts, evenly_spread
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.geometry import cosine_similarity_matrix, linear_cka_matrix, pool
from lit_layers.functional.trajectory import layer_stages
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.records import Record

Mode = Literal["token", "flattened"]
Rows = Literal["tokens", "prompts"]
MODES, ROWS = get_args(Mode), get_args(Rows)
SIZES = "num_beginning", "num_middle", "num_ending"


@dataclass(kw_only=True)
class LayerSimilarity(DividedAnalysis):
    """Similarity of every two layers, 0 to L, and the beginning, middle and ending that it divides the model into.

    `layer_cosine` (tag `mode`): the cosine of a token's states at two layers, averaged within each prompt, then over
    prompts ("token"), or that of all of a prompt's tokens as one vector, a mean weighted by norms ("flattened").
    `layer_cka`: linear centred kernel alignment. Both for `layer` and `other_layer` in either order.

    `num_beginning`, `num_middle`, `num_ending` and `block_contrast`: the contiguous division of layers 1..L (the
    embedding does not count) by `layer_stages`, of the similarity that the tag `of` names and its `mode`.

    A layer without a value has none with any other, and then there is no division (NaN). A prompt that is not finite at
    some layer is left out of the alignment, a layer at which most are not has none.

    Values are over prompts of equal weight, with intervals; those of `layer_cka` are over all rows together (tag
    `num_rows`), without. Padding never enters. A result of other than the default options says so in tags. The model
    runs in float32 or wider.
    Source: Sun et al., arXiv 2407.09298 (cosine); Kornblith et al. 2019 (CKA).

    Args:
        batches: what is measured on.
        rows: of the alignment: tokens, or one mean-pooled vector for each prompt.
        num_tokens: of each prompt, evenly spread, where tokens are the rows; None for all. All layers' rows are kept
            in memory: 128 prompts x 16 tokens x 13 layers x 768 x 4 B = 82 MB.
        debiased: the alignment that does not grow with width over rows, and may be below 0; it needs 4 rows.
        drop_first: how many first tokens are left out, mostly sinks, whose norm decides "flattened" and the alignment.
        states: which convention.
    """

    batches: Batches
    name: str = "layer_similarity"
    rows: Rows = "tokens"
    num_tokens: int | None = 16
    debiased: bool = True
    drop_first: int = 0
    states: States = "resid"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options(model)

    def parts(self, model: LayeredModel) -> Iterable[Batch]:
        self._check_options(model)
        return self.batches

    def of_part(self, model: LayeredModel, part: Batch) -> "_Found":
        states: list[Tensor] = []
        masks: list[Tensor] = []

        def keep(layer: int, hidden: Tensor, mask: Tensor) -> None:
            states.append(in_convention(model, self.states, layer, hidden))
            masks.append(mask)

        model.pass_states(part, keep)
        hidden, mask = torch.stack(states), masks[0]  # (layers + 1, batch, tokens, dim)
        mask = mask & (mask.cumsum(-1) > self.drop_first)
        left = mask.any(-1)
        hidden, mask = hidden[:, left], mask[left]
        cosines = {mode: _cosines(hidden, mask, mode) for mode in MODES}
        finite = (hidden.isfinite().all(-1) | ~mask).all(-1).cpu()
        rows, prompt = (part.cpu() for part in self._rows(hidden, mask))
        return _Found(cosines, rows, prompt, finite)

    def combine(self, model: LayeredModel, found: "list[_Found]") -> Iterable[Record]:
        rows, num_left_out, prompts = _joined(found)
        least = 4 if self.debiased else 2
        if rows.shape[1] < least:
            raise InputError(
                f"{self.name}: layer_cka needs at least {least} rows, got {rows.shape[1]} ({self.rows}): give more "
                "texts or longer ones"
            )
        tags = {"states": self.states} if self.states != "resid" else {}
        tags |= {"drop_first": self.drop_first} if self.drop_first else {}
        for mode in MODES:
            values = torch.cat([part.cosines[mode] for part in found])  # (prompts, layers + 1, layers + 1)
            tags_of_mode = {"mode": mode, **tags}
            yield from _cosine_records(values, tags_of_mode)
            yield from _stages("layer_cosine", mean_of_defined(values, dim=0), len(values), tags_of_mode)
        tags |= {"rows": self.rows} if self.rows != "tokens" else {}
        tags |= {} if self.debiased else {"debiased": "no"}
        tags |= left_out("", num_left_out)
        alignment = linear_cka_matrix(rows.to(model.device), debiased=self.debiased, undefined="nan").cpu()
        for layer, row in enumerate(alignment.tolist()):
            for other, value in enumerate(row):
                if not math.isnan(value):
                    yield Record(
                        metric="layer_cka",
                        value=value,
                        layer=layer,
                        other_layer=other,
                        n=prompts,
                        tags={**tags, "num_rows": rows.shape[1]},
                    )
        yield from _stages("layer_cka", alignment, prompts, tags)

    def _rows(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """What of a batch enters the alignment, (layers + 1, rows, dim), and of which prompts, (rows,)."""
        if self.rows == "prompts":
            return pool(hidden, mask.expand(hidden.shape[:-1]), undefined="nan"), torch.arange(len(mask))
        kept = torch.zeros_like(mask)
        for prompt, real in enumerate(mask):
            places = real.nonzero()[:, 0]
            count = len(places) if self.num_tokens is None else self.num_tokens
            kept[prompt, places[evenly_spread(0, len(places) - 1, count)]] = True
        return hidden[:, kept], kept.nonzero()[:, 0]

    def _check_options(self, model: LayeredModel) -> None:
        if model.num_layers < 2:
            raise InputError(f"{self.name}: stages need at least two blocks, the model has {model.num_layers}")
        check_choice(self.name, "rows", self.rows, ROWS)
        check_choice(self.name, "states", self.states, STATES)
        check_counts(self.name, num_tokens=self.num_tokens)
        if self.drop_first < 0:
            raise InputError(f"{self.name}: expected drop_first of at least 0, got {self.drop_first}")


class _Found(NamedTuple):
    """Of the prompts of one batch."""

    cosines: dict[Mode, Tensor]  # (prompts, layers + 1, layers + 1), in float64; NaN where a state is zero
    rows: Tensor  # (layers + 1, rows, dim)
    prompt: Tensor  # (rows,)
    finite: Tensor  # (layers + 1, prompts)


def _joined(found: list[_Found]) -> tuple[Tensor, int, int]:
    """The rows of all prompts that are finite wherever most are, how many are not, and how many are."""
    _, kept = complete(torch.cat([part.finite for part in found], dim=1))
    parts = kept.split([part.finite.shape[1] for part in found])
    rows = [part.rows[:, own[part.prompt]] for part, own in zip(found, parts, strict=True)]
    return torch.cat(rows, dim=1), int((~kept).sum()), int(kept.sum())


def _cosines(hidden: Tensor, mask: Tensor, mode: Mode) -> Tensor:
    """The matrix of each prompt, so that their mean is that of all, and so is its spread."""
    num_layers, num_prompts = hidden.shape[:2]
    found = [
        cosine_similarity_matrix(hidden[:, [index]], mask[[index]], mode=mode, undefined="nan").cpu()
        for index in range(num_prompts)
    ]
    return torch.stack([torch.zeros(num_layers, num_layers, dtype=torch.float64), *found])[1:]  # there may be none


def _cosine_records(values: Tensor, tags: dict[str, Any]) -> Iterator[Record]:
    num_layers = values.shape[-1]
    for layer in range(num_layers):
        for other in range(layer, num_layers):
            records = summarize("layer_cosine", values[:, layer, other], layer=layer, other_layer=other, tags=tags)
            yield from records
            if other != layer:
                yield from (replace(record, layer=other, other_layer=layer) for record in records)


def _stages(of: str, matrix: Tensor, num_prompts: int, tags: dict[str, Any]) -> Iterator[Record]:
    missing = matrix[1:, 1:].diagonal().isnan()
    if missing.any():
        for metric in (*SIZES, "block_contrast"):
            yield gap(metric, tags={"of": of, **tags, **left_out("layers", missing)})
        return
    found = layer_stages(matrix[1:, 1:])
    sizes = {name: getattr(found, name) for name in SIZES}
    for metric, value in {**sizes, "block_contrast": found.contrast}.items():
        yield Record(metric=metric, value=float(value), n=num_prompts, tags={"of": of, **tags})
