"""A row for each model family: where its blocks are, how it is called, how a state is read out.

A class without a row is taken apart by `structure`; a row says what cannot be found that way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.models.block_calls import identity_forward, replaced

# A module of timm or transformers: it has attributes that nn.Module does not declare.
Network = Any


def side_length(size: Any) -> int:
    """The side of square images or patches, whether a config gives one number or two."""
    return int(size) if isinstance(size, int | float) else int(size[0])


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Where a model of images keeps what text models have no word for."""

    width: Callable[[Network], int]
    fixed_side: Callable[[Network], int | None]  # px; None where a model takes any size
    usual_side: Callable[[Network], int]  # px: the size it was made for
    patch_side: Callable[[Network], int]  # px
    channels: Callable[[Network], int]
    class_token: Callable[[Network], bool]
    prefix: Callable[[Network], int]  # tokens before the patches: class, distillation, registers
    classes: Callable[[Network], int]  # that the logits score; 0 where they score none
    has_head: Callable[[Network], bool]  # more than what `truncate(head=False)` leaves
    attention: Callable[[Network], str]


TIMM = Vision(
    width=lambda model: model.embed_dim,
    fixed_side=lambda model: (
        model.patch_embed.img_size[0] if getattr(model.patch_embed, "strict_img_size", False) else None
    ),
    usual_side=lambda model: model.patch_embed.img_size[0],
    patch_side=lambda model: model.patch_embed.patch_size[0],
    channels=lambda model: model.patch_embed.proj.in_channels,
    class_token=lambda model: model.cls_token is not None,
    prefix=lambda model: model.num_prefix_tokens,
    classes=lambda model: model.num_classes,
    has_head=lambda model: model.num_classes > 0,
    attention=lambda model: (
        "sdpa" if any(getattr(part, "fused_attn", False) for part in model.blocks[0].modules()) else "eager"
    ),
)

TRANSFORMERS = Vision(
    width=lambda model: model.config.hidden_size,
    fixed_side=lambda model: side_length(model.config.image_size),
    usual_side=lambda model: side_length(model.config.image_size),
    patch_side=lambda model: side_length(model.config.patch_size),
    channels=lambda model: model.config.num_channels,
    class_token=lambda model: True,
    prefix=lambda model: 1 + getattr(model.config, "num_register_tokens", 0),
    classes=lambda model: getattr(getattr(model, "classifier", None), "out_features", 0),
    has_head=lambda model: trunk_of(model) is not model,
    attention=lambda model: model.config._attn_implementation,
)

ANY_SIZE = replace(TRANSFORMERS, fixed_side=lambda model: None)  # position embeddings are interpolated unasked


Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]

TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
IMAGES = ("pixel_values",)


def trunk_of(model: Network) -> Network:
    """The model without its head: itself where it has none (`base_model` is transformers' name for it)."""
    trunk = getattr(model, "base_model", model)
    is_clip = trunk is model and hasattr(model, "visual_projection") and not hasattr(model, "text_model")
    return getattr(model, "vision_model", trunk) if is_clip else trunk  # which transformers 5.17 does not call its base


