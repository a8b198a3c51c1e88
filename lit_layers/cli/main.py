"""The door of `lit-layers`: leaves the working directory, where a stranger's modules may lie, and runs a command,
whose mistakes it turns into one sentence.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; docs/training.md has them all."""
    is_own_process, argv = argv is None, sys.argv[1:] if argv is None else argv
    if is_own_process:
        _isolate_sys_path()
    # These load modules of Python, for which none of that folder may stand in.
    from lit_layers.cli import READER_GONE, TERMINATED
    from lit_layers.cli.command_line import InputError, parse_command, refuse, run_verb
    from lit_layers.cli.process import reader_is_gone, stopping

    with stopping() as stop:
        try:
            command, *rest = parse_command(argv)
            code = run_verb(command, rest) if command else 0
            print(end="", flush=True)  # a reader that is gone is noticed here at the latest
        except InputError as error:
            code = refuse(str(error))
        except BrokenPipeError:
            if not reader_is_gone():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
            code = READER_GONE
        except SystemExit:
            if not stop.asked:
                raise
    if stop.asked:
        print("lit-layers: ended by SIGTERM", file=sys.stderr)
    return TERMINATED if stop.asked else code


def run_and_end() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    code = main()
    mirror = sys.modules.get("lit_layers.report.wandb_mirror")
    if mirror is not None and mirror.abandoned:  # W&B would wait for its server as Python ends
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _isolate_sys_path() -> None:
    """Neither this process nor a Python that it starts looks for modules in the working directory: an empty part of
    PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:~/code` begins with where the variable was not set, is that folder.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [part for part in parts if part]
    if len(named) < len(parts):
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
        here, searched = os.path.abspath(""), {*map(os.path.abspath, named), str(Path(__file__).parents[2])}
        sys.path[:] = [folder for folder in sys.path if folder != here or folder in searched]


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # where `python -m` puts the working directory
    run_and_end()
