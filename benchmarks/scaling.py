"""A series over workers: what the engine costs here in CPU seconds, and what more workers save, by simulation.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py          # about ten minutes

A round measures the same 24 small checkpoints three times: in one process, and over one and two workers of Ray, which
start anew each time. Each process counts its own CPU seconds, so that other work on the machine does not count; the
row of wall time alone wants two idle cores. The numbers must be equal. What an engine costs beside CPU seconds, the
wait between two tasks of a worker, is measured by tasks that sleep, over eight workers.

The simulation hands out tasks as `--engine ray` does (`hand_out` itself, with workers that only let a clock go on),
by these times: of each task, of a worker's start, between two tasks, and of the process that hands them out, one after
the other. Over 1 and 2 workers it is the series that was measured; over more 154 checkpoints of ten models, the largest
with a hundred times the work of the smallest, in three groups of analyses. "Dealt" are the same without an engine:
every n-th checkpoint to the n-th process, as `--shard i/n` does.
"""

import argparse
import heapq
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rounds import Row, add_options, finish, ratios

sys.path.insert(0, str(Path(__file__).parents[1]))  # the run is the tests' one

from lit_layers.analyses import Coupling, Trajectory
from lit_layers.measuring import one_checkpoint
from lit_layers.measuring.offline import analyze_series
from lit_layers.measuring.one_checkpoint import CheckpointWorker
from lit_layers.measuring.ray_workers import Event, Job, RayWorkers, hand_out
from lit_layers.series import StepFolders
from tests.support.measured_series import sorted_lines, trained
from tests.support.random_text import RandomText

MODELS, STEPS, GROUPS, LARGEST = 10, 154, 3, 100.0


SLEEP, SLEEPERS, NAPS = 0.2, 8, 400  # seconds, workers and tasks


class Span(NamedTuple):
    """A task in its worker: which process, its CPU seconds and the wall's at the beginning and the end."""

    process: int
    cpu: tuple[float, float]
    wall: tuple[float, float]
    what: str = ""


