"""The corpus every Python carries: the standard library's source and the topics of `pydoc`."""

import hashlib
import os
import platform
import runpy
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_layers.data.corpora import SPLITS, Document, Documents, Source, digest, in_share
from lit_layers.errors import InputError

# Installed packages, tests, tables, and parts that distributions often leave out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings"}
LEFT_OUT |= {"turtledemo", "pydoc_data"}  # the topics of the latter are read one by one
MACHINE_MADE = "_sysconfigdata"  # written when Python was built: another file on every machine
TOPICS = Path("pydoc_data/topics.py")
ENOUGH = 1_000_000  # bytes


class PythonSources(Source):
    """Documents are files, and single topics of `pydoc_data.topics`; the split goes by a hash of the path."""

    splits = SPLITS

    def __init__(self, *, validation: float, root: Path | None = None):
        self.validation = validation
        self.root = Path(root or sysconfig.get_paths()["stdlib"])

    @cached_property
    def files(self) -> list[Path]:
        """Paths below the root, sorted; raises where this Python comes without sources."""
        found = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith("config-")]
            kept = [name for name in names if name.endswith(".py") and not name.startswith(MACHINE_MADE)]
            found += [(Path(folder) / name).relative_to(self.root) for name in kept]
        found.sort()
        size = sum((self.root / path).stat().st_size for path in found)
        if size < ENOUGH:
            raise InputError(
                f"this Python ({self.root}) carries only {size} bytes of its standard library's source, "
                "too little for the corpus 'python': name another corpus, or use a Python with sources"
            )
        return found

    @cached_property
    def topics(self) -> dict[str, str]:
        """Name -> text of the help topics, where they are installed."""
        path = self.root / TOPICS
        return runpy.run_path(str(path))["topics"] if path.is_file() else {}

    def describe(self) -> dict[str, Any]:
        files = [*self.files, TOPICS] if (self.root / TOPICS).is_file() else self.files
        listing = [f"{path.as_posix()} {(self.root / path).stat().st_size}" for path in files]
        return {
            "kind": "python",
            "python": platform.python_version(),
            "fingerprint": hashlib.sha256("\n".join(listing).encode()).hexdigest()[:16],
            "validation": self.validation,
        }

    def size(self) -> int:
        return sum((self.root / path).stat().st_size for path in self.files)

    def read(self, split: str | None, position: Any = None) -> "_Files":
        return _Files(self, split, position or 0)


class _Files(Documents):
    def __init__(self, source: PythonSources, split: str | None, position: int):
        self.source, self.split, self.position = source, split, position

    def __iter__(self) -> Iterator[Document]:
        names = [path.as_posix() for path in self.source.files]
        topics = self.source.topics
        names += [f"pydoc_data/topics/{name}" for name in sorted(topics)]
        for index in range(self.position, len(names)):
            name = names[index]
            self.position, self.fraction = index + 1, (index + 1) / len(names)
            if (self.split == "validation") == in_share(digest(name), self.source.validation or 0):
                yield Document(name, topics[Path(name).name] if index >= len(self.source.files) else self._file(name))

    def _file(self, name: str) -> str:
        with tokenize.open(self.source.root / name) as file:  # minds the encoding a file declares
            return file.read()