def text_config(config: Any) -> Any:
    """Of a model of several kinds of input the part for texts."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def language_head(model: Network, normed: Tensor) -> Tensor:
    """Scores of the next token; without a head the normed state itself, as the bare model returns it."""
    head = model.get_output_embeddings()
    return normed if head is None else head(normed)


def roberta_head(model: Network, hidden: Tensor) -> Tensor:
    """Words, one class per text or one per token; a classifier of texts picks the first token itself."""
    head = getattr(model, "lm_head", None) or getattr(model, "classifier", None)
    return hidden if head is None else head(hidden)


def timm_head(model: Network, normed: Tensor) -> Tensor:
    """Pooling, the norm after it where there is one, and the classifier."""
    return model.forward_head(normed)


def class_token_head(model: Network, normed: Tensor) -> Tensor:
    return model.classifier(normed[:, 0]) if hasattr(model, "classifier") else normed


def dinov2_head(model: Network, normed: Tensor) -> Tensor:
    """The class token beside the mean of the patches."""
    if not hasattr(model, "classifier"):
        return normed
    patches = normed[:, TRANSFORMERS.prefix(model) :]
    return model.classifier(torch.cat([normed[:, 0], patches.mean(dim=1)], dim=1))


def beit_head(model: Network, normed: Tensor) -> Tensor:
    return model.classifier(trunk_of(model).pooler(normed)) if hasattr(model, "classifier") else normed


def mae_head(model: Network, normed: Tensor) -> Tensor:
    """The pixels of each patch, from an encoder that has seen every patch in its place."""
    if not hasattr(model, "decoder"):
        return normed
    places = torch.arange(normed.shape[1] - 1, device=normed.device).expand(len(normed), -1)
    return model.decoder(normed, places).logits


def clip_head(model: Network, normed: Tensor) -> Tensor:
    """The class token alone, in the space shared with texts where the class projects into it."""
    pooled = normed[:, 0]
    return model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled


def call_hf(model: Network, inputs: Inputs, options: Options) -> Any:
    """A call as transformers' models are called, in the precision of their weights: accelerate has a model in training
    called under autocast, and its blocks, which are called alone here, are not."""
    plain = vars(model).get("_original_forward")
    with replaced([model], [plain]) if plain is not None else nullcontext():
        return model(**inputs, **options, return_dict=True)


def call_maskless(model: Network, inputs: Inputs, options: Options) -> Any:
    """Of a model that takes no mask: the batch alone says which tokens are real."""
    return call_hf(model, {name: inputs[name] for name in inputs if name != "attention_mask"}, options)


def call_timm(model: Network, inputs: Inputs, options: Options) -> Tensor:
    """A call as timm's models are called."""
    return model(inputs["pixel_values"])


def timm_features(model: Network, inputs: Inputs, options: Options) -> Tensor:
    return model.forward_features(inputs["pixel_values"])


def call_trunk(model: Network, inputs: Inputs, options: Options) -> Any:
    return call_hf(trunk_of(model), inputs, options)


def call_mae(model: Network, inputs: Inputs, options: Options, *, trunk: bool = False) -> Any:
    """A masked autoencoder is shown every patch, in order: none is drawn, and the model is as before afterwards."""
    embeddings = trunk_of(model).embeddings
    pixels, config = inputs["pixel_values"], embeddings.config
    places = torch.arange(embeddings.patch_embeddings.num_patches, device=pixels.device, dtype=torch.float32)
    kept, config.mask_ratio = config.mask_ratio, 0.0
    try:  # patches are sorted by the noise
        network = trunk_of(model) if trunk else model
        return call_hf(network, inputs, {**options, "noise": places.expand(len(pixels), -1)})
    finally:
        config.mask_ratio = kept


def no_offset(config: Any) -> int:
    return 0


def roberta_offset(config: Any) -> int:
    """Of RoBERTa's positions the first ones, up to the number of the padding token, belong to no token."""
    return config.pad_token_id + 1


