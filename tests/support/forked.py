"""Run functions in forked processes that can be killed and that share what this process has imported.

Importing torch, Lightning, transformers and W&B takes longer than a tiny run. Each child reports which modules it
imported, and this process imports them for the next child.
"""

import contextlib
import gc
import importlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch


def run_forked(
    function: Callable[[], int],
    *,
    kill_after: float = math.inf,
    when: Callable[[], bool] = lambda: False,
    signal_number: int = signal.SIGKILL,
) -> int:
    """Run `function` in a child and return its exit code, or minus the number of the signal that ended it.

    The child gets `signal_number` after `kill_after` seconds, or as soon as `when()` is true.
    """
    (code,) = _wait([_fork(function)], kill_after, when, signal_number, only=None)
    return code


def run_ranks(
    function: Callable[[], int],
    num_ranks: int = 2,
    *,
    kill_after: float = math.inf,
    when: Callable[[], bool] = lambda: False,
    signal_number: int = signal.SIGKILL,
    only: int | None = None,
) -> list[int]:
    """Run `function` in one child per rank, with the variables of torchrun, and return their exit codes.

    The signal is sent as in `run_forked`, to all ranks or to the rank `only`.
    """
    with rendezvous() as address:
        shared = {
            **address,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "test",
        }
        children = [_fork(function, {**shared, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(num_ranks)]
        return _wait(children, kill_after, when, signal_number, only)


@contextlib.contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """Yield MASTER_ADDR and MASTER_PORT, and reserve the port until the end of the block.

    The port is bound here without listening, so that rank 0 can bind it with SO_REUSEADDR, as torch does.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1])}


def run_command(
    arguments: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    when: Callable[[], bool] = lambda: False,
    signal_number: int = signal.SIGINT,
) -> "subprocess.CompletedProcess[str]":
    """Run `lit-layers ARGUMENTS` in a child and return its exit code and output.

    The child gets `signal_number` as soon as `when()` is true.
    """
    words = [str(argument) for argument in arguments]

    def command() -> int:
        from lit_layers.cli.main import main

        if folder is not None:
            os.chdir(folder)
        return main(words)

    return _run_captured(command, words, environment, when, signal_number)


def _run_captured(
    function: Callable[[], int],
    words: list[str],
    environment: Mapping[str, str] | None = None,
    when: Callable[[], bool] = lambda: False,
    signal_number: int = signal.SIGINT,
) -> "subprocess.CompletedProcess[str]":
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = _fork(function, environment, (out.fileno(), err.fileno()))
        (code,) = _wait([child], math.inf, when, signal_number, only=None)
        output = []
        for file in (out, err):
            file.seek(0)
            output.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *output)


@dataclass(frozen=True)
class _Child:
    pid: int
    imported: IO[bytes]  # names of the modules that the child imported


def _fork(
    function: Callable[[], int], environment: Mapping[str, str] | None = None, output: tuple[int, int] | None = None
) -> _Child:
    imported = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_import_modules`
    already = set(sys.modules)
    child = os.fork()
    if child:
        return _Child(child, imported)
    code = 99
    try:
        os.setpgid(0, 0)
        gc.freeze()  # else each collection visits, and so copies, the memory of all imported modules
        os.environ.update(environment or {})
        os.environ.pop("WANDB_SERVICE", None)  # the parent's W&B service would survive and keep the run open
        for number, (name, file) in enumerate(zip(("stdout", "stderr"), output or (), strict=False), 1):
            os.dup2(file, number)
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
        # A fork does not copy torch's thread pool: the first thread that needs one creates it. If two threads need it
        # at the same time, as in a backward pass, one finds no pool and ends the process.
        torch.set_num_threads(torch.get_num_threads())
        code = function()
        imported.write("\n".join(name for name in sys.modules if name not in already).encode())
        imported.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        if output:
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(
    children: list[_Child], kill_after: float, when: Callable[[], bool], signal_number: int, only: int | None
) -> list[int]:
    deadline, sent, codes = time.monotonic() + kill_after, False, {}
    while len(codes) < len(children):
        for child in children:
            if child.pid not in codes:
                done, status = os.waitpid(child.pid, os.WNOHANG)
                if done:
                    codes[child.pid] = os.waitstatus_to_exitcode(status)
                    _import_modules(child.imported)
        if not sent and (time.monotonic() > deadline or when()):
            for child in children if only is None else [children[only]]:
                if child.pid not in codes:
                    os.kill(child.pid, signal_number)
            sent = True
        time.sleep(0.002)
    return [codes[child.pid] for child in children]


def _import_modules(file: IO[bytes]) -> None:
    """Import the modules that a child imported, except modules that cannot be imported by name."""
    with file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file.seek(0)
        for name in file.read().decode().split():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
