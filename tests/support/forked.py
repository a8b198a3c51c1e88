"""A function in forked processes that can be killed: all that was imported is there at once."""

import gc
import math
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    everyone = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    children = [_fork(function, {**everyone, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(num_ranks)]
    return _wait(children, kill_after, when, signal_number, only)


def _fork(function: Callable[[], int], environment: Mapping[str, str] | None = None) -> int:
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.setpgid(0, 0)
        gc.freeze()  # else each collection walks, and so copies, all that was imported
        os.environ.update(environment or {})
        os.environ.pop("WANDB_SERVICE", None)  # W&B's own process of this one would survive the kill, holding the run
        null = os.open(os.environ.get("FORKED_OUTPUT", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait(
    children: list[int], kill_after: float, when: Callable[[], bool], signal_number: int, only: int | None
) -> list[int]:
    deadline, sent, codes = time.monotonic() + kill_after, False, {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if not sent and (time.monotonic() > deadline or when()):
            for child in children if only is None else [children[only]]:
                if child not in codes:
                    os.kill(child, signal_number)
            sent = True
        time.sleep(0.002)
    return [codes[child] for child in children]
