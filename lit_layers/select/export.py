"""A layer that is enough, as a folder: the model up to it, its probe, its tokenizer, its page."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, save_tokenizer, tokenizer_hash
from lit_layers.durable import sync
from lit_layers.errors import InputError
from lit_layers.models.build import save, weights_hash
from lit_layers.models.costs import Cost
from lit_layers.models.plain import open_plainly
from lit_layers.models.truncation import truncate
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.select.card import Card, render
from lit_layers.select.head import FACTS, NAMES, ProbeHead

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
    found = _tokenizer(view, tokenizer)
    refuse_taken(folder, overwrite)
    if keep_lm_head and not _has_head(view):
        raise InputError(f"keep_lm_head: this {type(view.model).__name__} has no head to keep: leave it out")
    cut = truncate(view.model, layer, head=keep_lm_head)
    card = card if card.weights_hash else replace(card, weights_hash=weights_hash(view.model))
    with _draft_of(folder) as draft:
        save(cut, draft)
        fingerprint = weights_hash(cut)
        del cut
        if found is not None:
            save_tokenizer(found, draft)
        head.save(draft)
        _verify(draft, view, layer, head, found, batches, keep_lm_head, fingerprint)
        _write_page(card if costs is None else replace(card, costs=costs(draft)), head, view, draft)
        refuse_taken(folder, overwrite)  # that took a while
        _replace(folder, draft)
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


def _replace(folder: Path, draft: Path) -> None:
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
