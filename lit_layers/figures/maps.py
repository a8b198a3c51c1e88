"""Heat maps: pairs of layers or tokens, layers over steps, heads and word pairs, with a slider over checkpoints."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import pandas as pd

from lit_layers.figures import tables
from lit_layers.figures.chart import Cells, Chart, Series
from lit_layers.figures.labels import pair_text
from lit_layers.figures.profiles import FRAMES
from lit_layers.figures.tables import Point
from lit_layers.figures.theme import DIVERGING, MISSING, Axis, Training, rounded, spread
from lit_layers.metrics import look_up, names, sentence

__all__ = ["layer_matrix", "layer_surface", "table_map", "tag_map"]

SIMILARITIES = names("similarity")
_LONGEST = 24  # maximum number of characters of a category label; tooltips have the full name
_ROW = 13  # pixels per row
_Cell = Callable[[Point], tuple[Any, Any]]  # returns the row and column of a point in a heat map


# ------------------------------------------------------------------------------------------------ pairs


def layer_matrix(frame: pd.DataFrame, metric: str, **chosen: Unpack[tables.Chosen]) -> Chart:
    """Return a metric of layer pairs as a heat map with a slider over checkpoints.

    Colours have the same meaning at every checkpoint. The colour scale is centred at 0. Its range comes from pairs of
    different layers, so values on the diagonal may lie outside it. For similarities, the scale goes from the smallest
    value of any checkpoint to 1: these values are far from 0, so all would look alike on a scale centred at 0.

    Raises:
        ValueError: the metric has no values per pair of layers.
    """
    points, tags = tables.drawable(frame, metric, tables.is_pair, "values per pair of layers", **chosen)
    layers = sorted({n for point in points for n in (point.layer, point.other_layer) if n is not None})
    look: dict[str, Any] = {"hover": "layer {y}, other layer {x}"}
    if metric in SIMILARITIES:
        low = min((point.value for point in points if math.isfinite(point.value)), default=0.0)
        look |= {"scheme": "viridis", "ends": (*rounded([low], 3), max(1.0, low + 1e-3))}
    axes = key_axis("Other layer", layers), key_axis("Layer", layers)
    return _pairs(tables.title_of(metric, tags), points, lambda p: (p.layer, p.other_layer), *axes, look)


def table_map(
    frame: pd.DataFrame, metric: str, *, layer: int, other_layer: int | None = None, **chosen: Unpack[tables.Chosen]
) -> Chart:
    """Return the table of values of one layer, or of one pair of blocks, as a heat map with a slider over checkpoints.

    The table is one of two kinds. A metric of token pairs has the tags `token` (down) and `other_token` (across), which
    are positions in per cent of the prompt. Its colours are as in `layer_matrix`.

    The Jacobian of one block in the leading singular directions of another has the tags `row` and `column`. Blue is
    positive, brown negative. Jacobians grow by orders of magnitude in training, so each checkpoint has its own colour
    scale. It saturates at half the largest entry, because a few entries are much larger than the others.

    Raises:
        ValueError: the metric has no such table, or not for these layers.
    """
    placed = [p for p in tables.select(frame, metric, **chosen) if p.tags.keys() & {"token", "row"}]
    points = [point for point in placed if (point.layer, point.other_layer) == (layer, other_layer)]
    if not points:
        pairs = sorted({pair_text(point.layer, point.other_layer) for point in placed})
        there = f"{pair_text(layer, other_layer)}; it has: {', '.join(pairs)}"
        raise ValueError(f"metric {metric!r} has no {there if pairs else 'values per pair of tokens or of directions'}")
    points, tags = tables.plainest_points(points, chosen.get("tags"))
    is_jacobian, where = "row" in points[0].tags, pair_text(layer, other_layer)
    down, across = ("row", "column") if is_jacobian else ("token", "other_token")
    keys = sorted({point.tags[name] for point in points for name in (down, across)})
    cell = lambda p: (p.tags[down], p.tags[across])  # noqa: E731
    if not is_jacobian:
        axes = key_axis("Position of other token", keys, unit="%"), key_axis("Position of token", keys, unit="%")
        title = f"{tables.title_of(metric, tags)}, {where}"
        return _pairs(title, points, cell, *axes, {"hover": "token at {y}%, other token at {x}%"})
    title = ", ".join(filter(None, [sentence(where), tables.variant_text(tags)]))
    steps = spread(tables.steps_of(points), FRAMES)
    look: dict[str, Any] = {"ends": (-1.0, 1.0), "hover": "row {y}, column {x}"}
    look["scale"] = [_largest((p for p in points if p.step == step), 0.5) for step in steps]
    return _pairs(title, points, cell, key_axis("Right direction", keys), key_axis("Left direction", keys), look)


def _pairs(title: str, points: Sequence[Point], cell: _Cell, x: Axis, y: Axis, look: Mapping[str, Any]) -> Chart:
    """Return a square heat map of pairs; its colours saturate at the largest off-diagonal entry of any checkpoint."""
    bound = _largest(p for p in points if cell(p)[0] != cell(p)[1])
    look = {"ends": (-bound, bound), "scheme": DIVERGING, **look}
    return slider_map(title, frame_grids(points, cell, y.keys or (), x.keys or ()), x, y, look, square=True)


def slider_map(
    title: str, frames: Mapping[int, Any], x: Axis, y: Axis, look: Mapping[str, Any], **options: Any
) -> Chart:
    """Return a heat map with a slider over the steps in `frames`.

    The columns of the heat map are the keys (categories) of the axis `x`, and its rows are the keys of the axis `y`.
    `look` holds keyword arguments of `Cells`, and `options` those of `Chart`.
    """
    cells = Cells(**{"values": [*frames.values()], "rows": y.keys, "columns": x.keys, **look})
    return Chart(title=title, x=x, y=y, cells=cells, frames=[*frames], **{"height": 450, **options})


def named_matrix(
    title: str, names: Sequence[str], values: Sequence[Any], ends: tuple[float, float], texts: Sequence[str] = ()
) -> Chart:
    """Return a heat map of values for all pairs of names: rows are labelled with number and name, columns with numbers.

    The tooltip of a cell shows its value and the row's entry of `texts`, or by default the row's name.
    """
    keys, labels = list(range(len(names))), [f"{n}  {name}" for n, name in enumerate(names, 1)]
    look: dict[str, Any] = {"ends": ends, "scheme": DIVERGING, "hover": "{t}", "texts": texts or names}
    x = Axis(labels={key: str(key + 1) for key in keys}, keys=keys, grid=False)
    y = Axis(labels=dict(enumerate(labels)), keys=keys, grid=False)
    return slider_map(title, {0: values}, x, y, look, height=140 + 18 * len(keys))


def frame_grids(
    points: Sequence[Point], cell: _Cell, rows: Sequence[Any], columns: Sequence[Any], digits: int = 3
) -> dict[int, list[list[Any]]]:
    """Return the values of a heat map as rows, for each step of its slider; a missing value is None."""
    values = {(point.step, *cell(point)): point.value for point in points}
    return {
        step: [rounded((values.get((step, row, column)) for column in columns), digits) for row in rows]
        for step in spread(tables.steps_of(points), FRAMES)
    }


def key_axis(title: str, keys: Sequence[Any], *, unit: str = "", most: int = 9) -> Axis:
    """Return an axis of heat map cells, one per key, with at most `most` evenly spaced labels."""
    labeled = keys[:: -(-len(keys) // most) or 1]
    return Axis(title=title, keys=keys, labels={key: f"{key}{unit}" for key in labeled}, grid=False)


def _largest(points: Iterable[Point], share: float = 1.0) -> float:
    """Return the value at which colours saturate: the largest absolute value, or a share of it."""
    largest = max((abs(point.value) for point in points if math.isfinite(point.value)), default=0.0)
    return rounded([share * largest], 3)[0] or 1.0


# ------------------------------------------------------------------------------------------------ layers over steps


def has_surface(points: Iterable[Point]) -> bool:
    """Return whether points of one variant have values per layer at two or more steps."""
    return len({point.step for point in points if _is_of_layer(point)}) > 1


def _is_of_layer(point: Point) -> bool:
    is_map = point.other_layer is not None or tables.is_tabular(point)
    return point.layer is not None and not is_map and point.tags.keys().isdisjoint(("reference", "index", "control"))


def layer_surface(
    frame: pd.DataFrame,
    metric: str,
    *,
    steps: Sequence[int] = (),
    **chosen: Unpack[tables.Chosen],
) -> Chart:
    """Return a metric over steps (log scale, with a gap after step 0) and layers as a heat map.

    `steps` are all steps that were scheduled for measuring; missing values are grey. Metrics whose values span orders
    of magnitude have a log colour scale. For a score, dots mark the best layer at each step (layer 0 excluded).

    Raises:
        InputError: for checkpoints that an audit found suspect, unless `allow_suspect`.
        ValueError: the metric has no values per layer at two or more steps.
    """
    points = tables.select(frame, metric, **chosen, over_steps=True)
    points, tags = tables.plainest_points([point for point in points if _is_of_layer(point)], chosen.get("tags"))
    if not has_surface(points):
        raise ValueError(f"metric {metric!r} has no values per layer of at least two steps")
    every = sorted({*tables.steps_of(points), *steps})
    layers = [*range(max(point.layer or 0 for point in points) + 1)]
    by_place = {(point.layer, point.step): point.value for point in points}
    values = [rounded((by_place.get((layer, step)) for step in every), 17) for layer in layers]
    series = []
    if look_up(metric).better is not None:
        best = best_layers(values, metric)
        series.append(Series(x=every, y=best, mark="circle-open", size=6, color="black", hover=False))
    drawn = [rounded(row, 4) for row in values]
    cells = Cells(values=[drawn], rows=layers, columns=every, hover="{w}\nlayer {y}", **colored(metric, values))
    y = Axis(title="Layer", whole=True, grid=False, ends=(-0.5, layers[-1] + 0.5))
    training = Training(every, {point.step: point.tokens for point in points})
    look: dict[str, Any] = {"x": Axis(grid=False), "y": y, "height": 380, "background": MISSING}
    title = tables.title_of(metric, tags)
    return Chart(title=title, cells=cells, series=series, training=training, **look)


def best_layers(values: Sequence[Sequence[float | None]], metric: str) -> list[int | None]:
    """Return the best layer at each step, without layer 0, for values (layers, steps); None if a step has no values."""
    scores = np.array(values, dtype=float) * (1 if look_up(metric).higher_is_better else -1)
    scores[np.isnan(scores)] = -math.inf
    scores[0] = -math.inf
    return [int(n) if math.isfinite(top) else None for n, top in zip(scores.argmax(0), scores.max(0), strict=True)]


def colored(metric: str, values: Sequence[Sequence[float | None]], *, reverse: bool = False) -> dict[str, Any]:
    """Return the range and scheme of a map's colours, and whether they are logarithmic, as options of `Cells`."""
    is_log = look_up(metric).log
    every = (value for row in values for value in row if value is not None)
    finite = [value for value in every if math.isfinite(value) and (value > 0 or not is_log)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 2.0)
    if low == high:
        low, high = (low / 2, low * 2) if is_log else (low - 0.5, high + 0.5)
    scheme = {"name": "viridis", "extent": [1, 0]} if reverse else "viridis"
    return {"ends": (low, high), "scheme": scheme, "log": is_log}


