"""Pictures in a plane: coupled blocks on a circle, and the paths of tokens through the layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures.axes import Axis
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.curves import FRAMES, color_bar
from lit_layers.figures.tables import (
    Chosen,
    Point,
    grouped,
    is_placed,
    matching,
    of_plainest,
    select,
    steps_of,
    title_of,
    variant_text,
    variants_of,
)
from lit_layers.figures.theme import DEPTH, colors_of, rounded, spread
from lit_layers.metrics import look_up

_LEVELS = 6  # widths of a line that can be told apart
_SHARE = 0.2  # of the largest coupling of any checkpoint: below it no line is drawn unless told otherwise


def coupling_graph(
    frame: pd.DataFrame,
    metric: str = "coupling_pair",
    *,
    threshold: float | None = None,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns blocks on a circle, joined where they are coupled, with a slider over the checkpoints.

    The value of a line is the mean of both directions of a pair, so the graph is symmetric although the metric is not;
    a pair with one direction missing has no line. Width and opacity grow with it, in six steps that mean the same at
    every checkpoint, from `threshold` to the largest value of any; below `threshold` (None: a fifth of the largest)
    there is no line. Colours of blocks are by depth, clockwise from the top.

    Raises:
        ValueError: where the metric has no values per pair of different layers, or for a threshold that is not
            positive.
    """
    if threshold is not None and not threshold > 0:
        raise ValueError(f"expected a threshold above 0, got {threshold}")
    points = [
        point
        for point in select(frame, metric, **chosen)
        if point.other_layer is not None and point.layer != point.other_layer and not is_placed(point)
    ]
    if not points:
        raise ValueError(f"metric {metric!r} has no values per pair of different layers")
    points, tags = of_plainest(points, chosen.get("tags"))
    layers = sorted({n for point in points for n in (point.layer, point.other_layer) if n is not None})
    values = {(point.step, point.layer, point.other_layer): point.value for point in points}
    steps = spread(steps_of(points), FRAMES)
    edges = {step: _edges(values, step, layers) for step in steps}
    largest = max((value for step in steps for value in edges[step].values()), default=0.0)
    least = threshold if threshold is not None else max(_SHARE * largest, 1e-9)
    angles = [2 * math.pi * index / len(layers) for index in range(len(layers))]
    place = {n: (round(math.sin(a), 4), round(math.cos(a), 4)) for n, a in zip(layers, angles, strict=True)}

    def strength(value: float) -> int:
        """Of a line, from 0 on; -1: there is none."""
        span = largest - least
        return -1 if value < least else min(_LEVELS - 1, int(_LEVELS * (value - least) / span)) if span else _LEVELS - 1

    drawn = [(n, pair, v, strength(v)) for n, step in enumerate(steps) for pair, v in edges[step].items()]
    series = [_lines([(n, pair) for n, pair, _, own in drawn if own == at], place, at) for at in range(_LEVELS)]
    shown = [(n, pair, value) for n, pair, value, at in drawn if at >= 0]
    middles = [[sum(place[end][side] for end in pair) / 2 for _, pair, _ in shown] for side in (0, 1)]
    texts = [f"blocks {one} and {two}\n{value:.3g}" for _, (one, two), value in shown]
    look = {"frame": [n for n, _, _ in shown], "texts": texts, "tells_texts": True}
    series.append(Series(x=rounded(middles[0], 4), y=rounded(middles[1], 4), **look))
    few = len(layers) <= 24
    nodes = {"colors": colors_of(DEPTH, len(layers)), "mark": "circle", "size": 25 if few else 16, "tells_texts": True}
    nodes |= {"texts": [f"block {n}" for n in layers], "labels": [*map(str, layers)], "label_color": "white"}
    series.append(Series(x=[place[n][0] for n in layers], y=[place[n][1] for n in layers], **nodes))
    note = f"Lines: {least:.2g} to {largest:.2g}" if largest >= least else "No pair is coupled"
    side = Axis(ends=(-1.18, 1.18), hidden=True)
    options: dict[str, Any] = {"series": series, "frames": steps, "notes": [note], "height": 450, "square": True}
    return Chart(title=title_of(metric, tags), x=side, y=side, **options)


def _edges(
    values: Mapping[tuple[int, int | None, int | None], float], step: int, layers: list[int]
) -> dict[tuple[int, int], float]:
    """The mean of both directions of each pair that has both, weakest first: strong lines lie on top."""
    means = {}
    for index, one in enumerate(layers):
        for two in layers[index + 1 :]:
            both = [values.get((step, *pair), math.nan) for pair in ((one, two), (two, one))]
            if all(map(math.isfinite, both)):
                means[one, two] = sum(both) / 2
    return dict(sorted(means.items(), key=lambda item: item[1]))


