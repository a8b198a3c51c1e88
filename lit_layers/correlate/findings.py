"""Correlations of a metric with a score, over models or layers, and confounders that may explain them."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_layers.correlate.layer_tables import LayerTables, ModelTables
from lit_layers.correlate.model_table import SIZES, ModelTable, nearest
from lit_layers.errors import InputError
from lit_layers.figures.labels import mid_sentence, p_equation, value
from lit_layers.functional import correlation
from lit_layers.functional.correlation import Correlation, UndefinedError

Column = NDArray[np.float64]
CONFOUNDED = 0.5  # warn if the R² of the metric with its baseline or with a size of the model is higher
FEW = 10
# Fewest models for a bootstrap interval: samples of fewer models mostly hold only two or three of them.
_FEWEST_DRAWN = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """A correlation coefficient over models, such as Pearson r, with its 95% interval.

    Fields that do not apply to the coefficient are None.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int
    df: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Covariate:
    """The Pearson correlations r, and R², of a covariate (another column) with the metric and with the score."""

    name: str
    r2_metric: float
    r2_score: float
    n: int
    r_metric: float
    r_score: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The correlations between the metric and the score in a table of models, and warnings about them.

    `rows` has the coefficients of the metric, `corrected` those of the metric minus its baseline. `given` names the
    columns that the user asked to hold fixed.
    """

    metric: str
    score: str
    n: int
    rows: list[Row]
    corrected: list[Row]
    covariates: list[Covariate]
    groups: list[Row]
    group: str | None
    given: list[str]
    warnings: list[str]
    left_out: dict[str, str] = field(default_factory=dict)


def correlate(
    table: ModelTable,
    *,
    given: Sequence[str] = (),
    group: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Findings:
    """Correlate the metric of a table with its score over models.

    Args:
        table: The models.
        given: Columns to hold fixed in partial correlations, first one by one and then all together. The sizes of
            the models and the metric's baseline are always held fixed one by one, if the table has them. The baseline
            is the value that the metric would have by chance, or the value predicted from the width.
        group: Column for correlations within groups of models with the same value of it. If it is None, the group
            column of the table is used, if there is one.
        resamples: Number of bootstrap resamples of the models, for percentile intervals.
        seed: Seed of the resamples and shuffles.

    Raises:
        InputError: A column does not exist or is not numeric, or the metric or score is constant.
    """
    columns = [str(column) for column in table.frame.columns if column != "model"]
    for option, names in (("given", given), ("group", [group] if group else [])):
        for name in names:
            if name not in columns:
                raise InputError(f"{option}: no column {name!r}{nearest(name, columns)}")
    x, y = table.values(table.metric), table.values(table.score)
    for name, column in ((table.metric, x), (table.score, y)):
        if (column == column[0]).all():
            raise InputError(f"a correlation is undefined: {name} is {column[0]:g} for all {len(column)} models")
    options = {"resamples": resamples, "seed": seed}
    covariates = _covariates(table, given)
    rows = _coefficients(x, y, options) + _partials(table, x, y, covariates, given, options)
    group = group or table.group
    corrected = []
    if table.corrected is not None:
        excess = table.values(table.corrected)
        defined = ~np.isnan(excess)
        with suppress(UndefinedError):
            corrected = _coefficients(excess[defined], y[defined], options)
    found = []
    for name in covariates:
        rx, ry = (_r(table, name, column) for column in (x, y))
        if rx is not None and ry is not None:
            title, shares = table.covariate_title(name), (rx.value**2, ry.value**2)
            found.append(Covariate(title, *shares, rx.n, rx.value, ry.value))
    return Findings(
        metric=table.metric,
        score=table.score,
        n=len(x),
        rows=rows,
        corrected=corrected,
        covariates=found,
        groups=_groups(table, x, y, group, options) if group else [],
        group=group,
        given=list(given),
        warnings=_warnings(table, x, corrected, rows) + table.missing_notes(given, group),
        left_out=dict(table.left_out),
    )


def _row(
    name: str, statistic: Callable[..., Correlation], *columns: Any, options: Mapping[str, int], **facts: Any
) -> Row:
    """Return a correlation coefficient over models with its bootstrap interval.

    `statistic` computes the coefficient from `columns`. `facts` may replace its `p` and `df` and add a `note`.
    Coefficients over the same number of models use the same resamples.
    """
    whole, n = statistic(*columns), len(columns[0])
    low, high, note = None, None, facts.pop("note", "")
    if n >= _FEWEST_DRAWN:
        with suppress(UndefinedError):
            drawn = correlation.bootstrap_rows(lambda rows: statistic(*(c[rows] for c in columns)).value, n, **options)
            low, high = drawn.low, drawn.high
    if low is None:
        note = ", ".join(filter(None, [note, "too few models for an interval"]))
    row: dict[str, Any] = {"p": whole.p, "df": whole.df, **facts}
    return Row(name=name, value=whole.value, low=low, high=high, n=n, note=note, **row)


def _coefficients(x: Column, y: Column, options: Mapping[str, int]) -> list[Row]:
    def r2(x: Column, y: Column) -> Correlation:
        result = correlation.pearson(x, y)
        return result._replace(value=result.value * result.value)

    def distance(x: Column, y: Column) -> Correlation:
        return Correlation(correlation.distance_correlation(x, y), math.nan, len(x), 0)

    statistics = {"Pearson r": correlation.pearson, "R²": r2}
    statistics |= {"Spearman rho": correlation.spearman, "Kendall tau": correlation.kendall}
    rows = [_row(name, statistic, x, y, options=options) for name, statistic in statistics.items()]
    if len(x) >= 4:
        null, p = correlation.distance_null(x, y, seed=options["seed"])
        facts = {"note": f"{value(null)} for shuffled models", "p": p, "df": None}
        rows.append(_row("Distance correlation", distance, x, y, options=options, **facts))
    return rows


def _covariates(table: ModelTable, given: Sequence[str]) -> list[str]:
    """Return the columns that partial correlations hold fixed one by one.

    These are the metric's baseline (`ModelTable.baseline`), the sizes of the models and the columns in `given`, if they
    vary between models.
    """
    there = set(table.frame.columns) - {table.metric, table.score}
    names = dict.fromkeys(n for n in (table.baseline, *SIZES, "k", *given) if n in there)
    differ = [name for name in names if len(set(table.values(name)[~np.isnan(table.values(name))])) > 1]
    if same := [name for name in given if name not in differ]:
        raise InputError(f"given: {same[0]} is the same for all models: leave it out")
    return differ


def _given(table: ModelTable, names: Sequence[str]) -> str:
    return f"Partial r given {' and '.join(mid_sentence(table.covariate_title(name)) for name in names)}"


def _partials(
    table: ModelTable, x: Column, y: Column, covariates: Sequence[str], given: Sequence[str], options: Mapping[str, int]
) -> list[Row]:
    def partial(x: Column, y: Column, *fixed: Column) -> Correlation:
        return correlation.partial_correlation(x, y, fixed)

    rows = []
    for names in [[name] for name in covariates] + ([list(given)] if len(given) > 1 else []):
        columns = np.stack([x, y, *(table.values(name) for name in names)])
        columns = columns[:, ~np.isnan(columns).any(0)]
        try:
            rows.append(_row(_given(table, names), partial, *columns, options=options))
        except UndefinedError as error:
            if set(names) <= set(given):
                raise InputError(
                    f"given: {', '.join(names)} leaves nothing to correlate: it determines a column or models are few"
                ) from error
    return rows


def _groups(table: ModelTable, x: Column, y: Column, group: str, options: Mapping[str, int]) -> list[Row]:
    """Return the correlation coefficients within groups of models, which have equal values in the column `group`.

    The first coefficient is pooled over all groups. Each group of 3 or more models then has its own.
    """
    labels = table.frame[group]
    codes, title = labels.factorize()[0], table.title(group)  # the code -1 means that a model has no group
    columns = [column[codes >= 0] for column in (x, y, codes)]
    try:
        within = correlation.groupwise_correlation
        rows = [_row(f"Within equal {mid_sentence(title)}", within, *columns, options=options)]
    except UndefinedError as error:
        raise InputError(
            f"group: expected groups of several models with different metrics and scores, {group} leaves none"
        ) from error
    for code, label in enumerate(labels.dropna().unique()):
        members = codes == code
        if members.sum() >= 3:
            name = f"{title} {label:.15g}" if isinstance(label, float) else f"{title} {label}"
            with suppress(UndefinedError):
                rows.append(_row(name, correlation.pearson, x[members], y[members], options=options))
    return rows


def _r(table: ModelTable, name: str, column: Column) -> Correlation | None:
    """Return the Pearson correlation of `column` with the covariate `name`, or None if it is undefined.

    Only models that have the covariate are used.
    """
    covariate = table.values(name)
    defined = ~np.isnan(covariate)
    with suppress(UndefinedError):
        return correlation.pearson(column[defined], covariate[defined])
    return None


def _warnings(table: ModelTable, x: Column, corrected: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    warnings, title = [], table.title(table.metric)
    names = [name for name in (table.baseline, "width", "k") if name in table.frame.columns]
    shares = {name: r.value**2 for name in names if name and (r := _r(table, name, x)) is not None}
    for name, r2 in ((name, r2) for name, r2 in shares.items() if r2 > CONFOUNDED):
        partial = next((row for row in rows if row.name == _given(table, [name])), None)
        beyond = f"; beyond it r = {value(partial.value)} ({p_equation(partial.p)})" if partial else ""
        warnings.append(f"{title} follows {mid_sentence(table.covariate_title(name))}, R² = {r2:.2f}{beyond}.")
    if warnings and corrected:
        r2, other = next(row for row in corrected if row.name == "R²"), mid_sentence(table.title(str(table.corrected)))
        warnings.append(f"Compare across widths by {other}: R² = {r2.value:.2f} ({p_equation(r2.p)}).")
    steps = table.values("step") if "step" in table.frame.columns else np.empty(0)
    if len(np.unique(steps[~np.isnan(steps)])) > 1:
        first, last = np.nanmin(steps), np.nanmax(steps)
        warnings.append(f"The models were measured at different steps, {first:,.0f} to {last:,.0f}.")
    if len(x) < FEW:
        warnings.append(
            f"Only {len(x)} models: the intervals are too narrow, and one model can decide the coefficients."
        )
    return warnings


# ------------------------------------------------------------------------------------------------ over layers


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A rule that chooses a layer for each task without using labels, and the scores at the layers it chooses.

    The layers belong to one model. The other models below are those of the same comparison. The rule takes the layer
    where `metric` is smallest (`rule` is "min") or largest ("max"). `is_chosen` is true if this direction scores higher
    on the other models than the opposite direction.

    If `metric` is None, the rule has the metric and direction that score highest on the other models. `rule` then names
    both, for example "min prompt_entropy".
    """

    metric: str | None
    rule: str
    result: correlation.Selection
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class MetricFindings:
    """The correlation coefficients of one metric with the scores over the layers of one model.

    `tasks` are the tasks used. `left_out` maps each other task to the reason why it is left out.
    """

    metric: str
    correlations: list[correlation.LayerCorrelation]
    tasks: list[str]
    left_out: dict[str, str]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFindings:
    """The results of `correlate_layers` for one model."""

    model: str
    step: int | None
    num_layers: int
    null: correlation.Null
    metrics: list[MetricFindings]
    choices: list[Choice]


