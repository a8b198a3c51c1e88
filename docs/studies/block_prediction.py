"""Which blocks the model needs: harm of changing one block against measurements of that block, over training.

python docs/studies/block_prediction.py     prints the tables `blocks`, `blocks given depth` and `over training` of
                                            four_papers.md: a CPU minute
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit
from study_data import DATA, GROUPS, Table, group_of, markdown_table, unpack

from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.theme import COLORS, MUTED, Axis, Training, rounded
from lit_layers.functional.block_schedules import BLOCK_NAMES
from lit_layers.functional.correlation import UndefinedError
from lit_layers.records import AXES, Measurement, Record

Array = NDArray[np.float64]
Predictor = tuple[str, str]  # its name and its analysis
COLUMNS = ("run", "step", "analysis", "harm", "predictor", "given", "rho", "low", "high", "over", "p_value")
COLUMNS = (*COLUMNS, "null_low", "null_high", "num_blocks", "num_checkpoints", "num_undefined")
HARMS = ("skip_one", "switch", "repeat_one")
CHANGES = {
    "skip_one": "Skipping a block",
    "switch": "Switching a block with the next",
    "repeat_one": "Running a block twice",
}
DEPTH = "depth"
_DEPTH: Predictor = (DEPTH, "")  # needs no analysis
INFLUENCE, NORM_STEP = "influence", "norm step"
_RELATIVE = 1e-10  # smaller residuals of a column are rounding errors
BLOCK_STEPS = (0, 1, 4, 16, 32, 64, 128, 192, 384, 576, 960, 2048)
BLOCK_LINES = (("skip_one", "coupling, k = 12"), ("skip_one", "influence"), ("repeat_one", "influence"))
_CHANCE = "grey band: 95% of permuted blocks"  # text of the legend
_FEWEST_BLOCKS = 4


# ------------------------------------------------------------------------------------------------ the test


class BlockCorrelation(NamedTuple):
    """A rank correlation over blocks, averaged over checkpoints and runs: see `block_correlation`.

    `null` has the ends of the central 95% of the permutations. `low` and `high` are a 95% interval `over` "runs" or
    "blocks". `num_cells` counts the checkpoints of all runs, `num_undefined` those without a coefficient.
    """

    value: float
    p: float
    null: tuple[float, float]
    low: float
    high: float
    over: str
    num_cells: int
    num_undefined: int


def block_correlation(
    x: Sequence[Array],
    y: Sequence[Array],
    given: Sequence[Sequence[Array]] = (),
    *,
    permutations: int = 9999,
    seed: int = 0,
) -> BlockCorrelation:
    """Return Spearman's rho between two numbers of a block, over blocks, averaged over checkpoints and runs.

    rho at a checkpoint is Pearson's r between the ranks of its blocks. With covariates it is Pearson's r between the
    residuals of the ranks, after a regression with an intercept. rho is averaged over the checkpoints of each run, then
    over runs.

    Under the null hypothesis x is assigned to blocks at random. A permutation reorders the blocks of x within each run,
    in the same way at all its checkpoints, because a block keeps its identity during training. p is two-sided. A single
    run uses all permutations if there are at most `permutations`. Otherwise p uses that number of random permutations
    and counts the data as one of them. With covariates the residuals of x are permuted, which is approximate.

    The interval is Student's t over runs if at least three runs have a value. Otherwise it is over blocks: Fisher's z
    with the variance of Bonett and Wright, (1 + rho²/2) / (blocks - 3 - covariates). It is NaN if that denominator is
    below 1.

    Args:
        x, y: a table (checkpoints, blocks) for each run.
        given: covariates, each in the form of x.
        permutations: number of random permutations.
        seed: seed of the permutations.

    Raises:
        UndefinedError: if no checkpoint has a coefficient: NaN, only ties, or too few blocks for the covariates.
        ValueError: if tables differ in shape.
    """
    runs, undefined, cells, blocks = [], 0, 0, 0
    for run, (one, other) in enumerate(zip(x, y, strict=True)):
        tables = [np.asarray(table, dtype=np.float64) for table in (one, other, *(each[run] for each in given))]
        if len({table.shape for table in tables}) > 1 or tables[0].ndim != 2:
            raise ValueError(f"expected tables of one shape, got {', '.join(str(table.shape) for table in tables)}")
        products = []
        for checkpoint in zip(*tables, strict=True):
            try:
                products.append(np.outer(*_rank_residuals(*checkpoint)))
            except UndefinedError:
                undefined += 1
        cells, blocks = cells + len(tables[0]), max(blocks, tables[0].shape[1])
        if products:
            runs.append(np.mean(products, axis=0))  # [i, j]: x of block i times y of block j
    if not runs:
        raise UndefinedError(f"no checkpoint of {cells} has a rank correlation over {blocks} blocks")
    values = np.array([np.trace(run) for run in runs])
    value, null = float(np.clip(values.mean(), -1, 1)), _permuted(runs, permutations, seed)
    reached = (np.abs(null) >= abs(values.mean()) * (1 - 1e-12)).sum()
    exact = len(null) != permutations
    p = reached / len(null) if exact else (1 + reached) / (1 + len(null))
    low, high, over = (
        _runs_interval(values) if len(runs) > 2 else _blocks_interval(value, len(runs[0]) - 3 - len(given))
    )
    ends = np.quantile(null, [0.025, 0.975])
    return BlockCorrelation(value, float(p), (float(ends[0]), float(ends[1])), low, high, over, cells, undefined)


def _rank_residuals(*columns: Array) -> list[Array]:
    """Return the residuals of the ranks of x and y, scaled to length 1."""
    if not all(np.isfinite(column).all() for column in columns):
        raise UndefinedError("a value is not finite")
    x, y, *given = map(_ranks, columns)
    basis = _basis(given, len(x))
    if len(x) - 2 - basis.shape[1] < 1:
        raise UndefinedError(f"{len(x)} blocks are too few for {basis.shape[1]} covariates")
    left = [_residual(name, column, basis) for name, column in (("x", x), ("y", y))]
    return [column / np.linalg.norm(column) for column in left]


def _permuted(runs: Sequence[Array], permutations: int, seed: int) -> Array:
    rng, total = np.random.default_rng(seed), np.zeros(1)
    for table in runs:
        blocks = len(table)
        if len(runs) == 1 and math.factorial(blocks) <= permutations:
            orders = np.array([*itertools.permutations(range(blocks))])
        else:
            orders = rng.permuted(np.tile(np.arange(blocks), (permutations, 1)), axis=1)
        total = total + table[orders, np.arange(blocks)].sum(1)
    return total / len(runs)


def _runs_interval(values: Array) -> tuple[float, float, str]:
    half = float(stdtrit(len(values) - 1, 0.975)) * values.std(ddof=1) / math.sqrt(len(values))
    return max(-1.0, values.mean() - half), min(1.0, values.mean() + half), "runs"


def _blocks_interval(value: float, left: int) -> tuple[float, float, str]:
    if left < 1:
        return math.nan, math.nan, "blocks"
    center, half = math.atanh(min(max(value, -1 + 1e-12), 1 - 1e-12)), 1.96 * math.sqrt((1 + value**2 / 2) / left)
    return math.tanh(center - half), math.tanh(center + half), "blocks"


def _ranks(column: Array) -> Array:
    _, ranks, counts = np.unique(column, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[ranks]


def _basis(columns: Sequence[Array], n: int) -> Array:
    """Return an orthonormal basis of the span of the centred columns."""
    centered = [column - column[0] - (column - column[0]).mean() for column in columns if (column != column[0]).any()]
    if not centered:
        return np.zeros((n, 0))
    scaled = np.stack([column / np.linalg.norm(column) for column in centered], axis=1)
    left, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
    return left[:, sizes > _RELATIVE * sizes[0]]


def _residual(name: str, column: Array, basis: Array) -> Array:
    if np.ptp(column) == 0:
        raise UndefinedError(f"a correlation is undefined: {name} is constant")
    centered = column - column[0] - (column - column[0]).mean()
    left = centered - basis @ (basis.T @ centered)
    if np.linalg.norm(left) <= _RELATIVE * np.linalg.norm(centered):
        raise UndefinedError(f"a correlation is undefined: {name} is determined by the covariates")
    return left


# ------------------------------------------------------------------------------------------------ blocks of a run


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Harm of changing each block in one run and one way, and its predictors, as arrays (checkpoints, blocks).

    Values that were not measured are NaN. The keys of `predictors` are pairs of a name (such as `coupling, k = 12`,
    `influence`, `norm step`) and an analysis.
    """

    run: str
    analysis: str
    harm: str
    steps: Sequence[int]
    harms: Array
    predictors: Mapping[Predictor, Array]


