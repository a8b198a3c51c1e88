"""Measuring a whole series of checkpoints: audited first, one model in memory at a time, the next one fetched ahead."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_layers import emergence, records
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.offline import Device, Dtype, device_of, refuse_double_names
from lit_layers.records import Measurement
from lit_layers.series import Audit, Checkpoint, Series, audit

Tell = Callable[[int, int, str], None]  # checkpoints done, checkpoints in all, what comes next


@dataclass
class SeriesResult:
    """What came of a series. `failures`: one sentence for each checkpoint that could not be had or loaded."""

    verdict: Audit
    left_out: list[Checkpoint]
    measurements: list[Measurement] = field(default_factory=list)
    num_known: int = 0  # measurements that were there already
    failures: list[str] = field(default_factory=list)


def analyze_series(
    series: Series,
    analyses: Sequence[Analysis],
    *,
    root: str | Path,
    allow_suspect: bool = False,
    keep_downloads: bool = True,
    shard: tuple[int, int] = (0, 1),
    device: Device = "auto",
    dtype: Dtype = "float32",
    progress: Tell | None = None,
) -> SeriesResult:
    """Measures every checkpoint of a series; each measurement is also a line of `root/measurements.jsonl`.

    The series is audited first. A checkpoint that is suspect is left out, unless `allow_suspect`; the verdict stands in
    every measurement. What is there already, of the same options and weight files, is not measured again, nor is such a
    checkpoint loaded. One that cannot be had is named in `failures`, and the others are measured.

    Args:
        root: the folder of the results; its name is the run's (models without steps are a run each), so that the
            numbers of a run's own folder join those that training wrote.
        keep_downloads: whether weights that this call downloads stay in the Hub's cache when they are measured.
        shard: (i, n): every n-th checkpoint from the i-th (from 0), for n processes on one root.
        progress: told what is done and what comes next.

    Raises:
        InputError: a series that is not there, options that fit no checkpoint.
    """
    refuse_double_names(analyses)
    index, count = shard
    if not 0 <= index < count:
        raise InputError(f"shard: expected i/n with i from 0 to n - 1, got {index}/{count}")
    place, number = device_of(device), {"float32": torch.float32, "float64": torch.float64}[dtype]
    verdict, kept, tell = audit(series), _Kept(Path(root), dtype), progress or (lambda done, total, what: None)
    suspects = frozenset() if allow_suspect else verdict.suspect_names
    mine = list(series)[index::count]
    result = SeriesResult(verdict, [found for found in mine if found.name in suspects])
    wanted = [found for found in mine if found.name not in suspects]
    due = [found for found in wanted if kept.missing(found, analyses)]
    result.num_known = len(analyses) * (len(wanted) - len(due))
    checked, view = False, None
    for done, (checkpoint, fetched) in enumerate(_fetched_ahead(due)):
        tell(done + len(wanted) - len(due), len(wanted), checkpoint.name)
        try:
            fetched.result()
            view = LayeredModel(checkpoint.load(dtype=number).to(place))
            for analysis in () if checked else analyses:
                analysis.check(view)  # before the first number: what does not fit is refused
        except InputError as error:
            if view is not None and not checked:
                raise
            result.failures.append(str(error))
        else:
            checked = True
            _measure(view, checkpoint, analyses, verdict.verdict(checkpoint), kept, result)
        finally:
            view = None  # before the next one is loaded
            if not keep_downloads:
                checkpoint.source.drop()
    tell(len(wanted), len(wanted), "")
    return result


def _measure(
    view: LayeredModel,
    checkpoint: Checkpoint,
    analyses: Sequence[Analysis],
    verdict: str,
    kept: "_Kept",
    result: SeriesResult,
) -> None:
    source, fingerprint = {**checkpoint.provenance(), "audit": verdict}, weights_hash(view.model)
    for analysis in analyses:
        if kept.is_done(checkpoint, analysis, fingerprint):
            result.num_known += 1
            continue
        measurement = emergence.measure(
            view,
            analysis,
            run=kept.run_of(checkpoint),
            step=checkpoint.step,
            tokens=checkpoint.tokens,
            provenance=source,
            weights_hash=fingerprint,
        )
        kept.add(measurement)
        result.measurements.append(measurement)


def _fetched_ahead(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[Checkpoint, Future]]:
    """Each checkpoint with its download, while that of the next one is under way."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        under_way = [pool.submit(found.fetch) for found in checkpoints[:1]]
        try:
            for number, checkpoint in enumerate(checkpoints):
                fetched = under_way.pop()
                # what the pool holds runs one after the other: the next download begins when this one is complete
                under_way += [pool.submit(found.fetch) for found in checkpoints[number + 1 : number + 2]]
                yield checkpoint, fetched
        finally:
            for waiting in under_way:
                waiting.cancel()


class _Kept:
    """The measurements of a root: those that were there, and those that are added."""

    def __init__(self, root: Path, dtype: str) -> None:
        self.dtype = dtype
        self.file, self.run = root / "measurements.jsonl", root.resolve().name
        self.measurements = records.read(self.file) if self.file.exists() else []

    def run_of(self, checkpoint: Checkpoint) -> str:
        """The root's name; models without steps are a run each."""
        return checkpoint.name if checkpoint.step is None else self.run

    def missing(self, checkpoint: Checkpoint, analyses: Sequence[Analysis]) -> bool:
        """Whether an analysis is not known from weight files and data of these very hashes, in this precision."""
        files: dict[str, Any] = checkpoint.source.weights()
        known = {
            (m.analysis, m.provenance.get("config_hash"), m.provenance.get("data_hash"))
            for m in records.latest(self.measurements)
            if (m.run, m.step, m.error) == (self.run_of(checkpoint), checkpoint.step, None)
            and (m.provenance.get("weight_files"), m.provenance.get("dtype")) == (files, self.dtype)
        }
        return not {(analysis.name, analysis.config_hash(), analysis.data_hash()) for analysis in analyses} <= known

    def is_done(self, checkpoint: Checkpoint, analysis: Analysis, fingerprint: str) -> bool:
        return records.is_done(
            [known for known in self.measurements if known.provenance.get("data_hash") == analysis.data_hash()],
            run=self.run_of(checkpoint),
            step=checkpoint.step,
            analysis=analysis.name,
            config_hash=analysis.config_hash(),
            weights_hash=fingerprint,
        )

    def add(self, measurement: Measurement) -> None:
        records.append(self.file, measurement)
        self.measurements.append(measurement)
