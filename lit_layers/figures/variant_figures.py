"""What is left of a model whose blocks run otherwise: over the middle, loops, blocks, training, and its cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures.axes import Axis, AxisName, layer_axis
from lit_layers.figures.chart import Cells, Chart, Series
from lit_layers.figures.labels import tag_text
from lit_layers.figures.maps import colored, tabled
from lit_layers.figures.models import color_of, short_names, symbol_of
from lit_layers.figures.profiles import FRAMES, fixed_ends, level, series_of, value_axis
from lit_layers.figures.tables import Chosen, Point, grouped, steps_of, title_of
from lit_layers.figures.theme import INK, MISSING, rounded, spread
from lit_layers.figures.training import Curves
from lit_layers.figures.variant_scores import (
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
from lit_layers.metrics import look_up

MIDDLE = "Number of middle blocks changed (M)"
_TICKS = 12
_Key = tuple[str, bool, str]  # which line it is: variant, whether at the best loops, kind


def variant_curves(
    frame: pd.DataFrame,
    metric: str,
    *,
    split: str | None = None,
    best_loops: bool = False,
    **chosen: Unpack[Chosen],
) -> Chart:
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
    points = variant_points(frame, metric, split=split, **chosen)
    middles = middles_of(points)

    def lines(step: int) -> list[Line]:
        here = [point for point in points if point.step == step]
        if split is None:
            return lines_by_middle(here, metric=metric, best=best_loops)
        parts = several(here, split).items()
        return [
            line for kind, part in parts for line in lines_by_middle(part, metric=metric, kind=tag_text({split: kind}))
        ]

    def kind_of(point: Point) -> str:
        return tag_text({split: point.tags[split]}) if split is not None and split in point.tags else ""

    steps = spread(steps_of(points), FRAMES)
    by_step = [lines(step) for step in steps]
    keys = sorted({_key(line): line for part in by_step for line in part}, key=lambda key: [*LOOKS].index(key[0]))
    if not keys or not middles:
        raise ValueError(f"metric {metric!r} has no values of variants of the middle")
    last_kind = by_step[-1][-1].kind if by_step[-1] else ""
    series = []
    for key in keys:
        faint = key[1] or (split is not None and key[2] != last_kind)
        found = [(n, line) for n, part in enumerate(by_step) for line in part if _key(line) == key]
        band = key[0] == "random" and split is None
        series.append(_line(found, middle_of, faint=faint, band=band))
    full = [point for point in points if point.tags["variant"] == BASELINE]
    kinds = [*dict.fromkeys(map(kind_of, full))]
    for kind in kinds:
        values = [next((p.value for p in full if p.step == step and kind_of(p) == kind), math.nan) for step in steps]
        name = f"Full model, {kind}" if len(kinds) > 1 else "Full model"
        series.append(_full_model(middles, values, name=name, dash="dash" if kind == kinds[-1] else "dashdot"))
    guess = random_level(frame, metric, chosen.get("analysis"))
    if guess is not None:
        series.append(level([middles[0], middles[-1]], guess, "Guessing", dash="dot"))
    drawn = [p for part in by_step for line in part for p in line.points]
    return Chart(
        title=_title(metric, chosen),
        x=_middle_axis(middles),
        y=value_axis(metric, ends=_ends([*drawn, *full], points, guess, metric)),
        series=series,
        frames=steps,
        place="at {x}",
        height=430,
    )


def block_curves(
    frame: pd.DataFrame,
    metric: str,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over the blocks that are skipped alone, or switched with the next one, a slider over steps.

    Dashed is the full model.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no variant of single blocks has values, or as in `variant_curves`.
    """
    points = variant_points(frame, metric, **chosen)
    steps = spread([s for s in steps_of(points) if lines_by_block([p for p in points if p.step == s])], FRAMES)
    if not steps:
        raise ValueError(f"metric {metric!r} has no values of single blocks that are skipped or switched")
    here = [[p for p in points if p.step == step] for step in steps]
    by_step = [lines_by_block(part) for part in here]
    blocks = sorted({p.layer for part in by_step for line in part for p in line.points if p.layer is not None})
    series = []
    for name in (line.variant for line in by_step[-1]):
        found = [(n, line) for n, part in enumerate(by_step) for line in part if line.variant == name]
        series.append(_line(found, lambda p: p.layer or 0))
    full = [baseline_of(part) for part in here]
    series.append(_full_model(blocks, [p.value if p else math.nan for p in full]))
    drawn = [p for part in here for p in part if p.layer is not None or p.tags["variant"] == BASELINE]
    return Chart(
        title=_title(metric, chosen),
        x=layer_axis("block"),
        y=value_axis(metric, ends=_ends(drawn, points, None, metric)),
        series=series,
        frames=steps,
        place="block {x}",
        height=400,
    )


