"""The Jacobian lens: earlier layers carried to the last one by the mean Jacobian between them."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis
from lit_layers.analyses.readouts.judged_rows import Rows, check_head, rows_of
from lit_layers.analyses.readouts.readout_scores import FullModel
from lit_layers.analyses.states import at_least_float32, first_rows, real_tokens
from lit_layers.analyses.statistics import exponential, summarize, summarize_ratio, with_a_value
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.files.lens_files import read_lens, write_lens
from lit_layers.functional.jacobian.through_blocks import jacobians_to_last_layer, rows_at_a_time
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.models.workload import OF_A_BLOCK, Part, Work, passes_of
from lit_layers.records import Record

LensName = Literal["jacobian", "logit", "tuned", "shuffled"]
HALVES = "one half", "other half"
_ROWS = 256  # tokens whose logits are held at a time


class FittedLens(NamedTuple):
    """A lens and those of both halves of its prompts, in float64; NaN where no prompt has a finite Jacobian."""

    jacobians: Tensor  # (layers, dim, dim), of layers 0 to L - 1
    halves: Tensor  # (2, layers, dim, dim)
    num_prompts: int
    num_undefined: Tensor  # (layers,) prompts that are left out: too short, or without a finite Jacobian

    def save(self, path: str | Path, *, dtype: torch.dtype = torch.float16, **about: str | int | float) -> None:
        """Writes the file that the reference implementation reads: layers 1 to L - 1 that are finite.

        Raises:
            InputError: it cannot be written, or no layer can be in `dtype`.
        """
        write_lens(path, self.jacobians, self.num_prompts, dtype=dtype, about=about)


def fit_jacobian_lens(
    model: LayeredModel, batches: Iterable[Batch], *, num_prompts: int = 8, skip_first: int = 16
) -> FittedLens:
    """Fits the Jacobian lens of a model that predicts the next token, exactly, on the first prompts.

    Per prompt over its places from `skip_first` on, but the last; then the mean over prompts. All directions of few
    prompts are worth more than random directions of many at the same cost.

    Raises:
        InputError: no prompt is longer than `skip_first` + 1.
    """
    view = at_least_float32(model)
    sums = torch.zeros(2, view.num_layers, view.dim, view.dim, dtype=torch.float64)
    counts = torch.zeros(2, view.num_layers)
    number = num_short = 0
    for _, trajectory in _prompts(view, first_rows(batches, num_prompts)):
        places = _places(trajectory, skip_first)
        if len(places) == 0:
            num_short += 1
            continue
        blocks = [trajectory.block(layer) for layer in range(1, view.num_layers + 1)]
        jacobians = jacobians_to_last_layer(blocks, trajectory.hidden[0], places)
        defined = jacobians.isfinite().flatten(1).all(-1).cpu()
        for layer, jacobian in enumerate(jacobians):  # no copy of all of them in float64: 24 x 1,024² x 8 B = 0.2 GB
            if defined[layer]:
                sums[number % 2, layer] += jacobian.cpu()
        counts[number % 2] += defined
        number += 1
    if not number:
        raise InputError(
            f"skip_first: no prompt has a place from {skip_first} on that another token follows: give longer texts"
        )
    whole, halves = (each / many[..., None, None] for each, many in ((sums.sum(0), counts.sum(0)), (sums, counts)))
    return FittedLens(whole, halves, number, num_short + number - counts.sum(0).long())


@dataclass(kw_only=True)
class JacobianLens(Analysis):
    """The Jacobian lens beside its controls: how near each layer's readout is to the model's own output.

    A lens carries the states of layer l to the last layer, whose norm and head then read them. `jacobian`: by the mean
    Jacobian J_l = E[d h_L / d h_l], fitted anew at each checkpoint; `logit`: as they are; `tuned`: by an affine map
    that was trained to give the model's own output; `shuffled`: by the Jacobian lens of the same model with the entries
    of each weight matrix of its blocks in another order, the null of `jacobian`. The tag `lens` says which.

    Per layer 0 to L - 1, over tokens of held-out prompts from place `skip_first` on: `lens_kl` = KL(model, lens) in
    nats, 0 for the model's own output; `lens_rank`, the geometric mean of the rank of the true next token, 1 the first.
    `stderr` and the interval are over prompts; `num_undefined` and `num_undefined_fit_prompts` count those that are too
    short or not finite. Of `jacobian` the tag `num_fit_stderr` is half the difference in `lens_kl` between lenses
    fitted on halves of the prompts. `jacobian_lens_halves`: how far the halves' matrices are apart, over the norm of
    the whole; 0 is no difference.

    The first `num_prompts` prompts fit the Jacobians, these and the next up to `num_tuned` train the affine maps, and
    the rest is held out. float32 or wider; the maps' training draws from `seed`.

    Cost: about three quarters of `dim` backward passes through all blocks at the places of the `num_prompts`; 8 prompts
    x 111 places of a model of width 1,024 with 302 M parameters in its blocks (Pythia 410M) take 3/4 x 2 x 302e6 x 111
    x 8 x 1,024 = 4.1e14 FLOP, and 4% more for the weights of the attention.

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026 (estimator); Belrose et al., Eliciting latent predictions with the tuned lens, arXiv 2303.08112 (the
    affine maps, trained on the KL divergence).

    Args:
        batches: prompts of equal length, or padded.
        num_prompts: that the Jacobians are fitted on.
        num_tuned: that the affine maps are trained on, at least `num_prompts`.
        skip_first: places of each prompt that are left out, as the first tokens' states are unlike all others.
        lenses: which to measure.
        tuned_steps: of training the affine maps.
        file: a fitted lens, in the format of the reference implementation, that is read in place of fitting one.
        seed: of the order of training tokens and of shuffled weights.
    """

    SEES = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"num_prompts": 1, "num_tuned": 1, "skip_first": 0, "tuned_steps": 1}
    LISTS = ("lenses",)

    batches: Batches
    name: str = "jacobian_lens"
    num_prompts: int = 8
    num_tuned: int = 32
    skip_first: int = 16
    lenses: tuple[LensName, ...] = ("jacobian", "logit", "tuned", "shuffled")
    tuned_steps: int = 100
    file: str | None = None
    seed: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        check_head(self.name, model)
        if self.num_tuned < self.num_prompts:
            raise InputError(
                f"{self.name}: expected num_tuned of at least num_prompts, {self.num_prompts}, got {self.num_tuned}"
            )
        if self.file is not None:
            matrices = self._read(model, self.file)
            dim = next(iter(matrices.values())).shape[0]
            if dim != model.dim:
                raise InputError(
                    f"{self.name}: file: {self.file} is of a model of width {dim}, this one is {model.dim} wide"
                )

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_prompts()

    def _check_prompts(self) -> None:
        """Refuses prompts that are too few or too short to fit on and to compare on."""
        is_long = [len(ids) > self.skip_first + 1 for batch in self.batches for ids in real_tokens(batch)]
        fitted = "shuffled" in self.lenses or ("jacobian" in self.lenses and self.file is None)
        fitting = is_long[: self.num_prompts if fitted else self.num_tuned]
        if (fitted or "tuned" in self.lenses) and not any(fitting):
            raise InputError(
                f"{self.name}: skip_first: none of the first {len(fitting)} prompts has a place from {self.skip_first} "
                "on that another token follows: give longer texts"
            )
        if not any(is_long[self._num_seen :]):
            raise InputError(
                f"{self.name}: no prompt is left to compare on: give more than {self._num_seen} that have a "
                f"place from {self.skip_first} on (skip_first), got {len(is_long)}"
            )

    def work(self, model: LayeredModel) -> Work | None:
        whole = passes_of(model, self.batches)
        if whole is None:
            return None
        tokens = whole.tokens // max(1, whole.texts)
        fits = (self.file is None and "jacobian" in self.lenses) + ("shuffled" in self.lenses)
        places = max(0, tokens - self.skip_first - 1)
        rows, waiting = rows_at_a_time(max(1, places), model.dim, model.device)
        # Where all directions wait together, the maps of an MLP are multiplied with one another: 10 dim^3 a place
        # instead of 16 of 24 in all.
        passed = (0.75 if waiting == model.dim else 1.0) * fits * self.num_prompts * model.num_layers * model.dim / rows
        backward = Part("blocks", passed, (rows, max(1, places)))
        steps = self.tuned_steps if "tuned" in self.lenses else 0
        trained = 2 * steps * min(_ROWS, self.num_tuned * places) * model.num_layers  # there, and back to its input
        held_out = max(0, whole.texts - self._num_seen)
        readouts = len(self.lenses) + 2 * (self.file is None and "jacobian" in self.lenses)  # both halves, too
        head = Part("head", trained + held_out * places * (readouts * model.num_layers + 1))
        small = Part("steps", (30 * steps + 5 * held_out * readouts) * model.num_layers)
        # The directions that wait, a product of dim x dim for each place, and what one block makes of some rows.
        held = 4.0 * max(1, places) * model.dim * (waiting + model.dim + 2 * OF_A_BLOCK * rows)
        held += 12.0 * _ROWS * (model.vocab_size or 1)
        return whole + Work(parts=(backward, head, small), device=whole.device + held)

    def announced(self) -> Iterator[Batch]:
        if "jacobian" in self.lenses and self.file is None:
            yield from first_rows(self.batches, self.num_prompts)
        if "tuned" in self.lenses:
            yield from first_rows(self.batches, self.num_tuned)
        yield from _one_by_one(self.batches, after=self._num_seen)

    def run(self, model: LayeredModel) -> Iterable[Record]:
        self.check_options(model)
        self._check_prompts()
        view = at_least_float32(model)
        yield from with_a_value(self.name, self._records(view))

    @property
    def _num_seen(self) -> int:
        """The prompts that are not held out."""
        return max(self.num_prompts, self.num_tuned)

    def _records(self, view: LayeredModel) -> Iterator[Record]:
        layers, lenses, untrained = range(view.num_layers), {}, 0
        if "jacobian" in self.lenses:
            lenses |= self._jacobian(view)
        if "logit" in self.lenses:
            lenses["logit"] = dict.fromkeys(layers, _as_it_is)
        if "tuned" in self.lenses:
            lenses["tuned"], untrained = self._tuned(view)
        if "shuffled" in self.lenses:
            shuffled = self._fitted(LayeredModel(with_shuffled_weights(view, self.seed)))
            lenses["shuffled"] = {layer: _matrix(shuffled.jacobians[layer], view) for layer in layers}
        fitted: FittedLens | None = lenses.pop("fitted", None)
        if fitted is not None:
            apart = (fitted.halves[0] - fitted.halves[1]).norm(dim=(-2, -1)) / fitted.jacobians.norm(dim=(-2, -1))
            for layer in layers:
                tags = self._fit_tags(fitted, layer)
                yield from summarize("jacobian_lens_halves", apart[layer : layer + 1], layer=layer, tags=tags)
        sums = self._compared(view, lenses)
        for name in self.lenses:
            for layer in lenses[name]:
                tags: dict[str, Any] = {"lens": name}
                if name == "jacobian" and fitted is not None:
                    tags |= self._fit_tags(fitted, layer) | _fit_error(sums, layer)
                if name == "tuned" and untrained:
                    tags["num_undefined_fit_tokens"] = untrained
                divergence, log_rank, tokens = sums[name, layer]
                about: dict[str, Any] = {"layer": layer, "tags": tags, "counted": "num_tokens"}
                yield from summarize_ratio("lens_kl", divergence, tokens, **about)
                yield from map(exponential, summarize_ratio("lens_rank", log_rank, tokens, **about))

    def _fit_tags(self, fitted: FittedLens, layer: int) -> dict[str, int]:
        left_out = int(fitted.num_undefined[layer])
        return {"num_fit_prompts": fitted.num_prompts} | ({"num_undefined_fit_prompts": left_out} if left_out else {})

    def _fitted(self, view: LayeredModel) -> FittedLens:
        return fit_jacobian_lens(view, self.batches, num_prompts=self.num_prompts, skip_first=self.skip_first)

    def _jacobian(self, view: LayeredModel) -> dict[str, Any]:
        if self.file is not None:
            matrices = self._read(view, self.file)
            return {"jacobian": {layer: _matrix(matrix, view) for layer, matrix in matrices.items()}}
        fitted = self._fitted(view)
        lenses: dict[str, Any] = {"fitted": fitted}
        for name, matrices in (("jacobian", fitted.jacobians), *zip(HALVES, fitted.halves, strict=True)):
            lenses[name] = {layer: _matrix(matrix, view) for layer, matrix in enumerate(matrices)}
        return lenses

    @staticmethod
    def _read(model: LayeredModel, file: str) -> dict[int, Tensor]:
        config: Any = getattr(model.model, "config", None)
        return read_lens(file, model.num_layers, config=config.to_dict() if hasattr(config, "to_dict") else None)[0]

    def _tuned(self, view: LayeredModel) -> tuple[dict[int, Callable[[Tensor], Tensor]], int]:
        """The maps of all layers, and how many tokens they could not be trained on."""
        states, logits = [], []
        for _, trajectory in _prompts(view, first_rows(self.batches, self.num_tuned)):
            places = _places(trajectory, self.skip_first)
            if len(places):
                states.append(trajectory.hidden[:, 0, places])
                logits.append(trajectory.logits_of((torch.zeros_like(places), places)))
        hidden, target = torch.cat(states, 1), torch.cat(logits)
        defined = hidden.isfinite().all(-1).all(0) & target.isfinite().all(-1)
        hidden, target = hidden[:, defined], target[defined]
        maps: dict[int, Callable[[Tensor], Tensor]] = dict.fromkeys(range(view.num_layers), _undefined)
        if len(target):
            for layer in maps:
                maps[layer] = _trained_map(view, hidden[layer], target, self.tuned_steps, self.seed)
        return maps, int((~defined).sum())

    def _compared(
        self, view: LayeredModel, lenses: dict[str, dict[int, Callable[[Tensor], Tensor]]]
    ) -> dict[tuple[str, int], Tensor]:
        """KL, log rank and tokens (3, prompts) of each lens and layer, over the prompts that are held out."""
        results: dict[tuple[str, int], list[Tensor]] = {(n, layer): [] for n, maps in lenses.items() for layer in maps}
        for batch, trajectory in _prompts(view, self.batches, after=self._num_seen):
            pieces = self._rows(view, batch, trajectory)
            for sums in results.values() if not pieces else ():
                sums.append(torch.zeros(3, device=view.device))  # too short: left out of the ratio, and counted
            for rows in pieces:
                full = FullModel(trajectory.logits_of(rows.index), rows)
                for (name, layer), sums in results.items():
                    with torch.no_grad():
                        carried = lenses[name][layer](trajectory.hidden[layer][rows.index])
                        logits = view.readout(carried[None])[0]
                    sums.append(torch.stack([full.compared(logits)[2].sum(), _log_rank(logits, rows), *_count(rows)]))
        return {key: torch.stack(sums, -1).double().cpu() for key, sums in results.items() if sums}

    def _rows(self, view: LayeredModel, batch: Batch, trajectory: Trajectory) -> Sequence[Rows]:
        """The tokens of a prompt that are compared, in one piece, as one prompt has few; none of a short one."""
        places = _places(trajectory, self.skip_first)
        if len(places) == 0:
            return []
        every = rows_of(self.name, view, trajectory, batch)
        chosen = torch.isin(every.place, places)
        return [Rows(every.prompt[chosen], every.place[chosen], every.target[chosen], True)]


def _fit_error(sums: dict[tuple[str, int], Tensor], layer: int) -> dict[str, float]:
    """Half the difference of the divergences of both halves' lenses, where both are defined."""
    one, other = ((sums[name, layer][0].sum() / sums[name, layer][2].sum()).item() for name in HALVES)
    return {"num_fit_stderr": abs(one - other) / 2} if math.isfinite(one - other) else {}


