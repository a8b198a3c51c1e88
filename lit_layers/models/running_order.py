"""A model whose blocks run in another order while a context lasts: skipped, repeated, side by side."""

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

_IDS, _OWNER = itertools.count(1), "lit_layers_order"  # of orders; a number stays what it is in a copy of a cache


@contextmanager
def running_order(model: nn.Module, schedule: Sequence[Step]) -> Iterator[nn.Module]:
    """The model, whose blocks run in the order of `schedule` until the context ends, whoever calls it.

    A number runs its whole block on the current state; a tuple runs each of its blocks on the same state and averages
    their outputs. What a block is called with besides its state (masks, positions) is what it would have had in place.
    Embedding, final norm and head stay; so do weights, `state_dict` and modules. Gradients flow. With a key-value cache
    each execution of each block has a slot of its own, so that cached generation is what recomputing gives; a cache
    that was begun in the context ends with it. Hooks on single blocks do not see the executions, nor would the model's
    `output_hidden_states`, which is refused.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298. (Its code averages the keys and values of
    parallel blocks, which is wrong from the second generated token on.)

    A `LayeredModel` of it is refused meanwhile.

    Raises:
        InputError: a model that is no row of blocks, or one in such a context already, here or in another thread;
            inside, a cache that is not made of keys and values alone or was filled in another order, and
            `output_hidden_states`.
        TypeError, ValueError: a schedule that does not fit the model.
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
    """Stands in place of the blocks: each notes what it is called with and passes its input on; the last runs them.

    Each execution of a block has a slot of a key-value cache, after those that the model itself counts.
    """

    def __init__(
        self,
        steps: Schedule,
        forwards: list[Callable[..., Any]],
        kind: str,
        returned: Sequence[int],
    ) -> None:
        self.steps, self.forwards, self.kind, self.returned = steps, forwards, kind, returned
        self.number = next(_IDS)
        self.arguments: list[tuple[tuple, dict[str, Any]]] = []  # of the blocks of one forward pass, so far

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
        """Claim empty caches for this order, and refuse what another one has filled, or what has no slots."""
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
                setattr(cache, _OWNER, self.number)
            elif owner != self.number:
                raise InputError(
                    f"{self.kind} was given a key-value cache that was filled in another order of its blocks: begin "
                    "with the whole text in this one"
                )

    def _run(self, hidden: Tensor, arguments: list[tuple[tuple, dict[str, Any]]]) -> Tensor:
        # Caches say of each block that the tokens at hand are in it: masks and positions go by that.
        placeholder = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)  # (batch, head, tokens, width)
        for number, (args, kwargs) in enumerate(arguments):
            for cache in filter(is_cache, (*args, *kwargs.values())):
                cache.update(placeholder, placeholder, number)
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
    """What block `number` is given in place of a cache; anything else as it is."""
    if not is_cache(value):
        return value
    if len(value.layers) == slot:
        layer = value.layers[number - 1]  # of the same kind: with a window, or without
        window = getattr(layer, "sliding_window", None)
        value.layers.append(type(layer)() if window is None else type(layer)(sliding_window=window))
    return _OneSlot(value, slot)


class _OneSlot:
    """A cache of which a block sees one slot (its place), whichever it asks for."""

    def __init__(self, cache: Any, slot: Any) -> None:
        self._cache, self._slot = cache, slot

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.layers[self._slot].update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def variants_of(options: Any, model: LayeredModel, prefix: str = "") -> list[Variant]:
    """The orders of blocks that an analysis's options of those names ask for, the full model first.

    Raises:
        InputError: options that do not fit the model; the sentence begins with the `place`.
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
    """Final states of many schedules on one batch; what they begin with in common is computed once.

    Composed as in `running_order`. States that the full model passes are those of the trajectory and cost no run.
    Equal schedules are one. The states in memory are those on the way through the present schedule, and of one group.

    Raises:
        TypeError, ValueError: a schedule that does not fit `num_blocks` blocks.
    """

    def __init__(self, schedules: Sequence[Sequence[Step]], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        indices: dict[Schedule, list[int]] = {}
        for index, schedule in enumerate(schedules):
            indices.setdefault(checked(schedule, num_blocks), []).append(index)
        # In this order schedules with a common beginning follow each other.
        self.indices = {each: indices[each] for each in sorted(indices, key=lambda each: [*map(members, each)])}

    def states(self, trajectory: Trajectory) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield the indices of equal schedules and the state (batch, tokens, dim) before final norm and head.

        The state is to be read and not written to: it may be needed for others.
        """
        passed, previous, full = [trajectory.hidden[0]], (), tuple(range(1, len(trajectory.hidden)))
        for schedule, indices in self.indices.items():
            pairs = zip(schedule, previous, strict=False)
            start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            del passed[start + 1 :]
            for layer, step in enumerate(schedule[start:], start + 1):
                is_passed = schedule[:layer] == full[:layer]
                passed.append(trajectory.hidden[layer] if is_passed else _apply_step(step, passed[-1], trajectory))
            yield tuple(indices), passed[-1]
            previous = schedule


@torch.no_grad()
def _apply_step(step: Step, state: Tensor, trajectory: Trajectory) -> Tensor:
    outputs = [trajectory.block(number)(state) for number in members(step)]
    return outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(0)
