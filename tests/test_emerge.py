"""`lit-layers emerge` against curves whose times were planted, and tables written as other tools write them."""

import html
import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import LAYER_COLUMNS, MONOTONICITY, StepCurve, curves_in, merge_seeds
from lit_layers.clock.times_and_order import (
    COLUMNS,
    Clock,
    agreement_sentence,
    agreement_table,
    emerged_curves,
    measure_times,
    order_table,
    probability_before,
    times_table,
)
from lit_layers.errors import InputError
from lit_layers.figures.vega import encoded
from lit_layers.functional.emergence.curve_times import EmergenceTimes, Time
from lit_layers.identity import UNKNOWN
from lit_layers.records import Record
from lit_layers.report import write_report
from lit_layers.report.emergence import axis_text, layer_fronts, order_matrix, sentence, timeline
from lit_layers.report.rendering import write_pictures
from tests.support.charts import page_figures
from tests.support.undrawn import leave_undrawn
from tests.support.written import write

STEPS = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
AT = np.array(STEPS)
AXIS = np.log2(1 + AT)
ERROR = 0.02


def rise(middle: float) -> np.ndarray:
    """Return a curve that is half-way at step 2^middle - 1."""
    return 1 / (1 + np.exp(-(AXIS - middle) / 0.5))


def write_run(root, seed: int = 0, *, shift: float = 0.0, audit: dict | None = None, steps=STEPS):
    """Write a run, half-way at octave 3 (coupling), 5, 6, 7 (probes of layers 1 to 3), 8 (entropy) and never (loss)."""
    noise = np.random.default_rng(seed).normal(0, ERROR, (6, len(STEPS)))
    rises = [rise(middle + shift) for middle in (3, 5, 6, 7)]
    coupling, *probes, entropy, loss = np.array([*rises, 3 - rise(8 + shift), 0 * AXIS + 5]) + noise
    for n, step in enumerate(steps):
        known = {"stderr": ERROR, "n": 50}
        found = {
            "coupling": [
                Record(metric="coupling", value=coupling[n], **known),
                Record(metric="coupling_pair", value=0.5, layer=1, other_layer=2),
            ],
            "probe": [
                *(Record(metric="accuracy", value=row[n], layer=i, **known) for i, row in enumerate(probes, 1)),
                Record(metric="accuracy", value=0.1, layer=1, tags={"reference": "majority"}),
            ],
            "representation": [
                Record(metric="prompt_entropy", value=entropy[n], tags={"normalization": "raw"}, **known)
            ],
            "lens": [Record(metric="logit_lens_loss", value=loss[n], layer=3, **known)],
        }
        provenance = {"audit": (audit or {}).get(step), "config_hash": "c" * 16}
        for analysis, records_ in found.items():
            write(root, analysis, records_, run=root.name, step=step, tokens=2048 * step, provenance=provenance)
    return root


def curve_of(metric: str = "accuracy", *, run: str = "a", analysis: str = "r", layer: int | None = None, **more):
    return StepCurve(
        run=run, analysis=analysis, metric=metric, layer=layer, **{"tags": {}, "at": AT, "values": AXIS, **more}
    )


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    if "drawn" not in request.node.name:
        leave_undrawn(monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "planted")


@pytest.fixture(scope="module")
def clock(run):
    return measure_times(curves_of(run))


def test_planted_times_are_found_in_order_and_flat_curves_do_not_emerge(clock):
    table = times_table(clock)
    assert tuple(table.columns[: len(COLUMNS)]) == COLUMNS
    assert len(table) == 6  # neither the reference nor the pair of layers
    planted = {("coupling", -1): 3, ("accuracy", 1): 5, ("accuracy", 3): 7, ("prompt_entropy", -1): 8}
    for (name, layer), middle in planted.items():
        (row,) = table[(table.metric == name) & (table.layer.fillna(-1) == layer)].to_dict("records")
        assert (row["emerges"], row["over"]) == (True, "prompts")
        # An octave between checkpoints, a width of half of one: 0.3 octaves are well beyond the error.
        assert abs(np.log2(1 + row["halfway"]) - middle) < 0.3
        assert row["onset"] < row["halfway_low"] < 2**middle - 1 < row["halfway_high"] < row["peak"]
    flat = table[table.metric == "logit_lens_loss"].iloc[0]
    assert (flat.emerges, pd.isna(flat.halfway)) == (False, True)
    order = [curve.metric for curve, _ in emerged_curves(clock, "planted")]
    assert order == ["coupling", "accuracy", "prompt_entropy"]  # of the probes the last layer's
    assert (order_table(clock).p_a_before_b > 0.99).all()


