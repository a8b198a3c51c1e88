"""The files of a checkpoint in a folder or on the Hub, and the fingerprint of its weights: hashes and samples."""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import pickle
import re
import threading
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lit_layers import schema
from lit_layers.errors import InputError, no_folder
from lit_layers.files.durable import on_disk, replace_file
from lit_layers.files.hub import Hub, ListedFile, content_hash

if TYPE_CHECKING:  # torch is imported inside functions: it takes seconds, and listing files does not need it
    import torch
    from torch import Tensor, nn

    from lit_layers.models.offload import Offload


Format = Literal["safetensors", "pickle"]
STEMS: dict[Format, tuple[str, str]] = {"safetensors": ("model", ".safetensors"), "pickle": ("pytorch_model", ".bin")}


def formats(files: Mapping[str, ListedFile]) -> dict[Format, dict[str, ListedFile]]:
    """Return the weight files by format; safetensors, the format that is loaded, comes first."""
    by_format: dict[Format, dict[str, ListedFile]] = {}
    for kind, (stem, suffix) in STEMS.items():
        name = re.compile(rf"{stem}(-\d+-of-\d+)?{re.escape(suffix)}")
        if weights := {path: file for path, file in sorted(files.items()) if name.fullmatch(path)}:
            by_format[kind] = weights
    return by_format


NUM_SAMPLES = 2048  # sampled values of each tensor: 500 tensors x 2048 x 4 B = 4 MB per checkpoint
FOLDER = ".audit"
_VERSION = 4  # version of the cached fingerprints; increase it when their content changes
_VALUES = 2**20  # values of a tensor that are read at a time, to limit memory


@dataclass(frozen=True)
class TensorFacts:
    """Facts about one tensor.

    `norm` is the Euclidean norm of its finite values. `num_broken` is the number of its NaN and infinite values.
    """

    dtype: str
    shape: tuple[int, ...]
    norm: float = 0.0
    num_broken: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor has two or more dimensions, and enough values for the audit's statistics."""
        return len(self.shape) >= 2 and self.count >= 128


@dataclass(frozen=True)
class Fingerprint:
    """Names, shapes and norms of one checkpoint's tensors, with a hash and samples of their values.

    `digest` hashes the names, shapes and values of the tensors, with the values converted to float32. It does not
    change if the same values are stored in other files or in another precision. `samples` has up to `NUM_SAMPLES`
    values per tensor, from the same positions in every checkpoint.
    """

    tensors: Mapping[str, TensorFacts]
    digest: str
    samples: Mapping[str, "Tensor"]

    @property
    def precision(self) -> str:
        """Coarsest precision that represents every sampled value of the matrices exactly, or else the stored data type.

        It is `8 bits` if most matrices have at most 256 different values. Rounding to 8 bits with a scale per row is
        not recognised.
        """
        import torch

        stored = Counter(facts.dtype for facts in self.tensors.values()).most_common(1)
        matrices = [values for name, values in self.samples.items() if self.tensors[name].is_matrix]
        levels = [(len(values.unique()), len(values)) for values in matrices]
        if sum(2 < level <= min(256, count / 2) for level, count in levels) * 2 > len(levels):
            return "8 bits"
        for coarse in (torch.bfloat16, torch.float16) if matrices else ():
            if all(bool((values.to(coarse).float() == values).all()) for values in matrices):
                return str(coarse).removeprefix("torch.")
        return stored[0][0] if stored else "nothing"


def fingerprint(tensors: Iterator[tuple[str, "Tensor"]]) -> Fingerprint:
    """Return the fingerprint of a checkpoint with these tensors, reading one tensor at a time."""
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
    flat, digest = tensor.reshape(-1), hashlib.blake2b(digest_size=16)
    squares, num_broken = 0.0, 0
    for start in range(0, len(flat), _VALUES):
        piece = flat[start : start + _VALUES].float()
        digest.update(piece.numpy().data)
        finite = piece.isfinite()
        num_broken += int((~finite).sum())
        squares += float(piece[finite].double().square().sum())
    facts = TensorFacts(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), squares**0.5, num_broken)
    return facts, flat[_sample_ids(len(flat))].float(), digest.digest()


