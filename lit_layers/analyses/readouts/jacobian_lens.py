"""The Jacobian lens: earlier layers carried to the last one by the mean Jacobian between them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import StagedAnalysis
from lit_layers.analyses.probes.probe_fits import MOST_SENT, FollowingAnalysis
from lit_layers.analyses.readouts.judged_rows import Rows, check_head, rows_of
from lit_layers.analyses.readouts.lens_fit import (
    FitPart,
    FittedLens,
    JacobianSum,
    LensFit,
    added_up,
    is_long,
    one_by_one,
    places_of,
)
from lit_layers.analyses.readouts.readout_scores import FullModel
from lit_layers.analyses.states import first_rows
from lit_layers.analyses.statistics import exponential, summarize, summarize_ratio
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.jacobian.through_blocks import rows_at_a_time
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.models.workload import OF_A_BLOCK, Part, Work, passes_of
from lit_layers.records import Record

LensName = Literal["jacobian", "logit", "shuffled"]
HALVES = "one half", "other half"

_Carry = Callable[[Tensor], Tensor]  # from states (*n, dim) of a layer to those that the last norm reads
_Lenses = dict[str, dict[int, _Carry]]  # by name and layer
_Summed = tuple[str, int, JacobianSum | None]  # of a part of a fit: of which, and of which half


class _Fit(NamedTuple):
    """What records say of a fit."""

    num_prompts: int
    num_undefined: Tensor  # (layers,)
    apart: Tensor  # (layers,) as `_apart`


@dataclass(kw_only=True)
class JacobianLens(StagedAnalysis):
    """The Jacobian lens beside its controls: how near each layer's readout is to the model's own output.

    A lens carries the states of layer l to the last layer, whose norm and head then read them. `jacobian`: by the mean
    Jacobian J_l = E[d h_L / d h_l], fitted anew at each checkpoint; `logit`: as they are; `shuffled`: by the Jacobian
    lens of the same model with the entries of each weight matrix of its blocks in another order, the null of
    `jacobian`. The tag `lens` says which.

    Per layer 0 to L - 1, over tokens of held-out prompts from place `skip_first` on: `lens_kl` = KL(model, lens) in
    nats, 0 for the model's own output; `lens_rank`, the geometric mean of the rank of the true next token, 1 the first.
    `stderr` and the interval are over prompts; `num_undefined` and `num_undefined_fit_prompts` count those that are too
    short or not finite. Of `jacobian` the tag `num_fit_stderr` is half the difference in `lens_kl` between lenses
    fitted on halves of the prompts. `jacobian_lens_halves`: how far the halves' matrices are apart, over the norm of
    the whole; 0 is no difference.

    The first `num_prompts` prompts fit the Jacobians, the rest is held out. The model runs in float32 or wider.

    Cost: about three quarters of `dim` backward passes through all blocks at the places of the `num_prompts`; 8 prompts
    x 111 places of a model of width 1,024 with 302 M parameters in its blocks (Pythia 410M) take 3/4 x 2 x 302e6 x 111
    x 8 x 1,024 = 4.1e14 FLOP, and 4% more for the weights of the attention.

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026.

    Args:
        batches: prompts of equal length, or padded.
        num_prompts: that the Jacobians are fitted on.
        skip_first: places of each prompt that are left out, as the first tokens' states are unlike all others.
        lenses: which to measure.
        seed: of the order of the shuffled weights.
    """

    SEES = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"num_prompts": 1, "skip_first": 0}
    LISTS = ("lenses",)

    batches: Batches
    name: str = "jacobian_lens"
    num_prompts: int = 8
    skip_first: int = 16
    lenses: tuple[LensName, ...] = ("jacobian", "logit", "shuffled")
    seed: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        check_head(self.name, model)

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_prompts()

    def _check_prompts(self) -> None:
        """Refuses prompts that are too few or too short to fit on and to compare on."""
        are_long = [is_long(prompt, self.skip_first) for prompt in one_by_one(self.batches)]
        fitting = are_long[: self.num_prompts]
        if self._fits and not any(fitting):
            raise InputError(
                f"{self.name}: skip_first: none of the first {len(fitting)} prompts has a place from {self.skip_first} "
                "on that another token follows: give longer texts"
            )
        if not any(are_long[self.num_prompts :]):
            raise InputError(
                f"{self.name}: no prompt is left to compare on: give more than {self.num_prompts} that have a "
                f"place from {self.skip_first} on (skip_first), got {len(are_long)}"
            )

    def work(self, model: LayeredModel) -> Work | None:
        whole = passes_of(model, self.batches)
        if whole is None:
            return None
        tokens = whole.tokens // max(1, whole.texts)
        places = max(0, tokens - self.skip_first - 1)
        rows, waiting = rows_at_a_time(max(1, places), model.dim, model.device)
        # Where all directions wait together, the maps of an MLP are multiplied with one another: 10 dim^3 a place
        # instead of 16 of 24 in all.
        share = 0.75 if waiting == model.dim else 1.0
        passed = share * len(self._fits) * self.num_prompts * model.num_layers * model.dim / rows
        backward = Part("blocks", passed, (rows, max(1, places)))
        held_out = max(0, whole.texts - self.num_prompts)
        readouts = len(self.lenses) + 2 * ("jacobian" in self._fits)  # both halves, too
        head = Part("head", held_out * places * (readouts * model.num_layers + 1))
        small = Part("steps", 5 * held_out * readouts * model.num_layers)
        # The directions that wait, a product of dim x dim for each place, and what one block makes of some rows.
        held = 4.0 * max(1, places) * model.dim * (waiting + model.dim + 2 * OF_A_BLOCK * rows)
        return whole + Work(parts=(backward, head, small), device=whole.device + held)

    def announced(self) -> Iterator[Batch]:
        """The prompts that are held out."""
        yield from (prompt for prompt in self._held_out() if is_long(prompt, self.skip_first))

    @property
    def _fits(self) -> dict[str, int | None]:
        """The lenses that are fitted, and the seeds of those of shuffled weights."""
        fits: dict[str, int | None] = {}
        if "jacobian" in self.lenses:
            fits["jacobian"] = None
        if "shuffled" in self.lenses:
            fits["shuffled"] = self.seed
        return fits

    def _long_prompts(self) -> list[Batch]:
        """The prompts of the fits that are not too short."""
        return [p for p in one_by_one(first_rows(self.batches, self.num_prompts)) if is_long(p, self.skip_first)]

    def _held_out(self) -> Iterator[Batch]:
        return one_by_one(self.batches, after=self.num_prompts)

    def parts(self, model: LayeredModel) -> Iterator[FitPart | list[FitPart] | None]:
        """Prompts of the fits; all of them in one part, of a process that then does the rest as well, where matrices
        are too large to be sent; None where nothing is fitted.
        """
        self._check_prompts()
        prompts = self._long_prompts() if self._fits else []
        fits = [LensFit(name, model, self.skip_first, seed) for name, seed in self._fits.items()]
        size = self._prompts_of_a_part(model, len(prompts))
        parts = [part for fit in fits for part in fit.parts(prompts, size or 1)]
        if size is None:
            yield parts
        else:
            yield from parts or [None]

    def _prompts_of_a_part(self, model: LayeredModel, num_prompts: int) -> int | None:
        """As few as `MOST_SENT` allows, from shapes alone, as sums are rounded part by part; None: it allows nothing.

        One prompt's Jacobians are sent in the model's dtype, sums of several in float64.
        """
        of_a_lens = model.num_layers * model.dim**2
        most, num_fits, itemsize = MOST_SENT / of_a_lens, len(self._fits), model.dtype.itemsize
        if itemsize * num_fits * num_prompts <= most:
            return 1
        parts_of_a_half = int(most / (2 * 8 * num_fits))
        return math.ceil(math.ceil(num_prompts / 2) / parts_of_a_half) if parts_of_a_half else None

    def reads(self, model: LayeredModel, part: FitPart | list[FitPart] | None) -> Sequence[Batch]:
        parts = part if isinstance(part, list) else [part]
        return [prompt for each in parts if each and each.fit.reads_model for prompt in each.prompts]

    def of_part(self, model: LayeredModel, part: FitPart | list[FitPart] | None) -> _Summed | list[Record] | None:
        if isinstance(part, list):
            sums: list[_Summed | None] = [_summed(each) for each in part]
            for each in part:
                each.fit.let_go()
            return [*self._after(model, sums).run(model)]
        return part and _summed(part)

    def then(self, model: LayeredModel, results: list[Any]) -> FollowingAnalysis:
        """The comparison, a prompt each."""
        if isinstance(results[0], list):
            (records,) = results
            return FollowingAnalysis(self, [None], lambda part: None, lambda none: records)
        return self._after(model, results)

    def _after(self, model: LayeredModel, results: list[_Summed | None]) -> FollowingAnalysis:
        """What follows on the fits, whose list is emptied."""
        return self._comparison(model, *self._lenses(model, results))

    def _lenses(self, model: LayeredModel, results: list[_Summed | None]) -> tuple[_Lenses, _Fit | None]:
        lenses: _Lenses = {}
        sums = {name: added_up(each[1:] for each in results if each and each[0] == name) for name in self._fits}
        results.clear()
        num_long = len(self._long_prompts())
        num_short = sum(1 for _ in one_by_one(first_rows(self.batches, self.num_prompts))) - num_long
        fit: _Fit | None = None
        for name in self._fits:
            lens = FittedLens.of(sums.pop(name), num_long, num_short)
            matrices = {name: lens.jacobians}
            if name == "jacobian":
                fit = _Fit(num_long, lens.num_undefined, _apart(lens))
                matrices |= dict(zip(HALVES, lens.halves, strict=True))
            for each in matrices:
                lenses[each] = {layer: _matrix(matrix, model) for layer, matrix in enumerate(matrices[each])}
            del lens, matrices  # in float64, before the next ones are made
        if "logit" in self.lenses:
            lenses["logit"] = dict.fromkeys(range(model.num_layers), _as_it_is)
        return lenses, fit

    def _comparison(self, model: LayeredModel, lenses: _Lenses, fit: _Fit | None) -> FollowingAnalysis:
        """The held-out prompts, a part each: KL, log rank and tokens of each lens and layer."""
        keys = [(name, layer) for name, maps in lenses.items() for layer in maps]

        def of_prompt(part: tuple[int, Batch]) -> Tensor:
            """(keys, 3); zeros of a prompt that is too short, which is left out of the ratio, and counted."""
            _, prompt = part
            if not is_long(prompt, self.skip_first):
                return torch.zeros(len(keys), 3, dtype=torch.float64)
            trajectory = model.trajectory(prompt)
            rows = self._rows(model, prompt, trajectory)
            full = FullModel(trajectory.logits_of(rows.index), rows)
            sums = []
            for name, layer in keys:
                with torch.no_grad():
                    carried = lenses[name][layer](trajectory.hidden[layer][rows.index])
                    logits = model.readout(carried[None])[0]
                sums.append(torch.stack([full.compared(logits)[2].sum(), _log_rank(logits, rows), *_count(rows)]))
            return torch.stack(sums).cpu().double()

        def records(of_prompts: list[Tensor]) -> Iterator[Record]:
            sums = dict(zip(keys, torch.stack(of_prompts, -1), strict=True))  # (3, prompts) each
            return self._records(sums, fit)

        return FollowingAnalysis(self, [*enumerate(self._held_out())], of_prompt, records)

    def _records(self, sums: Mapping[tuple[str, int], Tensor], fit: _Fit | None) -> Iterator[Record]:
        for layer, apart in enumerate([] if fit is None else fit.apart[:, None]):
            assert fit is not None
            yield from summarize("jacobian_lens_halves", apart, layer=layer, tags=_fit_tags(fit, layer))
        for name in self.lenses:
            for layer in [layer for other, layer in sums if other == name]:
                tags: dict[str, Any] = {"lens": name}
                if name == "jacobian" and fit is not None:
                    tags |= _fit_tags(fit, layer) | _fit_error(sums, layer)
                divergence, log_rank, tokens = sums[name, layer]
                about: dict[str, Any] = {"layer": layer, "tags": tags, "counted": "num_tokens"}
                yield from summarize_ratio("lens_kl", divergence, tokens, **about)
                yield from map(exponential, summarize_ratio("lens_rank", log_rank, tokens, **about))

    def _rows(self, view: LayeredModel, batch: Batch, trajectory: Trajectory) -> Rows:
        """The tokens of a prompt that are compared, in one piece, as one prompt has few."""
        every = rows_of(self.name, view, trajectory, batch)
        chosen = torch.isin(every.place, places_of(trajectory, self.skip_first))
        return Rows(every.prompt[chosen], every.place[chosen], every.target[chosen], True)


def _summed(part: FitPart) -> _Summed:
    return part.fit.name, part.half, part.fit.of_part(part)


def _apart(lens: FittedLens) -> Tensor:
    """(layers,) the distance of the halves' matrices, over the norm of the whole."""
    return (lens.halves[0] - lens.halves[1]).norm(dim=(-2, -1)) / lens.jacobians.norm(dim=(-2, -1))


