"""Recipes that measure published figures and tables again and compare the numbers with the printed ones.

Such a recipe lists steps, which run in order. A step of a recipe is a command of lit-layers with its options, written
as in that command's own recipe (see docs/papers.md).
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from pydantic import with_config

from lit_layers import records, schema
from lit_layers.errors import InputError
from lit_layers.identity import same_tag
from lit_layers.schema import Count, Tag

PAPERS = {
    "coupling": "Aubry et al., Transformer Block Coupling and its Correlation with Generalization in LLMs "
    "([arXiv 2407.07810](https://arxiv.org/abs/2407.07810))",
    "monotonicity": "Hierarchical analysis: monotonicity of layerwise performance in large language models "
    "([OpenReview ZVLyyG5yS6](https://openreview.net/forum?id=ZVLyyG5yS6))",
    "layers": "Skean et al., Layer by Layer: Uncovering Hidden Representations in Language Models "
    "([arXiv 2502.02013](https://arxiv.org/abs/2502.02013))",
    "painters": "Sun et al., Transformer Layers as Painters ([arXiv 2407.09298](https://arxiv.org/abs/2407.09298))",
}
# The commands of lit-layers that a step of a recipe may run.
VERBS = ("analyze", "correlate", "emerge", "fit", "intervene", "mteb", "report", "select")
OVER = ("run", "step", "layer")  # fields of a `Target` that `Published.over` may name; it may also name a tag or column
_NAME = re.compile(r"<([a-z]\w*)>")


@dataclass(frozen=True, kw_only=True)
@with_config(schema.STRICT)
class Target:
    """The place where a measured number is found: a record of measurements.jsonl, or a value in a .csv or .json file.

    Args:
        root: run folder of the command that measured it, relative to the folder of the results.
        run, step, analysis, metric, layer, other_layer: fields of the record; any run or step matches if left out.
        tags: tags that the record must have.
        file: a .csv or .json file to read instead of measurements, relative to the folder of the results.
        row: values of columns that identify the row of a .csv.
        column: column of the .csv, or keys of the .json joined by dots.
    """

    root: str = ""
    run: str | None = None
    step: Count | None = None
    analysis: str = ""
    metric: str = ""
    layer: Count | None = None
    other_layer: Count | None = None
    tags: dict[str, Tag] = field(default_factory=dict)
    file: str = ""
    row: dict[str, Tag] = field(default_factory=dict)
    column: str = ""


@dataclass(frozen=True, kw_only=True)
@with_config(schema.STRICT)
class Published:
    """One or several numbers printed in a paper, and where to find the measured number that belongs to each.

    If there are several numbers, each belongs to another run, optimizer step, layer, or value of a tag or column.
    `over` says which of these it is.

    Args:
        what: the quantity in words.
        value: the printed number.
        values: printed numbers by the value of `over`.
        over: what the keys of `values` are: run, step, layer, the name of a tag, or a column of `measured.file`.
        error: error of reading the number off a printed figure.
        at_least, at_most: a bound that the paper states in words, instead of a number.
        measured: where to find the measured number.
    """

    what: str
    measured: Target
    value: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    over: str = ""
    error: float = 0.0
    at_least: float | None = None
    at_most: float | None = None

    def single(self) -> Iterator["Published"]:
        """Yield one `Published` for each printed number; its `measured` says where to find the measured number."""
        if not self.values:
            yield self
        for key, value in self.values.items():
            target = self.measured
            field_name = "row" if target.file else "tags"
            at = {self.over: key} if self.over in OVER and not target.file else {}
            target = replace(target, **(at or {field_name: {**getattr(target, field_name), self.over: key}}))
            what = f"{self.what}, {key}" if self.over == "run" else f"{self.what}, {self.over} {key}"
            yield replace(self, what=what, value=value, values={}, over="", measured=target)

    @property
    def printed(self) -> str:
        """The number or bound printed in the paper, as text for the table that compares it with the measured number."""
        if self.value is not None:
            return _short(self.value) + (f" ± {_short(self.error)}" if self.error else "")
        return f"at most {_short(self.at_most)}" if self.at_least is None else f"at least {_short(self.at_least)}"


class Step(NamedTuple):
    """One step of a recipe: a command of lit-layers, the options and recipe files it is given, and its output folder.

    The options override those in the recipe files `configs`.
    """

    verb: str
    options: dict[str, Any]
    configs: list[str]
    folder: Path

    def argv(self, file: Path) -> list[str]:
        """Return the arguments for lit-layers that run the command with the options in `file`."""
        configs = [word for config in [*self.configs, str(file)] for word in ("--config", config)]
        resumed = ["--resume", "last"] if self.verb == "fit" else []
        return [self.verb, *configs, "--root", str(self.folder), *resumed]


@dataclass(frozen=True, kw_only=True)
@with_config(schema.STRICT)
class PaperRecipe:
    """A published figure or table.

    Args:
        paper: coupling, monotonicity, layers or painters.
        item: name of the figure or table.
        shows: what the figure or table shows.
        status: what a run at the published sizes needs: `here` (a machine without a GPU) or `gpu`; `cannot` if it is
            impossible (see `why`).
        why: reason why it cannot be run, or needs a GPU.
        differs: how the run differs from the paper.
        sizes: the value that replaces each `<name>` in `steps`, as published: models, optimizer steps, numbers of
            prompts.
        reduced: smaller values of the same names, for a laptop.
        steps: the commands in order, each with the content of its own recipe. `<root>` is replaced by the folder of the
            results, `<here>` by the folder of this recipe.
        published: the printed numbers.
    """

    paper: Literal["coupling", "monotonicity", "layers", "painters"]
    item: str
    shows: str
    status: Literal["here", "gpu", "cannot"]
    why: str = ""
    differs: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    reduced: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)

    def numbers(self) -> list[Published]:
        """Return one `Published` for each number printed in the paper (see `Published.single`)."""
        return [one for each in self.published for one in each.single()]

    def commands(self, root: Path, here: Path, *, reduced: bool) -> list[Step]:
        """Return the commands to run, with the published (or `reduced`) sizes inserted.

        Raises:
            InputError: a placeholder `<name>` has no value, a command does not exist, or a result folder is outside
                `root`.
        """
        names = self.sizes | (self.reduced if reduced else {}) | {"root": str(root), "here": str(here)}
        steps = []
        for number, step in enumerate(self.steps, start=1):
            where = f"steps: {number}"
            if len(step) != 1 or (verb := next(iter(step))) not in VERBS:
                raise InputError(f"{where}: expected one of {', '.join(VERBS)}, got {', '.join(step) or 'nothing'}")
            options = _filled(step[verb], names, f"{where}, {verb}")
            folder = Path(str(options.pop("root", root / f"{number}-{verb}")))
            if not folder.resolve().is_relative_to(root.resolve()):
                raise InputError(f"{where}, {verb}: root: expected a folder below <root>, got {folder}")
            steps.append(Step(verb, options, options.pop("config", []), folder))
        return steps


def read_recipe(path: Path) -> PaperRecipe:
    """Return the recipe in a file.

    Raises:
        InputError: the file does not exist, or a field is unknown, missing or wrong.
    """
    return schema.read_yaml(path, PaperRecipe, "docs/papers.md has the fields of a recipe")


def _filled(value: Any, names: Mapping[str, Any], where: str) -> Any:
    """Return the options of a command with each `<name>` in their strings replaced by its value in `names`.

    A string that is only `<name>` becomes the value itself, which may have any type.
    """
    if isinstance(value, Mapping):
        return {key: _filled(each, names, where) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, names, where) for each in value]
    if not isinstance(value, str):
        return value
    for name in _NAME.findall(value):
        if name not in names:
            raise InputError(f"{where}: <{name}> stands for nothing; the sizes are {', '.join(names)}")
    if whole := _NAME.fullmatch(value):
        return names[whole[1]]
    return _NAME.sub(lambda match: str(names[match[1]]), value)


# ------------------------------------------------------------------------------------------------ measured and printed

# Tags of numbers that are measured beside a metric, such as its control. A `Target` that does not name such a tag must
# not match a number that has it.
SIDE_TAGS = ("control", "reference", "statistic", "variant")
Verdict = Literal[
    "inside", "outside", "too wide", "no interval", "holds", "fails", "undecided", "not measured", "reduced"
]


class Row(NamedTuple):
    """A number printed in a paper, the measured number with its 95% interval, and the verdict of their comparison.

    The verdict is `inside` or `outside` if the printed number is inside or outside the interval of the measured number.
    The interval is widened by the error of reading the printed number off a figure. `too wide` means that the number is
    inside but smaller than the width of the interval, `no interval` that there is no interval. A printed bound `holds`,
    `fails`, or is `undecided` if the interval contains it. If the verdict is `not measured`, `note` has the reason.
    `reduced` numbers were measured at smaller sizes than published and are not judged.
    """

    what: str
    published: str
    verdict: Verdict
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    def cells(self) -> dict[str, str]:
        """Return the cells of this row in the table that compares printed with measured numbers, by column title."""
        interval = "" if self.low is None else f"{_short(self.low)} to {_short(self.high)}"
        names = {"": self.what, "published": self.published, "measured": _short(self.measured), "95%": interval}
        return names | {"the published number is": f"{self.verdict}{f': {self.note}' if self.note else ''}"}


class _MissingError(Exception):
    """Raised if there is no measured number for a `Target`, with the reason."""


def compare(recipe: PaperRecipe, root: Path, *, reduced: bool = False) -> list[Row]:
    """Return a row for each number printed in the paper, with the number that a run of the recipe measured in `root`.

    After a reduced run, the numbers that were not measured are only counted, in one row.

    Raises:
        InputError: a file of measurements is damaged.
    """
    read = functools.cache(_content)  # read each file once, although many numbers are in it
    rows, num_left_out = [], 0
    for each in recipe.numbers():
        try:
            number = _find(each.measured, root, read)
            rows.append(Row(each.what, each.printed, "reduced" if reduced else _verdict(each, *number), *number))
        except _MissingError as why:
            num_left_out += reduced
            rows += [] if reduced else [Row(each.what, each.printed, "not measured", note=str(why))]
    if num_left_out:
        rows.append(Row(f"{num_left_out} numbers that the reduced recipe lacks", "", "not measured"))
    return rows


def _verdict(published: Published, value: float, low: float | None, high: float | None) -> Verdict:
    if published.value is None:
        ends = (value, value) if low is None or high is None else (low, high)
        least, most = published.at_least, published.at_most
        holds = [(least is None or end >= least) and (most is None or end <= most) for end in ends]
        return "holds" if all(holds) else "undecided" if any(holds) else "fails"
    if low is None or high is None:
        return "no interval"
    if not low - published.error <= published.value <= high + published.error:
        return "outside"
    return "too wide" if high - low > abs(published.value) > 0 else "inside"


def _content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return records.frame(path)
    return json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else pd.read_csv(path)


def _find(target: Target, root: Path, read: Callable[[Path], Any]) -> tuple[float, float | None, float | None]:
    """Return the measured number at `target` and the low and high end of its interval, which are None if unknown.

    Raises:
        _MissingError: there is no such number.
    """
    path = root / (target.file or Path(target.root, "measurements.jsonl"))
    name = str(path.relative_to(root))
    if not path.is_file():
        raise _MissingError(f"there is no {name}")
    found, column = read(path), target.column or "value"
    if path.suffix == ".json":
        for key in target.column.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        found, column = found if isinstance(found, Mapping) else {"value": found}, "value"
    else:
        found = _row(found, target, name)
    of = "" if column == "value" else f"{column}_"
    ends = [found.get(end) for end in (column, f"{of}low", f"{of}high")]
    value, low, high = (None if pd.isna(end) else float(end) for end in ends)
    if value is None:
        raise _MissingError("undefined" if path.suffix != ".json" else f"{name} has no {target.column}")
    return value, low, high


def _row(table: Any, target: Target, name: str) -> Mapping[Any, Any]:
    """Return the only row of a table of measurements, or of a .csv, that matches `target`.

    A measurement with a layer, or with a tag of `SIDE_TAGS`, matches only if the target names this layer or tag.
    """
    wanted: dict[str, Any] = dict(target.row)
    if not target.file:
        table = table[(table["analysis"] == target.analysis) & (table["metric"] == target.metric)]
        wanted = {"layer": target.layer, "other_layer": target.other_layer, **dict.fromkeys(SIDE_TAGS), **target.tags}
        wanted |= {each: at for each in ("run", "step") if (at := getattr(target, each)) is not None}
    for column, value in wanted.items():
        cells = table[column] if column in table else [None] * len(table)
        table = table[[bool(pd.isna(cell)) if value is None else same_tag(cell, value) for cell in cells]]
    if len(table) != 1:
        raise _MissingError(f"{len(table) or 'no'} rows of {name} fit")
    return table.iloc[0]


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"
