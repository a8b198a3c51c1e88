"""How far the blocks of a model act along the same directions, and how linear its path is."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis
from lit_layers.analyses.summary import summarize
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional import coupling as functional
from lit_layers.functional.jacobian import block_jacobian, token_places
from lit_layers.models.families import trunk_of
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

# What published code does where it departs from our defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "released_code": {"k": (10, 30, 50), "sign": "absolute", "states": "hf", "fit_from": 10, "skip_last": True}
}
TOKENS = {"last": -1, "first": 0, "cls": 0, "last_patch": -1}
TIE = 1e-4  # relative gap of singular values below which their directions are not well determined


@dataclass(kw_only=True)
class Coupling(Analysis):
    """Depth-wise coupling of the blocks at one token, with its random baseline, and the spectra behind it.

    Per K (tag `k`, a count): `coupling` (mean over pairs of different blocks), `coupling_with_diagonal`,
    `coupling_by_distance` (tag `distance`), `coupling_pair` (layer = block of J1, other_layer = block that gives the
    bases), `random_coupling` (what unrelated bases would give), `excess_coupling` (0 random, 1 shared), `min_gap` and
    `num_tied` (Jacobians whose leading directions are not well determined), `error_bound` (of any one pair's value, for
    inexact singular vectors of these Jacobians; at p = 2). Besides, per layer: `singular_value` (tag
    `index`), `jacobian_norm`, `linearized_rollout`; and `spectrum_slope`, `spectrum_r_squared` of 1 / s_1 over depth.

    `k` counts directions where it is an int and is a share of the width where it is a float. `token` counts real
    tokens. The first `num_prompts` prompts are measured. `states="hf"` puts the final norm into the last block.
    Source: definitions and departures as in `lit_layers.functional.coupling`.
    """

    batches: Batches
    name: str = "coupling"
    k: tuple[int | float, ...] = (0.05, 0.1, 0.25)
    p: float = 2.0
    sign: Literal["signed", "absolute"] = "signed"
    token: int | Literal["last", "first", "cls", "last_patch"] = "last"
    num_prompts: int = 8
    num_singular_values: int = 15
    fit_from: int = 1
    skip_last: bool = False
    states: Literal["resid", "hf"] = "resid"
    preset: Literal["released_code"] | None = None

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options(model)

    def _check_options(self, model: LayeredModel) -> None:
        options = self._resolved()
        if model.num_layers < 2:
            raise InputError(f"{self.name}: coupling needs at least two blocks, the model has {model.num_layers}")
        if not options.k:
            raise InputError(f"{self.name}: expected at least one k, got none")
        for k in options.k:
            try:
                functional.num_directions(k, model.dim)
            except (TypeError, ValueError) as error:
                raise InputError(f"{self.name}: {error}; the model is {model.dim} wide: choose another k") from error
        if isinstance(self.token, str) and self.token not in TOKENS:
            raise InputError(f"{self.name}: expected token to be an int or one of {list(TOKENS)}, got {self.token!r}")
        for option in ("num_prompts", "num_singular_values", "fit_from"):
            if getattr(self, option) < 1:
                raise InputError(f"{self.name}: expected {option} of at least 1, got {getattr(self, option)}")
        for option, value, allowed in (
            ("sign", options.sign, ("signed", "absolute")),
            ("states", options.states, ("resid", "hf")),
        ):
            if value not in allowed:
                raise InputError(f"{self.name}: expected {option} to be one of {list(allowed)}, got {value!r}")
        if not options.p >= 1:
            raise InputError(f"{self.name}: expected p of at least 1, got {options.p}")

    def run(self, model: LayeredModel) -> Iterable[Record]:
        self._check_options(model)
        options = self._resolved()
        counts = sorted({functional.num_directions(k, model.dim) for k in options.k})
        groups = [_measure(model, batch, counts, options) for batch in options._prompts(model)]
        if not groups:
            raise InputError(f"{self.name}: the data holds no prompts")
        found = _Found(*(torch.cat(parts, dim=-1) for parts in zip(*groups, strict=True)))
        for position, count in enumerate(counts):
            yield from _pair_records(found, position, {"k": count})
        yield from _block_records(found, options.fit_from)

    def _resolved(self) -> "Coupling":
        """With the preset's options in place."""
        if self.preset is None:
            return self
        if self.preset not in PRESETS:
            raise InputError(f"{self.name}: expected preset to be one of {list(PRESETS)}, got {self.preset!r}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for option, value in PRESETS[self.preset].items():
            given = getattr(self, option)
            if given not in (defaults[option], value):
                raise InputError(
                    f"{self.name}: preset {self.preset} sets {option} to {value}, got {option} {given} as well: "
                    "leave one of them out"
                )
        return dataclasses.replace(self, **PRESETS[self.preset])

    def _prompts(self, model: LayeredModel) -> Iterator[Batch]:
        """The first prompts, a few at a time: their Jacobians of all blocks are held together."""
        # 2**25 entries: 128 MB in float32, four prompts of GPT-2 small (12 blocks x 768 x 768)
        size = max(1, 2**25 // (model.num_layers * model.dim**2))
        left = self.num_prompts
        for batch in self.batches:
            rows = min(left, len(next(iter(batch.values()))))
            for start in range(0, rows, size):
                yield {name: values[start : min(start + size, rows)] for name, values in batch.items()}
            left -= rows
            if left == 0:
                return


class _Found(NamedTuple):
    """What a group of prompts gave, float64 on the CPU, prompts last."""

    miscoupling: Tensor  # (k, blocks, blocks, prompts)
    random: Tensor  # (k, blocks, prompts)
    gaps: Tensor  # (k, blocks, prompts)
    bounds: Tensor  # (k, blocks, prompts)
    values: Tensor  # (blocks, top, prompts)
    norms: Tensor  # (blocks, prompts)
    rollout: Tensor  # (blocks, prompts)


def _measure(model: LayeredModel, batch: Batch, counts: list[int], options: Coupling) -> _Found:
    trajectory = model.trajectory(batch)
    token = TOKENS[options.token] if isinstance(options.token, str) else options.token
    place = token_places(token, trajectory.mask)[:, 0]
    states = trajectory.hidden[:, torch.arange(len(place)), place]  # (layers + 1, prompts, dim)
    jacobians, states = _token_jacobians(model, trajectory, token, states, options.states)
    top = min(options.num_singular_values, model.dim)
    broken = ~jacobians.isfinite().all(-1).all(-1)  # (prompts, blocks)
    finite = jacobians.masked_fill(broken[..., None, None], 0)
    # one direction more than the largest K: min_gap looks at it
    kept = min(max(counts[-1] + 1, top), model.dim)
    parts = [functional.singular_factors(finite[:, block], kept) for block in range(model.num_layers)]
    factors = functional.Factors(*(torch.stack(part, 1) for part in zip(*parts, strict=True)))
    wide = finite.to(factors.left.dtype)
    norms = torch.linalg.matrix_norm(wide)  # (prompts, blocks)
    miscoupling = functional.miscoupling_from_factors(
        wide, factors.values, factors, k=counts, p=options.p, sign=options.sign, undefined="nan"
    ).masked_fill(broken[:, None, :], math.nan)
    random = [
        functional.random_miscoupling_from_norms(
            factors.values[..., :count], norms, dim=model.dim, p=options.p, sign=options.sign, undefined="nan"
        )
        for count in counts
    ]
    gaps = torch.stack([functional.min_gap(factors.values, k=count) for count in counts])
    rollout = functional.linearized_rollout(
        jacobians.transpose(0, 1), states, skip_last=options.skip_last, undefined="nan"
    )
    return _Found(
        miscoupling=_prompts_last(miscoupling, 1),
        random=_prompts_last(torch.stack(random).masked_fill(broken, math.nan), 1),
        gaps=_prompts_last(gaps.masked_fill(broken, math.nan), 1),
        bounds=_prompts_last(torch.stack([factors.bounds[..., count - 1] for count in counts]), 1),
        values=_prompts_last(factors.values[..., :top].masked_fill(broken[..., None], math.nan), 0),
        norms=_prompts_last(norms.masked_fill(broken, math.nan), 0),
        rollout=_prompts_last(rollout, 1),
    )


def _token_jacobians(
    model: LayeredModel, trajectory: Trajectory, token: int, states: Tensor, convention: str
) -> tuple[Tensor, Tensor]:
    """Same-token Jacobians of all blocks, and the token's states in the same convention."""
    jacobians = torch.stack(
        [
            block_jacobian(
                trajectory.block(layer), trajectory.hidden[layer - 1], out_tokens=token, mask=trajectory.mask
            )
            for layer in range(1, model.num_layers + 1)
        ],
        dim=1,
    )  # (prompts, blocks, dim, dim)
    if convention == "hf" and model.family.norm is not None:
        norm = trunk_of(model.model).get_submodule(model.family.norm)
        last = states[-1][:, None]  # (prompts, 1, dim): a norm acts on each token alone
        outer = block_jacobian(norm, last, residual=False)
        # d norm(x + f(x)) / dx - I, by the chain rule
        jacobians[:, -1] = outer @ jacobians[:, -1] + outer - torch.eye(model.dim).to(outer)
        with torch.no_grad():
            states = torch.cat([states[:-1], norm(last)[:, 0][None]])
    return jacobians, states


def _pair_records(found: _Found, position: int, tags: dict[str, str | int | float]) -> Iterator[Record]:
    """The records of one K: means over pairs per prompt first, then over prompts."""
    pairs = 1 - found.miscoupling[position].movedim(-1, 0)  # (prompts, blocks, blocks)
    random = found.random[position].T  # (prompts, blocks)
    excess = functional.excess_coupling(1 - pairs, random)
    yield from summarize("coupling", functional.off_diagonal_mean(pairs), tags=tags)
    yield from summarize("random_coupling", (1 - random).nanmean(1), tags=tags)
    yield from summarize("excess_coupling", functional.off_diagonal_mean(excess), tags=tags)
    yield from summarize("coupling_with_diagonal", pairs.nanmean((1, 2)), tags=tags)
    for distance, values in enumerate(functional.mean_by_distance(pairs).T):
        yield from _defined("coupling_by_distance", values, tags={**tags, "distance": distance})
    for block, row in enumerate(pairs.movedim(0, -1), start=1):
        for other, values in enumerate(row, start=1):
            yield from _defined("coupling_pair", values, layer=block, other_layer=other, tags=tags)
    gaps = found.gaps[position]
    known = gaps[~gaps.isnan()]
    prompts = gaps.shape[-1]
    yield Record(metric="min_gap", value=float(known.min()), n=prompts, tags=tags)
    yield Record(metric="error_bound", value=float(found.bounds[position].max()), n=prompts, tags=tags)
    yield Record(metric="num_tied", value=float((known < TIE).sum()), n=prompts, tags=tags)


def _block_records(found: _Found, fit_from: int) -> Iterator[Record]:
    blocks = len(found.norms)
    for block in range(blocks):
        yield from _defined("jacobian_norm", found.norms[block], layer=block + 1)
        yield from _defined("linearized_rollout", found.rollout[block], layer=block + 1)
        for index, values in enumerate(found.values[block], start=1):
            yield from _defined("singular_value", values, layer=block + 1, tags={"index": index})
    yield from _defined("linearized_rollout", found.rollout[-1])
    if blocks - fit_from + 1 >= 3:
        slope, _, r_squared = functional.inverse_norm_line(found.values[:, 0].T, fit_from, undefined="nan")
        yield from _defined("spectrum_slope", slope)
        yield from _defined("spectrum_r_squared", r_squared)


def _defined(metric: str, values: Tensor, **place: Any) -> list[Record]:
    """One record, or none where no prompt defines it: a dead block leaves a gap, not a number."""
    return summarize(metric, values, **place) if not bool(values.isnan().all()) else []


def _prompts_last(values: Tensor, prompts: int) -> Tensor:
    return values.double().cpu().movedim(prompts, -1)
