"""The order of two curves, paired by prompt: against planted orders, and with incomplete values of prompts."""

import logging
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from lit_layers.cli.main import main
from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import StepCurve, prompts_of_curve
from lit_layers.clock.times_and_order import layer_order_table, measure_times, order_table, probability_before
from lit_layers.functional.emergence.curve_times import bootstrap_counts, emergence_times
from lit_layers.records import Record, Store, values_path
from tests.support.undrawn import leave_undrawn
from tests.support.written import measured

AXIS = np.linspace(0, 11, 16)
STEPS = np.round(np.exp2(AXIS) - 1)
PROMPTS = 64


def rise(middle: float, width: float = 1.0) -> np.ndarray:
    return 1 / (1 + np.exp(-(np.log2(1 + STEPS) - middle) / width))


def two_curves(seed: int, *, shift: float, shared: float) -> list[np.ndarray]:
    """Return prompts' values of two rising curves, the second later, with a `shared` part of their noise."""
    rng = np.random.default_rng([seed, int(10 * shift), int(10 * shared)])
    middle, common = rng.uniform(4, 7), rng.normal(size=(PROMPTS, len(AXIS)))
    truth = [rise(middle, rng.uniform(0.4, 1.2)), rise(middle + shift, rng.uniform(0.4, 1.2))]
    noises = [shared**0.5 * common + (1 - shared) ** 0.5 * rng.normal(size=common.shape) for _ in truth]
    return [curve + 0.4 * noise for curve, noise in zip(truth, noises, strict=True)]


def curve(rows: np.ndarray, metric: str, *, prompts_of: str = "d", layer: int | None = None) -> StepCurve:
    values, stderr = rows.mean(0), rows.std(0, ddof=1) / PROMPTS**0.5
    where = {"run": "r", "analysis": "a", "metric": metric, "layer": layer, "tags": {}, "at": STEPS}
    return StepCurve(**where, values=values, stderr=stderr, prompts=rows, prompts_of=prompts_of)


def test_prompts_without_any_value_do_not_exclude_other_prompts():
    at, values = np.arange(3.0), np.arange(3) + 1.5
    rows = {step: np.array([*(step + np.arange(4)), *[np.nan] * 6], dtype=np.float32) for step in (0, 1, 2)}
    prompts = prompts_of_curve(at, values, rows)
    assert prompts is not None
    assert np.isfinite(prompts).all(1).tolist() == [True] * 4 + [False] * 6
    rows[2][1:4] = np.nan  # one of four has all three
    assert prompts_of_curve(at, values, rows) is None


def test_the_order_reports_which_pairs_have_the_same_prompts():
    rows = two_curves(0, shift=0.5, shared=0.9)
    same = [curve(rows[0], "first"), curve(rows[1], "second")]
    other = curve(rows[1], "third", prompts_of="e")
    gone = replace(same[1], metric="fourth", prompts=None, prompts_of="")
    table = order_table(measure_times([*same, other, gone]))
    paired = {frozenset(pair) for *pair, is_paired in table[["a_metric", "b_metric", "paired"]].to_numpy() if is_paired}
    assert paired == {frozenset(("first", "second"))}
    assert len(table) == 6
    alone = order_table(measure_times(same))
    assert alone.p_a_before_b.tolist() == table[table["paired"]].p_a_before_b.tolist(), "others change nothing"
    layers = layer_order_table(measure_times([curve(row, "m", layer=n) for n, row in enumerate(rows, start=1)]))
    assert layers[["layer_a", "layer_b", "paired"]].to_numpy().tolist() == [[1, 2, True]]
    assert layers.p_a_before_b[0] > 0.5


@pytest.fixture
def run(tmp_path):
    """Write two analyses of the same prompts and one of others; half of the first one's metrics have no values."""
    store = Store(tmp_path / "planted" / "measurements.jsonl")
    first, second = two_curves(3, shift=1.0, shared=0.9)
    third = two_curves(4, shift=0.5, shared=0.0)[1]
    for number, step in enumerate(STEPS.astype(int).tolist()):
        for analysis, data, rows in (("a", "d", first), ("b", "d", second), ("c", "e", third)):
            kept = [record("shown", rows[:, number], 1), record("shown", rows[:, max(number - 1, 0)], 2)]
            kept.append(replace(record("unkept", rows[:, number]), by_prompt=None))
            provenance = {"config_hash": analysis, "data_hash": data}
            store.add(measured(analysis, kept, run="planted", step=step, provenance=provenance))
    return store.path.parent