def block_tables(run: str, measurements: Iterable[Measurement]) -> list[BlockTable]:
    """Return harms and predictors of the blocks of a run, for each kind of change that has both.

    The harm is the loss with the block skipped, repeated, or switched with the next, minus the loss of the full model.
    If there is no loss, it is the divergence from the full model. Predictors of a block l:

        coupling    the mean over the other blocks m of (coupling_pair(l, m) + coupling_pair(m, l)) / 2, for each k
        influence   1 - layer_cosine(l - 1, l): how far the block turns a token's state
        norm step   step_norm(l) / state_norm(l - 1): the relative length of its step

    A switch has the predictors of both blocks: their coupling with each other, and the mean of their influences and
    norm steps.
    """
    by_step: dict[int, _Checkpoint] = {}
    for m in measurements:
        if m.step is not None and m.error is None:
            by_step.setdefault(m.step, _Checkpoint()).add(m.analysis, m.records)
    kinds = sorted(
        {kind for each in by_step.values() for kind in each.harms}, key=lambda kind: (HARMS.index(kind[1]), kind)
    )
    tables = []
    for kind in kinds:
        steps = [step for step in sorted(by_step) if kind in by_step[step].harms]
        blocks = max(max(by_step[step].harms[kind]) for step in steps)
        predicted = [by_step[step].predictors(blocks, of_pairs=kind[1] == "switch") for step in steps]
        found = sorted({key for each in predicted for key in each}, key=_rank)
        nothing = np.full(blocks, np.nan)
        if found and blocks >= _FEWEST_BLOCKS:
            tables.append(
                BlockTable(
                    run=run,
                    analysis=kind[0],
                    harm=kind[1],
                    steps=steps,
                    harms=np.stack([_block_values(by_step[step].harms[kind], blocks) for step in steps]),
                    predictors={key: np.stack([each.get(key, nothing) for each in predicted]) for key in found},
                )
            )
    return tables


