"""Which figures a page shows: each metric of each analysis in the shapes that its rows allow, of a run or of models."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.errors import kind_and_words
from lit_layers.figures import tables
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import BLOCKS, analysis_note, pair_text, tag_text
from lit_layers.figures.maps import has_surface
from lit_layers.figures.models import short_names
from lit_layers.figures.tables import BASES
from lit_layers.metrics import METRICS, is_in, look_up, names, rank, reading, scalar_row, sentence
from lit_layers.report.template import Block, figure
from lit_layers.run_data import RunData

_TOGETHER = 6  # variants of a metric of the whole model that one figure still shows
_SPLITS = ("test", "validation", "train")
CONTROLS = ("random_labels", "untrained_model", "relabelled_vocabulary")

logger = logging.getLogger(__name__)
Captioned = tuple[str, Callable[..., Chart]]  # a caption, and what draws the figure below it
Choice = tuple[str, Iterable[Captioned]]  # what the reader chooses, and its figures


def sections(
    frame: pd.DataFrame, *, comparing: bool = False, num_layers: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Returns a section for each analysis of a run, or of models side by side, that has anything to draw.

    `num_layers` are those of the models, of which not all need be measured. Secondary metrics, the diagnostics, come
    last in their section and are `folded`.
    """
    shown = []
    table: Any = frame
    for analysis, part in table.groupby("analysis", sort=False):
        metrics = sorted((name for name in part["metric"].unique() if not look_up(name).unlisted), key=rank)
        blocks, elsewhere = ([], []) if comparing else _together(Rows(part, analysis))
        elsewhere = {*elsewhere, *(look_up(metric).baseline for metric in metrics)}
        of_metric = partial(_of_models, num_layers=num_layers) if comparing else _of_run
        drawn = {metric: of_metric(part, metric, analysis) for metric in metrics if metric not in elsewhere}
        aside = [each for metric, each in drawn.items() if each is not None and look_up(metric).secondary]
        blocks += [each for metric, each in drawn.items() if each is not None and not look_up(metric).secondary]
        if not blocks:  # then they are all that there is
            blocks, aside = aside, []
        if blocks:
            title, note = sentence(analysis), analysis_note(analysis)
            metrics_of = [*balanced(blocks), *(Block(each, folded=True) for each in balanced(aside))]
            shown.append({"name": analysis, "title": title, "note": note, "metrics": metrics_of})
    return shown


def training(run: RunData) -> list[Block]:
    """Returns the figures of training: the loss, then what else its rows hold."""
    recorded = dict.fromkeys(name for row in run.scalars for name in row if name not in ("step", "tokens"))
    unigram = run.about.get("data", {}).get("unigram_entropy")
    references = {"Unigram entropy": unigram} if unigram is not None else {}
    draw = partial(plots.training_curves, run.scalars, tokens_per_step=run.tokens_per_step)
    blocks = []
    losses = [name for name in recorded if name in METRICS and name.endswith("/loss")]
    if losses:
        note = "Dashed: what a model knows that only counts tokens." if references else ""
        blocks.append(block("Loss (nats)", note, [("", [("", partial(draw, references=references))])], wide=True))
    for name in sorted((name for name in recorded if name not in losses), key=rank):
        row, figures = scalar_row(name), [("", partial(draw, names=[name]))]
        blocks.append(block(row.with_unit, row.note, [("", figures)], of=[name] if row.group else []))
    return balanced(blocks)


_NO_FIGURE = figure(None, problem="No figure shows these numbers; --export writes them.")


def block(
    title: str, note: str, choices: Iterable[Choice], *, wide: bool | None = None, of: Sequence[str] = ()
) -> Block:
    """Returns the figures of a metric, drawn, with a choice of texts; several figures are wide.

    `of` are the metrics that it shows: below the figures stands how they are to be read. All choices have as many
    places: one that a choice has no figure for is not shown with it. A sentence stands for a choice without any.
    """
    shown = [{"text": text, "figures": [_drawn(*each) for each in figures]} for text, figures in choices]
    places = max([1, *(len(choice["figures"]) for choice in shown)])
    for choice in shown:
        choice["figures"] = choice["figures"] or [_NO_FIGURE]
        choice["figures"] += [figure(None)] * (places - len(choice["figures"]))
    wide = len(shown[0]["figures"]) > 1 if wide is None else wide
    readings = [each for metric in of if (each := reading(metric)) is not None]
    return Block(title=title, note=note, wide=wide, choices=shown, readings=readings)


