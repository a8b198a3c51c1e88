"""Downstream tasks of linear probes: labelled texts, split into train, validation and test rows."""

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

FEW_VALUES = 20  # if a regression has at most this many distinct values, its splits are stratified by value
_RANGES = {
    **dict.fromkeys(("test_share", "validation_share"), Range(0, 1, above=True, below=True)),
    **dict.fromkeys(("num_train", "num_test", "balance"), Range(1, math.inf)),
    "seed": Range(0, math.inf),
}
# Matches a field of a format string in the option `text`: a column, or an entry of a column's value ({choices[0]}).
_FIELD = re.compile(r"\{(?P<column>[^{}.\[\]!:]+)(?P<entries>(\[\w+\])*)\}")


@dataclass(frozen=True, eq=False)
class TaskSplit:
    """The texts of the train, validation or test rows, with the targets to predict from them."""

    texts: tuple[str, ...]
    targets: Tensor  # (rows,) int64 class indices, or float64 values of a regression
    rows: tuple[int, ...]
    """Row index of each text in its source, from 0, counted through all files in their order."""

    def __len__(self) -> int:
        return len(self.texts)

    def __add__(self, other: "TaskSplit") -> "TaskSplit":
        targets = torch.cat([self.targets, other.targets])
        return TaskSplit(self.texts + other.texts, targets, self.rows + other.rows)


@dataclass(frozen=True, eq=False)
class TaskData:
    """The train, validation and test rows of a task.

    No text is in two of the three splits. The comparison ignores case, runs of white space and different Unicode forms
    of a character (NFKC).
    """

    name: str
    kind: Literal["classification", "regression"]
    train: TaskSplit
    validation: TaskSplit
    test: TaskSplit
    classes: tuple[str, ...] | None
    """Names of the classes, by class index; None for a regression."""
    num_duplicates: int = 0
    """Rows dropped from train, and from a validation split of the source, because test has their text."""
    num_validation_duplicates: int = 0
    """Rows dropped from train because the validation split of the source has their text."""
    num_empty: int = 0
    """Blank rows that were dropped."""
    num_conflicting: int = 0
    """Rows of train and validation whose text also occurs there with another target; they are not dropped."""
    num_unseen_test_rows: int = 0
    """Test rows of a class that is missing in train: no probe can predict them."""

    def train_and_validation(self) -> TaskSplit:
        return self.train + self.validation

    def content_hash(self) -> str:
        """Return a hash of the kind, the classes, and all texts and targets, as 16 hex digits."""
        parts = ([part.texts, part.targets.tolist()] for part in (self.train, self.validation, self.test))
        return sha16(*map(json.dumps, ([self.kind, self.classes], *parts)))


@dataclass(frozen=True)
class ProbeTask(Task):
    """A labelled set of texts and the rules for splitting it. Nothing is read before `load`.

    The same text is never in more than one of train, validation and test. Texts of test are dropped from train and
    validation. Texts of a validation split of the source are dropped from train. If a share of the rows is held out,
    equal texts stay together. The rows held out or drawn depend on `seed` and the texts, not on the order of the rows.

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), section 3. The validation rows are our
    addition, so that no choice is made on test rows.

    Args:
        name: Name of the task, recorded in every measurement.
        source: A data set on the Hub, ORG/NAME or ORG/NAME:CONFIG, or a local parquet, csv or jsonl file. It may also
            be a folder with such files named after the splits, or a path that contains {split}, such as
            data/sst2_{split}.parquet.
        kind: "classification", or "regression" on numbers.
        text: A column, or a format string over columns: "question: {question} answer: A. {choices[0]}".
        label: A column of integers or strings; for a regression a column of numbers.
        train: A split of the source, or several to concatenate.
        test: A split of the source. If None, `test_share` of train is held out, stratified.
        test_share: Share of train to hold out for test if `test` is None.
        num_train: Number of random rows of train, including those later held out for validation. None means all rows.
        num_test: Number of random rows of test. None means all rows.
        where: Maps columns to the value, or list of values, that a row must have to be used.
        validation: A split of the source. If None, `validation_share` of train is held out, stratified.
        validation_share: Share of the training rows to hold out for validation if `validation` is None.
        classes: Names of all classes, by class index. None means the classes that occur, sorted by name.
        label_offset: Added to the labels of a regression, such as 1 if ratings of 1 to 5 stars are stored as 0 to 4.
        balance: Number of random rows of train per class (or value). None means all rows.
        seed: Decides which rows are held out and drawn.
        description: One line for readers.
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
        """Check the options without reading data.

        Raises:
            InputError: An option is out of range or contradicts another. The message names it.
        """
        refuse_outside(f"task {self.name}: ", _RANGES, vars(self))
        if "{" in self.text and re.search("[{}]", _FIELD.sub("", self.text)):
            raise self.refusal("text", f"expected {{column}} or {{column[0]}} in {self.text!r}")

    def text_columns(self) -> list[str]:
        """Return the columns that make up a row's text: the column `text`, or those in the braces of the format."""
        return [field["column"] for field in _FIELD.finditer(self.text)] or [self.text]

    def load(self, folder: str | None = None) -> TaskData:
        """Read and split the task.

        Blank rows are dropped and counted.

        Args:
            folder: A folder of local data, whose `tasks.yaml` names the files of a local copy. None means the Hub.
                Tasks whose source is a local file ignore it.

        Raises:
            InputError: An option is invalid (see `check`). A file, split, column, text or label is missing. The Hub
                does not answer. A label is not in `classes`. Train has only one class. There are fewer rows than
                requested, or none remain for train, validation or test.
        """
        self.check()
        task = self if is_local(self.source) else self.localized(folder)
        task.check()
        return _load(task)


