"""Metrics over steps and layers: cells, best layers, and means over common tasks."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lit_layers import plots, records
from lit_layers.errors import InputError
from lit_layers.figures.maps import best_layers, named_matrix
from lit_layers.records import Record
from lit_layers.report import write_report
from tests.support.charts import axis, axis_position, page_figures, svg_texts, svgs
from tests.support.layer_scores import DOMAINS, TASKS, add
from tests.support.written import write

STEPS = (0, 1, 8, 512)


def values(steps: int, layers: int, tasks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.2, 0.8, size=(steps, tasks, layers + 1))


def series(root: Path, *, layers: int = 4, absent: tuple[tuple[int, str], ...] = (), **options) -> np.ndarray:
    """Write scores of all tasks at four steps, except the `absent` (step, task) pairs."""
    found = values(len(STEPS), layers, len(TASKS))
    for number, step in enumerate(STEPS):
        there = [n for n, task in enumerate(TASKS) if (step, task) not in absent]
        add(root, "series", step, scores=found[number][there], tasks=[TASKS[n] for n in there], **options)
    return found


def table(root: Path) -> pd.DataFrame:
    return records.frame(root / "measurements.jsonl")


def means(root: Path) -> pd.DataFrame:
    return plots.add_task_means(table(root)).frame


# ------------------------------------------------------------------------------------------------ means over tasks


def all_tasks(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the means over all domains."""
    return frame[frame["domain"].isna()].sort_values(["step", "layer"])


def test_means_weight_tasks_equally_overall_and_in_each_domain(tmp_path):
    scores = series(tmp_path)
    metric = values(1, 4, len(TASKS), seed=3)[0]
    add(tmp_path, "series", 512, metric=metric)  # at fewer steps
    found = plots.add_task_means(table(tmp_path))
    frame = found.frame[found.frame["analysis"] == "mteb/mean_over_tasks"]
    own = found.frame[found.frame["analysis"] == "representation/mean_over_tasks"]
    assert len(frame) + len(own) == len(found.frame)
    assert np.allclose(all_tasks(frame)["value"], scores.mean(1).ravel())
    assert set(all_tasks(frame)["n"]) == {len(TASKS)}
    sts = frame[frame["domain"] == "sts"].sort_values(["step", "layer"])
    rows = [n for n, task in enumerate(TASKS) if DOMAINS[task] == "sts"]
    assert np.allclose(sts["value"], scores[:, rows].mean(1).ravel())
    assert set(sts["n"]) == {3}
    assert set(frame["tokens"]) == {1000 * step for step in STEPS}
    assert found.notes["mteb/mean_over_tasks"] == "Mean over 6 tasks measured everywhere."
    assert np.allclose(own["value"], metric.mean(0))


def test_a_task_missing_at_a_step_or_layer_is_in_no_mean_and_is_named(tmp_path):
    scores = series(tmp_path, absent=((8, "BIOSSES"), (512, "STS12")))
    found = plots.add_task_means(table(tmp_path))
    kept = [n for n, task in enumerate(TASKS) if task not in ("BIOSSES", "STS12")]
    means = all_tasks(found.frame)["value"]
    assert np.allclose(means, scores[:, kept].mean(1).ravel()), "also at the steps that have it"
    assert found.notes["mteb/mean_over_tasks"] == (
        "Mean over 4 tasks measured everywhere. Not included: BIOSSES (not at step 8); STS12 (not at step 512)."
    )
    scores[0, 2, 3] = math.nan
    for step in (1, 2):
        add(tmp_path / "layers", "r", step, scores=scores[0])
    whole = all_tasks(plots.add_task_means(table(tmp_path / "layers")).frame)
    assert np.allclose(whole[whole["step"] == 2]["value"], np.delete(scores[0], 2, axis=0).mean(0))


def test_compared_models_have_means_over_their_common_tasks(tmp_path):
    scores = values(2, 4, len(TASKS))
    add(tmp_path, "a", None, scores=scores[0])
    add(tmp_path, "b", None, scores=scores[1][:4], tasks=TASKS[:4])
    found = plots.add_task_means(table(tmp_path))
    for row, run in enumerate("ab"):
        whole = all_tasks(found.frame[found.frame["run"] == run])
        assert np.allclose(whole["value"], scores[row, :4].mean(0))
    assert "SICK-R, TwentyNewsgroupsClustering (not of model b)" in found.notes["mteb/mean_over_tasks"]


def test_a_single_task_and_other_analyses_are_not_changed(tmp_path):
    add(tmp_path, "r", 1, scores=values(1, 4, 1)[0], tasks=TASKS[:1])
    add(tmp_path, "r", 1, metric=values(1, 4, 2)[0], tasks=TASKS[:2], name="accuracy", analysis="probe")
    frame = table(tmp_path)
    assert plots.add_task_means(frame).frame is frame


def test_means_carry_the_verdict_of_the_audit(tmp_path):
    scores = values(1, 4, len(TASKS))[0]
    for step, verdict in ((1, "clean"), (2, "suspect: equal to the final step"), (3, "clean")):
        add(tmp_path, "r", step, scores=scores, provenance={"audit": verdict})
    frame = means(tmp_path)
    with pytest.raises(InputError, match="suspect step 2"):
        plots.layer_surface(frame, "main_score")
    assert plots.layer_surface(frame, "main_score", allow_suspect=True).cells.values[0][4][1] is not None


