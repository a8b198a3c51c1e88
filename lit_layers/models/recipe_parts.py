"""timm's own parts of the DeiT recipe: mixing of images, and the pipeline for large ones."""

from collections.abc import Callable
from typing import Any


def mixup(*, mixup: float, cutmix: float, smoothing: float, num_classes: int) -> Callable[..., Any]:
    """timm's Mixup and CutMix of a batch (in place) and its labels: images, labels -> images, soft targets.

    Where both are on, either is chosen with probability 1/2. Draws from numpy's global generator. Sources: Zhang et al.
    2017, arXiv 1710.09412; Yun et al. 2019, arXiv 1905.04899.
    """
    from timm.data import Mixup

    return Mixup(mixup_alpha=mixup, cutmix_alpha=cutmix, label_smoothing=smoothing, num_classes=num_classes)


def train_transform(
    size: int,
    *,
    flip: bool,
    rand_augment: str | None,
    erasing: float,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Callable[..., Any]:
    """timm's training pipeline of one large image: random resized crop, flip, RandAugment, erasing.

    Draws from the global generators of random, numpy and torch.

    Raises:
        ValueError: a RandAugment that timm does not know.
    """
    from timm.data import create_transform

    try:
        transform: Any = create_transform(
            size,
            is_training=True,
            hflip=0.5 if flip else 0.0,
            color_jitter=0.0,
            auto_augment=rand_augment,
            interpolation="bicubic",
            re_prob=erasing,
            re_mode="pixel",
            mean=mean,
            std=std,
        )
        return transform
    except AssertionError as error:
        raise ValueError(f"timm does not know {rand_augment!r}") from error
