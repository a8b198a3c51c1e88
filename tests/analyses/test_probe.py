"""Task probes against fits, metrics and baselines of scikit-learn on features of single texts."""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import accuracy_score, f1_score, log_loss, r2_score
from sklearn.preprocessing import StandardScaler

from lit_layers.analyses import Probe, SampleSizeSweep
from lit_layers.analyses.probes.task_probes import sizes, subsets, summarize_seeds
from lit_layers.data.preparing import prepared
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, save_tokenizer, tokenizer_hash, train_bpe
from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.probe_task import ProbeTask
from tests.support.measured import records_of
from tests.support.tiny_models import LAYERS

WORDS = {"red": "apple rose blood", "green": "grass leaf frog", "blue": "sky sea ice"}
TIGHT = {"tolerance": 1e-8, "max_iterations": 5000}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["the apple rose blood grass leaf frog sky sea ice and one two three four"] * 4
    save_tokenizer(train_bpe(texts, 280), folder)
    return folder


@pytest.fixture(scope="module")
def model(tokenizer) -> LayeredModel:
    size = load_tokenizer(str(tokenizer)).vocab_size
    options = {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 48, "vocab_size": size}
    found = causal_lm("gpt2", **options).double().eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.ndim > 1:
                parameter *= 6
    return LayeredModel(found)


