"""Measuring trained models: the checkpoints of an audited series. A single model is a series of one.

One checkpoint is in memory at a time, while the next one is prefetched.
"""

import contextlib
import copy
import functools
import gc
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lit_layers.analyses.base import Analysis, to_bfloat16
from lit_layers.errors import InputError, is_full, root_folder
from lit_layers.files import run_lock
from lit_layers.identity import settings_name, warn_of_other_versions
from lit_layers.measuring import MeasuringOptions, one_model
from lit_layers.measuring.engine import on_ray
from lit_layers.measuring.nulls import check_null, measure_null
from lit_layers.measuring.one_model import Opened, Visit, measure_unless_done, not_done
from lit_layers.models.build import weights_hash
from lit_layers.models.null import Null
from lit_layers.models.offload import Offload
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement, UnwrittenStore
from lit_layers.schema import Device
from lit_layers.series import Audit, Checkpoint, Series, StepFolders, audit
from lit_layers.series.auditing import SeriesMeasurements, is_suspect, read_weights
from lit_layers.series.checkpoint import prefetch
from lit_layers.series.checkpoint_sources import Memory, ask_all

logger = logging.getLogger(__name__)
Analyses = Sequence[Analysis] | Callable[[Checkpoint], Sequence[Analysis]]
# Is called with the number of checkpoints (or analyses) that are done, their total, and the name of the next one.
Progress = Callable[[int, int, str], None]
DEFAULTS = MeasuringOptions()
UNAUDITED = "unaudited"  # verdict on a single model, because there are no other checkpoints to compare it with


def silent(*_: Any) -> None:
    """Do nothing. This is the `progress` callback if the caller gives none."""


