"""The figures, the page and the tables of emergence times."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_layers import records
from lit_layers.clock.block_prediction import BlockTable, prediction_charts, prediction_table
from lit_layers.clock.block_prediction import sentences as block_sentences
from lit_layers.clock.layer_statistics import MONOTONICITY, LayerCurve, layer_table
from lit_layers.clock.lead_lags import lead_lag_chart, lead_lag_rows
from lit_layers.clock.lead_lags import sentences as lead_lag_sentences
from lit_layers.clock.model_forecasts import ModelForecasts, error_chart, error_rows
from lit_layers.clock.model_forecasts import sentences as forecast_sentences
from lit_layers.clock.step_curves import AxisName, StepCurve
from lit_layers.clock.times_and_order import (
    COLUMNS,
    Clock,
    agreement_sentence,
    agreement_table,
    emerged_in_order,
    is_before,
    layer_order_table,
    of_the_model,
    order_table,
    times_of_run,
    times_table,
)
from lit_layers.figures.axes import DECADES, TITLES, Axis, layer_axis, place
from lit_layers.figures.chart import Chart, Panels, Series
from lit_layers.figures.labels import count, p_equation, p_text, value
from lit_layers.figures.maps import named_matrix
from lit_layers.figures.models import look_of
from lit_layers.figures.tables import grouped
from lit_layers.figures.theme import rounded
from lit_layers.figures.vega import write_pictures
from lit_layers.functional.emergence import EmergenceTimes, Time
from lit_layers.records import Measurement
from lit_layers.report.template import Block, Figures, Table, block_of, fill, placed, table_of

Emerged = Sequence[tuple[StepCurve, EmergenceTimes]]
LEAST_P = 1e-4  # that is written out
MOST_LETTERS = 54  # of a row's label
MOST_ROWS = 60  # of a timeline or an order, the surest first: more cannot be read
ONLY_PROMPTS = (
    "These intervals are over prompts (or test rows): they say what other prompts would give for the same weights, not "
    "what another seed would, and are too narrow for that."
)
RISING = (
    "1: each layer has a better value than the one before it, or a higher one where none is better. The band is over "
    "seeds, or what errors of the layers make of it: drawn curves are rougher, so that it may lie beside the line."
)


def write_emergence(
    clock: Clock,
    folder: Path,
    *,
    axis: AxisName = "step",
    layers: Sequence[LayerCurve] = (),
    blocks: Sequence[BlockTable] = (),
    seeds: bool = False,
    leads: pd.DataFrame | None = None,
    forecasts: ModelForecasts | None = None,
) -> list[Path]:
    """Writes emergence.html, times and order as .csv and .parquet, agreement.csv, and the figures as .png, .svg, .pdf.

    Of numbers with `layers` also layers.csv and .parquet; of runs that say what single blocks are worth blocks.csv and
    .parquet, over these runs, too, where they are `seeds` of one. Of `leads` lead_lag.csv and .parquet; of `forecasts`
    forecast.csv and .parquet, and forecast_errors.csv.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: the folder cannot be written.
    """
    times, order, agreement = times_table(clock), order_table(clock), agreement_table(clock)
    predicted = prediction_table(blocks, pooled=seeds)
    leads = pd.DataFrame({"run": []}) if leads is None else leads
    files = {"times.csv": times[list(COLUMNS)], "times.parquet": times, "order.csv": order, "order.parquet": order}
    both = {"layer_order": layer_order_table(clock), "layers": layer_table(layers), "blocks": predicted}
    both |= {"lead_lag": leads, **({} if forecasts is None else {"forecast": forecasts.table})}
    for name, table in both.items():
        if len(table) or name == "forecast":
            files |= {f"{name}.csv": table, f"{name}.parquet": table}
    files |= {"agreement.csv": agreement} if len(agreement) else {}
    files |= {} if forecasts is None else {"forecast_errors.csv": forecasts.errors}
    paths = records.write_files(folder, files)
    charts = _Charts(
        timeline=timeline(clock, axis=axis) if any(time.emerges for time in clock.times) else None,
        orders={run: order_matrix(clock, run) for run in clock.runs if _pairs(clock, run)},
        rising=monotonicity_charts(layers, clock, axis=axis),
        harms={run: prediction_charts(predicted, blocks, run, axis=axis) for run in predicted["run"].unique()},
        leads={run: lead_lag_chart(leads, run) for run in leads["run"].unique()},
        forecast=error_chart(forecasts) if forecasts is not None and len(forecasts.errors) else None,
        fronts=layer_fronts(clock, axis=axis),
    )
    pictures = write_pictures(charts.named(), folder)
    page = _page(clock, charts, axis, agreement, predicted, leads, forecasts)
    return [*records.write_files(folder, {"emergence.html": page}), *pictures, *paths]


@dataclass(frozen=True, kw_only=True)
class _Charts:
    """The figures of a page, each drawn once: by run, or with what it is of."""

    timeline: Chart | None
    orders: dict[str, Chart]
    rising: list[tuple[str, Chart]]
    harms: dict[str, list[Chart]]
    leads: dict[str, Chart | None]
    forecast: Chart | None
    fronts: list[tuple[StepCurve, Chart]]

    def named(self) -> Iterator[tuple[str, Chart | Panels]]:
        """Yields what the files of each are called after, and the chart."""
        if self.timeline is not None:
            yield "timeline", self.timeline
        yield from ((f"order {run}", chart) for run, chart in self.orders.items())
        yield from ((f"monotonicity {name}", chart) for name, chart in self.rising)
        for run, charts in self.harms.items():
            yield f"blocks {run}", Panels(title="", charts=charts, columns=1, width=640)
        yield from ((f"lead_lag {run}", chart) for run, chart in self.leads.items() if chart is not None)
        if self.forecast is not None:
            yield "forecast", self.forecast
        for curve, chart in self.fronts:
            yield f"layers {curve.analysis} {curve.metric} {curve.tag_text}", chart


# ------------------------------------------------------------------------------------------------ in words


def at_text(number: float) -> str:
    """Returns a step or a number of tokens as text: whole ones, below 10 with a digit behind the point."""
    return f"{number:.1f}".removesuffix(".0") if number < 10 else count(round(number))


def time_text(time: Time | None) -> str:
    """Returns `43 (38 to 50)`, or nothing where there is no time."""
    if time is None:
        return ""
    low, high = at_text(time.low), at_text(time.high)
    return at_text(time.value) if low == high else f"{at_text(time.value)} ({low} to {high})"


def sentence(curve: StepCurve, times: EmergenceTimes, *, axis: AxisName = "step") -> str:
    """Returns `Coupling, k = 12: half-way at step 13 (13 to 14), peak at 64`, or that it does not emerge."""
    if times.halfway is None or times.peak is None:
        return f"{curve.title}: does not emerge ({p_equation(times.p_value, LEAST_P)})"
    where = "step" if axis == "step" else "token"
    return f"{curve.title}: half-way at {where} {time_text(times.halfway)}, peak at {at_text(times.peak.value)}"


# ------------------------------------------------------------------------------------------------ figures


def row_label(curve: StepCurve) -> str:
    """Returns its title as a row has room for it: a long one loses its middle, since names differ at their ends."""
    title = curve.title.removesuffix(", rank correlation")
    return title if len(title) <= MOST_LETTERS else f"{title[:35]}…{title[36 - MOST_LETTERS :]}"


def timeline(clock: Clock, *, axis: AxisName = "step") -> Chart:
    """Returns a row a metric, sorted by its half-way point, with intervals; a colour a run, hollow marks at peaks.

    Of more than `MOST_ROWS` rows the surest are shown.
    """
    by_key: dict[Any, list[tuple[int, StepCurve, EmergenceTimes]]] = {}
    for number, run in enumerate(clock.runs):
        for curve, times in emerged_in_order(clock, run):
            by_key.setdefault(curve.key, []).append((number, curve, times))
    surest = sorted(by_key, key=lambda key: min(_width(times) for _, _, times in by_key[key]))[:MOST_ROWS]
    keys = sorted(
        surest, key=lambda key: sum(place(_halfway(times).value) for *_, times in by_key[key]) / len(by_key[key])
    )
    rows = {key: row for row, key in enumerate(keys)}
    series, several = [], len(clock.runs)
    for number, run in enumerate(clock.runs):
        mine = [(rows[key], times) for key in keys for index, _, times in by_key[key] if index == number]
        at = [row + (0.5 * (number + 0.5) / several - 0.25 if several > 1 else 0) for row, _ in mine]
        texts = [f"{by_key[keys[row]][0][1].title}: half-way at {time_text(times.halfway)}" for row, times in mine]
        half, peak = ([getattr(times, name) for _, times in mine] for name in ("halfway", "peak"))
        ends = {end: rounded(place(getattr(time, end)) for time in half) for end in ("low", "high")}
        look = look_of(number, run, of=several, tells_texts=True, size=6.5)
        series.append(
            Series(x=at, y=rounded(place(t.value) for t in half), texts=texts, interval="bars", **ends, **look)
        )
        peaks = [f"{by_key[keys[row]][0][1].title}: peak at {time_text(times.peak)}" for row, times in mine]
        hollow = look | {"mark": f"{look['mark']}-open", "size": 5, "legend": False}
        series.append(Series(x=at, y=rounded(place(t.value) for t in peak), texts=peaks, **hollow))
    labels = {rows[key]: row_label(by_key[key][0][1]) for key in keys}
    down = Axis(labels=labels, ends=(-0.6, len(keys) - 0.4), reverse=True, grid=False)
    title = "When each metric is half-way (filled, with its interval) and at its peak (hollow)"
    return Chart(
        title=title,
        x=down,
        y=_time_axis(clock, axis),
        series=series,
        horizontal=True,
        place="",
        height=110 + 18 * len(keys),
    )


def layer_fronts(clock: Clock, *, axis: AxisName = "step") -> list[tuple[StepCurve, Chart]]:
    """Returns for each metric that emerges at two layers or more when each layer is half-way, a colour a run."""
    by_metric = grouped(
        [pair for pair in zip(clock.curves, clock.times, strict=True) if pair[0].layer is not None and pair[1].emerges],
        lambda pair: (pair[0].analysis, pair[0].metric, pair[0].tag_text),
    )
    charts = []
    for pairs in by_metric.values():
        series = []
        for number, run in enumerate(clock.runs):
            mine = sorted((pair for pair in pairs if pair[0].run == run), key=lambda pair: pair[0].layer or 0)
            half = [_halfway(times) for _, times in mine]
            texts = [f"layer {curve.layer}: half-way at {time_text(times.halfway)}" for curve, times in mine]
            ends = {end: rounded(place(getattr(time, end)) for time in half) for end in ("low", "high")}
            look = look_of(number, run, of=len(clock.runs), width=2.0, tells_texts=True, **ends)
            layers = [curve.layer for curve, _ in mine]
            series.append(Series(x=layers, y=rounded(place(t.value) for t in half), texts=texts, **look))
        if max(len(one.x) for one in series) > 1:
            first = pairs[0][0]
            charts.append((first, _front(first, series, clock, axis)))
    return charts


def _front(curve: StepCurve, series: Sequence[Series], clock: Clock, axis: AxisName) -> Chart:
    title = f"{curve.title.removesuffix(f', layer {curve.layer}')}: when each layer is half-way"
    return Chart(title=title, x=layer_axis(), y=_time_axis(clock, axis), series=series, place="")


def monotonicity_charts(
    layers: Sequence[LayerCurve], clock: Clock, *, axis: AxisName = "step"
) -> list[tuple[str, Chart]]:
    """Returns for each number with layers its rank correlation with depth over training, a colour a run, and its name.

    A number that never has one, being the same at all layers, has no chart.
    """
    mine = [each for each in layers if each.statistic == MONOTONICITY and np.isfinite(each.curve.values).any()]
    charts = []
    for (analysis, metric, tags), group in grouped(
        mine, lambda each: (each.curve.analysis, each.metric, each.tags)
    ).items():
        runs = {each.curve.run: each for each in group}
        series = []
        for number, run in enumerate(clock.runs):
            if run in runs:
                line = runs[run]
                ends = {"low": rounded(line.low), "high": rounded(line.high)}
                look = look_of(number, run, of=len(clock.runs), width=2.0, tells_texts=True, **ends)
                x = rounded(place(at) for at in line.curve.at)
                points = zip(line.curve.at, line.curve.values, strict=True)
                texts = [f"{at_text(at)}: {value(number)}" for at, number in points]
                series.append(Series(x=x, y=rounded(line.curve.values), texts=texts, **look))
        named = replace(group[0].curve, metric=metric, tags={k: v for k, v in group[0].curve.tags.items() if k != "of"})
        chart = Chart(
            title=f"{named.title}: rank correlation with depth",
            x=_time_axis(clock, axis),
            y=Axis(title="Spearman's rho over the layers", ends=(-1.05, 1.05)),
            series=series,
            place="",
        )
        charts.append((" ".join(filter(None, (analysis, metric, tags))), chart))
    return charts


def order_matrix(clock: Clock, run: str) -> Chart:
    """Returns P(row is half-way before column) of what emerges in a run, both sides with the earliest first.

    Of more than `MOST_ROWS` metrics the surest are shown.
    """
    emerged = _pairs(clock, run)
    table = [[None if a is b else is_before(a, b)[0] for b in emerged] for a in emerged]
    names = [row_label(curve) for curve, _ in emerged]
    title = f"P(row before column){f', {run}' if len(clock.runs) > 1 else ''}"
    texts = [f"that {curve.title} is before" for curve, _ in emerged]
    return named_matrix(title, names, [rounded(row, 3) for row in table], (0.0, 1.0), texts)


def _pairs(clock: Clock, run: str) -> Emerged:
    """What emerges in a run, earliest first; the surest of many, none of one alone."""
    emerged = emerged_in_order(clock, run)
    widest = sorted(_width(times) for _, times in emerged)[:MOST_ROWS]
    kept = [pair for pair in emerged if _width(pair[1]) <= widest[-1]] if emerged else []
    return kept if len(kept) > 1 else []


def _width(times: EmergenceTimes) -> float:
    """Of the interval of the half-way point, in tens."""
    half = _halfway(times)
    return place(half.high) - place(half.low)


def _halfway(times: EmergenceTimes) -> Time:
    """Of a curve that emerges."""
    assert times.halfway is not None
    return times.halfway


def _time_axis(clock: Clock, axis: AxisName) -> Axis:
    """log(1 + step), with labels at powers of ten, and at 2 and 5 or 3 between them where there is room."""
    last = max(float(curve.at[-1]) for curve in clock.curves)
    factors = (1, 2, 5) if last < 200 else (1, 3) if last < 10**DECADES else (1,)
    powers = range(math.floor(math.log10(max(last, 1))) + 1)
    ticks = [0, *(tick for power in powers for factor in factors if (tick := factor * 10**power) <= max(last, 1))]
    ticks = ticks if last < 10**7 else [tick for n, tick in enumerate(ticks) if n % 2 == 0]
    return Axis(
        title=TITLES[axis], labels={place(tick): at_text(tick) for tick in ticks}, ends=(-0.02, place(last) * 1.02)
    )


# ------------------------------------------------------------------------------------------------ the page


def of_one_run(run: str, measurements: Sequence[Measurement], root: Path, figures: Figures) -> dict[str, Any] | None:
    """Returns what a run's own page says of when its metrics emerge, in sentences and a figure; None without any."""
    clock = times_of_run(run, measurements, root)
    if clock is None:
        return None
    pairs = of_the_model(clock, run)
    emerges = any(times.emerges for _, times in pairs)
    return {
        "sentences": [sentence(*pair) for pair in emerged_in_order(clock, run)],
        "still": [curve.title for curve, times in pairs if not times.emerges],
        "notes": _notes(clock),
        "blocks": placed([_block("Timeline", timeline(clock), kind="scrolled")] if emerges else [], figures),
    }


