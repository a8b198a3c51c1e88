"""Parallel groups as one batched computation against the same groups block by block."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_layers.errors import InputError
from lit_layers.functional import block_schedules as schedules
from lit_layers.models.running_order import running_order
from lit_layers.models.stacked_blocks import StackedBlocks
from tests.support.tiny_models import tiny, tiny_batch

BLOCKS = 5
DEPTH = {"gpt2": "n_layer", "mpt": "n_layers", "vit": "depth", "distilbert": "n_layers"}
ALIKE = ("gpt2", "gpt_neox", "llama", "mistral", "qwen3", "gemma", "falcon", "falcon_alibi", "mpt", "bert_classifier")
WIDE = {"rtol": 1e-6, "atol": 1e-6}
SCHEDULES = {
    "parallel": schedules.parallel(BLOCKS, 0),
    "looped_parallel": schedules.looped_parallel(BLOCKS, 0, loops=3),
    "custom": schedules.parse_schedule("2 (1,3,3) (4,5) 2 5", BLOCKS),
}


def deep(name: str, dtype: torch.dtype = torch.float64, **options):
    return tiny(name, dtype, **{DEPTH.get(name, "num_hidden_layers"): BLOCKS}, **options)


def call(model, batch, **options):
    if "pixel_values" in batch:
        return model(batch["pixel_values"].to(next(model.parameters()).dtype))
    output = model(**batch, **options)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


UNPADDED = ("vit", "mamba_lm")
CASES = [
    pytest.param(name, side, marks=[] if side == ("left" if name in ALIKE else None) else pytest.mark.soak)
    for name in (*ALIKE, "roberta", "distilbert", *UNPADDED)
    for side in ((None,) if name in UNPADDED else (None, "right") if name == "roberta" else (None, "right", "left"))
]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_stacked_blocks_give_what_the_loop_gives(name, padding):
    dtype = torch.float32 if name == "mpt" else torch.float64  # its masked softmax is in float32
    model, batch = deep(name, dtype), tiny_batch(name, 2, 7, padding=padding)
    real = batch["attention_mask"].bool() if padding and "classifier" not in name else ...
    options = {"use_cache": False} if name == "mamba_lm" else {}  # its cache is no slots of keys and values
    for variant, schedule in SCHEDULES.items():
        with torch.no_grad(), running_order(model, schedule):
            expected = call(model, batch, **options)[real]
        with torch.no_grad(), running_order(model, schedule, parallel="stacked"):
            for _ in range(2):  # the stack of the first pass serves the second
                found = call(model, batch, **options)[real]
                tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else WIDE
                torch.testing.assert_close(found, expected, **tolerance, msg=f"{variant} of {name}")


@pytest.mark.parametrize(("parallel", "calls"), [("loop", 6), ("stacked", 2)])
def test_a_group_attends_in_one_call(parallel, calls):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "attention" in str(func):
                seen.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    model, batch = deep("gpt2"), tiny_batch("gpt2", 2, 7)
    with torch.no_grad(), running_order(model, (1, (2, 3, 4), 5), parallel=parallel), Watch():
        call(model, batch)
    # One call more for block 1, whose outcome is dropped: it shows what blocks return.
    assert len(seen) == (calls if parallel == "loop" else calls + 2)
    assert max(seen) == (2 if parallel == "loop" else 6)  # texts, members x texts


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_classifier"])
def test_single_precision_agrees_under_either_attention(name, attention):
    model, batch = deep(name, torch.float32, attention=attention), tiny_batch(name, 2, 7, padding="right")
    real = batch["attention_mask"].bool() if "classifier" not in name else ...
    outputs = []
    for parallel in ("loop", "stacked"):
        with torch.no_grad(), running_order(model, SCHEDULES["custom"], parallel=parallel):
            outputs.append(call(model, batch)[real])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5 * outputs[0].abs().max().item())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "mistral", "falcon", "mpt"])
def test_cached_generation_is_recomputation_token_for_token(name):
    model = deep(name)
    ids = tiny_batch(name, 2, 7)["input_ids"]
    model.generation_config.eos_token_id = None
    for schedule in SCHEDULES.values():
        with torch.no_grad(), running_order(model, schedule):
            expected, logits = ids, []
            for _ in range(5):
                logits.append(model(input_ids=expected, use_cache=False).logits[:, -1])
                expected = torch.cat([expected, logits[-1].argmax(-1, keepdim=True)], 1)
        with torch.no_grad(), running_order(model, schedule, parallel="stacked"):
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=5,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        assert found.sequences.tolist() == expected.tolist()
        torch.testing.assert_close(torch.stack(found.logits).double(), torch.stack(logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert_classifier", "vit"])
def test_gradients_reach_the_weights_as_in_the_loop(name):
    batch, gradients = tiny_batch(name, 2, 7), []
    for parallel in ("loop", "stacked"):
        model = deep(name)
        with running_order(model, SCHEDULES["custom"], parallel=parallel):
            call(model, batch).square().sum().backward()
        gradients.append({key: value.grad for key, value in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, rtol=1e-6, atol=1e-8, msg=key)


def test_a_weight_written_to_inside_is_seen_by_the_next_pass():
    model, batch = deep("gpt2"), tiny_batch("gpt2", 2, 7)
    with torch.no_grad(), running_order(model, SCHEDULES["parallel"], parallel="stacked"):
        before = call(model, batch)
        model.transformer.h[2].mlp.c_fc.weight.mul_(0.5)
        found = call(model, batch)
    with torch.no_grad(), running_order(model, SCHEDULES["parallel"]):
        torch.testing.assert_close(found, call(model, batch), **WIDE)
    assert not torch.allclose(before, found)


def test_dropout_draws_for_each_block():
    block = deep("gpt2", resid_pdrop=0.5, attn_pdrop=0.5).transformer.h[1].train()
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    with torch.no_grad():
        one, two = StackedBlocks([block, block], [2, 2], "GPT2LMHeadModel")(hidden, [((), {})] * 2)
        block.eval()
        same, again = StackedBlocks([block, block], [2, 2], "GPT2LMHeadModel")(hidden, [((), {})] * 2)
    assert not torch.equal(one, two)
    torch.testing.assert_close(same, again)
    assert not torch.allclose(one, same)


def test_the_copy_of_the_weights_ends_with_the_context():
    model, batch = deep("gpt2"), tiny_batch("gpt2", 2, 7)
    mine = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}

    def stacks():
        gc.collect()
        shape = (4, *model.transformer.h[0].mlp.c_fc.weight.shape)
        return [each for each in gc.get_objects() if type(each) is torch.Tensor and tuple(each.shape) == shape]

    with torch.no_grad(), running_order(model, SCHEDULES["parallel"], parallel="stacked"):
        call(model, batch)
        held = [weakref.ref(each) for each in stacks() if id(each) not in mine]
        assert len(held) == 1
    gc.collect()
    assert held[0]() is None
    assert all("forward" not in block.__dict__ for block in model.transformer.h)


def hooked(model):
    model.transformer.h[2].mlp.register_forward_hook(lambda *_: None)


def moved(model):
    own = model.transformer.h[1].forward
    model.transformer.h[1].forward = lambda *args, **kwargs: own(*args, **kwargs)


def halved(model):
    model.transformer.h[3].float()


def refused(model, schedule=SCHEDULES["parallel"]):
    with pytest.raises(InputError) as error, running_order(model, schedule, parallel="stacked"):
        pass
    assert "_running_order" not in model.__dict__
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (hooked, "block 3 has a hook on mlp"),
        (moved, "block 2 has a forward of another tool"),
        (halved, "blocks 2 and 4 differ in the shapes, precisions or devices of their weights"),
    ],
)
def test_blocks_that_are_watched_or_unlike_are_refused(change, why):
    model = deep("gpt2")
    change(model)
    assert refused(model) == f'parallel: (2,3,4,5) of GPT2LMHeadModel cannot be stacked: {why}; use parallel="loop"'


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}, "self_attn."),
        ("modernbert", {}, "att"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "attn."),
    ],
)
def test_blocks_of_several_kinds_of_attention_are_refused(name, options, what):
    sentence = refused(deep(name, torch.float32, **options))
    assert "cannot be stacked: blocks 2 and " in sentence
    assert what in sentence.partition("differ in ")[2]


def test_other_masks_than_the_first_blocks_are_refused():
    block = deep("bert_classifier").bert.encoder.layer[0]
    hidden, mask = torch.randn(2, 3, 32, dtype=torch.float64), torch.zeros(2, 1, 3, 3, dtype=torch.float64)
    group = StackedBlocks([block, block], [1, 1], "Bert")
    equal = group(hidden, [((mask,), {}), ((mask.clone(),), {})])
    torch.testing.assert_close(equal[1], block(hidden, mask))
    with pytest.raises(InputError, match="are called with other masks or positions"):
        group(hidden, [((mask,), {}), ((mask - 1,), {})])


def test_another_word_than_loop_and_stacked_is_refused():
    with (
        pytest.raises(ValueError, match="parallel: expected loop or stacked, got 'streams'"),
        running_order(deep("gpt2"), (1, 2), parallel="streams"),
    ):
        pass


def test_nested_use_is_refused_as_it_is_in_a_loop():
    model = deep("gpt2")
    with (
        running_order(model, (1, (2, 3)), parallel="stacked"),
        pytest.raises(InputError, match=r"runs the schedule 1 \(2,3\) already: leave that context"),
        running_order(model, (1, (2, 3)), parallel="stacked"),
    ):
        pass
