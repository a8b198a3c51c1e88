"""Scores of attention weights against loops in plain Python, and weights read off blocks against transformers' own."""

import math

import pytest
import torch
from torch import Tensor

from lit_layers.functional import (
    attention_entropy,
    copying_score,
    in_context_score,
    prefix_matching_score,
    previous_token_score,
    sink_mass,
    uniform_attention,
)
from lit_layers.functional.jacobian.block_attention import read_heads
from lit_layers.functional.jacobian.block_call import Unsupported
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import LAYERS, tiny, tiny_batch

IDS = torch.tensor([[4, 7, 9, 4, 7, 2, 4], [1, 2, 3, 3, 5, 1, 6]])


def weights(batch: int = 2, heads: int = 3, tokens: int = 7) -> Tensor:
    drawn = torch.rand(batch, heads, tokens, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = drawn.tril()
    return drawn / drawn.sum(-1, keepdim=True)


def test_scores_are_means_over_the_queries_behind_the_first():
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


def test_padding_behind_never_enters_and_elsewhere_is_refused():
    w, mask = weights(), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    spoilt = w.clone()
    spoilt[1, :, 5:] = torch.nan
    for score in (attention_entropy, sink_mass, previous_token_score):
        found = score(spoilt, mask)
        torch.testing.assert_close(found[0], score(w)[0])
        torch.testing.assert_close(found[1], score(w[1, :, :5, :5]))
        with pytest.raises(ValueError, match="expected real tokens in front of the padding"):
            score(w, mask.flip(-1))
        with pytest.raises(ValueError, match="it takes 2 real tokens"):
            score(w[..., :1, :1])


def test_uniform_attention_is_what_chance_gives():
    mask = torch.ones(1, 12, dtype=torch.bool)
    chance = uniform_attention(mask, causal=True)
    one_over = sum(1 / n for n in range(2, 13)) / 11
    assert sink_mass(chance).item() == pytest.approx(one_over)
    assert previous_token_score(chance).item() == pytest.approx(one_over)
    assert attention_entropy(chance).item() == pytest.approx(sum(math.log(n) for n in range(2, 13)) / 11)
    both = uniform_attention(mask, causal=False)
    assert previous_token_score(both).item() == pytest.approx(1 / 12)
    assert attention_entropy(both).item() == pytest.approx(math.log(12))
    ids = torch.arange(6).repeat(1, 2)
    assert prefix_matching_score(chance, ids).item() == pytest.approx(sum(1 / n for n in range(7, 13)) / 6)


def test_a_token_that_never_comes_back_has_no_prefix():
    with pytest.raises(ValueError, match="no token occurs twice"):
        prefix_matching_score(weights(1), torch.arange(7)[None])
    assert prefix_matching_score(weights(1), torch.arange(7)[None], undefined="nan").isnan().all()


def test_copying_is_the_share_of_what_is_raised_that_goes_to_the_token_itself():
    ids = torch.tensor([2, 0, 2])
    logits = torch.tensor([[1.0, -9.0, 3.0, -9.0], [2.0, 5.0, 2.0, -9.0], [-1.0, 0.0, -1.0, 0.0]])
    # less their means -3.5, 0 and -0.5: of 4.5 + 6.5 the second, of 2 + 2 the first, and nothing
    assert copying_score(logits, ids).item() == pytest.approx((6.5 / 11 + 2 / 4 + 0) / 3)
    scaled = logits * torch.tensor([[3.0], [0.1], [7.0]])
    assert copying_score(scaled, ids).item() == pytest.approx(copying_score(logits, ids).item())
    assert copying_score(torch.eye(5), torch.arange(5)).item() == 1
    assert copying_score(-torch.eye(5), torch.arange(5)).item() == 0
    some = copying_score(logits[:, [2, 0, 2]], torch.arange(3)[[0, 1, 0]], mean=logits.mean(-1))
    assert some.item() == pytest.approx(copying_score(logits, ids).item())
    with pytest.raises(ValueError, match="a logit is not finite"):
        copying_score(torch.eye(2), torch.arange(2), mean=torch.tensor([0.0, math.nan]))
    noise = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0))
    chance = copying_score(noise.unflatten(0, (200, 20)), torch.arange(20).expand(200, 20)).mean()
    assert chance.item() == pytest.approx(1 / 20, rel=0.05)
    with pytest.raises(ValueError, match="a logit is not finite"):
        copying_score(torch.full((2, 3), math.nan), torch.arange(2))


def test_the_in_context_score_compares_two_places():
    losses = torch.arange(10.0).square()[None]  # of tokens 2 to 11
    assert in_context_score(losses, early=3, late=11).item() == 81 - 1
    with pytest.raises(ValueError, match="there is no loss at token 12"):
        in_context_score(losses, early=3, late=12)
    with pytest.raises(ValueError, match="expected early to be at least 2"):
        in_context_score(losses, early=1, late=5)


def heads_of(name: str, attention: str | None, layer: int):
    model = tiny(name, torch.float64, attention=attention)
    batch = tiny_batch(name)
    trajectory = LayeredModel(model).trajectory(batch)
    return model, batch, trajectory, read_heads(trajectory.block(layer), trajectory.hidden[layer - 1])


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gpt_neox", "falcon", "gemma2", "mpt", "bert"])
def test_weights_read_off_a_block_are_those_that_transformers_gives(name):
    """Eager attention says its own weights; ours are the same under eager and fused attention."""
    for layer in range(1, LAYERS + 1):
        model, batch, _, eager = heads_of(name, "eager", layer)
        with torch.no_grad():
            expected = model(**batch, output_attentions=True).attentions[layer - 1]
        fused = heads_of(name, None, layer)[-1]
        for found in (eager.maps(), fused.maps()):
            torch.testing.assert_close(found, expected.to(found), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "falcon", "gemma2", "mpt", "bert", "vit"])
def test_what_heads_write_adds_up_to_what_attention_adds(name):
    """A block whose output projection is watched: its output less its bias is the weighted sum of what heads write."""
    _, _, trajectory, heads = heads_of(name, None, 2)
    written = torch.einsum("bhqk,bhkd->bqd", heads.maps(), heads.written())
    given: list[Tensor] = []
    block = trajectory.calls[1].module
    names = ("attn.c_proj", "self_attn.o_proj", "attention.dense", "self_attention.dense", "attn.out_proj")
    names += ("attention.output.dense", "attn.proj")
    (projection,) = [part for path, part in block.named_modules() if path in names]
    handle = projection.register_forward_hook(lambda module, args, output: given.append(output))
    heads.call(heads.hidden)
    handle.remove()
    bias = getattr(projection, "bias", None)
    expected = given[0] - (0 if bias is None else bias)
    torch.testing.assert_close(written, expected, rtol=1e-6, atol=1e-8)


def test_a_block_without_attention_says_so():
    with pytest.raises(Unsupported, match="no attention of a known kind"):
        heads_of("mamba_lm", None, 1)