def _page(
    clock: Clock,
    charts: _Charts,
    axis: AxisName,
    agreement: pd.DataFrame,
    predicted: pd.DataFrame,
    leads: pd.DataFrame,
    forecasts: ModelForecasts | None,
) -> str:
    figures: Figures = []
    emerges = [times.emerges for times in clock.times]
    blocks = [_block("Timeline", charts.timeline, kind="scrolled")] if charts.timeline is not None else []
    for title, note, each in (
        ("Which layer first", "", charts.fronts),
        ("Does it rise over the layers?", RISING, charts.rising),
    ):
        if each:
            blocks.append(block_of(title, [(chart.title.split(":")[0], chart) for _, chart in each], note))
    orders = [
        _block(f"Order{f', {run}' if len(clock.runs) > 1 else ''}", chart, kind="scrolled")
        for run, chart in charts.orders.items()
    ]
    return fill(
        "emergence.html.jinja",
        figures,
        title=clock.runs[0] if len(clock.runs) == 1 else f"{len(clock.runs)} runs",
        sentences={run: [sentence(*pair, axis=axis) for pair in emerged_in_order(clock, run)] for run in clock.runs},
        still={
            run: [curve.title for curve, times in of_the_model(clock, run) if not times.emerges] for run in clock.runs
        },
        facts=[("Curves", len(emerges)), ("Emerge", sum(emerges)), ("Runs", len(clock.runs))],
        notes=_notes(clock),
        left_out=clock.left_out,
        blocks=placed(blocks, figures),
        orders=placed(orders, figures),
        spared=[
            {
                "run": run,
                "lines": block_sentences(predicted, run),
                "blocks": placed([_block(chart.title.split(":")[0], chart) for chart in of_run], figures),
            }
            for run, of_run in charts.harms.items()
        ],
        leads=[_leads(leads, run, chart, figures) for run, chart in charts.leads.items()],
        forecast=None if forecasts is None else _forecast(forecasts, charts.forecast, figures),
        agreement=_agreement(agreement),
        agreed=agreement_sentence(agreement),
        paired=_how_paired(clock),
        times=_times(clock),
        confidence=f"{100 * clock.confidence:g}%",
    )


