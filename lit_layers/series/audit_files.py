"""Audit rules on names, sizes, hashes, configurations and tensor lists of a series, a function each."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_layers.data.tokenization import Tokenizer, tokenizer_hash
from lit_layers.files.hub import ADAPTER, MERGE_IT
from lit_layers.schedule import Schedule
from lit_layers.series.checkpoint import ALL, Checkpoint, Listing, Series
from lit_layers.series.checkpoint_sources import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    Fingerprint,
    Format,
    at_once,
    formats,
    missing,
)

# Kinds of what a listing shows of hashes alone, or not at all: without the weights nobody can say that it is mended.
OF_WEIGHTS = {
    "identical weights",
    "equal to the final step",
    "other tensors",
    "other precision",
    "damaged",
    "not finite",
    "zero weights",
    "value out of range",
    "rounded copy",
    "out of line",
    "swapped",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or with `note` only worth knowing; `names` are the checkpoints that it makes suspect."""

    kind: str
    message: str
    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    note: bool = False


@dataclass(frozen=True)
class Listed:
    """What a listing shows of a series: the chosen checkpoints, the last step and `main`, and their weight files."""

    series: Series
    chosen: Sequence[Checkpoint]
    compared: Mapping[str, Checkpoint]  # by name: the last step, `main`, the chosen ones
    hashes: Mapping[str, Mapping[Format, frozenset[str]]]  # by checkpoint; the format that is loaded first

    @classmethod
    def of(cls, series: Series, chosen: Sequence[Checkpoint]) -> "Listed":
        """Ask for the list of files of each checkpoint, several at once."""
        beside = filter(None, (series.listing.last, series.listing.main))
        compared = {one.name: one for one in (*beside, *chosen)}
        hashes = at_once(_hashes_of, compared.values())
        return cls(series, chosen, compared, dict(zip(compared, hashes, strict=True)))

    @property
    def listing(self) -> Listing:
        return self.series.listing

    def equal(self, one: str, other: str) -> bool | None:
        """Return whether both hold the same contents, in the first format that both have; None if they share none."""
        for kind, contents in self.hashes[one].items():
            if kind in self.hashes[other]:
                return contents == self.hashes[other][kind]
        return None


def _hashes_of(checkpoint: Checkpoint) -> Mapping[Format, frozenset[str]]:
    by_format = formats(checkpoint.source.files)
    return {kind: frozenset(file.hash for file in files.values()) for kind, files in by_format.items() if files}


def broken(listed: Listed) -> Iterator[Finding]:
    """Checkpoints that cannot be loaded."""
    by_problem: dict[tuple[str, str, bool], list[Checkpoint]] = {}
    indexes: dict[str, bytes] = {}  # by hash: most steps share one
    for one in listed.chosen:
        for problem in _problems(one, indexes):
            by_problem.setdefault(problem, []).append(one)
    for (kind, message, note), checkpoints in by_problem.items():
        yield finding(kind, message, checkpoints, note=note)


def _problems(checkpoint: Checkpoint, indexes: dict[str, bytes]) -> Iterator[tuple[str, str, bool]]:
    files = checkpoint.source.files

    def read(path: str) -> bytes:
        if files[path].hash not in indexes:
            indexes[files[path].hash] = checkpoint.source.read(path)
        return indexes[files[path].hash]

    weights = formats(files)
    if "config.json" not in files:
        is_adapter = ADAPTER in files
        says = f"an adapter of peft without its model: {MERGE_IT}" if is_adapter else "config.json is missing"
        yield "no config", says, False
    if not weights and ADAPTER not in files:
        yield "no weights", "neither safetensors nor pytorch_model.bin: nothing to load", False
    for place, kind in enumerate(weights):
        unused = " (not loaded where there are safetensors)" if place else ""
        try:
            if lost := missing(kind, files, read):
                rest = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
                yield "missing shard", f"{', '.join(lost[:3])}{rest} not there{unused}", bool(place)
        except ValueError as error:
            yield "missing shard", f"{error}{unused}", bool(place)


