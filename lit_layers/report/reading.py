"""How a metric is to be read: its range, what to compare it with, and the definition in the function behind it.

The definition is that function's docstring, read as text: nothing is imported for it, and it stands there alone.
"""

import ast
import functools
import re
from importlib.resources import files
from typing import NamedTuple

from lit_layers.metrics import Metric, look_up

_USAGE = re.compile(r"^(Args|Returns|Raises):", re.M)
_SOURCE = re.compile(r"^Source: (.*?)(?=\n\s*\n|\Z)", re.M | re.S)


class Definition(NamedTuple):
    """What a function's docstring says of what it computes, in paragraphs, and of where that was published."""

    paragraphs: list[str]
    source: str


class Reading(NamedTuple):
    """What helps to read a metric: short facts by name, and its definition, where a function has one."""

    title: str
    facts: dict[str, str]
    definition: Definition


def reading(metric: str) -> Reading | None:
    """Returns how a metric is to be read; None where nothing is known of it."""
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
    """What the metric would be by chance, or by definition."""
    if row.level is not None:
        return f"{row.level_name}: {row.level:g}"
    baseline = look_up(row.baseline)
    return baseline.title if baseline.meaning else ""


@functools.cache
def _definition(function: str) -> Definition:
    """Of a function of `lit_layers.functional`, as `entropy.matrix_entropy`; without what only a caller needs."""
    module, _, name = function.rpartition(".")
    source = files("lit_layers").joinpath("functional", *module.split(".")[:-1], f"{module.split('.')[-1]}.py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    text = _USAGE.split(ast.get_docstring(node) or "")[0]
    published = _SOURCE.search(text)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", _SOURCE.sub("", text))]
    return Definition([part for part in paragraphs if part], " ".join(published[1].split()) if published else "")
