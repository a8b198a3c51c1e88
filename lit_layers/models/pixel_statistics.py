"""The pixel statistics that a vision model was trained with, kept where timm keeps them: in its config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
_KNOWN = "pixel_statistics"  # attribute of a model that has been trained


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


def pixel_statistics(model: nn.Module) -> Statistics | None:
    """What a model's images were normalised by in training; None where nobody says."""
    return getattr(model, _KNOWN, None)
