"""Which metrics of a run lead which: `lead_lags` of all pairs that emerge, alone and given the loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_layers.clock.step_curves import StepCurve, loss_curves
from lit_layers.clock.times_and_order import Clock, emerged_in_order
from lit_layers.errors import InputError
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import MINUS, count, p_text
from lit_layers.figures.labels import value as number_text
from lit_layers.figures.maps import named_matrix
from lit_layers.figures.theme import rounded
from lit_layers.functional.emergence.lead_lag import (
    FEWEST_INCREMENTS,
    LeadLag,
    lead_lags,
    octave_increments,
    octave_range,
)

Array = NDArray[np.float64]
MOST_CURVES = 60  # of a run, the surest half-way points first: of more the pairs take hours and none of them is told
LOSS = "logit_lens_loss"  # of the last layer, which is the model's
LEVEL, LEAST = 0.05, 1e-3  # p-values that differ from chance, and the least that is written out
_SIDES = ("analysis", "metric", "layer", "tags")
_NUMBERS = ("lag", "lag_low", "lag_high", "correlation", "p_value", "q_value")
GIVEN = "given_loss_"
COLUMNS = ("run", *(f"{side}_{part}" for side in "ab" for part in _SIDES), "a_title", "b_title", *_NUMBERS)
COLUMNS = (*COLUMNS, *(f"{GIVEN}{name}" for name in _NUMBERS), "moves", f"{GIVEN}moves", "loss")
COLUMNS = (*COLUMNS, "num_increments", "num_runs")
_REDRAWN = 200  # of each curve with its errors, for the interval of a lag
_MOST_SENTENCES, _MOST_ROWS = 12, 30


def lead_lag_table(clock: Clock, *, loss: str = "", seed: int = 0) -> pd.DataFrame:
    """Returns a row a pair of what emerges in a run, the earlier half-way point first, as `order_table`.

    `lag` in octaves of 1 + step is positive where a leads; `lead_lags` defines it, its interval, `correlation` and
    `p_value`, which runs over seeds have of the seeds together. `q_value` is that of Benjamini and Hochberg over the
    pairs of a run, of which those without a p-value count as 1. The same stands once more `given_loss_`.

    Args:
        clock: of one run or more; of over 60 curves of a run those with the surest half-way points count.
        loss: METRIC or ANALYSIS/METRIC; without it, the last layer's logit-lens loss, where there is one.
        seed: of the redrawn curves.

    Raises:
        InputError: no run has a curve of `loss`, or one has several.
    """
    losses = _losses(clock, loss)
    rows = []
    for run in clock.runs:
        emerged = emerged_in_order(clock, run)
        width = lambda pair: np.log2((1 + pair[1].halfway.high) / (1 + pair[1].halfway.low))  # noqa: E731
        surest = sorted(emerged, key=width)[:MOST_CURVES]
        curves = [_Increments(curve, seed) for curve, times in emerged if any(times is each for _, each in surest)]
        loss_curve = _Increments(losses[run], seed) if run in losses else None
        rows += _of_run(run, *_of_all_seeds(curves, loss_curve, len(clock.runs) - 1), seed)
    table: Any = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.astype({"a_layer": "Int64", "b_layer": "Int64"})


def _losses(clock: Clock, loss: str) -> Mapping[str, StepCurve]:
    if not loss:
        try:
            return loss_curves(clock.curves, LOSS)
        except InputError:  # several, of which nobody chose one
            return {}
    if curves := loss_curves(clock.curves, loss):
        return curves
    raise InputError(f"loss: expected METRIC or ANALYSIS/METRIC of a curve, got {loss}, which no run has")


class _Increments:
    """A curve, and what it and copies of it with other errors gain in each half octave."""

    def __init__(self, curve: StepCurve, seed: int) -> None:
        self.curve = curve
        values = curve.values[None] if curve.seeds is None else curve.seeds
        unit = np.nanmax(np.abs(values), initial=0) or 1.0  # of any unit, also one whose squares are no number
        self.values = values / unit
        self.drawn: Array | None = None
        if curve.seeds is None and curve.stderr is not None:
            rng = np.random.default_rng([seed, *"".join(map(str, curve.key)).encode()])
            errors = np.nan_to_num(curve.stderr / unit)
            self.drawn = self.values + errors * rng.standard_normal((_REDRAWN, len(curve.at)))
        self.ends = octave_range(curve.at, self.values.mean(0))

    def within(self, ends: tuple[int, int]) -> Array:
        """(runs, increments)."""
        return octave_increments(self.curve.at, self.values, *ends)

    def redrawn(self, ends: tuple[int, int]) -> Array:
        """(draws, increments)."""
        values = self.drawn if self.drawn is not None else np.repeat(self.values[:1], _REDRAWN, 0)
        return octave_increments(self.curve.at, values, *ends)


def _of_all_seeds(
    curves: list[_Increments], loss: _Increments | None, seeds: int
) -> tuple[list[_Increments], _Increments | None]:
    """Over seeds without the curves that some seed lacks: those of others are not each other's."""
    whole = lambda each: each.curve.seeds is None or len(each.values) == seeds  # noqa: E731
    return [each for each in curves if whole(each)], loss if loss is not None and whole(loss) else None