def test_the_probability_of_an_order_is_that_of_all_pairs_of_draws(clock):
    (_, first), (_, second), *_ = emerged_curves(clock, "planted")
    ahead = first.halfway_draws[:, None] < second.halfway_draws[None]
    assert probability_before(first, second) == pytest.approx(ahead.mean(), abs=1e-12)
    assert probability_before(first, second) + probability_before(second, first) == pytest.approx(1)
    assert probability_before(first, first) == pytest.approx(0.5)


def test_open_ends_leave_orders_open_and_have_arrows():
    """By hand: a curve half-way after step 26 may be before or after one at 500, but is after one at 10."""
    draws = lambda at: np.full(1000, float(at))  # noqa: E731
    known = [replace(times_at(at, at, at), halfway_draws=draws(at)) for at in (10, 500)]
    halfway, ahead = Time(30.0, 26.0, math.inf), Time(math.inf, 1000.0, math.inf)
    late = EmergenceTimes(True, 0.01, halfway, halfway, ahead, ahead, 12, 0, draws(30), not_yet=True)
    begun = Time(30.0, 0.0, 40.0)
    early = EmergenceTimes(True, 0.01, begun._replace(value=0.0), begun, begun, begun, 12, 0, draws(30), before=True)
    assert [probability_before(each, late) for each in known] == [1, pytest.approx(math.nan, nan_ok=True)]
    assert [probability_before(early, each) for each in known] == [pytest.approx(math.nan, nan_ok=True), 1]
    assert math.isnan(probability_before(late, early))
    back = replace(known[0], emerges=False)
    for times, said in (
        (late, "half-way after 26, peak not yet, still moves at its last checkpoint"),
        (early, "half-way before 40, peak at 30, moves at its first checkpoint"),
        (back, "changes and comes back, farthest at 10"),
    ):
        assert sentence(curve_of(), times) == f"Probe accuracy: {said}"
    clock = Clock(list(map(curve_of, ("f1", "loss", "accuracy", "recall"))), [late, early, known[0], back])
    arrows = {series.mark: [*series.y] for series in timeline(clock).series if "triangle" in series.mark}
    counts = {mark: sum(at is not None for at in y) for mark, y in arrows.items()}
    assert counts == {"triangle-left": 1, "triangle-right": 1}
    table = times_table(clock)
    assert table["plateau"].tolist() == [math.inf, 30, 10, 10]
    assert table[["emerges", "changes", "before", "not_yet"]].sum().tolist() == [3, 4, 1, 1]
    assert len(order_table(clock)) == 3  # the order of the result is not tested


def times_at(low: float, half: float, high: float) -> EmergenceTimes:
    """Return an interval with all four times equal."""
    return EmergenceTimes(True, 0.01, *[Time(half, low, high)] * 4, 12, 0, np.arange(10.0))


def test_filled_and_hollow_marks_have_the_colour_of_their_run(clock):
    other = [replace(curve, run="other") for curve in clock.curves]
    both = timeline(Clock(clock.curves + other, clock.times * 2))
    assert (len(both.series), len({(each.name, each.color) for each in both.series})) == (4, 2), "colours are by name"
    first, _, second, _ = (each.x for each in both.series)
    assert [round(x) for x in first] == [round(x) for x in second] == [*range(len(first))]
    assert all(a < b for a, b in zip(first, second, strict=True)), "in a row the runs stand in their order"


