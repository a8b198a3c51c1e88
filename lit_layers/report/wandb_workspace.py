"""A W&B workspace of a run: all layers of a metric in one chart, heat maps."""

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.errors import InputError, refused
from lit_layers.figures.tables import grouped
from lit_layers.figures.theme import spread
from lit_layers.files.durable import replace_file
from lit_layers.identity import latest, logged_name, plain_settings
from lit_layers.metrics import GROUPS, look_up
from lit_layers.records import Measurement
from lit_layers.report.logged_numbers import (
    AXIS,
    MATRIX,
    SURFACE,
    TABLE,
    matrices_of,
    plotted,
    points_of,
    surfaces_of,
)
from lit_layers.report.wandb_mirror import refuse_settings_of_folder

_LINES = 25  # layers in one chart; of deeper models some that are spread evenly have a line


def workspace_of(root: str | Path, place: str) -> Any:
    """Return a workspace of `wandb_workspaces` for the runs of a project, with the charts that this run has."""
    ws, wr = _library()
    sections = [
        ws.Section(name=title, is_open=is_open, panels=charts) for title, is_open, charts in _sections(Path(root), wr)
    ]
    (entity, project), name = place_of(place), "Emergence, layer by layer"
    settings = ws.WorkspaceSettings(x_axis=AXIS, max_runs=50)
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def save(made: Any, place: str) -> str:
    """Write the specification to a .json file, or saves it at W&B; returns where it is.

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


def _sections(root: Path, wr: Any) -> Iterable[tuple[str, bool, list[Any]]]:
    """Yield titles, whether they are open at first, and the charts of each section."""
    named = _named(root)
    series = grouped(named, lambda pair: pair[0])
    surfaces = {picture for name, pairs in series.items() for picture in surfaces_of([m for _, m in pairs], name)}

    def chart(title: str, lines: list[str], log_y: bool = False) -> Any:
        options: dict[str, Any] = {"title_x": "Optimizer step", "log_x": True, **({"log_y": True} if log_y else {})}
        return wr.LinePlot(title=title, x=AXIS, y=lines, **options)

    if scalars := _scalars(root):
        yield "Training", True, [chart(name, [name]) for name in scalars]
    titles = {**{group.name: group.title for group in GROUPS}, "": "Other metrics"}
    charts: dict[str, list[Any]] = {title: [] for title in titles.values()}
    curves: dict[str, tuple[str, dict[int | None, str]]] = {}
    for name, measurement in named:
        for point in points_of(measurement, name):
            curves.setdefault(point.base, (point.metric, {}))[1][point.layer] = point.name
    for name, (metric, of_layer) in curves.items():
        row, title = look_up(metric), chart_title(metric, name)
        shown = charts[titles[row.group]]
        layers: list[Any] = spread(sorted(layer for layer in of_layer if layer is not None), _LINES)
        layers = [None, *layers] if None in of_layer else layers
        shown.append(chart(title, [of_layer[layer] for layer in layers], row.log))
        if (picture := f"{name}/{SURFACE}") in surfaces:
            shown.append(_gallery(wr, f"{title}: layers and steps", picture))
    yield from ((title, True, shown) for title, shown in charts.items() if shown)
    if pairs := dict.fromkeys(kind for name, measurement in named for kind in matrices_of(measurement, name)):
        yield "Pairs of layers", False, [_gallery(wr, kind.removesuffix(f"/{MATRIX}"), kind) for kind in pairs]
    yield "All numbers", False, [wr.WeavePanelSummaryTable(table_name=TABLE)]


def chart_title(metric: str, name: str) -> str:
    """Return what a chart is called after its metric and the tags in the name of its curves."""
    _, _, tags = name.partition(f"/{metric}/")  # the name of an analysis may have a slash
    return f"{look_up(metric).with_unit} ({', '.join(tags.split('/'))})" if tags else look_up(metric).with_unit


def _gallery(wr: Any, title: str, key: str) -> Any:
    return wr.MediaBrowser(title=title, media_keys=[key], num_columns=1, mode="gallery", gallery_axis="step")


def _scalars(root: Path) -> list[str]:
    """The names of the scalars of training, in the order in which they came."""
    file = root / "metrics.jsonl"
    names = {name: None for row in records.rows(file) for name in row} if file.is_file() else {}
    return [name for name in names if name not in ("step", "tokens")]


def _named(root: Path) -> list[tuple[str, Measurement]]:
    """Return what was measured at the steps of a run, by the names that the mirror gives it."""
    measured = [m for m in latest(records.read(root / "measurements.jsonl")) if m.error is None and m.step is not None]
    if not measured:
        raise InputError(f"{root}: nothing was measured at a step there, so a workspace would have no charts")
    plain = plain_settings(measured)
    return [(logged_name(measurement, plain), plotted(measurement)) for measurement in measured]


def _library() -> tuple[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its own use of pydantic
            import wandb_workspaces.reports.v2 as wr
            import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise InputError("wandb_workspaces is not installed: pip install 'lit_layers[wandb]'") from error
    return ws, wr
