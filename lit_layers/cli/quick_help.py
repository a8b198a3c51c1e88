"""The help of verbs whose parsers import torch or Lightning, for seconds: replayed from `quick_help.json`.

It holds where it was recorded from these sources, on any Python; elsewhere the parser itself speaks. What an unknown
option is, it says only beside the versions that it was recorded with: others may take more.
`python -m tests.support.record_help` records.
"""

import argparse
import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_suffix(".json")
_LIBRARIES = ("jsonargparse", "lightning")  # decide which options there are
_WHOLE = ("cli/options.py", "cli/recipes.py")  # make parsers: what their functions do matters, too
_OUTLINED = {  # whose options, words and classes the help tells
    "analyze": (
        "cli/verbs/analyze.py",
        "cli/measuring.py",
        "measuring/measuring_options.py",
        "analyses/__init__.py",
        "series/__init__.py",
    ),
    "fit": (
        "cli/verbs/fit.py",
        "analyses/__init__.py",
        "report/__init__.py",
        "training/__init__.py",
        "training/trainer.py",
    ),
    "watch": (
        "cli/verbs/watch.py",
        "cli/verbs/analyze.py",
        "measuring/measuring_options.py",
        "measuring/following.py",
        "analyses/__init__.py",
    ),
}


def answer(verb: str, argv: list[str]) -> str | None:
    """What can be said without the verb's parser: its help.

    Raises:
        InputError: an option that it does not have.
    """
    if verb not in _OUTLINED or (record := recorded(verb)) is None:
        return None
    if argv[:1] in (["-h"], ["--help"]) and (layout := record["layouts"].get(" ".join(argv[1:]))) is not None:
        return replayed(record["prog"], layout)
    if record["versions"] != versions():
        return None
    words = [word.partition("=")[0] for word in argv]
    if any(word == "-h" or word.endswith("help") for word in words):  # of a class, or beside other options
        return None
    options = {"--", "--code", *record["options"]}
    groups = {group for option in options if not option.endswith(".help") for group in _groups(option)}
    for word in words:
        # An option that is no group may be of a class, which has options of its own.
        if word.startswith("--") and word not in options and not (_groups(word) & options) - groups:
            from lit_layers.cli.recipes import refusal

            raise refusal(f"unrecognized arguments: {word}", record["keys"], record["prog"])
    return None


def _groups(option: str) -> set[str]:
    return {option[:place] for place, letter in enumerate(option) if letter == "."}


def versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}


def made_from(verb: str) -> str:
    """A hash of what shapes a verb's help: signatures, docstrings and constants."""
    package = Path(__file__).parents[1]
    parts = [(package / name).read_text(encoding="utf-8") for name in _WHOLE]
    parts += [_outline((package / name).read_text(encoding="utf-8")) for name in _OUTLINED[verb]]
    if verb == "fit":
        parts.append(_options_of_trainer())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _options_of_trainer() -> str:
    """Signature and docstring of Lightning's Trainer, read without an import; nothing where it is not found."""
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / "pytorch/trainer/trainer.py"
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    return source.partition("\nclass Trainer")[2].partition("def __init__(")[2].partition("super().__init__()")[0]


@functools.cache
def _outline(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Expr(ast.Constant(ast.get_docstring(node)))]
    return _dumped(tree)


def _dumped(node: Any) -> str:
    """As `ast.dump`, which tells more or less of what is empty from one Python to the next."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [f"{name}={_dumped(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
    return f"{type(node).__name__}({', '.join(fields)})"


def recorded(verb: str) -> dict[str, Any] | None:
    """What is recorded of a verb, if it holds for what is installed."""
    record = json.loads(RECORDS.read_text(encoding="utf-8")).get(verb, {})
    return record if record.get("made_from") == made_from(verb) else None


class _Formatter(argparse.HelpFormatter):
    def _format_action_invocation(self, action: Any) -> str:
        return action.invocation


def replayed(prog: str, layout: Sequence[Any]) -> str:
    """The help as argparse lays it out for this terminal."""
    formatter = _Formatter(prog)
    for method, *arguments in layout:
        getattr(formatter, method)(*map(_rows, arguments))
    return formatter.format_help()


def _rows(argument: Any) -> Any:
    """Options in place of their records; a text or a title as it is."""
    return [_option(**row) for row in argument] if isinstance(argument, list) else argument


def _option(invocation: str = "", help: str = "", option_strings: Sequence[str] = (), **usage: Any) -> argparse.Action:
    action: Any = argparse.Action(option_strings, dest="", help=help.replace("%", "%%"), **usage)
    action.invocation = invocation
    return action
