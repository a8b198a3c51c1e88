"""A layer that is enough, as a folder: the model up to it, its probe, its tokenizer, and its page with tables."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import torch
import yaml
from torch import nn

from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, save_tokenizer, tokenizer_hash
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import naming, own_draft_of, sync
from lit_layers.models.build import save, weights_hash
from lit_layers.models.copies import truncate
from lit_layers.models.costs import Cost, measure_costs
from lit_layers.models.saved import has_head, open_plainly
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.select.classifier import FACTS, NAMES, HeadFacts, ProbeHead
from lit_layers.tasks.embeddings import save_sentence_encoder

POOLINGS = (  # of texts, of images
    {"last": "taken at the last real token", "mean": "averaged over all real tokens"},
    {"last": "taken at the last patch", "mean": "averaged over the patches"},
)
ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of an exported model beside the model itself."""

    source: str  # name of the model on the Hub, or a folder
    num_layers: int  # of that model
    rule: str  # by which the layer was chosen, as in `choose_layer`
    tolerance: float | None
    metric: str  # by which the layer was chosen
    validation: Mapping[int, float]  # layer -> its value, which the choice was made on
    test_chosen: float  # of the chosen layer
    test_last: float  # of the last one
    test_metric: str | None = None  # of the two; None: the same
    costs: Sequence[Cost] = ()
    revision: str | None = None
    commit: str | None = None
    weights_hash: str | None = None  # of the source model; found by the export if not given
    picture: str | Path | None = None  # of the validation curve
    licence: str | None = None  # of the source model
    notes: Sequence[str] = ()  # sentences for the reader


def render(
    card: Card, facts: HeadFacts, *, package: str, picture: str | None, final_norm: bool = True, of_images: bool = False
) -> str:
    """The README.md of an export, in Markdown with the header that model pages of the Hub begin with.

    `package` is the one that opens the model, `picture` the name of a file beside it; `final_norm` says whether the
    model has a norm behind its last block, `of_images` whether it takes images.
    """
    header: dict[str, Any] = {"library_name": package, "tags": ["lit_layers", "truncated", facts.kind]}
    if ON_HUB.fullmatch(card.source) and not Path(card.source).exists():
        header["base_model"] = card.source
    if card.licence:
        header["license"] = card.licence
    about = {
        "source model": card.source,
        "revision": card.revision,
        "commit": card.commit,
        "hash of its weights": card.weights_hash,
        "task": facts.task,
        "layer": f"{facts.layer} of {card.num_layers}",
        "chosen by": card.rule if card.tolerance is None else f"{card.rule}, tolerance {card.tolerance:g}",
        "pooling": facts.pooling,
        "tokens kept of a text": facts.max_tokens,
        "classes": None if facts.classes is None else len(facts.classes),
    }
    scores = {f"{facts.layer} (chosen)": card.test_chosen, f"{card.num_layers} (last)": card.test_last}
    test = [(name, f"{score:.4f}") for name, score in scores.items()]
    template = files("lit_layers.select").joinpath("model_page.md.jinja").read_text(encoding="utf-8")
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return (
        jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
        .from_string(template)
        .render(
            card=card,
            facts=facts,
            header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
            name=card.source.rstrip("/").rpartition("/")[2],
            is_classifier=facts.kind == "classification",
            package=package,
            is_vision=of_images,
            pooling=POOLINGS[of_images].get(facts.pooling, "taken at the first token"),
            about=markdown(("", ""), [(name, str(value)) for name, value in about.items() if value is not None]),
            validation=score_table(card.validation, card.metric, chosen=facts.layer),
            test=markdown(("layer", card.test_metric or card.metric), test),
            costs=f"{cost_table(card.costs)}\n\n{measured_on(card.costs)}" if card.costs else "",
            picture=picture,
            final_norm=final_norm,
        )
    )


def compare_costs(whole: str | Path, cut: str | Path, *, layer: int, num_layers: int, **options: Any) -> list[Cost]:
    """Costs of a saved model as it is, of its trunk (without the head, where it has one), and of its first blocks.

    `whole` and `cut` are folders, of `num_layers` and `layer` blocks; `options` are those of `measure_costs`.
    """
    all_blocks, kept = f"all {num_layers} blocks", f"first {layer} blocks" if layer > 1 else "first block"
    if not has_head(whole):
        return measure_costs({all_blocks: whole, kept: cut}, trunks=[kept], **options)
    variants = {f"{all_blocks} and head": whole, all_blocks: whole, kept: cut}
    return measure_costs(variants, trunks=[all_blocks, kept], **options)


def score_table(scores: Mapping[int, float], metric: str, *, chosen: int) -> str:
    """A row for each layer with its score; the chosen one is marked."""
    rows = [
        (str(layer), f"{score:.4f}", "chosen" if layer == chosen else "") for layer, score in sorted(scores.items())
    ]
    return markdown(("layer", metric, ""), rows)


