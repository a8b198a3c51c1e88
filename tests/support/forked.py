"""A function in a forked process that can be killed: all that was imported is there at once."""

import gc
import math
import os
import signal
import time
import traceback
from collections.abc import Callable


def run_forked(
    function: Callable[[], int],
    *,
    kill_after: float = math.inf,
    when: Callable[[], bool] = lambda: False,
    signal_number: int = signal.SIGKILL,
) -> int:
    """Returns its exit code, or minus the signal that ended it: one sent after so many seconds, or when it is time."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setpgid(0, 0)
            gc.freeze()  # else each collection walks, and so copies, all that was imported
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline, sent = time.monotonic() + kill_after, False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if not sent and (time.monotonic() > deadline or when()):
            os.kill(child, signal_number)
            sent = True
        time.sleep(0.002)