class Row(NamedTuple):
    """A labelled text."""

    text: str
    key: str  # normalised text: equal keys mean equal texts
    label: Any  # as in the source; later replaced by the class index or the value of a regression
    position: int
    origin: str  # file or split, for error messages

    @property
    def location(self) -> str:
        return f"row {self.position} of {self.origin}"


Rows = list[Row]


def _load(task: ProbeTask) -> TaskData:
    parts, classes, num_empty = _read(task)
    num_duplicates, num_validation_duplicates = _dedupe(task, parts)
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
    """Read the rows of a probe task from its source.

    Returns:
        (rows, class names, number of blank rows that were dropped). The rows are a dict with the keys `train`,
        `validation` and `test`. A split that is later cut off from `train` has no key. The class names are None for a
        regression.
    """
    others = {part: [split] for part in ("validation", "test") if (split := getattr(task, part)) is not None}
    source = task.copy.files if task.copy else task.source
    if others and isinstance(source, str) and is_one_file(source):
        part = min(others)  # if both are set, the error names `test`, not `validation`
        raise task.refusal(part, f"{source} is one file without splits: set {part} to null to cut off a share")
    splits = {"train": [task.train] if isinstance(task.train, str) else task.train, **others}
    read = {part: _rows(task, each) for part, each in splits.items()}
    parts, num_empty = {part: rows for part, (rows, _, _) in read.items()}, sum(number for *_, number in read.values())
    if task.kind == "regression":
        return _to_values(task, parts), None, num_empty
    parts, classes = _to_classes(task, parts, next((names for _, names, _ in read.values() if names), None))
    return parts, classes, num_empty


def _dedupe(task: ProbeTask, parts: dict[str, Rows]) -> tuple[int, int]:
    """Drop rows from train and validation whose text is in test, and rows from train whose text is in validation.

    Return the number of rows dropped because their text is in test, and because it is in validation.
    """
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
    """Apply the options of a probe task that choose rows at random: `balance`, `num_train`, `test_share` and others.

    `parts` maps `train`, `validation` and `test` to rows, and is changed in place.
    """
    if task.balance is not None:
        parts["train"] = _balanced(task, parts["train"], task.balance)
    if "test" not in parts:
        parts["train"], parts["test"] = _cut(task, parts["train"], "test")
    for part, num in (("train", task.num_train), ("test", task.num_test)):
        if num is None:
            continue
        if len(parts[part]) < num:
            raise task.refusal(f"num_{part}", f"{part} has {len(parts[part])} rows, {num} were asked for")
        parts[part] = _drawn(task, parts[part], num, f"num_{part}")
    if "validation" not in parts:
        parts["train"], parts["validation"] = _cut(task, parts["train"], "validation")


def _drawn(task: ProbeTask, rows: Rows, num: int, purpose: str) -> Rows:
    return [rows[index] for index in draw([row.key for row in rows], num, seed=task.seed, purpose=purpose)]


def _balanced(task: ProbeTask, rows: Rows, num: int) -> Rows:
    """Return `num` random rows of each class (of each value for a regression), in the order of the source."""
    by_label: dict[Any, Rows] = {}
    for row in rows:
        by_label.setdefault(row.label, []).append(row)
    if (fewest := min(map(len, by_label.values()))) < num:
        raise task.refusal("balance", f"{rows[0].origin} has a label of {fewest} rows: ask for as many at most")
    chosen = [row for members in by_label.values() for row in _drawn(task, members, num, "balance")]
    return sorted(chosen, key=lambda row: row.position)


