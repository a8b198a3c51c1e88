"""How single tokens travel through the layers: straightness, growth, step lengths. All computed in float64.

Trajectories are `(layers, *n, dim)`, layer 0 (the input of the first block) first, so `L` blocks make `L + 1` layers.
There is no mask here: take the real tokens first, `states[:, mask]`. A state that is not finite is undefined like the
cases each function names. `PathStats` gives the same numbers of states that come one layer after the other.
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
    """Return how crooked each trajectory is: the number of steps over the length of the sum of its unit steps.

    Range [1, inf]: 1 iff all steps point the same way; sqrt(L) for orthogonal steps, and about that for random ones in
    high dimension; inf where the unit steps cancel. Unchanged by rotation, translation and positive scaling, by
    rescaling single steps, by their order and by reversal in time.

    Source: Gai & Zhang 2021, arXiv 2102.09235; Aubry et al., arXiv 2407.07810, section 3.2.

    Raises:
        ValueError: a token with a step of length zero, or no step; NaN there with `undefined="nan"`.
    """
    if len(states) < 2:
        values, problems = states[0, ..., 0].double(), {"it takes a step": torch.tensor(True)}
        return checked("line_shape_score", values, problems, undefined)
    return PathStats(states).line_shape_score(undefined)


def running_line_shape_score(states: States, *, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
    """Return the line_shape_score of the first l steps of each trajectory, for l = 1..L; always 1 for l = 1.

    In one pass, where L calls of `line_shape_score` would take L^2 / 2 steps. Raises as that does; with
    `undefined="nan"` a step of length zero, or a state that is not finite, leaves the values before it alone.
    """
    return PathStats(states).running_line_shape_score(undefined)


def growth_rates(states: States, *, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
    """Return log(|x^l| / |x^(l-1)|) for l = 1..L: the exponents by which the norm grows, any real number.

    Their mean is (log|x^L| - log|x^0|) / L. Unchanged by rotation and scaling; reversal in time flips sign and order.

    Source: Aubry et al., arXiv 2407.07810, section 3.3.

    Raises:
        ValueError: a state of norm zero (NaN in the two steps around it with `undefined="nan"`), or one that is not
            finite (NaN from there on).
    """
    return PathStats(states).growth_rates(undefined)


def expodistance(states: States, *, undefined: Undefined = "raise") -> PerToken:
    """Return how far norms are from growing by one factor per block: deviation of the growth rates over |their mean|.

    Range [0, inf): 0 iff all rates are equal and not 0; sqrt(L - 1) where one block does all the growing, the maximum
    while no rate is negative. Large where the norm ends near its start: give the median over tokens beside the mean.
    Unchanged by rotation, positive scaling, reversal in time and |x| -> |x|^c; not by translation.

    Source: Aubry et al., arXiv 2407.07810, section 3.3; that this is not squared is ours.

    Raises:
        ValueError: a state of norm zero, a norm that returns to its start, fewer than two steps; NaN there with
            `undefined="nan"`.
    """
    return PathStats(states).expodistance(undefined)


def equidistance(states: States, *, undefined: Undefined = "raise") -> PerToken:
    """Return how uneven the step lengths of each trajectory are: their deviation over their mean.

    Range [0, sqrt(L - 1)]: 0 iff all steps are equally long, sqrt(L - 1) if only one is not zero.
    Unchanged by rotation, translation, scaling and the order of the steps.

    Source: Aubry et al., arXiv 2407.07810, figure 23.

    Raises:
        ValueError: all steps have length zero, or no step; NaN there with `undefined="nan"`.
    """
    return PathStats(states).equidistance(undefined)


def state_norms(states: States) -> Float[Tensor, "layers *n"]:
    """Return |x^l| for every layer l = 0..L."""
    return PathStats(states).norms


def step_norms(states: States) -> Float[Tensor, "steps *n"]:
    """Return |x^l - x^(l-1)| for every block l = 1..L."""
    return PathStats(states).lengths


class PathStats:
    """What is left of trajectories whose states are seen one layer after the other: enough for every metric here.

    `norms` and `broken` (layers, *n), the latter whether a state so far is not finite; `lengths`, `distances` and
    `stopped` (steps, *n): of the steps, of the sums of unit steps so far, and whether a step so far had length zero.
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
        """Return what the function of that name does."""
        return self._scores("running_line_shape_score", slice(None), undefined)

    def line_shape_score(self, undefined: Undefined = "raise") -> PerToken:
        """Return what the function of that name does."""
        return self._scores("line_shape_score", -1, undefined)

    def growth_rates(self, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
        """Return what the function of that name does."""
        zero = self.norms == 0
        problems = {"a state is not finite": self.broken[1:], "a state has norm zero": zero[1:] | zero[:-1]}
        return checked("growth_rates", (self.norms[1:] / self.norms[:-1]).log(), problems, undefined)

    def expodistance(self, undefined: Undefined = "raise") -> PerToken:
        """Return what the function of that name does."""
        steps, zero = len(self.lengths), (self.norms == 0).any(0)
        norms = self.norms.masked_fill(zero, 1.0)
        total = (norms[-1] / norms[0]).log()
        returned = ~zero & (total.abs() <= 16 * _EPS)  # equal up to the rounding of two norms
        problems = {
            "it takes more steps": torch.tensor(steps < 2),
            "a state is not finite": self.broken[-1],
            "a state has norm zero": zero,
            "the norm returns to its start, so that the mean growth rate is 0": returned,
        }
        mean = (total / max(steps, 1)).masked_fill(returned | zero, 1.0).abs()
        return checked("expodistance", _deviation((norms[1:] / norms[:-1]).log()) / mean, problems, undefined)

    def equidistance(self, undefined: Undefined = "raise") -> PerToken:
        """Return what the function of that name does."""
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
        # steps that cancel leave their rounding
        resultants = self.resultants.masked_fill(self.resultants <= count * _EPS, 0.0)
        scores = (count / resultants).clamp(min=1.0)
        problems = {"a state is not finite": self.broken[1:][which], "a step has length zero": self.stopped[which]}
        return checked(metric, scores[which], problems, undefined)


def _not_finite(states: Tensor, norms: PerToken) -> Tensor:
    """Return which states are not finite, from their norms in float64 where no square can leave it."""
    return ~(norms.isfinite() if states.dtype != torch.float64 else states.isfinite().all(-1).to(norms.device))


def _deviation(values: Tensor) -> PerToken:
    """Return the standard deviation over steps; `Tensor.std` warns if there is no token."""
    return (values - values.mean(0)).square().mean(0).sqrt()


# The paths of tokens through the layers, seen in the plane that spreads the last layer most.


class PrincipalPaths(NamedTuple):
    """Where tokens are in a plane at every layer; see `principal_paths`."""

    points: Float[Tensor, "layers tokens 2"]
    explained_variance: Float[Tensor, " 2"]  # share of the last layer's variance along each axis, in [0, 1]


def principal_paths(states: Float[Tensor, "layers tokens dim"], *, undefined: Undefined = "raise") -> PrincipalPaths:
    """Return the states of every layer in the plane of the last layer's first two principal components, in float64.

    Mean and axes are those of the last layer's tokens; each axis points where its largest loading by size is positive.
    Unchanged by a translation of all states, and by rotation but for the axes' signs; scaling scales the places, and
    the order of tokens only orders them. Earlier layers need not lie in the plane: their places are a shadow.

    Source: Aubry et al., arXiv 2407.07810, whose axes have no fixed sign.

    Raises:
        ValueError: a state that is not finite, or tokens of the last layer that lie on a line, where there is no second
            axis (two do): all NaN with `undefined="nan"`.
    """
    states = widened(states)
    broken = ~states.isfinite().all()
    last = states[-1].masked_fill(broken, 0.0)
    mean = last.mean(0)
    _, sizes, axes = torch.linalg.svd(last - mean, full_matrices=False)
    # What subtracting the mean leaves of equal states is rounding, as large as the states are.
    rounding = max(last.shape) * torch.finfo(states.dtype).eps * torch.linalg.matrix_norm(last)
    on_line = "the last layer's tokens lie on a line and have no second axis"
    problems = {"a state is not finite": broken, on_line: sizes[1] <= rounding}
    axes = axes[:2]
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    found = (states - mean) @ axes.T, sizes[:2].square() / sizes.square().sum()
    return PrincipalPaths(*(checked("principal_paths", values, problems, undefined) for values in found))