def test_figures_and_sentences_give_the_times(clock):
    chart = timeline(clock)
    titles = [curve.title for curve, _ in emerged_curves(clock, "planted")]
    assert list(chart.x.labels.values()) == titles
    assert titles[:2] == ["Coupling", "Probe accuracy, layer 3"]
    half = [10**y - 1 for y in chart.series[0].y]
    expected = [found.halfway.value for _, found in emerged_curves(clock, "planted")]
    assert half == pytest.approx(expected, rel=1e-3)  # five digits of its logarithm
    ((_, front),) = layer_fronts(clock)
    assert front.series[0].x == [1, 2, 3]
    assert np.log2(10 ** np.array(front.series[0].y)) == pytest.approx([5, 6, 7], abs=0.3)
    matrix = np.array(order_matrix(clock, "planted").cells.values[0], dtype=float)
    assert np.isnan(np.diag(matrix)).all()
    assert (matrix[np.triu_indices(3, 1)] > 0.99).all()
    assert (matrix[np.tril_indices(3, -1)] < 0.01).all()
    curve, found = emerged_curves(clock, "planted")[0]
    halfway = found.halfway
    text = f"half-way at step {axis_text(halfway.value)} ({axis_text(halfway.low)} to {axis_text(halfway.high)})"
    assert sentence(curve, found) == f"Coupling: {text}, peak at {axis_text(found.peak.value)}"
    assert [axis_text(number) for number in (0.2, 9.96, 1444, 25_000)] == ["0.2", "10", "1,444", "25k"]


def test_the_mean_over_seeds_uses_common_checkpoints_and_their_spread(tmp_path):
    curves = []
    for seed in range(4):
        root = write_run(tmp_path / f"s{seed}", seed, shift=0.2 * seed, steps=STEPS[: 12 - seed % 2])
        curves += curves_of(root, metrics=["coupling"])
    (merged,) = merge_seeds(curves, "4 seeds")
    assert merged.error_unit == "seeds"
    assert merged.at.tolist() == STEPS[:11]
    assert merged.seeds == pytest.approx(np.stack([curve.values[:11] for curve in curves]))
    assert merged.values == pytest.approx(merged.seeds.mean(0))
    (found,) = measure_times([merged]).times
    (alone,) = measure_times(curves[:1]).times
    assert abs(np.log2(1 + found.halfway.value) - 3.3) < 0.3
    # Shifts of 0.2 octaves per seed: far more than the errors over prompts of one seed.
    width = lambda time: np.log2(1 + time.high) - np.log2(1 + time.low)  # noqa: E731
    assert width(found.halfway) > 1.5 * width(alone.halfway)


def test_only_curves_that_all_seeds_have_are_averaged_and_the_rest_is_counted(tmp_path, capsys):
    roots = [write_run(tmp_path / f"s{seed}", seed) for seed in range(3)]
    path = roots[2] / "measurements.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "prompt_entropy" not in line))
    merged = merge_seeds([curve for root in roots for curve in curves_of(root)], "3 seeds")
    assert {len(curve.seeds) for curve in merged} == {3}
    assert "prompt_entropy" not in {curve.metric for curve in merged}
    out = tmp_path / "out"
    arguments = ["--seeds", "--confidence", "0.9", "--metrics", "coupling,prompt_entropy", "--root", str(out)]
    assert main(["emerge", *map(str, roots), *arguments]) == 0
    assert "left out: 1 curve: over 3 seeds: not all of them have it" in capsys.readouterr().out
    page = html.unescape((out / "emergence.html").read_text())
    for text in (
        "Over 3 seeds the verdict rests on Student's t (df = 2)",
        "Intervals are 90%",
        "of 6 curves that never change, about 0.6 would",
        "<h1>3 runs</h1>",  # their mean is undefined
    ):
        assert text in page, text


