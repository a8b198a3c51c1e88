"""The file of a grid, that of a W&B sweep with `method: grid`, and the command line of each of its cells."""

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.schema import Expected, Tag

_MACROS = ("env", "interpreter", "program", "args", "args_no_hyphens")
_MACRO = re.compile(r"\$\{(.*)\}", re.DOTALL)
_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
_USUAL = ("${env}", "${interpreter}", "${program}", "${args}")
_COLUMNS = ("run", "best", "step", "seconds", "error")  # of the table: no parameter is called so
_LONG = 120  # characters; file systems allow 255 with our endings


@dataclass(frozen=True)
class Cell:
    """One run of a grid: its folder's name, and its options by their whole names."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What the file of a sweep says.

    `values` has each parameter's values, `fixed` those parameters that have one only. `metric` is a scalar of training,
    None where the file names none.
    """

    command: tuple[str, ...]
    program: str | None
    values: dict[str, list[Any]]
    fixed: dict[str, Any]
    metric: str | None
    goal: str

    @property
    def short_names(self) -> dict[str, str]:
        """What each varied parameter is called in folders and tables: its last part, where only one has it."""
        last = {name: name.split(".")[-1] for name in self.values}
        often = Counter(last.values())
        taken = {*_COLUMNS, self.metric}
        return {name: short if often[short] == 1 and short not in taken else name for name, short in last.items()}

    def cells(self) -> list[Cell]:
        """Every combination of the values, the last parameter varying fastest."""
        combinations = itertools.product(*self.values.values())
        return [self._cell(dict(zip(self.values, chosen, strict=True))) for chosen in combinations]

    def _cell(self, chosen: dict[str, Any]) -> Cell:
        short = self.short_names
        readable = ",".join(f"{short[name]}={value}" for name, value in chosen.items())
        name = re.sub(r"[^\w.,=+-]", "_", readable, flags=re.ASCII)[:_LONG]
        if name != readable:  # not unique any more
            name += f"-{hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:8]}"
        return Cell(name or "all", {**chosen, **self.fixed})

    def command_line(self, cell: Cell, environment: Mapping[str, str] = os.environ) -> list[str]:
        """The words that W&B's agent would start for this cell.

        Raises:
            InputError: a variable that the environment does not have.
        """
        options = [f"{name}={value}" for name, value in cell.parameters.items()]
        words = {
            "env": [] if os.name == "nt" else ["/usr/bin/env"],
            "interpreter": ["python"],
            "program": [self.program or ""],
            "args": [f"--{option}" for option in options],
            "args_no_hyphens": options,
        }
        line = []
        for word in self.command:
            filled = _VARIABLE.sub(lambda match: _value_of(match[1], environment), word)
            macro = _MACRO.fullmatch(word) if filled == word else None
            line += words[macro[1]] if macro else [filled]
        return line


def _once(values: list[Any]) -> list[Any]:
    if len(set(map(str, values))) < len(values):
        raise ValueError("expected each value once")
    return values


_Value = Annotated[str | bool | int | float, Expected("text or a number")]  # a number of any size stays what it is
_Values = Annotated[list[_Value], Field(min_length=1), AfterValidator(_once)]
_Parameter = Annotated[
    Annotated[dict[Literal["values"], _Values] | dict[Literal["value"], _Value], Field(min_length=1)],
    Expected("{values: [...]} of different numbers or texts, or {value: ...}, alone: W&B's agent runs what is more"),
]
_Metric = with_config(schema.STRICT)(
    TypedDict("_Metric", {"name": str, "goal": NotRequired[Literal["maximize", "minimize"]]})
)


@with_config(schema.STRICT)
class _Sweep(TypedDict, total=False):
    method: Required[Annotated[Literal["grid"], Expected("grid: W&B runs the other methods")]]
    parameters: Required[Annotated[dict[str | int, _Parameter], Field(min_length=1)]]
    command: Annotated[list[Tag], Field(min_length=1)] | None
    program: str | None
    metric: _Metric | None
    # What only W&B reads.
    name: Any
    description: Any
    project: Any
    entity: Any


def read_grid(path: Path) -> Grid:
    """Returns the grid of a W&B sweep's file.

    Raises:
        InputError: a file that cannot be read, or what only W&B's server can do.
    """
    content: Any = schema.read_yaml(path, _Sweep, "see docs/sweeps.md")
    parameters, metric = content["parameters"], content.get("metric") or {}
    return Grid(
        command=_command(content.get("command") or _USUAL, content.get("program"), path),
        program=content.get("program"),
        values={str(name): spec["values"] for name, spec in parameters.items() if "values" in spec},
        fixed={str(name): spec["value"] for name, spec in parameters.items() if "value" in spec},
        metric=metric.get("name"),
        goal=metric.get("goal", "minimize"),  # W&B's own default
    )


def _command(content: Sequence[Any], program: str | None, path: Path) -> tuple[str, ...]:
    command = tuple(map(str, content))
    macros = [match[1] for word in command if (match := _MACRO.fullmatch(word)) and not _VARIABLE.search(word)]
    for macro in macros:
        if macro not in _MACROS:
            names = ", ".join(f"${{{name}}}" for name in _MACROS)
            raise InputError(f"{path}: command: unknown macro ${{{macro}}}; known: {names}, ${{envvar:NAME}}")
    if not {"args", "args_no_hyphens"} & set(macros):
        raise InputError(f"{path}: command: expected the word ${{args}}, where the parameters go")
    if "program" in macros and program is None:
        raise InputError(f"{path}: program: expected the program that ${{program}} stands for, got none")
    return command


def _value_of(variable: str, environment: Mapping[str, str]) -> str:
    if variable not in environment:
        raise InputError(f"command: the variable {variable} of ${{envvar:{variable}}} is not set")
    return environment[variable]
