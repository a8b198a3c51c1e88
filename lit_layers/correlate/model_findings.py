"""What a table of models says: coefficients with their intervals, what explains them besides, and warnings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_layers.correlate.model_runs import SIZES, nearest
from lit_layers.correlate.model_table import ModelTable
from lit_layers.errors import InputError
from lit_layers.figures.labels import value
from lit_layers.functional import correlation
from lit_layers.functional.correlation import UndefinedError

SMALLEST = 1e-300  # of a p-value that float64 tells from 0
CONFOUNDED = 0.5  # R² of the metric with a size or its baseline, from which on a warning is due
FEW = 10
_FEWEST_DRAWN = 5  # models: of fewer, resamples are mostly the same two or three points
_LOGS = (*SIZES, "k")  # sizes differ by factors


@dataclass(frozen=True, kw_only=True)
class Row:
    """One coefficient; None for what it does not have."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int
    df: int | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Covariate:
    """How much of the metric and of the score another column explains alone."""

    name: str
    r2_metric: float
    r2_score: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that is said of a table. `given` names the covariates that the joint partial correlation holds fixed."""

    metric: str
    score: str
    n: int
    rows: list[Row]
    corrected: list[Row]
    covariates: list[Covariate]
    groups: list[Row]
    group: str | None
    given: list[str]
    influence: dict[str, Any] | None
    warnings: list[str]
    left_out: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


class Columns:
    """The columns of a table as numbers; sizes as their logarithms."""

    def __init__(self, table: ModelTable) -> None:
        self.table = table
        self.frame: Any = table.frame

    def has(self, name: str) -> bool:
        return name in self.frame.columns

    def title(self, name: str) -> str:
        text = self.table.title(name)
        return f"Log {lowered(text)}" if name in _LOGS else text

    def inner(self, name: str) -> str:
        """The same within a sentence."""
        return lowered(self.title(name))

    def values(self, name: str) -> NDArray[np.float64]:
        """NaN where there is none.

        Raises:
            InputError: for a column of text.
        """
        column = self.frame[name]
        numbers: Any = pd.to_numeric(column, errors="coerce")
        if (column.notna() & numbers.isna()).any():
            bad = column[column.notna() & numbers.isna()].iloc[0]
            raise InputError(f"given: expected a column of numbers, {name!r} has {bad!r}")
        found = numbers.to_numpy(dtype="float64", na_value=math.nan)
        if name in _LOGS:
            return np.log(np.where(found > 0, found, math.nan))
        return np.where(np.isfinite(found), found, math.nan)


def correlate(
    table: ModelTable,
    *,
    given: Sequence[str] = (),
    group: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Findings:
    """Returns what the models of a table say of its metric and score.

    Partial correlations are given each of the sizes and the baseline that is known, and given all of `given` together.
    Intervals are percentile bootstrap over models.

    Raises:
        InputError: for a column that there is not or that is no number, or a constant metric or score.
    """
    columns = Columns(table)
    for option, names in (("given", given), ("group", [group] if group else [])):
        for name in names:
            if not columns.has(name) or name == "model":
                raise InputError(f"{option}: no column {name!r}{nearest(name, map(str, table.frame.columns))}")
            if option == "given" and name in (table.metric, table.score):
                raise InputError(f"given: {name} is itself correlated; hold another column fixed")
    x, y = columns.values(table.metric), columns.values(table.score)
    for name, column in ((table.metric, x), (table.score, y)):
        if (column == column[0]).all():
            raise InputError(f"a correlation is undefined: {name} is {column[0]:g} for all {len(column)} models")
    draw = _Drawn(resamples, seed)
    rows = _coefficients(x, y, draw)
    known = _covariates_of(columns, given)
    rows += _partials(columns, x, y, known, given, draw)
    group = group or table.group
    groups = _groups(columns, x, y, group, draw) if group else []
    corrected = _corrected(columns, y, draw)
    alone = [_alone(columns, x, y, name) for name in known]
    return Findings(
        metric=table.metric,
        score=table.score,
        n=len(x),
        rows=rows,
        corrected=corrected,
        covariates=[found for found in alone if found is not None],
        groups=groups,
        group=group,
        given=list(given),
        influence=_influence(columns, x, y),
        warnings=_warnings(columns, x, y, corrected, rows),
        left_out=dict(table.left_out),
    )


class _Drawn:
    """Rows with their intervals, all from the same resamples of models."""

    def __init__(self, resamples: int, seed: int) -> None:
        self.options: dict[str, Any] = {"resamples": resamples, "seed": seed}

    def row(
        self,
        name: str,
        statistic: Callable[..., Any],
        *columns: Any,
        square: bool = False,
        note: str = "",
        p: float | None = None,
    ) -> Row:
        """A coefficient of some columns, or its square."""

        def at(rows: NDArray[np.intp]) -> float:
            found = statistic(*(column[rows] for column in columns))
            number = found if isinstance(found, float) else found.value
            return number * number if square else number

        n = len(columns[0])
        whole = statistic(*columns)
        number = whole if isinstance(whole, float) else whole.value
        low, high = None, None
        try:
            low, high, _ = correlation.bootstrap_rows(at, n, **self.options) if n >= _FEWEST_DRAWN else (None, None, 0)
        except UndefinedError:
            low, high = None, None
        if low is None:
            note = ", ".join(filter(None, [note, "too few models for an interval"]))
        return Row(
            name=name,
            value=number * number if square else number,
            low=low,
            high=high,
            p=p if isinstance(whole, float) else whole.p,
            n=n,
            df=None if isinstance(whole, float) else whole.df,
            note=note,
        )


def _coefficients(x: NDArray[np.float64], y: NDArray[np.float64], draw: _Drawn) -> list[Row]:
    rows = [
        draw.row("Pearson r", correlation.pearson, x, y),
        draw.row("R²", correlation.pearson, x, y, square=True),
        draw.row("Spearman rho", correlation.spearman, x, y),
        draw.row("Kendall tau", correlation.kendall, x, y),
    ]
    if len(x) >= 4:
        null, p = correlation.distance_null(x, y, seed=draw.options["seed"])
        note = f"{value(null)} for shuffled models"
        rows.append(draw.row("Distance correlation", correlation.distance_correlation, x, y, note=note, p=p))
    return rows


def _covariates_of(columns: Columns, given: Sequence[str]) -> list[str]:
    """The columns to hold fixed one by one: baseline, sizes, and what was asked for; those that differ."""
    wanted = [columns.table.baseline, *SIZES, "k", *given]
    found = dict.fromkeys(name for name in wanted if name is not None and columns.has(name))
    differ = [name for name in found if len(set(columns.values(name)[~np.isnan(columns.values(name))])) > 1]
    if same := [name for name in given if name in found and name not in differ]:
        raise InputError(f"given: {same[0]} is the same for all models: leave it out")
    return differ


def _partials(
    columns: Columns,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    known: Sequence[str],
    given: Sequence[str],
    draw: _Drawn,
) -> list[Row]:
    rows = []
    for names in [[name] for name in known] + ([list(given)] if len(given) > 1 else []):
        covariates = [columns.values(name) for name in names]
        there = ~np.isnan(np.stack(covariates)).any(0)
        used = [column[there] for column in covariates]
        text = _given(columns, names)

        def partial(x: Any, y: Any, *covariates: Any) -> Any:
            return correlation.partial_correlation(x, y, covariates)

        try:
            rows.append(draw.row(text, partial, x[there], y[there], *used))
        except UndefinedError as error:
            if set(names) <= set(given):
                raise InputError(
                    f"given: {', '.join(names)} leaves nothing to correlate: it determines the metric or the score, or "
                    f"there are too few models ({there.sum()})"
                ) from error
    return rows


def _given(columns: Columns, names: Sequence[str]) -> str:
    return f"Partial r given {' and '.join(map(columns.inner, names))}"


def _groups(columns: Columns, x: NDArray[np.float64], y: NDArray[np.float64], group: str, draw: _Drawn) -> list[Row]:
    """The correlation within groups, pooled, and that of each group of 3 or more."""
    labels = group_labels(columns.frame[group])
    title = columns.table.title(group)
    places = np.array([-1 if label is None else list(dict.fromkeys(labels)).index(label) for label in labels])
    there = places >= 0

    def within(x: Any, y: Any, places: Any) -> Any:
        return correlation.within_group_correlation(x, y, list(places))

    try:
        pooled = draw.row(f"Within equal {lowered(title)}", within, x[there], y[there], places[there])
    except UndefinedError as error:
        raise InputError(
            f"group: expected groups of several models with different metrics and scores, {group} leaves none"
        ) from error
    rows = [pooled]
    for label in dict.fromkeys(label for label in labels if label is not None):
        own = np.array([other == label for other in labels])
        if own.sum() >= 3:
            try:
                rows.append(draw.row(f"{title} {label}", correlation.pearson, x[own], y[own]))
            except UndefinedError:
                continue
    return rows


def group_labels(column: Any) -> list[str | None]:
    """What each row's group is called, None where it has none."""
    return [None if pd.isna(one) else f"{one:.15g}" if isinstance(one, float) else str(one) for one in column.tolist()]


