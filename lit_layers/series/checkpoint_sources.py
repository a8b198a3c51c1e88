"""Where a checkpoint lies, a folder or one commit of a repository of the Hub; which of its files hold its weights; and
what those look like: hashes, and one pass over the tensors.
"""

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

if TYPE_CHECKING:  # torch inside functions, as in checkpoint.py
    import torch
    from torch import Tensor, nn

    from lit_layers.models.offload import Offload


Format = Literal["safetensors", "pickle"]
STEMS: dict[Format, tuple[str, str]] = {"safetensors": ("model", ".safetensors"), "pickle": ("pytorch_model", ".bin")}


def formats(files: Mapping[str, ListedFile]) -> dict[Format, dict[str, ListedFile]]:
    """The weight files of each format that the checkpoint has, safetensors (what is loaded) first."""
    by_format: dict[Format, dict[str, ListedFile]] = {}
    for kind, (stem, suffix) in STEMS.items():
        name = re.compile(rf"{stem}(-\d+-of-\d+)?{re.escape(suffix)}")
        if weights := {path: file for path, file in sorted(files.items()) if name.fullmatch(path)}:
            by_format[kind] = weights
    return by_format


NUM_SAMPLES = 2048  # values kept of each tensor: 500 tensors x 2048 x 4 B = 4 MB a checkpoint
FOLDER = ".audit"
_VERSION = 4
_VALUES = 2**20  # at a time


@dataclass(frozen=True)
class TensorFacts:
    """One tensor in numbers: `norm` of its finite values, and how many are not finite."""

    dtype: str
    shape: tuple[int, ...]
    norm: float = 0.0
    num_broken: int = 0

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
        """The coarsest precision that holds every sampled value of the matrices, or else the one they are stored in.

        A matrix of 8 bits has at most 256 values; with a scale for each row it is not recognized.
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
    """The same places for every tensor of that many values: multiples of the golden ratio, in no step with any row."""
    import torch

    if count <= NUM_SAMPLES:
        return torch.arange(count)
    turns = torch.arange(1, NUM_SAMPLES + 1, dtype=torch.float64) * ((5**0.5 - 1) / 2)
    return ((turns - turns.floor()) * count).long().sort().values


_lock = threading.Lock()


class Memory:
    """Fingerprints, and hashes of files, that were made before, in a hidden folder beside the series.

    They count as long as size, times and place of the files on the disk are the same, on the Hub their listed hashes.
    Where nothing can be written, all is read again.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER

    def hash_of(self, path: Path, compute: Callable[[], str], *, part: str = "") -> str:
        """The hash of a file's content or a part of it, computed where the file is not the one of last time."""
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
        """What is kept of a checkpoint, if `key` still says that it is the same."""
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
_REQUESTS_AT_ONCE = 8  # the Hub allows some hundred a minute


