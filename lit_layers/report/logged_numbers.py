"""A measurement as loggers show it: which of its numbers are curves over steps and how these are called, and which are
pictures; the rows of the table that holds them all.
"""

import importlib.util
import io
import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.clock.times_and_order import times_of_run, times_table
from lit_layers.errors import InputError, first_line
from lit_layers.figures.chart import Chart
from lit_layers.figures.maps import has_surface, layer_matrix, layer_surface
from lit_layers.figures.tables import matching, select, usual_loops, variants_of
from lit_layers.figures.vega import pictures_of
from lit_layers.identity import logged_name, settings_of, short, variant_of
from lit_layers.metrics import look_up
from lit_layers.records import Measurement, Record
from lit_layers.report.emergence_charts import timeline
from lit_layers.run_data import read_run

logger = logging.getLogger(__name__)
TABLE, TIMES, TIMELINE = "emergence", "emergence_times", "emergence_times/timeline"
# 0.15 ms a row: 3 s. Above it the pairs of layers are left to the heat maps; W&B itself cuts at 200,000.
_TABLE_ROWS, _TABLE_LIMIT = 20_000, 200_000
Table = tuple[list[str], list[list[Any]]]  # columns, rows
MATRIX, SURFACE, LAYER_MEAN = "matrix", "over_layers", "layer_mean"  # last words of names
TABLE_COLUMNS = (
    *("step", "tokens", "analysis", "metric", "layer", "value"),
    *("other_layer", "stderr", "low", "high", "n", "settings", "tags"),
)


@dataclass(frozen=True)
class Point:
    """A number that has a curve: its curve's name, and that of all layers' curves together."""

    name: str
    base: str
    metric: str
    layer: int | None
    value: float


def points_of(measurement: Measurement, name: str | None = None) -> list[Point]:
    """The numbers of one measurement that are curves; those per layer alone with their mean over layers 1..L, too.

    Nothing is a curve for pairs of layers or places of tokens. A metric that lacks a layer has no mean, as its curve
    over steps would be of other layers from step to step. `name` is what its analysis is called, where not by its own.
    """
    name = name or measurement.analysis
    points: list[Point] = []
    layers: dict[tuple[str, str], dict[int, float]] = {}
    loops = usual_loops(record.tags for record in measurement.records)
    for record in measurement.records if measurement.error is None else ():
        if record.other_layer is not None or not record.tags.keys().isdisjoint(records.PLACES):
            continue
        if record.tags.get("loops", loops) != loops:
            continue  # a curve for each number of loops and of blocks would be hundreds: the table has them
        base = records.key(name, Record(metric=record.metric, value=0.0, tags=record.tags))
        points.append(Point(records.key(name, record), base, record.metric, record.layer, record.value))
        if record.layer and math.isfinite(record.value):
            layers.setdefault((base, record.metric), {})[record.layer] = record.value
    whole = {point.base for point in points if point.layer is None}
    depth = measurement.provenance.get("depth", max((max(values) for values in layers.values()), default=0))
    for (base, metric), values in layers.items():
        # The last block has none to be switched with.
        first = 1 if 1 in values else max(1, look_up(metric).first_layer or 1)
        last = depth - 1 if "/variant=switch" in base else depth
        if base not in whole and [*sorted(values)] == [*range(first, last + 1)]:
            points.append(Point(f"{base}/{LAYER_MEAN}", base, metric, None, sum(values.values()) / len(values)))
    return points


def values_of(measurement: Measurement, name: str | None = None) -> dict[str, float]:
    """The values of `points_of` by the names of their curves."""
    return {point.name: point.value for point in points_of(measurement, name)}


def plotted_values(measurement: Measurement, name: str | None = None) -> dict[str, float]:
    """Those of `values_of` that a person plots: no diagnostics, no single singular values."""
    rows = [(look_up(point.metric), point) for point in points_of(measurement, name)]
    return {
        point.name: point.value for row, point in rows if not (row.secondary or row.unlisted or "/index=" in point.base)
    }