def _sample_ids(count: int) -> "Tensor":
    """Return up to `NUM_SAMPLES` positions in a tensor of `count` values, the same at every call.

    Multiples of the golden ratio spread evenly and do not align with the rows of any matrix.
    """
    import torch

    if count <= NUM_SAMPLES:
        return torch.arange(count)
    turns = torch.arange(1, NUM_SAMPLES + 1, dtype=torch.float64) * ((5**0.5 - 1) / 2)
    return ((turns - turns.floor()) * count).long().sort().values


_lock = threading.Lock()


class Memory:
    """A cache of fingerprints and file hashes, in a hidden folder of the series.

    An entry is valid while size, times and inode of the files on disk, or the hashes that the Hub lists, are the same.
    If the folder cannot be written, everything is read again at the next audit.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER

    def hash_of(self, path: Path, compute: Callable[[], str], *, part: str = "") -> str:
        """Return the hash of a file or of a named `part` of it, cached unless the file is new or changed."""
        name, key = f"{path.parent.name}/{path.name} {part}", on_disk(path)
        saved = self._hashes.get(name)
        if saved is None or saved[0] != key:
            saved = (key, compute())
            with _lock:
                self._hashes[name] = saved
                self._write("hashes.json", json.dumps(self._hashes).encode())
        return saved[1]

    @functools.cached_property
    def _hashes(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "hashes.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def get(self, name: str, key: Any) -> Fingerprint | None:
        """Return the cached fingerprint of a checkpoint; None if there is none, or if its weights had another `key`."""
        import torch

        try:
            saved = torch.load(self.folder / _file(name), weights_only=True)
            if saved["key"] != [_VERSION, key]:
                return None
            facts = {each: TensorFacts(*values) for each, values in saved["facts"].items()}
        except (OSError, RuntimeError, EOFError, LookupError, TypeError, pickle.UnpicklingError):
            return None
        return Fingerprint(facts, saved["digest"], saved["samples"])

    def put(self, name: str, key: Any, weights: Fingerprint) -> None:
        import torch

        facts = {each: astuple(facts) for each, facts in weights.tensors.items()}
        saved = {"key": [_VERSION, key], "facts": facts, "digest": weights.digest, "samples": dict(weights.samples)}
        torch.save(saved, content := io.BytesIO())
        self._write(_file(name), content.getvalue())

    def _write(self, name: str, content: bytes) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / name, content)


def _file(name: str) -> str:
    return f"{name.replace(os.sep, '_')}.pt"


Item = TypeVar("Item")
Result = TypeVar("Result")
_REQUESTS_AT_ONCE = 8  # the Hub allows a few hundred requests per minute


def ask_all(ask: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return `ask(item)` of each item in order, calling several at a time because `ask` waits for the Hub."""
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(ask, items))


MAIN = "main"  # a branch that is not a step
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
COMPANIONS = (".json", ".txt", ".model", ".tiktoken", ".jinja")  # config and tokenizer: data, never code
_dropping = threading.Lock()


class Source(ABC):
    """The files of one checkpoint."""

    @property
    @abstractmethod
    def files(self) -> Mapping[str, ListedFile]:
        """Names, sizes and hashes of the files of the checkpoint, known without a download; subfolders are left out."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a small file."""

    @abstractmethod
    def fetch(self) -> Path:
        """Return a local folder with config, tokenizer and weights, downloaded if necessary."""

    def drop(self) -> None:  # noqa: B027 - local folders stay
        """Delete the weights that `fetch` downloaded; files that existed before stay."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return where the checkpoint comes from, for provenance."""

    @abstractmethod
    def tokenizer(self) -> str | None:
        """Return the tokenizer, as a folder or `NAME[@COMMIT]` on the Hub; None if the checkpoint has none."""

    def load(self, folder: Path, dtype: "torch.dtype", offload: "Offload | None" = None) -> "nn.Module":
        """Return the model in a fetched folder, on the CPU in evaluation mode; no code of the checkpoint runs."""
        from lit_layers.models.saved import load  # imports torch

        return load(folder, dtype=dtype, offload=offload)

    @property
    def is_here(self) -> bool:
        """Whether the weights are on this machine."""
        return True

    def identity(self) -> Any:
        """Return a value that changes if the weights change; it is found without reading the weights."""
        return self.weights()

    def tensors(self) -> Iterator[tuple[str, "Tensor"]]:
        """Yield the names and tensors of the weight files, memory-mapped: values are read on first access.

        Raises:
            InputError: a file is damaged, or a pickle holds more than tensors.
        """
        folder = self.fetch()
        for path in sorted(self.weights()):
            yield from tensors_in(folder / path)

    def recorded_step(self) -> int | None:
        """Return the optimizer step that the checkpoint records in its files; None if it records none."""
        return None

    def weights(self) -> dict[str, str]:
        """Return the hash of every weight file that would be loaded: safetensors if there are any, else pickles."""
        loaded = next(iter(formats(self.files).values()), {})
        return {path: file.hash for path, file in loaded.items()}


