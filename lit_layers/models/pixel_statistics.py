"""The pixel statistics that a vision model was trained with: in timm's config.json, beside that of transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
PREPROCESSOR = "preprocessor_config.json"  # where transformers keeps them
_KNOWN = "pixel_statistics"  # attribute of a model that has been trained
_PREPROCESSOR = "preprocessor_settings"  # attribute of a model of transformers: that file


def set_pixel_statistics_(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Notes what images are normalised by; saving writes it as timm's `pretrained_cfg.mean` and `.std`."""
    found: Statistics = tuple(map(float, mean)), tuple(map(float, std))
    setattr(model, _KNOWN, found)
    config: Any = model.pretrained_cfg
    setattr(model, "pretrained_cfg", {**config, "mean": list(found[0]), "std": list(found[1])})  # noqa: B010


def keep_pixel_statistics_(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Notes what a timm config.json says; nothing where it says nothing, though timm would then fill in a default."""
    config = settings.get("pretrained_cfg", settings)
    if "mean" in config and "std" in config:
        set_pixel_statistics_(model, config["mean"], config["std"])


def keep_preprocessor_(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Notes what a preprocessor_config.json says; where it gives no mean and deviation, nobody says."""
    setattr(model, _PREPROCESSOR, dict(settings))
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not settings.get("do_normalize", True):
        mean, std = 0.0, 1.0
    if mean is None or std is None:
        return
    # of pixels in 0..255, which are rescaled first: to 0..1 unless it says otherwise
    brightest = 255 * settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 255.0
    config: Any = model.config
    found = (_channels(value, config.num_channels, brightest) for value in (mean, std))
    setattr(model, _KNOWN, tuple(found))


def preprocessor(model: nn.Module) -> dict[str, Any] | None:
    """What the preprocessor_config.json said beside which a model of transformers lay; None where there was none."""
    return getattr(model, _PREPROCESSOR, None)


def copy_pixel_statistics_(source: nn.Module, model: nn.Module) -> None:
    """Notes of `model`, made from `source`, what is known of that."""
    for name in (_KNOWN, _PREPROCESSOR):
        if hasattr(source, name) and not hasattr(model, name):
            setattr(model, name, getattr(source, name))


def pixel_statistics(model: nn.Module) -> Statistics | None:
    """What a model's images were normalised by in training; None where nobody says."""
    return getattr(model, _KNOWN, None)


def _channels(value: Any, number: int, brightest: float) -> tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value] * number
    return tuple(float(each) / brightest for each in values)