def _rank(predictor: Predictor) -> tuple[str, int, Predictor]:
    """Return the sort key of a predictor, which puts `coupling, k = 4` before `coupling, k = 12`."""
    kind, _, number = predictor[0].partition(" = ")
    return kind, int(number) if number.isdecimal() else 0, predictor


def _names(tables: Iterable[BlockTable]) -> dict[Predictor, str]:
    """Return the names of predictors for all tables, with the analysis if several analyses have the same name."""
    predictors = {key for table in tables for key in table.predictors}
    often = Counter(name for name, _ in predictors)
    return {key: ", ".join(key) if often[key[0]] > 1 else key[0] for key in predictors}


def _kind(predictor: Predictor) -> str:
    return predictor[0].partition(",")[0]


class _Checkpoint:
    """Harms and predictors of one checkpoint, by name and analysis."""

    def __init__(self) -> None:
        self.harms: dict[tuple[str, str], dict[int, float]] = {}
        self.pairs: dict[Predictor, dict[tuple[int, int], float]] = {}  # couplings, and cosines between layers
        self.norms: dict[Predictor, tuple[dict[int, float], dict[int, float]]] = {}  # norms of steps, norms of states

    def add(self, analysis: str, records: Iterable[Record]) -> None:
        by_metric: dict[str, list[Record]] = {}
        for record in records:
            by_metric.setdefault(record.metric, []).append(record)
        for metric in ("variant_loss", "kl_to_full"):
            if full := [r.value for r in by_metric.get(metric, ()) if r.tags.get("variant") == "baseline"]:
                for r in by_metric[metric]:
                    variant = str(r.tags.get("variant"))
                    if variant in BLOCK_NAMES and r.layer is not None and not set(AXES) & r.tags.keys():
                        self.harms.setdefault((analysis, variant), {})[r.layer] = r.value - full[0]
                break
        for r in by_metric.get("coupling_pair", ()):
            if r.layer is not None and r.other_layer is not None and r.layer != r.other_layer:
                name = f"coupling, k = {r.tags['k']}" if "k" in r.tags else "coupling"
                self.pairs.setdefault((name, analysis), {})[r.layer, r.other_layer] = r.value
        for r in by_metric.get("layer_cosine", ()):
            # the cosine between a token's states before and after the block, not between flattened prompts
            if r.layer is not None and r.other_layer is not None and r.tags.get("mode", "token") == "token":
                self.pairs.setdefault((INFLUENCE, analysis), {})[r.layer, r.other_layer] = r.value
        norms = [
            {r.layer: r.value for r in by_metric.get(name, ()) if r.layer is not None and not r.tags}
            for name in ("step_norm", "state_norm")
        ]
        if all(norms):
            self.norms[NORM_STEP, analysis] = norms[0], norms[1]

    def predictors(self, blocks: int, *, of_pairs: bool) -> dict[Predictor, Array]:
        """Return predictors of each block, or with `of_pairs` of each block and the next."""
        last = blocks + of_pairs
        predictors: dict[Predictor, Array] = {}
        for key, pairs in self.pairs.items():
            table = np.full((last + 1, last + 1), np.nan)
            for (a, b), number in pairs.items():
                if a <= last and b <= last:
                    table[a, b] = number
            if key[0] == INFLUENCE:
                table = np.where(np.isnan(table), table.T, table)
                predictors[key] = 1 - np.diagonal(table, 1)
            else:
                both = (table + table.T)[1:, 1:] / 2
                predictors[key] = np.diagonal(both, 1) if of_pairs else _off_diagonal(both).mean(1)
        for key, norms in self.norms.items():
            steps, states = (_block_values(each, last, first=0) for each in norms)
            predictors[key] = steps[1:] / np.where(states == 0, np.nan, states)[:-1]
        if of_pairs:
            for key in [key for key in predictors if key[0] in (INFLUENCE, NORM_STEP)]:
                predictors[key] = (predictors[key][:-1] + predictors[key][1:]) / 2
        return {key: values for key, values in predictors.items() if np.isfinite(values).any()}


