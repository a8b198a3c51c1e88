"""What stays the same along a training: configuration, tokenizer, tensors, precision. One rule a function."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.findings import Finding, Kind, finding, weights_of
from lit_layers.series.fingerprints import Fingerprint
from lit_layers.series.sources import TOKENIZER

CONFIG = "config.json"
_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
# Fields of config.json that change no number: where it was saved, by what, in which precision, how to train on.
_OF_A_FILE = {"transformers_version", "dtype", "torch_dtype", "use_cache", "gradient_checkpointing", "architectures"}
_SIZE = 0.01  # relative: headers differ by some bytes, precisions by a factor of 2


def odd(
    values: Sequence[tuple[Checkpoint, Hashable]], *, first_may_differ: bool = False
) -> Iterator[tuple[list[Checkpoint], Any, Any, bool]]:
    """Checkpoints whose value is not the usual one, with theirs, the usual one, and whether that is only worth knowing.

    What changes once and stays for two steps or more, to the end or from the beginning, is how a training may go on
    (a longer context, say). What changes and comes back is an error, and so is a single last step.
    """
    counts = Counter(value for _, value in values)
    if len(counts) < 2:
        return
    most = max(counts.values())
    usual = next(value for _, value in reversed(values) if counts[value] == most)
    runs = [(value, list(group)) for value, group in itertools.groupby(values, lambda pair: pair[1])]
    for place, (value, group) in enumerate(runs):
        if value != usual:
            stays = place in (0, len(runs) - 1) and len(group) > 1
            note = stays or (first_may_differ and place == 0)
            yield [checkpoint for checkpoint, _ in group], value, usual, note


def _told(
    kind: Kind,
    values: Sequence[tuple[Checkpoint, Hashable]],
    says: Callable[[Any, Any], str],
    *,
    first_may_differ: bool = False,
) -> Iterator[Finding]:
    for these, value, usual, note in odd(values, first_may_differ=first_may_differ):
        yield finding(kind, says(value, usual), these, note=note)


def other_config(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose config.json makes another function of the weights; read only where the listed files differ."""
    texts = _read_where_different(chosen, CONFIG)
    known: dict[str, str | None] = {content: _config(content) for content in set(texts.values())}
    configs: list[tuple[Checkpoint, Hashable]] = [
        (one, config) for one in chosen if (config := known.get(texts.get(one.name, ""))) is not None
    ]
    for one in chosen:
        if one.name in texts and known[texts[one.name]] is None:
            yield finding("damaged", f"its {CONFIG} is no JSON", [one])
    yield from _told("other config", configs, _differences)


def _config(text: str) -> str | None:
    from lit_layers.models.build import with_defaults

    try:
        settings = json.loads(text)
    except ValueError:
        return None
    if not isinstance(settings, dict):
        return None
    kept = {
        name: value
        for name, value in with_defaults(settings).items()
        if not name.startswith("_") and name not in _OF_A_FILE
    }
    return json.dumps(kept, sort_keys=True, default=str)


def _differences(value: str, usual: str) -> str:
    here, there = json.loads(value), json.loads(usual)
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    if "model_type" in names:
        names = ["model_type"]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    said = (f"{name} is {here.get(name)}, not {there.get(name)}" for name in names[:3])
    return f"{', '.join(said)}{more}, as at the other steps"