# ------------------------------------------------------------------------------------------------ surfaces


def test_a_cell_is_a_layer_and_step_at_its_logarithm_with_step_0_separate(tmp_path):
    scores = series(tmp_path)
    fig = plots.layer_surface(means(tmp_path), "main_score")
    assert np.allclose(fig.cells.values, [scores.mean(1).T], rtol=1e-3)
    assert fig.cells.rows == [0, 1, 2, 3, 4]
    assert fig.training.texts()[2] == "step 8 · 8,000 tokens"
    x = [axis_position(fig, step) for step in STEPS]
    assert x[1:] == pytest.approx(np.log10([2, 9, 513]), abs=1e-4)
    assert axis(fig).divider == pytest.approx((x[0] + x[1]) / 2, abs=1e-4), "where the cells meet"
    ends = x[0] - (x[1] - x[0]) / 2, x[3] + (x[3] - x[2]) / 2
    assert axis(fig).ends == pytest.approx(ends, abs=1e-3), "whole cells at the ends"


def test_missing_measurements_are_blank_and_not_interpolated(tmp_path):
    found = values(1, 3, 1)[0][0]
    rows = [Record(metric="lidar", value=v, layer=n) for n, v in enumerate(found)]
    for step, own in {1: rows, 4: [], 16: rows[:2] + rows[3:]}.items():
        write(tmp_path, "invariance", own, step=step)
    fig = plots.layer_surface(table(tmp_path), "lidar", steps=[1, 4, 16])
    blank = [[v is None for v in row] for row in zip(*fig.cells.values[0], strict=True)]
    assert blank == [[False] * 4, [True] * 4, [False, False, True, False]]


def test_the_best_layer_is_never_the_embedding(tmp_path):
    frames = np.array([[0.9, 0.1, 0.3, 0.3], [0.2, 0.1, 0.5, 0.6], [0.2, math.nan, math.nan, math.nan]])
    for step, row in zip((1, 2, 4), frames, strict=True):
        add(tmp_path, "r", step, scores=row[None], tasks=TASKS[:1])
    fig = plots.layer_surface(table(tmp_path), "main_score")
    (best,) = [list(series.y) for series in fig.series]
    assert best == [2, 3, None], "of equal ones the earliest"
    assert best_layers(fig.cells.values[0], "log_loss") == [1, 1, None], "lower is better"


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_has_one_section_for_all_tasks_with_a_surface_for_each_domain(tmp_path):
    series(tmp_path, absent=((8, "BIOSSES"),))
    own = [Record(metric="token_curvature", value=1.0, layer=layer) for layer in range(3)]
    for step in (1, 8):
        write(tmp_path, "trajectory", own, run="series", step=step)
    page = write_report(tmp_path)
    text = page.read_text()
    shown = [
        words in text for words in ("<h2>MTEB: mean over tasks</h2>", "BIOSSES (not at step 8)", "<h2>MTEB: STS12")
    ]
    assert shown == [True, True, False]
    choices = re.findall(r"<option[^>]*>(.*?)<", text)
    assert choices == ["all tasks", "classification", "clustering", "sts"]
    surfaces = [figure for figure in page_figures(page) if figure.is_map and figure.steps]
    assert len(surfaces) == 1 + len(choices), "the page begins with one; what is no score has none"


# ------------------------------------------------------------------------------------------------ published numbers


@pytest.mark.realdata
def test_the_best_layers_of_pythia_410m_over_training_are_the_published_ones(realdata, tmp_path):
    file = realdata / "layerwise_reference" / "mteb_layer_scores.parquet"
    if not file.is_file():
        pytest.skip(f"no {file}")
    scores = pd.read_parquet(file)
    kept = (scores["family"] == "Pythia") & (scores["size"] == "410m") & (scores["split"] == "test")
    scores = scores[kept & scores["subset"].isin(["default", "en", "en-ext", "en-en"])]
    scores["step"] = scores["step"].fillna(143_000).astype(int)
    mean = scores.groupby(["step", "task", "layer"])["main_score"].mean().reset_index()
    for (step, task), rows in mean.groupby(["step", "task"]):
        own = [
            Record(metric="main_score", value=v, layer=int(n))
            for n, v in zip(rows["layer"], rows["main_score"], strict=True)
        ]
        write(tmp_path, f"mteb/{task}", own, step=int(step))
    fig = plots.layer_surface(means(tmp_path), "main_score")
    (best,) = [series.y for series in fig.series]
    at = dict(zip(fig.training.steps, best, strict=True))
    assert [at[step] for step in (4000, 8000, 16000, 32000, 64000, 128000, 143_000)] == [22, 19, 19, 19, 19, 17, 17]
    ends = [100 * fig.cells.values[0][layer][-1] for layer in (0, 17, 24)]
    assert ends == pytest.approx([45.04, 51.92, 46.82], abs=0.012)


def test_every_row_of_a_matrix_has_its_label_at_any_size():
    sizes = range(2, 40)  # of 19 rows, Vega placed the first below 0 and dropped its label
    matrices = [
        named_matrix("Order", [f"curve {n}" for n in range(size)], [[0.5] * size] * size, (0, 1)) for size in sizes
    ]
    for size, svg in zip(sizes, svgs(matrices), strict=True):
        texts = svg_texts(svg)
        assert {f"{n + 1}  curve {n}" for n in range(size)} <= {*texts}, size
