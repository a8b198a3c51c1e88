"""The sections of analyses whose metrics belong together: probes on tasks, sample sizes, word pairs, residuals."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures import Chart
from lit_layers.figures.labels import tag_text
from lit_layers.figures.tables import CATEGORY, TRAIN_ROWS
from lit_layers.metrics import look_up, names, sentence
from lit_layers.report.sections import Block, Captioned, block

_SPLITS = ("test", "validation", "train")
CONTROLS = ("random_labels", "untrained_model", "relabelled_vocabulary")
_NOTES = {"accuracy": "Of a linear probe. A row of a class that no training row has counts as an error."}
_Figures = Iterable[Captioned]


def section_blocks(part: pd.DataFrame, analysis: str) -> tuple[list[Block], list[str]]:
    """Returns the blocks of metrics that belong together, of one analysis of a run, and which metrics are in them."""
    table: Any = part
    # a measurement that failed leaves no rows, and each tag is a column of the whole run
    tags = {name for name in (TRAIN_ROWS, CATEGORY, "task", "split") if name in table and table[name].notna().any()}
    rows = _Rows(part, analysis)
    if TRAIN_ROWS in tags and rows.having("score"):
        return [_sample_sizes(rows)], rows.having("score")
    if CATEGORY in tags and "concept_alignment" in rows.metrics:
        return [_concepts(rows)], rows.having("concept")
    if "prediction_residual" in rows.metrics:
        return [*_residuals(rows)], rows.having("residual", "law", "residual_detail")
    if {"task", "split"} <= tags:
        return [*_probe(rows)], rows.having("score", "monotonicity", "layer")
    return [], []


class _Rows:
    """The rows of one analysis, each metric's apart: they are searched for every figure."""

    def __init__(self, part: pd.DataFrame, analysis: str) -> None:
        table: Any = part
        self.table, self.analysis = table, analysis
        self._of = {metric: table[table["metric"] == metric] for metric in dict.fromkeys(table["metric"])}

    def without(self, tag: str) -> "_Rows":
        """All rows, as if they did not have a tag."""
        return _Rows(self.table.drop(columns=tag), self.analysis)

    def lacking(self, tag: str) -> "_Rows":
        """The rows that do not have a tag."""
        return _Rows(self.table[self.table[tag].isna()], self.analysis)

    @property
    def metrics(self) -> Collection[str]:
        return self._of.keys()

    def having(self, *groups: str) -> list[str]:
        return [metric for group in groups for metric in names(group) if metric in self._of]

    def values(self, metric: str, tag: str, among: Sequence[str]) -> list[str]:
        rows = self._of[metric]
        known = set(rows[tag].dropna()) if tag in rows else set()
        return [value for value in among if value in known]

    def draw(
        self, make: Callable[..., Chart], metric: str, *, beside: Sequence[str] = (), **options: Any
    ) -> Callable[[], Chart]:
        table = pd.concat([self._of[name] for name in (metric, *beside)])
        return partial(make, table, metric, analysis=self.analysis, **options)


def _probe(rows: _Rows) -> Iterator[Block]:
    for metric in rows.having("score"):
        splits = rows.values(metric, "split", _SPLITS)
        choices = [(tag_text({"split": split}), _score(rows, metric, split)) for split in splits]
        yield block(look_up(metric).with_unit, _NOTES.get(metric, look_up(metric).note), choices, wide=True)
    rows = rows.without("split")  # one and the same
    if found := rows.having("monotonicity"):
        note = "How steadily the test score rises from layer 1 to the last, with 95% intervals over the test rows."
        yield block("Monotonicity over the layers", note, _over_training(rows, found))
    if found := rows.having("layer"):
        note = "Where the test score ends to rise by more than 0.01 a layer, where it is best, where it bends first."
        yield block("Plateau, best layer and inflection", note, _over_training(rows, found))


def _score(rows: _Rows, metric: str, split: str) -> _Figures:
    tags = {"split": split, "control": None}
    controls = rows.values(metric, "control", CONTROLS) if split == "test" else []
    yield "Over training", rows.draw(plots.emergence_curves, metric, tags=tags)
    yield "Over layers", rows.draw(plots.layer_profile, metric, tags=tags, controls=controls, intervals=True)


def _over_training(rows: _Rows, metrics: Sequence[str]) -> list[tuple[str, _Figures]]:
    """A choice a metric of the whole model; what it tells of, the accuracy or the log-loss, are lines of one figure."""
    return [(_short(metric), [("", rows.draw(plots.emergence_curves, metric))]) for metric in metrics]


def _short(metric: str) -> str:
    """A metric's title behind the comma: what tells it from those of its block."""
    return sentence(look_up(metric).title.split(", ")[-1])


def _sample_sizes(rows: _Rows) -> Block:
    choices = [
        (
            look_up(metric).title,
            [
                ("Over training rows", rows.draw(plots.sample_size_curves, metric)),
                ("Over layers", rows.draw(plots.sample_size_curves, metric, over="layers")),
            ],
        )
        for metric in rows.having("score")
    ]
    note = "On the test rows, with Student's 95% intervals over the draws of training rows."
    return block("Score by number of training rows", note, choices, wide=True)


def _concepts(rows: _Rows) -> Block:
    def figures(metric: str) -> _Figures:
        beside = [name for name in (look_up(metric).baseline,) if name in rows.metrics]
        options: dict[str, Any] = {"beside": beside, "baselines": beside, "intervals": True}
        yield "", rows.draw(plots.concept_map, metric)
        if metric in means.metrics:  # of a single category there is none
            yield "Mean, over training", means.draw(plots.emergence_curves, metric)
            yield "Mean, over layers", means.draw(plots.layer_profile, metric, **options)

    means = rows.lacking(CATEGORY)  # searched without the categories: 40 times as fast
    choices = [(look_up(metric).title, figures(metric)) for metric in rows.having("concept")]
    note = "Mean cosine between the differences of two word pairs; the excess is what shuffled pairs do not have."
    return {**block("Categories of word pairs (cosine)", note, choices, wide=True), "tall": True}


def _residuals(rows: _Rows) -> Iterator[Block]:
    def figures(metric: str) -> _Figures:
        profile = plots.residual_profile if metric == "prediction_residual" else plots.layer_profile
        options: dict[str, Any] = {} if metric == "prediction_residual" else {"intervals": True}
        options["controls"] = rows.values(metric, "control", CONTROLS)
        yield "Over training", rows.draw(plots.emergence_curves, metric, tags={"control": None})
        yield "Over layers", rows.draw(profile, metric, tags={"control": None}, **options)

    choices = [(look_up(metric).title, figures(metric)) for metric in rows.having("residual")]
    yield block("Prediction residual (share of variance)", look_up("prediction_residual").note, choices, wide=True)
    if found := rows.having("law"):
        note = "Of the line through the log residual over the layers: its slope rho, and how well the points fit it."
        yield block("Exponential law over the layers", note, _over_training(rows, found))
