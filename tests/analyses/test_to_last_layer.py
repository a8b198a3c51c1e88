"""Jacobians through several blocks, against brute force in float64 and closed forms."""

from typing import Any

import pytest
import torch

from lit_layers.analyses.jacobian_lens import jacobians_to_last_layer
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny


def by_definition(blocks, hidden, places, every=False) -> torch.Tensor:
    """Whole Jacobians by autograd, then the sums of the definition, averaged over t: t' >= t, or `every`."""
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
        for t in places:
            for later in places:
                if later >= t or every:
                    mean += whole[0, later, :, 0, t] / len(places)
        results.append(mean)
    return torch.stack(results)


def of_a_prompt(family, dtype=torch.float64, padding=0):
    """The blocks of a model as they are called on nine tokens, and these tokens' states."""
    view = LayeredModel(tiny(family, dtype))
    ids = torch.nn.functional.pad(torch.arange(9)[None] + 3, (padding, 0))
    mask = torch.nn.functional.pad(torch.ones(1, 9, dtype=torch.long), (padding, 0))
    trajectory = view.trajectory({"input_ids": ids, "attention_mask": mask})
    return [trajectory.block(layer) for layer in range(1, view.num_layers + 1)], trajectory.hidden[0]


PLACES = torch.tensor([2, 3, 5, 7])


# transformers computes the norms of Llama in float32 whatever comes in: their derivatives by another order of sums.
@pytest.mark.parametrize(
    ("family", "tolerance"),
    # one map after the other, in parallel with the attention, gated, grouped heads, capped scores and eager attention
    [
        ("gpt2", 1e-9),
        ("falcon_alibi", 1e-9),
        *(
            pytest.param(*of, marks=pytest.mark.soak)
            for of in (("gpt_neox", 1e-9), ("llama", 1e-5), ("qwen2", 1e-5), ("gemma2", 1e-5))
        ),
    ],
)
def test_a_causal_model_gives_what_the_definition_does_in_float64(family, tolerance):
    blocks, hidden = of_a_prompt(family)
    found = jacobians_to_last_layer(blocks, hidden, PLACES)
    expected = by_definition(blocks, hidden, PLACES)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_float32_is_that_of_float64_to_its_rounding_and_padding_in_front_changes_nothing():
    expected = jacobians_to_last_layer(*of_a_prompt("gpt2"), PLACES)
    single = jacobians_to_last_layer(*of_a_prompt("gpt2", torch.float32), PLACES)
    assert ((single - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max() < 1e-6
    torch.testing.assert_close(jacobians_to_last_layer(*of_a_prompt("gpt2", padding=2), PLACES + 2), expected)


@pytest.mark.soak
def test_blocks_may_be_functions_and_may_look_ahead():
    blocks, hidden = of_a_prompt("gpt2")
    between = torch.randn(hidden.shape[-1], hidden.shape[-1], generator=torch.Generator().manual_seed(1)).double()
    mixed = [blocks[0], lambda x: x + (x @ between).tanh().cumsum(1), blocks[1]]
    torch.testing.assert_close(
        jacobians_to_last_layer(mixed, hidden, PLACES), by_definition(mixed, hidden, PLACES), rtol=1e-9, atol=1e-9
    )
    blocks, hidden = of_a_prompt("bert")
    found = jacobians_to_last_layer(blocks, hidden, PLACES)
    torch.testing.assert_close(found, by_definition(blocks, hidden, PLACES, every=True), rtol=1e-9, atol=1e-9)
    forwards = by_definition(blocks, hidden, PLACES)  # effects on later places alone, which here are not all
    assert (found - forwards).norm() > 0.01 * forwards.norm()


def test_linear_blocks_give_the_product_of_their_matrices_and_a_mean_over_earlier_tokens_its_share():
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    hidden = torch.randn(1, 5, 3, generator=generator, dtype=torch.float64)
    found = jacobians_to_last_layer([lambda x: x @ one.T, lambda x: x @ two.T], hidden, torch.arange(5))
    torch.testing.assert_close(found, torch.stack([two @ one, two]))

    def over_earlier(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]

    # Token t has 1 / (t' + 1) of each t' >= t: summed over t' and averaged over t that is 1.
    torch.testing.assert_close(
        jacobians_to_last_layer([over_earlier], hidden, torch.arange(5))[0], torch.eye(3, dtype=torch.float64)
    )
    # Of places 1 and 3 alone: (1/2 + 1/4 + 1/4) / 2.
    some = jacobians_to_last_layer([over_earlier], hidden, torch.tensor([1, 3]))[0]
    torch.testing.assert_close(some, torch.eye(3, dtype=torch.float64) / 2)


def test_blocks_that_detach_their_input_carry_nothing():
    hidden = torch.randn(1, 4, 3)
    assert not jacobians_to_last_layer([lambda x: x.detach()], hidden, torch.arange(4)).any()