def record(metric: str, values: np.ndarray, layer: int | None = None) -> Record:
    values = values.astype(np.float32)
    mean, stderr = float(values.mean(dtype=np.float64)), float(values.std(ddof=1) / len(values) ** 0.5)
    return Record(metric=metric, value=mean, stderr=stderr, layer=layer, n=len(values), by_prompt=values)


def paired_of(folder) -> set[frozenset[str]]:
    order = pd.read_csv(folder / "order.csv")
    order = order[order["paired"]]
    names = (order[f"{side}_analysis"] + "/" + order[f"{side}_metric"] for side in "ab")
    return {frozenset(pair) for pair in zip(*names, strict=True)}


@pytest.mark.soak
def test_emerge_pairs_stored_values_of_prompts_and_does_without_them_otherwise(run, tmp_path, capsys, monkeypatch):
    leave_undrawn(monkeypatch)
    assert main(["emerge", str(run), "--root", str(tmp_path / "out"), "--metrics", "shown,unkept"]) == 0
    assert paired_of(tmp_path / "out") == {frozenset(("a/shown", "b/shown"))}
    layers = pd.read_csv(tmp_path / "out" / "layer_order.csv")
    assert layers["paired"].tolist() == [True] * 3
    assert "In 1 of 15 pairs both curves are resampled" in (tmp_path / "out" / "emergence.html").read_text()
    for curve in curves_of(run, metrics=["shown", "unkept"]):
        assert (curve.prompts is not None) == (curve.metric == "shown")
        if curve.prompts is not None:
            np.testing.assert_allclose(curve.prompts.mean(0, dtype=np.float64), curve.values, rtol=1e-5, atol=1e-6)
    for path in run.glob("values/*/*"):
        path.unlink()
    assert main(["emerge", str(run), "--root", str(tmp_path / "old"), "--metrics", "shown"]) == 0
    assert paired_of(tmp_path / "old") == set()
    assert "are taken as independent" in (tmp_path / "old" / "emergence.html").read_text()
    assert capsys.readouterr().err == ""


def test_a_damaged_file_is_reported_once_and_affects_only_its_analysis(run, tmp_path, caplog):
    (m, *_) = [each for each in Store(run / "measurements.jsonl") if each.analysis == "c" and each.step]
    values_path(run, m).write_bytes(b"PAR1 of somebody else PAR1")
    with caplog.at_level(logging.WARNING):
        curves = curves_of(run, metrics=["shown"])
    assert {curve.analysis for curve in curves if curve.prompts is not None} == {"a", "b"}
    assert [each.getMessage().count("is damaged") for each in caplog.records] == [1]
    assert str(run) in caplog.records[0].getMessage()


def test_prompts_that_agree_on_the_order_make_it_certain_where_intervals_overlap():
    """Each prompt rises at its own step, in the same order for both metrics; shuffled prompts lose this information."""
    rng = np.random.default_rng(5)
    middles, deal = rng.normal(6, 2, PROMPTS)[:, None], rng.permutation(PROMPTS)
    counts, times = bootstrap_counts(PROMPTS), []
    for seed, middle in enumerate((middles, middles + 0.3, middles[deal] + 0.3)):
        rows = rise(middle, 0.5) + rng.normal(0, 0.02, (PROMPTS, len(AXIS)))
        times.append(emergence_times(STEPS, rows.mean(0), replicates=rows, counts=counts, seed=seed))
    first, second, dealt = times
    assert first.halfway.high > second.halfway.low
    assert probability_before(first, second, paired=True) > 0.98
    for later, paired in ((second, False), (dealt, True)):
        assert 0.6 < probability_before(first, later, paired=paired) < 0.95
