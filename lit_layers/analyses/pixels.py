"""Images that are to be measured on, held against those that the model was trained on."""

import math

from lit_layers.data.images import EvalImages
from lit_layers.errors import InputError
from lit_layers.models.pixel_statistics import pixel_statistics
from lit_layers.models.view import LayeredModel

# Of 0..1: far above the rounding of six printed digits, far below what two sets of photographs differ by.
_NEGLIGIBLE = 1e-4


def refuse_unlike_training(name: str, images: EvalImages, model: LayeredModel) -> None:
    """Refuses images in another normalisation or size than the model's: its numbers would be wrong without a word.

    Raises:
        InputError: naming both; a model of which nobody knows the normalisation is taken as it is.
    """
    if not model.family.sees_images:
        return
    known, found = pixel_statistics(model.model), images.mean_and_std()
    if known is not None and len(known[0]) != len(found[0]):
        raise InputError(
            f"{name}: the model takes images of {len(known[0])} channels, {images.source} has {len(found[0])}"
        )
    if known is not None and not all(
        math.isclose(a, b, abs_tol=_NEGLIGIBLE) for a, b in zip(sum(known, ()), sum(found, ()), strict=True)
    ):
        raise InputError(
            f"{name}: normalisation {images.normalisation} of {images.source} gives mean {_digits(found[0])}, std "
            f"{_digits(found[1])}, and the model was trained with mean {_digits(known[0])}, std {_digits(known[1])}: "
            "use the normalisation of its training data"
        )
    size, taken = images.images()[0].shape[-1], model.image_size
    if taken is not None and size != taken:
        raise InputError(f"{name}: expected an image_size of {taken}, which the model takes, got images of {size} px")


def _digits(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:.3f}" for value in values) + ")"
