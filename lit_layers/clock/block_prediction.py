"""Which blocks can be spared: the harm of changing one block against what is measured of it, over training."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_layers import run_data
from lit_layers.clock.step_curves import AxisName
from lit_layers.errors import InputError
from lit_layers.figures.axes import Axis, Training
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import p_equation
from lit_layers.figures.labels import value as number_text
from lit_layers.figures.theme import COLORS, MUTED, rounded
from lit_layers.functional.block_schedules import OF_BLOCKS
from lit_layers.functional.correlation import BlockCorrelation, UndefinedError, block_correlation
from lit_layers.identity import UNKNOWN, Settings, settings_of, short
from lit_layers.records import PLACES, Record

logger = logging.getLogger(__name__)
Array = NDArray[np.float64]
Predictor = tuple[str, str]  # its name, the analysis that gives it
COLUMNS = ("run", "step", "analysis", "harm", "predictor", "given", "rho", "low", "high", "over", "p_value")
COLUMNS = (*COLUMNS, "null_low", "null_high", "num_blocks", "num_checkpoints", "num_undefined")
HARMS = {
    "skip_one": "skipping a block",
    "switch": "switching a block with the next",
    "repeat_one": "running a block twice",
}
DEPTH = "depth"
_DEPTH: Predictor = (DEPTH, "")  # no analysis measures it
INFLUENCE, NORM_STEP = "influence", "norm step"
_OF_BLOCKS = {"variant_loss", "kl_to_full", "coupling_pair", "layer_cosine", "step_norm", "state_norm"}
_CHANCE = "grey band: 95% of permuted blocks"  # in the legend
_FEWEST_BLOCKS, _MOST_BLOCKS = 4, 5000


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Of one run and kind of change: the harm to each block and what may predict it, (checkpoints, blocks), NaN where
    it was not measured. `predictors` are `coupling, k = 12` and its like, `influence`, `norm step`, each with the
    analysis that gives it; `settings` are those of each analysis that they or the harms are of."""

    run: str
    analysis: str
    harm: str
    steps: Sequence[int]
    tokens: Mapping[int, int | None]
    harms: Array
    predictors: Mapping[Predictor, Array]
    settings: Mapping[str, str] = field(default_factory=dict)


def block_tables(root: str | Path, *, settings: Settings = ()) -> list[BlockTable]:
    """Returns what a run's folder holds of single blocks, where both harms and what may predict them were measured.

    The harm is the loss with the block skipped, switched with the next or repeated, less the full model's; without a
    loss, the divergence from the full model. Predictors of a block l of the model's L:

        coupling    the mean over the other blocks m of (coupling_pair(l, m) + coupling_pair(m, l)) / 2, of each k
        influence   1 - layer_cosine(l - 1, l): how far the block turns a token's state
        norm step   step_norm(l) / state_norm(l - 1): how long its step is

    Of a switch they are those of both blocks: the coupling of the two with each other, and the mean of their influences
    and norm steps.

    Raises:
        InputError: as `run_data.read_run`, or for a block that no model has.
    """
    run = run_data.read_run(root, settings=settings)
    by_step: dict[int, _Checkpoint] = {}
    settings_by_analysis: dict[str, str] = {}
    for m in run.measurements:
        if m.step is not None and m.error is None:
            by_step.setdefault(m.step, _Checkpoint()).add(m.analysis, m.records, m.tokens)
            if _OF_BLOCKS & {r.metric for r in m.records}:
                settings_by_analysis[m.analysis] = settings_of(m)
    if run.compares_models or not by_step:
        return []
    kinds = sorted(
        {kind for each in by_step.values() for kind in each.harms}, key=lambda kind: (list(HARMS).index(kind[1]), kind)
    )
    tables = []
    for kind in kinds:
        steps = [step for step in sorted(by_step) if kind in by_step[step].harms]
        blocks = max(max(by_step[step].harms[kind]) for step in steps)
        if blocks > _MOST_BLOCKS:
            raise InputError(
                f"{root}: expected {HARMS[kind[1]]} of at most {_MOST_BLOCKS:,} blocks, got block {blocks}"
            )
        predicted = [by_step[step].predictors(blocks, of_pairs=kind[1] == "switch") for step in steps]
        found = sorted({of for each in predicted for of in each}, key=_rank)
        nothing = np.full(blocks, np.nan)
        if found and blocks >= _FEWEST_BLOCKS:
            tables.append(
                BlockTable(
                    run=run.name,
                    analysis=kind[0],
                    harm=kind[1],
                    steps=steps,
                    tokens={step: by_step[step].tokens for step in steps},
                    harms=np.stack([_by_block(by_step[step].harms[kind], blocks) for step in steps]),
                    predictors={of: np.stack([each.get(of, nothing) for each in predicted]) for of in found},
                    settings=settings_by_analysis,
                )
            )
    return tables


