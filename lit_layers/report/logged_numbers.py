"""Curves, pictures and tables of measurements for experiment trackers, and writers for the user's loggers.

Any Lightning logger receives curves through `log_metrics`. A W&B run also receives heat maps over layers and steps, and
a table. No tracker is imported here unless the user passes one of its runs, in which case it is already imported.
"""

import contextlib
import io
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.figures.maps import layer_surface
from lit_layers.figures.tables import grouped, plainest, usual_loops
from lit_layers.figures.vega import pictures_of
from lit_layers.identity import NO_CURVE, latest, logged_name, plain_settings
from lit_layers.metrics import look_up, rank
from lit_layers.records import Measurement, Record

logger = logging.getLogger(__name__)
AXIS = "trainer/global_step"
_SECTION = "lit_layers"  # W&B section of everything except metric curves
STEP, TOKENS = f"{_SECTION}/step", f"{_SECTION}/tokens"
TRANSFORMERS_AXIS = "train/global_step"  # transformers adds it to each row that it logs to W&B
TABLE = "emergence"
_TABLE_ROWS = 20_000  # rows, logged in 5 s; a longer table leaves out layer pairs. W&B truncates at 200,000
Scalars = Literal["plotted", "all"]  # which records become curves over steps
# Tags that distinguish variants of a metric, of which only one is plotted.
_VARIANTS = ("statistic", "control", "drop_first", "normalization", "split", "of", "domain", "k")


def measured_in(root: str | Path) -> tuple[list[Measurement], dict[tuple[str, str], str]]:
    """Return the latest measurements of a run, without suspect checkpoints, and the first settings of each analysis.

    One analysis may have been measured with several settings (options and data). The returned dictionary maps
    (run, analysis) to the settings that were measured first. Curves of these settings have the analysis's name. The
    names of curves of other settings end in `@` and a hash.
    """
    measurements = records.read(Path(root) / "measurements.jsonl")
    return [m for m in latest(measurements) if not records.is_suspect(m)], plain_settings(measurements)


def curves_of(
    measurements: Iterable[Measurement], plain: dict[tuple[str, str], str], scalars: Scalars = "plotted"
) -> dict[str, Record]:
    """Return the records of one step that are logged as scalars, by the names of their curves over steps.

    Values of layer pairs and of single tokens are left out. `scalars="all"` logs everything else. `scalars="plotted"`
    logs one variant of each metric (such as its mean but not its median), and values per layer only for one metric of
    each analysis: the one listed first in docs/metrics.md. `plain` maps (run, analysis) to the settings
    (options and data) whose curves have the analysis's name without a suffix, as `plain_settings` returns it.
    """
    curves = dict[str, Record]()
    for m in measurements:
        loops = usual_loops(record.tags for record in m.records)
        found = [
            record
            for record in (m.records if scalars == "all" else shown_records(m))
            if record.other_layer is None
            and record.tags.keys().isdisjoint(records.AXES)
            # Of the records of looped blocks, log only those with one number of loops, because all of them would give
            # hundreds of curves. The table of records has them all.
            and record.tags.get("loops", loops) == loops
        ]
        if scalars == "plotted":
            first = min((record.metric for record in found if record.layer is not None), key=rank, default=None)
            found = [record for record in found if record.layer is None or record.metric == first]
        curves |= {records.key(logged_name(m, plain), record): record for record in found}
    return curves


def null_curves_of(
    nulls: Iterable[Measurement], plain: dict[tuple[str, str], str], scalars: Scalars = "plotted"
) -> dict[str, float]:
    """Return the values of a run's nulls. A key is the name of the run's curve, then `/null_` and the kind of null.

    A tracker such as W&B draws a null as a horizontal line if it gets these values at the first and the last step.
    """
    by_kind = grouped(nulls, lambda m: m.provenance["null"]["kind"])
    return {
        f"{name}/null_{kind}": record.value
        for kind, measured in by_kind.items()
        for name, record in curves_of(measured, plain, scalars).items()
    }


