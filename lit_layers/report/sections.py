"""Which figures a page shows: each metric of each analysis in the shapes that its rows allow, of a run or of models."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pandas as pd

from lit_layers import plots, records
from lit_layers.figures import tables
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import BLOCKS, analysis_note, in_sentence, pair_text, tag_text
from lit_layers.figures.maps import has_surface
from lit_layers.figures.profiles import short_names
from lit_layers.figures.theme import spread
from lit_layers.figures.variants import BASELINE, LOOPED
from lit_layers.functional.block_schedules import CUSTOM, OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import GROUPS, METRICS, is_in, look_up, names, rank, scalar_row, sentence
from lit_layers.report.template import Block, Captioned, Choice, block
from lit_layers.run_data import RunData

_TOGETHER = 6  # variants of a metric of the whole model that one figure still shows
_CHOSEN_FROM = ("monotonicity", "layer", "concept", "residual", "law", "stage")  # groups of metrics that share a block
CONTROLS = ("random_labels", "relabelled_vocabulary")

READOUT, TASKS = "interventions", "intervene"
SPEED, FINETUNE = "intervene/speed", "intervene/finetune"
_MIDDLES = 4  # numbers of middle blocks that a reader chooses from, over training
_Drawing = tuple[str, str, Callable[[], Chart]]  # title of the block, text of the choice, and what draws it


def sections(
    frame: pd.DataFrame, *, comparing: bool = False, num_layers: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Return a section for each analysis of a run, or of models side by side, that has anything to draw.

    `num_layers` are those of the models, of which not all need be measured. Secondary metrics, the diagnostics, come
    last in their section and are `folded`.
    """
    shown = []
    table: Any = frame
    look: dict[str, Any] = {"comparing": comparing, "num_layers": num_layers}
    look["steps"] = [int(step) for step in sorted(table["step"].dropna().unique())]
    for analysis, part in table.groupby("analysis", sort=False):
        blocks, aside = [], []
        for title, members in _members(part, grouping=not comparing):
            rows = [look_up(metric) for metric in members]
            choices = [
                (", ".join(filter(None, [row.title if len(rows) > 1 else "", text])), figures)
                for row in rows
                for text, figures in shapes(part, row.name, analysis, **look)
            ]
            if choices:
                made = block(
                    title or rows[0].with_unit,
                    "" if title else rows[0].note,
                    choices,
                    tall=is_in(members[0], "concept"),
                    of=members,
                )
                (aside if all(row.secondary for row in rows) else blocks).append(made)
        if not blocks:  # then they are all that there is
            blocks, aside = aside, []
        if blocks:
            title, note = sentence(analysis), analysis_note(analysis)
            metrics_of = [*balanced(blocks), *(Block(each, folded=True) for each in balanced(aside))]
            shown.append({"name": analysis, "title": title, "note": note, "metrics": metrics_of})
    return shown


