"""Check that a model is a sequence of blocks, on its actual weights and a small batch made from its config.

Each check compares block calls with the model's own call on that batch. Besides its input state, a block gets other
arguments, which may carry information from earlier blocks (shared keys, a residual of earlier states). If they do, a
chain of blocks that are called with the recorded arguments agrees with the model only on that batch. Therefore the
model also runs with the output of block 1 changed, and the chain must give the same states as the model
(`Evidence.check_chain`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_layers.errors import InputError
from lit_layers.models.block_calls import (
    BlockCall,
    bypassed,
    call_hooks,
    clamped_masks,
    hooked,
    replaced,
    split_state,
    state_of,
)
from lit_layers.models.families import (
    Network,
    call_hf,
    call_maskless,
    call_timm,
    side_length,
    text_config,
    trunk_of,
)
from lit_layers.models.offload import execution_device

NUM_TOKENS = 12
COLUMNS = ("input_ids", "attention_mask", "token_type_ids")
# Errors that transformers and torch raise if inputs do not fit a model.
CANNOT_CALL = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError),
    *(TypeError, ValueError, NotImplementedError),
)


@dataclass(frozen=True)
class Probe:
    """Example inputs on which a model is checked, and how to call the model with them.

    They are texts (3, tokens) or images (2, channels, side, side).

    Texts 0 and 1 differ only in their last token. Images are noise.
    """

    inputs: Mapping[str, Tensor]
    columns: tuple[str, ...]  # input columns that the model takes; the required one first
    options: tuple[tuple[str, bool], ...]
    call: Callable[[Network, Mapping[str, Tensor], Mapping[str, Any]], Any]

    @property
    def needed(self) -> Tensor:
        """The required input: token ids or pixels."""
        return self.inputs[self.columns[0]]

    @property
    def is_text(self) -> bool:
        return self.columns[0] == "input_ids"


class SeenCall(NamedTuple):
    module: nn.Module
    state: Any  # input state; None if the module got no tensor
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    @property
    def result(self) -> Any:
        """Output state; None if the module returned no tensor."""
        output = state_of(self.output)
        return output if isinstance(output, Tensor) else None


def is_timm(model: nn.Module) -> bool:
    return type(model).__module__.split(".")[0] == "timm"


def probe_of(model: Network) -> Probe:
    """Return the example inputs on which a timm or transformers model is checked.

    Raises:
        InputError: if the model takes neither texts nor images of a size that its config states.
    """
    if is_timm(model):
        side, channels = _timm_size(model)
        return Probe({"pixel_values": _noise(model, channels, side)}, ("pixel_values",), (), call_timm)
    takes = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    has_cache = "use_cache" in takes or (passes_on and hasattr(text_config(model.config), "use_cache"))
    options = (("use_cache", False),) if has_cache else ()
    if "input_ids" in takes:
        columns = tuple(name for name in COLUMNS if name in takes)
        call = call_hf if "attention_mask" in columns else call_maskless
        return Probe({"input_ids": probe_texts(model).to(execution_device(model))}, columns, options, call)
    side = _from_configs(model.config, "image_size")
    if "pixel_values" not in takes or side is None:
        raise InputError(
            f"no layered view of {type(model).__name__}: it takes neither texts (input_ids) nor images of a size that "
            "its config says (pixel_values)"
        )
    noise = _noise(model, int(_from_configs(model.config, "num_channels") or 3), side_length(side))
    return Probe({"pixel_values": noise}, ("pixel_values",), (), call_hf)


def probe_texts(model: Network) -> Tensor:
    """Return three example texts as token ids (3, tokens), without special tokens of the config.

    Texts 0 and 1 differ only in the last token.

    Raises:
        InputError: if the config has no `vocab_size`.
    """
    config = text_config(model.config)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InputError(f"no layered view of {type(model).__name__}: its config says no vocab_size")
    special = {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("_id", "_index", "_idx")) and isinstance(value, int)
    }
    tokens = range(min(getattr(model.config, "unpadded_vocab_size", None) or config.vocab_size, 4096))
    plain = [token for token in tokens if token not in special] or [*tokens]
    limit = getattr(config, "max_position_embeddings", None) or 0
    length = min(NUM_TOKENS, limit) if limit > 0 else NUM_TOKENS
    # Choose tokens by multiples of a prime (7919) modulo the vocabulary: the same ones at every call, spread out, and
    # without repetition in large vocabularies.
    rows = [[plain[(7919 * (start + index)) % len(plain)] for index in range(length)] for start in (1, 1, 37)]
    rows[1][-1] = plain[(plain.index(rows[0][-1]) + 1) % len(plain)]
    return torch.tensor(rows)


def _noise(model: Network, channels: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    like = next(model.parameters())
    return torch.randn(2, channels, side, side, generator=generator).to(execution_device(model), like.dtype)


def _timm_size(model: Network) -> tuple[int, int]:
    """Return side (px) and number of channels of the images that a timm model takes."""
    patches: Any = getattr(model, "patch_embed", None)
    if getattr(patches, "img_size", None) is not None and hasattr(patches, "proj"):
        return side_length(patches.img_size), patches.proj.in_channels
    channels, side, _ = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return side, channels


def _from_configs(config: Any, name: str) -> Any:
    """Return a field of a config or of its vision or backbone config; None if none of them has it."""
    parts = [config, *(getattr(config, part, None) for part in ("vision_config", "backbone_config"))]
    return next((getattr(part, name) for part in parts if getattr(part, name, None) is not None), None)


@contextmanager
def watch(modules: Iterable[nn.Module]) -> Iterator[list[SeenCall]]:
    """Record the calls of these modules inside the context, in the order in which they return."""
    calls: list[SeenCall] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        try:
            state, others, named = split_state(args, kwargs)
        except StopIteration:
            state, others, named = None, args, kwargs
        calls.append(SeenCall(module, state if isinstance(state, Tensor) else None, others, dict(named), output))

    with hooked(call_hooks(modules, note)):
        yield calls


class PositionTables(TorchFunctionMode):
    """A torch function mode that finds the embedding tables of positions while a model runs.

    A table belongs to positions if consecutive ids (n, n + 1, ...) are looked up in it. `limit` is the number of tokens
    of the longest text that fits all these tables, or None if the model has none.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.count, self.limit = torch.arange(num_tokens), None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.embedding and len(args) > 1 and args[0].shape[-1:] == self.count.shape:
            ids = args[0].reshape(-1, len(self.count))[0].cpu()
            if bool((ids - ids[0] == self.count).all()):
                fits = len(args[1]) - int(ids[0])  # RoBERTa's first id is 2, so 514 rows fit 512 tokens
                self.limit = fits if self.limit is None else min(self.limit, fits)
        return func(*args, **(kwargs or {}))


