"""What is left of a model whose blocks run otherwise: over the middle, loops, blocks, training, and its cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up
from lit_layers.plots.axes import AxisName, Grid, on_axis, whole_ticks
from lit_layers.plots.labels import escape, tag_text
from lit_layers.plots.layers import interval_text
from lit_layers.plots.models import short_names
from lit_layers.plots.sliders import FRAMES, add_slider, spread
from lit_layers.plots.surfaces import MISSING, VIRIDIS, colored
from lit_layers.plots.tables import Point, grouped, steps_of
from lit_layers.plots.theme import COLORS, DASHES, INK, MUTED, figure, log_ticks, rounded, translucent
from lit_layers.plots.variant_scores import (
    BASELINE,
    LOOKS,
    LOOPED,
    FrontPoint,
    Line,
    baseline_of,
    default_loops,
    front_points,
    kept_of,
    last_of,
    lines_by_block,
    lines_by_middle,
    loop_table,
    middle_of,
    middles_of,
    random_level,
    several,
    variant_points,
)

MIDDLE = "Number of middle blocks changed (M)"
_SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_TICKS = 12


def variant_curves(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    split: str | None = None,
    best_loops: bool = False,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the number M of middle blocks that are changed, one line a variant, a slider over steps.

    The mean over random orders has its interval shaded. looped_parallel is drawn at three loops, or the nearest number
    that was measured. Dashed is the full model, dotted what guessing scores.

    Args:
        tags: chooses among what is not the variant itself, such as `{"training": "full"}`.
        split: a tag such as `when`: a line for each of its values, the last one strong and the others dashed.
        best_loops: adds a line of looped_parallel at the number of loops that is best for each M.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no variant of the middle has values, or in several ways between which `tags` must choose.
    """
    options: dict[str, Any] = {"analysis": analysis, "tags": tags, "split": split, "allow_suspect": allow_suspect}
    points = variant_points(frame, metric, **options)
    ends = _ends(middles_of(points), metric)
    guess = random_level(frame, metric, analysis)

    def lines(step: int) -> list[Line]:
        own = [point for point in points if point.step == step]
        if split is None:
            return lines_by_middle(own, metric=metric, best=best_loops)
        parts = several(own, split)
        return [
            line
            for kind, part in parts.items()
            for line in lines_by_middle(part, metric=metric, kind=tag_text({split: kind}))
        ]

    def kind_of(point: Point) -> str:
        return tag_text({split: point.tags[split]}) if split is not None and split in point.tags else ""

    steps = spread(steps_of(points), FRAMES)
    by_step = {step: lines(step) for step in steps}
    kinds = dict.fromkeys((line.variant, line.is_best, line.kind) for found in by_step.values() for line in found)
    order = sorted(kinds, key=lambda kind: [*LOOKS].index(kind[0]))
    full = [*dict.fromkeys(map(kind_of, _full(points)))]
    last_kind = [line.kind for line in by_step[steps[-1]]][-1:]
    if not order:
        raise ValueError(f"metric {metric!r} has no values of variants of the middle")

    def data(step: int) -> list[dict[str, Any]]:
        own = {(line.variant, line.is_best, line.kind): line for line in by_step[step]}
        traces: list[dict[str, Any]] = []
        for kind in order:
            line = own.get(kind) or Line(kind[0], [], 0 if not kind[1] else None, kind[2])
            if kind[0] == "random" and split is None:
                traces += _band(line)
            faint = line.is_best or (split is not None and [line.kind] != last_kind)
            traces.append(_line(line, middle_of, faint=faint))
        here = {kind_of(p): p.value for p in _full(points) if p.step == step}
        for kind in full:
            name = f"Full model, {kind}" if len(full) > 1 else "Full model"
            dash = DASHES[0] if kind == full[-1] else DASHES[2]
            traces.append(_level(ends, here.get(kind, math.nan), name, INK, dash))
        if guess is not None:
            traces.append(_level(ends, guess, "Guessing", MUTED, DASHES[1]))
        return traces

    fig = figure(
        _title(metric, tags),
        data(steps[-1]),
        unit=look_up(metric).unit,
        xaxis={"title": {"text": MIDDLE}, **_middle_ticks(middles_of(points))},
        log=look_up(metric).log,
        yaxis=_range([p for found in by_step.values() for line in found for p in line.points], points, guess, metric),
        height=430,
    )
    add_slider(fig, steps, data)
    return fig


