"""The sections of models whose blocks run otherwise, and of how alike layers are: few blocks, with choices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures import Chart
from lit_layers.figures.labels import analysis_note, tag_text
from lit_layers.figures.maps import SIMILARITIES
from lit_layers.figures.models import short_names
from lit_layers.figures.task_means import GLUE, GLUE_MEAN, MEDIAN
from lit_layers.figures.theme import spread
from lit_layers.figures.training import STAGES, stage_text
from lit_layers.figures.variant_scores import LOOPED
from lit_layers.functional.block_schedules import OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import headlines, is_in, look_up, rank, sentence
from lit_layers.records import FAILED
from lit_layers.report.sections import Block, balanced, block

INTERVENTIONS, TASKS = "interventions", "intervene"
SPEED, FINETUNE, SIMILARITY = "intervene/speed", "intervene/finetune", "layer_similarity"
CONTRAST = "block_contrast"
_MIDDLES = 4  # numbers of middle blocks that a reader chooses from, over training
_SIMILAR = "Similarity of layers"
_NOTES = {
    "Middle blocks changed": (
        "Each variant has its colour everywhere. Of random orders the mean, with its 95% interval where known."
    ),
    "Cost by blocks changed": "Each variant has its colour everywhere. M blocks in the middle are changed.",
    "Number of loops": (
        "The middle side by side and averaged, that many times. White: the best number. Bright is better."
    ),
    "Single blocks": "One block skipped, or run behind the next one.",
    "Over training": (
        "What a model learns first to do without: its middle blocks (skip), or their order (reverse, random)."
    ),
    "Own schedules": "Dashed: the full model.",
    "Quality against latency": (
        "Star: the full model. Dotted: what no other variant beats in both. M is the number of blocks changed."
    ),
    "Before and after fine-tuning": "Solid: after fine-tuning; dotted, hollow marks: before.",
    "Models side by side": "A line a model; dashed in its colour: the full model.",
    _SIMILAR: "Bright: the same. Colours go from the least of any checkpoint to 1.",
}
_Choice = tuple[str, Callable[[], Chart]]


class _Rows:
    """The rows of a metric of an analysis of one run, and what may be drawn of them."""

    def __init__(self, table: Any, analysis: str, metric: str, tags: Mapping[str, Any], text: str) -> None:
        self.table, self.analysis, self.metric, self.tags, self.text = table, analysis, metric, dict(tags), text
        rows = table[(table["analysis"] == analysis) & (table["metric"] == metric)]
        for name, value in self.tags.items():
            rows = rows[rows[name] == value] if value is not None else rows[rows[name].isna()]
        for name in ("seed", "statistic"):
            rows = rows[rows[name].isna()] if name in rows else rows
        self.rows = rows

    def names(self) -> set[str]:
        return set(self.rows["variant"].dropna())

    @property
    def middles(self) -> list[int]:
        return sorted({int(m) for m in self.rows["middle"].dropna()}) if "middle" in self.rows else []

    @property
    def num_steps(self) -> int:
        return self.rows["step"].nunique()

    @property
    def num_loops(self) -> int:
        looped = self.rows[self.rows["variant"] == LOOPED]
        return looped["loops"].nunique() if "loops" in looped else 0

    def draw(self, make: Callable[..., Chart], **options: Any) -> Callable[[], Chart]:
        """What draws a figure of them."""

        def drawing() -> Chart:
            table = self.table[self.table["analysis"] == self.analysis]
            return make(table, self.metric, analysis=self.analysis, tags=self.tags, **options)

        return drawing


def is_own(frame: pd.DataFrame) -> Any:
    """Returns which rows the sections of this file show, a boolean a row."""
    table: Any = frame
    first = table["analysis"].str.split("/").str[0]
    has_variant = table["variant"].notna() if "variant" in table else pd.Series(False, index=table.index)
    ours = first.isin([INTERVENTIONS, TASKS]) & (has_variant | (table["metric"] == "random_score"))
    return ours | ((first == SIMILARITY) & table["metric"].isin([*SIMILARITIES, *STAGES, CONTRAST]))


def _shown(frame: pd.DataFrame) -> Any:
    """The rows of this file without single random orders, which no figure shows: they are most of the rows."""
    table: Any = frame[is_own(frame) & (frame["metric"] != FAILED)]
    return table[table["seed"].isna()] if "seed" in table else table


def without(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that have no place in the sections of this file."""
    table: Any = frame
    return table if table.empty else table[~is_own(frame)]


