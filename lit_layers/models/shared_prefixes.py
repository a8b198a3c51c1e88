"""Many orders of the blocks on one batch, with what they begin with in common computed once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_layers.functional.block_schedules import Schedule, Step, checked
from lit_layers.models.view import Trajectory


class SharedPrefixes:
    """Final states of many schedules, as a walk through the tree of their common beginnings, depth first.

    Composed as in `LayeredModel.replay`. On one state each block runs at most once: as a step of its own, as the first
    of several schedules, in groups of blocks side by side. States that the full model passes are those of the
    trajectory and cost no run. Equal schedules are one.

    In memory are the states on the way to where the walk is, one for each step, and at each of them what the branches
    yet to come still need of a group: not one for each schedule.

    Raises:
        TypeError, ValueError: a schedule that does not fit `num_blocks` blocks.
    """

    def __init__(self, schedules: Sequence[Sequence[Step]], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._root = _Node(layer=0)
        for index, schedule in enumerate(schedules):
            self._insert(index, checked(schedule, num_blocks))

    @property
    def num_block_runs(self) -> int:
        """How many times a block runs for one batch, beside the trajectory itself."""
        total, nodes = 0, [self._root]
        while nodes:
            node = nodes.pop()
            total += sum(number != node.next_of_full for number in node.uses())
            nodes += node.children.values()
        return total

    def states(self, trajectory: Trajectory) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yields the indices of equal schedules and the state (batch, tokens, dim) before final norm and head.

        The state is to be read and not written to: it may be needed for others.

        Raises:
            ValueError: a trajectory through another number of blocks.
        """
        if trajectory.num_layers != self.num_blocks:
            raise ValueError(
                f"expected a trajectory through {self.num_blocks} blocks, got one through {trajectory.num_layers}"
            )
        path = [_Place(self._root, trajectory.hidden[0])]
        while path:
            place = path[-1]
            if place.node.ends and not place.told:
                place.told = True
                yield tuple(place.node.ends), place.state
            if not place.waiting:
                path.pop()
                continue
            step = place.waiting.pop(0)
            state = place.after(step, trajectory)
            if not place.waiting:
                path.pop()  # nothing else begins here: its state goes before the next one's branches come
            path.append(_Place(place.node.children[step], state))

    def _insert(self, index: int, schedule: Schedule) -> None:
        node = self._root
        for step in schedule:
            if step not in node.children:
                node.children[step] = _Node(layer=node.next_of_full if step == node.next_of_full else None)
            node = node.children[step]
        node.ends.append(index)


@dataclass(eq=False)
class _Node:
    """Where all schedules stand that begin with the same steps."""

    layer: int | None  # whose state it is, if the full model passes here
    children: "dict[Step, _Node]" = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    @property
    def next_of_full(self) -> int | None:
        """The block that the full model runs from here."""
        return None if self.layer is None else self.layer + 1

    def uses(self) -> Counter[int]:
        """For how many of the next steps each block is needed."""
        return Counter(number for step in self.children for number in set(_members(step)))

    def order(self) -> list[Step]:
        """The next steps: single blocks, then groups, which need the same outputs and then let go of them; the full
        model's last, so that nothing is held all along its way."""
        return sorted(self.children, key=lambda step: (step == self.next_of_full, isinstance(step, tuple)))


class _Place:
    """A node on the way, with its state and what it still has to do."""

    def __init__(self, node: _Node, state: Tensor) -> None:
        self.node, self.state, self.told = node, state, False
        self.waiting, self.needed = node.order(), node.uses()
        self.outputs: dict[int, Tensor] = {}

    def after(self, step: Step, trajectory: Trajectory) -> Tensor:
        """The state behind a step."""
        members = _members(step)
        for number in members:
            if number not in self.outputs:
                self.outputs[number] = self._run(number, trajectory)
        found = [self.outputs[number] for number in members]
        for number in set(members):
            self.needed[number] -= 1
            if not self.needed[number]:
                del self.outputs[number]
        return found[0] if len(found) == 1 else torch.stack(found).mean(0)

    def _run(self, number: int, trajectory: Trajectory) -> Tensor:
        if number == self.node.next_of_full:
            return trajectory.hidden[number]
        with torch.no_grad():
            return trajectory.block(number)(self.state)


def _members(step: Step) -> tuple[int, ...]:
    return step if isinstance(step, tuple) else (step,)