@dataclass(frozen=True, kw_only=True)
class LayerFindings:
    """The results of `correlate_layers` for all models.

    A rule picks a layer: it takes the layer with the smallest or largest value of a metric. `basis` is a sentence for
    the report page. It says whether the rule was selected with the scores of other models.
    """

    models: list[ModelFindings]
    basis: str
    first_layer: int
    left_out: dict[str, str]


def correlate_layers(tables: LayerTables, *, resamples: int = 2000, seed: int = 0) -> LayerFindings:
    """Correlate each metric with the scores over the layers of each model, and evaluate how well it chooses layers.

    For each task, a rule chooses the layer where a metric is smallest or largest. With several models, the scores of
    the other models decide between smallest and largest, and between the metrics. With one model, all rules are
    returned and none is preferred.
    """
    options, first = {"resamples": resamples, "seed": seed}, tables.first_layer
    models = []
    for model in tables.models:
        others = [other for other in tables.models if other is not model]
        keys = [key for key in tables.titles if key in model.metrics]
        sets = [[key] for key in keys] + ([keys] if len(keys) > 1 and others else [])
        models.append(
            ModelFindings(
                model=model.name,
                step=model.step,
                num_layers=model.num_layers,
                null=correlation.distance_null_over_layers(model.num_layers + 1 - first, seed=seed),
                metrics=[_correlated(model, key, first, options) for key in keys],
                choices=[c for names in sets for c in _choices(model, others, names, first, options)],
            )
        )
    basis = "Directions and metrics are chosen by the mean score of the other models (leave one model out)."
    basis = basis if len(models) > 1 else "No direction is chosen, because that takes the scores of other models."
    return LayerFindings(models=models, basis=basis, first_layer=first, left_out=dict(tables.left_out))


