"""A walk through the tree of what many orders of blocks begin with in common: a block on several states at once."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.functional.block_schedules import Step, members
from lit_layers.models.block_calls import HOOKS, BlockCall
from lit_layers.models.view import LayeredModel, Trajectory


@dataclass(eq=False)
class Node:
    """Where all schedules stand that begin with the same steps."""

    layer: int | None  # whose state it is, if the full model passes here
    children: "dict[Step, Node]" = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    @property
    def next_of_full(self) -> int | None:
        """The block that the full model runs from here."""
        return None if self.layer is None else self.layer + 1

    def uses(self) -> Counter[int]:
        """For how many of the next steps each block is needed."""
        return Counter(number for step in self.children for number in set(members(step)))

    def order(self) -> list[Step]:
        """The next steps: single blocks, then groups, which need the same outputs and then let go of them; the full
        model's last, so that nothing is held all along its way."""
        return sorted(self.children, key=lambda step: (step == self.next_of_full, isinstance(step, tuple)))


class Place:
    """A node on the way, with its state and what it still has to do."""

    def __init__(self, node: Node, state: Tensor, trajectory: Trajectory) -> None:
        self.node, self.state = node, state
        self.waiting, self.needed = node.order(), node.uses()
        self.outputs: dict[int, Tensor] = {}
        number = node.next_of_full
        if number is not None and number in self.needed and number < len(trajectory.hidden):
            self.outputs[number] = trajectory.hidden[number]

    @property
    def num_held(self) -> int:
        return 1 + len(self.outputs)

    def missing(self, step: Step) -> list[int]:
        """The blocks of a step that are still to be run."""
        return [number for number in dict.fromkeys(members(step)) if number not in self.outputs]

    def after(self, step: Step) -> Tensor:
        """The state after a step whose blocks have all been run."""
        self.waiting.remove(step)
        group = members(step)
        outputs = [self.outputs[number] for number in group]
        for number in set(group):
            self.needed[number] -= 1
            if not self.needed[number]:
                del self.outputs[number]
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(0)


class Walk:
    """Through the tree: `room` is how many states may be held when a block runs for several places."""

    def __init__(self, trajectory: Trajectory, runs: "Runs", room: int) -> None:
        self.trajectory, self.runs, self.room = trajectory, runs, room
        self.places: dict[Place, None] = {}  # that have steps to do, the newest last
        self.wanting: dict[int, dict[Place, None]] = {}  # by the block that they need, in the same order
        self.num_held = 0

    def ends(self, root: Node) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yields what ends at a node, with its state."""
        yield from self._begin(Place(root, self.trajectory.hidden[0], self.trajectory))
        while self.places:
            newest = next(reversed(self.places))
            if self._has_room() and self.wanting:
                number = max(self.wanting, key=lambda number: len(self.wanting[number]))
                waiting = self.wanting[number]
                chosen = [*islice(reversed(waiting), power_of_two(min(len(waiting), self.runs.most)))]
                self._run(number, chosen)
                yield from self._grow(chosen)
            else:
                step = newest.waiting[0]
                for number in newest.missing(step):
                    self._run(number, [newest])
                yield from self._begin(self._after(newest, step))

    def _begin(self, place: Place) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        yield from self._open(place)
        yield from self._grow([place])

    def _has_room(self) -> bool:
        return self.runs.most > 1 and self.num_held <= self.room

    def _grow(self, places: list[Place]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Does all steps whose blocks have been run, as far as there is room, and those behind them."""
        while places:
            place = places.pop()
            for step in [step for step in place.waiting if not place.missing(step)]:
                if not self._has_room():
                    return
                following = self._after(place, step)
                yield from self._open(following)
                places.append(following)

    def _open(self, place: Place) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        if place.waiting:
            self.places[place] = None
            self.num_held += place.num_held
            for number in place.needed.keys() - place.outputs.keys():
                self.wanting.setdefault(number, {})[place] = None
        if place.node.ends:
            yield tuple(place.node.ends), place.state

    def _after(self, place: Place, step: Step) -> Place:
        """The place behind a step. Where that was the last one its state goes before the next one's branches come."""
        self.num_held -= place.num_held
        state = place.after(step)
        if place.waiting:
            self.num_held += place.num_held
        else:
            del self.places[place]
        return Place(place.node.children[step], state, self.trajectory)

    def _run(self, number: int, places: list[Place]) -> None:
        outputs = self.runs.outputs(number, [place.state for place in places])
        for place, output in zip(places, outputs, strict=True):
            place.outputs[number] = output
            self.num_held += 1
            del self.wanting[number][place]
        if not self.wanting[number]:
            del self.wanting[number]


