"""Dispatch of `lit-layers` commands: find the command, run it, and print user errors as one sentence."""

import importlib
import logging
import sys
from importlib.metadata import version

from lit_layers.cli import INTERRUPTED, REFUSED
from lit_layers.cli.process import one_line, take_verbose
from lit_layers.errors import InputError, did_you_mean, is_full

COMMANDS = {  # name: help text; the module of this name in `verbs` defines the command
    "analyze": "measure every layer of a trained model, whole or block by block",
    "audit": "check whether the checkpoints of a series are what their names say",
    "correlate": "compare metrics with scores, over models or over layers",
    "emerge": "find when each metric of a run emerges, in which order, and with which uncertainty",
    "fit": "train from a recipe, and measure every layer during training",
    "intervene": "run the blocks in other orders, and measure what breaks",
    "mteb": "score every layer on the tasks of MTEB, from one pass over their texts",
    "prepare": "turn a text source into token shards",
    "report": "draw a run, or several side by side, on one HTML page",
    "reproduce": "measure a published figure again, and compare with the printed numbers",
    "select": "find the earliest sufficient layer for a task, and cut the model there",
}
RESUMABLE = ("analyze", "intervene", "mteb", "prepare")  # commands that continue their work if they are run again


def parse_command(argv: list[str]) -> list[str]:
    """Return the command name followed by its arguments.

    `--help` and `--version` are printed here; the command name is then the empty string.
    """
    argv = take_verbose(argv)
    command, rest = (argv or ["--help"])[0], argv[1:]
    if command in ("-h", "--help", "-V", "--version"):
        print(f"lit-layers {version('lit_layers')}" if command in ("-V", "--version") else _help())
        return [""]
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS, f"expected one of {', '.join(COMMANDS)}", most=1)
        raise InputError(f"unknown command {command!r}; {hint}")
    return [command, *rest]


def run_verb(command: str, rest: list[str]) -> int:
    """Run one command and return its exit code. An error that the user can fix is printed in one line."""
    try:
        verb = getattr(importlib.import_module(f"lit_layers.cli.verbs.{command}"), command)
        # `options` is imported here: it takes 0.25 s to load, and `lit-layers --help` does not need it.
        from lit_layers.cli import options

        return verb(**options.Recipe(verb, rest).arguments())
    except (InputError, OSError) as error:
        full = is_full(error)
        logging.getLogger("lit_layers.cli").debug("refused", exc_info=True)
        if isinstance(error, InputError):
            return refuse(str(error), command)
        if error.filename is None and not full:  # an error without a file is not the user's fault: show the traceback
            raise
        where = " ".join(filter(None, ["cannot write" if full else "", str(error.filename or "")[:200]]))
        return refuse(f"{where}: {(error.strerror or str(error)).lower()}", command)
    except KeyboardInterrupt:
        then = ": run the same command again to go on" if command in RESUMABLE else ""
        print(f"lit-layers {command}: interrupted{then}", file=sys.stderr)
        return INTERRUPTED


def refuse(sentence: str, command: str | None = None) -> int:
    """Print why a command is refused, and return the exit code for wrong input."""
    prog = f"lit-layers {command}" if command else "lit-layers"
    print(f"{prog}: error: {one_line(sentence)}", file=sys.stderr)
    return REFUSED


def _help() -> str:
    commands = "\n".join(f"  {name:<9}  {what}" for name, what in COMMANDS.items())
    return f"""usage: lit-layers COMMAND [options]

How structure emerges, layer by layer, while a transformer trains.

{commands}

To begin: lit-layers fit quickstart/gpt2, and then lit-layers report checkpoints/quickstart.
lit-layers COMMAND --help shows its options; all have -v (verbose).
With --code PACKAGE, recipes of fit and analyze may name classes of your own package or folder."""