def _rank(predictor: Predictor) -> tuple[str, int, Predictor]:
    """The order of predictors: `coupling, k = 4` before `k = 12`."""
    kind, _, number = predictor[0].partition(" = ")
    return kind, int(number) if number.isdecimal() else 0, predictor


def _names(tables: Iterable[BlockTable]) -> dict[Predictor, str]:
    """What predictors are called, the same in all tables: with the analysis where several of them give one."""
    predictors = {of for table in tables for of in table.predictors}
    often = Counter(name for name, _ in predictors)
    return {of: ", ".join(of) if often[of[0]] > 1 else of[0] for of in predictors}


def _kind(predictor: Predictor) -> str:
    return predictor[0].partition(",")[0]


class _Checkpoint:
    """What one checkpoint has of single blocks, pairs of blocks and layers: predictors by name and analysis."""

    def __init__(self) -> None:
        self.tokens: int | None = None
        self.harms: dict[tuple[str, str], dict[int, float]] = {}
        self.pairs: dict[Predictor, dict[tuple[int, int], float]] = {}  # couplings, and cosines of layers
        self.norms: dict[Predictor, tuple[dict[int, float], dict[int, float]]] = {}  # of steps, of states

    def add(self, analysis: str, records: Iterable[Record], tokens: int | None) -> None:
        self.tokens = tokens if tokens is not None else self.tokens
        by_metric: dict[str, list[Record]] = {}
        for record in records:
            by_metric.setdefault(record.metric, []).append(record)
        for metric in ("variant_loss", "kl_to_full"):
            if full := [r.value for r in by_metric.get(metric, ()) if r.tags.get("variant") == "baseline"]:
                for r in by_metric[metric]:
                    variant = str(r.tags.get("variant"))
                    if variant in OF_BLOCKS and r.layer is not None and not set(PLACES) & r.tags.keys():
                        self.harms.setdefault((analysis, variant), {})[r.layer] = r.value - full[0]
                break
        for r in by_metric.get("coupling_pair", ()):
            if r.layer is not None and r.other_layer is not None and r.layer != r.other_layer:
                name = f"coupling, k = {r.tags['k']}" if "k" in r.tags else "coupling"
                self.pairs.setdefault((name, analysis), {})[r.layer, r.other_layer] = r.value
        for r in by_metric.get("layer_cosine", ()):
            # of each token's state with itself a block later, not of prompts flattened to one vector
            if r.layer is not None and r.other_layer is not None and r.tags.get("mode", "token") == "token":
                self.pairs.setdefault((INFLUENCE, analysis), {})[r.layer, r.other_layer] = r.value
        norms = [
            {r.layer: r.value for r in by_metric.get(name, ()) if r.layer is not None and not r.tags}
            for name in ("step_norm", "state_norm")
        ]
        if all(norms):
            self.norms[NORM_STEP, analysis] = norms[0], norms[1]

    def predictors(self, blocks: int, *, of_pairs: bool) -> dict[Predictor, Array]:
        """Of each block, or of each and the next."""
        last = blocks + of_pairs
        predictors: dict[Predictor, Array] = {}
        for of, pairs in self.pairs.items():
            table = np.full((last + 1, last + 1), np.nan)
            for (a, b), number in pairs.items():
                if a <= last and b <= last:
                    table[a, b] = number
            if of[0] == INFLUENCE:
                table = np.where(np.isnan(table), table.T, table)
                predictors[of] = 1 - np.diagonal(table, 1)
            else:
                both = (table + table.T)[1:, 1:] / 2
                predictors[of] = np.diagonal(both, 1) if of_pairs else _without_diagonal(both).mean(1)
        for of, norms in self.norms.items():
            steps, states = (_by_block(each, last, first=0) for each in norms)
            predictors[of] = steps[1:] / np.where(states == 0, np.nan, states)[:-1]
        if of_pairs:
            for of in [of for of in predictors if of[0] in (INFLUENCE, NORM_STEP)]:
                predictors[of] = (predictors[of][:-1] + predictors[of][1:]) / 2
        return {of: values for of, values in predictors.items() if np.isfinite(values).any()}


