"""One split of a labelled image set, and the files that image sets come in: .npz, parquet, CIFAR's pickled batches."""

import codecs
import hashlib
import io
import json
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lit_layers.errors import InputError

SMALL = 64  # px; images up to this size are kept decoded (CIFAR-10: 50,000 x 3 x 32 x 32 B = 0.15 GB)
_BROKEN = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow says of a file it cannot read
# Kinds of pixels that Pillow converts to RGB with nothing cut off.
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")


class Pictures(ABC):
    """Labelled images in a fixed order."""

    labels: Tensor  # (images,) int64

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def picture(self, index: int) -> Image.Image:
        """One image in RGB.

        Raises:
            InputError: one that cannot be decoded, naming its file or row.
        """

    @abstractmethod
    def content_hash(self) -> str:
        """Sixteen hex digits over the images and their labels."""


class SmallPictures(Pictures):
    """Images of one size, held as uint8."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels  # (images, 3, height, width), (images,)

    def picture(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index].permute(1, 2, 0).numpy())

    def batch(self, chosen: Sequence[int], *, pinned: bool = False) -> Tensor:
        """Some images: (chosen, 3, height, width), `pinned` where a GPU takes them from without waiting.

        Whole images are copied, once: an index in brackets goes through them byte by byte, at half the speed or less.
        """
        images = torch.empty(len(chosen), *self.pixels.shape[1:], dtype=self.pixels.dtype, pin_memory=pinned)
        return torch.index_select(self.pixels, 0, torch.tensor(chosen, dtype=torch.long), out=images)

    def content_hash(self) -> str:
        """Over every pixel."""
        digest = hashlib.sha256(f"{tuple(self.pixels.shape)}".encode())
        digest.update(self.pixels.contiguous().numpy().data)
        digest.update(self.labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]


class FilePictures(Pictures):
    """Image files, opened when they are asked for."""

    def __init__(self, files: Sequence[Path], labels: Tensor, root: Path) -> None:
        self.files, self.labels, self.root = files, labels, root

    def picture(self, index: int) -> Image.Image:
        return decoded(self.files[index], str(self.files[index]))

    def content_hash(self) -> str:
        """Over names, sizes and labels, as reading 150 GB would take hours."""
        digest = hashlib.sha256()
        for file, label in zip(self.files, self.labels.tolist(), strict=True):
            digest.update(f"{file.relative_to(self.root)} {file.stat().st_size} {label}\n".encode())
        return digest.hexdigest()[:16]


class EncodedPictures(Pictures):
    """Rows of encoded bytes (a parquet file, a data set of the Hub), decoded when they are asked for."""

    def __init__(self, rows: Any, labels: Tensor, name: str, fingerprint: str) -> None:
        self.rows, self.labels, self.name, self.fingerprint = rows, labels, name, fingerprint

    def picture(self, index: int) -> Image.Image:
        return decoded(self.rows(index), f"row {index} of {self.name}")

    def content_hash(self) -> str:
        """Over the name of the data, its fingerprint and the labels."""
        facts = f"{self.name} {self.fingerprint} ".encode()
        return hashlib.sha256(facts + self.labels.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def decoded(source: Path | bytes | None, name: str) -> Image.Image:
    """Return an image in RGB, turned upright as its EXIF data ask for, from a file or its bytes.

    Sixteen bits are scaled to eight. Transparency is dropped, as timm and torchvision do.

    Raises:
        InputError: what cannot be decoded, by its name; numbers without a known range.
    """
    try:
        with Image.open(io.BytesIO(source or b"") if not isinstance(source, Path) else source) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16") or (image.mode == "I" and opened.format in ("PNG", "PPM")):
                image = Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))  # convert cuts off at 255
            if image.mode in _EIGHT_BITS:
                return image.convert("RGB")
            kind = image.mode
    except _BROKEN as error:
        raise InputError(
            f"{name} is no image that can be read ({' '.join(str(error).split())}): repair or remove it"
        ) from error
    raise InputError(f"{name} has pixels of the kind {kind}, whose range is not known: save it in RGB")


def pictures_of_rows(rows: Callable[[int], Any], labels: Tensor, name: str, fingerprint: str) -> Pictures:
    """Encoded images; as one tensor where they are small, which is judged by the first.

    Raises:
        InputError: no row, or a small image of another size than the first, by its row.
    """
    if not len(labels):
        raise InputError(f"source: {name} has no rows")
    pictures = EncodedPictures(rows, labels, name, fingerprint)
    width, height = pictures.picture(0).size
    if max(width, height) > SMALL:
        return pictures
    pixels = np.empty((len(pictures), height, width, 3), dtype=np.uint8)
    for index in range(len(pictures)):
        image = pictures.picture(index)
        if image.size != (width, height):
            size = f"{image.size[0]} x {image.size[1]}"
            raise InputError(
                f"row {index} of {name} is {size} px where the first image is {width} x {height}: images of up to "
                f"{SMALL} px must be of one size"
            )
        pixels[index] = np.asarray(image)
    return SmallPictures(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), labels)


def from_array(images: Any, labels: Any, name: str) -> SmallPictures:
    """Images in an array (images, height, width) or (images, height, width, channels) of uint8.

    Raises:
        InputError: another shape or type, or labels that do not go with the images.
    """
    pixels, numbers = np.asarray(images), np.asarray(labels).reshape(-1)
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] not in (1, 3)):
        raise InputError(
            f"{name}: expected images as uint8 of shape (images, height, width[, 1 or 3]), got {pixels.dtype} of "
            f"shape {pixels.shape}"
        )
    if len(numbers) != len(pixels) or not np.issubdtype(numbers.dtype, np.integer):
        raise InputError(
            f"{name}: expected a whole number as label of each of {len(pixels)} images, got {numbers.dtype} of shape "
            f"{numbers.shape}"
        )
    grey = pixels[..., None] if pixels.ndim == 3 else pixels
    colour = np.ascontiguousarray(np.broadcast_to(grey, (*grey.shape[:3], 3)).transpose(0, 3, 1, 2))
    return SmallPictures(torch.from_numpy(colour), torch.from_numpy(numbers.astype(np.int64)))


Split = Literal["train", "test"]
Content = tuple[Pictures, tuple[str, ...] | None]  # of a split, with the names of its classes
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "cls")
_ARRAYS = {  # of an .npz: images, labels; as Keras and as MedMNIST name them
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}


# ------------------------------------------------------------------------------------------------ NumPy


def npz_splits(file: Path, split: Split) -> Content:
    """Arrays x_train, y_train, x_test, y_test (or train_images, ...) of one file."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            for images, labels in _ARRAYS[split]:
                if images in arrays and labels in arrays:
                    return from_array(arrays[images], arrays[labels], f"{images} of {file}"), None
            expected, there = " and ".join(_ARRAYS[split][0]), ", ".join(arrays) or "none"
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"source: {file} is no .npz file of plain arrays ({error})") from error
    raise InputError(f"source: expected arrays {expected} in {file}, it has {there}")


