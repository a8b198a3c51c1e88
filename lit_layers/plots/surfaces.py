"""A metric over steps and layers at once, as a heat map; and which layer is the best one over steps."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up, sentence
from lit_layers.plots.axes import TITLES, AxisName, Grid, on_axis, whole_ticks
from lit_layers.plots.canvas import canvas, dress, rgb, save
from lit_layers.plots.tables import Point, is_placed, of_plainest, select, steps_of, title_of
from lit_layers.plots.theme import ACCENT, INK, MUTED, figure, log_colors, rounded

# Viridis: equal steps of the value are equal steps to the eye; grey, which it lacks, is what was not measured.
VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"]
MISSING = "#d5dae0"


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
        found: list[int | None] = []
        beaten: list[bool] = []
        sign = 1 if self.higher_is_better else -1
        for column in range(len(self.steps)):
            scores = {n: sign * row[column] for n, row in zip(self.layers, self.values, strict=True)}
            known = {layer: score for layer, score in scores.items() if math.isfinite(score)}
            blocks = {layer: score for layer, score in known.items() if layer > 0}
            best = max(blocks, key=lambda layer: blocks[layer]) if blocks else None
            found.append(best)
            beaten.append(0 in known and (best is None or known[0] > blocks[best]))
        return found, beaten


def read_surface(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    steps: Sequence[int] | None = None,
    allow_suspect: bool = False,
) -> Surface:
    """Returns a metric per layer and step; `steps` are those that were to be measured, of which some may lack it.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where the metric has no values per layer of at least two steps.
    """
    points = select(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect, over_steps=True)
    points, chosen = of_plainest([point for point in points if _is_of_layer(point)], tags)
    known: list[int] = sorted({*steps_of(points), *(steps or [])})
    if not has_surface(points):
        raise ValueError(f"metric {metric!r} has no values per layer of at least two steps")
    layers = list(range(max(point.layer or 0 for point in points) + 1))
    values = [[math.nan] * len(known) for _ in layers]
    for point in points:
        if point.layer is not None:
            values[point.layer][known.index(point.step)] = point.value
    tokens = {point.step: point.tokens for point in points}
    higher_is_better = look_up(metric).higher_is_better
    return Surface(title_of(metric, chosen), layers, known, tokens, values, higher_is_better)


def has_surface(points: Iterable[Point]) -> bool:
    """Returns whether points of one variant are values per layer of at least two steps."""
    return len({point.step for point in points if _is_of_layer(point)}) > 1


def layer_surface(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    steps: Sequence[int] | None = None,
    axis: AxisName = "step",
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over steps (log, the untrained model apart) and layers as a heat map.

    Grey is what was not measured. Colours of values that lie decades apart stand for their logarithm. Of a score dots
    show the best layer from 1 on, rings where the embedding beats it.

    Raises: as `read_surface`.
    """
    options: dict[str, Any] = {"analysis": analysis, "tags": tags, "steps": steps, "allow_suspect": allow_suspect}
    surface = read_surface(frame, metric, **options)
    grid = Grid.of(surface.steps, surface.tokens)
    texts = [row[0] for row in grid.hover()]
    traces: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            **colored(metric, surface.values, "<br>%{text}"),
            "y": list(surface.layers),
            "text": [[f"{text}<br>layer {layer}" for text in texts] for layer in surface.layers],
            "colorscale": [[n / (len(VIRIDIS) - 1), color] for n, color in enumerate(VIRIDIS)],
            "hoverongaps": False,
            "meta": 0,
        }
    ]
    if look_up(metric).better is not None:
        traces += _best_marks(surface)
    layout = on_axis(traces, [grid, *([grid] * (len(traces) - 1))], axis)
    _widen(layout)
    for shape in layout["shapes"]:
        shape |= {"layer": "above", "line": {"color": "white", "width": 5}}
    below = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0.5, "y1": 0.5, "layer": "above"}
    layout["shapes"] = [*layout["shapes"], {**below, "line": {"color": "white", "width": 3}}]
    return figure(
        surface.title,
        traces,
        yaxis={"title": {"text": "Layer"}, "showgrid": False, **whole_ticks(0, surface.layers[-1])},
        height=380,
        margin={"t": 40},
        plot_bgcolor=MISSING,
        showlegend=False,
        **{**layout, "xaxis": {**layout["xaxis"], "showgrid": False}},
    )


