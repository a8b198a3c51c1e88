"""Labelled rows of one source: texts put together, labels made numbers, random parts drawn.

Random parts depend on the seed and the texts, not on the order of the rows.
"""

import hashlib
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.tasks.task_files import Columns, read_columns

_FIELD = re.compile(r"(?P<column>[^.\[\]!:]+)(\[\w+\])*")  # of a text format: a column, or an entry of one


@dataclass(frozen=True)
class RowOptions:
    """What a task says of its rows: `lit_layers.tasks.probe_task.ProbeTask` documents it."""

    name: str
    source: str
    _: KW_ONLY
    text: str = "text"
    label: str = "label"
    where: dict[str, str | int | list[str] | list[int]] = field(default_factory=dict)
    group: str | None = None
    classes: tuple[str, ...] | None = None
    label_offset: float = 0.0
    drop_empty: bool = False


@dataclass(frozen=True)
class LabelledRows:
    """Parallel lists."""

    place: str
    texts: list[str]
    labels: list[Any]  # as read; then numbers of classes, or values
    numbers: list[int]  # of the rows in their source
    groups: list[Hashable] | None
    class_names: tuple[str, ...] | None
    num_empty: int

    @cached_property
    def keys(self) -> list[str]:
        """Equal where texts are equal."""
        return [normalised(text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> "LabelledRows":
        return replace(
            self,
            texts=[self.texts[index] for index in indices],
            labels=[self.labels[index] for index in indices],
            numbers=[self.numbers[index] for index in indices],
            groups=None if self.groups is None else [self.groups[index] for index in indices],
        )

    def without(self, keys: set[str]) -> "LabelledRows":
        return self.take([index for index, key in enumerate(self.keys) if key not in keys])


def refusal(task: str, option: str, sentence: str) -> InputError:
    return InputError(f"task {task}: {option}: {sentence}")


def text_columns(task: str, text: str) -> list[str]:
    """The columns that a text is made of: itself, or those in the braces of a format."""
    if "{" not in text:
        return [text]
    try:
        places = [place for _, place, _, _ in string.Formatter().parse(text) if place is not None]
    except ValueError as error:
        raise refusal(task, "text", f"{text!r} is no format ({error}): write {{column}} or {{column[0]}}") from error
    matches = [_FIELD.fullmatch(place) for place in places]
    for place, match in zip(places, matches, strict=True):
        if match is None:
            raise refusal(task, "text", f"cannot tell the column in {{{place}}}: write {{column}} or {{column[0]}}")
    return [match["column"] for match in matches if match]


def read_rows(task: RowOptions, splits: str | Sequence[str]) -> LabelledRows:
    """The rows of some splits that `where` keeps, with text and raw labels."""
    columns = dict.fromkeys(text_columns(task.name, task.text), "text") | {task.label: "label"}
    columns |= {column: "where" for column in task.where if column not in columns}
    if task.group is not None:
        columns.setdefault(task.group, "group")
    try:
        read = read_columns(task.source, [splits] if isinstance(splits, str) else splits, columns)
    except InputError as error:
        raise InputError(f"task {task.name}: {error}") from error
    numbers = list(_kept(task, read))
    texts = [_text(task, read, number) for number in numbers]
    if not task.drop_empty and not all(texts):
        empty = numbers[texts.index("")]
        raise refusal(
            task.name,
            "text",
            f"row {empty} of {read.place} has none: mend it, or leave such rows out by drop_empty",
        )
    full = [index for index, text in enumerate(texts) if text]
    numbers, num_empty = [numbers[index] for index in full], len(texts) - len(full)
    for column in [task.label] if task.group is None else [task.label, task.group]:
        for number in numbers:
            if _is_missing(read.values[column][number]):
                raise refusal(
                    task.name,
                    columns[column],
                    f"row {number} of {read.place} has no value in column {column!r}: mend the row or take it out",
                )
    return LabelledRows(
        read.place,
        [texts[index] for index in full],
        [read.values[task.label][number] for number in numbers],
        numbers,
        None if task.group is None else [read.values[task.group][number] for number in numbers],
        read.class_names.get(task.label),
        num_empty,
    )


def as_classes(task: RowOptions, parts: Mapping[str, LabelledRows]) -> tuple[dict[str, LabelledRows], tuple[str, ...]]:
    """The parts with numbers of classes for labels, and the classes' names."""
    values = {part: [_class(task, rows, index) for index in range(len(rows))] for part, rows in parts.items()}
    names = task.classes or next((rows.class_names for rows in parts.values() if rows.class_names), None)
    labels = {value for each in values.values() for value in each}
    if names is None:
        if len({type(value) for value in labels}) > 1:
            raise refusal(
                task.name,
                "label",
                f"column {task.label!r} mixes numbers and names, such as {_example(labels)}: use one",
            )
        order = sorted(labels)
        number_of = {value: number for number, value in enumerate(order)}
        names = tuple(map(str, order))
    else:
        number_of = dict(enumerate(range(len(names)))) | {name: number for number, name in enumerate(names)}
        for part, rows in parts.items():
            for value, number in zip(values[part], rows.numbers, strict=True):
                if value not in number_of:
                    raise refusal(
                        task.name,
                        "classes",
                        f"row {number} of {rows.place} has the label {value!r}, expected one of {', '.join(names)} or "
                        f"a number from 0 to {len(names) - 1}: name all classes, or choose the rows by where",
                    )
        if task.classes is None:  # the Hub names classes that may occur nowhere in the rows chosen
            used = sorted({number_of[value] for value in labels})
            places = {number: place for place, number in enumerate(used)}
            number_of = {value: places[number] for value, number in number_of.items() if number in places}
            names = tuple(names[number] for number in used)
    return {part: replace(rows, labels=[number_of[v] for v in values[part]]) for part, rows in parts.items()}, names


def as_values(task: RowOptions, parts: Mapping[str, LabelledRows]) -> dict[str, LabelledRows]:
    """The parts with numbers for labels."""
    for rows in parts.values():
        for label, number in zip(rows.labels, rows.numbers, strict=True):
            if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
                raise refusal(
                    task.name,
                    "label",
                    f"row {number} of {rows.place} has {label!r}, a regression needs finite numbers: name another "
                    "column, or choose kind classification",
                )
    return {
        part: replace(rows, labels=[float(label) + task.label_offset for label in rows.labels])
        for part, rows in parts.items()
    }


def _kept(task: RowOptions, read: Columns) -> Iterator[int]:
    """Numbers of the rows that `where` keeps."""
    num_rows = len(read.values[task.label])
    kept = range(num_rows)
    for column, condition in task.where.items():
        values, allowed = read.values[column], condition if isinstance(condition, list | tuple) else [condition]
        for value in allowed:
            if value not in values:
                held = ", ".join(sorted({repr(each) for each in values})[:5])
                raise refusal(
                    task.name, "where", f"no row of {read.place} has {value!r} in column {column!r}: it holds {held}"
                )
        kept = [number for number in kept if values[number] in allowed]
    if not kept:
        raise refusal(task.name, "where" if num_rows else "source", f"no row of {read.place} is left: choose others")
    return iter(kept)


def _text(task: RowOptions, read: Columns, number: int) -> str:
    """The text of a row; empty if there is nothing but space."""
    if "{" not in task.text:
        text = read.values[task.text][number]
        if text is not None and not isinstance(text, str):
            kind = type(text).__name__
            raise refusal(task.name, "text", f"expected text in column {task.text!r} of {read.place}, found {kind}")
        text = text or ""
    else:
        row = {column: read.values[column][number] for column in text_columns(task.name, task.text)}
        if missing := [column for column, value in row.items() if value is None]:
            raise refusal(
                task.name,
                "text",
                f"row {number} of {read.place} has no value in column {missing[0]!r}: mend the row or take it out",
            )
        try:
            text = task.text.format_map(row)
        except (LookupError, TypeError, ValueError) as error:
            raise refusal(
                task.name,
                "text",
                f"row {number} of {read.place} does not fit {task.text!r} ({error}): change the format",
            ) from error
    return text.encode("utf-8", "replace").decode() if text.strip() else ""  # JSON can hold half a surrogate pair


def _class(task: RowOptions, rows: LabelledRows, index: int) -> int | str:
    label = rows.labels[index]
    if isinstance(label, str):
        return label
    if isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        return int(label)
    raise refusal(
        task.name,
        "label",
        f"row {rows.numbers[index]} of {rows.place} has {label!r}, expected an integer or a name: name another column"
        + (", or choose kind regression" if isinstance(label, float) else ""),
    )


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _example(labels: set) -> str:
    numbers, names = ([value for value in labels if isinstance(value, kind)] for kind in (int, str))
    return f"{min(numbers)} and {min(names)!r}"


@dataclass(frozen=True, eq=False)
class TaskSplit:
    """Texts with what is to be told from them."""

    texts: tuple[str, ...]
    targets: Tensor  # (rows,) int64 numbers of classes, or float64 values
    rows: tuple[int, ...]
    """Where each text stands in its source, counted from 0; over several files in their order."""

    def __len__(self) -> int:
        return len(self.texts)

    def __add__(self, other: "TaskSplit") -> "TaskSplit":
        targets = torch.cat([self.targets, other.targets])
        return TaskSplit(self.texts + other.texts, targets, self.rows + other.rows)


def normalised(text: str) -> str:
    """What equal texts share: compatibility forms (NFKC), case and white space are of no account."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def draw(keys: Sequence[str], number: int, *, seed: int, purpose: str) -> list[int]:
    """Indices of `number` rows, in rising order.

    Each row has a random place of its own, which (seed, purpose, key) decides, so the rows drawn do not depend on the
    order of the rows, and fewer of them are a part of more. Equal keys are told apart by their count so far.
    """
    seen: Counter[str] = Counter()
    places = []
    for key in keys:
        places.append(_place(seed, purpose, f"{seen[key]}/{key}"))
        seen[key] += 1
    return sorted(sorted(range(len(keys)), key=places.__getitem__)[:number])


def hold_out(
    keys: Sequence[str],
    strata: Sequence[Hashable],
    share: float,
    *,
    seed: int,
    purpose: str,
    groups: Sequence[Hashable] | None = None,
) -> list[bool]:
    """Which rows to hold out: `share` of each stratum, with equal keys, and rows of one group, on one side.

    Rows that must stay together are one unit. Units stand in an order that (seed, purpose, keys) decides; the first
    that fit into what is left of the strata's shares are held out. Shares are rounded so that the total is the rounded
    share of all rows, and each stratum keeps a row on the other side. Where units are larger than what is left, as
    documents may be, those that bring the counts of the strata closer to the shares are held out, too. Returns False
    throughout if there is but one unit.
    """
    units = sorted(_units(keys, groups), key=lambda unit: _place(seed, purpose, min(keys[row] for row in unit)))
    counts = [Counter(strata[row] for row in unit) for unit in units]
    sizes = Counter(strata)
    quotas, taken, held = _quotas(sizes, share), Counter[Hashable](), set[int]()

    def gain(count: Counter[Hashable]) -> int:
        """How much the sum of squared differences from the shares falls with a unit."""
        return sum(rows * (2 * (quotas[stratum] - taken[stratum]) - rows) for stratum, rows in count.items())

    def fits(count: Counter[Hashable]) -> bool:
        return all(taken[stratum] + rows <= quotas[stratum] for stratum, rows in count.items())

    def helps(count: Counter[Hashable]) -> bool:
        return all(taken[stratum] + rows < sizes[stratum] for stratum, rows in count.items()) and gain(count) > 0

    for rule in (fits, helps):
        for number, count in enumerate(counts):
            if number not in held and rule(count):
                held.add(number)
                taken.update(count)
    if not held and len(units) > 1:  # every unit is far too large
        held.add(max(range(len(units)), key=lambda number: gain(counts[number])))
    chosen = {row for number in held for row in units[number]}
    return [row in chosen for row in range(len(keys))]


def _place(seed: int, purpose: str, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{purpose}/{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _quotas(sizes: Counter[Hashable], share: float) -> dict[Hashable, int]:
    """Rows of each stratum, by largest remainders."""
    exact = {stratum: share * rows for stratum, rows in sizes.items()}
    quotas = {stratum: math.floor(rows) for stratum, rows in exact.items()}
    missing = max(1, round(share * sizes.total())) - sum(quotas.values())
    for stratum in sorted(exact, key=lambda each: (round(quotas[each] - exact[each], 9), str(each))):
        if missing > 0 and quotas[stratum] < sizes[stratum] - 1:
            quotas[stratum] += 1
            missing -= 1
    return quotas


def _units(keys: Sequence[str], groups: Sequence[Hashable] | None) -> list[list[int]]:
    """Rows that belong together: connected by equal keys or equal groups."""
    parent = list(range(len(keys)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for labels in (keys, groups or ()):
        first: dict[Hashable, int] = {}
        for row, label in enumerate(labels):
            parent[root(row)] = root(first.setdefault(label, row))
    units: dict[int, list[int]] = {}
    for row in range(len(keys)):
        units.setdefault(root(row), []).append(row)
    return list(units.values())
