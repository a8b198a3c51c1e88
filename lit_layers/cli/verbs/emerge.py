"""`lit-layers emerge`: find when each metric of a run emerges, in which order, and with which uncertainty."""

from pathlib import Path
from typing import Annotated, Any, Literal

from lit_layers.cli.options import Names, refuse_replacing
from lit_layers.cli.process import bar
from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import MONOTONICITY, layer_curves, merge_layer_seeds, merge_seeds
from lit_layers.clock.times_and_order import measure_times
from lit_layers.errors import InputError
from lit_layers.report.emergence import write_emergence
from lit_layers.schema import SEED, Range


def emerge(
    runs: list[Path],
    *,
    metrics: Names | None = None,
    where: dict[str, str | int | float] | None = None,
    seeds: bool = False,
    axis: Literal["step", "tokens"] = "step",
    confidence: Annotated[float, Range(0.5, 0.999)] = 0.95,
    settings: Names | None = None,
    allow_suspect: bool = False,
    seed: Annotated[int, SEED] = 0,
    root: Path | None = None,
) -> int:
    """Find when each curve over training steps changes, in which order, and whether runs agree.

    Args:
        runs: folders of runs; tables of scores by step (.csv, .parquet, .jsonl); results of lm-eval (.json, or a folder
            of these)
        metrics: use only these metrics: METRIC,... or ANALYSIS/METRIC,... (default: those in the result tables of a
            report)
        where: use only curves with this value of a tag, or of a column of a table: --where.NAME=VALUE
        seeds: the runs repeat one training with different seeds: also find times for the mean curves over all seeds
        axis: unit of the time axis: optimizer steps or tokens
        confidence: confidence level of the intervals, and of the test for emergence
        settings: which settings (options and data) to use if an analysis was measured with several: see --settings of
            `lit-layers report`
        allow_suspect: also use checkpoints that the audit of their series found suspect
        seed: random seed
        root: folder for the page, the tables and the pictures (default: emergence)
    """
    if not runs:
        raise InputError("missing: runs: expected a run's folder or a table of scores, or several")
    folder = root or Path("emergence")
    refuse_replacing(folder, runs, ("times", "order", "layer_order", "layers", "agreement"))
    curves = []
    tags = {name: str(value) for name, value in (where or {}).items()}
    options: Any = {"metrics": metrics or (), "where": tags, "axis": axis, "settings": settings or ()}
    for path in runs:
        more = curves_of(path, allow_suspect=allow_suspect, **options)
        if twice := {curve.run for curve in curves} & {curve.run for curve in more}:
            raise InputError(f"runs: {path} has the name of another, {min(twice)}: expected runs of different names")
        curves += more
    layers = layer_curves(curves)
    curves += [each.curve for each in layers if each.statistic == MONOTONICITY]
    together, lacking = f"{len({curve.run for curve in curves})} seeds", 0
    if seeds:
        merged = merge_seeds(curves, together)
        lacking = len({curve.key for curve in curves}) - len(merged)
        curves = merged + curves
        layers = merge_layer_seeds(layers, together) + layers
    with bar("finding times") as show:
        times = measure_times(curves, confidence=confidence, seed=seed, show=show)
    if lacking:
        times.left_out[f"over {together}: not all of them have it at common steps"] = lacking
    paths = write_emergence(times, folder, axis=axis, layers=layers)
    print(f"{sum(each.emerges for each in times.times)} of {len(times.times)} curves emerge")
    for why, curves_left in times.left_out.items():
        print(f"left out: {curves_left} curve{'s' if curves_left > 1 else ''}: {why}")
    files = [path for path in paths if path.suffix not in (".png", ".svg", ".pdf")]
    print(*files, f"{len(paths) - len(files)} pictures in {folder}", sep="\n")
    return 0