def _alone(columns: Columns, x: NDArray[np.float64], y: NDArray[np.float64], name: str) -> Covariate | None:
    covariate = columns.values(name)
    there = ~np.isnan(covariate)
    try:
        r2 = [correlation.pearson(side[there], covariate[there]).value ** 2 for side in (x, y)]
    except UndefinedError:
        return None
    return Covariate(name=columns.title(name), r2_metric=r2[0], r2_score=r2[1], n=int(there.sum()))


def _corrected(columns: Columns, y: NDArray[np.float64], draw: _Drawn) -> list[Row]:
    """The same of the metric that has its baseline taken off, where there is one."""
    name = columns.table.corrected
    if name is None:
        return []
    x = columns.values(name)
    there = ~np.isnan(x)
    try:
        return _coefficients(x[there], y[there], draw)
    except UndefinedError:
        return []


def _influence(columns: Columns, x: NDArray[np.float64], y: NDArray[np.float64]) -> dict[str, Any] | None:
    if len(x) < 4:
        return None
    found = correlation.leave_one_out(x, y)
    names = list(columns.frame["model"])
    without = {name: None if math.isnan(r) else r for name, r in zip(names, found.values, strict=True)}
    defined = [r for r in found.values if not math.isnan(r)]
    return {
        "model": names[found.index],
        "without": without[names[found.index]],
        "change": None if math.isnan(found.change) else found.change,
        "lowest": min(defined),
        "highest": max(defined),
        "pearson_without": without,
    }