def _correlated(model: ModelTables, key: str, first: int, options: Mapping[str, int]) -> MetricFindings:
    tasks, metric, scores = model.tables(key, first)
    left_out, note = dict(model.left_out.get(key, {})), ""
    try:
        correlations = correlation.layer_correlations(metric, scores, **options)
    except UndefinedError as error:
        correlations, note = [], str(error)
    for row in correlations[0].undefined if correlations else ():
        left_out[tasks[row]] = "constant over the layers, not in the means of coefficients within tasks"
    return MetricFindings(metric=key, correlations=correlations, tasks=tasks, left_out=left_out, note=note)


def _choices(
    model: ModelTables, others: Sequence[ModelTables], keys: Sequence[str], first: int, options: Mapping[str, Any]
) -> list[Choice]:
    """Return rules that choose layers of one model, with the scores at these layers.

    With one key, there are two rules: the layer where this metric is smallest, and the layer where it is largest. With
    several keys, there is one rule: the metric and direction that score highest on the other models.
    """
    shared = _shared(model, keys, first)
    if shared is None:
        return []
    metrics, scores = shared
    pairs = [pair for other in others if (pair := _shared(other, keys, first)) is not None]
    better = correlation.better_rule(pairs) if pairs else None
    one = keys[0] if len(keys) == 1 else None
    rules: list[Any] = [(one, direction) for direction in correlation.DIRECTIONS] if one else [better]
    return [
        Choice(
            metric=one,
            rule=direction if one else f"{direction} {key}",
            result=correlation.selection(metrics[key], scores, direction, first_layer=first, **options),
            is_chosen=(key, direction) == better,
        )
        for key, direction in filter(None, rules)
    ]


def _shared(model: ModelTables, keys: Sequence[str], first: int) -> tuple[dict[str, Column], Column] | None:
    """Return the values of each metric in `keys`, (tasks, layers), and the scores, (tasks, layers), of one model.

    The tasks are those for which the model has all these metrics. Return None if there is no such task.
    """
    if any(key not in model.metrics for key in keys):
        return None
    tasks = [task for task in model.scores.index if all(task in model.metrics[key].index for key in keys)]
    tables = {key: model.tables(key, first, tasks) for key in keys}
    metrics = {key: metric for key, (_, metric, _) in tables.items()}
    return (metrics, tables[keys[0]][2]) if tasks else None
