"""Downstream tasks of linear probes: labelled texts, in a train, a validation and a test part."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from lit_layers.errors import InputError
from lit_layers.tasks.labelled_rows import (
    LabelledRows,
    RowOptions,
    TaskSplit,
    as_classes,
    as_values,
    draw,
    hold_out,
    read_rows,
    refusal,
    text_columns,
)
from lit_layers.tasks.task_files import MAPPING, Use, is_local, is_one_file, local_copies

FEW_VALUES = 20  # a regression with no more different values is split value by value


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
    num_train_wanted: int | None = None
    """Rows that the task asks for in training (with the validation cut from it) if the local copy has fewer."""
    num_test_wanted: int | None = None
    """Test rows that the task asks for if the local copy has fewer."""

    def train_and_validation(self) -> TaskSplit:
        return self.train + self.validation

    def content_hash(self) -> str:
        """Sixteen hex digits over the kind, the classes, and the texts and targets of each part."""
        digest = hashlib.sha256(json.dumps([self.kind, self.classes]).encode())
        for part in (self.train, self.validation, self.test):
            digest.update(json.dumps([part.texts, part.targets.tolist()]).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class ProbeTask(RowOptions):
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
        group: A column, for instance of documents: rows of one value stay together where a part is cut off here.
        validation: A split of its own, or None to cut `validation_share` off train, stratified.
        validation_share: Share of the training rows for validation, where validation is None.
        local: Where a folder of local data has the task, such as banking77/{split}.parquet; else its `tasks.yaml` says.
        local_options: Options that are others in that local copy.
        classes: Names of all classes, in the order of their numbers; without it those that occur, by name.
        label_offset: Added to the values of a regression: 1 where stars are stored from 0.
        balance: Random rows of each class (or value) of train; None for all.
        drop_empty: Leave out rows without text, which are refused otherwise.
        seed: Decides which rows are cut off and drawn.
        description: A line for readers.

    """

    use: ClassVar[Use] = "probe"
    _: KW_ONLY
    kind: Literal["classification", "regression"] = "classification"
    train: str | list[str] = "train"
    test: str | None = "test"
    test_share: float = 0.3
    num_train: int | None = None
    num_test: int | None = None
    validation: str | None = None
    validation_share: float = 0.2
    local: str | None = None
    local_options: dict[str, Any] = field(default_factory=dict)
    balance: int | None = None
    seed: int = 0
    description: str = ""

    def check(self) -> None:
        """Refuses options that contradict each other or are out of range; reads nothing.

        Raises:
            InputError: says which option.
        """
        if not self.name or not self.source:
            raise InputError(f"a task needs a name and a source, got {self.name!r} and {self.source!r}")
        if self.kind not in ("classification", "regression"):
            raise refusal(self.name, "kind", f"expected classification or regression, got {self.kind!r}")
        if not self.train or (isinstance(self.train, list) and len(set(self.train)) < len(self.train)):
            raise refusal(self.name, "train", f"expected a split, or several different ones, got {self.train!r}")
        for option in ("test_share", "validation_share"):
            if not 0 < getattr(self, option) < 1:
                raise refusal(self.name, option, f"expected a share between 0 and 1, got {getattr(self, option)}")
        for option in ("num_train", "num_test", "balance"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise refusal(self.name, option, f"expected at least 1, or null for all rows, got {number}")
        if self.seed < 0:
            raise refusal(self.name, "seed", f"expected at least 0, got {self.seed}")
        if self.kind == "regression" and self.classes is not None:
            raise refusal(self.name, "classes", "a regression has none: leave them out, or choose kind classification")
        if self.kind == "classification" and self.label_offset:
            raise refusal(self.name, "label_offset", "is for regressions: leave it out, or choose kind regression")
        if self.classes is not None and len(set(self.classes)) < max(2, len(self.classes)):
            raise refusal(self.name, "classes", f"expected two or more different names, got {list(self.classes)}")
        options = {each.name for each in fields(self)} - {"name", "local", "local_options"}
        text_columns(self.name, self.text)
        if strange := sorted(set(self.local_options) - options):
            sentence = f"there is no option {strange[0]!r}: name some of {', '.join(sorted(options))}"
            raise refusal(self.name, "local_options", sentence)

    def load(self, folder: str | None = None) -> TaskData:
        """Reads and splits the task.

        With `folder`, a data set of the Hub is read from its copy there, where `local` or the folder's `tasks.yaml`
        says. Such a copy may be a sample: where it has fewer rows than the task asks for all are taken, and
        `num_train_wanted` or `num_test_wanted` tells.

        Raises:
            InputError: an option is wrong (`check`); a file, split, column, text or label is missing; the Hub does not
                answer; a label is none of `classes`; train has one class only; there are fewer rows than asked for; or
                nothing is left for a part.
        """
        self.check()
        if folder is None or (self.local is None and is_local(self.source)):
            return _load(self, is_copy=False)
        place, options = self._copy(Path(folder).expanduser())
        local = replace(self, local=None, local_options={}, **{"source": str(place), **options})
        local.check()
        return _load(local, is_copy=True)

    def _copy(self, folder: Path) -> tuple[Path, Mapping[str, Any]]:
        """Where a folder has this task, and which options are others there."""
        if self.local is not None:
            if not folder.is_dir():
                raise refusal(self.name, "folder", f"expected a folder of data, {folder} is none")
            return folder / self.local, self.local_options
        copy = local_copies("probe", folder).get(self.name)
        if copy is None:
            sentence = f"{folder / MAPPING} names no copy: add it there, or leave folder out"
            raise refusal(self.name, "folder", sentence)
        if not isinstance(copy.files, str):
            raise refusal(self.name, "folder", f"{folder / MAPPING}: expected one path of files, with {{split}} in it")
        return folder / copy.files, copy.options


def _load(task: ProbeTask, *, is_copy: bool) -> TaskData:
    parts, classes = _read(task)
    num_empty = sum(rows.num_empty for rows in parts.values())
    num_duplicates, num_validation_duplicates = _part(task, parts)
    asked_for = _choose(task, parts, classes, is_copy)
    train, validation, test = parts["train"], parts["validation"], parts["test"]
    if len(seen := set(train.labels)) < 2:
        held = classes[train.labels[0]] if classes else train.labels[0]
        raise refusal(task.name, "label", f"all rows of train have {held!r}, a probe needs two labels: give other rows")
    return TaskData(
        name=task.name,
        kind=task.kind,
        train=_split(train, task.kind),
        validation=_split(validation, task.kind),
        test=_split(test, task.kind),
        classes=classes,
        num_duplicates=num_duplicates,
        num_validation_duplicates=num_validation_duplicates,
        num_empty=num_empty,
        num_conflicting=_num_conflicting(train, validation),
        num_unseen_test_rows=sum(label not in seen for label in test.labels) if classes else 0,
        num_train_wanted=asked_for.get("train"),
        num_test_wanted=asked_for.get("test"),
    )


def _read(task: ProbeTask) -> tuple[dict[str, LabelledRows], tuple[str, ...] | None]:
    """The splits that the source has, by part, and the names of the classes."""
    splits = {"train": task.train, "validation": task.validation, "test": task.test}
    if is_one_file(task.source):
        if len([task.train] if isinstance(task.train, str) else task.train) > 1:
            raise refusal(task.name, "train", f"{task.source} is one file without splits: name one")
        for part in ("test", "validation"):
            if splits[part] is not None:
                sentence = f"{task.source} is one file without splits: set {part} to null to cut off a share"
                raise refusal(task.name, part, sentence)
    parts = {part: read_rows(task, names) for part, names in splits.items() if names is not None}
    return as_classes(task, parts) if task.kind == "classification" else (as_values(task, parts), None)


def _part(task: ProbeTask, parts: dict[str, LabelledRows]) -> tuple[int, int]:
    """Takes the texts of test from the others, and those of validation from train; how many rows that were."""
    counts = []
    for first, others in (("test", ("train", "validation")), ("validation", ("train",))):
        before = sum(map(len, parts.values()))
        for other in parts.keys() & set(others) if first in parts else ():
            parts[other] = parts[other].without(set(parts[first].keys))
            if not len(parts[other]):
                raise refusal(task.name, other, f"all its texts are in {first}, too: give other rows")
        counts.append(before - sum(map(len, parts.values())))
    return counts[0], counts[1]


def _choose(
    task: ProbeTask, parts: dict[str, LabelledRows], classes: tuple[str, ...] | None, is_copy: bool
) -> dict[str, int]:
    """Draws and cuts off the parts; how many rows the task asks for where a copy has fewer."""
    parts["train"], asked_for_in_all = _balanced(task, parts["train"], classes, is_copy)
    asked_for = {"train": asked_for_in_all} if asked_for_in_all else {}
    if "test" not in parts:
        parts["train"], parts["test"] = _cut(task, parts["train"], "test")
        if asked_for_in_all:
            held_out = round(asked_for_in_all * task.test_share)
            asked_for = {"train": asked_for_in_all - held_out, "test": held_out}
    for part, number in (("train", task.num_train), ("test", task.num_test)):
        if number is None:
            continue
        if len(parts[part]) < number:
            if not is_copy:
                sentence = f"{number} rows are wanted, {len(parts[part])} are there for {part}: ask for fewer"
                raise refusal(task.name, f"num_{part}", sentence)
            asked_for[part] = number
        drawn = draw(parts[part].keys, number, seed=task.seed, purpose=f"num_{part}")
        parts[part] = parts[part].take(drawn)
    if "validation" not in parts:
        parts["train"], parts["validation"] = _cut(task, parts["train"], "validation")
    return asked_for


def _balanced(
    task: ProbeTask, rows: LabelledRows, classes: tuple[str, ...] | None, is_copy: bool
) -> tuple[LabelledRows, int | None]:
    """`balance` random rows of each class, and how many that should be in all where a copy has fewer."""
    if task.balance is None:
        return rows, None
    places: dict[Any, list[int]] = {}
    for index, label in enumerate(rows.labels):
        places.setdefault(label, []).append(index)
    label, fewest = min(((label, len(indices)) for label, indices in places.items()), key=lambda each: each[1])
    if fewest < task.balance and not is_copy:
        name = classes[label] if classes else label
        sentence = f"{task.balance} rows of each label are wanted, {rows.place} has {fewest} of {name!r}: ask for fewer"
        raise refusal(task.name, "balance", sentence)
    number, chosen = min(fewest, task.balance), []
    for indices in places.values():
        drawn = draw([rows.keys[index] for index in indices], number, seed=task.seed, purpose="balance")
        chosen += [indices[index] for index in drawn]
    return rows.take(sorted(chosen)), task.balance * len(places) if number < task.balance else None


def _cut(task: ProbeTask, rows: LabelledRows, part: Literal["test", "validation"]) -> tuple[LabelledRows, LabelledRows]:
    """What is left, and what is held out for a part."""
    share = task.test_share if part == "test" else task.validation_share
    by_label = task.kind == "classification" or len(set(rows.labels)) <= FEW_VALUES
    strata = rows.labels if by_label else [None] * len(rows)
    held = hold_out(rows.keys, strata, share, seed=task.seed, purpose=part, groups=rows.groups)
    if len(set(held)) < 2:
        sentence = f"cannot cut {share} off {len(rows)} rows with equal texts and groups kept whole: give more rows"
        raise refusal(task.name, f"{part}_share", sentence)
    left, out = ([index for index, each in enumerate(held) if each is side] for side in (False, True))
    return rows.take(left), rows.take(out)


def _split(rows: LabelledRows, kind: str) -> TaskSplit:
    dtype = torch.int64 if kind == "classification" else torch.float64
    return TaskSplit(tuple(rows.texts), torch.tensor(rows.labels, dtype=dtype), tuple(rows.numbers))


def _num_conflicting(*parts: LabelledRows) -> int:
    pairs = [pair for rows in parts for pair in zip(rows.keys, rows.labels, strict=True)]
    labels = Counter(key for key, _ in set(pairs))
    return sum(labels[key] > 1 for key, _ in pairs)