def _cut(task: ProbeTask, rows: Rows, part: Literal["test", "validation"]) -> tuple[Rows, Rows]:
    """Split rows at random into those that remain for training and those held out for `part`."""
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
    return TaskSplit(tuple(row.text for row in rows), targets, tuple(row.position for row in rows))


def _rows(task: ProbeTask, splits: Sequence[str]) -> tuple[Rows, tuple[str, ...] | None, int]:
    """Return the rows of some splits of the source that match the option `where`, with their labels unchanged.

    Also return the class names on the Hub, or None if the Hub lists none, and the number of dropped blank rows.
    """
    columns = dict.fromkeys(task.text_columns(), "text") | {task.label: "label"}
    columns |= {column: "where" for column in task.where if column not in columns}
    read = task.read(splits, columns)
    texts = {index: _text(task, read, index) for index in _matching(task, read)}
    num_empty = sum(not text for text in texts.values())
    texts = {index: text for index, text in texts.items() if text}
    labels = read.values[task.label]
    if (row := next((n for n in texts if _is_missing(labels[n])), None)) is not None:
        raise task.refusal("label", f"row {row} of {read.origin} has no value in column {task.label!r}")
    rows = [Row(text, normalised(text), labels[n], n, read.origin) for n, text in texts.items()]
    return rows, read.class_names.get(task.label), num_empty


def _to_classes(
    task: ProbeTask, parts: Mapping[str, Rows], names: tuple[str, ...] | None
) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """Return the rows of a classification with class indices as labels, and the class names.

    `names` are the class names on the Hub, or None if the Hub lists none.
    """
    parts = {part: [row._replace(label=_class_label(task, row)) for row in rows] for part, rows in parts.items()}
    names, labels = task.classes or names, {row.label for rows in parts.values() for row in rows}
    if names is None:
        if len({type(label) for label in labels}) > 1:
            raise task.refusal("label", f"column {task.label!r} mixes numbers and names: use one")
        order = sorted(labels)
        index_of = {label: index for index, label in enumerate(order)}
        names = tuple(map(str, order))
    else:
        index_of = dict(enumerate(range(len(names)))) | {name: index for index, name in enumerate(names)}
        for row in (row for rows in parts.values() for row in rows):
            if row.label not in index_of:
                expected = f"one of {', '.join(names)} or a number from 0 to {len(names) - 1}"
                raise task.refusal("classes", f"{row.location} has the label {row.label!r}, expected {expected}")
        # Leave out classes that the Hub lists but that do not occur in the selected rows.
        if task.classes is None:
            used = sorted({index_of[label] for label in labels})
            new = {index: new_index for new_index, index in enumerate(used)}
            index_of = {label: new[index] for label, index in index_of.items() if index in new}
            names = tuple(names[index] for index in used)
    return {part: [row._replace(label=index_of[row.label]) for row in rows] for part, rows in parts.items()}, names


def _to_values(task: ProbeTask, parts: Mapping[str, Rows]) -> dict[str, Rows]:
    """Return the rows of a regression task. Each label is the number in the data set plus `label_offset`."""
    for row in (row for rows in parts.values() for row in rows):
        if isinstance(row.label, bool) or not isinstance(row.label, int | float) or not math.isfinite(row.label):
            raise task.refusal("label", f"{row.location} has {row.label!r}, a regression needs finite numbers")
    return {
        part: [row._replace(label=float(row.label) + task.label_offset) for row in rows] for part, rows in parts.items()
    }


def _matching(task: ProbeTask, read: Columns) -> Iterator[int]:
    """Yield the indices of the rows read from the source that match the option `where`."""
    num_rows = len(read.values[task.label])
    rows = range(num_rows)
    for column, condition in task.where.items():
        values, allowed = read.values[column], condition if isinstance(condition, list | tuple) else [condition]
        for value in allowed:
            if value not in values:
                held = ", ".join(sorted({repr(each) for each in values})[:5])
                raise task.refusal("where", f"{read.origin} has no {value!r} in column {column!r}: it holds {held}")
        rows = [row for row in rows if values[row] in allowed]
    if not rows:
        raise task.refusal("where" if num_rows else "source", f"no row of {read.origin} is left")
    return iter(rows)


def _text(task: ProbeTask, read: Columns, row: int) -> str:
    """Return the text of a row that was read from the source, or an empty string if it is blank."""

    def filled(field: re.Match[str]) -> str:
        value = read.values[field["column"]][row]
        for entry in re.findall(r"\w+", field["entries"]):
            value = value[int(entry) if entry.isdigit() else entry]
        if value is None:
            raise LookupError(f"no value of {field['column']}")
        return str(value)

    try:
        given = read.values.get(task.text)
        text = _FIELD.sub(filled, task.text) if given is None else given[row] or ""
        if not isinstance(text, str):
            raise TypeError(f"expected text, found {type(text).__name__}")
    except (LookupError, TypeError) as error:
        raise task.refusal("text", f"row {row} of {read.origin} does not fit {task.text!r} ({error})") from error
    # Replace lone surrogates, which a JSON file can contain, by "?", because UTF-8 cannot encode them.
    return text.encode("utf-8", "replace").decode() if text.strip() else ""


