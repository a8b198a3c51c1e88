"""Downstream tasks of linear probes: labelled texts, in a train, a validation and a test part."""

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.identity import sha16
from lit_layers.schema import Range, refuse_outside
from lit_layers.tasks.task_files import Columns, Task, is_local, is_one_file

FEW_VALUES = 20  # a regression with no more different values is split value by value
_RANGES = {
    **dict.fromkeys(("test_share", "validation_share"), Range(0, 1, above=True, below=True)),
    **dict.fromkeys(("num_train", "num_test", "balance"), Range(1, math.inf)),
    "seed": Range(0, math.inf),
}
_FIELD = re.compile(r"\{(?P<column>[^{}.\[\]!:]+)(?P<entries>(\[\w+\])*)\}")  # of a format: a column, or its entry


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


@dataclass(frozen=True, eq=False)
class TaskData:
    """The parts of a task. No text is in two of them; texts are compared without case, white space and form (NFKC)."""

    name: str
    kind: Literal["classification", "regression"]
    train: TaskSplit
    validation: TaskSplit
    test: TaskSplit
    classes: tuple[str, ...] | None
    """Names of the classes, by number; None for a regression."""
    num_duplicates: int = 0
    """Rows of train, and of a validation split that came with the task, left out because test has their text."""
    num_validation_duplicates: int = 0
    """Rows of train left out because the validation split that came with the task has their text."""
    num_empty: int = 0
    """Rows without text that were left out of all parts."""
    num_conflicting: int = 0
    """Rows of train and validation, all kept, whose text also stands there with another target."""
    num_unseen_test_rows: int = 0
    """Test rows of a class that train lacks: no probe can get them right."""

    def train_and_validation(self) -> TaskSplit:
        return self.train + self.validation

    def content_hash(self) -> str:
        """Sixteen hex digits over the kind, the classes, and the texts and targets of each part."""
        parts = ([part.texts, part.targets.tolist()] for part in (self.train, self.validation, self.test))
        return sha16(*map(json.dumps, ([self.kind, self.classes], *parts)))


@dataclass(frozen=True)
class ProbeTask(Task):
    """A labelled set of texts and how it is split; read when it is loaded.

    Equal texts never stand in two parts: what test has is left out of train and validation, and the parts cut here
    keep equal texts together. Which rows are cut off or drawn depends on `seed` and the texts, not on the order of the
    rows. Source of the protocol: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), section 3; the
    validation part is ours, so that no choice is made on test rows.

    Args:
        name: Stands in every measurement of the task.
        source: A data set of the Hub, ORG/NAME or ORG/NAME:CONFIG; or a local parquet, csv or jsonl file; or a folder
            with such files named after the splits; or a path with {split} in it, such as data/sst2_{split}.parquet.
        kind: "classification", or "regression" on numbers.
        text: A column, or a format over columns: "question: {question} answer: A. {choices[0]}".
        label: A column of integers or strings, of numbers for a regression.
        train: A split, or several that are joined.
        test: A split, or None to cut `test_share` off train, stratified.
        test_share: Share of train for test, where test is None.
        num_train: Random rows of train, validation part included; None for all.
        num_test: Random rows of test; None for all.
        where: Columns and the value, or list of values, of the rows to use.
        validation: A split of its own, or None to cut `validation_share` off train, stratified.
        validation_share: Share of the training rows for validation, where validation is None.
        classes: Names of all classes, in the order of their numbers; without it those that occur, by name.
        label_offset: Added to the values of a regression: 1 where stars are stored from 0.
        balance: Random rows of each class (or value) of train; None for all.
        seed: Decides which rows are cut off and drawn.
        description: A line for readers.
    """

    _: KW_ONLY
    text: str = "text"
    label: str = "label"
    where: dict[str, str | int | list[str] | list[int]] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    label_offset: float = 0.0
    kind: Literal["classification", "regression"] = "classification"
    train: str | list[str] = "train"
    test: str | None = "test"
    test_share: float = 0.3
    num_train: int | None = None
    num_test: int | None = None
    validation: str | None = None
    validation_share: float = 0.2
    balance: int | None = None
    seed: int = 0
    description: str = ""

    def check(self) -> None:
        """Refuse options that contradict each other or are out of range; reads nothing.

        Raises:
            InputError: says which option.
        """
        refuse_outside(f"task {self.name}: ", _RANGES, vars(self))
        if "{" in self.text and re.search("[{}]", _FIELD.sub("", self.text)):
            raise self.refusal("text", f"expected {{column}} or {{column[0]}} in {self.text!r}")

    def text_columns(self) -> list[str]:
        """The columns that a text is made of: itself, or those in the braces of a format."""
        return [field["column"] for field in _FIELD.finditer(self.text)] or [self.text]

    def load(self, folder: str | None = None) -> TaskData:
        """Read and split the task.

        With `folder`, a data set of the Hub is read from its copy there, where the folder's `tasks.yaml` says. Rows
        without text are left out and counted.

        Raises:
            InputError: an option is wrong (`check`); a file, split, column, text or label is missing; the Hub does not
                answer; a label is none of `classes`; train has one class only; there are fewer rows than asked for; or
                nothing is left for a part.
        """
        self.check()
        task = self if is_local(self.source) else self.localized(folder)
        task.check()
        return _load(task)