def other_tokenizer(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose tokenizer does something else to text; one that is saved anew and does the same is the same."""
    texts = _read_where_different(chosen, TOKENIZER)
    known = {text: _tokenizer(text) for text in set(texts.values())}
    have = [(one, known[texts[one.name]]) for one in chosen if one.name in texts]
    yield from _told("other tokenizer", have, lambda *_: f"another {TOKENIZER} than at the other steps")
    for name in _VOCABULARIES:
        files = [(one, one.source.files[name].hash) for one in chosen if name in one.source.files]
        yield from _told("other tokenizer", files, lambda *_, name=name: f"another {name} than at the other steps")


def _tokenizer(text: str) -> str:
    from lit_layers.data.tokenization import Tokenizer, tokenizer_hash

    try:
        return tokenizer_hash(Tokenizer.from_str(text))
    except Exception:  # the library raises bare Exception; a damaged one is no other's equal
        return text


def _read_where_different(chosen: Sequence[Checkpoint], name: str) -> dict[str, str]:
    """A file's content at each step that has it; nothing where all are listed with one hash."""
    listed = {one.name: one.source.files[name].hash for one in chosen if name in one.source.files}
    if len(set(listed.values())) < 2:
        return {}
    contents: dict[str, str] = {}
    for one in chosen:
        if one.name in listed and listed[one.name] not in contents:
            contents[listed[one.name]] = one.source.read(name).decode("utf-8", errors="replace")
    return {step: contents[content] for step, content in listed.items()}


def other_size(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps whose weight files are longer or shorter together: another precision, another architecture, cut short."""
    sizes: list[tuple[Checkpoint, int]] = []
    formats: list[tuple[Checkpoint, Hashable]] = []
    for one in chosen:
        for kind, files in weights_of(one).items():
            sizes.append((one, sum(one.source.files[path].size for path in files)))
            formats.append((one, kind))
            break
    usual = Counter(kind for _, kind in formats).most_common(1)
    same = [pair for pair, (_, kind) in zip(sizes, formats, strict=True) if kind == usual[0][0]] if usual else []
    middle = sorted(size for _, size in same)[len(same) // 2] if same else 0
    near: list[tuple[Checkpoint, Hashable]] = [
        (one, middle if abs(size - middle) <= _SIZE * middle else size) for one, size in same
    ]
    yield from _told("other size", near, lambda size, usual: f"{size:,} bytes of weights, not {usual:,}")


def other_tensors(chosen: Sequence[Checkpoint], prints: Mapping[str, Fingerprint]) -> Iterator[Finding]:
    """Steps that hold other tensors, by names and shapes."""
    values: list[tuple[Checkpoint, Hashable]] = [
        (one, frozenset((name, facts.shape) for name, facts in prints[one.name].tensors.items()))
        for one in chosen
        if one.name in prints
    ]
    yield from _told("other tensors", values, _tensor_differences)


def _tensor_differences(value: frozenset[Any], usual: frozenset[Any]) -> str:
    here, there = dict(value), dict(usual)
    if missing := sorted(there.keys() - here.keys()):
        return f"{missing[0]} is missing" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    if more := sorted(here.keys() - there.keys()):
        return f"{more[0]} is there as at no other step"
    name = next(name for name in sorted(there) if here[name] != there[name])
    return f"{name} is {here[name]}, not {there[name]}"


def other_precision(chosen: Sequence[Checkpoint], prints: Mapping[str, Fingerprint]) -> Iterator[Finding]:
    """Steps stored in another precision, or rounded to one; the first may hold a model that training began with."""
    values: list[tuple[Checkpoint, Hashable]] = [
        (one, precision(prints[one.name])) for one in chosen if one.name in prints
    ]
    yield from _told(
        "other precision",
        values,
        lambda value, usual: f"its values are {value}, those of the other steps {usual}",
        first_may_differ=True,
    )


def precision(found: Fingerprint) -> str:
    """The coarsest precision that holds every sampled value of the matrices, or else the one they are stored in."""
    import torch

    stored = Counter(facts.dtype for facts in found.tensors.values()).most_common(1)
    matrices = [
        found.samples[name] for name, facts in found.tensors.items() if name in found.samples and is_matrix(facts)
    ]
    for coarse in (torch.bfloat16, torch.float16) if matrices else ():
        if all(bool((values.to(coarse).float() == values).all()) for values in matrices):
            return str(coarse).removeprefix("torch.")
    return stored[0][0] if stored else "nothing"


def is_matrix(facts: Any) -> bool:
    """Whether a tensor is large enough for what is said of it to be no chance."""
    return len(facts.shape) >= 2 and facts.count >= 128


def other_step(chosen: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Steps that say of themselves that they are another one; where most do, another count is meant."""
    recorded = {one.name: one.source.recorded_step() for one in chosen}
    shifts = {
        one.name: step - one.step for one in chosen if (step := recorded[one.name]) is not None and one.step is not None
    }
    usual = Counter(shifts.values()).most_common(1)
    if not usual or usual[0][1] * 2 <= len(shifts):
        return
    values: list[tuple[Checkpoint, Hashable]] = [(one, shifts[one.name]) for one in chosen if one.name in shifts]
    for these, _, _, note in odd(values):
        for one in these:
            yield finding("other step", f"says of itself that it is step {recorded[one.name]}", [one], note=note)
