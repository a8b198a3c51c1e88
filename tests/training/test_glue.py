"""Fine-tuning on GLUE with blocks in another order: metrics and a step by hand, trained weights, cached results."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Variant
from lit_layers.models.build import save
from lit_layers.models.families import trunk_of
from lit_layers.models.saved import load, sequence_classifier
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.catalogue import GLUE, GlueRows, find, glue_metrics, read_rows
from lit_layers.training import glue
from lit_layers.training.glue import EncodedRows, GlueData, GlueRecipe, GlueScores, LitGlue
from lit_layers.training.modules import warmup_linear
from lit_layers.training.trainer import StepSampler
from tests.support.data_mapping import write_mapping
from tests.support.glue_files import saved_bert_of_pairs, write_glue, write_rows
from tests.support.labelled_texts import labelled
from tests.support.measured import records_of
from tests.support.tiny_models import tiny
from tests.training.test_finetuning import stepped

MIDDLE = Variant(name="custom", schedule=(1, (2, 3)))
QUICK = {"max_steps": 2, "batch_size": 4, "num_tokens": 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a masked BERT with a tokenizer for pairs, and files of three tasks."""
    folder = write_glue(tmp_path_factory.mktemp("glue"))
    saved_bert_of_pairs(folder / "bert")
    for split, first, count in (("train", 0, 24), ("validation", 30, 10)):
        texts, others = ([text for text, _ in labelled(count, start)] for start in (first, first + 7))
        scores = [number % 6 * 0.9 for number in range(count)]
        write_rows(folder, f"stsb_{split}", sentence1=texts, sentence2=others, score=scores)
    return folder


@pytest.fixture(autouse=True)
def trained(monkeypatch):
    """Return a list that collects the trained modules, with their validation predictions."""
    modules = []

    class Kept(LitGlue):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            modules.append(self)

    monkeypatch.setattr(glue, "LitGlue", Kept)
    return modules


def analyses(folder, root, recipe=None, **options):
    recipe = GlueRecipe(**{"tasks": ["mrpc"], **QUICK, **(recipe or {})})
    options = {"variants": [], "custom": ["1 (2,3)"], "folder": folder, "root": root, **options}
    encoder = str(folder / "bert")
    return [GlueScores(task=task, recipe=recipe, model=encoder, tokenizer=encoder, **options) for task in recipe.tasks]


def scores(folder, root, recipe=None, **options):
    view = LayeredModel(load(folder / "bert"))
    return {analysis.name: list(records_of(analysis, view)) for analysis in analyses(folder, root, recipe, **options)}


# Metrics


def test_metrics_of_classes_equal_counts_by_hand():
    wanted, predicted = [1, 1, 1, 0, 0, 0, 0, 1], [1, 0, 1, 0, 1, 0, 0, 1]
    hits, false, missed, right = 3, 1, 1, 3  # true positives, false positives, false negatives, true negatives
    both = glue_metrics(GLUE["mrpc"], predicted, wanted)
    assert both["accuracy"] == pytest.approx(6 / 8)
    assert both["f1"] == pytest.approx(2 * hits / (2 * hits + false + missed))
    assert both["task_score"] == pytest.approx((both["accuracy"] + both["f1"]) / 2)
    spread = (hits + false) * (hits + missed) * (right + false) * (right + missed)
    expected = (hits * right - false * missed) / math.sqrt(spread)
    assert glue_metrics(GLUE["cola"], predicted, wanted) == pytest.approx(
        {"matthews": expected, "task_score": expected}
    )
    assert glue_metrics(GLUE["cola"], [1] * 8, wanted)["matthews"] == 0
    assert set(glue_metrics(GLUE["rte"], predicted, wanted)) == {"accuracy", "task_score"}


def test_correlations_are_those_of_values_and_of_ranks():
    wanted, predicted = [0.0, 1.0, 2.0, 5.0, 5.0], [0.1, 3.0, 2.0, 20.0, 9.0]

    def pearson(one, other):
        one, other = (np.array(each) - np.mean(each) for each in (one, other))
        return float(one @ other / math.sqrt((one @ one) * (other @ other)))

    found = glue_metrics(GLUE["stsb"], predicted, wanted)
    ranks = [1, 2, 3, 4.5, 4.5], [1, 3, 2, 5, 4]
    assert found["pearson"] == pytest.approx(pearson(predicted, wanted), abs=1e-12)
    assert found["spearman"] == pytest.approx(pearson(*ranks), abs=1e-12)
    assert found["task_score"] == pytest.approx((found["pearson"] + found["spearman"]) / 2)
    constant = glue_metrics(GLUE["stsb"], [2.0] * 5, wanted)
    assert all(map(math.isnan, constant.values()))


