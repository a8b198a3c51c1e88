"""The page, the files and the tables of emergence times."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.clock.block_prediction import BlockTable, prediction_charts, prediction_table
from lit_layers.clock.block_prediction import sentences as block_sentences
from lit_layers.clock.layer_statistics import LayerCurve, layer_table
from lit_layers.clock.lead_lags import lead_lag_chart, lead_lag_rows
from lit_layers.clock.lead_lags import sentences as lead_lag_sentences
from lit_layers.clock.model_forecasts import ModelForecasts, error_chart, error_rows
from lit_layers.clock.model_forecasts import sentences as forecast_sentences
from lit_layers.clock.state_maps import run_maps, step_maps
from lit_layers.clock.state_maps import sentences as state_sentences
from lit_layers.clock.state_similarity import CKA, kept_states, similarity_of_steps
from lit_layers.clock.state_similarity import COLUMNS as SIMILARITY_COLUMNS
from lit_layers.clock.step_curves import AxisName, StepCurve
from lit_layers.clock.times_and_order import (
    COLUMNS,
    Clock,
    agreement_sentence,
    agreement_table,
    emerged_in_order,
    few_seeds_sentence,
    layer_order_table,
    of_the_model,
    order_table,
    times_of_run,
    times_table,
)
from lit_layers.figures.chart import Chart, Panels
from lit_layers.figures.labels import p_text, value
from lit_layers.figures.vega import write_pictures
from lit_layers.records import Measurement
from lit_layers.report.emergence_charts import (
    LEAST_P,
    layer_fronts,
    monotonicity_charts,
    order_matrix,
    sentence,
    surest_pairs,
    time_text,
    timeline,
)
from lit_layers.report.template import Block, Figures, Table, block_of, fill, placed, table_of

ONLY_PROMPTS = (
    "These intervals are over prompts (or test rows): they say what other prompts would give for the same weights, not "
    "what another seed would, and are too narrow for that."
)
OTHER_SIMILARITIES = "The Procrustes distance, the overlap of subspaces, and other seeds: lit-layers emerge."
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
    states: pd.DataFrame | None = None,
) -> list[Path]:
    """Writes emergence.html, times and order as .csv and .parquet, agreement.csv, and the figures as .png, .svg, .pdf.

    Of numbers with `layers` also layers.csv and .parquet; of runs that say what single blocks are worth blocks.csv and
    .parquet, over these runs, too, where they are `seeds` of one. Of `leads` lead_lag.csv and .parquet; of `forecasts`
    forecast.csv and .parquet, and forecast_errors.csv; of `states`, as `similar_states` compares them, states.csv and
    .parquet.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: the folder cannot be written.
    """
    times, order, agreement = times_table(clock), order_table(clock), agreement_table(clock)
    predicted = prediction_table(blocks, pooled=seeds)
    leads = pd.DataFrame({"run": []}) if leads is None else leads
    states = pd.DataFrame(columns=[*SIMILARITY_COLUMNS]) if states is None else states
    files = {"times.csv": times[list(COLUMNS)], "times.parquet": times, "order.csv": order, "order.parquet": order}
    both = {"layer_order": layer_order_table(clock), "layers": layer_table(layers), "blocks": predicted}
    both |= {"lead_lag": leads, "states": states, **({} if forecasts is None else {"forecast": forecasts.table})}
    for name, table in both.items():
        if len(table) or name == "forecast":
            files |= {f"{name}.csv": table, f"{name}.parquet": table}
    files |= {"agreement.csv": agreement} if len(agreement) else {}
    files |= {} if forecasts is None else {"forecast_errors.csv": forecasts.errors}
    paths = records.write_files(folder, files)
    charts = _Charts(
        timeline=timeline(clock, axis=axis) if any(time.emerges for time in clock.times) else None,
        orders={run: order_matrix(clock, run) for run in clock.runs if surest_pairs(clock, run)},
        rising=monotonicity_charts(layers, clock, axis=axis),
        harms={run: prediction_charts(predicted, blocks, run, axis=axis) for run in predicted["run"].unique()},
        leads={run: lead_lag_chart(leads, run) for run in leads["run"].unique()},
        forecast=error_chart(forecasts) if forecasts is not None and len(forecasts.errors) else None,
        fronts=layer_fronts(clock, axis=axis),
        states=_state_blocks(states, several=len(clock.runs) > 1),
    )
    pictures = write_pictures(charts.named(), folder)
    page = _page(clock, charts, axis, agreement, predicted, leads, forecasts, state_sentences(states))
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
    states: list[Block]

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
        for block in self.states:
            charts = [each["chart"] for choice in block["choices"] for each in choice["figures"]]
            yield f"states {block['title']}", Panels(title="", charts=charts, columns=3, width=300)


# ------------------------------------------------------------------------------------------------ the page


def of_one_run(run: str, measurements: Sequence[Measurement], root: Path) -> dict[str, Any] | None:
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
        "blocks": [_block("Timeline", timeline(clock), kind="named")] if emerges else [],
    }


def _page(
    clock: Clock,
    charts: _Charts,
    axis: AxisName,
    agreement: pd.DataFrame,
    predicted: pd.DataFrame,
    leads: pd.DataFrame,
    forecasts: ModelForecasts | None,
    alike: Sequence[str],
) -> str:
    figures: Figures = []
    emerges = [times.emerges for times in clock.times]
    # Without the mean over seeds.
    runs = list(dict.fromkeys(curve.run for curve in clock.curves if curve.seeds is None)) or clock.runs
    blocks = [_block("Timeline", charts.timeline, kind="named")] if charts.timeline is not None else []
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
        title=runs[0] if len(runs) == 1 else f"{len(runs)} runs",
        sentences={run: [sentence(*pair, axis=axis) for pair in emerged_in_order(clock, run)] for run in clock.runs},
        still={
            run: [curve.title for curve, times in of_the_model(clock, run) if not times.emerges] for run in clock.runs
        },
        facts=[("Curves", len(emerges)), ("Emerge", sum(emerges)), ("Runs", len(runs))],
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
        alike=alike,
        states=placed(charts.states, figures),
        agreement=_agreement(agreement),
        agreed=agreement_sentence(agreement),
        paired=_how_paired(clock),
        times=_times(clock),
        confidence=f"{100 * clock.confidence:g}%",
    )


def _state_blocks(states: pd.DataFrame, *, several: bool) -> list[Block]:
    if not len(states):
        return []
    within = states["run"] == states["other_run"]
    maps = [*step_maps(states[within], several=several), *run_maps(states[~within & (states["over"] == "prompts")])]
    return [block_of(title, charts, note, wide=False) for title, note, charts in maps]


def states_of_run(run: str, measurements: Sequence[Measurement], root: Path) -> dict[str, Any] | None:
    """Returns the section of a run's own page on how alike its checkpoints are; None of a run that keeps no states.

    By the CKA alone, which takes milliseconds.
    """
    tables = [similarity_of_steps(kept, (CKA,)) for kept in kept_states(root, run, measurements)]
    blocks = [block for table in tables for block in _state_blocks(table, several=False)]
    if not blocks:
        return None
    note = " ".join([*(f"{line}." for table in tables for line in state_sentences(table)), OTHER_SIMILARITIES])
    return {"name": "states", "title": "How alike the checkpoints are", "note": note, "metrics": blocks}


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
    """On a phone a `named` one has its names above the rows, and a `scrolled` one does not shrink."""
    return block_of(title, [("", chart)], tall=True, kind=kind)


def _notes(clock: Clock) -> list[str]:
    over = {curve.over for curve in clock.curves}
    notes = [ONLY_PROMPTS] if "prompts" in over and "seeds" not in over else []
    guessed = sum(curve.over == "" for curve in clock.curves)
    if guessed:
        notes.append(
            f"{guessed} of {len(clock.curves)} curves come without errors, which are guessed from the curve itself."
        )
    if gaps := [times.num_gaps for times in clock.times if times.num_gaps]:
        curves = f"{len(gaps)} of {len(clock.curves)} curves"
        notes.append(f"Missing values: {sum(gaps)}, in {curves}; about these gaps the intervals are wider.")
    tested, false = len(clock.curves), (1 - clock.confidence) * len(clock.curves)
    return [
        *notes,
        *filter(None, [few_seeds_sentence(clock)]),
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
