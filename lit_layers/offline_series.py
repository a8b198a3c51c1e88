"""Measuring a whole series of checkpoints: audited first, one model in memory at a time, the next one fetched ahead."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_layers import emergence, run_lock
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.offline import Device, Dtype, device_of, refuse_missing_data
from lit_layers.records import Measurement
from lit_layers.series import Audit, Checkpoint, Series, audit
from lit_layers.series.auditing import REQUESTS_AT_ONCE, WEIGHTS, remember
from lit_layers.series.fingerprints import Memory
from lit_layers.series.known import Known, is_suspect
from lit_layers.series.prefetching import fetched_ahead

Tell = Callable[[int, int, str], None]  # checkpoints done, checkpoints in all, what comes next
Analyses = Sequence[Analysis] | Mapping[str, Sequence[Analysis]]


@dataclass
class SeriesResult:
    """What came of a series. `failures`: one sentence for each checkpoint that could not be had or loaded."""

    audit: Audit
    left_out: list[Checkpoint]
    verdicts: dict[str, str]  # by checkpoint, as they stand in the measurements
    measurements: list[Measurement] = field(default_factory=list)
    num_known: int = 0  # measurements that were there already
    failures: list[str] = field(default_factory=list)
    unlisted: frozenset[str] = frozenset()  # names of checkpoints that could not be audited


def analyze_series(
    series: Series,
    analyses: Analyses,
    *,
    root: str | Path,
    allow_suspect: bool = False,
    keep_downloads: bool = True,
    shard: tuple[int, int] = (0, 1),
    device: Device = "auto",
    dtype: Dtype = "float32",
    progress: Tell | None = None,
    without: Mapping[str, str] | None = None,
) -> SeriesResult:
    """Measures every checkpoint of a series; each measurement is also a line of `root/measurements.jsonl`.

    The series is audited first. A checkpoint that is suspect is left out, unless `allow_suspect`; the verdict stands in
    every measurement, and where it is another than before in those that were there, too. What is known, of the same
    options, data, tokenizer and weight files, is not measured again, nor is such a checkpoint loaded. One that cannot
    be had is named in `failures`, and the others are measured. Weights that had to be downloaded are judged when they
    are there, and the verdicts of the measurements corrected at the end.

    Args:
        analyses: for all checkpoints, or by the name of the checkpoint: models may need a tokenizer each.
        root: the folder of the results; its name is the run's (models without steps are a run each), so that the
            numbers of a run's own folder join those that training wrote.
        keep_downloads: whether weights that this call downloads stay in the Hub's cache when they are measured.
        shard: (i, n): every n-th checkpoint from the i-th (from 0), for n processes on one root.
        progress: told what is done and what comes next.
        without: names of checkpoints that cannot be measured, each with why: they are among the `failures`.

    Raises:
        InputError: a series that is not there, options or data that fit no checkpoint. Where each checkpoint has
            analyses of its own, what fits one of them only is among the `failures`. Where another process writes in
            `root`, unless as another shard of as many.
    """
    index, count = shard
    if not 0 <= index < count:
        raise InputError(
            f"shard: expected i/n with i from 0 to n - 1, got {index}/{count}: number a SLURM array from 0, "
            f"--array=0-{max(count, 1) - 1}"
        )
    place = device_of(device)
    with run_lock.writing(root, shard=shard):
        return _measured(
            series, analyses, Path(root), allow_suspect, keep_downloads, shard, place, dtype, progress, without or {}
        )


def _measured(
    series: Series,
    analyses: Analyses,
    root: Path,
    allow_suspect: bool,
    keep_downloads: bool,
    shard: tuple[int, int],
    place: torch.device,
    dtype: Dtype,
    progress: Tell | None,
    without: Mapping[str, str],
) -> SeriesResult:
    (index, count), number = shard, {"float32": torch.float32, "float64": torch.float64}[dtype]
    known, tell = Known(root, dtype), progress or (lambda done, total, what: None)
    if not _is_at(series, root):
        known.refuse_another(series.checkpoints)
    wanted, unmeasured = _by_name(series, analyses, without)
    result, mine = _audited(series, series.checkpoints[index::count], known, allow_suspect, unmeasured)
    due = [checkpoint for checkpoint in mine if not _is_known(known, checkpoint, wanted[checkpoint.name])]
    result.num_known = sum(len(wanted[one.name]) for one in mine) - sum(len(wanted[one.name]) for one in due)
    checked: set[int] = set()  # lists of analyses
    view: LayeredModel | None = None
    memory, read = series.memory or Memory(root), False
    for done, (checkpoint, fetched) in enumerate(fetched_ahead(due)):
        tell(done + len(mine) - len(due), len(mine), checkpoint.name)
        these = wanted[checkpoint.name]
        try:
            _had(fetched, checkpoint)
            source = _source(checkpoint, known, result.verdicts[checkpoint.name])
            view = LayeredModel(checkpoint.load(dtype=number).to(place))
            for analysis in () if id(these) in checked else these:
                analysis.check(view)  # before the first number: what does not fit is refused
        except torch.OutOfMemoryError:
            result.failures.append(f"{checkpoint.series} {checkpoint.name} does not fit in the memory of {place}")
        except InputError as error:
            if view is not None and not checked and not isinstance(analyses, Mapping):
                raise
            said = str(error)
            result.failures.append(said if checkpoint.name in said else f"{checkpoint.name}: {said}")
        else:
            checked.add(id(these))
            _measure(view, checkpoint, these, source, known, result)
            if WEIGHTS in result.audit.unchecked.get(checkpoint.name, ()):
                read |= remember(checkpoint, memory)
        finally:
            view = None  # before the next one is loaded
            if not keep_downloads:
                checkpoint.source.drop()
    tell(len(mine), len(mine), "")
    if read:
        _judge_again(series, mine, known, memory, result)
    return result


def _judge_again(
    series: Series, mine: Sequence[Checkpoint], known: Known, memory: Memory, result: SeriesResult
) -> None:
    """Audits once more, by the weights that were downloaded to be measured, and corrects what the numbers say."""
    result.audit = audit(series, without=result.unlisted, memory=memory)
    whole = _is_whole(series, result.audit)
    for one in mine:
        result.verdicts[one.name] = known.verdict(one, result.audit.verdict(one), whole=whole)
        known.correct_verdicts(one, result.verdicts[one.name])


def _is_at(series: Series, root: Path) -> bool:
    """Whether a series lies in the folder of the results: its own, whatever it was named before."""
    place: Path | None = getattr(series, "root", None)
    return place is not None and place.resolve() == root.resolve()


def _had(fetched: Future[Any], checkpoint: Checkpoint) -> None:
    """Waits for a checkpoint; a disk that is full is told of like a Hub that is not there."""
    try:
        fetched.result()
    except OSError as error:
        raise InputError(f"{checkpoint.series} {checkpoint.name} cannot be fetched: {error}") from error


def _by_name(
    series: Series, analyses: Analyses, without: Mapping[str, str]
) -> tuple[dict[str, Sequence[Analysis]], dict[str, str]]:
    """What is to be measured on each checkpoint, and which cannot be measured, each with why.

    Data that is not there is refused before anything is downloaded; where each checkpoint has data of its own, in the
    tokens of its own tokenizer, those are left out that have none.
    """
    if not isinstance(analyses, Mapping):
        refuse_missing_data(analyses)
        return {found.name: analyses for found in series}, dict(without)
    wanted, unmeasured = {}, dict(without)
    for found in series:
        if found.name in unmeasured:
            continue
        try:
            refuse_missing_data(analyses[found.name])
        except InputError as error:
            unmeasured[found.name] = f"{found.name}: {error}"
        else:
            wanted[found.name] = analyses[found.name]
    if not wanted:
        raise InputError(next(iter(unmeasured.values())))
    return wanted, unmeasured


def _audited(
    series: Series, mine: Sequence[Checkpoint], known: Known, allow_suspect: bool, unmeasured: Mapping[str, str]
) -> tuple[SeriesResult, list[Checkpoint]]:
    """What is said of the series, and which checkpoints of this shard are to be measured."""
    unlisted = {**_unlisted(series), **unmeasured}
    found = audit(series, without=unlisted.keys(), memory=series.memory or Memory(known.file.parent))
    listed = [checkpoint for checkpoint in mine if checkpoint.name not in unlisted]
    whole = _is_whole(series, found)
    verdicts = {one.name: known.verdict(one, found.verdict(one), whole=whole) for one in listed}
    for checkpoint in listed:
        known.correct_verdicts(checkpoint, verdicts[checkpoint.name])
    damaged = {name: each.message for each in found.findings if each.kind == "damaged" for name in each.names}
    suspects = [one for one in listed if is_suspect(verdicts[one.name]) and not allow_suspect]
    failures = [unlisted[one.name] for one in mine if one.name in unlisted]
    failures += [f"{one.name} cannot be loaded: {damaged[one.name]}" for one in suspects if one.name in damaged]
    result = SeriesResult(found, suspects, verdicts, failures=failures, unlisted=frozenset(unlisted))
    return result, [one for one in listed if one not in suspects]


def _measure(
    view: LayeredModel,
    checkpoint: Checkpoint,
    analyses: Sequence[Analysis],
    source: dict[str, Any],
    known: Known,
    result: SeriesResult,
) -> None:
    fingerprint = weights_hash(view.model)
    for analysis in analyses:
        if known.has(checkpoint, analysis, fingerprint):
            result.num_known += 1
            continue
        measurement = emergence.measure(
            view,
            analysis,
            run=known.run_of(checkpoint),
            step=checkpoint.step,
            tokens=checkpoint.tokens,
            provenance=source,
            weights_hash=fingerprint,
        )
        known.add(measurement)
        result.measurements.append(measurement)


def _source(checkpoint: Checkpoint, known: Known, verdict: str) -> dict[str, Any]:
    """Where a checkpoint comes from, what was found about it, and its own tokenizer's hash if it carries one."""
    tokenizer = known.tokenizer_hash(checkpoint)
    found = {**checkpoint.provenance(), "audit": verdict}
    return found if tokenizer is None else {**found, "model_tokenizer_hash": tokenizer}


def _unlisted(series: Series) -> dict[str, str]:
    """The checkpoints whose files cannot even be listed, each with why: not for them shall the others wait."""

    def reason(checkpoint: Checkpoint) -> str | None:
        try:
            checkpoint.source.files  # noqa: B018
        except InputError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        reasons = pool.map(reason, series.checkpoints)
        return {one.name: why for one, why in zip(series.checkpoints, reasons, strict=True) if why is not None}


def _is_whole(series: Series, found: Audit) -> bool:
    """Whether every step of the series was audited: only then a suspicion can be taken back."""
    everything = series.listing.checkpoints
    return found.num_checked == len(everything) and all(one.step is not None for one in everything)


def _is_known(known: Known, checkpoint: Checkpoint, analyses: Sequence[Analysis]) -> bool:
    try:
        return known.has_all(checkpoint, analyses)
    except InputError:  # its tokenizer cannot be had: fetching says why
        return False
