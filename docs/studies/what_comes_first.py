"""Print the table of what_comes_first.md, and draw its picture in the folder of the runs.

python docs/studies/what_comes_first.py checkpoints/what_comes_first
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from study_data import Quantity, find, markdown_table

from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.step_curves import StepCurve
from lit_layers.clock.times_and_order import measure_times, null_step
from lit_layers.figures.chart import Panels
from lit_layers.figures.profiles import level
from lit_layers.figures.theme import EDGE
from lit_layers.report.emergence import axis_text
from lit_layers.report.side_by_side import Line, training_chart

GROUPS = {
    "text": "shuffle_tokens=False,*",
    "shuffled tokens": "shuffle_tokens=True,*",
    "images": "shuffle_labels=False,*",
    "shuffled labels": "shuffle_labels=True,*",
}
QUANTITIES = (
    Quantity("line-shape score", "line_shape_score"),
    Quantity("prompt entropy", "prompt_entropy", {"normalization": "raw", "drop_first": 0}),
    Quantity("coupling, k = 12", "coupling", {"k": 12}),
    Quantity("non-normality of the Jacobian", "jacobian_non_normality", layered=True, layer=6),
    Quantity("symmetric share of the Jacobian", "jacobian_symmetric_share", layered=True, layer=6),
    Quantity("effective rank of the Jacobian", "jacobian_effective_rank", layered=True, layer=6),
    Quantity("effective depth", "effective_depth"),
    Quantity("loss of the last layer", "logit_lens_loss", layered=True),
    Quantity("preference for correct Python", "minimal_pair_difference"),
)
SHOWN_GROUPS = ("text", "shuffled tokens")
SHOWN = ("coupling", "jacobian_effective_rank", "effective_depth", "minimal_pair_difference")
METRICS = [*dict.fromkeys(each.metric for each in QUANTITIES)]


def read(folder: Path) -> dict[str, list[list[StepCurve]]]:
    """Return the curves of each run, by group."""
    groups = {}
    for name, pattern in GROUPS.items():
        metrics = METRICS if "tokens" in pattern else METRICS[:-1]  # images have no minimal pairs
        groups[name] = [curves_of(root, metrics=metrics) for root in sorted(folder.glob(pattern))]
    return {name: runs for name, runs in groups.items() if runs}


def seeds_of(runs: Sequence[Sequence[StepCurve]], quantity: Quantity) -> list[StepCurve]:
    return [curve for run in runs if (curve := find(run, quantity)) is not None]


def cells(runs: Sequence[Sequence[StepCurve]]) -> Iterator[str]:
    """Yield for each quantity at which step each seed is half-way, and from which step on it differs from its null."""
    for quantity in QUANTITIES:
        seeds = seeds_of(runs, quantity)
        yield f"{half_way(seeds)}; {null_text(seeds)}" if seeds else ""


def picture(groups: Mapping[str, Sequence[Sequence[StepCurve]]]) -> Panels:
    """Return charts of the means over seeds on text and on shuffled tokens, each with the null of the text."""
    charts = []
    for quantity in (each for each in QUANTITIES if each.metric in SHOWN):
        seeds = {name: seeds_of(groups[name], quantity) for name in SHOWN_GROUPS}
        chart = training_chart({name: Line.from_curves(name, curves) for name, curves in seeds.items()}, SHOWN_GROUPS)
        text = seeds[SHOWN_GROUPS[0]]
        null = fmean(float(curve.null.values[0]) for curve in text if curve.null is not None)
        grey = level(list(map(int, text[0].at)), null, "null of text", color=EDGE, width=1.8)
        charts.append(replace(chart, series=[*chart.series, grey]))
    return Panels(title="", charts=charts, columns=2, width=330)


def half_way(seeds: Sequence[StepCurve]) -> str:
    """Return the smallest and the largest half-way step of the seeds, and whether the curve of a seed comes back."""
    times = measure_times(seeds).times
    steps = sorted(each.halfway.value for each in times if each.changes and each.halfway is not None)
    if len(steps) < len(seeds):
        return "does not change"
    after = "after " * any(each.open_ends[1] for each in times)
    back = ", comes back" * (not all(each.emerges for each in times))
    return after + " to ".join(dict.fromkeys(axis_text(step) for step in (steps[0], steps[-1]))) + back


def null_text(seeds: Sequence[StepCurve]) -> str:
    """Return how many seeds differ from their null at the end, over prompts, and from which step on all of these do."""
    steps = [null_step(curve) for curve in seeds]
    differ = [step for step in steps if step is not None and math.isfinite(step)]
    return f"{len(differ)} from {axis_text(max(differ))}" if differ else "0"


if __name__ == "__main__":
    root = Path(sys.argv[1])
    groups = read(root)
    columns = {name: [*cells(runs)] for name, runs in groups.items()}
    rows = zip((each.title for each in QUANTITIES), *columns.values(), strict=True)
    print(markdown_table([["half-way at step; seeds that differ from the null", *columns], *map(list, rows)]))
    if {*SHOWN_GROUPS} <= groups.keys():  # not before all of them have a run
        picture(groups).write(root / "what_comes_first.png")
