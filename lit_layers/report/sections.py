"""Which figures a page shows: each metric of each analysis in the shapes that its rows allow, of a run or of models."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures import Chart
from lit_layers.figures.labels import analysis_note, pair_text
from lit_layers.figures.maps import has_surface
from lit_layers.figures.models import short_names
from lit_layers.figures.tables import (
    CATEGORY,
    TRAIN_ROWS,
    Point,
    choice_text,
    is_on_axes,
    is_placed,
    matching,
    plainest,
    select,
    variant_text,
    variants_of,
)
from lit_layers.figures.task_means import BASES
from lit_layers.metrics import is_in, look_up, rank, sentence
from lit_layers.report.facts import RunData

_TOGETHER = 6  # variants of a metric of the whole model that one figure still shows

logger = logging.getLogger(__name__)
Block = dict[str, Any]  # the figures of a metric, with what stands above them
Captioned = tuple[str, Callable[[], Chart]]  # a caption, and what draws the figure below it


def sections(
    frame: pd.DataFrame,
    of_metric: Callable[[pd.DataFrame, str, str], Block | None],
    whole: Callable[[pd.DataFrame, str], tuple[list[Block], Sequence[str]]] = lambda part, analysis: ([], ()),
) -> list[dict[str, Any]]:
    """Returns a section for each analysis, with what `of_metric` makes of its rows for each metric, where it makes any.

    First comes what `whole` makes of all rows of an analysis; it says which metrics are in that.
    """
    found = []
    table: Any = frame
    for analysis in dict.fromkeys(table["analysis"]):
        part = table[table["analysis"] == analysis]
        metrics = sorted((name for name in dict.fromkeys(part["metric"]) if not look_up(name).unlisted), key=rank)
        blocks, shown = whole(part, analysis)
        elsewhere = {*shown, *(look_up(metric).baseline for metric in metrics)}
        blocks += [of_metric(part, metric, analysis) for metric in metrics if metric not in elsewhere]
        if blocks := [drawn for drawn in blocks if drawn is not None]:
            title, note = sentence(analysis), analysis_note(analysis)
            found.append({"name": analysis, "title": title, "note": note, "metrics": balanced(blocks)})
    return found


def training(run: RunData) -> list[dict[str, Any]]:
    """Returns the figures of training: the loss, then what else its rows hold."""
    known = dict.fromkeys(name for row in run.scalars for name in row if name not in ("step", "tokens"))
    unigram = run.about.get("data", {}).get("unigram_entropy")
    references = {"Unigram entropy": unigram} if unigram is not None else {}
    draw = partial(plots.training_curves, run.scalars, tokens_per_step=run.tokens_per_step)
    blocks = []
    losses = [name for name in known if name.split("/")[-1] == "loss"]
    if losses:
        note = "Dashed: what a model knows that only counts tokens." if references else ""
        blocks.append(block("Loss (nats)", note, [("", [("", partial(draw, references=references))])], wide=True))
    for name in sorted((name for name in known if name not in losses), key=rank):
        figures = [("", partial(draw, names=[name]))]
        blocks.append(block(look_up(name).with_unit, look_up(name).note, [("", figures)]))
    return balanced(blocks)


def block(
    title: str, note: str, choices: Iterable[tuple[str, Iterable[Captioned]]], *, wide: bool | None = None
) -> Block:
    """Returns the figures of a metric, drawn, with a choice of texts; several figures are wide."""
    shown = [{"text": text, "figures": drawn(figures)} for text, figures in choices]
    return {
        "title": title,
        "note": note,
        "wide": len(shown[0]["figures"]) > 1 if wide is None else wide,
        "choices": shown,
    }


def drawn(figures: Iterable[Captioned]) -> list[dict[str, Any]]:
    """Returns the figures with their captions; in the place of one that cannot be drawn stands why."""
    found = []
    for caption, draw in figures:
        try:
            found.append({"caption": caption, "chart": draw(), "problem": ""})
        except Exception as error:  # whatever one figure stumbles over, the reader gets the others
            logger.debug("a figure could not be drawn", exc_info=True)
            reason = f"This figure could not be drawn: {type(error).__name__}: {' '.join(str(error).split())}"
            found.append({"caption": caption, "chart": None, "problem": reason})
    return found


def metric_block(part: pd.DataFrame, metric: str, analysis: str) -> Block:
    """Returns a metric of a run in all the shapes that it has, one choice a variant."""
    table: Any = part
    part = table[table["metric"].isin([metric, look_up(metric).baseline])]  # searched again for each figure
    points = select(part, metric, analysis=analysis)
    choices = [
        (text, _figures(part, metric, points, {"analysis": analysis, **options}))
        for options, text in choices_of(points)
    ]
    return block(look_up(metric).with_unit, look_up(metric).note, choices)


def _figures(part: pd.DataFrame, metric: str, points: list[Point], options: dict[str, Any]) -> Iterator[Captioned]:
    """The figures of one choice, with their captions."""
    yield from pictures(part, metric, points, options)
    alone = [point for point in points if point.other_layer is None and not is_placed(point)]
    if alone and "layer" not in options:
        baselines = [name for name in (look_up(metric).baseline,) if name in set(part["metric"])]
        yield from _curves(part, metric, alone, {**options, "baselines": baselines})
    yield from lists(part, metric, points, options)


def pictures(
    part: pd.DataFrame, metric: str, points: list[Point], options: dict[str, Any], *, has_graph: bool | None = None
) -> Iterator[Captioned]:
    """Yields the maps of one choice, and the graph of pairs where there is one (None: where points allow it)."""
    if "axis" in points[0].tags:
        yield "", partial(plots.paths_in_plane, part, metric, **options)
        return
    if "layer" in options:
        draw = plots.compression_matrix if "row" in points[0].tags else plots.token_map
        yield "", partial(draw, part, metric, **options)
        return
    if any(TRAIN_ROWS in point.tags for point in points):
        yield "Over training rows", partial(plots.sample_size_curves, part, metric, **options)
        yield "Over layers", partial(plots.sample_size_curves, part, metric, over="layers", **options)
        return
    if any(CATEGORY in point.tags and point.layer is not None for point in points):
        yield "Categories", partial(plots.concept_map, part, metric, **options)
    pairs = [point for point in points if is_pair(point)]
    if pairs:
        yield "", partial(plots.layer_matrix, part, metric, **options)
        if any(point.layer != point.other_layer for point in pairs) if has_graph is None else has_graph:
            yield "Mean of both directions", partial(plots.coupling_graph, part, metric, **options)


def lists(part: pd.DataFrame, metric: str, points: list[Point], options: dict[str, Any]) -> Iterator[Captioned]:
    """Yields the figures of one choice that have a line a layer, and a checkpoint at a time."""
    if "layer" in options:
        return
    if any("index" in point.tags for point in points):
        yield "At one checkpoint", partial(plots.spectrum, part, metric, **options)
    if any("token_distance" in point.tags for point in points):
        yield "Over the distance between the tokens", partial(plots.distance_profile, part, metric, **options)


def is_pair(point: Point) -> bool:
    """Whether a point belongs to two layers, and to no place in a table of their own."""
    return point.other_layer is not None and not is_placed(point)


def _curves(part: pd.DataFrame, metric: str, points: list[Point], options: dict[str, Any]) -> Iterator[Captioned]:
    """Values of layers, distances or the whole model: over training and, where there is an order, over that."""
    curves = partial(plots.emergence_curves, part, metric, **options)
    if any("index" in point.tags for point in points):
        yield "Over training, the largest", curves
    elif _is_per_layer(points):
        by_distance = all(point.layer is None for point in points)
        yield "Over training", curves
        yield "Over distance" if by_distance else "Over layers", partial(plots.layer_profile, part, metric, **options)
    else:
        yield "", curves


def choices_of(points: list[Point]) -> list[tuple[dict[str, Any], str]]:
    """What the reader chooses from, as options of a figure and their text: variants, and layers of tables."""
    if not points[0].tags.keys() & {"row", "token"} or "axis" in points[0].tags:
        return [({"tags": tags}, text) for tags, text in _variant_choices(points)]
    # different blocks first: what a block is in its own directions is known beforehand
    order = sorted(
        {(p.layer, p.other_layer) for p in points}, key=lambda pair: (pair[0] == pair[1], pair[0], pair[1] or 0)
    )
    kinds = _variant_choices(points)
    return [
        (
            {"tags": tags, "layer": layer, "other_layer": other},
            ", ".join([pair_text(layer, other), *([text] if len(kinds) > 1 else [])]),
        )
        for tags, text in kinds
        for layer, other in order
        if any((p.layer, p.other_layer) == (layer, other) for p in matching(points, tags))
    ]


def _variant_choices(points: list[Point]) -> list[tuple[Mapping[str, Any], str]]:
    """The variants that the reader chooses from, the plainest first; a few of the whole model are drawn together."""
    found = variants_of(points)
    if not _is_per_layer(points) and points[0].other_layer is None:
        statistics = dict.fromkeys(tags.get("statistic") for tags in found)
        if max(sum(t.get("statistic") == s for t in found) for s in statistics) <= _TOGETHER:
            if len(statistics) == 1:
                return [({}, "")]
            in_order = sorted(statistics, key=lambda statistic: statistic or "")
            return [({"statistic": s}, choice_text({"statistic": s})) for s in in_order]
    # A median may exist for the whole model alone, where the mean is also per layer: then it is no choice.
    found = [tags for tags in found if any(map(is_on_axes, matching(points, tags)))] or found
    first = plainest(found)
    text = choice_text if len(found) > 1 else variant_text
    return [(tags, text(tags)) for tags in sorted(found, key=lambda tags: tags != first)]


def _is_per_layer(points: list[Point]) -> bool:
    return any(map(is_on_axes, points))


def balanced(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the blocks: narrow ones stand in pairs, of an odd number the first becomes wide."""
    narrow = [block for block in blocks if not block["wide"]]
    if len(narrow) % 2:
        narrow[0]["wide"] = True
    return blocks