def device_of(name: Device) -> torch.device:
    """Return the device that the option `device` names; "auto" names a GPU if there is one.

    Raises:
        InputError: if the option names a GPU and torch finds none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: cuda was asked for and torch sees no GPU: use cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


class DoesNotFit(InputError):
    """Raised if an analysis does not fit a loaded model."""


@dataclass
class SeriesResult:
    """The result of measuring a series. `failures` holds one sentence per checkpoint that could not be measured."""

    audit: Audit
    left_out: list[Checkpoint] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    num_known: int = 0  # number of measurements that existed before and were not repeated
    failures: list[str] = field(default_factory=list)
    # For each analysis whose data are available, the name (a hash) of its settings: its options and data.
    settings: list[str] = field(default_factory=list)


def analyze_series(
    series: Series,
    analyses: Analyses,
    options: MeasuringOptions = DEFAULTS,
    *,
    root: str | Path,
    during_training: bool = False,
    progress: Progress | None = None,
    null: Null | None = None,
    **changed: Any,
) -> SeriesResult:
    """Measure every checkpoint of a series, and append each measurement to `root/measurements.jsonl`.

    First, an audit checks whether the checkpoints are what their names say. A suspect checkpoint is left out, unless
    `allow_suspect` is set. Every measurement contains the audit's verdict on its checkpoint. If a verdict changes,
    earlier measurements are corrected. A checkpoint is neither measured nor loaded again if its measurements exist for
    the same options, data, tokenizer and weight files. A single model is loaded in any case to hash its weights, but
    not measured again. A checkpoint that cannot be fetched is named in `failures`, and the others are measured.
    Downloaded weights are audited once they are local, and the verdicts of the measurements are corrected at the end.

    Args:
        series: the checkpoints.
        analyses: analyses for all checkpoints, or a function that makes those of one checkpoint, as each model may need
            its own tokenizer.
        options: how to measure; `changed` overrides some options by name, such as `dtype="float64"`.
        root: the folder of the results. Its name is the name of the run. If it is a run's own folder, the measurements
            are added to those that training wrote. If the series has several models without steps, each model is a run
            of its own.
        during_training: whether a training run that measures nothing itself may still be writing to `root`.
        progress: receives the number of checkpoints (or analyses of a single model) that are done, their total, and the
            name of the next one.
        null: the kind of null to measure on the last checkpoint of each run, as `null_model` explains. It is a
            baseline for the curves. With `shard`, only the first process measures it.

    About some options:

    - `keep_downloads`: if false, weights that this call downloads are removed from the Hub's cache once they are
      measured.
    - `shard`: "i/n" measures every n-th checkpoint from the i-th on (counted from 0), so that n processes can share the
      work on one root. With `during_training`, when checkpoints come and go, a hash of the checkpoint's name selects
      its shard instead.
    - `offload`: a folder on a disk, for models that do not fit into memory. Each batch reads the blocks from the disk.
    - `dtype`: the dtype to which weights are converted, however they are stored.
    - `engine`: "ray" distributes the work over a Ray cluster or, if there is none, over local processes, with one task
      per checkpoint. The calling process audits the series, sends the tasks and writes the results. The numbers equal
      those of "process".

    Raises:
        InputError: if the series does not exist, options or data fit no checkpoint, or another process writes to `root`
            (unless it measures another one of the n shards). If each checkpoint has its own analyses, those that do not
            fit are reported in `failures` instead.
    """
    options, root = replace(options, **changed), root_folder(root)
    # With Ray, no model runs in this process, so "cpu" is only a placeholder: each worker chooses its own device.
    device = device_of("cpu" if options.engine == "ray" else options.device)
    if null is not None and options.offload is not None:
        raise InputError("null: needs the weights in memory: leave --offload out")
    work = _Measuring(series, root, options, device, SeriesMeasurements(root), progress or silent, null)
    work.choose(analyses)
    with run_lock.writing(root, shard=options.share, part="measuring" if during_training else "all"):
        audited = work.audited(grows=during_training)
        if options.engine == "ray":
            found = work.on_ray(audited)
        else:
            hooks: Any = {"on_start": work.on_start, "on_error": work.on_error}
            found = measure_unless_done(work.visits(audited), work.earlier.store, **hooks)
        work.result.measurements += found
        work.measure_nulls(audited)
        return work.finished(audited)


def to_dtype(analyses: Sequence[Analysis], options: MeasuringOptions) -> Sequence[Analysis]:
    """Return the same analyses, or if the options request bfloat16, analyses that run the model in bfloat16."""
    return [to_bfloat16(each) for each in analyses] if options.dtype == "bfloat16" else analyses


def _prefixed(name: str, error: InputError) -> str:
    return str(error) if name in str(error) else f"{name}: {error}"


@dataclass
class _Measuring:
    """The state of one call of `analyze_series`. Ray workers receive a copy of it."""

    series: Series
    root: Path
    options: MeasuringOptions
    device: torch.device
    earlier: SeriesMeasurements
    progress: Progress
    null: Null | None
    analyses: dict[str, Sequence[Analysis]] = field(default_factory=dict)  # key: name of the checkpoint
    verdicts: dict[str, str] = field(default_factory=dict)  # key: name of the checkpoint
    unmeasured: dict[str, str] = field(default_factory=dict)  # name of a checkpoint that cannot be measured -> reason
    fitting: set[int] = field(default_factory=set)  # `id` of each list of analyses that was found to fit a model
    broken: set[tuple[str, int | None]] = field(default_factory=set)  # run and step of checkpoints that failed
    result: SeriesResult = field(default_factory=lambda: SeriesResult(Audit("", 0, ())))

    def choose(self, analyses: Analyses) -> None:
        """Check the analyses as far as possible before a model is opened or downloaded, and store them by checkpoint.

        If `analyses` is a function that makes the analyses of one checkpoint, a checkpoint is left out if its analyses
        are refused.
        """
        if not callable(analyses):
            self._refuse(analyses := to_dtype(analyses, self.options))
            self.analyses.update({one.name: analyses for one in self.series})
            return
        for one in self.series:
            try:
                self._refuse(made := to_dtype(analyses(one), self.options))
                self.analyses[one.name] = made
            except InputError as error:
                self.unmeasured[one.name] = _prefixed(one.name, error)
        if not self.analyses:
            raise InputError(next(iter(self.unmeasured.values())))

    def _refuse(self, analyses: Sequence[Analysis]) -> None:
        one_model.refuse_same_names(analyses)
        if self.options.offload is not None and self.options.dtype == "bfloat16":
            raise InputError("offload: --dtype bfloat16 needs a copy of the weights in memory: leave one of them out")
        for analysis in analyses:
            analysis.check_data()

    def audited(self, *, grows: bool) -> list[Checkpoint]:
        """Audit the series, and return the checkpoints that this shard must measure.

        Args:
            grows: whether training adds and removes checkpoints meanwhile.
        """
        index, count = self.options.share
        mine = [*self.series.checkpoints[index::count]]
        if grows:
            mine = [one for one in self.series if zlib.crc32(one.name.encode()) % count == index]
        self.result.audit = Audit(self.series.name, 0, ())
        if self.series.is_single:
            return mine
        self.earlier.refuse_another(self.series.checkpoints, lambda one: ("weight_files", one.source.weights()))
        self.unmeasured = {**self._unlisted(), **self.unmeasured}
        listed = [one for one in mine if one.name not in self.unmeasured]
        self._judge(listed)
        findings = self.result.audit.findings
        damaged = {name: each.message for each in findings if each.kind == "damaged" for name in each.names}
        suspects = [one for one in listed if is_suspect(self.verdicts[one.name]) and not self.options.allow_suspect]
        self.result.left_out = suspects
        self.result.failures = [self.unmeasured[one.name] for one in mine if one.name in self.unmeasured]
        self.result.failures += [
            f"{one.name} cannot be loaded: {damaged[one.name]}" for one in suspects if one.name in damaged
        ]
        return [one for one in listed if one not in suspects]

    def _unlisted(self) -> dict[str, str]:
        """Return the reasons why the files of some checkpoints cannot be listed, by name of the checkpoint.

        These checkpoints are left out, and the others are measured.
        """

        def unlisted(checkpoint: Checkpoint) -> dict[str, str]:
            try:
                checkpoint.source.files  # noqa: B018
            except InputError as error:
                return {checkpoint.name: str(error)}
            return {}

        return {name: why for each in ask_all(unlisted, self.series.checkpoints) for name, why in each.items()}

    def _judge(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Audit the series: check whether its checkpoints are what their names say.

        Each earlier measurement of one of `checkpoints` contains a verdict on it. These verdicts are updated.
        """
        self.result.audit = audit(self.series, without=self.unmeasured.keys(), memory=self._memory)
        listed = self.series.listing.checkpoints
        # A suspicion is withdrawn only if every step of the series was audited.
        whole = self.result.audit.num_checked == len(listed) and all(one.step is not None for one in listed)
        for one in checkpoints:
            self.verdicts[one.name] = self.earlier.verdict(one, self.result.audit.verdict(one), whole=whole)
        for one in checkpoints:
            self.earlier.correct_verdicts(one, self.verdicts[one.name])

    @property
    def _memory(self) -> Memory:
        return self.series.memory or Memory(self.root)

    def _due(self, checkpoints: Sequence[Checkpoint]) -> dict[str, tuple[Checkpoint, Sequence[Analysis]]]:
        """Return the checkpoints that must be measured, by name, each with the analyses that must run.

        An analysis must run if it has no measurement for the current weight files. No model is loaded to find this out.
        """
        due = {one.name: (one, lacking) for one in checkpoints if (lacking := self._lacking(one))}
        for run in dict.fromkeys(self.earlier.run_of(one) for one, _ in due.values() if one.step is not None):
            warn_of_other_versions(self.earlier.store, run)
        return due

    def _lacking(self, checkpoint: Checkpoint) -> Sequence[Analysis]:
        analyses = self.analyses[checkpoint.name]
        if self.series.is_single:  # which analyses are done is only known once the model is loaded and hashed
            return analyses
        facts = {"weight_files": checkpoint.source.weights(), "dtype": self.options.weights_dtype}
        return not_done(self.earlier.store, self.earlier.run_of(checkpoint), checkpoint.step, analyses, **facts)

    def visits(self, audited: Sequence[Checkpoint]) -> Iterator[Visit]:
        """Yield a visit for each checkpoint that must be measured. During a visit, the next checkpoint is fetched."""
        due, is_single = self._due(audited), self.series.is_single
        checkpoints = [checkpoint for checkpoint, _ in due.values()]
        for i, (checkpoint, fetched) in enumerate(prefetch(checkpoints), start=len(audited) - len(due)):
            if not is_single:  # for a single model, `on_start` reports the analyses
                self.progress(i, len(audited), checkpoint.name)
            yield self._visit(checkpoint, fetched, due[checkpoint.name][1])
            self._release()
        total = len(self.analyses[audited[0].name]) if is_single else len(audited)
        self.progress(total, total, "")

    def _release(self) -> None:
        if self.options.offload is not None:
            gc.collect()  # free the model, which is in a reference cycle with accelerate's hooks

    def _visit(self, checkpoint: Checkpoint, fetched: "Future[Path]", analyses: Sequence[Analysis]) -> Visit:
        return Visit(
            name=checkpoint.name,
            run=self.earlier.run_of(checkpoint),
            step=checkpoint.step,
            tokens=checkpoint.tokens,
            analyses=analyses,
            opened=functools.partial(self._opened, checkpoint, fetched),
        )

    def on_start(self, visit: Visit, analysis: Analysis) -> None:
        if self.series.is_single:
            self.progress(visit.analyses.index(analysis), len(visit.analyses), analysis.name)

    @contextlib.contextmanager
    def _opened(self, checkpoint: Checkpoint, fetched: "Future[Path]") -> Iterator[Opened]:
        """Load a checkpoint, and keep it open inside the context: on the device, or with its blocks on disk.

        Raises:
            InputError: if the checkpoint cannot be fetched or loaded, or does not fit into memory.
            DoesNotFit: if an analysis does not fit the model.
        """
        try:
            try:
                fetched.result()
            except OSError as error:  # such as a full disk
                raise InputError(f"{checkpoint.series} {checkpoint.name} cannot be fetched: {error}") from error
            offload = None if self.options.offload is None else Offload(self.options.offload, self.device)
            model = checkpoint.load(dtype=getattr(torch, self.options.weights_dtype), offload=offload)
            view = LayeredModel(model if offload else model.to(self.device))
            self._check(view, self.analyses[checkpoint.name])
            weights = weights_hash(view.model)
            yield Opened(view, weights, self._provenance(checkpoint, weights))
            if self.result.audit.levels.get(checkpoint.name) == "listing" and checkpoint.step is not None:
                read_weights(checkpoint, self._memory)
        except torch.OutOfMemoryError as error:
            why = f"{checkpoint.series} {checkpoint.name} does not fit in the memory of {self.device}"
            raise InputError(why) from error
        finally:
            if not self.options.keep_downloads:
                checkpoint.source.drop()

    def _check(self, view: LayeredModel, analyses: Sequence[Analysis]) -> None:
        """Refuse analyses that do not fit the model, before any number is computed."""
        if id(analyses) in self.fitting:
            return
        try:
            for analysis in analyses:
                analysis.check(view)
            if self.null is not None:
                check_null(self.null, analyses, view.model)
        except InputError as error:
            raise DoesNotFit(str(error)) from error.__cause__
        self.fitting.add(id(analyses))

    def _provenance(self, checkpoint: Checkpoint, weights: str) -> dict[str, Any]:
        """Return facts for the provenance of a checkpoint's measurements: its origin and the audit's verdict on it."""
        source = checkpoint.provenance() | ({"offloaded": True} if self.options.offload else {})
        if self.series.is_single:
            self.earlier.refuse_another([checkpoint], lambda _: ("weights_hash", weights))
            return {**source, "audit": UNAUDITED}
        return {**source, "audit": self.verdicts[checkpoint.name]}

    def measure_nulls(self, audited: Sequence[Checkpoint]) -> None:
        """Measure the null of each run on its last checkpoint; add each error to `failures`."""
        null = self.null
        if null is None or self.options.share[0] > 0:
            return
        for run, checkpoint in {self.earlier.run_of(one): one for one in audited}.items():
            _, fetched = next(_held := prefetch([checkpoint]))  # keep a reference: garbage collection stops a download
            analyses = self.analyses[checkpoint.name]
            try:
                with self._opened(checkpoint, fetched) as opened:
                    about: dict[str, Any] = {"run": run, "step": checkpoint.step, "tokens": checkpoint.tokens}
                    for m in measure_null(null, opened, analyses, self.root, **about):
                        if m.error is not None:
                            self.result.failures.append(f"null of {m.analysis}: {m.error}")
            except Exception as error:  # the measurements of the run itself are complete
                self.result.failures.append(f"null of {run}: {error}")

    def on_ray(self, audited: Sequence[Checkpoint]) -> Iterator[Measurement]:
        """Measure the missing analyses on Ray workers, and yield each measurement once it is stored."""
        due = self._due(audited)
        earlier = copy.copy(self.earlier)
        earlier.store = UnwrittenStore(earlier.store.path, [*self.earlier.store])
        carried = replace(self, earlier=earlier, progress=silent, fitting=set(), result=SeriesResult(self.result.audit))
        calls = {name: ([each.name for each in analyses],) for name, (_, analyses) in due.items()}
        for name, reply in on_ray(carried.measure_one, calls, self.options.device, self.progress):
            checkpoint, analyses = due[name]
            if isinstance(reply, InputError):
                self.on_error(self._visit(checkpoint, Future(), analyses), reply)
                continue
            self.fitting.add(id(self.analyses[name]))
            yield from map(self.earlier.store.add, reply)

    def measure_one(self, name: str, analyses: Sequence[str]) -> list[Measurement]:
        """Measure one checkpoint in a Ray worker. The measurements are stored by the calling process, not here."""
        checkpoint = next(one for one in self.series.checkpoints if one.name == name)
        self.device = device_of(self.options.device)
        chosen = [one for one in self.analyses[name] if one.name in analyses]
        _, fetched = next(_held := prefetch([checkpoint]))  # keep a reference: garbage collection stops a download
        return [*measure_unless_done([self._visit(checkpoint, fetched, chosen)], self.earlier.store)]

    def on_error(self, visit: Visit, why: InputError) -> None:
        """Add the error of a checkpoint to `failures`; raise it if no other checkpoint could be measured either."""
        fits_none = isinstance(why, DoesNotFit) and not self.fitting and len({*map(id, self.analyses.values())}) == 1
        if self.series.is_single or is_full(why) or fits_none:
            raise why from why.__cause__
        self.broken.add((visit.run, visit.step))
        self.result.failures.append(_prefixed(visit.name, why))

    def finished(self, audited: Sequence[Checkpoint]) -> SeriesResult:
        """Complete the result of `analyze_series` and return it.

        An audit checks whether checkpoints are what their names say, as far as their weights are on the local disk. If
        weights were missing in the first audit, a second audit follows here, because measuring may have downloaded
        them. `num_known` in the result counts the measurements that existed before this call.
        """
        if self.result.audit.level == "listing" and self.result.measurements and not self.series.is_single:
            self._judge(audited)
        whole = [one for one in audited if (self.earlier.run_of(one), one.step) not in self.broken]
        measured = [each for each in self.result.measurements if (each.run, each.step) not in self.broken]
        self.result.num_known = sum(len(self.analyses[one.name]) for one in whole) - len(measured)
        for each in {id(each): each for analyses in self.analyses.values() for each in analyses}.values():
            with contextlib.suppress(InputError):
                self.result.settings.append(settings_name(each.config_hash(), each.data_hash()))
        return self.result


