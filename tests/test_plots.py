import json
import math
import re
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import pytest

from lit_layers import plots, records
from lit_layers.errors import InputError
from lit_layers.figures import theme
from lit_layers.figures.profiles import fixed_limits, row_chart, short_names
from lit_layers.figures.theme import Axis
from lit_layers.records import Record
from tests.support.charts import axis, drawn, line, names, svg_texts, svgs, values
from tests.support.runs import measurement
from tests.support.written import measured


def table(*found: tuple[int, list[Record]], analysis: str = "a", tokens: int | None = 100) -> pd.DataFrame:
    return records.frame(
        measured(analysis, rows, step=step, tokens=None if tokens is None else step * tokens) for step, rows in found
    )


def analysis_frame(name: str, steps: tuple[int, ...] = (0, 1, 8)) -> pd.DataFrame:
    return records.frame(measurement("r", step, name) for step in steps)


def layered(steps: tuple[int, ...], layers: int = 3, **tags) -> list[tuple[int, list[Record]]]:
    return [(s, [Record(metric="m", value=s + n / 10, layer=n, tags=tags) for n in range(layers)]) for s in steps]


def whole(steps: tuple[int, ...], **tags) -> list[tuple[int, list[Record]]]:
    return [(s, [Record(metric="m", value=s, low=s - 1.0, high=s + 2.0, tags=tags)]) for s in steps]


class Drawn(NamedTuple):
    chart: Any
    svg: str


@pytest.fixture(scope="module")
def shown() -> dict[str, Drawn]:
    """Return the charts of the visual check, with their pictures."""
    undrawable = {1: 1.0, 2: math.inf, 3: math.nan, 4: 2.0}
    decades = [{"step": step, "validation/perplexity": value} for step, value in enumerate((2000.0, 150.0), start=1)]
    names = ["Best layer from 1 on", "The embedding is better than any"]
    lines = [plots.Series(x=[0, 1], y=[n, n], name=name, width=1.0, legend=True) for n, name in enumerate(names)]
    dot = plots.Series(x=[0], y=[0.5], mark="circle")
    charts = {
        "steps": plots.emergence_curves(table(*layered((0, 1, 2, 512, 1000))), "m"),
        "interval": plots.emergence_curves(table(*whole((1, 2), k=4), *whole((0,), k=4)), "m"),
        "gaps": plots.emergence_curves(table(*((s, layers_of(0, value=v)) for s, v in undrawable.items())), "m"),
        "decades": plots.training_curves(decades, ["validation/perplexity"]),
        "legend of coupling": plots.emergence_curves(
            analysis_frame("coupling"), "coupling", baselines=["random_coupling"]
        ),
        "legend of models": plots.layer_profile(models(a=2, b=4), "m", baselines=["random_m"]),
        "wide legend": plots.Chart(title="", x=Axis(), y=Axis(), series=lines),
        "long row": row_chart("", ["SmolLM2 135M Instruct, median"], Axis(), [dot], height=120),
    }
    return {name: Drawn(chart, svg) for (name, chart), svg in zip(charts.items(), svgs(charts.values()), strict=True)}


def layers_of(*layers: int, metric: str = "m", **numbers) -> list[Record]:
    return [Record(metric=metric, layer=layer, **{"value": 1.0, **numbers}) for layer in layers]


def lines_of(svg: str) -> list[str]:
    return re.findall(r'mark-line[^>]*><path[^>]* d="([^"]*)"', svg)


def test_step_0_has_its_own_position_and_step_n_is_at_log_n_plus_1(shown) -> None:
    fig = shown["steps"].chart
    points = drawn(fig, "layer 2")
    apart = min(points)
    assert points.pop(apart) == 0.2
    assert points == {round(math.log10(1 + s), 5): s + 0.2 for s in (1, 2, 512, 1000)}
    assert axis(fig).divider is not None
    assert apart < axis(fig).divider < math.log10(2)
    assert axis(fig).ends[0] < apart
    assert len(lines_of(shown["steps"].svg)) == 6, "the line of training does not reach to the untrained model"