def _class_label(task: ProbeTask, row: Row) -> int | str:
    label = row.label
    if isinstance(label, str):
        return label
    if isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        return int(label)
    raise task.refusal("label", f"{row.location} has {label!r}, expected an integer or a name, or kind regression")


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


# The functions below choose rows by hashes of the seed and the texts. The choice does not depend on the order of the
# rows.


def normalised(text: str) -> str:
    """Return the form of a text that is compared to find equal texts: NFKC, with folded case and single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def draw(keys: Sequence[str], num: int, *, seed: int, purpose: str) -> list[int]:
    """Return the indices of `num` random rows, in ascending order.

    Rows are sorted by a hash of (seed, purpose, key), and the first `num` are taken. So the draw does not depend on the
    order of the rows, and a larger draw includes a smaller one. Rows with equal keys are numbered before hashing, so
    that their hashes differ.
    """
    seen: Counter[str] = Counter()
    sort_keys = []
    for key in keys:
        sort_keys.append(_sort_key(seed, purpose, f"{seen[key]}/{key}"))
        seen[key] += 1
    return sorted(sorted(range(len(keys)), key=sort_keys.__getitem__)[:num])


def hold_out(keys: Sequence[str], strata: Sequence[Hashable], share: float, *, seed: int, purpose: str) -> list[bool]:
    """Return which rows to hold out: `share` of each stratum, without separating rows with equal keys.

    All rows with one key form a unit. Units are sorted by a hash of (seed, purpose, key). In this order, a unit is held
    out if it fits into the remaining quotas of its strata. Quotas are rounded so that their sum is the rounded share of
    all rows, and at least one row of each stratum remains.

    In a second pass, units that exceed the remaining quotas are also held out if this brings the counts closer to the
    quotas. If no unit qualifies in either pass, the unit that brings the counts closest is held out, unless it is the
    only unit.
    """
    by_key: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        by_key.setdefault(key, []).append(row)
    units = [by_key[key] for key in sorted(by_key, key=lambda key: _sort_key(seed, purpose, key))]
    counts = [Counter(strata[row] for row in unit) for unit in units]
    sizes = Counter(strata)
    quotas, taken, held = _quotas(sizes, share), Counter[Hashable](), set[int]()

    def gain(count: Counter[Hashable]) -> int:
        """Return how much closer the numbers of held-out rows come to `quotas` if a group of equal texts is held out.

        The distance is the sum of squared differences over strata. `count` is the group's number of rows per stratum.
        """
        return sum(rows * (2 * (quotas[stratum] - taken[stratum]) - rows) for stratum, rows in count.items())

    def fits(count: Counter[Hashable]) -> bool:
        return all(taken[stratum] + rows <= quotas[stratum] for stratum, rows in count.items())

    def helps(count: Counter[Hashable]) -> bool:
        return all(taken[stratum] + rows < sizes[stratum] for stratum, rows in count.items()) and gain(count) > 0

    for rule in (fits, helps):
        for index, count in enumerate(counts):
            if index not in held and rule(count):
                held.add(index)
                taken.update(count)
    # If every group of equal texts is far larger than the number of rows to hold out, neither pass holds out a row.
    # Then hold out the group that fits best.
    if not held and len(units) > 1:
        held.add(max(range(len(units)), key=lambda index: gain(counts[index])))
    chosen = {row for index in held for row in units[index]}
    return [row in chosen for row in range(len(keys))]


def _sort_key(seed: int, purpose: str, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{purpose}/{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _quotas(sizes: Counter[Hashable], share: float) -> dict[Hashable, int]:
    """Return the number of rows to hold out from each stratum, rounded by the largest-remainder method.

    `sizes` is the number of rows of each stratum.
    """
    exact = {stratum: share * rows for stratum, rows in sizes.items()}
    quotas = {stratum: math.floor(rows) for stratum, rows in exact.items()}
    missing = max(1, round(share * sizes.total())) - sum(quotas.values())
    for stratum in sorted(exact, key=lambda each: (round(quotas[each] - exact[each], 9), str(each))):
        if missing > 0 and quotas[stratum] < sizes[stratum] - 1:
            quotas[stratum] += 1
            missing -= 1
    return quotas
