"""A function in forked processes that can be killed: what was imported once is there at once.

Importing torch, Lightning, transformers and W&B takes a process longer than a tiny run. Each child tells which modules
it had to import, and the next one finds them in this process.
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
    """Returns its exit code, or minus the signal that ended it: one sent after so many seconds, or when it is time."""
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
    """The same for processes that find each other as those of torchrun do; the signal is for all, or `only` for one."""
    with rendezvous() as place:
        everyone = {
            **place,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "test",
        }
        children = [_fork(function, {**everyone, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(num_ranks)]
        return _wait(children, kill_after, when, signal_number, only)


@contextlib.contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """Where ranks find each other, by name of the variable: a port that Linux gives to nobody else meanwhile.

    It is bound here, and not listened to, so that the first rank may bind it, as torch does, with SO_REUSEADDR.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1])}


def run_command(
    arguments: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    when: Callable[[], bool] = lambda: False,
    signal_number: int = signal.SIGINT,
) -> "subprocess.CompletedProcess[str]":
    """`lit-layers ARGUMENTS` in a process of its own, what it prints as text; a signal is sent when it is time."""
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
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *said)


@dataclass(frozen=True)
class _Child:
    pid: int
    imported: IO[bytes]  # the names of modules


def _fork(
    function: Callable[[], int], environment: Mapping[str, str] | None = None, output: tuple[int, int] | None = None
) -> _Child:
    imported = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_import`
    there = set(sys.modules)
    child = os.fork()
    if child:
        return _Child(child, imported)
    code = 99
    try:
        os.setpgid(0, 0)
        gc.freeze()  # else each collection walks, and so copies, all that was imported
        os.environ.update(environment or {})
        os.environ.pop("WANDB_SERVICE", None)  # W&B's own process of this one would survive the kill, holding the run
        for number, (name, file) in enumerate(zip(("stdout", "stderr"), output or (), strict=False), 1):
            os.dup2(file, number)
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
        # A fork leaves torch's pool of threads behind, which the first thread that asks for it makes anew. Where two
        # ask at once, as those of a backward pass, one of them finds none and ends the process.
        torch.set_num_threads(torch.get_num_threads())
        code = function()
        imported.write("\n".join(name for name in sys.modules if name not in there).encode())
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
    """Imports what a child had to; what cannot be imported by its name alone is left to each child."""
    with file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file.seek(0)
        for name in file.read().decode().split():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