class Row(NamedTuple):
    """A labelled text."""

    text: str
    key: str  # equal where texts are equal
    label: Any  # as read; then the number of its class, or a value
    source_row: int
    origin: str  # its source

    @property
    def location(self) -> str:
        return f"row {self.source_row} of {self.origin}"


Rows = list[Row]


def _load(task: ProbeTask) -> TaskData:
    parts, classes, num_empty = _read(task)
    num_duplicates, num_validation_duplicates = _drop_duplicates(task, parts)
    _draw_parts(task, parts)
    train, validation, test = (parts[part] for part in ("train", "validation", "test"))
    if len(seen := {row.label for row in train}) < 2:
        held = classes[train[0].label] if classes else train[0].label
        raise task.refusal("label", f"all rows of train have {held!r}, a probe needs two labels")
    labels = Counter(key for key, _ in {(row.key, row.label) for row in train + validation})
    return TaskData(
        name=task.name,
        kind=task.kind,
        train=_to_split(train, task.kind),
        validation=_to_split(validation, task.kind),
        test=_to_split(test, task.kind),
        classes=classes,
        num_duplicates=num_duplicates,
        num_validation_duplicates=num_validation_duplicates,
        num_empty=num_empty,
        num_conflicting=sum(labels[row.key] > 1 for row in train + validation),
        num_unseen_test_rows=sum(row.label not in seen for row in test) if classes else 0,
    )


def _read(task: ProbeTask) -> tuple[dict[str, Rows], tuple[str, ...] | None, int]:
    """The splits that the source has, by part, the names of the classes, and how many rows had no text."""
    others = {part: [split] for part in ("validation", "test") if (split := getattr(task, part)) is not None}
    source = task.copy.files if task.copy else task.source
    if others and isinstance(source, str) and is_one_file(source):
        part = min(others)  # test before validation
        raise task.refusal(part, f"{source} is one file without splits: set {part} to null to cut off a share")
    splits = {"train": [task.train] if isinstance(task.train, str) else task.train, **others}
    read = {part: _rows(task, each) for part, each in splits.items()}
    parts, num_empty = {part: rows for part, (rows, _, _) in read.items()}, sum(number for *_, number in read.values())
    if task.kind == "regression":
        return _to_values(task, parts), None, num_empty
    parts, classes = _to_classes(task, parts, next((names for _, names, _ in read.values() if names), None))
    return parts, classes, num_empty


def _drop_duplicates(task: ProbeTask, parts: dict[str, Rows]) -> tuple[int, int]:
    """Take the texts of test from the others, and those of validation from train; how many rows that were."""
    counts = []
    for first, others in (("test", ("train", "validation")), ("validation", ("train",))):
        before, keys = sum(map(len, parts.values())), {row.key for row in parts.get(first, ())}
        for other in parts.keys() & set(others) if first in parts else ():
            parts[other] = [row for row in parts[other] if row.key not in keys]
            if not parts[other]:
                raise task.refusal(other, f"all its texts are in {first}, too")
        counts.append(before - sum(map(len, parts.values())))
    return counts[0], counts[1]


