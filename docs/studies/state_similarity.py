"""Similarity of states between two checkpoints of a run, and between two runs at one step.

    python docs/studies/state_similarity.py RUN RUN ...                   prints the CKA with the last checkpoint
    python docs/studies/state_similarity.py RUN RUN ... --csv states.csv  also writes every number

RUN is the folder of a run that was measured with the analysis `PooledStates`, which saves the states of its prompts.
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
from study_data import Table, markdown_table

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
DIMENSION = "pooled_dimension"  # the metric whose measurements have saved states
CKA, PROCRUSTES, SUBSPACE = "linear_cka", "procrustes_distance", "subspace_overlap"
PROMPT_SUBSPACE = "prompt_subspace_overlap"
COLUMNS = ("run", "other_run", "analysis", "layer", "step", "other_step", "metric")
COLUMNS += ("value", "low", "high", "over", "chance", "num_prompts")
RANGES = {CKA: (-np.inf, 1.0), PROCRUSTES: (0.0, 2.0), SUBSPACE: (0.0, 1.0), PROMPT_SUBSPACE: (0.0, 1.0)}
MOST_STEPS = 24  # compared steps, evenly spread over the checkpoints
NUM_DIRECTIONS = 8  # dimension of the compared subspaces
FEWEST_PROMPTS = 4  # for a similarity
NUM_DRAWS = 20  # random subsets of prompts, for the interval over prompts
# Share of prompts in a draw. Metrics that depend smoothly on the prompts are best estimated from large subsets.
# Subspaces do not, because one direction can replace another, and only halves vary as much as other prompts would.
DRAWN = {CKA: 0.75, PROCRUSTES: 0.75, SUBSPACE: 0.5, PROMPT_SUBSPACE: 0.5}
FEWEST_SEEDS = 3  # for an interval over seeds
_SAME = 1e-3  # relative tolerance between the dimension of saved states and its measured value


@dataclass(frozen=True, kw_only=True)
class SavedStates:
    """Saved states of one analysis in a run: for each layer (steps, prompts, dim), NaN if missing."""

    run: str
    analysis: str
    settings: str
    steps: Sequence[int]
    layers: Mapping[int, Array]


def saved_states(root: Path, run: str, measurements: Sequence[Measurement]) -> list[SavedStates]:
    """Return the saved states of a run at no more than `MOST_STEPS` checkpoints.

    Problems with the files of a folder are printed to standard error.
    """
    with_states = [m for m in measurements if m.step is not None and any(r.metric == DIMENSION for r in m.records)]
    saved, unread = [], list[str]()
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
            saved.append(SavedStates(steps=[*by_step], layers=_layer_states(by_step, *shapes), **about))
    for sentence in unread:
        print(f"{root}: states are not compared: {sentence}", file=sys.stderr)
    return saved


def read_states(root: Path, measurement: Measurement) -> dict[int, Array] | str:
    """Return the states (prompts, dim) of a measurement by layer, empty if there is no file.

    If the file is damaged or has no states, return a sentence that says so.
    """
    path = values_path(root, measurement)
    if not os.path.isfile(path):  # False also in an unreadable folder
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
    """Return one table with `similarity_of_steps` for each run and `similarity_of_runs` for all runs.

    Three or more runs count as seeds. Their means (`mean_over_runs`) are added under a name such as `3 seeds`.
    """
    runs = [run_data.read_run(root) for root in roots]
    several = [
        saved
        for root, run in zip(roots, runs, strict=True)
        for saved in saved_states(root, run.name, [m for m in run.measurements if not is_suspect(m)])
    ]
    tables = [*map(similarity_of_steps, several), similarity_of_runs(several)]
    table = pd.concat([table for table in tables if len(table)] or tables[-1:], ignore_index=True)
    if len(roots) < FEWEST_SEEDS:
        return table
    return pd.concat([mean_over_runs(table, len(roots), f"{len(roots)} seeds"), table], ignore_index=True)


def similarity_of_steps(saved: SavedStates, metrics: Sequence[str] = (CKA, PROCRUSTES, SUBSPACE)) -> pd.DataFrame:
    """Return a table of the similarity between every two checkpoints of a run, at each layer, with columns `COLUMNS`.

    `linear_cka` is debiased. `subspace_overlap` uses the 8 leading directions, or as many as there are. `chance` is the
    median over steps of the similarity between a checkpoint's states and the same states with permuted prompts. For
    subspaces it is the expected overlap of independent ones.

    `low` and `high` are the 95% interval over prompts. Its half width is Student's t times the standard error of the
    delete-d jackknife, from random subsets of prompts. It is NaN if a subset has too few prompts. A bootstrap would
    repeat prompts, and repeated prompts have equal states. Source: Shao and Wu 1989, A general theory for jackknife
    variance estimation.

    Prompts that are not finite at some step are excluded at all steps. Steps at which most prompts are not finite have
    no value.
    """
    rows = [
        (saved.run, saved.run, saved.analysis, layer, saved.steps[a], saved.steps[b], *numbers)
        for layer, states in saved.layers.items()
        for a, b, *numbers in _compared(states, metrics)
    ]
    return pd.DataFrame(rows, columns=[*COLUMNS])


def similarity_of_runs(several: Sequence[SavedStates]) -> pd.DataFrame:
    """Return a table like `similarity_of_steps` of every two runs at equal saved steps, at each layer.

    Only runs with equal settings, prompts and widths are compared. The features of two seeds do not correspond, so
    `prompt_subspace_overlap` replaces `subspace_overlap`. It uses the 8 leading directions in the space of prompts, and
    its `chance` is the expected overlap of independent ones.
    """
    rows = []
    for alike in grouped(several, lambda saved: (saved.analysis, saved.settings, _shape(saved))).values():
        common = sorted(set.intersection(*(set(saved.steps) for saved in alike)))
        for step in common if len(alike) > 1 else ():
            for layer in sorted(set.intersection(*(set(saved.layers) for saved in alike))):
                states = np.stack([saved.layers[layer][saved.steps.index(step)] for saved in alike])
                for a, b, *numbers in _compared(states, (CKA, PROCRUSTES, PROMPT_SUBSPACE)):
                    rows.append((alike[a].run, alike[b].run, alike[a].analysis, layer, step, step, *numbers))
    return pd.DataFrame(rows, columns=[*COLUMNS])


def mean_over_runs(table: pd.DataFrame, num_runs: int, name: str) -> pd.DataFrame:
    """Return means over all runs of a table, with 95% intervals over runs, as rows called `name`.

    For pairs of steps each run is one observation, and the interval is Student's. For pairs of runs the mean is over
    pairs that share runs, so the interval is that of a jackknife that omits one run at a time.
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
    """Yield two indices and the last columns of `COLUMNS` for all pairs of states (steps or runs, prompts, dim)."""
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
        if metric in (SUBSPACE, PROMPT_SUBSPACE):  # permuting prompts does not change the former
            chance = k / (rows.shape[-1] if metric == SUBSPACE else number - 1)
        else:
            by_chance = [matrices[metric](torch.stack(pair))[0, 1] for pair in zip(rows, shuffled, strict=True)]
            chance = torch.stack(by_chance).nanmedian().item()
        for a, b in itertools.combinations(range(len(rows)), 2):
            if not (value := values[a, b]).isnan():
                ends = _ends(metric, value.item(), np.nan if stderr is None else stderr[a, b].item(), NUM_DRAWS)
                yield a, b, metric, value.item(), *ends, "prompts", chance, number


