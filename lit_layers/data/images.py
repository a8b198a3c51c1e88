"""Labelled image sets by name, and fixed batches of images in the model's size and normalisation."""

import functools
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.files.hub import hub_errors
from lit_layers.identity import sha16
from lit_layers.schema import refuse_below_one

HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "cls")
# Images of up to this size in px are small: if they come from parquet files or the Hub, they stay decoded in memory.
# CIFAR-10 takes 50,000 x 3 x 32 x 32 B = 0.15 GB. Images in folders of files always count as large.
SMALL = 64
_HELD_OUT = ("val", "valid", "validation", "test")
# Errors that Pillow raises for unreadable files.
_BROKEN = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
# Pillow modes of images with 8 bits per value or fewer. They can be converted to RGB without clipping.
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")


@dataclass(eq=False)
class SmallPictures:
    """Labelled images of one size in a fixed order, held as uint8."""

    pixels: Tensor  # (images, 3, height, width)
    labels: Tensor  # (images,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index].permute(1, 2, 0).numpy())

    def batch(self, chosen: Sequence[int], *, pinned: bool = False) -> Tensor:
        """Return the images with the indices `chosen`, (chosen, 3, height, width).

        With `pinned` they are in pinned memory, for a copy to a GPU. `index_select` is used because indexing with
        brackets copies byte by byte and takes at least twice as long.
        """
        images = torch.empty(len(chosen), *self.pixels.shape[1:], dtype=self.pixels.dtype, pin_memory=pinned)
        return torch.index_select(self.pixels, 0, torch.tensor(chosen, dtype=torch.long), out=images)

    def content_hash(self) -> str:
        """Return a hash of all pixels and labels."""
        labels = self.labels.numpy().astype("<i8").tobytes()
        return sha16(f"{tuple(self.pixels.shape)}", self.pixels.contiguous().numpy().data, labels)


@dataclass(eq=False)
class EncodedPictures:
    """Labelled images that are decoded on access: files, or rows of a parquet file or a Hub data set."""

    rows: Callable[[int], bytes | Path]
    labels: Tensor  # (images,) int64
    name: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Image.Image:
        """Return one image in RGB.

        Raises:
            InputError: The image cannot be decoded; the message names its file or row.
        """
        row = self.rows(index)
        return decoded(row, str(row) if isinstance(row, Path) else f"row {index} of {self.name}")

    def content_hash(self) -> str:
        """Return a hash of the name, the labels and the fingerprint, which identifies the image files.

        Pixels are not hashed, because reading 150 GB of images would take hours.
        """
        return sha16(f"{self.name} {self.fingerprint} ", self.labels.numpy().astype("<i8").tobytes())


Pictures = SmallPictures | EncodedPictures


def decoded(source: Path | bytes | None, name: str) -> Image.Image:
    """Decode a file or its bytes to an RGB image, turned upright according to its EXIF data.

    Transparency is dropped, as in timm and torchvision.
    """
    try:
        with Image.open(io.BytesIO(source or b"") if not isinstance(source, Path) else source) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode in _EIGHT_BITS:
                return image.convert("RGB")
            kind = image.mode
    except _BROKEN as error:
        raise InputError(f"{name} is no image that can be read ({' '.join(str(error).split())})") from error
    raise InputError(f"{name} has pixels of the kind {kind}, not of 8 bits in RGB or grey: save it in RGB")


def _decoded_if_small(pictures: EncodedPictures) -> Pictures:
    """Decode all images of a split to one tensor if the first is small; otherwise return `pictures` unchanged."""
    width, height = pictures.picture(0).size
    if max(width, height) > SMALL:
        return pictures
    pixels = np.empty((len(pictures), height, width, 3), dtype=np.uint8)
    for index in range(len(pictures)):
        image = pictures.picture(index)
        if image.size != (width, height):
            sizes = f"{image.size[0]} x {image.size[1]} px where the first image is {width} x {height}"
            raise InputError(f"row {index} of {pictures.name} is {sizes}: small images must be of one size")
        pixels[index] = np.asarray(image)
    return SmallPictures(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), pictures.labels)


