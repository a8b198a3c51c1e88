"""The head runs for what is read alone, and gives what the model itself gives."""

import torch

from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import VOCAB, tiny, tiny_batch


def head_rows(network: torch.nn.Module) -> list[int]:
    """How many states each call of the head takes."""
    rows: list[int] = []
    network.get_output_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(args[0].shape[:-1].numel())
    )
    return rows


def test_a_pass_computes_no_head_and_logits_run_no_block():
    network = tiny("gpt2", torch.float64)
    rows, blocks = head_rows(network), []
    for block in network.transformer.h:
        block.attn.register_forward_hook(lambda module, args, output: blocks.append(module))
    trajectory = LayeredModel(network).trajectory(tiny_batch("gpt2", padding="left"))
    assert (rows, len(blocks)) == ([], 3)
    assert trajectory.logits.shape[-1] == VOCAB
    assert trajectory.logits is trajectory.logits, "they are computed once"
    assert (rows, len(blocks)) == ([30], 3)
    assert not any("forward" in vars(block) for block in network.transformer.h)


def test_what_a_models_own_forward_adds_behind_its_head_is_in_its_logits():
    network = tiny("gpt2", torch.float64)

    class Halved(type(network)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 2 + 1
            return output

    batch = tiny_batch("gpt2")
    plain = LayeredModel(network).trajectory(batch).logits
    network.__class__ = Halved
    trajectory, index = LayeredModel(network).trajectory(batch), (torch.tensor([0, 2]), torch.tensor([9, 1]))
    torch.testing.assert_close(trajectory.logits, plain / 2 + 1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trajectory.logits_of(index), (plain / 2 + 1)[index], rtol=1e-12, atol=1e-12)