def shared_shards(listed: Listed) -> Iterator[Finding]:
    """Single files that two steps share while the rest of them differs."""
    last = listed.listing.last
    shards: dict[tuple[str, ...], list[str]] = {}  # by the checkpoints that share them
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
    """A `main` that is not the last step."""
    last, main, is_said = listed.listing.last, listed.listing.main, listed.listing.main_is_last
    if last and main and is_said is not False and listed.equal(last.name, main.name) is False:
        what = "although it is said to be the same" if is_said else "which it need not share"
        yield finding("main differs", f"main serves other weights than the last step, {what}", [last], note=not is_said)


def gaps(listed: Listed) -> Iterator[Finding]:
    """Steps that should be there and are not."""
    series, expected = listed.series, listed.listing.expected
    steps = sorted(one.step for one in listed.listing.checkpoints if one.step is not None)
    if series.steps == ALL and expected is None:
        holes = [*_holes(steps)]
        most = sum(map(len, holes)) > len(steps)  # as of checkpoints in bursts
        says = "missing from an even spacing" + (", unless it is none: that would be most of the steps" if most else "")
        yield from (Finding("gap", says, hole, note=most) for hole in holes)
        return
    is_asked = series.steps != ALL
    if is_asked and steps and isinstance(series.steps, str | Mapping) and "log_spaced" not in series.steps:
        expected = tuple(Schedule(series.steps).until(steps[-1]))
    elif is_asked:
        return
    if absent := tuple(step for step in expected or () if step not in set(steps)):
        message = "asked for and not there" if is_asked else "belong to the series and are not there"
        yield Finding("gap", message, absent, note=is_asked)


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


def unreadable_names(listed: Listed) -> Iterator[Finding]:
    """Branches that look like steps and are not understood, or mean the same one."""
    listing = listed.listing
    if listing.strangers:
        names = ", ".join(listing.strangers)
        yield Finding("out of grammar", f"{names}: named like steps, but not as the others are; left out")
    by_name = {one.name: one for one in listing.checkpoints}
    for names in listing.doubles:
        kept = next(name for name in names if name in by_name)
        others = ", ".join(name for name in names if name != kept)
        yield finding("two names", f"{others} means the same step as {kept}, which is used", [by_name[kept]])


def reported(listed: Listed) -> Iterator[Finding]:
    """What the manifest says was reported, also of steps that are neither there nor missed as a gap."""
    listing = listed.listing
    known = {*(one.step for one in listing.checkpoints), *(listing.expected or ())}
    for defect in listing.defects:
        condemned = listed.chosen if defect.suspect and not defect.steps else ()
        suspects = [one for one in listed.chosen if one.step in defect.steps] or condemned
        if not defect.steps or suspects:
            yield finding("reported", f"{defect.says} ({defect.source})", suspects, note=not defect.suspect)
        if missing := [step for step in defect.steps if step not in known]:
            steps = f"no step {' and no step '.join(map(str, missing))}"
            yield finding("reported", f"{defect.says} ({defect.source}): there is {steps}", (), note=True)


OF_A_LISTING = (broken, shared_shards, main_differs, gaps, unreadable_names, reported)


def finding(kind: str, message: str, checkpoints: Iterable[Checkpoint], *, note: bool = False) -> Finding:
    """A finding about some checkpoints."""
    checkpoints = list(checkpoints)
    steps = tuple(one.step for one in checkpoints if one.step is not None)
    return Finding(kind, message, steps, tuple(one.name for one in checkpoints), note)


