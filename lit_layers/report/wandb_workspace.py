"""A W&B workspace of a run: when it emerges, all layers of a metric in one chart, heat maps."""

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.errors import InputError, refused
from lit_layers.figures.tables import grouped
from lit_layers.files.durable import replace_file
from lit_layers.functional.emergence.curve_times import FEWEST_CHECKPOINTS
from lit_layers.identity import latest, logged_name, plain_settings
from lit_layers.metrics import GROUPS, look_up
from lit_layers.records import Measurement
from lit_layers.report.logged_numbers import (
    AXIS,
    MATRIX,
    SURFACE,
    TABLE,
    TIMELINE,
    TIMES,
    matrices_of,
    points_of,
    surfaces_of,
)
from lit_layers.report.wandb_mirror import refuse_settings_of_folder

_EVERY_LAYER = 24  # lines in one chart; of deeper models every second, third, ... layer has one


@dataclass
class Panel:
    """One chart of a metric: its layers (or its one curve) over the steps, and the pictures beside it."""

    metric: str
    name: str  # of the curve, without a layer
    curves: dict[int | None, str] = field(default_factory=dict)  # by layer; None: of the whole model

    @property
    def title(self) -> str:
        what = look_up(self.metric).with_unit
        _, _, tags = self.name.partition(f"/{self.metric}/")  # the name of an analysis may have a slash, too
        return f"{what} ({', '.join(tags.split('/'))})" if tags else what

    def lines(self) -> list[str]:
        """The names of the curves that are drawn."""
        layers = sorted(layer for layer in self.curves if layer is not None)
        stride = -(-len(layers) // _EVERY_LAYER) or 1
        shown = [*layers[::stride], *([layers[-1]] if layers and layers[-1] not in layers[::stride] else [])]
        whole = [self.curves[None]] if None in self.curves else []
        return whole + [self.curves[layer] for layer in shown]


def panels_of(named: Iterable[tuple[str, Measurement]]) -> list[Panel]:
    """The charts of measurements, each with the names that the mirror gives its curves."""
    panels: dict[str, Panel] = {}
    for name, measurement in named:
        for point in points_of(measurement, name):
            panel = panels.setdefault(point.base, Panel(point.metric, point.base))
            panel.curves[point.layer] = point.name
    return list(panels.values())


def workspace_of(root: str | Path, place: str, *, seeds: bool = False) -> Any:
    """A workspace of `wandb_workspaces` for the runs of a project, with the charts that this run has.

    `seeds`: runs of one W&B group are seeds of one, and charts show their mean and range.
    """
    ws, wr, expr = _library()
    sections = [
        ws.Section(name=title, is_open=is_open, panels=charts)
        for title, is_open, charts in _sections(Path(root), wr, seeds=seeds)
    ]
    runs = ws.RunsetSettings(groupby=[expr.Metric("Group")]) if seeds else ws.RunsetSettings()
    (entity, project), name = place_of(place), "Emergence, layer by layer"
    settings = ws.WorkspaceSettings(x_axis=AXIS, max_runs=50)
    return ws.Workspace(
        entity=entity, project=project, name=name, sections=sections, settings=settings, runset_settings=runs
    )


def save(made: Any, place: str) -> str:
    """Writes the specification to a .json file, or saves it at W&B; returns where it is.

    Raises:
        InputError: W&B cannot be reached or refuses it, or the file cannot be written.
    """
    if place.endswith(".json"):
        spec = json.dumps(made._to_model().model_dump(by_alias=True, mode="json")["spec"], indent=1, sort_keys=True)
        with refused(f"cannot write {place}"):
            replace_file(Path(place), spec + "\n")
        return place
    refuse_settings_of_folder()
    try:
        made.save()
    except Exception as error:  # of wandb, requests, its GraphQL client: each has its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{place}: W&B did not take it ({reason[:300]}); FILE.json writes it to a file") from error
    return made.url


def place_of(place: str) -> tuple[str, str]:
    """Entity and project of ENTITY/PROJECT; a file is for any.

    Raises:
        InputError: neither ENTITY/PROJECT nor a .json file.
    """
    entity, _, project = ("entity/project" if place.endswith(".json") else place).partition("/")
    if not entity or not project or "/" in project:
        raise InputError(f"workspace: expected ENTITY/PROJECT at W&B, or FILE.json, got {place!r}")
    return entity, project


def _sections(root: Path, wr: Any, *, seeds: bool) -> Iterable[tuple[str, bool, list[Any]]]:
    """Titles, whether they are open at first, and the charts of each section."""
    named = _named(root)
    series = grouped(named, lambda pair: pair[0])
    surfaces = {picture for name, pairs in series.items() for picture in surfaces_of([m for _, m in pairs], name)}
    over_seeds = {"groupby": "Group", "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"} if seeds else {}

    def chart(title: str, lines: list[str], log_y: bool = False) -> Any:
        options: dict[str, Any] = {"title_x": "Optimizer step", "log_x": True, **({"log_y": True} if log_y else {})}
        return wr.LinePlot(title=title, x=AXIS, y=lines, **options, **over_seeds)

    times: list[Any] = [wr.WeavePanelSummaryTable(table_name=TIMES)]
    if len({measurement.step for _, measurement in named}) >= FEWEST_CHECKPOINTS:
        times.append(_gallery(wr, "When each metric is half-way (filled) and at its peak (hollow)", TIMELINE))
    yield "When it emerges", True, times
    if scalars := _scalars(root):
        yield "Training", True, [chart(name, [name]) for name in scalars]
    for title, opened, shown in _grouped(panels_of(named)):
        charts = []
        for panel in shown:
            charts.append(chart(panel.title, panel.lines(), look_up(panel.metric).log))
            if (picture := f"{panel.name}/{SURFACE}") in surfaces:
                charts.append(_gallery(wr, f"{panel.title}: layers and steps", picture))
        yield title, opened, charts
    pairs = dict.fromkeys(kind for name, measurement in named for kind in matrices_of(measurement, name))
    if pairs:
        yield "Pairs of layers", False, [_gallery(wr, kind.removesuffix(f"/{MATRIX}"), kind) for kind in pairs]
    yield "All numbers", False, [wr.WeavePanelSummaryTable(table_name=TABLE)]


def _gallery(wr: Any, title: str, key: str) -> Any:
    return wr.MediaBrowser(title=title, media_keys=[key], num_columns=1, mode="gallery", gallery_axis="step")


def _grouped(panels: list[Panel]) -> Iterable[tuple[str, bool, list[Panel]]]:
    """The groups of `metrics.toml` that have panels; first what stands in tables of results, closed what does not."""
    rows = [(look_up(panel.metric), panel) for panel in panels]
    for name, title in [*((group.name, group.title) for group in GROUPS), ("", "Other metrics")]:
        if shown := [panel for row, panel in rows if row.group == name and not (row.secondary or row.unlisted)]:
            yield title, True, shown
    if rest := [panel for row, panel in rows if row.secondary or row.unlisted]:
        yield "Diagnostics", False, rest


def _scalars(root: Path) -> list[str]:
    """The names of the scalars of training, in the order in which they came."""
    file = root / "metrics.jsonl"
    names = {name: None for row in records.iterate_rows(file) for name in row} if file.is_file() else {}
    return [name for name in names if name not in ("step", "tokens")]


def _named(root: Path) -> list[tuple[str, Measurement]]:
    """What was measured at the steps of a run, by the names that the mirror gives it."""
    file = root / "measurements.jsonl"
    if not file.is_file():
        raise InputError(f"{root}: expected a run's folder, with measurements.jsonl")
    measured = [m for m in latest(records.read(file)) if m.error is None and m.step is not None]
    if not measured:
        raise InputError(f"{root}: nothing was measured at a step there, so a workspace would have no charts")
    plain = plain_settings(measured)
    return [(logged_name(measurement, plain), measurement) for measurement in measured]


def _library() -> tuple[Any, Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its own use of pydantic
            import wandb_workspaces.reports.v2 as wr
            import wandb_workspaces.workspaces as ws
            from wandb_workspaces import expr
    except ImportError as error:
        raise InputError("wandb_workspaces is not installed: pip install 'lit_layers[wandb]'") from error
    return ws, wr, expr