def _leads(leads: pd.DataFrame, run: str, chart: Chart | None, figures: Figures) -> dict[str, Any]:
    rows = lead_lag_rows(leads, run)
    columns = ("Pair", "Octaves", "r", "p", "q", "Given the loss: octaves", "r", "p", "q")
    return {
        "run": run,
        "lines": lead_lag_sentences(leads, run),
        "blocks": placed([_block(chart.title, chart, kind="scrolled")] if chart is not None else [], figures),
        "table": table_of(columns, [("", rows)]) if rows else None,
    }


def _forecast(forecasts: ModelForecasts, chart: Chart | None, figures: Figures) -> dict[str, Any]:
    columns = ("Forecast by", "Mean error", "Of the baseline's", "Of the loss's", "80% intervals that hold", "Width")
    rows = error_rows(forecasts)
    return {
        "lines": forecast_sentences(forecasts),
        "blocks": placed([_block(chart.title, chart)] if chart is not None else [], figures),
        "errors": table_of(columns, rows) if rows else None,
    }


def _block(title: str, chart: Chart, *, kind: str = "") -> Block:
    """`scrolled` where its names alone are as wide as a phone."""
    return block_of(title, [("", chart)], tall=True, kind=kind)


def _notes(clock: Clock) -> list[str]:
    over = {curve.over for curve in clock.curves}
    notes = [ONLY_PROMPTS] if "prompts" in over and "seeds" not in over else []
    guessed = sum(curve.over == "" for curve in clock.curves)
    if guessed:
        notes.append(
            f"{guessed} of {len(clock.curves)} curves come without errors, which are guessed from the curve itself."
        )
    tested, false = len(clock.curves), (1 - clock.confidence) * len(clock.curves)
    return [
        *notes,
        f"Each verdict is a test of its own: of {tested} flat curves some {false:.2g} would be said to emerge.",
    ]


