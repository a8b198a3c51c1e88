"""Heat maps of a metric over layers and categories, such as the relations of word pairs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import sentence
from lit_layers.plots.axes import whole_ticks
from lit_layers.plots.labels import escape
from lit_layers.plots.sliders import FRAMES, add_slider, spread
from lit_layers.plots.tables import CATEGORY, Point, grouped, of_plainest, select, steps_of, title_of
from lit_layers.plots.theme import DIVERGING, INK, MUTED, figure, rounded

_LONGEST = 24  # letters of a category's name beside the map; hovering tells it whole
_ROW = 13  # pixels


@dataclass(frozen=True)
class Row:
    """A row of the map: a category, the mean over all of them (no category), or the name of a group (no points)."""

    text: str
    full: str
    category: tuple[str, str] | None = None  # id and name
    is_heading: bool = False


def concept_map(
    frame: pd.DataFrame,
    metric: str = "concept_alignment",
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric of categories (tag `category`) per layer as one heat map, with a slider over the checkpoints.

    Categories stand below their groups (tag `group`), by `category_id` or name; the mean over all of them comes first,
    where it was recorded. Blue is positive, brown negative; the largest value of any checkpoint is full colour. What
    was not measured is blank.

    Raises:
        ValueError: where the metric has no values per layer and category.
    """
    points = category_points(select(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect))
    if not points:
        raise ValueError(f"metric {metric!r} has no values per layer and category")
    points, tags = of_plainest(points, tags)
    rows, layers = rows_of(points), layers_of(points)
    full = rounded([largest(points)], 3)[0] or 1.0

    def data(step: int) -> list[dict[str, Any]]:
        values = [rounded(row, 3) for row in table_of(points, rows, layers, step)]
        return [{"type": "heatmap", "z": values, "zmin": -full, "zmax": full}]

    steps = spread(steps_of(points), FRAMES)
    look = {
        "x": layers,
        "y": [*range(len(rows))],
        "text": [[escape(row.full)] * len(layers) for row in rows],
        "colorscale": DIVERGING,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "%{z:.3g}<br>layer %{x}<br>%{text}<extra></extra>",
        "colorbar": _bar(),
    }
    texts = [f"<b>{escape(row.text)}</b>" if row.is_heading else escape(row.text) for row in rows]
    fig = figure(
        title_of(metric, tags),
        [{**data(steps[-1])[0], **look}],
        xaxis={"title": {"text": "Layer"}, "showgrid": False, **whole_ticks(layers[0], layers[-1])},
        yaxis={
            "autorange": "reversed",
            "showgrid": False,
            "tickvals": [*range(len(rows))],
            "ticktext": texts,
            "tickfont": {"size": 10, "color": INK},
            "ticks": "",
            "nticks": len(rows),
        },
        height=_ROW * len(rows) + 170,
        margin={"t": 60},
    )
    add_slider(fig, steps, data)
    return fig


def category_points(points: Iterable[Point]) -> list[Point]:
    """Returns the points per layer of categories and of their mean; none where no category has any."""
    found = [point for point in points if point.layer is not None and point.other_layer is None]
    return found if any(CATEGORY in point.tags for point in found) else []


def rows_of(points: Sequence[Point]) -> list[Row]:
    """Returns the rows from the top: the mean, then each group and its categories in order."""
    return [*_mean(points), *_categories(points)]


def layers_of(points: Sequence[Point]) -> list[int]:
    """Returns the layers of the map."""
    return sorted({point.layer for point in points if point.layer is not None})


def table_of(points: Sequence[Point], rows: Sequence[Row], layers: Sequence[int], step: int) -> list[list[float]]:
    """Returns the values of one checkpoint, a list a row; NaN where there is none."""
    known = {(_category(point), point.layer): point.value for point in points if point.step == step}
    return [
        [math.nan if row.is_heading else known.get((row.category, layer), math.nan) for layer in layers] for row in rows
    ]


def largest(points: Sequence[Point]) -> float:
    """Returns the largest absolute value."""
    return max((abs(point.value) for point in points if math.isfinite(point.value)), default=0.0)


def _mean(points: Sequence[Point]) -> Iterator[Row]:
    if any(CATEGORY not in point.tags for point in points):
        yield Row("Mean", "Mean over all categories")


def _categories(points: Sequence[Point]) -> Iterator[Row]:
    groups = {key: str(point.tags.get("group", "")) for point in points if (key := _category(point)) is not None}
    by_group = grouped(sorted(groups), lambda key: groups[key])
    for group, keys in by_group.items():
        if group and len(by_group) > 1:
            yield Row(sentence(group), "", is_heading=True)
        for own_id, name in keys:
            full = ", ".join(filter(None, [" ".join(filter(None, [own_id, name])), group.replace("_", " ")]))
            yield Row(_short(name), full, (own_id, name))


def _category(point: Point) -> tuple[str, str] | None:
    tags = point.tags
    return (str(tags.get("category_id", "")), str(tags[CATEGORY])) if CATEGORY in tags else None


def _short(name: str) -> str:
    name = name.replace("_", " ")
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def _bar() -> dict[str, Any]:
    """Thin and above the map: it costs no width on a narrow screen."""
    return {
        "orientation": "h",
        "x": 1,
        "xanchor": "right",
        "y": 1.0,
        "yanchor": "bottom",
        "len": 0.6,
        "thickness": 8,
        "outlinewidth": 0,
        "tickfont": {"size": 10, "color": MUTED},
        "nticks": 5,
        "xpad": 0,
        "ypad": 6,
    }