def test_a_diverged_model_scores_nan_and_not_as_the_first_class(folder, tmp_path, monkeypatch):
    """In two rows all logits but that of class 0 are NaN. Class 0 is the most frequent target."""
    for name in ("cola", "mrpc", "stsb"):
        assert all(map(math.isnan, glue_metrics(GLUE[name], [0.0, math.nan, 1.0], [0, 0, 1]).values()))
    outputs = LitGlue.outputs

    def broken(self, batch):
        found = outputs(self, batch).detach().clone()
        (found[:2, 1:] if found.ndim > 1 else found[:2]).fill_(torch.nan)
        return found

    recipe = {"tasks": ["cola", "mrpc", "stsb"], "max_steps": 1}
    monkeypatch.setattr(LitGlue, "training_step", lambda self, *_: outputs(self, *_[:1]).sum())
    monkeypatch.setattr(LitGlue, "outputs", broken)
    first = scores(folder, tmp_path, recipe, custom=[])
    for records in first.values():
        assert records
        assert all(math.isnan(record.value) for record in records)
    again = scores(folder, tmp_path, recipe, custom=[])  # read from the files
    assert {name: [r.metric for r in records] for name, records in again.items()} == {
        name: [r.metric for r in records] for name, records in first.items()
    }
    assert all(math.isnan(record.value) for records in again.values() for record in records)


# Rows


def test_pairs_become_one_row_of_two_segments(folder):
    rows = GlueRows(GLUE["mrpc"], (("a merry song", "sang again"), ("sang", "a sad song they heard")), (1.0, 0.0))
    tokenizer = load_tokenizer(str(folder / "bert"))
    number = tokenizer.tokenizer.token_to_id
    words = [[["a", "merry", "song"], ["sang", "again"]], [["sang"], ["a", "sad", "song", "they", "heard"]]]
    encoded = EncodedRows(tokenizer, rows, max_tokens=30)
    for place, (one, other) in enumerate(words):
        alone = encoded.batch([place], pad_id=0)
        assert alone["input_ids"].tolist() == [[2, *map(number, one), 3, *map(number, other), 3]]
        assert alone["token_type_ids"].tolist() == [[0] * (len(one) + 2) + [1] * (len(other) + 1)]
    batch = encoded.batch([1, 0], pad_id=7)
    assert batch["attention_mask"].sum(1).tolist() == [9, 8]
    assert batch["input_ids"][1].tolist() == [*encoded.batch([0], pad_id=0)["input_ids"][0].tolist(), 7]
    assert batch["token_type_ids"][1].tolist() == [0] * 5 + [1] * 3 + [0]
    assert batch["labels"].tolist() == [0, 1]
    short = EncodedRows(tokenizer, rows, max_tokens=6).batch([1], pad_id=0)
    assert short["input_ids"].tolist() == [[2, number("sang"), 3, number("a"), number("sad"), 3]]
    assert tokenizer.tokenizer.padding is None


def test_fewer_rows_are_the_first_of_more_rows(folder):
    rows = read_rows(GLUE["mrpc"], "train", folder)
    assert len(rows) == 24
    few, more = rows.take(5, seed=1), rows.take(9, seed=1)
    assert few.texts == more.texts[:5]
    assert few.content_hash() != more.content_hash() != rows.take(9, seed=2).content_hash()
    assert rows.take(24, seed=0) is rows.take(None, seed=0) is rows


def test_rows_and_splits_that_do_not_fit_are_refused(tmp_path):
    (write_mapping(tmp_path) / "glue").mkdir()
    for column, sentence in (("label", "row 0 of .* has 2, expected a class from 0 to 1"), ("other", "cola: .*label")):
        write_rows(tmp_path, "cola_train", sentence=["a"], **{column: [2]})
        with pytest.raises(InputError, match=sentence):
            read_rows(GLUE["cola"], "train", tmp_path)
    with pytest.raises(InputError, match="task rte: source: expected the split 'train' in"):
        read_rows(GLUE["rte"], "train", tmp_path)


def test_a_local_copy_of_a_task_may_change_its_score(folder, tmp_path):
    (tmp_path / "glue").symlink_to(folder / "glue")
    entry = {"files": "glue/mrpc_{split}.parquet", "options": {"score": "f1"}}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"glue": {"mrpc": entry}}))
    (analysis,) = analyses(folder, tmp_path)
    data = replace(analysis, folder=tmp_path).data()
    assert (data.task.scores, find("glue", "mrpc").scores) == (("f1",), ("accuracy", "f1"))