def _drawn(caption: str, draw: Callable[[], Chart]) -> dict[str, Any]:
    """A figure with its caption; in the place of one that cannot be drawn stands why."""
    try:
        return figure(draw(), caption)
    except Exception as error:  # whatever one figure stumbles over, the reader gets the others
        logger.debug("a figure could not be drawn", exc_info=True)
        reason = f"This figure could not be drawn: {kind_and_words(error)}"
        return figure(None, caption, problem=reason)


def balanced(blocks: list[Block]) -> list[Block]:
    """Returns the blocks: narrow ones stand in pairs, of an odd number the first becomes wide."""
    narrow = [block for block in blocks if not block["wide"]]
    if len(narrow) % 2:
        narrow[0]["wide"] = True
    return blocks


# ------------------------------------------------------------------------------------------------ one metric


def _of_run(part: pd.DataFrame, metric: str, analysis: str) -> Block:
    """A metric of a run in all the shapes that it has, one choice a variant."""
    table: Any = part
    part = table[table["metric"].isin([metric, look_up(metric).baseline])]  # searched again for each figure
    points = tables.select(part, metric, analysis=analysis)
    alone = [point for point in points if point.other_layer is None and not tables.is_placed(point)]
    compared = [name for name in (look_up(metric).baseline,) if name in set(part["metric"])]
    levels = {name: tables.select(part, name, analysis=analysis) for name in compared}

    def figures(options: dict[str, Any]) -> Iterator[Captioned]:
        yield from _maps(part, metric, points, options)
        baselines = [
            name for name in compared if tables.matching(levels[name], options.get("tags") or {})
        ]  # not every variant
        curves = partial(plots.emergence_curves, part, metric, baselines=baselines, **options)
        over = "distance" if all(point.layer is None for point in alone) else "layers"
        if not alone or "layer" in options:
            pass
        elif any("index" in point.tags for point in points):
            yield "Over training, the largest", curves
        elif any(map(tables.is_on_axes, alone)):
            yield "Over training", curves
            yield (
                f"Over {over}",
                partial(plots.layer_profile, part, metric, baselines=baselines, intervals=True, **options),
            )
        else:
            yield "", curves
        yield from _lists(part, metric, points, options)

    choices = [(text, figures({"analysis": analysis, **options})) for options, text in choices_of(points)]
    return block(look_up(metric).with_unit, look_up(metric).note, choices, of=[metric])


def _of_models(
    part: pd.DataFrame, metric: str, analysis: str, num_layers: Mapping[str, int] | None = None
) -> Block | None:
    """A metric of models without steps in all its shapes; None where the table of results says it all."""
    choices = shapes_of_models(part, metric, analysis, num_layers)
    return block(look_up(metric).with_unit, look_up(metric).note, choices, of=[metric]) if choices else None


def shapes_of_models(
    part: pd.DataFrame, metric: str, analysis: str, num_layers: Mapping[str, int] | None = None
) -> list[Choice]:
    """Returns the figures of a metric of models without steps, a choice a variant; a map has a choice a model.

    There are none where all values are those of whole models.
    """
    rows = tables.rows_of(part, metric)
    points = {run: tables.select(rows[rows["run"] == run], metric) for run in rows["run"].unique()}
    points = {run: these for run, these in points.items() if any(_has_picture(p) or _is_on_profile(p) for p in these)}
    every = [point for of_run in points.values() for point in of_run]
    baselines = [name for name in (look_up(metric).baseline,) if name in set(part["metric"])]
    draw = partial(plots.model_profile, part, metric, baselines=baselines, num_layers=num_layers)
    called = short_names(list(points))

    def figures(run: str, options: dict[str, Any]) -> list[Captioned]:
        """Pictures that show one model, and the profile of all."""
        of_run = rows[rows["run"] == run]
        chosen = {"analysis": analysis, **options}
        maps = [*_maps(of_run, metric, points[run], chosen), *_lists(of_run, metric, points[run], chosen)]
        if any(map(_is_on_profile, every)) and "layer" not in options:
            maps.insert(0, ("", partial(draw, **options)))  # its legend tells what it shows
        return [("", maps[0][1])] if len(maps) == 1 else maps

    if not any(map(_has_picture, every)):
        return [(text, [("", partial(draw, **options))]) for options, text in choices_of(every)] if every else []
    return [
        (", ".join(filter(None, [called[run] if len(points) > 1 else "", text])), figures(run, options))
        for run, of_run in points.items()
        for options, text in choices_of(of_run)
    ]


