"""The sections of models whose blocks run otherwise, and of how alike layers are: few blocks, with choices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import BLOCKS, analysis_note, in_sentence, tag_text
from lit_layers.figures.maps import SIMILARITIES
from lit_layers.figures.models import short_names
from lit_layers.figures.tables import GLUE, GLUE_MEAN, MEDIAN
from lit_layers.figures.theme import spread
from lit_layers.figures.training import STAGES, stage_text
from lit_layers.figures.variants import BASELINE, LOOPED
from lit_layers.functional.block_schedules import OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import headlines, is_in, look_up, rank, sentence
from lit_layers.records import FAILED
from lit_layers.report.sections import balanced, block
from lit_layers.report.template import Block

INTERVENTIONS, TASKS = "interventions", "intervene"
SPEED, FINETUNE, SIMILARITY = "intervene/speed", "intervene/finetune", "layer_similarity"
CONTRAST = "block_contrast"
_MIDDLES = 4  # numbers of middle blocks that a reader chooses from, over training
_CELL = ["variant", "middle", "loops", "layer"]
_SIMILAR = "Similarity of layers"
_Choice = tuple[str, Callable[[], Chart]]


class _Scores:
    """A metric of an analysis under one circumstance (`tags`): its rows, what draws them, and what it is called."""

    def __init__(self, table: Any, analysis: str, metric: str, tags: dict[str, Any], text: str) -> None:
        self.table, self.analysis, self.metric, self.tags, self.text = table, analysis, metric, tags, text
        rows = table[(table["analysis"] == analysis) & (table["metric"] == metric)]
        for name, value in ({"seed": None, "statistic": None} | tags).items():
            if name in rows:
                rows = rows[rows[name] == value] if value is not None else rows[rows[name].isna()]
        self.rows = rows

    def has(self, *variants: str) -> bool:
        return bool(self.rows["variant"].isin(variants).any())

    @property
    def middles(self) -> list[int]:
        return sorted({int(m) for m in self.rows["middle"].dropna()}) if "middle" in self.rows else []

    @property
    def num_loops(self) -> int:
        looped = self.rows[self.rows["variant"] == LOOPED]
        return looped["loops"].nunique() if "loops" in looped else 0

    def shares_cells(self, other: "_Scores") -> bool:
        """Whether both are of any variant of the same blocks and loops."""
        one, two = (s.rows[s.rows["variant"] != BASELINE].reindex(columns=_CELL) for s in (self, other))
        return len(one.merge(two)) > 0

    def draw(self, make: Callable[..., Chart], **options: Any) -> Callable[[], Chart]:
        table = self.table[self.table["analysis"] == self.analysis]
        return partial(make, table, self.metric, analysis=self.analysis, tags=self.tags, **options)


def is_own(frame: pd.DataFrame) -> Any:
    """Returns which rows the sections of this file show, a boolean a row."""
    table: Any = frame
    first = table["analysis"].str.split("/").str[0]
    has_variant = table["variant"].notna() if "variant" in table else pd.Series(False, index=table.index)
    ours = first.isin([INTERVENTIONS, TASKS]) & (has_variant | (table["metric"] == "random_score"))
    return ours | ((first == SIMILARITY) & table["metric"].isin([*SIMILARITIES, *STAGES, CONTRAST]))


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
    table: Any = frame[is_own(frame) & (frame["metric"] != FAILED)]
    # single random orders, which no figure shows, are most of the rows
    table = table[table["seed"].isna()] if "seed" in table else table
    analyses = [*table["analysis"].unique()]
    glue = sorted((name for name in analyses if name.startswith(f"{GLUE}/")), key=lambda name: name != GLUE_MEAN)
    trained = [name for name in analyses if _is_trained(name)]
    tasks = [name for name in analyses if name.startswith(f"{TASKS}/") and name not in (SPEED, *trained, *glue)]
    tasks.sort(key=lambda name: name != MEDIAN)
    readout, similar = ([n for n in analyses if n.split("/")[0] == first] for first in (INTERVENTIONS, SIMILARITY))
    parts = [(name, sentence(name), analysis_note(name), _by_variant(table, [name])) for name in readout]
    for name, title, tested, made in (
        (TASKS, "Tasks under intervention", MEDIAN, _by_variant(table, tasks)),
        (GLUE, "GLUE under intervention", GLUE_MEAN, _by_variant(table, glue)),
        (FINETUNE, "Fine-tuning under intervention", "", _finetuned(table, trained)),
        (SPEED, "Speed under intervention", "", _speed(table)),
    ):
        parts.append((name, title, f"{BLOCKS.get(title) or analysis_note(name)} {notes.get(tested, '')}", made))
    parts += [(name, sentence(name), analysis_note(name), _similarity(table, name)) for name in similar]
    return [
        {"name": name, "title": title, "note": note.strip(), "metrics": balanced(blocks)}
        for name, title, note, made in parts
        if (blocks := [*made])
    ]


# ------------------------------------------------------------------------------------------------ other running orders


def _by_variant(table: Any, analyses: Sequence[str]) -> Iterator[Block]:
    """The blocks of analyses that belong together; a choice tells the analysis where there are several."""
    every = [scores for name in analyses for scores in _metrics(table, name, named=len(analyses) > 1)]
    models = _models(table, analyses)
    if len(models) > 1:
        yield from _side_by_side(every)
        every = every[:1]  # of each model the first alone: the others are in the block of all models
    parts = [
        _Scores(of_model, scores.analysis, scores.metric, scores.tags, f"{before}{scores.text}")
        for scores in every
        for before, of_model in models
    ]
    parts = [scores for scores in parts if len(scores.rows)]
    for title, is_there, make in _OF_VARIANTS:
        yield from _block(title, [(s.text, make(s)) for s in parts if is_there(s)])
    yield from _block("Over training", [*_training(parts)])


# What is drawn of the variants of one metric: title, of which, and what draws it.
_OF_VARIANTS: Sequence[tuple[str, Callable[[_Scores], bool], Callable[[_Scores], Callable[[], Chart]]]] = (
    (
        "Middle blocks changed",
        lambda scores: scores.has(*OF_MIDDLES),
        lambda scores: scores.draw(plots.variant_curves, best_loops=scores.num_loops > 1),
    ),
    ("Number of loops", lambda scores: scores.num_loops > 1, lambda scores: scores.draw(plots.loop_map)),
    (
        "Single blocks",
        lambda scores: scores.has(*OF_BLOCKS),
        lambda scores: scores.draw(plots.variant_curves, blocks=True),
    ),
    ("Own schedules", lambda scores: scores.has("custom"), lambda scores: scores.draw(plots.schedule_scores)),
)


def _block(title: str, choices: Sequence[_Choice]) -> Iterator[Block]:
    if choices:
        yield block(title, BLOCKS[title], [(text, [("", draw)]) for text, draw in choices], wide=True)


def _training(parts: Sequence[_Scores]) -> Iterator[_Choice]:
    """Some numbers of middle blocks of each metric; of accuracy what is kept of the full model's."""
    stepped = [scores for scores in parts if scores.rows["step"].nunique() > 1 and scores.middles]
    stepped.sort(key=lambda scores: scores.metric != "variant_accuracy")
    for scores in stepped[:3]:
        kept = look_up(scores.metric).of_full
        # the one of about half of the blocks first; M = 1 changes no order
        middles = spread([middle for middle in scores.middles if middle > 1] or scores.middles, _MIDDLES)
        half = middles[(len(middles) - 1) // 2]
        for middle in sorted(middles, key=lambda middle: middle != half):
            text = f"{scores.text} kept" if kept else scores.text
            yield f"{text}, M = {middle}", scores.draw(plots.variants_over_training, middle=middle, kept=kept)


def _side_by_side(every: Sequence[_Scores]) -> Iterator[Block]:
    """A line a model: a choice for each of the first metrics, and each variant."""
    choices = [
        (f"{scores.text}: {tag_text({'variant': name})}", scores.draw(plots.models_by_middle, variant=name))
        for scores in every[:3]
        for name in (*OF_MIDDLES, *OF_BLOCKS)
        if scores.has(name)
    ]
    yield from _block("Models side by side", choices)


def _is_trained(analysis: str) -> bool:
    return analysis.startswith(f"{FINETUNE}_")


def _finetuned(table: Any, analyses: Sequence[str]) -> Iterator[Block]:
    choices = [
        (f"{before}{scores.text}", scores.draw(plots.variant_curves, split="when"))
        for name in analyses
        for before, of_model in _models(table, [name])
        for scores in _metrics(of_model, name, named=len(analyses) > 1, split="when")
    ]
    yield from _block("Before and after fine-tuning", choices)


def _speed(table: Any) -> Iterator[Block]:
    fronts: list[_Choice] = []
    costs: list[_Choice] = []
    for before, of_model in _models(table, [SPEED]):
        every = [*_metrics(of_model, SPEED, named=False)]
        latencies = [scores for scores in every if scores.metric == "relative_latency"]
        latencies = latencies or [scores for scores in every if scores.metric == "latency"]
        for quality in qualities(of_model):
            for cost in latencies:
                if quality.shares_cells(cost):
                    how = tag_text(cost.tags) if len(latencies) > 1 else ""
                    which = {"analysis": quality.analysis, "tags": quality.tags, "cost": cost.metric}
                    which |= {"cost_analysis": cost.analysis, "cost_tags": cost.tags}
                    front = partial(plots.quality_front, of_model, quality.metric, **which)
                    fronts.append((before + ", ".join(filter(None, [quality.text, how])), front))
        of_middles = [scores for scores in every if scores.has(*OF_MIDDLES)]
        costs += [(before + scores.text, scores.draw(plots.variant_curves)) for scores in of_middles]
    yield from _block("Quality against latency", fronts)
    yield from _block("Cost by blocks changed", costs)


def qualities(table: Any) -> list[_Scores]:
    """What a variant of one run is worth: the median over tasks or the tasks, then accuracy and loss."""
    names = [*table["analysis"].unique()]
    tasks = [
        n for n in names if n.startswith(f"{TASKS}/") and n != SPEED and not (_is_trained(n) or n.startswith(GLUE))
    ]
    tasks = [MEDIAN] if MEDIAN in tasks else tasks
    readout = [name for name in names if name.split("/")[0] == INTERVENTIONS]
    named = len(tasks) > 1 or len(readout) > 1
    every = [scores for name in (*tasks, *readout) for scores in _metrics(table, name, named=named)]
    return [scores for metric in headlines() for scores in every if scores.metric == metric]


def _metrics(table: Any, analysis: str, *, named: bool, split: str | None = None) -> Iterator[_Scores]:
    """The metrics of one analysis under each of its circumstances (such as `when`), the plainest metric first."""
    part = table[(table["analysis"] == analysis) & table["variant"].notna()] if "variant" in table else table[:0]
    metrics = sorted(part["metric"].unique(), key=lambda name: (not is_in(name, "variant", "task", "cost"), rank(name)))
    for metric in metrics:
        title = look_up(metric).title
        small = in_sentence(title)
        if analysis in (MEDIAN, GLUE_MEAN):
            title = f"{'Median' if analysis == MEDIAN else 'Mean'} {small}"
        elif named:
            title = f"{sentence(analysis.removeprefix(f'{GLUE}/').split('/', 1)[-1])}: {small}"
        for tags in _circumstances(part[part["metric"] == metric], split):
            yield _Scores(table, analysis, metric, tags, ", ".join(filter(None, [title, tag_text(tags)])))


def _circumstances(rows: Any, split: str | None) -> list[dict[str, Any]]:
    """The values of the tags that tell of no variant, together."""
    names = [n for n in ("training", "when") if n != split and n in rows and rows[n].notna().any()]
    rows = rows[rows["variant"] != BASELINE] if (rows["variant"] != BASELINE).any() else rows
    kinds = rows[names].drop_duplicates().to_dict("records") if names else [{}]
    return [{name: value for name, value in kind.items() if not pd.isna(value)} for kind in kinds]


def _models(table: Any, analyses: Sequence[str]) -> list[tuple[str, Any]]:
    """The rows of each run that has any of these analyses, and what its choices begin with where there are several."""
    names = short_names([*table[table["analysis"].isin(analyses)]["run"].unique()])
    return [(f"{name}, " if len(names) > 1 else "", table[table["run"] == run]) for run, name in names.items()]


# ------------------------------------------------------------------------------------------------ similarity


def _similarity(table: Any, analysis: str) -> Iterator[Block]:
    models = _models(table, [analysis])
    choices: list[tuple[str, list[Callable[[], Chart]]]] = []
    stages = []
    for before, of_model in models:
        rows = of_model[of_model["analysis"] == analysis]
        first = True
        for metric, tags in _similarities(rows):
            counted = _stages_of(rows, metric, tags)
            text = before + ", ".join(filter(None, [look_up(metric).title, tag_text(tags)]))
            over_steps = [partial(plots.stages_over_training, counted)] if counted["step"].nunique() > 1 else []
            choices.append((text, [partial(plots.layer_matrix, rows, metric, tags=tags), *over_steps]))
            if (counts := stage_text(counted)) and (len(models) == 1 or first):
                stages.append(f"{text}: {counts}")  # of several models by the first similarity
                first = False
    if choices:
        places = min(len(figures) for _, figures in choices)  # every choice has the same
        ends = f" Stages at the last checkpoint: {'; '.join(stages)}." if stages else ""
        figures = [(text, [("", draw) for draw in drawings[:places]]) for text, drawings in choices]
        yield block(_SIMILAR, BLOCKS[_SIMILAR] + ends, figures, wide=True)
    contrast = table[(table["analysis"] == analysis) & (table["metric"] == CONTRAST)]
    if len(models) == 1 and contrast["step"].nunique() > 1:
        row = look_up(CONTRAST)
        curves = [("", partial(plots.emergence_curves, contrast, CONTRAST))]
        yield block(row.with_unit, row.note, [("", curves)], wide=True)


def _similarities(rows: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each metric of pairs of layers in each of its modes."""
    for metric in SIMILARITIES:
        of_metric = rows[rows["metric"] == metric]
        modes = [*of_metric["mode"].dropna().unique()] if "mode" in of_metric else []
        if len(of_metric):
            yield from ((metric, {"mode": mode}) for mode in modes) if modes else [(metric, {})]


def _stages_of(rows: Any, metric: str, tags: Mapping[str, Any]) -> Any:
    """The rows that tell the stages by one similarity."""
    rows = rows[rows["metric"].isin(STAGES)]
    for name, value in {"of": metric, **tags}.items():
        rows = rows[rows[name] == value] if name in rows else rows
    return rows
