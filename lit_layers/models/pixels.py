"""Pixel statistics: mean and standard deviation of each channel, with which a model's images are normalized.

They are read from the files of timm and transformers, and saved in the same way.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lit_layers.errors import InputError

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
PREPROCESSOR = "preprocessor_config.json"  # file in which transformers saves the pixel statistics
_STATISTICS = "pixel_statistics"  # attribute of a model that holds the pixel statistics of its training
_PREPROCESSOR = "preprocessor_settings"  # attribute of a transformers model that holds the content of PREPROCESSOR


def set_pixel_statistics_(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Set the pixel statistics of a timm model; saving writes them as `pretrained_cfg.mean` and `.std`."""
    statistics: Statistics = tuple(map(float, mean)), tuple(map(float, std))
    setattr(model, _STATISTICS, statistics)
    config: Any = model.pretrained_cfg
    setattr(model, "pretrained_cfg", {**config, "mean": list(statistics[0]), "std": list(statistics[1])})  # noqa: B010


def keep_pixel_statistics_(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Set the pixel statistics of a timm model from `settings`, the content of its config.json, if they contain any.

    Without this call, timm would use the statistics of ImageNet.
    """
    config = settings.get("pretrained_cfg", settings)
    if "mean" in config and "std" in config:
        set_pixel_statistics_(model, config["mean"], config["std"])


def keep_preprocessor_(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Store the content of a preprocessor_config.json in a model, and the pixel statistics that follow from it."""
    setattr(model, _PREPROCESSOR, dict(settings))
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not settings.get("do_normalize", True):
        mean, std = 0.0, 1.0
    if mean is None or std is None:
        return
    # transformers first rescales pixels from 0..255, by default to 0..1, and then normalizes them. This package stores
    # the mean and std of pixels in 0..1. So divide transformers' mean and std by `brightest`, the value that a pixel of
    # 255 has after rescaling.
    brightest = 255 * settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 255.0
    config: Any = model.config
    statistics = (_channels(value, config.num_channels, brightest) for value in (mean, std))
    setattr(model, _STATISTICS, tuple(statistics))


def preprocessor(model: nn.Module) -> dict[str, Any] | None:
    """Return the content of the preprocessor_config.json that a model was loaded with; None if it had none."""
    return getattr(model, _PREPROCESSOR, None)


def copy_pixel_statistics_(source: nn.Module, model: nn.Module) -> None:
    """Copy pixel statistics and the preprocessor_config.json from `source` to `model`, unless `model` has its own."""
    for name in (_STATISTICS, _PREPROCESSOR):
        if hasattr(source, name) and not hasattr(model, name):
            setattr(model, name, getattr(source, name))


def pixel_statistics(model: nn.Module) -> Statistics | None:
    """Return the mean and standard deviation that normalized a model's training images; None if unknown."""
    return getattr(model, _STATISTICS, None)


def _channels(value: Any, number: int, brightest: float) -> tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value] * number
    return tuple(float(each) / brightest for each in values)


# Largest difference at which two pixel statistics count as equal (pixels in 0..1). It is far above the rounding of six
# digits, and far below the difference between two data sets of photos.
_NEGLIGIBLE = 1e-4


def refuse_unlike_training(name: str, images: Any, model: Any) -> None:
    """Refuse `EvalImages` whose normalization or size differs from that of the model.

    Otherwise, the metrics would be wrong without any warning. If the normalization of the model is unknown, only the
    size is compared.

    Args:
        name: name of the analysis, for error messages.
        images: the `EvalImages`.
        model: the `LayeredModel`.

    Raises:
        InputError: if normalization, number of channels or size differ.
    """
    if not model.family.sees_images:
        return
    trained, given = pixel_statistics(model.model), images.mean_and_std()
    if trained is not None and len(trained[0]) != len(given[0]):
        raise InputError(
            f"{name}: the model takes images of {len(trained[0])} channels, {images.source} has {len(given[0])}"
        )
    if trained is not None and not all(
        math.isclose(a, b, abs_tol=_NEGLIGIBLE) for a, b in zip(sum(trained, ()), sum(given, ()), strict=True)
    ):
        raise InputError(
            f"{name}: normalisation {images.normalisation} of {images.source} gives mean {_digits(given[0])}, std "
            f"{_digits(given[1])}, and the model was trained with mean {_digits(trained[0])}, std "
            f"{_digits(trained[1])}: use the normalisation of its training data"
        )
    size, expected = images.images()[0].shape[-1], model.image_size
    if expected is not None and size != expected:
        raise InputError(
            f"{name}: expected an image_size of {expected}, which the model takes, got images of {size} px"
        )


def _digits(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:.3f}" for value in values) + ")"