def shown_records(measurement: Measurement) -> list[Record]:
    """Return the records worth plotting, of one variant per metric.

    Secondary metrics, metrics without a figure of their own (such as baselines), reference values, and entries of lists
    and tables are left out.
    """
    of_metric = grouped(measurement.records, lambda record: record.metric)
    chosen = {metric: plainest(record.tags for record in each) for metric, each in of_metric.items()}

    def is_shown(record: Record) -> bool:
        row, tags, plain = look_up(record.metric), record.tags, chosen[record.metric]
        is_chosen = all(tags.get(name) == plain.get(name) for name in _VARIANTS)
        return is_chosen and not (row.secondary or row.unlisted or tags.keys() & NO_CURVE)

    return [*filter(is_shown, measurement.records)]


def surfaces_of(measured: Iterable[Measurement], plain: dict[tuple[str, str], str]) -> dict[str, list[Measurement]]:
    """Return the measurements that each heat map over layers and steps shows, by the name of the heat map.

    The measurements are reduced to one metric. A metric with values per layer at fewer than two steps has no heat map.
    `plain` maps (run, analysis) to the settings whose heat maps have no suffix, as `plain_settings` returns it.
    """
    found = defaultdict[str, list[Measurement]](list)
    for m in measured:
        of_layers = [record for record in shown_records(m) if record.layer is not None and record.other_layer is None]
        if m.error is None and m.step is not None:
            for metric, numbers in grouped(of_layers, lambda record: record.metric).items():
                found[f"{logged_name(m, plain)}/{metric}/over_layers"].append(replace(m, records=numbers))
    return {name: series for name, series in found.items() if len({m.step for m in series}) > 1}


def layer_maps(root: str | Path, last_step: float = math.inf) -> dict[str, Any]:
    """Return a W&B row with a heat map over layers and steps, up to `last_step`, of each metric with values per layer.

    W&B shows pictures of the same name with a slider over steps.
    """
    import wandb
    from PIL import Image  # imported here because only pictures need it

    charts, (measured, plain) = dict[str, Any](), measured_in(root)
    for name, series in surfaces_of((m for m in measured if (m.step or 0) <= last_step), plain).items():
        with contextlib.suppress(ValueError):  # skip a metric whose default variant has only one step
            charts[name] = layer_surface(records.frame(series), series[0].records[0].metric).whole()
    try:
        pictures = pictures_of([*charts.values()], [".png"]) if charts else []
    except InputError as error:
        logger.warning("no picture of layers by steps: %s", error)
        return {}
    opened = (Image.open(io.BytesIO(png)).convert("RGB") for (png,) in pictures)
    return dict(zip(charts, map(wandb.Image, opened), strict=True))


def are_maps_due(num_steps: int) -> bool:
    """Return whether heat maps over layers and steps are logged now: after 4, 8, 16, ... measured steps."""
    return num_steps >= 4 and num_steps.bit_count() == 1


def end_of_run(root: str | Path, name: str = TABLE) -> dict[str, Any]:
    """Return a W&B row with the table of all records, called `name`, and the final heat maps.

    The row is empty if nothing was measured.
    """
    import wandb

    frame = records.frame(measured_in(root)[0], settings="all")
    if frame.empty:
        return {}
    if len(frame) > _TABLE_ROWS:
        frame = frame[frame["other_layer"].isna()]
    cells: Any = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    table = wandb.Table(columns=list(frame.columns.astype(str)), data=cells, allow_mixed_types=True)
    return {name: table} | layer_maps(root)


# ------------------------------------------------------------------------------------------------ the user's loggers


