"""From the tokens of a prompt to one vector."""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from lit_layers.functional._checks import check_option, settled, widened
from lit_layers.functional._rows import centered, not_finite, real_rows, unit_rows

Pooling = Literal["mean", "last", "cls", "centered_unit_mean"]


def pool(
    tokens: Float[Tensor, "*n tokens dim"],
    mask: Bool[Tensor, "*n tokens"] | None = None,
    *,
    pooling: Pooling = "mean",
    undefined: Literal["raise", "nan"] = "raise",
) -> Float[Tensor, "*n dim"]:
    """One vector for each prompt, in float64: the mean of its real tokens, the last, or the first of them ("cls").

    "centered_unit_mean" is what the code of Skean et al. (OFSkean/information_flow, 2024-09) pools: tokens minus their
    mean, each scaled to norm 1, averaged.

    Raises:
        ValueError: a prompt without a real token, with a value that is not finite or (centered_unit_mean) with a token
            equal to the mean; NaN there with `undefined="nan"`.
    """
    check_option("pooling", pooling, "mean", "last", "cls", "centered_unit_mean")
    check_option("undefined", undefined, "raise", "nan")
    rows, kept = real_rows(widened("tokens", tokens), mask)
    count = kept.sum(-1)
    broken = not_finite(rows)
    problems = {"a token is not finite": broken, "there is no real token": count == 0}
    if not rows.shape[-2]:
        pooled = rows.sum(-2)
    elif pooling == "cls":
        pooled = rows[..., 0, :]
    elif pooling == "last":
        last = (count - 1).clamp(min=0)[..., None, None].expand(*count.shape, 1, rows.shape[-1])
        pooled = rows.gather(-2, last).squeeze(-2)
    else:
        if pooling == "centered_unit_mean":
            rows, nowhere = unit_rows(centered(rows, kept), kept, after_centering=True)
            problems["a token equals the mean that is subtracted"] = nowhere.any(-1)
        pooled = rows.sum(-2) / count.clamp(min=1)[..., None]
    return settled("pooled vector", pooled, {reason: bad[..., None] for reason, bad in problems.items()}, undefined)