def sections(frame: pd.DataFrame, notes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the sections of other running orders and of similarity, of a run or of models; `notes` tell of analyses.

    Of a run a figure has a slider over the checkpoints; several models have a figure each to choose.
    """
    if frame.empty:
        return []
    table = _shown(frame)
    analyses = [*dict.fromkeys(table["analysis"])]
    glue = [name for name in analyses if f"{name}/".startswith(f"{GLUE}/")]
    apart = {SPEED, FINETUNE, *glue}
    tasks = [name for name in analyses if name.startswith(f"{TASKS}/") and name not in apart]
    parts: list[tuple[str, str, str, list[Block]]] = []
    for name in analyses:
        if name.split("/")[0] == INTERVENTIONS:
            parts.append((name, sentence(name), analysis_note(name), [*_by_variant(table, [name])]))
    tasks.sort(key=lambda name: name != MEDIAN)
    glue.sort(key=lambda name: name not in (GLUE, GLUE_MEAN))
    note = " ".join(filter(None, [analysis_note(TASKS), notes.get(MEDIAN)]))
    parts.append((TASKS, "Tasks under intervention", note, [*_by_variant(table, tasks)]))
    note = " ".join(filter(None, ["Each variant is fine-tuned and tested as it is.", notes.get(GLUE_MEAN)]))
    parts.append((GLUE, "GLUE under intervention", note, [*_by_variant(table, glue)]))
    note = "Before and after the weights were fine-tuned in the new order."
    parts.append((FINETUNE, "Fine-tuning under intervention", note, [*_finetuned(table)]))
    note = "What a variant costs, and what is left of the model at that price."
    parts.append((SPEED, "Speed under intervention", note, [*_speed(table)]))
    for name in analyses:
        if name.split("/")[0] == SIMILARITY:
            parts.append((name, sentence(name), analysis_note(name), [*_similarity(table, name)]))
    return [
        {"name": name, "title": title, "note": note, "metrics": balanced(blocks)}
        for name, title, note, blocks in parts
        if blocks
    ]


# ------------------------------------------------------------------------------------------------ other running orders


def _by_variant(table: Any, analyses: Sequence[str]) -> Iterator[Block]:
    """The blocks of analyses that belong together; a choice tells the analysis where there are several."""
    every = [rows for name in analyses for rows in _metrics(table, name, told=len(analyses) > 1)]
    models = _models(table, analyses)
    many = len(models) > 1
    if many:
        yield from _side_by_side(table, every)
        every = every[:1]  # of each model the first alone: the others are in the block of all models
    parts = [
        (
            f"{models[run]}, {rows.text}" if many else rows.text,
            _Rows(_of(table, run), rows.analysis, rows.metric, rows.tags, ""),
        )
        for rows in every
        for run in models
    ]
    parts = [(text, rows) for text, rows in parts if len(rows.rows)]
    for title, is_there, draw in _OF_VARIANTS:
        yield from _block(title, [(text, draw(rows)) for text, rows in parts if is_there(rows)])
    yield from _block("Over training", [*_training(parts)])


# What is drawn of the variants of one metric: title, of which rows, and what draws it.
_OF_VARIANTS: Sequence[tuple[str, Callable[[_Rows], Any], Callable[[_Rows], Callable[[], Chart]]]] = (
    (
        "Middle blocks changed",
        lambda rows: rows.names() & {*OF_MIDDLES},
        lambda rows: rows.draw(plots.variant_curves, best_loops=rows.num_loops > 1),
    ),
    ("Number of loops", lambda rows: rows.num_loops > 1, lambda rows: rows.draw(plots.loop_map)),
    ("Single blocks", lambda rows: rows.names() & {*OF_BLOCKS}, lambda rows: rows.draw(plots.block_curves)),
    ("Own schedules", lambda rows: "custom" in rows.names(), lambda rows: rows.draw(plots.schedule_scores)),
)


def _block(title: str, choices: Sequence[_Choice]) -> Iterator[Block]:
    if choices:
        yield block(title, _NOTES[title], [(text, [("", draw)]) for text, draw in choices], wide=True)


def _training(parts: Sequence[tuple[str, _Rows]]) -> Iterator[_Choice]:
    """Some numbers of middle blocks of each metric; of accuracy what is kept of the full model's."""
    stepped = [(text, rows) for text, rows in parts if rows.num_steps > 1 and rows.middles]
    stepped.sort(key=lambda pair: pair[1].metric != "variant_accuracy")
    for text, rows in stepped[:3]:
        kept = look_up(rows.metric).of_full
        for middle in _spread_middles(rows.middles):
            told = f"{text} kept" if kept else text
            yield f"{told}, M = {middle}", rows.draw(plots.variants_over_training, middle=middle, kept=kept)


def _spread_middles(middles: list[int]) -> list[int]:
    """Some, the one of about half of the blocks first; M = 1 changes no order."""
    several = [middle for middle in middles if middle > 1] or middles
    chosen = spread(several, _MIDDLES)
    half = chosen[(len(chosen) - 1) // 2]
    return sorted(chosen, key=lambda middle: middle != half)


def _side_by_side(table: Any, every: Sequence[_Rows]) -> Iterator[Block]:
    """A line a model: a choice for each of the first metrics, and each variant."""
    choices: list[_Choice] = []
    for rows in every[:3]:
        for variant in (name for name in (*OF_MIDDLES, *OF_BLOCKS) if name in rows.names()):
            told = f"{rows.text}: {tag_text({'variant': variant})}"
            choices.append((told, rows.draw(plots.models_by_middle, variant=variant)))
    yield from _block("Models side by side", choices)


def _finetuned(table: Any) -> Iterator[Block]:
    models = _models(table, [FINETUNE])
    choices: list[_Choice] = []
    for run, name in models.items():
        for rows in _metrics(_of(table, run), FINETUNE, told=False, split="when"):
            text = f"{name}, {rows.text}" if len(models) > 1 else rows.text
            choices.append((text, rows.draw(plots.variant_curves, split="when")))
    yield from _block("Before and after fine-tuning", choices)


def _speed(table: Any) -> Iterator[Block]:
    models = _models(table, [SPEED])
    fronts: list[_Choice] = []
    costs: list[_Choice] = []
    for run, name in models.items():
        own = _of(table, run)
        before = f"{name}, " if len(models) > 1 else ""
        every = [*_metrics(own, SPEED, told=False)]
        for quality, cost, how in _fronts(own):
            which = {"analysis": quality.analysis, "tags": quality.tags, "cost": cost.metric}
            which |= {"cost_analysis": cost.analysis, "cost_tags": cost.tags}
            front = partial(plots.quality_front, own, quality.metric, **which)
            fronts.append((before + ", ".join(filter(None, [quality.text, how])), front))
        costs += [
            (before + rows.text, rows.draw(plots.variant_curves)) for rows in every if rows.names() & {*OF_MIDDLES}
        ]
    yield from _block("Quality against latency", fronts)
    yield from _block("Cost by blocks changed", costs)


def _fronts(table: Any) -> Iterator[tuple[_Rows, _Rows, str]]:
    """The qualities and costs of one run that have variants in common, and how these were run where that differs."""
    every = [*_metrics(table, SPEED, told=False)]
    chosen = [rows for rows in every if rows.metric == "relative_latency"]
    chosen = chosen or [rows for rows in every if rows.metric == "latency"]
    for quality in qualities(table):
        for cost in chosen:
            if cells(quality.rows) & cells(cost.rows) - {("baseline", None, None, None)}:
                yield quality, cost, tag_text(cost.tags) if len(chosen) > 1 else ""


def qualities(table: Any) -> list[_Rows]:
    """What a variant of one run is worth: the median over tasks or the tasks, then accuracy and loss."""
    names = dict.fromkeys(table["analysis"])
    tasks = [n for n in names if n.startswith(f"{TASKS}/") and n not in (SPEED, FINETUNE) and not n.startswith(GLUE)]
    tasks = [MEDIAN] if MEDIAN in tasks else tasks
    own = [name for name in names if name.split("/")[0] == INTERVENTIONS]
    every = [rows for name in (*tasks, *own) for rows in _metrics(table, name, told=len(tasks) > 1 or len(own) > 1)]
    return [rows for metric in headlines() for rows in every if rows.metric == metric]


def cells(rows: Any) -> set[tuple[Any, ...]]:
    """Returns which variants rows are of."""
    names = ("variant", "middle", "loops", "layer")
    columns = [rows[name].tolist() if name in rows else [None] * len(rows) for name in names]
    return {tuple(None if pd.isna(value) else value for value in cell) for cell in zip(*columns, strict=True)}


def _metrics(table: Any, analysis: str, *, told: bool, split: str | None = None) -> Iterator[_Rows]:
    """The metrics of one analysis under each of its circumstances (such as `execution`), the plainest metric first."""
    part = table[table["analysis"] == analysis]
    metrics = sorted(
        dict.fromkeys(part["metric"]), key=lambda name: (not is_in(name, "variant", "task", "cost"), rank(name))
    )
    for metric in metrics:
        rows = part[part["metric"] == metric]
        if "variant" not in rows or rows["variant"].isna().all() or ("seed" in rows and rows["seed"].notna().all()):
            continue
        for tags in _circumstances(rows, split):
            title = look_up(metric).title
            if analysis == MEDIAN:
                title = f"Median {title.lower()}"
            elif analysis == GLUE_MEAN:
                title = f"Mean {title.lower()}"
            elif told and analysis != GLUE:
                title = f"{sentence(analysis.removeprefix(f'{GLUE}/').split('/', 1)[-1])}: {title.lower()}"
            yield _Rows(table, analysis, metric, tags, ", ".join(filter(None, [title, tag_text(tags)])))


def _circumstances(rows: Any, split: str | None) -> list[dict[str, Any]]:
    """The values of the tags that tell of no variant, together."""
    names = [name for name in ("execution", "training", "when") if name in rows and rows[name].notna().any()]
    names = [name for name in names if name != split]
    found = rows[rows["variant"] != "baseline"] if (rows["variant"] != "baseline").any() else rows
    return (
        [
            {name: value for name, value in zip(names, values, strict=True) if not pd.isna(value)}
            for values in dict.fromkeys(zip(*(found[name] for name in names), strict=True))
        ]
        if names
        else [{}]
    )


def _models(table: Any, analyses: Sequence[str]) -> dict[str, str]:
    """The runs that have rows of these analyses, and what they are called."""
    return short_names([*table[table["analysis"].isin(analyses)]["run"].unique()])


def _of(table: Any, run: str) -> Any:
    return table[table["run"] == run]


# ------------------------------------------------------------------------------------------------ similarity


def _similarity(table: Any, analysis: str) -> Iterator[Block]:
    models = _models(table, [analysis])
    choices: list[tuple[str, list[Callable[[], Chart]]]] = []
    told = []
    for run, name in models.items():
        rows = _of(table, run)
        rows = rows[rows["analysis"] == analysis]
        for metric, tags in _similarities(rows):
            stages = _stages_of(rows, metric, tags)
            text = ", ".join(filter(None, [name if len(models) > 1 else "", look_up(metric).title, tag_text(tags)]))
            over_steps = [partial(plots.stages_over_training, stages)] if stages["step"].nunique() > 1 else []
            choices.append((text, [partial(plots.similarity_matrix, rows, metric, tags=tags), *over_steps]))
            if (counts := stage_text(stages)) and (len(models) == 1 or not any(name in one for one in told)):
                told.append(f"{text}: {counts}")  # of several models by the first similarity
    if choices:
        places = min(len(figures) for _, figures in choices)  # every choice has the same
        ends = f" Stages at the last checkpoint: {'; '.join(told)}." if told else ""
        figures = [(text, [("", draw) for draw in drawings[:places]]) for text, drawings in choices]
        yield block(_SIMILAR, _NOTES[_SIMILAR] + ends, figures, wide=True)
    contrast = table[(table["analysis"] == analysis) & (table["metric"] == CONTRAST)]
    if len(models) == 1 and contrast["step"].nunique() > 1:
        own = look_up(CONTRAST)
        curves = [("", partial(plots.emergence_curves, contrast, CONTRAST))]
        yield block(own.with_unit, own.note, [("", curves)], wide=True)


def _similarities(rows: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each metric of pairs of layers in each of its modes."""
    for metric in SIMILARITIES:
        own = rows[rows["metric"] == metric]
        modes = [*own["mode"].dropna().unique()] if "mode" in own else []
        if len(own):
            yield from ((metric, {"mode": mode}) for mode in modes) if modes else [(metric, {})]


def _stages_of(rows: Any, metric: str, tags: Mapping[str, Any]) -> Any:
    """The rows that tell the stages by one similarity."""
    found = rows[rows["metric"].isin(STAGES)]
    found = found[found["of"] == metric] if "of" in found else found
    for name, value in tags.items():
        found = found[found[name] == value]
    return found