def _maps(part: pd.DataFrame, metric: str, points: list[tables.Point], options: dict[str, Any]) -> Iterator[Captioned]:
    """The maps of one choice."""
    if "axis" in points[0].tags and points[0].layer is not None:
        yield "", partial(plots.paths_in_plane, part, metric, **options)
    elif "layer" in options:
        yield "", partial(plots.table_map, part, metric, **options)
    elif any(tables.TRAIN_ROWS in point.tags for point in points):
        yield from _sample_sizes(partial(plots.sample_size_curves, part, metric, **options))
    else:
        if any(tables.CATEGORY in point.tags and point.layer is not None for point in points):
            yield "Categories", partial(plots.concept_map, part, metric, **options)
        if any(tables.HEAD in point.tags for point in points):
            yield "Heads", partial(plots.head_map, part, metric, **options)
        if any(map(tables.is_pair, points)):
            yield "", partial(plots.layer_matrix, part, metric, **options)


_LISTS = {"index": "At one checkpoint", "token_distance": "Over the distance between the tokens"}


def _lists(part: pd.DataFrame, metric: str, points: list[tables.Point], options: dict[str, Any]) -> Iterator[Captioned]:
    """The figures of one choice that have a line a layer, and a checkpoint at a time."""
    tags = {tag for point in points for tag in point.tags} if "layer" not in options else ()
    for tag, caption in _LISTS.items():
        if tag in tags:
            yield caption, partial(plots.list_profile, part, metric, **options)


def _sample_sizes(draw: Callable[..., Chart]) -> Iterator[Captioned]:
    yield "Over training rows", draw
    yield "Over layers", partial(draw, over="layers")


def _has_picture(point: tables.Point) -> bool:
    return point.other_layer is not None or tables.is_placed(point) or "index" in point.tags


def _is_on_profile(point: tables.Point) -> bool:
    return tables.is_on_axes(point) and not _has_picture(point)


def choices_of(points: list[tables.Point]) -> list[tuple[dict[str, Any], str]]:
    """What the reader chooses from, as options of a figure and their text: variants, and layers of tables."""
    kinds = _variant_choices(points)
    if not points[0].tags.keys() & {"row", "token"} or "axis" in points[0].tags:
        return [({"tags": tags}, text) for tags, text in kinds]
    choices = []
    for tags, text in kinds:
        # different blocks first: what a block is in its own directions is known beforehand
        pairs = {(p.layer, p.other_layer) for p in tables.matching(points, tags)}
        for layer, other in sorted(pairs, key=lambda pair: (pair[0] == pair[1], pair[0], pair[1] or 0)):
            texts = [pair_text(layer, other), *([text] if len(kinds) > 1 else [])]
            choices.append(({"tags": tags, "layer": layer, "other_layer": other}, ", ".join(texts)))
    return choices


def _variant_choices(points: list[tables.Point]) -> list[tuple[Mapping[str, Any], str]]:
    """The variants that the reader chooses from, the plainest first; a few of the whole model are drawn together."""
    variants = tables.variants_of(points)
    if not any(map(tables.is_on_axes, points)) and points[0].other_layer is None:
        statistics = dict.fromkeys(tags.get("statistic") for tags in variants)
        if max(sum(t.get("statistic") == s for t in variants) for s in statistics) <= _TOGETHER:
            if len(statistics) == 1:
                return [({}, "")]
            in_order = sorted(statistics, key=lambda statistic: statistic or "")
            return [({"statistic": s}, tables.choice_text({"statistic": s})) for s in in_order]
    # A median may exist for the whole model alone, where the mean is also per layer: then it is no choice.
    variants = [tags for tags in variants if any(map(tables.is_on_axes, tables.matching(points, tags)))] or variants
    first = tables.plainest(variants)
    text = tables.choice_text if len(variants) > 1 else tables.variant_text
    return [(tags, text(tags)) for tags in sorted(variants, key=lambda tags: tags != first)]


