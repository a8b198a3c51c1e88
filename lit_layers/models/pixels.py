"""How images are prepared: pixel statistics, and where timm and transformers keep them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lit_layers.errors import InputError

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
PREPROCESSOR = "preprocessor_config.json"  # where transformers keeps them
_STATISTICS = "pixel_statistics"  # attribute of a model that has been trained
_PREPROCESSOR = "preprocessor_settings"  # attribute of a model of transformers: that file


def set_pixel_statistics_(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Note what images are normalised by; saving writes it as timm's `pretrained_cfg.mean` and `.std`."""
    statistics: Statistics = tuple(map(float, mean)), tuple(map(float, std))
    setattr(model, _STATISTICS, statistics)
    config: Any = model.pretrained_cfg
    setattr(model, "pretrained_cfg", {**config, "mean": list(statistics[0]), "std": list(statistics[1])})  # noqa: B010


def keep_pixel_statistics_(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Note what a timm config.json says; nothing where it says nothing, though timm would then fill in a default."""
    config = settings.get("pretrained_cfg", settings)
    if "mean" in config and "std" in config:
        set_pixel_statistics_(model, config["mean"], config["std"])


def keep_preprocessor_(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Note what a preprocessor_config.json says; where it gives no mean and deviation, nobody says."""
    setattr(model, _PREPROCESSOR, dict(settings))
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not settings.get("do_normalize", True):
        mean, std = 0.0, 1.0
    if mean is None or std is None:
        return
    # of pixels in 0..255, which are rescaled first: to 0..1 unless it says otherwise
    brightest = 255 * settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 255.0
    config: Any = model.config
    statistics = (_channels(value, config.num_channels, brightest) for value in (mean, std))
    setattr(model, _STATISTICS, tuple(statistics))


def preprocessor(model: nn.Module) -> dict[str, Any] | None:
    """What the preprocessor_config.json said beside which a model of transformers lay; None where there was none."""
    return getattr(model, _PREPROCESSOR, None)


def copy_pixel_statistics_(source: nn.Module, model: nn.Module) -> None:
    """Note of `model`, made from `source`, what is known of that."""
    for name in (_STATISTICS, _PREPROCESSOR):
        if hasattr(source, name) and not hasattr(model, name):
            setattr(model, name, getattr(source, name))


def pixel_statistics(model: nn.Module) -> Statistics | None:
    """What a model's images were normalised by in training; None where nobody says."""
    return getattr(model, _STATISTICS, None)


def _channels(value: Any, number: int, brightest: float) -> tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value] * number
    return tuple(float(number) / brightest for number in values)


# Of 0..1: far above the rounding of six printed digits, far below what two sets of photographs differ by.
_NEGLIGIBLE = 1e-4


def refuse_unlike_training(name: str, images: Any, model: Any) -> None:
    """Refuse `EvalImages` in another normalisation or size than those of the model in a view: its numbers would be
    wrong without a word.

    Raises:
        InputError: naming both; a model whose normalisation is unknown is taken as it is.
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
