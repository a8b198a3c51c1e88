"""The table `FAMILIES`: where a model family keeps its blocks, how to call it, how to read out a state.

Each row holds facts about a family that cannot be inferred from one forward pass, such as the position id of the first
token in RoBERTa. For model classes that are not in the table, the module `structure` searches for the blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.models.block_calls import identity_forward, replaced

# Type of a module of timm or transformers. It is Any, because nn.Module does not declare the attributes that we read.
Network = Any


def side_length(size: Any) -> int:
    """Return the side of square images or patches from the size in a config, which is one number or a pair."""
    return int(size) if isinstance(size, int | float) else int(size[0])


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Properties of a vision model, such as image size and patch size, each as a function of the model."""

    width: Callable[[Network], int]
    fixed_side: Callable[[Network], int | None]  # side of the images in px; None if any size is accepted
    usual_side: Callable[[Network], int]  # side in px of the images that the model was built for
    patch_side: Callable[[Network], int]  # px
    channels: Callable[[Network], int]
    class_token: Callable[[Network], bool]
    prefix: Callable[[Network], int]  # number of tokens before the patches: class, distillation, registers
    classes: Callable[[Network], int]  # number of classes in the logits; 0 if the model has no classifier
    has_head: Callable[[Network], bool]  # whether `truncate(head=False)` would remove something
    attention: Callable[[Network], str]


TIMM = Vision(
    width=lambda model: model.embed_dim,
    # Only `strict_img_size` makes timm refuse images of another size; the option `dynamic_img_size` turns it off.
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
    # timm has no config field for the attention implementation: each attention module stores its own flag.
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

# DINOv2 interpolates its position embeddings by default. The other families need images of the size in their config.
ANY_SIZE = replace(TRANSFORMERS, fixed_side=lambda model: None)


Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]

TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
IMAGES = ("pixel_values",)


def trunk_of(model: Network) -> Network:
    """Return the model without its head (`base_model` in transformers), or the same model if it has no head."""
    trunk = getattr(model, "base_model", model)
    # `base_model` of CLIPVisionModelWithProjection returns the model itself, head included (transformers 5.17). So its
    # `vision_model` is returned instead.
    is_clip = trunk is model and hasattr(model, "visual_projection") and not hasattr(model, "text_model")
    return getattr(model, "vision_model", trunk) if is_clip else trunk


def text_config(config: Any) -> Any:
    """Return the text part of a multimodal model's config; return the config of any other model unchanged."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def language_head(model: Network, normed: Tensor) -> Tensor:
    """Return the logits of states after the final norm, or these states if the model has no head."""
    # `get_output_embeddings` works for all classes, although their heads have different names (`lm_head`, `embed_out`).
    head = model.get_output_embeddings()
    return normed if head is None else head(normed)


def roberta_head(model: Network, hidden: Tensor) -> Tensor:
    """Return the head's scores for the states: over the vocabulary, or over classes, per text or per token.

    If the model has no head, return the states unchanged.
    """
    # The head of RobertaForSequenceClassification selects token 0 itself, so every head gets all tokens.
    head = getattr(model, "lm_head", None) or getattr(model, "classifier", None)
    return hidden if head is None else head(hidden)


def timm_head(model: Network, normed: Tensor) -> Tensor:
    """Return class scores of states after the final norm, pooled as the model pools them."""
    # `forward_head` pools, and with average pooling it also applies the final norm: timm then puts it after the mean
    # (`fc_norm`) and makes `norm` the identity.
    return model.forward_head(normed)


def class_token_head(model: Network, normed: Tensor) -> Tensor:
    """Return class scores of the class token, or if the model has no classifier, the states after the final norm."""
    return model.classifier(normed[:, 0]) if hasattr(model, "classifier") else normed


def dinov2_head(model: Network, normed: Tensor) -> Tensor:
    """Return class scores from the class token and the mean over patches.

    If the model has no classifier, return the states after the final norm.
    """
    if not hasattr(model, "classifier"):
        return normed
    # `prefix` counts the class token and the register tokens, which are not patches and do not enter the mean.
    patches = normed[:, TRANSFORMERS.prefix(model) :]
    return model.classifier(torch.cat([normed[:, 0], patches.mean(dim=1)], dim=1))


def beit_head(model: Network, normed: Tensor) -> Tensor:
    """Return class scores of the pooled states, or if the model has no classifier, the states after the final norm."""
    return model.classifier(trunk_of(model).pooler(normed)) if hasattr(model, "classifier") else normed


def mae_head(model: Network, normed: Tensor) -> Tensor:
    """Return the pixels that the decoder predicts for each patch.

    If the model has no decoder, return the states after the final norm.
    """
    if not hasattr(model, "decoder"):
        return normed
    # The decoder expects the permutation that puts shuffled patches back (`ids_restore`). `call_mae` never shuffles, so
    # this is the identity. It has no entry for the class token.
    order = torch.arange(normed.shape[1] - 1, device=normed.device).expand(len(normed), -1)
    return model.decoder(normed, order).logits


def clip_head(model: Network, normed: Tensor) -> Tensor:
    """Return the state of the class token. If the model has a projection into CLIP's joint space, apply it."""
    pooled = normed[:, 0]
    return model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled


