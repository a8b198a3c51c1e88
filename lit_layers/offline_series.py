"""Measuring a whole series of checkpoints: audited first, one model in memory at a time, the next one fetched ahead."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_layers import emergence
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.offline import Device, Dtype, device_of, refuse_double_names
from lit_layers.records import Measurement
from lit_layers.series import Audit, Checkpoint, Series, audit
from lit_layers.series.auditing import REQUESTS_AT_ONCE
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
) -> SeriesResult:
    """Measures every checkpoint of a series; each measurement is also a line of `root/measurements.jsonl`.

    The series is audited first. A checkpoint that is suspect is left out, unless `allow_suspect`; the verdict stands in
    every measurement, and where it is another than before in those that were there, too. What is known, of the same
    options, data, tokenizer and weight files, is not measured again, nor is such a checkpoint loaded. One that cannot
    be had is named in `failures`, and the others are measured.

    Args:
        analyses: for all checkpoints, or by the name of the checkpoint: models may need a tokenizer each.
        root: the folder of the results; its name is the run's (models without steps are a run each), so that the
            numbers of a run's own folder join those that training wrote.
        keep_downloads: whether weights that this call downloads stay in the Hub's cache when they are measured.
        shard: (i, n): every n-th checkpoint from the i-th (from 0), for n processes on one root.
        progress: told what is done and what comes next.

    Raises:
        InputError: a series that is not there, options that fit no checkpoint.
    """
    index, count = shard
    if not 0 <= index < count:
        raise InputError(
            f"shard: expected i/n with i from 0 to n - 1, got {index}/{count}: number a SLURM array from 0, "
            f"--array=0-{max(count, 1) - 1}"
        )
    place, number = device_of(device), {"float32": torch.float32, "float64": torch.float64}[dtype]
    known, tell = Known(Path(root), dtype), progress or (lambda done, total, what: None)
    wanted = _by_name(series, analyses)
    result, mine = _audited(series, series.checkpoints[index::count], known, allow_suspect)
    due = [checkpoint for checkpoint in mine if not _is_known(known, checkpoint, wanted[checkpoint.name])]
    result.num_known = sum(len(wanted[one.name]) for one in mine) - sum(len(wanted[one.name]) for one in due)
    checked: set[int] = set()  # lists of analyses
    view: LayeredModel | None = None
    for done, (checkpoint, fetched) in enumerate(fetched_ahead(due)):
        tell(done + len(mine) - len(due), len(mine), checkpoint.name)
        these = wanted[checkpoint.name]
        try:
            fetched.result()
            source = _source(checkpoint, known, result.verdicts[checkpoint.name])
            view = LayeredModel(checkpoint.load(dtype=number).to(place))
            for analysis in () if id(these) in checked else these:
                analysis.check(view)  # before the first number: what does not fit is refused
        except InputError as error:
            if view is not None and not checked:
                raise
            result.failures.append(str(error))
        else:
            checked.add(id(these))
            _measure(view, checkpoint, these, source, known, result)
        finally:
            view = None  # before the next one is loaded
            if not keep_downloads:
                checkpoint.source.drop()
    tell(len(mine), len(mine), "")
    return result


def _by_name(series: Series, analyses: Analyses) -> dict[str, Sequence[Analysis]]:
    """What is to be measured on each checkpoint; data that is not there is refused before anything is downloaded."""
    for each in analyses.values() if isinstance(analyses, Mapping) else [analyses]:
        refuse_double_names(each)
        for analysis in each:
            analysis.data_hash()
    return {found.name: analyses[found.name] if isinstance(analyses, Mapping) else analyses for found in series}


def _audited(
    series: Series, mine: Sequence[Checkpoint], known: Known, allow_suspect: bool
) -> tuple[SeriesResult, list[Checkpoint]]:
    """What is said of the series, and which checkpoints of this shard are to be measured."""
    unlisted = _unlisted(series)
    found = audit(series, without=unlisted.keys())
    listed = [checkpoint for checkpoint in mine if checkpoint.name not in unlisted]
    whole = _is_whole(series, found)
    verdicts = {one.name: known.verdict(one, found.verdict(one), whole=whole) for one in listed}
    for checkpoint in listed:
        known.correct_verdicts(checkpoint, verdicts[checkpoint.name])
    suspects = [one for one in listed if is_suspect(verdicts[one.name]) and not allow_suspect]
    failures = [unlisted[one.name] for one in mine if one.name in unlisted]
    result = SeriesResult(found, suspects, verdicts, failures=failures)
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
