"""The file of a grid, that of a W&B sweep with `method: grid`, and the command line of each of its cells."""

import difflib
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers import schema
from lit_layers.errors import InputError

_KEYS = ("command", "method", "metric", "parameters", "program", "name", "description", "project", "entity")
_GOALS = ("maximize", "minimize")
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
            filled = _VARIABLE.sub(lambda found: _value_of(found[1], environment), word)
            macro = _MACRO.fullmatch(word) if filled == word else None
            line += words[macro[1]] if macro else [filled]
        return line


def read_grid(path: Path) -> Grid:
    """Returns the grid of a W&B sweep's file.

    Raises:
        InputError: a file that cannot be read, or what only W&B's server can do.
    """
    content = schema.read_yaml(path, dict[str, Any], "see docs/sweeps.md")
    _known(content, _KEYS, path)
    if content.get("method") != "grid":
        raise InputError(f"{path}: method: expected grid, got {content.get('method')!r}; W&B runs the other methods")
    program = content.get("program")
    if program is not None and not isinstance(program, str):
        raise InputError(f"{path}: program: expected a file's name, got {program!r}")
    values, fixed = _parameters(content.get("parameters"), path)
    metric, goal = _metric(content.get("metric"), path)
    command = _command(content.get("command"), program, path)
    return Grid(command=command, program=program, values=values, fixed=fixed, metric=metric, goal=goal)


def _parameters(content: Any, path: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    if not isinstance(content, dict) or not content:
        raise InputError(f"{path}: parameters: expected NAME: {{values: [...]}}, got {content!r}")
    values, fixed = {}, {}
    for name, spec in content.items():
        where = f"{path}: parameters.{name}"
        if not isinstance(spec, dict) or set(spec) not in ({"values"}, {"value"}):
            got = ", ".join(map(str, spec)) if isinstance(spec, dict) and spec else repr(spec)
            raise InputError(f"{where}: expected values or value alone, got {got}; W&B's agent runs what is more")
        if "value" in spec:
            fixed[str(name)] = _plain(spec["value"], f"{where}.value")
            continue
        if not isinstance(spec["values"], list) or not spec["values"]:
            raise InputError(f"{where}.values: expected a list of at least one value, got {spec['values']!r}")
        values[str(name)] = [_plain(value, f"{where}.values") for value in spec["values"]]
        twice = [text for text, count in Counter(map(str, spec["values"])).items() if count > 1]
        if twice:
            raise InputError(f"{where}.values: expected each value once, got {twice[0]} more than once")
    return values, fixed


def _plain(value: Any, where: str) -> Any:
    if not isinstance(value, str | int | float):
        raise InputError(f"{where}: expected numbers, texts, true or false, got {value!r}")
    return value


def _metric(content: Any, path: Path) -> tuple[str | None, str]:
    if content is None:
        return None, _GOALS[1]
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        raise InputError(f"{path}: metric: expected {{name: a scalar of training, goal: maximize}}, got {content!r}")
    _known(content, ("name", "goal"), path, "metric.")
    goal = content.get("goal", _GOALS[1])  # W&B's own default
    if goal not in _GOALS:
        raise InputError(f"{path}: metric.goal: expected {' or '.join(_GOALS)}, got {goal!r}")
    return content["name"], goal


def _command(content: Any, program: str | None, path: Path) -> tuple[str, ...]:
    if content is not None and (not isinstance(content, list) or not content):
        raise InputError(f"{path}: command: expected a list of words, got {content!r}")
    command = tuple(map(str, _USUAL if content is None else content))
    macros = [found[1] for word in command if (found := _MACRO.fullmatch(word)) and not _VARIABLE.search(word)]
    for macro in macros:
        if macro not in _MACROS:
            known = ", ".join(f"${{{name}}}" for name in _MACROS)
            raise InputError(f"{path}: command: unknown macro ${{{macro}}}; known: {known}, ${{envvar:NAME}}")
    if not {"args", "args_no_hyphens"} & set(macros):
        raise InputError(f"{path}: command: expected the word ${{args}}, where the parameters go")
    if "program" in macros and program is None:
        raise InputError(f"{path}: program: expected the program that ${{program}} stands for, got none")
    return command


def _known(content: Iterable[Any], keys: tuple[str, ...], path: Path, prefix: str = "") -> None:
    for key in content:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(keys)}"
            raise InputError(f"{path}: unknown key {prefix}{key}; {hint}")


def _value_of(variable: str, environment: Mapping[str, str]) -> str:
    if variable not in environment:
        raise InputError(f"command: the variable {variable} of ${{envvar:{variable}}} is not set")
    return environment[variable]
