"""Save tiny models as checkpoints in shards."""

from pathlib import Path

from torch import nn

from lit_layers.models.build import quiet
from tests.support.tiny_models import tiny

SHARD = "20KB"  # so small that each block of a tiny model has its own shard or two


def saved(folder: Path, name: str = "gpt2", *, shard: str = SHARD, **options) -> nn.Module:
    """Save a tiny model of transformers in `folder`, and return the model."""
    model = tiny(name, **options)
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard)
    return model


def saved_vit(folder: Path) -> nn.Module:
    """Save a tiny vision transformer of timm in `folder`, and return the model."""
    from lit_layers.models import save, vit

    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 7}
    model = vit("vit_tiny_patch16_224", **size).eval()
    save(model, folder)
    return model
