"""Which submodule of a Lightning module holds the network of a config.json, by the names and shapes of its tensors."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_layers.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

State = Mapping[str, "Tensor"]
# What torch.compile, DDP and FSDP put into the names of the tensors of what they wrap.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Expected:
    """The tensors of a network without their memory: `groups` are names that share one, `rows` its vocabulary."""

    folder: Path
    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    groups: tuple[frozenset[str], ...]
    rows: int | None

    @classmethod
    def of(cls, folder: Path) -> "Expected":
        """What the config.json of a folder asks for.

        Raises:
            InputError: a config.json that nobody can build a model from.
        """
        network = empty(folder)
        state = network.state_dict(keep_vars=True)
        by_tensor: dict[int, set[str]] = {}
        for name, tensor in state.items():
            by_tensor.setdefault(id(tensor), set()).add(name)
        return cls(
            folder,
            type(network).__name__,
            {name: tuple(tensor.shape) for name, tensor in state.items()},
            tuple(map(frozenset, by_tensor.values())),
            getattr(getattr(network, "config", None), "vocab_size", None),
        )

    def fitted(self, state: State, prefix: str) -> dict[str, "Tensor"]:
        """The tensors below a prefix as the network has them, without the padding rows of its vocabulary.

        Raises:
            InputError: one that is missing, too many or of another shape.
        """
        given = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        for group in self.groups:  # tied: saved once or under each name
            if (held := next((name for name in sorted(group) if name in given), None)) is not None:
                given |= dict.fromkeys(group - given.keys(), given[held])
        for name, shape in self.shapes.items():
            if name in given and shape and shape[0] == self.rows:
                given[name] = given[name][: shape[0]]
        shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
        names = self.shapes.keys() | (shapes.keys() if prefix else set())  # at the top other submodules stand beside
        wrong = sorted(name for name in names if shapes.get(name) != self.shapes.get(name))
        if wrong:
            name, more = wrong[0], f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise InputError(
                f"its submodule {_spoken(prefix)} does not fit the config.json of {self.folder}: {name} is "
                f"{shapes.get(name)}, not {self.shapes.get(name)}{more}"
            )
        return {name: given[name] for name in self.shapes}

    def prefix_in(self, state: State, model: str | None) -> str:
        """The prefix of the network's tensors: of the submodule `model`, or the only one under which all of them are.

        Raises:
            InputError: none, or several that hold different tensors.
        """
        matches = Counter(prefix for name in state for prefix in self._prefixes(name))
        if model is not None:
            prefix = _plain(model) + "." if _plain(model) else ""
            if not matches[prefix]:
                there = ", ".join(map(_spoken, matches)) or "none"
                raise InputError(
                    f"model: no tensor of a {self.kind} below the submodule {model!r}; such tensors are below: {there}"
                )
            return prefix
        whole = [prefix for prefix in matches if self._has_all(state, prefix)]
        if not whole:
            best = max(matches, key=lambda prefix: matches[prefix], default=None)
            near = "no submodule holds any" if best is None else (
                f"the submodule {_spoken(best)} holds {matches[best]}, without {self._first_missing(state, best)}"
            )  # fmt: skip
            raise InputError(
                f"no submodule holds the {len(self.shapes)} tensors of the {self.kind} that the config.json of "
                f"{self.folder} asks for; {near}: name the right config, or the submodule with model="
            )
        first, *others = whole
        for other in others:
            if any(not state[first + name].equal(state[other + name]) for name in self._held(state, first)):
                raise InputError(
                    f"the submodules {' and '.join(map(_spoken, whole))} each hold a {self.kind}, with other weights: "
                    "name one with model="
                )
        return first

    def _prefixes(self, name: str) -> Iterator[str]:
        parts = name.split(".")
        for place in range(len(parts)):
            if ".".join(parts[place:]) in self.shapes:
                yield "".join(f"{part}." for part in parts[:place])

    def _held(self, state: State, prefix: str) -> list[str]:
        return [name for name in self.shapes if prefix + name in state]

    def _has_all(self, state: State, prefix: str) -> bool:
        return all(any(prefix + name in state for name in group) for group in self.groups)

    def _first_missing(self, state: State, prefix: str) -> str:
        return min(min(group) for group in self.groups if not any(prefix + name in state for name in group))


def empty(folder: Path) -> "nn.Module":
    """The network of a config.json without memory for its parameters."""
    import torch

    from lit_layers.models.shard_files import ShardFiles
    from lit_layers.models.streaming import skeleton

    return skeleton(ShardFiles(folder), device=torch.device("cpu"), dtype=torch.float32)


def unwrapped(state: State) -> dict[str, "Tensor"]:
    """The tensors by their names without what wrappers put there."""
    return {_plain(name): tensor for name, tensor in state.items()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _spoken(prefix: str) -> str:
    return repr(prefix.removesuffix(".")) if prefix else "(the module itself)"
