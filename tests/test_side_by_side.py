"""Comparison of runs: means, bands and differences against scipy, and the page of the command."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.clock.step_curves import StepCurve
from lit_layers.figures.labels import DASH, whole
from lit_layers.records import Record
from lit_layers.report.side_by_side import (
    Line,
    _blocks,
    difference,
    difference_chart,
    last_values,
    layer_chart,
    page_of,
    read_side_by_side,
    training_chart,
)
from tests.support.runs import make_run, measurement
from tests.support.undrawn import leave_undrawn
from tests.support.written import write

STEPS, LAYERS = (0, 1, 10, 100), (1, 2, 3)
RNG = np.random.default_rng(3)


def test_sections_have_the_order_of_a_single_runs_page_and_every_choice_has_a_name(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / f"{seed}", run=f"{seed}", seed=seed, steps=(0, 1))
    measured = dict.fromkeys(each.analysis for each in records.read(tmp_path / "1" / "measurements.jsonl"))
    content = read_side_by_side([tmp_path / "1", tmp_path / "2"])
    made = _blocks(content)
    assert [*made] == [*dict.fromkeys(last_values(content)["analysis"])] == [name for name in measured if name in made]
    assert [*made] != sorted(made)
    blocks = {block["title"]: block for blocks in made.values() for block in blocks}
    texts = {title: [choice["text"] for choice in block["choices"]] for title, block in blocks.items()}
    assert texts["Probe accuracy (share)"] == ["true labels", "random labels"], "what lacks the tags of others"
    assert texts["Line shape score"] == ["mean", "median"]
    assert all(text for choices in texts.values() if len(choices) > 1 for text in choices)


def write_run(root, values, *, shuffled: bool = False, steps=STEPS, stderr: float | None = 0.1, about=None):
    """Write a run with `values` (checkpoints,) as coupling; the accuracy of layer l is l times as large."""
    for step, number in zip(steps, values, strict=False):
        found = {
            "coupling": [Record(metric="coupling", value=number, stderr=stderr, tags={"k": 4})],
            "probe": [Record(metric="accuracy", value=number * layer, layer=layer, stderr=stderr) for layer in LAYERS],
        }
        for analysis, parts in found.items():
            write(root, analysis, parts, run=root.name, step=step, provenance=(about or {}).get(analysis, {}))
    config = {"data": {"class_path": "x.Y", "init_args": {"shuffle_tokens": shuffled}}}
    (root / "run.json").write_text(json.dumps({"run": root.name, "config": config}))
    return root


@pytest.fixture
def seeds(tmp_path):
    """Write three seeds and three controls; return their values `[group, seed, checkpoint]`."""
    values = RNG.uniform(0.1, 0.3, (2, 3, len(STEPS))) + np.array([0.2, 0])[:, None, None]
    roots = [
        write_run(tmp_path / f"{name}{seed}", values[group, seed], shuffled=bool(group))
        for group, name in enumerate(("real", "control"))
        for seed in range(3)
    ]
    return roots, values


def curve(values, at=STEPS, stderr=None, metric="without_a_range") -> StepCurve:
    numbers = {"at": np.array(at), "values": np.array(values), "stderr": None if stderr is None else np.array(stderr)}
    return StepCurve(run="a", analysis="coupling", metric=metric, layer=None, tags={}, **numbers)


def test_a_band_is_students_over_seeds_or_that_over_prompts_of_one_run():
    rows = RNG.normal(size=(4, 4))
    line = Line.from_curves("a", [curve(row) for row in rows])
    low, high = stats.t.interval(0.95, 3, rows.mean(0), stats.sem(rows))
    assert (line.low, line.high, line.interval_over) == (pytest.approx(low), pytest.approx(high), "4 seeds")
    alone = Line.from_curves("a", [curve(rows[0], stderr=[0.1, 0.2, 0.3, 0.4])])
    assert alone.high - alone.values == pytest.approx(stats.norm.ppf(0.975) * np.array([0.1, 0.2, 0.3, 0.4]))
    assert (alone.interval_over, Line.from_curves("a", [curve(rows[0])]).interval_over) == ("prompts", "")


def test_a_band_stays_in_the_range_of_its_metric():
    rows = np.array([[0.0, 0.5, 0.99, 1 + 1e-9], [0.1, 0.5, 0.7, 1.0], [0.0, 0.6, 0.99, 1.0]])
    low, high = stats.t.interval(0.95, 2, rows.mean(0), stats.sem(rows))
    assert low[0] < 0
    assert high[2] > 1
    line = Line.from_curves("a", [curve(row, metric="accuracy") for row in rows])
    assert line.low == pytest.approx([0, *low[1:]])
    assert line.high == pytest.approx([*high[:2], 1, 1])
    alone = Line.from_curves("a", [curve(rows[0], stderr=[0.1] * 4, metric="accuracy")])
    assert (alone.low[0], alone.high[2], alone.high[1]) == (0, 1, pytest.approx(0.5 + 0.196, abs=1e-4))
    # The difference of two accuracies is between -1 and 1.
    other = Line.from_curves("b", [curve(row, metric="accuracy") for row in 1 - rows])
    apart, free = difference(line, other), stats.ttest_ind(rows, 1 - rows, equal_var=False).confidence_interval(0.95)
    assert free.low[0] < -1
    assert free.high[2] > 1
    assert (apart.low[0], apart.high[2], apart.low[1]) == (-1, 1, pytest.approx(free.low[1]))
    # In per cent the metric's known range does not apply.
    percent = Line.from_curves("a", [curve(100 * row, metric="accuracy") for row in rows])
    assert (percent.low, percent.high) == (pytest.approx(100 * low), pytest.approx(100 * high))


def test_a_mean_is_never_over_fewer_seeds_than_reported():
    line = Line.from_curves("a", [curve([1, 2, 3, 4]), curve([1, np.nan, 3, 4]), curve([4, 5, 6], at=(0, 10, 100))])
    assert (line.at.tolist(), line.num_runs) == ([0, 10, 100], 3)
    assert line.values == pytest.approx([2, 11 / 3, 14 / 3])


def test_the_difference_of_groups_is_welchs_in_any_unit():
    one, other = RNG.normal(size=(4, 5)), RNG.normal(1, 2, size=(3, 5))
    for unit in (1, 1e-100):
        lines = [
            Line.from_curves(name, [curve(unit * row, range(5)) for row in rows])
            for name, rows in (("a", one), ("b", other))
        ]
        result = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
        found = difference(*lines)
        assert found.group == "a \N{MINUS SIGN} b"
        assert found.low / unit == pytest.approx(result.low)
        assert found.high / unit == pytest.approx(result.high)
    single = [Line.from_curves(name, [curve([1.0, 2.0], (0, 1), [0.3, 0.4])]) for name in "ab"]
    assert difference(*single).high == pytest.approx(stats.norm.ppf(0.975) * np.sqrt(2) * np.array([0.3, 0.4]))
    apart = difference(lines[0], single[0])
    assert np.isnan(apart.low).all()  # a single run has no spread over seeds
    assert apart.at.tolist() == [0, 1]


def test_the_difference_of_two_runs_on_the_same_prompts_is_that_of_their_pairs():
    hard = 10 * RNG.normal(size=(12, 1))
    rows = [hard + RNG.normal(size=(12, 4)) for _ in "ab"]
    rows[0][5, 2] = rows[1][4, 2] = np.nan  # at this step they are left out of interval and centre
    rows[1][4:, 3] = rows[0][:3, 3] = np.nan  # one pair: too few
    given = {"analysis": "coupling", "metric": "without_a_range", "layer": None, "tags": {}, "at": np.array(STEPS)}
    errors = {"stderr": np.full(4, 3.0)}
    curves = [
        StepCurve(run=run, values=np.nanmean(each, 0), prompts=each, prompts_of=f"{run} data 12", **given, **errors)
        for run, each in zip("ab", rows, strict=True)
    ]
    found = difference(*(Line.from_curves(each.run, [each]) for each in curves))
    for step in range(3):
        pairs = [(a, b) for a, b in zip(rows[0][:, step], rows[1][:, step], strict=True) if np.isfinite(a + b)]
        assert len(pairs) == (10 if step == 2 else 12)
        result = stats.ttest_rel(*np.transpose(pairs)).confidence_interval(0.95)
        assert (found.low[step], found.high[step]) == (pytest.approx(result.low), pytest.approx(result.high))
        assert found.values[step] == pytest.approx(np.mean([a - b for a, b in pairs]))
    assert found.values[3] == pytest.approx(np.nanmean(rows[0][:, 3]) - np.nanmean(rows[1][:, 3]))
    assert found.high[3] - found.values[3] == pytest.approx(stats.norm.ppf(0.975) * 3 * np.sqrt(2))
    assert difference_chart(found).title.endswith("a \N{MINUS SIGN} b, without up to 2 of 12 prompts")
    for other in (replace(curves[1], prompts_of="b others 12"), replace(curves[1], prompts=None)):
        apart = difference(*(Line.from_curves(each.run, [each]) for each in (curves[0], other)))
        assert apart.high - apart.low == pytest.approx(2 * stats.norm.ppf(0.975) * np.sqrt(2) * errors["stderr"])


def test_runs_with_equal_recipe_values_are_seeds_of_one_group(seeds):
    roots, values = seeds
    content = read_side_by_side(roots, group="data.shuffle_tokens")
    groups = [*content.groups]
    assert {name: len(runs) for name, runs in content.groups.items()} == {
        "shuffle_tokens=False": 3,
        "shuffle_tokens=True": 3,
    }
    lines = content.lines["coupling", "coupling", None, "k=4"]
    for line, truth in zip(lines.values(), values, strict=True):
        assert line.values == pytest.approx(truth.mean(0))
    row, of_layers = last_values(content).to_dict("records")
    assert (np.isnan(row["layer"]), of_layers["layer"]) == (True, 3)
    last = stats.ttest_ind(values[0, :, -1], values[1, :, -1], equal_var=False).confidence_interval(0.95)
    assert (row["difference low"], row["difference high"]) == (pytest.approx(last.low), pytest.approx(last.high))
    chart = training_chart(lines, groups)
    assert [series.name for series in chart.series] == groups
    assert chart.series[1].y == pytest.approx(values[1].mean(0), rel=1e-4)
    layers = layer_chart({layer: content.lines["probe", "accuracy", layer, ""] for layer in LAYERS}, groups)
    first = layers.series[0]
    at_last = [y for y, frame in zip(first.y, first.frame, strict=True) if frame == len(layers.frames) - 1]
    assert at_last == pytest.approx(values[0, :, -1].mean() * np.array(LAYERS), rel=1e-4)


def test_curves_that_some_seeds_lack_are_left_out_and_named(seeds, tmp_path):
    bare = write_run(tmp_path / "bare", [0.5] * 4) / "measurements.jsonl"
    bare.write_text("".join(f"{line}\n" for line in bare.read_text().splitlines() if '"coupling"' in line))
    content = read_side_by_side([*seeds[0][:2], bare.parent], seeds=True)
    assert {key[0] for key in content.lines} == {"coupling"}
    (note,) = content.notes
    assert note.startswith("Left out, not measured in all seeds of a group: curves Probe accuracy, layer 1")


def test_runs_with_other_layers_and_steps_are_drawn_at_their_own(tmp_path):
    few, deep = write_run(tmp_path / "few", [1.0, 2, 3, 4]), tmp_path / "deep"
    for step in STEPS:
        parts = [Record(metric="accuracy", value=10.0 * layer, layer=layer) for layer in (1, 3, 5, 6)]
        write(deep, "probe", parts, run="deep", step=step)
    content = read_side_by_side([few, deep])
    own = layer_chart({key[2]: lines for key, lines in content.lines.items() if key[2]}, [*content.groups]).series[1]
    at_first = {(x, y) for x, y, frame in zip(own.x, own.y, own.frame, strict=True) if not frame}
    assert at_first == {(1, 10), (3, 30), (5, 50), (6, 60)}
    (row,) = last_values(content).to_dict("records")
    assert (row["layer"], row["few"], row["deep"]) == (3, 12, 30)  # the last that both have
    apart = read_side_by_side([few, write_run(tmp_path / "apart", [1.0, 2], steps=(5, 50))])
    for runs, captions in (
        (content, ["Over training, the last common layer", "Over layers", "Difference, few less deep"]),
        (apart, ["Over training, the last layer"]),  # nothing in common
    ):
        (choice,) = _blocks(runs)["probe"][0]["choices"]
        assert [figure["caption"] for figure in choice["figures"]] == captions
        assert not any(figure["problem"] for figure in choice["figures"])


def test_means_of_whole_numbers_have_three_digits():
    texts = [whole(number) for number in (0, 12.0, 1_234_567, 25 / 3, -29.2655, 2 / 3, np.nan)]
    assert texts == ["0", "12", "1234567", "8.33", "\N{MINUS SIGN}29.3", "0.667", DASH]


def test_the_command_writes_the_page_the_table_and_the_pictures(seeds, tmp_path, monkeypatch, capsys):
    roots = [*map(str, seeds[0])]
    monkeypatch.chdir(tmp_path)
    leave_undrawn(monkeypatch)
    options = ["--group", "data.shuffle_tokens", "--export", "last.csv", "--pictures", "pictures"]
    assert main(["report", *roots, *options]) == 0
    page = (tmp_path / "runs.html").read_text()
    assert "shuffle_tokens=False" in page
    for name, value in (("real", False), ("control", True)):
        assert "; ".join(f"{name}{seed} (data.shuffle_tokens {value})" for seed in range(3)) in page
    assert "over the seeds of a group" in page
    assert len(pd.read_csv(tmp_path / "last.csv")) == 2
    difference_ = "difference_shuffle_tokens_false_less_shuffle_tokens_true"
    pictures = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    assert {f"coupling_coupling_k_4_{name}" for name in ("over_training", difference_)} <= pictures
    assert len(pictures) == 5
    capsys.readouterr()
    for out, page in (("pictures", "pictures/report.html"), ("two", "two.html")):
        assert main(["report", roots[0], roots[3], "--root", out]) == 0
        assert capsys.readouterr().out.splitlines() == [page]
    text = (tmp_path / page).read_text()
    for words in ("over prompts (or test rows)", "<dt>real0</dt>", "<dd>data.shuffle_tokens False</dd>"):
        assert words in text
    assert main(["report", *roots[:2], "--root", "two"]) == 0
    assert "data.shuffle_tokens" not in (tmp_path / page).read_text(), "they differ in nothing"


def test_fields_that_differ_are_found_beyond_their_beginning_and_for_any_kind_of_number(tmp_path):
    trainers = {"a": {"max_steps": 3}, "b": {"max_steps": 3, "gradient_clip_val": 0.5}}
    roots = [write_run(tmp_path / name, [1.0, 2, 3, 4]) for name in trainers]

    def recipes(**more) -> dict[str, str]:
        for root, (name, trainer) in zip(roots, trainers.items(), strict=True):
            data = {key: {"class_path": "x.Y", "init_args": {"corpus": value + name}} for key, value in more.items()}
            (root / "run.json").write_text(json.dumps({"run": name, "config": {**data, "trainer": trainer}}))
        return read_side_by_side(roots).recipes

    differing = recipes(data="/data/deep/")
    assert [text.partition(" ")[0] for text in differing.values()] == ["data.corpus", "data.corpus"]
    assert differing["a"].endswith("/deep/a")
    assert differing["b"].endswith("/deep/b, trainer.gradient_clip_val 0.5")
    assert recipes() == {"a": "", "b": "trainer.gradient_clip_val 0.5"}


def test_runs_whose_analyses_had_other_options_or_data_are_named(tmp_path, capsys):
    hashes = {"coupling": {"config_hash": "a" * 16, "data_hash": "b" * 16}, "probe": {"config_hash": "c" * 16}}
    other = {**hashes, "coupling": {"config_hash": "d" * 16, "data_hash": "b" * 16}}
    of = {"first": hashes, "second": hashes, "third": other, "of_old": {}}
    roots = [write_run(tmp_path / name, RNG.uniform(0.1, 0.3, 4), about=about) for name, about in of.items()]
    named = "aaaaaaaa.bbbbbbbb in first, second; dddddddd.bbbbbbbb in third."
    assert main(["report", *map(str, roots), "--root", str(tmp_path / "runs.html")]) == 0
    for said in (capsys.readouterr().err, (tmp_path / "runs.html").read_text()):
        assert f"coupling was measured with different options or data: {named}" in " ".join(said.split())
    assert read_side_by_side([*roots[:2], roots[3]]).notes == []


def test_groups_are_named_by_the_settings_of_all_their_runs(tmp_path):
    """One run of the first group has no hashes; each analysis differs in another pair."""
    settings = [{}, {"coupling": "a", "probe": "b"}, {"coupling": "c", "probe": "b"}, {"coupling": "c", "probe": "b"}]
    roots = []
    for number, of in enumerate(settings):
        about = {analysis: {"config_hash": digit * 16} for analysis, digit in of.items()}
        values = RNG.uniform(0.1, 0.3, 4)
        roots.append(write_run(tmp_path / f"run{number}", values, shuffled=number > 1, about=about))
    for order in (roots, roots[::-1]):
        (note,) = read_side_by_side(order, group="data.shuffle_tokens").notes
        assert "aaaaaaaa in shuffle_tokens=False" in note
        assert "cccccccc in shuffle_tokens=True" in note
        assert "probe" not in note


def test_wrong_input_is_one_sentence(seeds, tmp_path, capsys):
    one, other = map(str, seeds[0][:2])
    copy = write_run(tmp_path / "copy", seeds[1][0, 0])
    step = write_run(tmp_path / "step", [5.0, 6, 7, 8])
    no_field = f"group: the recipe of {one} has no "
    for command, sentence in (
        ([one, str(copy), "--seeds"], "seeds: real0 and copy have the same numbers at every checkpoint"),
        ([one, other, "--seeds", "--group", "data.seed"], "seeds: expected either seeds or group, got both"),
        ([one, other, "--group", "data.seed"], f"{no_field}data.seed: expected a field"),
        ([one, other, "--group", ""], "group: expected a name or a path, got ''"),
        ([one, str(step)], "runs: expected none to be called step, a column"),
        ([one, one], f"runs: {one} has the name of another, real0"),
        ([one, str(tmp_path / "none")], "expected a run's folder or a table of scores"),
        ([one, other, "--root", str(tmp_path / "no" / "folder.html")], "cannot write"),
        ([one, other, "--root", "x" * 300], "file name too long; --root names another place"),
    ):
        assert main(["report", *command]) == 2, command
        assert sentence in " ".join(capsys.readouterr().err.split()), command


def test_a_comparison_begins_with_the_first_difference(tmp_path):
    for name, seeds in {"a": (1, 1, 1), "b": (1, 1, 2), "c": (1, 1, 1)}.items():
        for step, seed in zip((0, 4, 8), seeds, strict=True):
            for analysis in ("trajectory", "lens"):
                measured = measurement(name, step, analysis, seed=seed if analysis == "trajectory" else 1, layers=2)
                records.append(tmp_path / name / "measurements.jsonl", measured)
    page = page_of(read_side_by_side([tmp_path / "a", tmp_path / "b"]))
    assert "All numbers are equal up to step 4." in page
    assert "Line shape score: differs from step 8 on" in page
    equal = page_of(read_side_by_side([tmp_path / "a", tmp_path / "c"]))
    assert "All numbers are equal at all common steps." in equal
