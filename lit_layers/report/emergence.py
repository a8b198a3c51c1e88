"""The emergence page: when metrics emerge and in which order, as sentences, figures and tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_layers import records
from lit_layers.clock.step_curves import MONOTONICITY, AxisName, LayerCurve, StepCurve, layer_table
from lit_layers.clock.times_and_order import (
    Clock,
    agreement_sentence,
    agreement_table,
    emerged_curves,
    few_seeds_sentence,
    layer_order_table,
    model_pairs,
    null_step,
    order_table,
    p_before,
    times_of_run,
    times_table,
)
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import BLOCKS, count, p_equation, p_text, value
from lit_layers.figures.maps import named_matrix
from lit_layers.figures.profiles import row_chart, style_of_run
from lit_layers.figures.tables import grouped
from lit_layers.figures.theme import Axis, layer_axis, log_labels, log_step, rounded
from lit_layers.figures.vega import write_pictures
from lit_layers.functional.emergence.curve_times import EmergenceTimes, Time
from lit_layers.records import Measurement
from lit_layers.report.logged_numbers import shown_records
from lit_layers.report.template import Block, block, fill

LEAST_P = 1e-4  # smaller p-values are shown as < 1e-4
MOST_ROWS = 60  # largest number of rows of a timeline or an order matrix; more are unreadable


def axis_text(number: float) -> str:
    """Return a step or a number of tokens as text, rounded to an integer, or to one decimal place below 10."""
    return f"{number:.1f}".removesuffix(".0") if number < 10 else count(round(number))


def time_text(time: Time | None) -> str:
    """Return a time as text: `43 (38 to 50)`, `before 50`, `after 38`, `not yet`, or an empty string for None."""
    if time is None:
        return ""
    if math.isinf(time.high):
        return "not yet" if math.isinf(time.value) else f"after {axis_text(time.low)}" if time.low else "not known"
    low, high = axis_text(time.low), axis_text(time.high)
    if time.low == 0 and high != low:
        return f"before {high}"
    return axis_text(time.value) if low == high else f"{axis_text(time.value)} ({low} to {high})"


def sentence(curve: StepCurve, times: EmergenceTimes, *, axis: AxisName = "step", confidence: float = 0.95) -> str:
    """Return a sentence such as `Coupling, k = 12: half-way at step 13 (13 to 14), peak at 64`.

    If the curve does not emerge, the sentence says so. If the curve has a null, the sentence ends with the step at
    which their lasting difference begins.
    """
    return f"{curve.title}: {_times_text(times, axis)}{_null_text(curve, axis, confidence)}"


def _null_text(curve: StepCurve, axis: AxisName, confidence: float) -> str:
    """Return `, differs from its null from step 64 on`, or "" if the curve has no null or its errors are unknown."""
    first = null_step(curve, confidence)
    if first is None:
        return ""
    if math.isinf(first):
        return ", does not differ from its null at the last checkpoint"
    return f", differs from its null from {axis.removesuffix('s')} {axis_text(first)} on"


def _times_text(times: EmergenceTimes, axis: AxisName) -> str:
    if times.halfway is None or times.peak is None:
        return f"does not emerge ({p_equation(times.p_value, LEAST_P)})"
    halfway = time_text(times.halfway)
    halfway = f"at {axis.removesuffix('s')} {halfway}" if halfway[0].isdigit() else halfway
    peak = "not yet" if math.isinf(times.peak.value) else f"at {axis_text(times.peak.value)}"
    if not times.emerges:
        return f"changes and comes back, farthest {peak}"
    ends = ", moves at its first checkpoint" * times.before + ", still moves at its last checkpoint" * times.not_yet
    return f"half-way {halfway}, peak {peak}{ends}"


# ------------------------------------------------------------------------------------------------ figures


def timeline(clock: Clock, *, axis: AxisName = "step") -> Chart:
    """Return a chart with one row per metric, sorted by half-way point, and one colour per run.

    The half-way point is the time at which a curve has made half of its change. Filled marks with intervals are
    half-way points, hollow marks are peaks. Only the earliest `MOST_ROWS` rows are shown.
    """
    entries = [(number, *pair) for number, run in enumerate(clock.runs) for pair in emerged_curves(clock, run)]
    by_key = grouped(entries, lambda entry: entry[1].key)
    mean = lambda key: np.mean([log_step(_halfway(times).value) for *_, times in by_key[key]])  # noqa: E731
    keys, series, several = sorted(by_key, key=mean)[:MOST_ROWS], [], len(clock.runs)
    for number, run in enumerate(clock.runs):
        own: list[Any] = [
            (row, *each) for row, key in enumerate(keys) for index, *each in by_key[key] if index == number
        ]
        at = [row + 0.5 * (number + 0.5) / several - 0.25 for row, *_ in own]
        look = style_of_run(number, run, of=several, texts_only=True, size=6.5, interval="bars")
        ends = _ends([times.halfway for *_, times in own], clock.curves)
        hollow: dict[str, Any] = {"mark": f"{look['mark']}-open", "size": 5, "legend": False}
        for name, text, more in (("halfway", "half-way", ends), ("peak", "peak", hollow)):
            found = [getattr(times, name) for *_, times in own]
            texts = [f"{each[1].title}: {text} at {time_text(time)}" for each, time in zip(own, found, strict=True)]
            series.append(Series(x=at, y=rounded(log_step(time.value) for time in found), texts=texts, **look | more))
        for side, (mark, end) in enumerate((("triangle-left", "low"), ("triangle-right", "high"))):
            is_open = [times.open_ends[side] for *_, times in own]
            if any(is_open):
                y = [at_end if arrow else None for at_end, arrow in zip(ends[end], is_open, strict=True)]
                series.append(Series(x=at, y=y, **look | {"mark": mark, "legend": False, "hover": False}))
    texts = [_row_title(by_key[key][0][1]) for key in keys]
    title = "Half-way points (filled, with intervals; arrows: open ends) and peaks (hollow)"
    return row_chart(title, texts, _time_axis(clock, axis), series, height=110 + 18 * len(keys))


def layer_fronts(clock: Clock, *, axis: AxisName = "step") -> list[tuple[StepCurve, Chart]]:
    """Return, for each metric that emerges at two or more layers, one of the metric's curves and a chart.

    The chart shows at which time each layer has made half of its change, with one line per run. The curve gives the
    name and the tags of the metric.
    """
    by_metric = grouped(
        [pair for pair in zip(clock.curves, clock.times, strict=True) if pair[0].layer is not None and pair[1].emerges],
        lambda pair: (pair[0].analysis, pair[0].metric, pair[0].tag_text),
    )
    charts = []
    for pairs in by_metric.values():
        halves, lines = [_halfway(times) for _, times in pairs], {}
        for run, part in grouped(sorted(pairs, key=lambda pair: pair[0].layer or 0), lambda pair: pair[0].run).items():
            half = [_halfway(times) for _, times in part]
            texts = [f"layer {curve.layer}: half-way at {time_text(times.halfway)}" for curve, times in part]
            y = [log_step(time.value) for time in half]
            lines[run] = Series(
                x=[curve.layer for curve, _ in part], y=y, texts=texts, **_ends(half, [c for c, _ in pairs])
            )
        series = _run_lines(clock, lines)
        if max(len(one.x) for one in series) > 1:
            first = pairs[0][0]
            title = f"{first.title.removesuffix(f', layer {first.layer}')}: when each layer is half-way"
            up = _time_axis(clock, axis, min(half.low for half in halves), max(half.high for half in halves))
            chart = Chart(title=title, x=layer_axis(), y=up, series=series, hover="")
            charts.append((first, chart))
    return charts


def monotonicity_charts(
    layers: Sequence[LayerCurve], clock: Clock, *, axis: AxisName = "step"
) -> list[tuple[str, Chart]]:
    """Return charts of the Spearman correlation between a metric and the layer index over training, with their names.

    Each chart has one colour per run. A metric that is equal at all layers has no correlation and no chart.
    """
    defined = [each for each in layers if each.statistic == MONOTONICITY and np.isfinite(each.curve.values).any()]
    charts = []
    by_number = grouped(defined, lambda each: (each.curve.analysis, each.metric, each.tags))
    for (analysis, metric, tags), group in by_number.items():
        lines = {}
        for each in group:
            points = zip(each.curve.at, each.curve.values, strict=True)
            texts = [f"{axis_text(at)}: {value(number)}" for at, number in points]
            ends: Any = {"y": rounded(each.curve.values), "low": rounded(each.low), "high": rounded(each.high)}
            lines[each.curve.run] = Series(x=rounded(map(log_step, each.curve.at)), texts=texts, **ends)
        named = replace(group[0].curve, metric=metric, tags={k: v for k, v in group[0].curve.tags.items() if k != "of"})
        title, up = f"{named.title}: rank correlation with depth", "Spearman's rho over the layers"
        look: Any = {"x": _time_axis(clock, axis), "y": Axis(title=up, ends=(-1.05, 1.05)), "hover": ""}
        name = " ".join(filter(None, (analysis, metric, tags)))
        charts.append((name, Chart(title=title, series=_run_lines(clock, lines), **look)))
    return charts


def _run_lines(clock: Clock, lines: Mapping[str, Series]) -> list[Series]:
    """Return the lines of the runs, each in the colour and mark that its run has in all figures of the page."""
    look = {"of": len(clock.runs), "width": 2.0, "texts_only": True}
    runs = [(number, run) for number, run in enumerate(clock.runs) if run in lines]
    return [replace(lines[run], **style_of_run(number, run, **look)) for number, run in runs]


def order_matrix(clock: Clock, run: str) -> Chart:
    """Return a heat map of the probability that a row's metric reaches half of its change before a column's metric.

    Rows and columns are the metrics that emerge in the run, earliest first, at most `MOST_ROWS`.
    """
    emerged = emerged_curves(clock, run)[:MOST_ROWS]
    table = [[None if a is b else p_before(a, b)[0] for b in emerged] for a in emerged]
    names = [_row_title(curve) for curve, _ in emerged]
    title = f"P(row before column){f', {run}' if len(clock.runs) > 1 else ''}"
    texts = [f"that {curve.title} is before" for curve, _ in emerged]
    return named_matrix(title, names, [rounded(row, 3) for row in table], (0.0, 1.0), texts)


def _ends(times: Sequence[Any], curves: Sequence[StepCurve]) -> dict[str, Any]:
    """Return the ends of the times' confidence intervals, `low` and `high`, as positions on the axis of the chart.

    Ends after the last checkpoint of `curves` are drawn at that checkpoint.
    """
    last = max(float(curve.at[-1]) for curve in curves)
    return {end: rounded(log_step(min(getattr(time, end), last)) for time in times) for end in ("low", "high")}


def _row_title(curve: StepCurve) -> str:
    return curve.title.removesuffix(", rank correlation")


def _halfway(times: EmergenceTimes) -> Time:
    assert times.halfway is not None
    return times.halfway


def _time_axis(clock: Clock, axis: AxisName, low: float = 0, high: float = math.inf) -> Axis:
    """Return an axis over log(1 + step) that ends at the nearest checkpoints below `low` and above `high`."""
    at = sorted({int(step) for curve in clock.curves for step in curve.at})
    first, last = max([0, *(step for step in at if step < low)]), min([at[-1], *(step for step in at if step > high)])
    shown, pad = [step for step in at if first <= step <= last], 0.02 * (log_step(last) - log_step(first))
    labels = ({0.0: "0"} if first == 0 else {}) | log_labels([step for step in shown if step > 0])
    return Axis(
        title={"step": "Optimizer step", "tokens": "Tokens seen"}[axis],
        labels=labels,
        ends=(log_step(first) - pad, log_step(last) + pad),
    )


# ------------------------------------------------------------------------------------------------ the page


def write_emergence(
    clock: Clock,
    folder: Path,
    *,
    axis: AxisName = "step",
    layers: Sequence[LayerCurve] = (),
) -> list[Path]:
    """Write emergence.html, tables as .csv, and figures as .png, .svg and .pdf; return their paths, the page first.

    The tables are called times and order, and also layer_order, layers and agreement unless these are empty. Existing
    files with these names are replaced.

    Raises:
        InputError: the folder cannot be written.
    """
    times, agreement = times_table(clock), agreement_table(clock)
    files = {"times.csv": times, "order.csv": order_table(clock)}
    more = {"layer_order": layer_order_table(clock), "layers": layer_table(layers), "agreement": agreement}
    files |= {f"{name}.csv": table for name, table in more.items() if len(table)}
    paths = records.write_files(folder, files)
    content, charts = _figures(clock, axis, layers)
    pictures = write_pictures(charts, folder)
    page = _page(clock, axis, agreement, content)
    return [*records.write_files(folder, {"emergence.html": page}), *pictures, *paths]


def run_summary(run: str, measurements: Sequence[Measurement], root: Path) -> dict[str, Any] | None:
    """Return the section of a run's page on the times at which metrics emerge, or None if no curve is long enough.

    The section has sentences and a figure. It leaves out secondary metrics, and values measured with changed blocks. If
    a metric was measured for several values of a tag such as `k`, the section shows one value. `lit-layers emerge`
    shows all of these.
    """
    shown = [replace(m, records=[r for r in shown_records(m) if "variant" not in r.tags]) for m in measurements]
    clock = times_of_run(run, shown, root)
    if clock is None:
        return None
    return {
        "sentences": _sentences(clock, run),
        "still": _unchanged(clock, run),
        "clock": clock,
        "few_seeds": few_seeds_sentence(clock),
        "blocks": [_block("Timeline", timeline(clock), "named")] if emerged_curves(clock, run) else [],
    }


def _sentences(clock: Clock, run: str, axis: AxisName = "step") -> list[str]:
    """Return a sentence for each metric of a run that emerges, earliest first.

    Sentences for metrics that change and then return to their first value follow.
    """
    back = [pair for pair in model_pairs(clock, run) if pair[1].changes and not pair[1].emerges]
    look: Any = {"axis": axis, "confidence": clock.confidence}
    return [sentence(*pair, **look) for pair in (*emerged_curves(clock, run), *back)]


def _unchanged(clock: Clock, run: str, axis: AxisName = "step") -> list[str]:
    flat = [curve for curve, times in model_pairs(clock, run) if not times.changes]
    return [f"{curve.title}{_null_text(curve, axis, clock.confidence)}" for curve in flat]


def _figures(
    clock: Clock, axis: AxisName, layers: Sequence[LayerCurve]
) -> tuple[dict[str, Any], list[tuple[str, Chart]]]:
    """Return the figure blocks in each section of the emergence page, and all charts with their file names."""
    several, first = len(clock.runs) > 1, list[Block]()
    named = [("timeline", timeline(clock, axis=axis))] if any(times.emerges for times in clock.times) else []
    first += [_block("Timeline", chart, "named") for _, chart in named]
    orders = {run: order_matrix(clock, run) for run in clock.runs if len(emerged_curves(clock, run)) > 1}
    named += [(f"order {run}", chart) for run, chart in orders.items()]
    rising = monotonicity_charts(layers, clock, axis=axis)
    named += [(f"monotonicity {name}", chart) for name, chart in rising]
    fronts = layer_fronts(clock, axis=axis)
    named += [(f"layers {curve.analysis} {curve.metric} {curve.tag_text}", chart) for curve, chart in fronts]
    for title, each in (("Which layer first", fronts), ("Does it rise over the layers?", rising)):
        if each:
            shown = [(chart.title.split(":")[0], [("", chart)]) for _, chart in each]
            first.append(block(title, BLOCKS.get(title, ""), shown, wide=True))
    blocks = [_block(f"Order{f', {run}' if several else ''}", chart, "scrolled") for run, chart in orders.items()]
    return {"blocks": first, "orders": blocks}, named


def _page(clock: Clock, axis: AxisName, agreement: pd.DataFrame, content: dict[str, Any]) -> str:
    """Return the HTML of the emergence page; `content` holds its figure blocks."""
    # Leave out the names of mean curves over seeds: a mean is not a run.
    runs = list(dict.fromkeys(curve.run for curve in clock.curves if curve.seeds is None)) or clock.runs
    return fill(
        "emergence.html.jinja",
        title=runs[0] if len(runs) == 1 else f"{len(runs)} runs",
        clock=clock,
        runs=runs,
        sentences={run: _sentences(clock, run, axis) for run in clock.runs},
        still={run: _unchanged(clock, run, axis) for run in clock.runs},
        few_seeds=few_seeds_sentence(clock),
        agreement=agreement.to_dict("records"),
        agreed=agreement_sentence(agreement),
        pairs=order_table(clock)["paired"],
        time_text=time_text,
        value=value,
        p_text=lambda p: p_text(p, LEAST_P),
        **content,
    )


def _block(title: str, chart: Chart, kind: str) -> Block:
    """Return a figure block with one wide figure.

    On narrow screens `kind="named"` puts row names above the rows, and `kind="scrolled"` keeps the figure's full width.
    """
    return block(title, "", [("", [("", chart)])], wide=True, kind=kind)
