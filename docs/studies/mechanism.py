"""Tables and timelines of mechanism and geometry in docs/studies/four_papers.md, from four_papers_mechanism.parquet.

`python docs/studies/four_papers.py` writes them and all others. `--pack-mechanism ROOT` packs the runs first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from study_data import half_way_text

from lit_layers.clock.step_curves import StepCurve, merge_seeds
from lit_layers.clock.times_and_order import Clock, agreement_table, measure_times, order_table
from lit_layers.figures.chart import Panels
from lit_layers.figures.labels import p_equation
from lit_layers.functional.emergence.curve_times import EmergenceTimes
from lit_layers.report.emergence import LEAST_P, axis_text, timeline
from lit_layers.report.side_by_side import Line, difference, training_chart

TIMELINE = Path(__file__).parents[1] / "images" / "four_papers_mechanism.png"
CONTROL = TIMELINE.with_name("four_papers_mechanism_control.png")
TOGETHER = "all seeds"
STEPS = (0, 32, 192)  # shown with the last step: untrained, collapsed, and recovering
COMPARED = ("prompt entropy", "coupling, k = 12", "entropy of attention", "prefix matching, best head")


@dataclass(frozen=True)
class Part:
    """Numbers of one kind: for each its name, metric, identifying tags, and whether it is taken at the last layer."""

    kind: str
    numbers: Sequence[tuple[str, str, Mapping[str, object], bool]]


PARTS = (
    Part(
        "geometry",
        (
            ("line-shape score", "line_shape_score", {}, False),
            ("prompt entropy", "prompt_entropy", {"normalization": "raw", "drop_first": 0}, False),
            ("anisotropy", "anisotropy", {}, False),
            ("intrinsic dimension (TwoNN)", "two_nn_dimension", {}, False),
            ("decay of the spectrum (alpha-ReQ)", "alpha_req", {}, False),
            ("block influence", "block_influence", {}, False),
            ("massive activations", "massive_activation", {}, False),
            ("coupling, k = 12", "coupling", {"k": 12}, False),
        ),
    ),
    Part(
        "prediction",
        (
            ("loss of the readout, last layer", "logit_lens_loss", {}, True),
            ("divergence from unigrams, last layer", "ngram_divergence", {"order": 1}, True),
            ("divergence from bigrams, last layer", "ngram_divergence", {"order": 2}, True),
            ("probe accuracy, last layer", "accuracy", {}, True),
        ),
    ),
    Part(
        "mechanism",
        (
            ("entropy of attention", "attention_entropy", {}, False),
            ("attention to the first token", "sink_mass", {}, False),
            ("attention to the previous token, best head", "best_previous_token_score", {}, False),
            ("prefix matching, best head", "best_prefix_matching_score", {}, False),
            ("in-context score", "in_context_score", {}, False),
        ),
    ),
)
BEFORE = (
    "prompt entropy",
    "line-shape score",
    "coupling, k = 12",
    "loss of the readout, last layer",
    "intrinsic dimension (TwoNN)",
)


@dataclass(frozen=True)
class Mechanism:
    """Curve of each number of `PARTS` in each run, and emergence times over all seeds and of each seed."""

    curves: Mapping[str, Mapping[str, StepCurve]]
    together: Mapping[str, tuple[StepCurve, EmergenceTimes]]
    each: Clock  # times of each seed, with intervals over prompts

    @classmethod
    def from_curves(cls, runs: Mapping[str, Sequence[StepCurve]]) -> "Mechanism":
        numbers = [number for part in PARTS for number in part.numbers]
        curves = {
            run: {name: _find(each, metric, tags, last) for name, metric, tags, last in numbers}
            for run, each in runs.items()
        }
        merged = merge_seeds([curve for found in curves.values() for curve in found.values()], TOGETHER)
        clock = measure_times(merged)
        by_key = {curve.key: (curve, times) for curve, times in zip(clock.curves, clock.times, strict=True)}
        first = next(iter(curves.values()))
        each = measure_times([curve for found in curves.values() for curve in found.values()])
        return cls(curves, {name: by_key[first[name].key] for name, *_ in numbers}, each)

    def line(self, name: str) -> Line:
        """Return the mean of a number over the seeds, with its interval, at each checkpoint."""
        return Line.from_curves(TOGETHER, [found[name] for found in self.curves.values()])

    def halfway(self, name: str) -> str:
        """Return the half-way point of a number over the seeds, as text."""
        times = self.together[name][1]
        return half_way_text(times) or f"does not emerge ({p_equation(times.p_value, LEAST_P)})"

    def clock(self, names: Sequence[str]) -> Clock:
        pairs = [self.together[name] for name in names]
        return Clock(curves=[curve for curve, _ in pairs], times=[times for _, times in pairs])

    def seed_times(self, name: str) -> str:
        """Return in how many seeds a number changes, and the first and last of their half-way points, as text.

        If one of these points has no upper end, return the smallest lower end instead.
        """
        keys = {found[name].key for found in self.curves.values()}
        times = [times for curve, times in zip(self.each.curves, self.each.times, strict=True) if curve.key in keys]
        halfway = [each.halfway for each in times if each.halfway is not None]
        share = f"{len(halfway)} of {len(self.curves)}"
        if not halfway:
            return share
        if any(np.isinf(time.high) for time in halfway):
            where = f"after {axis_text(min(time.low for time in halfway))}"
        else:
            values = [time.value for time in halfway]
            where = f"{axis_text(min(values))} to {axis_text(max(values))}"
        return f"{share}: {where}" + ", comes back" * (not any(each.emerges for each in times))


def _find(curves: Sequence[StepCurve], metric: str, tags: Mapping[str, object], last: bool) -> StepCurve:
    wanted = {name: str(tag) for name, tag in tags.items()}
    found = [
        curve
        for curve in curves
        if curve.metric == metric
        and wanted.items() <= {name: str(tag) for name, tag in curve.tags.items()}.items()
        and curve.tags.get("statistic") is None
        and (curve.layer is not None) == last
    ]
    return max(found, key=lambda curve: curve.layer or 0)


def times_of_mechanism(study: Mechanism, control: Mechanism) -> Iterator[list[str]]:
    """Yield the half-way points of each number over the seeds and in each seed, on the data and in the control."""
    columns = ["half-way at step", "in each seed, over prompts"]
    yield ["", f"over {len(study.curves)} seeds", *columns, *(f"shuffled tokens: {column}" for column in columns)]
    for part in PARTS:
        for name, *_ in part.numbers:
            yield [part.kind, name, *(text for m in (study, control) for text in (m.halfway(name), m.seed_times(name)))]


def values_of_mechanism(study: Mechanism, control: Mechanism) -> Iterator[list[str]]:
    """Yield means over the seeds at some steps, and the mean of the control at the last step."""
    at = [*next(iter(study.together.values()))[0].at.tolist()]
    indices = [*map(at.index, STEPS), len(at) - 1]
    steps = [f"step {at[index]:,.0f}" for index in indices]
    yield ["over seeds", *steps, f"shuffled tokens, {steps[-1]}", "difference"]
    for name in study.together:
        line, other = study.line(name), control.line(name)
        ends = [(other, -1), (difference(line, other), -1)]
        cells = [(line, index) for index in indices]
        yield [name, *(f"{x.values[i]:.3g} [{x.low[i]:.3g}, {x.high[i]:.3g}]" for x, i in (*cells, *ends))]


def order_of_mechanism(study: Mechanism) -> Iterator[list[str]]:
    """Yield P(a number of prediction or mechanism is half-way later than another), if both emerge over the seeds."""
    yield ["P(row is half-way later than column)", *BEFORE]
    names = [name for part in PARTS for name, *_ in part.numbers]
    table = order_table(study.clock(names))
    titles = {study.together[name][0].metric + study.together[name][0].tag_text: name for name in names}
    before = {
        (titles[row["a_metric"] + row["a_tags"]], titles[row["b_metric"] + row["b_tags"]]): row["p_a_before_b"]
        for row in table.to_dict("records")
    }
    for name, *_ in (number for part in PARTS[1:] for number in part.numbers):
        cells = []
        for other in BEFORE:
            later = before.get((other, name), 1 - before.get((name, other), np.nan))
            cells.append("" if name == other or np.isnan(later) else f"{later:.2f}")
        if any(cells):
            yield [name, *cells]


def agreement_of_mechanism(study: Mechanism) -> Iterator[list[str]]:
    """Yield Spearman's correlation of half-way points between seeds."""
    yield ["seeds", "Spearman", "numbers in common"]
    for row in agreement_table(study.each).to_dict("records"):
        pair = " and ".join(row[side].rpartition(", ")[2] for side in ("run_a", "run_b"))
        yield [pair, f"{row['spearman']:.2f}", f"{row['n']}"]


def mechanism_tables(study: Mechanism, control: Mechanism) -> dict[str, list[list[str]]]:
    """Return the tables on mechanism, by their names on the page."""
    return {
        "mechanism": [*times_of_mechanism(study, control)],
        "mechanism values": [*values_of_mechanism(study, control)],
        "mechanism order": [*order_of_mechanism(study)],
        "mechanism agreement": [*agreement_of_mechanism(study)],
    }


def write_mechanism(study: Mechanism, control: Mechanism, path: Path = TIMELINE, control_path: Path = CONTROL) -> None:
    """Draw the half-way point and the peak of each number, over the seeds and in each, and some with the control."""
    each = study.each
    whole = study.clock([*study.together])
    timeline(Clock(curves=[*whole.curves, *each.curves], times=[*whole.times, *each.times])).write(path)
    groups = {"on the data": study, "on shuffled tokens": control}
    charts = [training_chart({group: m.line(name) for group, m in groups.items()}, [*groups]) for name in COMPARED]
    Panels(title="", charts=charts, columns=2, width=420).write(control_path)
