import pytest
import torch

from lit_layers.models.families import causal_by_flag
from tests.support.tiny_models import tiny, tiny_batch


def _masks(model, ids) -> list:
    """Return the mask that each block passes to the attention kernel in a compiled forward pass."""
    found = []

    def look(graph, _):
        found.extend(n.kwargs.get("attn_mask") for n in graph.graph.nodes if "scaled_dot" in str(n.target))
        return graph

    torch.compiler.reset()
    torch.compile(model, backend=look)(input_ids=ids, use_cache=False)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_full_batches_give_the_same_logits_without_a_mask(name):
    model = tiny(name)
    ids = tiny_batch(name)["input_ids"]
    expected = model(input_ids=ids, use_cache=False).logits
    with causal_by_flag(model):
        found = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, expected)


@pytest.mark.soak
def test_a_compiled_model_builds_a_mask_only_outside():
    model = tiny("gpt2")
    ids = torch.zeros(2, 12, dtype=torch.long)
    with causal_by_flag(model):
        assert _masks(model, ids) == [None] * 3
    assert None not in _masks(model, ids)


def test_attention_is_restored_even_after_an_error():
    model = tiny("gpt2")
    with pytest.raises(KeyError), causal_by_flag(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_other_attention_implementations_do_not_change():
    model = tiny("gpt2", attention="eager")
    with causal_by_flag(model):
        assert model.config._attn_implementation == "eager"
