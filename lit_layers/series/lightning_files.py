"""Series of Lightning checkpoints of our modules: `.ckpt` files, which hold weights and no configuration."""

import functools
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError
from lit_layers.schedule import Steps
from lit_layers.series.checkpoint import Checkpoint, Listing, Series, would_run_code
from lit_layers.series.files import ListedFile
from lit_layers.series.local import run_facts
from lit_layers.series.sources import Source, companions

if TYPE_CHECKING:
    from torch import Tensor

PREFIX, WEIGHTS, CONFIG = "model.", "model.safetensors", "config.json"


class LightningCheckpoints(Series):
    """The `.ckpt` files below a folder, in the order of the optimizer steps that they record.

    Args:
        root: a folder; those below it are searched, too.
        config: a folder with the model's config.json, such as one of the run's own steps. Without it the first step
            folder in `root`, or beside it, is taken.
        steps: all, a list, {log_spaced: N}, or a schedule as in training.
        tokens_per_step: where it is known.
    """

    def __init__(
        self,
        root: str | Path,
        steps: Steps = "all",
        *,
        config: str | Path | None = None,
        tokens_per_step: int | None = None,
    ) -> None:
        if tokens_per_step is not None and tokens_per_step < 1:
            raise InputError(f"tokens_per_step: expected at least 1, got {tokens_per_step}")
        self.root, self.steps, self.tokens_per_step = Path(root), steps, tokens_per_step
        self.config = None if config is None else Path(config)
        self.name = self.root.resolve().name

    def find(self) -> Listing:
        paths = sorted(self.root.rglob("*.ckpt"), key=lambda path: (path.name.startswith("last"), str(path)))
        if not paths:
            raise InputError(f"expected Lightning checkpoints (*.ckpt) below {self.root}, found none")
        config = self._config()
        by_step: dict[int, list[Path]] = {}
        for path in paths:
            by_step.setdefault(_read(path)["global_step"], []).append(path)
        return Listing(
            checkpoints=tuple(self._checkpoint(step, by_step[step][0], config) for step in sorted(by_step)),
            doubles=tuple(
                names
                for same in by_step.values()  # last.ckpt is a copy of another by design
                if len(names := tuple(self._name(path) for path in same if not path.name.startswith("last"))) > 1
            ),
        )

    def _checkpoint(self, step: int, path: Path, config: Path) -> Checkpoint:
        begun = next(filter(None, map(run_facts, (self.root, self.root.parent))), {}).get("origin") or {}
        first, before = begun.get("step", 0), begun.get("tokens", 0)
        tokens = None if self.tokens_per_step is None or before is None else before + step * self.tokens_per_step
        return Checkpoint(self.name, self._name(path), LightningSource(path, config), step=first + step, tokens=tokens)

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
    """One `.ckpt` file; `fetch` writes what it holds as a model folder that `drop` removes."""

    def __init__(self, path: Path, config: Path) -> None:
        self.path, self.config = path, config
        self._folder: Path | None = None

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        """As a folder would hold them; the weights' hash leaves the optimizer out, so that copies are seen."""
        digest, size = hashlib.sha256(), 0
        for name, tensor in sorted(self._state().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(_bytes(tensor))
            size += tensor.numel() * tensor.element_size()
        return {**companions(self.config), WEIGHTS: ListedFile(WEIGHTS, size, digest.hexdigest())}

    def read(self, path: str) -> bytes:
        return (self.config / path).read_bytes()

    def fetch(self) -> Path:
        from lit_layers.models.build import causal_lm, save

        if self._folder is None:
            model = causal_lm(self.config)
            model.load_state_dict(self._fitting(model.state_dict()))
            folder = Path(tempfile.mkdtemp(prefix="lit-layers-"))
            for path in companions(self.config):
                shutil.copyfile(self.config / path, folder / path)
            save(model, folder)
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

    def _fitting(self, own: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """The weights without the padding rows of the vocabulary."""
        given = self._state()
        for name in sorted(own.keys() | given.keys()):
            shapes = [tuple(state[name].shape) if name in state else None for state in (given, own)]
            if shapes[0] != shapes[1] and name in given and name in own and len(given[name]) > len(own[name]):
                given[name] = given[name][: len(own[name])]
                shapes[0] = tuple(given[name].shape)
            if shapes[0] != shapes[1]:
                raise InputError(
                    f"{self.path} does not fit the config.json of {self.config}: {name} is {shapes[0]}, not {shapes[1]}"
                )
        return given

    def _state(self) -> "dict[str, Tensor]":
        state = _read(self.path)["state_dict"]
        return {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}


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
