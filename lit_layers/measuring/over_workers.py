"""The checkpoints of a series over the workers of an engine: which tasks there are, and what a worker does with one.

A task is a checkpoint and a group of its analyses: those that look at the same texts, which go through the blocks once
for all of them. A worker reads checkpoints and returns measurements; the process that hands the tasks out writes them.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.measuring import ray_workers
from lit_layers.measuring.one_checkpoint import Measurer, Tell, device_of, silent
from lit_layers.measuring.plan import counted, texts_of
from lit_layers.models.saved import outline
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import bytes_of_model
from lit_layers.records import Measurement, UnwrittenStore
from lit_layers.schema import Device
from lit_layers.series import Checkpoint
from lit_layers.series.auditing import read_weights
from lit_layers.series.checkpoint import fetched_ahead
from lit_layers.series.weight_files import Fingerprint

MARGIN = 1.25  # of the memory that is asked for, over what the plan counts
OF_A_PROCESS = 2**30  # bytes that torch and the other libraries take


@dataclass(frozen=True)
class Task:
    """`earlier` is what the record says of the checkpoint; `is_unread` asks for its weights, for the audit."""

    checkpoint: str
    analyses: tuple[str, ...]
    earlier: tuple[Measurement, ...]
    is_unread: bool


@dataclass(frozen=True)
class Outcome:
    """What came of a task: measurements, or why there are none."""

    measurements: tuple[Measurement, ...] = ()
    failure: InputError | None = None
    weights: Fingerprint | None = None


class CheckpointWorker:
    """What a worker does: it keeps the checkpoint of its last task loaded, and fetches that of the following one."""

    def __init__(self, measurer: Measurer, device: Device, threads: int, keep_downloads: bool) -> None:
        self.measurer, self.threads, self.keep_downloads = measurer, threads, keep_downloads
        self.device: Device = device
        self._ahead: Iterator[Any] = iter(())  # the download under way, which would stop if nobody held it

    def __call__(self, task: Task, following: Task | None) -> Outcome:
        """Measures, and writes nothing."""
        by_name = {one.name: one for one in self.measurer.series.checkpoints}
        checkpoint = by_name[task.checkpoint]
        ahead = [following] if following is not None and self.keep_downloads else []  # another may come to measure it
        self._ahead = fetched_ahead([by_name[each.checkpoint] for each in (task, *ahead)])
        _, fetched = next(self._ahead)
        analyses = [one for one in self.measurer.analyses[checkpoint.name] if one.name in task.analyses]
        try:
            torch.set_num_threads(self.threads)  # as where they are handed out: sums are rounded alike
            self.measurer.device = device_of(self.device)
            earlier = self.measurer.earlier
            earlier.store = UnwrittenStore(earlier.store.path, task.earlier)
            measured = self.measurer.measure(checkpoint, fetched, analyses)
            return Outcome(tuple(measured), weights=read_weights(checkpoint) if task.is_unread else None)
        except InputError as error:
            return Outcome(failure=error)
        finally:
            if not self.keep_downloads:
                checkpoint.source.drop()


def over_workers(
    measurer: Measurer,
    due: Sequence[tuple[Checkpoint, Sequence[Analysis]]],
    tell: Tell,
    *,
    device: Device,
    unread: set[str],
    keep_downloads: bool,
) -> Iterator[tuple[Task, Outcome]]:
    """Yields each task with what came of it, in the order in which they are done.

    Raises:
        InputError: an engine that is not there, workers that cannot be started.
    """
    jobs, memory = _jobs(measurer, due, unread, whole=measurer.stream_blocks or not keep_downloads)
    if not jobs:
        return
    total, threads = len(jobs), torch.get_num_threads()
    carried = CheckpointWorker(_carried(measurer), device, threads, keep_downloads)
    with ray_workers.RayWorkers(carried, threads=threads, gpu=device, memory=memory) as workers:

        def show(done: int, under_way: Sequence[Task]) -> None:
            what = ", ".join(dict.fromkeys(task.checkpoint for task in under_way[:2]))
            tell(done, total, f"{workers.description}: {what}" if what else workers.description)

        for task, outcome in ray_workers.hand_out(jobs, workers, show):
            yield task, outcome or Outcome(failure=_lost(task))
    tell(total, total, "")


def _lost(task: Task) -> InputError:
    return InputError(
        f"{task.checkpoint}: {ray_workers.ATTEMPTS} workers were lost that measured {', '.join(task.analyses)}: it may "
        "need more memory than they have; the same command tries it again"
    )


def _carried(measurer: Measurer) -> Measurer:
    """As workers get it: it tells nobody, and what was measured comes with each task."""
    earlier = copy.copy(measurer.earlier)
    earlier.store = UnwrittenStore(earlier.store.path, [])
    return replace(measurer, earlier=earlier, tell=silent, fitting=set())


def _jobs(
    measurer: Measurer, due: Sequence[tuple[Checkpoint, Sequence[Analysis]]], unread: set[str], *, whole: bool
) -> tuple[list[ray_workers.Job[Task]], int]:
    """A job for each task, and the bytes of memory that a worker needs for any; `whole`: all analyses in one."""
    jobs, memory, counts = [], 0.0, {}
    for checkpoint, analyses in due:
        earlier = _earlier(measurer, checkpoint)
        groups: dict[Any, list[Analysis]] = {}
        for number, each in enumerate(analyses):
            groups.setdefault("all" if whole else texts_of(each) or number, []).append(each)
        for number, group in enumerate(groups.values()):
            names = tuple(each.name for each in group)
            key = repr(checkpoint.config()), names  # the steps of a training have the same shapes
            if key not in counts:
                counts[key] = _counted(checkpoint, group)
            cost, held = counts[key]
            memory = max(memory, held)
            task = Task(checkpoint.name, names, earlier, is_unread=number == 0 and checkpoint.name in unread)
            jobs.append(ray_workers.Job(checkpoint.name, task, cost))
    states = measurer.kept_mb * 2**20
    return jobs, int(MARGIN * (memory + states) + OF_A_PROCESS) if memory else 0


def _counted(checkpoint: Checkpoint, analyses: Sequence[Analysis]) -> tuple[float, float]:
    """Operations and bytes; where the shapes cannot be had, nobody knows: loading it says why."""
    with contextlib.suppress(InputError):
        if config := checkpoint.config():
            view = LayeredModel(outline(config, checkpoint.name))
            operations, held = counted(view, analyses)
            return operations, held + bytes_of_model(view)
    return math.inf, 0.0


def _earlier(measurer: Measurer, checkpoint: Checkpoint) -> tuple[Measurement, ...]:
    """What is measured of a checkpoint; of other steps of its run, where it stands alone, whose they are."""
    run = measurer.earlier.run_of(checkpoint)
    of_run = [each for each in measurer.earlier.store if each.run == run]
    others = [each for each in of_run if each.step != checkpoint.step] if measurer.series.is_alone else []
    mine = [each for each in of_run if each.step == checkpoint.step]
    return (*mine, *(replace(each, records=[]) for each in others))
