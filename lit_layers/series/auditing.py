"""The audit of a series, with one function for each rule on file names, sizes, hashes, configurations and tokenizers.

`SeriesMeasurements` compares the checkpoints with earlier measurements of them.
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lit_layers import records
from lit_layers.data.tokenization import Tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.files.hub import ADAPTER, MERGE_IT
from lit_layers.records import Measurement, Store, lineage_in
from lit_layers.schema import run_facts
from lit_layers.series import audit_weights
from lit_layers.series.audit_weights import Finding, Listed, finding
from lit_layers.series.checkpoint import ALL, Checkpoint, Series
from lit_layers.series.checkpoint_sources import (
    CONFIG,
    MAIN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Fingerprint,
    Memory,
    fingerprint,
    formats,
)
from lit_layers.series.local_series import SUBMODULE

Level = Literal["listing", "weights"]
# Faults that an audit cannot find, by its level.
UNSEEN: Mapping[Level, str] = {
    "listing": "anything but names, sizes and hashes of files, configurations and tokenizers",
    "weights": "weights scaled by one factor up to 2, averages of earlier and later steps, an update applied twice, "
    "another training at the first step or from a long gap on, small changes (noise, single values, biases and norms), "
    "a step under another number between its neighbours': docs/series.md has all",
}


@dataclass(frozen=True)
class Audit:
    """The findings of an audit on one series. The audit is clean if all findings are notes.

    Level `listing` checks names, sizes and hashes of files, level `weights` also checks the values of the weights.
    `levels` has the level of each checkpoint, by name. `level` is `listing` if any checkpoint that could be read has
    this level. `UNSEEN` lists the faults that an audit of each level cannot find.
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
        """Names of the checkpoints that no curve should include."""
        return frozenset(name for finding in self.findings if not finding.note for name in finding.names)

    @property
    def suspect_steps(self) -> tuple[int, ...]:
        """Steps that no curve should include, in order."""
        found = (each for each in self.findings if each.names and not each.note)
        return tuple(sorted({step for each in found for step in each.steps}))

    def verdict(self, checkpoint: Checkpoint) -> str:
        """Return the verdict on a checkpoint, which goes into the provenance of its measurements.

        It is `suspect: KINDS`, `note: KINDS (level: LEVEL)` or `clean (level: LEVEL)`. KINDS are kinds of findings.
        LEVEL is `weights` if the audit read the values of the checkpoint's weights, and `listing` otherwise.
        """
        findings = [finding for finding in self.findings if checkpoint.name in finding.names]
        kinds = dict.fromkeys(finding.kind for finding in findings if not finding.note)
        if kinds:
            return f"suspect: {', '.join(kinds)}"
        notes = ", ".join(dict.fromkeys(each.kind for each in findings))
        return f"{f'note: {notes}' if notes else 'clean'} (level: {self.levels[checkpoint.name]})"

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as JSON data."""
        verdict = {"clean": self.is_clean, "suspect_steps": self.suspect_steps, "suspects": sorted(self.suspect_names)}
        return {**asdict(self), "unseen": UNSEEN[self.level], **verdict}


def audit(
    series: Series,
    *,
    without: Collection[str] = (),
    memory: Memory | None = None,
) -> Audit:
    """Compare the chosen steps of a series with each other, with its last step and with its main branch.

    One request per revision lists the files on the Hub. Weights on this machine are hashed and read once. Their hashes
    and fingerprints are cached in `memory`, or else in the folder of the series, if it has one.

    Args:
        series: the series; its `steps` choose the checkpoints.
        without: names of checkpoints to skip.
        memory: the cache of hashes and fingerprints; None: the cache of the series, if it has one.

    Raises:
        InputError: the series does not exist or cannot be listed.
    """
    chosen = [one for one in series.checkpoints if one.name not in without]
    listed = Listed.read(series, chosen)
    findings = [each for rule in LIST_RULES for each in rule(listed)]
    steps = [one for one in chosen if one.step is not None]
    lost = _names(each for each in findings if each.kind == "no weights")
    complete = [one for one in steps if one.name not in lost]
    prints, damaged = _prints(complete, memory or series.memory)
    findings += [*damaged, *changes(complete, prints, _names(damaged))]
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


def _prints(steps: Sequence[Checkpoint], memory: Memory | None) -> tuple[dict[str, Fingerprint], list[Finding]]:
    """Return the fingerprints of checkpoints, by name, and a finding for each checkpoint that cannot be read.

    Only checkpoints with cached fingerprints, or with weights on this machine, have one.
    """
    prints: dict[str, Fingerprint] = {}
    damaged: list[Finding] = []
    for one in steps:
        key = one.source.identity()
        found = None if memory is None else memory.get(one.name, key)
        try:
            if found is None and one.source.is_here:
                found = fingerprint(one.source.tensors())
                if memory is not None:
                    memory.put(one.name, key, found)
        except InputError as error:
            damaged.append(finding("damaged", str(error), [one]))
        if found is not None:
            prints[one.name] = found
    return prints, damaged


def read_weights(checkpoint: Checkpoint, memory: Memory) -> None:
    """Read the weights of a downloaded checkpoint and cache its fingerprint for the next audit."""
    _prints([checkpoint], memory)


def _findings_of_values(
    listed: Listed, steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint], findings: Sequence[Finding]
) -> list[Finding]:
    """Find copied weights, NaN, infinite or outsized values, and checkpoints off the path of the weights in training.

    Checkpoints that are suspect for another reason, including those in `findings`, are left out of the path.
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
    on_path = audit_weights.path_findings(audit_weights.Path.make(rest, prints))
    named = _names(on_path)
    return [*found, *on_path, *audit_weights.returned_vectors([one for one in rest if one.name not in named], prints)]