def _draw_parts(task: ProbeTask, parts: dict[str, Rows]) -> None:
    """Draw and cut off the parts."""
    if task.balance is not None:
        parts["train"] = _balanced(task, parts["train"], task.balance)
    if "test" not in parts:
        parts["train"], parts["test"] = _cut(task, parts["train"], "test")
    for part, number in (("train", task.num_train), ("test", task.num_test)):
        if number is None:
            continue
        if len(parts[part]) < number:
            raise task.refusal(f"num_{part}", f"{part} has {len(parts[part])} rows, {number} were asked for")
        parts[part] = _drawn(task, parts[part], number, f"num_{part}")
    if "validation" not in parts:
        parts["train"], parts["validation"] = _cut(task, parts["train"], "validation")


def _drawn(task: ProbeTask, rows: Rows, number: int, purpose: str) -> Rows:
    return [rows[index] for index in draw([row.key for row in rows], number, seed=task.seed, purpose=purpose)]


def _balanced(task: ProbeTask, rows: Rows, number: int) -> Rows:
    """Return so many random rows of each class."""
    by_label: dict[Any, Rows] = {}
    for row in rows:
        by_label.setdefault(row.label, []).append(row)
    if (fewest := min(map(len, by_label.values()))) < number:
        raise task.refusal("balance", f"{rows[0].origin} has a label of {fewest} rows: ask for as many at most")
    chosen = [row for those in by_label.values() for row in _drawn(task, those, number, "balance")]
    return sorted(chosen, key=lambda row: row.source_row)


def _cut(task: ProbeTask, rows: Rows, part: Literal["test", "validation"]) -> tuple[Rows, Rows]:
    """What is left, and what is held out for a part."""
    share = task.test_share if part == "test" else task.validation_share
    by_label = task.kind == "classification" or len({row.label for row in rows}) <= FEW_VALUES
    strata = [row.label if by_label else None for row in rows]
    held = hold_out([row.key for row in rows], strata, share, seed=task.seed, purpose=part)
    if len(set(held)) < 2:
        raise task.refusal(f"{part}_share", f"cannot cut {share} off {len(rows)} rows, equal texts together")
    left, out = ([row for row, each in zip(rows, held, strict=True) if each is side] for side in (False, True))
    return left, out


def _to_split(rows: Rows, kind: str) -> TaskSplit:
    dtype = torch.int64 if kind == "classification" else torch.float64
    targets = torch.tensor([row.label for row in rows], dtype=dtype)
    return TaskSplit(tuple(row.text for row in rows), targets, tuple(row.source_row for row in rows))


def _rows(task: ProbeTask, splits: Sequence[str]) -> tuple[Rows, tuple[str, ...] | None, int]:
    """The rows of some splits that `where` keeps, with raw labels, the names of classes, and how many had no text."""
    columns = dict.fromkeys(task.text_columns(), "text") | {task.label: "label"}
    columns |= {column: "where" for column in task.where if column not in columns}
    read = task.read(splits, columns)
    texts = {number: _text(task, read, number) for number in _matching_rows(task, read)}
    num_empty = sum(not text for text in texts.values())
    texts = {number: text for number, text in texts.items() if text}
    labels = read.values[task.label]
    if (row := next((n for n in texts if _is_missing(labels[n])), None)) is not None:
        raise task.refusal("label", f"row {row} of {read.origin} has no value in column {task.label!r}")
    rows = [Row(text, normalised(text), labels[n], n, read.origin) for n, text in texts.items()]
    return rows, read.class_names.get(task.label), num_empty


def _to_classes(
    task: ProbeTask, parts: Mapping[str, Rows], names: tuple[str, ...] | None
) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The parts with numbers of classes for labels, and the classes' names; `names` are those that the Hub gives."""
    parts = {part: [row._replace(label=_class_label(task, row)) for row in rows] for part, rows in parts.items()}
    names, labels = task.classes or names, {row.label for rows in parts.values() for row in rows}
    if names is None:
        if len({type(label) for label in labels}) > 1:
            raise task.refusal("label", f"column {task.label!r} mixes numbers and names: use one")
        order = sorted(labels)
        number_of = {label: number for number, label in enumerate(order)}
        names = tuple(map(str, order))
    else:
        number_of = dict(enumerate(range(len(names)))) | {name: number for number, name in enumerate(names)}
        for row in (row for rows in parts.values() for row in rows):
            if row.label not in number_of:
                expected = f"one of {', '.join(names)} or a number from 0 to {len(names) - 1}"
                raise task.refusal("classes", f"{row.location} has the label {row.label!r}, expected {expected}")
        if task.classes is None:  # the Hub names classes that may occur nowhere in the rows chosen
            used = sorted({number_of[label] for label in labels})
            places = {number: place for place, number in enumerate(used)}
            number_of = {label: places[number] for label, number in number_of.items() if number in places}
            names = tuple(names[number] for number in used)
    return {part: [row._replace(label=number_of[row.label]) for row in rows] for part, rows in parts.items()}, names


