"""Labelled image sets by name, and a fixed set of images to measure on, as the model wants to see them."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lit_layers.data.batches import Batches
from lit_layers.data.image_files import (
    Content,
    FilePictures,
    Pictures,
    SmallPictures,
    Split,
    columns_of,
    from_array,
    npz_splits,
    parquet_splits,
    pictures_of_rows,
    python_batches,
    python_splits,
)
from lit_layers.errors import InputError, whole_path
from lit_layers.files.hub import asking_the_hub
from lit_layers.schema import refuse_below_one

HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_HELD_OUT = ("val", "valid", "validation", "test")


class ImageSource:
    """A labelled image set with a train and a test split; a split is read once, when it is asked for."""

    def __init__(self, name: str, read: Callable[[Split], Content]) -> None:
        self.name = name
        self._content = functools.cache(lambda split: self._checked(split, *read(split)))

    @property
    def train(self) -> Pictures:
        return self.split("train")

    @property
    def test(self) -> Pictures:
        return self.split("test")

    def split(self, name: Split) -> Pictures:
        return self._content(name)[0]

    @property
    def num_classes(self) -> int:
        return int(self.train.labels.max()) + 1

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where the data has none."""
        return self._content("train")[1] or tuple(map(str, range(self.num_classes)))

    def check(self) -> None:
        """Reads both splits.

        Raises:
            InputError: a class without training images, or splits that do not have the same classes.
        """
        train, test = (set(each.labels.unique().tolist()) for each in (self.train, self.test))
        names = self.classes
        missing = sorted(set(range(len(names))) - train)
        if missing:
            raise InputError(
                f"{self.name}: class {names[missing[0]]!r} has no training image; add some or leave it out"
            )
        if train != test:
            odd = sorted(train ^ test)[0]
            name, where = (names[odd] if odd < len(names) else odd), "train" if odd in train else "test"
            raise InputError(
                f"{self.name}: the train split has {len(train)} classes and the test split {len(test)}; class {name!r} "
                f"is in {where} alone"
            )

    def _checked(self, split: Split, pictures: Pictures, names: tuple[str, ...] | None) -> Content:
        if not len(pictures):
            raise InputError(f"{self.name}: the {split} split has no image")
        low, high = int(pictures.labels.min()), int(pictures.labels.max())
        if low < 0 or (names is not None and high >= len(names)):
            wrong, limit = (
                (low, "at least 0") if low < 0 else (high, f"below {len(names or ())}, the number of classes")
            )
            row = pictures.labels.tolist().index(wrong)
            raise InputError(f"{self.name}: expected labels of {limit}, row {row} of the {split} split has {wrong}")
        return pictures, names


