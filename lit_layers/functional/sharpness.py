"""How far along an update the loss may go before it is above where it began."""

import math
from collections.abc import Callable
from typing import NamedTuple

GROWTH = 4.0  # of the step, until it is bracketed
BRACKETING, REFINING = 5, 3  # losses, besides that of no step


class CriticalStep(NamedTuple):
    """The step at which the loss is back where it began, in units of the update, between two that were tried."""

    step: float  # NaN where it was not found between 4^-4 and 4^4 updates
    low: float  # the largest step tried that did not raise the loss; 0 where each one did
    high: float  # the smallest one that did; infinite where none did
    num_losses: int


def critical_step(loss_at: Callable[[float], float]) -> CriticalStep:
    """The largest step along an update that does not raise the loss, found with at most 9 losses.

    `loss_at(s)` is the loss after s times the update, so that 1 is the step that was taken. Steps of 1, 4, 16, ... or
    1, 1/4, ... bracket the place where the loss passes that of no step; then (loss(s) - loss(0)) / s, which on a
    quadratic is a line, is followed to its zero three times: on a quadratic the step is exact.

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
    for _ in range(REFINING):
        step = _zero(rises, low, high)
        if not low < step < high:
            break
        low, high = (low, step) if tried(step) else (step, high)
    return CriticalStep(_zero(rises, low, high), low, high, 1 + len(rises))


def _zero(rises: dict[float, float], low: float, high: float) -> float:
    """Where a line through both ends is 0; halfway between them, by their logarithms, where there is none."""
    if not math.isfinite(rises[high]) or rises[high] == rises[low]:
        return math.sqrt(low * high)
    return low - rises[low] * (high - low) / (rises[high] - rises[low])