CONFIG = "config.json"
_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
# Fields of config.json that change no number: where it was saved, by what, in which precision, how to train on.
_OF_A_FILE = {
    *("transformers_version", "dtype", "torch_dtype", "use_cache", "gradient_checkpointing", "architectures"),
    *("name_or_path", "tokenizer_file", "special_tokens_map_file"),
}
# Fields of tokenizer_config.json that decide which tokens a text has.
_OF_A_TEXT = {
    *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "cls", "add_bos", "add_eos")),
    *("add_prefix_space", "do_lower_case", "model_max_length"),
}
_SIZE = 0.01  # relative: headers differ by some bytes, precisions by a factor of 2
_PRECISIONS, _HEADERS = (0.25, 0.5, 2, 4), 0.05  # beside which headers stay as long as they are


def differing(
    kind: str,
    values: Sequence[tuple[Checkpoint, Hashable]],
    says: Callable[[Any, Any], str],
    *,
    first_may_differ: bool = False,
) -> Iterator[Finding]:
    """Checkpoints without the usual value.

    What changes once and stays for two steps or more, to the end or from the beginning, is how a training may go on
    (a longer context, say): a note. What changes and comes back is an error, and so is a single last step. Where as
    many steps have another value, as of two, the usual one is not known.
    """
    counts = Counter(value for _, value in values)
    most = max(counts.values(), default=0)
    usual = next((value for _, value in reversed(values) if counts[value] == most), None)
    runs = [(value, [one for one, _ in group]) for value, group in itertools.groupby(values, lambda pair: pair[1])]
    odd = []
    for place, (value, group) in enumerate(runs):
        stays = place in (0, len(runs) - 1) and len(group) > 1
        if value != usual:
            odd.append((value, group, stays or (first_may_differ and place == 0)))
    rivals = dict.fromkeys(value for value, _, note in odd if not note and counts[value] == most)
    for rival in rivals:
        both = [one for one, value in values if value in (rival, usual)]
        yield finding(kind, f"{says(rival, usual)}, or those are wrong: as many steps have one as the other", both)
    for value, group, note in odd:
        if value not in rivals:
            yield finding(kind, says(value, usual), group, note=note)


def changes(
    chosen: Sequence[Checkpoint], prints: Mapping[str, Fingerprint], damaged: Collection[str]
) -> Iterator[Finding]:
    """What should stay the same along a training; the sizes of `damaged` files are no measure for others."""
    read = [(one, prints[one.name]) for one in chosen if one.name in prints]
    yield from other_config(chosen)
    yield from other_tokenizer(chosen)
    yield from mislabelled_steps([one for one in chosen if one.source.is_here])
    shapes = [(one, frozenset((name, facts.shape) for name, facts in each.tensors.items())) for one, each in read]
    yield from differing("other tensors", shapes, _tensor_differences)
    yield from differing(
        "other precision",  # the first step may hold a model that training began with
        [(one, each.precision) for one, each in read],
        lambda value, usual: f"its values are {value}, those of the other steps {usual}",
        first_may_differ=True,
    )
    whole = [one for one in chosen if one.name not in damaged]
    if len(read) < len(whole):
        yield from other_size(whole)