def _members(part: Any, *, grouping: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the metrics that share a block, with its title: a group that a reader chooses from, or one metric ("")."""
    measured = sorted(part["metric"].unique(), key=rank)
    baselines = {look_up(metric).baseline for metric in measured}
    titles = {group.name: group.title for group in GROUPS if grouping and group.name in _CHOSEN_FROM}
    titles = {group: title for group, title in titles.items() if names(group)[0] in measured}
    by_group = tables.grouped(measured, lambda name: group if (group := look_up(name).group) in titles else name)
    for name, members in by_group.items():
        if len(members) > 1:
            yield titles[name], members
        elif not look_up(members[0]).unlisted and members[0] not in baselines:
            yield "", members


def training(run: RunData) -> list[Block]:
    """Return the figures of training: the loss, then what else its rows hold."""
    recorded = dict.fromkeys(name for row in run.scalars for name in row if name not in ("step", "tokens"))
    unigram = run.about.get("data", {}).get("unigram_entropy")
    references = {"Unigram entropy": unigram} if unigram is not None else {}
    draw = partial(plots.training_curves, run.scalars)
    blocks = []
    losses = [name for name in recorded if name in METRICS and name.endswith("/loss")]
    if losses:
        note = "Dashed: what a model knows that only counts tokens." if references else ""
        blocks.append(block("Loss (nats)", note, [("", [("", partial(draw, references=references))])]))
    for name in sorted((name for name in recorded if name not in losses), key=rank):
        row, figures = scalar_row(name), [("", partial(draw, names=[name]))]
        blocks.append(block(row.with_unit, row.note, [("", figures)], of=[name] if row.group else []))
    return blocks


def first_surface(frame: pd.DataFrame) -> list[Block]:
    """Return the figure of one metric over layers and steps that a page begins with: the lens, or the first."""
    table: Any = frame
    on_layers = table[table["layer"].notna() & table["other_layer"].isna() & table["step"].notna()]
    counts = on_layers.groupby(["analysis", "metric"], sort=False)[["layer", "step"]].nunique().min(axis=1)
    pairs: list[Any] = [*counts[counts > 1].index]
    for analysis, metric in sorted(pairs, key=lambda pair: (pair[1] != "logit_lens_loss", rank(pair[1]))):
        if look_up(metric).secondary or look_up(metric).unlisted:
            continue
        points = tables.select(table, metric, analysis=analysis)
        tags = tables.plainest(tables.variants_of(points))
        if has_surface(tables.matching(points, tags)):
            draw = partial(plots.layer_surface, table, metric, analysis=analysis, tags=tags)
            return [block(f"{look_up(metric).with_unit}: layers over steps", "", [("", [("", draw)])], of=[metric])]
    return []


def balanced(blocks: list[Block]) -> list[Block]:
    """Return the blocks: narrow ones stand in pairs, of an odd number the first becomes wide."""
    narrow = [block for block in blocks if not block["wide"]]
    if len(narrow) % 2:
        narrow[0]["wide"] = True
    return blocks


# ------------------------------------------------------------------------------------------------ one metric


def shapes(
    part: pd.DataFrame,
    metric: str,
    analysis: str,
    *,
    comparing: bool = False,
    num_layers: Mapping[str, int] | None = None,
    steps: Sequence[int] = (),
) -> list[Choice]:
    """Return the figures of a metric in all the shapes that it has, a choice a variant.

    `steps` are all that the run has. Of models without steps maps have a choice a model; where all values are those of
    whole models there is no figure.
    """
    table: Any = part
    table = table[table["metric"].isin([metric, look_up(metric).baseline])]  # searched again for each figure
    unplaced = table[table[table.columns.intersection(records.PLACES)].isna().all(axis=1)]
    rows, levels = tables.rows_of(table, metric), tables.rows_of(table, look_up(metric).baseline or "")
    runs = {run: rows[rows["run"] == run] for run in rows["run"].unique()} if comparing else {"": table}
    points = {run: tables.select(of_run, metric, analysis=analysis) for run, of_run in runs.items()}
    if comparing:
        points = {run: part for run, part in points.items() if any(_has_picture(p) or _is_on_profile(p) for p in part)}
    every = [point for of_run in points.values() for point in of_run]
    called = short_names([*points])
    if comparing and every and not any(map(_has_picture, every)):
        points = {"": every}

    def lines(options: dict[str, Any]) -> Iterator[Captioned]:
        tags, alone = options.get("tags") or {}, [p for p in every if p.other_layer is None and not tables.is_placed(p)]
        look: dict[str, Any] = {**options, "controls": _controls(every, tags)}
        if "layer" in options or not alone:
            return
        if comparing:
            look |= {"baselines": [*levels["metric"].unique()], "num_layers": num_layers}
            if any(map(_is_on_profile, every)):
                yield "", partial(plots.model_profile, table, metric, **look)
            return
        names = levels["metric"].unique()  # not every variant has a baseline
        options["baselines"] = look["baselines"] = [
            name for name in names if tables.matching(tables.select(levels, name, analysis=analysis), tags)
        ]
        curves = partial(plots.emergence_curves, unplaced, metric, **options)
        if any("index" in point.tags for point in every):
            yield "Over training, the largest", curves
        elif not any(map(tables.is_on_axes, alone)):
            yield "", curves
        else:
            over = "distance" if all(point.layer is None for point in alone) else "layers"
            yield "Over training", curves
            yield f"Over {over}", partial(plots.layer_profile, unplaced, metric, intervals=True, **look)
            del look["baselines"], look["controls"]
            is_tasks = look_up(metric).better or analysis.split("/")[0] in tables.BASES
            if is_tasks and not is_in(metric, "half") and has_surface(tables.matching(alone, tags)):
                caption = f"Layers over steps{'; dots: the best layer' if look_up(metric).better else ''}"
                yield caption, partial(plots.layer_surface, unplaced, metric, steps=steps, **look)

    choices = []
    for run, of_run in points.items():
        for options, text in choices_of(of_run):
            chosen = {"analysis": analysis, **options}
            figures = [*_maps(runs.get(run, table), metric, of_run, chosen)]
            figures = [*lines(dict(chosen)), *figures] if comparing else [*figures, *lines(dict(chosen))]
            figures = [("", figures[0][1])] if comparing and len(figures) == 1 else figures
            name = called[run] if len(points) > 1 else ""
            choices.append((", ".join(filter(None, [name, text])), figures))
    return choices


def _controls(points: Sequence[tables.Point], tags: Mapping[str, Any]) -> list[str]:
    return [name for name in CONTROLS if tables.matching(points, {**tags, "control": name})]


def _maps(part: pd.DataFrame, metric: str, points: list[tables.Point], options: dict[str, Any]) -> Iterator[Captioned]:
    """The maps of one choice."""
    if "axis" in points[0].tags and points[0].layer is not None:
        yield "", partial(plots.paths_in_plane, part, metric, **options)
    elif "layer" in options:
        yield "", partial(plots.table_map, part, metric, **options)
    elif any(tables.TRAIN_ROWS in point.tags for point in points):
        yield "", partial(plots.sample_size_curves, part, metric, **options)
    else:
        if any(tables.CATEGORY in point.tags and point.layer is not None for point in points):
            yield "Categories", partial(plots.concept_map, part, metric, **options)
        if any(tables.HEAD in point.tags for point in points):
            yield "Heads", partial(plots.head_map, part, metric, **options)
        if any(map(tables.is_pair, points)):
            yield "", partial(plots.layer_matrix, part, metric, **options)
        for tag, caption in _LISTS.items():
            if any(tag in point.tags for point in points):
                yield caption, partial(plots.list_profile, part, metric, **options)


_LISTS = {"index": "At one checkpoint", "token_distance": "Over the distance between the tokens"}


def _has_picture(point: tables.Point) -> bool:
    return point.other_layer is not None or tables.is_placed(point) or "index" in point.tags


def _is_on_profile(point: tables.Point) -> bool:
    return tables.is_on_axes(point) and not _has_picture(point)


def choices_of(points: list[tables.Point]) -> list[tuple[dict[str, Any], str]]:
    """Return what the reader chooses from, as options of a figure and their text: variants, and layers of tables."""
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
    variants = [tags for tags in variants if tags.get("control") not in CONTROLS] or variants  # drawn beside the others
    first = tables.plainest(variants)
    if len(variants) < 2:
        return [(first, tables.variant_text(first))]
    differing = [name for name in first if len({str(tags[name]) for tags in variants}) > 1]
    ordered = sorted(variants, key=lambda tags: tags != first)
    return [(tags, tables.choice_text({name: tags[name] for name in differing})) for tags in ordered]


# ------------------------------------------------------------------------------------------------ interventions


@dataclass(frozen=True)
class _Scores:
    """A metric of an analysis under one circumstance (`tags`), and what it is called; `rows` are its own."""

    table: Any
    analysis: str
    metric: str
    tags: dict[str, Any]
    text: str

    @cached_property
    def rows(self) -> Any:
        rows = self.table[(self.table["analysis"] == self.analysis) & (self.table["metric"] == self.metric)]
        for name, value in ({"statistic": None} | self.tags).items():
            if name in rows:
                rows = rows[rows[name] == value] if value is not None else rows[rows[name].isna()]
        return rows

    def has(self, *variants: str) -> bool:
        return bool(self.rows["variant"].isin(variants).any())

    def draw(self, make: Callable[..., Chart], table: Any = None, **options: Any) -> Callable[[], Chart]:
        table = self.table if table is None else table
        return partial(make, table, self.metric, analysis=self.analysis, tags=self.tags, **options)


def is_of_intervention(frame: pd.DataFrame) -> Any:
    """Return which rows `intervention_sections` shows, a boolean a row."""
    table: Any = frame
    has_variant = table["variant"].notna() if "variant" in table else pd.Series(False, index=table.index)
    own = table["analysis"].str.split("/").str[0].isin([READOUT, TASKS])
    return own & (has_variant | (table["metric"] == "random_score"))


def intervention_sections(frame: pd.DataFrame, notes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the sections of other running orders, of a run or of models; `notes` tell of analyses.

    Of a run a figure has a slider over the checkpoints; several models have a figure each to choose.
    """
    table: Any = frame[is_of_intervention(frame) & (frame["metric"] != records.FAILED)]
    if table.empty or "variant" not in table:
        return []
    # single random orders, which no figure shows, are most of the rows
    table = table[table["seed"].isna()] if "seed" in table else table
    analyses = [*table["analysis"].unique()]
    readout = [name for name in analyses if name.split("/")[0] == READOUT]
    of_glue = sorted(
        (name for name in analyses if name.startswith(f"{tables.GLUE}/")), key=lambda name: name != tables.GLUE_MEAN
    )
    trained = [name for name in analyses if name.startswith(f"{FINETUNE}_")]
    tasks = [name for name in analyses if name not in (*readout, *of_glue, *trained, SPEED)]
    tasks.sort(key=lambda name: name != tables.MEDIAN)
    costs = {"Cost by blocks changed": (OF_MIDDLES, plots.variant_curves)}
    before_after = {"Before and after fine-tuning": (OF_MIDDLES, partial(plots.variant_curves, split="when"))}
    shown = []
    for name, title, tested, drawings in (
        *((name, sentence(name), "", _by_variant(table, [name])) for name in readout),
        (TASKS, "Tasks under intervention", tables.MEDIAN, _by_variant(table, tasks)),
        (tables.GLUE, "GLUE under intervention", tables.GLUE_MEAN, _by_variant(table, of_glue)),
        (
            FINETUNE,
            "Fine-tuning under intervention",
            "",
            _drawings([*_of_models(table, trained, "when")], before_after),
        ),
        (SPEED, "Speed under intervention", "", _drawings([*_of_models(table, [SPEED])], costs)),
    ):
        blocks = [
            block(heading, BLOCKS[heading], [(text, [("", draw)]) for _, text, draw in part], wide=True)
            for heading, part in tables.grouped(drawings, lambda drawing: drawing[0]).items()
        ]
        note = f"{BLOCKS.get(title) or analysis_note(name)} {notes.get(tested, '')}".strip()
        shown += [{"name": name, "title": title, "note": note, "metrics": balanced(blocks)}] if blocks else []
    return shown


def _own_schedules(frame: pd.DataFrame, metric: str, **chosen: Any) -> Chart:
    table: Any = frame
    return plots.models_in_rows(table[table["variant"].isin([BASELINE, CUSTOM])], metric, **chosen)


# By the title of the block: variants that have such a figure, and what draws it.
_Kinds = Mapping[str, tuple[Sequence[str], Callable[..., Chart]]]
_KINDS: _Kinds = {
    "Middle blocks changed": (OF_MIDDLES, plots.variant_curves),
    "Number of loops": ((LOOPED,), plots.loop_map),
    "Single blocks": (OF_BLOCKS, partial(plots.variant_curves, blocks=True)),
    "Own schedules": ((CUSTOM,), _own_schedules),
}


def _by_variant(table: Any, analyses: Sequence[str]) -> Iterator[_Drawing]:
    """Yield the figures of analyses that belong together; a choice names the analysis where there are several."""
    every, models = [*_metrics(table, analyses)], _models(table, analyses)
    if len(models) > 1:  # a choice for each of the first metrics, and each variant
        for scores in every[:3]:
            for name in filter(scores.has, (*OF_MIDDLES, *OF_BLOCKS)):
                text = f"{scores.text}: {tag_text({'variant': name})}"
                yield "Models side by side", text, scores.draw(plots.models_by_middle, variant=name)
        analyses, every = analyses[:1], every[:1]  # of each model only the first
    firsts = {(scores.analysis, scores.metric, str(scores.tags)) for scores in every}
    parts = [s for s in _of_models(table, analyses) if (s.analysis, s.metric, str(s.tags)) in firsts]
    yield from _drawings(parts, _KINDS)
    yield from _training(parts)


def _drawings(parts: Sequence[_Scores], kinds: _Kinds) -> Iterator[_Drawing]:
    for title, (variants, make) in kinds.items():
        yield from ((title, scores.text, scores.draw(make)) for scores in parts if scores.has(*variants))


def _training(parts: Sequence[_Scores]) -> Iterator[_Drawing]:
    """Yield some numbers of middle blocks of each metric, the one of about half of the blocks first."""
    for scores in [each for each in parts if each.rows["step"].nunique() > 1 and "middle" in each.rows][:3]:
        rows = scores.rows
        every = sorted({int(m) for m in rows["middle"].dropna()})
        middles = spread([middle for middle in every if middle > 1] or every, _MIDDLES)  # M = 1 changes no order
        half = middles[(len(middles) - 1) // 2] if middles else 0
        loops = tables.usual_loops(rows[["loops"]].dropna().to_dict("records")) if "loops" in rows else None
        usual = rows["loops"].isna() | (rows["loops"] == loops) if "loops" in rows else True
        for middle in sorted(middles, key=lambda middle: middle != half):
            shown = rows[((rows["middle"] == middle) & usual) | (rows["variant"] == BASELINE)]
            yield "Over training", f"{scores.text}, M = {middle}", scores.draw(plots.emergence_curves, shown)


def _of_models(table: Any, analyses: Sequence[str], split: str | None = None) -> Iterator[_Scores]:
    """Yield what `_metrics` does, of each model in turn."""
    for scores in _metrics(table, analyses, split):
        for before, of_model in _models(table, analyses):
            own = _Scores(of_model, scores.analysis, scores.metric, scores.tags, f"{before}{scores.text}")
            if len(own.rows):
                yield own


def _metrics(table: Any, analyses: Sequence[str], split: str | None = None) -> Iterator[_Scores]:
    """Yield the metrics of analyses under each of their circumstances (such as `when`), the plainest metric first."""
    for analysis in analyses:
        part = table[(table["analysis"] == analysis) & table["variant"].notna()]
        plain = lambda name: (not is_in(name, "variant", "task", "cost"), rank(name))  # noqa: E731
        for metric in sorted(part["metric"].unique(), key=plain):
            title = look_up(metric).title
            if analysis in (tables.MEDIAN, tables.GLUE_MEAN):
                title = f"{'Median' if analysis == tables.MEDIAN else 'Mean'} {in_sentence(title)}"
            elif len(analyses) > 1:
                title = f"{sentence(analysis.removeprefix(f'{tables.GLUE}/').split('/', 1)[-1])}: {in_sentence(title)}"
            for tags in _circumstances(part[part["metric"] == metric], split):
                yield _Scores(table, analysis, metric, tags, ", ".join(filter(None, [title, tag_text(tags)])))


def _circumstances(rows: Any, split: str | None) -> list[dict[str, Any]]:
    """Return the combined values of the tags that do not describe the variant."""
    names = [n for n in ("training", "when") if n != split and n in rows and rows[n].notna().any()]
    rows = rows[rows["variant"] != BASELINE] if (rows["variant"] != BASELINE).any() else rows
    kinds = rows[names].drop_duplicates().to_dict("records") if names else [{}]
    return [{name: value for name, value in kind.items() if not pd.isna(value)} for kind in kinds]


def _models(table: Any, analyses: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the rows of each run with any of these analyses, and what the choices of several runs begin with."""
    names = short_names([*table[table["analysis"].isin(analyses)]["run"].unique()])
    return [(f"{name}, " if len(names) > 1 else "", table[table["run"] == run]) for run, name in names.items()]