@functools.lru_cache(maxsize=3)  # training, analyses and probes look at the same data
def image_source(name: str) -> ImageSource:
    """The image set of a name: `digits`, `cifar10`, `cifar100`, a local path, or `ORG/NAME[:CONFIG]` of the Hub.

    A path is an .npz file, a folder of parquet files, torchvision's `cifar-10-batches-py` or `cifar-100-python` (or
    the folder that holds it), or a folder `train/CLASS/*.jpg` and `val/CLASS/*.jpg`. Nothing is read yet.

    Raises:
        InputError: a name that is none of these, or a folder that holds no images in a known form.
    """
    if name == "digits":
        return ImageSource(name, _digits)
    path = whole_path(name)
    if path.exists():
        return ImageSource(name, _local(path))
    hub = HUB_NAMES.get(name, name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", hub) or name.startswith((".", "/", "~")):
        raise InputError(
            f"source: expected digits, cifar10, cifar100, an existing path or ORG/NAME of the Hub, got {name!r}"
        )
    return ImageSource(name, lambda split: _hub(hub, split))


def _digits(split: Split) -> tuple[Pictures, tuple[str, ...]]:
    """Handwritten digits of 8 x 8 px that come with scikit-learn; of each class, every fifth is for testing."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    labels = np.asarray(digits.target)
    turn = np.empty(len(labels), dtype=int)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        turn[members] = np.arange(len(members))
    chosen = (turn % 5 == 4) == (split == "test")
    pixels = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)  # given as 0..16
    return from_array(pixels, labels[chosen], "digits"), tuple(map(str, range(10)))


def _local(path: Path) -> Callable[[Split], Content]:
    if path.suffix == ".npz":
        return functools.partial(npz_splits, path)
    if (path / "train").is_dir() and not list(path.glob("train/*.parquet")):
        return functools.partial(_folders, path)
    if batches := python_batches(path):
        return functools.partial(python_splits, batches)
    if path.is_dir() and list(path.rglob("*.parquet")):
        return functools.partial(parquet_splits, path)
    raise InputError(
        f"source: {path} holds no images in a known form: an .npz file, parquet files, cifar-10-batches-py, "
        "cifar-100-python, or train/CLASS/*.jpg"
    )


def _folders(root: Path, split: Split) -> tuple[Pictures, tuple[str, ...]]:
    """train/CLASS/*.jpg, and beside train one of val, valid, validation, test."""
    held_out = next((name for name in _HELD_OUT if (root / name).is_dir()), None)
    if held_out is None:
        raise InputError(f"{root}: expected a folder val (or test) beside train, found none")
    names = [_subfolders(root / each) for each in ("train", held_out)]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))[0]
        place, other = ("train", held_out) if odd in names[0] else (held_out, "train")
        raise InputError(
            f"{root}: {len(names[0])} classes in train and {len(names[1])} in {held_out}; class {odd!r} is in {place} "
            f"and not in {other}"
        )
    folder, files, labels = root / ("train" if split == "train" else held_out), [], []
    for label, name in enumerate(names[0]):
        images = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in SUFFIXES)
        if not images:
            raise InputError(f"{folder / name}: expected images ({', '.join(SUFFIXES)}) of class {name!r}, found none")
        files += images
        labels += [label] * len(images)
    return FilePictures(files, torch.tensor(labels), root), tuple(names[0])


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _hub(name: str, split: Split) -> Content:
    """A data set of the Hub, or its copy in the local cache; held out is validation, or test where there is none."""
    import datasets

    path, _, config = name.partition(":")
    what = f"source: {name!r} is no local path and cannot be had from the Hub"
    with asking_the_hub(what, "check the name and the network"):
        splits: Any = datasets.load_dataset(path, config or None)
    order = ("train",) if split == "train" else ("validation", "valid", "test")
    chosen = next((each for each in order if each in splits), None)
    if chosen is None:
        raise InputError(f"{name}: expected a split {' or '.join(order)}, it has {', '.join(splits)}")
    rows = splits[chosen]
    image, label = columns_of(rows.column_names, name)
    rows = rows.cast_column(image, datasets.Image(decode=False))
    names = getattr(rows.features[label], "names", None)

    def encoded(index: int) -> bytes | Path:
        value: Mapping[str, Any] = rows[index][image]
        return value["bytes"] if value["bytes"] is not None else Path(value["path"])

    labels = torch.tensor(rows[label][:])
    place = f"the {chosen} split of {name}"
    return pictures_of_rows(encoded, labels, place, rows._fingerprint), None if names is None else tuple(names)


Normalisation = Literal["imagenet", "half", "source"]
STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
USUAL_SIZE = 224
CROP = 0.875  # share of the shorter side that a large image keeps: 224 of 256


@dataclass
class EvalImages(Batches):
    """Images of a labelled set, drawn without replacement, in the model's normalisation, without any augmentation.

    `{"pixel_values": (batch, 3, image_size, image_size), "labels": (batch,)}`, float32 and int64. Images of up to 64 px
    are resized as a whole, larger ones to `image_size` / 0.875 by their shorter side and then cropped in the centre.

    Args:
        source: As for `LitImageData`: `digits`, `cifar10`, `cifar100`, a local path, or `ORG/NAME` of the Hub.
        split: `test` or `train`.
        num_images: Number of images. A larger set begins with the images of a smaller one.
        image_size: Of the model's input, in px; None: the source's, or 224 where its images are large.
        batch_size: Images a batch; the last batch may be smaller.
        seed: Decides which images are drawn, and their order.
        normalisation: `imagenet` or `half` (0.5, 0.5): fixed means and deviations of the channels; `source`: those of
            the source's training images, where they are small.

    Raises:
        InputError: for options out of range, and on the first walk for a source that cannot be read or has too few
            images.
    """

    source: str
    _: KW_ONLY
    split: Split = "test"
    num_images: int = 256
    image_size: int | None = None
    batch_size: int = 32
    seed: int = 0
    normalisation: Normalisation = "source"

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise InputError(f"expected the split train or test, not {self.split!r}")
        if self.normalisation not in (*STATISTICS, "source"):
            raise InputError(f"expected the normalisation imagenet, half or source, not {self.normalisation!r}")
        refuse_below_one(num_images=self.num_images, image_size=self.image_size, batch_size=self.batch_size)

    def images(self) -> tuple[Tensor, Tensor]:
        """All images and their labels; reads the source on the first call."""
        return self._loaded  # (num_images, 3, image_size, image_size), (num_images,)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What each channel is normalised by, as shares of full brightness."""
        return statistics(image_source(self.source), self.normalisation)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        pixels, labels = self.images()
        for images, classes in zip(pixels.split(self.batch_size), labels.split(self.batch_size), strict=True):
            yield {"pixel_values": images.clone(), "labels": classes.clone()}

    def __len__(self) -> int:
        return -(-self.num_images // self.batch_size)

    def content_hash(self) -> str:
        """Sixteen hex digits over pixels, labels and how they are cut into batches."""
        pixels, labels = self.images()
        digest = hashlib.sha256(f"{tuple(pixels.shape)} {self.batch_size}".encode())
        digest.update(pixels.numpy().astype("<f4").tobytes())
        digest.update(labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def _loaded(self) -> tuple[Tensor, Tensor]:
        source = image_source(self.source)
        pictures = source.split(self.split)
        if len(pictures) < self.num_images:
            raise InputError(
                f"{self.source!r} has {len(pictures)} images in its {self.split} split, and num_images is "
                f"{self.num_images}: ask for fewer"
            )
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(self.seed))
        chosen = order[: self.num_images]
        size = image_size(source, self.image_size)
        normalise = Normalise(*statistics(source, self.normalisation))
        return normalise(eval_pixels(pictures, chosen.tolist(), size)), pictures.labels[chosen]


class Normalise:
    """uint8 (or float 0..255) pixels of (images, 3, height, width) to float32, by channel."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = mean, std
        self._shift = torch.tensor(mean).mul(255).view(3, 1, 1)
        self._scale = torch.tensor(std).mul(255).reciprocal().view(3, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        if self._shift.device != pixels.device:
            self._shift, self._scale = self._shift.to(pixels.device), self._scale.to(pixels.device)
        return (pixels.float() - self._shift) * self._scale


def statistics(source: ImageSource, normalisation: Normalisation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, as shares of full brightness.

    Raises:
        InputError: those of a source of large images.
    """
    if normalisation in STATISTICS:
        return STATISTICS[normalisation]
    pictures = source.train
    if not isinstance(pictures, SmallPictures):
        raise InputError(
            f"normalisation: expected imagenet or half, got source, which is known for small images only and "
            f"{source.name} has large ones"
        )
    means, deviations = [], []
    levels = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(3):
        counts = pictures.pixels[:, channel].flatten().bincount(minlength=256).double()
        mean = (counts * levels).sum() / counts.sum()
        means.append(float(mean))
        deviations.append(float(((counts * (levels - mean) ** 2).sum() / counts.sum()).sqrt()))
    if min(deviations) == 0:
        raise InputError(
            f"normalisation: expected imagenet or half, got source, and a channel of {source.name} is constant"
        )
    return tuple(means), tuple(deviations)


def image_size(source: ImageSource, chosen: int | None) -> int:
    """The size of the model's input: where nobody says it, that of small images, and 224 for large ones.

    Raises:
        InputError: small images that are not square.
    """
    if chosen is not None:
        return chosen
    pictures = source.train
    if not isinstance(pictures, SmallPictures):
        return USUAL_SIZE
    height, width = pictures.pixels.shape[2:]
    if height != width:
        raise InputError(
            f"image_size: expected a number of pixels, as the images of {source.name} are {width} x {height} px"
        )
    return height


def eval_pixels(pictures: Pictures, chosen: list[int], size: int) -> Tensor:
    """Images as a model is tested on them, in 0..255: (images, 3, size, size)."""
    if isinstance(pictures, SmallPictures):
        return resized(pictures.batch(chosen), size)
    return torch.stack([_centre(pictures.picture(index), size) for index in chosen])


def resized(pixels: Tensor, size: int) -> Tensor:
    """The same images in another size (bicubic); as they are where it is theirs."""
    if pixels.shape[2:] == (size, size):
        return pixels
    large = F.interpolate(pixels.float(), (size, size), mode="bicubic", antialias=True, align_corners=False)
    return large.clamp(0, 255)


def _centre(image: Image.Image, size: int) -> Tensor:
    shorter = round(size / CROP)
    scale = shorter / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)
