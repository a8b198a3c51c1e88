"""`emerge --forecast` against curves whose end was planted, and on the published curves of the Pythia models."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from lit_layers.cli.main import main
from lit_layers.clock import Clock, curves_of, early_parts, forecast_models, measure_times
from lit_layers.clock.model_forecasts import COLUMNS, METHODS, error_chart, error_rows, model_group, sentences
from lit_layers.clock.step_curves import StepCurve
from lit_layers.errors import InputError

STEPS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000])  # 8 of them in the first tenth
AXIS = np.log2(1 + STEPS)
ERROR = 0.01
NO_TIMES = Clock([], [])


def curve(run, values, *, task="task", metric="acc", steps=STEPS):
    values = np.asarray(values, dtype=float)
    errors = np.full(len(values), ERROR)
    return StepCurve(run=run, analysis=task, metric=metric, layer=None, tags={}, at=steps, values=values, stderr=errors)


def lines(models: int = 8, **options):
    """A level and a slope of each model's own."""
    rng = np.random.default_rng(0)
    return [curve(f"m{n}", rng.normal() + rng.normal() * AXIS, **options) for n in range(models)]


def rise(middle, height=1.0):
    return height / (1 + np.exp(-(AXIS - middle) / 0.3))


def row_of(errors, method="curve", target="final", held_out="model", metric=""):
    kept = (errors["method"] == method) & (errors["of"] == target) & (errors["held_out"] == held_out)
    (row,) = errors[kept & (errors["metric"] == metric)].to_dict("records")
    return row


def test_the_end_of_straight_curves_is_forecast_exactly_and_persistence_is_off_by_their_slope():
    curves = lines()
    found = forecast_models(early_parts(curves, 0.1), NO_TIMES)
    assert tuple(found.table.columns) == COLUMNS
    assert found.table["curve"].tolist() == pytest.approx([each.values[-1] for each in curves], abs=1e-6)
    assert found.table["persistence"].tolist() == pytest.approx([each.values[STEPS == 64][0] for each in curves])
    for row in found.table.to_dict("records"):
        others = [each.values[-1] for each in curves if each.run != row["run"]]
        assert (row["others"], row["num_training"]) == (pytest.approx(np.median(others)), 7)
    assert row_of(found.errors)["error"] < 1e-6
    ends = np.array([each.values[-1] for each in curves])
    missed = np.abs(ends - [each.values[STEPS == 64][0] for each in curves]).mean() / ends.std()
    assert row_of(found.errors, "persistence")["error"] == pytest.approx(missed)
    assert "It beats persistence (0.00 [0.00, 0.00] of its error)." in sentences(found)[0]
    assert "no half-way point is forecast" in sentences(found)[1]
    assert "nothing is said against the loss alone" in sentences(found)[2]


def test_what_has_no_number_is_left_out_and_counted():
    curves = lines(9)
    curves[1].values[3] = np.inf
    curves[2] = replace(curves[2], at=STEPS - 1)
    curves[3] = replace(curves[3], stderr=-np.ones(len(STEPS)))  # forecast, though no time says when it emerges
    early = early_parts(curves, 0.1)
    assert early.left_out == {"a step is below 0 or a value beyond 1e+300": 2}
    found = forecast_models(early, measure_times([each for each in curves if each is not curves[2]]))
    assert sum(found.counts.values()) == 6
    assert set(found.table["run"]) == {each.run for each in curves} - {"m1", "m2"}
    steps = np.arange(101)
    (part,) = early_parts([curve(f"m{n}", n + steps, steps=steps) for n in range(5)], 0.57).parts
    assert (part.until, part.early.tolist()) == (57, [57, 58, 59, 60, 61])  # 0.57 x 100 is a rounding less
    some = [curve(f"m{n}", AXIS + n, task="lm", metric="loss") for n in range(6)]
    (*_, said, _) = sentences(forecast_models(early_parts(lines(9) + some, 0.1, loss="lm/loss"), NO_TIMES))
    assert said.startswith("Not all models of any curve have the early lm/loss, so that nothing")


