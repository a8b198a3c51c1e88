"""Run a model with its blocks in another order: skipped, repeated, or in parallel."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Schedule, Step, Variant, checked, format_schedule, members, variants
from lit_layers.functional.jacobian.block_call import is_cache, is_hooked
from lit_layers.models.block_calls import block_output, replaced, split_state, state_of
from lit_layers.models.build import plain_model
from lit_layers.models.families import Network
from lit_layers.models.structure import family_of
from lit_layers.models.view import REORDERED, LayeredModel, Trajectory

# Each order has an id, which it stores in the caches that it fills. Unlike an object, an id survives copying a cache.
_IDS, _OWNER = itertools.count(1), "lit_layers_order"


@contextmanager
def running_order(model: nn.Module, schedule: Sequence[Step]) -> Iterator[nn.Module]:
    """Let the blocks of `model` run in the order of `schedule` until the context ends; yield the model.

    Every call of the model inside the context runs the schedule, also calls by other code such as `generate`. Each
    block gets the other arguments (masks, positions) that it has in the original order. Embedding, final norm, head,
    weights, `state_dict` and modules do not change. Gradients flow through all executed blocks.

    In a key-value cache, each execution of a block has its own layer. So generation with and without a cache agree.
    After the context, this cache cannot be used. A `LayeredModel` refuses the model inside the context. Hooks on single
    blocks would not see the executions, so blocks with hooks are refused.

    Args:
        schedule: which blocks run, one entry after the other. A number runs that block (1..L) on the current state. A
            tuple of numbers runs each of these blocks on the current state and averages their outputs.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298. Its code averages the keys and values of
    parallel blocks. We do not do this, because the results would be wrong from the second generated token on.

    Raises:
        InputError: if the model is not a sequence of blocks, has hooks on its blocks, or is already inside such a
            context (in any thread). Inside the context, a call of the model also raises an `InputError` if
            `output_hidden_states` is set, or if the key-value cache was filled in another order. The cache must be an
            ordinary `DynamicCache` in memory.
        TypeError, ValueError: if the schedule does not fit the model.
    """
    network: Network = plain_model(model)
    family = family_of(network)
    blocks = family.block_list(network)
    if any(map(is_hooked, blocks)):
        raise InputError(f"{type(network).__name__} has hooks on its blocks, which do not move with them: remove them")
    steps = checked(schedule, len(blocks))
    if (running := network.__dict__.setdefault(REORDERED, steps)) is not steps:
        kind, other = type(network).__name__, format_schedule(running)
        raise InputError(f"this {kind} runs the schedule {other} already: leave that context first")
    returned = family.num_returned(len(blocks))
    order = _Order(steps, [block.forward for block in blocks], type(network).__name__, returned)
    refusing = network.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
    try:
        with refusing, replaced(blocks, map(order.forward_of, range(1, len(blocks) + 1))):
            yield model
    finally:
        network.__dict__.pop(REORDERED, None)


def _refuse_hidden_states(network: Network, args: tuple, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_hidden_states")
    if asked or (asked is None and getattr(getattr(network, "config", None), "output_hidden_states", False)):
        raise InputError(
            f"output_hidden_states: {type(network).__name__} runs its blocks in another order and would give the "
            "embedding for all of them: take the states of the plain model"
        )


class _Order:
    """Functions that replace the `forward` of each block inside a `running_order` context.

    The new `forward` of a block records the block's arguments and returns its input state. The last block therefore
    receives the input of block 1, and its new `forward` runs the whole schedule on this state.

    A model of L blocks counts the cached tokens in the first L layers of a key-value cache. Here, these cache layers
    hold only placeholders for the count. Each execution of a block stores its keys and values in its own cache layer
    after the first L.
    """

    def __init__(
        self,
        steps: Schedule,
        forwards: list[Callable[..., Any]],
        kind: str,
        returned: Sequence[int],
    ) -> None:
        self.steps, self.forwards, self.kind, self.returned = steps, forwards, kind, returned
        self.id = next(_IDS)
        self.arguments: list[tuple[tuple, dict[str, Any]]] = []  # of the blocks called so far in this forward pass

    def forward_of(self, number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, args, kwargs = split_state(args, kwargs)
            if number == 1:
                self._claim_caches(args, kwargs)
                self.arguments = []
            if len(self.arguments) != number - 1:
                raise RuntimeError(f"block {number} of {self.kind} was called alone: leave its order of blocks first")
            self.arguments.append((args, kwargs))
            if number < len(self.forwards):
                return block_output(hidden, self.returned[number - 1])
            arguments, self.arguments = self.arguments, []
            return block_output(self._run(hidden, arguments), self.returned[number - 1])

        return forward

    def _claim_caches(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Mark empty key-value caches as filled in this order of the blocks.

        Caches that were filled in another order are refused, and so are caches of an unsupported class.
        """
        from transformers.cache_utils import DynamicCache, DynamicLayer

        for cache in filter(is_cache, (*args, *kwargs.values())):
            is_plain = type(cache) is DynamicCache and not cache.offloading
            if not is_plain or not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
                raise InputError(
                    f"{self.kind} cannot use a {type(cache).__name__} of this kind while its blocks run in another "
                    "order: generate with use_cache=False"
                )
            owner = getattr(cache, _OWNER, None)
            if owner is None and not cache.get_seq_length():
                setattr(cache, _OWNER, self.id)
            elif owner != self.id:
                raise InputError(
                    f"{self.kind} was given a key-value cache that was filled in another order of its blocks: begin "
                    "with the whole text in this one"
                )

    def _run(self, hidden: Tensor, arguments: list[tuple[tuple, dict[str, Any]]]) -> Tensor:
        # The model computes masks and positions from the number of tokens in the cache's first L layers, one per block.
        # So add placeholders of width 1 for the new tokens there. The real keys and values are in later cache layers.
        placeholder = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)  # (batch, head, tokens, width)
        for index, (args, kwargs) in enumerate(arguments):
            for cache in filter(is_cache, (*args, *kwargs.values())):
                cache.update(placeholder, placeholder, index)
        slot = len(self.forwards)
        for step in self.steps:
            outputs = []
            for number in members(step):
                args, kwargs = arguments[number - 1]
                args = tuple(_slot_view(value, slot, number) for value in args)
                kwargs = {name: _slot_view(value, slot, number) for name, value in kwargs.items()}
                outputs.append(state_of(self.forwards[number - 1](hidden, *args, **kwargs)))
                slot += 1
            hidden = outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(0)
        return hidden