def _to_values(task: ProbeTask, parts: Mapping[str, Rows]) -> dict[str, Rows]:
    """The parts with numbers for labels."""
    for row in (row for rows in parts.values() for row in rows):
        if isinstance(row.label, bool) or not isinstance(row.label, int | float) or not math.isfinite(row.label):
            raise task.refusal("label", f"{row.location} has {row.label!r}, a regression needs finite numbers")
    return {
        part: [row._replace(label=float(row.label) + task.label_offset) for row in rows] for part, rows in parts.items()
    }


def _matching_rows(task: ProbeTask, read: Columns) -> Iterator[int]:
    """Numbers of the rows that `where` keeps."""
    num_rows = len(read.values[task.label])
    kept = range(num_rows)
    for column, condition in task.where.items():
        values, allowed = read.values[column], condition if isinstance(condition, list | tuple) else [condition]
        for value in allowed:
            if value not in values:
                held = ", ".join(sorted({repr(each) for each in values})[:5])
                raise task.refusal("where", f"{read.origin} has no {value!r} in column {column!r}: it holds {held}")
        kept = [number for number in kept if values[number] in allowed]
    if not kept:
        raise task.refusal("where" if num_rows else "source", f"no row of {read.origin} is left")
    return iter(kept)


def _text(task: ProbeTask, read: Columns, number: int) -> str:
    """The text of a row; empty if there is nothing but space."""

    def filled(field: re.Match[str]) -> str:
        value = read.values[field["column"]][number]
        for entry in re.findall(r"\w+", field["entries"]):
            value = value[int(entry) if entry.isdigit() else entry]
        if value is None:
            raise LookupError(f"no value of {field['column']}")
        return str(value)

    try:
        given = read.values.get(task.text)
        text = _FIELD.sub(filled, task.text) if given is None else given[number] or ""
        if not isinstance(text, str):
            raise TypeError(f"expected text, found {type(text).__name__}")
    except (LookupError, TypeError) as error:
        raise task.refusal("text", f"row {number} of {read.origin} does not fit {task.text!r} ({error})") from error
    return text.encode("utf-8", "replace").decode() if text.strip() else ""  # JSON can hold half a surrogate pair


def _class_label(task: ProbeTask, row: Row) -> int | str:
    label = row.label
    if isinstance(label, str):
        return label
    if isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        return int(label)
    raise task.refusal("label", f"{row.location} has {label!r}, expected an integer or a name, or kind regression")


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


# How rows are drawn and cut off: by the seed and the texts, not by the order of the rows.


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
        places.append(_sort_key(seed, purpose, f"{seen[key]}/{key}"))
        seen[key] += 1
    return sorted(sorted(range(len(keys)), key=places.__getitem__)[:number])


def hold_out(keys: Sequence[str], strata: Sequence[Hashable], share: float, *, seed: int, purpose: str) -> list[bool]:
    """Which rows to hold out: `share` of each stratum, with equal keys on one side.

    Rows of one key are one unit. Units stand in an order that (seed, purpose, keys) decides; the first that fit into
    what is left of the strata's shares are held out. Shares are rounded so that the total is the rounded share of all
    rows, and each stratum keeps a row on the other side. Where units are larger than what is left, those that bring the
    counts of the strata closer to the shares are also held out. Returns False throughout if there is only one unit.
    """
    by_key: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        by_key.setdefault(key, []).append(row)
    units = [by_key[key] for key in sorted(by_key, key=lambda key: _sort_key(seed, purpose, key))]
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


def _sort_key(seed: int, purpose: str, key: str) -> bytes:
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
