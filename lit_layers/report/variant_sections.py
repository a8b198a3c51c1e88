"""The sections of models whose blocks run otherwise: few blocks, with choices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import BLOCKS, analysis_note, in_sentence, tag_text
from lit_layers.figures.models import short_names
from lit_layers.figures.tables import GLUE, GLUE_MEAN, MEDIAN, grouped
from lit_layers.figures.theme import spread
from lit_layers.figures.variants import BASELINE, LOOPED
from lit_layers.functional.block_schedules import CUSTOM, OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import headlines, is_in, look_up, rank, sentence
from lit_layers.records import FAILED
from lit_layers.report.sections import balanced, block

READOUT, TASKS = "interventions", "intervene"
SPEED, FINETUNE = "intervene/speed", "intervene/finetune"
_MIDDLES = 4  # numbers of middle blocks that a reader chooses from, over training
_CELL = ["variant", "middle", "loops", "layer"]
_Drawing = tuple[str, str, Callable[[], Chart]]  # title of the block, text of the choice, and what draws it


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
        for name, value in ({"seed": None, "statistic": None} | self.tags).items():
            if name in rows:
                rows = rows[rows[name] == value] if value is not None else rows[rows[name].isna()]
        return rows

    def has(self, *variants: str) -> bool:
        return bool(self.rows["variant"].isin(variants).any())

    def shares_cells(self, other: "_Scores") -> bool:
        """Return whether both are of any variant of the same blocks and loops."""
        one, two = (s.rows[s.rows["variant"] != BASELINE].reindex(columns=_CELL) for s in (self, other))
        return len(one.merge(two)) > 0

    def draw(self, make: Callable[..., Chart], **options: Any) -> Callable[[], Chart]:
        return partial(make, self.table, self.metric, analysis=self.analysis, tags=self.tags, **options)


def is_own(frame: pd.DataFrame) -> Any:
    """Return which rows the sections of this file show, a boolean a row."""
    table: Any = frame
    has_variant = table["variant"].notna() if "variant" in table else pd.Series(False, index=table.index)
    own = table["analysis"].str.split("/").str[0].isin([READOUT, TASKS])
    return own & (has_variant | (table["metric"] == "random_score"))


def sections(frame: pd.DataFrame, notes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the sections of other running orders, of a run or of models; `notes` tell of analyses.

    Of a run a figure has a slider over the checkpoints; several models have a figure each to choose.
    """
    if frame.empty:
        return []
    table: Any = frame[is_own(frame) & (frame["metric"] != FAILED)]
    # single random orders, which no figure shows, are most of the rows
    table = table[table["seed"].isna()] if "seed" in table else table
    analyses = [*table["analysis"].unique()]
    trained = [name for name in analyses if _is_trained(name)]
    readout = [name for name in analyses if name.split("/")[0] == READOUT]
    of_glue = sorted((name for name in analyses if name.startswith(f"{GLUE}/")), key=lambda name: name != GLUE_MEAN)
    shown = []
    for name, title, tested, drawings in (
        *((name, sentence(name), "", _by_variant(table, [name])) for name in readout),
        (TASKS, "Tasks under intervention", MEDIAN, _by_variant(table, _tasks(analyses))),
        (GLUE, "GLUE under intervention", GLUE_MEAN, _by_variant(table, of_glue)),
        (FINETUNE, "Fine-tuning under intervention", "", _finetuned(table, trained)),
        (SPEED, "Speed under intervention", "", _speed(table)),
    ):
        by_title = grouped(drawings, lambda drawing: drawing[0])
        blocks = [
            block(heading, BLOCKS[heading], [(text, [("", draw)]) for _, text, draw in part], wide=True)
            for heading, part in by_title.items()
        ]
        note = f"{BLOCKS.get(title) or analysis_note(name)} {notes.get(tested, '')}".strip()
        shown += [{"name": name, "title": title, "note": note, "metrics": balanced(blocks)}] if blocks else []
    return shown


# Title, variants that have such a figure, and what draws it.
_OF_VARIANTS = (
    ("Middle blocks changed", OF_MIDDLES, partial(plots.variant_curves, best_loops=True)),
    ("Number of loops", (LOOPED,), plots.loop_map),
    ("Single blocks", OF_BLOCKS, partial(plots.variant_curves, blocks=True)),
    ("Own schedules", (CUSTOM,), plots.schedule_scores),
)


def _by_variant(table: Any, analyses: Sequence[str]) -> Iterator[_Drawing]:
    """Yield the figures of analyses that belong together; a choice tells the analysis where there are several."""
    every = [scores for name in analyses for scores in _metrics(table, name, named=len(analyses) > 1)]
    models = _models(table, analyses)
    if len(models) > 1:  # a choice for each of the first metrics, and each variant
        for scores in every[:3]:
            for name in filter(scores.has, (*OF_MIDDLES, *OF_BLOCKS)):
                text = f"{scores.text}: {tag_text({'variant': name})}"
                yield "Models side by side", text, scores.draw(plots.models_by_middle, variant=name)
        every = every[:1]  # of each model the first alone: the others are in the block of all models
    parts = [
        _Scores(of_model, scores.analysis, scores.metric, scores.tags, f"{before}{scores.text}")
        for scores in every
        for before, of_model in models
    ]
    parts = [scores for scores in parts if len(scores.rows)]
    for title, variants, make in _OF_VARIANTS:
        yield from ((title, scores.text, scores.draw(make)) for scores in parts if scores.has(*variants))
    yield from _training(parts)


