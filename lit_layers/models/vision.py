"""What models of images say of themselves: in the words of timm and in those of transformers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# A module of timm or transformers: it has attributes that nn.Module does not declare.
Network = Any


def one_side(size: Any) -> int:
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
    attention=lambda model: "sdpa" if getattr(model.blocks[0].attn, "fused_attn", False) else "eager",
)

TRANSFORMERS = Vision(
    width=lambda model: model.config.hidden_size,
    fixed_side=lambda model: one_side(model.config.image_size),
    usual_side=lambda model: one_side(model.config.image_size),
    patch_side=lambda model: one_side(model.config.patch_size),
    channels=lambda model: model.config.num_channels,
    class_token=lambda model: True,
    prefix=lambda model: 1 + getattr(model.config, "num_register_tokens", 0),
    classes=lambda model: getattr(getattr(model, "classifier", None), "out_features", 0),
    has_head=lambda model: model.base_model is not model,
    attention=lambda model: model.config._attn_implementation,
)

ANY_SIZE = replace(TRANSFORMERS, fixed_side=lambda model: None)  # position embeddings are interpolated unasked