def _warnings(
    columns: Columns, x: NDArray[np.float64], y: NDArray[np.float64], corrected: list[Row], rows: list[Row]
) -> list[str]:
    table, found = columns.table, []
    title = table.title(table.metric)
    if table.p_is_1:
        found.append(
            f"{title} divides by the sum of the leading singular values (p = 1): it grows with their number, and so "
            f"with the width, also where blocks share nothing."
        )
    for name in (table.baseline, "width", "k"):
        if name is None or not columns.has(name):
            continue
        covariate = columns.values(name)
        there = ~np.isnan(covariate)
        try:
            r2 = correlation.pearson(x[there], covariate[there]).value ** 2
        except UndefinedError:
            continue
        if r2 > CONFOUNDED:
            partial = next((row for row in rows if row.name == _given(columns, [name])), None)
            left = f"; beyond it r = {value(partial.value)} ({p_equation(partial.p)})" if partial else ""
            found.append(f"{title} follows {columns.inner(name)}, R² = {r2:.2f}{left}.")
    if found and corrected:
        r2, other = next(row for row in corrected if row.name == "R²"), lowered(table.title(str(table.corrected)))
        found.append(f"Compare across widths by {other}: R² = {r2.value:.2f} ({p_equation(r2.p)}).")
    if columns.has("step") and len(steps := set(columns.values("step")[~np.isnan(columns.values("step"))])) > 1:
        found.append(f"The models were measured at different steps, {min(steps):,.0f} to {max(steps):,.0f}.")
    if len(x) < FEW:
        found.append(f"Only {len(x)} models: the intervals are too narrow, and one model can decide the coefficients.")
    return found


def lowered(title: str) -> str:
    """Returns a title as it stands within a sentence."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]


def p_text(p: float | None) -> str:
    """Returns a p-value with two digits: 0.057, 1.4e-10; an empty string for None. No p is 0."""
    if p is None:
        return ""
    if p < SMALLEST:
        return f"< {SMALLEST:.0e}"
    return f"{p:.1e}".replace("e-0", "e-") if p < 9.5e-4 else f"{p:.2g}"


def p_equation(p: float | None) -> str:
    """The same in a sentence: p = 0.057, p < 1e-300."""
    text = p_text(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"
