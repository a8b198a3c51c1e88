"""Which figures a run's page shows: each metric of each analysis, in the shapes that its rows allow."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures import Chart
from lit_layers.figures.labels import analysis_note, pair_text
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
from lit_layers.metrics import look_up, rank, sentence
from lit_layers.report.facts import RunData

_TOGETHER = 6  # variants of a metric of the whole model that one figure still shows

logger = logging.getLogger(__name__)
Block = dict[str, Any]  # the figures of a metric, with what stands above them
Captioned = tuple[str, Callable[[], Chart]]  # a caption, and what draws the figure below it


def sections(
    frame: pd.DataFrame,
    block: Callable[[pd.DataFrame, str, str], Block | None],
    whole: Callable[[pd.DataFrame, str], tuple[list[Block], Sequence[str]]] = lambda part, analysis: ([], ()),
) -> list[dict[str, Any]]:
    """Returns a section for each analysis, with what `block` makes of its rows for each metric, where it makes any.

    First comes what `whole` makes of all rows of an analysis; it says which metrics are in that.
    """
    found = []
    table: Any = frame
    for analysis in dict.fromkeys(table["analysis"]):
        part = table[table["analysis"] == analysis]
        metrics = sorted((name for name in dict.fromkeys(part["metric"]) if not look_up(name).unlisted), key=rank)
        blocks, shown = whole(part, analysis)
        elsewhere = {*shown, *(look_up(metric).baseline for metric in metrics)}
        blocks += [block(part, metric, analysis) for metric in metrics if metric not in elsewhere]
        if blocks := [drawn for drawn in blocks if drawn is not None]:
            title, note = sentence(analysis), analysis_note(analysis)
            found.append({"name": analysis, "title": title, "note": note, "metrics": balanced(blocks)})
    return found


def training(run: RunData) -> list[dict[str, Any]]:
    """Returns the figures of training: the loss, then what else its rows hold."""
    known = dict.fromkeys(name for row in run.scalars for name in row if name not in ("step", "tokens"))
    unigram = run.about.get("data", {}).get("unigram_entropy")
    references = {"Unigram entropy": unigram} if unigram is not None else {}
    found = []
    losses = [name for name in known if name.split("/")[-1] == "loss"]
    if losses:
        fig = partial(plots.training_curves, run.scalars, tokens_per_step=run.tokens_per_step, references=references)
        found.append(
            _block(
                "Loss (nats)",
                "Dashed: what a model knows that only counts tokens." if references else "",
                fig,
            )
        )
        found[0]["wide"] = True
    for name in sorted((name for name in known if name not in losses), key=rank):
        fig = partial(plots.training_curves, run.scalars, [name], tokens_per_step=run.tokens_per_step)
        found.append(_block(look_up(name).with_unit, look_up(name).note, fig))
    return balanced(found)


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
    choices = []
    for options, text in choices_of(points):
        figures = _figures(part, metric, points, {"analysis": analysis, **options})
        choices.append({"text": text, "figures": drawn(figures)})
    return {
        "title": look_up(metric).with_unit,
        "note": look_up(metric).note,
        "wide": len(choices[0]["figures"]) > 1,
        "choices": choices,
    }


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


def _block(title: str, note: str, draw: Callable[[], Chart]) -> dict[str, Any]:
    choices = [{"text": "", "figures": drawn([("", draw)])}]
    return {"title": title, "note": note, "wide": False, "choices": choices}
