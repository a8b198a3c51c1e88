"""Figures and tables of a frame of records by their names, and figures as pictures at some of its checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.figures import chart, maps, models, profiles, scatter, training
from lit_layers.figures import variants as _variants
from lit_layers.figures.chart import *  # noqa: F403
from lit_layers.figures.chart import Chart, Panels
from lit_layers.figures.maps import *  # noqa: F403
from lit_layers.figures.models import *  # noqa: F403
from lit_layers.figures.profiles import *  # noqa: F403
from lit_layers.figures.scatter import *  # noqa: F403
from lit_layers.figures.tables import (
    change_table,
    model_table,
    rows_of,
    variants,
    with_task_means,
    with_task_medians,
)
from lit_layers.figures.theme import spread
from lit_layers.figures.training import *  # noqa: F403
from lit_layers.figures.variants import *  # noqa: F403
from lit_layers.metrics import look_up, sentence

__all__ = [
    "change_table",
    "model_table",
    "variants",
    "with_task_means",
    "with_task_medians",
    "write_concept_map",
    "write_layer_curves",
    "write_sample_sizes",
    "write_surface",
]

__all__ += chart.__all__
__all__ += maps.__all__
__all__ += models.__all__
__all__ += profiles.__all__
__all__ += scatter.__all__
__all__ += training.__all__
__all__ += _variants.__all__
_PANELS = 3


def write_layer_curves(
    frame: pd.DataFrame, path: str | Path, metric: str, *, controls: Sequence[str] = (), **options: Any
) -> None:
    """Writes a metric over the layers: a line for each checkpoint of a run, or for each model where none has a step.

    Other options are those of `layer_profile` and `model_profile`. The suffix of `path` decides: .png, .svg or .pdf.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: where the metric has no values per layer; another suffix.
    """
    if rows_of(frame, metric, options.get("analysis"))["step"].notna().any():
        chart = profiles.layer_profile(frame, metric, controls=controls, intervals=True, **options)
    else:
        chart = models.model_profile(frame, metric, controls=controls, **options)
    titled(chart, metric, options.get("analysis")).write(path)


def write_surface(frame: pd.DataFrame, path: str | Path, metric: str, **options: Any) -> None:
    """Writes `layer_surface` as a picture, and below it of a score `best_layers`. Else as `write_layer_curves`."""
    charts = [titled(maps.layer_surface(frame, metric, **options), metric, options.get("analysis"))]
    if look_up(metric).better is not None:
        options.pop("steps", None)
        charts.append(maps.best_layers(frame, metric, **options))
    (Panels(title="", charts=charts, columns=1, width=640) if len(charts) > 1 else charts[0]).write(path)


def write_sample_sizes(frame: pd.DataFrame, path: str | Path, metric: str = "accuracy", **options: Any) -> None:
    """Writes `sample_size_curves`, a panel for each of up to three checkpoints, or for each model without steps."""
    _side_by_side(profiles.sample_size_curves, frame, metric, options).write(path)


def write_concept_map(frame: pd.DataFrame, path: str | Path, metric: str = "concept_alignment", **options: Any) -> None:
    """Writes `concept_map`, a panel for each of up to three checkpoints, or for each model without steps."""
    _side_by_side(maps.concept_map, frame, metric, options).write(path)


def titled(chart: Chart, metric: str, analysis: str | None) -> Chart:
    """Returns a chart whose title names its analysis, too."""
    name = sentence(analysis or "")
    title = ": ".join(filter(None, [name if name != look_up(metric).title else "", chart.title]))
    return replace(chart, title=title)


def _side_by_side(draw: Callable[..., Chart], frame: pd.DataFrame, metric: str, options: dict[str, Any]) -> Panels:
    """Some checkpoints of a run beside each other, or models that have no steps."""
    rows = rows_of(frame, metric, options.get("analysis"))
    steps = sorted(int(step) for step in rows["step"].dropna().unique())
    if steps or rows.empty:
        draw(frame, metric, **options)  # refuses what may not be drawn at any of its checkpoints
        parts = {f"step {step:,}": rows[rows["step"] == step] for step in spread(steps, _PANELS)} or {"": rows}
    else:
        names = models.short_names([*rows["run"].unique()])
        parts = {name: rows[rows["run"] == run] for run, name in names.items()}
    charts = {name: draw(part, metric, **options) for name, part in parts.items()}
    title = titled(next(iter(charts.values())), metric, options.get("analysis")).title
    shown = [replace(chart, title=name) for name, chart in charts.items()]
    return Panels(title=title, charts=shown)