def _fit_tags(fit: _Fit, layer: int) -> dict[str, int]:
    left_out = int(fit.num_undefined[layer])
    return {"num_fit_prompts": fit.num_prompts} | ({"num_undefined_fit_prompts": left_out} if left_out else {})


def _fit_error(sums: Mapping[tuple[str, int], Tensor], layer: int) -> dict[str, float]:
    """Half the difference of the divergences of both halves' lenses, where both are defined."""
    one, other = ((sums[name, layer][0].sum() / sums[name, layer][2].sum()).item() for name in HALVES)
    return {"num_fit_stderr": abs(one - other) / 2} if math.isfinite(one - other) else {}


def _matrix(matrix: Tensor, view: LayeredModel) -> Callable[[Tensor], Tensor]:
    there = matrix.to(view.device, torch.promote_types(view.dtype, torch.float32))
    return lambda hidden: hidden @ there.T


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _log_rank(logits: Tensor, rows: Rows) -> Tensor:
    """Sum over tokens of the logarithm of the true token's rank, 1 the first; equal logits count half; NaN is NaN."""
    signs = (logits - logits.gather(1, rows.target[:, None])).sign_().sum(-1)  # how many more are above than below
    rank = (logits.shape[1] + 1 + signs) / 2
    defined = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
    return rank.where(defined, torch.nan).log().sum()


def _count(rows: Rows) -> list[Tensor]:
    return [torch.tensor(float(len(rows.place)), device=rows.place.device)]