def test_runs_of_other_settings_are_not_seeds_and_omitted_settings_are_reported(tmp_path, capsys, caplog):
    roots = [write_run(tmp_path / f"s{seed}", seed) for seed in range(2)]
    path = roots[1] / "measurements.jsonl"
    path.write_text(path.read_text().replace("c" * 16, "d" * 16))
    for verb in ("emerge", "report"):
        assert main([verb, *map(str, roots), "--seeds", "--root", str(tmp_path / "out")]) == 2
        assert "s0 and s1 measured coupling with other settings, cccccccc and dddddddd" in capsys.readouterr().err
    lines = [
        line.replace("d" * 16, ("e" if '"step":8,' in line else "c") * 16) for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines) + "\n")
    curves = [curve for root in roots for curve in curves_of(root)]
    assert "s1: other settings are left out: coupling: cccccccc is shown, not eeeeeeee at step 8" in caplog.text
    assert {8, *merge_seeds(curves, "2 seeds")[0].at} == {*STEPS}
    assert merge_seeds(
        [replace(curve, settings=UNKNOWN) if curve.run == "s1" else curve for curve in curves], "2 seeds"
    )


def test_the_agreement_of_two_runs_is_spearmans_over_what_emerges_in_both():
    places = {"a": [2, 3, 4, 5, 6, 7, None], "b": [20, 41, 30, 500, 77, 66, 9]}
    curves, times = [], []
    for run, at in places.items():
        for number, place in enumerate(at):
            curves.append(curve_of(f"m{number}", run=run))
            time = place and Time(place, place, place)
            times.append(EmergenceTimes(place is not None, 0.01, time, time, time, time, 12, 0))
    (row,) = agreement_table(Clock(curves, times)).to_dict("records")
    assert (row["run_a"], row["run_b"], row["n"]) == ("a", "b", 6)
    assert row["spearman"] == pytest.approx(stats.spearmanr(places["a"][:6], places["b"][:6]).statistic)
    assert agreement_table(Clock([*curves[:7]] + [replace(c, run="b") for c in curves[:7]], [times[0]] * 14)).empty
    wide = Time(2, 0.5, 11)  # 3 of 10 octaves
    unsure = [replace(found, halfway=wide) if found.halfway == Time(2, 2, 2) else found for found in times]
    assert agreement_table(Clock(curves, unsure))["n"].tolist() == [5]
    mean = [replace(curve, run="2 seeds", seeds=np.stack([AXIS, AXIS])) for curve in curves[:7]]
    with_mean = agreement_table(Clock(mean + curves, times[:7] + times))
    assert list(with_mean["run_a"] + with_mean["run_b"]) == ["ab"], "a mean agrees with what it is of"
    pairs = pd.DataFrame({"spearman": [0.2, 0.9, 0.8, 0.7, 0.6], "n": [5, 6, 7, 8, 9]})
    said = "The orders of 5 pairs of runs agree at a median Spearman of 0.70 (quartiles 0.60 and 0.80), over "
    assert agreement_sentence(pairs) == f"{said}5 to 9 curves a pair."
    assert agreement_sentence(pairs[:1]) == ""


def test_a_value_with_a_comma_can_be_requested_and_the_page_counts_missing_values(tmp_path):
    table = pd.DataFrame(
        {"step": STEPS * 2, "task": ["a"] * 12 + ["b"] * 12, "value": [*rise(5), *rise(7)], "shots": 0}
    )
    table.loc[[4, 7], "value"] = np.nan
    table = pd.concat([table.assign(run=f"GPT-2, seed {seed}") for seed in (1, 2)])
    table.to_csv(tmp_path / "scores.csv", index=False)
    for spelt in (["--where.run=GPT-2, seed 1"], ["--where", "{shots: 0, run: 'GPT-2, seed 1'}"]):
        assert main(["emerge", str(tmp_path / "scores.csv"), *spelt, "--root", str(tmp_path / "out")]) == 0
        assert set(pd.read_csv(tmp_path / "out" / "times.csv")["run"]) == {"GPT-2, seed 1"}
    assert "Missing values: 2, in 1 of 2 curves" in (tmp_path / "out" / "emergence.html").read_text()


