"""A measurement as loggers show it, curves over steps, pictures and tables, and what writes it to the user's loggers.

Any logger of Lightning takes curves by `log_metrics`. A run of W&B also gets pictures of layers by steps and a table.
None of the trackers is imported here: a training that logs to one has done so.
"""

import contextlib
import io
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.figures.maps import layer_surface
from lit_layers.figures.tables import grouped, plainest, usual_loops
from lit_layers.figures.vega import pictures_of
from lit_layers.identity import BESIDE, latest, logged_name, plain_settings, settings_of, short
from lit_layers.metrics import look_up
from lit_layers.records import Measurement, Record

logger = logging.getLogger(__name__)
AXIS = "trainer/global_step"
_PLACE = "lit_layers"  # section of everything that is not the curve of a metric
STEP, TOKENS = f"{_PLACE}/step", f"{_PLACE}/tokens"
TRANSFORMERS_AXIS = "train/global_step"  # in each row that transformers logs to W&B
TABLE = "emergence"
_TABLE_ROWS = 20_000  # 3 s; of more numbers the table has those on curves, and W&B itself cuts at 200,000
Scalars = Literal["plotted", "all"]  # which numbers are curves
# Tags whose values are variants of one number: figures show one of them first.
_VARIANTS = ("statistic", "control", "drop_first", "normalization", "split", "of", "domain", "k")
SURFACE = "over_layers"  # last word of a picture's name
TABLE_COLUMNS = (
    *("step", "tokens", "analysis", "metric", "layer", "value"),
    *("other_layer", "stderr", "low", "high", "n", "settings", "tags"),
)


class Point(NamedTuple):
    """A number that has a curve: its curve's name, and that of all layers' curves together."""

    name: str
    base: str
    metric: str
    layer: int | None
    value: float


def points_of(measurement: Measurement, name: str | None = None) -> list[Point]:
    """Return the numbers of one measurement that are curves: nothing is one for pairs of layers or places of tokens.

    `name` is what its analysis is called, where not by its own.
    """
    points, loops = list[Point](), usual_loops(record.tags for record in measurement.records)
    for record in measurement.records if measurement.error is None else ():
        # A curve for each number of loops and of blocks would be hundreds: the table has them.
        if _is_on_curve(record) and record.tags.get("loops", loops) == loops:
            name = name or measurement.analysis
            base = records.key(name, Record(metric=record.metric, value=0.0, tags=record.tags))
            points.append(Point(records.key(name, record), base, record.metric, record.layer, record.value))
    return points


def _is_on_curve(record: Record) -> bool:
    """Return whether a number belongs to no pair of layers and no place of a table of its own."""
    return record.other_layer is None and record.tags.keys().isdisjoint(records.PLACES)


def values_of(measurement: Measurement, name: str | None = None) -> dict[str, float]:
    """The values of `points_of` by the names of their curves."""
    return {point.name: point.value for point in points_of(measurement, name)}


def plotted(measurement: Measurement) -> Measurement:
    """Return a measurement with those numbers that a person plots: one variant of each metric, no diagnostics.

    Neither lists of values nor what a number is compared with are among them.
    """
    of_metric = grouped(measurement.records, lambda record: record.metric)
    chosen = {metric: plainest(record.tags for record in each) for metric, each in of_metric.items()}

    def is_shown(record: Record) -> bool:
        row, tags, plain = look_up(record.metric), record.tags, chosen[record.metric]
        is_chosen = all(tags.get(name) == plain.get(name) for name in _VARIANTS)
        return is_chosen and not (row.secondary or row.unlisted or tags.keys() & BESIDE)

    return replace(measurement, records=[*filter(is_shown, measurement.records)])


def surfaces_of(
    measured: Sequence[Measurement], plain: dict[tuple[str, str], str]
) -> dict[str, tuple[str, list[Measurement]]]:
    """Return the metric and the measurements of each picture of layers by steps, by its name.

    Names of settings other than `plain` say which they are.
    """
    found: dict[str, tuple[str, list[Measurement]]] = {}
    drawn = [plotted(m) for m in measured if m.error is None and m.step is not None]
    for name, series in grouped(drawn, lambda m: logged_name(m, plain)).items():
        metrics = dict.fromkeys(p.metric for m in series for p in points_of(m, name) if p.layer is not None)
        found |= {f"{name}/{metric}/{SURFACE}": (metric, series) for metric in metrics}
    return {key: kind for key, kind in found.items() if len({m.step for m in kind[1]}) > 1}


def layer_maps(measured: Sequence[Measurement], plain: dict[tuple[str, str], str]) -> dict[str, bytes]:
    """Return a picture (PNG) of layers by steps for each metric that has both, by its name."""
    charts, frames = {}, dict[int, Any]()
    for key, (metric, series) in surfaces_of(measured, plain).items():
        with contextlib.suppress(InputError, ValueError):  # no picture is worth the run's end
            if id(series) not in frames:  # what comes here may be drawn, whatever an audit says
                frames[id(series)] = records.frame(series).drop(columns=records.AUDIT, errors="ignore")
            charts[key] = layer_surface(frames[id(series)], metric)
    try:
        pictures = pictures_of([chart.whole() for chart in charts.values()], [".png"]) if charts else []
    except InputError as error:
        logger.warning("no picture of layers by steps: %s", error)
        return {}
    return {name: png for name, (png,) in zip(charts, pictures, strict=True)}


def are_maps_due(num_steps: int) -> bool:
    """Return whether layers by steps are drawn while training goes on: after 4, 8, 16, ... measured steps."""
    return num_steps >= 4 and num_steps.bit_count() == 1


def _table_row(measurement: Measurement, record: Record) -> list[Any]:
    tags = json.dumps(record.tags, sort_keys=True) if record.tags else None
    place = [measurement.step, measurement.tokens, measurement.analysis, record.metric, record.layer, record.value]
    count = [record.stderr, record.low, record.high, record.n]
    return [*place, record.other_layer, *count, short(settings_of(measurement)), tags]


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
    from PIL import Image  # what only pictures need

    return {name: library.Image(Image.open(io.BytesIO(png)).convert("RGB")) for name, png in pictures.items()}


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
            self._run.define_metric(name, step_metric=self._axis)
        self._defined |= row.keys()
        self._run.log(row, commit=commit)


def writer_of(destination: Any) -> Any:
    """Return what writes to a destination: a `WandbRun` for a run of W&B or its logger, or a logger of Lightning.

    None for others.
    """
    is_logger = "WandbLogger" in [kind.__name__ for kind in type(destination).__mro__]
    run = destination.experiment if is_logger else destination
    if any(kind.__module__.startswith("wandb.") and kind.__name__ == "Run" for kind in type(run).__mro__):
        return WandbRun(run, AXIS if is_logger else None)
    return destination if isinstance(destination, WandbRun) or hasattr(destination, "log_metrics") else None


def runs_of_trainer(reports_to: Sequence[str]) -> list[Any]:
    """Return the run of W&B that a Trainer of transformers has begun, where it reports to W&B."""
    run = sys.modules["wandb"].run if "wandb" in reports_to and "wandb" in sys.modules else None
    return [] if run is None else [WandbRun(run, TRANSFORMERS_AXIS)]