# ------------------------------------------------------------------------------------------------ metrics together


class Rows:
    """The rows of one analysis, each metric's apart: they are searched for every figure."""

    def __init__(self, table: Any, analysis: str) -> None:
        self.table, self.analysis = table, analysis
        self.of = dict(tuple(table.groupby("metric", sort=False)))

    def having(self, group: str) -> list[str]:
        return [metric for metric in names(group) if metric in self.of]

    def values(self, metric: str, tag: str, among: Sequence[str]) -> list[str]:
        rows = self.of[metric]
        return [value for value in among if tag in rows and (rows[tag] == value).any()]

    def draw(
        self, make: Callable[..., Chart], metric: str, *, beside: Sequence[str] = (), **options: Any
    ) -> Callable[[], Chart]:
        table = pd.concat([self.of[name] for name in (metric, *beside)])
        return partial(make, table, metric, analysis=self.analysis, **options)


def _together(rows: Rows) -> tuple[list[Block], list[str]]:
    """The blocks of metrics that belong together, of one analysis of a run, and which metrics are in them."""
    # a measurement that failed leaves no rows, and each tag is a column of the whole run
    tags = {
        tag
        for tag in (tables.TRAIN_ROWS, tables.CATEGORY, "task", "split")
        if tag in rows.table and rows.table[tag].notna().any()
    }
    if tables.TRAIN_ROWS in tags and rows.having("score"):
        blocks, groups = [_by_size(rows)], ["score"]
    elif tables.CATEGORY in tags and "concept_alignment" in rows.of:
        blocks, groups = [_concepts(rows)], ["concept"]
    elif "prediction_residual" in rows.of:
        blocks, groups = [_residuals(rows), *_summaries(rows, "law")], ["residual", "law", "residual_detail"]
    elif {"task", "split"} <= tags:
        without = Rows(rows.table.drop(columns="split"), rows.analysis)  # one and the same
        scores = [
            metric for metric in rows.having("score") if rows.values(metric, "split", _SPLITS)
        ]  # not the chosen c
        blocks = [_probe(rows, metric) for metric in scores]
        blocks += [*_summaries(without, "monotonicity"), *_summaries(without, "layer")]
        return blocks, [*scores, *rows.having("monotonicity"), *rows.having("layer")]
    else:
        return [], []
    return blocks, [metric for group in groups for metric in rows.having(group)]


def _probe(rows: Rows, metric: str) -> Block:
    def figures(split: str) -> Iterator[Captioned]:
        tags = {"split": split, "control": None}
        controls = rows.values(metric, "control", CONTROLS) if split == "test" else []
        yield "Over training", rows.draw(plots.emergence_curves, metric, tags=tags)
        yield "Over layers", rows.draw(plots.layer_profile, metric, tags=tags, controls=controls, intervals=True)

    notes = {"accuracy": "Of a linear probe. A row of a class that no training row has counts as an error."}
    choices = [(tag_text({"split": split}), figures(split)) for split in rows.values(metric, "split", _SPLITS)]
    note = notes.get(metric, look_up(metric).note)
    return block(look_up(metric).with_unit, note, choices, wide=True, of=[metric])


_SUMMARIES = {
    "monotonicity": "Monotonicity over the layers",
    "layer": "Plateau, best layer and inflection",
    "law": "Exponential law over the layers",
}


def _summaries(rows: Rows, group: str) -> Iterator[Block]:
    """A choice a metric of the whole model; what it tells of, the accuracy or the log-loss, are lines of one figure."""
    choices = [
        (sentence(look_up(metric).title.split(", ")[-1]), [("", rows.draw(plots.emergence_curves, metric))])
        for metric in rows.having(group)
    ]
    if choices:
        yield block(_SUMMARIES[group], BLOCKS[_SUMMARIES[group]], choices, of=rows.having(group))