# ------------------------------------------------------------------------------------------------ parquet


def parquet_splits(folder: Path, split: Split) -> Content:
    """Files named after their split, as on the Hub: train-00000-of-00005.parquet."""
    names = ("train",) if split == "train" else ("validation", "valid", "val", "test")
    files = sorted(folder.rglob("*.parquet"))
    for name in names:
        named = [
            file for file in files if re.match(rf"{name}\b", file.relative_to(folder).as_posix().replace("_", "-"))
        ]
        if named:
            return _parquet(folder, named)
    raise InputError(f"source: expected parquet files {names[0]}-*.parquet in {folder}, it has {files[0].name}, ...")


def _parquet(folder: Path, files: Sequence[Path]) -> Content:
    import pyarrow
    import pyarrow.parquet

    images, labels, digest = [], [], hashlib.sha256()
    for file in files:
        try:
            image, label = columns_of(pyarrow.parquet.read_schema(file).names, str(file))
            table = pyarrow.parquet.read_table(file, columns=[image, label])
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(f"source: {file} is no parquet file that can be read ({error})") from error
        column = table[image].combine_chunks()
        if pyarrow.types.is_struct(column.type):
            column = column.field("bytes")
        if not pyarrow.types.is_binary(column.type) or not pyarrow.types.is_integer(table[label].type):
            raise InputError(
                f"source: expected encoded images in column {image!r} and whole numbers in column {label!r} of {file}, "
                f"got {column.type} and {table[label].type}"
            )
        if table[label].null_count:
            row = table[label].to_pylist().index(None)
            raise InputError(f"source: row {row} of {file} has no label")
        images.append(column)
        labels.append(torch.from_numpy(table[label].to_numpy().astype(np.int64)))
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
    rows = pyarrow.chunked_array(images)
    name = f"{folder} ({files[0].name}, ...)"
    pictures = pictures_of_rows(lambda index: rows[index].as_py(), torch.cat(labels), name, digest.hexdigest())
    return pictures, _class_names(folder, files[0])