def test_ticks_are_measured_steps_at_their_positions() -> None:
    steps = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 143_000)
    fig = plots.emergence_curves(table(*layered(steps)), "m")
    labels = {text: place for place, text in axis(fig).labels.items()}
    assert labels["0"] == min(drawn(fig, "layer 0"))
    assert {"0", "1", "143k"} <= labels.keys()
    assert 4 <= len(labels) <= 8
    for text, place in labels.items():
        step = int(text.replace("k", "000"))
        assert step in steps
        assert step == 0 or place == pytest.approx(math.log10(1 + step), abs=1e-5)


def test_layers_are_lines_coloured_by_depth_and_hover_shows_known_tokens() -> None:
    fig = plots.emergence_curves(table(*layered((0, 1, 10), layers=5)), "m")
    assert names(fig) == [f"layer {n}" for n in range(5)]
    assert len({series.color for series in fig.series}) == 5
    assert fig.bar.labels == {0: "0", 2: "2", 4: "4"}
    assert fig.training.texts() == ["step 0 · 0 tokens", "step 1 · 100 tokens", "step 10 · 1,000 tokens"]
    blind = plots.emergence_curves(table(*layered((0, 1, 10)), tokens=None), "m")
    assert blind.training.texts() == ["step 0", "step 1", "step 10"]


def test_values_of_the_whole_model_come_with_their_interval_one_line_a_variant(shown) -> None:
    (one,) = shown["interval"].chart.series
    assert (one.x, one.low, one.high, one.interval) == ([0, 1, 2], [-1.0, 0.0, 1.0], [2.0, 3.0, 4.0], "band")
    picture = shown["interval"].svg
    assert re.search(r"mark-area[^>]*><path", picture)
    assert len(re.findall(r"mark-rule role-mark [^>]*><line", picture)) == 2, "what stands apart, and its interval"
    both = [(s, [Record(metric="m", value=s + k, tags={"k": k}) for k in (4, 12)]) for s in (1, 2)]
    fig = plots.emergence_curves(table(*both), "m")
    assert [series.name for series in fig.series if series.legend] == ["k = 4", "k = 12"]
    assert values(fig, "k = 12") == [13.0, 14.0]


def test_references_and_baselines_are_dashed_and_named() -> None:
    fig = plots.emergence_curves(analysis_frame("next_token_probe"), "accuracy")
    dashed = {series.name for series in fig.series if series.dash}
    assert dashed == {"majority class", "model's head", "model's head, probe's classes"}
    assert values(fig, "majority class") == [0.16] * 3
    fig = plots.emergence_curves(analysis_frame("coupling"), "coupling", baselines=["random_coupling"])
    assert {series.name for series in fig.series if series.dash} == {"Random bases, k = 4", "Random bases, k = 12"}
    colors = {series.name: series.color for series in fig.series}
    assert colors["k = 12"] == colors["Random bases, k = 12"] != colors["k = 4"]


def test_lines_per_layer_show_one_variant_and_the_title_names_it() -> None:
    frame = analysis_frame("representation", (0, 1))
    for draw in (plots.emergence_curves, plots.layer_profile):
        fig = draw(frame, "prompt_entropy")
        assert fig.title == "Prompt entropy (nats), raw, all tokens"
        other = draw(frame, "prompt_entropy", tags={"drop_first": 1})
        assert other.title == "Prompt entropy (nats), raw, without the first token"
    last = fig.series[1].y, other.series[1].y  # of the profiles, at step 1
    assert last[1][3] - last[0][3] == pytest.approx(0.3 * math.log(2) / math.log(513), abs=1e-4)


def test_counts_that_change_with_the_step_are_not_variants() -> None:
    rows = [(s, [Record(metric="m", value=1.0, layer=0, tags={"num_undefined": s})]) for s in (1, 2)]
    assert plots.variants(table(*rows), "m") == [{}]
    assert list(drawn(plots.emergence_curves(table(*rows), "m"), "layer 0").values()) == [1.0, 1.0]


