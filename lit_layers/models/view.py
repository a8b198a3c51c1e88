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

_CAUSAL = weakref.WeakKeyDictionary[nn.Module, bool]()  # found out once for a model, by a pass of two short texts
REORDERED = "_running_order"  # attribute of a model whose blocks run in another order for now


class LayeredModel:
    """A model as a row of blocks, with a layer before, between and after them.

    Layer 0 is the input of block 1, layer l the output of block l, before any final norm. The view never changes the
    model: no wrapped module, no lasting hook, no cache. Whatever mode the model is in, it is looked at as in evaluation
    (dropout and drop-path off), and its own modes are back when a call returns.

    Raises:
        InputError: the class has no row, and its structure is not that of a row of blocks; the sentence says why.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Network = wrap_own(plain_model(model))  # hooks added after torch.compile do not fire
        self.family = family_of(self.model)
        self.blocks = self.family.block_list(self.model)

    def __repr__(self) -> str:
        kind, proof = type(self.model).__name__, self.family.proof
        shown = "" if proof is None else ", proof=" + "; ".join(f"{name}: {value}" for name, value in proof.items())
        return f"LayeredModel({kind}, num_layers={self.num_layers}, dim={self.dim}, origin={self.origin!r}{shown})"

    @property
    def origin(self) -> str:
        """How the model is taken apart: by the "row" of its family, or by its "structure", with a proof in `family`."""
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
        """Number of real tokens that the readout scores; None where it scores no vocabulary (images, no head)."""
        has_words = not self.family.sees_images and self.model.get_output_embeddings() is not None
        return true_vocab_size(self.model) if has_words else None

    @property
    def predicts_next_token(self) -> bool:
        """Whether the model's own head predicts the next token, so that no state sees a later one."""
        can_predict = self.vocab_size is not None and self.family.is_causal and self.model.can_generate()
        if can_predict and self.model not in _CAUSAL:
            _CAUSAL[self.model] = self._is_causal()
        return can_predict and _CAUSAL.get(self.model, True)

    def _is_causal(self) -> bool:
        """Whether the last token of a text changes no state before it: a config may say `is_causal: false`."""
        if self.family.origin != "row":  # structure is proven, with this as well
            return True
        texts = probe_texts(self.model)[:2]  # they differ in the last token
        hidden = self.trajectory({"input_ids": texts}).hidden[:, :, :-1]
        return not rel_error(hidden[:, 1], hidden[:, 0]) > 1e-3  # NaN tells nothing

    @property
    def max_tokens(self) -> int | None:
        """Longest text the model takes; None for images and for a model that takes any length."""
        return None if self.family.sees_images else self.family.max_tokens(self.model.config)

    @property
    def image_size(self) -> int | None:
        """Side of the images the model takes, in px; None for text and for a model that takes any size."""
        return None if self.family.vision is None else self.family.vision.fixed_side(self.model)

    @property
    def has_class_token(self) -> bool:
        """Whether the first token of an image stands for the whole of it; False for text."""
        return self.family.vision is not None and self.family.vision.class_token(self.model)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches of an image (class, distillation, registers); 0 for text."""
        return 0 if self.family.vision is None else self.family.vision.prefix(self.model)

    @property
    def num_classes(self) -> int:
        """Number of classes of an image that the logits score; 0 where they score none, and for text."""
        return 0 if self.family.vision is None else self.family.vision.classes(self.model)

    @property
    def has_head(self) -> bool:
        """Whether the model is more than its trunk."""
        if (vision := self.family.vision) is not None:
            return vision.has_head(self.model)
        if isinstance(self.model, OwnNetwork):
            return self.vocab_size is not None or self.model.config.num_scores != self.dim
        return trunk_of(self.model) is not self.model

    def num_patches(self, image_size: int | None = None) -> int:
        """Number of patches of an image of that side in px, or of the size the model was made for."""
        vision: Any = self.family.vision
        side = vision.usual_side(self.model) if image_size is None else image_size
        return (side // vision.patch_side(self.model)) ** 2

    @property
    def device(self) -> torch.device:
        return execution_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters of the blocks."""
        return next(self.blocks[0].parameters()).dtype

    @property
    def precision(self) -> str:
        """What blocks compute in: "torch.float32", "bfloat16" beside states in float32, ..."""
        return str(self.dtype)

    @property
    def attention(self) -> str:
        """Name of the attention implementation now in use: "sdpa", "eager", ..."""
        vision = self.family.vision
        return self.model.config._attn_implementation if vision is None else vision.attention(self.model)

    def trajectory(self, batch: Batch) -> "Trajectory":
        """The hidden states of one batch at every layer, without a graph. Its logits are computed when asked for.

        Only the columns the model takes are used. In a padded text, positions count the real tokens. Padding before a
        text is moved after it for the model, so that neither the side nor the attention implementation nor the dtype
        can matter, and results are given back as the batch was given; a padded place then holds what its nearest real
        token has.

        Raises:
            InputError: a text longer than the model takes.
            ValueError: a missing column, or a text without a real token.
        """
        states: list[Tensor] = []
        calls: list[BlockCall] = []

        def keep(state: Tensor, _: Tensor, call: BlockCall | None) -> None:
            states.append(state)
            if call is not None:
                calls.append(call)

        # Not inference_mode, nor inside one: what is kept here takes part in derivatives later.
        with torch.inference_mode(False), torch.no_grad():
            inputs, alignment = self._pass(batch, keep)
            whole = block_calls.stacked(states)  # (layers + 1, batch, tokens, dim)
            mask = block_calls.mask_of(inputs, whole[0]) if alignment is None else alignment.given_mask
        return Trajectory(whole, mask, tuple(calls), self.attention, self, inputs, alignment)

    def pass_states(self, batch: Batch, visit: Callable[[int, Tensor, Tensor], None]) -> None:
        """Call `look(layer, hidden, mask)` for layers 0 to L as one batch passes them, and keep nothing.

        What `trajectory` holds as `hidden[layer]` (batch, tokens, dim) and `mask` (batch, tokens), to be read and not
        written to. No scores of a vocabulary are computed.

        Raises:
            InputError, ValueError: as `trajectory`.
        """
        layers = itertools.count()
        with torch.inference_mode(False), torch.no_grad():
            self._pass(batch, lambda state, mask, *_: visit(next(layers), state, mask))

    def _pass(self, batch: Batch, visit: Callable[..., None]) -> tuple[dict[str, Tensor], Alignment | None]:
        """Call `look(state, mask, call)` with the input of the first block (no call) and after each block."""
        is_first = True

        def give(state: Tensor, call: BlockCall | None = None) -> None:
            if alignment is None:
                visit(state, block_calls.mask_of(inputs, state), call)
            else:
                visit(alignment.restored(state), alignment.given_mask, call)

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
        """Final norm and head of states (*n, tokens, dim): the model's logits at the last layer, else the logit lens.

        With the model's logit scaling and soft-capping, and without padding rows of the vocabulary. A model without a
        head gives its final-normed states; a ViT, or a classifier of real tokens, (*n, classes); CLIP its pooled state.
        """
        with evaluating(self.model):
            flat = hidden.reshape(-1, *hidden.shape[-2:])
            logits = self._unpadded(self.family.read_out(self.model, flat))
        return logits.unflatten(0, hidden.shape[:-2]) if hidden.ndim > 2 else logits[0]

    @contextmanager
    def _observed(self, hook: Callable[..., None]) -> Iterator[None]:
        """The hook sees each block's call inside, where every block runs once, in order."""
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
        """Refuse a model whose blocks run in another order for now: what they are called with tells no layer."""
        if REORDERED in self.model.__dict__:
            raise InputError(
                f"this {type(self.model).__name__} runs its blocks in another order: leave that context before looking "
                "at its layers"
            )

    def own_logits(self, inputs: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """The logits that the model's own call makes of a last state: its blocks hand that on and do not run."""
        self.refuse_reordered()
        forwards = self.family.identities(self.num_layers, hidden)
        bypass = bypassed(self.blocks, forwards)
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model), bypass:
            return self._unpadded(self.family.logits(self.model, inputs))

    def _unpadded(self, logits: Tensor) -> Tensor:
        return logits[..., : self.vocab_size]

    def _inputs(self, batch: Batch) -> tuple[dict[str, Tensor], Alignment | None]:
        """The columns that the model is called with, on its device; how texts were moved, where any has padding before
        it: of a causal model such padding has nothing to see, which some attention in float64 turns into NaN."""
        needed = self.family.inputs[0]
        if needed not in batch:
            raise ValueError(f"a batch for {type(self.model).__name__} needs {needed!r}, got {sorted(batch)}")
        if self.family.sees_images:
            return {needed: batch[needed].to(self.device, self.dtype)}, None
        self.check_tokens(batch[needed])
        inputs = {name: batch[name].to(self.device) for name in self.family.columns if name in batch}
        mask, alignment = inputs.get("attention_mask"), None
        if mask is None or mask.bool().all():
            inputs.pop("attention_mask", None)  # nothing to hide: the fast causal path
        elif not mask.any(dim=-1).all():
            raise ValueError("every text needs a real token, got a row of attention_mask without one")
        elif not self.family.takes_padding:
            raise InputError(
                f"{type(self.model).__name__} has no row in lit_layers/models/families.py, and "
                "its states or scores are others with padding behind the texts: give texts of one length"
            )
        elif (alignment := Alignment.of(mask)) is not None:
            inputs = {name: alignment.moved(column) for name, column in inputs.items()}
            inputs["attention_mask"] = alignment.mask.to(mask)
        first = self.family.first_position(self.model.config)
        if first and "position_ids" in self.family.inputs:
            ids = inputs["input_ids"]
            inputs.setdefault("position_ids", torch.arange(ids.shape[1], device=ids.device).expand_as(ids) + first)
        return inputs, alignment

    def check_tokens(self, ids: Tensor) -> None:
        """Refuse token ids that the model does not take.

        Raises:
            InputError: too many tokens, or ids that it has no embedding of.
        """
        kind, limit, vocabulary = type(self.model).__name__, self.max_tokens, true_vocab_size(self.model)
        if ids.ndim != 2 or not ids.numel():
            raise ValueError(f"input_ids are (batch, tokens), got shape {tuple(ids.shape)}")
        if limit is not None and ids.shape[1] > limit:
            raise InputError(f"{kind} takes at most {limit} tokens, got {ids.shape[1]}: shorten the texts")
        worst = int(ids.max()) if ids.min() >= 0 else int(ids.min())
        if not 0 <= worst < vocabulary:  # on a GPU the embedding's own check would end the whole process
            raise InputError(f"{kind} knows {vocabulary} tokens, got token {worst}: use the tokenizer it was made for")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One batch on its way through the blocks."""

    hidden: Tensor  # (layers + 1, batch, tokens, dim)
    mask: Tensor  # (batch, tokens), False on padding
    calls: tuple[BlockCall, ...]
    attention: str
    model: LayeredModel
    inputs: Mapping[str, Tensor]  # what the model was called with
    alignment: Alignment | None = None  # how texts were moved for that

    @functools.cached_property
    def logits(self) -> Tensor:
        """(batch, tokens, vocabulary), or what the readout gives instead: the model's own, made of the last state."""
        if self.pools_some:
            return self.pooled(self.hidden[-1])
        last = self.hidden[-1] if self.alignment is None else self.alignment.moved(self.hidden[-1])
        logits = self.model.own_logits(self.inputs, last)
        return logits if self.alignment is None or logits.ndim < 3 else self.alignment.restored(logits)

    def logits_of(self, index: tuple[Tensor, ...]) -> Tensor:
        """`logits[index]`, rows (n, classes) of tokens (prompt, place), or of prompts where the head pools.

        Of a model that generates the head runs on these tokens alone, where it can.
        """
        if self.model.family.needs_all or not self.model.predicts_next_token:
            return self.logits[index]
        one = {name: column[:1, :1] for name, column in self.inputs.items()}
        rows = self.hidden[-1][index][None]
        if isinstance(self.model.model, OwnNetwork):  # which may compare the tokens it scores with those it is given
            one, rows = {name: column.expand(rows.shape[1], 1) for name, column in one.items()}, rows.transpose(0, 1)
        return self.model.own_logits(one, rows).reshape(len(index[0]), -1)

    def readout(self, hidden: Tensor, index: tuple[Tensor, ...]) -> Tensor:
        """The same rows as those of `logits_of`, of another state (batch, tokens, dim) of this batch."""
        return self.pooled(hidden)[index] if self.pools_some else self.model.readout(hidden[index])

    @functools.cached_property
    def pools_some(self) -> bool:
        """Whether the head makes one prediction of a text, of all its tokens but those that it takes for padding."""
        family = self.model.family
        if family.sees_images or not family.needs_all:
            return False
        padding = getattr(text_config(self.model.model.config), "pad_token_id", None)
        if self.mask.all() and (padding is None or (self.inputs["input_ids"] != padding).all()):
            return False
        return self.model.readout(self.hidden[-1][:1]).ndim == 2

    def pooled(self, hidden: Tensor) -> Tensor:
        """What the model's own end makes of the real tokens of states (batch, tokens, dim): (batch, classes)."""
        columns = {name: column for name, column in self._batch().items() if name != "attention_mask"}
        return block_calls.read_by_length(self.model.own_logits, self.mask, columns, hidden)

    def _batch(self) -> dict[str, Tensor]:
        """The inputs with each token where it was given."""
        back = (lambda column: column) if self.alignment is None else self.alignment.restored
        return {name: back(column) for name, column in self.inputs.items()}

    @property
    def num_layers(self) -> int:
        return len(self.calls)

    def block(self, layer: int) -> BlockCall:
        """Block `layer` (1..L) as a function of its input alone, closed over the arguments this batch really passed.

        Differentiable. `block(l)(hidden[l - 1])` is `hidden[l]`.

        Raises:
            IndexError: `layer` outside 1..L.
            RuntimeError: the attention implementation was changed since; a causal mask may then be missing.
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
        """The trajectory of some prompts, its blocks closed over their arguments."""
        some, size = slice(start, stop), self.hidden.shape[1]
        if self.model.family.origin == "structure":  # nobody knows which arguments have a row for each prompt
            batch = {name: column[some] for name, column in self._batch().items()}
            mask = {} if self.model.family.sees_images else {"attention_mask": self.mask[some].long()}
            return self.model.trajectory(batch | mask)
        return replace(
            self,
            hidden=self.hidden[:, some],
            mask=self.mask[some],
            calls=tuple(call.rows(some, size) for call in self.calls),
            inputs=rows_of(self.inputs, some, size),
            alignment=None if self.alignment is None else self.alignment.of_prompts(some),
        )


# The hidden states that analyses look at: in which convention and precision, and of which prompts and tokens.

# "resid": every layer as it leaves its block. "hf": the last one after the final norm, as in `hidden_states` of
# transformers and in much published code. "normed": every one after the final norm, as a model cut there would end.
States = Literal["resid", "hf", "normed"]


def final_norm(model: LayeredModel) -> torch.nn.Module | None:
    """Return the norm after the last block; None without one (BERT)."""
    return model.family.final_norm(model.model)


def convert_states(model: LayeredModel, states: States, layer: int, hidden: Tensor) -> Tensor:
    """Return the hidden states of a layer in a convention."""
    norm = final_norm(model)
    if states == "resid" or norm is None or (states == "hf" and layer < model.num_layers):
        return hidden
    with torch.no_grad():
        return norm(hidden)


def states_of_layers(trajectory: Trajectory, states: States) -> Iterator[Tensor]:
    """Yield the hidden states of layers 0 to L in a convention."""
    return (convert_states(trajectory.model, states, layer, hidden) for layer, hidden in enumerate(trajectory.hidden))


def upcast(model: LayeredModel) -> LayeredModel:
    """Return the model, or a float32 copy of one in half precision, whose rounding is as large as a late block's step.

    The copy is what loading the saved weights gives: what no checkpoint holds, such as rotary frequencies, is computed
    anew, as a cast has rounded it.
    """
    if model.dtype not in (torch.float16, torch.bfloat16):
        return model
    fresh = copy.deepcopy(model.model).float()
    for module in fresh.modules() if hasattr(fresh, "_init_weights") else ():
        if module._non_persistent_buffers_set:
            saved = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
            with torch.no_grad():
                fresh._init_weights(module)  # how from_pretrained gives buffers their values; and weights new ones
                for parameter, value in saved:
                    parameter.copy_(value)
    return LayeredModel(fresh)


def real_tokens(batch: Batch) -> list[Tensor]:
    """Return the token ids of each text, (tokens,), without padding."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[real] for row, real in zip(ids, mask, strict=True)]


def special_tokens(model: LayeredModel) -> set[int]:
    """Return the special tokens that a text model's config names, such as its `bos_token_id`."""
    given = [value for name, value in vars(model.model.config).items() if name.endswith("_token_id")]
    ids = {token for value in given for token in (value if isinstance(value, list | tuple) else [value])}
    return ids - {None}


def drop_first_tokens(mask: Tensor, count: int) -> Tensor:
    """Return a mask (batch, tokens) without the first real tokens of each text."""
    return mask & (mask.cumsum(-1) > count)


def evenly_spread(first: int, last: int, count: int) -> list[int]:
    """Return at most `count` whole numbers from `first` to `last`, including both; one number is `last`."""
    if count == 1 or first == last:
        return [last]
    count = min(count, last - first + 1)
    return [first + round(index * (last - first) / (count - 1)) for index in range(count)]