def loop_map(
    frame: pd.DataFrame,
    metric: str,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over the number M of middle blocks (across) and of loops (up), with a slider over the steps.

    One loop is `parallel`. Dots mark the best number of loops of each M; bright is better; grey was not measured.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where there is no looped_parallel, or as in `variant_curves`.
    """
    points = variant_points(frame, metric, **chosen)
    higher = look_up(metric).higher_is_better
    whole = loop_table(last_of(points))
    with_loops = {p.step for p in points if p.tags["variant"] == LOOPED}
    steps = spread([step for step in steps_of(points) if step in with_loops], FRAMES)
    tables = [loop_table([point for point in points if point.step == step]) for step in steps]
    values = [
        tabled({(k, m): row[c] for k, row in zip(t.loops, t.values, strict=True) for c, m in enumerate(t.middles)},
               whole.loops, whole.middles, 4)
        for t in tables
    ]  # fmt: skip
    best = [(n, m, k) for n, t in enumerate(tables) for m, k in t.best(higher_is_better=higher).items()]
    dots = Series(
        x=[m for _, m, _ in best],
        y=[k for _, _, k in best],
        frame=[n for n, _, _ in best],
        mark="circle-open",
        size=9,
        color="black",
        hover=False,
    )
    colors = colored(metric, whole.values, reverse=not higher)
    cells = Cells(values=values, rows=whole.loops, columns=whole.middles, hover="M = {x}, {y} loops", **colors)
    across, up = (
        {key: str(key) for key in spread(keys, most)} for keys, most in ((whole.middles, 12), (whole.loops, 20))
    )
    return Chart(
        title=f"{_title(metric, chosen)} over loops",
        x=Axis(title="Number of middle blocks in the loop (M)", keys=whole.middles, labels=across, grid=False),
        y=Axis(title="Loops", keys=[*reversed(whole.loops)], labels=up, grid=False),
        cells=cells,
        series=[dots],
        frames=steps,
        height=380,
        background=MISSING,
    )


def variants_over_training(
    frame: pd.DataFrame,
    metric: str,
    *,
    middle: int,
    kept: bool = False,
    axis: AxisName = "step",
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over training, one line a variant of so many middle blocks; the untrained model stands apart.

    Dashed is the full model. With `kept` values are shares of the full model's at the same step.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no variant of so many middle blocks has values at a step, or as in `variant_curves`.
    """
    table: Any = frame
    stepped = table[table["step"].notna()]
    points = variant_points(stepped, metric, **chosen)
    recorded = middles_of(points)
    if middle not in recorded:
        raise ValueError(
            f"metric {metric!r} has no variant of {middle} middle blocks; it has: {', '.join(map(str, recorded))}"
        )
    points = kept_of(points) if kept else points
    curves = Curves(points)
    for line in lines_over_steps(points, middle):
        color, symbol = LOOKS[line.variant]
        is_full = line.variant == BASELINE
        look: dict[str, Any] = {"color": color, "width": 2.0, "dash": "dash" if is_full else "", "interval": ""}
        look |= {"mark": "" if is_full and len(curves.training.steps) > 1 else symbol, "apart": symbol}
        curves.along(line.points, name=line.name, size=9 if is_full else 6, legend=True, **look)
    unit = "share of the full model's" if kept else look_up(metric).unit
    title = f"{look_up(metric).title}{' kept' if kept else ''}, M = {middle}"
    return curves.chart(title, Axis(title=unit, log=look_up(metric).log), axis, height=400)


def lines_over_steps(points: Sequence[Point], middle: int) -> list[Line]:
    """Returns a line for each variant of so many middle blocks over the steps, and the full model's."""
    own = [p for p in points if p.tags.get("middle") == middle or p.tags["variant"] == BASELINE]
    loops = default_loops(own)
    lines = []
    for name in LOOKS:
        part = [p for p in own if p.tags["variant"] == name and (name != LOOPED or p.tags.get("loops") == loops)]
        if part:
            lines.append(Line(name, sorted(part, key=lambda p: p.step), loops if name == LOOPED else None))
    return lines


def quality_front(
    frame: pd.DataFrame,
    metric: str,
    *,
    cost: str = "relative_latency",
    cost_analysis: str = "intervene/speed",
    cost_tags: Mapping[str, Any] | None = None,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns the quality of each variant over what it costs, at the last checkpoint; the line is the Pareto front.

    On the front are the variants that no other beats: none is as good or better and costs as little or less, one of the
    two strictly. A star is the full model. Variants without both numbers are left out.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no variant has both, or as in `variant_curves`.
    """
    quality = variant_points(frame, metric, **chosen)
    costs = variant_points(frame, cost, **{**chosen, "analysis": cost_analysis, "tags": cost_tags})
    points = front_points(last_of(quality), last_of(costs), higher=look_up(metric).higher_is_better)
    best = sorted((p for p in points if p.is_best), key=lambda p: p.cost)
    x, y = rounded(p.cost for p in best), rounded(p.quality for p in best)
    series = [Series(x=x, y=y, name="Pareto front", dash="dot", width=1.6, steps=True, legend=True, hover=False)]
    texts = labels_of(best, points)
    order = [*list(LOOKS)[1:], BASELINE]  # the full model above what lies at its place
    for variant, part in sorted(grouped(points, lambda p: p.variant).items(), key=lambda pair: order.index(pair[0])):
        color, symbol = LOOKS[variant]
        mark = {BASELINE: "star", LOOPED: "hexagram"}.get(variant, symbol)
        look = {"name": _name_of(variant), "color": color, "mark": mark, "size": 15 if variant == BASELINE else 8}
        look |= {"labels": [texts.get(p.name, "") for p in part], "sides": [(0, 1)] * len(part), "legend": True}
        told = [f"{p.quality:.4g} at {p.cost:.4g}\n{p.name}" + ("\non the front" if p.is_best else "") for p in part]
        x, y = rounded(p.cost for p in part), rounded(p.quality for p in part)
        series.append(Series(x=x, y=y, texts=told, tells_texts=True, **look))
    return Chart(
        title=f"{_title(metric, chosen)} against {look_up(cost).title.lower()}",
        x=Axis(title=look_up(cost).with_unit),
        y=Axis(title=look_up(metric).with_unit, log=look_up(metric).log),
        series=series,
        height=460,
    )


def labels_of(best: Sequence[FrontPoint], points: Sequence[FrontPoint]) -> dict[str, str]:
    """Returns the texts beside the points of the front, by name, without those too close to one that has a text."""
    (left, right), (low, high) = (
        (min(numbers), max(numbers)) for numbers in ([p.cost for p in points], [p.quality for p in points])
    )
    chosen = [point for point in points if point.variant == BASELINE]  # its star needs no text, nor what lies under it
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
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric of one variant over the number M of middle blocks (or over blocks), a line for each model.

    Dashed in a model's colour is the full model. Each model's last checkpoint is drawn.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no model has values of this variant, or as in `variant_curves`.
    """
    table: Any = frame
    rows = table[table["metric"] == metric]
    if (analysis := chosen.get("analysis")) is not None:
        rows = rows[rows["analysis"] == analysis]
    series: list[Series] = []
    middles: set[int] = set()
    loops: set[int] = set()
    by_block = False
    for index, (run, name) in enumerate(short_names([*rows["run"].unique()]).items()):
        points = last_of(variant_points(rows[rows["run"] == run], metric, **chosen))
        lines = [p for p in (*lines_by_middle(points, metric=metric), *lines_by_block(points)) if p.variant == variant]
        if not lines:
            continue
        (line,) = lines
        by_block = line.points[0].layer is not None
        places = [(p.layer or 0) if by_block else middle_of(p) for p in line.points]
        middles |= {*places}
        loops |= {line.loops} if line.loops is not None else set()
        look: dict[str, Any] = {"name": name, "color": color_of(index), "legend": True, "interval": ""}
        told = [f"k = {line.loops}"] * len(places) if line.loops is not None else []
        series.append(series_of(line.points, places, width=2.0, mark=symbol_of(index), size=6, texts=told, **look))
        if (full := baseline_of(points)) is not None:
            ends = [min(places), max(places)]
            series.append(level(ends, full.value, f"{name}, full model", color=color_of(index), legend=False))
    if not series:
        raise ValueError(f"metric {metric!r} has no values of the variant {variant!r}")
    told = _name_of(variant) + (f", k = {loops.pop()}" if len(loops) == 1 else "")
    return Chart(
        title=", ".join(filter(None, [look_up(metric).with_unit, told])),
        x=layer_axis("block") if by_block else _middle_axis(sorted(middles)),
        y=value_axis(metric),
        series=series,
        place="block {x}" if by_block else "M = {x}",
        height=400,
    )


def schedule_scores(
    frame: pd.DataFrame,
    metric: str,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric of schedules of one's own as dots, a row each, with 95% intervals, at the last checkpoint.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where there are none, or as in `variant_curves`.
    """
    points = last_of(variant_points(frame, metric, **chosen))
    own = [p for p in points if "schedule" in p.tags]
    if not own:
        raise ValueError(f"metric {metric!r} has no values of schedules of one's own")
    names = [f"{number}. {p.tags['schedule']}" for number, p in enumerate(own, 1)]
    full = baseline_of(points)
    look = {"name": "Schedule", "mark": "circle", "size": 8, "color": LOOKS["custom"][0], "interval": "bars"}
    series = [series_of(own, names, legend=full is not None, **look)]
    if full is not None:
        series.append(level(names, full.value, "Full model", color=INK, mark="line-ns", size=14))
    texts = {name: name if len(name) <= 46 else f"{name[:44]} …" for name in names}
    return Chart(
        title=_title(metric, chosen),
        x=Axis(keys=names, labels=texts, grid=False),
        y=Axis(title=look_up(metric).with_unit, log=look_up(metric).log),
        series=series,
        horizontal=True,
        place="{x}",
        height=140 + 26 * len(own),
    )


# ------------------------------------------------------------------------------------------------ parts


def _title(metric: str, chosen: Chosen) -> str:
    return title_of(metric, chosen.get("tags") or {})


def _key(line: Line) -> _Key:
    return line.variant, line.is_best, line.kind


def _name_of(variant: str) -> str:
    return "Full model" if variant == BASELINE else Line(variant, [], 0).name.split(", k")[0]


def _line(
    found: Sequence[tuple[int, Line]], place: Callable[[Point], int], *, faint: bool = False, band: bool = False
) -> Series:
    """A variant at all places of the slider."""
    line = found[0][1]
    color, symbol = LOOKS[line.variant]
    points = [point for _, each in found for point in each.points]
    look: dict[str, Any] = {"frame": [n for n, each in found for _ in each.points], "interval": "band" if band else ""}
    look |= {"width": 1.4, "dash": "dot", "mark": f"{symbol}-open"} if faint else {"width": 2.0, "mark": symbol}
    look["texts"] = [f"k = {point.tags['loops']}" for point in points] if line.is_best else ()
    look |= {"size": 9 if symbol == "star" and not faint else 7, "legend": True}
    return series_of(points, [place(point) for point in points], name=line.name, color=color, **look)


def _full_model(
    places: Sequence[int], values: Sequence[float], *, name: str = "Full model", dash: str = "dash"
) -> Series:
    """The full model's value at each place of the slider."""
    ends = [places[0], places[-1]]
    frame = [number for number in range(len(values)) for _ in ends]
    look = {"color": INK, "dash": dash, "width": 1.6, "legend": True}
    return Series(x=ends * len(values), y=rounded(v for v in values for _ in ends), frame=frame, name=name, **look)


def _middle_axis(middles: Sequence[int]) -> Axis:
    """Labels at numbers that were measured: models of an even number of blocks have odd middles only."""
    return Axis(title=MIDDLE, labels={m: str(m) for m in spread(middles, _TICKS)})


def _ends(
    drawn: Sequence[Point], points: Sequence[Point], guess: float | None, metric: str
) -> tuple[float, float] | None:
    """The same at every checkpoint, where there are several."""
    if len(steps_of(points)) < 2:
        return None
    values = [end for p in drawn for end in (p.value, p.low, p.high)] + ([] if guess is None else [guess])
    return fixed_ends(values, log=look_up(metric).log)
