"""`lit-layers emerge`: when each number of a run emerges, in which order, and how sure that is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lit_layers.cli.console import bar, show_table
from lit_layers.cli.options import Names, Pairs, refuse_replacing, refuse_unwritable
from lit_layers.errors import InputError
from lit_layers.schema import SEED, Range

if TYPE_CHECKING:
    from lit_layers.clock.times_and_order import Clock

WRITTEN = ("times", "order", "layer_order", "layers", "agreement", "emergence")  # without their endings
CONFIDENCE = Range(0.5, 0.999)  # no curve without errors has a p-value below 0.001
NO_TAGS = Pairs()


def emerge(
    runs: list[Path],
    *,
    metrics: Names | None = None,
    where: Pairs = NO_TAGS,
    seeds: bool = False,
    axis: Literal["step", "tokens"] = "step",
    confidence: Annotated[float, CONFIDENCE] = 0.95,
    settings: Names | None = None,
    allow_suspect: bool = False,
    seed: Annotated[int, SEED] = 0,
    root: Path | None = None,
) -> int:
    """Find when each curve over training steps changes, in which order, and whether runs agree.

    Args:
        runs: folders of runs; tables of scores by step (.csv, .parquet, .jsonl); results of lm-eval or MTEB (.json, or
            a folder of these)
        metrics: only these: METRIC,... or ANALYSIS/METRIC,... (default: those that tables of results show)
        where: only curves with these tags or columns: NAME=VALUE,... (a value may have commas, and no =)
        seeds: the runs are seeds of one training: also find times over all of them
        axis: what training is measured in: optimizer steps or tokens
        confidence: confidence of the intervals, and of the verdict that a curve emerges
        settings: which settings to take of analyses that were measured with several, as in report
        allow_suspect: also take checkpoints that the audit of their series found suspect
        seed: seed of the random draws
        root: folder of the page, the tables and the pictures (default: emergence)
    """
    if not runs:
        raise InputError("missing: runs: expected a run's folder or a table of scores, or several")
    folder = root or Path("emergence")
    refuse_unwritable("root", folder)
    refuse_replacing(folder, runs, WRITTEN)
    from lit_layers.clock.curve_sources import curves_of
    from lit_layers.clock.step_curves import MONOTONICITY, layer_curves, over_seeds, over_the_seeds
    from lit_layers.clock.times_and_order import measure_times
    from lit_layers.report.emergence import write_emergence

    curves = []
    options = {"metrics": metrics or (), "where": dict(where), "axis": axis, "settings": settings or ()}
    for place in runs:
        more = curves_of(place, allow_suspect=allow_suspect, **options)
        if twice := {curve.run for curve in curves} & {curve.run for curve in more}:
            raise InputError(f"runs: {place} has the name of another, {min(twice)}: expected runs of different names")
        curves += more
    layers = layer_curves(curves)
    curves += [each.curve for each in layers if each.statistic == MONOTONICITY]
    names = dict.fromkeys(curve.run for curve in curves)
    together = f"{len(names)} seeds" if seeds else ""
    if seeds:
        if len(names) < 2:
            raise InputError(f"seeds: expected the runs of 2 seeds or more, got {len(names)}")
        if together in names:
            raise InputError(f"seeds: expected no run to be called {together}, as the mean over them is")
        merged = over_seeds(curves, together)
        lacking = len({curve.key for curve in curves}) - len(merged)
        curves = merged + curves
        layers = over_the_seeds(layers, together) + layers
    with bar("finding times", transient=True) as show:
        times = measure_times(curves, confidence=confidence, seed=seed, show=show)
    if seeds and lacking:
        times.left_out[f"over {together}: not all of them have it at common steps"] = lacking
    paths = write_emergence(times, folder, axis=axis, layers=layers)
    _show(times, axis)
    pictures = [path for path in paths if path.suffix in (".png", ".svg", ".pdf")]
    files = [path for path in paths if path not in pictures]
    print(*files, f"{len(pictures)} pictures in {folder}", sep="\n")
    return 0


def _show(clock: "Clock", axis: str) -> None:
    from lit_layers.clock.times_and_order import (
        agreement_sentence,
        agreement_table,
        emerged_in_order,
        few_seeds_sentence,
        of_the_model,
    )
    from lit_layers.report.emergence import time_text

    for run in clock.runs:
        rows = [
            {"": curve.title, "onset": time_text(times.onset), "half-way": time_text(times.halfway)}
            | {
                "peak": time_text(times.peak),
                "plateau": time_text(times.plateau),
                "errors over": curve.over or "guessed",
            }
            for curve, times in emerged_in_order(clock, run)
            if times.emerges
        ]
        show_table(rows, f"{run}, {axis}s")
        others = [curve.title for curve, times in of_the_model(clock, run) if not times.emerges]
        print(f"does not emerge: {'; '.join(others)}\n" if others else "")
    for line in filter(None, [agreement_sentence(agreement_table(clock)), few_seeds_sentence(clock)]):
        print(line)
    for why, number in clock.left_out.items():
        print(f"left out: {number} curve{'s' if number > 1 else ''}: {why}")
