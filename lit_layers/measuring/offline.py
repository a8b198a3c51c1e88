"""Measuring models that are already trained: the checkpoints of a series, audited first. One model is a series of one.

One checkpoint is in memory at a time, while the next one is fetched.
"""

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_layers.analyses.base import Analysis, in_bfloat16
from lit_layers.errors import InputError, given_root, is_full
from lit_layers.files import run_lock
from lit_layers.identity import settings_name, warn_of_other_versions
from lit_layers.measuring import one_model
from lit_layers.measuring.engine import measured_on_ray
from lit_layers.measuring.measuring_options import MeasuringOptions
from lit_layers.measuring.one_checkpoint import DoesNotFit, Dtype, Measurer, Tell, device_of, silent
from lit_layers.prompt_values import ValueFiles
from lit_layers.records import Measurement
from lit_layers.schema import COUNT_OR_NONE, Device, refuse_no_shard, refuse_outside
from lit_layers.series import Audit, Checkpoint, OneModel, Series, audit
from lit_layers.series.auditing import WEIGHTS, SeriesMeasurements, is_suspect, read_weights
from lit_layers.series.checkpoint import fetched_ahead
from lit_layers.series.checkpoint_sources import at_once
from lit_layers.series.weight_files import Fingerprint, Memory

Analyses = Sequence[Analysis] | Callable[[Checkpoint], Sequence[Analysis]]
ALONE = MeasuringOptions(shard="0/1")  # whatever torchrun says


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
    offload: Path | None = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    progress: Tell | None = None,
) -> list[Measurement]:
    """Returns what the analyses find on one model: `analyze_series` on a series of one, whatever was measured before.

    Args:
        model: a folder with config.json and weights, or the name of a model of the Hub.
        revision: a branch, tag or commit of the Hub.

    Raises:
        InputError: a model that is not there or damaged, options that do not fit it; a root that holds the measurements
            of another model.
    """
    options = replace(ALONE, offload=offload, device=device, dtype=dtype)
    series, analyses = OneModel(model, revision=revision), in_dtype(analyses, options)  # as they are in the record
    analyze_series(series, analyses, options, root=root, dtype=options.weights_dtype, progress=progress)
    earlier, (checkpoint,) = SeriesMeasurements(Path(root)), series.checkpoints
    run, step = earlier.run_of(checkpoint), checkpoint.step
    return [last for each in analyses if (last := earlier.store.last(run, step, each))]  # there is one of each now


def analyze_series(
    series: Series,
    analyses: Analyses,
    options: MeasuringOptions = ALONE,
    *,
    root: str | Path,
    beside_training: bool = False,
    progress: Tell | None = None,
    **changed: Any,
) -> SeriesResult:
    """Measures every checkpoint of a series; each measurement is also a line of `root/measurements.jsonl`.

    The series is audited first. A checkpoint that is suspect is left out, unless `allow_suspect`; the verdict stands in
    every measurement, and where it is another than before in those that were there, too. What is known, of the same
    options, data, tokenizer and weight files, is not measured again, nor is such a checkpoint loaded. One that cannot
    be had is named in `failures`, and the others are measured. Weights that had to be downloaded are judged when they
    are there, and the verdicts of the measurements corrected at the end.

    Args:
        analyses: for all checkpoints, or a function that makes those of one: models may need a tokenizer each.
        options: how; `changed` are some of them by name: `dtype="float64"`.
        root: the folder of the results; its name is the run's (of several models without steps each
            is a run), so that the numbers of a run's own folder join those that training wrote.
        beside_training: whether a training may go on in root meanwhile, which measures nothing itself.
        progress: told what is done and what comes next.

    Of the options:

    - `keep_downloads`: false: weights that this call downloads leave the Hub's cache when they are measured.
    - `shard`, here (i, n): every n-th checkpoint from the i-th (from 0), for n processes on one root. Beside a
      training, which adds checkpoints and removes others, the name of each one says whose it is.
    - `offload`: a folder on a disk, for models that do not fit into memory. Each batch reads the blocks from the disk.
    - `dtype`: what the weights are converted to, however they are stored.
    - `values_mb`: the most that the values of prompts may take, in files beside the measurements; 0: none are kept.
    - `engine`: "ray" carries the work over the machines of a Ray cluster, or over processes of this machine where none
      is running: a task per checkpoint. This process audits, hands out and writes; the numbers are those of "process".

    Raises:
        InputError: a series that is not there, options or data that fit no checkpoint. Where each checkpoint has
            analyses of its own, what fits one of them only is among the `failures`. Where another process writes in
            `root`, unless as another shard of as many, by the same versions.
    """
    if "shard" in changed:
        refuse_no_shard(changed["shard"], changed.get("engine", options.engine))
        changed["shard"] = "{}/{}".format(*changed["shard"])
    options = replace(options, **changed)
    refuse_outside("", {"values_mb": COUNT_OR_NONE}, vars(options))
    tell = progress or silent
    root = given_root(root)
    measurer = Measurer(
        series=series,
        root=root,
        options=options,
        device=device_of("cpu" if options.engine == "ray" else options.device),  # each worker has its own
        earlier=SeriesMeasurements(root),
        tell=tell if series.is_alone else silent,  # of a series its checkpoints are counted, not their analyses
    )
    measuring = _Measuring(measurer=measurer, tell=tell, grows=beside_training)
    measuring.choose(analyses)
    part = "measuring" if beside_training else "all"
    with run_lock.writing(root, shard=options.share, part=part):
        return measuring.run()


