"""What `lit-layers mteb` prints and writes: the scores of all layers, their means, best layers and what is missing."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from lit_layers import records
from lit_layers.durable import write_json
from lit_layers.tasks.catalogue import DOMAINS, Task
from lit_layers.tasks.mteb_scores import Averages, averages, score_table

CSV, MEANS, JSON = "scores.csv", "averages.csv", "scores.json"


def write_results(frame: pd.DataFrame, folder: Path, tasks: Sequence[Task]) -> list[Path]:
    """Writes all scores and means of a root: scores.csv, averages.csv and scores.json; returns their paths."""
    names = [spec.name for spec in tasks]
    found, wide = averages(frame, expected=names), score_table(frame)
    folder.mkdir(parents=True, exist_ok=True)
    records.export(wide.rename(columns=_layer_name), folder / CSV)
    curves = [each.curve.assign(run=each.run, step=each.step, states=each.states) for each in found]
    records.export(pd.concat(curves), folder / MEANS)
    write_json(folder / JSON, [_described(each) for each in found])
    return [folder / name for name in (CSV, MEANS, JSON)]


def show_results(found: Averages, console: Console) -> None:
    """Prints a row for each task, each domain and all; values are percent."""
    title = found.run if found.step is None else f"{found.run}, step {found.step}"
    table = Table(title=f"{title} ({found.pooling}, {found.states}), percent", title_justify="left", box=None)
    for column in ("", "score"):
        table.add_column(column, no_wrap=True)
    for column in ("layer 0", "best layer", "at", f"layer {found.num_layers}"):  # the last that was asked for
        table.add_column(column, justify="right", no_wrap=True)
    layers = [name for name in found.scores.columns if isinstance(name, int)]
    later = [layer for layer in layers if layer > 0]
    for row in found.scores.to_dict("records"):
        best = max(later, key=lambda layer: row[layer])
        table.add_row(
            row["task"], row["score"], _percent(row.get(0)), *_best(row[best], best), _percent(row[later[-1]])
        )
    if len(found.scores):
        for domain in [name for name in DOMAINS if name in found.curve.columns]:
            number = found.scores["domain"].tolist().count(domain)
            table.add_row(f"{domain}: mean of {number}", "", *_means(found, domain), style="bold")
        table.add_row(f"all: mean of {len(found.scores)}", "", *_means(found, "average"), style="bold")
    console.print(table, highlight=False)
    if len(found.scores):
        console.print(f"best layer of each task (chosen on these scores): {_percent(found.best_per_task())}")
    if found.missing:
        console.print(f"in no mean, as it lacks scores: {', '.join(found.missing)}", style="yellow")


def _means(found: Averages, column: str) -> list[str]:
    best, last = found.best_layer(column), found.num_layers
    return [_percent(found.at(0, column)), *_best(found.at(best, column), best), _percent(found.at(last, column))]


def _best(value: float, layer: int) -> tuple[str, str]:
    return _percent(value), str(layer)


def _percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"


def _layer_name(column: Any) -> Any:
    return f"layer_{column:03d}" if isinstance(column, int) else column


def _described(found: Averages) -> dict[str, Any]:
    """As JSON: NaN, which JSON has not, as null."""
    has = bool(len(found.scores)) and found.num_layers > 0
    best = found.best_layer() if has else None
    layers = {name: _layer_name(name) for name in found.curve["layer"]}
    return {
        "run": found.run,
        "step": found.step,
        "pooling": found.pooling,
        "states": found.states,
        "best_layer": best,
        "best": None if best is None else found.at(best),
        "last_layer": found.num_layers if has else None,
        "last": found.at(found.num_layers) if has else None,
        "layer_0": _number(found.at(0)) if has else None,
        "best_per_task": found.best_per_task() if has else None,
        "missing": list(found.missing),
        "averages": _rows(found.curve),
        "scores": _rows(found.scores.rename(columns=layers)),
    }


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(table.to_json(orient="records", double_precision=15) or "[]")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