@dataclass(frozen=True)
class Family:
    """How one family of classes is taken apart. Paths are attribute paths below the trunk."""

    name: str
    classes: tuple[str, ...]
    blocks: str
    norm: str | None
    head: Callable[[Network, Tensor], Tensor] = language_head
    package: str = "transformers"
    inputs: tuple[str, ...] = TEXT
    options: tuple[tuple[str, bool], ...] = (("use_cache", False),)  # a repeated block with a cache is silently wrong
    first_position: Callable[[Any], int] = no_offset  # of a config: the number of a text's first token
    vision: Vision | None = None  # of models of images
    call: Callable[[Network, Inputs, Options], Any] = call_hf
    features: Callable[[Network, Inputs, Options], Any] = call_trunk  # the call without a head
    results: tuple[str, ...] = ("logits", "last_hidden_state")  # of what a call returns the first that is there
    origin: str = "row"  # or "structure": how its models are taken apart
    checks: tuple[tuple[str, Any], ...] = ()  # what was held against the model's own pass where there is no row
    takes_padding: bool = True  # whether the states of a text are the same with padding behind it
    is_causal: bool = True  # whether no state of a model that generates sees a later token
    needs_all: bool = False  # whether a readout needs all tokens of a text or image at once

    @property
    def sees_images(self) -> bool:
        return self.vision is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """Of a batch: those of the model, and which tokens are real, also where it takes no mask."""
        return self.inputs if self.sees_images else tuple(dict.fromkeys((*self.inputs, "attention_mask")))

    @property
    def proof(self) -> Mapping[str, Any] | None:
        """What was `shown`, by name; None where there is a row."""
        return dict(self.checks) if self.checks else None

    def container(self, model: Network) -> nn.Module:
        """The module that holds the blocks and nothing else."""
        return trunk_of(model).get_submodule(self.blocks)

    def block_list(self, model: Network) -> tuple[nn.Module, ...]:
        """The blocks in the order in which they run."""
        return tuple(self.container(model).children())

    def width(self, model: Network) -> int:
        """Of the hidden states."""
        return model.config.hidden_size if self.vision is None else self.vision.width(model)

    def max_tokens(self, config: Any) -> int | None:
        """Of the longest text; None where a text may have any length."""
        return config.max_position_embeddings - self.first_position(config)

    def final_norm(self, model: Network) -> nn.Module | None:
        """The norm behind the last block."""
        return None if self.norm is None else trunk_of(model).get_submodule(self.norm)

    def identities(self, num_blocks: int, last: Tensor | None = None) -> list[Callable[..., Any]]:
        """In place of the blocks: each returns the state it is given, or `last`, as its block returns one."""
        return [identity_forward(number, last) for number in self.num_returned(num_blocks)]

    def num_returned(self, num_blocks: int) -> Sequence[int]:
        """Of each block, how many values it returns in a tuple; 0: the state alone."""
        return (0,) * num_blocks

    def read_out(self, model: Network, hidden: Tensor) -> Tensor:
        """Final norm and head of states (batch, tokens, dim), as the model itself ends."""
        norm = self.final_norm(model)
        return self.head(model, hidden if norm is None else norm(hidden))

    def logits(self, model: Network, inputs: Inputs) -> Tensor:
        """What the model makes of a batch, as `read_out` makes it of the last state."""
        return self.result(self.call(model, inputs, dict(self.options)))

    def result(self, output: Any) -> Tensor:
        """The logits in what a call returns."""
        if isinstance(output, Tensor):
            return output
        return next(getattr(output, name) for name in self.results if hasattr(output, name))


def _decoder(name: str, prefix: str, blocks: str = "layers", norm: str = "norm", **options: Any) -> Family:
    return Family(name, (f"{prefix}ForCausalLM", f"{prefix}Model"), blocks, norm, **options)


def _images(name: str, prefix: str, head: Callable[[Network, Tensor], Tensor], **options: Any) -> Family:
    """Of transformers; of timm there is one row alone."""
    classes = (f"{prefix}ForImageClassification", f"{prefix}Model")
    usual = {"classes": classes, "blocks": "layers", "norm": "layernorm", "vision": TRANSFORMERS}
    return Family(name, head=head, inputs=IMAGES, options=(), **(usual | options))


_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "Model")
_DINO: dict[str, Any] = {"blocks": "encoder.layer", "vision": ANY_SIZE}

