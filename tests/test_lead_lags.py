"""Lead-lags of a run's metrics: curves of which one follows another, tables, sentences, figure and command."""

import numpy as np
import pandas as pd
import pytest

from lit_layers.cli.main import main
from lit_layers.clock import curves_of, lead_lag_table, measure_times, over_seeds
from lit_layers.clock.lead_lags import COLUMNS, lead_lag_chart, lead_lag_rows, sentences
from lit_layers.functional import lead_lags, octave_increments
from tests.support.drawn_lead_lags import AXIS, FINE, STEPS, at_checkpoints, walks

ERROR = 0.02


def planted(run: str = "one", seed: int = 0, *, short: bool = False) -> list[dict]:
    """Score `first`, `later` an octave behind it, `apart` on its own, and `loss` with `of_loss` that it drives."""
    rng = np.random.default_rng(seed)
    first, apart, loss, own = (walks("walk", rng, 1) for _ in range(4))
    curves = {
        "first": at_checkpoints(first),
        "later": 2 - 3 * at_checkpoints(first, 1.0),
        "apart": at_checkpoints(apart),
        "loss": at_checkpoints(loss),
        "of_loss": 1 + 2 * at_checkpoints(loss + 0.2 * own),
        "once": 40 / (1 + np.exp(-(AXIS[None] - 7) / 0.3)),
        "flat": 0 * AXIS[None],
    }
    rows = []
    for name, values in curves.items():
        at = slice(-8, None) if short and name == "apart" else slice(None)
        noisy = values[0] + ERROR * rng.standard_normal(len(STEPS))
        rows += [
            {"run": run, "metric": name, "step": step, "value": value, "stderr": ERROR}
            for step, value in zip(STEPS[at], noisy[at], strict=True)
        ]
    return rows


def write(rows: list[dict], path) -> str:
    pd.DataFrame(rows).to_csv(path, index=False)
    return str(path)


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    return measure_times(curves_of(write(planted(seed=1), tmp_path_factory.mktemp("scores") / "scores.csv")))


@pytest.fixture(scope="module")
def table(clock):
    return lead_lag_table(clock, loss="loss")


def pair(table, one: str, other: str) -> dict:
    rows = [row for row in table.to_dict("records") if {row["a_metric"], row["b_metric"]} == {one, other}]
    (row,) = rows
    if row["a_metric"] == other:
        row = {**row, "lag": -row["lag"], "lag_low": -row["lag_high"], "lag_high": -row["lag_low"]}
    return row


def test_a_metric_that_follows_another_is_told_from_chance_and_one_that_the_loss_drives_is_not_given_it(table):
    assert tuple(table.columns) == COLUMNS
    assert len(table) == 15  # all pairs but those of the flat curve
    planted_pair = pair(table, "first", "later")
    assert (planted_pair["lag"], planted_pair["num_increments"], planted_pair["num_runs"]) == (1.0, 22, 1)
    assert planted_pair["correlation"] < -0.7
    assert planted_pair["lag_low"] <= 1.0 <= planted_pair["lag_high"]
    assert planted_pair["p_value"] <= 0.05
    driven = pair(table, "loss", "of_loss")
    assert driven["correlation"] > 0.9
    assert np.isnan(driven["given_loss_correlation"])  # of the loss nothing is left
    assert np.isnan(pair(table, "once", "first")["p_value"])


def test_numbers_are_those_of_the_function_and_q_is_over_all_pairs(clock, table):
    curves = {curve.metric: curve for curve in clock.curves}
    first, second, loss = (
        octave_increments(curves[name].at, curves[name].values, 0, 22) for name in ("first", "apart", "loss")
    )
    row = pair(table, "first", "apart")
    for prefix, given in (("", None), ("given_loss_", loss)):
        (result,) = lead_lags([first], second, given)
        assert row[f"{prefix}correlation"] == pytest.approx(result.correlation)
        assert row["lag"] == result.lag or prefix
    p = table["p_value"].fillna(1.0).to_numpy()
    rank = p.argsort()
    expected = np.minimum.accumulate((p[rank] * len(p) / np.arange(1, len(p) + 1))[::-1])[::-1]
    known = table["p_value"].notna().to_numpy()[rank]
    assert table["q_value"].to_numpy()[rank][known] == pytest.approx(expected[known])


