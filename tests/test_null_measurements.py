"""The null of a run is measured once, stored separately from the run's numbers, and drawn with each curve."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import lit_layers
from lit_layers import measure, plots, records, run_data
from lit_layers.analyses import Coupling, LabelProbe, Lens, Trajectory
from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import seed_means
from lit_layers.clock.times_and_order import measure_times, null_step, times_table
from lit_layers.errors import InputError
from lit_layers.functional.emergence.null_differences import lasting_difference
from lit_layers.measuring.offline import analyze_series
from lit_layers.models.build import weights_hash
from lit_layers.models.null import null_model
from lit_layers.report.emergence import run_summary
from lit_layers.report.rendering import sections_of
from lit_layers.series import OneModel, StepFolders
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from tests.support.charts import line
from tests.support.listed_batches import Listed
from tests.support.random_text import RandomText
from tests.support.tiny_training import fit

STEPS, LAST = [0, 1, 2, 3, 4, 5], 6


class Note:
    """A logger that keeps its rows."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


def analyses() -> list:
    return [Trajectory(batches=RandomText()), Lens(batches=RandomText()), Coupling(batches=RandomText(), k=(2,))]


def probe(**options) -> LabelProbe:
    rows = [batch | {"labels": batch["input_ids"][:, 0] % 2} for batch in RandomText(num_batches=6)]
    return LabelProbe(train=Listed(*rows[:4]), test=Listed(*rows[4:]), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run that measured its null, and its module."""
    root = tmp_path_factory.mktemp("nulls") / "run"
    callbacks = [SeriesCheckpoint([LAST], root), EmergenceCallback(analyses(), STEPS, root, null="blocks")]
    return root, fit(root, callbacks, steps=LAST)[1]


def losses_of(root) -> list[float]:
    """Return the losses of the null at layers 0 to 2."""
    lens = records.read_nulls(root)[1]
    return [record.value for record in lens.records if record.metric == "logit_lens_loss"][:3]


def values(measurement) -> dict:
    return {records.key(measurement.analysis, record): record.value for record in measurement.records}


def test_the_null_has_the_numbers_of_the_null_model_and_the_run_is_as_without_it(run, tmp_path):
    root, module = run
    nulls = records.read_nulls(root)
    assert [(m.analysis, m.step) for m in nulls] == [(each.name, LAST) for each in analyses()]
    network = null_model(module.model, "blocks")
    for analysis, found in zip(analyses(), nulls, strict=True):
        expected = measure(network, analysis, run="run", step=LAST)
        torch.testing.assert_close(values(found), values(expected), rtol=0, atol=0, equal_nan=True)
    _, without = fit(tmp_path / "run", [EmergenceCallback(analyses(), STEPS, tmp_path / "run")], steps=LAST)
    assert weights_hash(without.model) == weights_hash(module.model)
    pairs = zip(*(records.read(each / "measurements.jsonl") for each in (root, tmp_path / "run")), strict=True)
    assert all(repr(values(one)) == repr(values(other)) for one, other in pairs)


def test_each_curve_is_drawn_with_its_null(run):
    root, _ = run
    frame, (trajectory, _, coupling) = records.frame(root), records.read_nulls(root)
    of_null = frame[frame["reference"] == "null_blocks"]
    assert sorted(of_null["step"].unique()) == [*STEPS, LAST]
    assert frame["other_layer"].notna().any()
    assert of_null["other_layer"].isna().all(), "pairs of layers are no curves"
    chart = plots.emergence_curves(frame, "coupling")
    grey, value = line(chart, "null: random blocks"), values(coupling)["coupling/coupling/k=2"]
    assert grey.y == pytest.approx([value] * 7, rel=1e-3)
    assert grey.dash == ""
    profile = line(plots.layer_profile(frame, "logit_lens_loss"), "null: random blocks")
    assert profile.y == pytest.approx(losses_of(root), rel=1e-3)
    medians = plots.emergence_curves(frame, "line_shape_score", tags={"statistic": "median"}).series
    assert sum(series.name == "null: random blocks" for series in medians) == 1  # not those of the mean
    layers = plots.emergence_curves(frame, "line_shape_score", analysis=trajectory.analysis).series
    assert sum(series.name == "null: random blocks" for series in layers) > 1
    assert sum(series.name == "null: random blocks" and series.legend for series in layers) == 1
    of_page, _ = sections_of(run_data.read_run(root))
    assert (of_page["reference"] == "null_blocks").sum() == len(of_null)


def test_the_step_from_which_a_curve_differs_is_that_of_its_prompts(run):
    root, _ = run
    found = {curve.tag_text + curve.metric: curve for curve in curves_of(root) if curve.layer is None}
    null = records.read_nulls(root)[0]
    of_null = records.read_values(records.null_folder(root, "blocks"), null)
    measured = [m for m in records.read(root / "measurements.jsonl") if m.analysis == null.analysis]
    by_step = [records.read_values(root, m) for m in measured]
    for metric in ("line_shape_score", "expodistance"):
        name = f"trajectory/{metric}"
        rows = np.stack([each[name] for each in by_step], axis=1).astype(float) - of_null[name][:, None]
        index = lasting_difference(rows.mean(0), replicates=rows)
        assert null_step(found[metric]) == (np.inf if index is None else found[metric].at[index])
    curve = found["line_shape_score"]
    assert null_step(replace(curve, null=replace(curve.null, values=curve.null.values * np.nan, prompts=None))) is None
    # Without values of prompts, errors of 3 and 4 give 5: a difference of 10 is 2 of them, too few for 6 checkpoints.
    at, null = np.ones(len(STEPS)), replace(curve.null, values=np.zeros(1), stderr=np.full(1, 4.0), prompts=None)
    errors = {"prompts": None, "stderr": 3 * at, "null": null}
    assert null_step(replace(curve, values=10 * at, **errors)) == np.inf
    assert null_step(replace(curve, values=14 * at, **errors)) == 0
    seeds = [replace(curve, run=f"seed {n}", null=replace(null, values=np.array([n]))) for n in range(3)]
    (mean,) = seed_means(seeds, "seeds")
    assert mean.null.seeds.ravel().tolist() == [0, 1, 2]
    assert seed_means([*seeds[:2], replace(seeds[2], null=None)], "seeds")[0].null is None, "one seed has no null"
    table = times_table(measure_times([found["k=2coupling"]]))
    assert table["null"].tolist() == ["blocks"]
    assert table["null_step"].notna().all()
    section = run_summary("run", run_data.read_run(root).measurements, root)
    sentences = section["sentences"] + section["still"]
    assert sum("its null" in text for text in sentences) == len(sentences)


def test_a_watch_measures_its_null_once_and_logs_it_at_the_first_and_the_last_step(run, tmp_path):
    note, model = Note(), run[1].model
    with lit_layers.watch(
        model,
        [probe(random_labels=False)],
        steps=[0, 1],
        root=tmp_path / "a",
        null="labels",
        loggers=[note],
        max_steps=2,
    ) as watched:
        watched.step()
        watched.step()
    (null,), with_control = records.read_nulls(tmp_path / "a"), measure(model, probe(), run="a", step=2)
    permuted = [r.value for r in with_control.records if r.tags.get("control") == "random_labels"]
    assert len(permuted) > 3
    assert [record.value for record in null.records] == permuted
    assert not any("control" in record.tags for record in null.records)
    assert "null_labels" in records.frame(tmp_path / "a")["reference"].unique()
    rows = [(step, row) for step, row in note.rows if any(name.endswith("/null_labels") for name in row)]
    assert [step for step, _ in rows] == [0, 2]
    assert rows[0][1].keys() == rows[1][1].keys()


def test_a_series_and_a_single_model_have_nulls_and_a_null_is_not_measured_twice(run, tmp_path):
    root, module = run
    series = StepFolders(root)
    analyze_series(series, analyses(), root=tmp_path / "series", null="all")
    file = records.null_folder(tmp_path / "series", "all") / "measurements.jsonl"
    first = file.read_text()
    assert [json.loads(text)["step"] for text in first.splitlines()] == [LAST] * 3
    analyze_series(series, analyses(), root=tmp_path / "series", null="all")
    assert file.read_text() == first
    later = replace(records.read(file)[0], step=LAST + 1)  # a longer training measures its null again
    for measurement in (later, replace(later, step=1)):  # and an earlier step may be measured later
        records.Store(file).add(measurement)
    assert later.step in [m.step for m in records.read_nulls(tmp_path / "series")]
    assert len(records.read_nulls(tmp_path / "series")) == 3
    folder = str(series.checkpoints[-1].source.folder)
    analyze_series(OneModel(folder), analyses(), root=tmp_path / "one", null="blocks")
    mine, theirs = (values(records.read_nulls(each)[0]) for each in (tmp_path / "one", root))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    shown = lit_layers.layers(module.model, ["logit_lens_loss"], batches=[*RandomText()], name="tiny", null="blocks")
    assert line(shown.plot(), "tiny, null: random blocks").y == pytest.approx(losses_of(root), rel=1e-3)


def test_nulls_that_cannot_be_measured_are_refused_before_the_first_number(tmp_path):
    with pytest.raises(InputError, match="null: expected one of blocks, all, labels, got 'new'"):
        EmergenceCallback(analyses(), STEPS, tmp_path, null="new")
    with pytest.raises(InputError, match="null: labels permutes the labels of probes, and no analysis has any"):
        fit(tmp_path, [EmergenceCallback(analyses(), STEPS, tmp_path / "run", null="labels")])
    with pytest.raises(InputError, match="null: needs the weights in memory: leave --offload out"):
        analyze_series(OneModel(tmp_path), analyses(), root=tmp_path / "x", null="all", offload=tmp_path)
