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
from lit_layers.figures.tables import GLUE, GLUE_MEAN, MEDIAN, grouped, usual_loops
from lit_layers.figures.theme import spread
from lit_layers.figures.variants import BASELINE, LOOPED
from lit_layers.functional.block_schedules import CUSTOM, OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import is_in, look_up, rank, sentence
from lit_layers.records import FAILED
from lit_layers.report.sections import balanced, block

READOUT, TASKS = "interventions", "intervene"
SPEED, FINETUNE = "intervene/speed", "intervene/finetune"
_MIDDLES = 4  # numbers of middle blocks that a reader chooses from, over training
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
        for name, value in ({"statistic": None} | self.tags).items():
            if name in rows:
                rows = rows[rows[name] == value] if value is not None else rows[rows[name].isna()]
        return rows

    def has(self, *variants: str) -> bool:
        return bool(self.rows["variant"].isin(variants).any())

    def draw(self, make: Callable[..., Chart], table: Any = None, **options: Any) -> Callable[[], Chart]:
        table = self.table if table is None else table
        return partial(make, table, self.metric, analysis=self.analysis, tags=self.tags, **options)


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
    table: Any = frame[is_own(frame) & (frame["metric"] != FAILED)]
    if table.empty or "variant" not in table:
        return []
    # single random orders, which no figure shows, are most of the rows
    table = table[table["seed"].isna()] if "seed" in table else table
    analyses = [*table["analysis"].unique()]
    readout = [name for name in analyses if name.split("/")[0] == READOUT]
    of_glue = sorted((name for name in analyses if name.startswith(f"{GLUE}/")), key=lambda name: name != GLUE_MEAN)
    trained = [name for name in analyses if name.startswith(f"{FINETUNE}_")]
    tasks = [name for name in analyses if name not in (*readout, *of_glue, *trained, SPEED)]
    tasks.sort(key=lambda name: name != MEDIAN)
    costs = {"Cost by blocks changed": (OF_MIDDLES, plots.variant_curves)}
    before_after = {"Before and after fine-tuning": (OF_MIDDLES, partial(plots.variant_curves, split="when"))}
    shown = []
    for name, title, tested, drawings in (
        *((name, sentence(name), "", _by_variant(table, [name])) for name in readout),
        (TASKS, "Tasks under intervention", MEDIAN, _by_variant(table, tasks)),
        (GLUE, "GLUE under intervention", GLUE_MEAN, _by_variant(table, of_glue)),
        (FINETUNE, "Fine-tuning under intervention", "", _of_each(table, trained, before_after, split="when")),
        (SPEED, "Speed under intervention", "", _of_each(table, [SPEED], costs)),
    ):
        blocks = [
            block(heading, BLOCKS[heading], [(text, [("", draw)]) for _, text, draw in part], wide=True)
            for heading, part in grouped(drawings, lambda drawing: drawing[0]).items()
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


def _of_each(table: Any, analyses: Sequence[str], kinds: _Kinds, split: str | None = None) -> Iterator[_Drawing]:
    yield from _drawings([*_of_models(table, analyses, split)], kinds)


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
        loops = usual_loops(rows[["loops"]].dropna().to_dict("records")) if "loops" in rows else None
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
            if analysis in (MEDIAN, GLUE_MEAN):
                title = f"{'Median' if analysis == MEDIAN else 'Mean'} {in_sentence(title)}"
            elif len(analyses) > 1:
                title = f"{sentence(analysis.removeprefix(f'{GLUE}/').split('/', 1)[-1])}: {in_sentence(title)}"
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
