"""How a correlation over models depends on an option of the metric, such as the number K of directions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lit_layers.correlate.findings import Row, correlate
from lit_layers.correlate.model_table import FEWEST, ModelTable, lowered, of_models
from lit_layers.correlate.run_models import RunModel
from lit_layers.errors import InputError
from lit_layers.figures.axes import Axis
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import tag_text
from lit_layers.figures.theme import COLORS, rounded
from lit_layers.metrics import look_up

HEADLINE = "Pearson r"


@dataclass(frozen=True, kw_only=True)
class OverTag:
    """The coefficients at each value of a tag, all over the same models: those that have the metric at every value."""

    tag: str
    values: Sequence[str | int | float]
    tables: Sequence[ModelTable]
    rows: Sequence[Sequence[Row]]  # of each value, of the metric
    corrected: Sequence[Sequence[Row]]  # of the metric with its baseline taken off, where it has one
    left_out: Mapping[str, str]

    def parts(self) -> list[tuple[str, Sequence[Sequence[Row]]]]:
        """The metric with its coefficients, and the corrected one with its own where there is one."""
        corrected = self.tables[0].corrected
        return [(self.tables[0].metric, self.rows), *([(corrected, self.corrected)] if corrected else [])]

    @property
    def frame(self) -> pd.DataFrame:
        """A row a value and coefficient: `tag`, `at`, `of`, `name`, `value`, `low`, `high`, `p` and `n`."""
        rows = []
        for of, parts in self.parts():
            for value, part in zip(self.values, parts, strict=True):
                facts = {"tag": self.tag, "at": value, "of": of}
                rows += [{**facts, **{k: v for k, v in vars(row).items() if k not in ("df", "note")}} for row in part]
        return pd.DataFrame(rows)

    def chart(self) -> Chart:
        """Pearson's r over the values, with its 95% interval over models: of the metric and of the corrected one."""
        numeric = all(isinstance(value, int | float) for value in self.values)
        x = list(self.values) if numeric else list(range(len(self.values)))
        labels = {place: str(value) for place, value in zip(x, self.values, strict=True)}
        table, series = self.tables[0], []
        for color, dash, (of, rows) in zip(COLORS, ("", "dash"), self.parts(), strict=False):
            headlines = [next((row for row in part if row.name == HEADLINE), None) for part in rows]
            if any(headlines):
                ends = {end: rounded([getattr(row, end, None) for row in headlines]) for end in ("low", "high")}
                values = rounded([row.value if row else None for row in headlines])
                look: dict[str, Any] = {"width": 2.0, "mark": "circle", "legend": True, "color": color, "dash": dash}
                series.append(Series(x=x, y=values, name=look_up(of).title, **ends, **look))
        axis = Axis(title=self.tag, labels=labels)
        title = f"Correlation with {lowered(table.title(table.score))} over {self.tag}, {len(table.frame)} models"
        return Chart(title=title, x=axis, y=Axis(title="r"), series=series, place="")


def over_tag(
    models: Sequence[RunModel],
    tag: str,
    values: Sequence[str | int | float],
    *,
    tags: Mapping[str, str | int | float],
    resamples: int,
    seed: int,
    **options: Any,
) -> OverTag:
    """Returns the coefficients at each of the values of a tag; `options` are those of `read_runs`.

    A model that lacks one of the values is left out of all, so that differences between values are not those of models.

    Raises:
        InputError: fewer than two values, or fewer than three models that have them all.
    """
    if len({*map(str, values)}) < 2:
        raise InputError(f"over: expected several values, as in {tag}=0.05,0.1,0.2, got {tag}={values[0]}")
    left_out: dict[str, str] = {}
    for value in values:
        for name, why in of_models(models, tags={**tags, tag: value}, **options).left_out.items():
            left_out.setdefault(name, f"{why} ({tag_text({tag: value})})")
    complete = [model for model in models if model.name not in left_out]
    if len(complete) < FEWEST:
        first = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:3])
        raise InputError(
            f"over: expected at least {FEWEST} models with every value of {tag}, got {len(complete)} ({first})"
        )
    tables = [of_models(complete, tags={**tags, tag: value}, **options) for value in values]
    coefficients = [_correlated(table, resamples, seed) for table in tables]
    rows, corrected = [each[0] for each in coefficients], [each[1] for each in coefficients]
    return OverTag(tag=tag, values=values, tables=tables, rows=rows, corrected=corrected, left_out=left_out)


def _correlated(table: ModelTable, resamples: int, seed: int) -> tuple[list[Row], list[Row]]:
    """The coefficients of the metric and of the corrected one; none where the metric is the same for all models."""
    if len(set(table.values(table.metric).tolist())) < 2:
        return [], []
    findings = correlate(table, resamples=resamples, seed=seed)
    return [row for row in findings.rows if not row.name.startswith("Partial")], findings.corrected
