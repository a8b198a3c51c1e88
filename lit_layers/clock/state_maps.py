"""Heat maps of the similarity of states, steps by steps and runs by runs, each with a sentence."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from lit_layers.clock.state_similarity import CKA, PROCRUSTES, PROMPT_SUBSPACE, SUBSPACE, settling_steps
from lit_layers.figures.axes import Axis
from lit_layers.figures.chart import Cells, Chart
from lit_layers.figures.labels import count, value
from lit_layers.figures.maps import tabled
from lit_layers.figures.theme import spread

TITLES = {
    CKA: "CKA of pooled states",
    PROCRUSTES: "Procrustes distance of pooled states",
    SUBSPACE: "Overlap of leading subspaces of pooled states",
    PROMPT_SUBSPACE: "Overlap of leading subspaces over prompts",
}
_BEST = {CKA: 1.0, PROCRUSTES: 0.0, SUBSPACE: 1.0, PROMPT_SUBSPACE: 1.0}  # of states with themselves
_LAYERS = 9  # that a reader chooses from: the tables have all
_TICKS = 9

Maps = tuple[str, str, list[tuple[str, Chart]]]  # a title, a note, and the map of each layer with its name


def step_maps(table: pd.DataFrame, *, several: bool = False) -> Iterator[Maps]:
    """Yields for each run, analysis and metric of a table of steps a map of steps by steps, for a choice of layers.

    With `several` runs the titles say which.
    """
    for (run, analysis, metric), part in table.groupby(["run", "analysis", "metric"], sort=False):
        where = ", ".join([*([str(run)] if several else []), *([] if analysis == "pooled_states" else [str(analysis)])])
        title = f"{TITLES[str(metric)]}{f', {where}' if where else ''}"
        charts = [(f"Layer {layer}", _steps(title, layer, of_layer)) for layer, of_layer in _by_layer(part)]
        yield title, _chance(part), charts


def run_maps(table: pd.DataFrame) -> Iterator[Maps]:
    """Yields for each analysis and metric of a table of runs a map of runs by runs, with a slider over the steps."""
    for (analysis, metric), part in table.groupby(["analysis", "metric"], sort=False):
        title = f"{TITLES[str(metric)]}, runs at equal steps"
        title += "" if analysis == "pooled_states" else f", {analysis}"
        charts = [(f"Layer {layer}", _runs(title, layer, of_layer)) for layer, of_layer in _by_layer(part)]
        yield title, _chance(part), charts


def sentences(table: pd.DataFrame) -> list[str]:
    """Returns of each run from which step on its first, middle and last layer are what they are in the end."""
    lines = []
    for (run, _), part in settling_steps(table).groupby(["run", "analysis"], sort=False):
        part = part[part["layer"] > 0]
        places = spread(part.to_dict("records"), 3)
        steady = [f"layer {row['layer']} from step {count(row['step'])}" for row in places]
        if steady and part["step"].min() < part["last"].max():
            lines.append(
                f"{run}: the CKA with step {count(part['last'].max())} stays above 0.9 at {', '.join(steady)} on"
            )
    return lines


def _by_layer(table: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    for layer in spread(sorted(table["layer"].unique()), _LAYERS):
        yield int(layer), table[table["layer"] == layer]


def _chance(table: pd.DataFrame) -> str:
    low, high = table["chance"].min(), table["chance"].max()
    between = value(low) if value(low) == value(high) else f"{value(low)} to {value(high)}"
    return f"By chance {between}."


def _steps(title: str, layer: int, table: pd.DataFrame) -> Chart:
    keys = sorted({*table["step"], *table["other_step"]})
    matrix = _matrix(table, "step", "other_step", keys)
    labels = {step: count(step) for step in spread(keys, _TICKS)}
    intervals = [_intervals(table, "step", "other_step", keys)]
    names = "Optimizer step", "step {y}, step {x}{w}"
    return _map(f"{title}, layer {layer}", names, keys, labels, [matrix], intervals, table)


def _runs(title: str, layer: int, table: pd.DataFrame) -> Chart:
    names = list(dict.fromkeys([*table["run"], *table["other_run"]]))
    steps = sorted(table["step"].unique().tolist())
    by_step = [table[table["step"] == step] for step in steps]
    matrices = [_matrix(part, "run", "other_run", names) for part in by_step]
    intervals = [_intervals(part, "run", "other_run", names) for part in by_step]
    labels = {number: f"{name}  {number + 1}" for number, name in enumerate(names)}
    keys = range(len(names))
    chart = _map(f"{title}, layer {layer}", ("Run", "{t}{w}"), keys, labels, matrices, intervals, table, steps, names)
    across = Axis(title="Run", keys=keys, labels={number: str(number + 1) for number in labels}, grid=False)
    return Chart(**{**vars(chart), "x": across, "square": False})


def _map(
    title: str,
    names: tuple[str, str],
    keys: Sequence[int],
    labels: dict[int, str],
    values: list[list[list[Any]]],
    notes: list[list[list[str]]],
    table: pd.DataFrame,
    frames: Sequence[int] = (),
    texts: Sequence[str] = (),
) -> Chart:
    """`names` are those of both axes, and what touching a place says."""
    metric = str(table["metric"].iloc[0])
    best, (side, hover) = _BEST[metric], names
    ends = (min(table["value"].min(), 0.999), best) if best else (best, max(table["value"].max(), 1e-3))
    scheme: Any = "viridis" if best else {"name": "viridis", "extent": [1, 0]}
    axis = Axis(title=side, keys=keys, labels=labels, grid=False)
    hovering = {"hover": hover, "texts": texts, "notes": notes}
    cells = Cells(values=values, rows=keys, columns=keys, ends=ends, scheme=scheme, **hovering)
    return Chart(title=title, x=axis, y=axis, cells=cells, frames=frames, height=420, square=True)


def _matrix(table: pd.DataFrame, down: str, across: str, keys: Sequence[Any]) -> list[list[Any]]:
    pairs = {(row[down], row[across]): row["value"] for row in table.to_dict("records")}
    pairs |= {(b, a): each for (a, b), each in pairs.items()}
    best = _BEST[str(table["metric"].iloc[0])]
    return tabled({**pairs, **{(key, key): best for key in keys}}, keys, keys)


def _intervals(table: pd.DataFrame, down: str, across: str, keys: Sequence[Any]) -> list[list[str]]:
    """What touching a place of the matrix says of its interval: nothing where there is none."""
    texts = {
        (row[down], row[across]): f"\n95% {value(row['low'])} to {value(row['high'])}, over {row['over']}"
        for row in table[table["low"].notna()].to_dict("records")
    }
    texts |= {(b, a): each for (a, b), each in texts.items()}
    return [[texts.get((row, column), "") for column in keys] for row in keys]
