"""What is known of the checkpoints of a series: the measurements of a root, and the verdicts that stand in them."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.data.tokenization import Tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.records import FAILED, Measurement
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.local import run_facts
from lit_layers.series.sources import TOKENIZER

SUSPECT = "suspect"


class Known:
    """The measurements of a root in one precision: those that were there, and those that are added."""

    def __init__(self, root: Path, dtype: str) -> None:
        self.file, self.dtype = root / "measurements.jsonl", dtype
        self.run = run_facts(root).get("run") or root.resolve().name  # a run's folder may have been renamed
        self._last = {_key(m): m for m in records.read(self.file)}
        self._tokenizers: dict[str, str] = {}  # by the hash of the file: most steps share one

    def run_of(self, checkpoint: Checkpoint) -> str:
        """The root's name; models without steps are a run each."""
        return checkpoint.name if checkpoint.step is None else self.run

    def refuse_another(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Refuses to make one curve of two series.

        Raises:
            InputError: where the root holds steps of another series, as far as its measurements say of which they are.
        """
        of = {(m.run, m.step is None): m.provenance.get("series") for m in self._last.values()}
        for one in checkpoints:
            other = of.get((self.run_of(one), one.step is None))
            if other not in (None, one.series) and one.step is not None:
                raise InputError(
                    f"root: {self.file.parent} holds measurements of {other}, and {one.series} would be drawn as one "
                    "curve with them: choose another root"
                )

    def has_all(self, checkpoint: Checkpoint, analyses: Sequence[Analysis]) -> bool:
        """Whether all is known from weight files of these very hashes, without loading any."""
        files = checkpoint.source.weights()
        return all(
            known is not None
            and (known.provenance.get("weight_files"), known.provenance.get("dtype")) == (files, self.dtype)
            and self._is_of(known, checkpoint, analysis)
            for analysis in analyses
            for known in [self._last_of(checkpoint, analysis.name)]
        )

    def has(self, checkpoint: Checkpoint, analysis: Analysis, weights_hash: str) -> bool:
        """Whether an analysis is known from these weights, whatever files they came in: training writes others."""
        known = self._last_of(checkpoint, analysis.name)
        return (
            known is not None
            and known.provenance.get("weights_hash") == weights_hash
            and self._is_of(known, checkpoint, analysis)
        )

    def _is_of(self, known: Measurement, checkpoint: Checkpoint, analysis: Analysis) -> bool:
        """Whether it succeeded with these options, data and, where it says which, this tokenizer of the model."""
        said = known.provenance
        wanted = (analysis.config_hash(), analysis.data_hash())
        return (
            known.error is None
            and not any(record.metric == FAILED for record in known.records)
            and (said.get("config_hash"), said.get("data_hash")) == wanted
            and said.get("model_tokenizer_hash") in (None, self.tokenizer_hash(checkpoint))
        )

    def add(self, measurement: Measurement) -> None:
        records.append(self.file, measurement)
        self._last[_key(measurement)] = measurement

    def tokenizer_hash(self, checkpoint: Checkpoint) -> str | None:
        """Hash of the tokenizer that a checkpoint carries, by what it does to text; None where it has none.

        Raises:
            InputError: a tokenizer.json that is damaged or cannot be had.
        """
        listed = checkpoint.source.files.get(TOKENIZER)
        if listed is None:
            return None
        if listed.hash not in self._tokenizers:
            try:
                tokenizer = Tokenizer.from_str(checkpoint.source.read(TOKENIZER).decode())
            except InputError:
                raise
            except Exception as error:  # the library raises bare Exception
                where = f"{checkpoint.series} {checkpoint.name}"
                raise InputError(f"{where}: its {TOKENIZER} is damaged ({error}): get it again") from error
            self._tokenizers[listed.hash] = tokenizer_hash(tokenizer)
        return self._tokenizers[listed.hash]

    def verdict(self, checkpoint: Checkpoint, today: str, *, whole: bool) -> str:
        """Today's verdict, unless it is of a part of the series and an audit of more found these files suspect."""
        if whole or is_suspect(today):
            return today
        earlier = (known.provenance.get("audit") or "" for known in self._of_files(checkpoint))
        return next(filter(is_suspect, earlier), today)

    def correct_verdicts(self, checkpoint: Checkpoint, verdict: str) -> None:
        """Writes again, with this verdict, the measurements of these files that another one would let pass or hide."""
        for known in self._of_files(checkpoint):
            if is_suspect(known.provenance.get("audit") or "") != is_suspect(verdict):
                self.add(dataclasses.replace(known, provenance={**known.provenance, "audit": verdict}))

    def _of_files(self, checkpoint: Checkpoint) -> list[Measurement]:
        """What was measured on the files that the checkpoint has now; training does not say on which."""
        run, files = self.run_of(checkpoint), checkpoint.source.weights()
        return [
            known
            for known in list(self._last.values())
            if (known.run, known.step) == (run, checkpoint.step)
            and known.provenance.get("weight_files") in (None, files)
        ]

    def _last_of(self, checkpoint: Checkpoint, analysis: str) -> Measurement | None:
        return self._last.get((self.run_of(checkpoint), checkpoint.step, analysis))


def is_suspect(verdict: str) -> bool:
    return verdict.startswith(SUSPECT)


def _key(measurement: Measurement) -> tuple[str, int | None, str]:
    return measurement.run, measurement.step, measurement.analysis
