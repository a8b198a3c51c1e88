"""Comparison of runs: intervals over seeds, one colour per run or group of seeds, and the difference of two groups."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import StepCurve, common_checkpoints, differing_settings, refuse_odd_seeds
from lit_layers.errors import InputError
from lit_layers.figures import vega
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import listing, number_text, tag_text
from lit_layers.figures.profiles import FRAMES, color_of, level, levels_of, symbol_of, value_axis
from lit_layers.figures.tables import choice_text, grouped
from lit_layers.figures.theme import INK, Axis, Training, layer_axis, rounded, spread
from lit_layers.identity import Settings, short
from lit_layers.metrics import look_up, rank, sentence
from lit_layers.report.template import Block, Captioned, block, charts_in, fill
from lit_layers.schema import run_facts

Array = NDArray[np.floating[Any]]
Key = tuple[str, str, int | None, str]  # analysis, metric, layer, tags
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Line:
    """One metric of a run, or of all seeds of a group, over their common steps. All arrays have shape (checkpoints,).

    `low` and `high` are the ends of a 95% interval, clipped to the metric's range (e.g. accuracy >= 0). For a group of
    seeds it is Student's interval over the seeds. For a single run it is an interval over prompts, and NaN if the run
    has no standard errors. `error` is the standard error and `df` its degrees of freedom, which are infinite for a
    single run. If the line is a difference, `left_out` says which prompts are left out of it.
    """

    group: str
    curve: StepCurve
    at: Array
    values: Array
    low: Array
    high: Array
    error: Array
    df: float
    num_runs: int
    left_out: str = ""

    @classmethod
    def from_curves(cls, group: str, curves: Sequence[StepCurve]) -> "Line":
        """Return the line of one metric from one curve per run, at the steps that all curves have."""
        common, rows = common_checkpoints(curves)
        first, n, df = curves[0], len(curves), np.inf
        error = np.full(len(common), np.nan)
        with np.errstate(over="ignore", invalid="ignore"):  # values near the float maximum get no interval
            if n > 1:
                error, df = rows.std(0, ddof=1) / np.sqrt(n), float(n - 1)
            elif first.stderr is not None:
                error = first.stderr[np.isin(first.at, common)]
            mean, row = rows.mean(0), look_up(first.metric)
            low, high = _interval(mean, _quantile(df) * error, row.low, row.high)
        about = {"low": low, "high": high, "error": error, "df": df, "num_runs": n}
        return cls(group=group, curve=first, at=common, values=mean, **about)

    @property
    def interval_over(self) -> str:
        """Source of the interval's spread: `5 seeds`, `prompts`, or an empty string if there is no interval."""
        return f"{self.num_runs} seeds" if self.num_runs > 1 else "prompts" if np.isfinite(self.error).any() else ""


def _quantile(df: float) -> float:
    return float(stats.norm.ppf(0.975) if np.isinf(df) else stats.t.ppf(0.975, df))


def _interval(values: Array, half: Array, least: float, most: float) -> tuple[Array, Array]:
    """Return the ends of an interval of half width `half` around `values`, clipped to [least, most].

    Nothing is clipped if a value is outside this range: the values are then in other units than expected.
    """
    low, high = values - half, values + half
    if ((values < least - _ROUNDING) | (values > most + _ROUNDING)).any():
        return low, high
    return np.maximum(low, np.minimum(values, least)), np.minimum(high, np.maximum(values, most))


