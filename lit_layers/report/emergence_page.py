"""The page, the files and the tables of emergence times."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.clock.step_curves import AxisName, LayerCurve, layer_table
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
from lit_layers.figures.chart import Chart
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
from lit_layers.report.template import Block, Table, block_of, fill, table_of

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
) -> list[Path]:
    """Write emergence.html, tables as .csv and .parquet, and figures as .png, .svg and .pdf; return their paths.

    The page comes first. The tables are times, order, layer_order, layers (of numbers with `layers`) and agreement
    (only .csv). Files of these names are replaced.

    Raises:
        InputError: the folder cannot be written.
    """
    times, order, agreement = times_table(clock), order_table(clock), agreement_table(clock)
    files = {"times.csv": times[list(COLUMNS)], "times.parquet": times, "order.csv": order, "order.parquet": order}
    for name, table in {"layer_order": layer_order_table(clock), "layers": layer_table(layers)}.items():
        if len(table):
            files |= {f"{name}.csv": table, f"{name}.parquet": table}
    files |= {"agreement.csv": agreement} if len(agreement) else {}
    paths = records.write_files(folder, files)
    content, charts = _figures(clock, axis, layers)
    pictures = write_pictures(charts, folder)
    page = _page(clock, axis, agreement, content)
    return [*records.write_files(folder, {"emergence.html": page}), *pictures, *paths]


# ------------------------------------------------------------------------------------------------ the page


def of_one_run(run: str, measurements: Sequence[Measurement], root: Path) -> dict[str, Any] | None:
    """Returns what a run's own page says of when its metrics emerge, in sentences and a figure; None without any."""
    clock = times_of_run(run, measurements, root)
    if clock is None:
        return None
    pairs = of_the_model(clock, run)
    emerges = any(times.emerges for _, times in pairs)
    return {
        "sentences": _sentences(clock, run),
        "still": [curve.title for curve, times in pairs if not times.changes],
        "notes": _notes(clock),
        "blocks": [_block("Timeline", timeline(clock), kind="named")] if emerges else [],
    }


def _sentences(clock: Clock, run: str, axis: AxisName = "step") -> list[str]:
    """What emerges, the earliest first, and then what changes and comes back."""
    back = [pair for pair in of_the_model(clock, run) if pair[1].changes and not pair[1].emerges]
    return [sentence(*pair, axis=axis) for pair in (*emerged_in_order(clock, run), *back)]


def _figures(
    clock: Clock, axis: AxisName, layers: Sequence[LayerCurve]
) -> tuple[dict[str, Any], list[tuple[str, Chart]]]:
    """Return what the page shows, by its parts, and each figure with the name of its files."""
    several, first, named = len(clock.runs) > 1, list[Block](), list[tuple[str, Chart]]()
    if any(times.emerges for times in clock.times):
        chart = timeline(clock, axis=axis)
        first.append(_block("Timeline", chart, kind="named"))
        named.append(("timeline", chart))
    orders = {run: order_matrix(clock, run) for run in clock.runs if surest_pairs(clock, run)}
    named += [(f"order {run}", chart) for run, chart in orders.items()]
    rising = monotonicity_charts(layers, clock, axis=axis)
    named += [(f"monotonicity {name}", chart) for name, chart in rising]
    fronts = layer_fronts(clock, axis=axis)
    named += [(f"layers {curve.analysis} {curve.metric} {curve.tag_text}", chart) for curve, chart in fronts]
    for title, note, each in (
        ("Which layer first", "", fronts),
        ("Does it rise over the layers?", RISING, rising),
    ):
        if each:
            first.append(block_of(title, [(chart.title.split(":")[0], chart) for _, chart in each], note))
    content = {
        "blocks": first,
        "orders": [
            _block(f"Order{f', {run}' if several else ''}", chart, kind="scrolled") for run, chart in orders.items()
        ],
    }
    return content, named


def _page(clock: Clock, axis: AxisName, agreement: pd.DataFrame, content: dict[str, Any]) -> str:
    """The page of these parts, with what is said in words."""
    emerges = [times.emerges for times in clock.times]
    # Without the mean over seeds.
    runs = list(dict.fromkeys(curve.run for curve in clock.curves if curve.seeds is None)) or clock.runs
    return fill(
        "emergence.html.jinja",
        title=runs[0] if len(runs) == 1 else f"{len(runs)} runs",
        sentences={run: _sentences(clock, run, axis) for run in clock.runs},
        still={
            run: [curve.title for curve, times in of_the_model(clock, run) if not times.changes] for run in clock.runs
        },
        facts=[("Curves", len(emerges)), ("Emerge", sum(emerges)), ("Runs", len(runs))],
        notes=_notes(clock),
        left_out=clock.left_out,
        agreement=_agreement(agreement),
        agreed=agreement_sentence(agreement),
        paired=_how_paired(clock),
        times=_times(clock),
        confidence=f"{100 * clock.confidence:g}%",
        **content,
    )


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