def _lines(pairs: Sequence[tuple[int, tuple[int, int]]], place: Mapping[int, tuple[float, float]], at: int) -> Series:
    """The lines of one strength, with a gap behind each."""
    strength = (at + 1) / _LEVELS
    look = {"width": round(0.8 + 6 * strength**1.5, 2), "color": f"rgba(31,95,168,{0.12 + 0.78 * strength:.2f})"}
    x, y = ([v for _, (a, b) in pairs for v in (place[a][side], place[b][side], None)] for side in (0, 1))
    frame = [number for number, _ in pairs for _ in range(3)]
    return Series(x=x, y=y, frame=frame, name=f"strength {at + 1}", hover=False, **look)


def paths_in_plane(
    frame: pd.DataFrame,
    metric: str = "path",
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns paths (tags `token` and `axis`, 1 across and 2 up) as lines with a dot a layer, one line a token.

    Dots are coloured by layer, the first hollow and the last large; a slider goes over the checkpoints. Each has axes
    of its own, so their ranges change with it, and the shares of variance that the corner tells. `tags` chooses a
    prompt (`{"prompt": 2}`); without it the first is drawn.

    Raises:
        ValueError: where the metric has no paths.
    """
    points = [point for point in select(frame, metric, **chosen) if {"axis", "token"} <= point.tags.keys()]
    if not points:
        raise ValueError(f"metric {metric!r} has no paths of tokens in a plane")
    variant = variants_of(points)[0]
    points = matching(points, variant)
    shares = _shares(frame, metric, variant, {**chosen, "tags": None})
    values = {(p.step, p.tags["token"], p.layer, p.tags["axis"]): p.value for p in points}
    tokens = sorted({point.tags["token"] for point in points})
    layers = sorted({point.layer for point in points if point.layer is not None})
    steps = spread(steps_of(points), FRAMES)
    keys = [(n, step, token) for n, step in enumerate(steps) for token in tokens]
    # a gap behind each path, so that one series holds them all
    across, up = (
        rounded((v for _, step, t in keys for v in [*(values.get((step, t, n, axis)) for n in layers), None]), 4)
        for axis in (1, 2)
    )
    many = len(keys)
    several = len(layers) > 1
    look = {
        "frame": [number for number, _, _ in keys for _ in range(len(layers) + 1)],
        "colors": [*colors_of(DEPTH, len(layers)), None] * many,
        "sizes": [*(8 if layer == layers[-1] else 5 for layer in layers), 5] * many,
        "marks": [*("circle-open" if several and n == layers[0] else "circle" for n in layers), None] * many,
        "texts": [text for _, _, t in keys for text in [*(f"token {t}, layer {n}" for n in layers), ""]],
    }
    series = Series(x=across, y=up, color="rgba(91,103,116,0.35)", width=1.0, tells_texts=True, **look)
    size = len(tokens) * (len(layers) + 1)
    parts = [slice(n * size, (n + 1) * size) for n in range(len(steps))]
    ranges = [(_range(across[part]), _range(up[part])) for part in parts]
    return Chart(
        title=", ".join(filter(None, [title_of(metric, {}), variant_text(variant)])),
        x=Axis(title="Axis 1"),
        y=Axis(title="Axis 2"),
        series=[series],
        bar=color_bar("Layer", DEPTH, layers),
        frames=steps,
        ranges=ranges,
        notes=_notes(shares, steps),
        height=450,
    )


def _shares(
    frame: pd.DataFrame, metric: str, variant: Mapping[str, Any], chosen: Chosen
) -> dict[tuple[int, int], float]:
    """The share of variance along each axis, by step and axis, where it is recorded."""
    table: Any = frame
    name = look_up(metric).baseline
    if not (table["metric"] == name).any():
        return {}
    points: list[Point] = matching(select(frame, name, **chosen), variant)
    by_place = grouped(points, lambda point: (point.step, point.tags["axis"]))
    return {place: part[0].value for place, part in by_place.items()}


def _notes(shares: Mapping[tuple[int, int], float], steps: Sequence[int]) -> list[str]:
    """Of each checkpoint, how much of the variance lies along the axes."""
    if not shares:
        return []
    told = [[(axis, shares.get((step, axis))) for axis in (1, 2)] for step in steps]
    return [", ".join(f"axis {axis}: {share:.0%}" for axis, share in each if share is not None) for each in told]


def _range(numbers: Sequence[float | None]) -> tuple[float, float]:
    finite = [number for number in numbers if number is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    pad = 0.06 * (high - low) or 1.0
    return float(f"{low - pad:.4g}"), float(f"{high + pad:.4g}")
