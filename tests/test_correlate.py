"""Correlation over models: the values taken, the warnings, and the published numbers."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lit_layers.correlate import correlate, published
from lit_layers.correlate.model_table import ModelTable, read_file, read_run_models, table_of_models
from lit_layers.errors import InputError
from lit_layers.figures.labels import p_equation
from lit_layers.functional.correlation import groupwise_correlation, partial_correlation, pearson
from lit_layers.records import Record, ScalarLog
from tests.support.written import write


def read_runs(folders: list[Path], **options) -> ModelTable:
    return table_of_models(read_run_models(folders), **options)


def add(root: Path, run: str, step: int | None, analysis: str, *found: Record, **provenance) -> None:
    write(root, analysis, found, run=run, step=step, provenance=provenance)


def couplings(value: float, k: int, *, chance: float = -0.01) -> list[Record]:
    return [
        Record(metric="coupling", value=value, low=value - 0.1, high=value + 0.1, n=8, tags={"k": k, "num_tied": 1}),
        Record(metric="random_coupling", value=chance, tags={"k": k}),
        Record(metric="excess_coupling", value=(value - chance) / (1 - chance), tags={"k": k}),
        Record(metric="coupling_by_distance", value=9.0, tags={"k": k, "distance": 1}),
    ]


def comparison(root: Path, names: str = "abcd") -> Path:
    """Write pretrained models, each with two K, a metric per layer, and its width."""
    for number, name in enumerate(names):
        pairs = couplings(0.1 * number, 3)
        pairs += couplings(0.2 + 0.1 * number, 3 + number) if number else []
        layers = [Record(metric="loss", value=3 - layer - 0.1 * number, layer=layer) for layer in range(3)]
        for analysis, found in {"coupling": pairs, "lens": layers}.items():
            add(root, f"org/{name}", None, analysis, *found, width=30 + 10 * number)
    return root


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Any]:
    """Return the arguments that read these models, with a file of scores."""
    file = scores(tmp_path / "scores.csv")
    names = {"metric": "coupling/coupling[k=3]", "score": f"{file}:arc"}
    return {"folders": [comparison(tmp_path / "models")], **names}


def grid(root: Path, cells: int = 6) -> Path:
    """Write trained models: a folder each, with two steps, scalars, and recipe options."""
    for number in range(cells):
        folder, odd = root / f"cell{number}", number % 2
        for step, value in ((0, 0.0), (10, 0.5 + 0.01 * number**2 + 0.1 * odd)):
            add(folder, f"cell{number}", step, "coupling", *couplings(value, 4))
        log = ScalarLog(folder / "metrics.jsonl")
        of_steps = {0: 0.1 + 0.001 * number, 5: 0.9 - 0.01 * number, 10: 0.7 + 0.02 * number + 0.05 * odd}
        for step, accuracy in of_steps.items():
            log.log(step, {"validation/accuracy": accuracy})
        log.close()
        options = {"drop_path_rate": 0.1 * odd, "weight_decay": 0.01 * number, "lr": 0.001}
        config = {"model": {"class_path": "x.Y", "init_args": options}}
        about = {"run": f"cell{number}", "model": {"parameters": 1000 + number}, "config": config}
        (folder / "run.json").write_text(json.dumps(about))
    return root


def scores(path: Path) -> Path:
    path.write_text("model,arc,family\nb,40,x\norg/a,30,x\nc,55,y\nd,50,y\n")
    return path


def column_of(table: ModelTable, column: str) -> dict[str, float]:
    return dict(zip(table.frame["model"], table.frame[column].tolist(), strict=True))


# ---------------------------------------------------------------------------------------- which value is taken


def test_models_are_joined_with_a_file_by_their_whole_name_or_its_last_part(models):
    table = read_runs(**models)
    expected = {
        "arc": [30, 40, 55, 50],
        "coupling": pytest.approx([0.0, 0.1, 0.2, 0.3]),
        "family": ["x", "x", "y", "y"],
        "width": [30, 40, 50, 60],
        "random_coupling": [-0.01] * 4,
        "depth": [2, 2, 2, 2],  # from the last layer measured
    }
    assert {column: [column_of(table, column)[name] for name in "abcd"] for column in expected} == expected
    assert (table.baseline, table.corrected) == ("random_coupling", "excess_coupling")


def test_a_layerwise_metric_is_taken_at_the_last_or_the_requested_layer(models):
    for asked, value in (({}, 0.9), ({"layer": 0}, 2.9), ({"layer": "last"}, 0.9)):
        assert column_of(read_runs(**models | {"metric": "loss", **asked}), "loss")["b"] == pytest.approx(value)
    other = read_runs(**models | {"score": "lens/loss"})
    assert column_of(other, "lens/loss") == pytest.approx({"a": 1.0, "b": 0.9, "c": 0.8, "d": 0.7}), "a score, too"


def test_the_value_of_the_whole_model_is_preferred_to_layers_pairs_and_references(tmp_path):
    places = [{"layer": 1, "other_layer": 2}, {"layer": 3}]
    places += [{"tags": tags} for tags in ({"reference": "majority"}, {"distance": 1}, {"statistic": "median"})]
    found = [Record(metric="m", value=5.0 + number, **place) for number, place in enumerate(places)]
    for number, name in enumerate("abc"):
        own, score = Record(metric="m", value=0.5 + number), Record(metric="s", value=1.0 - number)
        add(tmp_path, name, None, "x", *found[:2], own, *found[2:], score)
    assert column_of(read_runs([tmp_path], metric="m", score="x/s"), "m") == {"a": 0.5, "b": 1.5, "c": 2.5}
    with pytest.raises(InputError, match="m is 6 for all"):
        correlate(read_runs([tmp_path], metric="m", score="x/s", layer=3))


def test_models_measured_with_different_options_are_not_compared(tmp_path):
    def found(number: int, **tags) -> list[Record]:
        return [Record(metric="coupling", value=0.1 * number, tags=tags), Record(metric="loss", value=3.0 - number)]

    names = ("coupling/coupling", "coupling/loss")
    for number, tags in enumerate(({"k": 4}, {"k": 8}, {"k": 8, "dtype": "bfloat16"})):
        add(tmp_path, f"org/{number}", None, "coupling", *found(number, **tags))
    unlike = "coupling/coupling is k=8 of org/1; k=8,dtype=bfloat16 of org/2: .* choose one by its tags"
    for which, (metric, score) in {"metric": names, "score": names[::-1]}.items():
        with pytest.raises(InputError, match=f"{which}: {unlike}"):
            read_runs([tmp_path], metric=metric, score=score)
    add(tmp_path, "org/2", None, "coupling", *found(2))
    with pytest.raises(InputError, match="k=8 of org/1; no tag of org/2"):
        read_runs([tmp_path], metric=names[0], score=names[1])


def test_the_last_checkpoint_of_a_run_counts_or_the_requested_step(tmp_path):
    root, names = grid(tmp_path / "grid"), {"metric": "coupling", "score": "validation/accuracy"}
    table = read_runs([root], **names)
    assert column_of(table, "step") == {f"cell{n}": 10 for n in range(6)}
    columns = {"coupling": 0.69, "validation/accuracy": 0.81, "weight_decay": 0.03, "parameters": 1003}
    assert {column: column_of(table, column)["cell3"] for column in columns} == pytest.approx(columns)
    assert "lr" not in table.frame.columns, "the same in all of them"
    early = read_runs([root], **names, step=0)
    assert set(column_of(early, "coupling").values()) == {0.0}
    assert column_of(early, "validation/accuracy")["cell3"] == pytest.approx(0.103)
    with pytest.raises(InputError, match="cell0: no coupling/coupling with step 7"):
        read_runs([root], **names, step=7)


def test_models_without_a_value_are_left_out_and_reported(models):
    (root,) = models["folders"]
    comparison(root, "abcde")
    add(root, "org/s", None, "coupling", *couplings(0.9, 3), audit="suspect: identical weights")
    write(root, "coupling", [], run="org/f", error="out of memory")
    table = read_runs(**models)
    assert list(table.frame["model"]) == ["a", "b", "c", "d"]
    assert table.left_out == {
        "org/e": "no arc",
        "org/s": "all its checkpoints are suspect",
        "org/f": "no coupling/coupling with k = 3",
    }
    assert correlate(table, resamples=100).left_out == table.left_out


def test_a_run_without_measurements_is_reported_by_name(tmp_path):
    root = grid(tmp_path / "grid", 4)
    (root / "cell2" / "measurements.jsonl").unlink()
    (root / "scores.csv").write_text("run,accuracy\n" + "".join(f"cell{n},{n * n}\n" for n in range(4)))
    (root / "cell1.json").write_text("{}")
    table = read_runs([root], metric="coupling/coupling", score=f"{root / 'scores.csv'}:accuracy")
    assert table.left_out == {"cell2": "no coupling/coupling"}
    assert column_of(table, "accuracy") == {"cell0": 0, "cell1": 1, "cell3": 9}


def test_folders_with_equal_run_names_are_named_by_their_paths(tmp_path):
    for name in ("one", "two"):
        grid(tmp_path / name, 2)
    table = read_runs([tmp_path / "one", tmp_path / "two"], metric="coupling", score="validation/accuracy")
    assert len(set(table.frame["model"])) == 4
    with pytest.raises(InputError, match="hold one model more than once"):
        read_runs([tmp_path / "one", tmp_path / "one"], metric="coupling", score="validation/accuracy")


def test_wrong_input_is_one_sentence(models):
    file = models["score"].removesuffix(":arc")
    for options, sentence in (
        ({"metric": "coupling/coupling"}, "org/b has 2 variants (k=3; k=4): choose one by its tags"),
        ({"metric": "coupling[k=5]"}, "org/a: no coupling/coupling with k = 5, it has k = 3"),
        ({"score": "lens/los"}, "no model has 'lens/los', neither as a scalar of training nor as ANALYSIS/METRIC"),
        ({"score": "missing.csv:arc"}, "cannot read missing.csv: [Errno 2] No such file"),
        ({"score": f"{file}:family"}, "expected numbers in column 'family' of"),
    ):
        with pytest.raises(InputError, match=re.escape(sentence)):
            read_runs(**models | options)


def test_a_file_with_all_columns_is_a_table_of_models_and_others_are_refused(tmp_path):
    frame = pd.DataFrame({"name": list("abcd"), "m": [1, 2, 3, 5.0], "random_m": [0.1] * 4, "acc": [1, 3, 2, None]})
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_file(tmp_path / "t.parquet", metric="m", score="acc")
    assert table.left_out == {"d": "no acc"}
    assert table.baseline == "random_m"
    assert correlate(table, resamples=100).n == 3
    few = "expected at least 3 models with a metric and a score, got 2 (b: no acc)"
    for text, sentence in (
        ("who,m,acc\na,1,2\n", "no column that names the models (model, run, name); it has: who, m, acc"),
        ("model,m,acc\na,1,2\na,2,3\nb,1,1\nc,4,5\n", "more than one row for a"),
        ("model,m,acc\na,1,2\nb,2,\nc,3,x\n", "expected numbers in column 'acc'"),
        ("model,m,acc\na,1,2\nb,2,\nc,3,3\n", few),
        ("", "cannot read"),
    ):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(InputError, match=re.escape(sentence)):
            read_file(tmp_path / "t.csv", metric="m", score="acc")


# ---------------------------------------------------------------------------------------- what is said


def table_of(**columns) -> ModelTable:
    n = len(columns["m"])
    frame = pd.DataFrame({"model": [f"m{number}" for number in range(n)], **columns})
    return ModelTable(frame=frame, metric="m", score="s")


def some(n: int = 20, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    width = 2.0 ** rng.integers(6, 12, n)
    m = rng.standard_normal(n)
    return {"m": m, "s": m + rng.standard_normal(n), "width": width}


def test_every_row_has_the_coefficient_it_names():
    columns = some() | {"tied": np.repeat([1, 2, 3, 4], 5)}
    table = table_of(**columns)
    found = correlate(table, given=["width", "tied"], group="tied", resamples=200)
    rows = {row.name: row for row in found.rows}
    m, s, width, tied = (columns[name] for name in ("m", "s", "width", "tied"))
    assert rows["Pearson r"].value == pearson(m, s).value
    assert rows["R²"].value == pytest.approx(pearson(m, s).value ** 2)
    assert rows["Partial r given log width"].value == partial_correlation(m, s, [np.log(width)]).value
    both = rows["Partial r given log width and tied"]
    assert both.value == partial_correlation(m, s, [np.log(width), tied]).value
    assert both.df == 20 - 2 - 2
    assert found.groups[0].value == groupwise_correlation(m, s, list(tied)).value
    assert [(row.name, row.n) for row in found.groups[1:]] == [(f"tied {n}", 5) for n in (1, 2, 3, 4)]
    assert found.groups[2].value == pearson(m[5:10], s[5:10]).value
    assert all(row.low <= row.value <= row.high for row in found.rows if row.low is not None)
    assert (rows["R²"].low, rows["R²"].high) == pytest.approx(
        (rows["Pearson r"].low ** 2, rows["Pearson r"].high ** 2), abs=0.01
    )
    assert found.covariates[0].r2_score == pytest.approx(pearson(s, np.log(width)).value ** 2)


def test_a_covariate_is_controlled_for_the_models_that_have_it():
    columns = some()
    columns["depth"] = np.where(np.arange(20) < 15, np.arange(20) % 4 + 2.0, math.nan)
    (row,) = [row for row in correlate(table_of(**columns), resamples=100).rows if "depth" in row.name]
    assert row.n == 15
    expected = partial_correlation(columns["m"][:15], columns["s"][:15], [np.log(columns["depth"][:15])])
    assert row.value == expected.value


def test_models_without_a_requested_column_are_named(tmp_path):
    columns = some()
    columns["tokens"] = np.arange(20) * 1e6  # no tokens at step 0: it has no logarithm
    columns["tokens"][5] = math.nan
    columns["family"] = np.array([None, *"ab" * 9, "a"], dtype=object)
    found = correlate(table_of(**columns), given=["tokens"], group="family", resamples=100)
    (row,) = [row for row in found.rows if "tokens" in row.name]
    assert row.n == 18
    first, sixth = table_of(**columns).frame["model"][[0, 5]]
    assert found.warnings == [
        f"Training tokens: left out where it is held fixed, because they have none above 0: {first}, {sixth}.",
        f"family: left out where it is held fixed, because they have none: {first}.",
    ]


def test_a_score_does_not_explain_itself():
    columns = some()
    columns["tokens"] = np.exp(columns.pop("s"))
    found = correlate(replace(table_of(**columns), score="tokens"), resamples=100)
    assert [each.name for each in found.covariates] == ["Log width"]


def test_only_a_metric_that_depends_on_the_width_gets_a_warning():
    columns = some()
    assert correlate(table_of(**columns), resamples=100).warnings == []
    columns["m"] = np.log(columns["width"]) + 0.1 * columns["m"]
    (warning,) = correlate(table_of(**columns), resamples=100).warnings
    assert warning.startswith("m follows log width, R² = 1.00")
    assert "beyond it r =" in warning
    few = {name: column[:5] for name, column in some().items()}
    assert "Only 5 models" in correlate(table_of(**few), resamples=100).warnings[-1]


def test_k_as_a_share_uses_the_width_of_each_model_and_the_corrected_metric_is_shown(models):
    table = read_runs(**models | {"metric": "coupling[k=0.1]"})
    assert column_of(table, "k") == {"a": 3, "b": 4, "c": 5, "d": 6}
    assert column_of(table, "coupling") == pytest.approx({"a": 0.0, "b": 0.3, "c": 0.4, "d": 0.5})
    expected = pearson(table.frame["excess_coupling"], table.frame["arc"]).value
    assert correlate(table, resamples=100).corrected[0].value == pytest.approx(expected)


def test_wrong_columns_are_one_sentence():
    columns = some() | {"word": ["w"] * 20, "own": np.arange(20)}
    columns["double"] = 2 * columns["m"]
    for options, sentence in (
        ({"given": ["widht"]}, "given: no column 'widht'; did you mean width?"),
        ({"given": ["model"]}, "given: no column 'model'"),
        ({"group": "famly"}, "group: no column 'famly'"),
        ({"given": ["word"]}, "given: expected a column of numbers, 'word' has 'w'"),
        ({"given": ["double"]}, "given: double leaves nothing to correlate"),
        ({"group": "own"}, "group: expected groups of several models"),
    ):
        with pytest.raises(InputError, match=re.escape(sentence)):
            correlate(table_of(**columns), resamples=100, **options)
    with pytest.raises(InputError, match="undefined: m is 3 for all 20 models"):
        correlate(table_of(**(some() | {"m": np.full(20, 3.0)})))


# ---------------------------------------------------------------------------------------- published


def test_the_findings_of_the_published_table_are_the_published_numbers():
    frame = published().frame
    assert len(frame) == 28
    alone = 1 - 1 / np.sqrt(np.floor(0.1 * frame["width"].to_numpy(float)))
    assert frame["width_alone"].to_numpy(float) == pytest.approx(alone)
    assert np.abs(frame["coupling"] - alone).mean() == pytest.approx(0.0038, abs=5e-5)
    found = correlate(published(), resamples=200)
    rows = {row.name: row for row in [*found.rows, *found.groups]}
    assert rows["R²"].value == pytest.approx(0.80, abs=0.005)
    assert rows["Pearson r"].p == pytest.approx(1.4e-10, rel=0.05)
    partial = rows["Partial r given coupling by width alone"]
    assert (partial.value, partial.p) == (pytest.approx(0.57, abs=0.005), pytest.approx(0.002, abs=0.0005))
    for width, n, r, p in ((4096, 11, 0.59, 0.06), (2048, 6, 0.30, 0.56)):
        row = rows[f"Width {width}"]
        assert (row.n, row.value, row.p) == (n, pytest.approx(r, abs=0.005), pytest.approx(p, abs=0.005))
    covariates = {one.name: (one.r2_metric, one.r2_score) for one in found.covariates}
    assert covariates["Coupling by width alone"] == pytest.approx((0.93, 0.71), abs=0.005)
    assert covariates["Log width"][1] == pytest.approx(0.73, abs=0.0051)
    assert "follows coupling by width alone, R² = 0.93; beyond it r = 0.568 (p = 0.002)" in found.warnings[0]


def test_the_score_of_a_run_is_that_of_the_step_of_its_metric(tmp_path):
    """Models measured at different steps are also reported."""
    root = grid(tmp_path / "sweep")
    early = root / "cell0" / "measurements.jsonl"
    early.write_text(early.read_text().splitlines()[0] + "\n")  # this run stopped before the last checkpoint
    table = read_runs([root], metric="coupling/coupling", score="validation/accuracy")
    assert column_of(table, "validation/accuracy")["cell0"] == 0.1, "at step 0"
    assert "different steps, 0 to 10" in " ".join(correlate(table, resamples=100).warnings)


def test_no_p_value_is_zero():
    texts = {0.0: "p < 1e-300", 1.44e-10: "p = 1.4e-10", 0.0571: "p = 0.057", 0.0008: "p = 8.0e-4"}
    assert {p: p_equation(p) for p in texts} == texts
