"""Printed numbers beside measured ones."""

import csv
import functools
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from lit_layers import records
from lit_layers.identity import Measurement, Record, shown
from lit_layers.papers.recipe import PaperRecipe, Place, Published

NAME = "comparison"
_NORMAL = 1.96  # standard errors on either side of a 95% interval
ASIDE = ("control", "reference", "statistic", "variant")  # tags of numbers beside the one that is meant
Verdict = Literal["inside", "outside", "no interval", "holds", "fails", "undecided", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A printed number, the measured one with its 95% interval, and what becomes of them.

    `verdict`: whether the printed number lies `inside` the interval, widened by the error of reading it off a figure,
    or `outside`; `no interval` where none is known. A bound `holds`, `fails`, or is `undecided` where the interval
    reaches over it. `not measured`: `note` says why.
    """

    what: str
    published: str
    verdict: Verdict
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    def cells(self) -> dict[str, str]:
        """For a printed table."""
        interval = "" if self.low is None or self.high is None else f"{_short(self.low)} to {_short(self.high)}"
        measured = "" if self.measured is None else _short(self.measured)
        names = {"": self.what, "published": self.published, "measured": measured, "95%": interval}
        return names | {"the published number is": f"{self.verdict}{f': {self.note}' if self.note else ''}"}


class _Number(NamedTuple):
    """What was measured, and its 95% interval."""

    value: float
    low: float | None = None
    high: float | None = None


class _MissingError(Exception):
    """Why there is no number, in words."""


def compare(recipe: PaperRecipe, root: Path) -> list[Row]:
    """A row for each printed number.

    Raises:
        InputError: a damaged file of measurements.
    """
    read = functools.cache(_content)  # a step's file has many of them
    return [_row(each, root, read) for each in recipe.numbers()]


def write_comparison(rows: Sequence[Row], root: Path, title: str, notes: Iterable[str] = ()) -> list[Path]:
    """Writes comparison.csv and comparison.md, and returns their paths.

    Raises:
        InputError: where the folder cannot be written.
    """
    header = list(rows[0].cells()) if rows else []
    lines = [header, ["---"] * len(header), *(list(row.cells().values()) for row in rows)]
    table = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines if line]
    text = "\n".join([f"# {title}", "", *(f"{note}\n" for note in notes), *table]) + "\n"
    numbers = pd.DataFrame([vars(row) for row in rows])
    return records.write_files(root, {f"{NAME}.csv": numbers, f"{NAME}.md": text})


def _row(published: Published, root: Path, read: Callable[[Path], Any]) -> Row:
    if published.value is not None:
        printed = _short(published.value) + (f" ± {_short(published.error)}" if published.error else "")
    elif published.at_least is not None:
        printed = f"at least {_short(published.at_least)}"
    else:
        printed = f"at most {_short(published.at_most)}"
    try:
        number = _find(published.measured, root, read)
    except _MissingError as why:
        return Row(what=published.what, published=printed, verdict="not measured", note=str(why))
    verdict = _inside(published, number) if published.value is not None else _holds(published, number)
    interval: Any = {"low": number.low, "high": number.high}
    return Row(what=published.what, published=printed, verdict=verdict, measured=number.value, **interval)


def _inside(published: Published, number: _Number) -> Verdict:
    if number.low is None or number.high is None or published.value is None:
        return "no interval"
    is_inside = number.low - published.error <= published.value <= number.high + published.error
    return "inside" if is_inside else "outside"


def _holds(published: Published, number: _Number) -> Verdict:
    """Of a bound: by the interval, where there is one."""
    ends = (number.value, number.value) if number.low is None or number.high is None else (number.low, number.high)
    if published.at_least is not None:
        holds = [end >= published.at_least for end in ends]
    else:
        holds = [end <= (published.at_most or 0.0) for end in ends]
    return "holds" if all(holds) else "undecided" if any(holds) else "fails"


def _find(place: Place, root: Path, read: Callable[[Path], Any]) -> _Number:
    """The number of a place.

    Raises:
        _MissingError: there is none.
    """
    path = root / (place.file or Path(place.root, "measurements.jsonl"))
    if not path.is_file():
        raise _MissingError(f"there is no {path.relative_to(root)}")
    find = {"": _in_records, ".csv": _in_csv, ".json": _in_json}[path.suffix if place.file else ""]
    return find(read(path), place)


def _content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return shown(records.read(path))
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else list(csv.DictReader(io.StringIO(text)))


def _in_records(measurements: Sequence[Measurement], place: Place) -> _Number:
    of_run = [each for each in measurements if place.run in (None, each.run)]
    fit = [each for each in of_run if each.analysis == place.analysis and place.step in (None, each.step)]
    if not fit:
        where, steps = f" of {place.run}" if place.run else "", {each.step for each in of_run}
        if place.step is not None and steps and place.step not in steps:
            raise _MissingError(f"step {place.step}{where} is not among those measured")
        raise _MissingError(f"no {place.analysis}{where}")
    if len(fit) > 1:
        raise _MissingError(f"{len(fit)} measurements fit: name a run or a step")
    if fit[0].error is not None:
        raise _MissingError(f"{place.analysis} failed: {fit[0].error}")
    numbers = [record for record in fit[0].records if _is_meant(record, place)]
    if not numbers:
        raise _MissingError(f"{place.analysis} has no such {place.metric}")
    if len(numbers) > 1:
        raise _MissingError(f"{len(numbers)} numbers fit: name their tags, such as {_differing(numbers)}")
    record = numbers[0]
    if math.isnan(record.value):
        raise _MissingError("undefined")
    low, high = record.low, record.high
    if (low is None or high is None) and record.stderr is not None:
        low, high = record.value - _NORMAL * record.stderr, record.value + _NORMAL * record.stderr
    return _Number(record.value, low, high)


def _is_meant(record: Record, place: Place) -> bool:
    same = (record.metric, record.layer, record.other_layer) == (place.metric, place.layer, place.other_layer)
    aside = [name for name in ASIDE if name in record.tags and name not in place.tags]
    return same and not aside and all(_equal(record.tags.get(name), value) for name, value in place.tags.items())


def _differing(fit: Sequence[Record]) -> str:
    first, second = fit[0].tags, fit[1].tags
    return ", ".join(sorted(name for name in {*first, *second} if first.get(name) != second.get(name)))


def _equal(value: Any, asked: Any) -> bool:
    """Numbers as numbers, however they are written."""
    try:
        return math.isclose(float(value), float(asked), rel_tol=1e-9)
    except (TypeError, ValueError):
        return value == asked


def _in_csv(rows: Sequence[Mapping[str, str]], place: Place) -> _Number:
    fit = [row for row in rows if all(_equal(row.get(name), value) for name, value in place.row.items())]
    if len(fit) != 1:
        raise _MissingError(f"{len(fit) or 'no'} rows of {place.file} fit")
    of = "" if place.column == "value" else f"{place.column}_"
    value, low, high = (_number(fit[0].get(name)) for name in (place.column, f"{of}low", f"{of}high"))
    if value is None:
        raise _MissingError("undefined")
    return _Number(value, low, high)


def _in_json(content: Any, place: Place) -> _Number:
    for key in place.column.split("."):
        content = content.get(key) if isinstance(content, Mapping) else None
    content = content if isinstance(content, Mapping) else {"value": content}
    value, low, high = (_number(content.get(name)) for name in ("value", "low", "high"))
    if value is None:
        raise _MissingError(f"{place.file} has no {place.column}")
    return _Number(value, low, high)


def _number(text: Any) -> float | None:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"
