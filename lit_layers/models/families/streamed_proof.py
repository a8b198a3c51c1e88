"""The proof of a model that is read block by block: each block is read once.

What blocks are called with besides their state is first made without any block: by the model's own calls, whose blocks
hand on layer 0. Then the model's own pass is run once, with the state behind block 1 changed. While a block is in
memory there, a twin of it with the same weights is called with whatever else the proof needs: what blocks leave to each
other in their modules, the twins leave to each other, and of other states.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_layers.models.block_calls import BlockCall, entered, first, replaced, split_arguments
from lit_layers.models.families.discovery import Structured
from lit_layers.models.families.proof import Evidence, NotShown, Pass, alike, apart, shifted
from lit_layers.models.families.rows import Network, trunk_of
from lit_layers.models.families.trial_batch import CANNOT_CALL, Probe, Watched

_MOST_VALUES = 4  # that a block returns in a tuple


class Entered(NamedTuple):
    """A batch before block 1, and what every block is called with besides the state."""

    hidden: Tensor
    calls: list[BlockCall]


class Companions:
    """The calls of blocks beside the model's own pass, and how far apart their states are from its."""

    def __init__(self, model: Network, outlined: Structured, passes: Mapping[str, Entered], is_trunk: bool) -> None:
        self.path, self.passes, self.is_trunk = outlined.blocks, passes, is_trunk
        self.blocks = blocks = outlined.block_list(model)
        self.twins = outlined.block_list(_twin(model))
        self.replayed, self.chained, self.padded = ([torch.inf] * len(blocks) for _ in range(3))
        self.refusals: list[str] = []
        self.states = {name: each.hidden for name, each in passes.items()}
        self.states["another"] = shifted(passes["own"].hidden, seed=1)
        self.takes_padding = "padded" in passes and "alone" in passes

    @classmethod
    def of(cls, model: Network, outlined: Structured, probe: Probe) -> "Companions | None":
        """Of a model's blocks as they are without weights; None where its calls do not show what blocks are given."""
        blocks, ids = outlined.block_list(model), probe.needed
        length = max(1, ids.shape[1] - 4)
        attention = (torch.arange(ids.shape[1], device=ids.device) < length)[None].long()
        padded = {"input_ids": ids[:1], "attention_mask": attention}
        batches = {
            "own": probe.inputs,
            "other": {name: c.flip(0)[:, : max(1, c.shape[1] - 1)] for name, c in probe.inputs.items()},
            "padded": {name: column for name, column in padded.items() if name in probe.columns},
            "alone": {"input_ids": ids[:1, :length]},
        }

        def enter(call: Callable[..., Any], inputs: Mapping[str, Tensor], num_values: int) -> Entered | None:
            """None where blocks are not called one after the other; of copies that the model's own pass never sees."""
            with suppress(*CANNOT_CALL):
                own_call = partial(call, model, inputs, dict(probe.options))
                if (made := entered(blocks, [num_values] * len(blocks), own_call)) is not None:
                    hidden, calls = made
                    return Entered(hidden, copy.deepcopy(calls, {id(block): block for block in blocks}))
            return None

        for num_values in range(_MOST_VALUES + 1):
            made = {name: enter(probe.call, inputs, num_values) for name, inputs in batches.items()}
            passes = {name: each for name, each in made.items() if each is not None}
            if "own" in passes and "other" in passes:
                break
        else:
            return None
        trunk = None if trunk_of(model) is model else enter(outlined.features, probe.inputs, num_values)
        whole = passes["own"]
        is_trunk = (
            trunk is not None
            and torch.equal(trunk.hidden, whole.hidden)
            and all(
                alike(one.args, other.args) and alike(one.kwargs, other.kwargs)
                for one, other in zip(trunk.calls, whole.calls, strict=True)
            )
        )
        try:
            return cls(model, outlined, passes, is_trunk)
        except CANNOT_CALL:  # something in it is not to be copied
            return None

    @contextmanager
    def beside(self, calls: list[Watched]) -> Iterator[None]:
        """Inside, a block that the model calls is called with everything else, too; of that `calls` notes nothing."""

        def with_others(number: int, original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                noted = len(calls)
                state, given, named = split_arguments(args, kwargs)
                try:
                    self._call(number, Watched(self.blocks[number], state, given, named, output))
                except CANNOT_CALL as error:
                    self._refuse_uncallable(error)
                del calls[noted:]
                return output if number else self._changed(output)

            return forward

        with replaced(self.blocks, [with_others(n, block.forward) for n, block in enumerate(self.blocks)]):
            yield

    def _call(self, number: int, model: Watched) -> None:
        """The twin of a block, by number from 0, that the model has called: first with another batch, so that it is not
        called for the first time either, and last with another state, so that the next twin finds what blocks of the
        model have left to each other nowhere but in its state."""

        def after(name: str, state: Tensor) -> Tensor:
            call = self.passes[name].calls[number]
            return first(self.twins[number].forward(state, *call.args, **call.kwargs))

        given = self.passes["own"].calls[number]
        mine = dict(enumerate(model.args)) | model.kwargs
        without = dict(enumerate(given.args)) | given.kwargs
        unlike = [name for name, value in mine.items() if not alike(value, without.get(name))]
        try:
            self.states["other"] = after("other", self.states["other"])
            again = after("own", model.state)
            idle = apart(again, model.after) <= 4 * torch.finfo(again.dtype).eps
        except CANNOT_CALL:
            if not unlike:
                raise
            idle = False
        if unlike and not idle:
            self.refusals.append(
                f"block {number + 1} is called with something ({unlike[0]}) that blocks before it have made"
            )
            return
        self.replayed[number] = apart(again, model.after)
        is_own = torch.equal(self.states["own"], model.state)
        self.states["own"] = again if is_own else after("own", self.states["own"])
        self.chained[number] = apart(self.states["own"], model.after)
        if self.takes_padding:
            with suppress(*CANNOT_CALL):
                padded, alone = (after(name, self.states[name]) for name in ("padded", "alone"))
                self.states |= {"padded": padded, "alone": alone}
                self.padded[number] = apart(padded[:, : alone.shape[1]], alone)
        self.states["another"] = after("own", self.states["another"])

    def _changed(self, output: Any) -> Any:
        state = self.states["own"] = shifted(first(output))
        return state if isinstance(output, Tensor) else type(output)((state, *output[1:]))

    def _refuse_uncallable(self, error: Exception) -> None:
        words = " ".join(str(error).split())[:200]
        self.refusals.append(f"its blocks cannot be called again ({type(error).__name__}: {words})")


def _twin(model: Network) -> Network:
    """A copy that has the weights of a model, also those that come and go in its modules, and nothing else of it."""
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for mine, its in zip(twin.modules(), model.modules(), strict=True):
        vars(mine)["_parameters"], vars(mine)["_buffers"] = its._parameters, its._buffers
    return twin


class EvidenceOfOneRead(Evidence):
    """The identities as they were found beside the model's own pass."""

    def __init__(
        self, model: Network, family: Structured, probe: Probe, model_pass: Pass, companions: Companions
    ) -> None:
        super().__init__(model, family, probe, model_pass)
        self.companions = companions

    def replayed(self) -> float:
        if self.companions.refusals:
            raise NotShown(self.companions.refusals[0])
        return self._worst(self.companions.replayed, "block {} called again gives another state")

    def chained(self) -> float:
        return self._same(self.companions.chained[-1], "its blocks one after the other give another last state")

    def arguments_alone(self) -> None:
        """Shown by `replayed`: its calls are with what was made without any block."""

    def followed(self) -> float:
        sentence = (
            "with another state behind block 1, block {} gives another state than in the model: something else leads "
            "from block to block"
        )
        worst = self._worst(self.companions.chained, sentence)
        moved = apart(self.companions.states["another"], self.states[-1])
        if len(self.blocks) > 1 and not self._is_change(moved, worst):
            raise NotShown("another layer 0 changes nothing behind the last block")
        return worst

    def takes_padding(self) -> bool:
        return max(self.companions.padded) <= self.tolerance

    def trunk_alone(self) -> bool:
        return self.companions.is_trunk

    def _worst(self, differences: list[float], sentence: str) -> float:
        return max(self._same(value, sentence.format(number)) for number, value in enumerate(differences, start=1))