def matrices_of(measurement: Measurement, name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Metric and tags of each kind of pairs of layers of a measurement, by the name of its picture."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {}
    for record in measurement.records if measurement.error is None else ():
        if record.other_layer is not None and record.tags.keys().isdisjoint(records.PLACES):
            tags = variant_of(record.tags)
            key = records.key(name, Record(metric=record.metric, value=0.0, tags=tags))
            kinds[f"{key}/{MATRIX}"] = record.metric, tags
    return kinds


def matrix_charts(measurement: Measurement, name: str) -> dict[str, Chart]:
    """A heat map for each kind of pairs of layers of one measurement."""
    kinds = matrices_of(measurement, name)
    if not kinds:
        return {}
    frame = _frame([measurement])
    return {key: layer_matrix(frame, metric, tags=tags) for key, (metric, tags) in kinds.items()}


def surfaces_of(measurements: list[Measurement], name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Metric and tags of each heat map of layers by steps of one analysis, by its name: what tables of results have."""
    frame = _frame(measurements)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {}
    for metric in dict.fromkeys(point.metric for m in measurements for point in points_of(m, name)):
        if look_up(metric).secondary or look_up(metric).unlisted:
            continue
        points = select(frame, metric, over_steps=True)
        for tags in variants_of(points):
            if has_surface(matching(points, tags)):
                present = {tag: value for tag, value in tags.items() if value is not None}  # others have the rest
                key = records.key(name, Record(metric=metric, value=0.0, tags=present))
                kinds[f"{key}/{SURFACE}"] = metric, tags
    return kinds


def _frame(measurements: list[Measurement]) -> pd.DataFrame:
    return records.frame(measurements).drop(columns=records.AUDIT, errors="ignore")  # what comes here may be drawn


def table_rows(measurements: list[Measurement], *, most_with_pairs: int, most: int) -> Iterator[list[Any]]:
    """Rows of `TABLE_COLUMNS`, at most so many; pairs of layers and places of tokens only where all rows are few."""
    pairs = [(measurement, record) for measurement in measurements for record in measurement.records]
    if len(pairs) > most_with_pairs:
        pairs = [
            (measurement, record)
            for measurement, record in pairs
            if record.other_layer is None and record.tags.keys().isdisjoint(records.PLACES)
        ]
    return (_table_row(measurement, record) for measurement, record in pairs[:most])


def _table_row(measurement: Measurement, record: Record) -> list[Any]:
    tags = json.dumps(record.tags, sort_keys=True) if record.tags else None
    place = [measurement.step, measurement.tokens, measurement.analysis, record.metric, record.layer, record.value]
    count = [record.stderr, record.low, record.high, record.n]
    return [*place, record.other_layer, *count, short(settings_of(measurement)), tags]


def heat_maps(measurement: Measurement, name: str, without: Collection[str] = ()) -> dict[str, bytes]:
    """A picture (PNG) for each kind of pairs of layers, but those that are there already."""
    if not _draws() or matrices_of(measurement, name).keys() <= set(without):
        return {}
    charts = matrix_charts(measurement, name)
    due = {key: chart for key, chart in charts.items() if key not in without}
    return _drawn(due, f"{measurement.analysis} at step {measurement.step}")


def layer_maps(measured: Sequence[Measurement], plain: dict[tuple[str, str], str]) -> dict[str, bytes]:
    """Layers by steps, a picture (PNG) for each metric that has both; of settings other than `plain` by their names."""
    series: dict[str, list[Measurement]] = {}
    for measurement in measured if _draws() else ():
        if measurement.error is None and measurement.step is not None:
            series.setdefault(logged_name(measurement, plain), []).append(measurement)
    charts: dict[str, Chart] = {}
    for name, measurements in series.items():
        try:
            frame, kinds = _frame(measurements), surfaces_of(measurements, name)
            charts |= {key: layer_surface(frame, metric, tags=tags) for key, (metric, tags) in kinds.items()}
        except (InputError, ValueError) as error:  # no picture is worth the run's end
            logger.warning("no maps over layers of %s: %s", name, first_line(error))
    return _drawn(charts, "layers by steps") if charts else {}


def _draws() -> bool:
    return importlib.util.find_spec("vl_convert") is not None


def _drawn(charts: Mapping[str, Chart], what: str) -> dict[str, bytes]:
    try:
        pictures = pictures_of([chart.whole() for chart in charts.values()], [".png"])
    except InputError as error:
        logger.warning("no map of %s: %s", what, error)
        return {}
    return {name: png for name, (png,) in zip(charts, pictures, strict=True)}


def of_the_whole_run(
    root: Path,
    measured: Sequence[Measurement],
    plain: dict[tuple[str, str], str],
    *,
    allow_suspect: bool = False,
    maps: dict[str, bytes] | None = None,
) -> tuple[dict[str, Table], dict[str, bytes]]:
    """The tables and the pictures (PNG) that are of all steps together, by their names; of no measurements none.

    The long form of all, `layer_maps` (unless `maps` are these), and where there are checkpoints enough to say it when
    each metric emerges.
    """
    rows = list(table_rows([*measured], most_with_pairs=_TABLE_ROWS, most=_TABLE_LIMIT + 1))
    if len(rows) > _TABLE_LIMIT:
        logger.warning("the table would have more than %d rows; the first are kept", _TABLE_LIMIT)
    if not rows:
        return {}, {}
    tables: dict[str, Table] = {TABLE: ([*TABLE_COLUMNS], rows[:_TABLE_LIMIT])}
    pictures = layer_maps(measured, plain) if maps is None else dict(maps)
    clock = None
    try:
        run = read_run(root)
        shown = [m for m in run.measurements if allow_suspect or not records.is_suspect(m)]
        if not run.compares_models and (clock := times_of_run(run.name, shown, root)) is not None:
            times = times_table(clock).drop(columns="run").astype(object)
            tables[TIMES] = [*map(str, times)], times.where(times.notna(), None).values.tolist()
    except Exception as error:  # no table is worth the run's end
        logger.warning("no table of emergence times: %s", first_line(error))
    try:
        if clock is not None and _draws() and any(times.emerges for times in clock.times):
            pictures |= _drawn({TIMELINE: timeline(clock)}, "when metrics emerge")
    except Exception as error:  # nor is a picture
        logger.warning("no picture of when metrics emerge: %s", first_line(error))
    return tables, pictures


def as_logged(library: Any, tables: Mapping[str, Table], pictures: Mapping[str, bytes]) -> dict[str, Any]:
    """Tables and pictures (PNG) as a row of wandb takes them.

    Beside others of its name a picture has a slider over the steps.
    """
    made = {name: library.Table(columns=columns, data=rows) for name, (columns, rows) in tables.items()}
    return made | {name: library.Image(image(png)) for name, png in pictures.items()}


def image(png: bytes) -> Any:
    from PIL import Image  # what only heat maps need

    return Image.open(io.BytesIO(png)).convert("RGB")
