"""The door of `lit-layers`: leaves the working directory, where a stranger's modules may lie, and runs a command."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; docs/training.md has them all."""
    is_own_process, argv = argv is None, sys.argv[1:] if argv is None else argv
    if is_own_process:
        _leave_working_directory()
    from lit_layers.cli import command_line  # it loads modules of Python, for which none of that folder may stand in

    return command_line.run(argv, is_own_process=is_own_process)


def run_and_end() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    try:
        code = main()
    except SystemExit as end:  # of a parser, after its help
        if end.code:
            raise
        code = 0
    from lit_layers.cli import process

    process.end_process(code)


def _leave_working_directory() -> None:
    """Neither this process nor a Python that it starts looks for modules in the working directory: an empty part of
    PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:~/code` begins with where the variable was not set, is that folder.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [part for part in given if part]
    if len(named) < len(given):
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
        here, searched = os.path.abspath(""), {*map(os.path.abspath, named), str(Path(__file__).parents[2])}
        sys.path[:] = [folder for folder in sys.path if folder != here or folder in searched]


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # where `python -m` puts the working directory
    run_and_end()