def _how_paired(clock: Clock) -> str:
    """How the comparisons of the order were made."""
    pairs = order_table(clock)["paired"]
    if not pairs.any():
        return "Errors of different curves are taken as independent, which those over the same prompts are not."
    how = "Both are drawn by the same resampled prompts, as the run keeps the values of each."
    alone = len(pairs) - int(pairs.sum())
    rest = f" {alone} of {len(pairs)} pairs, of different prompts or without such values, are taken as independent."
    return how + (rest if alone else "")


def _agreement(agreement: pd.DataFrame) -> Table | None:
    if not len(agreement):
        return None
    rows = [
        (f"{row['run_a']}, {row['run_b']}", value(row["spearman"]), str(row["n"]))
        for row in agreement.to_dict("records")
    ]
    return table_of(("Runs", "Spearman of the half-way points", "Curves"), [("", rows)])


def _times(clock: Clock) -> Table:
    columns = ("Curve", "Onset", "Half-way", "Peak", "Plateau", "p", "Errors over")
    groups = []
    for run, pairs in itertools.groupby(zip(clock.curves, clock.times, strict=True), key=lambda pair: pair[0].run):
        rows = [
            (
                curve.title,
                *map(time_text, (times.onset, times.halfway, times.peak, times.plateau)),
                p_text(times.p_value, LEAST_P),
                curve.over or "guessed",
            )
            for curve, times in pairs
        ]
        groups.append((run, rows))
    return table_of(columns, groups)