def test_a_run_without_a_curve_is_listed_as_left_out():
    lengths = {("long", "a"): 8, ("long", "b"): 2, ("short", "a"): 2, ("short", "b"): 3}
    curves = [
        curve_of(metric, run=run, at=np.arange(float(steps)), values=np.arange(float(steps)))
        for (run, metric), steps in lengths.items()
    ]
    why = "expected values at 6 checkpoints or more"
    assert measure_times(curves).left_out == {why: 1, f"all of short: {why}": 2}


def test_long_names_of_rows_are_not_cut_and_keep_their_number():
    tags = [{"of": of, "drop_first": 1, "normalization": "maxEntropy"} for of in ("accuracy", "token_curvature")]
    curves = [curve_of("monotonicity_spearman", tags=each) for each in (*tags, {"of": "accuracy"})]
    clock = Clock(curves, [times_at(2.0, 3.0, 4.0)] * 3)
    names = [
        "Monotonicity of accuracy, without the first token, share of the maximum",
        "Monotonicity of token curvature, without the first token, share of the maximum",
        "Monotonicity of accuracy",
    ]
    assert [*timeline(clock).x.labels.values()] == names
    numbered = [f"{number}  {name}" for number, name in enumerate(names, 1)]
    assert [*order_matrix(clock, "a").y.labels.values()] == numbered


def test_a_front_of_layers_shows_the_steps_at_which_they_are_half_way():
    times = [times_at(half, half, half * 1.2) for half in (30, 70)]
    ((_, front),) = layer_fronts(Clock([curve_of(layer=1), curve_of(layer=2)], times))
    labels = [int(text) for text in front.y.labels.values()]
    assert {*labels} <= {*STEPS}
    assert labels[0] < 30 < 84 < labels[-1]
    assert "tickCount" not in encoded(front.y, "y")["axis"]  # with more labels Vega leaves out every second one


def scores(**columns) -> pd.DataFrame:
    rows = [
        {"model": model, "task": task, "metric": "acc", "step": step, "value": value, "stderr": 0.02, "shots": shots}
        | {"family": model[0]}
        for model in ("x1", "y1")
        for task, middle in (("easy", 3), ("hard", 7))
        for shots in (0, 5)
        for step, value in zip(STEPS, rise(middle + shots / 5), strict=True)
    ]
    return pd.DataFrame(rows).assign(**columns)


def test_a_curve_with_missing_standard_errors_is_reported(tmp_path, caplog):
    table = scores()
    some = (table["model"] == "x1") & (table["step"] == STEPS[3])
    table.assign(stderr=table["stderr"].where(~some)).to_csv(tmp_path / "scores.csv", index=False)
    curves = {(curve.run, curve.analysis, curve.tags["shots"]): curve for curve in curves_of(tmp_path / "scores.csv")}
    assert [curve.error_unit for curve in curves.values()] == [""] * 4 + ["prompts"] * 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(
        f"of x1 has no standard error at 1 of {len(STEPS)} checkpoints, and 3 other curves have gaps: errors are "
        "guessed from the curve"
    )
    caplog.clear()
    table.drop(columns="stderr").to_csv(tmp_path / "none.csv", index=False)
    assert {curve.error_unit for curve in curves_of(tmp_path / "none.csv")} == {""}
    assert not caplog.records  # the column `over` says so for all


def test_a_table_of_scores_has_a_curve_for_each_combination_of_its_other_columns(tmp_path):
    table = scores().sample(frac=1, random_state=0)
    table.to_parquet(tmp_path / "scores.parquet")
    table.to_csv(tmp_path / "scores.csv", index=False)
    table.to_json(tmp_path / "scores.jsonl", orient="records", lines=True)
    parquet, csv, lines = (curves_of(tmp_path / f"scores.{kind}") for kind in ("parquet", "csv", "jsonl"))
    assert [curve.key for curve in csv] == [curve.key for curve in parquet] == [curve.key for curve in lines]
    assert len(parquet) == 8
    curve = next(c for c in parquet if (c.run, c.analysis, c.tags) == ("y1", "hard", {"shots": 5}))  # no "family" tag
    assert (curve.at.tolist(), curve.error_unit, curve.metric) == (STEPS, "prompts", "acc")
    assert curve.values == pytest.approx(rise(8))
    few = curves_of(tmp_path / "scores.csv", where={"shots": "0", "model": "x1"})
    assert [curve.analysis for curve in sorted(few, key=lambda c: c.key)] == ["easy", "hard"]