def with_shuffled_weights(view: LayeredModel, seed: int) -> torch.nn.Module:
    """A copy of a model in which the entries of each weight matrix of its blocks stand in another order."""
    model = copy.deepcopy(view.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in dict.fromkeys(LayeredModel(model).blocks):
            for weight in block.parameters():
                if weight.ndim > 1:
                    order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                    weight.copy_(weight.flatten()[order].view_as(weight))
    return model


def _one_by_one(batches: Iterable[Batch], *, after: int = 0) -> Iterator[Batch]:
    """Prompts, each in a batch of its own; without the first `after`."""
    number = 0
    for batch in batches:
        for row in range(len(next(iter(batch.values())))):
            number += 1
            if number > after:
                yield {name: column[row : row + 1] for name, column in batch.items()}


def _prompts(view: LayeredModel, batches: Iterable[Batch], *, after: int = 0) -> Iterator[tuple[Batch, Trajectory]]:
    """Prompts one by one, each passed alone; without the first `after`."""
    return ((prompt, view.trajectory(prompt)) for prompt in _one_by_one(batches, after=after))


def _places(trajectory: Trajectory, skip_first: int) -> Tensor:
    """Places of a prompt's real tokens from the given one on, but the last: no token follows it."""
    return trajectory.mask[0].nonzero()[:, 0][skip_first:-1]


def _matrix(matrix: Tensor, view: LayeredModel) -> Callable[[Tensor], Tensor]:
    there = matrix.to(view.device, torch.promote_types(view.dtype, torch.float32))
    return lambda hidden: hidden @ there.T


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _undefined(hidden: Tensor) -> Tensor:
    return torch.full_like(hidden, torch.nan)


def _trained_map(
    view: LayeredModel, hidden: Tensor, target: Tensor, steps: int, seed: int
) -> Callable[[Tensor], Tensor]:
    """h + A h + b with the least KL from the model's own output, by Adam from A = 0, b = 0.

    Source: Belrose et al., the tuned lens, arXiv 2303.08112, section 3: without its weight decay, which matters over
    many more tokens than these.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.zeros(view.dim, view.dim, device=hidden.device, dtype=hidden.dtype, requires_grad=True)
    bias = torch.zeros(view.dim, device=hidden.device, dtype=hidden.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([matrix, bias], lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        rows = torch.randint(len(hidden), (min(_ROWS, len(hidden)),), generator=generator).to(hidden.device)
        with torch.enable_grad():
            carried = hidden[rows] + hidden[rows] @ matrix.T + bias
            log_proba = view.readout(carried[None])[0].log_softmax(-1)
            loss = torch.nn.functional.kl_div(
                log_proba, target[rows].log_softmax(-1), log_target=True, reduction="batchmean"
            )
            matrix.grad, bias.grad = torch.autograd.grad(loss, [matrix, bias])  # the model's own have none
        optimizer.step()
    trained, moved = matrix.detach(), bias.detach()
    return lambda states: states + states @ trained.T + moved


def _log_rank(logits: Tensor, rows: Rows) -> Tensor:
    """Sum over tokens of the logarithm of the true token's rank, 1 the first; equal logits count half; NaN is NaN."""
    signs = (logits - logits.gather(1, rows.target[:, None])).sign_().sum(-1)  # how many more are above than below
    rank = (logits.shape[1] + 1 + signs) / 2
    defined = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
    return rank.where(defined, torch.nan).log().sum()


def _count(rows: Rows) -> list[Tensor]:
    return [torch.tensor(float(len(rows.place)), device=rows.place.device)]
