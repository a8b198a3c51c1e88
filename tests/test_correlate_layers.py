"""Metrics against task scores over layers: input, refusals, warnings, and the published numbers."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lit_layers.cli import main as cli
from lit_layers.correlate import correlate_layers, read_layers
from lit_layers.correlate.model_table import MetricQuery, split
from lit_layers.correlate.pages import write_layers
from lit_layers.errors import InputError
from lit_layers.records import Record
from tests.support.layer_scores import TASKS, add, tables
from tests.support.undrawn import leave_undrawn
from tests.support.written import write


def one_model(root: Path, layers: int = 8, **options) -> tuple[Path, np.ndarray, np.ndarray]:
    metric, scores = tables(layers)
    return add(root / "runs", "org/model", None, scores=scores, metric=metric, **options), metric, scores


def read(*roots: Path, metrics: Sequence[str] = ("prompt_entropy",), scores: str = "mteb", **options):
    return read_layers([*roots], metrics=[*metrics], scores=scores, **options)


def layer_records(name: str, values, **tags) -> list[Record]:
    """Of normed states."""
    tags = {"states": "normed", **tags}
    return [Record(metric=name, value=float(value), layer=n, tags=tags) for n, value in enumerate(values)]


def series(root: Path, count: int = 3) -> Path:
    for number in range(count):
        metric, scores = tables(5 + number, seed=number, sign=1.0 if number == count - 1 else -1.0)
        add(root / f"m{number}", f"org/m{number}", None, scores=scores, metric=metric)
    return root


# ------------------------------------------------------------------------------------------------ what is asked for


def test_a_metric_is_written_with_its_analysis_and_tags():
    assert split("prompt_entropy[a=1,b=x], lidar ,r/d[c=2]") == ["prompt_entropy[a=1,b=x]", "lidar", "r/d[c=2]"]
    wanted = MetricQuery.parse("representation/prompt_entropy[normalization=raw, drop_first=1]")
    assert (wanted.analysis, wanted.name) == ("representation", "prompt_entropy")
    assert wanted.tags == {"normalization": "raw", "drop_first": "1"}
    assert wanted.fits({"normalization": "raw", "drop_first": 1})
    assert not wanted.fits({"normalization": "raw"})
    for text in ("a[b", "a[b]"):
        with pytest.raises(InputError, match="expected NAME, ANALYSIS/NAME or NAME.tag=value"):
            MetricQuery.parse(text)


# ------------------------------------------------------------------------------------------------ what is read


def test_the_metric_on_each_task_is_paired_with_its_scores(tmp_path):
    root, metric, scores = one_model(tmp_path)
    found = read(root)
    (model,) = found.models
    tasks, x, y = model.tables("prompt_entropy", found.first_layer)
    assert tasks == [*TASKS]
    assert np.array_equal(x, metric[:, 1:])
    assert np.array_equal(y, scores[:, 1:])
    assert (model.name, model.step, model.num_layers, found.states) == ("model", None, 8, "normed")


def test_layer_0_is_left_out_unless_requested(tmp_path):
    metric, scores = tables(6)
    metric[:, 0] = np.nan
    root = add(tmp_path, "m", None, scores=scores, metric=metric)
    assert read(root).first_layer == 1
    with pytest.raises(InputError, match="no prompt_entropy at layer 0"):
        read(root, with_layer_0=True)


def test_a_metric_of_one_corpus_pairs_with_every_task_and_the_tasks_own_texts_are_preferred(tmp_path):
    root, metric, _ = one_model(tmp_path)
    common = np.arange(9.0) ** 2
    write(root, "invariance", layer_records("lidar", common), run="org/model")
    write(root, "representation", layer_records("prompt_entropy", 9 + np.arange(9)), run="org/model")
    found = read(root, metrics=["lidar", "representation/prompt_entropy"])
    _, x, _ = found.models[0].tables("lidar", 1)
    assert np.array_equal(x, np.tile(common[1:], (len(TASKS), 1)))
    assert found.common == ["lidar"]
    assert np.array_equal(found.models[0].tables("representation/prompt_entropy", 0)[1], metric)


def test_the_last_step_with_both_that_is_not_suspect_counts_or_the_requested_one(tmp_path):
    for step, verdict in ((0, "clean"), (10, "clean"), (15, "suspect: equal to the final step"), (20, "clean")):
        metric, scores = tables(6, seed=step)
        provenance = {"audit": verdict}
        add(tmp_path, "m", step, scores=scores, metric=metric if step < 20 else None, provenance=provenance)
    assert read(tmp_path).models[0].step == 10
    found = read(tmp_path, step=0)
    assert np.array_equal(found.models[0].scores.loc["BIOSSES"], tables(6, seed=0)[1][2])
    with pytest.raises(InputError, match="no scores and metrics at step 20"):
        read(tmp_path, step=20)


def test_tasks_that_lack_a_layer_are_left_out_with_the_reason(tmp_path):
    metric, scores = tables(8)
    metric[1, 3], scores[2, 5] = np.nan, np.nan
    root = add(tmp_path, "m", None, scores=scores, metric=metric)
    deeper = np.concatenate([metric[3:4], metric[3:4, :1]], axis=1)
    add(root, "m", None, metric=deeper, tasks=TASKS[3:4])
    found = read(root)
    assert found.models[0].left_out["prompt_entropy"] == {
        TASKS[1]: "no prompt_entropy at layer 3",
        TASKS[2]: "no score at layer 5",
        TASKS[3]: "prompt_entropy has layers up to 9, the score up to 8",
    }
    findings = correlate_layers(found, resamples=100)
    assert set(findings.models[0].metrics[0].left_out) == {*TASKS[1:4]}


def test_metric_and_score_of_two_conventions_are_refused(tmp_path):
    for name, tags, states in (("plain", {}, "resid"), ("preset", {"preset": "released_code"}, "hf")):
        root, *_ = one_model(tmp_path / name, metric_states=None, tags=tags)
        with pytest.raises(InputError, match=f"was measured on states {states}, the scores of org/model on normed"):
            read(root)


def test_the_convention_of_the_scores_is_taken_among_several(tmp_path):
    root, metric, _ = one_model(tmp_path)
    add(root, "org/model", None, metric=metric + 5, metric_states=None, analysis="representation_resid")
    found = read(root, metrics=["representation/prompt_entropy"])
    assert np.array_equal(found.models[0].tables("representation/prompt_entropy", 0)[1], metric)
    both = "in more than one analysis: representation/prompt_entropy, representation_resid"
    with pytest.raises(InputError, match=both):
        read(root)


def test_several_variants_are_refused_and_none_is_the_default(tmp_path):
    metric, scores = tables(6)
    add(tmp_path, "r", None, scores=scores)
    for task in TASKS:
        write(tmp_path, f"a/{task}", [r for k in (3, 12) for r in layer_records("m", metric[0] + k, k=k)])
    with pytest.raises(InputError, match=r"m of r has 2 variants \(k=3; k=12\): choose one by its tags"):
        read(tmp_path, metrics=["m"])
    found = read(tmp_path, metrics=["m[k=12]"])
    assert np.array_equal(found.models[0].tables("m[k=12]", 0)[1][0], metric[0] + 12)
    assert found.titles == {"m[k=12]": "M, k = 12"}


@pytest.mark.parametrize("of_metric", [True, False])
def test_models_measured_with_different_options_are_not_compared(tmp_path, of_metric):
    name, analysis = ("prompt_entropy", "representation") if of_metric else ("main_score", "mteb")
    for run, tags in (("a", {}), ("b", {"dtype": "bfloat16"})):
        metric, scores = tables(6)
        add(tmp_path / run, run, None, **({"scores": scores} if of_metric else {"metric": metric}))
        for task in TASKS:
            write(tmp_path / run, f"{analysis}/{task}", layer_records(name, metric[0], **tags), run=run)
    text = "metrics: prompt_entropy" if of_metric else "scores: mteb"
    with pytest.raises(InputError, match=f"{text} is no tag of a; dtype=bfloat16 of b: measure all models alike"):
        read_layers([tmp_path / "a", tmp_path / "b"], metrics=["prompt_entropy"], scores="mteb")


def test_unknown_metrics_tasks_and_layers_are_refused(tmp_path):
    root, *_ = one_model(tmp_path)
    for options, message in (
        ({"metrics": ["promt_entropy"]}, "no model has 'promt_entropy' per layer; did you mean .*prompt_entropy"),
        ({"scores": "mtb"}, "scores: no model has 'mtb' per layer"),
        ({"scores": "scores.csv"}, "scores: cannot read scores.csv: .* No such file"),
    ):
        with pytest.raises(InputError, match=message):
            read(root, **options)


def test_a_metric_without_a_normalization_is_raw(tmp_path):
    metric, scores = tables(6)
    add(tmp_path, "m", None, scores=scores)
    for task, row in zip(TASKS, metric, strict=True):
        other = layer_records("dime", row + 9, normalization="logD")
        write(tmp_path, f"invariance/{task}", [*layer_records("dime", row), *other], run="m")
    names = ["dime", "dime[normalization=raw]", "dime[normalization=logD]"]
    model = read(tmp_path, metrics=names).models[0]
    for name, shift in zip(names, (0, 0, 9), strict=True):
        assert np.allclose(model.tables(name, 0)[1], metric + shift)


def test_models_without_scores_of_their_last_layers_or_with_too_few_layers_are_left_out(tmp_path):
    for name, layers, depth in (("whole", 6, 6), ("part", 6, 12), ("shallow", 3, 3)):
        metric, scores = tables(layers)
        add(tmp_path / name, name, None, scores=scores, metric=metric, provenance={"depth": depth})
    found = read(tmp_path / "whole", tmp_path / "part", tmp_path / "shallow")
    assert [model.name for model in found.models] == ["whole"]
    assert found.left_out == {"part": "scores up to layer 6 of 12", "shallow": "3 layers, expected at least 4"}


def test_scores_of_a_file_meet_metrics_of_runs_and_wrong_layers_are_named(tmp_path):
    root, metric, scores = one_model(tmp_path)
    path, names = tmp_path / "scores.csv", {"scores": str(tmp_path / "scores.csv")}
    long = pd.DataFrame(scores, index=pd.Index(TASKS, name="task")).stack().rename_axis(["task", "layer"])
    frame = long.rename("score").reset_index().assign(model="model")
    means = pd.DataFrame({"model": "model", "task": TASKS, "layer": [np.nan] * len(TASKS), "score": 9.0})
    pd.concat([frame, means]).to_csv(path, index=False)  # rows without a layer are means
    (model,) = read(root, **names).models
    _, x, y = model.tables("prompt_entropy", 0)
    assert np.allclose(x, metric)
    assert np.allclose(y, scores)
    with pytest.raises(InputError, match="expected run folders"):
        read(**names)
    for wrong, message in (
        (frame.replace({"layer": {3: 2.5}}), "expected layers in .*scores.csv, whole numbers from 0, got 2.5"),
        (pd.concat([frame, frame]), "more than one score of model, Banking77Classification, layer 0"),
        (frame.drop(columns="task"), "has no column 'task'"),
    ):
        wrong.to_csv(path, index=False)
        with pytest.raises(InputError, match=message):
            read(root, **names)


# ------------------------------------------------------------------------------------------------ what is said


def test_with_one_model_both_directions_are_reported_and_none_is_chosen(tmp_path):
    root, metric, scores = one_model(tmp_path)
    found = correlate_layers(read(root), resamples=100)
    (model,) = found.models
    rules = [choice.rule for choice in model.choices]
    assert rules == ["min", "max"]
    assert not any(choice.is_chosen for choice in model.choices)
    expected = np.mean([row[1:][own[1:].argmin()] for own, row in zip(metric, scores, strict=True)])
    assert model.choices[0].result.score.value == pytest.approx(expected)
    assert "takes the scores of other models" in found.basis


def test_with_several_models_the_others_choose_the_direction(tmp_path):
    found = correlate_layers(read(series(tmp_path)), resamples=100)
    chosen = {m.model: [c.rule for c in m.choices if c.is_chosen] for m in found.models}
    gains = {m.model: {c.rule: c.result.score.value for c in m.choices} for m in found.models}
    for name, rule in chosen.items():
        others = {d: sum(own[d] for other, own in gains.items() if other != name) for d in ("min", "max")}
        assert rule == [max(others, key=lambda d: others[d])]
    assert chosen["m2"] == ["min"], "its own scores would choose the largest"
    assert gains["m2"]["max"] > gains["m2"]["min"]
    assert "leave one model out" in found.basis


def test_the_metric_is_picked_on_the_other_models_too(tmp_path):
    for number in range(3):
        metric, scores = tables(6, seed=number)
        root = add(tmp_path / f"m{number}", f"m{number}", None, scores=scores, metric=metric)
        noise = np.random.default_rng(number).normal(size=metric.shape)
        add(root, f"m{number}", None, metric=noise, name="lidar", analysis="invariance")
    metrics = ["lidar", "prompt_entropy"]
    found = correlate_layers(read(tmp_path, metrics=metrics), resamples=100)
    picked = [choice for model in found.models for choice in model.choices if choice.metric is None]
    assert [choice.rule for choice in picked] == ["min prompt_entropy"] * 3


def test_the_command_writes_numbers_page_and_pictures(tmp_path, capsys, monkeypatch):
    """Its refusals are in tests/cli/test_refusals.py."""
    leave_undrawn(monkeypatch)
    root = series(tmp_path / "runs")
    out = tmp_path / "out"
    command = ["correlate", str(root), "--metrics", "prompt_entropy", "--scores", "mteb", "--root", str(out)]
    assert cli.main([*command, "--resamples", "100"]) == 0
    assert "Prompt entropy: Spearman rho " in capsys.readouterr().out
    pictures = ("depth_score", "depth_prompt_entropy", *(f"scatter_m{n}_prompt_entropy" for n in range(3)))
    names = {"layers.html", "layers.json", "correlations.csv", "selection.csv", "curves.csv"}
    names |= {f"{picture}{suffix}" for picture in pictures for suffix in (".png", ".svg", ".pdf")}
    assert {path.name for path in out.iterdir()} == names
    table = pd.read_csv(out / "correlations.csv")
    assert len(table) == 3 * 6
    assert not any(column == "p" or column.startswith("p_") for column in table.columns), "no p values over layers"
    assert table.loc[table["coefficient"] == "distance_correlation", "null_noise"].notna().all()
    numbers = json.loads((out / "layers.json").read_text())
    assert numbers["models"][0]["metrics"][0]["tasks"] == [*TASKS]
    page = (out / "layers.html").read_text()
    forms = "mean over tasks of the coefficient", "coefficient of the mean curves"
    for text in (*forms, "random walks", "leave one model out", "Best per task", "no method can count on them"):
        assert text in page
    assert len(pd.read_csv(out / "curves.csv")) == sum((5 + n + 1) * len(TASKS) for n in range(3))


def test_the_page_lists_the_tasks_that_are_left_out(tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    metric, scores = tables(8)
    metric[1, 3] = np.nan
    found = read(add(tmp_path / "r", "<m>", None, scores=scores, metric=metric))
    write_layers(found, correlate_layers(found, resamples=100), tmp_path / "out")
    page = (tmp_path / "out" / "layers.html").read_text()
    assert "EmotionClassification (no prompt_entropy at layer 3)" in page
    assert "<m>" not in page


# ------------------------------------------------------------------------------------------------ published numbers

# Skean et al., stored results of Pythia-410m, layers 0 to 24: tasks, then dCor, rho, tau in both forms.
PUBLISHED = {
    "dime": (29, (0.662, -0.430, -0.300), (0.878, -0.721, -0.553)),
    "infonce": (29, (0.651, 0.404, 0.277), (0.817, 0.604, 0.453)),
    "lidar": (29, (0.658, -0.396, -0.264), (0.868, -0.405, -0.240)),
    "entropy_dataset": (24, (0.649, -0.490, -0.356), (0.853, -0.539, -0.340)),
    "entropy_sentence": (24, (0.664, -0.473, -0.335), (0.834, -0.598, -0.413)),
}
# Score x 100 at the layers chosen, and at the last layer, over the same tasks.
SELECTED = {
    ("dime", "min"): (48.60, 46.51),
    ("infonce", "min"): (46.88, 46.51),
    ("infonce", "max"): (49.48, 46.51),
    ("lidar", "min"): (48.75, 46.51),
    ("entropy_dataset", "min"): (45.62, 43.16),
}


def stem(name: str) -> str:
    """Return the part of the name that a task shares with its data set."""
    return re.sub(r"[^a-z0-9]|classification|clustering|reranking|rr$|^mteb|/test$", "", name.lower())


@pytest.fixture(scope="module")
def stored(realdata, tmp_path_factory) -> tuple[Path, Path]:
    """Return the stored results (test split, English subsets) as a table of scores and a run folder."""
    folder = realdata / "layerwise_reference"
    if not folder.is_dir():
        pytest.skip(f"no layerwise_reference in {realdata}")
    scores = pd.read_parquet(folder / "mteb_layer_scores.parquet")
    kept = (scores["family"] == "Pythia") & (scores["revision"] == "main") & (scores["split"] == "test")
    scores = scores[kept & (scores["size"] == "410m") & scores["subset"].isin(["default", "en", "en-ext", "en-en"])]
    scores = scores.groupby(["task", "layer"])["main_score"].mean().rename("score").reset_index()
    metrics = pd.read_parquet(folder / "representation_metrics.parquet")
    kept = (metrics["family"] == "Pythia") & (metrics["revision"] == "main") & (metrics["size"] == "410m")
    metrics = metrics[kept & metrics["dataset"].str.endswith("/test")]
    tasks = {name: [task for task in {*scores["task"]} if stem(task) in stem(name)] for name in {*metrics["dataset"]}}
    metrics = metrics.assign(task=metrics["dataset"].map(lambda name: next(iter(tasks[name]), None)))
    metrics = metrics.dropna(subset=["task", "value"])
    out = tmp_path_factory.mktemp("stored")
    scores.assign(model="pythia-410m").to_csv(out / "scores.csv", index=False)
    (out / "run").mkdir()
    for (name, task), rows in metrics[metrics["variant"] == "raw"].groupby(["metric", "task"]):
        found = [Record(metric=name, value=row.value, layer=row.layer) for row in rows.itertuples()]
        write(out / "run", f"{name}/{task}", found, run="pythia-410m")
    return out / "scores.csv", out / "run"


@pytest.mark.realdata
def test_the_stored_results_of_pythia_410m_give_the_published_correlations_and_selections(stored):
    scores, run = stored
    found = read(run, metrics=[*PUBLISHED], scores=str(scores), with_layer_0=True)
    assert len(found.models[0].scores) == 32
    (model,) = correlate_layers(found, resamples=200).models
    assert (model.num_layers, model.null.noise, model.null.walk) == pytest.approx((24, 0.34, 0.54), abs=0.01)
    for one in model.metrics:
        tasks, *forms = PUBLISHED[one.metric]
        assert len(one.tasks) == tasks
        assert {"SprintDuplicateQuestions", "TwitterSemEval2015", "TwitterURLCorpus"} <= {*one.left_out}
        for form, expected in zip(("per_task_mean", "of_task_means"), forms, strict=True):
            own = [found.estimate.value for found in one.correlations if found.form == form]
            assert own == pytest.approx(expected, abs=6e-4)
    own = {(c.metric, c.rule): c.result for c in model.choices if c.metric is not None}
    for rule, expected in SELECTED.items():
        chosen = 100 * own[rule].score.value, 100 * own[rule].last.value
        assert chosen == pytest.approx(expected, abs=0.006), rule
    assert own["dime", "min"].best_layer == 17
    whole = 100 * found.models[0].scores.to_numpy().mean(0)
    assert (whole.argmax(), whole.max(), whole[-1]) == pytest.approx((17, 51.92, 46.82), abs=0.006)