def test_results_of_lm_eval_are_curves(tmp_path):
    for step, value in zip(STEPS, rise(5), strict=True):
        folder = tmp_path / "harness" / f"run{step}"
        folder.mkdir(parents=True)
        scored = {"acc,none": value, "acc_stderr,none": 0.01, "alias": "piqa"}
        scored |= {f"match,{name}": value / 2 for name in ("strict", "flexible")}
        config = {"model_args": f"pretrained=org/tiny,revision=step{step},dtype=float32"}
        (folder / "results_2026.json").write_text(json.dumps({"results": {"piqa": scored}, "config": config}))
        (folder / "other.json").write_text("{}")
    harness, *matches = curves_of(tmp_path / "harness")
    assert (harness.run, harness.analysis, harness.metric, harness.tags) == ("org/tiny", "piqa", "acc", {})
    filters = ({"filter": "strict"}, {"filter": "flexible"})
    assert [(each.metric, each.tags) for each in matches] == [("match", tags) for tags in filters]
    assert len(curves_of(tmp_path / "harness", metrics=("acc",))) == 1
    assert harness.at.tolist() == STEPS
    assert harness.values == pytest.approx(rise(5))
    assert harness.stderr == pytest.approx(np.full(12, 0.01))


def test_the_command_writes_tables_figures_and_a_page(run, tmp_path, capsys):
    other, out = write_run(tmp_path / "other", 1, shift=0.1), tmp_path / "out"
    words = ["--seeds", "--metrics", "coupling,probe/accuracy", "--root", str(out)]
    assert main(["emerge", str(run), str(other), *words]) == 0
    times, order, layers = (pd.read_csv(out / f"{name}.csv") for name in ("times", "order", "layers"))
    assert tuple(times.columns[: len(COLUMNS)]) == COLUMNS
    assert {*times.run} == {*order.run} == {"planted", "other", "2 seeds"}
    assert set(times[times.run == "2 seeds"].over) == {"seeds"}
    shown = capsys.readouterr().out
    assert f" of {len(times)} curves emerge" in shown
    assert "layers.csv" in shown
    page = (out / "emergence.html").read_text()
    for text in ("Probe accuracy, layer 3", "Coupling: half-way at step", "Does it rise over the layers?"):
        assert text in page
    for name in ("timeline", "order_planted", "layers_probe_accuracy", "monotonicity_probe_accuracy"):
        assert {path.suffix for path in out.glob(f"{name}.*")} == {".png", ".svg", ".pdf"}, name
    assert tuple(layers.columns) == LAYER_COLUMNS
    layers = layers[(layers.run == "planted") & (layers.metric == "accuracy") & (layers.statistic == MONOTONICITY)]
    # layers 1 to 3 rise one after another: the first is ahead at first, and at the end all are equal
    assert layers.set_index("step")["value"][64] == -1
    assert (times[times.run == "planted"].metric == MONOTONICITY).sum() == 1


def test_a_missing_metric_is_reported_with_the_available_ones(run, caplog):
    has, *_ = {curve.metric for curve in curves_of(run)}
    asked = curves_of(run, metrics=[has, "los"])
    assert {curve.metric for curve in asked} == {has}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"metrics: {run} has no curve of los over steps: expected of ")