def _class_names(folder: Path, file: Path) -> tuple[str, ...] | None:
    """From labels.json beside the files, or what `datasets` wrote into them."""
    import pyarrow.parquet

    if (folder / "labels.json").is_file():
        names = json.loads((folder / "labels.json").read_text())
        if isinstance(names, list):
            return tuple(map(str, names))
    written = (pyarrow.parquet.read_schema(file).metadata or {}).get(b"huggingface")
    features = json.loads(written)["info"]["features"] if written else {}
    names = next((each["names"] for each in features.values() if isinstance(each, dict) and "names" in each), None)
    return tuple(names) if names else None


def columns_of(names: Sequence[str], place: str) -> tuple[str, str]:
    """The columns of images and of labels.

    Raises:
        InputError: where one of them is missing.
    """
    columns = []
    for kind, usual in (("images", IMAGE_COLUMNS), ("labels", LABEL_COLUMNS)):
        column = next((name for name in usual if name in names), None)
        if column is None:
            raise InputError(
                f"source: expected a column of {kind} named {' or '.join(usual)} in {place}, it has {', '.join(names)}"
            )
        columns.append(column)
    return columns[0], columns[1]


# ------------------------------------------------------------------------------------------------ pickled batches


def python_batches(path: Path) -> Path | None:
    """The folder cifar-10-batches-py or cifar-100-python, at or in a path."""
    for folder in (path, path / "cifar-10-batches-py", path / "cifar-100-python"):
        if (folder / "data_batch_1").is_file() or ((folder / "train").is_file() and (folder / "meta").is_file()):
            return folder
    return None


def python_splits(folder: Path, split: Split) -> Content:
    """CIFAR as its authors give it out and torchvision keeps it."""
    ten = (folder / "data_batch_1").is_file()
    training = [f"data_batch_{number}" for number in range(1, 6)] if ten else ["train"]
    held_out = ["test_batch"] if ten else ["test"]
    label, meta, names = (
        ("labels", "batches.meta", "label_names") if ten else ("fine_labels", "meta", "fine_label_names")
    )
    parts = [_batch(folder / name, label) for name in (training if split == "train" else held_out)]
    pixels = torch.cat([part.pixels for part in parts])
    classes = _unpickled(folder / meta).get(names) if (folder / meta).is_file() else None
    labels = torch.cat([part.labels for part in parts])
    return SmallPictures(pixels, labels), tuple(map(str, classes)) if classes else None


def _batch(file: Path, label: str) -> SmallPictures:
    content = _unpickled(file)
    data, labels = content.get("data"), content.get(label)
    if not isinstance(data, _Array) or data.pixels.ndim != 2 or data.pixels.shape[1] != 3072:
        raise InputError(f"source: expected data of (images, 3072) uint8 in {file}, got {_kind(data)}")
    data = data.pixels
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(each) is int for each in labels):
        raise InputError(f"source: expected {label!r}, a whole number for each of {len(data)} images, in {file}")
    return SmallPictures(torch.from_numpy(data.reshape(-1, 3, 32, 32)), torch.tensor(labels))


class _Restricted(pickle.Unpickler):
    """Builds plain containers and arrays of bytes, and refuses whatever else a pickle names."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _HARMLESS:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, and batches of images need no such thing"
            )
        return _HARMLESS[module_name, global_name]


class _Array:
    """What stands in for an array while a pickle is read: NumPy's own would believe any shape and type."""

    pixels: np.ndarray = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        content = data.encode("latin1") if isinstance(data, str) else data
        if not isinstance(kind, _Kind) or kind.name not in ("u1", "uint8") or by_columns:
            raise pickle.UnpicklingError("it holds an array of another type than bytes in rows")
        self.pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


class _Kind:
    """What stands in for an array's type."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which bytes have none of."""


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _kind(data: Any) -> str:
    return f"shape {data.pixels.shape}" if isinstance(data, _Array) else type(data).__name__


# All that the batches of CIFAR are made of: a pickle may otherwise name any function, and unpickling would call it.
_HARMLESS = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): codecs.encode,
}


# What a damaged pickle can end in.
_DAMAGE = (OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, MemoryError)


def _unpickled(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            content = _Restricted(stream, encoding="latin1").load()
    except (*_DAMAGE, pickle.UnpicklingError) as error:
        raise InputError(f"source: {file} is no batch of images that can be read ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"source: expected a dictionary in {file}, got {type(content).__name__}")
    return content
