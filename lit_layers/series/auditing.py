"""Whether a series is what it says: by names, sizes and hashes, and by the weights themselves where they are here."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from lit_layers.errors import InputError
from lit_layers.series import continuity, outliers
from lit_layers.series.checkpoint import Checkpoint, Series
from lit_layers.series.findings import (
    Finding,
    broken,
    duplicates,
    finding,
    gaps,
    main_differs,
    odd_names,
    reported,
    shared_shards,
    weights_of,
)
from lit_layers.series.fingerprints import Fingerprint, Memory, fingerprint, outline

REQUESTS_AT_ONCE = 8  # to the Hub, which allows some hundred a minute
Level = Literal["auto", "listing", "files", "weights"]
WEIGHTS, ORDER = "weights", "order"  # what was not checked of a checkpoint
_COPIES = ("identical weights", "equal to the final step")


@dataclass(frozen=True)
class Audit:
    """The verdicts on one series. No finding but notes means clean.

    `level` is what was looked at, of every checkpoint at least: `listing` are names, sizes and hashes, `files` also
    which tensors the weight files hold, `weights` their values. `unchecked` says of a checkpoint what was not.
    """

    series: str
    num_checked: int
    findings: tuple[Finding, ...]
    commits: Mapping[str, str] = field(default_factory=dict)
    level: Level = "listing"
    unchecked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _steps: Mapping[str, int] = field(default_factory=dict, repr=False)

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
        return tuple(sorted(self._steps[name] for name in self.suspect_names if name in self._steps))

    def verdict(self, checkpoint: Checkpoint) -> str:
        """What is to be said of one checkpoint, for its measurements: `clean`, `note: ...` or `suspect: ...`, and
        behind the first two what was not checked.
        """
        mine = [finding for finding in self.findings if checkpoint.name in finding.names]
        kinds = dict.fromkeys(finding.kind for finding in mine if not finding.note)
        if kinds:
            return f"suspect: {', '.join(kinds)}"
        notes = dict.fromkeys(finding.kind for finding in mine)
        rest = self.unchecked.get(checkpoint.name, ())
        return (f"note: {', '.join(notes)}" if notes else "clean") + (
            f"; not checked: {', '.join(rest)}" if rest else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "series": self.series,
            "checked": self.num_checked,
            "level": self.level,
            "clean": self.is_clean,
            "suspect_steps": list(self.suspect_steps),
            "suspects": sorted(self.suspect_names),
            "findings": [asdict(finding) for finding in self.findings],
            "unchecked": {name: list(rest) for name, rest in self.unchecked.items()},
            "commits": dict(self.commits),
        }


def audit(
    series: Series,
    *,
    without: Collection[str] = (),
    level: Level = "auto",
    memory: Memory | None = None,
) -> Audit:
    """What is wrong with the chosen steps of a series, compared with each other, its last step and its main branch.

    Asks the Hub for lists of files and for the small files that name shards, one list a revision; a local series is
    hashed, and its weights are read, once: what was found is kept in `memory`, the series' own folder if it has one.
    Checkpoints named in `without` are not looked at.

    Args:
        level: `listing` compares names, sizes and hashes, configurations and tokenizers; `files` also the tensors that
            the weight files say they hold; `weights` reads their values, and downloads them where they are not here,
            one checkpoint at a time. `auto`: the weights of those that are on this machine.

    Raises:
        InputError: a series that is not there, or cannot be had after several attempts.
    """
    if level not in get_args(Level):
        raise InputError(f"level: expected auto, listing, files or weights, got {level!r}")
    listing = series.listing
    chosen = [found for found in series.checkpoints if found.name not in without]
    last = listing.checkpoints[-1] if listing.checkpoints[-1].step is not None else None
    seen = {found.name: found for found in (*chosen, *filter(None, (last, listing.main)))}
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        weights = dict(zip(seen, pool.map(weights_of, seen.values()), strict=True))
    found = [
        *broken(chosen),
        *duplicates(chosen, last, listing, weights),
        *shared_shards(chosen, last, weights),
        *main_differs(last, listing, weights),
        *gaps(series, listing),
        *odd_names(listing),
        *reported(chosen, listing),
    ]
    steps = [one for one in chosen if one.step is not None]
    lost = {
        name for each in found if not each.note for name in each.names if each.kind in ("no weights", "missing shard")
    }
    prints, damaged = _prints([one for one in steps if one.name not in lost], level, memory or series.memory)
    found += [*damaged, *_along([one for one in steps if one.name not in lost], prints)]
    found, undecided = _of_values(steps, prints, last, found)
    described = {one.name: one.source.describe().get("commit") for one in chosen}
    unread = [one.name for one in chosen if not (one.name in prints and prints[one.name].digest)]
    made: Level = "files" if prints.keys() >= set(unread) else "listing"
    return Audit(
        series=series.name,
        num_checked=len(chosen),
        findings=tuple(found),
        commits={name: commit for name, commit in described.items() if commit is not None},
        level="weights" if not set(unread) - {*lost, *_names(damaged)} else made,
        unchecked=dict.fromkeys(unread, (WEIGHTS,)) | {one.name: (ORDER,) for one in chosen if one.name in undecided},
        _steps={one.name: one.step for one in chosen if one.step is not None},
    )


def _prints(
    steps: Sequence[Checkpoint], level: Level, memory: Memory | None
) -> tuple[dict[str, Fingerprint], list[Finding]]:
    """What the weights look like, one checkpoint after the other, and which cannot be read."""
    prints: dict[str, Fingerprint] = {}
    damaged: list[Finding] = []
    for one in steps:
        key = one.source.identity()
        kept = memory.get(one.name, key) if memory is not None and level in ("auto", "weights") else None
        if kept is not None:
            prints[one.name] = kept
            continue
        if level == "listing" or (level != "weights" and not one.source.is_here):
            continue
        was_here = one.source.is_here
        try:
            tensors = one.source.tensors()
            prints[one.name] = outline(tensors) if level == "files" else fingerprint(tensors)
        except InputError as error:
            damaged.append(finding("damaged", str(error), [one]))
            continue
        finally:
            if not was_here:
                one.source.drop()
        if memory is not None and level != "files":
            memory.put(one.name, key, prints[one.name])
    return prints, damaged


def remember(checkpoint: Checkpoint, memory: Memory) -> bool:
    """Reads the weights of a checkpoint of a series that is on this machine now, for the next audit."""
    return checkpoint.step is not None and bool(_prints([checkpoint], "auto", memory)[0])


def _along(steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint]) -> Iterator[Finding]:
    """What should stay the same along a training."""
    yield from continuity.other_config(steps)
    yield from continuity.other_tokenizer(steps)
    yield from continuity.other_step([one for one in steps if one.source.is_here])
    yield from continuity.other_tensors(steps, prints)
    yield from continuity.other_precision(steps, prints)
    if not all(one.name in prints for one in steps):
        yield from continuity.other_size(steps)


def _of_values(
    steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint], last: Checkpoint | None, found: list[Finding]
) -> tuple[list[Finding], frozenset[str]]:
    """The findings with those that the values of the weights show, and checkpoints whose order they do not show.

    Steps that are out for another reason are left out before the path of the rest is judged.
    """
    found = list(found)
    odd = _names(each for each in found if each.kind == "other tensors" and not each.note)
    read = [one for one in steps if one.name in prints and prints[one.name].digest and one.name not in odd]
    read = [one for one in read if prints[one.name].tensors]
    for place, each in enumerate(found):
        if each.kind in _COPIES and not each.note and set(each.names) <= _names_of(read):
            names = {*each.names, *([last.name] if each.kind == "equal to the final step" and last else ())}
            if outliers.is_frozen(read, prints, sorted(names)):
                found[place] = replace(each, note=True, message="hardly anything changes here")
    copied = _names(each for each in found if each.kind in _COPIES)
    mine = [*outliers.broken_values(read, prints), *outliers.lone_values(read, prints)]
    mine += [each for each in outliers.copies(read, prints, last) if not copied >= set(each.names)]
    found += mine
    out = _names(each for each in found if not each.note)
    path = outliers.Path.of([one for one in read if one.name not in out], prints)
    exchange = outliers.swapped(path)
    if exchange is not None:
        found.append(exchange)
    else:
        off = list(outliers.out_of_line(path))
        found += off
        path = path.without(_names(off))
    return found, outliers.undecided_order(path) - (_names([exchange]) if exchange else frozenset())


def _names(findings: "Iterator[Finding] | Sequence[Finding]") -> frozenset[str]:
    return frozenset(name for each in findings for name in each.names)


def _names_of(checkpoints: Sequence[Checkpoint]) -> frozenset[str]:
    return frozenset(one.name for one in checkpoints)
