"""Features of layers read a few rows at a time: what probes check, and by what they centre and divide."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 2**21  # numbers widened at once: 16 MB in float64


def check_features(features: Tensor, like: Tensor | None = None) -> None:
    """Raises unless the features are a floating-point tensor (layers, n, dim), of the layers and width of `like`."""
    if not isinstance(features, Tensor) or not features.is_floating_point():
        kind = features.dtype if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"expected features to be a floating-point tensor, got {kind}")
    if features.ndim != 3 or not len(features) or not features.shape[2]:
        raise ValueError(f"expected features of shape (layers, n, dim), got {tuple(features.shape)}")
    if like is not None and (len(features), features.shape[2]) != like.shape[:2]:
        layers, dim = like.shape[:2]
        raise ValueError(f"these probes read {layers} layers of width {dim}, got shape {tuple(features.shape)}")


def check_finite(features: Float[Tensor, "layers n dim"], first_layer: int = 0) -> None:
    """Raises ValueError, naming the layer, where a feature is not finite."""
    for chunk in _chunks(features):
        if chunk.sum(dtype=torch.float64).isfinite():  # one cheap pass for the usual case
            continue
        finite = chunk.isfinite().flatten(1).all(1)
        if not finite.all():
            layer = first_layer + int(finite.int().argmin())
            raise ValueError(f"expected finite features, got others at layer {layer}")


def widened_chunks(features: Float[Tensor, "layers n dim"]) -> Iterator[Float[Tensor, "layers rows dim"]]:
    """Copies of the rows in float64, in order and some at a time."""
    for chunk in _chunks(features):
        yield chunk.detach().to(torch.float64, copy=True)


def feature_scaling(
    features: Float[Tensor, "layers n dim"], *, standardize: bool, center: bool
) -> tuple[Float[Tensor, "layers dim"], Float[Tensor, "layers dim"]]:
    """What to subtract from features and then divide them by, in float64.

    The mean, or 0 unless `center`; the population deviation, or 1 unless `standardize` and where the feature is
    constant. Rows are read once, and chunks joined as in Chan, Golub & LeVeque (1983).
    """
    origin = (
        features[:, 0].detach().double()
    )  # a constant feature minus it is exactly 0, minus a rounded mean it is not
    mean, squares, count = torch.zeros_like(origin), torch.zeros_like(origin), 0
    if center or standardize:
        for chunk in widened_chunks(features):
            shifted = chunk.sub_(origin[:, None])
            here, rows = shifted.mean(1), shifted.shape[1]
            count += rows
            step = here - mean
            squares += shifted.sub_(here[:, None]).square_().sum(1) + step.square() * (rows * (count - rows) / count)
            mean += step * (rows / count)
    scale = (squares / max(count, 1)).sqrt() if standardize else torch.ones_like(squares)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (origin + mean if center else torch.zeros_like(mean)), scale


def _chunks(features: Tensor) -> Iterator[Tensor]:
    layers, _, dim = features.shape
    yield from features.split(max(1, CHUNK // (layers * dim)), dim=1)
