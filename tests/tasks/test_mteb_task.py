"""Scores of layers equal independent evaluations in float64 and those of mteb, and survive interruptions."""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.cluster import MiniBatchKMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, v_measure_score

from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.records import AXES, Record
from lit_layers.tasks.catalogue import resolve
from lit_layers.tasks.embeddings import LayerEncoder, TaskEmbeddings
from lit_layers.tasks.mteb_scores import mteb_analyses
from lit_layers.tasks.mteb_tasks import MtebScorer, open_task
from lit_layers.tasks.text_features import text_features
from tests.support.labelled_texts import saved_bert
from tests.support.measured import records_of
from tests.support.tiny_models import tiny
from tests.tasks.tiny_tasks import NAMES, embedding_of, encoded, saved_model, spoil_, task, write, write_tiny_data

Vectors = Callable[[list[str]], np.ndarray]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> tuple[Path, Path]:
    """The folders of the data and of the model."""
    root = tmp_path_factory.mktemp("mteb")
    saved_model(root / "model")
    return write_tiny_data(root / "data"), root / "model"


@pytest.fixture(scope="module")
def scored(home, tmp_path_factory) -> Callable[[str], list[Record]]:
    """A function that returns the records of a tiny task, computed at the first call."""
    root = tmp_path_factory.mktemp("scored")
    return functools.cache(lambda name: list(records_of(task(name, *home, root), saved_model(home[1]))))


def vectors(model: Path, layer: int) -> Vectors:
    """Return a function that embeds texts in float64 without the store."""
    view = saved_model(model)

    def embed(texts: list[str]) -> np.ndarray:
        return text_features(view, encoded(model, list(texts)), pooling="mean").layer(layer).double().numpy()

    return embed


def columns(data: Path, file: str, *names: str) -> list[list[Any]]:
    table = pq.read_table(data / file)
    return [table[name].to_pylist() for name in names]


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)


def classification(data: Path, embed: Vectors) -> float:
    texts, labels = columns(data, "banking77/train.parquet", "text", "label")
    test, truth = columns(data, "banking77/test.parquet", "text", "label")
    train, unseen, hits, order = embed(texts), embed(test), [], list(range(len(texts)))
    for _ in range(10):
        np.random.RandomState(42).shuffle(order)
        chosen = [row for label in set(labels) for row in [row for row in order if labels[row] == label][:8]]
        chosen.sort(key=order.index)
        probe = LogisticRegression(max_iter=100, random_state=42).fit(train[chosen], np.array(labels)[chosen])
        hits.append((probe.predict(unseen) == np.array(truth)).mean())
    return float(np.mean(hits))


def pair_classification(data: Path, embed: Vectors) -> float:
    first, second, labels = columns(data, "glue/mrpc_test.parquet", "sentence1", "sentence2", "label")
    a, b, relevant = embed(first), embed(second), np.array(labels)
    near = [cosines(a, b), -np.abs(a - b).sum(1), -np.linalg.norm(a - b, axis=1), (a * b).sum(1)]
    return max(average_precision_score(relevant, scores.round(5)) for scores in near)


def sts(data: Path, embed: Vectors) -> float:
    first, second, gold = columns(data, "glue/stsb_test.parquet", "sentence1", "sentence2", "score")
    return float(spearmanr(gold, cosines(embed(first), embed(second)).round(6))[0])


def reranking(data: Path, embed: Vectors) -> float:
    names = ("query_id", "query", "candidate", "relevant")
    rows = list(zip(*columns(data, "reranking/test.parquet", *names), strict=True))
    found = []
    for number in range(7):
        mine = [row for row in rows if row[0] == number]
        relevant = np.array([row[3] for row in mine])
        if len(set(relevant.tolist())) < 2:
            continue
        near = cosines(embed([row[1] for row in mine]), embed([row[2] for row in mine])).round(6)
        order = sorted(range(len(mine)), key=lambda row: (-near[row], -relevant[row]))
        ranked = relevant[order]
        found.append((np.cumsum(ranked) / np.arange(1, len(ranked) + 1))[ranked == 1].mean())
    return float(np.mean(found))


def clustering(data: Path, embed: Vectors) -> float:
    found = []
    for texts, truth in zip(*columns(data, "twenty_newsgroups/sets.parquet", "sentences", "labels"), strict=True):
        points = embed(texts).astype(np.float32)
        model = MiniBatchKMeans(n_clusters=3, batch_size=500, n_init="auto", random_state=42).fit(points)
        found.append(v_measure_score(truth, model.labels_))
    return float(np.mean(found))