def _off_diagonal(table: Array) -> Array:
    return table[~np.eye(len(table), dtype=bool)].reshape(len(table), -1)


def _block_values(values: Mapping[int, float], last: int, *, first: int = 1) -> Array:
    return np.array([values.get(block, np.nan) for block in range(first, last + 1)])


def prediction_table(tables: Sequence[BlockTable]) -> pd.DataFrame:
    """Return Spearman's rho between harm and predictor over blocks, pooled over runs, per checkpoint and over training.

    A row without a step is the mean over the checkpoints after step 0. The rows of step 0 are those of untrained
    weights. Each predictor is tested without covariates, given depth (the block's index), and given depth and the other
    predictors, where coupling enters with one k. `block_correlation` defines rho, its permutation p and its interval.
    The runs that measured a change are pooled as seeds, under a name such as `3 seeds`. Only predictors that all of
    these runs have are tested.
    """
    rows, names = [], {_DEPTH: DEPTH, **_names(tables)}
    kinds = list(dict.fromkeys((table.analysis, table.harm) for table in tables))
    for analysis, harm in kinds:
        group = [table for table in tables if (table.analysis, table.harm) == (analysis, harm)]
        common = sorted(set.intersection(*(set(table.steps) for table in group)))
        for predictor in _common_predictors(group) if len(group) > 1 else ():
            for given in _givens(group, predictor):
                trained = [step for step in common if step > 0]
                for step, steps in ((None, trained), *((step, [step]) for step in common)):
                    if (result := _correlation(group, predictor, given, steps)) is not None:
                        head = {"run": f"{len(group)} seeds", "step": step, "analysis": analysis, "harm": harm}
                        what = {"predictor": names[predictor], "given": " and ".join(names[each] for each in given)}
                        rows.append({**head, **what, **_numbers(result, group)})
    table: Any = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.astype({"step": "Int64"})


def _common_predictors(group: Sequence[BlockTable]) -> list[Predictor]:
    return [key for key in group[0].predictors if all(key in table.predictors for table in group)]


def _givens(group: Sequence[BlockTable], predictor: Predictor) -> list[tuple[Predictor, ...]]:
    """Return the sets of covariates of a predictor. Among several couplings, the one with the largest k is used."""
    others = {_kind(key): key for key in _common_predictors(group) if _kind(key) != _kind(predictor)}
    return [(), (_DEPTH,), *([(_DEPTH, *others.values())] if others else [])]


def _correlation(
    group: Sequence[BlockTable], predictor: Predictor, given: Sequence[Predictor], steps: Sequence[int]
) -> BlockCorrelation | None:
    at = [[table.steps.index(step) for step in steps] for table in group]
    columns = lambda key: [_column(table, key)[rows] for table, rows in zip(group, at, strict=True)]  # noqa: E731
    try:
        return block_correlation(
            columns(predictor),
            [table.harms[rows] for table, rows in zip(group, at, strict=True)],
            [columns(each) for each in given],
        )
    except UndefinedError:
        return None


def _column(table: BlockTable, key: Predictor) -> Array:
    if key == _DEPTH:
        return np.broadcast_to(np.arange(1.0, table.harms.shape[1] + 1), table.harms.shape)
    return table.predictors[key]


