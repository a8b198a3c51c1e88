"""Vision transformers of timm by name: measured as in timm's own forward pass, or refused in one sentence."""

import pytest
import timm
import torch

from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.replay import replay

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 5}


def check(name: str, **options) -> None:
    """Check that states, blocks and readout give the logits of timm."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    side = options.get("img_size", model.default_cfg.get("input_size", (3, 224, 224))[-1])
    images = {"pixel_values": torch.randn(1, 3, side, side)}
    view = LayeredModel(model)
    trajectory = view.trajectory(images)
    with torch.no_grad():
        logits = model(images["pixel_values"])
        assert torch.allclose(view.readout(trajectory.hidden[-1]), logits, atol=1e-4), name
        assert torch.allclose(replay(view, trajectory, range(1, view.num_layers + 1)), logits, atol=1e-4), name
    assert view.attention in ("sdpa", "eager"), name


SIDE_BY_SIDE = ("vit_base_patch16_xp_224", "vit_small_patch16_18x2_224", "deit3_small_patch16_224")
BY_STRUCTURE = ("eva02_tiny_patch14_224", "beit_base_patch16_224", "vit_small_patch16_rope_224")


@pytest.mark.soak
def test_blocks_of_one_shape_are_measured_and_hierarchical_ones_are_refused():
    for name in SIDE_BY_SIDE:
        check(name, **SMALL)
    for name in BY_STRUCTURE:
        check(name, **SMALL, img_size=28 if "14" in name else 32)
    with pytest.raises(InputError, match=r"not \(batch, tokens, dim\) of one shape"):
        LayeredModel(timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)).eval())