@pytest.mark.parametrize("unit", [2.0**-1000, 2.0**990])
def test_forecasts_are_the_same_in_any_unit(unit):
    curves = lines()
    found, other = (
        forecast_models(early_parts([replace(c, values=u * c.values) for c in curves], 0.1), NO_TIMES)
        for u in (1, unit)
    )
    for name in ("curve", "curve_low", "curve_high", "persistence", "others", "unit"):
        assert (other.table[name] / unit).tolist() == found.table[name].tolist(), name
    assert other.errors.drop(columns="metric").equals(found.errors.drop(columns="metric"))


def test_where_nothing_changes_early_or_late_the_page_says_that_persistence_is_not_beaten():
    rng = np.random.default_rng(0)
    curves = [curve(f"m{n}", rng.normal() + 1e-3 * rng.normal(size=len(STEPS))) for n in range(12)]
    found = forecast_models(early_parts(curves, 0.1), NO_TIMES)
    assert "It does not beat persistence" in sentences(found)[0]


def test_errors_coverage_and_ratios_are_those_of_the_rows():
    rng = np.random.default_rng(0)
    curves = [curve(f"m{n}", rng.normal() + rng.normal(size=12).cumsum(), task=t) for n in range(10) for t in "ab"]
    curves += [curve(f"m{n}", np.exp(rng.normal() + rng.normal(size=12)), metric="ppl", task="lm") for n in range(10)]
    found = forecast_models(early_parts(curves, 0.1, loss="lm/ppl"), NO_TIMES)
    table = found.table
    assert set(table["analysis"]) == {"a", "b"}  # not the loss itself
    unit = table["analysis"].map({t: np.std([each.values[-1] for each in curves if each.analysis == t]) for t in "ab"})
    errors = {name: (table[name] - table["truth"]).abs() / unit for name in METHODS}
    for name in METHODS:
        row = row_of(found.errors, name)
        assert row["error"] == pytest.approx(errors[name].mean())
        assert (row["num_models"], row["num_curves"], row["num_forecasts"]) == (10, 2, 20)
    row = row_of(found.errors, "both")
    assert row["ratio"] == pytest.approx(errors["both"].mean() / errors["persistence"].mean())
    assert row["to_loss"] == pytest.approx(errors["both"].mean() / errors["loss"].mean())
    assert row["coverage"] == ((table["both_low"] <= table["truth"]) & (table["truth"] <= table["both_high"])).mean()
    assert row["width"] == pytest.approx(((table["both_high"] - table["both_low"]) / unit).mean())
    # Resampled here, too: whole models, both of their curves at once.
    sums = pd.DataFrame({n: errors[n] for n in ("both", "loss")}).groupby(table["run"]).sum().to_numpy()
    drawn = np.array([sums[rng.integers(10, size=10)].sum(0) for _ in range(4000)])
    ends = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    assert [row["to_loss_low"], row["to_loss_high"]] == pytest.approx(ends, rel=0.05)
    assert row["to_loss_low"] < row["to_loss"] < row["to_loss_high"]


def planted(models: int = 8):
    """The lower the early loss, the later the rise, but of the first model, which rises early, and the last, which does
    not; the loss falls in a straight line."""
    losses = [curve(f"m{n}", np.exp(4 - 0.1 * n - 0.1 * AXIS), metric="ppl", task="lm") for n in range(models)]
    rises = [curve(f"m{n}", rise(7.2 + 0.25 * n)) for n in range(1, models - 1)]
    return [*losses, curve("m0", rise(3.0)), *rises, curve(f"m{models - 1}", 0 * AXIS)]