def _by_size(rows: Rows) -> Block:
    choices = [
        (look_up(metric).title, _sample_sizes(rows.draw(plots.sample_size_curves, metric)))
        for metric in rows.having("score")
    ]
    title = "Score by number of training rows"
    return block(title, BLOCKS[title], choices, wide=True, of=rows.having("score"))


def _concepts(rows: Rows) -> Block:
    def figures(metric: str) -> Iterator[Captioned]:
        beside = [name for name in (look_up(metric).baseline,) if name in rows.of]
        options: dict[str, Any] = {"beside": beside, "baselines": beside, "intervals": True}
        yield "", rows.draw(plots.concept_map, metric)
        if metric in means.of:  # of a single category there is none
            yield "Mean, over training", means.draw(plots.emergence_curves, metric)
            yield "Mean, over layers", means.draw(plots.layer_profile, metric, **options)

    # searched without the categories: 40 times as fast
    means = Rows(rows.table[rows.table[tables.CATEGORY].isna()], rows.analysis)
    choices = [(look_up(metric).title, figures(metric)) for metric in rows.having("concept")]
    title = "Categories of word pairs (cosine)"
    return Block(block(title, BLOCKS[title], choices, wide=True, of=rows.having("concept")), tall=True)


def _residuals(rows: Rows) -> Block:
    def figures(metric: str) -> Iterator[Captioned]:
        options: dict[str, Any] = {
            "tags": {"control": None},
            "intervals": True,
            "fits": metric == "prediction_residual",
        }
        controls = rows.values(metric, "control", CONTROLS)
        yield "Over training", rows.draw(plots.emergence_curves, metric, tags={"control": None})
        yield "Over layers", rows.draw(plots.layer_profile, metric, controls=controls, **options)

    choices = [(look_up(metric).title, figures(metric)) for metric in rows.having("residual")]
    title, note = "Prediction residual (share of variance)", look_up("prediction_residual").note
    return block(title, note, choices, wide=True, of=rows.having("residual"))


# ------------------------------------------------------------------------------------------------ layers over steps


def surface_section(frame: pd.DataFrame) -> dict[str, Any] | None:
    """Returns the section of layers over steps; None for a run without two steps of an analysis of tasks."""
    table: Any = frame
    table = table[table["step"].notna() & table["analysis"].str.split("/").str[0].isin(BASES)]
    steps = [int(step) for step in sorted(frame["step"].dropna().unique())]
    blocks = []
    for (analysis, metric), part in table.groupby(["analysis", "metric"], sort=False):
        rows = part[part["layer"].notna() & part["other_layer"].isna()]
        is_other = look_up(metric).unlisted or is_in(metric, "half")
        if not is_other and rows["step"].nunique() > 1 and (kinds := _with_surface(rows, metric)):
            draw = partial(plots.layer_surface, rows, metric, steps=steps)
            choices = [(text, [("", partial(draw, tags=tags))]) for tags, text in kinds]
            blocks.append(block(look_up(metric).with_unit, sentence(analysis), choices))
    title = "Layers over steps"
    return {"name": "surfaces", "title": title, "note": BLOCKS[title], "metrics": balanced(blocks)} if blocks else None


def _with_surface(rows: pd.DataFrame, metric: str) -> list[tuple[dict[str, Any], str]]:
    """The tags and texts of a metric's variants that have a surface, the plainest first."""
    points = [point for point in tables.select(rows, metric) if not tables.is_placed(point)]
    kinds = [tags for tags in tables.variants_of(points) if has_surface(tables.matching(points, tags))]
    if len(kinds) < 2:
        return [(dict(tags), tables.variant_text(tags)) for tags in kinds]
    first = tables.plainest(kinds)
    differing = [name for name in first if len({str(tags[name]) for tags in kinds}) > 1]
    ordered = sorted(kinds, key=lambda tags: tags != first)
    return [(dict(tags), tables.choice_text({name: tags[name] for name in differing})) for tags in ordered]
