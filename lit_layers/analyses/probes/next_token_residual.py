"""Least-squares prediction of the next token's id from each layer's states, and how its residual falls with depth."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Jobs, Rows, Values, joined
from lit_layers.analyses.probes.probe_fits import MAX_SENT, vector_bytes
from lit_layers.analyses.statistics import TagDict, all_undefined, comparable, half_records, missing_tag, nan_record
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.curves import exponential_law
from lit_layers.functional.probes.regression import Normalize, PredictionResidual, prediction_residual
from lit_layers.models.build import true_vocab_size
from lit_layers.models.view import Batch, LayeredModel, Trajectory, final_norm, states_of_layers
from lit_layers.records import Record

MAX_BYTES = 8 * 10**9  # limit for bytes of states in memory: 78,000 rows of 25 layers of width 1,024 in float32
EPS = 1e-5  # the eps to use if a norm has no attribute for it; the code of OlmoLayerNorm contains this value


@dataclass(kw_only=True)
class NextTokenResidual(Analysis):
    """Least-squares prediction of the next token's vocabulary index from the states at all positions, per layer 0..L.

    Per layer, with `n` counting rows (positions):

    - `prediction_residual`, the mean squared residual divided by the variance of the indices, on the rows that are
      fitted, in [0, 1];
    - `adjusted`, the prediction residual corrected for the number of features;
    - `held_out`, the residual of a fit on the share `split` of the texts, scored on the other texts;
    - `rank`, the rank of the matrix of features.

    Records tagged `control="relabelled_vocabulary"` come from fits after a random permutation of the vocabulary's ids.
    In most vocabularies ids are roughly ordered by frequency, and the permutation removes this order. Compare values
    only at equal numbers of rows and widths, or use `adjusted`.

    Records without a layer describe `exponential_law`, fitted to prediction_residual over layers 1..L. `residual_ratio`
    is its rho: if it is below 1, the residual shrinks by this factor per block. `r_squared` and `pearson` tell how well
    the law fits. A model of fewer than 3 blocks, or with a residual of 0 at a layer, has no record of these three. If
    most texts have non-finite states at a layer, that layer has no records, and the three values are NaN. A text with a
    non-finite state at any of the remaining layers is left out at all layers and counted in `num_undefined`.

    Intervals and stderr of prediction_residual, adjusted and residual_ratio come from the spread over `num_halves`
    random halves of the texts, centred on the value (delete-half jackknife). Resampling with replacement would repeat
    rows. The means over halves, of `num_half_texts` texts each, are `..._of_half`. There are no intervals if there are
    fewer than 4 texts, or if a half has too few rows for the width.

    Rows are normalised by a norm without weights, of the same kind and eps as the model's own. With `states="hf"`, the
    last layer is measured after the final norm and not normalised again. The model runs in float32 or wider; all fits
    are in float64 on its device. Memory: layers x rows x width, refused above 8 GB.

    Source: He & Su, arXiv 2408.13442.
    """

    SEES = "text"
    NEXT_TOKEN = True  # in other models, the states already contain the token to predict
    batches: Batches
    name: str = "prediction_residual"
    states: Literal["resid", "hf"] = "resid"
    split: float = 0.8
    seed: int = 0
    num_halves: int = 20

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_rows(model, self._rows())

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        """Return the texts on which the model runs.

        The dict is empty if the states are too large to send between ranks. `jobs` then runs the model itself.
        """
        rows = self._rows()
        self._check_rows(model, rows)
        is_large = vector_bytes(model, len(rows.targets)) > MAX_SENT
        return {} if is_large else {"batches": Rows(self.batches)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the states (layers + 1, dim, rows) at positions with a next token."""
        prompt, position = _predicted(seen.mask)
        layers = states_of_layers(seen, self.states)
        return {"states": torch.stack([states[prompt, position].cpu() for states in layers]).mT}

    def jobs(self, model: LayeredModel, batches: Values | None = None) -> Jobs:
        rows = self._rows()
        if batches is None:
            batches = joined([self.update(model.trajectory(batch), batch) for batch in self.batches])
        states = batches.pop("states").mT
        layers, used, tags = self._comparable(states, rows)
        if tags:
            states, rows = states[:, used], rows.where(used)
            self._check_rows(model, rows)
        size, generator = true_vocab_size(model.model), torch.Generator().manual_seed(self.seed)
        ids = torch.stack([rows.targets, torch.randperm(size, generator=generator)[rows.targets]], dim=1)
        fitted = self._texts_to_fit(rows)[rows.text]
        halves = self._halves(rows, model.dim)

        def fit_layer(layer: int) -> _LayerFit:
            features = states[layer].contiguous().to(model.device)
            half_fits = torch.zeros(len(halves), 2, dtype=torch.float64)
            for i, half in enumerate(halves):
                fit = self._fit(model, layer, features[half], ids[half, :1])
                half_fits[i] = torch.stack([fit.value[0], fit.adjusted[0]])
            return _LayerFit(layer, self._fit(model, layer, features, ids, fitted), half_fits)

        def records(fits: list[_LayerFit]) -> Iterator[Record]:
            curve = torch.full((len(states),), math.nan, dtype=torch.float64)
            half_fits = torch.zeros(len(halves), len(states), dtype=torch.float64)
            for each in fits:
                curve[each.layer], half_fits[:, each.layer] = each.whole.value[0], each.halves[:, 0]
                yield from self._layer_records(each, rows, tags)
            yield from self._law(curve[1:], half_fits[:, 1:], rows, tags)

        return Jobs([partial(fit_layer, layer) for layer in layers.nonzero()[:, 0].tolist()], records)

    def _comparable(self, states: Tensor, rows: "_Rows") -> tuple[Tensor, Tensor, TagDict]:
        """Return masks of the layers (layers + 1,) and rows (rows,) to use, and a tag that counts texts left out.

        All states of a used row's text are finite at every used layer.
        """
        broken = (~states.isfinite().all(-1)).double()  # (layers + 1, rows)
        of_texts = broken.new_zeros(len(states), rows.num_texts).index_add_(1, rows.text, broken)
        layers, used = comparable(of_texts == 0)
        if not layers.any():
            raise all_undefined(self.name)
        return layers, used[rows.text], {**missing_tag("", ~used)}

    def _fit(
        self, model: LayeredModel, layer: int, features: Tensor, ids: Tensor, split: Tensor | None = None
    ) -> PredictionResidual:
        kind, eps = _own_norm(model)
        if self.states == "hf" and layer == model.num_layers:
            kind = "none"  # these states are already normalised
        fit = prediction_residual(features, ids, normalize=kind, eps=eps, split=split)
        held_out = None if fit.held_out is None else fit.held_out.cpu()
        return replace(fit, value=fit.value.cpu(), adjusted=fit.adjusted.cpu(), held_out=held_out, rank=fit.rank.cpu())

    def _layer_records(self, found: "_LayerFit", rows: "_Rows", counts: TagDict) -> Iterator[Record]:
        """Yield the records of one layer, for the ids of the vocabulary and for the permuted ids (the control)."""
        layer, whole, halves = found
        num_scored = whole.num_rows - int(self._texts_to_fit(rows)[rows.text].sum())
        held_out = cast("Tensor", whole.held_out)
        controls: tuple[TagDict, ...] = ({}, {"control": "relabelled_vocabulary"})
        for column, control in enumerate(controls):
            tags = self._tags(rows) | counts | control
            value, adjusted = halves[: 0 if control else None].T
            for metric, values, spread in (
                ("prediction_residual", whole.value, value),
                ("adjusted", whole.adjusted, adjusted),
            ):
                yield from self._spread(metric, values[column], spread, whole.num_rows, rows, tags, layer)
            yield Record(metric="held_out", value=held_out[column].item(), layer=layer, n=num_scored, tags=tags)
        tags = self._tags(rows) | counts
        yield Record(metric="rank", value=whole.rank.item(), layer=layer, n=whole.num_rows, tags=tags)

    def _law(self, curve: Tensor, halves: Tensor, rows: "_Rows", counts: TagDict) -> Iterator[Record]:
        """Yield the records of the exponential law over layers 1..L.

        `curve` (layers,) is the `prediction_residual` of each layer on all texts, and `halves` (halves, layers) is the
        same on random halves of the texts.
        """
        tags, missing, n = self._tags(rows) | counts, missing_tag("layers", curve.isnan()), rows.num_texts
        if missing and len(curve) >= 3:
            yield from (nan_record(each, tags=tags | missing) for each in ("residual_ratio", "r_squared", "pearson"))
        if len(curve) < 3 or not (curve > 0).all():
            return
        law = exponential_law(curve)
        spread = exponential_law(halves).rho if len(halves) and (halves > 0).all() else halves.new_empty(0)
        yield from self._spread("residual_ratio", law.rho, spread, n, rows, tags)
        if not law.pearson.isnan():
            yield Record(metric="r_squared", value=law.r_squared.item(), n=n, tags=tags)
            yield Record(metric="pearson", value=law.pearson.item(), n=n, tags=tags)

    def _spread(
        self, metric: str, value: Tensor, halves: Tensor, n: int, rows: "_Rows", tags: TagDict, layer: int | None = None
    ) -> Iterator[Record]:
        tags = tags | ({"num_half_texts": rows.num_texts // 2} if len(halves) else {})
        return half_records(metric, value.item(), halves, n, layer=layer, tags=tags)

    def _tags(self, rows: "_Rows") -> TagDict:
        return {"num_texts": rows.num_texts, **self.tags_of("states")}

    def _rows(self) -> "_Rows":
        """Return the tokens to predict, and the text of each. The model is not needed for this."""
        targets, text, num_texts = [], [], 0
        for batch in self.batches:
            ids = batch["input_ids"]
            prompt, position = _predicted(batch.get("attention_mask", torch.ones_like(ids)).bool())
            # Number only the texts that have rows; texts of one token have none.
            _, index = prompt.unique(return_inverse=True)
            targets.append(ids[prompt, position + 1])
            text.append(num_texts + index)
            num_texts += int(index.max()) + 1 if len(index) else 0
        if not num_texts:
            raise InputError(f"{self.name}: no text has a next token to predict: give texts of two tokens or more")
        return _Rows(torch.cat(targets), torch.cat(text), num_texts)

    def _texts_to_fit(self, rows: "_Rows") -> Tensor:
        """Return the mask (texts,) of the texts on which the fit is made; it is scored on the other texts.

        Each text has a random number that depends on the seed and the text's index. The texts with the lowest numbers
        are used for the fit.
        """
        draws = [np.random.default_rng([self.seed, i]).random() for i in range(rows.num_texts)]
        count = min(max(round(self.split * rows.num_texts), 1), rows.num_texts - 1)
        fitted = torch.zeros(rows.num_texts, dtype=torch.bool)
        fitted[torch.tensor(draws).argsort()[:count]] = True
        return fitted

    def _halves(self, rows: "_Rows", dim: int) -> list[Tensor]:
        """Return masks (rows,) of random halves of the texts; an empty list if a half would have too few rows."""
        subsets = []
        for i in range(self.num_halves if rows.num_texts >= 4 else 0):
            order = np.random.default_rng([self.seed, i]).permutation(rows.num_texts)
            chosen = torch.zeros(rows.num_texts, dtype=torch.bool)
            chosen[torch.from_numpy(order[: rows.num_texts // 2])] = True
            subsets.append(chosen[rows.text])
        enough = all(half.sum() > dim + 1 and len(rows.targets[half].unique()) > 1 for half in subsets)
        return subsets if enough else []

    def _check_rows(self, model: LayeredModel, rows: "_Rows") -> None:
        num_rows, dim = len(rows.targets), model.dim
        if rows.num_texts < 2:
            raise InputError(f"{self.name}: expected at least 2 texts, to fit on one and score another, got 1")
        if num_rows <= dim + 1:
            raise InputError(
                f"{self.name}: {num_rows} positions are fitted exactly by states of width {dim}: give many times "
                f"{dim + 1} positions"
            )
        if (size := vector_bytes(model, num_rows)) > MAX_BYTES:
            raise InputError(
                f"{self.name}: the states of {num_rows} positions take {size / 1e9:.1f} GB: give "
                f"{MAX_BYTES / size:.0%} of the texts"
            )


class _Rows(NamedTuple):
    """Positions that have a next token, text by text.

    Texts are numbered from 0. Texts without such a position have no number.
    """

    targets: Tensor  # (rows,) ids of the next tokens
    text: Tensor  # (rows,) index of each row's text
    num_texts: int

    def where(self, used: Tensor) -> "_Rows":
        """Return the rows selected by a mask (rows,), with their texts renumbered from 0."""
        texts, text = self.text[used].unique(return_inverse=True)
        return _Rows(self.targets[used], text, len(texts))


class _LayerFit(NamedTuple):
    layer: int
    whole: PredictionResidual
    halves: Tensor  # (halves, 2) `prediction_residual` and `adjusted` of each half


def _predicted(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text index and the position of each real token whose next token is also real."""
    prompt, position = (mask[:, :-1] & mask[:, 1:]).nonzero().T
    return prompt, position


def _own_norm(model: LayeredModel) -> tuple[Normalize, float]:
    """Return kind and eps of the model's final norm or, if it has none, of the first norm in its blocks."""
    norm: Any = final_norm(model)
    if norm is None:
        norm = next(module for module in model.blocks[0].modules() if "norm" in type(module).__name__.lower())
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", EPS))
    return ("rms_norm" if "rms" in type(norm).__name__.lower() else "layer_norm"), eps
