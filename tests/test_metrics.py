"""Every metric has one row, its values lie where the row says, and what has no row is shown all the same."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jinja2")

from lit_layers import analyses, metrics, plots, records, run_data
from lit_layers.analyses import metric_names
from lit_layers.analyses.speed import Speed
from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import layer_curves
from lit_layers.correlate.model_table import read_run_models, table_of_models
from lit_layers.data import GivenTexts
from lit_layers.metrics import METRICS, Metric, look_up
from lit_layers.records import Measurement, Record
from lit_layers.report import logged_numbers, sections, write_report
from lit_layers.report.rendering import write_pictures
from lit_layers.tasks.benchmark_scores import BenchmarkScores
from lit_layers.tasks.catalogue import GLUE
from lit_layers.training.run_log import RunLog
from tests.analyses.test_contract import every_record_has_a_row
from tests.support import every_analysis
from tests.support.benchmark_rows import tiny_speaker, write_tasks, write_tokenizer
from tests.support.charts import figure_data
from tests.support.labelled_texts import labelled
from tests.support.layer_results import layer_results
from tests.support.measured import records_of
from tests.support.metric_tables import DOCS, with_tables
from tests.support.tiny_models import tiny
from tests.support.tiny_training import fit
from tests.support.undrawn import leave_undrawn

BRIER = Metric("brier_score", "Probe Brier score", "", "Mean squared error of the probabilities.", low=0, high=2)
BRIER = replace(BRIER, better="lower", group="score")
# What takes minutes of training, in whose own tests the values are compared, or what tiny random models may lack.
OF_GLUE = {metric for task in GLUE.values() for metric in task.scores}
NOT_HERE = {
    *("validation/accuracy", "validation/accuracy_top5"),
    *(
        "train/images_per_second",
        "mean_squared_error",
        "inflection_layer",
        "normalized_score",
        "failed",
    ),
    "probe_c",  # of `estimator: watch` alone
    *("bf16_difference", "bf16_largest_difference"),  # of `dtype: bfloat16` alone
}


@pytest.mark.soak
def test_every_row_is_of_something_that_is_measured_and_every_record_has_a_row(tmp_path):
    """With the options that add metrics, scores of benchmarks, and what training logs."""
    folder = every_analysis.save_inputs(tmp_path / "inputs")
    text, batches, model = every_analysis.of_text(folder), every_analysis.prompts(), tiny("gpt2", vocab_size=300)
    views = {"texts": GivenTexts([text for text, _ in labelled(8)]), "tokenizer": str(folder / "tokenizer")}
    (residual,) = (each for each in text if isinstance(each, analyses.NextTokenResidual))
    more: list[Any] = [
        analyses.Representation(batches=batches, rankme=True),
        analyses.Representation(batches=batches, preset="released_code"),
        replace(residual, num_halves=2),
        analyses.TokenCoupling(batches=batches, k=(2,), pairs="all", tables=("token",), num_tokens=2, num_prompts=2),
        analyses.Invariance(**views, num_views=3, max_tokens=30, num_halves=2, permutations=2, form="cross"),
        *metric_names.made([name for name, row in METRICS.items() if row.of_states], batches, batches),
        Speed(variants=("skip",), middles=(2,), num_tokens=8, batch_size=2, num_rounds=1, num_warm_up=0),
    ]
    given = [(model, each) for each in [*text, *more]]
    given += [(tiny("vit"), each) for each in every_analysis.of_images()]
    write_tasks(tmp_path / "benchmarks")
    write_tokenizer(tmp_path / "speaker")
    for task in ("lambada", "arc_challenge"):
        options: dict[str, Any] = {"tokenizer": str(tmp_path / "speaker"), "folder": tmp_path}
        options |= {"variants": ("skip",), "middles": (1,), "results": tmp_path / task}
        given.append((tiny_speaker(blocks=4, seed=3), BenchmarkScores(task=task, **options)))
    measured = [record for network, analysis in given for record in records_of(analysis, network)]
    every_record_has_a_row(measured)
    fit(tmp_path, [RunLog(tmp_path)], steps=2, val_check_interval=2, log_every_n_steps=1, limit_val_batches=1)
    scalars = {name for row in records.rows(tmp_path / "metrics.jsonl") for name in row} - {"step", "tokens"}
    assert "validation/loss" in scalars
    assert scalars | OF_GLUE | NOT_HERE <= METRICS.keys()
    assert METRICS.keys() - {record.metric for record in measured} - scalars <= OF_GLUE | NOT_HERE


def test_the_rows_fit_each_other():
    names = [metric.name for group in metrics.GROUPS for metric in group.metrics]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert not [row.with_unit for row in METRICS.values() if ") (" in row.with_unit]
    headlines = sorted(row.headline for row in METRICS.values() if row.headline)
    assert headlines == [*range(1, len(headlines) + 1)]
    for row in METRICS.values():
        assert row.low <= row.high, row.name
        assert row.better in (None, "higher", "lower"), row.name
        assert row.level is None or row.low <= row.level <= row.high
        assert (row.level is None) == (not row.level_name)
        assert not (row.secondary and row.unlisted), row.name
        assert not row.meaning or row.meaning.endswith("."), row.name
    assert look_up("log_loss").note == "Of a linear probe on the test rows; lower is better."
    assert look_up("of_mine").title == "Of mine"


def with_brier(root, steps: tuple[int | None, ...] = (0, 8)) -> None:
    """Probes of which every accuracy has a Brier score beside it."""
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


def test_a_metric_without_a_row_has_a_block_beside_those_of_its_analysis(tmp_path):
    with_brier(tmp_path)
    listed = ["Probe accuracy (share)", "Probe log-loss (nats)"]
    groups = ["How a probe's score rises over the layers", "Layers that a probe's scores single out"]
    assert titles(tmp_path) == [*listed, *groups, "Brier score", "Probe macro F1 (share)"]


@pytest.mark.soak
def test_one_row_shows_a_metric_everywhere(tmp_path, monkeypatch):
    with_brier(tmp_path / "run")
    monkeypatch.setitem(METRICS, "brier_score", BRIER)
    run = tmp_path / "run"
    assert "Probe Brier score" in titles(run)
    page = write_report(run).read_text()
    assert "Mean squared error of the probabilities; lower is better." in page
    assert "of Brier score" in str(figure_data(page))
    frame = records.frame(run / "measurements.jsonl")
    assert "brier_score" in plots.change_table(frame)["metric"].tolist()
    leave_undrawn(monkeypatch)
    pictures = [path.name for path in write_pictures(run, tmp_path / "pictures")]
    assert "probe_topics_probe_brier_score_test_rows_over_layers.svg" in pictures
    (first, *_) = records.read(run / "measurements.jsonl")
    assert "probe/topics/brier_score/split=test/task=topics/layer_01" in logged_numbers.curves_of([first], {}, "all")
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
    documented = with_tables("<!-- metrics: all -->\n<!-- end of metrics -->")
    assert "| `brier_score` | Probe Brier score |  | 0 to 2 |" in documented


def test_the_tables_of_the_documentation_are_those_of_the_rows():
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert with_tables(text) == text, f"{page.name}: run python -m tests.support.metric_tables"
    assert all(f"| `{name}` |" in (DOCS / "metrics.md").read_text() for name in METRICS)
