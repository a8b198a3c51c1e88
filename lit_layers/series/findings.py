"""What can be wrong with a series: one rule a function, over names, sizes and hashes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lit_layers.schedule import Schedule
from lit_layers.series.checkpoint import Checkpoint, Listing, Series
from lit_layers.series.files import Format, formats, missing
from lit_layers.series.selection import ALL

Kind = Literal[
    "identical weights",
    "equal to the final step",
    "equal to main",
    "main differs",
    "shared shard",
    "missing shard",
    "no weights",
    "no config",
    "gap",
    "out of grammar",
    "two names",
    "reported",
    "other config",
    "other tokenizer",
    "other size",
    "other tensors",
    "other precision",
    "other step",
    "damaged",
    "not finite",
    "zero weights",
    "value out of range",
    "rounded copy",
    "out of line",
    "swapped",
]
# What a listing shows of hashes alone, or not at all: without the weights nobody can say that it is mended.
OF_WEIGHTS: frozenset[Kind] = frozenset(
    {
        *("identical weights", "equal to the final step", "other tensors", "other precision", "damaged"),
        *("not finite", "zero weights", "value out of range", "rounded copy", "out of line", "swapped"),
    }
)
Weights = Mapping[Format, Mapping[str, str]]  # format -> file -> hash


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or with `note` only worth knowing; `names` are the checkpoints that it makes suspect."""

    kind: Kind
    message: str
    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    note: bool = False


def weights_of(checkpoint: Checkpoint) -> Weights:
    """The hashes of the weight files, by format, the one that is loaded first."""
    found = formats(checkpoint.source.files)
    return {kind: {path: file.hash for path, file in files.items()} for kind, files in found.items()}


def _equal(one: Weights, other: Weights) -> bool | None:
    """Whether both hold the same contents, in the format that is loaded where both have it; None if they share none."""
    for kind, files in one.items():
        if files and other.get(kind):
            return set(files.values()) == set(other[kind].values())
    return None


def _loaded(weights: Weights) -> tuple[Format | None, Mapping[str, str]]:
    for kind, files in weights.items():
        if files:
            return kind, files
    return None, {}