# fmt: off
FAMILIES = (
    # Read block by block, as large ones are, a class without a row is first proven on all its weights.
    Family("gpt2", ("GPT2LMHeadModel", "GPT2Model"), "h", "ln_f"),
    _decoder("gpt_neox", "GPTNeoX", norm="final_layer_norm"),
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3"),
    # Positions are always said to it: its own count takes any token with the number of the padding token for padding.
    Family("roberta", tuple(f"Roberta{head}" for head in _HEADS), "encoder.layer", None, roberta_head, options=(),
           first_position=roberta_offset),
    # Without weights, images tell nothing of their model: read block by block and counted they need a row.
    Family("timm_vit", ("VisionTransformer",), "blocks", "norm", timm_head, package="timm", inputs=IMAGES, options=(),
           vision=TIMM, call=call_timm, features=timm_features),
    _images("vit", "ViT", class_token_head),
    # Of any size.
    _images("dinov2", "Dinov2", dinov2_head, **_DINO),
    _images("dinov2_with_registers", "Dinov2WithRegisters", dinov2_head, **_DINO),
    # Shown every patch, in order.
    _images("vit_mae", "ViTMAE", mae_head, classes=("ViTMAEForPreTraining", "ViTMAEModel"), call=call_mae,
            features=partial(call_mae, trunk=True)),
    # Where the patches are averaged for classes, the norm comes after the mean, and `layernorm` does nothing.
    _images("beit", "Beit", beit_head),
    # CLIP itself norms the class token alone and gives out the others as the last block leaves them.
    _images("clip_vision", "CLIPVision", clip_head, classes=("CLIPVisionModelWithProjection", "CLIPVisionModel"),
            blocks="encoder.layers", norm="post_layernorm", results=("image_embeds", "pooler_output")),
)
# fmt: on


def row_of(model: nn.Module) -> Family | None:
    """The row of a model, by the names of its class and of the classes it derives from; None without one."""
    for ancestor in type(model).__mro__:
        for family in FAMILIES:
            if ancestor.__name__ in family.classes and ancestor.__module__.split(".")[0] == family.package:
                return family
    return None


def class_named(architecture: str) -> Any:
    """The class of transformers that a config.json names, in any capitals (MPT's say MPTForCausalLM); None without one.

    The repositories' own code, where that name comes from, is never run.
    """
    import transformers

    if (kind := getattr(transformers, architecture, None)) is not None:
        return kind
    same = [name for name in dir(transformers) if name.lower() == architecture.lower()]
    return getattr(transformers, same[0]) if same else None


def propose_blocks(model: nn.Module) -> str | None:
    """Path of the one ModuleList that holds nothing but transformers' checkpointing layers, where there is just one.

    That list is the block list of every text model of transformers 5 it was tried on (30 types).
    """
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and all(map(_is_checkpointing_layer, module))
    ]
    return paths[0] if len(paths) == 1 else None


def _is_checkpointing_layer(module: nn.Module) -> bool:
    # By name: a model of this kind has transformers loaded already, any other model need not load it.
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


# The attention of a training step: causal by the kernel's flag, without a mask.

# A name that transformers knows an attention function for, but no function that builds its mask: it then builds none.
_BY_FLAG = "sdpa_causal_by_flag"
_WHOLE_PAST = ("gpt2", "gpt_neox", "llama")  # model types whose every block attends to all earlier tokens


@contextmanager
def causal_by_flag(model: Any) -> Iterator[None]:
    """Inside, `model` takes full batches only (no padding) and builds no attention mask for them.

    transformers finds out by itself that such batches need no mask, but it looks at the position ids for that: once a
    forward pass it waits for the GPU, and under `torch.compile`, where values cannot be looked at, it hands an explicit
    mask to every block, which rules the flash kernel out. Other model types and other attention implementations than
    sdpa stay as they are.
    """
    config = model.config
    if config.model_type not in _WHOLE_PAST or config._attn_implementation != "sdpa":
        yield
        return
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_BY_FLAG, sdpa_attention_forward)
    config._attn_implementation = _BY_FLAG
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