def test_a_figure_refuses_missing_data_and_lists_what_is_available() -> None:
    one, cells = table(*layered((1,))), {(0, 0): 9.0, (0, 100): 1.0}
    two = pd.concat([one, table(*layered((1,)), analysis="b")])
    of_tokens = table((1, matrix(1, "m", "token", "other_token", cells, layer=2)))
    of_models, of_k, coupling = models(a=2, b=4), table(*layered((1,), k=4)), analysis_frame("coupling")
    for draw, frame, metric, options, sentence in (
        (plots.emergence_curves, one, "n", {}, "no rows of metric 'n' that have a step; metrics in this table: m$"),
        (plots.emergence_curves, of_k, "m", {"tags": {"k": 9}}, "no rows of metric 'm' with k = 9"),
        (plots.emergence_curves, two, "m", {}, "more than one analysis: a, b; choose one"),
        (plots.emergence_curves, of_tokens, "m", {}, "'m' has values for pairs of layers or of tokens only"),
        (plots.layer_profile, of_models, "whole", {}, "no values per layer"),
        (plots.layer_profile, coupling, "excess_coupling", {}, "'excess_coupling' has no values per layer"),
        (plots.layer_matrix, one, "m", {}, "no values per pair of layers"),
        (plots.layer_matrix, of_models, "pair", {}, "more than one run: org/a, org/b; choose one"),
        (plots.list_profile, one, "m", {}, "'m' has no lists of values per layer"),
        (plots.table_map, one, "m", {"layer": 1, "other_layer": 2}, "metric 'm' has no values per pair of tokens"),
        (plots.table_map, of_tokens, "m", {"layer": 1}, "has no layer 1; it has: layer 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            draw(frame, metric, **options)
    assert len(plots.emergence_curves(two, "m", analysis="b").series) == 3
    assert plots.variants(of_tokens, "m") == [{"k": 2}], "values in tables are no variants"
    assert plots.change_table(of_tokens).empty


def test_values_that_cannot_be_drawn_are_gaps(shown) -> None:
    assert list(shown["gaps"].chart.series[0].y) == [1.0, None, None, 2.0]
    (path,) = lines_of(shown["gaps"].svg)
    assert path.count("M") == 2, "the line breaks there"


def test_a_single_checkpoint_can_be_drawn() -> None:
    for step in (0, 7):
        one = table(*layered((step,)))
        fig = plots.emergence_curves(one, "m")
        assert values(fig, "layer 1") == [step + 0.1]
        assert ([*axis(fig).labels.values()], axis(fig).divider) == ([str(step)], None)
        assert list(plots.layer_profile(one, "m").series[0].y) == [step + n / 10 for n in range(3)]


def test_a_profile_has_a_line_per_checkpoint_and_thins_all_but_first_and_last() -> None:
    fig = plots.layer_profile(table(*layered((0, 1, 8))), "m")
    assert [list(series.x) for series in fig.series] == [[0, 1, 2]] * 3
    assert list(fig.series[1].y) == [1.0, 1.1, 1.2]
    assert fig.series[-1].width > fig.series[0].width
    many = plots.layer_profile(table(*layered(tuple(range(100)))), "m")
    firsts = [series.y[0] for series in many.series]
    assert (len(firsts), firsts[0], firsts[-1]) == (16, 0, 99)


def test_an_entropy_has_its_unit_unless_it_is_divided_by_its_maximum() -> None:
    for normalization, unit in {"raw": "nats", "maxEntropy": ""}.items():
        found = [
            Record(metric="prompt_entropy", value=n, layer=n, tags={"normalization": normalization}) for n in (0, 1)
        ]
        for draw in (plots.layer_profile, plots.emergence_curves):
            chart = draw(table((0, found), (1, found)), "prompt_entropy", tags={"normalization": normalization})
            assert (chart.y.title, "nats" in chart.title) == (unit, bool(unit))


def test_a_profile_over_distance_is_over_blocks() -> None:
    fig = plots.layer_profile(analysis_frame("coupling", (8,)), "coupling_by_distance", tags={"k": 4})
    assert list(fig.series[0].x) == [0, 1, 2, 3, 4, 5]
    assert fig.x.title == "Distance between the blocks"


def test_a_matrix_has_the_layer_down_and_the_other_layer_across_at_each_slider_position() -> None:
    def pairs(step: int) -> list[Record]:
        return pairs_of({(1, 1): 9.0, (1, 2): step, (2, 1): -2.0 * step, (2, 2): 9.0})

    fig = plots.layer_matrix(table((0, pairs(0)), (3, pairs(3))), "coupling_pair")
    assert fig.cells.values == [[[9.0, 0.0], [0.0, 9.0]], [[9.0, 3.0], [-6.0, 9.0]]]
    assert (fig.y.title, fig.y.keys, fig.frames) == ("Layer", [1, 2], [0, 3])
    assert fig.cells.ends == (-6.0, 6.0), "the diagonal does not decide the colours"
    assert fig.spec()["height"] > 200, "of a chart that is given no height"
    (slider,) = fig.spec(still=False)["params"]
    assert (slider["bind"]["max"], slider["value"]) == (1, 1)
    assert [row["z"] for row in fig.spec()["data"]["values"]] == [9.0, 3.0, -6.0, 9.0], "a picture shows the last"


def matrix(step: int, metric: str, row: str, column: str, cells: dict[tuple[int, int], float], **place) -> list[Record]:
    """Return the records of a matrix, with each value multiplied by the step."""
    return [
        Record(metric=metric, value=step * v, tags={row: i, column: j, "k": 2}, **place) for (i, j), v in cells.items()
    ]


def test_a_compression_has_its_rows_down_and_a_frame_per_step_of_the_chosen_pair() -> None:
    cells = {(1, 1): 4.0, (1, 2): 1.0, (2, 1): -2.0, (2, 2): 3.0}
    rows = [
        (s, matrix(s, "compression", "row", "column", cells, layer=1, other_layer=3)
         + matrix(10 * s, "compression", "row", "column", cells, layer=3, other_layer=1))
        for s in (0, 1, 2)
    ]  # fmt: skip
    fig = plots.table_map(table(*rows), "compression", layer=1, other_layer=3)
    assert fig.cells.values[1:] == [[[4.0, 1.0], [-2.0, 3.0]], [[8.0, 2.0], [-4.0, 6.0]]]
    assert (fig.frames, fig.y.keys) == ([0, 1, 2], [1, 2])
    assert (fig.y.title, fig.x.title) == ("Left direction", "Right direction")
    assert fig.cells.scale[1:] == [2.0, 4.0], "half of the largest entry of each checkpoint is full colour"
    shown = {(row["y"], row["x"]): row["v"] for row in fig.spec()["data"]["values"]}
    assert shown == {(1, 1): 2.0, (1, 2): 0.5, (2, 1): -1.0, (2, 2): 1.5}
    assert fig.title == "Block 1 in the directions of block 3"
    other = plots.table_map(table(*rows), "compression", layer=3, other_layer=1)
    assert other.cells.values[-1][0][1] == 20.0
    missing = "has no block 1 in the directions of block 2; it has: block 1 in .* block 3, "
    with pytest.raises(ValueError, match=missing):
        plots.table_map(table(*rows), "compression", layer=1, other_layer=2)


def test_a_map_over_tokens_has_the_token_down_and_empty_cells_for_missing_pairs() -> None:
    cells = {(0, 0): 9.0, (0, 100): 1.0, (100, 0): -2.0, (50, 100): 3.0}
    rows = [(s, matrix(s, "token_coupling_pair", "token", "other_token", cells, layer=2)) for s in (1, 2)]
    fig = plots.table_map(table(*rows), "token_coupling_pair", layer=2)
    assert [*fig.y.labels.values()] == [*fig.x.labels.values()] == ["0%", "50%", "100%"]
    assert fig.cells.values[1] == [[18.0, None, 2.0], [None, None, 6.0], [-4.0, None, None]]
    assert fig.cells.values[0][2][0] == -2.0
    assert fig.cells.ends[1] == 6.0, "the diagonal does not decide the colours"


def pairs_of(values: dict[tuple[int, int], float]) -> list[Record]:
    return [Record(metric="coupling_pair", value=v, layer=i, other_layer=j) for (i, j), v in values.items()]


def test_a_profile_over_the_distance_between_tokens_has_a_line_a_layer_and_its_mean_is_the_curve() -> None:
    def found(step: int) -> list[Record]:
        far = [(layer, d) for layer in (1, 2) for d in (0, 1, 3)]
        records = [
            Record(metric="m", value=layer + d + step, layer=layer, tags={"token_distance": d}) for layer, d in far
        ]
        return [*records, *[Record(metric="m", value=10.0 * layer, layer=layer) for layer in (1, 2)]]

    frame = table((1, found(1)), (5, found(5)))
    fig = plots.list_profile(frame, "m")
    assert drawn(fig, "layer 2", 1) == {0: 7.0, 1: 8.0, 2: 10.0}, "log2 of one more"
    assert values(fig, "layer 1", 0) == [2.0, 3.0, 5.0]
    assert fig.x.labels == {0: "0", 1: "1", 1.585: "2"}
    assert {*values(plots.emergence_curves(frame, "m"), "layer 2")} == {20.0}
    assert [*plots.layer_profile(frame, "m").series[0].y] == [10.0, 20.0]


def test_excess_coupling_has_a_line_at_random_bases_and_profiles_have_their_baseline() -> None:
    assert values(plots.emergence_curves(analysis_frame("coupling"), "excess_coupling"), "Random bases") == [0.0] * 3
    frame = records.frame(measurement("r", step, "token_coupling", layers=3) for step in (0, 8))
    fig = plots.layer_profile(frame, "token_coupling", baselines=["random_token_coupling"])
    assert drawn(fig, "Random bases") == {1: -0.05, 2: -0.05, 3: -0.05}
    fig = plots.emergence_curves(frame, "token_coupling", baselines=["random_token_coupling"])
    assert not any(series.dash for series in fig.series), "a baseline per layer is left to the profile"


def test_a_spectrum_has_a_line_a_layer_on_a_log_axis_and_its_curve_shows_the_largest() -> None:
    frame = records.frame(measurement("r", step, "coupling", layers=2) for step in (1, 8))
    fig = plots.list_profile(frame, "singular_value")
    assert (len(fig.series), fig.y.log) == (2, True)
    assert [*drawn(fig, "layer 1", 1)] == list(range(1, 16))
    curve = drawn(plots.emergence_curves(frame, "singular_value"), "layer 1")
    assert values(fig, "layer 1", 1)[0] == curve[max(curve)]


def test_training_curves_show_training_first_and_levels() -> None:
    rows = [{"step": 0, "validation/loss": 7.0}, {"step": 1, "train/loss": 6.0}, {"step": 2, "train/loss": 5.0}]
    rows.append({"step": 4, "train/loss": 4.0, "validation/loss": 4.5})
    fig = plots.training_curves(rows, references={"Unigram entropy": 5.5})
    assert [(series.name, sorted({*series.y})) for series in fig.series if series.legend] == [
        ("Training loss", [4.0, 5.0, 6.0]),
        ("Validation loss", [4.5, 7.0]),
        ("Unigram entropy", [5.5]),
    ]
    assert fig.training.steps == [0, 1, 2, 4]


def test_long_curves_are_averaged_over_steps_that_share_a_pixel() -> None:
    rows = [{"step": step, "train/loss": float(step % 2), "tokens": 5 * step} for step in range(1, 20_001)]
    fig = plots.training_curves(rows)
    line = fig.series[0]
    assert 200 < len(line.y) <= 500
    assert list(line.y[:4]) == [1.0, 0.0, 1.0, 0.0]
    assert line.y[-1] == pytest.approx(0.5, abs=0.01)
    assert fig.training.tokens[fig.training.steps[-1]] == 100_000
    with pytest.raises(ValueError, match="no values of lr in these rows; they have: train/loss"):
        plots.training_curves(rows, ["lr"])


def test_lines_that_span_three_decades_above_0_are_on_a_log_axis(shown) -> None:
    assert {"200", "500", "1,000"} <= {*svg_texts(shown["decades"].svg)}, "labels at plain numbers"
    for low, largest, is_log in ((0.5, 5000.0, True), (0.5, 400.0, False), (0.0, 5000.0, False)):
        first, last = (
            layers_of(1, metric="state_norm", value=value, low=low, high=2.0 * value)
            + layers_of(2, metric="state_norm", value=largest)
            for value in (1.0, 1.5)
        )
        frame = table((0, first), (8, last))
        for figure in (
            plots.emergence_curves(frame, "state_norm"),
            plots.layer_profile(frame, "state_norm"),
            plots.layer_profile(records.frame([measured("a", first)]), "state_norm"),
        ):
            shown_as = figure.spec()["encoding"]["y"]["scale"].get("type")
            assert (figure.y.log, shown_as == "log") == (is_log, is_log), (low, largest)


def test_hovering_over_the_line_of_a_layer_shows_its_interval() -> None:
    found = layers_of(1, 2, value=2.0, low=1.5, high=2.5)
    fig = plots.emergence_curves(table((0, found), (8, found)), "m")
    assert (line(fig, "layer 2").low[-1], line(fig, "layer 2").high[-1]) == (1.5, 2.5)
    assert "95% interval" in str(fig.spec(still=False))


def test_the_change_table_compares_the_first_and_the_last_checkpoint_of_each_headline() -> None:
    def found(s: int) -> list[Record]:
        raw, share = ({"normalization": name} for name in ("raw", "maxEntropy"))
        return [
            Record(metric="line_shape_score", value=3.0 - s, low=2.0 - s, high=4.0 - s),
            Record(metric="line_shape_score", value=0.0, tags={"statistic": "median"}),
            *[Record(metric="coupling", value=k + s, tags={"k": k}) for k in (4, 12)],
            *[Record(metric="accuracy", value=n + s, layer=n) for n in range(3)],
            *[Record(metric="prompt_entropy", value=n, layer=n, tags=share) for n in (0, 1)],
            *[Record(metric="prompt_entropy", value=n + s, layer=n, tags=raw) for n in (0, 1)],
            Record(metric="accuracy", value=0.5, tags={"reference": "majority"}),
            Record(metric="coupling_pair", value=0.5, layer=1, other_layer=2),
            Record(metric="min_gap", value=0.5),
        ]

    rows = [(s, found(s)) for s in (2, 0, 1)]
    changes = plots.change_table(table(*rows))
    assert changes[["metric", "variant", "layer", "first", "last", "change"]].fillna(-1).values.tolist() == [
        ["line_shape_score", "", -1, 3.0, 1.0, -2.0],
        ["coupling", "k = 4", -1, 4.0, 6.0, 2.0],
        ["coupling", "k = 12", -1, 12.0, 14.0, 2.0],
        ["accuracy", "", 2, 2.0, 4.0, 2.0],
        ["prompt_entropy", "raw", 1, 1.0, 3.0, 2.0],
    ]
    assert changes.iloc[0][["first_step", "last_step", "last_low", "last_high"]].tolist() == [0, 2, 0.0, 2.0]
    assert plots.change_table(table(*rows[:1]))["change"].isna().all()
    assert plots.change_table(records.frame([])).empty


def audited(verdicts: dict[int | str, str], metric: str = "m") -> pd.DataFrame:
    """Return a metric's layers at several steps or models, each with an audit verdict."""
    runs = {at: {"run": at} if isinstance(at, str) else {"step": at} for at in verdicts}
    rows = layers_of(0, 1, metric=metric)
    return records.frame(measured("a", rows, provenance={"audit": verdicts[at]}, **tags) for at, tags in runs.items())


def test_suspect_checkpoints_and_models_are_left_out_unless_allowed() -> None:
    """tests/test_gallery.py checks the figures of the gallery."""
    clean = {0: "clean", 1: "note: identical weights", 4: "clean"}
    frame = audited({**clean, 2: "suspect: equal to the final step", 1000: "suspect: no weights"})
    of_steps = re.escape(
        "no curve is drawn through the suspect steps 2, 1,000 (equal to the final step; no weights): "
        "leave these rows out, or pass allow_suspect=True"
    )
    of_models = audited({"org/a": "clean", "org/b": "suspect: identical weights"})
    for draw, suspect, message in (
        (plots.change_table, frame, f"^{of_steps}$"),
        (partial(plots.variants, metric="m"), frame, f"^{of_steps}$"),
        (plots.model_table, of_models, r"through the suspect model org/b \(identical weights\)"),
    ):
        draw(suspect[~suspect["audit"].str.startswith("suspect")])
        draw(suspect, allow_suspect=True)
        with pytest.raises(InputError, match=message):
            draw(suspect)
    many = audited(dict.fromkeys(range(1, 16), "suspect: equal to main"))
    with pytest.raises(InputError, match=r"suspect steps 1, 2, .*, 12 and 3 more \(equal to main\)"):
        plots.emergence_curves(many, "m")
    both = pd.concat([audited({1: "clean"}), audited({1: "suspect: no weights"}, metric="random")])
    plots.emergence_curves(both, "m")  # settings of rows that are not drawn do not matter
    for draw in (plots.emergence_curves, plots.layer_profile):
        with pytest.raises(InputError, match="suspect step 1 "):
            draw(both, "m", baselines=["random"])


def models(**depths: int) -> pd.DataFrame:
    """Return models of these depths, named org/name: metric `m` of layer l is l / 10 + the model's index."""
    found = []
    for number, (name, depth) in enumerate(depths.items(), start=1):
        rows = [Record(metric="m", value=number + n / 10, low=0.5, high=9.5, layer=n) for n in range(depth + 1)]
        rows += layers_of(*range(1, depth + 1), metric="random_m", value=0.25)
        rows += [Record(metric="m", value=0.5, tags={"reference": "majority"})]
        rows += [Record(metric="m", value=5.0 + number, tags={"reference": "lm_head"})]
        rows += [Record(metric="whole", value=10.0 * number, low=1.0, high=99.0)]
        rows += [Record(metric="pair", value=0.1, layer=1, other_layer=two) for two in range(1, depth + 1)]
        found.append(measured("a", rows, run=f"org/{name}"))
    return records.frame(found)


def test_models_of_different_depths_have_a_line_each_over_their_depth_in_per_cent() -> None:
    fig = plots.layer_profile(models(a=2, b=4), "m")
    assert drawn(fig, "a") == pytest.approx({0: 1.0, 50: 1.1, 100: 1.2})
    assert drawn(fig, "b") == pytest.approx({0: 2.0, 25: 2.1, 50: 2.2, 75: 2.3, 100: 2.4})
    one = line(fig, "b")
    assert (one.low[1], one.high[1], one.texts[1]) == (0.5, 9.5, "layer 1 of 4")
    assert fig.x.title == "Depth (100 layer / number of layers)"
    random = plots.layer_profile(models(a=2, b=4), "random_m")
    assert list(drawn(random, "b")) == [25, 50, 75, 100], "the depth is of the model's layers, not of the metric's"
    part = plots.layer_profile(models(a=2, b=4), "m", num_layers={"org/a": 8, "org/b": 2})
    assert list(drawn(part, "a")) == [0, 12.5, 25], "of a model whose later layers were not measured"
    assert list(drawn(part, "b")) == [0, 25, 50, 75, 100]
    assert line(part, "a").texts[1] == "layer 1 of 8"


def test_models_of_one_depth_are_drawn_over_their_layers() -> None:
    fig = plots.layer_profile(models(a=3, b=3), "m")
    assert list(drawn(fig, "b")) == [0, 1, 2, 3]
    assert fig.x.title == "Layer"
    alone = plots.layer_profile(models(a=3)[lambda rows: rows["value"] < 2], "random_m")
    assert not any(series.legend for series in alone.series)


def test_a_reference_that_all_models_share_is_grey() -> None:
    fig = plots.layer_profile(models(a=2, b=4), "m", baselines=["random_m"])
    lines = {series.name: series for series in fig.series}
    same = lines["majority class"]
    assert (same.color, list(same.x), list(same.y)) == (theme.MUTED, [0, 100], [0.5, 0.5])
    for name in ("a", "b"):
        for text in ("model's head", "Random m"):
            own = lines[f"{name}, {text}"]
            assert (own.color, own.legend, own.dash) == (lines[name].color, False, lines[text].dash)
    assert list(lines["b, model's head"].y) == [7.0, 7.0]
    assert list(lines["a, Random m"].x) == [50, 100]


def test_charts_in_one_row_keep_their_own_legends_and_signals() -> None:
    of_pairs = table((1, pairs_of({(1, 2): 1.0, (2, 1): 0.5})))
    charts = [plots.layer_matrix(of_pairs, "coupling_pair")]
    charts += [plots.layer_profile(models(a=2, b=4), "m"), plots.emergence_curves(table(*layered((0, 1))), "m")]
    signals = r'"expr": "[^"]*\b(width|height)\b'
    assert all(re.search(signals, json.dumps(chart.whole())) for chart in charts)
    beside = plots.Panels(title="", charts=charts).whole()
    assert not re.search(signals, json.dumps(beside))
    for part in ("scale", "legend"):
        assert {"color": "independent", "strokeDash": "independent"}.items() <= beside["resolve"][part].items(), part


def test_more_models_than_colours_have_other_marks() -> None:
    fig = plots.layer_profile(models(**{f"m{number}": 2 for number in range(15)}), "m")
    looks = [(series.color, series.mark) for series in fig.series[:15]]
    assert len(set(looks)) == 15


def test_models_are_called_by_the_last_part_of_their_names_unless_two_share_it() -> None:
    names = ["EleutherAI/pythia-70m@main", "a/base", "b/base", "/tmp/x/", "gpt2"]
    assert [*short_names(names).values()] == ["pythia-70m@main", "a/base", "b/base", "x", "gpt2"]


def test_the_table_of_models_has_the_headlines_of_each_at_its_last_layer() -> None:
    found = plots.model_table(models(a=2, b=4))
    rows = found[["metric", "run", "layer", "value", "low", "high"]].astype(object)
    assert rows.where(rows.notna(), None).values.tolist() == [
        ["m", "org/a", 2, 1.2, 0.5, 9.5],
        ["random_m", "org/a", 2, 0.25, None, None],
        ["whole", "org/a", None, 10.0, 1.0, 99.0],
        ["m", "org/b", 4, 2.4, 0.5, 9.5],
        ["random_m", "org/b", 4, 0.25, None, None],
        ["whole", "org/b", None, 20.0, 1.0, 99.0],
    ]
    assert plots.model_table(table(*whole((1, 2)))).empty
    gap = [Record(metric="min_gap", value=0.1), Record(metric="kl_to_final", value=0.1, layer=1)]
    assert plots.model_table(records.frame([measured("a", gap)]))["metric"].tolist() == ["min_gap"], "no profile"


def test_one_model_without_steps_has_its_matrix_without_a_slider() -> None:
    frame = models(a=2, b=4)
    fig = plots.layer_matrix(frame[frame["run"] == "org/b"], "pair")
    assert fig.cells.columns == [1, 2, 3, 4]
    assert "params" not in fig.spec(still=False)


def test_a_legend_shows_the_line_colours_and_its_entries_do_not_overlap_in_a_wider_font(shown) -> None:
    for name in ("legend of coupling", "legend of models"):
        symbols = re.findall(r'role-legend-symbol[^>]*><path[^>]*stroke="([^"]*)"', shown[name].svg)
        named = dict.fromkeys((line.name, line.color) for line in shown[name].chart.series if line.legend)
        assert symbols == [color for _, color in named], name
    place = r'translate\(([\d.]+),[\d.]+\)"><path class="background"[^>]*d="M0,0h([\d.]+)v1\d\.'
    (_, width), (second, _) = [(float(x), float(w)) for x, w in re.findall(place, shown["wide legend"].svg)]
    assert second > width * 7 / 6


def test_the_text_of_a_row_of_intervals_is_not_cut_in_a_wider_font(shown) -> None:
    (left,) = re.findall(r"^<svg.*?translate\((\d+),", shown["long row"].svg)
    assert float(left) > 178 + 7  # the width of the text in DejaVu Sans of 11 pixels, plus the margin


def test_an_axis_extends_beyond_its_values_except_at_zero():
    assert fixed_limits([0.0, 10.0]) == (-0.5, 10.5)
    assert fixed_limits([2.0, 10.0], zero=True) == (0.0, 10.5)
    assert fixed_limits([-10.0, 10.0], zero=True) == (-11.0, 11.0)