def loop_map(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the number M of middle blocks (across) and of loops (up), with a slider over the steps.

    One loop is `parallel`. Dots mark the best number of loops of each M; bright is better; grey was not measured.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where there is no looped_parallel, or as in `variant_curves`.
    """
    points = variant_points(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    higher = look_up(metric).higher_is_better
    whole = loop_table(last_of(points))
    hover = "<br>M = %{x}, %{y} loops"
    look = colored(metric, whole.values, hover)
    low, high = _limits([value for row in look["z"] for value in row if value is not None])

    def data(step: int) -> list[dict[str, Any]]:
        table = loop_table([point for point in points if point.step == step])
        place = {
            (k, m): table.values[row][column]
            for row, k in enumerate(table.loops)
            for column, m in enumerate(table.middles)
        }
        z = colored(metric, [[place.get((k, m), math.nan) for m in whole.middles] for k in whole.loops], hover)["z"]
        best = table.best(higher_is_better=higher)
        return [
            {"type": "heatmap", "z": z},
            {"type": "scatter", "x": [str(m) for m in best], "y": [str(k) for k in best.values()]},
        ]

    steps = [s for s in steps_of(points) if any(p.tags["variant"] == LOOPED for p in points if p.step == s)]
    steps = spread(steps, FRAMES)
    heat, marks = data(steps[-1])
    across, up = [str(m) for m in whole.middles], [str(k) for k in whole.loops]
    stops = VIRIDIS if higher else VIRIDIS[::-1]
    heat = {**look, **heat, "x": across, "y": up, "zmin": low, "zmax": high, "hoverongaps": False, "xgap": 1, "ygap": 1}
    heat |= {"colorscale": [[n / (len(stops) - 1), color] for n, color in enumerate(stops)]}
    marks |= {"mode": "markers", "hoverinfo": "skip"}
    marks |= {"marker": {"size": 9, "color": "white", "line": {"width": 1.2, "color": "black"}}}
    category = {"type": "category", "showgrid": False}
    fig = figure(
        f"{_title(metric, tags)} over loops",
        [heat, marks],
        xaxis={"title": {"text": "Number of middle blocks in the loop (M)"}, "categoryarray": across, **category},
        yaxis={"title": {"text": "Loops"}, "categoryarray": up, "nticks": 2 * len(up), **category},
        height=380,
        plot_bgcolor=MISSING,
        showlegend=False,
        margin={"t": 40},
    )
    add_slider(fig, steps, data)
    return fig


def block_curves(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the blocks that are skipped alone, or switched with the next one, a slider over steps.

    Dashed is the full model.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no variant of single blocks has values, or as in `variant_curves`.
    """
    points = variant_points(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    steps = spread([s for s in steps_of(points) if lines_by_block([p for p in points if p.step == s])], FRAMES)
    if not steps:
        raise ValueError(f"metric {metric!r} has no values of single blocks that are skipped or switched")
    own = [p for p in points if p.step in steps and p.layer is not None]
    names = [line.variant for line in lines_by_block([p for p in own if p.step == steps[-1]])]
    blocks = sorted({p.layer for p in own if p.layer is not None})

    def data(step: int) -> list[dict[str, Any]]:
        here = [p for p in points if p.step == step]
        lines = {line.variant: line for line in lines_by_block(here)}
        traces = [_line(lines.get(name) or Line(name, []), lambda p: p.layer or 0) for name in names]
        full = baseline_of(here)
        return [
            *traces,
            _level((blocks[0], blocks[-1]), full.value if full else math.nan, "Full model", INK, DASHES[0]),
        ]

    fig = figure(
        _title(metric, tags),
        data(steps[-1]),
        unit=look_up(metric).unit,
        xaxis={"title": {"text": "Block"}, **whole_ticks(blocks[0], blocks[-1])},
        log=look_up(metric).log,
        yaxis=_range(own, points, None, metric),
        height=400,
    )
    add_slider(fig, steps, data)
    return fig


def variants_over_training(
    frame: pd.DataFrame,
    metric: str,
    *,
    middle: int,
    kept: bool = False,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    axis: AxisName = "step",
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over training, one line a variant of so many middle blocks; the untrained model stands apart.

    Dashed is the full model. With `kept` values are shares of the full model's at the same step.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no variant of so many middle blocks has values at a step, or as in `variant_curves`.
    """
    table: Any = frame
    stepped = table[table["step"].notna()]
    points = variant_points(stepped, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    known = middles_of(points)
    if middle not in known:
        raise ValueError(
            f"metric {metric!r} has no variant of {middle} middle blocks; it has: {', '.join(map(str, known))}"
        )
    points = kept_of(points) if kept else points
    tokens_of = {point.step: point.tokens for point in points}
    steps = steps_of(points)
    parts = [[s for s in steps if s > 0], [s for s in steps if s <= 0]]
    grids = [Grid.of(part, tokens_of) for part in parts]
    traces: list[dict[str, Any]] = []
    for line in lines_over_steps(points, middle):
        color, symbol, _ = LOOKS[line.variant]
        by_step = {p.step: p for p in line.points}
        name = escape(line.name)
        for number, grid in enumerate(grids):
            found = [by_step.get(step) for step in grid.steps]
            if not grid.steps:
                continue
            is_full = line.variant == BASELINE
            trained = number == 0
            look = {"color": color, "width": 2, "dash": DASHES[0] if is_full else "solid"}
            mode = "lines" if is_full and len(grid.steps) > 1 else "markers" if not trained else "lines+markers"
            size = (9 if is_full else 6) + (0 if trained else 2)
            traces.append(
                {
                    "y": rounded(p.value if p else math.nan for p in found),
                    "text": [interval_text(p) if p else "" for p in found],
                    "name": name,
                    "legendgroup": name,
                    "showlegend": trained or not grids[0].steps,
                    "mode": mode,
                    "line": look,
                    "marker": {"size": size, "color": color, "symbol": symbol, "line": _edge(symbol, color)},
                    "hovertemplate": "%{y:.4g}%{text}<br>%{customdata[0]}<extra>" + name + "</extra>",
                    "meta": number,
                }
            )
    layout = on_axis(traces, grids, axis)
    unit = "share of the full model's" if kept else look_up(metric).unit
    title = f"{look_up(metric).title}{' kept' if kept else ''}, M = {middle}"
    return figure(title, traces, unit=unit, log=look_up(metric).log, height=400, **layout)


def lines_over_steps(points: Sequence[Point], middle: int) -> list[Line]:
    """Returns a line for each variant of so many middle blocks over the steps, and the full model's."""
    own = [p for p in points if p.tags.get("middle") == middle or p.tags["variant"] == BASELINE]
    loops = default_loops(own)
    found = []
    for name in LOOKS:
        part = [p for p in own if p.tags["variant"] == name and (name != LOOPED or p.tags.get("loops") == loops)]
        if part:
            line = Line(name, sorted(part, key=lambda p: p.step), loops if name == LOOPED else None)
            found.append(line)
    return found


def quality_front(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    cost: str = "relative_latency",
    cost_analysis: str = "intervene/speed",
    cost_tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns the quality of each variant over what it costs, at the last checkpoint; the line is the Pareto front.

    On the front are the variants that no other beats: none is as good or better and costs as little or less, one of the
    two strictly. A star is the full model. Variants without both numbers are left out.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no variant has both, or as in `variant_curves`.
    """
    found = read_front(
        frame,
        metric,
        analysis=analysis,
        tags=tags,
        cost=cost,
        cost_analysis=cost_analysis,
        cost_tags=cost_tags,
        allow_suspect=allow_suspect,
    )
    traces: list[dict[str, Any]] = []
    best = sorted((p for p in found if p.is_best), key=lambda p: p.cost)
    line = {"color": MUTED, "width": 1.6, "dash": DASHES[1], "shape": "hv"}
    traces.append(
        {
            "x": rounded(p.cost for p in best),
            "y": rounded(p.quality for p in best),
            "mode": "lines",
            "name": "Pareto front",
            "line": line,
            "hoverinfo": "skip",
        }
    )
    labels = labels_of(best, found)
    order = [*list(LOOKS)[1:], BASELINE]  # the full model above what lies at its place
    for variant, part in sorted(grouped(found, lambda p: p.variant).items(), key=lambda pair: order.index(pair[0])):
        color, symbol, _ = LOOKS[variant]
        is_full = variant == BASELINE
        name = "Full model" if is_full else Line(variant, [], 0).name.split(", k")[0]
        marker = {"color": color, "size": 15 if is_full else 8, "symbol": "star" if is_full else symbol}
        if variant == LOOPED:
            marker["symbol"] = "hexagram"
        traces.append(
            {
                "x": rounded(p.cost for p in part),
                "y": rounded(p.quality for p in part),
                "text": [labels.get(p.name, "") for p in part],
                "hovertext": [escape(p.name) + ("<br>on the front" if p.is_best else "") for p in part],
                "textposition": "top center",
                "textfont": {"size": 10, "color": INK},
                "mode": "markers+text",
                "name": name,
                "marker": {**marker, "opacity": 1.0, "line": {"width": 0.6, "color": "white"}},
                "hovertemplate": "%{y:.4g} at %{x:.4g}<br>%{hovertext}<extra></extra>",
            }
        )
    return figure(
        f"{_title(metric, tags)} against {look_up(cost).title.lower()}",
        traces,
        unit=look_up(metric).with_unit,
        log=look_up(metric).log,
        xaxis={"title": {"text": look_up(cost).with_unit}},
        height=460,
    )


def read_front(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    cost: str = "relative_latency",
    cost_analysis: str = "intervene/speed",
    cost_tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> list[FrontPoint]:
    """Returns what `quality_front` draws."""
    quality = variant_points(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    costs = variant_points(frame, cost, analysis=cost_analysis, tags=cost_tags, allow_suspect=allow_suspect)
    return front_points(last_of(quality), last_of(costs), higher=look_up(metric).higher_is_better)


def labels_of(best: Sequence[FrontPoint], found: Sequence[FrontPoint]) -> dict[str, str]:
    """Returns the texts beside the points of the front, by name, without those too close to one that has a text."""
    (left, right), (low, high) = (
        (min(numbers), max(numbers)) for numbers in ([p.cost for p in found], [p.quality for p in found])
    )
    chosen = [point for point in found if point.variant == BASELINE]  # its star needs no text, nor what lies under it
    for point in sorted(best, key=lambda p: -p.cost):
        far = all(
            abs(point.cost - other.cost) > 0.07 * (right - left or 1)
            or abs(point.quality - other.quality) > 0.07 * (high - low or 1)
            for other in chosen
        )
        if point.short and far:
            chosen.append(point)
    return {point.name: point.short for point in chosen if point.variant != BASELINE}


def models_by_middle(
    frame: pd.DataFrame,
    metric: str,
    *,
    variant: str,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric of one variant over the number M of middle blocks (or over blocks), a line for each model.

    Dashed in a model's colour is the full model. Each model's last checkpoint is drawn.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no model has values of this variant, or as in `variant_curves`.
    """
    table: Any = frame
    rows = table[table["metric"] == metric]
    rows = rows if analysis is None else rows[rows["analysis"] == analysis]
    names = short_names([*rows["run"].unique()])
    traces: list[dict[str, Any]] = []
    middles: set[int] = set()
    loops: set[int] = set()
    across = "M"
    for index, (run, name) in enumerate(names.items()):
        points = last_of(variant_points(rows[rows["run"] == run], metric, tags=tags, allow_suspect=allow_suspect))
        found = [p for p in (*lines_by_middle(points, metric=metric), *lines_by_block(points)) if p.variant == variant]
        if not found:
            continue
        (line,) = found
        across = "block" if line.points[0].layer is not None else "M"
        places = [(p.layer or 0) if across == "block" else middle_of(p) for p in line.points]
        middles |= {*places}
        loops |= {line.loops} if line.loops is not None else set()
        color, symbol = COLORS[index % len(COLORS)], _SYMBOLS[index // len(COLORS) % len(_SYMBOLS)]
        own = {"x": places, "y": rounded(p.value for p in line.points), "mode": "lines+markers", "name": escape(name)}
        own |= {"line": {"color": color, "width": 2}, "marker": {"size": 6, "symbol": symbol, "color": color}}
        own |= {"legendgroup": escape(name), "text": [interval_text(p) for p in line.points]}
        told = f", k = {line.loops}" if line.loops is not None else ""
        traces.append(
            {**own, "hovertemplate": f"%{{y:.4g}}%{{text}}<br>{across} = %{{x}}{told}<extra>{escape(name)}</extra>"}
        )
        if (full := baseline_of(points)) is not None:
            level = _level((min(places), max(places)), full.value, f"{name}, full model", color, DASHES[0])
            traces.append({**level, "legendgroup": escape(name), "showlegend": False})
    if not traces:
        raise ValueError(f"metric {metric!r} has no values of the variant {variant!r}")
    told = Line(variant, [], 0).name.split(", k")[0] + (f", k = {loops.pop()}" if len(loops) == 1 else "")
    titles = {"block": "Block", "M": MIDDLE}
    return figure(
        ", ".join(filter(None, [look_up(metric).with_unit, told])),
        traces,
        unit=look_up(metric).unit,
        log=look_up(metric).log,
        xaxis={"title": {"text": titles[across]}, **_middle_ticks(sorted(middles))},
        showlegend=True,
        height=400,
    )


def schedule_scores(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric of schedules of one's own as dots, a row each, with 95% intervals, at the last checkpoint.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where there are none, or as in `variant_curves`.
    """
    points = last_of(variant_points(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect))
    own = [p for p in points if "schedule" in p.tags]
    if not own:
        raise ValueError(f"metric {metric!r} has no values of schedules of one's own")
    names = [f"{number}. {p.tags['schedule']}" for number, p in enumerate(own, 1)]
    texts = {name: escape(name if len(name) <= 46 else f"{name[:44]} …") for name in names}
    bars = [(p.high - p.value, p.value - p.low) if interval_text(p) else (0.0, 0.0) for p in own]
    marks = {
        "x": rounded(p.value for p in own),
        "y": names,
        "mode": "markers",
        "name": "Schedule",
        "marker": {"size": 8, "color": LOOKS["custom"][0]},
        "error_x": {"array": [up for up, _ in bars], "arrayminus": [down for _, down in bars], "symmetric": False},
        "hovertemplate": "%{x:.4g}<br>%{y}<extra></extra>",
    }
    traces: list[dict[str, Any]] = [marks]
    if (full := baseline_of(points)) is not None:
        line = {"color": INK, "width": 1.6, "dash": DASHES[0]}
        level = {"x": rounded([full.value] * len(names)), "y": names, "mode": "lines+markers", "line": line}
        mark = {"size": 16, "symbol": "line-ns", "line": {"width": 1.6, "color": INK}}
        traces.append({**level, "marker": mark, "name": "Full model", "hoverinfo": "x+name"})
    return figure(
        _title(metric, tags),
        traces,
        xaxis={"title": {"text": look_up(metric).with_unit}, **_log_axis(metric, [p.value for p in own])},
        yaxis={
            "type": "category",
            "autorange": "reversed",
            "tickvals": names,
            "ticktext": [*texts.values()],
            "nticks": len(names),
        },
        showlegend=len(traces) > 1,
        height=140 + 26 * len(own),
    )


# ------------------------------------------------------------------------------------------------ parts


def _title(metric: str, tags: Mapping[str, Any] | None) -> str:
    known = {name: value for name, value in (tags or {}).items() if value is not None}
    return ", ".join(filter(None, [look_up(metric).with_unit, tag_text(known)]))


def _full(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.tags["variant"] == BASELINE]


def _line(line: Line, place: Callable[[Point], int], *, faint: bool = False) -> dict[str, Any]:
    color, symbol, _ = LOOKS[line.variant]
    name = escape(line.name)
    texts = [interval_text(p) + (f"<br>k = {p.tags['loops']}" if line.is_best else "") for p in line.points]
    return {
        "type": "scatter",
        "x": [place(p) for p in line.points],
        "y": rounded(p.value for p in line.points),
        "text": texts,
        "name": name,
        "legendgroup": name,
        "mode": "lines+markers",
        "line": {"color": color, "width": 1.4 if faint else 2, "dash": DASHES[1] if faint else "solid"},
        "marker": {
            "size": 9 if symbol == "star" and not faint else 7,
            "symbol": f"{symbol}-open" if faint else symbol,
            "color": color,
            "line": _edge(symbol, color),
        },
        "hovertemplate": "%{y:.4g}%{text}<br>at %{x}<extra>" + name + "</extra>",
    }


def _edge(symbol: str, color: str) -> dict[str, Any]:
    """Marks that are lines only have their colour in their edge."""
    return {"width": 1.5 if symbol.startswith("line") else 0.8, "color": color}


def _band(line: Line) -> list[dict[str, Any]]:
    """The interval of a line, as two edges with the room between them filled; without points both are empty."""
    known = [p for p in line.points if math.isfinite(p.low) and math.isfinite(p.high)]
    edge = {"type": "scatter", "x": [middle_of(p) for p in known], "mode": "lines", "line": {"width": 0}}
    edge |= {"hoverinfo": "skip", "showlegend": False, "legendgroup": escape(line.name)}
    fill = {"fill": "tonexty", "fillcolor": translucent(LOOKS[line.variant][0], 0.16)}
    low, high = rounded(p.low for p in known), rounded(p.high for p in known)
    return [{**edge, "y": low}, {**edge, "y": high, **fill}]


def _level(ends: Sequence[int], value: float, name: str, color: str, dash: str) -> dict[str, Any]:
    line = {"color": color, "width": 1.6, "dash": dash}
    level = {"type": "scatter", "x": [*ends], "y": rounded([value] * 2), "mode": "lines", "name": escape(name)}
    return {**level, "line": line, "hovertemplate": "%{y:.4g}<extra>" + escape(name) + "</extra>"}


def _ends(middles: Sequence[int], metric: str) -> tuple[int, int]:
    if not middles:
        raise ValueError(f"metric {metric!r} has no values of variants of the middle")
    return middles[0], middles[-1]


def _middle_ticks(middles: list[int]) -> dict[str, Any]:
    """At numbers that were measured: models of an even number of blocks have odd middles only."""
    return {"tickvals": spread(middles, _TICKS)}


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The range of the colours; of equal values a little around them."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _log_axis(metric: str, values: Sequence[float]) -> dict[str, Any]:
    """Of values across, where they lie decades apart."""
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    return {"type": "log", **log_ticks(min(logs), max(logs))} if look_up(metric).log and logs else {}


def _range(drawn: Sequence[Point], points: Sequence[Point], guess: float | None, metric: str) -> dict[str, Any]:
    """The same at every checkpoint, where there are several; of a log axis in powers of ten."""
    if len(steps_of(points)) < 2:
        return {}
    values = [end for p in (*drawn, *_full(points)) for end in (p.value, p.low, p.high) if math.isfinite(end)]
    values += [] if guess is None else [guess]
    if look_up(metric).log:
        values = [math.log10(value) for value in values if value > 0]
    if not values:
        return {}
    pad = 0.05 * (max(values) - min(values)) or 0.5
    return {"range": [float(f"{end:.4g}") for end in (min(values) - pad, max(values) + pad)]}
