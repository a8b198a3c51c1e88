"""Heat maps: pairs of layers and of tokens, layers over steps, word pairs; with a slider over the checkpoints."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import pandas as pd

from lit_layers.figures import tables
from lit_layers.figures.chart import Cells, Chart, Series
from lit_layers.figures.labels import pair_text, wrapped
from lit_layers.figures.profiles import FRAMES
from lit_layers.figures.theme import DIVERGING, MISSING, Axis, AxisName, Training, rounded, spread
from lit_layers.metrics import look_up, names, sentence

__all__ = ["concept_map", "head_map", "layer_matrix", "layer_surface", "table_map"]

SIMILARITIES = names("similarity")
_LONGEST = 24  # letters of a category's name beside the map; hovering tells it whole
_ROW = 13  # pixels


# ------------------------------------------------------------------------------------------------ pairs


def layer_matrix(frame: pd.DataFrame, metric: str, **chosen: Unpack[tables.Chosen]) -> Chart:
    """Returns a metric of pairs of layers as a heat map, with a slider over the checkpoints.

    The colours mean the same at every checkpoint. Their range is that of the pairs of different layers: what a layer
    has with itself may lie outside. Similarities have colours from the least of any checkpoint to 1: they are far from
    0, and on colours around 0 all layers would look alike.

    Raises:
        ValueError: where the metric has no values per pair of layers.
    """
    points, tags = tables.drawable(frame, metric, tables.is_pair, "values per pair of layers", **chosen)
    layers = sorted({n for point in points for n in (point.layer, point.other_layer) if n is not None})
    names = ("Layer", "Other layer", "layer {y}, other layer {x}")
    chart = _pairs(tables.title_of(metric, tags), points, lambda p: (p.layer, p.other_layer), layers, names)
    if metric not in SIMILARITIES or chart.cells is None:
        return chart
    low = min((v for table in chart.cells.values for row in table for v in row if v is not None), default=0.0)
    ends = (low, max(1.0, low + 1e-3))
    return replace(chart, cells=replace(chart.cells, scheme="viridis", ends=ends))


def table_map(
    frame: pd.DataFrame, metric: str, *, layer: int, other_layer: int | None = None, **chosen: Unpack[tables.Chosen]
) -> Chart:
    """Returns a table of one layer, or pair of blocks, as a heat map with a slider over the checkpoints.

    It is a metric of pairs of tokens (tags `token`, down, and `other_token`, across), whose places are in per cent of
    the prompt, in colours as in `layer_matrix`. Or it is one block's Jacobian in another's leading directions (tags
    `row` and `column`): blue is positive, brown negative. Then each checkpoint has colours of its own, as Jacobians
    grow by decades in training: half its largest entry is full colour, as a few entries tower over the others.

    Raises:
        ValueError: where the metric has no such table, or none of these layers.
    """
    placed = [p for p in tables.select(frame, metric, **chosen) if p.tags.keys() & {"token", "row"}]
    if not placed:
        raise ValueError(f"metric {metric!r} has no values per pair of tokens or of directions")
    points = [point for point in placed if (point.layer, point.other_layer) == (layer, other_layer)]
    if not points:
        pairs = sorted({pair_text(point.layer, point.other_layer) for point in placed})
        raise ValueError(f"metric {metric!r} has no {pair_text(layer, other_layer)}; it has: {', '.join(pairs)}")
    points, tags = tables.of_plainest(points, chosen.get("tags"))
    is_jacobian, where = "row" in points[0].tags, pair_text(layer, other_layer)
    if is_jacobian:
        down, across = "row", "column"
        names = ("Left direction", "Right direction", "row {y}, column {x}")
        title = ", ".join(filter(None, [sentence(where), tables.variant_text(tags)]))
    else:
        down, across = "token", "other_token"
        names = ("Place of the token", "Place of the other token", "token at {y}%, other token at {x}%")
        title = f"{tables.title_of(metric, tags)}, {where}"
    keys = sorted({point.tags[name] for point in points for name in (down, across)})
    cell = lambda p: (p.tags[down], p.tags[across])  # noqa: E731
    return _pairs(title, points, cell, keys, names, unit="" if is_jacobian else "%", each_step=is_jacobian)


def _pairs(
    title: str,
    points: Sequence[tables.Point],
    cell: Callable[[tables.Point], tuple[Any, Any]],
    keys: Sequence[int],
    names: tuple[str, str, str],
    *,
    unit: str = "",
    each_step: bool = False,
) -> Chart:
    """A square map with a place of the slider for each checkpoint.

    The largest entry off the diagonal of any checkpoint is full colour; with `each_step` half the largest of each.
    """
    frames = _by_step(points, cell, keys, keys)
    bound = _full(p for p in points if cell(p)[0] != cell(p)[1])
    scale = [_full((p for p in points if p.step == step), 0.5) for step in frames] if each_step else []
    ends = (-1.0, 1.0) if each_step else (-bound, bound)
    down, across, hover = names
    look = {"ends": ends, "scheme": DIVERGING, "scale": scale, "hover": hover}
    x, y = key_axis(across, keys, unit=unit), key_axis(down, keys, unit=unit)
    return slider_map(title, frames, x, y, look, height=450, square=True)


def slider_map(
    title: str, frames: Mapping[int, Any], x: Axis, y: Axis, look: Mapping[str, Any], **options: Any
) -> Chart:
    """Returns values by row and column, of each step, over the keys of two axes; `look` are options of the `Cells`."""
    cells = Cells(**{"values": [*frames.values()], "rows": y.keys, "columns": x.keys, **look})
    return Chart(title=title, x=x, y=y, cells=cells, frames=[*frames], **options)


def named_matrix(
    title: str, names: Sequence[str], values: Sequence[Any], ends: tuple[float, float], texts: Sequence[str] = ()
) -> Chart:
    """Returns values of pairs as a heat map: names down, which have numbers, and the numbers across.

    `texts` are what hovering says of a row, beyond the value; the names by default.
    """
    keys, labels = list(range(len(names))), [wrapped(f"{name} ({n})") for n, name in enumerate(names, 1)]
    look: dict[str, Any] = {"ends": ends, "scheme": DIVERGING, "hover": "{t}", "texts": texts or names}
    x = Axis(labels={key: str(key + 1) for key in keys}, keys=keys, grid=False)
    y = Axis(labels=dict(enumerate(labels)), keys=keys, grid=False)
    return slider_map(title, {0: values}, x, y, look, height=140 + row_height(labels) * len(keys))


def row_height(labels: Iterable[str]) -> int:
    """Returns pixels that rows with such labels are apart."""
    return 27 if any("\n" in label for label in labels) else 18


def as_matrix(
    values: Mapping[Any, float], rows: Sequence[Any], columns: Sequence[Any], digits: int = 3
) -> list[list[Any]]:
    """Returns values by row and column as lists, None where there is none."""
    return [rounded((values.get((row, column)) for column in columns), digits) for row in rows]


def _by_step(
    points: Sequence[tables.Point], cell: Callable[[tables.Point], Any], rows: Sequence[Any], columns: Sequence[Any]
) -> dict[int, list[list[Any]]]:
    """The values by row and column at each place of the slider."""
    by_step = tables.grouped(points, lambda point: point.step)
    steps = spread(sorted(by_step), FRAMES)
    return {step: as_matrix({cell(p): p.value for p in by_step[step]}, rows, columns) for step in steps}


def key_axis(title: str, keys: Sequence[Any], *, unit: str = "", most: int = 9) -> Axis:
    """Returns an axis of cells, with a label at each, or at every second, third, ... where they are many."""
    labeled = keys[:: -(-len(keys) // most) or 1]
    return Axis(title=title, keys=keys, labels={key: f"{key}{unit}" for key in labeled}, grid=False)


def _full(points: Iterable[tables.Point], share: float = 1.0) -> float:
    """The value that is full colour: the largest, or a share of it."""
    largest = max((abs(point.value) for point in points if math.isfinite(point.value)), default=0.0)
    return rounded([share * largest], 3)[0] or 1.0


# ------------------------------------------------------------------------------------------------ layers over steps


@dataclass(frozen=True)
class Surface:
    """Values (layers, steps) of one variant of a metric; NaN where nothing was measured."""

    title: str
    layers: Sequence[int]
    steps: Sequence[int]
    tokens: Mapping[int, int | None]
    values: Sequence[Sequence[float]]
    higher_is_better: bool = True

    def best(self) -> tuple[list[int | None], list[bool]]:
        """The best layer from 1 on at each step (None without any), and whether layer 0 is better than that."""
        values = np.asarray(self.values, dtype=float)
        scores = np.where(np.isfinite(values), values if self.higher_is_better else -values, -math.inf)
        blocks = np.where(np.asarray(self.layers)[:, None] > 0, scores, -math.inf)
        best = [int(n) if math.isfinite(top) else None for n, top in zip(blocks.argmax(0), blocks.max(0), strict=True)]
        return best, (scores[0] > blocks.max(0)).tolist()


def read_surface(
    frame: pd.DataFrame, metric: str, *, steps: Sequence[int] | None = None, **chosen: Unpack[tables.Chosen]
) -> Surface:
    """Returns a metric per layer and step; `steps` are those that were to be measured, of which some may lack it.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where the metric has no values per layer of at least two steps.
    """
    points = tables.select(frame, metric, **chosen, over_steps=True)
    points, tags = tables.of_plainest([point for point in points if _is_of_layer(point)], chosen.get("tags"))
    every: list[int] = sorted({*tables.steps_of(points), *(steps or [])})
    if not has_surface(points):
        raise ValueError(f"metric {metric!r} has no values per layer of at least two steps")
    layers = list(range(max(point.layer or 0 for point in points) + 1))
    value_of = {(point.layer, point.step): point.value for point in points}
    values = [[value_of.get((layer, step), math.nan) for step in every] for layer in layers]
    tokens = {point.step: point.tokens for point in points}
    higher_is_better = look_up(metric).higher_is_better
    return Surface(tables.title_of(metric, tags), layers, every, tokens, values, higher_is_better)


def has_surface(points: Iterable[tables.Point]) -> bool:
    """Returns whether points of one variant are values per layer of at least two steps."""
    return len({point.step for point in points if _is_of_layer(point)}) > 1


def _is_of_layer(point: tables.Point) -> bool:
    beside = point.other_layer is not None or tables.is_placed(point) or point.reference is not None
    return point.layer is not None and not beside and "index" not in point.tags and "control" not in point.tags


def layer_surface(
    frame: pd.DataFrame,
    metric: str,
    *,
    steps: Sequence[int] | None = None,
    axis: AxisName = "step",
    **chosen: Unpack[tables.Chosen],
) -> Chart:
    """Returns a metric over steps (log, the untrained model apart) and layers as a heat map.

    Grey is what was not measured. Colours of values that lie decades apart stand for their logarithm. Of a score dots
    show the best layer from 1 on, rings where the embedding beats it.

    Raises: as `read_surface`.
    """
    surface = read_surface(frame, metric, steps=steps, **chosen)
    training = Training.of(surface.steps, surface.tokens)
    series = []
    if look_up(metric).better is not None:
        layers, beaten = surface.best()
        dots = {"color": "black", "hover": False}
        for y, mark, size in ((layers, "circle-open", 6), ([0 if ring else None for ring in beaten], "ring", 7)):
            series.append(Series(x=surface.steps, y=y, mark=mark, size=size, **dots))
    cells = Cells(
        values=[[rounded(row, 4) for row in surface.values]],
        rows=surface.layers,
        columns=surface.steps,
        hover="{w}\nlayer {y}",
        **colored(metric, surface.values),
    )
    last = surface.layers[-1]
    y = Axis(title="Layer", whole=True, grid=False, ends=(-0.5, last + 0.5))
    look: dict[str, Any] = {"x": Axis(grid=False), "y": y, "height": 380, "background": MISSING}
    return Chart(title=surface.title, cells=cells, series=series, training=training, axis=axis, **look)


def colored(metric: str, values: Sequence[Sequence[float | None]], *, reverse: bool = False) -> dict[str, Any]:
    """Returns the ends and the scheme of the colours of a map; of equal values a little around them."""
    is_log = look_up(metric).log
    every = (value for row in values for value in row if value is not None)
    finite = [value for value in every if math.isfinite(value) and (value > 0 or not is_log)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 2.0)
    if low == high:
        low, high = (low / 2, low * 2) if is_log else (low - 0.5, high + 0.5)
    scheme = {"name": "viridis", "extent": [1, 0]} if reverse else "viridis"
    return {"ends": (low, high), "scheme": scheme, "log": is_log}


# ------------------------------------------------------------------------------------------------ heads


def head_map(frame: pd.DataFrame, metric: str, **chosen: Unpack[tables.Chosen]) -> Chart:
    """Returns a metric of attention heads (tag `head`, across) and blocks (down) as a heat map.

    With a slider over the checkpoints; the colours mean the same at every one.

    Raises:
        ValueError: where the metric has no values per head.
    """
    has_head = lambda point: tables.HEAD in point.tags and point.layer is not None  # noqa: E731
    points, tags = tables.drawable(frame, metric, has_head, "values per head", **chosen)
    layers = sorted({point.layer for point in points if point.layer is not None})
    heads = sorted({point.tags[tables.HEAD] for point in points})
    frames = _by_step(points, lambda p: (p.layer, p.tags[tables.HEAD]), layers, heads)
    look = colored(metric, [row for table in frames.values() for row in table]) | {"hover": "block {y}, head {x}"}
    x, y = key_axis("Head", heads), key_axis("Block", layers)
    return slider_map(tables.title_of(metric, tags), frames, x, y, look, height=450)


# ------------------------------------------------------------------------------------------------ categories


def concept_map(frame: pd.DataFrame, metric: str = "concept_alignment", **chosen: Unpack[tables.Chosen]) -> Chart:
    """Returns a metric of categories (tag `category`) per layer as one heat map, with a slider over the checkpoints.

    Categories stand below their groups (tag `group`), by `category_id` or name; the mean over all of them comes first,
    where it was recorded. Blue is positive, brown negative; the largest value of any checkpoint is full colour. What
    was not measured is blank.

    Raises:
        ValueError: where the metric has no values per layer and category.
    """
    selected = tables.select(frame, metric, **chosen)
    points = [point for point in selected if point.layer is not None and point.other_layer is None]
    if not any(tables.CATEGORY in point.tags for point in points):
        raise ValueError(f"metric {metric!r} has no values per layer and category")
    points, tags = tables.of_plainest(points, chosen.get("tags"))
    rows = [*_rows(points)]
    layers = sorted({point.layer for point in points if point.layer is not None})
    full = _full(points)
    keys = [key for *_, key in rows]
    frames = _by_step(points, lambda p: (_category(p), p.layer), keys, layers)
    numbers = [*range(len(rows))]
    strong = [n for n in numbers if keys[n] == _HEADING]
    beside = {n: text for n, (text, *_) in enumerate(rows)}
    look: dict[str, Any] = {"ends": (-full, full), "scheme": DIVERGING, "flat": True, "hover": "layer {x}\n{t}"}
    look["texts"] = [full_text for _, full_text, _ in rows]
    y = Axis(keys=numbers, labels=beside, strong=strong, grid=False)
    title, height = tables.title_of(metric, tags), _ROW * len(rows) + 170
    return slider_map(title, frames, key_axis("Layer", layers), y, look, height=height)


_HEADING = ("", "")  # of a row that has no values: the name of a group


def _rows(points: Sequence[tables.Point]) -> Iterator[tuple[str, str, tuple[str, str] | None]]:
    """From the top: the mean, then each group and its categories in order: text, text in full, and category."""
    if any(tables.CATEGORY not in point.tags for point in points):
        yield "Mean", "Mean over all categories", None
    groups = {key: str(point.tags.get("group", "")) for point in points if (key := _category(point)) is not None}
    by_group = tables.grouped(sorted(groups), lambda key: groups[key])
    for group, keys in by_group.items():
        if group and len(by_group) > 1:
            yield sentence(group), "", _HEADING
        for number, name in keys:
            full = ", ".join(filter(None, [" ".join(filter(None, [number, name])), group.replace("_", " ")]))
            text = name.replace("_", " ")
            text = text if len(text) <= _LONGEST else text[: _LONGEST - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
            yield text, full, (number, name)


def _category(point: tables.Point) -> tuple[str, str] | None:
    tags = point.tags
    return (str(tags.get("category_id", "")), str(tags[tables.CATEGORY])) if tables.CATEGORY in tags else None
