"""A series over workers: what two of them save here, and what more would, by simulation from measured times.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py          # a machine with two idle cores: about ten minutes

A round measures the same 24 small checkpoints three times: in one process, and over one and two workers of Ray, which
start anew each time. Wall time, as workers are processes of their own: nothing else may run. The numbers must be equal.

The simulation hands out tasks as `--engine ray` does (`hand_out` itself, with workers that only let a clock go on). A
task takes what the record says, its worker what it needed beyond that, the process that hands out the CPU seconds that
it used for each, one task after the other, and a worker its start. 154 checkpoints of ten models, the largest with a
hundred times the work of the smallest, in three groups of analyses. "Dealt" are the same without an engine: every n-th
checkpoint to the n-th process, as `--shard i/n` does.
"""

import argparse
import heapq
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rounds import Row, add_options, finish

sys.path.insert(0, str(Path(__file__).parents[1]))  # the run is the tests' one

from lit_layers import records
from lit_layers.analyses import Coupling, Trajectory
from lit_layers.measuring.offline import analyze_series
from lit_layers.measuring.ray_workers import Event, Job, hand_out
from lit_layers.series import StepFolders
from tests.support.measured_series import trained
from tests.support.random_text import RandomText

MODELS, STEPS, GROUPS, LARGEST = 10, 154, 3, 100.0


class Measured(NamedTuple):
    """One pass over the series: seconds until the first task, of all, of the analyses, and of this process's CPU."""

    start: float
    wall: float
    tasks: list[float]
    cpu: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=24, help="checkpoints")
    parser.add_argument("--batches", type=int, default=600, help="of texts of an analysis: how long a task takes")
    options = parser.parse_args()
    ways: dict[str, list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder) / "run", steps=options.steps - 1, every=1)
        for number in range(options.rounds):
            found = {}
            for way, engine, workers in (("process", "process", 1), ("one", "ray", 1), ("two", "ray", 2)):
                root = Path(folder) / f"{way}{number}" / "run"
                ways[way].append(measured(run, root, options.batches, engine, workers))
                lines = [replace(each, seconds=0.0) for each in records.read(root / "measurements.jsonl")]
                found[way] = sorted(lines, key=lambda each: (each.step or 0, each.analysis))
            if not found["process"] == found["one"] == found["two"]:
                raise SystemExit("the three ways do not give the same numbers")
    alone, one, two = (ways[way] for way in ("process", "one", "two"))
    rows = [
        Row("one process", [each.wall for each in alone], unit=" s"),
        Row("one worker: over one process", [b.wall / a.wall for a, b in zip(alone, one, strict=True)]),
        Row("two workers: over one process", [b.wall / a.wall for a, b in zip(alone, two, strict=True)]),
        Row("the same, from the first task on", [_rest(b) / _rest(a) for a, b in zip(alone, two, strict=True)]),
        Row("until the first task, two workers", [each.start for each in two], unit=" s"),
    ]
    times = Times.of(one)
    for number in (8, 64, 512):
        efficiency, dealt = simulated(times, number)
        others = {"every n-th dealt": f"{dealt:.3f}", "tasks": f"{GROUPS * MODELS * STEPS:,}"}
        what = f"simulated, {number} workers: time that is not idle"
        rows.append(Row(what, [efficiency] * options.rounds, others=others))
    return finish("scaling", rows, options)


def measured(run: Path, root: Path, batches: int, engine: Any, workers: int) -> Measured:
    text, other = RandomText(batches), RandomText(batches // 2)
    analyses = [Trajectory(batches=text), Coupling(batches=RandomText(), k=(2,)), Trajectory(batches=other, name="b")]
    first: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()

    def tell(done: int, total: int, what: str) -> None:
        if ": " in what and not first:
            first.append(time.perf_counter() - began)

    with Cluster(engine, workers):
        result = analyze_series(
            StepFolders(run), analyses, root=root, engine=engine, device="cpu", progress=tell, allow_suspect=True
        )
    assert not result.failures, result.failures
    tasks: dict[tuple[Any, str], float] = defaultdict(float)
    for each in records.read(root / "measurements.jsonl"):
        tasks[each.step, each.analysis] += each.seconds
    start = first[0] if first else 0.0
    return Measured(start, time.perf_counter() - began, [*tasks.values()], time.process_time() - cpu)


class Cluster:
    """A cluster of this machine alone with so many workers, for a while."""

    def __init__(self, engine: str, workers: int) -> None:
        self.ray: Any = None
        if engine == "ray":
            import ray

            self.ray, self.workers = ray, workers

    def __enter__(self) -> None:
        if self.ray is not None:
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            self.ray.init(num_cpus=self.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def __exit__(self, *_: object) -> None:
        if self.ray is not None:
            self.ray.shutdown()


def _rest(each: Measured) -> float:
    return each.wall - each.start


@dataclass(frozen=True)
class Times:
    """Seconds: of a worker's start, of the tasks, of a worker beyond each, of the process that hands out for each."""

    start: float
    tasks: list[float]
    beyond: float
    handing: float

    @classmethod
    def of(cls, passes: list[Measured]) -> "Times":
        tasks = [statistics.median(times) for times in zip(*(each.tasks for each in passes), strict=True)]
        number = len(tasks)
        start = statistics.median(each.start for each in passes)
        beyond = statistics.median((_rest(each) - sum(each.tasks)) / number for each in passes)
        return cls(start, tasks, max(beyond, 0.0), statistics.median(each.cpu / number for each in passes))


class Clock:
    """Workers that do nothing but let time go on."""

    def __init__(self, times: Times) -> None:
        self.times, self.now, self.number = times, 0.0, 0
        self.ends: list[tuple[float, int]] = []

    def start(self, number: int) -> None:
        for _ in range(number):
            self.number += 1
            heapq.heappush(self.ends, (self.now + self.times.start, self.number))

    def send(self, worker: int, task: float, following: float | None) -> None:
        self.now += self.times.handing
        heapq.heappush(self.ends, (self.now + self.times.beyond + task, worker))

    def next_event(self) -> Event:
        end, worker = heapq.heappop(self.ends)
        self.now = max(self.now, end)
        return Event(worker)


class Few(Clock):
    """The same where the cluster has room for some: others wait, as they do in Ray."""

    def __init__(self, times: Times, room: int) -> None:
        super().__init__(times)
        self.room = room

    def start(self, number: int) -> None:
        super().start(min(number, self.room - self.number))


def simulated(times: Times, workers: int) -> tuple[float, float]:
    """The share of all workers' time in which they measure: with the engine, and dealt beforehand."""
    jobs = []
    for model in range(MODELS):
        scale = LARGEST ** (model / (MODELS - 1))
        for step in range(STEPS):
            for part in range(GROUPS):
                seconds = scale * times.tasks[(GROUPS * step + part) % len(times.tasks)]
                jobs.append(Job(f"{model}/{step}", seconds, seconds))
    work = sum(job.task for job in jobs)
    clock = Few(times, workers)
    for _ in hand_out(jobs, clock):
        pass
    shares = [times.start] * workers
    for number, job in enumerate(jobs):
        shares[number // GROUPS % workers] += job.task + times.beyond
    return work / (workers * clock.now), work / (workers * max(shares))


if __name__ == "__main__":
    sys.exit(main())