@pytest.mark.soak
def test_over_seeds_the_curves_of_all_seeds_count_and_those_that_one_lacks_do_not(tmp_path):
    rows = [row for seed in range(4) for row in planted(f"s{seed}", seed)]
    whole = curves_of(write(rows, tmp_path / "whole.csv"))
    lacks = [row for row in rows if (row["run"], row["metric"]) != ("s3", "apart")]
    part = curves_of(write(lacks, tmp_path / "part.csv"))
    for curves, metrics in ((whole, {"first", "later", "apart"}), (part, {"first", "later"})):
        chosen = [curve for curve in curves if curve.metric in ("first", "later", "apart")]
        # Their mean over seeds need not emerge: a level of its own in each makes it.
        for curve in chosen:
            curve.values[:] = curve.values + 30 / (1 + np.exp(-(AXIS - 5)))
        table = lead_lag_table(measure_times(over_seeds(chosen, "4 seeds") + chosen))
        of_all = table[table["run"] == "4 seeds"]
        assert {*of_all["a_metric"], *of_all["b_metric"]} == metrics
        assert set(of_all["num_runs"]) == {4}
        found = pair(of_all, "first", "later")
        assert (found["lag"], found["p_value"] < 0.01) == (1.0, True)
        assert set(of_all["loss"]) == {""}


def test_short_curves_share_too_few_half_octaves_and_are_counted(tmp_path):
    curves = curves_of(write(planted(seed=1, short=True), tmp_path / "scores.csv"))
    table = lead_lag_table(measure_times(curves), loss="loss")
    short = table[(table["a_metric"] == "apart") | (table["b_metric"] == "apart")]
    assert len(short)
    assert (short["num_increments"] == 0).all()
    assert short["p_value"].isna().all()
    assert any(f"{len(short)} share fewer than 8 half octaves" in line for line in sentences(table, "one"))


def test_sentences_rows_and_figure_say_who_leads(table):
    told = table.assign(q_value=np.where(table["p_value"] < 0.05, 0.01, table["q_value"]))
    lines = sentences(told, "one")
    found = next(line for line in lines if "irst" in line and "ater" in line)
    assert " leads " in found
    assert found.index("irst") < found.index("ater")
    assert "by 1 octave (" in found
    assert "given the loss r" in found
    assert any(line.startswith("Of 15 pairs ") and "given the loss (" in line for line in lines)
    assert any("have no p-value" in line for line in lines)
    rows = lead_lag_rows(told, "one")
    top = next(row for row in rows if "irst" in row[0] and "ater" in row[0])
    assert top[0].index("irst") < top[0].index(", then ") < top[0].index("ater")
    assert top[1].startswith("1 (")
    chart = lead_lag_chart(told, "one")
    names = list(chart.cells.texts)
    values = chart.cells.values[0]
    row = next(each for each in told.to_dict("records") if {each["a_metric"], each["b_metric"]} == {"first", "later"})
    a, b = names.index(row["a_title"]), names.index(row["b_title"])
    assert values[a][b] == pytest.approx(row["correlation"], abs=1e-3)
    assert values[b][a] == pytest.approx(row["given_loss_correlation"], abs=1e-3)
    assert not any("nce" in name for name in names)  # it moves once
    assert lead_lag_chart(told.assign(p_value=np.nan), "one") is None
    assert lead_lag_rows(told.assign(p_value=np.nan), "one") == []


def test_the_command_writes_tables_a_figure_and_a_section(tmp_path, capsys):
    scores = write(planted(seed=1), tmp_path / "scores.csv")
    out = tmp_path / "out"
    assert main(["emerge", scores, "--metrics", "first,later,apart", "--loss", "loss", "--out", str(out)]) == 0
    csv, parquet = pd.read_csv(out / "lead_lag.csv"), pd.read_parquet(out / "lead_lag.parquet")
    assert tuple(csv.columns) == tuple(parquet.columns) == COLUMNS
    assert csv["lag"].to_numpy() == pytest.approx(parquet["lag"].to_numpy(), nan_ok=True)
    assert (csv["loss"] != "").all()
    assert (out / "lead_lag_one.svg").is_file()
    page = (out / "emergence.html").read_text()
    section = page[page.index('<section id="leads">') : page.index('<section id="times">')]
    assert "what leads need not be a cause" in section
    capsys.readouterr()
    assert main(["emerge", scores, "--loss", "perplexity", "--out", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert "loss: expected METRIC or ANALYSIS/METRIC of a curve, got perplexity, which no run has" in error
    assert not (tmp_path / "no").exists()


def test_the_drawn_curves_lie_on_the_axis_of_emergence():
    assert at_checkpoints(FINE[None])[0] == pytest.approx(AXIS)