def in_dtype(analyses: Sequence[Analysis], options: MeasuringOptions) -> Sequence[Analysis]:
    """The analyses, with their blocks in bfloat16 where that is asked for."""
    return [in_bfloat16(each) for each in analyses] if options.dtype == "bfloat16" else analyses


def _named(checkpoint: Checkpoint, error: InputError) -> str:
    return str(error) if checkpoint.name in str(error) else f"{checkpoint.name}: {error}"


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

    measurer: Measurer
    tell: Tell
    grows: bool

    def __post_init__(self) -> None:
        self.series, self.earlier, self.options = self.measurer.series, self.measurer.earlier, self.measurer.options
        checkpoints, root = len(self.series.checkpoints), self.measurer.root
        self.earlier.store.values = ValueFiles(root, self.options.values_mb, checkpoints=checkpoints, insist=True)
        self.memory = self.series.memory or Memory(root)
        self.analyses, self.verdicts = self.measurer.analyses, self.measurer.verdicts
        self.unmeasured: dict[str, str] = {}  # names of checkpoints that cannot be measured, each with why
        self.result = SeriesResult(Audit(self.series.name, 0, ()))
        self._is_read = False  # whether weights were, for the audit

    def choose(self, analyses: Analyses) -> None:
        """Refuses what is wrong with the analyses whatever the model is, before one is opened or downloaded.

        Where each checkpoint has data of its own, in the tokens of its own tokenizer, those are left out that have
        none.
        """
        self.varied = callable(analyses)
        if not callable(analyses):
            analyses = in_dtype(analyses, self.options)
            self._refuse(analyses)
            self.analyses.update({one.name: analyses for one in self.series})
            return
        for one in self.series:
            try:
                self.analyses[one.name] = made = in_dtype(analyses(one), self.options)
                self._refuse(made)
            except InputError as error:
                self.analyses.pop(one.name, None)
                self.unmeasured[one.name] = _named(one, error)
        if not self.analyses:
            raise InputError(next(iter(self.unmeasured.values())))

    def _refuse(self, analyses: Sequence[Analysis]) -> None:
        one_model.refuse_same_names(analyses)
        if not analyses:
            raise InputError("analyses: expected at least one, got none")
        if self.options.offload is not None and self.options.dtype == "bfloat16":
            raise InputError("offload: --dtype bfloat16 needs a copy of the weights in memory: leave one of them out")
        for analysis in analyses:
            analysis.check_data()

    def run(self) -> SeriesResult:
        """Measures in this process or over workers, as the engine says."""
        audited = self._mine()
        if not self.series.is_alone:
            self.measurer.refuse_another(lambda one: ("weight_files", one.source.weights()))
            audited = self._audited(audited)
        due = [one for one in audited if not self._is_known(one)]
        self.result.num_known = sum(len(self.analyses[one.name]) for one in audited if one not in due)
        for run in dict.fromkeys(self.earlier.run_of(one) for one in due if one.step is not None):
            warn_of_other_versions(self.earlier.store, run, one_model.versions())
        if self.options.engine == "ray":
            self._over_workers(due)
        else:
            self._one_by_one(due, len(audited) - len(due), len(audited))
        if self._is_read:  # judged once more, by the weights that were downloaded to be measured
            self._judge(audited)
        for each in {id(each): each for analyses in self.analyses.values() for each in analyses}.values():
            with contextlib.suppress(InputError):
                self.result.settings.append(settings_name(each.config_hash(), each.data_hash()))
        return self.result

    def _mine(self) -> list[Checkpoint]:
        """The checkpoints of this shard."""
        index, count = self.options.share
        if not self.grows:
            return [*self.series.checkpoints[index::count]]
        return [one for one in self.series if zlib.crc32(one.name.encode()) % count == index]

    def _one_by_one(self, due: Sequence[Checkpoint], num_before: int, total: int) -> None:
        tell = silent if self.series.is_alone else self.tell
        for number, (checkpoint, fetched) in enumerate(fetched_ahead(due), start=num_before):
            tell(number, total, checkpoint.name)
            try:
                measured = self.measurer.measure(checkpoint, fetched)
            except InputError as error:
                self._failed(checkpoint, error)
            else:
                self._measured(checkpoint, measured, self.analyses[checkpoint.name])
                if self._is_unread(checkpoint):
                    self._remember(checkpoint, read_weights(checkpoint))
            finally:
                self.measurer.release()
                if checkpoint.source.is_copied or not self.options.keep_downloads:
                    checkpoint.source.drop()
        tell(total, total, "")

    def _over_workers(self, due: Sequence[Checkpoint]) -> None:
        left = {checkpoint.name: (checkpoint, self._not_known(checkpoint)) for checkpoint in due}
        self.result.num_known += sum(len(self.analyses[name]) - len(mine) for name, (_, mine) in left.items())
        unread = {checkpoint.name for checkpoint in due if self._is_unread(checkpoint)}
        for checkpoint, outcome in measured_on_ray(self.measurer, [*left.values()], self.tell, unread):
            if outcome.failure is not None:
                self._failed(checkpoint, outcome.failure)
                continue
            self.measurer.fitting |= {id(self.analyses[checkpoint.name])}
            store, (_, mine) = self.earlier.store, left[checkpoint.name]
            self._measured(checkpoint, [store.add(each) for each in outcome.measurements], mine)
            self._remember(checkpoint, outcome.weights)

    def _measured(self, checkpoint: Checkpoint, measured: list[Measurement], of: Sequence[Any]) -> None:
        self.result.measurements += measured
        self.result.num_known += len(of) - len(measured)

    def _is_unread(self, checkpoint: Checkpoint) -> bool:
        return WEIGHTS in self.result.audit.unchecked.get(checkpoint.name, ())

    def _remember(self, checkpoint: Checkpoint, weights: Fingerprint | None) -> None:
        """Keeps what was read of weights that were downloaded to be measured, for the audit."""
        if weights is not None:
            self.memory.put(checkpoint.name, checkpoint.source.identity(), weights)
            self._is_read = True

    def _audited(self, mine: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Audits the series, and returns which checkpoints of this shard are to be measured."""
        self.unmeasured = {**_unlisted(self.series), **self.unmeasured}
        listed = [checkpoint for checkpoint in mine if checkpoint.name not in self.unmeasured]
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
        return not self._not_known(checkpoint)

    def _not_known(self, checkpoint: Checkpoint) -> list[Analysis]:
        """The analyses of which that cannot be said."""
        analyses = [*self.analyses[checkpoint.name]]
        if self.series.is_alone:  # its files are not hashed, as nothing is compared with them
            return analyses
        try:
            facts = {
                "weight_files": checkpoint.source.weights(),
                "dtype": self.options.weights_dtype,
                "model_tokenizer_hash": self.earlier.tokenizer_hash(checkpoint),
            }
        except InputError:  # its tokenizer cannot be had: fetching says why
            return analyses
        place = self.earlier.run_of(checkpoint), checkpoint.step
        return [each for each in analyses if not self.earlier.store.is_done(*place, each, **facts)]

    def _failed(self, checkpoint: Checkpoint, why: InputError) -> None:
        """Notes what cannot be measured; refuses what no other checkpoint can be measured with either."""
        is_loaded = isinstance(why, DoesNotFit)
        if self.series.is_alone or is_full(why) or (is_loaded and not self.measurer.fitting and not self.varied):
            raise why from why.__cause__
        sentence = _named(checkpoint, why)
        if sentence not in self.result.failures:  # each of its tasks may say so
            self.result.failures.append(sentence)