Split = Literal["train", "test"]
Content = tuple[Pictures, tuple[str, ...] | None]  # the images of a split, and the class names or None


class ImageSource:
    """A labelled image set with a train and a test split; each split is read once, on first use."""

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
        """Return the class names, or the class indices as text if the data has no names."""
        return self._content("train")[1] or tuple(map(str, range(self.num_classes)))

    def check(self) -> None:
        """Read both splits, and raise InputError if a class is missing in one of them."""
        names = self.classes
        for split in (self.train, self.test):
            if odd := sorted(set(split.labels.unique().tolist()) ^ set(range(len(names)))):
                name = names[odd[0]] if odd[0] < len(names) else odd[0]
                raise InputError(f"{self.name}: class {name!r} is not in both splits: leave it out")

    def _checked(self, split: Split, pictures: Pictures, names: tuple[str, ...] | None) -> Content:
        highest = int(pictures.labels.max()) if names is None else len(names) - 1
        for row, label in enumerate(pictures.labels.tolist()):
            if not 0 <= label <= highest:
                raise InputError(f"{self.name}: row {row} of {split} has {label}, expected a label from 0 to {highest}")
        return pictures, names


@functools.lru_cache(maxsize=3)  # cached, so that training, analyses and probes share the data
def image_source(name: str) -> ImageSource:
    """Return the image set `digits`, `cifar10`, `cifar100`, a local path, or `ORG/NAME[:CONFIG]` of the Hub.

    A path is a folder of parquet files, or a folder with `train/CLASS/*.jpg` and `val/CLASS/*.jpg`. Nothing is
    read yet.

    Raises:
        InputError: The name is none of these, or the folder holds no images in a known layout.
    """
    if name == "digits":
        return ImageSource(name, _digits)
    path = Path(name).expanduser()
    if (path / "train").is_dir() and not list(path.glob("train/*.parquet")):
        return ImageSource(name, functools.partial(_folders, path))
    if path.exists():
        if not list(path.rglob("*.parquet")):
            raise InputError(f"source: {path} holds no parquet files and no train/CLASS/*.jpg (see docs/images.md)")
        return ImageSource(name, functools.partial(_data_set, str(path)))
    hub = HUB_NAMES.get(name, name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", hub) or name.startswith((".", "/", "~")):
        raise InputError(f"source: expected digits, cifar10, cifar100, an existing path or ORG/NAME, got {name!r}")
    return ImageSource(name, functools.partial(_data_set, hub))


def _digits(split: Split) -> Content:
    """Return a split of scikit-learn's handwritten digits, 8 x 8 px.

    Every fifth image of a class is in the test split.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    labels = np.asarray(digits.target)
    nth = np.empty(len(labels), dtype=int)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        nth[members] = np.arange(len(members))
    chosen = (nth % 5 == 4) == (split == "test")
    grey = torch.from_numpy(np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8))  # scikit-learn stores 0..16
    pictures = SmallPictures(grey[:, None].repeat(1, 3, 1, 1), torch.from_numpy(labels[chosen].astype(np.int64)))
    return pictures, tuple(map(str, range(10)))


def _folders(root: Path, split: Split) -> Content:
    """Read a split from an image folder with files such as train/CLASS/1.jpg.

    The split `test` is read from a folder val, valid, validation or test, the first that exists.
    """
    from torchvision.datasets import ImageFolder

    held_out = next((name for name in _HELD_OUT if (root / name).is_dir()), None)
    if held_out is None:
        raise InputError(f"{root}: expected a folder val (or test) beside train, found none")
    try:
        folders = {"train": ImageFolder(root / "train"), "test": ImageFolder(root / held_out)}
    except FileNotFoundError as error:
        raise InputError(f"{root}: {error}") from error
    names = [folder.classes for folder in folders.values()]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))[0]
        raise InputError(f"{root}: class {odd!r} is not in both train and {held_out}")
    files = [Path(file) for file, _ in folders[split].samples]
    labels = torch.tensor([label for _, label in folders[split].samples])
    return EncodedPictures(files.__getitem__, labels, split, _listing(root, files)), tuple(names[0])


def _listing(root: Path, files: Sequence[Path]) -> str:
    return sha16("".join(f"{file.relative_to(root)} {file.stat().st_size}\n" for file in files))


def _data_set(name: str, split: Split) -> Content:
    """Read a split of a Hub data set or of parquet files in a folder.

    If the data has a validation split, it is used as the split `test`.
    """
    from datasets import Image as EncodedImage
    from datasets import exceptions, load_dataset

    is_local, (path, _, config) = Path(name).is_dir(), name.partition(":")
    what, advice = f"source: {name!r} is no local path and cannot be had from the Hub", "check the name and the network"
    if is_local:
        what, advice = f"source: the parquet files of {name} cannot be read", "copy them again"
    with hub_errors(what, advice):
        try:
            where: Any = ("parquet", None, name) if is_local else (path, config or None)
            splits: Any = load_dataset(*where)
        except exceptions.DatasetGenerationError as error:
            raise OSError(str(error.__cause__)) from error
    order = ("train",) if split == "train" else ("validation", "valid", "test")
    chosen = next((each for each in order if each in splits), None)
    if chosen is None:
        raise InputError(f"{name}: expected a split {' or '.join(order)}, it has {', '.join(splits)}")
    rows, origin = splits[chosen], f"the {chosen} split of {name}"
    image, label = _columns(rows.column_names, origin)
    names, labels = getattr(rows.features[label], "names", None), rows[label][:]
    if odd := [each for each in labels if not isinstance(each, int)]:
        raise InputError(f"source: {origin} has the label {odd[0]!r}: expected a whole number")
    images = rows.cast_column(image, EncodedImage(decode=False)).data.column(image)

    def encoded(index: int) -> bytes | Path:
        value = images[index].as_py()
        return value["bytes"] if value["bytes"] is not None else Path(value["path"])

    # Identify local files by their names and sizes. The fingerprint of `datasets` contains modification times, so a
    # copy of the files would have another one.
    fingerprint = _listing(Path(name), sorted(Path(name).rglob("*.parquet"))) if is_local else rows._fingerprint
    pictures = EncodedPictures(encoded, torch.tensor(labels), origin, fingerprint)
    return _decoded_if_small(pictures), None if names is None else tuple(names)


def _columns(names: Sequence[str], origin: str) -> tuple[str, str]:
    """Return the names of the image column and the label column of a data set, given its column names."""
    columns = []
    for kind, usual in (("images", IMAGE_COLUMNS), ("labels", LABEL_COLUMNS)):
        column = next((name for name in usual if name in names), None)
        if column is None:
            raise InputError(f"source: expected {' or '.join(usual)} ({kind}) in {origin}, it has {', '.join(names)}")
        columns.append(column)
    return columns[0], columns[1]


Normalisation = Literal["imagenet", "half", "source"]
STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
USUAL_SIZE = 224
CROP = 0.875  # side of the centre crop divided by the image's shorter side, for large images: 224 / 256


@dataclass
class EvalImages(Batches):
    """Images of a labelled set, drawn without replacement, normalised, without augmentation.

    A batch is `{"pixel_values": (batch, 3, image_size, image_size), "labels": (batch,)}`, float32 and int64. Images of
    up to 64 px are resized as a whole. For larger images, and for images in folders of files, the shorter side is
    resized to `image_size` / 0.875, and the centre is cropped.

    Args:
        source: As in `LitImageData`: `digits`, `cifar10`, `cifar100`, a local path, or `ORG/NAME` of the Hub.
        split: `test` or `train`.
        num_images: Number of images. A larger set begins with the images of a smaller one.
        image_size: Side of the model's input in px. None means the size of the source's images, or 224 if they are
            larger than 64 px or in folders of files.
        batch_size: Images per batch; the last batch may be smaller.
        seed: Decides which images are drawn, and their order.
        normalisation: `imagenet` and `half` (mean and standard deviation 0.5) normalise each channel by fixed numbers.
            `source` uses the mean and standard deviation of the source's training images. It requires images of up to
            64 px that are not in folders of files.

    Raises:
        InputError: An option is out of range. On the first iteration: the source cannot be read or has too few images.
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
        refuse_below_one(num_images=self.num_images, image_size=self.image_size, batch_size=self.batch_size)

    def images(self) -> tuple[Tensor, Tensor]:
        """Return all images and their labels. The first call reads the source."""
        return self._loaded  # (num_images, 3, image_size, image_size), (num_images,)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the means and the standard deviations that normalise the channels, as fractions of full brightness."""
        return statistics(image_source(self.source), self.normalisation)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        pixels, labels = self.images()
        for images, classes in zip(pixels.split(self.batch_size), labels.split(self.batch_size), strict=True):
            yield {"pixel_values": images.clone(), "labels": classes.clone()}

    def __len__(self) -> int:
        return -(-self.num_images // self.batch_size)

    def content_hash(self) -> str:
        """Return a hash of the pixels, the labels and the batch size, as 16 hex digits."""
        pixels, labels = self.images()
        values = pixels.numpy().astype("<f4").tobytes(), labels.numpy().astype("<i8").tobytes()
        return sha16(f"{tuple(pixels.shape)} {self.batch_size}", *values)

    @functools.cached_property
    def _loaded(self) -> tuple[Tensor, Tensor]:
        source = image_source(self.source)
        pictures = source.split(self.split)
        if len(pictures) < self.num_images:
            there = f"{self.source!r} has {len(pictures)} images in its {self.split} split"
            raise InputError(f"{there}, and num_images is {self.num_images}: ask for fewer")
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(self.seed))
        chosen = order[: self.num_images]
        size = image_size(source, self.image_size)
        normalise = Normalise(*statistics(source, self.normalisation))
        return normalise(eval_pixels(pictures, chosen.tolist(), size)), pictures.labels[chosen]


class Normalise:
    """A transform that normalises each channel of images, (images, 3, height, width), from 0..255 to float32."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = mean, std
        self._shift = torch.tensor(mean).mul(255).view(3, 1, 1)
        self._scale = torch.tensor(std).mul(255).reciprocal().view(3, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        if self._shift.device != pixels.device:
            self._shift, self._scale = self._shift.to(pixels.device), self._scale.to(pixels.device)
        return (pixels.float() - self._shift) * self._scale


def statistics(source: ImageSource, normalisation: Normalisation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the means and the standard deviations that a normalisation uses for the three channels.

    Means and standard deviations are fractions of full brightness.
    """
    if normalisation in STATISTICS:
        return STATISTICS[normalisation]
    pictures = source.train
    if not isinstance(pictures, SmallPictures):
        raise InputError(f"normalisation: the images of {source.name} are large: take imagenet or half")
    means, stds = [], []
    levels = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(3):
        counts = pictures.pixels[:, channel].flatten().bincount(minlength=256).double()
        mean = (counts * levels).sum() / counts.sum()
        means.append(float(mean))
        stds.append(float(((counts * (levels - mean) ** 2).sum() / counts.sum()).sqrt()))
    return tuple(means), tuple(stds)


def image_size(source: ImageSource, chosen: int | None) -> int:
    """Return the side of the model's input: `chosen` or, if None, the size of small images and 224 for large ones."""
    if chosen is not None:
        return chosen
    pictures = source.train
    if not isinstance(pictures, SmallPictures):
        return USUAL_SIZE
    height, width = pictures.pixels.shape[2:]
    if height != width:
        raise InputError(f"image_size: name one, as images of {source.name} have {width} x {height} px")
    return height


def eval_pixels(pictures: Pictures, chosen: list[int], size: int) -> Tensor:
    """Return the images with the indices `chosen`, resized and cropped for evaluation.

    The result is (images, 3, size, size) with values in 0..255.
    """
    if isinstance(pictures, SmallPictures):
        return resized(pictures.batch(chosen), size)
    return torch.stack([_crop(pictures.picture(index), size) for index in chosen])


def resized(pixels: Tensor, size: int) -> Tensor:
    """Resize images (bicubic), or return them unchanged if they have this size."""
    if pixels.shape[2:] == (size, size):
        return pixels
    out = F.interpolate(pixels.float(), (size, size), mode="bicubic", antialias=True, align_corners=False)
    return out.clamp(0, 255)


def _crop(image: Image.Image, size: int) -> Tensor:
    shorter = round(size / CROP)
    scale = shorter / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)
