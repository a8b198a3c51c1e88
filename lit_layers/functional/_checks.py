"""Input checks, conversion to float32 or wider, and handling of undefined values, shared by all metrics."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Undefined = Literal["raise", "nan"]  # whether an undefined element raises ValueError or becomes NaN in the result


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, moved to the CPU if its device has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def check_option(name: str, value: Any, *allowed: Any) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(map(repr, allowed))}, got {value!r}")


def checked(metric: str, values: Tensor, problems: Mapping[str, Tensor], undefined: str) -> Tensor:
    """Return the values of a metric with NaN where the metric is undefined.

    `problems` maps each reason why the metric is undefined to a boolean tensor that broadcasts to `values`. It is True
    at the values that the reason applies to.

    Raises:
        ValueError: a value is undefined and `undefined` is not "nan"; the message names the first such value.
    """
    for reason, bad in problems.items():
        bad = bad.to(values.device).expand(values.shape)
        if undefined != "nan" and bad.any():
            index = tuple(bad.nonzero()[0].tolist())
            where = f" at element {index}" if index else ""
            raise ValueError(f'{metric} is undefined{where}: {reason}; pass undefined="nan" to get NaN there instead')
        values = values.masked_fill(bad, torch.nan)
    return values


# The real tokens of each prompt as packed rows, and operations on rows before they are measured.

Rows = Float[Tensor, "*n rows dim"]
Real = Bool[Tensor, "*n rows"]


def real_rows(tokens: Float[Tensor, "*n tokens dim"], mask: Tensor | None, drop_first: int = 0) -> tuple[Rows, Real]:
    """Return the real tokens of each prompt, packed to the front with zeros after them, and a mask of the real rows.

    Packing makes values independent of the side and the content of padding. `mask` broadcasts over leading dimensions.
    The first `drop_first` real tokens of each prompt are removed.

    Raises:
        TypeError: a mask that is not boolean.
        ValueError: a `drop_first` below 0.
    """
    if drop_first < 0:
        raise ValueError(f"expected drop_first of at least 0, got {drop_first}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"expected a boolean mask, True on real tokens, got {mask.dtype}")
        mask = mask.to(tokens.device)
        mask.expand(tokens.shape[:-1])  # raises if the mask has another number of prompts or tokens
    if mask is None or mask.all():
        rows = tokens[..., drop_first:, :]
        return rows, rows.new_ones(rows.shape[:-1], dtype=torch.bool)
    keep = mask & (mask.cumsum(-1) > drop_first)
    counts = keep.sum(-1, keepdim=True)
    width = int(counts.max()) if counts.numel() else 0
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    rows = torch.take_along_dim(tokens, order[..., None].expand(*tokens.shape[:-2], width, 1), -2)
    real = (torch.arange(width, device=mask.device) < counts).expand(rows.shape[:-1])
    return rows.masked_fill(~real[..., None], 0.0), real


def not_finite(rows: Rows) -> Bool[Tensor, "*n"]:
    """Return a mask of the sets of rows (batch elements) that contain a NaN or an infinity."""
    if rows.sum().isfinite():  # usually all values are finite, which this one cheap pass shows
        return rows.new_zeros(rows.shape[:-2], dtype=torch.bool)
    return ~rows.isfinite().flatten(-2).all(-1)


def zeroed(rows: Rows, elements: Bool[Tensor, "*n"]) -> Rows:
    """Return `rows`, with zeros in place of each set of rows (one batch element) that `elements` selects.

    NaN in one set would otherwise spread to the other sets through batched operations.
    """
    return rows.masked_fill(elements[..., None, None], 0.0) if elements.any() else rows


def centered(rows: Rows, real: Real) -> Rows:
    """Return each prompt's rows minus their mean; equal rows become exactly 0."""
    # Subtract the first row before the mean: equal rows become zeros, whose mean is exactly 0. The mean of the original
    # rows may be rounded.
    shifted = rows - rows[..., :1, :]
    shifted = shifted.masked_fill(~real[..., None], 0.0)
    mean = shifted.sum(-2, keepdim=True) / real.sum(-1).clamp(min=1)[..., None, None]
    return (shifted - mean).masked_fill(~real[..., None], 0.0)


