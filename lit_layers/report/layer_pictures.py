"""Pictures of what is known of the layers of a run, or of models: for papers and talks, where a page cannot go."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import plots, records
from lit_layers.errors import InputError
from lit_layers.identity import Settings
from lit_layers.metrics import is_in
from lit_layers.plots.tables import CATEGORY, TRAIN_ROWS
from lit_layers.report import interventions
from lit_layers.report.facts import read_run
from lit_layers.report.layerwise import CONTROLS
from lit_layers.report.surfaces import layered, variants

SUFFIXES = (".png", ".svg")
_LONG = 100  # characters of a file name


def write_pictures(
    root: str | Path, folder: str | Path, *, allow_suspect: bool = False, settings: Settings = ()
) -> list[Path]:
    """Writes PNG and SVG pictures of a run's probes, sizes, categories, residuals, surfaces and running orders.

    ANALYSIS_METRIC.png and .svg: scores of the test rows over the layers, scores over the number of training rows, heat
    maps of categories, and residuals over the layers; a line or panel for each of some checkpoints, or for each model;
    metrics of representations, invariance and task scores over steps and layers; and what is left of a model whose
    blocks run otherwise, over the middle, loops, blocks, training and latency. Returns their paths.

    The folder is made where there is none; other files in it stay. Checkpoints that an audit found suspect are left
    out, unless `allow_suspect`; `settings` chooses numbers of other settings, as for the page.

    Raises:
        InputError: where `root` is no run's folder, has nothing of this kind, or a picture cannot be written.
    """
    run, folder = read_run(root, settings=settings), Path(folder)
    known = [m for m in run.measurements if allow_suspect or not records.is_suspect(m)]
    frame = plots.with_task_means(records.frame(known).drop(columns=records.AUDIT, errors="ignore")).frame
    frame = plots.with_task_medians(frame).frame
    drawings = [*_drawings(frame)]
    if not drawings:
        raise InputError(
            f"{root} has nothing to draw as pictures: they are made of the analyses Probe, SampleSizeSweep, "
            "ConceptAlignment, NextTokenResidual and Interventions, of scores of `intervene`, and of several steps of "
            "Representation, Invariance and task scores"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {(error.strerror or str(error)).lower()}") from error
    paths = []
    for name, draw in drawings:
        for suffix in SUFFIXES:
            paths.append(folder / f"{name}{suffix}")
            draw(path=paths[-1])
    return paths


def _drawings(frame: pd.DataFrame) -> Iterator[tuple[str, Callable[..., None]]]:
    """The name of each picture, and what draws it."""
    table: Any = frame
    names: set[str] = set()
    others: Any = interventions.without(frame)
    for analysis in dict.fromkeys(others["analysis"]):
        part = others[others["analysis"] == analysis]
        for metric in dict.fromkeys(part["metric"]):
            rows = part[part["metric"] == metric]
            if (draw := _drawing(rows, metric)) is not None:
                parts = dict.fromkeys([analysis, metric])  # an analysis of one metric may bear its name
                yield _file_name("_".join(parts), names), partial(draw, rows, metric=metric, analysis=analysis)
    steps = [int(step) for step in sorted(table["step"].dropna().unique())]
    for analysis, metric, rows in layered(frame):
        for number, (tags, text) in enumerate(variants(rows, metric)):
            name = _file_name("_".join(filter(None, [analysis, metric, text if number else ""])), names)
            yield name, partial(plots.write_surface, rows, metric=metric, analysis=analysis, tags=tags, steps=steps)
    for name, draw in interventions.drawings(frame):
        yield _file_name(name, names), draw


def _drawing(rows: Any, metric: str) -> Callable[..., None] | None:
    per_layer = rows[rows["layer"].notna()]
    tags = {tag for tag in (TRAIN_ROWS, CATEGORY, "split", "control") if tag in rows and per_layer[tag].notna().any()}
    if TRAIN_ROWS in tags:
        return plots.write_sample_sizes
    if CATEGORY in tags:
        return plots.write_concept_map if is_in(metric, "concept") else None
    is_profile = is_in(metric, "residual") or (is_in(metric, "score") and "split" in tags)
    if is_profile and not per_layer.empty:
        known = set(per_layer["control"].dropna()) if "control" in tags else set()
        return partial(plots.write_layer_curves, controls=[name for name in CONTROLS if name in known])
    return None


def _file_name(name: str, names: set[str]) -> str:
    """Analyses come with any name, and may differ in letters that no file name has."""
    name, number = re.sub(r"[^\w.-]+", "_", name)[:_LONG], 1
    while (found := name if number == 1 else f"{name}_{number}") in names:
        number += 1
    names.add(found)
    return found