def difference(one: Line, other: Line) -> Line:
    """Return `one` minus `other` at their common steps.

    The interval depends on what is compared:

    - Two groups of seeds: Welch's interval with Welch-Satterthwaite degrees of freedom at each step. The field `df`
      of the result is the smallest of them.
    - Two single runs with values of the same prompts: Student's interval over the differences of prompts that have a
      value in both runs. The difference itself also leaves out prompts with a value in only one run, and `left_out`
      counts them.
    - Other single runs: the errors are treated as independent. The interval is too wide if the prompts are the same.
    - A group and a single run: no interval, because the variance of the single run over seeds is unknown.
    """
    common = np.intersect1d(one.at, other.at)
    (a, b), (of_a, of_b) = ((one, other), (np.isin(one.at, common), np.isin(other.at, common)))
    error_a, error_b = a.error[of_a], b.error[of_b]
    error, df = np.hypot(error_a, error_b), np.full(len(common), np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        values, left_out = a.values[of_a] - b.values[of_b], ""
    if (a.num_runs > 1) != (b.num_runs > 1):
        error = np.full(len(common), np.nan)
    elif a.num_runs > 1:
        # Use the ratios of errors in this formula: the fourth power of a small error underflows to 0.
        with np.errstate(invalid="ignore", divide="ignore"):
            df = 1 / ((error_a / error) ** 4 / a.df + (error_b / error) ** 4 / b.df)
        df = np.where(np.isfinite(df), df, a.df + b.df)  # NaN if both errors are 0
    elif (diffs := _prompt_differences(a.curve, b.curve, common)) is not None:
        values, error, df, left_out = _paired_means(*diffs, values, error)
    with np.errstate(over="ignore", invalid="ignore"):
        row, half = look_up(a.curve.metric), np.array([_quantile(float(each)) for each in df]) * error
        low, high = _interval(values, half, row.low - row.high, row.high - row.low)
    ends = {"low": low, "high": high, "error": error, "df": float(df.min(initial=np.inf))}
    about = {"num_runs": min(a.num_runs, b.num_runs), "left_out": left_out}
    name = f"{a.group} \N{MINUS SIGN} {b.group}"
    return Line(group=name, curve=a.curve, at=common, values=values, **about, **ends)


def _prompt_differences(a: StepCurve, b: StepCurve, common: Array) -> tuple[Array, Array] | None:
    """Return the differences per prompt at each step, and the number of prompts with a value in at least one run.

    Returns None if the runs have no values of the same prompts.
    """
    same = a.prompts_of.removeprefix(f"{a.run} ") == b.prompts_of.removeprefix(f"{b.run} ")
    if a.prompts is None or b.prompts is None or not same:
        return None
    one, other = (each[:, np.isin(of.at, common)] for each, of in ((a.prompts, a), (b.prompts, b)))
    return one.astype(np.float64) - other, (np.isfinite(one) | np.isfinite(other)).sum(0)


def _paired_means(diffs: Array, either: Array, values: Array, error: Array) -> tuple[Array, Array, Array, str]:
    """Return the means over prompts of paired differences at each step, their standard errors, df, and a text.

    Only prompts with a value in both runs are used. The text says how many others there are. `diffs` has the shape
    (prompts, steps), and `either` counts the prompts with a value in at least one run.

    `values` and `error` are the results without pairing. A step with fewer than two paired prompts keeps its `values`
    and `error`. A step where no prompt is left out keeps its `values`, which are more precise than the rounded values
    of single prompts.
    """
    diffs = np.where(np.isfinite(diffs), diffs, np.nan)
    n = np.isfinite(diffs).sum(0)
    paired, lost = n > 1, either - n
    values, error, df = values.copy(), error.copy(), np.where(paired, n - 1.0, np.inf)
    error[paired] = np.nanstd(diffs[:, paired], axis=0, ddof=1) / np.sqrt(n[paired])
    partly = paired & (lost > 0)
    values[partly] = np.nanmean(diffs[:, partly], axis=0)
    if not partly.any():
        return values, error, df, ""
    most = int(np.argmax(np.where(partly, lost, 0)))
    return values, error, df, f"up to {lost[most]:,} of {either[most]:,} prompts"


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Runs, the groups of seeds that they form, and the lines of each group.

    `notes` are sentences on curves that are left out and on differing settings. `recipes` holds, for each run, the
    recipe fields that differ between the runs.
    """

    groups: Mapping[str, Sequence[str]]
    lines: Mapping[Key, Mapping[str, Line]]
    notes: Sequence[str] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)

    @property
    def shared(self) -> dict[Key, Mapping[str, Line]]:
        """The lines of the metrics that every group (one run, or several seeds) has."""
        return {key: lines for key, lines in self.lines.items() if len(lines) == len(self.groups)}


def read_side_by_side(
    roots: Sequence[str | Path],
    *,
    seeds: bool = False,
    group: str | None = None,
    settings: Settings = (),
    allow_suspect: bool = False,
) -> SideBySide:
    """Return the curves of several runs, in groups.

    Args:
        roots: folders of runs.
        seeds: all runs are the same training with different seeds.
        group: runs with the same value of this recipe field, such as `data.shuffle_tokens`, are the same training with
            different seeds.
        settings: which settings (options and data) to use if an analysis was measured with several, as in
            `lit_layers.identity`.
        allow_suspect: also use checkpoints that an audit found suspect.

    Raises:
        InputError: two runs have the same name, or two seeds have equal values or different settings. Also if a recipe
            lacks the field that `group` names, no metric has common steps, or a run cannot be read (see `curves_of`).
    """
    if seeds and group is not None:
        raise InputError("seeds: expected either seeds or group, got both")
    by_run: dict[str, list[StepCurve]] = {}
    groups, recipes = dict[str, list[str]](), dict[str, dict[str, str]]()
    for root in roots:
        curves = curves_of(root, settings=settings, allow_suspect=allow_suspect)
        name = curves[0].run
        if name in by_run:
            raise InputError(f"runs: {root} has the name of another, {name}")
        by_run[name] = curves
        recipes[name] = _recipe(root)
        if group is not None and group not in recipes[name]:
            raise InputError(f"group: the recipe of {root} has no {group}: expected a field such as data.seed")
        of = name if group is None else f"{group.rpartition('.')[-1]}={recipes[name][group]}"
        groups.setdefault(f"{len(roots)} seeds" if seeds else of, []).append(name)
    if taken := groups.keys() & {"analysis", "metric", "layer", "tags", "step", "title", "difference"}:
        raise InputError(f"runs: expected none to be called {taken.pop()}, a column of the table")
    lines: dict[Key, dict[str, Line]] = {}
    partly: dict[str, None] = {}
    for name, runs in groups.items():
        curves_of_seeds = [curve for run in runs for curve in by_run[run]]
        refuse_odd_seeds(curves_of_seeds)
        by_key = grouped(curves_of_seeds, lambda curve: curve.key)
        for key, curves in by_key.items():
            line = Line.from_curves(name, curves) if len(curves) == len(runs) else None
            if line is None or not len(line.at):
                partly[curves[0].title] = None
            else:
                lines.setdefault(key, {})[name] = line
    if not lines:
        raise InputError("runs: expected runs that have a metric at common steps, these have none")
    notes = [f"Left out, not measured in all seeds of a group: {listing('curve', partly, most=8)}."] if partly else []
    drawn = ((name, c) for name, runs in groups.items() for run in runs for c in by_run[run] if c.key in lines)
    for analysis, named in differing_settings(drawn).items():
        each = "; ".join(f"{short(settings)} in {', '.join(names)}" for settings, names in named.items())
        notes.append(f"{analysis} was measured with different options or data: {each}.")
    return SideBySide(groups=groups, lines=lines, notes=notes, recipes=_differing(recipes))


def _recipe(root: str | Path) -> dict[str, str]:
    """Return the seed, model, data and trainer fields of a run's recipe, by dotted path such as `data.num_tokens`."""
    config = run_facts(Path(root)).get("config") or {}
    parts = {part: config[part] for part in ("seed_everything", "model", "data", "trainer") if part in config}
    # Convert with to_dict, which keeps integers: a row of a DataFrame has one dtype, so 3 could become 3.0.
    flat = pd.json_normalize(parts).to_dict("records")[0] if parts else {}
    return {str(name).replace(".init_args", ""): str(content) for name, content in flat.items()}


def _differing(recipes: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    names = dict.fromkeys(name for recipe in recipes.values() for name in recipe)
    varied = [name for name in names if len({recipe.get(name) for recipe in recipes.values() if recipe}) > 1]
    return {run: ", ".join(f"{name} {said[name]}" for name in varied if name in said) for run, said in recipes.items()}


# ------------------------------------------------------------------------------------------------ figures


def training_chart(lines: Mapping[str, Line], groups: Sequence[str]) -> Chart:
    """Return a chart of one metric over training, with intervals and one colour per group."""
    first = next(iter(lines.values()))
    series = []
    for number, name in enumerate(groups):
        if name in lines:
            look = {"color": color_of(number), "width": 2.2, "mark": symbol_of(number)}
            series.append(_series(lines[name], name=name, legend=True, **look))
    return _chart(first.curve.title, first.curve.metric, series)


def difference_chart(line: Line) -> Chart:
    """Return a chart of the difference between two runs or groups of seeds over training, with its interval."""
    zero = level([int(step) for step in line.at], 0.0, "no difference", width=1.4, legend=False)
    look = {"color": INK, "width": 2.2, "mark": "circle", "name": line.group}
    title = f"{line.curve.title}: {line.group}{f', without {line.left_out}' if line.left_out else ''}"
    return _chart(title, line.curve.metric, [zero, _series(line, **look)], signed=True)


def _series(line: Line, **look: Any) -> Series:
    ends = {"low": rounded(line.low), "high": rounded(line.high)}
    return Series(x=[int(step) for step in line.at], y=rounded(line.values), **ends, **look)


def _chart(title: str, metric: str, series: list[Series], *, signed: bool = False) -> Chart:
    steps = sorted({step for each in series for step in each.x})
    if not signed:
        series += levels_of(metric, steps, mark="line-ew")
    values = value_axis(metric, log=False) if signed else value_axis(metric)
    return Chart(title=title, x=Axis(), y=values, series=series, training=Training(steps))


def _common_steps(lines: Iterable[Line]) -> list[float]:
    return sorted(set.intersection(*(set(line.at.tolist()) for line in lines)))


def layer_chart(by_layer: Mapping[int, Mapping[str, Line]], groups: Sequence[str]) -> Chart:
    """Return a chart of one metric over the layers, with one colour per group and a slider over the common steps."""
    steps = _common_steps(line for lines in by_layer.values() for line in lines.values())
    frames, series = spread(steps, FRAMES), []
    for number, name in enumerate(groups):
        lines = {layer: by_layer[layer][name] for layer in sorted(by_layer) if name in by_layer[layer]}
        places = [(frame, layer) for frame in range(len(frames)) for layer in lines]
        ends: dict[str, Any] = {
            end: rounded(getattr(lines[n], of)[np.searchsorted(lines[n].at, frames[frame])] for frame, n in places)
            for end, of in (("y", "values"), ("low", "low"), ("high", "high"))
        }
        look = {"color": color_of(number), "width": 2.0, "mark": symbol_of(number), "legend": True, "name": name}
        frame, x = [frame for frame, _ in places], [layer for _, layer in places]
        series += [Series(x=x, frame=frame, **ends, **look)] if places else []
    first = next(iter(by_layer[max(by_layer)].values())).curve
    title = first.title.removesuffix(f", layer {first.layer}")
    look = {"x": layer_axis(), "y": value_axis(first.metric), "frames": [int(step) for step in frames]}
    return Chart(title=title, series=series, **look)


# ------------------------------------------------------------------------------------------------ the page


def page_of(content: SideBySide) -> str:
    """Return the HTML page: the runs of each group, a table of the values at the last step, and all figures."""
    shown = [
        {"name": analysis, "title": sentence(analysis), "metrics": blocks}
        for analysis, blocks in _blocks(content).items()
    ]
    return fill(
        "runs.html.jinja",
        title=f"{sum(map(len, content.groups.values()))} runs",
        facts=[],
        groups=content.groups,
        recipes=content.recipes,
        notes=content.notes,
        over={line.interval_over for lines in content.lines.values() for line in lines.values()},
        differs=_first_difference(content),
        results=last_values(content).to_dict("records"),
        columns=[*content.groups, *(["difference"] if len(content.groups) == 2 else [])],
        number=number_text,
        title_of=sentence,
        sections=shown,
    )


def _first_difference(content: SideBySide) -> dict[str, Any]:
    """Return a sentence that names the last step before groups of runs differ, and a figure of the first difference."""
    found: list[tuple[float, tuple[int, int], Key]] = []
    order = _order(content)
    for key, lines in content.shared.items():
        common = np.array(_common_steps(lines.values()))
        values = np.stack([line.values[np.isin(line.at, common)] for line in lines.values()])
        differs = ~np.isclose(values, values[0], rtol=_ROUNDING, atol=0, equal_nan=True).all(0)
        found += [(common[differs][0], order(*key[:2]), key)] if differs.any() else []
    if not found:
        return {"sentence": "All numbers are equal at all common steps." if content.shared else "", "blocks": []}
    first, _, key = min(found, key=lambda each: each[:2])
    equal = [step for step in _common_steps(content.shared[key].values()) if step < first]
    said = f"All numbers are equal up to step {equal[-1]:,.0f}." if equal else ""
    draw = partial(training_chart, content.shared[key], list(content.groups))
    title = f"{next(iter(content.shared[key].values())).curve.title}: differs from step {first:,.0f} on"
    return {"sentence": said, "blocks": [block(title, look_up(key[1]).note, [("", [("", draw)])], wide=True)]}


def write_pictures(content: SideBySide, folder: Path) -> list[Path]:
    """Write the figures of the page as .png, .svg and .pdf; return their paths."""
    sections = _blocks(content).items()
    return vega.write_pictures((pair for name, blocks in sections for pair in charts_in(name, blocks)), folder)


def _blocks(content: SideBySide) -> dict[str, list[Block]]:
    groups = list(content.groups)
    by_analysis: dict[str, list[Block]] = {}
    order = _order(content)
    metrics = grouped(content.lines.items(), lambda item: item[0][:2])
    for (analysis, metric), items in sorted(metrics.items(), key=lambda item: order(*item[0])):
        choices, variants = [], grouped(items, lambda item: item[0][3])
        names = sorted({name for _, lines in items for line in lines.values() for name in line.curve.tags})
        for of_tags in variants.values():
            by_layer = {key[2]: lines for key, lines in of_tags}
            layered = {layer: each for layer, each in by_layer.items() if layer is not None}
            of_all = [layer for layer, each in layered.items() if len(each) == len(groups)]
            lines = by_layer[None] if None in by_layer else layered[max(of_all or layered)]
            is_last = max(of_all or layered, default=0) == max(layered, default=0)
            at = "" if None in by_layer else ", the last layer" if is_last else ", the last common layer"
            parts: list[Captioned] = [(f"Over training{at}", partial(training_chart, lines, groups))]
            if len(layered) > 1 and _common_steps(line for each in layered.values() for line in each.values()):
                parts.append(("Over layers", partial(layer_chart, layered, groups)))
            if len(groups) == 2 and len(lines) == 2 and _common_steps(lines.values()):
                gap = difference(*(lines[name] for name in groups))
                parts.append((f"Difference, {groups[0]} less {groups[1]}", partial(difference_chart, gap)))
            tags = next(iter(lines.values())).curve.tags
            text = choice_text({name: tags.get(name) for name in names}) if len(variants) > 1 else tag_text(dict(tags))
            choices.append((text, parts))
        row = look_up(metric)
        by_analysis.setdefault(analysis, []).append(block(row.unit_title, row.note, choices))
    return by_analysis


def _order(content: SideBySide) -> Callable[[str, str], tuple[int, int]]:
    """Return a sort key for a metric: analyses in order of appearance, their metrics as on the page of one run."""
    analyses = [*dict.fromkeys(key[0] for key in content.lines)]
    return lambda analysis, metric: (analyses.index(analysis), rank(metric))


def last_values(content: SideBySide) -> pd.DataFrame:
    """Return a table with one row per metric at the last common step, with the value and interval of each group.

    Columns are analysis, metric, layer, tags, step, title, and value, low and high of each group. Metrics with values
    per layer are shown at the last common layer. With two groups, the last columns are their difference.
    """
    groups, rows = list(content.groups), list[dict[str, Any]]()
    last: dict[tuple[str, str, str], int | None] = {}
    for analysis, metric, layer, tags in content.shared:
        key = (analysis, metric, tags)
        last[key] = None if layer is None or last.get(key, -1) is None else max(layer, last.get(key, -1) or 0)
    for (analysis, metric, layer, tags), lines in content.shared.items():
        common = _common_steps(lines.values())
        if layer != last[analysis, metric, tags] or not common:
            continue
        step = max(common)
        row: dict[str, Any] = {"analysis": analysis, "metric": metric, "layer": layer, "tags": tags, "step": int(step)}
        row["title"] = next(iter(lines.values())).curve.title
        gap = {"difference": difference(*(lines[name] for name in groups))} if len(groups) == 2 else {}
        for name, line in {**lines, **gap}.items():
            at = int(np.searchsorted(line.at, step))
            row |= {name: line.values[at], f"{name} low": line.low[at], f"{name} high": line.high[at]}
        rows.append(row)
    order = _order(content)
    rows.sort(key=lambda row: order(row["analysis"], row["metric"]))
    return pd.DataFrame(rows)
