"""Times at which curves emerge, their order and its certainty, and the agreement of runs on the order."""

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from lit_layers.clock.step_curves import StepCurve, add_prompts, curves_in
from lit_layers.errors import InputError
from lit_layers.figures.tables import grouped
from lit_layers.functional.emergence.curve_times import (
    FEWEST_CHECKPOINTS,
    EmergenceTimes,
    bootstrap_counts,
    emergence_times,
)
from lit_layers.functional.emergence.null_differences import lasting_difference
from lit_layers.records import Measurement

TIMES = ("onset", "halfway", "peak", "plateau")
# The first columns of times.csv. More columns follow: the ends of the intervals of onset, peak and plateau, and two
# counts of checkpoints.
COLUMNS = ("run", "analysis", "metric", "layer", "tags", "emerges", "changes", "p_value", "onset", "halfway")
COLUMNS = (*COLUMNS, "halfway_low", "halfway_high", "peak", "plateau", "before", "not_yet", "over")
Timed = tuple[StepCurve, EmergenceTimes]
BEFORE = ("p_a_before_b", "paired")
FEW_SEEDS = 3
FEWEST_COMMON = 5  # number of curves that two runs must share before their orders of emergence are compared
UNDECIDED = 0.05  # if more than this share of draws leave undecided which curve is first, its probability is NaN
# Half-way points with wider intervals, as a share of the log axis, are left out of comparisons of orders.
WIDEST = 0.25


@dataclass(frozen=True)
class Clock:
    """Curves with their emergence times.

    `confidence` is the confidence level of the intervals, and of the tests that decide whether a curve emerges.

    `left_out` maps each reason why curves have no times to the number of these curves.
    """

    curves: list[StepCurve]
    times: list[EmergenceTimes]
    left_out: dict[str, int] = field(default_factory=dict)
    confidence: float = 0.95

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys(curve.run for curve in self.curves))

    def run_pairs(self, run: str) -> list[tuple[StepCurve, EmergenceTimes]]:
        return [pair for pair in zip(self.curves, self.times, strict=True) if pair[0].run == run]


