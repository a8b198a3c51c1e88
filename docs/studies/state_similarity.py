"""How alike the states of two checkpoints of a run are, and those of two runs at one step.

    python docs/studies/state_similarity.py RUN RUN ...                   prints the CKA with the last checkpoint
    python docs/studies/state_similarity.py RUN RUN ... --csv states.csv  also writes every number

RUN is the folder of a run that was measured with the analysis `PooledStates`, which keeps the states of its prompts.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import state_distances
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load
from scipy.special import stdtrit
from study_data import Table, as_markdown

from lit_layers import run_data
from lit_layers.analyses.statistics import comparable
from lit_layers.errors import first_line
from lit_layers.figures.tables import grouped
from lit_layers.figures.theme import spread
from lit_layers.functional import geometry
from lit_layers.functional.entropy import participation_ratio
from lit_layers.identity import Measurement, settings_of
from lit_layers.records import is_suspect, values_path

Array = NDArray[np.float32]
DIMENSION = "pooled_dimension"  # the metric whose records have states
CKA, PROCRUSTES, SUBSPACE = "linear_cka", "procrustes_distance", "subspace_overlap"
PROMPT_SUBSPACE = "prompt_subspace_overlap"
COLUMNS = ("run", "other_run", "analysis", "layer", "step", "other_step", "metric")
COLUMNS += ("value", "low", "high", "over", "chance", "num_prompts")
RANGES = {CKA: (-np.inf, 1.0), PROCRUSTES: (0.0, 2.0), SUBSPACE: (0.0, 1.0), PROMPT_SUBSPACE: (0.0, 1.0)}
MOST_STEPS = 24  # that are compared, evenly spread over the checkpoints
NUM_DIRECTIONS = 8  # of a subspace
FEWEST_PROMPTS = 4  # that have a similarity
NUM_DRAWS = 20  # of prompts, for the interval over them
# The share of prompts in a draw. What depends on them smoothly is best drawn from most of them; where a direction takes
# another's place in a subspace, it does not, and only halves are as far apart as other prompts would be.
DRAWN = {CKA: 0.75, PROCRUSTES: 0.75, SUBSPACE: 0.5, PROMPT_SUBSPACE: 0.5}
FEWEST_SEEDS = 3  # that have an interval over them
_SAME = 1e-3  # of the dimension of the states that a file holds to that of its measurement, relative


@dataclass(frozen=True, kw_only=True)
class KeptStates:
    """What a run keeps of one analysis: of each layer the states (steps, prompts, dim), NaN where there are none."""

    run: str
    analysis: str
    settings: str
    steps: Sequence[int]
    layers: Mapping[int, Array]


def kept_states(root: Path, run: str, measurements: Sequence[Measurement]) -> list[KeptStates]:
    """Returns the states that a run keeps of its curves' measurements, of at most `MOST_STEPS` checkpoints.

    What a folder holds in place of states is printed to standard error.
    """
    with_states = [m for m in measurements if m.step is not None and any(r.metric == DIMENSION for r in m.records)]
    kept, unread = [], list[str]()
    for analysis, of_analysis in grouped(with_states, lambda m: m.analysis).items():
        there = [m for m in of_analysis if os.path.isfile(values_path(root, m))]
        by_step: dict[int, Mapping[int, Array]] = {}
        for m in spread(sorted(there, key=lambda m: m.step or 0), MOST_STEPS):
            states = read_states(root, m)
            problem = states if isinstance(states, str) else _problem(m, states)
            if problem or isinstance(states, str):
                unread.append(problem)
            else:
                by_step[m.step or 0] = states
        shapes = {tuple(states.shape) for layers in by_step.values() for states in layers.values()}
        if len(shapes) > 1:
            unread.append(f"the states of {analysis} are not of the same prompts and width at all steps")
        elif shapes:
            about = {"run": run, "analysis": analysis, "settings": settings_of(there[0])}
            kept.append(KeptStates(steps=[*by_step], layers=_by_layer(by_step, *shapes), **about))
    for sentence in unread:
        print(f"{root}: states are not compared: {sentence}", file=sys.stderr)
    return kept


def read_states(root: Path, measurement: Measurement) -> dict[int, Array] | str:
    """Returns by layer the states (prompts, dim) of the prompts that were measured; none without a file.

    In place of those of a file that is damaged or holds no states stands the sentence that says so.
    """
    path = values_path(root, measurement)
    if not os.path.isfile(path):  # also in a folder nobody may read
        return {}
    try:
        there = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        return f"{path.name} is damaged: {first_line(error)}"
    layers = {
        record.layer: there.get(f"layer-{record.layer}") for record in measurement.records if record.metric == DIMENSION
    }
    by_layer = {layer: states for layer, states in layers.items() if layer is not None and states is not None}
    if any(states.ndim != 2 or not states.size or states.dtype != np.float32 for states in by_layer.values()):
        return f"{path.name} holds no states of prompts"
    return by_layer


def similar_states(roots: Sequence[Path]) -> pd.DataFrame:
    """Return the tables of `similarity_of_steps` of each run, and of `similarity_of_runs` of all, as one.

    Of three runs or more, seeds of one, also what they have on average (`over_the_runs`), called `3 seeds`.
    """
    runs = [run_data.read_run(root) for root in roots]
    several = [
        kept
        for root, run in zip(roots, runs, strict=True)
        for kept in kept_states(root, run.name, [m for m in run.measurements if not is_suspect(m)])
    ]
    tables = [*map(similarity_of_steps, several), similarity_of_runs(several)]
    table = pd.concat([table for table in tables if len(table)] or tables[-1:], ignore_index=True)
    if len(roots) < FEWEST_SEEDS:
        return table
    return pd.concat([over_the_runs(table, len(roots), f"{len(roots)} seeds"), table], ignore_index=True)


def similarity_of_steps(kept: KeptStates, metrics: Sequence[str] = (CKA, PROCRUSTES, SUBSPACE)) -> pd.DataFrame:
    """Returns the table of every two checkpoints of a run, at each layer, with the columns `COLUMNS`.

    `linear_cka` is debiased; `subspace_overlap` is of the 8 leading directions, or as many as there are. `chance` is
    the same between the states of a checkpoint and those of other prompts, in a random order, the median over steps; of
    subspaces what independent ones have. `low` and `high` are the 95% interval over prompts, of what as many others
    would give on average: Student's t times the delete-d jackknife's error, of random draws without the other prompts;
    NaN where a draw has too few. A bootstrap has prompts twice, which are alike in everything.
    Source: Shao and Wu 1989, A general theory for jackknife variance estimation.
    Prompts that are not finite at some step are left out at all, and steps at which most are not have no value.
    """
    rows = [
        (kept.run, kept.run, kept.analysis, layer, kept.steps[a], kept.steps[b], *numbers)
        for layer, states in kept.layers.items()
        for a, b, *numbers in _compared(states, metrics)
    ]
    return pd.DataFrame(rows, columns=[*COLUMNS])


def similarity_of_runs(several: Sequence[KeptStates]) -> pd.DataFrame:
    """Returns the table of every two runs at equal steps of those kept, at each layer, as `similarity_of_steps`.

    Of runs that were measured with the same settings on the same prompts, and are as wide. As the features of two seeds
    have no order in common, `subspace_overlap` is replaced by `prompt_subspace_overlap`: of the 8 leading directions of
    the prompts' own space, chance being that of independent ones.
    """
    rows = []
    for alike in grouped(several, lambda kept: (kept.analysis, kept.settings, _shape(kept))).values():
        common = sorted(set.intersection(*(set(kept.steps) for kept in alike)))
        for step in common if len(alike) > 1 else ():
            for layer in sorted(set.intersection(*(set(kept.layers) for kept in alike))):
                states = np.stack([kept.layers[layer][kept.steps.index(step)] for kept in alike])
                for a, b, *numbers in _compared(states, (CKA, PROCRUSTES, PROMPT_SUBSPACE)):
                    rows.append((alike[a].run, alike[b].run, alike[a].analysis, layer, step, step, *numbers))
    return pd.DataFrame(rows, columns=[*COLUMNS])


def over_the_runs(table: pd.DataFrame, num_runs: int, name: str) -> pd.DataFrame:
    """Returns the means over all runs of a table of both kinds, with 95% intervals over runs, as rows of that name.

    Of steps by steps each run is a draw, with Student's interval. Of runs by runs it is the mean over the pairs, which
    share runs: the interval is the jackknife's, that leaves out one run after the other.
    """
    rows, within = [], table["run"] == table["other_run"]
    keys = ["analysis", "layer", "step", "other_step", "metric"]
    num_pairs = num_runs * (num_runs - 1) // 2
    for alike, number, other in ((table[within], num_runs, name), (table[~within], num_pairs, f"other of {name}")):
        for key, part in alike.groupby(keys, sort=False):
            if len(part) == number:
                runs, values = dict.fromkeys([*part["run"], *part["other_run"]]), part["value"].to_numpy()
                without = [values[(part["run"] != run) & (part["other_run"] != run)].mean() for run in runs]
                stderr = (num_runs - 1) / num_runs**0.5 * np.std(without, ddof=1)
                ends = _ends(str(key[-1]), values.mean(), float(stderr), num_runs)
                about = ("seeds", part["chance"].mean(), part["num_prompts"].min())
                rows.append((name, other, *key, values.mean(), *ends, *about))
    return pd.DataFrame(rows, columns=[*COLUMNS])


def _compared(
    states: Array, metrics: Sequence[str]
) -> Iterator[tuple[int, int, str, float, float, float, str, float, int]]:
    """Of states (places, prompts, dim) both places, the metric, its value, low, high, over, chance and prompts."""
    tensor = torch.from_numpy(states)
    _, kept = comparable(tensor.isfinite().all(-1))
    rows, number = tensor[:, kept].double(), int(kept.sum())
    if number < FEWEST_PROMPTS:
        return
    k = min(NUM_DIRECTIONS, number - 1, rows.shape[-1])
    matrices: dict[str, Callable[..., Any]] = {
        CKA: lambda rows: geometry.linear_cka_matrix(rows, debiased=True, undefined="nan"),
        PROCRUSTES: lambda rows: state_distances.procrustes_distance_matrix(rows, undefined="nan"),
        SUBSPACE: lambda rows: state_distances.subspace_overlap_matrix(rows, k=k, undefined="nan"),
        PROMPT_SUBSPACE: lambda rows: state_distances.subspace_overlap_matrix(rows, k=k, of="rows", undefined="nan"),
    }
    shuffled = rows[:, torch.randperm(number, generator=torch.Generator().manual_seed(0))]
    for metric in metrics:
        values, stderr = matrices[metric](rows), None
        if (drawn := round(number * DRAWN[metric])) >= max(FEWEST_PROMPTS, k + 1):
            draws = [
                torch.randperm(number, generator=torch.Generator().manual_seed(n))[:drawn] for n in range(NUM_DRAWS)
            ]
            stderr = torch.stack([matrices[metric](rows[:, draw]) for draw in draws]).std(0)
            stderr *= (drawn / (number - drawn)) ** 0.5
        if metric in (SUBSPACE, PROMPT_SUBSPACE):  # the former does not know the order of the rows
            chance = k / (rows.shape[-1] if metric == SUBSPACE else number - 1)
        else:
            by_chance = [matrices[metric](torch.stack(pair))[0, 1] for pair in zip(rows, shuffled, strict=True)]
            chance = torch.stack(by_chance).nanmedian().item()
        for a, b in itertools.combinations(range(len(rows)), 2):
            if not (value := values[a, b]).isnan():
                ends = _ends(metric, value.item(), np.nan if stderr is None else stderr[a, b].item(), NUM_DRAWS)
                yield a, b, metric, value.item(), *ends, "prompts", chance, number


def _ends(metric: str, value: float, stderr: float, number: int) -> tuple[float, float]:
    """Student's 95% interval of so many draws, within the metric's range."""
    least, most = RANGES[metric]
    wide = stdtrit(number - 1, 0.975) * stderr
    return float(np.clip(value - wide, least, most)), float(np.clip(value + wide, least, most))


def _problem(measurement: Measurement, states: Mapping[int, Array]) -> str:
    """Why the states by layer are not those that were measured: of other prompts, or of another dimension."""
    if not states:
        return f"none of {measurement.analysis} at step {measurement.step} can be read"
    tensors = {layer: torch.from_numpy(values) for layer, values in states.items()}
    if len({each.shape for each in tensors.values()}) > 1:
        return f"those of {measurement.analysis} at step {measurement.step} are not of the same prompts at all layers"
    _, kept = comparable(torch.stack([each.isfinite().all(-1) for each in tensors.values()]))
    for record in measurement.records:
        if record.metric == DIMENSION and record.layer in tensors:
            rows = tensors[record.layer][kept].double()
            ratio = participation_ratio(rows, center=True, undefined="nan").item() if len(rows) == record.n else np.nan
            if not abs(ratio - record.value) <= _SAME * record.value:
                return f"those of {measurement.analysis} at step {measurement.step} are not what was measured"
    return ""


def _by_layer(by_step: Mapping[int, Mapping[int, Array]], shape: tuple[int, ...]) -> dict[int, Array]:
    nothing = np.full(shape, np.nan, dtype=np.float32)
    layers = sorted({layer for states in by_step.values() for layer in states})
    return {layer: np.stack([states.get(layer, nothing) for states in by_step.values()]) for layer in layers}


def _shape(kept: KeptStates) -> tuple[int, ...]:
    return tuple(next(iter(kept.layers.values())).shape[1:])


# ------------------------------------------------------------------------------------------------ in text


def with_the_last(table: pd.DataFrame) -> Table:
    """Yield the CKA of each checkpoint with the last one, a row a run and layer."""
    within = table[(table["run"] == table["other_run"]) & (table["metric"] == CKA)]
    steps = sorted(within["step"].unique())
    yield ["CKA with the last checkpoint", *(f"step {step}" for step in steps)]
    for (run, analysis, layer), part in within.groupby(["run", "analysis", "layer"], sort=False):
        to_last: Any = part[part["other_step"] == part["other_step"].max()].set_index("step")
        yield [f"{run}, {analysis}, layer {layer}", *(_interval(to_last, step) for step in steps)]


def between_runs(table: pd.DataFrame) -> Table:
    """Yield the CKA of every two runs at their last common step, a row a pair of runs and layer."""
    pairs = table[(table["run"] != table["other_run"]) & (table["metric"] == CKA)]
    yield ["CKA of two runs at their last common step", "step", "CKA", "by chance"]
    for (run, other, analysis, layer), part in pairs.groupby(["run", "other_run", "analysis", "layer"], sort=False):
        last: Any = part[part["step"] == part["step"].max()].set_index("step")
        chance = f"{last['chance'].iloc[0]:.3f}"
        yield [
            f"{run} and {other}, {analysis}, layer {layer}",
            f"{last.index[0]}",
            _interval(last, last.index[0]),
            chance,
        ]


def _interval(rows: Any, step: int) -> str:
    if step not in rows.index:
        return ""
    row = rows.loc[step]
    return f"{row['value']:.3f}" + ("" if np.isnan(row["low"]) else f" [{row['low']:.3f}, {row['high']:.3f}]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--csv", type=Path, help="also write every number to this file")
    options = parser.parse_args()
    table = similar_states(options.runs)
    if options.csv is not None:
        table.to_csv(options.csv, index=False)
    print(as_markdown(with_the_last(table)))
    if len(options.runs) > 1:
        print(as_markdown(between_runs(table)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
