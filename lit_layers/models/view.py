"""The layered view: hidden states at every block boundary, and each block as a function of its input."""

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_layers.errors import InputError
from lit_layers.functional.jacobian.block_call import Alignment, evaluating
from lit_layers.models import block_calls
from lit_layers.models.block_calls import (
    BlockCall,
    bypassed,
    call_hooks,
    clamped_masks,
    hooked,
    rows_of,
    split_state,
    state_of,
)
from lit_layers.models.build import plain_model, true_vocab_size
from lit_layers.models.families import Network, text_config, trunk_of
from lit_layers.models.offload import execution_device
from lit_layers.models.own_networks import OwnNetwork, wrap_own
from lit_layers.models.proof import probe_texts, rel_error
from lit_layers.models.structure import family_of

Batch = Mapping[str, Tensor]

_CAUSAL = weakref.WeakKeyDictionary[nn.Module, bool]()  # result of `_is_causal`, which costs a forward pass
REORDERED = "_running_order"  # attribute of a model inside a `running_order` context


class LayeredModel:
    """A model as a sequence of blocks, with a layer at every block boundary.

    Layer 0 is the input of block 1. Layer l is the output of block l, before any final norm. The view never changes the
    model: it wraps no module, leaves no hook and keeps no cache. Every call runs in evaluation mode (dropout and
    drop-path off) and restores the modes of the submodules afterwards.

    Raises:
        InputError: if the class has no row in `FAMILIES` and its modules are not a sequence of blocks. The message
            says why.
    """

    def __init__(self, model: nn.Module) -> None:
        # Take the network out of its wrappers, because a compiled model ignores new hooks.
        self.model: Network = wrap_own(plain_model(model))
        self.family = family_of(self.model)
        self.blocks = self.family.block_list(self.model)

    def __repr__(self) -> str:
        kind, proof = type(self.model).__name__, self.family.proof
        shown = "" if proof is None else ", proof=" + "; ".join(f"{name}: {value}" for name, value in proof.items())
        return f"LayeredModel({kind}, num_layers={self.num_layers}, dim={self.dim}, origin={self.origin!r}{shown})"

    @property
    def origin(self) -> str:
        """How the blocks were found: "row" if a row of `FAMILIES` names them, "structure" if a search found them."""
        return self.family.origin

    @property
    def num_layers(self) -> int:
        """Number of blocks, L; there are L + 1 layers."""
        return len(self.blocks)

    @property
    def dim(self) -> int:
        """Width of the hidden states."""
        return self.family.width(self.model)

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens in the vocabulary, without padding rows; None if the model has no head over a vocabulary."""
        has_words = not self.family.sees_images and self.model.get_output_embeddings() is not None
        return true_vocab_size(self.model) if has_words else None

    @property
    def predicts_next_token(self) -> bool:
        """Whether the model's own head predicts the next token and no state depends on later tokens."""
        can_predict = self.vocab_size is not None and self.family.is_causal and self.model.can_generate()
        if can_predict and self.model not in _CAUSAL:
            _CAUSAL[self.model] = self._is_causal()
        return can_predict and _CAUSAL.get(self.model, True)

    def _is_causal(self) -> bool:
        """Return whether a change of the last token of a text leaves all states before it unchanged.

        The class is not enough to know this, because the config may say `is_causal: false`.
        """
        if self.family.origin != "row":  # not in `FAMILIES`: `Evidence.is_causal` has checked the model
            return True
        texts = probe_texts(self.model)[:2]  # they differ only in the last token
        hidden = self.trajectory({"input_ids": texts}).hidden[:, :, :-1]
        return not rel_error(hidden[:, 1], hidden[:, 0]) > 1e-3  # NaN (a diverged model) counts as causal

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens per text; None if the model has no limit or takes images."""
        return None if self.family.sees_images else self.family.max_tokens(self.model.config)

    @property
    def image_size(self) -> int | None:
        """Side in px of the images that the model takes; None if it takes images of any size, or texts."""
        return None if self.family.vision is None else self.family.vision.fixed_side(self.model)

    @property
    def has_class_token(self) -> bool:
        """Whether the first token of an image is a class token; False if the model takes texts."""
        return self.family.vision is not None and self.family.vision.class_token(self.model)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches of an image (class, distillation, registers); 0 for a text model."""
        return 0 if self.family.vision is None else self.family.vision.prefix(self.model)

    @property
    def num_classes(self) -> int:
        """Number of image classes in the logits; 0 if the model has no classifier or takes texts."""
        return 0 if self.family.vision is None else self.family.vision.classes(self.model)

    @property
    def has_head(self) -> bool:
        """Whether the model has a head on top of its trunk."""
        if (vision := self.family.vision) is not None:
            return vision.has_head(self.model)
        if isinstance(self.model, OwnNetwork):
            return self.vocab_size is not None or self.model.config.num_scores != self.dim
        return trunk_of(self.model) is not self.model

    def num_patches(self, image_size: int | None = None) -> int:
        """Return the number of patches of an image with this side in px (default: the size the model was built for)."""
        vision: Any = self.family.vision
        side = vision.usual_side(self.model) if image_size is None else image_size
        return (side // vision.patch_side(self.model)) ** 2

    @property
    def device(self) -> torch.device:
        return execution_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the blocks' parameters."""
        return next(self.blocks[0].parameters()).dtype

    @property
    def precision(self) -> str:
        """Name of the precision in which blocks compute.

        This is the name of their dtype, such as "torch.float32", or "bfloat16" for `BFloat16View`.
        """
        return str(self.dtype)

    @property
    def attention(self) -> str:
        """Name of the attention implementation now in use: "sdpa", "eager", ..."""
        vision = self.family.vision
        return self.model.config._attn_implementation if vision is None else vision.attention(self.model)

    def trajectory(self, batch: Batch) -> "Trajectory":
        """Run one batch and return its hidden states at every layer, without an autograd graph.

        Only columns that the model takes are read. Logits are computed on first access. Padding before a text is moved
        after it for the forward pass, and the states are moved back to the positions in the batch. So the side of the
        padding has no effect, for any attention implementation and dtype. A padded position then holds the state of the
        nearest real token.

        Raises:
            InputError: if a text is longer than the model takes, has unknown tokens, or has padding that would change
                its states or scores.
            ValueError: if a column is missing, or a text has no real token.
        """
        states: list[Tensor] = []
        calls: list[BlockCall] = []

        def keep(state: Tensor, _: Tensor, call: BlockCall | None) -> None:
            states.append(state)
            if call is not None:
                calls.append(call)

        # Turn off any inference_mode of the caller: later, gradients of blocks are computed at these states, and
        # autograd refuses inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            inputs, alignment = self._pass(batch, keep)
            whole = block_calls.stacked(states)  # (layers + 1, batch, tokens, dim)
            mask = block_calls.mask_of(inputs, whole[0]) if alignment is None else alignment.input_mask
        return Trajectory(whole, mask, tuple(calls), self.attention, self, inputs, alignment)

    def pass_states(self, batch: Batch, visit: Callable[[int, Tensor, Tensor], None]) -> None:
        """Run one batch and call `visit(layer, hidden, mask)` at layers 0 to L, without storing the states.

        `hidden` (batch, tokens, dim) and `mask` (batch, tokens) are those of `trajectory`. `visit` must not write to
        them. The head does not run.

        Raises:
            InputError, ValueError: as in `trajectory`.
        """
        layers = itertools.count()
        with torch.inference_mode(False), torch.no_grad():
            self._pass(batch, lambda state, mask, *_: visit(next(layers), state, mask))

    def _pass(self, batch: Batch, visit: Callable[..., None]) -> tuple[dict[str, Tensor], Alignment | None]:
        """Run one batch, and call `visit(state, mask, call)` before block 1 and after each block.

        `call` is the `BlockCall` that gave the state, and None before block 1.

        Returns:
            The inputs of the model's call, and how padding was moved after the texts (None if it was not).
        """
        is_first = True

        def give(state: Tensor, call: BlockCall | None = None) -> None:
            if alignment is None:
                visit(state, block_calls.mask_of(inputs, state), call)
            else:
                visit(alignment.restore(state), alignment.input_mask, call)

        def show(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            nonlocal is_first
            before, args, kwargs = split_state(args, kwargs)
            if is_first:
                give(before)
                is_first = False
            give(state_of(output), BlockCall(module, args, kwargs, alignment))

        with evaluating(self.model):
            inputs, alignment = self._inputs(batch)
            with self._observed(show):
                self.family.features(self.model, inputs, dict(self.family.options))
        return inputs, alignment

    def readout(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to states (*n, tokens, dim).

        For states of the last layer, the result is the model's logits; for states of earlier layers, the logit lens.
        Logit scaling and soft-capping of the model are included. Padding rows of the vocabulary are dropped.

        Returns:
            Logits (*n, tokens, vocabulary), or (*n, classes) from a head that pools tokens. A model without a head
            returns the states after the final norm. CLIP always returns its pooled state.
        """
        with evaluating(self.model):
            flat = hidden.reshape(-1, *hidden.shape[-2:])
            logits = self._unpadded(self.family.read_out(self.model, flat))
        return logits.unflatten(0, hidden.shape[:-2]) if hidden.ndim > 2 else logits[0]

    @contextmanager
    def _observed(self, hook: Callable[..., None]) -> Iterator[None]:
        """Inside the context, call `hook` after each block call; then check that each block ran once, in order."""
        self.refuse_reordered()
        order: list[nn.Module] = []

        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            order.append(module)
            hook(module, args, kwargs, output)

        handles = call_hooks(self.blocks, note)
        with hooked(handles), clamped_masks(self.blocks) if self.dtype == torch.float64 else nullcontext():
            yield
        if order != list(self.blocks):
            raise RuntimeError(f"expected {self.num_layers} blocks to run once each, in order, saw {len(order)} calls")

    def refuse_reordered(self) -> None:
        """Refuse a model inside a `running_order` context.

        Inside that context, each block only returns its input, and the last block runs the whole schedule. So the
        inputs and outputs of the blocks are not the layers.
        """
        if REORDERED in self.model.__dict__:
            raise InputError(
                f"this {type(self.model).__name__} runs its blocks in another order: leave that context before looking "
                "at its layers"
            )

    def own_logits(self, inputs: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Return the logits of the model's own call with its blocks bypassed, so that `hidden` is the last state."""
        self.refuse_reordered()
        forwards = self.family.identities(self.num_layers, hidden)
        bypass = bypassed(self.blocks, forwards)
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model), bypass:
            return self._unpadded(self.family.logits(self.model, inputs))

    def _unpadded(self, logits: Tensor) -> Tensor:
        return logits[..., : self.vocab_size]

    def _inputs(self, batch: Batch) -> tuple[dict[str, Tensor], Alignment | None]:
        """Return the inputs of the model's call, and how padding was moved after the texts (None if it was not).

        Raises:
            InputError, ValueError: as in `trajectory`.
        """
        # Padding is moved after the texts. In a causal model, padding before a text can attend to no token, and some
        # attention in float64 returns NaN for an empty softmax. Padding after a text can attend to the text.
        needed = self.family.inputs[0]
        if needed not in batch:
            raise ValueError(f"a batch for {type(self.model).__name__} needs {needed!r}, got {sorted(batch)}")
        if self.family.sees_images:
            return {needed: batch[needed].to(self.device, self.dtype)}, None
        self.check_tokens(batch[needed])
        inputs = {name: batch[name].to(self.device) for name in self.family.columns if name in batch}
        mask, alignment = inputs.get("attention_mask"), None
        if mask is None or mask.bool().all():
            inputs.pop("attention_mask", None)  # without a mask, attention takes its fast causal kernel
        elif not mask.any(dim=-1).all():
            raise ValueError("every text needs a real token, got a row of attention_mask without one")
        elif not self.family.takes_padding:
            raise InputError(
                f"{type(self.model).__name__} has no row in lit_layers/models/families.py, and "
                "its states or scores are others with padding behind the texts: give texts of one length"
            )
        elif (alignment := Alignment.from_mask(mask)) is not None:
            inputs = {name: alignment.align(column) for name, column in inputs.items()}
            inputs["attention_mask"] = alignment.mask.to(mask)
        first = self.family.first_position(self.model.config)
        if first and "position_ids" in self.family.inputs:
            ids = inputs["input_ids"]
            inputs.setdefault("position_ids", torch.arange(ids.shape[1], device=ids.device).expand_as(ids) + first)
        return inputs, alignment

    def check_tokens(self, ids: Tensor) -> None:
        """Check that the model accepts these token ids.

        Raises:
            InputError: if a text is too long, or an id is outside the vocabulary.
            ValueError: if `ids` is empty or not (batch, tokens).
        """
        kind, limit, vocabulary = type(self.model).__name__, self.max_tokens, true_vocab_size(self.model)
        if ids.ndim != 2 or not ids.numel():
            raise ValueError(f"input_ids are (batch, tokens), got shape {tuple(ids.shape)}")
        if limit is not None and ids.shape[1] > limit:
            raise InputError(f"{kind} takes at most {limit} tokens, got {ids.shape[1]}: shorten the texts")
        worst = int(ids.max()) if ids.min() >= 0 else int(ids.min())
        # Check the ids here, because the embedding's own check on a GPU is a device assert that ends the process.
        if not 0 <= worst < vocabulary:
            raise InputError(f"{kind} knows {vocabulary} tokens, got token {worst}: use the tokenizer it was made for")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The hidden states of one batch at every layer, and the block calls between them."""

    hidden: Tensor  # (layers + 1, batch, tokens, dim)
    mask: Tensor  # (batch, tokens), False on padding
    calls: tuple[BlockCall, ...]
    attention: str
    model: LayeredModel
    inputs: Mapping[str, Tensor]  # inputs of the model's call, with padding after the texts
    alignment: Alignment | None = None  # how padding was moved after the texts; None if it was not

    @functools.cached_property
    def logits(self) -> Tensor:
        """Logits of the model's own call: (batch, tokens, vocabulary), or as `LayeredModel.readout` describes."""
        if self.pools_some:
            return self.pooled(self.hidden[-1])
        last = self.hidden[-1] if self.alignment is None else self.alignment.align(self.hidden[-1])
        logits = self.model.own_logits(self.inputs, last)
        return logits if self.alignment is None or logits.ndim < 3 else self.alignment.restore(logits)

    def logits_of(self, index: tuple[Tensor, ...]) -> Tensor:
        """Return `logits[index]`, (n, classes).

        The head runs only on the selected tokens if it predicts the next token and reads one token at a time.

        Args:
            index: (prompts, positions), each (n,); (prompts,) if the head pools tokens.
        """
        if self.model.family.needs_all or not self.model.predicts_next_token:
            return self.logits[index]
        one = {name: column[:1, :1] for name, column in self.inputs.items()}
        rows = self.hidden[-1][index][None]
        # A user's network may check that states and input ids agree in shape, so pass each token as a text of its own.
        if isinstance(self.model.model, OwnNetwork):
            one, rows = {name: column.expand(rows.shape[1], 1) for name, column in one.items()}, rows.transpose(0, 1)
        return self.model.own_logits(one, rows).reshape(len(index[0]), -1)

    def readout(self, hidden: Tensor, index: tuple[Tensor, ...]) -> Tensor:
        """Return the logits at `index` as `logits_of` does, but read out from `hidden` instead of the last state.

        `hidden` is a state (batch, tokens, dim) of the same batch.
        """
        return self.pooled(hidden)[index] if self.pools_some else self.model.readout(hidden[index])

    @functools.cached_property
    def pools_some(self) -> bool:
        """Whether the head pools the tokens of a text, and some tokens of this batch are padding.

        Real tokens whose id is `pad_token_id` count as padding too, because the head takes them for padding.
        """
        family = self.model.family
        if family.sees_images or not family.needs_all:
            return False
        padding = getattr(text_config(self.model.model.config), "pad_token_id", None)
        if self.mask.all() and (padding is None or (self.inputs["input_ids"] != padding).all()):
            return False
        return self.model.readout(self.hidden[-1][:1]).ndim == 2

    def pooled(self, hidden: Tensor) -> Tensor:
        """Return the class scores (batch, classes) that the head computes from the states (batch, tokens, dim).

        Only real tokens are pooled.
        """
        columns = {name: column for name, column in self._batch().items() if name != "attention_mask"}
        return block_calls.read_by_length(self.model.own_logits, self.mask, columns, hidden)

    def _batch(self) -> dict[str, Tensor]:
        """Return `inputs` with tokens and padding at their original positions in the batch."""
        back = (lambda column: column) if self.alignment is None else self.alignment.restore
        return {name: back(column) for name, column in self.inputs.items()}

    @property
    def num_layers(self) -> int:
        return len(self.calls)

    def block(self, layer: int) -> BlockCall:
        """Return block `layer` (1..L) as a differentiable function of its input state.

        Its other arguments (masks, positions) are those of this batch. `block(l)(hidden[l - 1])` equals `hidden[l]`.

        Raises:
            IndexError: if `layer` is outside 1..L.
            RuntimeError: if the attention implementation changed after the forward pass. The stored arguments may then
                lack a causal mask.
        """
        if not 1 <= layer <= self.num_layers:
            raise IndexError(f"blocks are numbered 1..{self.num_layers}, got {layer}")
        self.model.refuse_reordered()
        if self.model.attention != self.attention:
            raise RuntimeError(
                f"this trajectory was taken under {self.attention!r} attention and the model now uses "
                f"{self.model.attention!r}: take the trajectory again"
            )
        return self.calls[layer - 1]

    def rows(self, start: int, stop: int) -> "Trajectory":
        """Return the trajectory of the prompts `start:stop`, with block calls for these prompts."""
        some, size = slice(start, stop), self.hidden.shape[1]
        # Run the model again if its class has no row in `FAMILIES`, because it is then unknown which block arguments
        # have one entry per prompt.
        if self.model.family.origin == "structure":
            batch = {name: column[some] for name, column in self._batch().items()}
            mask = {} if self.model.family.sees_images else {"attention_mask": self.mask[some].long()}
            return self.model.trajectory(batch | mask)
        return replace(
            self,
            hidden=self.hidden[:, some],
            mask=self.mask[some],
            calls=tuple(call.rows(some, size) for call in self.calls),
            inputs=rows_of(self.inputs, some, size),
            alignment=None if self.alignment is None else self.alignment.select(some),
        )


# The hidden states that analyses read: their convention, precision, prompts and tokens.

# "resid": each layer as its block returns it. "hf": only the last layer after the final norm, as in `hidden_states` of
# transformers and in much published code. "normed": each layer after the final norm, like the output of a model that is
# truncated there.
States = Literal["resid", "hf", "normed"]


def final_norm(model: LayeredModel) -> torch.nn.Module | None:
    """Return the norm after the last block; None if the model has no such norm (BERT)."""
    return model.family.final_norm(model.model)


def convert_states(model: LayeredModel, states: States, layer: int, hidden: Tensor) -> Tensor:
    """Return the hidden states of a layer in the convention `states`: "resid", "hf" or "normed"."""
    norm = final_norm(model)
    if states == "resid" or norm is None or (states == "hf" and layer < model.num_layers):
        return hidden
    with torch.no_grad():
        return norm(hidden)


def states_of_layers(trajectory: Trajectory, states: States) -> Iterator[Tensor]:
    """Yield the hidden states of layers 0 to L in the convention `states`: "resid", "hf" or "normed"."""
    return (convert_states(trajectory.model, states, layer, hidden) for layer, hidden in enumerate(trajectory.hidden))


def upcast(model: LayeredModel) -> LayeredModel:
    """Return a float32 copy of a model in half precision; any other model unchanged.

    The rounding errors of half precision are as large as the change that a late block makes to a state. The copy equals
    a model that was loaded in float32 from the same saved weights.
    """
    if model.dtype not in (torch.float16, torch.bfloat16):
        return model
    fresh = copy.deepcopy(model.model).float()
    # Buffers that no checkpoint holds, such as rotary frequencies, were rounded when the model was cast to half
    # precision. `float()` does not undo that, so they are computed again.
    for module in fresh.modules() if hasattr(fresh, "_init_weights") else ():
        if module._non_persistent_buffers_set:
            saved = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
            with torch.no_grad():
                # from_pretrained computes buffers by this call, which also overwrites the weights.
                fresh._init_weights(module)
                for parameter, value in saved:
                    parameter.copy_(value)
    return LayeredModel(fresh)


def real_tokens(batch: Batch) -> list[Tensor]:
    """Return the token ids of each text, (tokens,), without padding."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[real] for row, real in zip(ids, mask, strict=True)]


def special_tokens(model: LayeredModel) -> set[int]:
    """Return the ids of special tokens in a text model's config, such as its `bos_token_id`."""
    given = [value for name, value in vars(model.model.config).items() if name.endswith("_token_id")]
    ids = {token for value in given for token in (value if isinstance(value, list | tuple) else [value])}
    return ids - {None}


def drop_first_tokens(mask: Tensor, count: int) -> Tensor:
    """Return a mask (batch, tokens) without the first `count` real tokens of each text."""
    return mask & (mask.cumsum(-1) > count)


def evenly_spread(first: int, last: int, count: int) -> list[int]:
    """Return up to `count` integers from `first` to `last`, evenly spread, with both ends; `last` if `count` is 1."""
    if count == 1 or first == last:
        return [last]
    count = min(count, last - first + 1)
    return [first + round(index * (last - first) / (count - 1)) for index in range(count)]