SLOW = [
    pytest.param(name, marks=pytest.mark.soak) for name in ("Banking77Classification", "TwentyNewsgroupsClustering")
]
REFERENCES = {  # the evaluation, its tolerance, the number of scored rows
    "Banking77Classification": (classification, 1e-9, 30),
    "TwitterURLCorpus": (pair_classification, 1e-9, 40),
    "STSBenchmark": (sts, 2e-3, 40),  # float32 cosines have near ties
    "AskUbuntuDupQuestions": (reranking, 1e-5, 7),  # mteb rounds to five decimal places
    "TwentyNewsgroupsClustering": (clustering, 1e-9, 500),
}


@pytest.mark.parametrize("name", [*NAMES[1:4], *SLOW])
def test_a_score_equals_that_of_an_independent_evaluation(home, scored, name):
    reference, tolerance, number = REFERENCES[name]
    found = scored(name)
    assert [(each.metric, each.layer, each.n) for each in found] == [("main_score", n, number) for n in range(4)]
    spec = resolve([name])[0]
    tags = {"task": name, "domain": spec.domain, "score": spec.score, "pooling": "mean", "states": "resid"}
    for layer in (0, 2):
        assert found[layer].tags.items() >= tags.items()
        assert found[layer].value == pytest.approx(reference(home[0], vectors(home[1], layer)), abs=tolerance)


@pytest.mark.parametrize("name", SLOW)
def test_a_layer_scores_as_mteb_scores_a_new_task_and_as_it_scores_alone(home, scored, name, tmp_path):
    one = task(name, *home, tmp_path)
    view = saved_model(home[1])
    embeddings = TaskEmbeddings(view, **embedding_of(home[1]))
    fresh = open_task(one.task, seed=42)
    options = {"batch_size": 4, "show_progress_bar": False}
    plain = fresh.evaluate(LayerEncoder(embeddings, 2), "test", encode_kwargs=options)
    assert scored(name)[2].value == plain["default"]["main_score"]
    assert list(records_of(task(name, *home, tmp_path, layers=(2,)), view)) == [scored(name)[2]]
    stored = json.loads(next(tmp_path.rglob("layer-002.json")).read_text())
    assert stored["mteb_version"].startswith("2.")
    assert ("another draw" in stored.get("difference", "")) == ("v_measures" in stored["scores"])


