"""A layer that is enough, as a folder: the model up to it, its probe, its tokenizer, and its page with tables."""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import torch
import yaml
from torch import nn

from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, save_tokenizer
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import naming, own_draft_of, sync
from lit_layers.models.build import save, weights_hash
from lit_layers.models.copies import truncate
from lit_layers.models.families import Network, trunk_of
from lit_layers.models.saved import load
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.select.choosing import Choice, Score
from lit_layers.select.classifier import FACTS, HeadFacts, ProbeHead
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
    choice: Choice
    tolerance: float | None  # None of a rule that has none
    seconds: Mapping[int, float] | None = None  # layer -> median seconds until it is reached; None: not measured
    costs: str = ""  # made of them by the export
    revision: str | None = None
    commit: str | None = None
    weights_hash: str | None = None  # of the source model, found by the export
    picture: str | Path | None = None  # of the validation curve
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
    choice = card.choice
    about = {
        "source model": card.source,
        "revision": card.revision,
        "commit": card.commit,
        "hash of its weights": card.weights_hash,
        "task": facts.task,
        "layer": f"{facts.layer} of {choice.num_layers}",
        "chosen by": choice.rule if card.tolerance is None else f"{choice.rule}, tolerance {card.tolerance:g}",
        "pooling": facts.pooling,
        "tokens kept of a text": facts.max_tokens,
        "classes": None if facts.classes is None else len(facts.classes),
    }
    kinds = {"chosen": facts.layer, "last": choice.num_layers}
    test = [(f"{layer} ({kind})", f"{choice.test[layer].value:.4f}") for kind, layer in kinds.items()]
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
            validation=score_table(choice.validation, choice.metric, chosen=facts.layer),
            test=markdown(("layer", choice.metric), test),
            picture=picture,
            final_norm=final_norm,
        )
    )


def score_table(scores: Mapping[int, Score], metric: str, *, chosen: int) -> str:
    """A row for each layer with its score; the chosen one is marked."""
    rows = [(str(n), f"{scores[n].value:.4f}", "chosen" if n == chosen else "") for n in sorted(scores)]
    return markdown(("layer", metric, ""), rows)


def cost_table(whole: LayeredModel, cut: nn.Module, layer: int, seconds: Mapping[int, float]) -> str:
    """A row for the model without its head and one for its first blocks, with the share of the former."""
    rows, first = [], list[float]()
    for blocks, network in ((whole.num_layers, whole.model), (layer, cut)):
        weights = [*trunk_of(network).parameters()]
        costs = [sum(each.numel() for each in weights), sum(each.nbytes for each in weights), seconds[blocks]]
        first = first or costs
        texts = (f"{costs[0]:,}", f"{costs[1] / 1e6:.3g} MB", f"{costs[2] * 1e3:.3g} ms")
        shares = [f"{text} ({cost / of:.0%})" for text, cost, of in zip(texts, costs, first, strict=True)]
        rows.append((f"{blocks} of {whole.num_layers} blocks", *shares))
    return markdown(("", "parameters", "weights", "median time"), rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, the first column to the left and the others to the right."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    cells.insert(1, ["---", *["---:"] * (len(header) - 1)])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


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
    keep_lm_head: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a folder with the blocks of `model` up to `layer` and its probe; returns its path.

    `AutoModel.from_pretrained` (of a timm model `timm.create_model("local-dir:...")`) opens it, and with `keep_lm_head`
    the Auto class of the model's own head; `load_classifier` opens all of it. It holds config.json, the weights in
    safetensors, the tokenizer, probe.safetensors, probe.json and README.md, in the precision that the model is in.

    The folder appears as a whole or not at all. Before it does, it is read again, and the hidden states of `batches` at
    every layer are compared with those of `model` up to rounding, and the weights bit by bit. With `overwrite` an
    earlier export gives way; a folder that is none is never removed.

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
    card = replace(card, weights_hash=weights_hash(view.model))
    if card.seconds is not None and layer < view.num_layers:
        card = replace(card, costs=cost_table(view, cut, layer, card.seconds))
    with _draft_of(folder) as draft:
        save(cut, draft)
        fingerprint = weights_hash(cut)
        del cut
        if text_tokenizer is not None:
            save_tokenizer(text_tokenizer, draft)
            if view.family.norm is None:  # else its vectors are those before the final norm
                save_sentence_encoder(draft, head.facts.pooling, view.dim, head.facts.max_tokens)
        head.save(draft)
        _verify(draft, view, layer, batches, fingerprint)
        _write_page(card, head, view, draft)
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
    """Refuse a folder that is there, unless it is an earlier export and may be overwritten.

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


def _verify(draft: Path, view: LayeredModel, layer: int, batches: Iterable[Batch], fingerprint: str) -> None:
    reloaded: Network = load(draft, dtype=view.dtype).to(view.device)
    if not view.family.sees_images:
        reloaded.set_attn_implementation(view.attention)
    again = LayeredModel(reloaded)
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
    if weights_hash(again.model) != fingerprint:
        raise RuntimeError("the exported weights differ from those of the model itself")


def _put_in_place(folder: Path, draft: Path) -> None:
    """The draft, which is on the disk, becomes the folder."""
    for file in draft.iterdir():
        sync(file)
    sync(draft)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    sync(folder.absolute().parent)
