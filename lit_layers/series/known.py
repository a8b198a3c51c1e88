"""What is known of the checkpoints of a series: the measurements of a root, and the verdicts that stand in them."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers.data.tokenization import Tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Store
from lit_layers.run_file import run_facts
from lit_layers.series.auditing import WEIGHTS
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.findings import OF_WEIGHTS
from lit_layers.series.hub import MAIN
from lit_layers.series.local import run_in
from lit_layers.series.sources import TOKENIZER

SUSPECT = "suspect"


class Known:
    """The measurements of a series' checkpoints in a root, and the verdicts that stand in them."""

    def __init__(self, root: Path) -> None:
        self.store, self.run = Store(root / "measurements.jsonl"), run_in(root)
        self._tokenizers: dict[str, str] = {}  # by the hash of the file: most steps share one

    def run_of(self, checkpoint: Checkpoint) -> str:
        """The root's name; models without steps are a run each, unless one is measured alone."""
        return checkpoint.name if checkpoint.step is None and checkpoint.is_of_a_series else self.run

    def refuse_another(
        self, checkpoints: Iterable[Checkpoint], weights: Callable[[Checkpoint], tuple[str, Any]]
    ) -> None:
        """Refuses to make one curve of two series, or to put a model in another's place.

        Raises:
            InputError: where the root holds measurements of another one, as far as they say of which they are.
        """
        runs: dict[str, list[Origin]] = {}
        for one in checkpoints:
            origin = Origin(one.step, one.place(), lambda one=one: weights(one))
            runs.setdefault(self.run_of(one), []).append(origin)
        for run, origins in runs.items():
            refuse_another_model(self.store.path.parent, run, self.store, origins)

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
        """Today's verdict, unless an audit that saw more found these files suspect: more steps, or their weights."""
        if is_suspect(today):
            return today
        earlier = (known.provenance.get("audit") or "" for known in self._of_files(checkpoint))
        suspicion = next(filter(is_suspect, earlier), today)
        saw_weights = not OF_WEIGHTS.isdisjoint(suspicion.removeprefix(f"{SUSPECT}: ").split(", "))
        return today if whole and not (saw_weights and f"not checked: {WEIGHTS}" in today) else suspicion

    def correct_verdicts(self, checkpoint: Checkpoint, verdict: str) -> None:
        """Writes again, with this verdict, the measurements of these files that another one would let pass or hide."""
        for known in self._of_files(checkpoint):
            if is_suspect(known.provenance.get("audit") or "") != is_suspect(verdict):
                self.store.add(dataclasses.replace(known, provenance={**known.provenance, "audit": verdict}))

    def _of_files(self, checkpoint: Checkpoint) -> list[Measurement]:
        """What was measured on the files that the checkpoint has now; training does not say on which."""
        run, files = self.run_of(checkpoint), checkpoint.source.weights()
        return [
            known
            for known in self.store
            if (known.run, known.step) == (run, checkpoint.step)
            and known.provenance.get("weight_files") in (None, files)
        ]


@dataclass(frozen=True)
class Origin:
    """Where weights come from, as provenance says it, and what they are: a name of provenance and its value."""

    step: int | None
    source: Mapping[str, Any]
    weights: Callable[[], tuple[str, Any]]


def refuse_another_model(root: Path, run: str, measurements: Iterable[Measurement], origins: Sequence[Origin]) -> None:
    """Refuses numbers of a second model under the name of one run, where they would replace or go on with the first's.

    A model is its repository or folder, that of all its steps; with equal weights it is the same one, also where it
    was moved, a series under its name. Measurements that do not say where they come from are of the run that was
    trained in `root`, if one was.

    Raises:
        InputError: naming both.
    """
    home, mine = os.path.realpath(root), origins[0]
    place = _model_of(mine.source, mine.step)
    is_trained_here = run_facts(root).get("run") == run
    is_inside = mine.step is not None and Path(str(place)).is_relative_to(home)
    others: dict[int | None, Measurement] = {}
    for m in measurements:
        there = _model_of(m.provenance, m.step)
        is_another = is_trained_here and not is_inside if there is None else there != place
        if m.run == run and is_another and place != home:
            others[m.step] = m
    if not others:
        return
    other = next(iter(others.values()))
    names = [_name_of(other.provenance, other.step) or run, _name_of(mine.source, mine.step)]
    # Step 0 shows nothing: many trainings begin with the same weights.
    common = next((one for one in reversed(origins) if one.step != 0 and one.step in others), None)
    if common is not None and (common.step is None or names[0] == names[1]):
        name, value = common.weights()
        if others[common.step].provenance.get(name) == value:
            return
    if names[0] == names[1]:
        names = [_model_of(other.provenance, other.step) or home, place]
    what = "take their place" if mine.step is None else "be drawn as one curve with them"
    raise InputError(f"root: {root} holds measurements of {names[0]}, and {names[1]} would {what}: choose another root")


def _model_of(source: Mapping[str, Any], step: int | None) -> str | None:
    """The repository, with its revision where that is no step, or the folder of a model; None where nothing is said."""
    checkpoint = source.get("checkpoint")
    if checkpoint is None:
        return None
    if "commit" in source:
        revision = source.get("revision")
        return checkpoint if step is not None or revision in (None, MAIN) else f"{checkpoint}@{revision}"
    folder = os.path.realpath(checkpoint)
    return folder if step is None else os.path.dirname(folder)


def _name_of(source: Mapping[str, Any], step: int | None) -> str | None:
    """What a model is called in a sentence."""
    checkpoint = source.get("checkpoint")
    if step is None or checkpoint is None or "commit" in source:
        return _model_of(source, step) if "commit" in source else checkpoint
    return source.get("series") or os.path.basename(os.path.dirname(os.path.realpath(checkpoint)))


def is_suspect(verdict: str) -> bool:
    return verdict.startswith(SUSPECT)
