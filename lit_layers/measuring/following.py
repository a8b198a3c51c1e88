"""Checkpoints are measured as they appear in a folder, while whoever writes them goes on.

`lit-layers watch` does it for any folder; `EmergenceCallback(measure="async")` starts this file as a second process on
its own machine (`MeasuringAside`), which is handed the analyses and goes on until what training saved is measured.
"""

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
from lit_layers.files.durable import no_link
from lit_layers.measuring.offline import SeriesResult, analyze_series
from lit_layers.records import Measurement
from lit_layers.report import write_report
from lit_layers.series import StepFolders
from lit_layers.series.checkpoint import Series

logger = logging.getLogger(__name__)
EVERY = 5.0  # seconds between two looks
SETTLED = 10.0  # seconds that the files of a folder must be untouched: only our own appear as a whole
OURS = "step-*"
LOG = "measuring.log"  # in the run's folder: what the second process says
PATIENCE = 30.0  # seconds that a training waits at its end for what is nearly measured


def follow(
    root: Path,
    measure: Callable[[Series], SeriesResult],
    *,
    tokens_per_step: int | None = None,
    kept_in: Path | None = None,
    every: float = EVERY,
    settled: float = SETTLED,
    patience: float | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> SeriesResult | None:
    """Measures the steps in a folder, and those that come, until nothing came for `patience` seconds and no training of
    ours goes on there; None: for ever. Returns the last result. Nothing is written there where `kept_in` names another
    folder for what the audit read.

    What cannot be measured is tried again at every look, until patience ends.

    Raises:
        InputError: what was wrong with the last look.
    """
    seen: dict[str, float] = {}  # what was measured last
    shown: dict[str, float] = {}  # by the look before
    result, wrong, last_change = None, None, time.monotonic()
    while True:
        goes_on = run_lock.is_training(root)  # before the look: what is saved last is seen
        complete, waits = _complete(root, settled)
        is_news, shown = bool(complete) and complete != shown, complete
        if not complete or complete == seen:
            wrong = None  # what could not be measured is gone
        else:
            try:
                steps = _steps(root, complete)
                series = StepFolders(root, steps, tokens_per_step=tokens_per_step, kept_in=kept_in)
                result, seen, wrong = measure(series), complete, None
            except (InputError, FileNotFoundError, NotADirectoryError) as error:  # a trainer may have removed one
                before = str(wrong)
                wrong = error if isinstance(error, InputError) else _told(error, root)
                if str(wrong) != before:
                    logger.warning("%s; it is tried again at each look", wrong)
        if is_news:
            last_change = time.monotonic()
        elif not (goes_on or waits) and patience is not None and time.monotonic() - last_change >= patience:
            if wrong is not None:
                raise wrong
            return result
        wait(every)


def _complete(root: Path, settled: float) -> tuple[dict[str, float], bool]:
    """The folders that nobody is writing, each with the time of its last change, and whether others are left."""
    complete, waits, now = {}, False, time.time()
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.is_dir() and (folder / "config.json").is_file():
            try:
                changed = max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=now)
            except FileNotFoundError:  # a trainer that keeps its last ones alone has just removed it
                waits = True
                continue
            if folder.match(OURS) or now - changed >= settled:
                complete[folder.name] = changed
            else:
                waits = True
    return complete, waits


def _told(error: OSError, root: Path) -> InputError:
    return InputError(f"{error.filename or root}: {(error.strerror or str(error)).lower()}")


def _steps(root: Path, names: dict[str, float]) -> list[int]:
    return [one.step for one in StepFolders(root).listing.checkpoints if one.step is not None and one.name in names]


