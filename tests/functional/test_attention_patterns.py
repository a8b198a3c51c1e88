"""Attention scores against plain Python loops, and weights read from blocks against those of transformers."""

import math

import pytest
import torch
from torch import Tensor

from lit_layers.functional import (
    attention_entropy,
    prefix_matching_score,
    previous_token_score,
    sink_mass,
    uniform_attention,
)
from lit_layers.functional.jacobian.block_call import Unsupported, read_attention
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import LAYERS, tiny, tiny_batch

IDS = torch.tensor([[4, 7, 9, 4, 7, 2, 4], [1, 2, 3, 3, 5, 1, 6]])


def weights(batch: int = 2, heads: int = 3, tokens: int = 7) -> Tensor:
    drawn = torch.rand(batch, heads, tokens, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = drawn.tril()
    return drawn / drawn.sum(-1, keepdim=True)


def test_scores_are_means_over_all_queries_after_the_first():
    w = weights()
    for prompt in range(2):
        for head in range(3):
            rows = w[prompt, head].tolist()
            entropy = [-sum(p * math.log(p) for p in row if p) for row in rows[1:]]
            assert attention_entropy(w)[prompt, head].item() == pytest.approx(sum(entropy) / 6)
            assert sink_mass(w)[prompt, head].item() == pytest.approx(sum(row[0] for row in rows[1:]) / 6)
            before = [rows[q][q - 1] for q in range(1, 7)]
            assert previous_token_score(w)[prompt, head].item() == pytest.approx(sum(before) / 6)
            tokens, found = IDS[prompt].tolist(), []
            for q in range(7):
                after = [k for k in range(1, q + 1) if tokens[k - 1] == tokens[q] and k - 1 < q]
                if after:
                    found.append(sum(rows[q][k] for k in after))
            assert prefix_matching_score(w, IDS)[prompt, head].item() == pytest.approx(sum(found) / len(found))


def test_non_finite_weights_single_tokens_and_unrepeated_tokens_have_no_score():
    broken = weights()
    broken[1, 0, 5] = torch.nan
    for score in (attention_entropy, sink_mass, previous_token_score):
        assert score(broken, undefined="nan").isnan().tolist() == [[False] * 3, [True, False, False]]
        with pytest.raises(ValueError, match="a weight is not finite"):
            score(broken)
        with pytest.raises(ValueError, match="it takes 2 tokens"):
            score(weights()[..., :1, :1])
    with pytest.raises(ValueError, match="no token occurs twice"):
        prefix_matching_score(weights(1), torch.arange(7)[None])
    assert prefix_matching_score(weights(1), torch.arange(7)[None], undefined="nan").isnan().all()


def test_uniform_attention_scores_at_chance():
    chance = uniform_attention(12, causal=True)[None]
    mean_reciprocal = sum(1 / n for n in range(2, 13)) / 11
    assert sink_mass(chance).item() == pytest.approx(mean_reciprocal)
    assert previous_token_score(chance).item() == pytest.approx(mean_reciprocal)
    assert attention_entropy(chance).item() == pytest.approx(sum(math.log(n) for n in range(2, 13)) / 11)
    both = uniform_attention(12, causal=False)
    assert previous_token_score(both).item() == pytest.approx(1 / 12)
    assert attention_entropy(both).item() == pytest.approx(math.log(12))
    ids = torch.arange(6).repeat(1, 2)
    assert prefix_matching_score(chance, ids).item() == pytest.approx(sum(1 / n for n in range(7, 13)) / 6)


def attention_of(name: str, attention: str | None, layer: int):
    model = tiny(name, torch.float64, attention=attention)
    batch = tiny_batch(name)
    trajectory = LayeredModel(model).trajectory(batch)
    return model, batch, trajectory, read_attention(trajectory.block(layer), trajectory.hidden[layer - 1])


@pytest.mark.parametrize("name", ["gpt2", "falcon", "gemma2", "mpt"])
def test_weights_read_from_a_block_equal_those_of_transformers(name):
    """Compare blocks with eager and with fused attention with the eager weights of transformers."""
    for layer in range(1, LAYERS + 1):
        model, batch, _, eager = attention_of(name, "eager", layer)
        with torch.no_grad():
            expected = model(**batch, output_attentions=True).attentions[layer - 1]
        fused = attention_of(name, None, layer)[-1]
        for attention in (eager, fused):
            found = torch.stack([attention.pattern(prompt) for prompt in range(len(expected))])
            torch.testing.assert_close(found, expected.to(found), rtol=1e-5, atol=1e-6)


def test_a_block_without_attention_is_refused():
    with pytest.raises(Unsupported, match="no attention of a known kind"):
        attention_of("mamba_lm", None, 1)