@pytest.mark.soak
def test_half_way_points_are_forecast_of_what_emerges_later_by_what_emerges_later():
    curves = planted()
    found = forecast_models(early_parts(curves, 0.1, loss="lm/ppl"), measure_times(curves))
    assert found.counts == {"emerge early": 1, "emerge later": 6, "emerge never": 1}
    rows = found.table[found.table["of"] == "halfway"]
    assert rows["run"].tolist() == [f"m{n}" for n in range(1, 7)]
    assert set(rows["num_training"]) == {5}
    halfway = {each.run: time.halfway.value for each, time in _pairs(curves) if time.halfway}
    assert rows["truth"].tolist() == pytest.approx([halfway[run] for run in rows["run"]])
    others = [np.median([np.log2(1 + halfway[f"m{n}"]) for n in range(1, 7) if f"m{n}" != run]) for run in rows["run"]]
    assert np.log2(1 + rows["others"]).tolist() == pytest.approx(others)
    # The rises are a quarter of an octave apart, 1.25 in all, and the loss is a straight line in them.
    assert row_of(found.errors, "others", "halfway")["error"] > 0.3
    assert row_of(found.errors, "loss", "halfway")["error"] < 0.15
    octaves = (np.log2(1 + rows["loss"]) - np.log2(1 + rows["truth"])).abs().mean()
    assert row_of(found.errors, "loss", "halfway")["error"] == pytest.approx(octaves)
    assert "Of 8 curves of single models 1 emerge within that part, 6 later and 1 never" in sentences(found)[-1]
    assert "does not beat the loss alone" in sentences(found)[1]


def _pairs(curves):
    clock = measure_times([each for each in curves if each.metric == "acc"])
    return zip(clock.curves, clock.times, strict=True)


def _measured(changed):
    """The curve and its times, which are the same beside any others."""
    clock = measure_times([changed])
    return clock.curves, clock.times


@pytest.mark.parametrize("models", [(0,), pytest.param((1, 2, 3, 4, 5, 6), marks=pytest.mark.soak)])
def test_late_values_of_a_held_out_model_change_its_truth_and_nothing_of_its_forecast(models):
    rng = np.random.default_rng(1)
    noisy = [rise(7.6 + 0.2 * n) + ERROR / 2 * rng.normal(size=12) for n in range(7)]
    losses = [curve(f"m{n}", 4 - 0.1 * n - 0.1 * AXIS, metric="loss", task="lm") for n in range(7)]
    clock = measure_times([*losses, *(curve(f"m{n}", each) for n, each in enumerate(noisy))])

    def forecast(clock):
        table = forecast_models(early_parts(clock.curves, 0.1, loss="lm/loss"), clock).table
        return table.set_index(["of", "run"]).sort_index()

    before = forecast(clock)
    for model in models:
        late = noisy[model].copy()
        late[STEPS > 100] *= 0.7
        late[STEPS > 500] += 0.4
        changed = replace(clock, curves=[*clock.curves], times=[*clock.times])
        (changed.curves[7 + model],), (changed.times[7 + model],) = _measured(curve(f"m{model}", late))
        after = forecast(changed)
        told = [name for name in COLUMNS if name.startswith((*METHODS, "num_training"))]
        for target in ("final", "halfway"):
            pd.testing.assert_series_equal(
                before.loc[(target, f"m{model}"), told], after.loc[(target, f"m{model}"), told]
            )
            other = f"m{(model + 1) % 7}"
            assert before.loc[(target, other), "curve"] != after.loc[(target, other), "curve"]
            assert before.loc[(target, f"m{model}"), "truth"] != after.loc[(target, f"m{model}"), "truth"]