def call_hf(model: Network, inputs: Inputs, options: Options) -> Any:
    """Call a transformers model with keyword arguments, in the precision of its weights."""
    # `Accelerator.prepare` replaces the `forward` of a model in training by a function under autocast, and stores the
    # old `forward`. Blocks called one by one run without autocast, so only the old `forward` gives the same states.
    plain = vars(model).get("_original_forward")
    with replaced([model], [plain]) if plain is not None else nullcontext():
        return model(**inputs, **options, return_dict=True)


def call_maskless(model: Network, inputs: Inputs, options: Options) -> Any:
    """Call a model whose forward takes no `attention_mask`, without the mask in `inputs`."""
    return call_hf(model, {name: inputs[name] for name in inputs if name != "attention_mask"}, options)


def call_timm(model: Network, inputs: Inputs, options: Options) -> Tensor:
    """Call a timm model, which takes the pixels as its only argument."""
    return model(inputs["pixel_values"])


def timm_features(model: Network, inputs: Inputs, options: Options) -> Tensor:
    return model.forward_features(inputs["pixel_values"])


def call_trunk(model: Network, inputs: Inputs, options: Options) -> Any:
    return call_hf(trunk_of(model), inputs, options)


def call_mae(model: Network, inputs: Inputs, options: Options, *, trunk: bool = False) -> Any:
    """Call a masked autoencoder with every patch visible and in order; restore its config afterwards."""
    embeddings = trunk_of(model).embeddings
    pixels, config = inputs["pixel_values"], embeddings.config
    # By default the model drops 75% of the patches at random. A mask ratio of 0 keeps all, but still shuffles them: it
    # sorts patches by `noise`, which is random unless passed. Increasing numbers leave each patch at its position.
    order = torch.arange(embeddings.patch_embeddings.num_patches, device=pixels.device, dtype=torch.float32)
    mask_ratio, config.mask_ratio = config.mask_ratio, 0.0
    try:
        network = trunk_of(model) if trunk else model
        return call_hf(network, inputs, {**options, "noise": order.expand(len(pixels), -1)})
    finally:
        config.mask_ratio = mask_ratio


def no_offset(config: Any) -> int:
    return 0


def roberta_offset(config: Any) -> int:
    """Return the position id of the first token of a text in RoBERTa, `pad_token_id + 1`."""
    # Padding has the position id `pad_token_id` (1), and row 0 of the position table is never used. So a table of 514
    # rows fits texts of 512 tokens.
    return config.pad_token_id + 1