def test_an_interrupted_task_resumes_and_a_damaged_result_is_computed_again(home, scored, tmp_path, monkeypatch):
    name, evaluated, plain = "TwitterURLCorpus", [], MtebScorer.evaluate

    def interrupted(prepared: MtebScorer, encoder: LayerEncoder) -> dict[str, Any]:
        if encoder.layer == 2 and not evaluated.count(2):
            evaluated.append(2)
            raise KeyboardInterrupt
        evaluated.append(encoder.layer)
        return plain(prepared, encoder)

    monkeypatch.setattr(MtebScorer, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(records_of(task(name, *home, tmp_path), saved_model(home[1])))
    file = next(tmp_path.rglob("layer-001.json"))
    file.write_text(file.read_text()[:40])
    for _ in range(2):
        assert list(records_of(task(name, *home, tmp_path), saved_model(home[1]))) == scored(name)
        assert evaluated == [0, 1, 2, 1, 2, 3]


def test_other_options_never_find_stored_results(home, tmp_path):
    options = [{}, {"pooling": "last"}, {"states": "normed"}, {"max_tokens": 4}, {"seed": 1}]
    for number, each in enumerate(options, 1):
        scores = list(records_of(task("TwitterURLCorpus", *home, tmp_path, layers=(1,), **each), saved_model(home[1])))
        assert len(scores) == 1
        assert all(r.tags.keys().isdisjoint(AXES) for r in scores)  # otherwise pages and correlate would not see curves
        assert len(list((tmp_path / "mteb").glob("*/*/*"))) == number, f"{each} found results of others"


def test_other_data_and_other_weights_never_find_stored_results(home, tmp_path):
    data, changed = write_tiny_data(tmp_path / "data"), saved_model(home[1])
    next(changed.blocks[1].parameters()).data.mul_(1.5)

    def scored(view: LayeredModel) -> Record:
        (record,) = records_of(task("STSBenchmark", data, home[1], tmp_path, layers=(3,)), view)
        return record

    first = scored(saved_model(home[1]))
    assert scored(changed) != first
    table = pq.read_table(data / "glue/stsb_test.parquet")
    pq.write_table(table.slice(3), data / "glue/stsb_test.parquet")
    assert scored(saved_model(home[1])).n == (first.n or 0) - 3


def test_layers_that_are_not_finite_have_no_score_and_fail_the_task_if_there_are_no_others(home, scored, tmp_path):
    view = saved_model(home[1])
    spoil_(view, 3)
    found, expected = list(records_of(task("STSBenchmark", *home, tmp_path), view)), scored("STSBenchmark")
    assert [replace(record, tags=expected[0].tags) for record in found] == expected[:3]
    assert {record.tags["num_undefined"] for record in found} == {1}
    file = next(tmp_path.rglob("layer-003.json"))
    assert "at layer 3 are not finite" in json.loads(file.read_text())["undefined"]
    with pytest.raises(InputError, match="layer 3 are not finite"):
        list(records_of(task("STSBenchmark", *home, tmp_path, layers=(3,)), view))


def test_a_half_precision_model_is_scored_like_its_checkpoint_in_float32(home, tmp_path):
    half = saved_model(home[1]).model.to(torch.bfloat16)
    found = list(records_of(task("STSBenchmark", *home, tmp_path / "half"), LayeredModel(half)))
    assert found == list(records_of(task("STSBenchmark", *home, tmp_path / "full"), LayeredModel(half.float())))


def test_a_layer_with_an_undefined_score_has_no_record_and_is_counted(home, tmp_path):
    saved_bert(tmp_path)
    found = list(records_of(task("STSBenchmark", home[0], tmp_path, tmp_path, pooling="cls"), saved_model(tmp_path)))
    assert [record.layer for record in found] == [1, 2, 3], "at layer 0 every text has the vector of [CLS]"
    assert {record.tags["num_undefined"] for record in found} == {1}
    file = next(tmp_path.rglob("layer-000.json"))
    assert json.loads(file.read_text())["main_score"] is None
    with pytest.raises(InputError, match="expected more than the 2 special tokens of every text, got 2"):
        task("STSBenchmark", home[0], tmp_path, tmp_path, max_tokens=2).check(saved_model(tmp_path))


def test_a_task_does_not_change_the_random_state(home, tmp_path):
    def seeded() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seeded()
    expected = [random.random(), np.random.rand(), torch.rand(1).item()]
    one = task("TwentyNewsgroupsClustering", *home, tmp_path)
    prepared, view = MtebScorer(open_task(one.task, seed=42), one.task), saved_model(home[1])
    seeded()
    prepared.evaluate(LayerEncoder(TaskEmbeddings(view, **embedding_of(home[1])), 1))
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == expected


@pytest.mark.soak  # one model imports timm
def test_invalid_options_and_models_are_refused(home, tmp_path):
    cases = [
        ({"pooling": "max"}, "expected pooling to be one of .*'mean'.*, got 'max'"),
        ({"states": "raw"}, "expected states to be one of .*'hf'.*, got 'raw'"),
        ({"seed": -1}, "expected seed of at least 0, got -1"),
    ]
    for options, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            task("STSBenchmark", *home, tmp_path, **options).check(saved_model(home[1]))
    with pytest.raises(InputError, match="expected a model of text, got VisionTransformer"):
        task("STSBenchmark", *home, tmp_path).check(LayeredModel(tiny("vit")))


@pytest.mark.soak
def test_metrics_use_the_first_thousand_texts_of_a_published_test_split(home, tmp_path):
    """The table has as many rows as the published split, one of them without words. All texts differ."""
    folder = write_tiny_data(tmp_path / "data")
    first, second = ([f"{name} {row} is a longer text" for row in range(1_379)] for name in ("sentence1", "sentence2"))
    first[7] = " "
    scores = [row % 5 for row in range(len(first))]
    write(folder / "glue" / "stsb_test.parquet", sentence1=first, sentence2=second, score=scores)
    tasks = resolve(["STSBenchmark"], folder)
    _, representation, invariance = mteb_analyses(tasks, metrics=True, tokenizer=str(home[1]), root=tmp_path / "run")
    for given in (representation.batches.texts, invariance.texts):
        assert list(given.texts()) == [*first[:7], *first[8:1000]]
