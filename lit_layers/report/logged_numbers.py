"""A measurement as loggers show it, curves over steps, pictures and tables, and what writes it to the user's loggers.

Any logger of Lightning takes curves by `log_metrics`. A run of W&B also gets heat maps and tables. None of the trackers
is imported here: a training that logs to one has done so.
"""

import io
import json
import logging
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pandas as pd

from lit_layers import records
from lit_layers.errors import InputError, first_line
from lit_layers.figures.chart import Chart
from lit_layers.figures.maps import has_surface, layer_matrix, layer_surface
from lit_layers.figures.tables import grouped, matching, plainest, select, usual_loops, variants_of
from lit_layers.figures.vega import pictures_of
from lit_layers.identity import latest, logged_name, plain_settings, settings_of, short, variant_of
from lit_layers.metrics import METRICS, look_up
from lit_layers.records import Measurement, Record

logger = logging.getLogger(__name__)
AXIS = "trainer/global_step"
_PLACE = "lit_layers"  # section of everything that is not the curve of a metric
STEP, TOKENS = f"{_PLACE}/step", f"{_PLACE}/tokens"
TRANSFORMERS_AXIS = "train/global_step"  # in each row that transformers logs to W&B
TABLE = "emergence"
# 0.15 ms a row: 3 s. Above it the pairs of layers are left to the heat maps; W&B itself cuts at 200,000.
_TABLE_ROWS = 20_000
Scalars = Literal["plotted", "all"]  # which numbers are curves
# Tags whose values are variants of one number: figures show one of them first.
_VARIANTS = ("statistic", "control", "drop_first", "normalization", "split", "of", "domain", "k")
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
        if not _is_on_curve(record):
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


def _is_on_curve(record: Record) -> bool:
    """Return whether a number belongs to no pair of layers and no place of a table of its own."""
    return record.other_layer is None and record.tags.keys().isdisjoint(records.PLACES)


def values_of(measurement: Measurement, name: str | None = None) -> dict[str, float]:
    """The values of `points_of` by the names of their curves."""
    return {point.name: point.value for point in points_of(measurement, name)}


def plotted(measurement: Measurement) -> Measurement:
    """Return a measurement with those numbers that a person plots: one variant of each metric, no diagnostics.

    Neither single singular values nor the coupling of blocks with themselves are among them.
    """
    of_metric = grouped(measurement.records, lambda record: record.metric)
    chosen = {metric: plainest(record.tags for record in each) for metric, each in of_metric.items()}

    def is_shown(record: Record) -> bool:
        row, tags, plain = look_up(record.metric), record.tags, chosen[record.metric]
        is_chosen = all(tags.get(name) == plain.get(name) for name in _VARIANTS)
        return is_chosen and not (row.secondary or row.unlisted or "index" in tags or tags.get("distance") == 0)

    return replace(measurement, records=[*filter(is_shown, measurement.records)])