def _ends(metric: str, value: float, stderr: float, number: int) -> tuple[float, float]:
    """Return Student's 95% interval for `number` draws, clipped to the metric's range."""
    least, most = RANGES[metric]
    wide = stdtrit(number - 1, 0.975) * stderr
    return float(np.clip(value - wide, least, most)), float(np.clip(value + wide, least, most))


def _problem(measurement: Measurement, states: Mapping[int, Array]) -> str:
    """Return why saved states are not those that were measured (other prompts, other dimension), or "" if they are."""
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


def _layer_states(by_step: Mapping[int, Mapping[int, Array]], shape: tuple[int, ...]) -> dict[int, Array]:
    nothing = np.full(shape, np.nan, dtype=np.float32)
    layers = sorted({layer for states in by_step.values() for layer in states})
    return {layer: np.stack([states.get(layer, nothing) for states in by_step.values()]) for layer in layers}


def _shape(saved: SavedStates) -> tuple[int, ...]:
    return tuple(next(iter(saved.layers.values())).shape[1:])


# ------------------------------------------------------------------------------------------------ in text


def last_checkpoint_table(table: pd.DataFrame) -> Table:
    """Yield the CKA of each checkpoint with the last one, one row per run and layer."""
    within = table[(table["run"] == table["other_run"]) & (table["metric"] == CKA)]
    steps = sorted(within["step"].unique())
    yield ["CKA with the last checkpoint", *(f"step {step}" for step in steps)]
    for (run, analysis, layer), part in within.groupby(["run", "analysis", "layer"], sort=False):
        to_last: Any = part[part["other_step"] == part["other_step"].max()].set_index("step")
        yield [f"{run}, {analysis}, layer {layer}", *(_interval(to_last, step) for step in steps)]


def run_pair_table(table: pd.DataFrame) -> Table:
    """Yield the CKA of every two runs at their last common step, one row per pair of runs and layer."""
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
    print(markdown_table(last_checkpoint_table(table)))
    if len(options.runs) > 1:
        print(markdown_table(run_pair_table(table)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
