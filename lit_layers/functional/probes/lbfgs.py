"""L-BFGS on many convex problems of one shape at once, each with a step of its own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MEMORY = 8
# Approximate Wolfe conditions (Hager & Zhang 2005), on slopes alone: near the optimum the values no longer resolve in
# float32, the slopes still do.
OVERSHOT, TOO_SHORT = 0.6, 0.9
MAX_TRIALS = 20

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]


class Minimum(NamedTuple):
    """Where `minimize` stopped."""

    point: Tensor  # (problems, *shape)
    value: Tensor  # (problems,)
    slope: Tensor  # the gradients there
    done: Tensor  # (problems,) bool, False where the iterations ran out or no step was found
    num_iterations: Tensor  # (problems,) int


class _Pair(NamedTuple):
    """A step, how the gradient changed over it, and 1 / their product; 0 where a problem did not move."""

    step: Tensor
    change: Tensor
    weight: Tensor


def minimize(
    evaluate: Evaluate,
    start: Tensor,
    precondition: Callable[[Tensor], Tensor],
    is_done: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    max_iterations: int,
) -> Minimum:
    """The minima of smooth convex functions, one for each row of `start` (problems, *shape).

    Args:
        evaluate: of all problems at once, (problems, *shape) to values (problems,) and gradients of that shape.
        precondition: times an estimate of the inverse Hessians, symmetric and positive where gradients lie; linear.
        is_done: which problems (problems,) are solved, by points, values, gradients and the steps L-BFGS would take.
        max_iterations: for each problem. One that uses them up, or finds no acceptable step, stays where it is.
    """
    point = start
    value, slope = evaluate(start)
    done = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    stuck = torch.zeros_like(done)
    num_iterations = torch.zeros_like(done, dtype=torch.long)
    pairs: list[_Pair] = []
    for _ in range(max_iterations):
        direction = _direction(slope, pairs, precondition)
        done = done | (~stuck & is_done(point, value, slope, direction))
        active = ~(done | stuck)
        if not active.any():
            break
        step, new_value, new_slope, stuck_here = _search(evaluate, point, value, slope, direction, active)
        pairs = [*pairs[1 - MEMORY :], _pair(step * direction, new_slope - slope)]
        point, value, slope = point + step * direction, new_value, new_slope
        stuck = stuck | stuck_here
        num_iterations += active
    return Minimum(point, value, slope, done, num_iterations)


def remaining_decrease(slope: Tensor, direction: Tensor) -> Tensor:
    """Of the value, by the step that L-BFGS would take: half its product with the gradient, (problems,)."""
    return -_dot(slope, direction).flatten() / 2


def _direction(slope: Tensor, pairs: list[_Pair], precondition: Callable[[Tensor], Tensor]) -> Tensor:
    """Minus the inverse Hessian, as the pairs know it, times the gradient: the two-loop recursion."""
    left = slope
    shares: list[Tensor] = []
    for pair in reversed(pairs):
        share = pair.weight * _dot(pair.step, left)
        left = left.addcmul(share, pair.change, value=-1)
        shares.append(share)
    direction = precondition(left)
    if pairs:
        last = pairs[-1]
        size = last.weight * _dot(last.change, precondition(last.change))
        direction = direction / torch.where(size > 0, size, torch.ones_like(size))
    for pair, share in zip(pairs, reversed(shares), strict=True):
        direction = direction.addcmul(share - pair.weight * _dot(pair.change, direction), pair.step)
    return -direction


def _search(
    evaluate: Evaluate, point: Tensor, value: Tensor, slope: Tensor, direction: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step along each direction, value and gradient there, and which problems found none (their step is 0)."""
    first = _dot(slope, direction)
    low, high = torch.zeros_like(first), torch.full_like(first, torch.inf)
    step = torch.ones_like(first)
    moving = _column(active, slope) & (first < 0)
    rejected, new_value, new_slope = moving, value, slope
    for _ in range(MAX_TRIALS):
        new_value, new_slope = evaluate(point + step * direction)
        here = _dot(new_slope, direction)
        too_far = moving & ~(here <= OVERSHOT * -first)  # also where it is not a number
        too_short = moving & (here < TOO_SHORT * first)
        rejected = too_far | too_short
        if not rejected.any():
            break
        high, low = torch.where(too_far, step, high), torch.where(too_short, step, low)
        zero_of_line = step * first / (first - here)  # of the slope, were it linear
        inside = low + (high - low) * 0.5
        closer = torch.where(low > 0, inside, zero_of_line.nan_to_num(0).clamp(0.1 * step, 0.9 * step))
        further = torch.where(high.isinf(), 2.5 * step, inside)
        step = torch.where(too_far, closer, torch.where(too_short, further, step))
    moving = moving & ~rejected
    # A problem that does not move keeps its gradient, so that the pair made of it says nothing.
    moved = moving.flatten()
    return step * moving, torch.where(moved, new_value, value), torch.where(moving, new_slope, slope), active & ~moved


def _pair(step: Tensor, change: Tensor) -> _Pair:
    product = _dot(step, change)
    return _Pair(step, change, torch.where(product > 0, 1 / product, torch.zeros_like(product)))


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products, (problems, 1, ..., 1)."""
    return (left * right).flatten(1).sum(1).view(-1, *[1] * (left.ndim - 1))


def _column(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (like.ndim - 1))