def _training(parts: Sequence[_Scores]) -> Iterator[_Drawing]:
    """Yield some numbers of middle blocks of each metric; of accuracy what is kept of the full model's."""
    stepped = [scores for scores in parts if scores.rows["step"].nunique() > 1 and "middle" in scores.rows]
    for scores in sorted(stepped, key=lambda scores: scores.metric != "variant_accuracy")[:3]:
        kept, every = look_up(scores.metric).of_full, sorted({int(m) for m in scores.rows["middle"].dropna()})
        # the one of about half of the blocks first; M = 1 changes no order
        middles = spread([middle for middle in every if middle > 1] or every, _MIDDLES)
        half = middles[(len(middles) - 1) // 2] if middles else 0
        for middle in sorted(middles, key=lambda middle: middle != half):
            text = f"{scores.text}{' kept' if kept else ''}, M = {middle}"
            yield "Over training", text, scores.draw(plots.variants_over_training, middle=middle, kept=kept)


def _is_trained(analysis: str) -> bool:
    """Return whether an analysis is of weights trained in another order, on the rows of a task."""
    return analysis.startswith(f"{FINETUNE}_")


def _tasks(analyses: Sequence[str]) -> list[str]:
    """Return the analyses of tasks, the median over them first."""
    names = [name for name in analyses if name.startswith(f"{TASKS}/") and name != SPEED]
    names = [name for name in names if not (_is_trained(name) or name.startswith(GLUE))]
    return sorted(names, key=lambda name: name != MEDIAN)


def _finetuned(table: Any, analyses: Sequence[str]) -> Iterator[_Drawing]:
    for name in analyses:
        for before, of_model in _models(table, [name]):
            for scores in _metrics(of_model, name, named=len(analyses) > 1, split="when"):
                draw = scores.draw(plots.variant_curves, split="when")
                yield "Before and after fine-tuning", f"{before}{scores.text}", draw


def _speed(table: Any) -> Iterator[_Drawing]:
    costs = list[_Drawing]()
    for before, of_model in _models(table, [SPEED]):
        every = [*_metrics(of_model, SPEED, named=False)]
        latencies = [scores for scores in every if scores.metric == "relative_latency"]
        latencies = latencies or [scores for scores in every if scores.metric == "latency"]
        for quality in _qualities(of_model):
            for cost in filter(quality.shares_cells, latencies):
                text = ", ".join(filter(None, [quality.text, tag_text(cost.tags) if len(latencies) > 1 else ""]))
                which = {"cost": cost.metric, "cost_analysis": cost.analysis, "cost_tags": cost.tags}
                yield "Quality against latency", before + text, quality.draw(plots.quality_front, **which)
        of_middles = (scores for scores in every if scores.has(*OF_MIDDLES))
        costs += [("Cost by blocks changed", before + s.text, s.draw(plots.variant_curves)) for s in of_middles]
    yield from costs


def _qualities(table: Any) -> list[_Scores]:
    """Return what a variant of one run is worth: the median over tasks or the tasks, then accuracy and loss."""
    analyses = [*table["analysis"].unique()]
    tasks, readout = _tasks(analyses), [name for name in analyses if name.split("/")[0] == READOUT]
    tasks = tasks[:1] if MEDIAN in tasks else tasks
    named = len(tasks) > 1 or len(readout) > 1
    every = [scores for name in (*tasks, *readout) for scores in _metrics(table, name, named=named)]
    return [scores for metric in headlines() for scores in every if scores.metric == metric]


def _metrics(table: Any, analysis: str, *, named: bool, split: str | None = None) -> Iterator[_Scores]:
    """Yield the metrics of one analysis under each of its circumstances (such as `when`), the plainest metric first."""
    part = table[(table["analysis"] == analysis) & table["variant"].notna()] if "variant" in table else table[:0]
    metrics = sorted(part["metric"].unique(), key=lambda name: (not is_in(name, "variant", "task", "cost"), rank(name)))
    for metric in metrics:
        title = look_up(metric).title
        if analysis in (MEDIAN, GLUE_MEAN):
            title = f"{'Median' if analysis == MEDIAN else 'Mean'} {in_sentence(title)}"
        elif named:
            title = f"{sentence(analysis.removeprefix(f'{GLUE}/').split('/', 1)[-1])}: {in_sentence(title)}"
        for tags in _circumstances(part[part["metric"] == metric], split):
            yield _Scores(table, analysis, metric, tags, ", ".join(filter(None, [title, tag_text(tags)])))


def _circumstances(rows: Any, split: str | None) -> list[dict[str, Any]]:
    """Return the values of the tags that tell of no variant, together."""
    names = [n for n in ("training", "when") if n != split and n in rows and rows[n].notna().any()]
    rows = rows[rows["variant"] != BASELINE] if (rows["variant"] != BASELINE).any() else rows
    kinds = rows[names].drop_duplicates().to_dict("records") if names else [{}]
    return [{name: value for name, value in kind.items() if not pd.isna(value)} for kind in kinds]


def _models(table: Any, analyses: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the rows of each run with any of these analyses, and what the choices of several runs begin with."""
    names = short_names([*table[table["analysis"].isin(analyses)]["run"].unique()])
    return [(f"{name}, " if len(names) > 1 else "", table[table["run"] == run]) for run, name in names.items()]
