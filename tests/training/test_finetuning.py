"""Training on while blocks run in another order, against steps written by hand."""

import copy
import json
import math
import statistics

import pytest
import torch
import yaml
from torch.nn import functional as F

from lit_layers.cli.verbs.intervene import read_recipe
from lit_layers.data.batches import TokenBlocks
from lit_layers.data.preparing import prepared
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Variant
from lit_layers.models.build import causal_lm, vit, weights_hash
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.training import finetuning
from lit_layers.training.finetuning import Finetuning, FinetuningRecipe, LitVariant
from lit_layers.training.trainer import StepSampler
from lit_layers.training.variant_training import means_of_seeds, name_of
from tests.support.labelled_texts import labelled, saved_gpt2
from tests.support.measured import records_of

TOKENS, ROWS = 12, 4
MIDDLE = Variant(name="custom", schedule=(1, (2, 3), 5))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a corpus of short texts, and a model with its tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    texts = [json.dumps({"text": text}) for text, _ in labelled(1500)]
    (folder / "corpus.jsonl").write_text("\n".join(texts))
    saved_gpt2(folder / "model", n_layer=5, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return folder


@pytest.fixture
def model(text):
    return load(text / "model", dtype=torch.float64)


def recipe(text, **options) -> FinetuningRecipe:
    usual = {"steps": 1, "learning_rate": 1e-2, "batch_size": ROWS, "num_tokens": TOKENS, "num_validation_sequences": 6}
    usual |= {"corpus": str(text / "corpus.jsonl"), "tokenizer": str(text / "model"), "validation_batch_size": 4}
    return FinetuningRecipe(**(usual | options))


def run(model, text, root, variant=MIDDLE, **options):
    training = recipe(text, **options)
    analysis = Finetuning(recipe=training, root=root, tokenizer=str(text / "model"))
    analysis.check(LayeredModel(model))
    return tuple(analysis.before_and_after(LayeredModel(model), variant).values())


def trained(root, variant=MIDDLE):
    return load(root / name_of(variant) / "model", dtype=torch.float64)


def composed(model, ids):
    """Logits of blocks 1, the mean of 2 and 3, and 5, written out."""
    trunk = model.transformer
    hidden = trunk.wte(ids) + trunk.wpe(torch.arange(ids.shape[1]))
    block = {number: lambda states, number=number: trunk.h[number - 1](states) for number in range(1, 6)}
    hidden = block[1](hidden)
    hidden = (block[2](hidden) + block[3](hidden)) / 2
    return model.lm_head(trunk.ln_f(block[5](hidden)))


def losses(model, blocks):
    ids = torch.stack([block["input_ids"] for block in blocks])
    logits = composed(model, ids[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return each, (logits.argmax(-1) == ids[:, 1:]).double()


def blocks(text, split):
    return TokenBlocks(prepared(str(text / "corpus.jsonl"), str(text / "model")), split=split, num_tokens=TOKENS)


def test_a_step_is_one_of_adamw_on_the_loss_of_the_composed_blocks(model, text, tmp_path):
    run(model, text, tmp_path, weight_decay=0.1, gradient_clip=0.5, seed=3)
    data = blocks(text, "train")
    batch = [data[index] for index in StepSampler(len(data), global_batch_size=ROWS, seed=3).global_batch(0)]
    losses(model, batch)[0].mean().backward()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.stack([parameter.grad.norm() for parameter in parameters.values()]).norm()
    assert norm > 0.5
    found = dict(trained(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        expected = parameter.detach().clone()
        if name in parameters:
            gradient = parameter.grad * 0.5 / (norm + 1e-6)
            decay = 0.1 if parameter.ndim >= 2 else 0.0
            expected = expected * (1 - 1e-2 * decay) - 1e-2 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(
            found[name], expected, rtol=1e-9, atol=1e-9, msg=lambda told, name=name: f"{name}: {told}"
        )


def test_blocks_that_do_not_run_keep_their_weights_and_the_given_model_all_of_them(model, text, tmp_path):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    modes = [part.training for part in model.modules()]
    run(model, text, tmp_path, steps=3)
    for name, parameter in trained(tmp_path).named_parameters():
        stays = name.startswith("transformer.h.3.")
        assert torch.equal(parameter, before[name]) == stays, name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert [part.training for part in model.modules()] == modes
    assert all("forward" not in block.__dict__ for block in model.transformer.h)


def test_quality_before_and_after_is_that_of_the_composed_blocks(model, text, tmp_path):
    found = run(model, text, tmp_path, steps=8)
    held = [blocks(text, "validation")[index] for index in range(6)]
    for quality, network in zip(found, (model, trained(tmp_path)), strict=True):
        with torch.no_grad():
            loss, right = losses(network, held)
        assert quality.loss == pytest.approx(loss.mean().item(), abs=1e-9)
        assert quality.accuracy == pytest.approx(right.mean().item(), abs=1e-12)
        assert quality.loss_stderr == pytest.approx(statistics.stdev(loss.mean(1).tolist()) / 6**0.5, abs=1e-9)
        assert quality.num_sequences == 6
    assert found[1].loss < found[0].loss


def test_the_same_seed_gives_the_same_weights_and_leaves_the_random_state(model, text, tmp_path):
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.2
    state = torch.get_rng_state()
    hashes = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(3 if name == "b" else 0)
        run(model, text, tmp_path / name, steps=2, seed=seed)
        hashes.append(weights_hash(trained(tmp_path / name)))
    torch.set_rng_state(state)
    assert hashes[0] == hashes[1] != hashes[2]
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    run(model, text, tmp_path / "d", steps=1)
    assert torch.equal(torch.rand(2), expected)


def test_what_is_finished_is_not_trained_again_and_other_settings_are_refused(model, text, tmp_path, monkeypatch):
    first = run(model, text, tmp_path)
    facts = json.loads((tmp_path / name_of(MIDDLE) / "finetuned.json").read_text())
    assert facts["schedule"] == "1 (2,3) 5"
    monkeypatch.setattr(LitVariant, "training_step", lambda *_: pytest.fail("trained again"))
    assert run(model, text, tmp_path) == first
    with pytest.raises(InputError, match=r"finetuned.json is the result of other settings \(steps differs\)"):
        run(model, text, tmp_path, steps=2)
    with torch.no_grad():
        model.transformer.wpe.weight.add_(1)
    with pytest.raises(InputError, match=r"other settings \(weights differs\): choose another root"):
        run(model, text, tmp_path)


def test_a_corpus_that_has_changed_is_other_settings(model, text, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text((text / "corpus.jsonl").read_text())
    run(model, text, tmp_path, corpus=str(corpus))
    with corpus.open("a") as file:
        file.write("\n" + json.dumps({"text": "one more"}))
    with pytest.raises(InputError, match=r"other settings \(corpus differs\)"):
        run(model, text, tmp_path, corpus=str(corpus))
    model.config.layer_norm_epsilon = 0.5
    with pytest.raises(InputError, match=r"other settings \(architecture differs\)"):
        run(model, text, tmp_path, corpus=str(corpus))


def test_an_interrupted_training_leaves_no_result_and_the_model_as_it_was(model, text, tmp_path, monkeypatch):
    before, step = weights_hash(model), LitVariant.training_step

    def broken(self, batch, index):
        if index == 1:
            raise OSError("gone")
        return step(self, batch, index)

    monkeypatch.setattr(LitVariant, "training_step", broken)
    with pytest.raises(OSError, match="gone"):
        run(model, text, tmp_path, steps=3)
    assert weights_hash(model) == before
    assert "_running_order" not in model.__dict__
    assert not list(tmp_path.rglob("finetuned.json"))
    monkeypatch.setattr(LitVariant, "training_step", step)
    assert run(model, text, tmp_path, steps=3)[1].num_sequences == 6


def test_variants_begin_with_the_same_weights_and_one_record_tells_each_number(model, text, tmp_path):
    options = {"variants": ("random", "skip_one"), "middles": (2,), "seeds": (0, 1)}
    analysis = Finetuning(recipe=recipe(text, steps=2), root=tmp_path, tokenizer=str(text / "model"), **options)
    compared = analysis.chosen(LayeredModel(model))
    records = list(records_of(analysis, LayeredModel(model)))
    alone = run(model, text, tmp_path / "alone", compared[3], steps=2)
    found = {(str(r.tags), r.layer, r.metric): r.value for r in records}
    assert len(found) == len(records) == 4 * len(compared) + 4
    for when, quality in zip(("before", "after"), alone, strict=True):
        tags = str({"variant": "skip_one", "when": when})
        assert found[tags, compared[3].block, "variant_loss"] == quality.loss
        assert found[tags, compared[3].block, "variant_accuracy"] == quality.accuracy
    assert [r.tags["num_seeds"] for r in records[-4:]] == [2] * 4


def test_the_mean_over_seeds_and_how_many_orders_are_the_plain_one():
    def of(seed, schedule, value, when="after"):
        tags = {"variant": "random", "middle": 2, "seed": seed, "schedule": schedule, "when": when}
        return Record(metric="variant_loss", value=value, tags=tags, n=6)

    records = [of(0, "1 2 3 4", 1.0), of(1, "1 3 2 4", 4.0), of(2, "1 2 3 4", 4.0), of(0, "1 3 2 4", 9.0, "before")]
    records.append(Record(metric="variant_loss", value=7.0, tags={"variant": "skip", "middle": 2, "when": "after"}))
    after, before = means_of_seeds(records, 4)
    assert after.value == 3.0
    assert after.stderr == pytest.approx(1.0)  # standard deviation of 1, 4, 4 is the root of 3
    assert after.tags == {"variant": "random", "middle": 2, "when": "after", "num_seeds": 3, "num_identical": 2}
    assert (before.value, before.stderr) == (9.0, None)
    broken = [of(0, "1 2 3 4", math.nan), of(1, "1 3 2 4", 4.0), of(2, "1 2 3 4", 2.0), of(0, "1 2 3 4", math.nan, "x")]
    after, nothing = means_of_seeds(broken, 4)
    assert (after.value, after.stderr) == (3.0, 1.0)
    assert after.tags["num_undefined"] == 1
    assert math.isnan(nothing.value)


def test_a_model_that_has_diverged_has_no_accuracy(model, text):
    network = copy.deepcopy(model)
    with torch.no_grad():
        network.lm_head.weight[0] = torch.nan
    module = LitVariant(network, recipe(text), 1)
    module.validation_step({"input_ids": torch.arange(18).view(2, 9)}, 0)
    module.on_validation_epoch_end()
    assert math.isnan(module.result.loss)
    assert math.isnan(module.result.accuracy)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({}, "recipe: missing: corpus; give it in the recipe"),
        ({"corpus": "c", "step": 3}, "recipe: unknown key step in the recipe; did you mean steps?"),
        ({"corpus": "c", "steps": 0}, "recipe: steps: expected at least 1, got 0"),
        ({"corpus": "c", "batch_size": True}, "recipe: batch_size: expected int, got True"),
        ({"corpus": "c", "warmup_steps": -1}, "recipe: warmup_steps: expected at least 0, got -1"),
        ({"corpus": "c", "learning_rate": "fast"}, "recipe: learning_rate: expected float, got fast"),
        ({"corpus": "c", "learning_rate": 0}, "recipe: learning_rate: expected a positive learning rate, got 0"),
        ({"corpus": "c", "min_lr_ratio": 2}, "recipe: min_lr_ratio: expected a share from 0 to 1, got 2"),
        ({"corpus": 3}, "recipe: corpus: expected str, got 3"),
        ([1], "recipe: expected a recipe of KEY: VALUE lines, got - 1"),
    ],
)
def test_a_recipe_with_wrong_keys_or_values_is_refused(content, sentence, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(InputError) as refused:
        read_recipe(FinetuningRecipe, tmp_path / "recipe.yaml")
    assert sentence in str(refused.value)


def test_recipes_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match="File does not exist"):
        read_recipe(FinetuningRecipe, tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(InputError, match="Problems parsing config"):
        read_recipe(FinetuningRecipe, tmp_path / "broken.yaml")


def test_a_number_may_be_written_as_python_writes_it(tmp_path):
    (tmp_path / "recipe.yaml").write_text("corpus: c\nlearning_rate: 5e-5\n")  # to YAML it is text
    assert read_recipe(FinetuningRecipe, tmp_path / "recipe.yaml").learning_rate == 5e-5


def test_the_recipe_that_comes_with_the_package_is_readable():
    assert read_recipe(FinetuningRecipe, "recipes/finetune/text.yaml").steps == 200


def test_models_that_do_not_fit_are_refused_before_anything_is_written(text, tmp_path):
    def sentence(model, **options):
        with pytest.raises(InputError) as refused:
            run(model, text, tmp_path, **options)
        assert not list(tmp_path.iterdir())
        return str(refused.value)

    image = vit("vit_tiny_patch16_224", depth=5, embed_dim=32, num_heads=2, img_size=32)
    assert "expected a causal language model, which predicts the next token, got VisionTransformer" in sentence(image)
    small = causal_lm("gpt2", n_layer=5, n_embd=16, n_head=2, vocab_size=61, n_positions=16)
    assert "tokenizer: GPT2LMHeadModel knows 61 tokens" in sentence(small)
    assert "recipe: num_tokens: GPT2LMHeadModel takes at most 16 tokens, got 17" in sentence(small, num_tokens=17)
    assert finetuning.ANALYSIS == "intervene/finetune"
