"""Which files of a checkpoint hold its weights, and what those look like: hashes, and one pass over the tensors."""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_layers.files.durable import on_disk, replace_file
from lit_layers.files.hub import ListedFile, named_shards

if TYPE_CHECKING:  # torch inside functions, as in checkpoint.py
    from torch import Tensor


Format = Literal["safetensors", "pickle"]
STEMS: dict[Format, tuple[str, str]] = {"safetensors": ("model", ".safetensors"), "pickle": ("pytorch_model", ".bin")}


def formats(files: Mapping[str, ListedFile]) -> dict[Format, dict[str, ListedFile]]:
    """The weight files of each format that the checkpoint has, safetensors (what is loaded) first."""
    by_format: dict[Format, dict[str, ListedFile]] = {}
    for kind, (stem, suffix) in STEMS.items():
        name = re.compile(rf"{stem}(-\d+-of-\d+)?{re.escape(suffix)}")
        weights = {path: file for path, file in sorted(files.items()) if name.fullmatch(path)}
        if weights or index_of(kind) in files:
            by_format[kind] = weights
    return by_format


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
    if whole in files:
        return []
    if index in files:
        try:
            return sorted(set(named_shards(read(index)).values()) - files.keys())
        except ValueError as error:
            raise ValueError(f"{index} {error}") from error
    is_sharded = any(re.fullmatch(rf"{stem}-\d+-of-\d+{re.escape(suffix)}", path) for path in files)
    return [index] if is_sharded else []


NUM_SAMPLES = 2048  # values kept of each tensor: 500 tensors x 2048 x 4 B = 4 MB a checkpoint
FOLDER = ".audit"
_VERSION = "2"
_VALUES = 2**20  # at a time
_PIECES, _LONG = 8, 32  # rows and columns that are looked at for 8 bits, and values of each