def measure_times(
    curves: Sequence[StepCurve],
    *,
    confidence: float = 0.95,
    seed: int = 0,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Clock:
    """Return the emergence times of all curves; curves with too few values are left out and counted.

    Curves measured on the same prompts use the same resampled prompts. `show` is called before each curve with its
    index, the number of curves, and its run and title.

    Raises:
        InputError: if no curve has emergence times.
    """
    counts: dict[str, Any] = {}
    timed, times, left_out, first = [], [], dict[tuple[str, str], int](), dict[str, str]()
    for i, curve in enumerate(curves):
        show(i, len(curves), f"{curve.run}: {curve.title}")
        try:
            errors: dict[str, Any] = {"seed": seed}
            if curve.prompts is not None:
                if curve.prompts_of not in counts:
                    drawn = zlib.crc32(f"{seed} {curve.prompts_of}".encode())
                    counts[curve.prompts_of] = bootstrap_counts(len(curve.prompts), seed=drawn)
                of_curve = zlib.crc32(str((curve.run, curve.key)).encode())
                errors = {"replicates": curve.prompts, "counts": counts[curve.prompts_of], "seed": [seed, of_curve]}
            else:
                errors |= {"stderr": curve.stderr} if curve.seeds is None else {"replicates": curve.seeds}
            measured = emergence_times(curve.at, curve.values, confidence=confidence, **errors)
        except ValueError as error:
            reason = str(error).split(", got")[0]
            left_out[curve.run, reason] = left_out.get((curve.run, reason), 0) + 1
            first.setdefault(reason, f"{curve.run}, {curve.title}: {error}")
            continue
        timed.append(curve)
        times.append(measured)
    if not timed:
        reasons = "; ".join(first.values())
        raise InputError(f"no curve has emergence times: {reasons or f'none has {FEWEST_CHECKPOINTS} checkpoints'}")
    runs, reasons = {curve.run for curve in timed}, dict[str, int]()
    for (run, reason), i in left_out.items():
        reason = reason if run in runs else f"all of {run}: {reason}"
        reasons[reason] = reasons.get(reason, 0) + i
    return Clock(timed, times, reasons, confidence)


def times_of_run(run: str, measurements: Sequence[Measurement], root: Path) -> Clock | None:
    """Return the emergence times of one curve per metric of a run: that of the whole model, or else of the last layer.

    The numbers equal those of `lit-layers emerge` and use the values of prompts that the run's folder `root` stores.
    Return None if no curve has at least `FEWEST_CHECKPOINTS` checkpoints, or none has emergence times.
    """
    curves = [curve for curve in curves_in(run, measurements) if len(curve.at) >= FEWEST_CHECKPOINTS]
    if not curves:
        return None
    try:
        return measure_times(add_prompts(model_curves(curves), root, measurements))
    except InputError:  # no curve has emergence times
        return None


def null_step(curve: StepCurve, confidence: float = 0.95) -> float | None:
    """Return the step (or number of tokens) at which a lasting difference between a curve and its null begins.

    `lasting_difference` defines it. Return infinity if the curve does not differ at the last checkpoint. Return None if
    the curve has no null, or if the errors of the difference are unknown. The test covers other prompts or seeds, but
    not other random weights: a null is one draw of them.
    """
    null = curve.null
    if null is None:
        return None
    errors: dict[str, Any] = {}
    if curve.seeds is not None and null.seeds is not None and len(curve.seeds) == len(null.seeds):
        errors["replicates"] = curve.seeds - null.seeds
    elif curve.prompts is not None and null.prompts is not None and curve.prompts_of == null.prompts_of:
        errors["replicates"] = curve.prompts - null.prompts
    elif curve.stderr is not None and null.stderr is not None:
        errors["stderr"] = np.hypot(curve.stderr, null.stderr)
    if not errors or not np.isfinite(curve.values - null.values).any():
        return None
    try:
        first = lasting_difference(curve.values - null.values, confidence=confidence, **errors)
    except ValueError:  # fewer than two complete replicates
        return None
    return math.inf if first is None else float(curve.at[first])


def times_table(clock: Clock) -> pd.DataFrame:
    """Return a table with one row per curve.

    Its first columns are `COLUMNS`. Then come the ends of the intervals of onset, peak and plateau, and the numbers of
    checkpoints with and without a value. If a curve has a null, the last columns are its kind and the `null_step`.
    """
    rows = []
    for curve, times in zip(clock.curves, clock.times, strict=True):
        row: dict[str, Any] = {"run": curve.run, "analysis": curve.analysis, "metric": curve.metric}
        row |= {"layer": curve.layer, "tags": curve.tag_text, "emerges": times.emerges, "changes": times.changes}
        row |= {"p_value": times.p_value, "before": times.before, "not_yet": times.not_yet}
        ends = {}
        for name in TIMES:
            time = getattr(times, name)
            row[name] = None if time is None else time.value
            ends |= {f"{name}_{end}": None if time is None else getattr(time, end) for end in ("low", "high")}
        row |= ends | {"over": curve.error_unit, "num_checkpoints": times.num_checkpoints, "num_gaps": times.num_gaps}
        if curve.null is not None:
            row |= {"null": curve.null.null_kind, "null_step": null_step(curve, clock.confidence)}
        rows.append(row)
    table: Any = pd.DataFrame(rows).astype({"tags": "str", "over": "str"})
    table["layer"] = pd.array([curve.layer for curve in clock.curves], dtype="Int64")
    return table[[*COLUMNS, *(name for name in table if name not in COLUMNS)]]


def model_pairs(clock: Clock, run: str) -> list[tuple[StepCurve, EmergenceTimes]]:
    """Return the curve that represents each metric of a run (see `model_curves`), with its emergence times."""
    pairs = clock.run_pairs(run)
    timed = {curve.key for curve in model_curves([curve for curve, _ in pairs])}
    return [pair for pair in pairs if pair[0].key in timed]


def model_curves(curves: Sequence[StepCurve]) -> list[StepCurve]:
    """Return one curve for each metric of a run: that of the whole model, or, if there is none, of the last layer."""
    by_metric = grouped(curves, lambda curve: (curve.analysis, curve.metric, curve.tag_text))
    depth = lambda curve: math.inf if curve.layer is None else curve.layer  # noqa: E731
    return [max(same, key=depth) for same in by_metric.values()]


def probability_before(first: EmergenceTimes, second: EmergenceTimes, *, paired: bool = False) -> float:
    """Return the probability that the first curve reaches its half-way point before the second curve.

    Without `paired`, the draws of the two half-way points are independent. With `paired`, draw i of one belongs to draw
    i of the other, because both come from `emergence_times` with the same `counts`.

    If a half-way point may lie before the first checkpoint, its draws are only upper bounds. If it may lie after the
    last checkpoint, they are only lower bounds. The probability is NaN if the share of draws whose order such bounds
    leave undecided is larger than `UNDECIDED`.
    """
    ahead, behind = _share_before(first, second, paired), _share_before(second, first, paired)
    is_open = any((*first.open_ends, *second.open_ends))
    return math.nan if is_open and ahead + behind < 1 - UNDECIDED else (1 + ahead - behind) / 2


def _share_before(first: EmergenceTimes, second: EmergenceTimes, paired: bool) -> float:
    """Return the share of draws in which the first curve certainly reaches its half-way point before the second.

    No draw is certain if the half-way point of the first curve may lie after the last checkpoint, or that of the second
    before the first checkpoint.
    """
    if first.open_ends[1] or second.open_ends[0]:
        return 0.0
    if paired:
        return float((first.halfway_draws < second.halfway_draws).mean())
    ahead = np.searchsorted(np.sort(first.halfway_draws), second.halfway_draws, side="left")
    return float(ahead.mean() / len(first.halfway_draws))


def p_before(first: Timed, second: Timed) -> tuple[float, bool]:
    """Return the result of `probability_before` for two curves, and whether their draws were paired."""
    paired = first[0].prompts is not None and first[0].prompts_of == second[0].prompts_of
    return probability_before(first[1], second[1], paired=paired), paired


def few_seeds_sentence(clock: Clock) -> str:
    """Return a warning that a test of emergence over two or three seeds is weak, or "" for more seeds."""
    seeds = min((len(curve.seeds) for curve in clock.curves if curve.seeds is not None), default=FEW_SEEDS + 1)
    if seeds > FEW_SEEDS:
        return ""
    verdict = f"Over {seeds} seeds the verdict rests on Student's t (df = {seeds - 1}): "
    return verdict + "what emerges in each of them may be said not to."


def order_table(clock: Clock) -> pd.DataFrame:
    """Return the probability that curve a reaches its half-way point before curve b, for pairs of curves of a run.

    The table has a row for each pair of `emerged_curves`; a is the curve with the earlier half-way point. The
    probability is NaN if the order is undecided (see `probability_before`). The column `paired` is True if both curves
    were drawn with the same resampled prompts, and False if they were drawn independently.
    """
    sides = [f"{side}_{part}" for side in "ab" for part in ("analysis", "metric", "layer", "tags")]
    rows = [
        (run, *a[0].key, *b[0].key, *p_before(a, b))
        for run in clock.runs
        for a, b in itertools.combinations(emerged_curves(clock, run), 2)
    ]
    return pd.DataFrame(rows, columns=["run", *sides, *BEFORE])


def layer_order_table(clock: Clock) -> pd.DataFrame:
    """Return the probability that a metric reaches its half-way point at layer a before layer b.

    The table has a row for each run, metric and pair of layers at which the metric emerges.
    """
    rows = []
    for run in clock.runs:
        layered = [pair for pair in clock.run_pairs(run) if pair[0].layer is not None and pair[1].emerges]
        for same in grouped(layered, lambda pair: (pair[0].analysis, pair[0].metric, pair[0].tag_text)).values():
            for a, b in itertools.combinations(sorted(same, key=lambda pair: pair[0].layer or 0), 2):
                curve = a[0]
                what = run, curve.analysis, curve.metric, curve.tag_text, curve.layer, b[0].layer
                rows.append((*what, *p_before(a, b)))
    return pd.DataFrame(rows, columns=["run", "analysis", "metric", "tags", "layer_a", "layer_b", *BEFORE])


def emerged_curves(clock: Clock, run: str) -> list[tuple[StepCurve, EmergenceTimes]]:
    """Return the curves of a run that emerge, one per metric (see `model_curves`), earliest half-way point first."""
    emerged = [(curve, times) for curve, times in model_pairs(clock, run) if times.emerges]
    return sorted(emerged, key=lambda pair: pair[1].halfway.value)  # pyright: ignore[reportOptionalMemberAccess]


def agreement_table(clock: Clock) -> pd.DataFrame:
    """Return Spearman's correlation of the half-way points of each pair of runs, over curves that emerge in both.

    A half-way point is left out if its interval is open, or wider than the share `WIDEST` of the logarithmic axis. Such
    a point can be at any step, for example if a score fluctuates by more than its errors. A pair of runs is left out if
    it shares fewer than `FEWEST_COMMON` curves, or if all shared curves of one run have the same half-way point. The
    mean over seeds is left out, because it would be compared with the runs from which it is computed.
    """
    halfway = {
        run: {
            curve.key: times.halfway.value  # pyright: ignore
            for curve, times in model_pairs(clock, run)
            if times.emerges and _is_known(curve, times.halfway)
        }
        for run in clock.runs
        if all(curve.seeds is None for curve, _ in clock.run_pairs(run))
    }
    rows = []
    for a, b in itertools.combinations(halfway, 2):
        common = [key for key in halfway[a] if key in halfway[b]]
        one, other = ([halfway[run][key] for key in common] for run in (a, b))
        if len(common) >= FEWEST_COMMON and min(len({*one}), len({*other})) > 1:
            rho: Any = stats.spearmanr(one, other)
            rows.append({"run_a": a, "run_b": b, "spearman": float(rho.statistic), "n": len(common)})
    return pd.DataFrame(rows, columns=["run_a", "run_b", "spearman", "n"])


def _is_known(curve: StepCurve, time: Any) -> bool:
    low, high, first, last = np.log2(1 + np.array([time.low, time.high, curve.at[0], curve.at[-1]]))
    return bool(high - low <= WIDEST * (last - first))


def agreement_sentence(agreement: pd.DataFrame) -> str:
    """Return a sentence on how well the pairs of an `agreement_table` agree, or "" for fewer than two pairs."""
    if len(agreement) < 2:
        return ""
    low, median, high = agreement["spearman"].quantile([0.25, 0.5, 0.75])
    return (
        f"The orders of {len(agreement)} pairs of runs agree at a median Spearman of {median:.2f} "
        f"(quartiles {low:.2f} and {high:.2f}), over {agreement['n'].min()} to {agreement['n'].max()} curves a pair."
    )
