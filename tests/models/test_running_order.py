"""A model in another order compared with blocks composed by hand, and cached generation with recomputation."""

import dataclasses
import threading

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from lit_layers.errors import InputError
from lit_layers.functional import block_schedules as schedules
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny, tiny_batch

BLOCKS = 5
DEPTH = {"gpt2": "n_layer", "mpt": "n_layers", "vit": "depth"}
VARIANTS = {
    "baseline": schedules.baseline(BLOCKS),
    "skip": schedules.skip(BLOCKS, 1),
    "reverse": schedules.reverse(BLOCKS, 0),
    "looped_parallel": schedules.looped_parallel(BLOCKS, 1, loops=3),
    "custom": schedules.parse_schedule("2 (1,3,3) (4,5) 2 5", BLOCKS),
}
PROMPTS = 2, 7  # texts, tokens
NAMES = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
CACHE = "cache" if "cache" in NAMES else "past_key_values"  # before transformers 5.24


def deep(name: str, dtype: torch.dtype = torch.float64):
    if name == "gemma2":
        options = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
    else:
        options = {}
    return tiny(name, dtype, **{DEPTH.get(name, "num_hidden_layers"): BLOCKS}, **options)


def call(model, batch):
    if "pixel_values" in batch:
        return model(batch["pixel_values"].double())
    output = model(**batch)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.soak) for n in ("gemma2", "mistral", "falcon", "mpt"))]
)
def test_cached_generation_equals_recomputation_token_for_token(name):
    model = deep(name)
    ids = tiny_batch(name, *PROMPTS)["input_ids"]
    steps = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None  # generation never stops early
    for variant in ("baseline", "reverse", "looped_parallel", "custom"):
        with torch.no_grad(), running_order(model, VARIANTS[variant]):
            expected, logits = ids, []
            for _ in range(6):  # without a cache
                logits.append(model(input_ids=expected, use_cache=False).logits[:, -1])
                expected = torch.cat([expected, logits[-1].argmax(-1, keepdim=True)], 1)
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, **steps
            )
        assert found.sequences.tolist() == expected.tolist(), f"{variant} of {name}"
        torch.testing.assert_close(torch.stack(found.logits).double(), torch.stack(logits), rtol=1e-5, atol=1e-5)


def test_beams_reorder_the_slots_of_each_execution():
    model = deep("llama")
    ids = tiny_batch("llama", *PROMPTS)["input_ids"]
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), running_order(model, VARIANTS["custom"]):
        mask = torch.ones_like(ids)
        cached = model.generate(ids, attention_mask=mask, **options)
        recomputed = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert cached.tolist() == recomputed.tolist()


@pytest.mark.parametrize("name", ["gpt2", "falcon", "vit"])
def test_the_model_is_unchanged_after_the_context_even_after_an_error(name):
    model = deep(name)
    batch = tiny_batch(name, *PROMPTS)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    with torch.no_grad():
        expected = call(model, batch)
        state = torch.get_rng_state()
        changed = torch.empty(0)

        def broken_off() -> None:
            nonlocal changed
            with running_order(model, VARIANTS["custom"]):
                changed = call(model, batch)
                raise RuntimeError("broken off")

        with pytest.raises(RuntimeError, match="broken off"):
            broken_off()
        assert not torch.equal(changed, expected)
        assert torch.equal(call(model, batch), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.__dict__.keys() for module in model.modules()] == [each.keys() for each in attributes]


def test_the_next_pass_works_after_an_error_inside_a_block():
    model = deep("gpt2")
    batch = tiny_batch("gpt2", *PROMPTS)
    with torch.no_grad(), running_order(model, VARIANTS["reverse"]):
        expected = call(model, batch)
        fault = model.transformer.h[2].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            call(model, batch)
        fault.remove()
        assert torch.equal(call(model, batch), expected)


