"""Measure checkpoints as they appear in a folder, beside the training that writes them."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.series import StepFolders

logger = logging.getLogger(__name__)
EVERY = 3.0  # seconds between two looks
SETTLED = 10.0  # seconds that the files of a checkpoint must rest: only our own step-* folders appear as a whole


def follow(folder: Path, measure: Callable[[list[int]], object], patience: float | None = None) -> None:
    """Measure the steps in a folder at once, and again whenever a checkpoint came.

    It ends once nothing came for `patience` seconds (None: never), or when a training that it saw there has ended.
    What cannot be measured is tried again at each look.

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