def _without_diagonal(table: Array) -> Array:
    return table[~np.eye(len(table), dtype=bool)].reshape(len(table), -1)


def _by_block(values: Mapping[int, float], last: int, *, first: int = 1) -> Array:
    return np.array([values.get(block, np.nan) for block in range(first, last + 1)])


def prediction_table(tables: Sequence[BlockTable], *, pooled: bool = False) -> pd.DataFrame:
    """Returns Spearman's rho of harm and predictor over blocks: of each checkpoint, and over training.

    A row without a step is the mean over the trained checkpoints, those after step 0, whose own rows are what untrained
    weights give. Each predictor stands alone, given depth (the block's number), and given depth and the other
    predictors (of coupling the k in question alone). `block_correlation` defines rho, its p of permuted blocks and its
    interval.

    Args:
        tables: of one run or more.
        pooled: also over those of these runs that have a change, as seeds of one, called `3 seeds`; of predictors that
            all of them have, and a warning names the others.

    Raises:
        InputError: seeds that are pooled, of which an analysis had other settings.
    """
    if pooled:
        _refuse_other_settings(tables)
    alone, rows, names = set[Predictor](), [], {_DEPTH: DEPTH, **_names(tables)}
    kinds = list(dict.fromkeys((table.analysis, table.harm) for table in tables))
    for analysis, harm in kinds:
        mine = [table for table in tables if (table.analysis, table.harm) == (analysis, harm)]
        groups = [(table.run, [table]) for table in mine]
        if pooled and len(mine) > 1:
            groups.insert(0, (f"{len(mine)} seeds", mine))
            alone |= {of for table in mine for of in table.predictors}.difference(_common_predictors(mine))
        for name, group in groups:
            common = sorted(set.intersection(*(set(table.steps) for table in group)))
            for predictor in _common_predictors(group):
                for given in _givens(group, predictor):
                    trained = [step for step in common if step > 0]
                    for step, steps in ((None, trained), *((step, [step]) for step in common)):
                        if (result := _correlation(group, predictor, given, steps)) is not None:
                            head = {"run": name, "step": step, "analysis": analysis, "harm": harm}
                            what = {"predictor": names[predictor], "given": " and ".join(names[each] for each in given)}
                            rows.append({**head, **what, **_numbers(result, group)})
    if alone:
        of_some = ", ".join(names[of] for of in sorted(alone, key=_rank))
        logger.warning("blocks: what predicts their harm is not pooled where not all seeds have it: %s", of_some)
    table: Any = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"step": "Int64"})
    return table


def _refuse_other_settings(tables: Sequence[BlockTable]) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for table in tables:
        for analysis, settings in table.settings.items():
            run, first = seen.setdefault(analysis, (table.run, settings))
            if first != settings and not any(each.startswith(UNKNOWN) for each in (first, settings)):
                raise InputError(
                    f"blocks: {run} and {table.run} measured {analysis} with other settings, {short(first)} and "
                    f"{short(settings)}: expected the same; choose with --settings, or measure one again"
                )


def _common_predictors(group: Sequence[BlockTable]) -> list[Predictor]:
    return [of for of in group[0].predictors if all(of in table.predictors for table in group)]


def _givens(group: Sequence[BlockTable], predictor: Predictor) -> list[tuple[Predictor, ...]]:
    """Of several of a kind the last: the most directions of coupling."""
    others = {_kind(of): of for of in _common_predictors(group) if _kind(of) != _kind(predictor)}
    return [(), (_DEPTH,), *([(_DEPTH, *others.values())] if others else [])]


def _correlation(
    group: Sequence[BlockTable], predictor: Predictor, given: Sequence[Predictor], steps: Sequence[int]
) -> BlockCorrelation | None:
    at = [[table.steps.index(step) for step in steps] for table in group]
    columns = lambda of: [_column(table, of)[rows] for table, rows in zip(group, at, strict=True)]  # noqa: E731
    try:
        return block_correlation(
            columns(predictor),
            [table.harms[rows] for table, rows in zip(group, at, strict=True)],
            [columns(each) for each in given],
        )
    except UndefinedError:
        return None


