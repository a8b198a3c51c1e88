"""Where the numbers of a report come from: what all have in common, by analysis, and by checkpoint."""

import json
import re
from collections.abc import Iterable
from typing import Any

from lit_layers.figures.labels import DASH
from lit_layers.records import Measurement
from lit_layers.report.facts import RunData, distinct

# What belongs to one checkpoint, in the order of the table; what else differs from one to the next comes in between.
_OF_CHECKPOINT = ("checkpoint", "revision", "commit", "weights_hash", "audit")
_LAST = ("optimizer_step", "tokens_approximate", "weight_files")
_LONG_HASH = re.compile(r"\b[0-9a-f]{32,}\b")
_DIGITS, _FILES = 12, 2  # of a long hash, and of one checkpoint, that a table shows


def provenance(run: RunData) -> dict[str, Any]:
    """Returns where the numbers come from.

    `shared`: what all measurements have in common; `analyses`: what differs between analyses, by model where models
    differ in it; `checkpoints`: a row for each step or model, with what is its own; `run`: what the run's file says.
    """
    names = dict.fromkeys(name for m in run.measurements for name in m.provenance)
    own = [name for name in names if _is_of_checkpoint(name, run)]
    found = {name: _values(name, run.measurements) for name in names if name not in own}
    shared = {name: values[0] for name, values in found.items() if len(values) == 1}
    analyses = {}
    for mine in _by_analysis(run):
        analyses[mine[0].analysis] = {name: _differing(name, mine, run) for name in found if name not in shared}
    about = {name: value for name, value in run.about.items() if name != "config"}
    return {
        "shared": shared,
        "analyses": analyses,
        "checkpoints": _checkpoints(run, own),
        "run": about,
        "config": run.about.get("config"),
    }


def short(text: str) -> str:
    """Returns text whose long hashes are cut: commits, and the sums of files; of many files only their number."""
    if len(files := text.split(", ")) > _FILES and all(map(_LONG_HASH.search, files)):
        return f"{len(files)} files"
    return cut(text)


def cut(text: str) -> str:
    """Returns text whose long hashes are cut."""
    return _LONG_HASH.sub(lambda found: found[0][:_DIGITS], text)


def flat(content: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Returns nested data as rows of (dotted name, text)."""
    if isinstance(content, dict) and content:
        return [row for name, value in content.items() for row in flat(value, f"{prefix}.{name}" if prefix else name)]
    if isinstance(content, list):
        return [(prefix, ", ".join(json.dumps(v) if isinstance(v, dict | list) else _or_dash(v) for v in content))]
    return [(prefix, _or_dash(content))]


def _checkpoints(run: RunData, own: list[str]) -> dict[str, Any]:
    """The columns of the table, and a row of texts for each checkpoint."""
    first = [name for name in _OF_CHECKPOINT if name in own]
    columns = [*first, *(name for name in own if name not in (*_OF_CHECKPOINT, *_LAST))]
    columns += [name for name in _LAST if name in own]
    rows = []
    for measurements in _by_checkpoint(run):
        texts = [", ".join(map(_text, _values(name, measurements))) for name in columns]
        rows.append([run.place(measurements[0]), *texts])
    return {"columns": ["model" if run.compares_models else "step", *columns], "rows": rows if columns else []}


def _is_of_checkpoint(name: str, run: RunData) -> bool:
    """Whether something is told by checkpoint: by its kind, or as it differs between checkpoints and never within."""
    if name in (*_OF_CHECKPOINT[1:], *_LAST):
        return True
    if all(len(_values(name, mine)) < 2 for mine in _by_analysis(run)):
        return False  # it differs between analyses, which not every checkpoint has
    within = [_values(name, measurements) for measurements in _by_checkpoint(run)]
    return not any(len(values) > 1 or isinstance(value, dict) for values in within for value in values)


def _by_checkpoint(run: RunData) -> list[list[Measurement]]:
    found: dict[Any, list[Measurement]] = {}
    for m in run.measurements:
        found.setdefault(m.run if run.compares_models else m.step, []).append(m)
    return list(found.values())


def _by_analysis(run: RunData) -> list[list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for m in run.measurements:
        found.setdefault(m.analysis, []).append(m)
    return list(found.values())


def _values(name: str, measurements: Iterable[Measurement]) -> list[Any]:
    """What those say; one that failed early may say nothing, of any other that is a value, too."""
    return distinct(m.provenance.get(name) for m in measurements if name in m.provenance or m.error is None)


def _differing(name: str, measurements: list[Measurement], run: RunData) -> Any:
    """One value, or several: with their models where models are compared."""
    values = _values(name, measurements)
    if len(values) < 2:
        return values[0] if values else None
    if run.compares_models:
        return {run.place(m): m.provenance.get(name) for m in measurements}
    return values


def _or_dash(value: Any) -> str:
    return DASH if value is None else str(value)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "" if value is None else str(value)
