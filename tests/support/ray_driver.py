"""A process that hands light work out over a Ray cluster and writes what is done: for tests that kill it.

python -m tests.support.ray_driver FILE ADDRESS TOTAL
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


def main(out: Path, address: str, total: int) -> None:
    """Does what is not done, and is the only one who writes."""
    lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    out.write_bytes(b"".join(whole))
    done = {json.loads(line)[0] for line in whole}
    left = [Job(str(number // 4), number) for number in range(total) if number not in done]
    os.environ["RAY_ADDRESS"] = address
    with RayWorkers(Slow(), threads=1, gpu="cpu") as workers, open(out, "ab", buffering=0) as file:
        for task, result in hand_out(left, workers):
            if result is not None:  # given up: the next call tries it again
                file.write(json.dumps([task, result]).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
