import functools
import math

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import AutoConfig

from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm
from lit_layers.training import LitCausalLM, modules
from tests.support.tiny_training import CONFIG, CONTEXT, RandomBlocks, fit, module

NO_DROPOUT = {"dropout": 0.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    _, lit = fit(tmp_path_factory.mktemp("run"), [], steps=1)
    return lit.eval()


def test_the_loss_is_the_mean_negative_log_probability_of_the_next_token(trained):
    tokens = RandomBlocks(3).tokens
    with torch.no_grad():
        ours = trained.loss({"input_ids": tokens})
        logits = trained.model(input_ids=tokens[:, :-1]).logits.double()[..., :61]
    total = 0.0
    for row in range(3):
        for place in range(CONTEXT):
            chosen = logits[row, place, tokens[row, place + 1]]
            total -= chosen.item() - math.log(logits[row, place].exp().sum().item())
    assert ours.item() == pytest.approx(total / (3 * CONTEXT), abs=1e-5)


def test_padding_the_vocabulary_changes_nothing_but_the_shape(tmp_path):
    """Dropout depends on shapes inside the blocks, not on the vocabulary: both runs have the same noise."""
    _, padded = fit(tmp_path, [], module=module(pad_vocab_to=64), steps=3)
    _, plain = fit(tmp_path, [], module=module(pad_vocab_to=None), steps=3)
    assert padded.model.get_input_embeddings().weight.shape[0] == 64
    assert plain.model.get_input_embeddings().weight.shape[0] == 61
    for (name, first), second in zip(padded.state_dict().items(), plain.state_dict().values(), strict=True):
        if name.endswith("c_attn.bias"):
            # A shift of all keys does not change the softmax. So the gradient of their biases is only rounding, which
            # Adam turns into full steps.
            first, second = (torch.cat([each.chunk(3)[0], each.chunk(3)[2]]) for each in (first, second))
        torch.testing.assert_close(
            first[: second.shape[0]], second, atol=1e-6, rtol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.soak
def test_compiled_training_trains_the_eager_model(tmp_path, monkeypatch):
    # Only Dynamo's part: generating and compiling C++ code takes minutes and is not tested here.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    _, compiled = fit(tmp_path, [], module=module(compile=True, **NO_DROPOUT), steps=3)
    _, eager = fit(tmp_path, [], module=module(**NO_DROPOUT), steps=3)
    assert set(compiled.state_dict()) == set(eager.state_dict())
    for (name, first), second in zip(compiled.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.soak
def test_on_other_devices_the_loss_is_part_of_the_compiled_graph(tmp_path, monkeypatch):
    graphs = []

    def counting(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return aot_eager(graph, inputs)

    monkeypatch.setattr(modules, "_EAGER_LOSS", ())  # as on a GPU
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    torch._dynamo.reset()
    counters.clear()
    fit(tmp_path, [], module=module(compile=True, **NO_DROPOUT), steps=2, accumulate_grad_batches=2)
    assert [F.cross_entropy in graph for graph in graphs] == [True]
    assert not counters["graph_break"]


def test_activation_checkpointing_gives_equal_bits_with_fewer_bytes(tmp_path):
    results = []
    for again in (False, True):
        lit, kept = module(activation_checkpointing=again), []

        def keep(tensor, kept=kept):
            kept.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            fit(tmp_path, [], module=lit, steps=2)
        results.append((lit.state_dict(), sum(kept)))
    (state, bytes_kept), (state_again, bytes_again) = results
    for name, tensor in state.items():
        assert torch.equal(tensor, state_again[name]), name
    assert bytes_again < 0.5 * bytes_kept


def test_validation_loss_and_perplexity_are_means_over_all_tokens(tmp_path):
    trainer, lit = fit(
        tmp_path, [], steps=5, limit_val_batches=None, val_check_interval=5, check_val_every_n_epoch=None
    )
    tokens = RandomBlocks().tokens
    with torch.no_grad():
        logits = lit.eval()(tokens[:, :-1])
    expected = F.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert trainer.callback_metrics["validation/loss"].item() == pytest.approx(expected, abs=1e-5)
    assert trainer.callback_metrics["validation/perplexity"].item() == pytest.approx(math.exp(expected), rel=1e-5)


def test_the_validation_loss_is_weighted_and_nan_if_a_batch_is_nan():
    lit = module()
    for loss, weight, mean in ((1.0, 8, 1.0), (4.0, 4, 2.0), (math.nan, 8, math.nan)):
        lit.validation_loss.update(torch.tensor(loss), weight=weight)
        assert lit.validation_loss.compute().item() == pytest.approx(mean, nan_ok=True, rel=0, abs=0)


def test_wrong_hyper_parameters_are_refused():
    for option, value, message in (
        ("warmup_steps", -3, "model.warmup_steps: .* got -3"),
        ("pad_vocab_to", 0, "model.pad_vocab_to: expected at least 1, got 0"),
        ("weight_decay", -0.1, "model.weight_decay: expected at least 0"),
        ("betas", (2.0, 0.9), "model.betas: expected less than 1"),
        ("decay_steps", 0, "model.decay_steps: expected at least 1, got 0"),
        ("min_lr_ratio", -3.0, "model.min_lr_ratio: expected at least 0"),
    ):
        with pytest.raises(InputError, match=message):
            LitCausalLM(**{option: value})


IDS = torch.arange(12).reshape(2, 6)
PROMPTED = torch.where(torch.arange(6) < 4, -100, IDS)  # collators mark a prompt in this way


def test_batch_tensors_that_the_loss_would_ignore_are_refused_by_name():
    for batch, left_out in (
        ({"input_ids": IDS, "labels": PROMPTED}, "labels"),
        ((IDS, PROMPTED), "labels"),
        (({"input_ids": IDS}, PROMPTED), "labels"),
        ((IDS[:, :-1], IDS[:, 1:]), "labels"),
        ({"input_ids": IDS, "position_ids": IDS % 3}, "position_ids"),
        ({"input_ids": IDS, "loss_mask": torch.ones(2, 6)}, "loss_mask"),
        ({"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}, "token_type_ids"),
    ):
        with pytest.raises(InputError, match=f"expected batches of input_ids, .* got other {left_out}"):
            LitCausalLM().loss(batch)


def test_labels_equal_to_the_token_ids_do_not_change_the_loss():
    lit = LitCausalLM("gpt2", {**CONFIG, "vocab_size": 61})
    lit.set_model(causal_lm("gpt2", vocab_size=61, **CONFIG).eval())
    batches = [IDS, [IDS], (IDS, IDS.clone()), {"input_ids": IDS, "labels": IDS.clone(), "text": ["a", "b"]}]
    batches.append({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    logits = lit.model(input_ids=IDS[:, :-1]).logits[..., :61]
    expected = F.cross_entropy(logits.double().flatten(0, 1), IDS[:, 1:].flatten()).item()
    assert [lit.loss(batch).item() for batch in batches] == [pytest.approx(expected, abs=1e-5)] * len(batches)


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_a_decoder_that_sees_later_tokens_is_refused(family, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8} if family == "gemma" else {}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "is_causal": False}
    AutoConfig.for_model(family, **sizes, **more, **ends).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="that sees later ones"):
        fit(tmp_path, [], module=LitCausalLM(str(tmp_path)))