def broken(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Checkpoints that cannot be loaded."""
    lacking: dict[tuple[Kind, str, bool], list[Checkpoint]] = {}
    indexes: dict[str, bytes] = {}  # by hash: most steps share one
    for found in chosen:
        for problem in _problems(found, indexes):
            lacking.setdefault(problem, []).append(found)
    for (kind, message, note), these in lacking.items():
        yield finding(kind, message, these, note=note)


def _problems(checkpoint: Checkpoint, indexes: dict[str, bytes]) -> Iterator[tuple[Kind, str, bool]]:
    files = checkpoint.source.files

    def read(path: str) -> bytes:
        if files[path].hash not in indexes:
            indexes[files[path].hash] = checkpoint.source.read(path)
        return indexes[files[path].hash]

    if "config.json" not in files:
        yield "no config", "config.json is missing: the model cannot be loaded", False
    found = formats(files)
    if not found:
        yield "no weights", "neither safetensors nor pytorch_model.bin: nothing to load", False
    for place, kind in enumerate(found):
        try:
            lost = missing(kind, files, read)
        except ValueError as error:
            yield "missing shard", f"{error}: nobody can say which shards belong to it", place > 0
            continue
        if lost:
            rest = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            loaded = "not loaded where there are safetensors" if place else "the model cannot be loaded"
            yield "missing shard", f"{', '.join(lost[:3])}{rest} not there ({kind}): {loaded}", place > 0


def duplicates(
    chosen: Sequence[Checkpoint], last: Checkpoint | None, listing: Listing, weights: Mapping[str, Weights]
) -> Iterator[Finding]:
    """Groups of equal weights. The last step is right by itself; of others nobody knows which one is."""
    final = [
        found
        for found in chosen
        if last is not None and found is not last and _equal(weights[found.name], weights[last.name])
    ]
    main = listing.main
    as_main = [
        found
        for found in chosen
        if main is not None and found is not last and found not in final
        if _equal(weights[found.name], weights[main.name])
    ]
    if final and last is not None:
        early = last.step is not None and last.step <= listing.warm_up
        yield finding(
            "equal to the final step",
            "learning rate still 0, as far as is known" if early else f"serve the weights of step {last.step}",
            final,
            note=early,
        )
    if as_main and main is not None:
        yield finding("equal to main", "serve the weights of main", as_main)
    rest = [found for found in chosen if found is not last and found not in final and found not in as_main]
    for group in _groups(rest, weights):
        early = all(found.step is not None and found.step <= listing.warm_up for found in group)
        yield finding(
            "identical weights",
            "may be genuine: the learning rate starts at 0" if early else "the same files under several names",
            group,
            note=early,
        )


def _groups(checkpoints: Sequence[Checkpoint], weights: Mapping[str, Weights]) -> Iterator[list[Checkpoint]]:
    by_content: dict[tuple[Format, frozenset[str]], list[Checkpoint]] = {}
    for found in checkpoints:
        for kind, files in weights[found.name].items():
            if files:
                by_content.setdefault((kind, frozenset(files.values())), []).append(found)
    told: set[tuple[str, ...]] = set()
    for (kind, _), group in by_content.items():
        names = tuple(found.name for found in group)
        loaded = any(_loaded(weights[name])[0] == kind for name in names)  # else safetensors say better
        if len(group) > 1 and loaded and names not in told:
            told.add(names)
            yield group


def shared_shards(
    chosen: Sequence[Checkpoint], last: Checkpoint | None, weights: Mapping[str, Weights]
) -> Iterator[Finding]:
    """Single files that two steps share while the rest of them differs."""
    compared = list(chosen) if last is None or last in chosen else [*chosen, last]
    holders: dict[str, list[tuple[Checkpoint, str]]] = {}
    for found in compared:
        for path, content in _loaded(weights[found.name])[1].items():
            holders.setdefault(content, []).append((found, path))
    groups: dict[tuple[str, ...], tuple[list[Checkpoint], list[str]]] = {}
    for held in holders.values():
        these = list({found.name: found for found, _ in held}.values())
        whole = {frozenset(_loaded(weights[found.name])[1].values()) for found in these}
        if len(these) > 1 and len(whole) > 1:
            names = tuple(found.name for found in these)
            groups.setdefault(names, (these, []))[1].append(held[0][1])
    for these, paths in groups.values():
        suspects = [found for found in these if found is not last]
        steps = ", ".join(_label(found) for found in these)
        yield finding("shared shard", f"{', '.join(sorted(paths))} is one file in {steps}", suspects)


def main_differs(last: Checkpoint | None, listing: Listing, weights: Mapping[str, Weights]) -> Iterator[Finding]:
    """A `main` that is not the last step."""
    if last is None or listing.main is None or listing.main_is_last is False:
        return
    one, other = weights[last.name], weights[listing.main.name]
    if _equal(one, other) is not False:
        return
    known = listing.main_is_last is True
    what = "although it is said to be the same" if known else "which it need not share"
    yield finding("main differs", f"main serves other weights than the last step, {what}", [last], note=not known)


def gaps(series: Series, listing: Listing) -> Iterator[Finding]:
    """Steps that should be there and are not."""
    steps = sorted(found.step for found in listing.checkpoints if found.step is not None)
    is_all = series.steps == ALL
    if listing.expected is not None and is_all:
        if absent := tuple(step for step in listing.expected if step not in set(steps)):
            yield Finding("gap", "belong to the series and are not there", absent)
    elif is_all:
        for hole in _holes(steps):
            yield Finding("gap", "missing from an even spacing", hole)
    elif steps and isinstance(series.steps, str | Mapping) and "log_spaced" not in series.steps:
        schedule = Schedule(series.steps).until(steps[-1])
        if absent := tuple(step for step in schedule if step not in set(steps)):
            yield Finding("gap", "asked for and not there", absent, note=True)


def _holes(steps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """What is missing where one distance (ratio) is a multiple (power) of both its neighbours, which are equal."""
    widths = [after - before for before, after in itertools.pairwise(steps)]
    for place in range(1, len(widths) - 1):
        width = widths[place - 1]
        if width == widths[place + 1] and widths[place] > width and widths[place] % width == 0:
            yield tuple(range(steps[place] + width, steps[place + 1], width))
            continue
        before, start, end, after = steps[place - 1 : place + 3]
        ratio = start // before if before > 0 and start % before == 0 else 1
        if ratio > 1 and after == end * ratio:
            hole = [start * ratio]
            while hole[-1] < end:
                hole.append(hole[-1] * ratio)
            if len(hole) > 1 and hole[-1] == end:
                yield tuple(hole[:-1])


def odd_names(listing: Listing) -> Iterator[Finding]:
    """Branches that look like steps and are not understood, or mean the same one."""
    if listing.strangers:
        names = ", ".join(listing.strangers)
        yield Finding("out of grammar", f"{names}: named like steps, but not as the others are; left out")
    by_name = {found.name: found.step for found in listing.checkpoints}
    for names in listing.doubles:
        steps = tuple(step for name in names if (step := by_name.get(name)) is not None)
        kept = next(name for name in names if name in by_name)
        others = ", ".join(name for name in names if name != kept)
        yield Finding("two names", f"{others} means the same step as {kept}, which is used", steps, (kept,))


def reported(chosen: Sequence[Checkpoint], listing: Listing) -> Iterator[Finding]:
    """What the manifest says was reported."""
    for defect in listing.defects:
        these = [found for found in chosen if found.step in defect.steps]
        if not defect.steps and defect.suspect:
            these = list(chosen)
        if not defect.steps or these:
            yield finding("reported", f"{defect.says} ({defect.source})", these, note=not defect.suspect)


def finding(kind: Kind, message: str, checkpoints: Iterable[Checkpoint], *, note: bool = False) -> Finding:
    """A finding about some checkpoints."""
    checkpoints = list(checkpoints)
    steps = tuple(found.step for found in checkpoints if found.step is not None)
    return Finding(kind, message, steps, tuple(found.name for found in checkpoints), note)


def _label(checkpoint: Checkpoint) -> str:
    return checkpoint.name if checkpoint.step is None else f"step {checkpoint.step}"