def _numbers(result: BlockCorrelation, group: Sequence[BlockTable]) -> dict[str, Any]:
    ends = {"rho": result.value, "low": result.low, "high": result.high, "over": result.over, "p_value": result.p}
    null = {"null_low": result.null[0], "null_high": result.null[1], "num_blocks": group[0].harms.shape[1]}
    return {**ends, **null, "num_checkpoints": result.num_cells, "num_undefined": result.num_undefined}


# ------------------------------------------------------------------------------------------------ tables and figures


def predictions(runs: Mapping[str, Sequence[Measurement]]) -> dict[str, pd.DataFrame]:
    """Return the `prediction_table` of each group of runs."""
    tables = {group: [] for group in GROUPS}
    for run, measurements in runs.items():
        tables[group_of(run)] += block_tables(run, measurements)
    return {group: prediction_table(of_group) for group, of_group in tables.items()}


def harm_correlations(blocks: Mapping[str, pd.DataFrame], given: str) -> Table:
    """Yield the correlations between harm and predictors, pooled over seeds and averaged over trained checkpoints."""
    yield ["changing a block by", "predictor", *blocks]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for group, table in blocks.items():
        rows: Any = table[table["step"].isna() & (table["given"] == given)]
        for row in rows.to_dict("records"):
            p = "p < 0.001" if row["p_value"] < 1e-3 else f"p {row['p_value']:.2g}"
            interval = "" if np.isnan(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
            cells.setdefault((row["harm"], row["predictor"]), {})[group] = f"{row['rho']:.2f}{interval}, {p}"
    for (harm, predictor), found in cells.items():
        yield [harm, predictor, *(found.get(group, "not measured") for group in blocks)]


def training_correlations(blocks: Mapping[str, pd.DataFrame]) -> Table:
    """Yield the correlation between harm and some predictors at some checkpoints, pooled over seeds."""
    yield ["step", *map(str, BLOCK_STEPS)]
    for group, table in blocks.items():
        for harm, predictor in BLOCK_LINES:
            chosen = (table["harm"] == harm) & (table["predictor"] == predictor) & (table["given"] == "")
            line: Any = table[chosen & table["step"].notna()].set_index("step")
            cells = [line.loc[step] if step in line.index else None for step in BLOCK_STEPS]
            marked = ["" if c is None else f"{c['rho']:.2f}{'*' if c['p_value'] < 0.05 else ''}" for c in cells]
            yield [f"{group}: {harm}, {predictor}", *marked]


def block_tables_of_page(blocks: Mapping[str, pd.DataFrame]) -> dict[str, list[list[str]]]:
    """Return the tables of blocks, by their names on the page."""
    return {
        "blocks": [*harm_correlations(blocks, "")],
        "blocks given depth": [*harm_correlations(blocks, "depth")],
        "over training": [*training_correlations(blocks)],
    }


def prediction_charts(table: pd.DataFrame) -> list[Chart]:
    """Return for each change a chart of rho over training, with a line per predictor and the null in grey."""
    charts = []
    mine: Any = table[table["step"].notna() & (table["given"] == "")]
    for (_, harm), rows in mine.groupby(["analysis", "harm"], sort=False):
        series = []
        for number, (predictor, line) in enumerate(rows.groupby("predictor", sort=False)):
            steps = line["step"].astype(int).tolist()
            ends: dict[str, Any] = {"low": rounded(line["low"]), "high": rounded(line["high"])}
            if not number:  # the null is the same for all predictors
                null: dict[str, Any] = {"low": rounded(line["null_low"]), "high": rounded(line["null_high"])}
                series.append(
                    Series(x=steps, y=rounded([0.0] * len(steps)), name=_CHANCE, color=MUTED, legend=True, **null)
                )
            look: dict[str, Any] = {
                "color": COLORS[number % len(COLORS)],
                "width": 2.0,
                "mark": "circle",
            }
            series.append(
                Series(x=steps, y=rounded(line["rho"]), name=str(predictor), legend=True, interval="", **ends, **look)
            )
        training = Training.of(rows["step"].astype(int), {})
        charts.append(
            Chart(
                title=f"{CHANGES[harm]}: harm against what is measured of the block",
                x=Axis(),
                y=Axis(title="Spearman's rho over blocks", ends=(-1.05, 1.05)),
                series=series,
                training=training,
            )
        )
    return charts


if __name__ == "__main__":
    for name, table in block_tables_of_page(predictions(unpack(DATA))).items():
        print(f"{name}\n\n{markdown_table(table)}")
