"""A process beside a training that measures what the training saves."""

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.files.durable import no_link
from lit_layers.records import Measurement

logger = logging.getLogger(__name__)
LOG = "measuring.log"  # in the run's folder: what that process says


class MeasuringAside:
    """Starts the process (`lit_layers.measuring.following`) and reads what it adds to the record.

    Nothing here waits for it: where it dies or lags, training goes on, and what is not measured is said at the end.

    Raises:
        InputError: analyses that cannot be sent to another process.
    """

    def __init__(self, root: Path, analyses: Sequence[Analysis], **options: Any) -> None:
        self.file, self._names = root / "measurements.jsonl", {each.name for each in analyses}
        self.root, self._saved = root, set[int]()
        self._measured: dict[int, set[str]] = {}
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
        return measurements

    def _read(self) -> list[Measurement]:
        measurements, self._offset = records.read_on(self.file, self._offset)
        return measurements

    def _note(self, measurements: Sequence[Measurement]) -> None:
        for each in measurements:
            if each.step is not None:
                self._measured.setdefault(each.step, set()).add(each.analysis)

    def under_way(self) -> str | None:
        """A sentence of what is not measured yet; None where all is."""
        left = sorted(step for step in self._saved if not self._names <= self._measured.get(step, set()))
        if not left:
            return None
        steps = f"{len(left)} of {len(self._saved)} saved steps"
        if self._process.poll() is not None:
            return f"{steps} are not measured, as the process that did it has ended: see {self.root / LOG}; " + (
                f"`lit-layers analyze {self.root}` measures them"
            )
        return (
            f"{steps} are still being measured by process {self._process.pid}, which then writes the page anew and ends"
        )
