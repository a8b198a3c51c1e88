"""What models cost is measured side by side, in turns."""

import statistics

import pytest
import torch
from safetensors.torch import save_file

from lit_layers.errors import InputError
from lit_layers.models import costs as costs_module
from lit_layers.models.build import causal_lm, save, vit
from lit_layers.models.copies import truncate
from lit_layers.models.costs import call_of, interleaved, measure_costs, this_machine
from lit_layers.models.saved import bytes_of_weights, open_plainly
from tests.support.rounding import assert_rounded
from tests.support.saved_models import saved
from tests.support.tiny_models import tiny, tiny_batch

WORDS, WIDTH, BLOCKS = 50_000, 256, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A narrow, deep model with a large vocabulary, whole and cut."""
    root = tmp_path_factory.mktemp("models")
    model = causal_lm("gpt2", vocab_size=WORDS, n_embd=WIDTH, n_layer=BLOCKS, n_head=4, n_positions=64).eval()
    save(model, root / "full")
    save(truncate(model, 3, head=False), root / "cut")
    return root


def parameters(num_blocks: int) -> int:
    """Of a GPT-2 with tied head: embeddings, blocks (4 matrices of 12 d^2 in all, 9 d biases, 4 d of norms), a norm."""
    return WORDS * WIDTH + 64 * WIDTH + num_blocks * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH


@pytest.mark.soak
@pytest.mark.slow
def test_a_whole_model_and_its_cut_are_measured_with_what_each_is(folders):
    variants = {"full": folders / "full", "cut": str(folders / "cut")}
    found = measure_costs(variants, num_tokens=16, batch_size=4, num_rounds=3, num_warm_up=1)
    assert [cost.name for cost in found] == ["full", "cut"]
    assert [cost.parameters for cost in found] == [parameters(12), parameters(3)]
    files = [(folders / name / "model.safetensors").stat().st_size for name in ("full", "cut")]
    assert [cost.bytes_on_disk for cost in found] == files
    for cost in found:
        assert (cost.batch_size, cost.num_tokens, cost.num_rounds) == (4, 16, 3)
        assert 0 < cost.latency_quartiles[0] <= cost.latency <= cost.latency_quartiles[1]
        assert cost.throughput > 0
        assert cost.machine == this_machine()
    full, cut = (cost.peak_memory for cost in found)
    scores = 4 * 16 * WORDS * 4  # 13 MB: logits of the batch
    assert full >= 4 * parameters(12) + scores
    assert 4 * parameters(3) < cut < 4 * parameters(3) + scores


def test_a_trunk_is_opened_and_its_memory_measured_without_the_head(folders, monkeypatch):
    asked = []
    monkeypatch.setattr(costs_module, "peak_of_call", lambda call: call() or 7)
    monkeypatch.setattr(costs_module, "call_of", lambda model, batch: lambda: asked.append(type(model).__name__))
    variants = {"full": folders / "full", "trunk": folders / "full"}
    found = measure_costs(variants, trunks=["trunk"], num_tokens=2, batch_size=1, num_rounds=1, num_warm_up=0)
    assert [cost.parameters for cost in found] == [parameters(12), parameters(12)]
    assert asked == ["GPT2LMHeadModel"] * 2 + ["GPT2Model"] * 2 + ["GPT2LMHeadModel", "GPT2Model"]
    assert {cost.peak_memory for cost in found} == {4 * parameters(12) + 7}


def test_models_take_turns_and_each_round_begins_with_another():
    calls = []
    named = {name: [lambda name=name, part=part: calls.append(name + part) for part in "12"] for name in "abc"}
    seconds = interleaved(named, num_rounds=3, num_warm_up=2)
    assert {name: [len(found) for found in both] for name, both in seconds.items()} == {name: [3, 3] for name in "abc"}
    order = ["b1b2c1c2a1a2", "c1c2a1a2b1b2", "a1a2b1b2c1c2", "b1b2c1c2a1a2", "c1c2a1a2b1b2"]
    assert "".join(calls) == "".join(order)


def test_median_quartiles_and_throughput_are_those_of_the_seconds(folders, monkeypatch):
    one, many = [0.5, 0.1, 0.2, 0.4, 0.3], [2.0, 1.0, 8.0, 4.0, 2.0]
    monkeypatch.setattr(costs_module, "interleaved", lambda calls, **_: {name: [one, many] for name in calls})
    (cost,) = measure_costs({"cut": folders / "cut"}, num_tokens=2, batch_size=6, num_rounds=5)
    assert (cost.latency, cost.throughput) == (statistics.median(one), 3.0)
    assert cost.latency_quartiles == pytest.approx((0.2, 0.4))


def test_a_call_is_the_models_own_and_gives_what_it_gives():
    for name in ("gpt2", "bert_trunk", "vit"):
        model, batch = tiny(name), tiny_batch(name, padding="right")
        expected = model(batch["pixel_values"]) if name == "vit" else model(**batch)[0]
        with torch.no_grad():
            found = call_of(model, batch)()
        assert torch.equal(found if name == "vit" else found[0], expected)


def test_images_are_measured_and_given_rows_are_taken(tmp_path):
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 7}
    save(vit("vit_tiny_patch16_224", **size), tmp_path)
    (cost,) = measure_costs({"cut": tmp_path}, trunks=["cut"], batch_size=2, num_rounds=1, num_warm_up=0)
    assert (cost.num_tokens, cost.batch_size) == (None, 2)
    given = {**tiny_batch("vit", batch=5), "labels": torch.zeros(5)}
    (cost,) = measure_costs({"cut": tmp_path}, inputs=given, num_rounds=1, num_warm_up=0)
    assert cost.batch_size == 5


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bert_classifier", "bert_tagger", "gpt2_trunk"])
def test_plain_opening_gives_the_class_that_is_named_or_its_trunk(name, tmp_path, capfd):
    before = torch.get_rng_state()
    model = saved(tmp_path, name)
    batch = tiny_batch(name)
    assert type(open_plainly(tmp_path)) is type(model)
    assert_rounded(open_plainly(tmp_path)(**batch)[0], model(**batch)[0])
    trunk = open_plainly(tmp_path, head=False, attention="eager")
    assert type(trunk) is type(model.base_model)
    assert trunk.config._attn_implementation == "eager"
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


def test_weights_are_counted_once_and_without_the_probe_beside_them(tmp_path):
    save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(99)}, tmp_path / "probe.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 5)
    assert bytes_of_weights(tmp_path) == (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "probe.safetensors").unlink()
    assert bytes_of_weights(tmp_path) == 5


def test_what_cannot_be_measured_is_refused(folders, tmp_path):
    cut = {"cut": folders / "cut"}
    for variants, options, message in (
        (cut, {"num_rounds": 0}, "num_rounds: expected at least 1, got 0"),
        (cut, {"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        (cut, {"num_tokens": 65}, "num_tokens: cut takes at most 64 tokens, got 65"),
        ({"none": tmp_path}, {}, r"expected a model in .*, found no config\.json there"),
    ):
        with pytest.raises(InputError, match=message):
            measure_costs(variants, **options)