@dataclass(frozen=True)
class FolderSource(Source):
    """A folder with config.json and weights; `memory` caches the hashes of its files."""

    folder: Path
    memory: Memory | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        return companions(self.folder, self.memory, weights=True)

    def identity(self) -> Any:
        return {path: on_disk(self.folder / path) for path in self.weights()}

    def recorded_step(self) -> int | None:
        try:
            state = json.loads((self.folder / "trainer_state.json").read_bytes())  # written by transformers' Trainer
            return int(state["global_step"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def fetch(self) -> Path:
        return self.folder

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": str(self.folder)}

    def tokenizer(self) -> str | None:
        return str(self.folder.absolute()) if TOKENIZER in self.files else None


@dataclass(frozen=True)
class HubSource(Source):
    """One commit of a repository. `revision` is the branch or tag that pointed to it when the branches were listed."""

    hub: Hub = field(compare=False, repr=False)
    repo: str
    revision: str
    commit: str
    reason: str | None = None  # why the repository cannot be used; None: it can
    _downloaded: list[Path] = field(default_factory=list, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        if self.reason is not None:
            raise InputError(self.reason)
        return self.hub.tree(self.repo, self.commit, self.revision)

    def read(self, path: str) -> bytes:
        return self._download(path).read_bytes()

    def fetch(self) -> Path:
        if CONFIG not in self.files:
            raise InputError(f"expected a model in {self.repo} at {self.revision}, found no {CONFIG} there")
        beside = [path for path in self.files if path.endswith(COMPANIONS)]
        for path in {*beside, *self.weights()}:
            self._download(path)
        return self._download(CONFIG).parent

    @property
    def is_here(self) -> bool:
        return self.reason is None and all(
            self.hub.cached(self.repo, self.commit, path) is not None for path in self.weights()
        )

    def drop(self) -> None:
        with _dropping:
            while self._downloaded:
                link = self._downloaded.pop()
                blob = link.resolve()
                link.unlink(missing_ok=True)
                others = (other for other in link.parents[1].glob(f"*/{link.name}") if other.resolve() == blob)
                if blob != link and not any(others):
                    blob.unlink(missing_ok=True)

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": self.repo, "revision": self.revision, "commit": self.commit}

    def tokenizer(self) -> str | None:
        return f"{self.repo}@{self.commit}" if TOKENIZER in self.files else None

    def _download(self, path: str) -> Path:
        is_new = self.hub.cached(self.repo, self.commit, path) is None
        what = f"cannot download {path} of {self.repo} at {self.revision}"
        place = self.hub.download(self.repo, self.commit, self.files[path].path, what)
        if is_new and path in self.weights():
            self._downloaded.append(place)
        return place


def companions(folder: Path, memory: Memory | None = None, *, weights: bool = False) -> dict[str, ListedFile]:
    """Return size and hash of the config and tokenizer files of a folder and, with `weights`, of its weight files."""
    names = tuple(stem for stem, _ in STEMS.values())
    listed: dict[str, ListedFile] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        is_weights = path.name.startswith(names) and path.suffix in (".safetensors", ".bin")
        if (weights and is_weights) or path.name.endswith(COMPANIONS):
            hash_ = content_hash(path) if memory is None else memory.hash_of(path, lambda path=path: content_hash(path))
            listed[path.name] = ListedFile(path.name, path.stat().st_size, hash_)
    return listed


def tensors_in(path: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the names and tensors of one weight file, memory-mapped.

    A safetensors file is opened again for each tensor, so that pages read for one tensor are freed with it.

    Raises:
        InputError: the file is damaged, or a pickle holds more than tensors.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
            for name in names:
                with safe_open(path, framework="pt") as file:
                    yield name, file.get_tensor(name)
            return
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise InputError(f"{path} holds more than tensors by name: no weights of a model")
        yield from state.items()
    except (OSError, SafetensorError, RuntimeError, EOFError, LookupError, ValueError, pickle.UnpicklingError) as error:
        raise InputError(f"{path.name} cannot be read ({' '.join(str(error).split())[:150]})") from error


class ModelFiles(Source):
    """The files of one model: a folder, or a repository on the Hub whose files are downloaded on first use.

    If `untrained` is set, the weights are initialised at random with this number as the seed.

    Raises:
        InputError: there is no such model.
    """

    def __init__(self, model: str | Path, *, revision: str | None = None, untrained: int | None = None) -> None:
        self.model, self.revision, self.untrained = os.fspath(model), revision, untrained
        self.local = os.path.isdir(self.model)
        # The absolute path keeps transformers from taking the name of a folder for a name on the Hub.
        self.location = os.path.abspath(self.model) if self.local else self.model
        self.commit: str | None = None
        if self.local:
            if revision is not None:
                raise InputError(f"revision: {model} is a local folder and has no revision {revision!r}: leave it out")
        elif os.path.isfile(self.model):
            raise no_folder(model)
        elif isinstance(model, Path) or not is_hub_name(self.model):
            raise InputError(f"expected a folder with a model or a name on the Hub, {model} does not exist")
        else:
            self._hub = Hub()
            self.commit = self.path_of(CONFIG).parent.name
        self.config = schema.read(self.path_of(CONFIG), dict[str, Any], "download or save the model again")

    @property
    def files(self) -> Mapping[str, ListedFile]:
        return {}  # a single model is not audited, so its files need no hashes

    def path_of(self, file: str) -> Path:
        """Return the local path of a file of the model, downloaded if the model is on the Hub.

        Raises:
            InputError: the file is not available. Its `__cause__` is a FileNotFoundError if the model has no such file.
        """
        if not self.local:
            at = f" at revision {self.revision}" if self.revision else ""
            what = f"{self.model}{at} is no local folder, and {file} cannot be had from the Hub"
            return self._hub.download(self.model, self.commit or self.revision, file, what)
        if not (path := Path(self.location, file)).is_file():
            raise InputError(f"expected a model in {self.model}, found no {file} there") from FileNotFoundError(file)
        return path

    def has(self, file: str) -> bool:
        """Return whether the model has a file; a file on the Hub is downloaded."""
        try:
            return self.path_of(file).is_file()
        except InputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise

    def read(self, path: str) -> bytes:
        return self.path_of(path).read_bytes()

    def fetch(self) -> Path:
        return self.path_of(CONFIG).parent

    def describe(self) -> dict[str, Any]:
        commit = {} if self.local else {"revision": self.revision or MAIN, "commit": self.commit}
        seed = {} if self.untrained is None else {"untrained": {"seed": self.untrained}}
        return {"checkpoint": self.model, **commit, **seed}

    def tokenizer(self) -> str | None:
        if not self.has(TOKENIZER):
            return None
        return self.location if self.revision is None else f"{self.model}@{self.commit}"

    def load(self, folder: Path, dtype: "torch.dtype", offload: "Offload | None" = None) -> "nn.Module":
        from lit_layers.models.pixels import PREPROCESSOR  # imports torch
        from lit_layers.models.saved import initialise, load

        if self.untrained is None:
            return load(self.location, revision=self.commit, dtype=dtype, offload=offload)
        preprocessor = json.loads(self.read(PREPROCESSOR)) if self.has(PREPROCESSOR) else None
        return initialise(self.config, self.model, seed=self.untrained, dtype=dtype, preprocessor=preprocessor)


def is_hub_name(name: str) -> bool:
    """Return whether a name can be that of a repository on the Hub; `a/b` cannot if there is a local folder `a`."""
    is_spelled_so = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is not None
    return is_spelled_so and not ("/" in name and Path(name).parent.is_dir())
