"""A process that hands work out over a Ray cluster and writes what is done: for tests that kill it.

python -m tests.support.ray_driver square ADDRESS FILE TOTAL    light work
python -m tests.support.ray_driver measure ADDRESS RUN ROOT     the two groups of analyses of a run
"""

import json
import os
import sys
import time
from pathlib import Path

from lit_layers.measuring.ray_workers import Job, RayWorkers, hand_out


class Slow:
    """Work that takes a moment."""

    def __call__(self, task: int, following: int | None) -> int:
        time.sleep(0.2)
        return task * task


def measure(run: Path, root: Path) -> None:
    """Until no checkpoint fails: what lost too many workers is tried again."""
    from lit_layers.measuring.offline import analyze_series
    from lit_layers.series import StepFolders
    from tests.support.measured_series import two_groups

    while failures := analyze_series(StepFolders(run), two_groups(), root=root, engine="ray").failures:
        if not all("workers were lost" in failure for failure in failures):
            raise SystemExit(failures[0])


def square(out: Path, total: int) -> None:
    """Does what is not done, and is the only one who writes."""
    lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    out.write_bytes(b"".join(whole))
    done = {json.loads(line)[0] for line in whole}
    left = [Job(str(number // 4), number) for number in range(total) if number not in done]
    with RayWorkers(Slow(), threads=1, gpu="cpu") as workers, open(out, "ab", buffering=0) as file:
        for task, result in hand_out(left, workers):
            if result is not None:  # given up: the next call tries it again
                file.write(json.dumps([task, result]).encode() + b"\n")


if __name__ == "__main__":
    what, os.environ["RAY_ADDRESS"], place, last = sys.argv[1:]
    if what == "measure":
        measure(Path(place), Path(last))
    else:
        square(Path(place), int(last))
