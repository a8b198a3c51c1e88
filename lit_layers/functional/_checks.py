"""What a metric does first, check and widen its input, and last, deal with what is undefined."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def widened(name: str, tensor: Tensor) -> Tensor:
    """The tensor in float64 (on the CPU where its device has none).

    Raises:
        TypeError: no floating-point tensor.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"expected {name} to be a floating-point tensor, got {kind}")
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def check_option(name: str, value: Any, *allowed: Any) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(map(repr, allowed))}, got {value!r}")


def settled(metric: str, values: Tensor, problems: Mapping[str, Tensor], undefined: str) -> Tensor:
    """`values`, with NaN for each element that has a problem.

    `problems` maps a reason to a boolean tensor that broadcasts to `values`.

    Raises:
        ValueError: `undefined="raise"` and an element with a problem; the sentence names the first one.
    """
    for reason, bad in problems.items():
        bad = bad.to(values.device).expand(values.shape)
        if undefined == "raise" and bad.any():
            place = tuple(bad.nonzero()[0].tolist())
            where = f" at element {place}" if place else ""
            raise ValueError(f'{metric} is undefined{where}: {reason}; pass undefined="nan" to get NaN there instead')
        values = values.masked_fill(bad, torch.nan)
    return values