def _of_run(run: str, curves: Sequence[_Increments], loss: _Increments | None, seed: int) -> list[dict[str, Any]]:
    rows = []
    for number, second in enumerate(curves):
        alone = _with(second, curves[:number], None, seed)
        given = _with(second, curves[:number], loss, seed) if loss is not None else [None] * number
        for first, *results in zip(curves[:number], alone, given, strict=True):
            sides = (("a", first.curve), ("b", second.curve))
            names = {f"{side}_{part}": at for side, curve in sides for part, at in zip(_SIDES, curve.key, strict=True)}
            titles = {f"{side}_title": curve.title for side, curve in sides}
            rows.append({"run": run, **names, **titles, **_numbers(*results)})
            rows[-1]["loss"] = loss.curve.title if loss is not None else ""
            rows[-1]["num_runs"] = len(second.values)
    for prefix in ("", GIVEN):
        p = np.array([row[f"{prefix}p_value"] for row in rows])
        adjusted = _benjamini_hochberg(p)
        for row, q in zip(rows, adjusted, strict=True):
            row[f"{prefix}q_value"] = q
    return rows


def _with(second: _Increments, firsts: Sequence[_Increments], loss: _Increments | None, seed: int) -> list[Any]:
    """Of each first curve with the second, None where they share too few half octaves."""
    results_of_pairs: list[LeadLag | None] = [None] * len(firsts)
    by_ends: dict[tuple[tuple[int, int], bool], list[int]] = {}
    for number, first in enumerate(firsts):
        parts = [each.ends for each in (first, second, loss) if each is not None]
        ends = max(start for start, _ in parts), min(end for _, end in parts)
        if ends[1] - ends[0] >= FEWEST_INCREMENTS:
            errors = first.drawn is not None and second.drawn is not None
            by_ends.setdefault((ends, errors), []).append(number)
    for (ends, errors), numbers in by_ends.items():
        of = [firsts[number] for number in numbers]
        given = None if loss is None else loss.within(ends)
        drawn = None
        if errors:
            copies = np.stack([first.redrawn(ends) for first in of])
            drawn = copies, second.redrawn(ends), None if loss is None else loss.redrawn(ends)
        results = lead_lags([first.within(ends) for first in of], second.within(ends), given, drawn=drawn, seed=seed)
        for number, result in zip(numbers, results, strict=True):
            results_of_pairs[number] = result
    return results_of_pairs


def _numbers(alone: LeadLag | None, given: LeadLag | None) -> dict[str, Any]:
    row: dict[str, Any] = {"num_increments": 0 if alone is None else alone.num_increments}
    for prefix, each in (("", alone), (GIVEN, given)):
        names = ("lag", "lag_low", "lag_high", "correlation", "p_value", "moves")
        values = [np.nan] * len(names) if each is None else each[: len(names)]
        row |= {f"{prefix}{name}": at for name, at in zip(names, values, strict=True)}
    return row


def _benjamini_hochberg(p: Array) -> Array:
    from scipy.stats import false_discovery_control

    there = np.isfinite(p)
    return np.where(there, false_discovery_control(np.where(there, p, 1.0)), np.nan) if len(p) else p


# ------------------------------------------------------------------------------------------------ in words and a figure


def sentences(table: pd.DataFrame, run: str) -> list[str]:
    """Returns a sentence for each pair of a run that differs from chance, the surest first, and how many are not."""
    rows: list[Any] = table[table["run"] == run].to_dict("records")
    surest = sorted((row for row in rows if _surest(row)[0] <= LEVEL), key=_surest)
    lines = [_sentence(row) for row in surest[:_MOST_SENTENCES]]
    alone, given = (sum(row[f"{prefix}q_value"] <= LEVEL for row in rows) for prefix in ("", GIVEN))
    loss = rows[0]["loss"]
    also = f", and {given} given the loss ({loss})" if loss else "; no loss was found to hold fixed (--loss)"
    lines.append(f"Of {count(len(rows))} pairs {alone} differ from chance (q of at most {LEVEL:g}){also}.")
    short = sum(not row["num_increments"] for row in rows)
    once = sum(bool(row["num_increments"]) and np.isnan(row["p_value"]) for row in rows)
    if once:
        lines.append(f"{count(once)} have no p-value, as one of the two moves once and is still before and after.")
    if short:
        lines.append(f"{count(short)} share fewer than {FEWEST_INCREMENTS} half octaves.")
    return lines