def _names(findings: Iterable[Finding]) -> frozenset[str]:
    return frozenset(name for each in findings for name in each.names)


# ------------------------------------------------------------------------------------- rules on listed files


def broken(listed: Listed) -> Iterator[Finding]:
    """Find checkpoints that cannot be loaded."""
    lists = {one.name: one.source.files for one in listed.chosen}
    unconfigured = [one for one in listed.chosen if CONFIG not in lists[one.name]]
    adapters = [one for one in unconfigured if ADAPTER in lists[one.name]]
    empty = [one for one in listed.chosen if not formats(lists[one.name]) and one not in adapters]
    for kind, says, wrong in (
        ("no config", f"an adapter of peft without its model: {MERGE_IT}", adapters),
        ("no config", f"{CONFIG} is missing", [one for one in unconfigured if one not in adapters]),
        ("no weights", "neither safetensors nor pytorch_model.bin: nothing to load", empty),
    ):
        if wrong:
            yield finding(kind, says, wrong)


def shared_shards(listed: Listed) -> Iterator[Finding]:
    """Find weight files that several checkpoints have in common, although their other weight files differ."""
    last = listed.listing.last
    shards: dict[tuple[str, ...], list[str]] = {}  # names of checkpoints -> the weight files they share
    holders: dict[str, dict[str, str]] = {}  # hash -> checkpoint -> file
    compared = [*listed.chosen, *([last] if last is not None and last not in listed.chosen else [])]
    for one in compared:
        for path, content in one.source.weights().items():
            holders.setdefault(content, {}).setdefault(one.name, path)
    for paths in holders.values():
        if len({next(iter(listed.hashes[name].values())) for name in paths}) > 1:
            shards.setdefault(tuple(paths), []).append(next(iter(paths.values())))
    for names, paths in shards.items():
        sharing = [listed.compared[name] for name in names]
        message = f"{', '.join(sorted(paths))} is one file in {', '.join(one.label for one in sharing)}"
        yield finding("shared shard", message, [one for one in sharing if one is not last])


def main_differs(listed: Listed) -> Iterator[Finding]:
    """Find a `main` branch with weights that differ from those of the last step."""
    last, main, is_said = listed.listing.last, listed.listing.main, listed.listing.main_is_last
    if last and main and is_said is not False and listed.equal(last.name, main.name) is False:
        what = "although it is said to be the same" if is_said else "which it need not share"
        yield finding("main differs", f"main serves other weights than the last step, {what}", [last], note=not is_said)


def gaps(listed: Listed) -> Iterator[Finding]:
    """Find expected steps without a checkpoint.

    The manifest or run.json gives the expected steps. If neither does, the steps are expected to be evenly spaced.
    """
    if listed.series.steps != ALL:
        return
    steps = sorted(one.step for one in listed.listing.checkpoints if one.step is not None)
    expected = listed.listing.expected
    if expected is not None:
        if absent := tuple(step for step in expected if step not in set(steps)):
            yield Finding("gap", "belong to the series and are not there", absent)
        return
    holes = [*_holes(steps)]
    # If more steps are missing than present, checkpoints were saved in bursts on purpose. Then report no gap.
    if sum(map(len, holes)) <= len(steps):
        yield from (Finding("gap", "missing from an even spacing", hole) for hole in holes)


