"""The audit of a checkpoint series, and what earlier measurements record of its checkpoints."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lit_layers.errors import InputError
from lit_layers.records import Measurement, Store, lineage_in
from lit_layers.schema import run_facts
from lit_layers.series import audit_files, audit_weights
from lit_layers.series.audit_files import OF_A_LISTING, Finding, Listed, finding
from lit_layers.series.checkpoint import Checkpoint, Series
from lit_layers.series.checkpoint_sources import MAIN, Fingerprint, Memory, fingerprint
from lit_layers.series.local_series import SUBMODULE

Level = Literal["auto", "listing", "weights"]
# What no check of a level sees of any checkpoint.
UNSEEN: Mapping[Level, str] = {
    "listing": "anything but names, sizes and hashes of files, configurations and tokenizers",
    "weights": "weights scaled by one factor up to 2, averages of earlier and later steps, an update applied twice, "
    "another training at the first step or from a long gap on, small changes (noise, single values, biases and norms), "
    "a step under another number between its neighbours': docs/series.md has all",
}


@dataclass(frozen=True)
class Audit:
    """The verdicts on one series. No finding but notes means clean.

    `level` is what was looked at, of every checkpoint at least: `listing` are names, sizes and hashes, `weights` also
    the values of weights; `levels` has that of each checkpoint. `UNSEEN` says what no audit of the level sees.
    """

    series: str
    num_checked: int
    findings: tuple[Finding, ...]
    level: Level = "listing"
    levels: Mapping[str, Level] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return all(finding.note for finding in self.findings)

    @property
    def suspect_names(self) -> frozenset[str]:
        """The checkpoints that no curve should be drawn through."""
        return frozenset(name for finding in self.findings if not finding.note for name in finding.names)

    @property
    def suspect_steps(self) -> tuple[int, ...]:
        """The steps that no curve should be drawn through."""
        found = (each for each in self.findings if each.names and not each.note)
        return tuple(sorted({step for each in found for step in each.steps}))

    def verdict(self, checkpoint: Checkpoint) -> str:
        """The verdict on one checkpoint, for its measurements: `suspect: ...`, or `clean` or `note: ...` with the level
        at which it was looked at: `clean (level: listing)`.
        """
        findings = [finding for finding in self.findings if checkpoint.name in finding.names]
        kinds = dict.fromkeys(finding.kind for finding in findings if not finding.note)
        if kinds:
            return f"suspect: {', '.join(kinds)}"
        notes = ", ".join(dict.fromkeys(each.kind for each in findings))
        return f"{f'note: {notes}' if notes else 'clean'} (level: {self.levels[checkpoint.name]})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        verdict = {"clean": self.is_clean, "suspect_steps": self.suspect_steps, "suspects": sorted(self.suspect_names)}
        return {**asdict(self), "unseen": UNSEEN[self.level], **verdict}


def audit(
    series: Series,
    *,
    without: Collection[str] = (),
    level: Level = "auto",
    memory: Memory | None = None,
) -> Audit:
    """What is wrong with the chosen steps of a series, compared with each other, its last step and its main branch.

    Asks the Hub for lists of files and for the small files that name shards, one list a revision; a local series is
    hashed, and its weights are read, once: the result is kept in `memory`, the series' own folder if it has one.
    Checkpoints named in `without` are not looked at.

    Args:
        level: `listing` compares names, sizes and hashes, configurations, tokenizers; `weights` also reads the values
            of weights, and downloads them where they are not here, one checkpoint at a time. `auto`: the weights of
            those that are on this machine.

    Raises:
        InputError: a series that is not there, or cannot be had.
    """
    chosen = [one for one in series.checkpoints if one.name not in without]
    listed = Listed.of(series, chosen)
    findings = [each for rule in OF_A_LISTING for each in rule(listed)]
    steps = [one for one in chosen if one.step is not None]
    lost = _names(each for each in findings if each.kind in ("no weights", "missing shard"))
    complete = [one for one in steps if one.name not in lost]
    prints, damaged = _prints(complete, level, memory or series.memory)
    findings += [*damaged, *audit_files.changes(complete, prints, _names(damaged))]
    findings += _findings_of_values(listed, steps, prints, findings)
    levels: dict[str, Level] = {one.name: "weights" if one.name in prints else "listing" for one in chosen}
    is_unread = "listing" in {levels[one.name] for one in chosen if one.name not in lost | _names(damaged)}
    return Audit(
        series=series.name,
        num_checked=len(chosen),
        findings=tuple(findings),
        level="listing" if is_unread else "weights",
        levels=levels,
    )


def _prints(
    steps: Sequence[Checkpoint], level: Level, memory: Memory | None
) -> tuple[dict[str, Fingerprint], list[Finding]]:
    """What the weights look like, one checkpoint after the other, and which cannot be read."""
    prints: dict[str, Fingerprint] = {}
    damaged: list[Finding] = []
    for one in steps if level != "listing" else ():
        key, is_here = one.source.identity(), one.source.is_here
        found = None if memory is None else memory.get(one.name, key)
        if found is None and (is_here or level == "weights"):
            try:
                found = fingerprint(one.source.tensors())
            except InputError as error:
                damaged.append(finding("damaged", str(error), [one]))
            if not is_here:
                one.source.drop()
            if found is not None and memory is not None:
                memory.put(one.name, key, found)
        if found is not None:
            prints[one.name] = found
    return prints, damaged


def read_weights(checkpoint: Checkpoint, memory: Memory) -> None:
    """Read the weights of a checkpoint that is on this machine now, for the next audit."""
    _prints([checkpoint], "auto", memory)


def _findings_of_values(
    listed: Listed, steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint], findings: Sequence[Finding]
) -> list[Finding]:
    """What equal hashes and the values of the weights show.

    Steps that are suspect for another reason are left out before the path of the rest is judged.
    """
    odd = _names(each for each in findings if each.kind == "other tensors" and not each.note)
    read = [one for one in steps if one.name in prints and one.name not in odd and prints[one.name].tensors]
    found = [
        *audit_weights.copies(listed, prints, read),
        *audit_weights.broken_values(read, prints),
        *audit_weights.outsized_tensors(read, prints),
    ]
    suspects = _names(each for each in (*findings, *found) if not each.note)
    rest = [one for one in read if one.name not in suspects]
    of_path = audit_weights.path_findings(audit_weights.Path.of(rest, prints))
    named = _names(of_path)
    return [*found, *of_path, *audit_weights.returned_vectors([one for one in rest if one.name not in named], prints)]


def _names(findings: Iterable[Finding]) -> frozenset[str]:
    return frozenset(name for each in findings for name in each.names)


SUSPECT = "suspect"


class SeriesMeasurements:
    """The measurements of a series' checkpoints in a root, and the verdicts that stand in them."""

    def __init__(self, root: Path) -> None:
        self.run = run_facts(root).get("run") or root.resolve().name  # the folder may have been renamed since
        self.store = Store(root / "measurements.jsonl", lineage=lineage_in(root))

    def run_of(self, checkpoint: Checkpoint) -> str:
        """The root's name; models without steps are a run each, unless one is measured alone and bears no name."""
        if checkpoint.run is not None:
            return checkpoint.run
        return checkpoint.name if checkpoint.step is None and checkpoint.is_of_a_series else self.run

    def refuse_another(
        self, checkpoints: Iterable[Checkpoint], weights: Callable[[Checkpoint], tuple[str, Any]]
    ) -> None:
        """Refuse to make one curve of two series, or to put a model in another's place.

        Raises:
            InputError: where the root holds measurements of another one, as far as they say of which they are.
        """
        runs: dict[str, list[Checkpoint]] = {}
        for one in checkpoints:
            runs.setdefault(self.run_of(one), []).append(one)
        for run, members in runs.items():
            self._refuse_another_model(run, members, weights)

    def verdict(self, checkpoint: Checkpoint, today: str, *, whole: bool) -> str:
        """Today's verdict, unless an earlier audit found these files suspect: that of all weights takes it back."""
        if is_suspect(today) or (whole and "(level: listing)" not in today):
            return today
        earlier = (m.provenance.get("audit") or "" for m in self._of_files(checkpoint))
        return next(filter(is_suspect, earlier), today)

    def correct_verdicts(self, checkpoint: Checkpoint, verdict: str) -> None:
        """Write again, with this verdict, the measurements of these files that another one would let pass or hide."""
        for m in self._of_files(checkpoint):
            if is_suspect(m.provenance.get("audit") or "") != is_suspect(verdict):
                self.store.add(replace(m, provenance={**m.provenance, "audit": verdict}))

    def _of_files(self, checkpoint: Checkpoint) -> list[Measurement]:
        """What was measured on the files that the checkpoint has now; training does not say on which."""
        run, files = self.run_of(checkpoint), checkpoint.source.weights()
        of_step = (m for m in self.store if (m.run, m.step) == (run, checkpoint.step))
        return [m for m in of_step if m.provenance.get("weight_files") in (None, files)]

    def _refuse_another_model(
        self, run: str, checkpoints: Sequence[Checkpoint], weights: Callable[[Checkpoint], tuple[str, Any]]
    ) -> None:
        """Refuse numbers of a second model under the name of one run, where they would replace or go on with the
        first's.

        A model is its repository or folder, that of all its steps; with equal weights it is the same one, also where
        it was moved, a series under its name. Measurements that do not say where they come from are of the run that
        was trained in the root, if one was.
        """
        root = self.store.path.parent
        home, step, here = _place(root), checkpoints[0].step, checkpoints[0].place()
        place = str(_model_of(here, step))
        is_inside = "commit" not in here and step is not None and Path(_place(here["checkpoint"])).is_relative_to(home)
        trained = home if run_facts(root).get("run") == run and not is_inside else place
        of_run = [(m, _model_of(m.provenance, m.step) or trained) for m in self.store if m.run == run]
        others = {m.step: (m, there) for m, there in of_run if there != place}
        if place == home or not others:
            return
        there = next(iter(others.values()))[1]
        # Step 0 shows nothing: many trainings begin with the same weights.
        common = next((one for one in reversed(checkpoints) if one.step != 0 and one.step in others), None)
        if common is not None and (common.step is None or os.path.basename(there) == os.path.basename(place)):
            name, value = weights(common)
            if others[common.step][0].provenance.get(name) == value:
                return
        what = "take their place" if step is None else "be drawn as one curve with them"
        raise InputError(f"root: {root} holds measurements of {there}, and {place} would {what}: choose another root")


def _model_of(source: Mapping[str, Any], step: int | None) -> str | None:
    """The repository, with its revision where that is no step, or the folder of a model; None where nothing is said."""
    checkpoint = source.get("checkpoint")
    if checkpoint is None:
        return None
    if "commit" in source:
        revision = source.get("revision")
        return checkpoint if step is not None or revision in (None, MAIN) else f"{checkpoint}@{revision}"
    folder = _place(checkpoint) if step is None else os.path.dirname(_place(checkpoint))
    return f"{folder}: {source[SUBMODULE]}" if source.get(SUBMODULE) else folder


def _place(folder: str | Path) -> str:
    """Where a folder really is, however it is named."""
    return os.path.realpath(folder)


def is_suspect(verdict: str) -> bool:
    return verdict.startswith(SUSPECT)