def cost_table(costs: Sequence[Cost]) -> str:
    """A row for each model, with its share of the first one's costs."""
    first, thing = costs[0], "text" if costs[0].num_tokens is not None else "image"

    def shared(cost: Cost, name: str, text: str) -> str:
        whole = getattr(first, name)
        return f"{text} ({getattr(cost, name) / whole:.0%})" if whole > 0 else text

    rows = [
        (
            cost.name,
            shared(cost, "parameters", f"{cost.parameters:,}"),
            shared(cost, "bytes_on_disk", _bytes(cost.bytes_on_disk)),
            shared(cost, "peak_memory", _bytes(cost.peak_memory)),
            shared(cost, "latency", f"{cost.latency * 1e3:.3g} ms"),
            " to ".join(f"{seconds * 1e3:.3g}" for seconds in cost.latency_quartiles) + " ms",
            shared(cost, "throughput", f"{cost.throughput:.3g}"),
        )
        for cost in costs
    ]
    header = ("model", "parameters", "on disk", "peak memory", f"one {thing}", "quartiles", f"{thing}s a second")
    return markdown(header, rows)


def measured_on(costs: Sequence[Cost]) -> str:
    """A sentence on how the costs were measured."""
    cost, machine = costs[0], costs[0].machine
    things = "images" if cost.num_tokens is None else f"texts of {cost.num_tokens} tokens"
    threads = "1 thread" if machine.num_threads == 1 else f"{machine.num_threads} threads"
    return (
        f"Medians of {cost.num_rounds} rounds in which the models took turns, {things}, one alone or in batches "
        f"of {cost.batch_size}, on {machine.processor} ({threads}, {machine.system}, torch "
        f"{machine.torch}); peak memory is that of the weights and of running one batch."
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns stand under each other, the first to the left and the others to the right."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    cells.insert(1, ["-" * (width - 1) + (":" if column else "-") for column, width in enumerate(widths)])
    sides = [str.rjust if column else str.ljust for column in range(len(header))]
    lines = [[side(text, width) for side, text, width in zip(sides, row, widths, strict=True)] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bytes(count: int) -> str:
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if count >= pair[0]), (1e3, "kB"))
    return f"{count / unit:.3g} {name}"


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
    card: Card,
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
            is missing (or is given for images).
        RuntimeError: the folder gives other hidden states than the model; nothing is left behind.
    """
    folder, view = Path(folder), LayeredModel(model)
    if not 1 <= layer <= view.num_layers:
        kind = type(view.model).__name__
        raise InputError(f"layer: {kind} is exported up to one of its blocks 1..{view.num_layers}, got {layer}")
    text_tokenizer = _tokenizer(view, tokenizer)
    refuse_taken(folder, overwrite)
    if keep_lm_head and not view.has_head:
        raise InputError(f"keep_lm_head: this {type(view.model).__name__} has no head to keep: leave it out")
    cut = truncate(view.model, layer, head=keep_lm_head)
    card = card if card.weights_hash else replace(card, weights_hash=weights_hash(view.model))
    with _draft_of(folder) as draft:
        save(cut, draft)
        fingerprint = weights_hash(cut)
        del cut
        if text_tokenizer is not None:
            save_tokenizer(text_tokenizer, draft)
            if view.family.norm is None:  # else its vectors are those before the final norm
                save_sentence_encoder(draft, head.facts.pooling, view.dim, head.facts.max_tokens)
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
    draft = own_draft_of(folder.absolute())
    with refused(f"cannot write beside {folder}"):
        draft.mkdir(parents=True)
    try:
        with naming(folder):
            yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_page(card: Card, head: ProbeHead, view: LayeredModel, draft: Path) -> None:
    picture = None
    if card.picture is not None:
        source = Path(card.picture)
        picture = f"validation{source.suffix}"
        shutil.copyfile(source, draft / picture)
    has_norm = view.family.norm is not None
    about = {"package": view.family.package, "of_images": view.family.sees_images}
    page = render(card, head.facts, picture=picture, final_norm=has_norm, **about)
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
    for batch in batches:
        expected, got = view.trajectory(batch).hidden[: layer + 1], again.trajectory(batch).hidden
        if expected.shape != got.shape or expected.dtype != got.dtype:
            raise RuntimeError(f"the exported model has states {got.shape} in {got.dtype}, not {expected.shape}")
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            largest = (one.double() - other.double()).abs().max().item()
            if not largest <= min(ROUNDING * torch.finfo(one.dtype).eps, 0.05) * one.abs().max().item():
                raise RuntimeError(
                    f"the exported model differs from the model itself at layer {number}, by up to {largest:.3g}"
                )
    copy, same = ProbeHead.load(draft), {"weights": weights_hash(again.model) == fingerprint}
    tensors = all(torch.equal(getattr(copy, name), getattr(head, name).cpu()) for name in NAMES)
    same["probe"] = copy.facts == head.facts and tensors
    if tokenizer is not None:
        reread = load_tokenizer(str(draft)).tokenizer
        same["tokenizer"] = tokenizer_hash(reread) == tokenizer_hash(tokenizer.tokenizer)
    for part, is_same in same.items():
        if not is_same:
            raise RuntimeError(f"the exported {part} differs from that of the model itself")


def _put_in_place(folder: Path, draft: Path) -> None:
    """The draft, which is on the disk, becomes the folder."""
    for file in draft.iterdir():
        sync(file)
    sync(draft)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    sync(folder.absolute().parent)