def other_config(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose config.json makes another function of the weights; read only where the listed files differ."""
    configs = _contents(chosen, CONFIG, _config)
    yield from (finding("damaged", f"its {CONFIG} is no JSON", [one]) for one, config in configs if config is None)
    yield from differing("other config", [pair for pair in configs if pair[1] is not None], _differences)


def _config(text: str) -> str | None:
    from lit_layers.models.build import with_defaults  # torch, which an audit of a listing need not wait for

    if (settings := _keys_and_values(text)) is None:
        return None
    kept = {
        name: value
        for name, value in with_defaults(settings).items()
        if not name.startswith("_") and name not in _OF_A_FILE
    }
    return json.dumps(kept, sort_keys=True, default=str)


def _keys_and_values(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _differences(value: str, usual: str) -> str:
    here, there = json.loads(value), json.loads(usual)
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    names = ["model_type"] if "model_type" in names else names
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    differences = (f"{name} is {here.get(name)}, not {there.get(name)}" for name in names[:3])
    return f"{', '.join(differences)}{more}, as at the other steps"


def other_tokenizer(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose tokenizer does something else to text; one that is saved anew and does the same is the same."""
    kinds = {TOKENIZER: _tokenizer, TOKENIZER_CONFIG: _settings, "special_tokens_map.json": _settings}
    for name in (*kinds, *_VOCABULARIES):
        files = [(one, one.source.files[name].hash) for one in chosen if name in one.source.files]
        parsed = _contents(chosen, name, kinds[name]) if name in kinds else []
        # Where none can be parsed, the tokenizers are of a library newer than this one's.
        if name in kinds and (name != TOKENIZER or any(each is not None for _, each in parsed)):
            yield from (finding("damaged", f"its {name} is damaged", [one]) for one, each in parsed if each is None)
            files = [pair for pair in parsed if pair[1] is not None]
        yield from differing("other tokenizer", files, lambda *_, name=name: f"another {name} than at the other steps")


def _settings(text: str) -> str | None:
    """The settings that decide which tokens a text has: a token with its options is that token, null is not named."""
    if (settings := _keys_and_values(text)) is None:
        return None
    chosen = {name: settings[name] for name in _OF_A_TEXT & settings.keys() if settings[name] is not None}
    said = {name: value.get("content") if isinstance(value, dict) else value for name, value in chosen.items()}
    return json.dumps(said, sort_keys=True)


def _tokenizer(text: str) -> str | None:
    try:
        return tokenizer_hash(Tokenizer.from_str(text))
    except Exception:  # the library raises bare Exception
        return None


def _contents(chosen: Sequence[Checkpoint], name: str, parsed: Callable[[str], Any]) -> list[tuple[Checkpoint, Any]]:
    """What a file says at each step that has it; nothing where all are listed with one hash."""
    listed = [(one, one.source.files[name].hash) for one in chosen if name in one.source.files]
    values: dict[str, Any] = {}
    if len({content for _, content in listed}) > 1:
        for one, content in listed:
            if content not in values:
                values[content] = parsed(one.source.read(name).decode("utf-8", errors="replace"))
    return [(one, values[content]) for one, content in listed if values]


def other_size(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose weight files are longer or shorter together: another precision, another architecture, cut short."""
    loaded = [(one, *next(iter(by_format.items()))) for one in chosen if (by_format := formats(one.source.files))]
    usual = Counter(kind for _, kind, _ in loaded).most_common(1)
    sizes = [(one, sum(file.size for file in files.values())) for one, kind, files in loaded if kind == usual[0][0]]
    middle = sorted(size for _, size in sizes)[len(sizes) // 2] if sizes else 0
    near = [(one, middle if abs(size - middle) <= _SIZE * middle else size) for one, size in sizes]
    first, second = [size for _, size in near[:2]] if len(near) > 1 else (0, 0)
    yield from differing(
        "other size",
        near,
        lambda size, usual: f"{size:,} bytes of weights, not {usual:,}",
        # The first step may hold a model that training began with, in a precision of its own.
        first_may_differ=any(abs(first - times * second) < _HEADERS * first for times in _PRECISIONS),
    )


def _tensor_differences(value: frozenset[Any], usual: frozenset[Any]) -> str:
    here, there = dict(value), dict(usual)
    other = sorted(name for name, _ in value ^ usual)[0]
    return f"{other} is {here.get(other, 'missing')}, not {there.get(other, 'missing')}, as at the other steps"


def mislabelled_steps(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps that say of themselves that they are another one; where most do, another count is meant."""
    recorded = [(one, one.step, one.source.recorded_step()) for one in chosen]
    shifts = [(one, said - step) for one, step, said in recorded if said is not None and step is not None]
    usual = Counter(shift for _, shift in shifts).most_common(1)
    if usual and usual[0][1] * 2 > len(shifts):
        yield from differing(
            "other step", shifts, lambda shift, usual: f"counts {shift - usual:+} steps beside the name"
        )
