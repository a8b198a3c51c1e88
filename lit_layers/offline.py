"""Measuring models that are already trained: the checkpoints of a series, audited first. One model is a series of one.

A checkpoint is in memory whole, one at a time while the next one is fetched, or is read block by block.
"""

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lit_layers import canary, undisturbed
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.layerwise import STATE, layerwise, walk
from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.identity import settings_name
from lit_layers.models.build import weights_hash
from lit_layers.models.shard_files import ShardFiles
from lit_layers.models.streaming import StreamedModel
from lit_layers.models.view import LayeredModel
from lit_layers.prompt_values import ValueFiles
from lit_layers.records import Measurement
from lit_layers.schema import COUNT_OR_NONE, KEPT_MB, VALUES_MB, refuse_outside
from lit_layers.series import Audit, Checkpoint, OneModel, Series, audit
from lit_layers.series.auditing import WEIGHTS, SeriesMeasurements, is_suspect, remember
from lit_layers.series.checkpoint import fetched_ahead
from lit_layers.series.checkpoint_sources import at_once
from lit_layers.series.weight_files import Memory

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "float64"]
Tell = Callable[[int, int, str], None]  # done, of how many, what comes next: checkpoints, or analyses or blocks of one
Analyses = Sequence[Analysis] | Callable[[Checkpoint], Sequence[Analysis]]
STATE_FORMAT = "2"  # of the folder in which a streamed measurement goes on: what an earlier version left is not read
UNFINISHED = ".stream"  # folder in the root: what a streamed measurement has found so far


@dataclass
class SeriesResult:
    """The result on a series. `failures`: one sentence for each checkpoint that could not be had or loaded."""

    audit: Audit
    left_out: list[Checkpoint] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    num_known: int = 0  # measurements that were there already
    failures: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)  # of the analyses whose data can be had


def analyze(
    model: str | Path,
    analyses: Sequence[Analysis],
    *,
    root: str | Path,
    revision: str | None = None,
    stream_blocks: bool = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    progress: Tell | None = None,
) -> list[Measurement]:
    """Returns what the analyses find on one model: `analyze_series` on a series of one, whatever was measured before.

    Args:
        model: a folder with config.json and weights, or the name of a model of the Hub.
        revision: a branch, tag or commit of the Hub.

    Raises:
        InputError: a model that is not there or damaged, options that do not fit it, an analysis that cannot stream; a
            root that holds the measurements of another model.
    """
    series, root = OneModel(model, revision=revision), Path(root)
    options: dict[str, Any] = {"stream_blocks": stream_blocks, "device": device, "dtype": dtype, "progress": progress}
    analyze_series(series, analyses, root=root, **options)
    earlier, (checkpoint,) = SeriesMeasurements(root), series.checkpoints
    run: Any = earlier.run_of(checkpoint), checkpoint.step
    return [last for each in analyses if (last := earlier.store.last(*run, each))]  # there is one of each now


def analyze_series(
    series: Series,
    analyses: Analyses,
    *,
    root: str | Path,
    allow_suspect: bool = False,
    keep_downloads: bool = True,
    shard: tuple[int, int] = (0, 1),
    stream_blocks: bool = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    kept_mb: int = KEPT_MB,
    values_mb: int = VALUES_MB,
    progress: Tell | None = None,
) -> SeriesResult:
    """Measures every checkpoint of a series; each measurement is also a line of `root/measurements.jsonl`.

    The series is audited first. A checkpoint that is suspect is left out, unless `allow_suspect`; the verdict stands in
    every measurement, and where it is another than before in those that were there, too. What is known, of the same
    options, data, tokenizer and weight files, is not measured again, nor is such a checkpoint loaded. One that cannot
    be had is named in `failures`, and the others are measured. Weights that had to be downloaded are judged when they
    are there, and the verdicts of the measurements corrected at the end.

    Args:
        analyses: for all checkpoints, or a function that makes those of one: models may need a tokenizer each.
        root: the folder of the results; its name is the run's (of several models without steps each is a run), so that
            the numbers of a run's own folder join those that training wrote.
        keep_downloads: whether weights that this call downloads stay in the Hub's cache when they are measured.
        shard: (i, n): every n-th checkpoint from the i-th (from 0), for n processes on one root.
        stream_blocks: whether to read each model block by block, so that it is never in memory as a whole; an
            interrupted call goes on after the last finished block. Trajectory, Representation, StateMetric, Coupling.
        device: "auto" is a GPU where there is one.
        dtype: what the weights are converted to, however they are stored.
        kept_mb: how much of the states that several analyses look at is kept on the device between them; what is more
            lies in files in `root` meanwhile.
        values_mb: the most that the values of prompts may take, in files beside the measurements; 0: none are kept.
        progress: told what is done and what comes next.

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
    sizes = {"kept_mb": kept_mb, "values_mb": values_mb}
    refuse_outside("", dict.fromkeys(sizes, COUNT_OR_NONE), sizes)
    measuring = _Measuring(
        series=series,
        root=Path(root),
        allow_suspect=allow_suspect,
        keep_downloads=keep_downloads,
        shard=shard,
        stream_blocks=stream_blocks,
        device=device_of(device),
        dtype=dtype,
        kept_mb=kept_mb,
        values_mb=values_mb,
        tell=progress or _silent,
    )
    measuring.choose(analyses)
    with run_lock.writing(root, shard=shard):
        return measuring.run()


def device_of(name: Device) -> torch.device:
    """Returns the device that an option names.

    Raises:
        InputError: a GPU where torch sees none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: cuda was asked for and torch sees no GPU: use cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _named(checkpoint: Checkpoint, error: InputError) -> str:
    return str(error) if checkpoint.name in str(error) else f"{checkpoint.name}: {error}"