@dataclass(frozen=True)
class Family:
    """Layout of one family of classes: where its blocks are, how to call its models and how to read out a state.

    `blocks` and `norm` are attribute paths below the trunk (`trunk_of`).
    """

    name: str
    classes: tuple[str, ...]
    blocks: str
    norm: str | None
    head: Callable[[Network, Tensor], Tensor] = language_head
    package: str = "transformers"
    inputs: tuple[str, ...] = TEXT
    # Models are called without a key-value cache. With one, a block called a second time would append its keys again
    # and attend to twice the tokens.
    options: tuple[tuple[str, bool], ...] = (("use_cache", False),)
    first_position: Callable[[Any], int] = no_offset  # config -> position id of the first token of a text
    vision: Vision | None = None  # None for text models
    call: Callable[[Network, Inputs, Options], Any] = call_hf
    features: Callable[[Network, Inputs, Options], Any] = call_trunk  # calls a model without computing logits
    # Output fields that may hold the logits; the first one that exists is read.
    results: tuple[str, ...] = ("logits", "last_hidden_state")
    origin: str = "row"  # "row" if this is a row of `FAMILIES`, "structure" if the blocks were found in a call
    checks: tuple[tuple[str, Any], ...] = ()  # name and result of each check; empty for a row of `FAMILIES`
    takes_padding: bool = True  # whether padding after a text leaves its states unchanged
    is_causal: bool = True  # whether no state depends on later tokens; only meaningful if the model generates text
    needs_all: bool = False  # whether the head needs all tokens at once, because it pools or compares them

    @property
    def sees_images(self) -> bool:
        return self.vision is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are read from a batch: the model's inputs, and for texts always the mask."""
        return self.inputs if self.sees_images else tuple(dict.fromkeys((*self.inputs, "attention_mask")))

    @property
    def proof(self) -> Mapping[str, Any] | None:
        """Results of the checks that the blocks reproduce the model, by name of the check.

        None for the entries of `FAMILIES`, which are not checked.
        """
        return dict(self.checks) if self.checks else None

    def container(self, model: Network) -> nn.Module:
        """Return the module whose children are the blocks."""
        return trunk_of(model).get_submodule(self.blocks)

    def block_list(self, model: Network) -> tuple[nn.Module, ...]:
        """Return the blocks in the order in which they run."""
        return tuple(self.container(model).children())

    def width(self, model: Network) -> int:
        """Return the dimension of the hidden states."""
        return model.config.hidden_size if self.vision is None else self.vision.width(model)

    def max_tokens(self, config: Any) -> int | None:
        """Return the maximum number of tokens per text; None if there is no limit."""
        return config.max_position_embeddings - self.first_position(config)

    def final_norm(self, model: Network) -> nn.Module | None:
        """Return the norm after the last block; None if the family has none."""
        return None if self.norm is None else trunk_of(model).get_submodule(self.norm)

    def identities(self, num_blocks: int, last: Tensor | None = None) -> list[Callable[..., Any]]:
        """Return a new `forward` for each block. Each function returns its input state, or `last` if given.

        The state is returned in the format of the block's output: as a tensor, or as the first item of a tuple.
        """
        return [identity_forward(length, last) for length in self.num_returned(num_blocks)]

    def num_returned(self, num_blocks: int) -> Sequence[int]:
        """Return for each block the length of the tuple that it returns; 0 if it returns a tensor."""
        return (0,) * num_blocks

    def read_out(self, model: Network, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to states (batch, tokens, dim)."""
        norm = self.final_norm(model)
        return self.head(model, hidden if norm is None else norm(hidden))

    def logits(self, model: Network, inputs: Inputs) -> Tensor:
        """Return the logits of the model's own call. They equal those that `read_out` computes from the last state."""
        return self.result(self.call(model, inputs, dict(self.options)))

    def result(self, output: Any) -> Tensor:
        """Return the logits from the output of a call."""
        if isinstance(output, Tensor):
            return output
        return next(getattr(output, name) for name in self.results if hasattr(output, name))


def _decoder(name: str, prefix: str, blocks: str = "layers", norm: str = "norm", **options: Any) -> Family:
    return Family(name, (f"{prefix}ForCausalLM", f"{prefix}Model"), blocks, norm, **options)


def _images(name: str, prefix: str, head: Callable[[Network, Tensor], Tensor], **options: Any) -> Family:
    """Return the row of `FAMILIES` for a transformers image model whose classes and modules are named as usual."""
    classes = (f"{prefix}ForImageClassification", f"{prefix}Model")
    usual = {"classes": classes, "blocks": "layers", "norm": "layernorm", "vision": TRANSFORMERS}
    return Family(name, head=head, inputs=IMAGES, options=(), **(usual | options))


_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "Model")
_DINO: dict[str, Any] = {"blocks": "encoder.layer", "vision": ANY_SIZE}

