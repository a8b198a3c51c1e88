"""The measurements and curves of the study's runs, from four_papers.parquet and four_papers_mechanism.parquet."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.clock.step_curves import StepCurve, curves_in
from lit_layers.functional.emergence.curve_times import EmergenceTimes
from lit_layers.records import Measurement, Record
from lit_layers.report.emergence import time_text

FOLDER = Path(__file__).parent
PAGE = FOLDER / "four_papers.md"
DATA = FOLDER / "four_papers.parquet"
MECHANISM_DATA = FOLDER / "four_papers_mechanism.parquet"
COLUMNS = ("metric", "layer", "other_layer", "value", "stderr")
MODELS = {"tokens": "GPT-2", "labels": "ViT"}  # by what the controls shuffle
GROUPS = ("GPT-2", "GPT-2, shuffled tokens", "ViT", "ViT, shuffled labels")
Table = Iterator[list[str]]


@dataclass(frozen=True)
class Quantity:
    """A number in the tables: its title, and the record to use. The default `layer` is the last one."""

    title: str
    metric: str
    tags: Mapping[str, Any] = field(default_factory=dict)
    layered: bool = False
    layer: int | None = None


QUANTITIES = (
    Quantity("line-shape score", "line_shape_score"),
    Quantity("expodistance", "expodistance"),
    Quantity("linearized rollout", "linearized_rollout"),
    Quantity("coupling, k = 4", "coupling", {"k": 4}),
    Quantity("coupling, k = 12", "coupling", {"k": 12}),
    Quantity("coupling, k = 32", "coupling", {"k": 32}),
    Quantity("prompt entropy", "prompt_entropy", {"normalization": "raw", "drop_first": 0}),
    Quantity("dataset entropy", "dataset_entropy", {"normalization": "raw"}),
    Quantity("token curvature", "token_curvature"),
    Quantity("loss of the readout, last layer", "logit_lens_loss", layered=True),
    Quantity("loss of the readout, middle layer", "logit_lens_loss", layered=True, layer=6),
    Quantity("probe accuracy, last layer", "accuracy", layered=True),
    Quantity("probe accuracy, middle layer", "accuracy", layered=True, layer=6),
)


def unpack(path: Path, run: str | None = None) -> dict[str, list[Measurement]]:
    """Return the measurements of each run of a packed table, or only those of one run."""
    table: Any = pd.read_parquet(path, filters=None if run is None else [("run", "==", run)])
    names = [name for name in table if name not in ("run", "step", "tokens", "analysis", *COLUMNS)]
    runs: dict[str, list[Measurement]] = {}
    for (name, step, analysis), part in table.groupby(["run", "step", "analysis"], sort=False):
        found = []
        for row in part.drop(columns=["run", "step", "analysis"]).to_dict("records"):
            tags = {name: _plain(row[name]) for name in names if not pd.isna(row[name])}
            ends: dict[str, Any] = {name: None if pd.isna(row[name]) else _plain(row[name]) for name in COLUMNS}
            found.append(Record(**ends, tags=tags))
        at: Any = {"run": name, "step": int(step), "tokens": _plain(part["tokens"].iloc[0]), "seconds": 0.0}
        runs.setdefault(name, []).append(Measurement(**at, analysis=analysis, records=found, provenance={}))
    return runs


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value.item() if hasattr(value, "item") else value


def group_of(run: str) -> str:
    """Return the group of a run: `GPT-2` of `GPT-2, seed 0`."""
    return run.rpartition(", seed")[0]


def curves_by_group(runs: Mapping[str, list[Measurement]]) -> dict[str, dict[str, list[StepCurve]]]:
    """Return the curves of each run, by group."""
    curves: dict[str, dict[str, list[StepCurve]]] = {group: {} for group in GROUPS}
    for run, measurements in runs.items():
        curves[group_of(run)][run] = curves_in(run, measurements)
    return curves


def find(curves: Iterable[StepCurve], quantity: Quantity) -> StepCurve | None:
    """Return the curve of a number in one run, at the last layer if several layers have it."""
    tags = {name: str(tag) for name, tag in quantity.tags.items()}
    found = [
        curve
        for curve in curves
        if curve.metric == quantity.metric
        and tags.items() <= {name: str(tag) for name, tag in curve.tags.items()}.items()
        and curve.tags.get("statistic") is None
        and curve.tags.get("pooling") in (None, "cls")
        and ("of" in curve.tags) == ("of" in tags)
        and (curve.layer is not None) == quantity.layered
        and quantity.layer in (None, curve.layer)
    ]
    return max(found, key=lambda curve: curve.layer or 0, default=None)


def seeds_of(curves: Mapping[str, Sequence[StepCurve]], quantity: Quantity) -> list[StepCurve]:
    """Return the curve of a number in each run that has it."""
    found = [find(of_run, quantity) for of_run in curves.values()]
    return [curve for curve in found if curve is not None]


def loss_of_runs(curves: Iterable[StepCurve], loss: str) -> dict[str, StepCurve]:
    """Return the curve of a loss (METRIC or ANALYSIS/METRIC) in each run: for the whole model, else its last layer."""
    losses: dict[str, StepCurve] = {}
    for curve in curves:
        if loss in (curve.metric, f"{curve.analysis}/{curve.metric}"):
            other = losses.setdefault(curve.run, curve)
            if other.layer is not None and (curve.layer is None or curve.layer > other.layer):
                losses[curve.run] = curve
    return losses


def half_way_text(times: EmergenceTimes) -> str:
    """Return when a curve is half-way and whether it comes back, as text, or "" if it does not change."""
    text = time_text(times.halfway)
    return text if times.emerges or not text else f"{text}, comes back"


# Number of first columns that name the rows of a table, 1 for other tables.
LABELS = {"blocks": 2, "blocks given depth": 2, "mechanism": 2}


def shown(name: str, page: str, table: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return the rows and columns of a table that the page shows, found by their labels on the page."""
    labels = LABELS.get(name, 1)
    heads, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in page.splitlines())
    every, *found = table
    columns = [[*every].index(head) for head in heads]
    by_label = {tuple(row[:labels]): row for row in found}
    return [heads, *([by_label[tuple(row[:labels])][column] for column in columns] for row in rows)]


def markdown_table(table: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with the first row as its head."""
    head, *rows = (f"| {' | '.join(row)} |\n" for row in table)
    return "".join([head, "|---" * (head.count("|") - 1) + "|\n", *rows])
