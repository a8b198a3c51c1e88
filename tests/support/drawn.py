"""Pictures drawn by one kept process: to start vl-convert's engine costs half a second a picture."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from lit_layers.figures import vega

in_its_own_process = vega._drawing  # what users have

_LOOP = """
import contextlib, io, json, runpy, sys
main, lines = runpy.run_path(sys.argv[1])["main"], sys.stdin
for line in lines:
    suffixes, task = json.loads(line)
    sys.stdin = io.StringIO(task)
    with contextlib.redirect_stdout(io.StringIO()) as drawn:
        main(suffixes)
    print(json.dumps(drawn.getvalue()), flush=True)
"""


@contextlib.contextmanager
def by_one_process() -> Iterator[None]:
    """Figures are drawn by `drawing.py` in one process, which starts with the first of them.

    A forked process, what the kept one fails at, and Vega's script go the users' way.
    """
    pid, lock, kept = os.getpid(), threading.Lock(), []

    def ask(*suffixes: str, task: str = "") -> str:
        if suffixes and os.getpid() == pid:
            with lock:
                kept[:] = kept or [_start()]
                print(json.dumps([suffixes, task]), file=kept[0].stdin, flush=True)
                if answer := kept[0].stdout.readline():
                    return json.loads(answer)
                _end(kept.pop())
        return in_its_own_process(*suffixes, task=task)

    vega._drawing = ask
    try:
        yield
    finally:
        vega._drawing = in_its_own_process
        for process in kept:
            _end(process)


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", _LOOP, str(Path(vega.__file__).with_name("drawing.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, encoding="utf-8", start_new_session=True, **pipes)


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()