def unit_rows(rows: Rows, real: Real, *, after_centering: bool = False) -> tuple[Rows, Bool[Tensor, "*n rows"]]:
    """Return the rows scaled to norm 1, and a mask of the real rows that have no direction.

    A zero row has no direction and remains 0. With `after_centering` (the mean has been subtracted from the rows), a
    row of the size of rounding errors was equal to the mean. It has no direction either and becomes 0.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1)
    floor = torch.zeros_like(norms[..., :1])
    if after_centering and norms.shape[-1]:
        floor = max(rows.shape[-2:]) * torch.finfo(rows.dtype).eps * norms.amax(-1, keepdim=True)
    zero = real & (norms <= floor)
    return rows / norms.masked_fill(norms <= floor, torch.inf)[..., None], zero


# Jacobians, which are square matrices.


def wide_matrices(matrices: Tensor) -> Tensor:
    """Return the matrices in float64 if dim <= 512 or they already are in float64, otherwise in float32."""
    if matrices.shape[-1] != matrices.shape[-2]:
        raise ValueError(f"expected square matrices (*n, dim, dim), got {tuple(matrices.shape)}")
    wide = matrices.dtype == torch.float64 or matrices.shape[-1] <= 512
    return matrices.detach().to(torch.float64 if wide else torch.float32)


def finite_matrices(jacobians: Tensor, undefined: str) -> tuple[Tensor, Tensor]:
    """Return the Jacobians with non-finite ones set to zero, and a mask of the non-finite ones.

    Raises:
        ValueError: a Jacobian is not finite and `undefined` is not "nan".
    """
    broken = ~jacobians.isfinite().all(-1).all(-1)
    if undefined != "nan" and broken.any():
        raise ValueError(f"expected finite Jacobians, got a non-finite one at index {broken.nonzero()[0].tolist()}")
    return zeroed(jacobians, broken), broken


# Checks and scaling of the features that probes read, in chunks of rows.

CHUNK = 2**21  # largest number of entries that are converted at once: 16 MB in float64


def check_features(features: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless the features are finite and match the layers and width of a fitted probe."""
    layers, dim = weight.shape[:2]
    if (len(features), features.shape[2]) != (layers, dim):
        raise ValueError(f"these probes read {layers} layers of width {dim}, got shape {tuple(features.shape)}")
    check_finite(features)


def check_finite(features: Float[Tensor, "layers n dim"], first_layer: int = 0) -> None:
    """Raise ValueError if a feature is not finite; the message numbers the layers from `first_layer`."""
    for chunk in _chunks(features):
        if chunk.sum(dtype=torch.float64).isfinite():  # usually all features are finite, which this cheap pass shows
            continue
        finite = chunk.isfinite().flatten(1).all(1)
        if not finite.all():
            layer = first_layer + int(finite.int().argmin())
            raise ValueError(f"expected finite features, got others at layer {layer}")


def widened_chunks(features: Float[Tensor, "layers n dim"]) -> Iterator[Float[Tensor, "layers rows dim"]]:
    """Yield copies of the rows in float64, in order and in chunks."""
    for chunk in _chunks(features):
        yield chunk.detach().to(torch.float64, copy=True)


def feature_scaling(
    features: Float[Tensor, "layers n dim"],
) -> tuple[Float[Tensor, "layers dim"], Float[Tensor, "layers dim"]]:
    """Return the mean of the features and their population standard deviation (1 for a constant feature), in float64.

    Reads the rows once. Chunks are combined as in Chan, Golub & LeVeque (1983).
    """
    # Subtract one row first: a constant feature becomes exactly 0. Subtracting its rounded mean would leave noise.
    origin = features[:, 0].detach().double()
    mean, squares, count = torch.zeros_like(origin), torch.zeros_like(origin), 0
    for chunk in widened_chunks(features):
        shifted = chunk.sub_(origin[:, None])
        here, rows = shifted.mean(1), shifted.shape[1]
        count += rows
        step = here - mean
        squares += shifted.sub_(here[:, None]).square_().sum(1) + step.square() * (rows * (count - rows) / count)
        mean += step * (rows / count)
    scale = (squares / count).sqrt()
    return origin + mean, scale.where(scale > 0, 1.0)


def _chunks(features: Tensor) -> Iterator[Tensor]:
    layers, _, dim = features.shape
    yield from features.split(max(1, CHUNK // (layers * dim)), dim=1)
