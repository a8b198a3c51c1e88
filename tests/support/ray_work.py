"""Work of workers of Ray that computes nothing: they start by what this file imports, without torch."""

import os
import time
from pathlib import Path


class Meeting:
    """Work of a large job that ends when all small ones have begun, and of these, which end when it has begun: whoever
    waits in vain, for five minutes on a busy machine, fails.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    def __call__(self, task: str, following: str | None) -> bool:
        (self.folder / task).touch()
        until = time.monotonic() + 300
        awaited = [f"small{n}" for n in range(self.number)] if task == "large" else ["large"]
        while not all((self.folder / name).exists() for name in awaited) and time.monotonic() < until:
            time.sleep(0.05)
        return time.monotonic() < until


class OnGpu:
    """Work that ends when both GPUs have some, and says which one it had, in which process, and when: whoever waits in
    vain, for five minutes on a busy machine, fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, task: str, following: str | None) -> tuple[str, int, float, float]:
        import ray  # as a worker: who collects the tests needs none

        (gpu,), began = ray.get_gpu_ids(), time.monotonic()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == str(gpu)
        (self.folder / str(gpu)).touch()
        while len([*self.folder.iterdir()]) < 2:
            assert time.monotonic() < began + 300, "the other GPU has no work"
            time.sleep(0.05)
        time.sleep(0.2)
        return str(gpu), os.getpid(), began, time.monotonic()