def best_layers(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    axis: AxisName = "step",
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns the best layer of a score, among the layers from 1 on, over steps; rings: the embedding beats it there.

    Raises: as `read_surface`.
    """
    surface = read_surface(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    found, beaten = surface.best()
    grid = Grid.of(surface.steps, surface.tokens)
    line = {"mode": "lines+markers", "line": {"color": ACCENT, "width": 2, "shape": "hv"}, "marker": {"size": 6}}
    traces: list[dict[str, Any]] = [
        {
            **line,
            "y": found,
            "meta": 0,
            "name": "Best layer from 1 on",
            "hovertemplate": "layer %{y}<br>%{customdata[0]}<extra></extra>",
        },
        {
            "mode": "markers",
            "y": [0 if ring else None for ring in beaten],
            "meta": 1,
            "name": "The embedding is better than any",
            "marker": {"size": 8, "symbol": "circle-open", "color": INK, "line": {"width": 1.6}},
            "hovertemplate": "the embedding<br>%{customdata[0]}<extra></extra>",
        },
    ]
    layout = on_axis(traces, [grid, grid], axis)
    last = surface.layers[-1]
    return figure(
        f"Best layer, {surface.title}",
        traces,
        yaxis={"title": {"text": "Layer"}, "range": [-0.06 * last - 0.3, 1.06 * last], **whole_ticks(0, last)},
        height=380,
        **layout,
    )


def write_surface(
    frame: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    steps: Sequence[int] | None = None,
    allow_suspect: bool = False,
) -> None:
    """Writes `layer_surface` as a picture, and below it of a score `best_layers`. The suffix decides: .png or .svg.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: where the metric has no values per layer of at least two steps; another suffix.
    """
    from matplotlib.colors import ListedColormap
    from numpy import array, ma

    options: dict[str, Any] = {"analysis": analysis, "tags": tags, "steps": steps, "allow_suspect": allow_suspect}
    surface = read_surface(frame, metric, **options)
    layout = on_axis([], [Grid.of(surface.steps, surface.tokens)], "step")
    spec = layout["meta"]["axes"]["step"]
    places = _places(surface.steps, spec["apart"])
    edges = _edges(places)
    has_best = look_up(metric).better is not None
    fig = canvas(7.2, 5.4 if has_best else 3.8)
    drawn = fig.subplots(2 if has_best else 1, 1, squeeze=False, sharex=True, height_ratios=[5, 2] if has_best else [1])
    axes = drawn[0, 0]
    axes.set_facecolor(MISSING)
    axes.patch.set(hatch="////", edgecolor="white")
    values = array(surface.values)
    rows = [layer - 0.5 for layer in surface.layers] + [surface.layers[-1] + 0.5]
    look = {"cmap": ListedColormap(rgb(VIRIDIS, 256)), "norm": color_norm(metric)}
    image = axes.pcolormesh(edges, rows, ma.masked_invalid(values), **look)
    axes.axhline(0.5, color="white", linewidth=2.5)
    if spec["divider"] is not None:
        axes.axvline(spec["divider"], color="white", linewidth=3.5)
    if has_best:
        found, beaten = surface.best()
        for part, look in (
            ([*found], {"color": "white"}),
            ([0 if ring else None for ring in beaten], {"color": "none"}),
        ):
            own = [(x, y) for x, y in zip(places, part, strict=True) if y is not None]
            axes.scatter([x for x, _ in own], [y for _, y in own], s=13, edgecolors="black", linewidths=0.7, **look)
        below = drawn[1, 0]
        at = [(x, y) for x, y in zip(places, found, strict=True) if y is not None]
        below.step([x for x, _ in at], [y for _, y in at], where="post", color=ACCENT, linewidth=1.4)
        below.plot([x for x, _ in at], [y for _, y in at], linestyle="", marker="o", markersize=3, color=ACCENT)
        rings = [x for x, ring in zip(places, beaten, strict=True) if ring]
        below.plot(
            rings, [0] * len(rings), linestyle="", marker="o", markersize=4.5, color=INK, markerfacecolor="white"
        )
        below.set_ylim(-0.08 * surface.layers[-1] - 0.4, 1.08 * surface.layers[-1])
        dress(below, TITLES["step"], "best layer")
        below.set_title(
            "best layer from 1 on; rings: the embedding is better than any",
            loc="left",
            fontsize=8,
            color=MUTED,
        )
    bottom = drawn[-1, 0]
    bottom.set_xticks(spec["tickvals"], spec["ticktext"])
    bottom.set_xlim(edges[0], edges[-1])
    dress(axes, "" if has_best else TITLES["step"], "layer")
    _whole_layers_up(axes)
    axes.grid(False)
    bar = fig.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(labelsize=7, length=2, colors=MUTED)
    name = sentence(analysis or "")
    save(fig, path, ": ".join(filter(None, [name if name != look_up(metric).title else "", surface.title])))


def colored(metric: str, values: Sequence[Sequence[float]], hover: str) -> dict[str, Any]:
    """Returns what a heat map's colours stand for, their bar, and the text on touch, which ends in `hover`.

    They stand for the logarithm of what lies decades apart.
    """
    bar = {"thickness": 9, "outlinewidth": 0, "tickfont": {"size": 10, "color": MUTED}, "x": 1.01, "xpad": 4}
    if not look_up(metric).log:
        z, text = [rounded(row, 4) for row in values], "%{z:.4g}"
        return {"z": z, "colorbar": {**bar, "nticks": 5}, "hovertemplate": f"{text}{hover}<extra></extra>"}
    places, texts = log_colors(cell for row in values for cell in row)
    z = [rounded((math.log10(cell) if cell > 0 else math.nan for cell in row), 4) for row in values]
    text = "10<sup>%{z:.4g}</sup>"
    bar |= {"tickvals": places, "ticktext": texts}
    return {"z": z, "colorbar": bar, "hovertemplate": f"{text}{hover}<extra></extra>"}


def color_norm(metric: str) -> Any:
    """Returns matplotlib's scale of colours: of logarithms for what lies decades apart, else None."""
    from matplotlib.colors import LogNorm

    return LogNorm() if look_up(metric).log else None


def _whole_layers_up(axes: Any) -> None:
    """Has ticks at whole layers only, on the axis that goes up."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _is_of_layer(point: Point) -> bool:
    beside = point.other_layer is not None or is_placed(point) or point.reference is not None
    return point.layer is not None and not beside and "index" not in point.tags and "control" not in point.tags


def _best_marks(surface: Surface) -> list[dict[str, Any]]:
    found, beaten = surface.best()
    line = {"width": 1, "color": "black"}
    own = {"mode": "markers", "hoverinfo": "skip"}
    rings = [0 if ring else None for ring in beaten]
    return [
        {**own, "y": found, "meta": 1, "marker": {"size": 6, "color": "white", "line": line}},
        {**own, "y": rings, "meta": 2, "marker": {"size": 7, "color": "rgba(0,0,0,0)", "line": line}},
    ]


def _places(steps: Sequence[int], apart: float) -> list[float]:
    return [math.log10(1 + step) if step > 0 else apart for step in steps]


def _edges(places: Sequence[float]) -> list[float]:
    """Between the places halfway, at the ends as far beyond as within."""
    inner = [(left + right) / 2 for left, right in itertools.pairwise(places)]
    return [2 * places[0] - inner[0], *inner, 2 * places[-1] - inner[-1]]


def _widen(layout: dict[str, Any]) -> None:
    """The ends of each axis at the edges of the cells, not inside them."""
    grid = layout["meta"]["grids"][0]
    for name, spec in layout["meta"]["axes"].items():
        values = grid["steps"] if name == "step" or grid["tokens"] is None else grid["tokens"]
        edges = _edges(_places(values, spec["apart"]))
        spec["range"] = [round(edges[0], 5), round(edges[-1], 5)]
        if layout["xaxis"]["title"]["text"] == spec["title"]:
            layout["xaxis"]["range"] = spec["range"]