# Largest relative errors that count as rounding: for float32 and float64, then for 16-bit dtypes. float64 has no
# smaller limit, because parts of any model (a softmax, a norm) may compute in float32.
_SAME, _SAME_IN_HALF = 1e-4, 3e-2
_SHIFT = 0.5  # norm of the noise that `shifted` adds, relative to the norm of the state


class Unproven(Exception):
    """A check failed; the message says which one and where."""


class NotFinite(Unproven):
    """States or logits are NaN or infinite, so nothing can be checked."""


def rel_error(one: Tensor, other: Tensor) -> float:
    """Return the largest relative distance between vectors at the same index of two tensors (.., dim).

    Each distance is divided by the norm of the vector in `other`.
    """
    lengths = other.double().norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return float(((one.double() - other.double()).norm(dim=-1) / lengths).max())


class Evidence:
    """The block calls recorded in one forward pass of a model, and checks that compare new calls with these calls.

    Attributes:
        states: the states of layers 0 to L in this forward pass.
        tolerance: largest relative error that counts as rounding.
    """

    def __init__(self, model: Network, family: Any, probe: Probe, calls: Sequence[SeenCall], output: Any) -> None:
        self.model, self.family, self.probe = model, family, probe
        self.blocks = family.block_list(model)
        self.calls, self.logits = self._ordered(calls), family.result(output)
        self.states = [self.calls[0].state, *(call.result for call in self.calls)]
        self.tolerance = _SAME_IN_HALF if self.states[0].dtype.itemsize == 2 else _SAME
        if not all(bool(values.isfinite().all()) for values in (*self.states, self.logits)):
            raise NotFinite("its states are not finite on these weights, and nothing can be shown")

    def check_replay(self) -> float:
        """Check that every block, called again with the recorded arguments, returns the recorded state.

        Returns:
            The largest relative error.

        Raises:
            Unproven: if a block returns another state.
        """
        # A block may read values that another block, or an earlier call, left in a shared object. To find this, another
        # batch of another length runs first, and the blocks are called from the last to the first.
        inputs = {name: column.flip(0) for name, column in self.probe.inputs.items()}
        if self.probe.is_text:
            inputs = {name: column[:, : max(1, column.shape[1] - 1)] for name, column in inputs.items()}
        self.probe.call(self.model, inputs, dict(self.family.options))
        return max(
            self._check(
                rel_error(self._call(number)(self.states[number - 1]), self.states[number]),
                f"block {number} called again gives another state",
            )
            for number in reversed(self._numbers())
        )

    def check_chain(self) -> float:
        """Change the output of block 1, and check that blocks called one by one give the same states as the model.

        Each block is called on the output of the block before it. Its other arguments are those of the unchanged pass.

        Returns:
            The largest relative error.

        Raises:
            Unproven: if a block returns another state than in the model, or the change has no effect on the last state.
        """
        if len(self.blocks) == 1:
            return 0.0
        changed = shifted(self.states[1])
        original, *others = [block.forward for block in self.blocks]

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            return changed if isinstance(output, Tensor) else type(output)((changed, *output[1:]))

        with replaced(self.blocks, [forward, *others]):
            calls = self._run(self.probe.call)
        hidden, worst = calls[0].result, 0.0
        for number in self._numbers()[1:]:
            hidden = self._call(number)(hidden)
            error = rel_error(hidden, calls[number - 1].result)
            worst = max(
                worst,
                self._check(
                    error,
                    f"with another state behind block 1, block {number} gives another "
                    "state than in the model: something else leads from block to block",
                ),
            )
        if not self._is_change(rel_error(hidden, self.states[-1]), worst):
            raise Unproven("another state behind block 1 changes nothing behind the last block")
        return worst

    def check_readout(self) -> tuple[float, bool]:
        """Check that the logits depend on the last state only.

        Returns:
            The relative error, and whether the head needs all tokens of a text at once.

        Raises:
            Unproven: if the readout of the last state gives other logits than the model, or the readout of a changed
                state gives the same logits.
        """
        reasons = []
        for needs_all in (False, True) if self.probe.is_text else (True,):
            family = replace(self.family, needs_all=needs_all)
            try:
                logits = family.read_out(self.model, self.states[-1])
                if logits.shape != self.logits.shape:
                    raise Unproven(f"its readout has the shape {tuple(logits.shape)}, not {tuple(self.logits.shape)}")
                error = self._check(rel_error(logits, self.logits), "the readout of the last state gives other logits")
                moved = rel_error(family.read_out(self.model, shifted(self.states[-1])), self.logits)
            except Unproven as reason:
                reasons.append(str(reason))
                continue
            # A head that is initialized with zeros gives constant logits for any state. This is no failure: the check
            # runs again once the weights have changed.
            is_constant = bool((self.logits == self.logits.reshape(-1, self.logits.shape[-1])[0]).all())
            if not is_constant and not self._is_change(moved, error):
                raise Unproven(f"another last state does not change the logits (by {moved:.1e})")
            return error, needs_all
        raise Unproven(reasons[-1])

    def check_args(self) -> None:
        """Check that the other arguments of a block, besides its input state, depend only on the batch, not on states.

        The model runs again with bypassed blocks, and must call each block with the same arguments as before.

        Raises:
            Unproven: if an argument differs and the output of its block depends on it.
        """
        with bypassed(self.blocks, self.family.identities(len(self.blocks))):
            calls = self._run(self.probe.call)
        refusal = None
        # Check the last block first, because `_agrees` runs a block, which may write into an object that all blocks
        # share. With the first block first, later blocks would read these values and wrongly seem to need no earlier
        # block.
        for number in reversed(self._numbers()):
            with_blocks, without = self.calls[number - 1], calls[number - 1]
            mine, theirs = dict(enumerate(with_blocks.args)) | with_blocks.kwargs, dict(enumerate(without.args))
            theirs |= without.kwargs
            unlike = [name for name, value in mine.items() if not alike(value, theirs.get(name))]
            if unlike and not self._agrees(number, without):
                refusal = f"block {number} is called with something ({unlike[0]}) that blocks before it have made"
        if refusal is not None:
            raise Unproven(refusal)

    def _agrees(self, number: int, without: SeenCall) -> bool:
        """Return whether a block gives the recorded output even if its other arguments come from another call.

        Args:
            number: number of the block, 1..L.
            without: the block's call in a pass of the model in which all blocks were bypassed.
        """
        try:
            state = self._block_call(without)(self.states[number - 1])
        except CANNOT_CALL:
            return False
        return rel_error(state, self.states[number]) <= 4 * torch.finfo(state.dtype).eps

    def check_alone(self) -> None:
        """Check that the last text or image of the batch has the same states when it runs alone.

        Raises:
            Unproven: if the states of this text or image depend on the rest of the batch, or are random.
        """
        calls = self._run(self.family.call, {name: column[-1:] for name, column in self.probe.inputs.items()})
        for number, state in enumerate([calls[0].state, *(call.result for call in calls)]):
            self._check(
                rel_error(state, self.states[number][-1:]),
                f"passed alone, one of its batch has another state behind block {number}: "
                "states depend on what else is in a batch, or on chance",
            )

    def check_layer_0(self) -> None:
        """Check that no block receives layer 0 (the input of block 1) as an argument in addition to its input state.

        Raises:
            Unproven: if a block receives it.
        """
        for number, call in enumerate(self.calls, start=1):
            if any(alike(value, self.calls[0].state) for value in (*call.args, *call.kwargs.values())):
                raise Unproven(f"block {number} is called with layer 0 besides its state")

    def is_causal(self) -> bool:
        """Return whether the last token of a text leaves all states before it unchanged; False for images."""
        return self.probe.is_text and all(
            rel_error(state[1, :-1], state[0, :-1]) <= self.tolerance for state in self.states if state is not None
        )

    def takes_padding(self) -> bool:
        """Return whether padding after a text leaves its states unchanged; False for images."""
        if not self.probe.is_text:
            return False
        ids = self.probe.needed[:1]
        length = max(1, ids.shape[1] - 4)
        try:
            alone, behind = (
                [call.result[:, :length] for call in self._run(self.family.features, inputs)]
                for inputs in ({"input_ids": ids[:, :length]}, self._padded(length))
            )
        except CANNOT_CALL:
            return False
        return all(rel_error(one, other) <= self.tolerance for one, other in zip(behind, alone, strict=True))

    def scores_take_padding(self) -> bool:
        """Return whether padding after a text leaves its scores unchanged.

        This does not follow from `takes_padding`, which compares states, because a head may average or select tokens.
        """
        length = max(1, self.probe.needed.shape[1] - 4)
        alone, behind = (
            self.family.logits(self.model, inputs)
            for inputs in ({"input_ids": self.probe.needed[:1, :length]}, self._padded(length))
        )
        behind = behind[:, :length] if behind.ndim == 3 else behind
        return alone.shape == behind.shape and rel_error(behind, alone) <= self.tolerance

    def _padded(self, length: int) -> dict[str, Tensor]:
        """Return the first example text with an attention mask that makes all but its first `length` tokens padding."""
        ids = self.probe.needed[:1]
        mask = (torch.arange(ids.shape[1], device=ids.device) < length)[None].long()
        return {n: v for n, v in (("input_ids", ids), ("attention_mask", mask)) if n in self.probe.columns}

    def trunk_agrees(self) -> bool:
        """Return whether the model has a head, and a call of the trunk alone gives the same states at all blocks."""
        if trunk_of(self.model) is self.model:
            return False
        try:
            calls = self._run(self.family.features)
        except (Unproven, *CANNOT_CALL):
            return False
        return all(call.module is block for call, block in zip(calls, self.blocks, strict=True)) and all(
            rel_error(call.result, state) <= self.tolerance for call, state in zip(calls, self.states[1:], strict=True)
        )

    def _run(self, call: Callable[..., Any], inputs: Mapping[str, Tensor] | None = None) -> list[SeenCall]:
        inputs = self.probe.inputs if inputs is None else inputs
        is_wide = next(self.blocks[0].parameters(), self.logits).dtype == torch.float64
        with watch(self.blocks) as calls, clamped_masks(self.blocks) if is_wide else nullcontext():
            call(self.model, inputs, dict(self.family.options))
        return self._ordered(calls)

    def _ordered(self, calls: Sequence[SeenCall]) -> list[SeenCall]:
        """Check that every block ran once, in order; return the calls as a list.

        Raises:
            Unproven: if a block did not run, ran more than once, or ran out of order.
        """
        if [each.module for each in calls] != list(self.blocks):
            raise Unproven(f"its {len(self.blocks)} blocks do not run once each, in order")
        return [*calls]

    def _numbers(self) -> range:
        return range(1, len(self.blocks) + 1)

    def _call(self, number: int) -> BlockCall:
        return self._block_call(self.calls[number - 1])

    def _block_call(self, call: SeenCall) -> BlockCall:
        return BlockCall(call.module, call.args, call.kwargs)

    def _check(self, error: float, sentence: str) -> float:
        if not error <= self.tolerance:
            raise Unproven(f"{sentence} (by {error:.1e} of its length)")
        return error

    def _is_change(self, moved: float, error: float) -> bool:
        """Return whether changing a state has changed the result of a check by more than rounding.

        The relative change `moved` must be more than 10 times the rounding error. The factor is this small because a
        large bias makes the relative change of logits small.
        """
        return moved > 10 * max(error, 4 * torch.finfo(self.states[0].dtype).eps)


def shifted(state: Tensor, *, seed: int = 0) -> Tensor:
    """Return a state (batch, tokens, dim) plus noise. At each token, the norm of the noise is half that of the state.

    The direction of the noise differs between positions. At one position it is the same in all texts, so that equal
    states of two texts remain equal.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(state.shape[1:], generator=generator).to(state)
    return state + noise * (_SHIFT * state.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))


def alike(one: Any, other: Any) -> bool:
    """Return whether two arguments of a block are equal.

    Tensors, numbers and strings are compared by value, also in containers: blocks of Gemma 3n leave keys in a dict for
    later blocks. Other objects are compared by type.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, int | float | str | None) or isinstance(other, int | float | str | None):
        return bool(type(one) is type(other) and one == other)
    return type(one) is type(other)
