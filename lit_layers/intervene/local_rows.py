"""Rows of benchmarks in local files, as lm-eval's own task definitions have them."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import find
from lit_layers.tasks.files import SUFFIXES, Columns, read_columns
from lit_layers.tasks.local_copies import local_copy

Row = dict[str, Any]
EXAMPLES = "train"  # the split that worked examples are drawn from
OWN_COLUMNS = ("context", "choices", "label")
_OWN: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "context",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


@dataclass(frozen=True)
class LocalRows:
    """The rows of a task by split, in the columns of lm-eval's definition, and what of that definition is ours.

    `definition` is a task file within lm-eval; None: `settings` are all.
    """

    name: str
    split: str  # that is scored
    rows: Mapping[str, list[Row]]
    definition: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    difference: str = ""

    def content_hash(self) -> str:
        """Sixteen hex digits over every row, in their order, and what is done with them."""
        plain = [self.name, self.split, self.rows, self.settings]
        return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_file(task: str) -> bool:
    """Whether a task is a file of rows, and not a name."""
    return task.endswith(SUFFIXES)


def local_rows(task: str, folder: Path | None, limit: int | None = None) -> LocalRows:
    """The first `limit` rows of a task: of the catalogue, in a folder of local data; or of a file of the user's with
    the columns context, choices (a list, in CSV written as JSON) and label.

    Raises:
        InputError: there is no such task, files or columns are missing, or a row is none of the task.
    """
    if is_file(task):
        columns = dict.fromkeys(OWN_COLUMNS[:2], "text") | {"label": "label"}
        read = read_columns(task, ["test"], columns, None)
        name = Path(task).stem
        return LocalRows(name, "test", {"test": _rows(name, read, _own, limit)}, settings=_OWN)
    found = find("benchmark", task, f"name a file ({', '.join(SUFFIXES)}) with the columns {', '.join(OWN_COLUMNS)}")
    assert folder is not None, "only a file needs no folder"
    copy, split = local_copy("benchmark", task, folder), found.options["split"]
    as_official = _AS_OFFICIAL.get(task, dict)
    try:
        rows = {split: _rows(task, copy.read(split, dict.fromkeys(found.text, "columns")), as_official, limit)}
        if found.options.get("examples"):
            rows[EXAMPLES] = _rows(task, copy.read(EXAMPLES, dict.fromkeys(found.text, "columns")), as_official, None)
            if len(rows[EXAMPLES]) < found.options["examples"]:
                number = found.options["examples"]
                raise InputError(f"{number} worked examples are needed, there are {len(rows[EXAMPLES])}")
    except InputError as error:
        raise InputError(f"task {task}: {error}") from error
    settings = {f"{each}_split": each if each in rows else None for each in ("training", "validation", "test")}
    settings |= {"training_split": EXAMPLES if EXAMPLES in rows else None} | found.options.get("settings", {})
    return LocalRows(task, split, rows, found.source, settings, copy.difference)


def _rows(task: str, read: Columns, as_official: Callable[[Row], Row], limit: int | None) -> list[Row]:
    plain = [dict(zip(read.values, values, strict=True)) for values in zip(*read.values.values(), strict=True)][:limit]
    if not plain:
        raise InputError(f"{read.place} has no row: a score needs at least one")
    rows = []
    for number, row in enumerate(plain):
        try:
            if empty := [column for column, value in row.items() if value is None]:
                raise ValueError(f"nothing in column {empty[0]!r}")
            rows.append(as_official(row))
            if "choices" in row and not 0 <= int(row["label"]) < len(row["choices"]):
                raise ValueError(f"{len(row['choices'])} choices and the label {row['label']}")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise InputError(f"{read.place}: row {number} is no row of {task} ({error})") from error
    return rows


def _lettered(row: Row) -> Row:
    letters = list(ascii_uppercase[: len(row["choices"])])
    return row | {"choices": {"text": row["choices"], "label": letters}, "answerKey": letters[row["label"]]}


def _winogrande(row: Row) -> Row:
    if "_" not in row["sentence"]:
        raise ValueError(f"no blank in {row['sentence']!r}")
    first, second = row["choices"]
    return {"sentence": row["sentence"], "option1": first, "option2": second, "answer": str(row["label"] + 1)}


def _piqa(row: Row) -> Row:
    first, second = row["choices"]
    return {"goal": row["goal"], "sol1": first, "sol2": second, "label": row["label"]}


def _sciq(row: Row) -> Row:
    wrong = {f"distractor{number}": text for number, text in enumerate(row["distractors"], 1)}
    return {name: row[name] for name in ("question", "support", "correct_answer")} | wrong


def _own(row: Row) -> Row:
    choices = json.loads(row["choices"]) if isinstance(row["choices"], str) else row["choices"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices: expected a list of two texts or more, got {choices!r}")
    row |= {"choices": choices, "label": int(row["label"])}
    return row


# From rows with a list of choices and the number of the right one to the data set's own columns.
_AS_OFFICIAL: dict[str, Callable[[Row], Row]] = {
    "arc_challenge": _lettered,
    "arc_easy": _lettered,
    "openbookqa": lambda row: _lettered(row) | {"question_stem": row["question"]},
    "winogrande": _winogrande,
    "piqa": _piqa,
    "sciq": _sciq,
}
