"""Block Jacobians of families against derivatives that are taken one token and one coordinate at a time."""

import warnings

import pytest
import torch
from torch import Tensor

from lit_layers.functional.jacobian import block_jacobians
from lit_layers.functional.jacobian.block_jacobians import block_jacobian
from lit_layers.models.view import LayeredModel, Trajectory
from tests.support.tiny_models import PICTURES, RECURRENT, sees_images, tiny, tiny_batch

OTHERS = ("roberta", "distilbert", "modernbert", "mamba_lm")
CASES = [(name, p) for name in (*PICTURES, *OTHERS) for p in ((None,) if sees_images(name) else (None, "left"))]


def of_the_branch(trajectory: Trajectory, layer: int, prompt: int) -> Tensor:
    """d (block(x) - x)[last token] / d x of every token, by plain autograd on one prompt: (tokens, dim, dim)."""
    alone = trajectory.rows(prompt, prompt + 1)
    last = alone.mask[0].nonzero().max()
    hidden = alone.hidden[layer - 1].detach().requires_grad_()
    update = (alone.block(layer)(hidden) - hidden)[0, last]
    rows = [torch.autograd.grad(value, hidden, retain_graph=True)[0][0] for value in update]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_jacobians_of_every_token_are_those_of_plain_autograd(name, padding):
    trajectory = LayeredModel(tiny(name, torch.float64)).trajectory(
        tiny_batch(name, batch=2, tokens=6, padding=padding)
    )
    fewest = int(trajectory.mask.sum(1).min())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the Jacobians of MambaBlock are computed by plain reverse mode")
        found = block_jacobian(
            trajectory.block(2), trajectory.hidden[1], mask=trajectory.mask, out_tokens=-1, in_tokens=range(-fewest, 0)
        )
    for prompt, mask in enumerate(trajectory.mask):
        expected = of_the_branch(trajectory, 2, prompt)[mask][-fewest:]
        # rotary tables are float32 in any model
        torch.testing.assert_close(found[prompt, 0], expected, rtol=0, atol=1e-6 if name == "modernbert" else 1e-11)
        assert expected.abs().max() > 0.1


@pytest.mark.parametrize("name", RECURRENT[::2])
def test_a_state_space_has_no_attention_to_expand_and_says_that_it_takes_longer(name, monkeypatch):
    monkeypatch.setattr(block_jacobians, "_warned", set())
    trajectory = LayeredModel(tiny(name)).trajectory(tiny_batch(name, batch=1, tokens=3))
    block, hidden = trajectory.block(2), trajectory.hidden[1]
    with pytest.warns(RuntimeWarning, match=r"Jacobians of Mamba2?Block are computed by plain reverse mode, exactly"):
        found = block_jacobian(block, hidden)
    assert torch.equal(found, block_jacobian(block, hidden, route="plain"))
    with pytest.raises(ValueError, match="no route 'cut' for Mamba"):
        block_jacobian(block, hidden, route="cut")
