"""Vision transformers of timm by their names: measured as timm's own pass, or refused in a sentence."""

import pytest
import timm
import torch

from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.replay import replay

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 5}


def check(name: str, **options) -> bool:
    """Return whether the model is measured; states, blocks and readout then lead to timm's logits."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    images = {"pixel_values": torch.randn(1, *model.default_cfg.get("input_size", (3, 224, 224)))}
    try:
        view = LayeredModel(model)
        trajectory = view.trajectory(images)
    except InputError:
        return False
    with torch.no_grad():
        logits = model(images["pixel_values"])
        assert torch.allclose(view.readout(trajectory.hidden[-1]), logits, atol=1e-4)
        assert torch.allclose(replay(view, trajectory, range(1, view.num_layers + 1)), logits, atol=1e-4)
    return view.attention in ("sdpa", "eager")


@pytest.mark.parametrize("name", ["vit_base_patch16_xp_224", "vit_small_patch16_18x2_224", "deit3_small_patch16_224"])
def test_blocks_with_attention_and_mlp_side_by_side_are_measured(name):
    assert check(name, **SMALL)


@pytest.mark.nightly
def test_every_vit_and_deit_of_timm_is_measured_or_refused_in_a_sentence():
    measured = 0
    for name in timm.list_models(["vit*", "deit*"]):
        for options in (SMALL, {"depth": 2, "num_classes": 5}):
            try:
                with torch.device("meta"):
                    size = sum(weight.numel() for weight in timm.create_model(name, **options).parameters())
            except (TypeError, AssertionError, RuntimeError, ValueError, NotImplementedError):
                continue  # no option of that name, or nothing on the meta device
            if size < 1e8:
                measured += check(name, **options)
                break
    assert measured > 100
