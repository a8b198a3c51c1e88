"""Labelled image sets by name: the embedded digits, CIFAR, local files, data sets of the Hub."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lit_layers.data.picture_files import (
    columns_of,
    npz_splits,
    parquet_splits,
    pictures_of_rows,
    python_batches,
    python_splits,
)
from lit_layers.data.pictures import FilePictures, Pictures, from_array
from lit_layers.downloads import HUB_ERRORS, reason
from lit_layers.errors import InputError

Split = Literal["train", "test"]
HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_HELD_OUT = ("val", "valid", "validation", "test")


@dataclass(frozen=True)
class ImageSource:
    """A labelled image set with a train and a test split; a split is read when it is asked for."""

    name: str
    read: Callable[[Split], tuple[Pictures, tuple[str, ...] | None]]

    @cached_property
    def _train(self) -> tuple[Pictures, tuple[str, ...] | None]:
        return self._checked("train")

    @cached_property
    def _test(self) -> tuple[Pictures, tuple[str, ...] | None]:
        return self._checked("test")

    @property
    def train(self) -> Pictures:
        return self._train[0]

    @property
    def test(self) -> Pictures:
        return self._test[0]

    def split(self, name: Split) -> Pictures:
        return self.train if name == "train" else self.test

    @property
    def num_classes(self) -> int:
        return int(self.train.labels.max()) + 1

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where the data has none."""
        return self._train[1] or tuple(map(str, range(self.num_classes)))

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

    def _checked(self, split: Split) -> tuple[Pictures, tuple[str, ...] | None]:
        pictures, names = self.read(split)
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
    path = Path(name).expanduser()
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

    found: Any = load_digits()
    labels = np.asarray(found.target)
    turn = np.empty(len(labels), dtype=int)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        turn[members] = np.arange(len(members))
    chosen = (turn % 5 == 4) == (split == "test")
    pixels = np.rint(found.images[chosen] * (255 / 16)).astype(np.uint8)  # given as 0..16
    return from_array(pixels, labels[chosen], "digits"), tuple(map(str, range(10)))


def _local(path: Path) -> Callable[[Split], tuple[Pictures, tuple[str, ...] | None]]:
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
        found = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in SUFFIXES)
        if not found:
            raise InputError(f"{folder / name}: expected images ({', '.join(SUFFIXES)}) of class {name!r}, found none")
        files += found
        labels += [label] * len(found)
    return FilePictures(files, torch.tensor(labels), root), tuple(names[0])


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _hub(name: str, split: Split) -> tuple[Pictures, tuple[str, ...] | None]:
    """A data set of the Hub, or its copy in the local cache; held out is validation, or test where there is none."""
    import datasets

    path, _, config = name.partition(":")
    try:
        found: Any = datasets.load_dataset(path, config or None)
    except (*HUB_ERRORS, RuntimeError) as error:
        raise InputError(
            f"source: {name!r} is no local path and cannot be had from the Hub ({reason(error)}): check the name and "
            "the network"
        ) from error
    order = ("train",) if split == "train" else ("validation", "valid", "test")
    chosen = next((each for each in order if each in found), None)
    if chosen is None:
        raise InputError(f"{name}: expected a split {' or '.join(order)}, it has {', '.join(found)}")
    rows = found[chosen]
    image, label = columns_of(rows.column_names, name)
    rows = rows.cast_column(image, datasets.Image(decode=False))
    names = getattr(rows.features[label], "names", None)

    def encoded(index: int) -> bytes | Path:
        value: Mapping[str, Any] = rows[index][image]
        return value["bytes"] if value["bytes"] is not None else Path(value["path"])

    labels = torch.tensor(rows[label][:])
    place = f"the {chosen} split of {name}"
    return pictures_of_rows(encoded, labels, place, rows._fingerprint), None if names is None else tuple(names)