def _surest(row: Mapping[str, Any]) -> tuple[float, float]:
    return float(np.fmin(row["q_value"], row[f"{GIVEN}q_value"])), -abs(row["correlation"])


def _sentence(row: Mapping[str, Any]) -> str:
    a, b, lag = _sides(row)
    if lag == 0:
        text = f"{a} and {b} move at once"
    elif row["lag_low"] <= 0 <= row["lag_high"]:
        text = f"{a} and {b} go together, and which leads is not told ({lag:g} octaves{_interval(row)})"
    else:
        text = f"{a} leads {b} by {lag:g} octave{'' if lag == 1 else 's'}{_interval(row)}"
    text += f": r {number_text(row['correlation'])}, q {p_text(row['q_value'], LEAST)}"
    if np.isfinite(row[f"{GIVEN}q_value"]):
        q = p_text(row[f"{GIVEN}q_value"], LEAST)
        text += f"; given the loss r {number_text(row[f'{GIVEN}correlation'])}, q {q}"
    return text


def _sides(row: Mapping[str, Any]) -> tuple[str, str, float]:
    """The one that leads, the one that follows, and by how much."""
    a, b, lag = row["a_title"], row["b_title"], row["lag"]
    return (b, a, -lag) if lag < 0 else (a, b, lag)


def _interval(row: Mapping[str, Any], prefix: str = "") -> str:
    """From the side of the one that leads."""
    ends = row[f"{prefix}lag_low"], row[f"{prefix}lag_high"]
    low, high = ends if row["lag"] >= 0 else (-ends[1], -ends[0])
    return "" if np.isnan(low) else f" ({low + 0:g} to {high + 0:g})".replace("-", MINUS)


def lead_lag_rows(table: pd.DataFrame, run: str) -> list[tuple[str, ...]]:
    """Returns for a table the surest pairs of a run: text alone."""
    rows: list[Any] = table[(table["run"] == run) & table["p_value"].notna()].to_dict("records")
    lines = []
    for row in sorted(rows, key=_surest)[:_MOST_ROWS]:
        a, b, lag = _sides(row)
        given = row[f"{GIVEN}lag"] if row["lag"] >= 0 else -row[f"{GIVEN}lag"]
        cells = [f"{a}, then {b}" if lag else f"{a} and {b}", f"{lag:g}{_interval(row)}"]
        cells += [number_text(row["correlation"])]
        cells += [p_text(row["p_value"], LEAST), p_text(row["q_value"], LEAST)]
        there = np.isfinite(given)
        cells += [f"{given + 0:g}".replace("-", MINUS) + _interval(row, GIVEN) if there else ""]
        cells += [number_text(row[f"{GIVEN}correlation"]) if there else ""]
        lines.append((*cells, *(p_text(row[f"{GIVEN}{name}"], LEAST) for name in ("p_value", "q_value"))))
    return lines


def lead_lag_chart(table: pd.DataFrame, run: str) -> Chart | None:
    """Returns the correlations of a run's pairs at their lag, above the diagonal alone, below it given the loss.

    Empty where a pair has no p-value; None where fewer than 4 metrics have one with another.
    """
    mine: Any = table[(table["run"] == run) & table["p_value"].notna()]
    names = list(dict.fromkeys([*mine["a_title"], *mine["b_title"]]))
    if len(names) < 4:
        return None
    cells: list[list[float | None]] = [[None] * len(names) for _ in names]
    for row in mine.to_dict("records"):
        a, b = names.index(row["a_title"]), names.index(row["b_title"])
        (cells[a][b],) = rounded([row["correlation"]], 3)
        if np.isfinite(row[f"{GIVEN}p_value"]):
            (cells[b][a],) = rounded([row[f"{GIVEN}correlation"]], 3)
    of_run = f", {run}" if table["run"].nunique() > 1 else ""
    title = f"Correlation of increments, below the diagonal given the loss{of_run}"
    return named_matrix(title, names, cells, (-1.0, 1.0))
