"""How single tokens travel through the layers: straightness, growth, step lengths. All computed in float64.

Trajectories are `(layers, *n, dim)`, layer 0 (the input of the first block) first, so `L` blocks make `L + 1` layers.
There is no mask here: take the real tokens first, `states[:, mask]`. A state that is not finite is undefined like the
cases each function names. `WalkedPath` gives the same numbers of states that are seen two layers at a time.
"""

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_layers.functional._checks import check_option, settled, widened

States = Float[Tensor, "layers *n dim"]
PerToken = Float[Tensor, "*n"]
Undefined = Literal["raise", "nan"]

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
        return settled("line_shape_score", values, problems, undefined)
    return WalkedPath.along(states).line_shape_score(undefined)


def running_line_shape_score(states: States, *, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
    """Return the line_shape_score of the first l steps of each trajectory, for l = 1..L; always 1 for l = 1.

    In one pass, where L calls of `line_shape_score` would take L^2 / 2 steps. Raises as that does.
    """
    return WalkedPath.along(states).running_line_shape_score(undefined)


def growth_rates(states: States, *, undefined: Undefined = "raise") -> Float[Tensor, "steps *n"]:
    """Return log(|x^l| / |x^(l-1)|) for l = 1..L: the exponents by which the norm grows, any real number.

    Their mean is (log|x^L| - log|x^0|) / L. Unchanged by rotation and scaling; reversal in time flips sign and order.

    Source: Aubry et al., arXiv 2407.07810, section 3.3.

    Raises:
        ValueError: a state of norm zero; NaN in the two steps around it with `undefined="nan"`.
    """
    return WalkedPath.along(states).growth_rates(undefined)


def expodistance(
    states: States,
    *,
    form: Literal["cv", "var_over_mean2"] = "cv",
    correction: int = 0,
    undefined: Undefined = "raise",
) -> PerToken:
    """Return how far norms are from growing by one factor per block: deviation of the growth rates over |their mean|.

    Range [0, inf): 0 iff all rates are equal and not 0; sqrt(L - 1) where one block does all the growing, the maximum
    while no rate is negative. Large where the norm ends near its start: give the median over tokens beside the mean.
    Unchanged by rotation, positive scaling, reversal in time and |x| -> |x|^c; not by translation. `correction` is
    subtracted from the count in the variance.

    Source: Aubry et al., arXiv 2407.07810, section 3.3; "cv" is ours, `var_over_mean2` its square.

    Raises:
        ValueError: a state of norm zero, a norm that returns to its start, fewer than two steps; NaN there with
            `undefined="nan"`.
    """
    check_option("form", form, "cv", "var_over_mean2")
    return WalkedPath.along(states).expodistance(undefined, form=form, correction=correction)


def equidistance(states: States, *, correction: int = 0, undefined: Undefined = "raise") -> PerToken:
    """Return how uneven the step lengths of each trajectory are: their deviation over their mean.

    Range [0, sqrt(L - 1)] for `correction=0`: 0 iff all steps are equally long, sqrt(L - 1) if only one is not zero.
    Unchanged by rotation, translation, scaling and the order of the steps.

    Source: Aubry et al., arXiv 2407.07810, figure 23.

    Raises:
        ValueError: all steps have length zero, or too few steps; NaN there with `undefined="nan"`.
    """
    return WalkedPath.along(states).equidistance(undefined, correction=correction)


def state_norms(states: States) -> Float[Tensor, "layers *n"]:
    """Return |x^l| for every layer l = 0..L."""
    return WalkedPath.along(states).state["norms"]


def step_norms(states: States) -> Float[Tensor, "steps *n"]:
    """Return |x^l - x^(l-1)| for every block l = 1..L."""
    return WalkedPath.along(states).state["lengths"]


class WalkedPath:
    """What is left of trajectories whose states are seen one layer after the other: enough for every metric here.

    `state` is all of it, plain tensors by name, so that a walk can be put down and taken up, on another device too:
    `norms` and `broken` (layers, *n), the latter whether a state so far is not finite, `lengths`, `distances` and
    `stopped` (steps, *n), and `total` (*n, dim), the sum of unit steps.
    """

    def __init__(self, state: dict[str, Tensor] | None = None) -> None:
        self.state: dict[str, Tensor] = {} if state is None else state

    @classmethod
    def along(cls, states: States) -> "WalkedPath":
        """Return the path of states that are all at hand."""
        path = cls()
        path.start(states[0])
        for pair in pairwise(states):
            path.step(*pair)
        return path

    def start(self, state: Float[Tensor, "*n dim"]) -> None:
        """Take layer 0."""
        norms = torch.linalg.vector_norm(widened(state), dim=-1)
        self.state.update(
            norms=norms[None],
            lengths=norms.new_empty(0, *norms.shape),
            distances=norms.new_empty(0, *norms.shape),
            stopped=torch.empty(0, *norms.shape, dtype=torch.bool, device=norms.device),
            broken=_not_finite(state, norms)[None],
        )

    def step(self, before: Float[Tensor, "*n dim"], after: Float[Tensor, "*n dim"]) -> None:
        """Take the next layer, from the one before it."""
        reached = widened(after)
        step = reached - widened(before)  # two layers at a time, not all
        self.state.update({name: tensor.to(step.device) for name, tensor in self.state.items()})
        length = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
        total = step / length.masked_fill(length == 0, 1.0) + self.state.get("total", 0.0)
        still = (length == 0).squeeze(-1)
        if len(self.state["stopped"]):
            still = still | self.state["stopped"][-1]
        norms = torch.linalg.vector_norm(reached, dim=-1)
        self._append(
            norms=norms,
            lengths=length.squeeze(-1),
            distances=torch.linalg.vector_norm(total, dim=-1),
            stopped=still,
            broken=self.state["broken"][-1] | _not_finite(after, norms),
        )
        self.state["total"] = total

    def _append(self, **rows: Tensor) -> None:
        for name, row in rows.items():
            self.state[name] = torch.cat([self.state[name], row[None]])

    def running_line_shape_score(
        self, undefined: Undefined = "raise", *, so_far: bool = False
    ) -> Float[Tensor, "steps *n"]:
        """Return what the function of that name does; with `so_far` a broken state spoils only what follows it."""
        return self._scores("running_line_shape_score", slice(None), undefined, so_far=so_far)

    def line_shape_score(self, undefined: Undefined = "raise") -> PerToken:
        """Return what the function of that name does."""
        return self._scores("line_shape_score", -1, undefined)

    def growth_rates(self, undefined: Undefined = "raise", *, so_far: bool = False) -> Float[Tensor, "steps *n"]:
        """Return what the function of that name does; `so_far` is that of `running_line_shape_score`."""
        norms = self.state["norms"]
        zero = norms == 0
        problems = {"a state is not finite": self._broken(so_far)[1:], "a state has norm zero": zero[1:] | zero[:-1]}
        return settled("growth_rates", (norms[1:] / norms[:-1]).log(), problems, undefined)

    def expodistance(self, undefined: Undefined = "raise", *, form: str = "cv", correction: int = 0) -> PerToken:
        """Return what the function of that name does."""
        norms = self.state["norms"]
        steps, zero = len(norms) - 1, (norms == 0).any(0)
        norms = norms.masked_fill(zero, 1.0)
        total = (norms[-1] / norms[0]).log()
        returned = ~zero & (total.abs() <= 16 * _EPS)  # equal up to the rounding of two norms
        problems = {
            "it takes more steps": torch.tensor(steps < max(2, correction + 1)),
            "a state is not finite": self.state["broken"][-1],
            "a state has norm zero": zero,
            "the norm returns to its start, so that the mean growth rate is 0": returned,
        }
        mean = (total / max(steps, 1)).masked_fill(returned | zero, 1.0).abs()
        values = _deviation((norms[1:] / norms[:-1]).log(), correction) / mean
        return settled("expodistance", values if form == "cv" else values.square(), problems, undefined)

    def equidistance(self, undefined: Undefined = "raise", *, correction: int = 0) -> PerToken:
        """Return what the function of that name does."""
        lengths = self.state["lengths"]
        mean = lengths.mean(0)
        problems = {
            "it takes more steps": torch.tensor(len(lengths) < correction + 1),
            "a state is not finite": self.state["broken"][-1],
            "all steps have length zero": mean == 0,
        }
        values = _deviation(lengths, correction) / mean.masked_fill(mean == 0, 1.0)
        return settled("equidistance", values, problems, undefined)

    def _broken(self, so_far: bool) -> Bool[Tensor, "layers *n"]:
        broken = self.state["broken"]
        return broken if so_far else broken[-1:].expand_as(broken)

    def _scores(self, metric: str, which: int | slice, undefined: Undefined, *, so_far: bool = False) -> Tensor:
        distances, stopped = self.state["distances"], self.state["stopped"]
        number = torch.arange(1.0, len(distances) + 1, dtype=distances.dtype, device=distances.device)
        number = number.reshape(-1, *[1] * (distances.ndim - 1))
        distances = distances.masked_fill(distances <= number * _EPS, 0.0)  # steps that cancel leave their rounding
        scores = (number / distances).clamp(min=1.0)
        problems = {"a state is not finite": self._broken(so_far)[1:][which], "a step has length zero": stopped[which]}
        return settled(metric, scores[which], problems, undefined)


def _not_finite(states: Float[Tensor, "*n dim"], norms: PerToken) -> Bool[Tensor, "*n"]:
    """Return which states are not finite, from their norms in float64 where no square can leave it."""
    return ~(norms.isfinite() if states.dtype != torch.float64 else states.isfinite().all(-1).to(norms.device))


def _deviation(values: Float[Tensor, "steps *n"], correction: int) -> PerToken:
    """Return the standard deviation over steps; `Tensor.std` warns if there is no token."""
    return ((values - values.mean(0)).square().sum(0) / (len(values) - correction)).sqrt()


# The paths of tokens through the layers, seen in the plane that spreads the last layer most.


class PrincipalPaths(NamedTuple):
    """Where tokens are in a plane at every layer; see `principal_paths`."""

    places: Float[Tensor, "layers tokens 2"]
    explained_variance: Float[Tensor, " 2"]  # share of the last layer's variance along each axis, in [0, 1]


def principal_paths(
    states: Float[Tensor, "layers tokens dim"], *, undefined: Literal["raise", "nan"] = "raise"
) -> PrincipalPaths:
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
    return PrincipalPaths(*(settled("principal_paths", values, problems, undefined) for values in found))