# fmt: off
FAMILIES = (
    # Many decoders would work without a row, but a class without a row is first checked on all its weights. For this, a
    # large model whose blocks are read from disk would be read in full. The common classes skip the checks.
    Family("gpt2", ("GPT2LMHeadModel", "GPT2Model"), "h", "ln_f"),
    _decoder("gpt_neox", "GPTNeoX", norm="final_layer_norm"),
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3"),
    # RoBERTa numbers its tokens by comparing input ids with `pad_token_id`, not by the mask. A real token with that id
    # would get the position of padding, so position ids are always passed. There is no final norm, because each block
    # ends in a norm.
    Family("roberta", tuple(f"Roberta{head}" for head in _HEADS), "encoder.layer", None, roberta_head, options=(),
           first_position=roberta_offset),
    # Thanks to this entry, image models without weights (meta device) can be read. Without an entry, `structure` would
    # have to run the model to count its prefix tokens. Every ViT and DeiT of timm is this class or derives from it.
    Family("timm_vit", ("VisionTransformer",), "blocks", "norm", timm_head, package="timm", inputs=IMAGES, options=(),
           vision=TIMM, call=call_timm, features=timm_features),
    _images("vit", "ViT", class_token_head),
    # DINOv2 takes any image size, and its class token is not the only input of its classifier.
    _images("dinov2", "Dinov2", dinov2_head, **_DINO),
    _images("dinov2_with_registers", "Dinov2WithRegisters", dinov2_head, **_DINO),
    # The decoder of MAE is a second sequence of blocks. It is part of the head, and only the encoder has layers.
    _images("vit_mae", "ViTMAE", mae_head, classes=("ViTMAEForPreTraining", "ViTMAEModel"), call=call_mae,
            features=partial(call_mae, trunk=True)),
    # With `use_mean_pooling`, BEiT's `layernorm` is the identity and the pooler applies a norm after the mean over
    # patches. In such a model, the "final norm" of this row does not change the states of the last layer.
    _images("beit", "Beit", beit_head),
    # CLIP applies `post_layernorm` only to the class token that it pools, and its `last_hidden_state` has no norm. Here
    # the norm applies to all tokens, so the normed states differ from `last_hidden_state`. The pooled outputs agree.
    _images("clip_vision", "CLIPVision", clip_head, classes=("CLIPVisionModelWithProjection", "CLIPVisionModel"),
            blocks="encoder.layers", norm="post_layernorm", results=("image_embeds", "pooler_output")),
)
# fmt: on


def row_of(model: nn.Module) -> Family | None:
    """Return the row of `FAMILIES` for a model's class or its nearest base class; None if there is no such row."""
    # Compare names of classes, because isinstance would import timm and transformers. Compare packages too, because
    # torchvision also has a class VisionTransformer, with other attributes.
    for ancestor in type(model).__mro__:
        for family in FAMILIES:
            if ancestor.__name__ in family.classes and ancestor.__module__.split(".")[0] == family.package:
                return family
    return None


def class_named(architecture: str) -> Any:
    """Return the class of transformers that a config.json names, ignoring case; None if there is no such class.

    The config.json of MPT says MPTForCausalLM, the name in the repository's own code. The class of transformers is
    MptForCausalLM. The repository's code never runs.
    """
    import transformers

    if (kind := getattr(transformers, architecture, None)) is not None:
        return kind
    same = [name for name in dir(transformers) if name.lower() == architecture.lower()]
    return getattr(transformers, same[0]) if same else None


def propose_blocks(model: nn.Module) -> str | None:
    """Return the path of the only ModuleList of gradient-checkpointing layers; None if there is not exactly one.

    transformers 5 derives blocks from `GradientCheckpointingLayer`. This list held the blocks in all 30 types of text
    models that were tried. It is only a proposal: `discovery` uses it to choose between candidates.
    """
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and all(map(_is_checkpointing_layer, module))
    ]
    return paths[0] if len(paths) == 1 else None


def _is_checkpointing_layer(module: nn.Module) -> bool:
    # Compares names, as isinstance would import transformers for models that do not need it.
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


# Attention in training steps: the kernel's `is_causal` flag replaces the mask.

# This attention implementation is registered in transformers without a mask function. transformers then builds no mask,
# and its sdpa function passes `is_causal=True` to the kernel instead.
_BY_FLAG = "sdpa_causal_by_flag"
_WHOLE_PAST = ("gpt2", "gpt_neox", "llama")  # model types whose every block attends to all earlier tokens


@contextmanager
def causal_by_flag(model: Any) -> Iterator[None]:
    """Prevent `model` from building attention masks inside the context; its batches must have no padding.

    Otherwise, transformers reads the values of the position ids to find that no mask is needed, which waits for the GPU
    once per forward pass. Under `torch.compile`, values cannot be read, so every block gets an explicit mask and cannot
    use the flash kernel. The context only affects sdpa attention of the model types in `_WHOLE_PAST`.
    """
    config = model.config
    # Models with sliding windows need a mask even for full batches.
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