# ------------------------------------------------------------------------------------------------ heads, categories


def tag_map(frame: pd.DataFrame, metric: str, **chosen: Unpack[tables.Chosen]) -> Chart:
    """Return a heat map of a metric by layer and by category of word pairs (tag `category`) or head (tag `head`).

    Layers are on the horizontal axis, and a slider selects the checkpoint. Categories are sorted by group (tag
    `group`), by `category_id` and by name; the mean over all categories comes first, if recorded. If any value is
    negative, positive values are blue and negative ones brown, and colours saturate at the largest absolute value of
    any checkpoint. Missing values are blank.

    Raises:
        ValueError: the metric has no values per layer and category or head.
    """
    is_layered = lambda point: point.layer is not None and point.other_layer is None  # noqa: E731
    points, tags = tables.drawable(frame, metric, is_layered, "values per layer and category or head", **chosen)
    by_head = any(tables.HEAD in point.tags for point in points)
    points = [point for point in points if not by_head or tables.HEAD in point.tags]
    if not by_head and not any(tables.CATEGORY in point.tags for point in points):
        raise ValueError(f"metric {metric!r} has no values per layer and category or head")
    layers = key_axis("Block" if by_head else "Layer", sorted({point.layer or 0 for point in points}))
    kinds = {_category(point): str(point.tags.get("group", "")).replace("_", " ") for point in points}
    keys = sorted(kinds, key=lambda key: (bool(key[2]), kinds[key], key))  # the mean (empty name) first
    texts = [name.replace("_", " ") or "Mean" for *_, name in keys]
    texts = [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1].rstrip()}…" for text in texts]
    frames = frame_grids(points, lambda p: (_category(p), p.layer), keys, layers.keys or ())
    look: dict[str, Any] = {"hover": ("block" if by_head else "layer") + " {x}\n{t}"}
    if any(point.value < 0 for point in points):
        full = _largest(points)
        look |= {"ends": (-full, full), "scheme": DIVERGING}
    else:
        look |= colored(metric, [row for table in frames.values() for row in table])
    whole = [", ".join(filter(None, [f"{key[0] or ''} {key[2]}".strip(), kinds[key]])) for key in keys]
    look["texts"] = [text or "Mean over all categories" for text in whole]
    y = Axis(keys=[*range(len(keys))], labels=dict(enumerate(texts)), grid=False)
    return slider_map(tables.title_of(metric, tags), frames, layers, y, look, height=_ROW * len(keys) + 170)


def _category(point: Point) -> tuple[str, int, str]:
    """Return the id, sort key and name of a point's category of word pairs, or of its attention head.

    The id of a head is empty. For the mean over all categories, id and name are empty.
    """
    if tables.HEAD in point.tags:
        return "", point.tags[tables.HEAD] + 1, f"head {point.tags[tables.HEAD]}"
    return str(point.tags.get("category_id", "")), 0, str(point.tags.get(tables.CATEGORY, ""))
