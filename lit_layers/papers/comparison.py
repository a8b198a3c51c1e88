"""Printed numbers beside measured ones."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    measured: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    note: str = ""

    def cells(self) -> dict[str, str]:
        """For a printed table."""
        interval = "" if self.low is None or self.high is None else f"{_short(self.low)} to {_short(self.high)}"
        measured = "" if self.measured is None else _short(self.measured)
        names = {"": self.what, "published": self.published, "measured": measured, "95%": interval}
        return names | {"the published number is": f"{self.verdict}{f': {self.note}' if self.note else ''}"}


@dataclass
class _Found:
    value: float
    low: float | None = None
    high: float | None = None


@dataclass
class _Results:
    """What the steps of a recipe have left, each file read once."""

    root: Path
    read: dict[Path, Any] = field(default_factory=dict)

    def of(self, path: Path, reader: Callable[[Path], Any]) -> Any:
        if path not in self.read:
            self.read[path] = reader(path) if path.is_file() else None
        return self.read[path]


def compare(recipe: PaperRecipe, root: Path) -> list[Row]:
    """A row for each printed number.

    Raises:
        InputError: a damaged file of measurements.
    """
    results = _Results(root)
    return [_row(each, results) for each in recipe.numbers()]


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


def _row(published: Published, results: _Results) -> Row:
    number, note = _find(published.measured, results)
    bound = published.at_least if published.value is None else None
    bound = published.at_most if published.value is None and bound is None else bound
    if published.value is not None:
        printed = _short(published.value) + (f" ± {_short(published.error)}" if published.error else "")
    else:
        printed = f"at {'least' if published.at_least is not None else 'most'} {_short(bound)}"
    if number is None:
        return Row(
            what=published.what,
            published=printed,
            measured=None,
            low=None,
            high=None,
            verdict="not measured",
            note=note,
        )
    verdict = _inside(published, number) if published.value is not None else _holds(published, number)
    return Row(
        what=published.what, published=printed, measured=number.value, low=number.low, high=number.high, verdict=verdict
    )


def _inside(published: Published, number: _Found) -> Verdict:
    if number.low is None or number.high is None or published.value is None:
        return "no interval"
    is_inside = number.low - published.error <= published.value <= number.high + published.error
    return "inside" if is_inside else "outside"


def _holds(published: Published, number: _Found) -> Verdict:
    """Of a bound: by the interval, where there is one."""
    ends = (number.value, number.value) if number.low is None or number.high is None else (number.low, number.high)
    if published.at_least is not None:
        holds = [end >= published.at_least for end in ends]
    else:
        holds = [end <= (published.at_most or 0.0) for end in ends]
    return "holds" if all(holds) else "undecided" if any(holds) else "fails"


def _find(place: Place, results: _Results) -> tuple[_Found | None, str]:
    """The number of a place; else why there is none."""
    if place.file:
        path = results.root / place.file
        content = results.of(path, _read_json if path.suffix == ".json" else _read_csv)
        if content is None:
            return None, f"there is no {place.file}"
        return _in_json(content, place) if path.suffix == ".json" else _in_csv(content, place)
    path = results.root / place.root / "measurements.jsonl"
    measurements = results.of(path, lambda path: shown(records.read(path)))
    if measurements is None:
        return None, f"there is no {path.relative_to(results.root)}"
    return _in_records(measurements, place)


def _in_records(measurements: Sequence[Measurement], place: Place) -> tuple[_Found | None, str]:
    steps = {each.step for each in measurements if place.run in (None, each.run)}
    mine = [each for each in measurements if each.analysis == place.analysis and place.run in (None, each.run)]
    if place.step is not None:
        mine = [each for each in mine if each.step == place.step]
    if not mine:
        where = f" of {place.run}" if place.run else ""
        if place.step is not None and steps and place.step not in steps:
            return None, f"step {place.step}{where} is not among those measured"
        return None, f"no {place.analysis}{where}"
    if len(mine) > 1:
        return None, f"{len(mine)} measurements fit: name a run or a step"
    if mine[0].error is not None:
        return None, f"{place.analysis} failed: {mine[0].error}"
    fit = [record for record in mine[0].records if _is_meant(record, place)]
    if not fit:
        return None, f"{place.analysis} has no such {place.metric}"
    if len(fit) > 1:
        return None, f"{len(fit)} numbers fit: name their tags, such as {_differing(fit)}"
    record = fit[0]
    if math.isnan(record.value):
        return None, "undefined"
    low, high = record.low, record.high
    if (low is None or high is None) and record.stderr is not None:
        low, high = record.value - _NORMAL * record.stderr, record.value + _NORMAL * record.stderr
    return _Found(record.value, low, high), ""


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


def _read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _in_csv(rows: Sequence[Mapping[str, str]], place: Place) -> tuple[_Found | None, str]:
    fit = [row for row in rows if all(_equal(row.get(name), value) for name, value in place.row.items())]
    if len(fit) != 1:
        return None, f"{len(fit) or 'no'} rows of {place.file} fit"
    of = "" if place.column == "value" else f"{place.column}_"
    numbers = [_number(fit[0].get(name)) for name in (place.column, f"{of}low", f"{of}high")]
    return (None, "undefined") if numbers[0] is None else (_Found(numbers[0], *numbers[1:]), "")


def _in_json(content: Any, place: Place) -> tuple[_Found | None, str]:
    for key in place.column.split("."):
        content = content.get(key) if isinstance(content, Mapping) else None
    if isinstance(content, Mapping):
        numbers = [_number(content.get(name)) for name in ("value", "low", "high")]
    else:
        numbers = [_number(content), None, None]
    return (
        (None, f"{place.file} has no {place.column}") if numbers[0] is None else (_Found(numbers[0], *numbers[1:]), "")
    )


def _number(text: Any) -> float | None:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"