# ------------------------------------------------------------------------------------------------ models side by side


def profile_block(part: pd.DataFrame, metric: str, analysis: str) -> Block | None:
    """Returns a metric of models without steps in all its shapes; None where the table of results says it all."""
    table: Any = part
    rows = table[table["metric"] == metric]
    points = {run: select(rows[rows["run"] == run], metric) for run in rows["run"].unique()}
    own = {run: those for run, those in points.items() if _is_drawn(those)}
    if not own:
        return None
    if not any(map(_has_pictures, own.values())):
        choices = [
            (text, [("", _profile(part, metric, options))])
            for options, text in choices_of([point for those in own.values() for point in those])
        ]
    else:
        choices = _by_model(part, metric, analysis, own)
    return block(look_up(metric).with_unit, look_up(metric).note, choices)


def _by_model(
    part: pd.DataFrame, metric: str, analysis: str, points: dict[str, list[Point]]
) -> Iterator[tuple[str, list[Captioned]]]:
    """The choices of a metric whose pictures show one model."""
    names = short_names(list(points))
    has_profile = any(map(_has_profile, points.values()))
    # every choice has the same places: a graph only where every model has pairs of different blocks
    has_graph = all(any(is_pair(point) and point.layer != point.other_layer for point in p) for p in points.values())
    table: Any = part
    for run, mine in points.items():
        rows = table[table["run"] == run]
        for options, text in choices_of(mine):
            chosen = {"analysis": analysis, **options}
            figures = [*pictures(rows, metric, mine, chosen, has_graph=has_graph), *lists(rows, metric, mine, chosen)]
            if has_profile and "layer" not in options:
                figures.insert(0, ("", _profile(part, metric, options)))  # its legend tells what it shows
            if len(figures) == 1:
                figures = [("", figures[0][1])]
            yield ", ".join(filter(None, [names[run] if len(names) > 1 else "", text])), figures


