"""What it leaves on disk: the numbers, the page, the pictures."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.correlate.over_layers import figures
from lit_layers.correlate.over_layers.findings import LayerFindings
from lit_layers.correlate.over_layers.page import render
from lit_layers.correlate.over_layers.reading import LayerTables
from lit_layers.durable import replace_file
from lit_layers.errors import InputError
from lit_layers.figures import Panels, scatter_plot
from lit_layers.figures.models import depth_curves, interval_rows
from lit_layers.figures.vega import write_charts

_ESTIMATES = ("score", "last", "best", "oracle", "middle", "random", "minus_last", "minus_best")


def write(tables: LayerTables, findings: LayerFindings, folder: Path) -> list[Path]:
    """Writes layers.html, layers.json, correlations.csv, selection.csv, curves.csv and the pictures into a folder.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    page, numbers = folder / "layers.html", folder / "layers.json"
    pictures = write_pictures(tables, findings, folder)
    content = findings.to_dict() | {"source": tables.source, "states": tables.states, "titles": tables.titles}
    try:
        replace_file(page, render(tables, findings, {path.stem: path for path in pictures}))
        replace_file(numbers, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    found = [page, *pictures, numbers]
    for name, rows in (
        ("correlations", correlation_table(findings)),
        ("selection", selection_table(findings)),
        ("curves", curve_table(tables)),
    ):
        found.append(folder / f"{name}.csv")
        records.export(rows, found[-1])
    return found


def write_pictures(tables: LayerTables, findings: LayerFindings, folder: Path) -> list[Path]:
    """Writes depth.png, correlations.png, selection.png and scatter_MODEL.png; returns their paths.

    Raises:
        InputError: where a picture cannot be written.
    """
    depth = [depth_curves(panel) for panel in figures.depth_panels(tables)]
    panels = {"depth": Panels(title="Scores and metrics over depth", charts=depth)}
    titles = list(figures.COEFFICIENT_TITLES.values())
    charts = interval_rows(figures.correlation_rows(tables, findings), titles, kinds=figures.correlation_kinds())
    title = f"Metrics against {tables.score_title.lower()} over layers, 95% intervals over tasks"
    panels["correlations"] = Panels(title=title, charts=charts)
    titles = [f"{tables.score_title} above that of the last layer"]
    charts = interval_rows(figures.choice_rows(tables, findings), titles, kinds=figures.CHOICES)
    title = "Layers chosen without labels, 95% intervals over tasks"
    panels["selection"] = Panels(title=title, charts=charts, width=460)
    for model, own in zip(tables.models, findings.models, strict=True):
        title = f"{figures.heading(own)}: means over tasks, a point a layer"
        contents = figures.scatters(tables, own, model).values()
        charts = [scatter_plot(content, width=380, height=360) for content in contents]
        name = re.sub(r"[^\w.-]+", "_", model.name)
        panels[f"scatter_{name}"] = Panels(title=title, charts=charts)
    return write_charts({folder / f"{name}.png": each for name, each in panels.items()})


def correlation_table(findings: LayerFindings) -> pd.DataFrame:
    """Returns a row a coefficient: model, step, metric, form, coefficient, value, low, high, tasks, and the null."""
    rows: list[dict[str, Any]] = []
    for model in findings.models:
        for one in model.metrics:
            for found in one.correlations:
                is_distance = found.coefficient == "distance_correlation"
                rows.append(
                    {
                        "model": model.model,
                        "step": model.step,
                        "metric": one.metric,
                        "form": found.form,
                        "coefficient": found.coefficient,
                        **found.estimate._asdict(),
                        "num_tasks": found.num_tasks,
                        "null_noise": model.null.noise if is_distance else None,
                        "null_walk": model.null.walk if is_distance else None,
                    }
                )
    return pd.DataFrame(rows)


def selection_table(findings: LayerFindings) -> pd.DataFrame:
    """Returns a row a way of choosing: its score, what it is compared with, and the paired differences."""
    rows: list[dict[str, Any]] = []
    for model in findings.models:
        for choice in model.choices:
            found = choice.result
            row = {"model": model.model, "step": model.step, "metric": choice.metric, "rule": choice.rule}
            row |= {"is_chosen": choice.is_chosen, "num_tasks": found.num_tasks}
            row |= {"best_layer": found.best_layer, "best_share": found.best_share, "middle_layer": found.middle_layer}
            for name in _ESTIMATES:
                estimate = getattr(found, name)
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            rows.append(row)
    return pd.DataFrame(rows)


def curve_table(tables: LayerTables) -> pd.DataFrame:
    """Returns a row a model, task and layer, with the score and each metric."""
    rows: list[dict[str, Any]] = []
    for model in tables.models:
        for task, scores in model.scores.items():
            for layer in range(model.num_layers + 1):
                row = {"model": model.name, "step": model.step, "task": task, "domain": model.domains.get(task)}
                own = {key: metric[task][layer] for key, metric in model.metrics.items() if task in metric}
                rows.append({**row, "layer": layer, "score": scores[layer], **own})
    return pd.DataFrame(rows)
