"""A layer that is enough, as a folder: the model up to it, its probe, its tokenizer, and its page with tables."""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, save_tokenizer, tokenizer_hash
from lit_layers.durable import sync
from lit_layers.errors import InputError
from lit_layers.models.build import save, truncate, weights_hash
from lit_layers.models.costs import Cost, measure_costs
from lit_layers.models.saved import has_head, open_plainly
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.select.classifier import FACTS, NAMES, HeadFacts, ProbeHead

AFTER_NORM = (
    " What such a model returns as its last state has been through the final norm, which was made for the last block "
    "of the source model; the probe reads the state before it."
)
ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of an exported model beside the model itself."""

    source: str  # name of the model on the Hub, or a folder
    num_layers: int  # of that model
    rule: str  # by which the layer was chosen, as in `choose_layer`
    tolerance: float | None
    metric: str  # name of all scores here
    validation: Mapping[int, float]  # layer -> score, which the choice was made on
    test_chosen: float  # of the chosen layer
    test_last: float  # of the last one
    costs: Sequence[Cost] = ()
    revision: str | None = None
    commit: str | None = None
    weights_hash: str | None = None  # of the source model; found by the export if not given
    picture: str | Path | None = None  # of the validation curve
    licence: str | None = None  # of the source model
    notes: Sequence[str] = ()  # sentences for the reader

    @classmethod
    def of(cls, content: "Card | Mapping[str, Any]") -> "Card":
        """A card of fields by name.

        Raises:
            InputError: a field that is missing or unknown.
        """
        if isinstance(content, Card):
            return content
        required = {field.name: field.default is MISSING for field in fields(cls)}
        for name in content:
            if name not in required:
                raise InputError(f"card: {name!r} is no field of a card; they are {', '.join(required)}")
        if missing := [name for name, needed in required.items() if needed and name not in content]:
            raise InputError(f"card: {missing[0]!r} is missing")
        return cls(**content)


def render(card: Card, facts: HeadFacts, *, package: str, picture: str | None, final_norm: bool = True) -> str:
    """The README.md of an export, in Markdown with the header that model pages of the Hub begin with.

    `package` is the one that opens the model, `picture` the name of a file beside it; `final_norm` says whether the
    model has a norm behind its last block.
    """
    name = card.source.rstrip("/").rpartition("/")[2]
    does = "a classifier" if facts.kind == "classification" else "a regression"
    given = "images" if package == "timm" else "texts"
    parts = [
        _header(card, package, facts),
        f"# {name}, cut after block {facts.layer} of {card.num_layers}, with {does} for {facts.task}",
        f"The first {facts.layer} of the {card.num_layers} blocks of `{card.source}`, unchanged, and a linear probe on "
        f"the state that the last of them leaves (before any final norm), {_pooling(facts, given)}.",
        markdown(("", ""), _facts(card, facts)),
        "## Use",
        _use(facts, given),
        f"The model alone is an ordinary model of {package}: {_plain(package)}." + (AFTER_NORM if final_norm else ""),
        "## Scores",
        f"On the validation rows, which the layer was chosen on ({card.metric}):",
        score_table(card.validation, card.metric, chosen=facts.layer),
        *([f"![{card.metric} over layers]({picture})"] if picture else []),
        "On the test rows, which no choice was made on:",
        markdown(
            ("layer", card.metric),
            [
                (f"{facts.layer} (chosen)", f"{card.test_chosen:.4f}"),
                (f"{card.num_layers} (last)", f"{card.test_last:.4f}"),
            ],
        ),
        *(["## Costs", cost_table(card.costs), measured_on(card.costs)] if card.costs else []),
        *(["## Notes", "\n".join(f"- {note}" for note in card.notes)] if card.notes else []),
        "## Licence",
        f"The weights are those of `{card.source}`, and its licence holds for them"
        + (f": {card.licence}." if card.licence else ": look there."),
    ]
    return "\n\n".join(parts) + "\n"


def _header(card: Card, package: str, facts: HeadFacts) -> str:
    content: dict[str, Any] = {"library_name": package, "tags": ["lit_layers", "truncated", facts.kind]}
    if ON_HUB.fullmatch(card.source) and not Path(card.source).exists():
        content["base_model"] = card.source
    if card.licence:
        content["license"] = card.licence
    return f"---\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}---"


def _facts(card: Card, facts: HeadFacts) -> list[tuple[str, str]]:
    rule = card.rule if card.tolerance is None else f"{card.rule}, tolerance {card.tolerance:g}"
    rows = [
        ("source model", card.source),
        ("revision", card.revision),
        ("commit", card.commit),
        ("hash of its weights", card.weights_hash),
        ("task", facts.task),
        ("layer", f"{facts.layer} of {card.num_layers}"),
        ("chosen by", rule),
        ("pooling", facts.pooling),
        ("tokens kept of a text", None if facts.max_tokens is None else str(facts.max_tokens)),
        ("classes", None if facts.classes is None else str(len(facts.classes))),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _pooling(facts: HeadFacts, given: str) -> str:
    text = given == "texts"
    mean = "averaged over all real tokens" if text else "averaged over the patches"
    last = "taken at the last real token" if text else "taken at the last patch"
    phrases = {"last": last, "mean": mean, "cls": "taken at the first token"}
    return phrases.get(facts.pooling, f"pooled by {facts.pooling}")


def _plain(package: str) -> str:
    if package == "timm":
        return '`timm.create_model("local-dir:FOLDER", pretrained=True)`'
    return "`AutoModel.from_pretrained(FOLDER)` and `AutoTokenizer.from_pretrained(FOLDER)`"


def _use(facts: HeadFacts, given: str) -> str:
    example = '["a text", "another one"]' if given == "texts" else "pixel_values  # (n, channels, height, width)"
    lines = ["from lit_layers.select import load_classifier", "", 'classifier = load_classifier("FOLDER")']
    lines += [f"inputs = {example}", "classifier.predict(inputs)"]
    lines += ["classifier.probabilities(inputs)"] if facts.kind == "classification" else []
    return "\n".join(["```python", *lines, "```"])


def compare_costs(whole: str | Path, cut: str | Path, *, layer: int, num_layers: int, **options: Any) -> list[Cost]:
    """Costs of a saved model as it is, of its trunk (without the head, where it has one), and of its first blocks.

    `whole` and `cut` are folders, of `num_layers` and `layer` blocks; `options` are those of `measure_costs`.
    """
    all_blocks, kept = f"all {num_layers} blocks", f"first {layer} blocks" if layer > 1 else "first block"
    if not has_head(whole):
        return measure_costs({all_blocks: whole, kept: cut}, trunks=[kept], **options)
    variants = {f"{all_blocks} and head": whole, all_blocks: whole, kept: cut}
    return measure_costs(variants, trunks=[all_blocks, kept], **options)


KB, MB, GB = 1e3, 1e6, 1e9


def score_table(scores: Mapping[int, float], metric: str, *, chosen: int) -> str:
    """A row for each layer with its score; the chosen one is marked."""
    rows = [
        (str(layer), f"{score:.4f}", "chosen" if layer == chosen else "") for layer, score in sorted(scores.items())
    ]
    return markdown(("layer", metric, ""), rows)


def cost_table(costs: Sequence[Cost]) -> str:
    """A row for each model, with its share of the first one's costs."""
    rows = [_cost_row(cost, costs[0]) for cost in costs]
    thing = "text" if costs[0].num_tokens is not None else "image"
    header = ("model", "parameters", "on disk", "peak memory", f"one {thing}", "quartiles", f"{thing}s a second")
    return markdown(header, rows)


