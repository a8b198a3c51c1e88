"""One curve out of many runs' numbers: from the lines, from the tables that `lit-layers compact` writes, by DuckDB.

    OMP_NUM_THREADS=1 python benchmarks/many_runs.py      # 45 runs x 154 steps x 3,100 numbers: 4 GB
    OMP_NUM_THREADS=1 python benchmarks/many_runs.py --runs 4 --steps 20

Synthetic numbers in the lines that a run writes. Each round asks for another layer of a metric at all steps of all
runs, in a process that has imported the package, as in a notebook. CPU seconds, of this process and of those that it
starts. From the lines it is asked of one run alone, and scaled. All ways must give the same numbers.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from rounds import Row, add_options, finish

from lit_layers import records

LAYERS, SHARE = 25, 124  # numbers of an analysis a step: metrics x layers
LEAST = 4 * SHARE  # of which the fourth analysis is asked for
SECOND = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--runs", type=int, default=45)
    parser.add_argument("--steps", type=int, default=154)
    parser.add_argument("--numbers", type=int, default=3100, help=f"of a step, at least {LEAST}")
    options = parser.parse_args()
    if options.numbers < LEAST or min(options.runs, options.steps, options.rounds) < 1:
        got = f"{options.runs}, {options.steps}, {options.rounds} and {options.numbers}"
        parser.error(f"expected positive runs, steps and rounds, and numbers of at least {LEAST}, got {got}")
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder) / f"run{number:02d}" for number in range(options.runs)]
        for number, root in enumerate(roots):
            write_run(root, number, options.steps, options.numbers)
        began = spent()
        made = [records.compact(root) for root in roots]
        compacting = spent() - began
        total = sum(each.numbers for each in made)
        sizes = sum(each.log_bytes for each in made), sum(each.table_bytes for each in made)
        seconds: dict[str, list[float]] = {"lines": [], "tables": [], "duckdb": []}
        for turn in range(options.rounds + 1):
            layer = turn % LAYERS
            began = spent()
            frame = records.frame(roots, analysis="analysis_3", metric="metric_1", layer=layer)
            tables = spent() - began
            began = spent()
            asked = by_duckdb(folder, layer)
            duck = spent() - began
            began = spent()
            lines = records.frame(records.read(roots[0] / "measurements.jsonl"))
            lines = lines[(lines.analysis == "analysis_3") & (lines.metric == "metric_1") & (lines.layer == layer)]
            whole = spent() - began
            same(frame, asked, lines, options.runs * options.steps)
            if turn:
                for way, took in zip(seconds, (whole * options.runs, tables, duck), strict=True):
                    seconds[way].append(took)
    of = f"of {total:,} numbers"
    rows = [
        Row(f"a curve {of}, `records.frame` on tables", seconds["tables"], SECOND, at_most=True, unit=" s"),
        Row(f"a curve {of}, DuckDB on tables", seconds["duckdb"], unit=" s"),
        Row(f"a curve {of}, from the lines (scaled from one run)", seconds["lines"], unit=" s"),
        Row("bytes of the lines over those of the tables", [sizes[0] / sizes[1]] * options.rounds),
        Row("compacting a run", [compacting / options.runs] * options.rounds, unit=" s"),
    ]
    return finish("many_runs", rows, options)


def spent() -> float:
    return sum(os.times()[:4])


def write_run(root: Path, seed: int, steps: int, numbers: int) -> None:
    """A run's lines as `records.append` writes them, without its waiting for the disk."""
    root.mkdir()
    draw = random.Random(seed)
    with open(root / "measurements.jsonl", "w", encoding="utf-8") as file:
        for step in range(steps):
            for part in range(numbers // SHARE):
                one = [
                    {
                        "metric": f"metric_{number // LAYERS}",
                        "layer": number % LAYERS,
                        **dict(zip(("value", "stderr", "low", "high"), (draw.random() for _ in range(4)), strict=True)),
                        "n": 128,
                        "tags": {"k": number // LAYERS},
                    }
                    for number in range(SHARE)
                ]
                known = {"config_hash": f"{part:016x}", "data_hash": "0" * 16, "weights_hash": f"{step:016x}"}
                line = {"run": root.name, "step": step * 1000, "tokens": step * 10**6, "analysis": f"analysis_{part}"}
                line |= {"records": one, "seconds": draw.random(), "error": None, "provenance": known}
                file.write(json.dumps(line) + "\n")


def by_duckdb(folder: str, layer: int):
    import duckdb

    duckdb.sql("set threads = 1")
    tables = f"{folder}/*/measurements.parquet"
    where = f"analysis = 'analysis_3' and metric = 'metric_1' and layer = {layer}"
    return duckdb.execute(f"select run, step, value from '{tables}' where {where} order by run, step").df()


def same(frame, asked, lines, rows: int) -> None:
    """Ends where the three ways differ."""
    frame = frame.sort_values(["run", "step"])
    first = frame[frame.run == frame.run.iloc[0]]
    if not (len(frame) == rows and all(map(np.array_equal, (frame.value, first.value), (asked.value, lines.value)))):
        raise SystemExit("the lines, the tables and DuckDB do not give the same numbers")


if __name__ == "__main__":
    sys.exit(main())