class WandbRun:
    """Writer of measurements to a W&B run of the user, which leaves the row numbers of the user's own rows unchanged.

    W&B numbers the rows of a run, and drops a row whose number is lower than that of the previous row. Measurements are
    therefore merged into the open row, which W&B has not yet sent. A row holds the measurements of at most one step.
    Measurements that cannot be merged get a row of their own at the end of the run, or some steps later if `axis` is
    set.

    Args:
        run: the W&B run.
        axis: the key under which the user's logger writes the step into each of its rows, or None if it does not. If
            `axis` is set, measurements of a step are only merged into the row that the logger writes at that step.
            Charts are also right for measurements in other rows, because W&B uses this key as the x axis.
    """

    # By run id: the number of the last row with measurements, and their step. Two networks may log to one run, so all
    # writers share this.
    _last_rows: ClassVar[dict[str, tuple[int, int]]] = {}

    def __init__(self, run: Any, axis: str | None = None) -> None:
        self._run = run
        self._axis, self._is_shared = axis or STEP, axis is not None
        self._pending = dict[int, dict[str, Any]]()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Write the options of each analysis and the run's folder to the run's config."""
        self._run.config.update({_SECTION: dict(about)}, allow_val_change=True)
        if not self._is_shared:
            self._run.define_metric(STEP)

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue the curves and heat maps of one step.

        If the writer has no `axis`, merge them into the open W&B row (the one not yet sent), unless this row already
        holds measurements of another step.
        """
        # Write the pending steps in rows of their own. A single pending step waits: it may be step 0, which is measured
        # before the logger writes its first row, and that row may still take it.
        if self._is_shared and len(self._pending) > 1:
            self.flush()
        self._pending[step] = {**self._pending.get(step, {}), **values, self._axis: step}
        if not self._is_shared:
            self.join(step)

    def join(self, step: int) -> None:
        """Merge a queued step into the W&B row not yet sent, unless this row holds measurements of another step."""
        if step not in self._pending:
            return
        number, (taken, by) = self._run.step, self._last_rows.get(self._run.id, (-1, -1))
        if number != taken or step == by:
            self._log(step, commit=False)
            self._last_rows[self._run.id] = number, step

    def end(self, root: Path) -> None:
        """Write the queued steps, the table and the final heat maps; the run is left open for the user."""
        self.flush()
        self._run.log(end_of_run(root, f"{_SECTION}/{TABLE}"), commit=False)

    def flush(self) -> None:
        """Write all queued steps after the user's last row.

        If the user's code chooses the row numbers (`wandb.log(step=...)`), log a warning instead.
        """
        if self._pending and not self._is_shared:
            self.join(max(self._pending))
        if not self._pending:
            return
        number = self._run.step
        if not self._is_shared and number - self._run.summary.get("_step", -1) > 1:
            # The user's code chooses the row numbers. Do not write the queued steps: they would take the numbers of the
            # user's next rows, and W&B would drop those rows.
            words = "W&B: %d steps are no points of its curves, as the run has fewer rows; %s/emergence has them"
            logger.warning(words, len(self._pending), _SECTION)
            return
        if self._last_rows.get(self._run.id, (-1, -1))[0] == number:
            self._run.log({}, commit=True)
        for step in sorted(self._pending):
            self._log(step, commit=True)

    def _log(self, step: int, *, commit: bool) -> None:
        row = self._pending.pop(step)
        for name in row.keys() - {self._axis}:  # exact names: a glob could match the user's keys
            self._run.define_metric(name, step_metric=self._axis)
        self._run.log(row, commit=commit)


def writer_of(destination: Any) -> Any:
    """Return the writer for a destination, or None if it is neither a W&B run nor a logger.

    The writer is a `WandbRun` for a W&B run or logger, and the logger itself for any other Lightning logger.
    """
    is_logger = "WandbLogger" in [kind.__name__ for kind in type(destination).__mro__]
    run = destination.experiment if is_logger else destination
    if any(kind.__module__.startswith("wandb.") and kind.__name__ == "Run" for kind in type(run).__mro__):
        return WandbRun(run, AXIS if is_logger else None)
    return destination if isinstance(destination, WandbRun) or hasattr(destination, "log_metrics") else None


def runs_of_trainer(reports_to: Sequence[str]) -> list[Any]:
    """Return a list with a writer for the W&B run that a transformers Trainer has started; empty if there is none."""
    run = sys.modules["wandb"].run if "wandb" in reports_to and "wandb" in sys.modules else None
    return [] if run is None else [WandbRun(run, TRANSFORMERS_AXIS)]