def _silent(done: int, total: int, what: str) -> None:
    """Tells nobody."""


def _unlisted(series: Series) -> dict[str, str]:
    """The checkpoints whose files cannot even be listed, each with why: not for them shall the others wait."""

    def reason(checkpoint: Checkpoint) -> str | None:
        try:
            checkpoint.source.files  # noqa: B018
        except InputError as error:
            return str(error)
        return None

    reasons = at_once(reason, series.checkpoints)
    return {one.name: why for one, why in zip(series.checkpoints, reasons, strict=True) if why is not None}


@dataclass(kw_only=True)
class _Measuring:
    """One call on one series."""

    series: Series
    root: Path
    allow_suspect: bool
    keep_downloads: bool
    shard: tuple[int, int]
    stream_blocks: bool
    device: torch.device
    dtype: Dtype
    kept_mb: int
    values_mb: int
    tell: Tell

    def __post_init__(self) -> None:
        self.earlier = SeriesMeasurements(self.root)
        self.earlier.store.values = ValueFiles(self.root, self.values_mb, checkpoints=len(self.series.checkpoints))
        self.memory = self.series.memory or Memory(self.root)
        self.analyses: dict[str, Sequence[Analysis]] = {}  # by the name of the checkpoint
        self.unmeasured: dict[str, str] = {}  # names of checkpoints that cannot be measured, each with why
        self.verdicts: dict[str, str] = {}  # by checkpoint, as they stand in the measurements
        self.result = SeriesResult(Audit(self.series.name, 0, ()))
        self._fitting: set[int] = set()  # lists of analyses that fit a model of this series

    def choose(self, analyses: Analyses) -> None:
        """Refuses what is wrong with the analyses whatever the model is, before one is opened or downloaded.

        Where each checkpoint has data of its own, in the tokens of its own tokenizer, those are left out that have
        none.
        """
        self.varied = callable(analyses)
        if not callable(analyses):
            self._refuse(analyses)
            self.analyses = {one.name: analyses for one in self.series}
            return
        for one in self.series:
            try:
                self.analyses[one.name] = made = analyses(one)
                self._refuse(made)
            except InputError as error:
                self.analyses.pop(one.name, None)
                self.unmeasured[one.name] = _named(one, error)
        if not self.analyses:
            raise InputError(next(iter(self.unmeasured.values())))

    def _refuse(self, analyses: Sequence[Analysis]) -> None:
        names = [analysis.name for analysis in analyses]
        if double := {name for name in names if names.count(name) > 1}:
            raise InputError(f"analyses: two are named {sorted(double)[0]!r}; give each a name of its own")
        if not analyses:
            raise InputError("analyses: expected at least one, got none")
        for analysis in analyses:
            analysis.check_data()
        if self.stream_blocks:
            layerwise(analyses)

    def run(self) -> SeriesResult:
        index, count = self.shard
        audited = list(self.series.checkpoints[index::count])
        if not self.series.is_alone:
            self._refuse_another(lambda one: ("weight_files", one.source.weights()))
            audited = self._audited(audited)
        due = [one for one in audited if not self._is_known(one)]
        self.result.num_known = sum(len(self.analyses[one.name]) for one in audited if one not in due)
        for run in dict.fromkeys(self.earlier.run_of(one) for one in due if one.step is not None):
            canary.compare_with_earlier(self.earlier.store, run, self.series.listing.checkpoints, self._opened)
        is_read = False
        for number, (checkpoint, fetched) in enumerate(fetched_ahead(due), start=len(audited) - len(due)):
            if not self.series.is_alone:
                self.tell(number, len(audited), checkpoint.name)
            try:
                self._measure(checkpoint, fetched)
            except torch.OutOfMemoryError as error:
                why = f"{checkpoint.series} {checkpoint.name} does not fit in the memory of {self.device}"
                self._failed(checkpoint, InputError(why), error)
            except InputError as error:
                self._failed(checkpoint, error)
            else:
                if WEIGHTS in self.result.audit.unchecked.get(checkpoint.name, ()):
                    is_read |= remember(checkpoint, self.memory)
            finally:
                if not self.keep_downloads:
                    checkpoint.source.drop()
        if not self.series.is_alone:
            self.tell(len(audited), len(audited), "")
        if is_read:  # judged once more, by the weights that were downloaded to be measured
            self._judge(audited)
        for each in {id(each): each for analyses in self.analyses.values() for each in analyses}.values():
            with contextlib.suppress(InputError):
                self.result.settings.append(settings_name(each.config_hash(), each.data_hash()))
        return self.result

    def _refuse_another(self, weights: Callable[[Checkpoint], tuple[str, Any]]) -> None:
        """Unless the series lies in the folder of the results: it is its own, whatever it was named before."""
        place: Path | None = getattr(self.series, "root", None)
        if place is None or place.resolve() != self.root.resolve():
            self.earlier.refuse_another(self.series.checkpoints, weights)

    def _audited(self, mine: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Audits the series, and returns which checkpoints of this shard are to be measured."""
        self.unmeasured = {**_unlisted(self.series), **self.unmeasured}
        listed = [checkpoint for checkpoint in mine if checkpoint.name not in self.unmeasured]
        self._judge(listed)
        findings = self.result.audit.findings
        damaged = {name: each.message for each in findings if each.kind == "damaged" for name in each.names}
        suspects = [one for one in listed if is_suspect(self.verdicts[one.name]) and not self.allow_suspect]
        self.result.left_out = suspects
        self.result.failures = [self.unmeasured[one.name] for one in mine if one.name in self.unmeasured]
        self.result.failures += [
            f"{one.name} cannot be loaded: {damaged[one.name]}" for one in suspects if one.name in damaged
        ]
        return [one for one in listed if one not in suspects]

    def _judge(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Audits the series, and corrects what the numbers of these checkpoints say of it."""
        self.result.audit = audit(self.series, without=self.unmeasured.keys(), memory=self.memory)
        everything = self.series.listing.checkpoints
        # Only where every step of the series was audited a suspicion can be taken back.
        whole = self.result.audit.num_checked == len(everything) and all(one.step is not None for one in everything)
        for one in checkpoints:
            self.verdicts[one.name] = self.earlier.verdict(one, self.result.audit.verdict(one), whole=whole)
        for one in checkpoints:
            self.earlier.correct_verdicts(one, self.verdicts[one.name])

    def _is_known(self, checkpoint: Checkpoint) -> bool:
        """Whether all is known from weight files of these very hashes, without loading any."""
        if self.series.is_alone:  # its files are not hashed, as nothing is compared with them
            return False
        try:
            facts = {
                "weight_files": checkpoint.source.weights(),
                "dtype": self.dtype,
                "model_tokenizer_hash": self.earlier.tokenizer_hash(checkpoint),
            }
        except InputError:  # its tokenizer cannot be had: fetching says why
            return False
        place = self.earlier.run_of(checkpoint), checkpoint.step
        return all(self.earlier.store.is_done(*place, each, **facts) for each in self.analyses[checkpoint.name])

    def _failed(self, checkpoint: Checkpoint, why: InputError, cause: BaseException | None = None) -> None:
        """Notes what cannot be measured; refuses what no other checkpoint can be measured with either."""
        is_loaded = isinstance(why, _DoesNotFit)
        if self.series.is_alone or (is_loaded and not self._fitting and not self.varied):
            raise why from (cause or why.__cause__)
        self.result.failures.append(_named(checkpoint, why))

    def _measure(self, checkpoint: Checkpoint, fetched: "Future[Path]") -> None:
        analyses = self.analyses[checkpoint.name]
        try:
            fetched.result()
        except OSError as error:  # a disk that is full
            raise InputError(f"{checkpoint.series} {checkpoint.name} cannot be fetched: {error}") from error
        tell = self.tell if self.series.is_alone else _silent
        with self._model(checkpoint, self.dtype) as view:
            self._check(view, analyses)
            if isinstance(view, StreamedModel):
                self._walk(view, checkpoint, analyses, tell)
                return
            fingerprint = weights_hash(view.model)
            seen = canary.provenance_of(view, fingerprint, self.earlier.store)
            way = functools.partial(undisturbed.in_one_pass, kept_mb=self.kept_mb, folder=self.root)
            self._keep(checkpoint, view, analyses, way, tell, fingerprint, seen)

    @contextlib.contextmanager
    def _model(self, checkpoint: Checkpoint, dtype: str) -> Iterator[LayeredModel]:
        """A checkpoint in memory, or to be read block by block."""
        if not self.stream_blocks:
            yield LayeredModel(checkpoint.load(dtype=getattr(torch, dtype)).to(self.device))
            return
        files = self.series.files if isinstance(self.series, OneModel) else ShardFiles(checkpoint.fetch())
        with (
            contextlib.closing(StreamedModel(files, device=self.device, dtype=getattr(torch, dtype))) as streamed,
            undisturbed.kept_random_state(),
            undisturbed.plain_numbers(self.device),
        ):
            yield streamed

    @contextlib.contextmanager
    def _opened(self, checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[LayeredModel, str]]:
        with self._model(checkpoint, dtype) as view:
            yield view, view.weights_hash() if isinstance(view, StreamedModel) else weights_hash(view.model)

    def _keep(
        self,
        checkpoint: Checkpoint,
        view: Any,
        analyses: Sequence[Analysis],
        way: undisturbed.Way,
        tell: Tell,
        fingerprint: str,
        seen: dict[str, Any],
    ) -> None:
        """Measures one checkpoint by these weights, whatever files they came in: training writes others."""
        source, same = checkpoint.provenance() | seen, {}
        if self.series.is_alone:
            source["streamed"] = self.stream_blocks
            self._refuse_another(lambda _: ("weights_hash", fingerprint))
        else:
            source["audit"] = self.verdicts[checkpoint.name]
            source |= {"streamed": True} if self.stream_blocks else {}
            same["model_tokenizer_hash"] = self.earlier.tokenizer_hash(checkpoint)
            source |= {name: value for name, value in same.items() if value is not None}
        measured = [
            *undisturbed.measure_missing(
                view,
                analyses,
                self.earlier.store,
                run=self.earlier.run_of(checkpoint),
                step=checkpoint.step,
                tokens=checkpoint.tokens,
                provenance=source,
                weights_hash=fingerprint,
                way=way,
                starting=lambda analysis: tell(analyses.index(analysis), len(analyses), analysis.name),
                same=same,
            )
        ]
        tell(len(analyses), len(analyses), "")
        self.result.measurements += measured
        self.result.num_known += len(analyses) - len(measured)

    def _check(self, view: Any, analyses: Sequence[Analysis]) -> None:
        """Before the first number: what does not fit is refused."""
        if id(analyses) in self._fitting:
            return
        try:
            for analysis in analyses:
                analysis.check(view)
        except InputError as error:
            raise _DoesNotFit(str(error)) from error.__cause__
        self._fitting.add(id(analyses))

    def _walk(self, view: StreamedModel, checkpoint: Checkpoint, analyses: Sequence[Analysis], tell: Tell) -> None:
        """Block by block."""
        place, bird = self.root / UNFINISHED, canary.Canary()

        def way(view: Any, due: Sequence[Analysis], _: Any, **facts: Any) -> Iterator[Measurement]:
            # A kill between the first line and the last one leaves the blocks of all of them.
            is_whole = due and (place / _key(view, [*analyses, bird]) / STATE).is_file()
            if not due:
                return
            chosen = layerwise([*(analyses if is_whole else due), bird])
            folder = place / _key(view, chosen)
            source, fingerprint = facts.pop("provenance"), facts.pop("weights_hash")
            outcomes = walk(view, chosen, folder, tell)
            source |= canary.compared(canary.sums(outcomes[bird.name].records), fingerprint, self.earlier.store)
            for analysis in due:
                outcome = outcomes[analysis.name]
                provenance = {**undisturbed.describe_run(view, analysis, fingerprint), **source}
                result = {"records": outcome.records, "seconds": outcome.seconds, "error": outcome.error}
                yield Measurement(analysis=analysis.name, provenance=provenance, **facts, **result)
            shutil.rmtree(folder)

        hashed = view.kept_weights_hash(place, lambda: tell(0, 1, "hashing the weights"))
        self._keep(checkpoint, view, analyses, way, tell, hashed, {})
        for leftover in place.glob(f"*-{view.fingerprint()}.txt"):
            leftover.unlink()
        with contextlib.suppress(OSError):  # another measurement is under way there
            place.rmdir()


class _DoesNotFit(InputError):
    """An analysis that does not fit a model that was loaded."""


def _key(view: StreamedModel, analyses: Sequence[Analysis]) -> str:
    """What blocks already measured depend on: files, options, data, precision, kind of device."""
    measured = (f"{a.config_hash()} {a.data_hash()}" for a in analyses)
    parts = [STATE_FORMAT, view.fingerprint(), view.device.type, *measured]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]
