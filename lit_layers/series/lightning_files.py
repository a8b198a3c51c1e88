"""Series of Lightning checkpoints: `.ckpt` files, which hold weights and no configuration."""

import functools
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError
from lit_layers.foreign_weights import would_run_code
from lit_layers.run_file import run_facts
from lit_layers.schedule import Steps
from lit_layers.series.checkpoint import Checkpoint, Listing, Series
from lit_layers.series.files import ListedFile
from lit_layers.series.fingerprints import Memory, on_disk
from lit_layers.series.sources import Source, companions
from lit_layers.series.submodule import Expected, empty, unwrapped

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class LightningCheckpoints(Series):
    """The `.ckpt` files below a folder, in the order of the optimizer steps that they record: of any Lightning project
    whose module holds a network of a known family, under whatever name.

    Args:
        root: a folder; those below it are searched, too.
        config: a folder with the model's config.json, such as one of the run's own steps. Without it the first step
            folder in `root`, or beside it, is taken.
        steps: all, a list, {log_spaced: N}, or a schedule as in training.
        tokens_per_step: where it is known.
        model: name of the submodule that is the network; None: the only one that holds the tensors of config.json.
    """

    def __init__(
        self,
        root: str | Path,
        steps: Steps = "all",
        *,
        config: str | Path | None = None,
        tokens_per_step: int | None = None,
        model: str | None = None,
    ) -> None:
        if tokens_per_step is not None and tokens_per_step < 1:
            raise InputError(f"tokens_per_step: expected at least 1, got {tokens_per_step}")
        self.root, self.steps, self.tokens_per_step = Path(root), steps, tokens_per_step
        self.config, self.model = None if config is None else Path(config), model
        self.name, self.memory = self.root.resolve().name, Memory(self.root)

    def find(self) -> Listing:
        paths = sorted(self.root.rglob("*.ckpt"), key=lambda path: (path.name.startswith("last"), str(path)))
        if not paths:
            raise InputError(f"expected Lightning checkpoints (*.ckpt) below {self.root}, found none")
        expected = Expected.of(self._config())
        by_step: dict[int, list[Path]] = {}
        for path in paths:
            by_step.setdefault(_read(path)["global_step"], []).append(path)
        first = by_step[min(by_step)][0]
        try:
            prefix = expected.prefix_in(unwrapped(_read(first)["state_dict"]), self.model)
        except InputError as error:
            raise InputError(f"{first}: {error}") from error

        def source(step: int) -> "LightningSource":
            return LightningSource(by_step[step][0], expected, prefix, self.memory)

        return Listing(
            checkpoints=tuple(self._checkpoint(step, source(step)) for step in sorted(by_step)),
            doubles=tuple(
                names
                for same in by_step.values()  # last.ckpt is a copy of another by design
                if len(names := tuple(self._name(path) for path in same if not path.name.startswith("last"))) > 1
            ),
        )

    def _checkpoint(self, step: int, source: "LightningSource") -> Checkpoint:
        begun = next(filter(None, map(run_facts, (self.root, self.root.parent))), {}).get("origin") or {}
        first, before = begun.get("step", 0), begun.get("tokens", 0)
        tokens = None if self.tokens_per_step is None or before is None else before + step * self.tokens_per_step
        return Checkpoint(self.name, self._name(source.path), source, step=first + step, tokens=tokens)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _config(self) -> Path:
        beside = [path for folder in (self.root, self.root.parent) for path in sorted(folder.glob("step*"))]
        for folder in beside if self.config is None else [self.config]:
            if (folder / CONFIG).is_file():
                return folder
        raise InputError(
            f"config: expected a folder with the config.json of the models in {self.root}, got {self.config}"
        )


class LightningSource(Source):
    """The network in one `.ckpt` file; `fetch` writes it as a model folder that `drop` removes."""

    def __init__(self, path: Path, expected: Expected, prefix: str, memory: Memory | None) -> None:
        self.path, self.config, self._expected, self._prefix = path, expected.folder, expected, prefix
        self._memory = memory
        self._folder: Path | None = None

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        """As a folder would hold them; the weights' hash leaves the optimizer out, so that copies are seen."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._state().values())
        found = self._memory.hash_of(self.path, self._hash, part=self._prefix) if self._memory else self._hash()
        return {**companions(self.config), WEIGHTS: ListedFile(WEIGHTS, size, found)}

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self._state().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(_bytes(tensor))
        return digest.hexdigest()

    @property
    def is_here(self) -> bool:
        return True

    def identity(self) -> Any:
        return [on_disk(self.path), self._prefix]

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        state = self._state()
        for group in self._expected.groups:
            yield (name := min(group)), state[name]

    def recorded_step(self) -> int | None:
        """Of its first optimizer, where that counts them, as those of the Adam family do."""
        try:
            states = _read(self.path)["optimizer_states"][0]["state"]
            return max(int(each["step"]) for each in states.values())
        except (LookupError, TypeError, ValueError, AttributeError):
            return None

    def read(self, path: str) -> bytes:
        return (self.config / path).read_bytes()

    def fetch(self) -> Path:
        from lit_layers.models.build import save

        if self._folder is None:
            network = empty(self.config)
            network.load_state_dict(self._state(), assign=True)
            folder = Path(tempfile.mkdtemp(prefix="lit-layers-"))
            for path in companions(self.config):
                shutil.copyfile(self.config / path, folder / path)
            save(network, folder)
            self._folder = folder
        return self._folder

    def drop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": os.fspath(self.path)}

    def _tokenizer_name(self) -> str:
        return str(self.config)

    def _state(self) -> "dict[str, Tensor]":
        try:
            return self._expected.fitted(unwrapped(_read(self.path)["state_dict"]), self._prefix)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint, mapped: of the tensors only what is touched is read."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise would_run_code(os.fspath(path), error) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): get it again") from error
    if not isinstance(found, dict) or not {"state_dict", "global_step"} <= found.keys():
        raise InputError(f"{path} is no checkpoint of Lightning: it lacks state_dict or global_step")
    return found


def _bytes(tensor: "Tensor") -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
