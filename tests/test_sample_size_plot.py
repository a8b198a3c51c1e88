"""Figures and pictures of probes on tasks, sample sizes, categories of word pairs and prediction residuals."""

import re
from pathlib import Path

import pandas as pd
import pytest

from lit_layers import plots, records
from lit_layers.errors import InputError
from lit_layers.records import Record
from tests.support.charts import drawn, line, names, svg_texts, svgs
from tests.support.layer_results import ANALYSES, CATEGORIES, LAYERS, SIZES, layer_results
from tests.support.written import measured


def table_of(analysis: str, *steps: int, layers: int = LAYERS) -> pd.DataFrame:
    return records.frame(layer_results(analysis, step=step, layers=layers) for step in steps)


def test_a_layers_score_is_drawn_against_training_rows_on_a_log_axis_with_its_intervals() -> None:
    fig = plots.list_profile(table_of("sample_sizes/topics", 0, 64), "accuracy")
    one = line(fig, "layer 2")
    assert drawn(fig, "layer 2", 0)[SIZES[0]] == pytest.approx(0.32)
    assert drawn(fig, "layer 2", 1) == pytest.approx(dict(zip(SIZES, (0.384, 0.484, 0.584), strict=True)))
    assert one.interval == "bars"
    assert one.high[3:] == [pytest.approx(0.394), pytest.approx(0.494), None], "all rows are drawn once: no interval"
    assert one.low[3:] == [pytest.approx(0.364), pytest.approx(0.464), None]
    assert (fig.x.log, [*fig.x.labels], fig.frames) == (True, [*SIZES], [0, 64])
    assert fig.x.ends[0] < SIZES[0] < SIZES[-1] < fig.x.ends[1]
    assert fig.y.ends[0] < 0.28, "all checkpoints have one axis"
    assert fig.y.ends[1] > 0.3 + 0.2 + 0.04 + 0.064
    assert names(fig) == [f"layer {layer}" for layer in range(LAYERS + 1)], "one line a layer, none a size"
    many = plots.list_profile(table_of("sample_sizes/topics", 8, layers=24), "accuracy")
    assert {series.interval for series in many.series} == {""}, "many layers have no bars"
    assert line(many, "layer 24").has_interval


def test_all_categories_stand_in_one_map_by_their_groups_with_one_range_around_zero() -> None:
    frame = table_of("concept_alignment", 0, 64)
    gone = (frame["category_id"] == "E01") & (frame["layer"] == 0)
    fig = plots.tag_map(frame[~gone], "concept_alignment")
    texts = list(fig.y.labels.values())
    last = fig.cells.values[-1]
    assert len(last) == len(texts) == 1 + len(CATEGORIES)
    assert texts[:2] == ["Mean", "thing - fact 1"]
    assert texts[21].startswith("noun - form"), "one group after the other"
    values = dict(zip(texts, last, strict=True))
    assert values["Mean"][3] == pytest.approx(0.094)
    assert values["noun - form 5"][2] == pytest.approx((4 - 20) / 50 + 0.02 + 0.064)
    assert [value is None for value in values["thing - fact 1"][:2]] == [True, False], "undefined at a layer: blank"
    low, high = fig.cells.ends
    assert -low == high == pytest.approx(19 / 50 + 0.04 + 0.064), "the same at all checkpoints"
    assert fig.cells.texts[texts.index("noun - form 5")] == "I05 noun - form_5, Inflectional morphology"


def test_names_of_categories_are_shown_not_interpreted_and_long_ones_are_cut() -> None:
    rows = [Record(metric="m", value=1.0, layer=0, tags={"category": f"<i>{'long ' * 9}{n}"}) for n in range(2)]
    fig = plots.tag_map(records.frame([measured("a", rows, step=1)]), "m")
    texts = [text for text in svg_texts(fig) if "long" in text]
    assert len(texts) == 2
    assert all(text.startswith("&lt;i&gt;long") and text.endswith("\N{HORIZONTAL ELLIPSIS}") for text in texts)
    assert fig.cells.texts[1].endswith("1")


def test_curves_of_a_metric_with_categories_are_those_of_its_mean() -> None:
    frame = table_of("concept_alignment", 0, 64)
    fig = plots.layer_profile(frame, "concept_alignment", baselines=["shuffled"])
    assert list(line(fig, "step 64").y) == pytest.approx([layer / 100 + 0.064 for layer in range(LAYERS + 1)])
    assert {series.name for series in fig.series if series.dash} == {"Shuffled pairs"}
    assert len(plots.emergence_curves(frame, "concept_alignment").series) == LAYERS + 1
    assert plots.variants(frame, "excess") == [{}]