def write(folder: Path, name: str, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def written_task(folder: Path, kind: str = "classification", **options) -> ProbeTask:
    """Write a task whose texts have words of one colour as the class, or a number of words as the target."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 90), ("test", 40)):
        rows = []
        for number in range(count):
            label = str(draw.choice(list(WORDS)))
            words = [*draw.choice(WORDS[label].split(), 2), *draw.choice(["one", "two", "the", "and"], 3)]
            draw.shuffle(words)
            words += ["four"] * int(draw.integers(0, 6))
            text = " ".join([*words, str(number if split == "train" else -number)])
            target = label if kind == "classification" else float(text.count("four") + draw.normal())
            rows.append({"text": text, "label": target})
        write(folder, split, rows)
    return ProbeTask("colours", str(folder), kind=kind, **options)  # pyright: ignore[reportArgumentType]


def features_of(model: LayeredModel, tokenizer: Path, texts: tuple[str, ...], layer: int) -> np.ndarray:
    found: TextTokenizer = load_tokenizer(str(tokenizer))
    return np.stack([last_states(model, tuple(found.tokenizer.encode(text).ids[:48]))[layer] for text in texts])


@functools.cache
def last_states(model: LayeredModel, ids: tuple[int, ...]) -> np.ndarray:
    """Return the state of each layer at the last token of the text."""
    return model.trajectory({"input_ids": torch.tensor([ids])}).hidden[:, 0, -1].double().numpy()


def value_of(records, metric: str, layer: int | None = None, **tags):
    (found,) = [
        record
        for record in records
        if (record.metric, record.layer) == (metric, layer)
        and {n: v for n, v in record.tags.items() if not n.startswith("num_")} == {"task": "colours", **tags}
    ]
    return found


@pytest.mark.parametrize("fit_on", ["train", pytest.param("train_and_validation", marks=pytest.mark.soak)])
def test_a_probe_and_its_metrics_equal_those_of_scikit_learn_on_the_same_features(fit_on, model, tokenizer, tmp_path):
    task = written_task(tmp_path)
    data = task.load()
    probe = Probe(task=task, tokenizer=str(tokenizer), fit_on=fit_on, c=0.3, **TIGHT)
    records = records_of(probe, model)
    train = data.train if fit_on == "train" else data.train_and_validation()
    splits = {"train": train, "test": data.test} | ({"validation": data.validation} if fit_on == "train" else {})
    for layer in range(LAYERS + 1):
        scaler = StandardScaler()
        features = scaler.fit_transform(features_of(model, tokenizer, train.texts, layer))
        sklearn = LogisticRegression(C=0.3, tol=1e-10, max_iter=20000).fit(features, train.targets.numpy())
        for name, split in splits.items():
            inputs, truth = scaler.transform(features_of(model, tokenizer, split.texts, layer)), split.targets.numpy()
            predicted, share = sklearn.predict(inputs), sklearn.predict_proba(inputs)
            for metric, expected in (
                ("accuracy", accuracy_score(truth, predicted)),
                ("macro_f1", f1_score(truth, predicted, average="macro", labels=np.unique(truth))),
                ("log_loss", log_loss(truth, share, labels=[0, 1, 2])),
            ):
                record = value_of(records, metric, layer, split=name)
                assert record.value == pytest.approx(expected, rel=1e-4), (metric, layer, name)
                assert record.n == len(truth)
                if name != "train":
                    assert record.low <= record.value <= record.high
                    assert record.low < record.high or metric == "accuracy" or record.value in (0, 1)
    assert {r.tags["split"] for r in records} == set(splits)
    accuracies = [value_of(records, "accuracy", layer, split="test").value for layer in range(LAYERS + 1)]
    assert max(accuracies) > 0.45  # chance is a third, so there is a signal


def test_a_regression_equals_scikit_learns_ridge(model, tokenizer, tmp_path):
    task = written_task(tmp_path, kind="regression")
    data = task.load()
    train = data.train_and_validation()
    for penalty in (2.0, 0.0):
        probe = Probe(task=task, tokenizer=str(tokenizer), penalty=penalty, random_labels=False, pooling="last")
        records = records_of(probe, model)
        for layer in range(1, LAYERS + 1):
            scaler = StandardScaler()
            features = scaler.fit_transform(features_of(model, tokenizer, train.texts, layer))
            ridge = Ridge(alpha=penalty).fit(features, train.targets.numpy())
            predicted = ridge.predict(scaler.transform(features_of(model, tokenizer, data.test.texts, layer)))
            truth, mean = data.test.targets.numpy(), train.targets.numpy().mean()
            error = float(((predicted - truth) ** 2).mean())
            found = value_of(records, "mean_squared_error", layer, split="test")
            assert found.value == pytest.approx(error, rel=1e-5)
            assert found.low < found.value < found.high
            shifted = r2_score(np.append(truth, 2 * mean - truth), np.append(predicted, 2 * mean - predicted))
            assert value_of(records, "r_squared", layer, split="test").value == pytest.approx(shifted, rel=1e-5)
    baseline = value_of(records, "mean_squared_error", None, split="test", reference="mean")
    assert baseline.value == pytest.approx(float(((truth - mean) ** 2).mean()))


@pytest.mark.soak
def test_a_probe_that_chooses_its_c_reports_it_and_a_sweep_does_the_same(model, tokenizer, tmp_path):
    task, given = written_task(tmp_path), {"tokenizer": str(tokenizer), "estimator": "watch"}
    records = records_of(Probe(task=task, **given), model)
    best = min(value_of(records, "log_loss", layer, split="test").value for layer in range(LAYERS + 1))
    assert best < value_of(records, "log_loss", None, split="test", reference="majority").value
    for layer in range(LAYERS + 1):
        assert value_of(records, "probe_c", layer).n == 90
        assert value_of(records, "probe_c", layer, control="random_labels").value > 0
    swept = records_of(SampleSizeSweep(task=task, num_seeds=1, **given), model)
    expected = value_of(records, "log_loss", 1, split="test").value
    assert value_of(swept, "log_loss", 1, split="test", train_rows=90).value == pytest.approx(expected)


@pytest.mark.soak
def test_a_regression_that_chooses_its_penalty_reports_it(model, tokenizer, tmp_path):
    task = written_task(tmp_path, kind="regression")
    train = task.load().train_and_validation()
    given = {"task": task, "tokenizer": str(tokenizer), "random_labels": False}
    records = records_of(Probe(**given, estimator="watch"), model)
    for layer in range(LAYERS + 1):
        features = StandardScaler().fit_transform(features_of(model, tokenizer, train.texts, layer))
        errors = RidgeCV(np.logspace(-3, 5, 17)).fit(features, train.targets.numpy())  # also leaves rows out
        chosen = value_of(records, "probe_c", layer)
        assert (1 / chosen.value, chosen.n) == (pytest.approx(errors.alpha_), 90)
        fixed = records_of(Probe(**given, penalty=1 / chosen.value), model)
        expected = value_of(fixed, "mean_squared_error", layer, split="test").value
        assert value_of(records, "mean_squared_error", layer, split="test").value == pytest.approx(expected)
    assert not [record for record in fixed if record.metric == "probe_c"]


@pytest.fixture(scope="module")
def probed(model, tokenizer, tmp_path_factory):
    """Return a task and the records of its probe."""
    task = written_task(tmp_path_factory.mktemp("task"))
    return task, records_of(Probe(task=task, tokenizer=str(tokenizer), tolerance=1e-4), model)


def test_the_reference_is_the_majority_and_random_labels_teach_nothing(probed):
    task, records = probed
    data = task.load()
    train, test = data.train_and_validation().targets.numpy(), data.test.targets.numpy()
    dummy = DummyClassifier(strategy="prior").fit(np.zeros((len(train), 1)), train)
    zeros = np.zeros((len(test), 1))
    found = value_of(records, "accuracy", None, split="test", reference="majority")
    assert found.value == pytest.approx(dummy.score(zeros, test))
    assert found.tags["num_train_rows"] == 90
    loss = value_of(records, "log_loss", None, split="test", reference="majority")
    assert loss.value == pytest.approx(log_loss(test, dummy.predict_proba(zeros), labels=[0, 1, 2]))
    taught = max(value_of(records, "accuracy", n, split="test").value for n in range(LAYERS + 1))
    control = [value_of(records, "accuracy", n, split="test", control="random_labels").value for n in range(LAYERS + 1)]
    assert np.mean(control) < taught - 0.1


def test_the_curve_over_layers_is_summarized_from_the_test_scores(probed):
    _, records = probed
    for metric, sign in (("accuracy", 1), ("log_loss", -1)):
        curve = [sign * value_of(records, metric, layer, split="test").value for layer in range(1, LAYERS + 1)]
        share = value_of(records, "monotonicity_fraction_increasing", None, split="test", of=metric)
        assert share.value == np.mean(np.diff(curve) > 0)
        best = value_of(records, "best_layer", None, split="test", of=metric)
        assert best.value == 1 + int(np.argmax(curve))
        assert best.low <= best.value <= best.high
        drop = value_of(records, "monotonicity_largest_drop", None, split="test", of=metric).value
        assert drop == pytest.approx(max(0, -np.diff(curve).min()))


def test_rows_of_a_test_class_without_training_rows_are_errors_and_counted(model, tokenizer, tmp_path):
    write(tmp_path, "train", [{"text": f"{word} {n}", "label": word} for n in range(20) for word in ("sky", "sea")])
    rows = [{"text": f"{word} {n} two", "label": word} for n in range(5) for word in ("sky", "sea", "ice")]
    write(tmp_path, "test", rows)
    task = ProbeTask("colours", str(tmp_path), classes=("ice", "sea", "sky"))
    records = records_of(Probe(task=task, tokenizer=str(tokenizer), random_labels=False, tolerance=1e-4), model)
    found = [value_of(records, "accuracy", layer, split="test") for layer in range(LAYERS + 1)]
    assert max(record.value for record in found) <= 10 / 15
    loss = value_of(records, "log_loss", 1, split="test")
    assert math.isfinite(loss.value)
    assert (loss.n, loss.tags["num_unseen"]) == (10, 5)
    assert value_of(records, "accuracy", None, split="test", reference="majority").tags["num_unseen_test_rows"] == 5


def test_sizes_are_nested_shares_of_one_permutation():
    assert sizes(640) == [20, 40, 80, 160, 320, 640]
    assert sizes(50) == [3, 6, 12, 25, 50]
    small, large = subsets(640, 20, 5, 0), subsets(640, 80, 5, 0)
    assert all(torch.equal(few, more[:20]) for few, more in zip(small, large, strict=True))
    assert len({tuple(few.tolist()) for few in small}) == 5
    (whole,) = subsets(640, 640, 5, 0)
    assert torch.equal(whole, torch.arange(640))
    record = summarize_seeds("accuracy", [0.1, 0.2, 0.6], layer=1, tags={})
    assert record.value == pytest.approx(0.3)
    assert (record.stderr, record.n) == (pytest.approx(np.std([0.1, 0.2, 0.6], ddof=1) / math.sqrt(3)), 3)
    assert record.high - record.value == pytest.approx(4.302653 * record.stderr, rel=1e-5)


def test_a_sweep_of_sizes_equals_scikit_learns_probe_on_each_subset(model, tokenizer, tmp_path):
    task = written_task(tmp_path)
    data = task.load()
    train = data.train_and_validation()
    sweep = SampleSizeSweep(task=task, tokenizer=str(tokenizer), layers=[0, 2], num_seeds=2, c=0.3, **TIGHT)
    records = records_of(sweep, model)
    features, held_out = (features_of(model, tokenizer, split.texts, 2) for split in (train, data.test))
    for size in (22, 90):
        accuracies, losses = [], []
        for subset in subsets(90, size, 2, 0):
            scaler = StandardScaler().fit(features[subset])
            labels = train.targets.numpy()[subset]
            sklearn = LogisticRegression(C=0.3, tol=1e-10, max_iter=20000).fit(
                scaler.transform(features[subset]), labels
            )
            share = sklearn.predict_proba(scaler.transform(held_out))
            accuracies.append(np.mean(share.argmax(1) == data.test.targets.numpy()))
            losses.append(log_loss(data.test.targets.numpy(), share, labels=[0, 1, 2]))
        found = value_of(records, "accuracy", 2, split="test", train_rows=size)
        assert found.value == pytest.approx(np.mean(accuracies))
        assert found.n == (1 if size == 90 else 2)
        assert value_of(records, "log_loss", 2, split="test", train_rows=size).value == pytest.approx(
            np.mean(losses), rel=1e-4
        )
    assert {record.layer for record in records} == {0, 2}
    assert {record.tags["train_rows"] for record in records} == {2, 5, 11, 22, 45, 90}


def test_another_tokenizer_gives_another_data_hash(tokenizer, tmp_path):
    options = {"task": written_task(tmp_path / "data"), "tokenizer": str(tokenizer)}
    other = tmp_path / "other"
    save_tokenizer(train_bpe(["apple sky leaf", "one two three"] * 9, 270), other)
    assert Probe(**{**options, "tokenizer": str(other)}).data_hash() != Probe(**options).data_hash()
    assert Probe(**options).data_hash() == Probe(**options).data_hash()


def test_wrong_options_are_refused_in_one_sentence(model, tokenizer, tmp_path):
    given = {"task": written_task(tmp_path), "tokenizer": str(tokenizer)}
    for analysis, sentence in (
        (Probe(**given, max_tokens=0), "max_tokens: expected more than the 0 special tokens of every text, got 0"),
        (SampleSizeSweep(**given, layers=[9]), r"sample_sizes/colours: expected layers from 0 to 3, got \[9\]"),
    ):
        with pytest.raises(InputError, match=sentence):
            analysis.check(model)


def test_a_tokenizer_trained_on_a_corpus_is_found_by_its_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_LAYERS_CACHE", str(tmp_path / "cache"))
    lines = [f"the apple rose {n} grass leaf frog {n + 1} sky sea ice and one two three four" for n in range(60)]
    corpus = str(tmp_path / "corpus")
    Path(corpus).mkdir()
    for split in ("train", "validation"):
        (Path(corpus) / f"{split}.txt").write_text("\n".join([split, *lines]))
    task = written_task(tmp_path / "task")
    probe = Probe(task=task, tokenizer="bpe:280", corpus=corpus)
    found = load_tokenizer(str(prepared(corpus, "bpe:280").tokenizer_path))
    assert probe.tokenizer_hash() == tokenizer_hash(found.tokenizer)
    with pytest.raises(InputError, match="tokenizer: bpe:280 is trained on a corpus: name that as corpus"):
        Probe(task=task, tokenizer="bpe:280").data_hash()


def test_a_curve_reports_how_many_of_its_probes_have_not_converged(model, tokenizer, tmp_path):
    probe = Probe(task=written_task(tmp_path), tokenizer=str(tokenizer), max_iterations=1, random_labels=False)
    records = records_of(probe, model)
    flagged = {r.layer for r in records if r.layer and r.tags.get("num_not_converged")}
    curves = [r for r in records if "of" in r.tags]
    assert flagged
    assert curves
    assert {r.tags.get("num_not_converged") for r in curves} == {len(flagged)}
