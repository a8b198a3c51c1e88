"""Every metric has one row and values in its range; a metric without a row is also shown."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jinja2")

from lit_layers import metrics, plots, records, run_data
from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import layer_curves
from lit_layers.correlate.model_table import read_run_models, table_of_models
from lit_layers.metrics import METRICS, Metric, look_up
from lit_layers.records import Measurement, Record
from lit_layers.report import sections, write_report
from tests.support.charts import figure_data
from tests.support.layer_results import layer_results
from tests.support.metric_tables import DOCS, fill_tables

BRIER = Metric("brier_score", "Probe Brier score", "", "Mean squared error of the probabilities.", low=0, high=2)
BRIER = replace(BRIER, better="lower", group="score")


def test_the_rows_fit_each_other():
    names = [metric.name for group in metrics.GROUPS for metric in group.metrics]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert not [row.unit_title for row in METRICS.values() if ") (" in row.unit_title]
    headlines = sorted(row.headline for row in METRICS.values() if row.headline)
    assert headlines == [*range(1, len(headlines) + 1)]
    for row in METRICS.values():
        assert row.low <= row.high, row.name
        assert row.better in (None, "higher", "lower"), row.name
        assert row.level is None or row.low <= row.level <= row.high
        assert (row.level is None) == (not row.level_name)
        assert not (row.secondary and row.unlisted), row.name
        assert not row.meaning or row.meaning.endswith("."), row.name
    assert look_up("log_loss").note == "Linear probe, on test rows; lower is better."
    assert look_up("of_mine").title == "Of mine"


def add_brier(root, steps: tuple[int | None, ...] = (0, 8)) -> None:
    """Write probes with a Brier score for every accuracy."""
    for step in steps:
        found = layer_results("probe/topics", step=step)
        more = [
            replace(record, metric="brier_score", value=1 - record.value, low=None, high=None)
            for record in found.records
            if record.metric == "accuracy"
        ]
        more += [
            replace(record, tags={**record.tags, "of": "brier_score"})
            for record in found.records
            if record.tags.get("of") == "log_loss"
        ]
        records.append(root / "measurements.jsonl", replace(found, records=[*found.records, *more]))


def titles(root) -> list[str]:
    run = run_data.read_run(root)
    (section,) = sections.sections(records.frame(run.measurements))
    return [block["title"] for block in (*section["metrics"], *section["diagnostics"])]


def test_a_metric_without_a_row_has_its_own_block_in_its_analysis(tmp_path):
    add_brier(tmp_path)
    listed = ["Probe accuracy (share)", "Probe log-loss (nats)"]
    groups = ["How a probe's score rises over the layers", "Layers that a probe's scores single out"]
    assert titles(tmp_path) == [*listed, *groups, "Brier score", "Probe macro F1 (share)"]


@pytest.mark.soak
def test_one_row_shows_a_metric_everywhere(tmp_path, monkeypatch):
    add_brier(tmp_path / "run")
    monkeypatch.setitem(METRICS, "brier_score", BRIER)
    run = tmp_path / "run"
    assert "Probe Brier score" in titles(run)
    page = write_report(run).read_text()
    assert "Mean squared error of the probabilities; lower is better." in page
    assert "of Brier score" in str(figure_data(page))
    frame = records.frame(run / "measurements.jsonl")
    fig: Any = plots.layer_surface(frame, "brier_score", tags={"split": "test", "control": None})
    assert list(fig.series[0].y) == [4, 4]  # the lowest
    for number in range(4):
        of_step = {"brier_score": 0.3 + number / 10, "random_brier_score": 0.9}
        found = [Record(metric=name, value=value + number**2 / 50) for name, value in of_step.items()]
        found.append(Record(metric="accuracy", value=0.8 - number / 20))
        line = Measurement(run=f"m{number}", step=None, tokens=None, analysis="p", records=found, seconds=1)
        records.append(tmp_path / "models" / f"m{number}" / "measurements.jsonl", line)
    table = table_of_models(read_run_models([tmp_path / "models"]), metric="p/brier_score", score="p/accuracy")
    assert table.title("brier_score") == "Probe Brier score"
    assert table.baseline == "random_brier_score"
    curves = curves_of(run, metrics=["brier_score"], where={"split": "test"})
    assert any(curve.title.startswith("Probe Brier score") for curve in curves)
    best = [each for each in layer_curves(curves) if each.statistic == "best_layer" and "control" not in each.tags]
    assert [list(each.curve.values) for each in best] == [[4, 4]]  # the lowest: `emerge` knows the direction


def test_the_tables_of_the_documentation_are_those_of_the_rows():
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert fill_tables(text) == text, f"{page.name}: run python -m tests.support.metric_tables"
    page = (DOCS / "metrics.md").read_text()  # the page has one rule for halves, and one for chance levels
    shown = [name for name, row in METRICS.items() if row.also != "half"]
    unnamed = {name for name in shown if f"`{name}`" not in page}
    assert unnamed <= {f"random_{name}" for name in METRICS}