class Measured(NamedTuple):
    """One pass over the series: seconds of the wall, of this process's CPU until the first task and in all."""

    wall: float
    cpu_before: float
    cpu: float
    spans: list[Span]

    @property
    def tasks(self) -> list[float]:
        """CPU seconds of the tasks: of the same analyses the median, as the checkpoints have the same shapes."""
        kinds: dict[str, list[float]] = defaultdict(list)
        for each in self.spans:
            kinds[each.what].append(each.cpu[1] - each.cpu[0])
        return [statistics.median(kinds[kind]) for _ in range(len(self.spans) // len(kinds)) for kind in kinds]

    @property
    def workers(self) -> float:
        """CPU seconds of all workers."""
        return sum(max(each.cpu[1] for each in group) for group in _by_process(self.spans))

    @property
    def start(self) -> float:
        """CPU seconds of a worker beyond its tasks: most of them before the first and in it."""
        return (self.workers - sum(self.tasks)) / len(_by_process(self.spans))


def _by_process(spans: list[Span]) -> list[list[Span]]:
    groups: dict[int, list[Span]] = defaultdict(list)
    for each in spans:
        groups[each.process].append(each)
    return [*groups.values()]


class Counting(CheckpointWorker):
    """What a worker does, and beside the root a line of what each task took."""

    def __call__(self, task: Any, following: Any) -> Any:
        began = time.process_time(), time.perf_counter()
        try:
            return super().__call__(task, following)
        finally:
            ended = time.process_time(), time.perf_counter()
            span = os.getpid(), *zip(began, ended, strict=True), " ".join(task.analyses)
            with open(self.measurer.root.parent / "spans.jsonl", "a") as file:
                file.write(json.dumps(span) + "\n")


class Sleeping:
    """A task that costs nothing but time."""

    def __call__(self, task: int, following: int | None) -> Span:
        began = time.process_time(), time.perf_counter()
        time.sleep(SLEEP)
        ended = time.process_time(), time.perf_counter()
        return Span(os.getpid(), (began[0], ended[0]), (began[1], ended[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=24, help="checkpoints")
    parser.add_argument("--batches", type=int, default=600, help="of texts of an analysis: how long a task takes")
    options = parser.parse_args()
    ways: dict[str, list[Measured]] = defaultdict(list)
    waits: list[float] = []
    one_checkpoint.CheckpointWorker = Counting
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder) / "run", steps=options.steps - 1, every=1)
        for number in range(options.rounds):
            found = {}
            for way, engine, workers in (("process", "process", 1), ("one", "ray", 1), ("two", "ray", 2)):
                root = Path(folder) / f"{way}{number}" / "run"
                ways[way].append(measured(run, root, options.batches, engine, workers))
                found[way] = sorted_lines(root)
            if not found["process"] == found["one"] == found["two"]:
                raise SystemExit("the three ways do not give the same numbers")
            waits.append(wait_between_tasks())
    return finish("scaling", table_of(ways["process"], ways["one"], ways["two"], waits), options)


def table_of(alone: list[Measured], one: list[Measured], two: list[Measured], waits: list[float]) -> list[Row]:
    all_of_it = [each.cpu + each.workers for each in two]
    rows = [
        Row("one process, CPU", [each.cpu for each in alone], unit=" s"),
        Row("one worker, its tasks: CPU over one process", ratios(map(_work, one), (each.cpu for each in alone))),
        Row("two workers, their tasks: CPU over one process", ratios(map(_work, two), (each.cpu for each in alone))),
        Row("two workers, starts and handing out with them", ratios(all_of_it, (each.cpu for each in alone))),
        Row("two workers: wall over one process", ratios((b.wall for b in two), (a.wall for a in alone))),
        Row("start of a worker, CPU", [each.start for each in two], unit=" s"),
        Row("handing out a task, CPU", [1e3 * _handing(each) for each in two], unit=" ms"),
        Row(f"between two tasks, {SLEEPERS} workers that sleep", [1e3 * each for each in waits], unit=" ms"),
    ]
    each_round = [Times.of(*both) for both in zip(one, waits, strict=True)]
    for jobs, several in ((of_series, (1, 2)), (of_suite, (8, 64, 512))):
        for number in several:
            shares = [simulated(times, jobs(times.tasks), number) for times in each_round]
            dealt = f"{statistics.median(other for _, other in shares):.3f}"
            others = {"every n-th dealt": dealt, "tasks": f"{len(jobs(each_round[0].tasks)):,}"}
            what = f"simulated, {number} worker{'s' if number > 1 else ''}: time that is not idle"
            rows.append(Row(what, [share for share, _ in shares], others=others))
    return rows


def measured(run: Path, root: Path, batches: int, engine: Any, workers: int) -> Measured:
    text, other = RandomText(batches), RandomText(batches // 2)
    analyses = [Trajectory(batches=text), Coupling(batches=RandomText(), k=(2,)), Trajectory(batches=other, name="b")]
    first: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()

    def tell(done: int, total: int, what: str) -> None:
        if ": " in what and not first:
            first.append(time.process_time() - cpu)

    with Cluster(engine, workers):
        result = analyze_series(
            StepFolders(run), analyses, root=root, engine=engine, device="cpu", progress=tell, allow_suspect=True
        )
    assert not result.failures, result.failures
    spans = root.parent / "spans.jsonl"
    lines = [Span(*json.loads(line)) for line in spans.read_text().splitlines()] if spans.exists() else []
    return Measured(time.perf_counter() - began, first[0] if first else 0.0, time.process_time() - cpu, lines)


def wait_between_tasks() -> float:
    """Seconds of the wall from the end of a worker's task to the beginning of its next one, the median."""
    jobs = [Job(str(number // GROUPS), number) for number in range(NAPS)]
    with Cluster("ray", SLEEPERS), RayWorkers(Sleeping(), threads=1, gpu="cpu") as workers:
        spans = [span for _, span in hand_out(jobs, workers)]
    waits = []
    for group in _by_process(spans):
        walls = sorted(each.wall for each in group)
        waits += [after[0] - before[1] for before, after in pairwise(walls)]
    return statistics.median(waits)


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
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            self.ray.init("local", num_cpus=self.workers, **options)

    def __exit__(self, *_: object) -> None:
        if self.ray is not None:
            self.ray.shutdown()


def _work(each: Measured) -> float:
    return sum(each.tasks)


def _handing(each: Measured) -> float:
    return (each.cpu - each.cpu_before) / len(each.spans)


@dataclass(frozen=True)
class Times:
    """Seconds: of a worker's start, of the tasks, of a worker beyond each, of the process that hands out for each."""

    start: float
    tasks: list[float]
    beyond: float
    handing: float

    @classmethod
    def of(cls, one: Measured, wait: float) -> "Times":
        """Of a pass with one worker; the wait between its tasks has what the worker does then, and the handing out."""
        handing = _handing(one)
        return cls(one.cpu_before + one.start, one.tasks, max(wait - handing, 0.0), handing)


class Clock:
    """Workers that do nothing but let time go on."""

    def __init__(self, times: Times) -> None:
        self.times, self.now, self.number = times, 0.0, 0
        self.ends: list[tuple[float, int]] = []
        self.memory: dict[int, int] = {}

    def start(self, memory: Sequence[int]) -> None:
        for each in memory:
            self.number += 1
            self.memory[self.number] = each
            heapq.heappush(self.ends, (self.now + self.times.start, self.number))

    def send(self, worker: int, task: float, following: float | None) -> None:
        self.now += self.times.handing
        heapq.heappush(self.ends, (self.now + self.times.beyond + task, worker))

    def stop(self, worker: int) -> None:
        """Its memory is too small for what is left: it is given nothing more."""

    def next_event(self) -> Event:
        end, worker = heapq.heappop(self.ends)
        self.now = max(self.now, end)
        return Event(worker)


class Few(Clock):
    """The same where the cluster has room for some: others wait, as they do in Ray."""

    def __init__(self, times: Times, room: int) -> None:
        super().__init__(times)
        self.room = room

    def start(self, memory: Sequence[int]) -> None:
        super().start(memory[: self.room - self.number])


def of_series(tasks: list[float]) -> list[Job[float]]:
    """The series that was measured."""
    return [Job(str(number // GROUPS), seconds, seconds) for number, seconds in enumerate(tasks)]


def of_suite(tasks: list[float]) -> list[Job[float]]:
    """Ten models, the largest with a hundred times the work of the smallest."""
    jobs = []
    for model in range(MODELS):
        scale = LARGEST ** (model / (MODELS - 1))
        for step in range(STEPS):
            for part in range(GROUPS):
                seconds = scale * tasks[(GROUPS * step + part) % len(tasks)]
                jobs.append(Job(f"{model}/{step}", seconds, seconds))
    return jobs


def simulated(times: Times, jobs: list[Job[float]], workers: int) -> tuple[float, float]:
    """The share of all workers' time in which they measure: with the engine, and dealt beforehand."""
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