def _slot_view(value: Any, slot: int, number: int) -> Any:
    """Return an argument of block `number` for one execution of the block.

    A key-value cache is replaced by a view of its layer `slot`, so that each execution has its own keys and values. Any
    other argument is returned unchanged.
    """
    if not is_cache(value):
        return value
    if len(value.layers) == slot:
        # Give the new cache layer the class and the sliding window of the block's cache layer in the original order.
        layer = value.layers[number - 1]
        window = getattr(layer, "sliding_window", None)
        value.layers.append(type(layer)() if window is None else type(layer)(sliding_window=window))
    return _OneSlot(value, slot)


class _OneSlot:
    """A view of a key-value cache that reads and writes one of its layers, whatever layer index the block passes."""

    def __init__(self, cache: Any, slot: Any) -> None:
        self._cache, self._slot = cache, slot

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.layers[self._slot].update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def variants_of(options: Any, model: LayeredModel, prefix: str = "") -> list[Variant]:
    """Return the orders of blocks that the options of an analysis select. The original order comes first.

    Args:
        options: an object with `variants` (kinds of orders), and optionally with `middles`, `seeds`, `loops` and
            `custom`, as `lit_layers.functional.block_schedules.variants` explains them.
        prefix: the beginning of error messages.

    Raises:
        InputError: if the model has only one block, or the options do not fit it.
    """
    names = ("middles", "seeds", "loops", "custom")
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if model.num_layers < 2:
        raise InputError(f"{prefix}an order needs at least two blocks, the model has {model.num_layers}")
    try:
        return variants(model.num_layers, options.variants, **given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{prefix}{error}") from error


class SharedPrefixes:
    """The final states of a batch under each of many schedules (orders of blocks).

    The states equal those that the model computes inside the context manager `running_order`. Blocks at the start that
    several schedules share run only once, and equal schedules run only once. If a schedule begins as the original order
    does (blocks 1, 2, ...), these blocks do not run: their states are taken from the model's ordinary forward pass.
    Only the states along the current schedule are in memory.

    Raises:
        TypeError, ValueError: if a schedule does not fit `num_blocks` blocks.
    """

    def __init__(self, schedules: Sequence[Sequence[Step]], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        indices: dict[Schedule, list[int]] = {}
        for index, schedule in enumerate(schedules):
            indices.setdefault(checked(schedule, num_blocks), []).append(index)
        # Sort the schedules, so that those with a common prefix follow each other.
        self.indices = {each: indices[each] for each in sorted(indices, key=lambda each: [*map(members, each)])}

    def states(self, trajectory: Trajectory) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield for each distinct schedule its indices in the constructor's `schedules`, and its final state.

        The final state (batch, tokens, dim) is the one before the final norm and the head. The caller must not write to
        it, because later schedules may continue from it.
        """
        passed, previous, full = [trajectory.hidden[0]], (), tuple(range(1, len(trajectory.hidden)))
        for schedule, indices in self.indices.items():
            pairs = zip(schedule, previous, strict=False)
            start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            del passed[start + 1 :]
            for layer, step in enumerate(schedule[start:], start + 1):
                is_full = schedule[:layer] == full[:layer]
                passed.append(trajectory.hidden[layer] if is_full else _apply_step(step, passed[-1], trajectory))
            yield tuple(indices), passed[-1]
            previous = schedule


@torch.no_grad()
def _apply_step(step: Step, state: Tensor, trajectory: Trajectory) -> Tensor:
    outputs = [trajectory.block(number)(state) for number in members(step)]
    return outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(0)