def matrices_of(measurement: Measurement, name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Metric and tags of each kind of pairs of layers of a measurement, by the name of its picture."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {}
    for record in measurement.records if measurement.error is None else ():
        if record.other_layer is not None and record.tags.keys().isdisjoint(records.PLACES):
            tags = variant_of(record.tags)
            key = records.key(name, Record(metric=record.metric, value=0.0, tags=tags))
            kinds[f"{key}/{MATRIX}"] = record.metric, tags
    return kinds


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


def _table_row(measurement: Measurement, record: Record) -> list[Any]:
    tags = json.dumps(record.tags, sort_keys=True) if record.tags else None
    place = [measurement.step, measurement.tokens, measurement.analysis, record.metric, record.layer, record.value]
    count = [record.stderr, record.low, record.high, record.n]
    return [*place, record.other_layer, *count, short(settings_of(measurement)), tags]


def heat_maps(measurement: Measurement, name: str, without: Collection[str] = ()) -> dict[str, bytes]:
    """A picture (PNG) for each kind of pairs of layers, but those that are there already."""
    due = {key: kind for key, kind in matrices_of(measurement, name).items() if key not in without}
    if not due:
        return {}
    frame = _frame([measurement])
    charts = {key: layer_matrix(frame, metric, tags=tags) for key, (metric, tags) in due.items()}
    return _drawn(charts, f"{measurement.analysis} at step {measurement.step}")


def layer_maps(
    measured: Sequence[Measurement], plain: dict[tuple[str, str], str], until: float = math.inf
) -> dict[str, bytes]:
    """Return a picture (PNG) of layers by steps up to `until` for each metric that has both, by its name.

    Names of settings other than `plain` say which they are.
    """
    drawn = (plotted(m) for m in measured if m.error is None and m.step is not None and m.step <= until)
    series = grouped(drawn, lambda m: logged_name(m, plain))
    charts: dict[str, Chart] = {}
    for name, measurements in series.items():
        try:
            frame, kinds = _frame(measurements), surfaces_of(measurements, name)
            charts |= {key: layer_surface(frame, metric, tags=tags) for key, (metric, tags) in kinds.items()}
        except (InputError, ValueError) as error:  # no picture is worth the run's end
            logger.warning("no maps over layers of %s: %s", name, first_line(error))
    return _drawn(charts, "layers by steps") if charts else {}


def are_maps_due(num_steps: int) -> bool:
    """Return whether layers by steps are drawn while training goes on: after 4, 8, 16, ... measured steps."""
    return num_steps >= 4 and num_steps.bit_count() == 1


def _drawn(charts: Mapping[str, Chart], what: str) -> dict[str, bytes]:
    try:
        pictures = pictures_of([chart.whole() for chart in charts.values()], [".png"])
    except InputError as error:
        logger.warning("no map of %s: %s", what, error)
        return {}
    return {name: png for name, (png,) in zip(charts, pictures, strict=True)}


def of_the_whole_run(
    library: Any, measured: Sequence[Measurement], plain: dict[tuple[str, str], str], name: str = TABLE
) -> dict[str, Any]:
    """Return the row of wandb of all steps together, a table of this name and pictures; empty without numbers."""
    rows = [(measurement, record) for measurement in measured for record in measurement.records]
    if not rows:
        return {}
    rows = rows if len(rows) <= _TABLE_ROWS else [pair for pair in rows if _is_on_curve(pair[1])]
    table = library.Table(columns=[*TABLE_COLUMNS], data=[_table_row(*pair) for pair in rows])
    return {name: table} | images_of(library, layer_maps(measured, plain))


def images_of(library: Any, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    """Return pictures (PNG) as a row of wandb takes them: beside others of its name one has a slider over the steps."""
    from PIL import Image  # what only heat maps need

    return {name: library.Image(Image.open(io.BytesIO(png)).convert("RGB")) for name, png in pictures.items()}


def best_of(name: str) -> str | None:
    """Return what a run's summary keeps of a curve: the best value of a score, else the last."""
    better = next((METRICS[part].better for part in name.split("/") if part in METRICS), None)
    return {"lower": "min", "higher": "max"}.get(better or "")


# ------------------------------------------------------------------------------------------------ the user's loggers


class WandbRun:
    """A guest in a run of W&B: its rows join the user's rows, which keep their numbers.

    W&B numbers the rows of a run, and drops a row whose number is below that of the row before. A row of measurements
    is therefore added to the row that is open, at most one to each. A row that finds no place waits for the end.

    Args:
        run: the run.
        axis: the name under which the user's logger writes the step into each of its rows; None: it writes none. The
            measurements of a step then join only the row that the logger writes at that step (`join`). If it writes
            none, they have a row of their own some steps later: W&B draws all rows over the axis.
    """

    # By run, the last row that measurements were added to, and their step: two networks may be measured in one run.
    _taken: ClassVar[dict[str, tuple[int, int]]] = {}

    def __init__(self, run: Any, axis: str | None = None) -> None:
        self._run, self._wandb = run, sys.modules["wandb"]
        self._axis, self._is_shared = axis or STEP, axis is not None
        self._waiting = dict[int, tuple[Mapping[str, float], Mapping[str, bytes]]]()
        self._defined = {self._axis}

    def begin(self, about: Mapping[str, Any]) -> None:
        """Take what is measured, the options of each analysis by its name, and where."""
        self._run.config.update({_PLACE: dict(about)}, allow_val_change=True)
        if not self._is_shared:
            self._run.define_metric(STEP)

    def row(self, step: int, values: Mapping[str, float], pictures: Mapping[str, bytes]) -> None:
        """Take the curves of a step of the axis, and its pictures."""
        if self._is_shared and len(self._waiting) > 1:  # one alone may be step 0, before the logger's first row
            self.flush()
        self._waiting[step] = values, pictures
        if not self._is_shared:
            self.join(step)

    def join(self, step: int) -> None:
        """Add the row of a step to the one that is open, unless that has measurements of another step."""
        if step not in self._waiting:
            return
        number, (taken, by) = self._run.step, self._taken.get(self._run.id, (-1, -1))
        if number != taken or step == by:
            self._log(step, commit=False)
            self._taken[self._run.id] = number, step

    def end(self, root: Path) -> None:
        """Take the tables and the pictures of all steps; the run is the user's to close."""
        self.flush()
        measurements = records.read(root / "measurements.jsonl")
        shown = [measurement for measurement in latest(measurements) if not records.is_suspect(measurement)]
        row = of_the_whole_run(self._wandb, shown, plain_settings(measurements), f"{_PLACE}/{TABLE}")
        self._run.log(row, commit=False)

    def flush(self) -> None:
        """Write the rows that wait behind the user's last row."""
        if self._waiting and not self._is_shared:
            self.join(max(self._waiting))
        if not self._waiting:
            return
        number = self._run.step
        if not self._is_shared and number - self._run.summary.get("_step", -1) > 1:
            # The user numbers the rows: one that comes later would be dropped if these took its number.
            words = "W&B: %d steps are no points of its curves, as the run has fewer rows; %s/emergence has them"
            logger.warning(words, len(self._waiting), _PLACE)
            return
        if self._taken.get(self._run.id, (-1, -1))[0] == number:
            self._run.log({}, commit=True)
        for step in sorted(self._waiting):
            self._log(step, commit=True)

    def _log(self, step: int, *, commit: bool) -> None:
        values, pictures = self._waiting.pop(step)
        row = {**values, **images_of(self._wandb, pictures), self._axis: step}
        for name in row.keys() - self._defined:  # by exact name: globs are the user's
            self._run.define_metric(name, step_metric=self._axis, summary=best_of(name))
        self._defined |= row.keys()
        self._run.log(row, commit=commit)


class TensorBoardWriter:
    """Curves in a SummaryWriter."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def writer_of(destination: Any) -> Any:
    """Return what writes to a destination: a `WandbRun`, or an object with `log_metrics(values, step)`.

    A destination is a logger of Lightning, a tracker of accelerate, a SummaryWriter or a run of W&B.
    None for others.
    """
    kinds = [kind.__name__ for kind in type(destination).__mro__]
    is_logger = "WandbLogger" in kinds
    behind = destination.experiment if is_logger else destination
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(behind).__mro__}
    if "accelerate.GeneralTracker" in names:
        return writer_of(behind.tracker)
    if "wandb.Run" in names:
        return WandbRun(behind, AXIS if is_logger else None)
    if {"torch.SummaryWriter", "tensorboardX.SummaryWriter"} & names:
        return TensorBoardWriter(behind)
    return destination if isinstance(destination, WandbRun) or hasattr(destination, "log_metrics") else None


def runs_of_trainer(reports_to: Sequence[str], callbacks: Sequence[Any]) -> list[Any]:
    """The runs that a Trainer of transformers has begun in its trackers, of the names of these and its callbacks."""
    run = sys.modules["wandb"].run if "wandb" in reports_to and "wandb" in sys.modules else None
    runs: list[Any] = [run and WandbRun(run, TRANSFORMERS_AXIS)]
    if "tensorboard" in reports_to:
        runs += [getattr(callback, "tb_writer", None) for callback in callbacks]
    return [run for run in runs if run is not None]
