"""The commands of `lit-layers`: finds one, runs it, turns the user's mistakes into one sentence."""

import importlib
import logging
import sys
from importlib.metadata import version

from lit_layers.cli import INTERRUPTED, REFUSED
from lit_layers.cli.process import one_line, take_verbose
from lit_layers.errors import InputError, did_you_mean, is_full

COMMANDS = {  # each a file of `verbs`
    "analyze": "measure every layer of a trained model, whole or block by block",
    "audit": "check whether a checkpoint series is what it says",
    "correlate": "compare metrics with scores, over models or over layers",
    "emerge": "find when each number of a run changes, in which order, and how sure that is",
    "fit": "train from a recipe and measure every layer on the way",
    "intervene": "run the blocks in other orders, and see what breaks",
    "mteb": "score every layer on the tasks of MTEB, from one pass over their texts",
    "prepare": "turn a text source into token shards",
    "report": "draw a run, or several side by side, on one HTML page",
    "reproduce": "measure a published figure again, beside its printed numbers",
    "select": "choose the layer that is enough for a task, and cut the model there",
}
RESUMABLE = ("analyze", "intervene", "mteb", "prepare")  # where they were, when they are run again


def parse_command(argv: list[str]) -> list[str]:
    """Return the command and its words; for help and version, which are printed, an empty one."""
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
    """Run one command inside of what is under way, print its mistakes, and return its exit code."""
    try:
        verb = getattr(importlib.import_module(f"lit_layers.cli.verbs.{command}"), command)
        # its parser takes a quarter of a second to load, which `lit-layers --help` does without
        from lit_layers.cli import options

        return verb(**options.Recipe(verb, rest).arguments())
    except (InputError, OSError) as error:
        full = is_full(error)
        logging.getLogger("lit_layers.cli").debug("refused", exc_info=True)
        if isinstance(error, InputError):
            return refuse(str(error), command)
        if error.filename is None and not full:  # not about a file that was named
            raise
        where = " ".join(filter(None, ["cannot write" if full else "", str(error.filename or "")[:200]]))
        return refuse(f"{where}: {(error.strerror or str(error)).lower()}", command)
    except KeyboardInterrupt:
        then = ": run the same command again to go on" if command in RESUMABLE else ""
        print(f"lit-layers {command}: interrupted{then}", file=sys.stderr)
        return INTERRUPTED


def refuse(sentence: str, command: str | None = None) -> int:
    """Print why a command is refused, and return its exit code."""
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
fit and analyze: --code PACKAGE lets recipes name the classes of your own package or folder."""
