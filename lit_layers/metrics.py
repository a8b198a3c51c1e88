"""Every metric, a row each in `metrics.toml`: what it is called, which values it can have, and where it is shown.

Figures, pages, tables, W&B, `correlate` and `select` read these rows, and the tables of docs/metrics.md are made of
them: what is said of a metric is said there. A metric that has no row is called by its name and is shown all the same.
"""

import ast
import functools
import math
import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

INF = math.inf


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        title: in sentence case.
        meaning: one sentence that helps to read the numbers; which direction is better comes from `better`.
        low, high: the range of its values, at whatever options.
        better: which values are better. None: it is no score.
        baseline: the metric that says what this one would be by chance, or is drawn beside it for another reason.
        as_baseline: what it is called where it is drawn beside another.
        excess: the metric from which chance has been taken off.
        level, level_name: a value to compare with that follows from the definition.
        log: values lie decades apart.
        whole: values are numbers of layers.
        first_layer: the first layer that can have a value; None: only the whole model has one.
        median: tokens have outliers, so that a median stands beside the mean.
        secondary: only figures tell of it, not the tables of results.
        unlisted: no table of results has it, nor does a figure of its own show it.
        headline: its place among the few that stand for all scores of a variant of the model; 0: none.
        of_full: what is left of the full model's value is a share of it.
        also: a second group.
        function: whose docstring defines it: of `lit_layers.functional`, as `entropy.matrix_entropy`.
        of_states: `StateMetric` measures that function, under its own name; the analysis of its group does not.
    """

    name: str
    title: str
    unit: str = ""
    meaning: str = ""
    low: float = -INF
    high: float = INF
    better: Literal["higher", "lower"] | None = None
    baseline: str = ""
    as_baseline: str = ""
    excess: str = ""
    level: float | None = None
    level_name: str = ""
    log: bool = False
    whole: bool = False
    first_layer: int | None = 0
    median: bool = False
    secondary: bool = False
    unlisted: bool = False
    headline: int = 0
    relative: bool = False
    also: str = ""
    function: str = ""
    of_states: bool = False
    group: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "baseline", self.baseline or f"random_{self.name}")
        object.__setattr__(self, "excess", self.excess or f"excess_{self.name}")

    @property
    def unit_title(self) -> str:
        unit = f", {self.unit}" if self.title.endswith(")") else f" ({self.unit})"
        return self.title if self.title.endswith(self.unit) else f"{self.title}{unit}"

    @property
    def compared(self) -> str:
        """What it is called where it is drawn beside another metric."""
        return self.as_baseline or self.title

    @property
    def note(self) -> str:
        """The meaning, and which direction is better."""
        if self.better is None:
            return self.meaning
        direction = f"{self.better} is better."
        return f"{self.meaning.removesuffix('.')}; {direction}" if self.meaning else sentence(direction)

    @property
    def range(self) -> str:
        """The range of its values in words; empty where there is no end to it."""
        low, high = (str(end).replace("3.141592653589793", "π") for end in (self.low, self.high))
        if math.isinf(self.low):
            return "" if math.isinf(self.high) else f"at most {high}"
        return f"at least {low}" if math.isinf(self.high) else f"{low} to {high}"

    @property
    def higher_is_better(self) -> bool:
        return self.better != "lower"


@dataclass(frozen=True)
class Group:
    """Metrics that belong together.

    `over_tasks`: the group is called like its analysis, which can be measured on the texts of a task, too, as
    `GROUP/TASK`; there is a mean over tasks then.
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    over_tasks: bool = False


def _read() -> tuple[Group, ...]:
    groups = []
    for group, facts in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        metrics = []
        for name, row in facts.pop("metrics").items():
            values: dict[str, Any] = {key: None if value == "none" else value for key, value in row.items()}
            metrics.append(Metric(name, group=group, **values))
        groups.append(Group(group, metrics=tuple(metrics), **facts))
    return tuple(groups)


GROUPS = _read()
METRICS = {metric.name: metric for group in GROUPS for metric in group.metrics}


def look_up(metric: str) -> Metric:
    """Return a metric's row; one that has none is called by its name, and nothing else is known of it."""
    half = metric.endswith("_of_half")
    return METRICS.get(metric) or Metric(metric, sentence(metric), secondary=half, also="half" if half else "")


def scalar_row(name: str) -> Metric:
    """Return the row of a scalar of training; a user's own scalar has none and keeps its name."""
    return METRICS[name] if "/" in name and name in METRICS else Metric(name, name)


def is_in(metric: str, *groups: str) -> bool:
    row = look_up(metric)
    return row.group in groups or row.also in groups


def names(group: str) -> list[str]:
    """Return the metrics of a group, in order."""
    return [name for name in METRICS if is_in(name, group)]


def headlines() -> list[str]:
    """Return the metrics that stand for all scores of a variant of the model, the first one first."""
    return sorted((name for name, row in METRICS.items() if row.headline), key=lambda name: METRICS[name].headline)


def rank(metric: str) -> int:
    """Return a metric's place among the rows; those without a row come last."""
    return list(METRICS).index(metric) if metric in METRICS else len(METRICS)


def sentence(name: str) -> str:
    """Return `some_name` as `Some name`, and `probe/some_task` as `Probe: some task`."""
    words = name.replace("_", " ").replace("/", ": ").strip()
    return f"MTEB{words[4:]}" if words.split(":")[0] == "mteb" else words[:1].upper() + words[1:]


_USAGE = re.compile(r"^(Args|Returns|Raises):", re.M)
_SOURCE = re.compile(r"^Source: (.*?)(?=\n\s*\n|\Z)", re.M | re.S)


class Definition(NamedTuple):
    """What a function's docstring says of what it computes, in paragraphs, and of where that was published."""

    paragraphs: list[str]
    source: str


class Reading(NamedTuple):
    """What helps to read a metric: short facts by name, and its definition, where a function has one."""

    title: str
    facts: dict[str, str]
    definition: Definition


def reading(metric: str) -> Reading | None:
    """Return how a metric is to be read; None where nothing is known of it."""
    row = look_up(metric)
    definition = _definition(row.function) if row.function else Definition([], "")
    facts = {
        "Meaning": row.meaning,
        "Range": row.range,
        "Better": row.better or "",
        "Compare with": _compared(row),
        "Source": definition.source,
        "Function": f"lit_layers.functional.{row.function}" if row.function else "",
    }
    facts = {name: text for name, text in facts.items() if text}
    return Reading(row.title, facts, definition) if facts else None


def _compared(row: Metric) -> str:
    """What the metric would be by chance, or by definition."""
    if row.level is not None:
        return f"{row.level_name}: {row.level:g}"
    baseline = look_up(row.baseline)
    return baseline.title if baseline.meaning else ""


@functools.cache
def _definition(function: str) -> Definition:
    """Of a function of `lit_layers.functional`, as `entropy.matrix_entropy`; without what only a caller needs."""
    module, _, name = function.rpartition(".")
    source = files("lit_layers").joinpath("functional", *module.split(".")[:-1], f"{module.split('.')[-1]}.py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    text = _USAGE.split(ast.get_docstring(node) or "")[0]
    published = _SOURCE.search(text)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", _SOURCE.sub("", text))]
    return Definition([part for part in paragraphs if part], " ".join(published[1].split()) if published else "")
