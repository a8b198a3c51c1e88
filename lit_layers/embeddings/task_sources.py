"""Where the data of a task come from: local data in their own layout, a mirror of the Hub, or the Hub."""

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers.embeddings.local_tasks import open_copy
from lit_layers.embeddings.task_list import TaskSpec
from lit_layers.errors import InputError
from lit_layers.tasks.local_copies import MAPPING, LocalCopy, local_copies

INSTALL = "mteb is not installed: pip install lit_layers[eval]"


def the_library() -> Any:
    """The package mteb, imported now: that takes seconds.

    Raises:
        InputError: it is not installed.
    """
    try:
        import mteb
    except ImportError as error:
        raise InputError(INSTALL) from error
    return mteb


@dataclass(frozen=True)
class Sources:
    """Where to look, in this order: `folder`, `mirror`, the Hub.

    Args:
        folder: local data, whose `tasks.yaml` says where the tasks lie.
        mirror: a folder with a copy of data sets of the Hub, each in ORGANIZATION/NAME.
    """

    folder: Path | None = None
    mirror: Path | None = None

    def check(self) -> None:
        """Refuses a folder that is not there."""
        for name in ("folder", "mirror"):
            place: Path | None = getattr(self, name)
            if place is not None and not place.is_dir():
                raise InputError(f"{name}: expected a folder with data, {place} is none")
        self._copies()

    def local_names(self) -> list[str]:
        """The tasks whose files lie in the folder, all of them."""
        return [name for name, copy in self._copies().items() if not copy.missing()]

    def place(self, spec: TaskSpec) -> str:
        """How the data of a task are had: "folder", "mirror" or "hub".

        Raises:
            InputError: data that can only be local and are not there.
        """
        copy = self._copies().get(spec.name)
        if copy is not None and not copy.missing():
            return "folder"
        if not spec.official:
            missing = copy.missing()[0] if copy is not None else f"an entry in {MAPPING}"
            raise InputError(f"{spec.name}: expected local data with {missing}: name them with --folder")
        return "mirror" if self.mirror is not None and self._mirrored(spec).is_dir() else "hub"

    def data_hash(self, spec: TaskSpec) -> str | None:
        """Sixteen hex digits over the data, or over the revision of the Hub; None where there are none."""
        try:
            place = self.place(spec)
        except InputError:
            return None
        if place == "folder":
            return _hash_of(self._copies()[spec.name].paths())
        if place == "mirror":
            folder = self._mirrored(spec)
            return _hash_of(sorted(path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts))
        return hashlib.sha256(repr(sorted(_official(spec.name).metadata.dataset.items())).encode()).hexdigest()[:16]

    def open(self, spec: TaskSpec, *, seed: int) -> Any:
        """The task of mteb with its data.

        Raises:
            InputError: data that are not there.
        """
        place = self.place(spec)
        if place == "folder":
            return open_copy(spec, self._copies()[spec.name], seed)
        task = type(_official(spec.name))(seed=seed)
        task.hf_subsets = [spec.subset]
        if place == "mirror":
            dataset = {**task.metadata.dataset, "path": str(self._mirrored(spec))}
            task.metadata = task.metadata.model_copy(update={"dataset": dataset})
        _load(task, spec, place)
        return task

    def describe(self, spec: TaskSpec) -> dict[str, Any]:
        """Where the data come from and how they differ from the official ones, for the results."""
        place = self.place(spec)
        said: dict[str, Any] = {"source": place}
        if spec.official:
            said["dataset"] = dict(_official(spec.name).metadata.dataset)
        if place == "folder" and (difference := self._copies()[spec.name].difference):
            said["difference"] = difference
        return said

    def _copies(self) -> dict[str, LocalCopy]:
        return {} if self.folder is None else local_copies("mteb", self.folder)

    def _mirrored(self, spec: TaskSpec) -> Path:
        assert self.mirror is not None
        return self.mirror / _official(spec.name).metadata.dataset["path"]


def _load(task: Any, spec: TaskSpec, place: str) -> None:
    """Has mteb read the data of a task."""
    from datasets.exceptions import DatasetNotFoundError

    try:
        with no_bars():
            task.load_data()
    except (DatasetNotFoundError, OSError, ValueError, RuntimeError, KeyError) as error:
        path = task.metadata.dataset["path"]
        said = " ".join(str(error).split())[:200]
        advice = "mend the mirror" if place == "mirror" else "check the network, or name a --folder or --mirror with it"
        raise InputError(f"{spec.name}: its data set {path} cannot be had ({said}): {advice}") from error


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """`datasets` draws no progress inside."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


@functools.cache
def _official(name: str) -> Any:
    return the_library().get_task(name)


def _hash_of(files: Iterable[Path]) -> str:
    return hashlib.sha256("/".join(_of_file(path, path.stat().st_mtime_ns) for path in files).encode()).hexdigest()[:16]


@functools.cache
def _of_file(path: Path, changed: int) -> str:
    with path.open("rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}"
