"""How far along an update the loss may go before it is above where it began."""

import math
from collections.abc import Callable
from typing import NamedTuple

GROWTH = 4.0  # of the step, until it is bracketed
BRACKETING, MOST = 5, 9  # losses: until it is, besides that of no step, and in all
CLOSE = 1e-3  # a change of the loss for each unit of step, over the largest one: then no further step is tried


class CriticalStep(NamedTuple):
    """The step at which the loss is back where it began, in units of the update, between two that were tried."""

    step: float  # NaN where it was not found between 4^-4 and 4^4 updates
    low: float  # the largest step tried that did not raise the loss; 0 where each one did
    high: float  # the smallest one above it that did; infinite where none did
    num_losses: int


def critical_step(loss_at: Callable[[float], float]) -> CriticalStep:
    """The largest step along an update that does not raise the loss, found with at most 9 losses.

    `loss_at(s)` is the loss after s times the update, so that 1 is the step that was taken. Steps of 1, 4, 16, ... or
    1, 1/4, ... bracket the place where the loss passes that of no step; then (loss(s) - loss(0)) / s, which on a
    quadratic is a line, is followed to its zero. Where that did not halve the bracket, which steep losses have on one
    side alone, its middle is next. On a quadratic the step is exact, on other smooth losses mostly to a thousandth. A
    loss that rises, falls and rises again passes there several times: this is one of the places.

    Source: Kalra et al., arXiv 2601.16979, equation 3: with the learning rate eta the critical one is step x eta, the
    critical sharpness 2 / (step x eta).

    Raises:
        ValueError: the loss of no step is not finite.
    """
    start = loss_at(0.0)
    if not math.isfinite(start):
        raise ValueError(f"expected a finite loss before the update, got {start}")
    rises = {}  # (loss(s) - loss(0)) / s by s; a loss that is not finite is a rise

    def tried(step: float) -> bool:
        change = loss_at(step) - start
        rises[step] = change / step if math.isfinite(change) else math.inf
        return rises[step] > 0

    step, low, high = 1.0, 0.0, math.inf
    for _ in range(BRACKETING):
        low, high = (low, step) if tried(step) else (step, high)
        if low > 0 and high < math.inf:
            break
        step = step / GROWTH if low == 0 else step * GROWTH
    if low == 0 or high == math.inf:
        return CriticalStep(math.nan, low, high, 1 + len(rises))
    halves = False
    while len(rises) < MOST - 1 and abs(rises[step]) > -CLOSE * min(rises.values()):
        width, step = high / low, math.sqrt(low * high) if halves else _zero(rises, low, high)
        if not low < step < high:
            step = math.sqrt(low * high)
        low, high = (low, step) if tried(step) else (step, high)
        halves = not halves and (high / low) ** 2 > width
    return CriticalStep(_zero(rises, low, high), low, high, 1 + len(rises))


def _zero(rises: dict[float, float], low: float, high: float) -> float:
    """Where a line through both ends is 0; halfway between them, by their logarithms, where there is none."""
    if not math.isfinite(rises[high]) or rises[high] == rises[low]:
        return math.sqrt(low * high)
    return low - rises[low] * (high - low) / (rises[high] - rises[low])