def _profile(part: pd.DataFrame, metric: str, options: dict[str, Any]) -> Callable[[], Chart]:
    table: Any = part
    baselines = [name for name in (look_up(metric).baseline,) if name in set(table["metric"])]
    return partial(plots.model_profile, part, metric, baselines=baselines, **options)


def _has_pictures(points: list[Point]) -> bool:
    return any(point.other_layer is not None or is_placed(point) or "index" in point.tags for point in points)


def _has_profile(points: list[Point]) -> bool:
    return any(
        is_on_axes(point) and point.other_layer is None and not is_placed(point) and "index" not in point.tags
        for point in points
    )


def _is_drawn(points: list[Point]) -> bool:
    return _has_pictures(points) or _has_profile(points)


# ------------------------------------------------------------------------------------------------ layers over steps


def surface_section(frame: pd.DataFrame) -> dict[str, Any] | None:
    """Returns the section; None for a run without two steps of such an analysis."""
    table: Any = frame
    steps = [int(step) for step in sorted(table["step"].dropna().unique())]
    blocks = [
        block(
            look_up(metric).with_unit,
            sentence(analysis),
            [(text, _surfaces(part, metric, tags, steps)) for tags, text in variants(part, metric)],
        )
        for analysis, metric, part in layered(frame)
    ]
    if not blocks:
        return None
    note = (
        "Across: training steps, the untrained model apart; up: layers, the embedding apart. Grey was not measured. "
        "Of task scores white dots are the best layer from 1 on, rings where the embedding is better than any."
    )
    return {"name": "surfaces", "title": "Layers over steps", "note": note, "metrics": blocks}


def layered(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yields analysis, metric and rows of what has a surface: a variant with values per layer at two steps or more."""
    table: Any = frame
    table = table[table["step"].notna()]
    for analysis in dict.fromkeys(table["analysis"]):
        if analysis.split("/")[0] not in BASES:
            continue
        part = table[table["analysis"] == analysis]
        for metric in dict.fromkeys(part["metric"]):
            rows = part[(part["metric"] == metric) & part["layer"].notna() & part["other_layer"].isna()]
            is_other = look_up(metric).unlisted or is_in(metric, "half")
            if not is_other and rows["step"].nunique() > 1 and variants(rows, metric):
                yield analysis, metric, rows


def variants(rows: pd.DataFrame, metric: str) -> list[tuple[dict[str, Any], str]]:
    """Returns the tags and texts of a metric's variants that have a surface, the plainest first."""
    points = [point for point in select(rows, metric) if not is_placed(point)]
    found = [tags for tags in variants_of(points) if has_surface(matching(points, tags))]
    if not found:
        return []
    first = plainest(found)
    if len(found) == 1:
        return [(dict(first), variant_text(first))]
    told = [name for name in first if len({str(tags[name]) for tags in found}) > 1]
    ordered = sorted(found, key=lambda tags: tags != first)
    return [(dict(tags), choice_text({name: tags[name] for name in told})) for tags in ordered]


def _surfaces(rows: pd.DataFrame, metric: str, tags: dict[str, Any], steps: list[int]) -> Iterator[Captioned]:
    yield "", partial(plots.layer_surface, rows, metric, tags=tags, steps=steps)
    if look_up(metric).better is not None:
        yield "", partial(plots.best_layers, rows, metric, tags=tags)