def ask_all(ask: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What is asked of each item, several at a time where it takes requests to the Hub; in their order."""
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(ask, items))


MAIN = "main"  # the branch of a repository that is no step
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
COMPANIONS = (".json", ".txt", ".model", ".tiktoken", ".jinja")  # config and tokenizer: data, never code
_dropping = threading.Lock()


class Source(ABC):
    """The files of one checkpoint."""

    @property
    @abstractmethod
    def files(self) -> Mapping[str, ListedFile]:
        """Names, sizes and hashes of the files at the top, without downloading any."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a small file."""

    @abstractmethod
    def fetch(self) -> Path:
        """A local folder with config, tokenizer and weights, downloaded now if need be."""

    def drop(self) -> None:  # noqa: B027 - what lies on this machine stays
        """Remove from this machine the weights that `fetch` downloaded; what was there before stays."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Where the checkpoint comes from, for provenance."""

    @abstractmethod
    def tokenizer(self) -> str | None:
        """The tokenizer as recipes name it; None where the checkpoint carries none."""

    def load(self, folder: Path, dtype: "torch.dtype", offload: "Offload | None" = None) -> "nn.Module":
        """The model in the folder that `fetch` gave, on the CPU in evaluation mode; no code of the checkpoint runs."""
        from lit_layers.models.saved import load  # torch, which names and steps do not need

        return load(folder, dtype=dtype, offload=offload)

    @property
    def is_here(self) -> bool:
        """Whether the weights are on this machine."""
        return True

    def identity(self) -> Any:
        """What changes when the weights are others, without reading them: the listed hashes."""
        return self.weights()

    def tensors(self) -> Iterator[tuple[str, "Tensor"]]:
        """The tensors of the weight files, one at a time, mapped: a value is read when it is touched.

        Raises:
            InputError: a file that is damaged, a pickle that is more than tensors.
        """
        folder = self.fetch()
        for path in sorted(self.weights()):
            yield from tensors_in(folder / path)

    def recorded_step(self) -> int | None:
        """The optimizer step that the checkpoint itself says it is of, where it does."""
        return None

    def weights(self) -> dict[str, str]:
        """The hash of every weight file that is loaded: safetensors, or else the pickle."""
        loaded = next(iter(formats(self.files).values()), {})
        return {path: file.hash for path, file in loaded.items()}


@dataclass(frozen=True)
class FolderSource(Source):
    """A folder with config.json and weights; `memory` keeps the hashes of its files."""

    folder: Path
    memory: Memory | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        return companions(self.folder, self.memory, weights=True)

    def identity(self) -> Any:
        return {path: on_disk(self.folder / path) for path in self.weights()}

    def recorded_step(self) -> int | None:
        try:
            state = json.loads((self.folder / "trainer_state.json").read_bytes())  # of the Trainer of transformers
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
    """One commit of a repository; `revision` is the branch that pointed to it when it was listed."""

    hub: Hub = field(compare=False, repr=False)
    repo: str
    revision: str
    commit: str
    reason: str | None = None  # it cannot be had
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
    """Config and tokenizer of a folder, and with `weights` these, too; what else lies there is not hashed."""
    names = tuple(stem for stem, _ in STEMS.values())
    listed: dict[str, ListedFile] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        is_weights = path.name.startswith(names) and path.suffix in (".safetensors", ".bin")
        if (weights and is_weights) or path.name.endswith(COMPANIONS):
            hash_ = content_hash(path) if memory is None else memory.hash_of(path, lambda path=path: content_hash(path))
            listed[path.name] = ListedFile(path.name, path.stat().st_size, hash_)
    return listed


def tensors_in(path: Path) -> Iterator[tuple[str, "Tensor"]]:
    """The tensors of one file, mapped anew for each, so that what was read of one leaves memory with it.

    Raises:
        InputError: it is damaged, or a pickle that is more than tensors.
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
    """One model: a folder with config.json and weights, or a repository of the Hub whose files are downloaded when they
    are read. With `untrained` its weights are new, of that seed.

    Raises:
        InputError: no such model.
    """

    def __init__(self, model: str | Path, *, revision: str | None = None, untrained: int | None = None) -> None:
        self.model, self.revision, self.untrained = os.fspath(model), revision, untrained
        self.local = os.path.isdir(self.model)
        # A folder is never read as a name of the Hub.
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
        return {}  # nothing compares them with others

    def path_of(self, file: str) -> Path:
        """Return the local path of a file of the model, downloaded if the model is the Hub's.

        Raises:
            InputError: it cannot be had; the cause is a FileNotFoundError where the model has no such file.
        """
        if not self.local:
            at = f" at revision {self.revision}" if self.revision else ""
            what = f"{self.model}{at} is no local folder, and {file} cannot be had from the Hub"
            return self._hub.download(self.model, self.commit or self.revision, file, what)
        if not (path := Path(self.location, file)).is_file():
            raise InputError(f"expected a model in {self.model}, found no {file} there") from FileNotFoundError(file)
        return path

    def has(self, file: str) -> bool:
        """Return whether the model has a file, which is downloaded."""
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
        from lit_layers.models.pixels import PREPROCESSOR  # torch, which names and steps do not need
        from lit_layers.models.saved import initialise, load

        if self.untrained is None:
            return load(self.location, revision=self.commit, dtype=dtype, offload=offload)
        preprocessor = json.loads(self.read(PREPROCESSOR)) if self.has(PREPROCESSOR) else None
        return initialise(self.config, self.model, seed=self.untrained, dtype=dtype, preprocessor=preprocessor)


def is_hub_name(name: str) -> bool:
    """Return whether a name may be one of the Hub: checkpoints/first is none if checkpoints is a folder here."""
    is_spelled_so = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is not None
    return is_spelled_so and not ("/" in name and Path(name).parent.is_dir())