def _holes(steps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the missing steps of each hole in an even spacing.

    Let the last two steps before a gap be d apart, and the first two steps after it as well. The gap is a hole if its
    length is 2 d, 3 d, ...
    """
    widths = [after - before for before, after in itertools.pairwise(steps)]
    for index in range(1, len(widths) - 1):
        width = widths[index - 1]
        if width == widths[index + 1] and widths[index] > width and widths[index] % width == 0:
            yield tuple(range(steps[index] + width, steps[index + 1], width))


def reported(listed: Listed) -> Iterator[Finding]:
    """Report the checkpoints that the manifest lists as faulty."""
    for step, why in listed.listing.suspect.items():
        yield from (finding("reported", why, [one]) for one in listed.chosen if one.step == step)


LIST_RULES = (broken, shared_shards, main_differs, gaps, reported)


# Fields of config.json that do not change the model's function: file names, versions, precision, training options.
_NO_EFFECT = {
    *("transformers_version", "dtype", "torch_dtype", "use_cache", "gradient_checkpointing", "architectures"),
    *("name_or_path", "tokenizer_file", "special_tokens_map_file"),
}
# Fields of tokenizer_config.json that decide how a text is split into tokens.
_TOKENIZING = {
    *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "cls", "add_bos", "add_eos")),
    *("add_prefix_space", "do_lower_case", "model_max_length"),
}
_SIZE = 0.01  # relative difference of file sizes that is ignored: headers differ by bytes, precisions by a factor of 2


Content = frozenset[tuple[str, Any]]  # (name, value) of each field of a file


def differing(
    kind: str, contents: Sequence[tuple[Checkpoint, Content]], *, first_may_differ: bool = False
) -> Iterator[Finding]:
    """Find checkpoints whose content, such as the fields of a file, differs from the most frequent content.

    Two or more checkpoints with different content at the beginning or end of the series are only noted. Training runs
    make such changes on purpose, for example for a longer context. A change that is undone later is a fault. A change
    at only the last checkpoint is a fault. A change at only the first checkpoint is a fault unless `first_may_differ`.
    If two contents are equally frequent, the checkpoints of both are suspect.
    """
    counts = Counter(content for _, content in contents)
    most = max(counts.values(), default=0)
    usual = next((content for _, content in reversed(contents) if counts[content] == most), frozenset())
    runs = [
        (content, [one for one, _ in group]) for content, group in itertools.groupby(contents, lambda pair: pair[1])
    ]
    odd = []
    for index, (content, group) in enumerate(runs):
        stays = index in (0, len(runs) - 1) and len(group) > 1
        if content != usual:
            odd.append((content, group, stays or (first_may_differ and index == 0)))
    rivals = dict.fromkeys(content for content, _, note in odd if not note and counts[content] == most)
    for rival in rivals:
        both = [one for one, content in contents if content in (rival, usual)]
        says = f"{_differences(rival, usual)}, or those are wrong: as many steps have one as the other"
        yield finding(kind, says, both)
    for content, group, note in odd:
        if content not in rivals:
            yield finding(kind, _differences(content, usual), group, note=note)


def _differences(content: Content, usual: Content) -> str:
    here, there = dict(content), dict(usual)
    names = sorted({name for name, _ in content ^ usual})
    names = ["model_type"] if "model_type" in names else names[:3]
    differences = (f"{name} is {here.get(name, 'missing')}, not {there.get(name, 'missing')}" for name in names)
    return f"{', '.join(differences)}, as at the other steps"


def changes(
    chosen: Sequence[Checkpoint], prints: Mapping[str, Fingerprint], damaged: Collection[str]
) -> Iterator[Finding]:
    """Find checkpoints that differ in what training should not change, such as the tokenizer or shapes of tensors.

    The file sizes of the `damaged` checkpoints, given by name, are not compared.
    """
    read = [(one, prints[one.name]) for one in chosen if one.name in prints]
    yield from other_config(chosen)
    yield from other_tokenizer(chosen)
    yield from mislabelled_steps([one for one in chosen if one.source.is_here])
    shapes = [(one, frozenset((name, facts.shape) for name, facts in each.tensors.items())) for one, each in read]
    yield from differing("other tensors", shapes)
    precisions = [(one, frozenset({("precision", each.precision)})) for one, each in read]
    # A training run may start from a model in another precision.
    yield from differing("other precision", precisions, first_may_differ=True)
    whole = [one for one in chosen if one.name not in damaged]
    if len(read) < len(whole):
        yield from other_size(whole)


def other_config(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Find checkpoints with a config.json that defines a different model from that of most checkpoints."""
    yield from _other_content("other config", chosen, CONFIG, _config)


def _config(text: str) -> Content:
    from lit_layers.models.build import fill_defaults  # imports torch, which not every audit needs

    settings = fill_defaults(dict(json.loads(text))).items()
    kept = ((name, value) for name, value in settings if not name.startswith("_") and name not in _NO_EFFECT)
    return frozenset((name, json.dumps(value, sort_keys=True, default=str)) for name, value in kept)


def other_tokenizer(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Find checkpoints whose tokenizer splits text differently from that of most checkpoints.

    Tokenizer files that differ but split text in the same way are accepted.
    """
    yield from _other_content("other tokenizer", chosen, TOKENIZER, _tokenizer)
    yield from _other_content("other tokenizer", chosen, TOKENIZER_CONFIG, _settings)


def _tokenizer(text: str) -> Content:
    return frozenset({("hash of the tokenizer", tokenizer_hash(Tokenizer.from_str(text)))})


def _settings(text: str) -> Content:
    """Return the fields of a tokenizer_config.json that decide how a text is split into tokens.

    A special token is reduced to its text, and null values are dropped.
    """
    settings = json.loads(text)
    chosen = {name: settings[name] for name in _TOKENIZING & settings.keys() if settings[name] is not None}
    return frozenset(
        (name, value.get("content") if isinstance(value, dict) else value) for name, value in chosen.items()
    )


def _other_content(
    kind: str, chosen: Sequence[Checkpoint], name: str, parsed: Callable[[str], Content]
) -> Iterator[Finding]:
    """Find checkpoints whose file `name`, read by `parsed`, differs in content from that of most checkpoints.

    The files are read only if their listed hashes differ.
    """
    listed = [(one, one.source.files[name].hash) for one in chosen if name in one.source.files]
    read: dict[str, Content | None] = {}
    for one, hash_ in listed if len({hash_ for _, hash_ in listed}) > 1 else ():
        if hash_ not in read:
            try:
                read[hash_] = parsed(one.source.read(name).decode("utf-8", errors="replace"))
            except Exception:  # the tokenizers library raises a bare Exception for a damaged file
                read[hash_] = None
    if all(content is None for content in read.values()):  # written by a newer library: compare hashes instead
        read = {hash_: frozenset({(f"hash of {name}", hash_)}) for hash_ in read}
    pairs = [(one, read[hash_]) for one, hash_ in listed if read]
    yield from (finding("damaged", f"its {name} is damaged", [one]) for one, content in pairs if content is None)
    yield from differing(kind, [(one, content) for one, content in pairs if content is not None])


def other_size(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Find checkpoints whose weight files differ in total size from those of most checkpoints.

    This rule is used if the weights of some checkpoints were not read.
    """
    loaded = [(one, *next(iter(by_format.items()))) for one in chosen if (by_format := formats(one.source.files))]
    usual = Counter(kind for _, kind, _ in loaded).most_common(1)
    sizes = [(one, sum(file.size for file in files.values())) for one, kind, files in loaded if kind == usual[0][0]]
    middle = sorted(size for _, size in sizes)[len(sizes) // 2] if sizes else 0
    near = [(one, middle if abs(size - middle) <= _SIZE * middle else size) for one, size in sizes]
    contents = [(one, frozenset({("size of the weights", f"{size:,} bytes")})) for one, size in near]
    yield from differing("other size", contents, first_may_differ=True)


def mislabelled_steps(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Find checkpoints whose files record a different step from the one in their name.

    A difference between the two steps is not a fault if most checkpoints have this difference.
    """
    recorded = [(one, one.step, one.source.recorded_step()) for one in chosen]
    shifts = [(one, said - step) for one, step, said in recorded if said is not None and step is not None]
    usual = Counter(shift for _, shift in shifts).most_common(1)
    if usual and usual[0][1] * 2 > len(shifts):
        yield from differing("other step", [(one, frozenset({("count beside the name", n)})) for one, n in shifts])


# ------------------------------------------------------------------------------ verdicts in measurements


class SeriesMeasurements:
    """The measurements of a series in one run folder, with the verdicts of audits that are recorded in them."""

    def __init__(self, root: Path) -> None:
        self.run = run_facts(root).get("run") or root.resolve().name  # the folder may have another name now
        self.store = Store(root / "measurements.jsonl", lineage=lineage_in(root))

    def run_of(self, checkpoint: Checkpoint) -> str:
        """Return the name of the run that the checkpoint's measurements belong to.

        That is the checkpoint's own `run`, if it has one. Otherwise it is the name of the run whose folder receives the
        measurements or, if the series is a set of models without steps, the name of the model.
        """
        if checkpoint.run is not None:
            return checkpoint.run
        return checkpoint.name if checkpoint.step is None and checkpoint.has_series else self.run

    def refuse_another(
        self, checkpoints: Sequence[Checkpoint], weights: Callable[[Checkpoint], tuple[str, Any]]
    ) -> None:
        """Refuse checkpoints of a model that is not the one measured in this run folder.

        Otherwise measurements of two models would form one curve, or replace each other. `weights` returns the field of
        provenance that identifies a checkpoint's weights, and its value.

        Raises:
            InputError: the folder holds measurements of another series or model.
        """
        for run in dict.fromkeys(map(self.run_of, checkpoints)):
            self._refuse_another_model(run, [one for one in checkpoints if self.run_of(one) == run], weights)

    def verdict(self, checkpoint: Checkpoint, today: str, *, whole: bool) -> str:
        """Return the verdict of this audit (`today`), or that of an earlier audit that found the same files suspect.

        The earlier verdict is dropped if this audit also finds the checkpoint suspect. Otherwise it is dropped only if
        this audit covers the whole series (`whole`) and has read the checkpoint's weights.
        """
        if is_suspect(today) or (whole and "(level: listing)" not in today):
            return today
        earlier = (m.provenance["audit"] for m in self._current(checkpoint) if records.is_suspect(m))
        return next(earlier, today)

    def correct_verdicts(self, checkpoint: Checkpoint, verdict: str) -> None:
        """Write a checkpoint's measurements again if their verdict changes between suspect and not suspect."""
        for m in self._current(checkpoint):
            if records.is_suspect(m) != is_suspect(verdict):
                self.store.add(replace(m, provenance={**m.provenance, "audit": verdict}))

    def _current(self, checkpoint: Checkpoint) -> list[Measurement]:
        """Return the measurements of a checkpoint that belong to its current weight files.

        Measurements that record no weight files, because they were made during training, are included.
        """
        run, files = self.run_of(checkpoint), checkpoint.source.weights()
        of_step = (m for m in self.store if (m.run, m.step) == (run, checkpoint.step))
        return [m for m in of_step if m.provenance.get("weight_files") in (None, files)]

    def _refuse_another_model(
        self, run: str, checkpoints: Sequence[Checkpoint], weights: Callable[[Checkpoint], tuple[str, Any]]
    ) -> None:
        """Refuse checkpoints if their run already has measurements of another model.

        A model is identified by its repository, or by the folder that contains its checkpoints. A model that was moved
        is recognised by equal weights. A series that was moved must also have kept its name. Measurements that record
        no origin belong to the training run that wrote the run folder, if there was one.
        """
        root = self.store.path.parent
        home, step, here = _real(root), checkpoints[0].step, checkpoints[0].origin()
        origin = str(_model_of(here, step))
        is_inside = "commit" not in here and step is not None and Path(_real(here["checkpoint"])).is_relative_to(home)
        trained = home if run_facts(root).get("run") == run and not is_inside else origin
        of_run = [(m, _model_of(m.provenance, m.step) or trained) for m in self.store if m.run == run]
        others = {m.step: (m, there) for m, there in of_run if there != origin}
        if origin == home or not others:
            return
        there = next(iter(others.values()))[1]
        # Equal weights at step 0 prove nothing: many training runs begin with the same weights.
        common = next((one for one in reversed(checkpoints) if one.step != 0 and one.step in others), None)
        if common is not None and (common.step is None or os.path.basename(there) == os.path.basename(origin)):
            name, value = weights(common)
            if others[common.step][0].provenance.get(name) == value:
                return
        what = "take their place" if step is None else "be drawn as one curve with them"
        raise InputError(f"root: {root} holds measurements of {there}, and {origin} would {what}: choose another root")


def _model_of(source: Mapping[str, Any], step: int | None) -> str | None:
    """Return what identifies a model in its provenance: its repository or folder; None if neither is recorded.

    The revision is appended to a repository, unless it is `main` or the branch of a step.
    """
    checkpoint = source.get("checkpoint")
    if checkpoint is None:
        return None
    if "commit" in source:
        revision = source.get("revision")
        return checkpoint if step is not None or revision in (None, MAIN) else f"{checkpoint}@{revision}"
    folder = _real(checkpoint) if step is None else os.path.dirname(_real(checkpoint))
    return f"{folder}: {source[SUBMODULE]}" if source.get(SUBMODULE) else folder


def _real(folder: str | Path) -> str:
    """Return the absolute path of a folder, with links resolved."""
    return os.path.realpath(folder)


def is_suspect(verdict: str) -> bool:
    return verdict.startswith("suspect")
