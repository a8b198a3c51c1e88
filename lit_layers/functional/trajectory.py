"""The paths of single tokens through the layers: straightness, growth, step lengths. All computed in float64.

Trajectories are `(layers, *n, dim)`. Layer 0 is the input of the first block, so `L` blocks make `L + 1` layers. A step
is the change of a state from one layer to the next. There is no mask argument: select the real tokens first,
`states[:, mask]`. Metrics are undefined for non-finite states, and in the cases that each function names.
`PathStats` computes the same metrics from states that arrive one layer at a time.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import Undefined, checked, widened

States = Float[Tensor, "layers *n dim"]
PerToken = Float[Tensor, "*n"]

_EPS = torch.finfo(torch.float64).eps


def line_shape_score(states: States, *, undefined: Undefined = "raise") -> PerToken:
    """Return how crooked each trajectory is: the number of steps divided by the length of the sum of its unit steps.

    `LSS = L / |u^1 + ... + u^L|` with the unit steps `u^l = (x^l - x^(l-1)) / |x^l - x^(l-1)|`. Range [1, inf]: 1 if
    and only if all steps have the same direction, inf if the unit steps cancel. It is sqrt(L) for orthogonal steps, and
    about sqrt(L) for random steps in high dimension. Unchanged by rotation and translation, and by positive scaling,
    even if each step has its own factor. Unchanged by reordering the steps and by reversing the path.

    Source: Gai & Zhang 2021, arXiv 2102.09235; Aubry et al., arXiv 2407.07810, section 3.2.

    Raises:
        ValueError: a token with a step of length zero, or no step; NaN instead with `undefined="nan"`.
    """
    if len(states) < 2:
        values, problems = states[0, ..., 0].double(), {"it takes a step": torch.tensor(True)}
        return checked("line_shape_score", values, problems, undefined)
    return PathStats(states).line_shape_score(undefined)


def running_line_shape_score(states: States, *, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
    """Return the `line_shape_score` of the first l steps of each trajectory, for l = 1..L; always 1 for l = 1.

    Computed in one pass. L calls of `line_shape_score` would read about L^2 / 2 states.

    Raises:
        ValueError: in the cases of `line_shape_score`. With `undefined="nan"`, values before a step of length zero or a
            non-finite state stay defined, and only later values are NaN.
    """
    return PathStats(states).running_line_shape_score(undefined)


def growth_rates(states: States, *, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
    """Return the growth rate log(|x^l| / |x^(l-1)|) of the norm at each block l = 1..L.

    A rate may be any real number. The mean of the rates is (log|x^L| - log|x^0|) / L. Unchanged by rotation and
    scaling. Reversing the path reverses the signs and the order of the rates.

    Source: Aubry et al., arXiv 2407.07810, section 3.3.

    Raises:
        ValueError: a state of norm zero (NaN in the two steps next to it with `undefined="nan"`), or a state that is
            not finite (NaN in this and all later steps).
    """
    return PathStats(states).growth_rates(undefined)


def expodistance(states: States, *, undefined: Undefined = "raise") -> PerToken:
    """Return how far the norms are from growing by the same factor in every block.

    This is the standard deviation of the growth rates divided by |their mean|. Range [0, inf): 0 if and only if all
    rates are equal and not 0. If no rate is negative, the maximum is sqrt(L - 1), reached if all growth is in one
    block. The value is large if the last norm is near the first one, so report the median over tokens in addition to
    the mean. Unchanged by rotation, positive scaling, reversing the path and raising all norms to the same power. It is
    changed by translation.

    Source: Aubry et al., arXiv 2407.07810, section 3.3. We do not square the ratio.

    Raises:
        ValueError: a state of norm zero, a last norm equal to the first one, or fewer than two steps; NaN instead with
            `undefined="nan"`.
    """
    return PathStats(states).expodistance(undefined)


def equidistance(states: States, *, undefined: Undefined = "raise") -> PerToken:
    """Return how uneven the step lengths of each trajectory are: their standard deviation divided by their mean.

    Range [0, sqrt(L - 1)]: 0 if and only if all steps are equally long, sqrt(L - 1) if only one is not zero.
    Unchanged by rotation, translation, scaling and the order of the steps.

    Source: Aubry et al., arXiv 2407.07810, figure 23.

    Raises:
        ValueError: all steps have length zero, or there is no step; NaN instead with `undefined="nan"`.
    """
    return PathStats(states).equidistance(undefined)


def state_norms(states: States) -> Float[Tensor, "layers *n"]:
    """Return |x^l| for every layer l = 0..L."""
    return PathStats(states).norms


def step_norms(states: States) -> Float[Tensor, "steps *n"]:
    """Return |x^l - x^(l-1)| for every block l = 1..L."""
    return PathStats(states).lengths


class PathStats:
    """Statistics of trajectories from which all metrics above follow; the states may arrive one layer at a time.

    Each method returns the values of the function of the same name.

    Attributes:
        norms: |x^l|, (layers, *n).
        broken: Whether a state up to this layer is not finite, (layers, *n).
        lengths: Length of each step, (steps, *n).
        resultants: Length of the sum of the unit steps up to and including this one, (steps, *n).
        stopped: Whether this step or an earlier one has length zero, (steps, *n).
    """

    def __init__(self, states: Iterable[Float[Tensor, "*n dim"]]) -> None:
        layers, steps, before = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]](), None
        broken, stopped, total = torch.tensor(False), torch.tensor(False), torch.tensor(0.0)
        for state in states:
            reached = widened(state)
            norms = torch.linalg.vector_norm(reached, dim=-1)
            broken = broken.to(norms.device) | _not_finite(state, norms)
            layers.append((norms, broken))
            if before is not None:
                step = reached - before
                length = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
                total = step / length.masked_fill(length == 0, 1.0) + total.to(step.device)
                stopped = stopped.to(step.device) | (length == 0).squeeze(-1)
                steps.append((length.squeeze(-1), torch.linalg.vector_norm(total, dim=-1), stopped))
            before = reached
        self.norms, self.broken = map(torch.stack, zip(*layers, strict=True))
        if steps:
            self.lengths, self.resultants, self.stopped = map(torch.stack, zip(*steps, strict=True))
        else:
            self.lengths = self.resultants = self.norms[:0]
            self.stopped = self.broken[:0]

    def running_line_shape_score(self, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
        return self._scores("running_line_shape_score", slice(None), undefined)

    def line_shape_score(self, undefined: Undefined = "raise") -> PerToken:
        return self._scores("line_shape_score", -1, undefined)

    def growth_rates(self, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
        zero = self.norms == 0
        problems = {"a state is not finite": self.broken[1:], "a state has norm zero": zero[1:] | zero[:-1]}
        return checked("growth_rates", (self.norms[1:] / self.norms[:-1]).log(), problems, undefined)

    def expodistance(self, undefined: Undefined = "raise") -> PerToken:
        steps, zero = len(self.lengths), (self.norms == 0).any(0)
        norms = self.norms.masked_fill(zero, 1.0)
        total = (norms[-1] / norms[0]).log()
        returned = ~zero & (total.abs() <= 16 * _EPS)  # the first and the last norm are equal up to rounding
        problems = {
            "it takes more steps": torch.tensor(steps < 2),
            "a state is not finite": self.broken[-1],
            "a state has norm zero": zero,
            "the norm returns to its start, so that the mean growth rate is 0": returned,
        }
        mean = (total / max(steps, 1)).masked_fill(returned | zero, 1.0).abs()
        return checked("expodistance", _deviation((norms[1:] / norms[:-1]).log()) / mean, problems, undefined)

    def equidistance(self, undefined: Undefined = "raise") -> PerToken:
        mean = self.lengths.mean(0)
        problems = {
            "it takes a step": torch.tensor(not len(self.lengths)),
            "a state is not finite": self.broken[-1],
            "all steps have length zero": mean == 0,
        }
        values = _deviation(self.lengths) / mean.masked_fill(mean == 0, 1.0)
        return checked("equidistance", values, problems, undefined)

    def _scores(self, metric: str, which: int | slice, undefined: Undefined) -> Tensor:
        count = torch.arange(1.0, len(self.resultants) + 1).to(self.resultants)
        count = count.reshape(-1, *[1] * (self.resultants.ndim - 1))
        # Unit steps that cancel leave a rounding error. Without the masking, the score would be 1e16 instead of inf.
        resultants = self.resultants.masked_fill(self.resultants <= count * _EPS, 0.0)
        scores = (count / resultants).clamp(min=1.0)
        problems = {"a state is not finite": self.broken[1:][which], "a step has length zero": self.stopped[which]}
        return checked(metric, scores[which], problems, undefined)


def _not_finite(states: Tensor, norms: PerToken) -> Tensor:
    """Return a mask of the states that are not finite.

    For types narrower than float64, a state is finite if its norm is. In float64 the norm of a finite state can
    overflow, so the entries are checked.
    """
    return ~(norms.isfinite() if states.dtype != torch.float64 else states.isfinite().all(-1).to(norms.device))


def _deviation(values: Tensor) -> PerToken:
    """Return the standard deviation over steps. `Tensor.std` would warn if there is no token."""
    return (values - values.mean(0)).square().mean(0).sqrt()


# The effect of skipping a block on later blocks.


def effective_depth(effects: Float[Tensor, "blocks *n"], *, undefined: Undefined = "raise") -> PerToken:
    """Return the number of blocks that matter: the participation ratio (sum_l w_l)^2 / sum_l w_l^2 of effects w_l.

    Range [1, L] for L blocks: L if all blocks have the same effect, 1 if only one block has any. Unchanged by scaling
    and by the order of the blocks.

    Source: ours. Csordás et al., arXiv 2505.13898, ask the same question. `EffectiveDepth` defines the effects.

    Raises:
        ValueError: effects that are all 0, negative or not finite (NaN instead with `undefined="nan"`).
    """
    effects = widened(effects)
    largest = effects.amax(0)
    problems = {
        "an effect is negative or not finite": ~(effects.isfinite() & (effects >= 0)).all(0),
        "all effects are 0": largest == 0,
    }
    effects = effects / largest.where(largest > 0, 1.0)  # squares of tiny effects would underflow
    values = effects.sum(0).square() / effects.square().sum(0).where(largest > 0, 1.0)
    return checked("effective_depth", values, problems, undefined)


# The paths of tokens through the layers, projected onto the plane of largest variance of the last layer.


class PrincipalPaths(NamedTuple):
    """Coordinates of tokens in a plane at every layer; see `principal_paths`."""

    points: Float[Tensor, "layers tokens 2"]
    explained_variance: Float[Tensor, " 2"]  # share of the last layer's variance along each axis, in [0, 1]


def principal_paths(states: Float[Tensor, "layers tokens dim"], *, undefined: Undefined = "raise") -> PrincipalPaths:
    """Return the states of every layer in the plane of the last layer's first two principal components, in float64.

    Mean and axes are those of the last layer's tokens. The sign of each axis is chosen so that its entry of largest
    magnitude is positive. States outside the plane are projected onto it. A translation of all states does not change
    the coordinates. A rotation changes at most their signs. Scaling scales them.

    Source: Aubry et al., arXiv 2407.07810, whose axes have no fixed sign.

    Raises:
        ValueError: a state that is not finite, or tokens of the last layer that lie on a line and have no second axis,
            such as two tokens (all NaN with `undefined="nan"`).
    """
    states = widened(states)
    broken = ~states.isfinite().all()
    last = states[-1].masked_fill(broken, 0.0)
    mean = last.mean(0)
    _, sizes, axes = torch.linalg.svd(last - mean, full_matrices=False)
    # Subtracting the mean of equal states leaves rounding errors in proportion to the states, not to their spread.
    rounding = max(last.shape) * torch.finfo(states.dtype).eps * torch.linalg.matrix_norm(last)
    on_line = "the last layer's tokens lie on a line and have no second axis"
    problems = {"a state is not finite": broken, on_line: sizes[1] <= rounding}
    axes = axes[:2]
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    found = (states - mean) @ axes.T, sizes[:2].square() / sizes.square().sum()
    return PrincipalPaths(*(checked("principal_paths", values, problems, undefined) for values in found))