def test_models_of_a_size_are_also_held_out_together():
    assert [
        model_group(name) for name in ("pythia-1.4b-deduped", "org/pythia-70m", "gpt2_124M_seed3", "seed1", "v2")
    ] == [
        "pythia-1.4b",
        "org/pythia-70m",
        "gpt2_124M",
        "seed1",
        "v2",
    ]
    rng = np.random.default_rng(0)
    sizes = ["1b", "2b", "3b", "4b", "5b"]
    levels = {size: rng.normal() for size in sizes}
    runs = [f"m-{size}{end}" for size in sizes for end in ("", "-deduped")]
    curves = [curve(run, levels[run[2:4]] + 0.01 * rng.normal(size=12)) for run in runs]
    table = forecast_models(early_parts(curves, 0.1), NO_TIMES).table
    assert len(table) == 20
    for row in table.to_dict("records"):
        alone = row["held_out"] == "model"
        assert row["num_training"] == (9 if alone else 8)
        others = [
            each.values[-1] for each in curves if (each.run != row["run"] if alone else row["group"] not in each.run)
        ]
        assert row["others"] == pytest.approx(np.median(others))
    alone = forecast_models(early_parts([*curves[:6], curve("x", AXIS)], 0.1), NO_TIMES).table
    assert set(alone["held_out"]) == {"model"}  # four groups are too few


def test_models_that_end_elsewhere_and_gaps_are_left_out_and_counted():
    curves = lines(7)
    curves += [curve("short", AXIS[:-1], steps=STEPS[:-1]), *lines(3, task="rare")]
    curves[0].values[2] = np.nan
    early = early_parts(curves, 0.1)
    (part,) = early.parts
    assert [each.run for each in part.curves] == [f"m{n}" for n in range(7)]
    assert early.left_out == {"the model ends at another step than most": 1, "fewer than 5 models have it": 3}
    curves += [curve(f"m{n}", (AXIS > 8) * 1.0, task="same") for n in range(6)]
    found = forecast_models(early_parts(curves, 0.1), NO_TIMES)
    assert "Not forecast: 6 curves of single models: all models have the same final value." in sentences(found)
    assert set(found.table["analysis"]) == {"task"}
    assert "Not forecast: 3 curves" in sentences(forecast_models(early, NO_TIMES))[-1]


def write(curves, path):
    rows = [
        {"run": each.run, "task": each.analysis, "metric": each.metric, "step": step, "value": value, "stderr": ERROR}
        for each in curves
        for step, value in zip(each.at, each.values, strict=True)
    ]
    pd.DataFrame(rows).to_csv(path, index=False)
    return str(path)


