"""Which files of a checkpoint hold its weights, and whether they are all there: from names, sizes and hashes alone."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_layers.foreign_weights import named_shards

Format = Literal["safetensors", "pickle"]
STEMS: dict[Format, tuple[str, str]] = {"safetensors": ("model", ".safetensors"), "pickle": ("pytorch_model", ".bin")}
_PIECE = 2**22


@dataclass(frozen=True)
class ListedFile:
    """A file by its name in the checkpoint. `hash` is a sha256, or git's sha1 where the Hub knows no other."""

    path: str
    size: int
    hash: str


def formats(files: Mapping[str, ListedFile]) -> dict[Format, dict[str, ListedFile]]:
    """The weight files of each format that the checkpoint has, safetensors (what is loaded) first."""
    found: dict[Format, dict[str, ListedFile]] = {}
    for kind, (stem, suffix) in STEMS.items():
        name = re.compile(rf"{stem}(-\d+-of-\d+)?{re.escape(suffix)}")
        mine = {path: file for path, file in sorted(files.items()) if name.fullmatch(path)}
        if mine or index_of(kind) in files:
            found[kind] = mine
    return found


def index_of(kind: Format) -> str:
    """The file that names the shards."""
    return "".join(STEMS[kind]) + ".index.json"


def missing(kind: Format, files: Mapping[str, ListedFile], read: Callable[[str], bytes]) -> list[str]:
    """The files without which the weights of this format cannot be loaded; `read` gives the content of the index.

    Raises:
        ValueError: an index that cannot be understood.
    """
    stem, suffix = STEMS[kind]
    index, whole = index_of(kind), stem + suffix
    if index in files and whole not in files:
        try:
            named = sorted(set(named_shards(read(index)).values()))
        except ValueError as error:
            raise ValueError(f"{index} {error}") from error
        return [shard for shard in named if shard not in files]
    numbered = [re.fullmatch(rf"{stem}-(\d+)-of-(\d+){re.escape(suffix)}", path) for path in files]
    counts = [match for match in numbered if match]
    if whole in files or not counts:
        return []
    width, total = len(counts[0][1]), int(counts[0][2])
    shards = [f"{stem}-{number:0{width}d}-of-{counts[0][2]}{suffix}" for number in range(1, total + 1)]
    return [index, *(shard for shard in shards if shard not in files)]


def content_hash(path: Path, like: str = "sha256") -> str:
    """The hash of a file's content: sha256, or git's sha1 where `like` is as short as one."""
    size = path.stat().st_size
    digest = hashlib.sha1(f"blob {size}\0".encode()) if len(like) == 40 else hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
