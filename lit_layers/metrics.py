"""The metrics, one row each in `metrics.toml`: title, unit, range, direction, and where a metric is shown.

Figures, pages, tables, W&B, `correlate` and `select` read these rows, and docs/metrics.md is generated from them. A
metric without a row is shown under its name in the records.
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
    """The row of one metric in `metrics.toml`.

    Attributes:
        title: title in sentence case.
        meaning: one sentence that helps to read the numbers; `better` adds the direction.
        low, high: range that contains the values for all options of the analysis.
        better: which values are better; None: the metric is not a score.
        baseline: name of the metric to draw for comparison, usually the chance level of this one.
        as_baseline: title of this metric where it is drawn for comparison with another.
        excess: name of the metric with the values of this one minus its chance level.
        level, level_name: a reference value that follows from the metric's definition, and the name of that value.
        log: draw the values on a logarithmic axis.
        whole: the values are indices or counts of layers.
        first_layer: first layer with a value; None: only the whole model has a value.
        median: also measure the median, because single tokens are outliers.
        secondary: show the metric in figures but not in tables of results.
        unlisted: show the metric neither in tables of results nor in a figure of its own.
        headline: rank among the few metrics that summarise all scores of a model variant (a model with a changed order
            of its blocks); 0: the metric is not one of them.
        relative: summaries show this metric for the full model only, because `normalized_score` compares other orders
            of the blocks with the full model.
        group: the table of `metrics.toml` that contains this row.
        also: name of a second group that the metric belongs to.
        function: function of `lit_layers.functional` whose docstring defines the metric: `entropy.matrix_entropy`.
        of_states: the analysis `StateMetric` measures this metric. The analysis that measures the other metrics of
            `group` does not.
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
        """Title of the metric in a figure where it serves as the baseline of another metric."""
        return self.as_baseline or self.title

    @property
    def note(self) -> str:
        """Meaning of the metric and the direction that is better."""
        if self.better is None:
            return self.meaning
        direction = f"{self.better} is better."
        return f"{self.meaning.removesuffix('.')}; {direction}" if self.meaning else sentence(direction)

    @property
    def range(self) -> str:
        """Range of the values in words; empty if they are unbounded."""
        low, high = (str(end).replace("3.141592653589793", "π") for end in (self.low, self.high))
        if math.isinf(self.low):
            return "" if math.isinf(self.high) else f"at most {high}"
        return f"at least {low}" if math.isinf(self.high) else f"{low} to {high}"

    @property
    def higher_is_better(self) -> bool:
        return self.better != "lower"


@dataclass(frozen=True)
class Group:
    """Metrics that belong together, such as those of one analysis.

    With `over_tasks` the analysis can also run on the texts of tasks, under the name `GROUP/TASK`. Pages then show the
    mean over tasks.
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
    """Return a metric's row in `metrics.toml`; a metric without one gets a row with hardly more than its name."""
    half = metric.endswith("_of_half")
    return METRICS.get(metric) or Metric(metric, sentence(metric), secondary=half, also="half" if half else "")


def scalar_row(name: str) -> Metric:
    """Return the row of a training scalar in `metrics.toml`; a user's own scalar gets a row with its name only."""
    return METRICS[name] if "/" in name and name in METRICS else Metric(name, name)


def is_in(metric: str, *groups: str) -> bool:
    row = look_up(metric)
    return row.group in groups or row.also in groups


def names(group: str) -> list[str]:
    """Return the names of the metrics in a group, in the order of `metrics.toml`."""
    return [name for name in METRICS if is_in(name, group)]


def headlines() -> list[str]:
    """Return the metrics that summarise the scores of a model with a changed order of its blocks, main metric first."""
    return sorted((name for name, row in METRICS.items() if row.headline), key=lambda name: METRICS[name].headline)


def rank(metric: str) -> int:
    """Return the position of a metric in `metrics.toml`, to sort by it; metrics without a row come last."""
    return list(METRICS).index(metric) if metric in METRICS else len(METRICS)


def sentence(name: str) -> str:
    """Return `some_name` as `Some name`, and `probe/some_task` as `Probe: some task`."""
    words = name.replace("_", " ").replace("/", ": ").strip()
    return f"MTEB{words[4:]}" if words.split(":")[0] == "mteb" else words[:1].upper() + words[1:]


_USAGE = re.compile(r"^(Args|Returns|Raises):", re.M)
_SOURCE = re.compile(r"^Source: (.*?)(?=\n\s*\n|\Z)", re.M | re.S)


class Definition(NamedTuple):
    """The paragraphs of a function's docstring that define its result, and the paper that it names as `Source:`."""

    paragraphs: list[str]
    source: str


class Reading(NamedTuple):
    """Text about a metric on a page: title, facts such as the range, and the definition in its function's docstring."""

    title: str
    facts: dict[str, str]
    definition: Definition


def reading(metric: str) -> Reading | None:
    """Return the title, facts (such as the range) and definition of a metric; None if no facts are known."""
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
    """Return what the values of a metric can be compared with: a reference value, or the title of its chance level."""
    if row.level is not None:
        return f"{row.level_name}: {row.level:g}"
    baseline = look_up(row.baseline)
    return baseline.title if baseline.meaning else ""


@functools.cache
def _definition(function: str) -> Definition:
    """Return the definition of a metric in the docstring of its function, such as `entropy.matrix_entropy`.

    The verb `Return` and the sections `Args:`, `Returns:` and `Raises:` are left out.
    """
    module, _, name = function.rpartition(".")
    source = files("lit_layers").joinpath("functional", *module.split(".")[:-1], f"{module.split('.')[-1]}.py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    docstring = ast.get_docstring(node) or ""
    text, published = _USAGE.split(docstring)[0].removeprefix("Return "), _SOURCE.search(docstring)
    text = text[:1].upper() + text[1:]
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", _SOURCE.sub("", text))]
    return Definition([part for part in paragraphs if part], " ".join(published[1].split()) if published else "")