def test_the_command_writes_the_forecasts_their_errors_a_figure_and_a_section(tmp_path, capsys):
    scores = write(planted(), tmp_path / "scores.csv")
    out = tmp_path / "out"
    assert main(["emerge", scores, "--forecast", "0.1", "--loss", "lm/ppl", "--metrics", "acc", "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "From the first 10% of training the final value of 8 held-out models" in shown
    table = pd.read_csv(out / "forecast.csv")
    assert tuple(table.columns) == COLUMNS
    assert set(table["metric"]) == {"acc"}
    empty = ["layer", "tags"]
    again = pd.read_parquet(out / "forecast.parquet")
    pd.testing.assert_frame_equal(table.drop(columns=empty), again.drop(columns=empty), check_dtype=False)
    assert set(pd.read_csv(out / "forecast_errors.csv")["method"]) == set(METHODS)
    assert {path.suffix for path in out.glob("forecast.*")} == {".csv", ".parquet", ".png", ".svg", ".pdf"}
    page = (out / "emergence.html").read_text()
    assert "Is the end known early?" in page
    assert "early curve" in page
    found = forecast_models(early_parts(planted(), 0.1, loss="lm/ppl"), measure_times(planted()))
    assert [head for head, _ in error_rows(found)] == [
        "Final value, a model held out (standard deviations over models)",
        "Half-way point, a model held out (octaves)",
    ]
    assert list((error_chart(found).x.labels or {}).values()) == ["Final value", "Half-way point"]


def test_what_cannot_be_forecast_is_refused_in_a_sentence(tmp_path, capsys):
    scores = write(planted(), tmp_path / "scores.csv")
    four = write(lines(4), tmp_path / "four.csv")
    twice = write([*planted(), *lines(8, metric="ppl")], tmp_path / "twice.csv")
    for sentence, arguments in (
        ("forecast: expected a share of training above 0 and below 1, got 10", [scores, "--forecast", "10"]),
        ("forecast: expected a share of training above 0 and below 1, got 0", [scores, "--forecast", "0"]),
        ("forecast: expected 5 models or more, of which one is held out, got 4", [four, "--forecast", "0.1"]),
        (
            "expected 6 checkpoints that all models have in the first 1% of training, got 5",
            [scores, "--forecast", "0.01"],
        ),
        (
            "loss: expected ANALYSIS/METRIC of a curve of 5 models, got lm/loss",
            [scores, "--forecast", "0.1", "--loss", "lm/loss"],
        ),
        ("loss: m0 has several curves of ppl", [twice, "--forecast", "0.1", "--loss", "ppl"]),
    ):
        assert main(["emerge", *arguments, "--out", str(tmp_path / "out")]) == 2, sentence
        error = capsys.readouterr().err
        assert sentence in error, (sentence, error)
        assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ published curves


def pythia(realdata):
    file = realdata / "pythia_evals" / "pythia_evals.parquet"
    if not file.is_file():
        pytest.skip(f"no {file}")
    chosen = {"version": "pythia-v1", "setting": "zero-shot"}
    return curves_of(file, where=chosen, metrics=["acc", "lambada_openai/ppl"])


@pytest.mark.soak
@pytest.mark.realdata
def test_the_end_of_pythia_models_is_forecast_better_than_by_persistence_and_no_better_than_by_the_loss(realdata):
    """The numbers of docs/emergence_accuracy.md."""
    early = early_parts(pythia(realdata), 0.1, loss="lambada_openai/ppl")
    assert early.left_out == {"the model ends at another step than most": 195}  # 3 models with other batches
    found = forecast_models(early, NO_TIMES)
    for held_out, error, ratio, to_loss, coverage in (
        ("model", 0.812, 0.753, 1.068, 0.812),
        ("group", 0.848, 0.787, 0.999, 0.868),
    ):
        row = row_of(found.errors, held_out=held_out)
        assert [row["error"], row["ratio"], row["to_loss"]] == pytest.approx([error, ratio, to_loss], abs=2e-3)
        assert row["coverage"] == pytest.approx(coverage, abs=2e-3)
        assert [row[f"num_{of}"] for of in ("models", "groups", "curves", "forecasts")] == [16, 8, 65, 1040]
    text = sentences(found)[0]
    assert "It beats persistence" in text
    assert "It does not beat the loss alone" in text


@pytest.mark.realdata
@pytest.mark.soak
def test_half_way_points_of_pythia_models_are_forecast_worse_than_by_the_others_median(realdata):
    """The numbers of docs/emergence_accuracy.md; the times take two CPU minutes."""
    curves = pythia(realdata)
    found = forecast_models(early_parts(curves, 0.1, loss="lambada_openai/ppl"), measure_times(curves))
    assert found.counts == {"emerge early": 283, "emerge later": 278, "emerge never": 479}
    row = row_of(found.errors, target="halfway", held_out="group")
    assert [row["error"], row["ratio"], row["coverage"]] == pytest.approx([1.70, 1.19, 0.877], abs=0.02)
    assert row["ratio_low"] > 1


@pytest.mark.realdata
def test_one_model_over_training_is_refused(realdata, tmp_path):
    file = realdata / "layerwise_reference" / "mteb_layer_scores.parquet"
    if not file.is_file():
        pytest.skip(f"no {file}")
    scores = pd.read_parquet(file).dropna(subset="step").rename(columns={"size": "run", "main_score": "value"})
    scores = scores[(scores["split"] == "test") & (scores["subset"] == "default")]
    scores[["run", "step", "layer", "task", "value"]].to_csv(tmp_path / "mteb.csv", index=False)
    with pytest.raises(InputError, match="expected 5 models or more, of which one is held out, got 1"):
        early_parts(curves_of(tmp_path / "mteb.csv"), 0.1)