def test_a_logged_scalar_is_a_curve_under_its_own_name(run):
    rows = [{"step": step, "tokens": 8 * step, "my/loss": step**0.5} for step in range(1, 1001)]
    rows[9] |= {"score": 0.25}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    long, short = curves_of(run, metrics=["my/loss", "score"], axis="tokens")
    assert (long.title, short.title, short.at, short.values) == ("my/loss", "score", [80], [0.25])
    assert (long.at[0], long.values[0], long.at[-1]) == (8, 1, 8000), "single steps first, then means over more"
    assert len(long.at) <= 100
    widths = np.diff(long.at, prepend=0) / 8
    assert (long.values * widths).sum() == pytest.approx(sum(row["my/loss"] for row in rows))
    assert not {curve.metric for curve in curves_of(run)} & {"my/loss", "score"}


def test_tags_choose_curves_of_a_run_and_times_can_be_tokens(run):
    (curve,) = curves_of(run, where={"normalization": "raw"})
    assert curve.metric == "prompt_entropy"  # curves without this tag are not chosen
    by_step, by_tokens = (measure_times(curves_of(run, metrics=["coupling"], axis=axis)) for axis in ("step", "tokens"))
    ratio = by_tokens.times[0].halfway.value / by_step.times[0].halfway.value
    assert ratio == pytest.approx(2048, rel=0.25)  # smooth over another axis: the same gap, another place in it


def test_unmeasurable_input_is_refused_in_one_sentence(run, tmp_path, capsys):
    few = write_run(tmp_path / "few", steps=STEPS[:5])
    suspect = write_run(tmp_path / "suspect", audit={8: "suspect: equal to\nthe final step"})
    good = pd.DataFrame({"step": STEPS, "value": rise(4)})
    results = {"results": {"piqa": {"acc": "high"}}, "model_name": "m/step1000"}
    tables = {
        "no_value": scores().drop(columns="value"),
        "no_step": scores(step=np.nan),
        "apart": scores(loss=np.arange(len(scores()))),
        "words": good.assign(value="high"),
        "halves": good.assign(layer=0.5),
        "one_step": good.assign(step=0),
    }
    for name, table in tables.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    for name, content in {"list": [1, 2], "results": results}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "empty").mkdir()
    for sentence_, arguments in (
        ("times: few, Coupling: expected values at 6 checkpoints or more, got 5", [few]),
        ("step 8 is suspect (equal to the final step)", [suspect]),
        ("expected a column value", ["no_value.csv"]),
        ("two values at step nan of", ["no_step.csv"]),
        ("value: expected numbers", ["words.csv"]),
        ("layer: expected whole numbers", ["halves.csv"]),
        ("two values at step 0: expected one", ["one_step.csv"]),
        ("or results of lm-eval", ["list.json"]),
        ("got neither", ["results.json"]),
        ("no curve over steps of normalization=logN", [run, "--where.normalization=logN"]),
        ("no curve over steps of shots=3,task=easy", ["apart.csv", "--where.shots=3", "--where.task=easy"]),
        ("expected a run's folder, or results", ["empty"]),
        ("is not there", ["gone.csv"]),
        ("has no curve of accuracies and los over steps", [run, "--metrics", "accuracies,los"]),
        ("where: expected one of dict", [run, "--where", "k"]),
        ("planted and again have the same numbers", [run, write_run(tmp_path / "again"), "--seeds"]),
        ("has the name of another, planted", [run, run]),
        ("confidence: expected at most 0.999", [run, "--confidence", "0.9999"]),
        ("not a directory", [run, "--root", tmp_path / "list.json"]),
        ("settings: nothing was measured with 'abc'", [run, "--settings", "abc"]),
    ):
        place, *options = arguments
        assert main(["emerge", str(tmp_path / place), *map(str, options)]) == 2, sentence_
        error = capsys.readouterr().err
        assert (sentence_ in error, "Traceback" in error) == (True, False), (sentence_, error)
    assert curves_of(suspect, allow_suspect=True)


