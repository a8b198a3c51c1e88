"""The real tokens of each prompt as packed rows, and what may be done to rows before they are measured."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Rows = Float[Tensor, "*n rows dim"]
Kept = Bool[Tensor, "*n rows"]


def real_rows(tokens: Float[Tensor, "*n tokens dim"], mask: Tensor | None, drop_first: int = 0) -> tuple[Rows, Kept]:
    """The real tokens of each prompt in order and packed to the front, zeros behind them; and which rows are real.

    Packing makes values independent of where padding stands and what it holds. `mask` broadcasts over leading
    dimensions; `drop_first` counts among the real tokens.

    Raises:
        TypeError: a mask that is not boolean.
        ValueError: a shape or a count that does not fit.
    """
    if tokens.ndim < 2:
        raise ValueError(f"expected rows of shape (*n, rows, dim), got {tuple(tokens.shape)}")
    if not isinstance(drop_first, int) or drop_first < 0:
        raise ValueError(f"expected drop_first to be an integer of at least 0, got {drop_first!r}")
    if mask is not None:
        mask = _checked(mask, tokens)
    if mask is None or mask.all():
        rows = tokens[..., drop_first:, :]
        return rows, rows.new_ones(rows.shape[:-1], dtype=torch.bool)
    keep = mask & (mask.cumsum(-1) > drop_first)
    counts = keep.sum(-1, keepdim=True)
    width = int(counts.max()) if counts.numel() else 0
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    rows = torch.take_along_dim(tokens, order[..., None].expand(*tokens.shape[:-2], width, 1), -2)
    kept = (torch.arange(width, device=mask.device) < counts).expand(rows.shape[:-1])
    return rows.masked_fill(~kept[..., None], 0.0), kept


def _checked(mask: Tensor, tokens: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"expected a boolean mask, True on real tokens, got {mask.dtype}")
    shape = tokens.shape[:-1]
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == shape and mask.shape[-1] == shape[-1]
    except (RuntimeError, IndexError):
        fits = False
    if not fits:
        raise ValueError(f"expected a mask that fits {tuple(shape)}, got {tuple(mask.shape)}")
    return mask.to(tokens.device)


def not_finite(rows: Rows) -> Bool[Tensor, "*n"]:
    """Which elements hold a NaN or an infinity."""
    if rows.sum().isfinite():  # one cheap pass for the usual case
        return rows.new_zeros(rows.shape[:-2], dtype=torch.bool)
    return ~rows.isfinite().flatten(-2).all(-1)


def without(rows: Rows, elements: Bool[Tensor, "*n"]) -> Rows:
    """The rows with zeros for those of some elements: what is undefined must not spoil its neighbours."""
    return rows.masked_fill(elements[..., None, None], 0.0) if elements.any() else rows


def centered(rows: Rows, kept: Kept) -> Rows:
    """Each prompt's rows minus their mean; equal rows become exactly 0."""
    shifted = rows - rows[..., :1, :]  # a mean of equal rows is off by rounding, one of zeros is not
    shifted = shifted.masked_fill(~kept[..., None], 0.0)
    mean = shifted.sum(-2, keepdim=True) / kept.sum(-1).clamp(min=1)[..., None, None]
    return (shifted - mean).masked_fill(~kept[..., None], 0.0)


def unit_rows(rows: Rows, kept: Kept, *, after_centering: bool = False) -> tuple[Rows, Bool[Tensor, "*n rows"]]:
    """Rows of norm 1, and which real rows have no direction: those stay 0.

    A centred row has none either where it is rounding: a row that equals the mean.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1)
    floor = torch.zeros_like(norms[..., :1])
    if after_centering and norms.shape[-1]:
        floor = max(rows.shape[-2:]) * torch.finfo(rows.dtype).eps * norms.amax(-1, keepdim=True)
    none = kept & (norms <= floor)
    return (rows / norms.masked_fill(norms <= floor, 1.0)[..., None]).masked_fill(none[..., None], 0.0), none
