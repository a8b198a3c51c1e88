"""Image sets in files: .npz, parquet, and the pickled batches in which CIFAR is given out."""

import codecs
import hashlib
import json
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_layers.data.pictures import EncodedPictures, Pictures, SmallPictures, from_array, kept_small
from lit_layers.errors import InputError

Split = Literal["train", "test"]
Found = tuple[Pictures, tuple[str, ...] | None]
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "cls")
_ARRAYS = {  # of an .npz: images, labels; as Keras and as MedMNIST name them
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}


def npz_splits(file: Path, split: Split) -> Found:
    """Arrays x_train, y_train, x_test, y_test (or train_images, ...) of one file."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            for images, labels in _ARRAYS[split]:
                if images in arrays and labels in arrays:
                    return from_array(arrays[images], arrays[labels], f"{images} of {file}"), None
            wanted, there = " and ".join(_ARRAYS[split][0]), ", ".join(arrays) or "none"
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"source: {file} is no .npz file of plain arrays ({error})") from error
    raise InputError(f"source: expected arrays {wanted} in {file}, it has {there}")


# ------------------------------------------------------------------------------------------------ parquet


def parquet_splits(folder: Path, split: Split) -> Found:
    """Files named after their split, as on the Hub: train-00000-of-00005.parquet."""
    wanted = ("train",) if split == "train" else ("validation", "valid", "val", "test")
    files = sorted(folder.rglob("*.parquet"))
    for name in wanted:
        mine = [file for file in files if re.match(rf"{name}\b", file.relative_to(folder).as_posix().replace("_", "-"))]
        if mine:
            return _parquet(folder, mine)
    raise InputError(f"source: expected parquet files {wanted[0]}-*.parquet in {folder}, it has {files[0].name}, ...")


def _parquet(folder: Path, files: Sequence[Path]) -> Found:
    import pyarrow
    import pyarrow.parquet

    images, labels, places, digest = [], [], [], hashlib.sha256()
    for file in files:
        try:
            names = pyarrow.parquet.read_schema(file).names
            image, label = columns_of(names, str(file))
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
        places += [(len(images) - 1, row) for row in range(len(column))]
        digest.update(f"{file.name} {file.stat().st_size} ".encode())

    def encoded(index: int) -> bytes | None:
        part, row = places[index]
        return images[part][row].as_py()

    found = pictures_of_rows(encoded, torch.cat(labels), f"{folder} ({files[0].name}, ...)", digest.hexdigest())
    return found, _class_names(folder, files[0])


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
    found = []
    for kind, known in (("images", IMAGE_COLUMNS), ("labels", LABEL_COLUMNS)):
        column = next((name for name in known if name in names), None)
        if column is None:
            raise InputError(
                f"source: expected a column of {kind} named {' or '.join(known)} in {place}, it has {', '.join(names)}"
            )
        found.append(column)
    return found[0], found[1]


def pictures_of_rows(rows: Callable[[int], Any], labels: Tensor, name: str, fingerprint: str) -> Pictures:
    """Encoded images, all decoded at once where they are small."""
    if not len(labels):
        raise InputError(f"source: {name} has no rows")
    return kept_small(EncodedPictures(rows, labels, name, fingerprint), name)


# ------------------------------------------------------------------------------------------------ pickled batches


def python_batches(path: Path) -> Path | None:
    """The folder cifar-10-batches-py or cifar-100-python, at or in a path."""
    for folder in (path, path / "cifar-10-batches-py", path / "cifar-100-python"):
        if (folder / "data_batch_1").is_file() or ((folder / "train").is_file() and (folder / "meta").is_file()):
            return folder
    return None


def python_splits(folder: Path, split: Split) -> Found:
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


def _kind(found: Any) -> str:
    return f"shape {found.pixels.shape}" if isinstance(found, _Array) else type(found).__name__


# All that the batches of CIFAR are made of: a pickle may otherwise name any function, and unpickling would call it.
_HARMLESS = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): codecs.encode,
}


def _unpickled(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            content = _Restricted(stream, encoding="latin1").load()
    except (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        MemoryError,
        pickle.UnpicklingError,
    ) as error:
        raise InputError(f"source: {file} is no batch of images that can be read ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"source: expected a dictionary in {file}, got {type(content).__name__}")
    return content
