"""Audit rules on names, sizes, hashes, configurations and tensor lists of a series, a function each."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_layers.data.tokenization import Tokenizer, tokenizer_hash
from lit_layers.files.hub import ADAPTER, MERGE_IT
from lit_layers.series.checkpoint import ALL, Checkpoint, Listing, Series
from lit_layers.series.checkpoint_sources import (
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Fingerprint,
    Format,
    at_once,
    formats,
    missing,
)


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
    by_problem: dict[tuple[str, str], list[Checkpoint]] = {}
    indexes: dict[str, bytes] = {}  # by hash: most steps share one
    for one in listed.chosen:
        for problem in _problems(one, indexes):
            by_problem.setdefault(problem, []).append(one)
    for (kind, message), checkpoints in by_problem.items():
        yield finding(kind, message, checkpoints)


def _problems(checkpoint: Checkpoint, indexes: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    files = checkpoint.source.files

    def read(path: str) -> bytes:
        if files[path].hash not in indexes:
            indexes[files[path].hash] = checkpoint.source.read(path)
        return indexes[files[path].hash]

    if CONFIG not in files:
        yield (
            "no config",
            (f"an adapter of peft without its model: {MERGE_IT}" if ADAPTER in files else f"{CONFIG} is missing"),
        )
    loaded = next(iter(formats(files)), None)
    if loaded is None and ADAPTER not in files:
        yield "no weights", "neither safetensors nor pytorch_model.bin: nothing to load"
    try:
        if loaded is not None and (lost := missing(loaded, files, read)):
            yield "missing shard", f"{', '.join(lost)} not there"
    except ValueError as error:
        yield "missing shard", str(error)


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
    steps = sorted(one.step for one in listed.listing.checkpoints if one.step is not None)
    expected = listed.listing.expected
    steps, expected = (
        sorted(one.step for one in listed.listing.checkpoints if one.step is not None),
        listed.listing.expected,
    )
    if listed.series.steps != ALL:
        return
    if expected is not None:
        if absent := tuple(step for step in expected if step not in set(steps)):
            yield Finding("gap", "belong to the series and are not there", absent)
        return
    holes = [*_holes(steps)]
    most = sum(map(len, holes)) > len(steps)  # as of checkpoints in bursts
    says = "missing from an even spacing" + (", unless it is none: that would be most of the steps" if most else "")
    yield from (Finding("gap", says, hole, note=most) for hole in holes)


def _holes(steps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """What is missing where one distance is a multiple of both its neighbours, which are equal."""
    widths = [after - before for before, after in itertools.pairwise(steps)]
    for place in range(1, len(widths) - 1):
        width = widths[place - 1]
        if width == widths[place + 1] and widths[place] > width and widths[place] % width == 0:
            yield tuple(range(steps[place] + width, steps[place + 1], width))


def double_names(listed: Listed) -> Iterator[Finding]:
    """Branches, folders or files that mean the same step."""
    by_name = {one.name: one for one in listed.listing.checkpoints}
    for names in listed.listing.doubles:
        kept = next(name for name in names if name in by_name)
        others = ", ".join(name for name in names if name != kept)
        yield finding("two names", f"{others} means the same step as {kept}, which is used", [by_name[kept]])


def reported(listed: Listed) -> Iterator[Finding]:
    """What the manifest says was reported."""
    for defect in listed.listing.defects:
        is_of_all = defect.suspect and not defect.steps
        suspects = [one for one in listed.chosen if is_of_all or one.step in defect.steps]
        if suspects or not defect.steps:
            yield finding("reported", f"{defect.says} ({defect.source})", suspects, note=not defect.suspect)


OF_A_LISTING = (broken, shared_shards, main_differs, gaps, double_names, reported)


def finding(kind: str, message: str, checkpoints: Iterable[Checkpoint], *, note: bool = False) -> Finding:
    """A finding about some checkpoints."""
    checkpoints = list(checkpoints)
    steps = tuple(one.step for one in checkpoints if one.step is not None)
    return Finding(kind, message, steps, tuple(one.name for one in checkpoints), note)


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
    """Steps whose config.json makes another function of the weights."""
    yield from _other_content("other config", chosen, CONFIG, _config, _differences)


def _config(text: str) -> str:
    from lit_layers.models.build import with_defaults  # torch, which an audit of a listing need not wait for

    settings = with_defaults(dict(json.loads(text))).items()
    kept = {name: value for name, value in settings if not name.startswith("_") and name not in _OF_A_FILE}
    return json.dumps(kept, sort_keys=True, default=str)


def _differences(value: str, usual: str) -> str:
    here, there = json.loads(value), json.loads(usual)
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    names = ["model_type"] if "model_type" in names else names[:3]
    return ", ".join(f"{name} is {here.get(name)}, not {there.get(name)}" for name in names) + ", as at the other steps"


def other_tokenizer(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose tokenizer does something else to text; one that is saved anew and does the same is the same."""
    for name, parsed in (TOKENIZER, _tokenizer), (TOKENIZER_CONFIG, _settings):
        says = f"another {name} than at the other steps"
        yield from _other_content("other tokenizer", chosen, name, parsed, lambda *_, says=says: says)


def _tokenizer(text: str) -> str:
    return tokenizer_hash(Tokenizer.from_str(text))


def _settings(text: str) -> str:
    """The settings that decide which tokens a text has: a token with its options is that token, null is not named."""
    settings = json.loads(text)
    chosen = {name: settings[name] for name in _OF_A_TEXT & settings.keys() if settings[name] is not None}
    said = {name: value.get("content") if isinstance(value, dict) else value for name, value in chosen.items()}
    return json.dumps(said, sort_keys=True)


def _other_content(
    kind: str,
    chosen: Sequence[Checkpoint],
    name: str,
    parsed: Callable[[str], str],
    says: Callable[[Any, Any], str],
) -> Iterator[Finding]:
    """Steps whose file says something else; the files are read only where their listed hashes differ."""
    listed = [(one, one.source.files[name].hash) for one in chosen if name in one.source.files]
    values: dict[str, str | None] = {}
    for one, content in listed if len({content for _, content in listed}) > 1 else ():
        if content not in values:
            try:
                values[content] = parsed(one.source.read(name).decode("utf-8", errors="replace"))
            except Exception:  # tokenizers raises bare Exception
                values[content] = None
    if values and not any(values.values()):  # tokenizers of a library newer than this one's
        values = {content: content for content in values}
    pairs = [(one, values[content]) for one, content in listed if values]
    yield from (finding("damaged", f"its {name} is damaged", [one]) for one, value in pairs if value is None)
    yield from differing(kind, [pair for pair in pairs if pair[1] is not None], says)


def other_size(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose weight files are longer or shorter together, where these are not read."""
    loaded = [(one, *next(iter(by_format.items()))) for one in chosen if (by_format := formats(one.source.files))]
    usual = Counter(kind for _, kind, _ in loaded).most_common(1)
    sizes = [(one, sum(file.size for file in files.values())) for one, kind, files in loaded if kind == usual[0][0]]
    middle = sorted(size for _, size in sizes)[len(sizes) // 2] if sizes else 0
    near = [(one, middle if abs(size - middle) <= _SIZE * middle else size) for one, size in sizes]

    def says(size: int, usual: int) -> str:
        return f"{size:,} bytes of weights, not {usual:,}"

    yield from differing("other size", near, says, first_may_differ=True)


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