# Models


def test_the_trunk_is_the_saved_one_and_the_seed_sets_the_new_head(folder):
    state = torch.get_rng_state()
    model, trunk = sequence_classifier(folder / "bert", 2, seed=4)
    again, _ = sequence_classifier(folder / "bert", 2, seed=4)
    other, _ = sequence_classifier(folder / "bert", 2, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    source = load(folder / "bert").bert.state_dict()
    for name, tensor in trunk.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(tensor, source[name]), name
    of_trunk = {id(parameter) for parameter in trunk.parameters()}
    head = [parameter for parameter in model.parameters() if id(parameter) not in of_trunk]
    assert sorted(tuple(each.shape) for each in head) == [(2,), (2, 32)]
    assert torch.equal(model.classifier.weight, again.classifier.weight)
    assert not torch.equal(model.classifier.weight, other.classifier.weight)


def test_models_that_are_not_complete_encoders_are_refused(folder, tmp_path):
    save(tiny("gpt2"), tmp_path / "gpt2")
    with pytest.raises(InputError, match=r"model: expected an encoder \(bert, .*\), .* is of the type gpt2"):
        sequence_classifier(tmp_path / "gpt2", 2)
    with pytest.raises(InputError, match="model: cannot open "):
        sequence_classifier(tmp_path, 2)
    model = tiny("bert")
    save(model, tmp_path / "less")
    config = json.loads((tmp_path / "less" / "config.json").read_text())
    (tmp_path / "less" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(InputError, match=r"do not fill its trunk: bert.encoder.layer.3.* are not there"):
        sequence_classifier(tmp_path / "less", 2)


# Training


def composed(model, batch):
    """Return the outputs of the schedule block 1, mean of blocks 2 and 3, written out."""
    bert = model.bert
    hidden = bert.embeddings(input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"])
    mask = (1 - batch["attention_mask"][:, None, None].double()) * -1e9  # (batch, 1, 1, tokens)
    one, two, three = (lambda states, block=block: block(states, mask) for block in bert.encoder.layer)
    hidden = one(hidden)
    hidden = (two(hidden) + three(hidden)) / 2
    return model.classifier(torch.tanh(bert.pooler.dense(hidden[:, 0])))


@pytest.mark.parametrize(("name", "training"), [("mrpc", "full"), ("stsb", "full"), ("mrpc", "frozen")])
def test_a_step_is_adamw_on_the_loss_of_the_composed_blocks(folder, tmp_path, trained, name, training):
    task, options = GLUE[name], {"learning_rate": 1e-2, "weight_decay": 0.1, "seed": 3}
    network, _ = sequence_classifier(folder / "bert", task.num_classes or 1)
    network = network.double()
    for part in network.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0
    (analysis,) = analyses(folder, tmp_path, {"tasks": [name], "max_steps": 1, **options})
    data = analysis.data()
    encoded, metrics = data.encoded, analysis.score(network, MIDDLE, training, data, LayeredModel(trunk_of(network)))
    batch = encoded["train"].batch(StepSampler(24, global_batch_size=4, seed=3).global_batch(0), pad_id=0)
    outputs = composed(network, batch)
    if name == "mrpc":
        loss = -outputs.log_softmax(-1)[range(4), batch["labels"]].mean()
    else:
        loss = (outputs[:, 0] - batch["labels"].double()).square().mean()
    loss.backward()
    rate = 1e-2 if training == "full" else 3e-2
    mine = [p for n, p in network.named_parameters() if p.grad is not None and (training == "full" or "bert." not in n)]
    norm = torch.stack([parameter.grad.norm() for parameter in mine]).norm()
    found = dict(trained[0].model.named_parameters())
    for key, parameter in network.named_parameters():
        is_trained = any(parameter is each for each in mine)
        expected = stepped(parameter, min(1, 1 / (norm + 1e-6)), rate) if is_trained else parameter.detach()
        torch.testing.assert_close(
            found[key], expected, rtol=1e-7, atol=1e-7, msg=lambda told, key=key: f"{key}: {told}"
        )
    with torch.no_grad():
        outputs = composed(trained[0].model, encoded["validation"].batch(range(10), pad_id=0))
    predicted = outputs.argmax(-1) if name == "mrpc" else outputs[:, 0]
    torch.testing.assert_close(torch.cat(trained[0].predictions), predicted.double(), rtol=1e-6, atol=1e-6)
    assert metrics == glue_metrics(
        task, torch.cat(trained[0].predictions).numpy(), encoded["validation"].targets.numpy()
    )


def test_a_result_is_cached_and_not_computed_again(folder, tmp_path, trained):
    recipe, lines = {"tasks": ["mrpc"], "training": ["frozen"]}, []
    first = scores(folder, tmp_path, recipe, tell=lines.append)
    assert len(trained) == len(lines) == 2
    kept = json.loads((tmp_path / "glue" / "mrpc" / "frozen" / "baseline.json").read_text())
    assert kept["metrics"]["accuracy"] == first["intervene/glue/mrpc"][0].value
    assert scores(folder, tmp_path, recipe) == first
    assert len(trained) == 2
    (tmp_path / "glue" / "mrpc" / "frozen" / "baseline.json").unlink()
    assert scores(folder, tmp_path, recipe) == first
    assert len(trained) == 3
    with pytest.raises(InputError, match=r"baseline.json is the result of other settings \(max_steps differs\)"):
        scores(folder, tmp_path, {**recipe, "max_steps": 1})


def test_records_have_the_tags_of_variant_task_and_training(folder, tmp_path):
    recipe = {"tasks": ["stsb"], "training": ["frozen"], "max_steps": 1}
    found = scores(folder, tmp_path, recipe, variants=["random", "skip"], middles=[2], seeds=[0, 1], custom=[])
    assert list(found) == ["intervene/glue/stsb"]
    skip = {"variant": "skip", "middle": 2, "task": "stsb", "training": "frozen"}
    skipped = [record.metric for record in found["intervene/glue/stsb"] if record.tags == skip]
    assert sorted(skipped) == ["pearson", "spearman", "task_score"]
    of_scores = [record for record in found["intervene/glue/stsb"] if record.metric == "task_score"]
    assert len(of_scores) == 1 + 2 + 1 + 1  # full model, seeds, skip, mean of seeds
    of_seeds = [record for record in of_scores if "seed" in record.tags]
    (mean,) = (record for record in of_scores if "num_seeds" in record.tags)
    assert mean.value == pytest.approx(sum(record.value for record in of_seeds) / 2)


def test_the_same_seed_gives_the_same_weights_after_other_random_draws(folder, tmp_path, trained):
    for root, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(len(trained))
        scores(folder, tmp_path / root, {"seed": seed, "max_steps": 1}, custom=[])
    one, two, three = (torch.cat([p.flatten() for p in module.model.parameters()]) for module in trained)
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


class SixtyTokens(EncodedRows):
    def batch(self, indices, pad_id):
        batch = super().batch(indices, pad_id)
        return batch | {"input_ids": batch["input_ids"] % 60}


@pytest.mark.parametrize(
    "name", ["distilbert", *(pytest.param(name, marks=pytest.mark.soak) for name in ("roberta", "modernbert"))]
)
def test_other_encoders_are_trained_and_scored_with_the_variant_active(name, tmp_path, folder, trained):
    source = tiny(name, num_labels=2, **{"n_layers" if name == "distilbert" else "num_hidden_layers": 4})
    save(source, tmp_path / name)
    model, trunk = sequence_classifier(tmp_path / name, 2)
    rows = read_rows(GLUE["mrpc"], "train", folder)
    encoded = SixtyTokens(load_tokenizer(str(folder / "bert")), rows, max_tokens=20)
    (analysis,) = analyses(folder, tmp_path)
    data = GlueData(dict.fromkeys(("train", "validation"), rows), load_tokenizer(str(folder / "bert")), analysis.recipe)
    data.encoded = {"train": encoded, "validation": encoded}
    order, plain = (
        analysis.score(model, variant, "full", data, LayeredModel(trunk))
        for variant in (Variant(name="custom", schedule=(1, 4)), Variant(name="baseline", schedule=(1, 2, 3, 4)))
    )
    assert set(order) == set(plain) == {"accuracy", "f1", "task_score"}
    assert "_running_order" not in trunk.__dict__
    before = LayeredModel(trunk).blocks
    for module, stays in zip(trained, ({2, 3}, set()), strict=True):
        after = LayeredModel(trunk_of(module.model)).blocks
        pairs = enumerate(zip(before, after, strict=True), 1)
        same = {n for n, two in pairs if all(map(torch.equal, *(block.parameters() for block in two)))}
        assert same == stays


def test_the_learning_rate_rises_and_falls_linearly():
    factor = warmup_linear(warmup_steps=2, steps=6)
    assert [factor(step) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert warmup_linear(warmup_steps=0, steps=2)(1) == 0.5
    assert GlueRecipe(num_epochs=3, batch_size=32).steps(100) == 10
    assert GlueRecipe(num_epochs=3, batch_size=32, max_steps=4).steps(100) == 4
