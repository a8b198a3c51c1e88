"""Tiny models as checkpoints on disk, cut into shards."""

from pathlib import Path

from torch import nn

from lit_layers.models.build import quiet
from tests.support.tiny_models import tiny

SHARD = "20KB"  # so small that every block of a tiny model lies in a shard of its own, or in two


def saved(folder: Path, name: str = "gpt2", *, shard: str = SHARD, **options) -> nn.Module:
    """A tiny model of transformers, which now also lies in `folder`."""
    model = tiny(name, **options)
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard)
    return model


def saved_vit(folder: Path) -> nn.Module:
    """A tiny vision transformer of timm, which now also lies in `folder`."""
    from lit_layers.models import save, vit

    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 7}
    model = vit("vit_tiny_patch16_224", **size).eval()
    save(model, folder)
    return model