class MeasuringAside:
    """Starts this file as a process beside a training, and reads what it adds to the record.

    Nothing here waits for it: where it dies or lags, training goes on, and what is not measured is said at the end.

    Raises:
        InputError: analyses that cannot be sent to another process.
    """

    def __init__(self, root: Path, analyses: Sequence[Analysis], **options: Any) -> None:
        self.file, self._names = root / "measurements.jsonl", {each.name for each in analyses}
        self.root, self._saved = root, set[int]()
        self._measured: dict[int, set[str]] = {}
        self._seconds: dict[int, float] = {}  # of the steps that this process measured
        self._offset = 0
        self._note(self._read())  # what was there is no news
        if local := next((each for each in analyses if type(each).__module__ == "__main__"), None):
            raise InputError(
                f"measure: async sends the analyses to a second process, which cannot import {type(local).__name__} of "
                "this script: put it into a module of its own"
            )
        try:
            content = pickle.dumps(list(analyses))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"measure: async sends the analyses to a second process, which cannot be: {error}"
            ) from error
        about = {"root": str(root.resolve()), "path": sys.path, **options}
        root.mkdir(parents=True, exist_ok=True)
        # A file without a name: a pipe holds little, and the process may read it when training has ended.
        with open(root / LOG, "ab", opener=no_link) as log, tempfile.TemporaryFile() as message:
            message.write(json.dumps(about).encode() + b"\n" + content)
            message.seek(0)
            command = [sys.executable, "-P", "-m", "lit_layers.measuring.following"]
            places = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
            quiet: Any = {"stdout": log, "stderr": log, "start_new_session": True}  # Ctrl-C is for training
            quiet["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
            self._process = subprocess.Popen(command, stdin=message, **quiet)

    def saved(self, step: int) -> None:
        """Notes a step that is to be measured."""
        self._saved.add(step)

    def arrived(self) -> list[Measurement]:
        """What was measured since the last call."""
        try:
            measurements = self._read()
        except (InputError, OSError) as error:  # another file in its place: training goes on
            logger.warning("measure: async: no numbers from here on: %s", error)
            self._offset, measurements = sys.maxsize, []
        self._note(measurements)
        for each in measurements:
            if each.step is not None:
                self._seconds[each.step] = self._seconds.get(each.step, 0.0) + each.seconds
        return measurements

    def last(self, patience: float = PATIENCE, *, is_stopped: Callable[[], bool]) -> Iterator[Measurement]:
        """Yields what is measured after the last step of training, until all is, `patience` seconds are over, or
        training `is_stopped`.

        Nothing is waited for where, by the longest of the steps before, that would not be enough, or nobody knows.
        """
        expected = len(self._left()) * max(self._seconds.values(), default=patience + 1)
        if not 0 < expected <= patience:
            return
        logger.warning("measure: async: the last steps are waited for, %.0f s at most", patience)
        deadline = time.monotonic() + patience
        while self._left() and time.monotonic() < deadline and not is_stopped():
            has_ended = self._process.poll() is not None  # before the look: what it wrote last is seen
            yield from self.arrived()
            if has_ended:
                return
            time.sleep(0.1)

    def _read(self) -> list[Measurement]:
        measurements, self._offset = records.read_on(self.file, self._offset)
        return measurements

    def _note(self, measurements: Sequence[Measurement]) -> None:
        for each in measurements:
            if each.step is not None:
                self._measured.setdefault(each.step, set()).add(each.analysis)

    def _left(self) -> list[int]:
        """The saved steps that are not measured yet."""
        return [step for step in self._saved if not self._names <= self._measured.get(step, set())]

    def under_way(self) -> str | None:
        """A sentence of what is not measured yet; None where all is."""
        self.arrived()
        if not (left := self._left()):
            return None
        steps = f"{len(left)} of {len(self._saved)} saved steps"
        if self._process.poll() is not None:
            return f"{steps} are not measured, as the process that did it has ended: see {self.root / LOG}; " + (
                f"`lit-layers analyze {self.root}` measures them"
            )
        return (
            f"{steps} are still being measured by process {self._process.pid}, which then writes the page anew and ends"
        )


def main() -> None:
    """The second process of a training: told by its standard input where to look, and for what."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10)  # training first
    options = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = options.pop("path")
    analyses = pickle.load(sys.stdin.buffer)  # from the process that started this one, through a file without a name
    root, tokens_per_step = Path(options.pop("root")), options.pop("tokens_per_step")

    def measure(series: Series) -> SeriesResult:
        return analyze_series(series, analyses, root=root, beside_training=True, device="cpu", **options)

    with contextlib.suppress(InputError):  # which was said
        follow(root, measure, tokens_per_step=tokens_per_step, every=1.0, patience=0.0)
    if (root / "report.html").is_file() and not _page_has_all(root):
        write_report(root)


def _page_has_all(root: Path) -> bool:
    """Whether the last number was there when `fit` began its page, just before which it closes run.json."""
    try:
        times = [(root / name).stat().st_mtime_ns for name in ("measurements.jsonl", "run.json", "report.html")]
    except FileNotFoundError:
        return False
    return times[0] < times[1] < times[2]


if __name__ == "__main__":
    main()