def test_gradients_flow_through_every_execution():
    model = deep("gpt2")
    batch = tiny_batch("gpt2", *PROMPTS)
    with running_order(model, (1, (2, 3), 3)):
        call(model, batch).sum().backward()
    used = {number: block.mlp.c_fc.weight.grad is not None for number, block in enumerate(model.transformer.h, 1)}
    assert used == {1: True, 2: True, 3: True, 4: False, 5: False}


def test_a_forward_of_another_tool_is_called_and_restored():
    model, calls = deep("gpt2"), []
    block = model.transformer.h[0]
    own = block.forward

    def moving(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    block.forward = moving
    with torch.no_grad(), running_order(model, (1, 1, 2)):
        call(model, tiny_batch("gpt2", *PROMPTS))
    assert block.forward is moving
    assert len(calls) == 2  # block 1 is in the schedule twice


def test_a_view_and_a_second_order_are_refused_inside_the_context_in_any_thread():
    model, sentences = deep("gpt2"), []
    batch = tiny_batch("gpt2", *PROMPTS)
    view = LayeredModel(model)
    trajectory = view.trajectory(batch)

    def another_order() -> None:
        with running_order(model, (1, 3)):
            pass

    def try_it(look) -> None:
        with pytest.raises(InputError) as refused:
            look()
        sentences.append(str(refused.value))

    with torch.no_grad(), running_order(model, (1, (2, 3))):
        expected = call(model, batch)
        for look in (lambda: view.trajectory(batch), lambda: view.pass_states(batch, lambda *_: None), another_order):
            try_it(look)
        thread = threading.Thread(target=try_it, args=[another_order])
        thread.start()
        thread.join()
        assert torch.equal(call(model, batch), expected)
    in_view = "this GPT2LMHeadModel runs its blocks in another order: leave that"
    nested = "this GPT2LMHeadModel runs the schedule 1 (2,3) already: leave that context"
    for sentence, start in zip(sentences, (in_view, in_view, nested, nested), strict=True):
        assert start in sentence
    another_order()
    assert torch.equal(view.trajectory(batch).hidden, trajectory.hidden)


def test_a_cache_that_cannot_have_a_slot_for_each_execution_is_refused():
    from transformers import StaticCache

    model = deep("llama")
    ids = tiny_batch("llama", *PROMPTS)["input_ids"]
    with torch.no_grad(), running_order(model, (1, 2)), pytest.raises(InputError) as refused:
        model(input_ids=ids, **{CACHE: StaticCache(model.config, max_cache_len=20)})
    assert "LlamaForCausalLM cannot use a StaticCache" in str(refused.value)


def test_an_invalid_schedule_is_refused_before_anything_changes():
    model = deep("gpt2")
    with pytest.raises(ValueError, match=r"block: expected 1\.\.5, got 9"), running_order(model, (1, 9)):
        pass
    assert all("forward" not in block.__dict__ for block in model.transformer.h)


def test_a_cache_of_another_order_is_refused():
    model = deep("gpt2")
    ids = tiny_batch("gpt2", *PROMPTS)["input_ids"]
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=True)[CACHE]
        with running_order(model, VARIANTS["reverse"]):
            filled = model(input_ids=ids, use_cache=True)[CACHE]
            model(input_ids=ids[:, :1], **{CACHE: filled})  # the order that filled the cache may continue
        with running_order(model, VARIANTS["skip"]):
            for cache in (plain, filled):
                with pytest.raises(InputError, match="a key-value cache that was filled in another order"):
                    model(input_ids=ids[:, :1], **{CACHE: cache})


def test_hidden_states_that_would_be_the_embedding_are_refused():
    model = deep("gpt2")
    batch = tiny_batch("gpt2", *PROMPTS)
    with torch.no_grad(), running_order(model, VARIANTS["reverse"]):
        with pytest.raises(InputError, match="^output_hidden_states: GPT2LMHeadModel runs its blocks in another order"):
            model(**batch, output_hidden_states=True)
        call(model, batch)
    with torch.no_grad():
        assert len(model(**batch, output_hidden_states=True).hidden_states) == BLOCKS + 1