@dataclass(frozen=True)
class TensorFacts:
    """One tensor in numbers: `norm` of its finite values, its two largest magnitudes, how many are not finite, and
    whether they have 8 bits or fewer.
    """

    dtype: str
    shape: tuple[int, ...]
    norm: float = 0.0
    largest: float = 0.0
    second: float = 0.0
    num_broken: int = 0
    is_8_bit: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is large enough for what is said of it to be no chance."""
        return len(self.shape) >= 2 and self.count >= 128


@dataclass(frozen=True)
class Fingerprint:
    """The tensors of one checkpoint. `digest` is the same for the same values in another file or another precision
    that holds them; `samples` are the same values of each tensor at every checkpoint, all where there are few.
    """

    tensors: Mapping[str, TensorFacts]
    digest: str
    samples: Mapping[str, "Tensor"]

    @property
    def precision(self) -> str:
        """The coarsest precision that holds every sampled value of the matrices, or else the one they are stored in; 8
        bits where most of them are.
        """
        import torch

        stored = Counter(facts.dtype for facts in self.tensors.values()).most_common(1)
        names = [name for name in self.samples if self.tensors[name].is_matrix]
        matrices = [self.samples[name] for name in names]
        if sum(self.tensors[name].is_8_bit for name in names) * 2 > len(names):
            return "8 bits"
        for coarse in (torch.bfloat16, torch.float16) if matrices else ():
            if all(bool((values.to(coarse).float() == values).all()) for values in matrices):
                return str(coarse).removeprefix("torch.")
        return stored[0][0] if stored else "nothing"


def fingerprint(tensors: Iterator[tuple[str, "Tensor"]]) -> Fingerprint:
    """Read each tensor once, one at a time."""
    facts: dict[str, TensorFacts] = {}
    samples: dict[str, Tensor] = {}
    digests: dict[str, bytes] = {}
    for name, tensor in tensors:
        facts[name], samples[name], digests[name] = _facts(tensor)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(facts):
        digest.update(f"{name} {facts[name].shape} ".encode() + digests[name])
    return Fingerprint(facts, digest.hexdigest(), samples)


def _facts(tensor: "Tensor") -> tuple[TensorFacts, "Tensor", bytes]:
    import torch

    flat, digest = tensor.reshape(-1), hashlib.blake2b(digest_size=16)
    squares, largest, second, num_broken = 0.0, 0.0, 0.0, 0
    for start in range(0, len(flat), _VALUES):
        piece = flat[start : start + _VALUES].float()
        digest.update(piece.numpy().data)
        finite = piece.isfinite()
        if not finite.all():
            num_broken += int((~finite).sum())
            piece = piece[finite]
        squares += float(piece.double().square().sum())
        top = torch.topk(piece.abs(), min(2, len(piece))).values.tolist()
        largest, second = sorted([largest, second, *top], reverse=True)[:2]
    numbers = squares**0.5, largest, second, num_broken, _is_8_bit(tensor)
    facts = TensorFacts(_dtype(tensor), tuple(tensor.shape), *numbers)
    return facts, flat[_places(len(flat))].float(), digest.digest()


def _is_8_bit(tensor: "Tensor") -> bool:
    """Whether a matrix is whole numbers of 8 bits times a scale: of its own, of each row, column or block of 32."""
    if tensor.ndim < 2 or not tensor.numel():
        return False
    table = tensor.flatten(1)

    def most(rows: "Tensor") -> bool:
        pieces = rows[:: -(-len(rows) // _PIECES), :_LONG].float()
        return sum(map(_is_on_grid, pieces)) * 2 > len(pieces)

    return most(table) or most(table.T)


def _is_on_grid(values: "Tensor") -> bool:
    """Whether values have at most 256 levels, all of them multiples of the least distance apart."""
    gaps = values.double().unique().diff()
    if len(gaps) < 2 or not gaps.isfinite().all():
        return False
    steps = gaps / gaps.min()
    return bool(steps.sum() < 256 and ((steps - steps.round()).abs() < 0.01).all())


def _dtype(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _places(count: int) -> "Tensor":
    """The same places for every tensor of that many values: multiples of the golden ratio, in no step with any row."""
    import torch

    if count <= NUM_SAMPLES:
        return torch.arange(count)
    turns = torch.arange(1, NUM_SAMPLES + 1, dtype=torch.float64) * ((5**0.5 - 1) / 2)
    return ((turns - turns.floor()) * count).long().sort().values


class Memory:
    """Fingerprints, and hashes of files, that were made before, in a hidden folder beside the series.

    They count as long as size, times and place of the files on the disk are the same, on the Hub their listed hashes.
    Where nothing can be written, all is read again.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (self.folder.parent,)  # a lock is no data

    def hash_of(self, path: Path, compute: Callable[[], str], *, part: str = "") -> str:
        """The hash of a file's content or a part of it, computed where the file is not the one of last time."""
        name, key = f"{path.parent.name}/{path.name} {part}", on_disk(path)
        kept = self._hashes.get(name)
        if kept is None or kept[0] != key:
            kept = (key, compute())
            with self._lock:
                self._hashes[name] = kept
                self._write("hashes.json", json.dumps(self._hashes).encode())
        return kept[1]

    @functools.cached_property
    def _hashes(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "hashes.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def get(self, name: str, key: Any) -> Fingerprint | None:
        """What is kept of a checkpoint, if `key` still says that it is the same."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.folder / _file(name), framework="pt") as file:
                kept = file.metadata() or {}
                if kept.get("version") != _VERSION or kept.get("key") != json.dumps(key):
                    return None
                tensors = json.loads(kept["facts"]).items()
                facts = {each: TensorFacts(**{**values, "shape": tuple(values["shape"])}) for each, values in tensors}
                return Fingerprint(facts, kept["digest"], {each: file.get_tensor(each) for each in facts})
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None

    def put(self, name: str, key: Any, weights: Fingerprint) -> None:
        from safetensors.torch import save  # which imports torch

        facts = json.dumps({each: asdict(facts) for each, facts in weights.tensors.items()})
        kept = {"version": _VERSION, "key": json.dumps(key), "facts": facts, "digest": weights.digest}
        self._write(_file(name), save(dict(weights.samples), kept))

    def _write(self, name: str, content: bytes) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / name, content)


def _file(name: str) -> str:
    return f"{name.replace(os.sep, '_')}.safetensors"