def measured_on(costs: Sequence[Cost]) -> str:
    """A sentence on how the costs were measured."""
    cost, machine = costs[0], costs[0].machine
    thing = "texts" if cost.num_tokens is not None else "images"
    length = f" of {cost.num_tokens} tokens" if cost.num_tokens is not None else ""
    return (
        f"Medians of {cost.num_rounds} rounds in which the models took turns, {thing}{length}, one alone or in batches "
        f"of {cost.batch_size}, on {machine.processor} ({_threads(machine.num_threads)}, {machine.system}, torch "
        f"{machine.torch}); peak memory is that of opening the model and running one batch, without the libraries."
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns stand under each other, the first to the left and the others to the right."""
    cells = [[_escaped(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = [("-" * (width - 1) + ":") if column else "-" * width for column, width in enumerate(widths)]
    lines = [
        [cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in (cells[0], rule, *cells[1:]))
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cost_row(cost: Cost, first: Cost) -> tuple[str, ...]:
    low, high = cost.latency_quartiles
    return (
        cost.name,
        f"{cost.parameters:,}{_share(cost.parameters, first.parameters)}",
        f"{_bytes(cost.bytes_on_disk)}{_share(cost.bytes_on_disk, first.bytes_on_disk)}",
        f"{_bytes(cost.peak_memory)}{_share(cost.peak_memory, first.peak_memory)}",
        f"{cost.latency * 1e3:.3g} ms{_share(cost.latency, first.latency)}",
        f"{low * 1e3:.3g} to {high * 1e3:.3g} ms",
        f"{cost.throughput:.3g}{_share(cost.throughput, first.throughput)}",
    )


def _share(value: float, of: float) -> str:
    return f" ({value / of:.0%})" if of > 0 else ""


def _bytes(count: int) -> str:
    unit, name = (GB, "GB") if count >= GB else (MB, "MB") if count >= MB else (KB, "kB")
    return f"{count / unit:.3g} {name}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


# Equal weights at other addresses: MKL's products differ in their last bits on many CPUs, and blocks add that up.
ROUNDING = 256  # units in the last place of the largest state

PAGE = "README.md"


def export(
    model: nn.Module,
    layer: int,
    head: ProbeHead,
    folder: str | Path,
    *,
    tokenizer: str | Path | TextTokenizer | None,
    card: Card | Mapping[str, Any],
    batches: Iterable[Batch],
    costs: Callable[[Path], Sequence[Cost]] | None = None,
    keep_lm_head: bool = False,
    overwrite: bool = False,
) -> Path:
    """Writes a folder with the blocks of `model` up to `layer` and its probe; returns its path.

    `AutoModel.from_pretrained` (of a timm model `timm.create_model("local-dir:...")`) opens it, and with `keep_lm_head`
    the Auto class of the model's own head; `load_classifier` opens all of it. It holds config.json, the weights in
    safetensors, the tokenizer, probe.safetensors, probe.json and README.md, in the precision that the model is in.

    The folder appears as a whole or not at all. Before it does, it is read again without this package, and the hidden
    states of `batches` at every layer are compared with those of `model` up to rounding, and the weights bit by bit.
    With `overwrite` an earlier export gives way; a folder that is none is never removed. `costs` is called with the
    folder that is checked and gives what the page says of costs, such as `compare_costs` of the whole model with it.

    Raises:
        InputError: a layer that is none of 1..L, a folder that is there, a model that cannot be cut, a tokenizer that
            is missing (or is given for images), a card with a field missing or unknown.
        ValueError: a head of another layer or width, no batch to check with.
        RuntimeError: the folder gives other hidden states than the model; nothing is left behind.
    """
    folder, view = Path(folder), LayeredModel(model)
    card = Card.of(card)
    if not 1 <= layer <= view.num_layers:
        kind = type(view.model).__name__
        raise InputError(f"layer: {kind} is exported up to one of its blocks 1..{view.num_layers}, got {layer}")
    if (head.facts.layer, head.dim) != (layer, view.dim):
        raise ValueError(
            f"expected a head of layer {layer} and width {view.dim}, got layer {head.facts.layer}, width {head.dim}"
        )
    text_tokenizer = _tokenizer(view, tokenizer)
    refuse_taken(folder, overwrite)
    if keep_lm_head and not _has_head(view):
        raise InputError(f"keep_lm_head: this {type(view.model).__name__} has no head to keep: leave it out")
    cut = truncate(view.model, layer, head=keep_lm_head)
    card = card if card.weights_hash else replace(card, weights_hash=weights_hash(view.model))
    with _draft_of(folder) as draft:
        save(cut, draft)
        fingerprint = weights_hash(cut)
        del cut
        if text_tokenizer is not None:
            save_tokenizer(text_tokenizer, draft)
        head.save(draft)
        _verify(draft, view, layer, head, text_tokenizer, batches, keep_lm_head, fingerprint)
        _write_page(card if costs is None else replace(card, costs=costs(draft)), head, view, draft)
        refuse_taken(folder, overwrite)  # that took a while
        _put_in_place(folder, draft)
    return folder


def _tokenizer(view: LayeredModel, given: str | Path | TextTokenizer | None) -> TextTokenizer | None:
    if view.family.sees_images:
        if given is not None:
            raise InputError(f"tokenizer: a model of images needs none, got {given}")
        return None
    if given is None:
        raise InputError("tokenizer: a model of texts is exported with its tokenizer, got none")
    return given if isinstance(given, TextTokenizer) else load_tokenizer(str(given))


def _has_head(view: LayeredModel) -> bool:
    return view.has_head


def refuse_taken(folder: Path, overwrite: bool) -> None:
    """Refuses a folder that is there, unless it is an earlier export and may be overwritten.

    Raises:
        InputError: saying which of both.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not overwrite:
        raise InputError(f"{folder} is there already: choose another folder, or allow to overwrite it")
    if not folder.is_dir() or folder.is_symlink() or (any(folder.iterdir()) and not (folder / FACTS).is_file()):
        raise InputError(f"{folder} is no earlier export (it has no {FACTS}) and is not overwritten: choose another")


@contextmanager
def _draft_of(folder: Path) -> Iterator[Path]:
    """A folder beside the one to be; what is still there of it at the end is removed."""
    draft = folder.absolute().with_name(f".{folder.absolute().name}.draft-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write beside {folder}: {(error.strerror or str(error)).lower()}") from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_page(card: Card, head: ProbeHead, view: LayeredModel, draft: Path) -> None:
    picture = None
    if card.picture is not None:
        source = Path(card.picture)
        if not source.is_file():
            raise InputError(f"card: expected a file with a picture, {source} is none")
        picture = f"validation{source.suffix}"
        shutil.copyfile(source, draft / picture)
    has_norm = view.family.norm is not None
    page = render(card, head.facts, package=view.family.package, picture=picture, final_norm=has_norm)
    (draft / PAGE).write_text(page, encoding="utf-8")


def _verify(
    draft: Path,
    view: LayeredModel,
    layer: int,
    head: ProbeHead,
    tokenizer: TextTokenizer | None,
    batches: Iterable[Batch],
    keep_lm_head: bool,
    fingerprint: str,
) -> None:
    attention = None if view.family.sees_images else view.attention
    reloaded: nn.Module = open_plainly(draft, head=keep_lm_head, attention=attention, safetensors_only=True)
    again = LayeredModel(reloaded.to(view.device))
    num_batches = 0
    for batch in batches:
        num_batches += 1
        expected, got = view.trajectory(batch).hidden[: layer + 1], again.trajectory(batch).hidden
        if expected.shape != got.shape or expected.dtype != got.dtype:
            raise RuntimeError(f"the exported model has states {_kind(got)}, the model itself {_kind(expected)}")
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            largest = (one.double() - other.double()).abs().max().item()
            if not largest <= min(ROUNDING * torch.finfo(one.dtype).eps, 0.05) * one.abs().max().item():
                raise RuntimeError(
                    f"the exported model differs from the model itself at layer {number}, by up to {largest:.3g}"
                )
    if weights_hash(again.model) != fingerprint:
        raise RuntimeError("the exported weights differ from those of the model itself")
    if not num_batches:
        raise ValueError("expected at least one batch to check the exported model with, got none")
    copy = ProbeHead.load(draft)
    if copy.facts != head.facts or not all(torch.equal(getattr(copy, n), getattr(head, n).cpu()) for n in NAMES):
        raise RuntimeError("the exported probe differs from the probe itself")
    if tokenizer is not None:
        reread = load_tokenizer(str(draft)).tokenizer
        if tokenizer_hash(reread) != tokenizer_hash(tokenizer.tokenizer):
            raise RuntimeError("the exported tokenizer differs from the tokenizer itself")


def _kind(states: torch.Tensor) -> str:
    return f"of shape {tuple(states.shape)} in {str(states.dtype).removeprefix('torch.')}"


def _put_in_place(folder: Path, draft: Path) -> None:
    """The draft becomes the folder; an earlier one is gone only after that."""
    for file in draft.iterdir():
        sync(file)
    sync(draft)
    before = draft.with_name(f"{draft.name}-before")
    if folder.exists():
        folder.rename(before)
    try:
        draft.rename(folder)
    except OSError:
        if before.exists():
            before.rename(folder)
        raise
    sync(folder.absolute().parent)
    shutil.rmtree(before, ignore_errors=True)