EVERY = 3.0  # seconds between two scans of a folder by `follow`
# Seconds without changes after which a checkpoint counts as complete. Our own step-* folders need no wait, because they
# appear atomically.
SETTLED = 10.0


def follow(folder: Path, measure: Callable[[list[int]], object], patience: float | None = None) -> None:
    """Call `measure` with the steps of the checkpoints in a folder, and again whenever a checkpoint is added.

    The function returns after `patience` seconds without a new checkpoint, but not while a training runs in the folder.
    It also returns when a training that was seen to run there has ended; with None as `patience`, it returns only then.
    If a checkpoint cannot be measured, it is tried again at each scan.

    Raises:
        InputError: if `measure` still fails at the last scan.
    """
    listed, measured, error, since, saw_training = {}, {}, None, time.monotonic(), False
    while True:
        is_training = run_lock.is_training(folder)  # before the scan, so that the last saved step is found
        saw_training |= is_training
        before = listed
        try:
            listed = {config.parent.name: _last_change(config.parent) for config in folder.glob("*/config.json")}
            whole = {name: changed for name, changed in listed.items() if changed is not None}
            if whole and whole != measured:
                measure([one.step or 0 for one in StepFolders(folder).listing.checkpoints if one.name in whole])
                measured = whole
            error = None
        except (InputError, FileNotFoundError, NotADirectoryError) as wrong:  # training may have removed a checkpoint
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
    """Return the time at which a checkpoint last changed; None if it may still be incomplete."""
    times = [path.stat().st_mtime for path in checkpoint.rglob("*") if path.is_file()]
    last = max(times, default=time.time())
    return last if checkpoint.match("step-*") or time.time() - last >= SETTLED else None