def test_empty_cells_of_a_table_are_not_values(tmp_path):
    rows = pd.DataFrame({"step": STEPS, "value": rise(4), "shots": 0, "metric": "acc", "run": None})
    gap = pd.DataFrame([{"step": 0, "value": 1, "shots": None, "metric": None, "run": None}])
    pd.concat([gap, rows]).to_csv(tmp_path / "gaps.csv", index=False)
    (curve,) = curves_of(tmp_path / "gaps.csv", where={"shots": "0"})  # a column with a gap reads as 0.0
    assert (curve.run, curve.metric, curve.tags) == ("gaps", "acc", {})
    assert [(c.run, c.metric) for c in curves_of(tmp_path / "gaps.csv")] == [("gaps", "value"), ("gaps", "acc")]


def test_two_values_at_one_step_of_a_curve_are_refused(run):
    (first, *rest) = records.read(run / "measurements.jsonl")
    alike = [replace(first.records[0], tags=tags) for tags in ({"a": 1, "b": 2}, {"a": "1,b=2"})]  # of one name
    for axis, measurements in (
        ("step", [replace(first, records=[*first.records, *first.records[:1]]), *rest]),
        ("step", [replace(first, records=alike)]),
        ("tokens", [replace(m, tokens=0) for m in (first, *rest)]),
    ):
        with pytest.raises(InputError, match=rf"two values of .* at {axis}s? 0: expected one"):
            curves_in("run", measurements, axis=axis)


def test_names_and_layers_of_an_untrusted_run_are_drawn_escaped(tmp_path):
    root, script = tmp_path / "run", "<script>alert(1)</script>"
    for step, value in zip(STEPS[:6], rise(3), strict=False):
        parts = [
            Record(metric=f"a\0\x1b{script}", value=value, stderr=ERROR, layer=layer, tags={"<b>": script})
            for layer in (None, 2**62 + 1)
        ]
        write(root, "=1+1", parts, run=f"\0{script}", step=step)
    assert main(["emerge", str(root), "--root", str(tmp_path / "out")]) == 0
    assert main(["report", str(root)]) == 0
    for page in (tmp_path / "out" / "emergence.html", root / "report.html"):
        assert (script in page.read_text(), "&lt;script&gt;alert(1)" in page.read_text()) == (False, True)
    times = pd.read_csv(tmp_path / "out" / "times.csv", dtype={"layer": "Int64"})
    assert times.layer.tolist() == [pd.NA, 2**62 + 1]


def test_the_page_of_a_run_begins_with_emergence_times_without_suspect_checkpoints(run, tmp_path, monkeypatch):
    def sections_of(root, **options) -> list[str]:
        page = write_report(root, tmp_path / "page.html", **options).read_text()
        return re.findall(r'<section id="(.*?)"', page)

    ids = sections_of(run)
    text = (tmp_path / "page.html").read_text()
    section = text[text.index('<section id="emergence">') : text.index('<section id="results">')]
    lines = re.findall(r"<li>(.*?)</li>", section)
    halfway = {line.split(":")[0]: float(re.findall(r"half-way at step ([\d,.]+)", line)[0]) for line in lines}
    planted = {"Coupling": 7, "Probe accuracy, layer 3": 127, "Prompt entropy, raw": 255}
    assert list(halfway) == list(planted)  # of the whole model or the last layer, earliest first
    for name, step in planted.items():
        assert abs(np.log2((1 + halfway[name]) / (1 + step))) < 0.5, name
    assert "Does not emerge: Logit-lens loss, layer 3." in section
    assert 'class="metric' in section
    pictures = {path.stem for path in write_pictures(run, tmp_path / "pictures")}
    assert "emergence_timeline" in pictures
    assert len(pictures) == len(page_figures(tmp_path / "page.html"))
    suspect = write_run(tmp_path / "run", audit=dict.fromkeys(STEPS[4:], "suspect: equal to the final step"))
    for root in (write_run(tmp_path / "short", steps=STEPS[:5]), suspect):
        assert "emergence" not in sections_of(root)
    assert "emergence" in sections_of(suspect, allow_suspect=True)
    monkeypatch.setattr("lit_layers.report.emergence.times_of_run", lambda *_: 1 / 0)
    assert sections_of(run) == ids
    told = "The times at which metrics emerge could not be computed: ZeroDivisionError: division by zero"
    assert told in (tmp_path / "page.html").read_text()