def _column(table: BlockTable, of: Predictor) -> Array:
    if of == _DEPTH:
        return np.broadcast_to(np.arange(1.0, table.harms.shape[1] + 1), table.harms.shape)
    return table.predictors[of]


def _numbers(result: BlockCorrelation, group: Sequence[BlockTable]) -> dict[str, Any]:
    ends = {"rho": result.value, "low": result.low, "high": result.high, "over": result.over, "p_value": result.p}
    null = {"null_low": result.null[0], "null_high": result.null[1], "num_blocks": group[0].harms.shape[1]}
    return {**ends, **null, "num_checkpoints": result.num_cells, "num_undefined": result.num_undefined}


# ------------------------------------------------------------------------------------------------ in words and figures


def sentences(table: pd.DataFrame, run: str) -> list[str]:
    """Returns a sentence for each change and predictor of a run, over training."""
    lines = []
    whole: Any = table[(table["run"] == run) & table["step"].isna()]
    for (analysis, harm, predictor), rows in whole.groupby(["analysis", "harm", "predictor"], sort=False):
        by_given = {row["given"]: row for row in rows.to_dict("records")}
        alone, depth = by_given.get(""), by_given.get(DEPTH)
        if alone is None:
            continue
        change = _change(table, analysis, harm)
        text = f"{change} harms {'less' if alone['rho'] < 0 else 'more'} where {predictor} is higher"
        parts = [f"Spearman {_rho(alone)}", *([f"given depth {_rho(depth)}"] if depth is not None else [])]
        if alone["p_value"] >= 0.05:
            text = f"{change}: its harm has no sure relation to {predictor}"
        lines.append(f"{text} ({'; '.join(parts)})")
    return lines


def _change(table: Any, analysis: str, harm: str) -> str:
    """`Skipping a block`, the same for all runs of a table: with its analysis where several have changed blocks so."""
    several = table.loc[table["harm"] == harm, "analysis"].nunique() > 1
    return HARMS[harm].capitalize() + (f" ({analysis})" if several else "")


def _rho(row: Mapping[str, Any]) -> str:
    interval = "" if np.isnan(row["low"]) else f" [{number_text(row['low'])}, {number_text(row['high'])}]"
    return f"{number_text(row['rho'])}{interval}, {p_equation(row['p_value'], 1e-3)}"


def prediction_charts(
    table: pd.DataFrame, tables: Sequence[BlockTable], run: str, *, axis: AxisName = "step"
) -> list[Chart]:
    """Returns for each change rho over training, a line a predictor, in grey what permuted blocks give."""
    charts = []
    mine: Any = table[(table["run"] == run) & table["step"].notna() & (table["given"] == "")]
    tokens = {step: number for each in tables for step, number in each.tokens.items()}
    for (analysis, harm), rows in mine.groupby(["analysis", "harm"], sort=False):
        series = []
        for number, (predictor, line) in enumerate(rows.groupby("predictor", sort=False)):
            steps = line["step"].astype(int).tolist()
            ends: dict[str, Any] = {"low": rounded(line["low"]), "high": rounded(line["high"])}
            if not number:  # alike for all
                null: dict[str, Any] = {"low": rounded(line["null_low"]), "high": rounded(line["null_high"])}
                series.append(
                    Series(x=steps, y=rounded([0.0] * len(steps)), name=_CHANCE, color=MUTED, legend=True, **null)
                )
            look: dict[str, Any] = {
                "color": COLORS[number % len(COLORS)],
                "width": 2.0,
                "mark": "circle",
                "apart": "circle-open",
            }
            series.append(
                Series(x=steps, y=rounded(line["rho"]), name=str(predictor), legend=True, interval="", **ends, **look)
            )
        training = Training.of(rows["step"].astype(int), tokens)
        charts.append(
            Chart(
                title=f"{_change(table, analysis, harm)}: harm against what is measured of the block",
                x=Axis(),
                y=Axis(title="Spearman's rho over blocks", ends=(-1.05, 1.05)),
                series=series,
                training=training,
                axis=axis if axis in training.names else "step",
            )
        )
    return charts
