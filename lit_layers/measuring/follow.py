"""Measure checkpoints as they appear in a folder; for `measure: async`, do so in a process beside the training."""

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.measuring.offline import analyze_series
from lit_layers.records import Measurement
from lit_layers.report import write_report
from lit_layers.series import StepFolders

logger = logging.getLogger(__name__)
LOG = "measuring.log"  # in the run's folder: the output of the second process
PATIENCE = 30.0  # seconds that a training waits at its end for its last steps
EVERY = 3.0  # seconds between two looks
SETTLED = 10.0  # seconds that the files of a checkpoint must rest: only our own step-* folders appear as a whole


def follow(folder: Path, measure: Callable[[list[int]], object], patience: float | None = None) -> None:
    """Measure the steps in a folder at once, and again whenever a checkpoint came.

    It ends once nothing came for `patience` seconds (None: never), or when a `fit --measure async` that it saw there
    has ended. What cannot be measured is tried again at each look.

    Raises:
        InputError: what was wrong at the last look.
    """
    listed, measured, error, since, saw_training = {}, {}, None, time.monotonic(), False
    while True:
        is_training = run_lock.is_training(folder)  # before the look: the step that is saved last is seen
        saw_training |= is_training
        before = listed
        try:
            listed = {config.parent.name: _last_change(config.parent) for config in folder.glob("*/config.json")}
            whole = {name: changed for name, changed in listed.items() if changed is not None}
            if whole and whole != measured:
                measure([one.step or 0 for one in StepFolders(folder).listing.checkpoints if one.name in whole])
                measured = whole
            error = None
        except (InputError, FileNotFoundError, NotADirectoryError) as wrong:  # the training may have removed one
            if str(wrong) != str(error):
                logger.warning("%s; it is tried again at each look", wrong)
            error = wrong
        since = since if listed == before else time.monotonic()
        is_over = saw_training or (patience is not None and time.monotonic() - since >= patience)
        if listed == before and None not in listed.values() and not is_training and is_over:
            if error is not None:
                raise error
            return
        time.sleep(EVERY)


def _last_change(checkpoint: Path) -> float | None:
    """Return when a checkpoint last changed; None while it may still be written."""
    times = [path.stat().st_mtime for path in checkpoint.rglob("*") if path.is_file()]
    last = max(times, default=time.time())
    return last if checkpoint.match("step-*") or time.time() - last >= SETTLED else None


class MeasuringAside:
    """Starts this file as a process beside a training, and reads the numbers that it adds to the record.

    Raises:
        InputError: analyses that cannot be sent to another process.
    """

    def __init__(self, root: Path, analyses: Sequence[Analysis], **options: Any) -> None:
        self.root, self._names = root, {each.name for each in analyses}
        self._saved, self._measured = set[int](), dict[int, set[str]]()
        self._offset = 0
        self.arrived()  # what was there is no news
        if local := next((each for each in analyses if type(each).__module__ == "__main__"), None):
            why = f"cannot import {type(local).__name__} of this script: put it into a module of its own"
            raise InputError(f"measure: async sends the analyses to a second process, which {why}")
        try:
            content = pickle.dumps(list(analyses))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(f"measure: async cannot send the analyses to a second process: {error}") from error
        about = {"root": str(root.resolve()), "path": sys.path, **options}
        root.mkdir(parents=True, exist_ok=True)
        # A file without a name: a pipe holds little, and the process may read it when training has ended.
        with open(root / LOG, "ab") as log, tempfile.TemporaryFile() as message:
            message.write(json.dumps(about).encode() + b"\n" + content)
            message.seek(0)
            command = [sys.executable, "-P", "-m", "lit_layers.measuring.follow"]
            folders = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
            quiet: Any = {"stdout": log, "stderr": log, "start_new_session": True}  # Ctrl-C is for training
            quiet["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
            self._process = subprocess.Popen(command, stdin=message, **quiet)

    def saved(self, step: int) -> None:
        """Notes a step that is to be measured."""
        self._saved.add(step)

    def arrived(self) -> list[Measurement]:
        """Return what was measured since the last call."""
        measurements, self._offset = records.read_on(self.root / "measurements.jsonl", self._offset)
        for each in measurements:
            if each.step is not None:
                self._measured.setdefault(each.step, set()).add(each.analysis)
        return measurements

    def last(self, *, is_stopped: Callable[[], bool]) -> Iterator[Measurement]:
        """Yield what is measured after the last step of training, until all is, training `is_stopped`, or for 30 s."""
        deadline = time.monotonic() + PATIENCE
        while self._pending() and time.monotonic() < deadline and not is_stopped():
            has_ended = self._process.poll() is not None  # before the look: what it wrote last is seen
            yield from self.arrived()
            if has_ended:
                return
            time.sleep(0.1)

    def _pending(self) -> list[int]:
        """Return the saved steps that are not measured yet."""
        return [step for step in self._saved if not self._names <= self._measured.get(step, set())]

    def under_way(self) -> str | None:
        """Return a sentence about the steps that are not measured yet; None if all are."""
        self.arrived()
        if not (pending := self._pending()):
            return None
        steps = f"{len(pending)} of {len(self._saved)} saved steps"
        if self._process.poll() is not None:
            return f"{steps} are not measured, as the process that did it has ended: see {self.root / LOG}; " + (
                f"`lit-layers analyze {self.root}` measures them"
            )
        return f"{steps} are still being measured by process {self._process.pid}, which then writes the page again"


def main() -> None:
    """The second process: its standard input says where to look, and for what."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10)  # training first
    options = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = options.pop("path")
    analyses = pickle.load(sys.stdin.buffer)  # from the process that started this one, through a file without a name
    root, tokens_per_step = Path(options.pop("root")), options.pop("tokens_per_step")

    def measure(steps: list[int]) -> None:
        series = StepFolders(root, steps, tokens_per_step=tokens_per_step)
        analyze_series(series, analyses, root=root, beside_training=True, device="cpu", **options)

    with contextlib.suppress(InputError):  # which was logged
        follow(root, measure, patience=0.0)
    if (root / "report.html").is_file():  # training drew it before the last numbers came
        write_report(root)


if __name__ == "__main__":
    main()
