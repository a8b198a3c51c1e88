"""The weights of one model where they lie: safetensors files of a folder or of the Hub, read tensor by tensor."""

import contextlib
import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_layers import schema
from lit_layers.errors import InputError, refuse_odd_files
from lit_layers.files.durable import on_disk
from lit_layers.files.gguf_files import no_folder
from lit_layers.files.hub import ADAPTER, HUB_ERRORS, MERGE_IT, Hub, named_shards

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PIECE = 2**22  # bytes that are read at a time where a tensor is only passed through


def refuse_weights_elsewhere(model: str, revision: str | None = None) -> None:
    """Refuses a model in a folder or on the Hub whose weights are not all in its own files.

    Raises:
        InputError: an index that names others or is damaged; an adapter, which transformers would add where the package
            peft is installed, and not elsewhere.
    """
    from transformers.utils import cached_file

    if cached_file(model, ADAPTER, revision=revision, _raise_exceptions_for_missing_entries=False) is not None:
        raise InputError(f"{model}: expected a model alone, found an adapter beside it ({ADAPTER}): {MERGE_IT}")

    for index in (INDEX, PICKLED[1]):
        file = cached_file(model, index, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        try:
            named_shards(Path(file).read_bytes())
        except ValueError as error:
            raise InputError(f"{model}: {index} {error}; download or save the model again") from error


class ShardFiles:
    """A folder with config.json and safetensors, or a repository of the Hub of which each file is fetched when needed,
    again where the network failed, and its hash compared.

    Nothing is kept open: a file is mapped while one tensor is read, so that its pages leave memory with it.

    Raises:
        InputError: no such model.
    """

    def __init__(self, model: str | Path, *, revision: str | None = None) -> None:
        self.model = os.fspath(model)
        self.commit: str | None = None
        self._revision = revision
        self._folder = Path(self.model) if os.path.isdir(self.model) else None
        self.local = self._folder is not None
        self._paths: dict[str, Path] = {}
        # By name: of a tensor that is put together from stored ones, their names, and how.
        self.put_together: dict[str, tuple[list[str], Callable[[], Tensor]]] = {}
        if os.path.isfile(self.model):
            raise no_folder(model)
        if self._folder is None:
            name = self.model
            local = isinstance(model, Path) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
            if local or ("/" in name and Path(name).parent.is_dir()):
                raise InputError(f"expected a folder with a model or a name on the Hub, {name} does not exist")
            self._hub = Hub()
            self._revision = self.commit = self.fetch(CONFIG).parent.name
        elif revision is not None:
            raise InputError(f"revision: {self.model} is a local folder and has no revision {revision!r}: leave it out")
        else:
            refuse_odd_files(self._folder)
            if not (self._folder / CONFIG).is_file():
                raise InputError(f"expected a model in {self.model}, found no {CONFIG} there")
        self.config: dict[str, Any] = schema.read(
            self.fetch(CONFIG), dict[str, Any], "download or save the model again"
        )

    def fetch(self, file: str) -> Path:
        """Where a file of the model lies on this machine; downloads it where the model is the Hub's.

        Raises:
            InputError: it cannot be had; the cause is a FileNotFoundError where the model has no such file.
        """
        if self._folder is not None:
            if not (self._folder / file).is_file():
                raise InputError(f"{self.model} has no file {file}") from FileNotFoundError(file)
            return self._folder / file
        if file not in self._paths:
            at = f" at revision {self._revision}" if self._revision else ""
            what = f"{self.model}{at} is no local folder, and {file} cannot be had from the Hub"
            self._paths[file] = self._hub.fetch(self.model, self._revision, file, what)
        return self._paths[file]

    def has(self, file: str) -> bool:
        """Whether the model has a file; fetches it. Known without the Hub where it was asked before."""
        if self._folder is None:
            from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

            if try_to_load_from_cache(self.model, file, revision=self._revision) is _CACHED_NO_EXIST:
                return False
        try:
            self.fetch(file)
        except InputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    def read(self, name: str) -> Tensor:
        """A tensor as stored: a view of the mapped file, whose pages become resident as they are touched."""
        if name in self.put_together:
            return self.put_together[name][1]()
        with self._mapped(self.shard_of[name]) as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor, from the header of its file."""
        with self._mapped(self.shard_of[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor as stored."""
        if name in self.put_together:
            return sum(map(self.num_bytes, self.put_together[name][0]))
        tensor = self.read(name)
        return tensor.numel() * tensor.element_size()

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A tensor as flat pieces as stored, one resident at a time."""
        count, start = 1, 0
        whole = self.read(name) if name in self.put_together else None
        while start < count:
            flat = (self.read(name) if whole is None else whole).reshape(-1)
            count, step = len(flat), max(1, PIECE // flat.element_size())
            yield flat[start : start + step]
            start += step

    def warm(self, name: str) -> None:
        """Has the operating system read a tensor into its page cache: the next one to read it need not wait."""
        for part in self.put_together[name][0] if name in self.put_together else [name]:
            for piece in self.pieces(part):
                piece.view(torch.uint8)[::4096].sum()

    def fingerprint(self) -> str:
        """Sixteen hex digits that change when a file is exchanged: commit, or what is on the disk of the shards."""
        parts = [self.commit or ""]
        if self._folder is not None:
            for shard in sorted(set(self.shard_of.values())):
                parts.append(f"{shard} {on_disk(self._folder / shard)}")
        return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]

    @functools.cached_property
    def shard_of(self) -> dict[str, str]:
        """The file of every tensor.

        Raises:
            InputError: no safetensors, or (in a folder) a shard that is missing or cut short.
        """
        if self.has(WHOLE):
            with self._mapped(WHOLE) as file:
                return dict.fromkeys(file.keys(), WHOLE)
        if self.has(INDEX):
            try:
                shards = named_shards(self.fetch(INDEX).read_bytes())
            except ValueError as error:
                raise InputError(f"{self.model}: {INDEX} {error}; download or save the model again") from error
            for shard in sorted(set(shards.values())) if self._folder is not None else ():
                if not (Path(self.model) / shard).is_file():
                    raise InputError(f"{self.model} lacks the shard {shard} that its {INDEX} names: download it again")
                with self._mapped(shard):
                    pass  # refuses one that is cut short
            return shards
        if any(self._named(file) for file in PICKLED):
            raise InputError(
                f"{self.model} holds its weights as a pickle ({PICKLED[0]}); only safetensors are read: save the model "
                "again with save_pretrained"
            )
        raise InputError(f"{self.model} holds no weights: expected {WHOLE} or {INDEX}")

    def _named(self, file: str) -> bool:
        """Whether a file is there, without fetching it."""
        if self._folder is not None:
            return (self._folder / file).is_file()
        with contextlib.suppress(*HUB_ERRORS):
            return self._hub.api.file_exists(self.model, file, revision=self._revision)
        return False

    @contextlib.contextmanager
    def _mapped(self, shard: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        path = self.fetch(shard)
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged or cut short ({error}): download or save it again") from error


# What files call the tensors of a model.


def named_in_files(network: Any, files: ShardFiles) -> dict[str, str]:
    """What files call each tensor of a model: the trunk's name added or taken away, older names renewed.

    Where transformers puts one tensor together from several (a layer's experts), `files` has it under another name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(network)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, names, stored_as = network.base_model_prefix, network.state_dict(), {}
    parts: dict[str, dict[str, list[str]]] = {}
    for stored in sorted(files.shard_of, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, names)
        stored_as[name] = stored if pattern is None else f"{name}, put together"
        if pattern is not None:
            parts.setdefault(name, {}).setdefault(pattern, []).append(stored)
    for name, of_patterns in parts.items():
        converter = next(each for each in converters if next(iter(of_patterns)) in each.source_patterns)
        convert = functools.partial(_put_together, network, files, name, of_patterns, converter)
        files.put_together[stored_as[name]] = [stored for part in of_patterns.values() for stored in part], convert
    return stored_as


def _put_together(network: Any, files: ShardFiles, name: str, parts: dict[str, list[str]], converter: Any) -> Tensor:
    tensors: dict[str, Any] = {pattern: [files.read(stored) for stored in names] for pattern, names in parts.items()}
    for operation in converter.operations:
        tensors = operation.convert(
            tensors,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=name,
            model=network,
            config=network.config,
        )
    whole = list(tensors.values())
    if len(whole) != 1 or not isinstance(whole[0], Tensor):
        raise InputError(
            f"{files.model} stores {name} of {type(network).__name__} in a way that is only read whole: open it so"
        )
    return whole[0]


# Where blocks are read to.


class Room:
    """Memory that one block after the other is read into: taken anew for each it would be scattered over the heap."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory, self.taken = device, torch.empty(0), 0

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    def clear(self, count: int, dtype: torch.dtype) -> None:
        """Makes room for `count` numbers; what was there is overwritten."""
        count, self.taken = count + 16 * 256, 0  # tensors begin at multiples of 16 numbers
        if len(self.memory) < count:
            self.memory = torch.empty(0)  # first let go, then take
            self.memory = torch.empty(count, dtype=dtype, device=self.device)

    def take(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and type as one on the meta device."""
        start, stop = self.taken, self.taken + like.numel()
        if like.dtype != self.memory.dtype or stop > len(self.memory):
            return torch.empty_like(like, device=self.device)
        self.taken = -(-stop // 16) * 16
        return self.memory[start:stop].view(like.shape)


class Prefetch:
    """A thread that reads the next block while this one is at work.

    For a GPU its tensors are copied there as stored. On a CPU a second block in memory would double what is resident:
    its pages are read into the system's page cache instead, which takes only memory that nobody asks for.
    """

    def __init__(self, files: ShardFiles, device: torch.device) -> None:
        self.files, self.device = files, device
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="next-block")
        self.stop = threading.Event()
        self.job: tuple[int, Future[dict[str, Tensor] | None]] | None = None

    def start(self, layer: int, names: list[str]) -> None:
        self.job = (layer, self.pool.submit(self._read, names))

    def take(self, layer: int) -> dict[str, Tensor] | None:
        """The tensors of a block where they are on the device already; waits for those that are on their way."""
        if self.job is None:
            return None
        (which, future), self.job = self.job, None
        tensors = future.result()
        return tensors if which == layer else None

    def close(self) -> None:
        self.stop.set()
        self.pool.shutdown(cancel_futures=True)

    def _read(self, names: list[str]) -> dict[str, Tensor] | None:
        tensors = {}
        for name in names:
            if self.stop.is_set():
                break
            if self.device.type != "cuda":
                self.files.warm(name)
            else:
                stream = torch.cuda.Stream(self.device)  # beside the one that is at work
                with torch.cuda.stream(stream):
                    tensors[name] = self.files.read(name).to(self.device)
                stream.synchronize()
        return tensors if self.device.type == "cuda" else None
