import pytest
import torch

from lit_layers.models import causal_lm
from lit_layers.models.families import causal_by_flag

SMALL = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 12},
    "gpt_neox": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
    "llama": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
}


def _masks(model, ids) -> list:
    """Returns the mask that each block hands to the attention kernel in a compiled forward pass."""
    found = []

    def look(graph, _):
        found.extend(n.kwargs.get("attn_mask") for n in graph.graph.nodes if "scaled_dot" in str(n.target))
        return graph

    torch.compiler.reset()
    torch.compile(model, backend=look)(input_ids=ids, use_cache=False)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_full_batches_give_the_same_logits_without_a_mask(name):
    model = causal_lm(name, vocab_size=61, **SMALL[name]).eval()
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids, use_cache=False).logits
    with causal_by_flag(model):
        found = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, expected)


@pytest.mark.soak
def test_a_compiled_model_builds_a_mask_only_outside():
    model = causal_lm("gpt2", vocab_size=61, **SMALL["gpt2"]).eval()
    ids = torch.zeros(2, 12, dtype=torch.long)
    with causal_by_flag(model):
        assert _masks(model, ids) == [None, None]
    assert None not in _masks(model, ids)


def test_the_model_heeds_padding_again_afterwards_even_if_a_step_failed():
    model = causal_lm("gpt2", vocab_size=61, **SMALL["gpt2"]).eval()
    with pytest.raises(KeyError), causal_by_flag(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_other_attention_is_left_as_it_is():
    model = causal_lm("gpt2", vocab_size=61, **SMALL["gpt2"])
    model.set_attn_implementation("eager")
    with causal_by_flag(model):
        assert model.config._attn_implementation == "eager"
