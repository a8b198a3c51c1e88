"""Series on this machine: folders named after their steps, and Lightning's .ckpt files."""

import functools
import hashlib
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError
from lit_layers.files.durable import Scratch, on_disk
from lit_layers.files.hub import ListedFile, would_run_code
from lit_layers.schedule import Schedule, Steps
from lit_layers.schema import run_facts
from lit_layers.series.checkpoint import Checkpoint, Grammar, Listing, Series, StepName, ordered, recognize
from lit_layers.series.checkpoint_sources import CONFIG, FolderSource, Memory, ModelFiles, Source, companions

if TYPE_CHECKING:  # torch is imported inside functions: it takes seconds, and listing files does not need it
    import torch
    from torch import Tensor, nn

    from lit_layers.models.offload import Offload


_NO_CHECKPOINTS = {"resume", "values", "wandb"}


class _LocalSeries(Series):
    """Checkpoints in a folder, which also holds the cache of their fingerprints."""

    def __init__(self, root: str | Path, steps: Steps, tokens_per_step: int | None) -> None:
        self.root, self.steps, self.tokens_per_step = Path(root), steps, tokens_per_step
        self.name = self.root.resolve().name
        self.memory: Memory = Memory(self.root)

    def _checkpoint(self, name: StepName, source: Source, run: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint at a step; its token count includes the tokens seen before its run began."""
        first, before = _beginning(run)
        per_step = self.tokens_per_step or run.get("tokens_per_step")
        tokens = None if before is None else name.tokens(per_step, first, before)
        return Checkpoint(self.name, name.name, source, name.step, tokens)


class StepFolders(_LocalSeries):
    """A run folder with one folder per step: step-000001000 (written by this package), checkpoint-500, iter_0500, ...

    Tokens per step and the schedule are read from run.json, if the run has one.

    Args:
        root: the run folder.
        steps: all, a list, {log_spaced: N}, or a schedule as in training.
        grammar: how the folders are named; auto recognises the known grammars.
        tokens_per_step: tokens per optimizer step, if there is no run.json.
    """

    def __init__(
        self,
        root: str | Path,
        steps: Steps = "all",
        *,
        grammar: str = "auto",
        tokens_per_step: int | None = None,
    ) -> None:
        super().__init__(root, steps, tokens_per_step)
        self._grammar = None if grammar == "auto" else Grammar(grammar)

    def find(self) -> Listing:
        if not self.root.is_dir():
            raise InputError(f"expected a folder with checkpoints, {self.root} does not exist")
        folders = {path.name: path for path in self.root.iterdir() if path.is_dir() and path.name[0] != "."}
        names = sorted(name for name in folders if name not in _NO_CHECKPOINTS)
        found = ordered(names, self._grammar or recognize(names))
        if not found:
            advice = "name the grammar if they are called otherwise"
            if (self.root / CONFIG).is_file():
                advice = "it is one model: leave steps out, or name the folder that its steps lie in"
            raise InputError(f"{self.root} holds no folder that is a step, such as step-000001000; {advice}")
        run = run_facts(self.root)
        schedule = run.get("config", {}).get("steps")
        until = None if schedule is None else Schedule(schedule).steps_to(found[-1].step, _beginning(run)[0])
        return Listing(
            tuple(self._checkpoint(step, FolderSource(folders[step.name], self.memory), run) for step in found),
            # Steps after the last checkpoint are not expected, because the run may have been interrupted.
            expected=None if until is None else tuple(until),
        )


def _beginning(run: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the step and tokens at which a run began: zero, unless it started from a checkpoint of another run."""
    beginning = run.get("origin") or {}
    return beginning.get("step", 0), beginning.get("tokens", 0)


# Parts that torch.compile, DDP and FSDP insert into the names of the tensors of a wrapped module.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_COUNTED = "n_averaged"  # a counter that torch's AveragedModel adds to the tensors of the model


class NetworkTensors:
    """Names and shapes of the tensors of the network that a folder's config.json describes.

    They identify the network's tensors among all tensors of a Lightning checkpoint. `rows` is the size of the network's
    vocabulary.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        from lit_layers.models.saved import outline  # imports torch

        network = outline(ModelFiles(folder).config, str(folder), torch.float32)
        self.folder, self.kind = folder, type(network).__name__
        self.shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        self.rows: int | None = getattr(getattr(network, "config", None), "vocab_size", None)

    def fitted(self, path: Path, prefix: str) -> dict[str, "Tensor"]:
        """Return the network's tensors from a Lightning checkpoint, without padding rows of the vocabulary.

        `prefix` is the beginning of their names in the file, and is removed.

        Raises:
            InputError: a tensor is missing, unknown or of another shape.
        """
        state = states_in(path)
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        for name, shape in self.shapes.items():
            if name in own and shape and shape[0] == self.rows:
                own[name] = own[name][: shape[0]]
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        # An empty prefix selects all tensors of the file. Then tensors that do not belong to the network are no error.
        names = self.shapes.keys() | (shapes.keys() if prefix else set())
        wrong = sorted(name for name in names if shapes.get(name) != self.shapes.get(name))
        if wrong:
            raise InputError(
                f"{path}: its submodule {_quoted(prefix)} does not fit the config.json of {self.folder}: {wrong[0]} is "
                f"{shapes.get(wrong[0])}, not {self.shapes.get(wrong[0])}"
            )
        return {name: own[name] for name in self.shapes}

    def prefix_in(self, path: Path, model: str | None) -> str:
        """Return the prefix of the names of the network's tensors in a Lightning checkpoint.

        It is the name of the submodule that holds the network: `model` or, if that is None, the only one that fits.

        Raises:
            InputError: no submodule fits, or several fit and hold different tensors.
        """
        state, longest = states_in(path), max(self.shapes, key=len)
        found = [name.removesuffix(longest) for name in state if f".{name}".endswith(f".{longest}")]
        there = " and ".join(map(_quoted, found)) or "none"
        asked = found if model is None else [each for each in found if each.removesuffix(".") == _plain(model)]
        if not asked:
            where = "a submodule" if model is None else f"the submodule {model!r}"
            raise InputError(
                f"{path}: expected a {self.kind}, by the config.json of {self.folder}, in {where}, found it in {there}"
            )
        first = asked[0]
        for other in asked[1:]:
            both = [name for name in self.shapes if first + name in state and other + name in state]
            if any(not state[first + name].equal(state[other + name]) for name in both):
                raise InputError(
                    f"{path}: the submodules {there} each hold a {self.kind}, with other weights: name one with model= "
                    "(--submodule)"
                )
        return first


def states_in(path: Path) -> dict[str, "Tensor"]:
    """Return the tensors of a Lightning checkpoint; parts that wrappers add to their names are removed."""
    state = read_lightning(path)["state_dict"]
    return {_plain(name): tensor for name, tensor in state.items() if name.rpartition(".")[2] != _COUNTED}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _quoted(prefix: str) -> str:
    return repr(prefix.removesuffix(".")) if prefix else "(the module itself)"


WEIGHTS, SUBMODULE = "model.safetensors", "submodule"
DESCRIBED = "network"  # key of the content of config.json in Lightning checkpoints that this package wrote


class LightningCheckpoints(_LocalSeries):
    """The `.ckpt` files of a Lightning project, in the order of the optimizer steps that they record.

    The network may be any submodule of the project's LightningModule, whatever its name. This package must know
    the network's model family.

    Args:
        root: a folder, which is searched with its subfolders, or one file.
        config: a folder with the model's config.json. None: `root`, or the first step folder in `root` or in its
            parent.
        steps: all, a list, {log_spaced: N}, or a schedule as in training.
        tokens_per_step: tokens per optimizer step, if known.
        model: name of the submodule that is the network; None: the only one with the tensors of config.json.
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
        self.file = Path(root) if os.path.isfile(root) else None
        super().__init__(root if self.file is None else self.file.parent, steps, tokens_per_step)
        self.config, self.model = None if config is None else Path(config), model

    def find(self) -> Listing:
        found = self.root.rglob("*.ckpt") if self.file is None else [self.file]
        paths = sorted(found, key=lambda path: (path.name.startswith("last"), str(path)))
        if not paths:
            raise InputError(f"expected Lightning checkpoints (*.ckpt) below {self.root}, found none")
        expected = NetworkTensors(self._config(paths[0]))
        run = next(filter(None, map(run_facts, (self.root, self.root.parent))), {})
        first, _ = _beginning(run)
        by_step: dict[int, Path] = {}
        for path in paths:
            by_step.setdefault(read_lightning(path)["global_step"], path)
        prefix = ""
        # Check the first and the last file. A submodule with averaged weights may equal the network in the first file,
        # and differs from the network in the last one.
        for step in sorted({min(by_step), max(by_step)}):
            prefix = expected.prefix_in(by_step[step], self.model)
        return Listing(
            tuple(
                self._checkpoint(
                    StepName(str(path.relative_to(self.root)), first + step),
                    LightningSource(expected.folder, self.memory, path, prefix, expected),
                    run,
                )
                for step, path in sorted(by_step.items())
            )
        )

    def _config(self, path: Path) -> Path:
        steps = [path for folder in (self.root, self.root.parent) for path in sorted(folder.glob("step*"))]
        for folder in [self.root, *steps] if self.config is None else [self.config]:
            if (folder / CONFIG).is_file():
                return folder
        if self.config is None and isinstance(described := read_lightning(path).get(DESCRIBED), str):
            return _written(described).folder
        raise InputError(
            f"config: expected the config.json of the models in {self.config or self.root}, beside the .ckpt files"
        )


@dataclass(frozen=True)
class LightningSource(FolderSource):
    """The network in one `.ckpt` file, with config.json and tokenizer from a folder."""

    memory: Memory = field(compare=False, repr=False)
    path: Path
    prefix: str
    expected: NetworkTensors = field(compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        """The files that a model folder with this network would have.

        The hash of the weights does not depend on the optimizer's state, so that an audit finds copies of weights.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._state().values())
        digest = self.memory.hash_of(self.path, self._hash, part=self.prefix)
        return {**companions(self.folder), WEIGHTS: ListedFile(WEIGHTS, size, digest)}

    def _hash(self) -> str:
        import torch

        digest = hashlib.sha256()
        for name, tensor in sorted(self._state().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def identity(self) -> Any:
        return [on_disk(self.path), self.prefix]

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        yield from self._state().items()

    def load(self, folder: Path, dtype: "torch.dtype", offload: "Offload | None" = None) -> "nn.Module":
        if offload is not None:
            raise InputError(f"offload: {self.path} is only read whole: leave --offload out")
        network = ModelFiles(folder, untrained=0).load(folder, dtype)
        network.load_state_dict(self._state())
        return network

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": os.fspath(self.path), SUBMODULE: self.prefix.removesuffix(".")}

    def _state(self) -> "dict[str, Tensor]":
        return self.expected.fitted(self.path, self.prefix)


@functools.cache
def _written(described: str) -> Scratch:
    """Return a temporary folder with a network's config.json; `described` is the text of that file.

    The vocabulary size in the file is the one without padding rows.
    """
    settings, scratch = json.loads(described), Scratch()
    if "unpadded_vocab_size" in settings:
        settings["vocab_size"] = settings.pop("unpadded_vocab_size")
    (scratch.folder / CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    return scratch


def read_lightning(path: Path) -> dict[str, Any]:
    """Return the content of a Lightning checkpoint, memory-mapped: values are read on first access.

    Raises:
        InputError: the file is not a Lightning checkpoint, cannot be read, or would run code.
    """
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise would_run_code(os.fspath(path), error) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): get it again") from error
    if not isinstance(content, dict) or not {"state_dict", "global_step"} <= content.keys():
        raise InputError(f"{path} is no checkpoint of Lightning: it lacks state_dict or global_step")
    return content
