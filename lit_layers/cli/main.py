"""Entry point of `lit-layers`.

It first removes the working directory from the module search path, because that folder may hold untrusted modules. Then
it runs the command and prints user errors as one sentence.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    docs/training.md lists all exit codes.
    """
    is_own_process, argv = argv is None, sys.argv[1:] if argv is None else argv
    if is_own_process:
        _isolate_sys_path()
    # Imported only now, so that modules of the working directory cannot replace what these imports load.
    from lit_layers.cli import READER_GONE, TERMINATED
    from lit_layers.cli.command_line import InputError, parse_command, refuse, run_verb
    from lit_layers.cli.process import reader_is_gone, stopping

    with stopping() as stop:
        try:
            command, *rest = parse_command(argv)
            code = run_verb(command, rest) if command else 0
            print(end="", flush=True)  # raises BrokenPipeError if the reader has closed the pipe
        except InputError as error:
            code = refuse(str(error))
        except BrokenPipeError:
            if not reader_is_gone():
                raise
            # Discard what is left in stdout: Python flushes it at exit, which would raise the same error again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = READER_GONE
        except SystemExit:
            if not stop.asked:
                raise
    if stop.asked:
        print("lit-layers: ended by SIGTERM", file=sys.stderr)
    return TERMINATED if stop.asked else code


def run_and_end() -> NoReturn:
    """Run the command line, then end the process with its exit code."""
    code = main()
    mirror = sys.modules.get("lit_layers.report.wandb_mirror")
    if mirror is not None and mirror.abandoned:  # end at once: W&B's exit handler would wait for its server
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _isolate_sys_path() -> None:
    """Keep this process and its child processes from importing modules of the working directory.

    An empty entry of PYTHONPATH means the working directory, so empty entries are removed. For example,
    `PYTHONPATH=$PYTHONPATH:~/code` begins with an empty entry if PYTHONPATH was unset before.
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
        del sys.path[0]  # the working directory, which `python -m` puts first
    run_and_end()