class Runs:
    """The blocks of a trajectory on several states of its batch at once."""

    def __init__(self, trajectory: Trajectory, most: int) -> None:
        self.trajectory, self.most = trajectory, most
        self._repeated: dict[int, tuple[BlockCall, ...]] = {}

    @torch.no_grad()
    def outputs(self, number: int, states: list[Tensor]) -> list[Tensor]:
        """What a block makes of each."""
        block, count = self.trajectory.block(number), len(states)
        if count > 1 and self.most > 1 and count not in self._repeated:
            calls = repeated(self.trajectory, count)
            if calls is None:
                self.most = 1
            else:
                self._repeated[count] = calls
        if count == 1 or self.most == 1:
            return [block(state) for state in states]
        whole = self._repeated[count][number - 1](torch.cat(states))
        return [output.clone() for output in whole.split(len(states[0]))]  # each goes by itself


def takes_copies(model: LayeredModel) -> bool:
    """Whether a text is to its model the same whatever texts are beside it: where each part is torch's, or of the
    package of its row, has weights of torch's plain kind, and no hook, which may change one row of the batch."""
    network = model.model
    if model.origin == "structure" or getattr(network, "is_quantized", False):
        return False
    known = ("torch.nn.", f"{model.family.package}.")
    return all(
        type(part).__module__.startswith(known)
        and not any(getattr(part, kind) for kind in HOOKS)
        and all(type(weight) is nn.Parameter for weight in part._parameters.values() if weight is not None)
        and not (isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is None)
        for part in network.modules()
    )


def repeated(trajectory: Trajectory, count: int) -> tuple[BlockCall, ...] | None:
    """The blocks as they are called with `count` copies of the batch, one after the other: by the model's own call with
    these, in which no block runs.

    None where their other arguments are not those of the batch, or copies of them: where they come from blocks, or are
    of a kind that cannot be compared.
    """
    size = trajectory.hidden.shape[1]
    if any(len(column) != size for column in trajectory.inputs.values()):
        return None
    batch = {name: torch.cat([column] * count) for name, column in trajectory.inputs.items()}
    calls = trajectory.model.embedded(batch, in_tuple=trajectory.in_tuple).calls
    known: dict[tuple[int, int], bool] = {}
    for call, once in zip(calls, trajectory.calls, strict=True):
        others, expected = [call.args, call.kwargs], [once.args, once.kwargs]
        if call.layout != once.layout or not _are_copies(others, expected, count, known):
            return None
    if (moved := trajectory.alignment) is not None:
        moved = type(moved)(*(torch.cat([part] * count) for part in moved))
    return tuple(replace(call, alignment=moved) for call in calls)


def _are_copies(value: Any, once: Any, count: int, known: dict[tuple[int, int], bool]) -> bool:
    """Whether arguments of copies of a batch are those of the batch, or `count` times these along one axis.

    `known`: what was found of tensors, by their identities, which the caller keeps alive.
    """
    if value is once:
        return True
    if type(value) is not type(once):
        return False
    if isinstance(value, Tensor):
        key = id(value), id(once)
        if key not in known:
            known[key] = _is_copies(value, once, count)
        return known[key]
    if isinstance(value, tuple | list):
        return len(value) == len(once) and all(
            _are_copies(*pair, count, known) for pair in zip(value, once, strict=True)
        )
    if isinstance(value, dict):
        return value.keys() == once.keys() and all(
            _are_copies(item, once[name], count, known) for name, item in value.items()
        )
    return isinstance(value, bool | int | float | str) and value == once


def _is_copies(value: Tensor, once: Tensor, count: int) -> bool:
    if value.ndim != once.ndim or value.dtype != once.dtype:
        return False
    axes = [axis for axis in range(value.ndim) if value.shape[axis] != once.shape[axis]]
    if any(value.shape[axis] != count * once.shape[axis] for axis in axes):
        return False
    return torch.equal(value, torch.cat([once] * count, dim=axes[0]) if axes else once)


def power_of_two(number: int) -> int:
    """The largest one that is no more: few sizes of batches are met."""
    return 1 << number.bit_length() - 1
