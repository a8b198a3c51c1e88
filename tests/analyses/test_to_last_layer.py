"""Jacobians through several blocks, against brute force in float64 and closed forms."""

from typing import Any

import pytest
import torch

from lit_layers.analyses.jacobian_lens import jacobians_to_last_layer
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny


def jacobian_sums(blocks, hidden, positions, every=False) -> torch.Tensor:
    """Sum whole Jacobians of autograd over t' >= t, or with `every` over all t', and average over t."""
    results = []
    for start in range(len(blocks)):
        state = hidden
        for block in blocks[:start]:
            state = block(state)

        def rest(x, start=start):
            for block in blocks[start:]:
                x = block(x)
            return x

        whole: Any = torch.autograd.functional.jacobian(rest, state.detach())  # (1, t', i, t, j)
        mean = torch.zeros(hidden.shape[-1], hidden.shape[-1], dtype=hidden.dtype)
        for t in positions:
            for later in positions:
                if later >= t or every:
                    mean += whole[0, later, :, 0, t] / len(positions)
        results.append(mean)
    return torch.stack(results)


def blocks_and_states(family, dtype=torch.float64, padding=0):
    """Return the blocks of a model as called on nine tokens, and the states of these tokens."""
    view = LayeredModel(tiny(family, dtype))
    ids = torch.nn.functional.pad(torch.arange(9)[None] + 3, (padding, 0))
    mask = torch.nn.functional.pad(torch.ones(1, 9, dtype=torch.long), (padding, 0))
    trajectory = view.trajectory({"input_ids": ids, "attention_mask": mask})
    return [trajectory.block(layer) for layer in range(1, view.num_layers + 1)], trajectory.hidden[0]


TOKENS = torch.tensor([2, 3, 5, 7])


# transformers always computes the norms of Llama in float32, and their derivatives sum in another order.
@pytest.mark.parametrize(
    ("family", "tolerance"),
    # sequential, parallel and gated MLPs, grouped heads, capped scores and eager attention
    [
        ("gpt2", 1e-9),
        ("falcon_alibi", 1e-9),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("gpt_neox", 1e-9), ("llama", 1e-5), ("qwen2", 1e-5), ("gemma2", 1e-5))
        ),
    ],
)
def test_a_causal_model_agrees_with_the_definition_in_float64(family, tolerance):
    blocks, hidden = blocks_and_states(family)
    found = jacobians_to_last_layer(blocks, hidden, TOKENS)
    expected = jacobian_sums(blocks, hidden, TOKENS)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_float32_agrees_with_float64_to_rounding_and_left_padding_changes_nothing():
    expected = jacobians_to_last_layer(*blocks_and_states("gpt2"), TOKENS)
    single = jacobians_to_last_layer(*blocks_and_states("gpt2", torch.float32), TOKENS)
    assert ((single - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max() < 1e-6
    torch.testing.assert_close(jacobians_to_last_layer(*blocks_and_states("gpt2", padding=2), TOKENS + 2), expected)


@pytest.mark.soak
def test_blocks_can_be_functions_and_can_attend_to_later_tokens():
    blocks, hidden = blocks_and_states("gpt2")
    between = torch.randn(hidden.shape[-1], hidden.shape[-1], generator=torch.Generator().manual_seed(1)).double()
    mixed = [blocks[0], lambda x: x + (x @ between).tanh().cumsum(1), blocks[1]]
    torch.testing.assert_close(
        jacobians_to_last_layer(mixed, hidden, TOKENS), jacobian_sums(mixed, hidden, TOKENS), rtol=1e-9, atol=1e-9
    )
    blocks, hidden = blocks_and_states("bert")
    found = jacobians_to_last_layer(blocks, hidden, TOKENS)
    torch.testing.assert_close(found, jacobian_sums(blocks, hidden, TOKENS, every=True), rtol=1e-9, atol=1e-9)
    forwards = jacobian_sums(blocks, hidden, TOKENS)  # only effects on later positions, which are not all
    assert (found - forwards).norm() > 0.01 * forwards.norm()


def test_linear_blocks_give_the_product_of_their_matrices_and_a_running_mean_its_share():
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    hidden = torch.randn(1, 5, 3, generator=generator, dtype=torch.float64)
    found = jacobians_to_last_layer([lambda x: x @ one.T, lambda x: x @ two.T], hidden, torch.arange(5))
    torch.testing.assert_close(found, torch.stack([two @ one, two]))

    def running_mean(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]

    # Token t contributes 1 / (t' + 1) to each t' >= t. Summed over t' and averaged over t, this is 1.
    torch.testing.assert_close(
        jacobians_to_last_layer([running_mean], hidden, torch.arange(5))[0], torch.eye(3, dtype=torch.float64)
    )
    # Only positions 1 and 3: (1/2 + 1/4 + 1/4) / 2.
    some = jacobians_to_last_layer([running_mean], hidden, torch.tensor([1, 3]))[0]
    torch.testing.assert_close(some, torch.eye(3, dtype=torch.float64) / 2)


def test_blocks_that_detach_their_input_have_zero_jacobians():
    hidden = torch.randn(1, 4, 3)
    assert not jacobians_to_last_layer([lambda x: x.detach()], hidden, torch.arange(4)).any()