def test_the_random_label_control_and_the_majority_are_dashed_and_differ() -> None:
    frame = table_of("probe/topics", 0, 64)
    fig = plots.layer_profile(frame, "accuracy", controls=["random_labels"])
    dashed = {series.name: series for series in fig.series if series.dash}
    assert dashed.keys() == {"majority class", "random labels"}
    assert list(dashed["majority class"].y) == [0.4, 0.4]
    assert list(dashed["random labels"].y) == pytest.approx([0.38 + layer / 1000 for layer in range(LAYERS + 1)])
    assert dashed["majority class"].dash != dashed["random labels"].dash
    validation = plots.layer_profile(frame, "accuracy", tags={"split": "validation"})
    assert not [series for series in validation.series if series.dash], "the majority is of the test rows"


def test_the_plainest_variant_is_of_the_test_rows_and_of_the_accuracy_and_layers_have_whole_ticks() -> None:
    frame = table_of("probe/topics", 0, 64)
    fig = plots.emergence_curves(frame, "accuracy")
    assert fig.title == "Probe accuracy (share), test rows"
    lines = {*names(plots.emergence_curves(frame, "monotonicity_spearman"))}
    assert lines == {"test rows, of accuracy", "test rows, of log-loss"}
    assert (plots.emergence_curves(frame, "plateau_layer").y.whole, fig.y.whole) == (True, False)


def test_the_tables_of_results_have_headlines_of_test_rows_and_none_for_categories_or_sizes() -> None:
    frame = records.frame(layer_results(analysis, step=step) for step in (0, 64) for analysis in ANALYSES)
    rows = plots.change_table(frame)
    assert "sample_sizes/topics" not in {*rows["analysis"]}
    assert {*rows[rows["analysis"] == "concept_alignment"]["variant"]} == {""}
    probes = rows[rows["analysis"] == "probe/topics"]
    assert {*probes["variant"]} == {"test rows", "test rows, of accuracy"}
    accuracy = probes.iloc[0]
    assert (accuracy["layer"], accuracy["first"], accuracy["last"]) == pytest.approx((LAYERS, 0.7, 0.764))


def test_runs_without_these_rows_and_unwritable_pictures_are_refused(tmp_path: Path) -> None:
    frame = table_of("probe/topics", 0, 64)
    chart = plots.layer_profile(frame, "accuracy")
    with pytest.raises(ValueError, match=r"expected a picture that ends in \.png, \.svg, \.pdf, got '\.gif'"):
        chart.write(tmp_path / "a.gif")
    with pytest.raises(InputError, match="cannot write .*: no such file or directory"):
        chart.write(tmp_path / "no" / "a.png")
    with pytest.raises(ValueError, match="no values per layer and category"):
        plots.tag_map(frame, "accuracy")


GAP = 2


def probed(steps, gaps: dict[int | str, list[int]], **runs: int):
    """Return probe scores of checkpoints or models with a random-label control; layers in `gaps` have none."""
    found = [layer_results("probe/topics", step=step, layers=LAYERS) for step in steps]
    found += [layer_results("probe/topics", step=None, run=f"lab/{name}", layers=depth) for name, depth in runs.items()]
    for each in found:
        missing = gaps.get(each.run if each.step is None else each.step, [])
        each.records[:] = [record for record in each.records if record.layer not in missing]
    return records.frame(found)


def pieces(picture: str, mark: str, color: str) -> int:
    """Return the number of pieces of a line or band of this colour in a picture."""
    side = "stroke" if mark == "line" else "fill"
    groups = re.findall(rf"mark-{mark} role-mark[^>]*>(.*?)</g>", picture, re.S)
    paths = [path for group in groups for path in re.findall(r"<path[^>]*>", group) if f'{side}="{color}"' in path]
    return sum(re.findall(r' d="([^"]*)"', path)[0].count("M") for path in paths)


def test_a_line_and_its_band_break_at_a_layer_without_a_value():
    of_models = probed([], {"lab/large": [GAP]}, small=2, large=4, other=4)
    charts = [
        plots.layer_profile(probed([0, 64], {64: [GAP]}), "accuracy", controls=["random_labels"]),
        plots.layer_profile(probed([0, 64], {0: [LAYERS]}), "accuracy"),
        plots.layer_profile(of_models, "accuracy"),
    ]
    inner, last, models = zip(charts, svgs(charts), strict=True)

    chart, picture = inner
    whole, broken, control = (line(chart, name) for name in ("step 0", "step 64", "random labels"))
    assert whole.x == broken.x == control.x == list(range(LAYERS + 1))
    assert [series.y[GAP] is None for series in (whole, broken, control)] == [False, True, True]
    for mark in ("line", "area"):
        assert (pieces(picture, mark, whole.color), pieces(picture, mark, broken.color)) == (1, 2), mark

    chart, picture = last
    assert [line(chart, name).y[-1] is None for name in ("step 0", "step 64")] == [True, False]
    assert pieces(picture, "line", line(chart, "step 0").color) == 1, "a last layer does not stretch the others"

    chart, picture = models
    small, large = line(chart, "small"), line(chart, "large")
    assert (small.x, [y is None for y in small.y]) == ([0, 50, 100], [False] * 3)
    assert (large.x, [y is None for y in large.y]) == ([0, 25, 50, 75, 100], [False, False, True, False, False])
    assert pieces(picture, "line", large.color) == 2
