"""A language model without some of its blocks: the harm of skipping each block, the export, and its README.md."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_layers.analyses.readout_scores import Interventions
from lit_layers.data.batches import Batches
from lit_layers.data.tokenization import load_tokenizer, save_tokenizer
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import CUSTOM, format_schedule
from lit_layers.measuring.one_model import measure
from lit_layers.models.build import save, weights_hash
from lit_layers.models.copies import remove_blocks
from lit_layers.models.costs import call_of, interleaved
from lit_layers.models.families import Network
from lit_layers.models.running_order import running_order
from lit_layers.models.saved import load
from lit_layers.models.view import Batch, LayeredModel, evaluating, upcast
from lit_layers.records import Record
from lit_layers.select.export import PAGE, PRUNED, ROUNDING, draft_of, fill_page, publish, refuse_taken

LEAST = "least:"
LOSS, HARM = "variant_loss", "variant_loss_difference"


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Cost and saving of removing blocks.

    Losses are in nats per predicted token, each with its 95% interval over the texts.

    Args:
        blocks: numbers of the removed blocks, from 1.
        num_blocks: number of blocks of the whole model.
        full: loss of the whole model.
        loss: loss without these blocks.
        harm: rise of the loss from `full` to `loss`, with the difference taken within each text.
        harms: the rise of the loss for each block of the whole model, if only this block is skipped.
        seconds: median seconds of a call on one text, for the whole model and without the blocks; set by
            `export_without`.
        num_tokens: number of tokens of that text.
    """

    blocks: tuple[int, ...]
    num_blocks: int
    full: Record
    loss: Record
    harm: Record
    harms: Mapping[int, Record]
    seconds: tuple[float, float] = (np.nan, np.nan)
    num_tokens: int = 0

    def content(self) -> dict[str, Any]:
        """Return the numbers as JSON data."""
        scores = {"full": self.full, "without": self.loss, "difference": self.harm}
        return {
            "without": list(self.blocks),
            "num_blocks": self.num_blocks,
            "loss": {name: _score(record) for name, record in scores.items()},
            "difference_without_block": {str(block): _score(record) for block, record in self.harms.items()},
            "seconds": dict(zip(("full", "without"), self.seconds, strict=True)),
            "num_tokens": self.num_tokens,
        }


def _score(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("value", "low", "high", "n")}


def measure_harm(view: LayeredModel, batches: Batches, without: str) -> Pruned:
    """Choose the blocks to remove and measure the harm, by skipping blocks of the whole model.

    Args:
        view: a model that predicts the next token.
        batches: the texts.
        without: numbers of blocks from 1, such as `3,4`; or `least:N` for the N blocks that raise the loss least when
            skipped one at a time. Their joint harm may be larger.

    Raises:
        InputError: the model does not predict the next token, `without` has another form, or a block does not exist.
    """
    kind, depth = type(view.model).__name__, view.num_layers
    if not view.predicts_next_token:
        raise InputError(f"without: expected a model that predicts the next token, got {kind}")
    texts = without.removeprefix(LEAST).split(",")
    numbers = sorted({int(each) for each in texts if each.strip().isdecimal()})
    is_count = without.startswith(LEAST)
    most = (1, depth - 1) if is_count else (depth - 1, depth)  # how many numbers, and the largest one
    if len(numbers) != len(texts) or len(numbers) > most[0] or not 1 <= numbers[0] <= numbers[-1] <= most[1]:
        expected = f"some of the blocks 1..{depth} of this {kind}, such as 2,3, but not all; or {LEAST}N"
        raise InputError(f"without: expected {expected} for the N least harmful ones, got {without}")
    harms = {each.layer or 0: each for each in _losses(view, batches, "skip_one", ()) if each.metric == HARM}
    blocks = sorted(harms, key=lambda block: harms[block].value)[: numbers[0]] if is_count else numbers
    order = format_schedule([block for block in range(1, depth + 1) if block not in blocks])
    found = {(each.metric, each.tags["variant"]): each for each in _losses(view, batches, "baseline", (order,))}
    full, loss, harm = found[LOSS, "baseline"], found[LOSS, CUSTOM], found[HARM, CUSTOM]
    return Pruned(blocks=tuple(sorted(blocks)), num_blocks=depth, full=full, loss=loss, harm=harm, harms=harms)


def _losses(view: LayeredModel, batches: Batches, variant: str, custom: tuple[str, ...]) -> list[Record]:
    analysis = Interventions(batches=batches, variants=(variant,), custom=custom)
    return measure(upcast(view), analysis, run="", step=None, raises=True).records


def export_without(
    view: LayeredModel,
    pruned: Pruned,
    folder: Path,
    *,
    source: str,
    commit: str | None,
    tokenizer: str,
    batch: Batch,
    rounds: int,
    overwrite: bool = False,
) -> Pruned:
    """Write the model without the blocks to `folder`, and return `pruned` with the measured times.

    The folder opens with `AutoModelForCausalLM.from_pretrained`. It also holds the tokenizer, `pruned.json` and a
    README.md with the losses and times. It is created completely or not at all. The export is reopened and checked: its
    logits on `batch` must equal those of the whole model while it skips the blocks, up to rounding.

    Args:
        source: name or folder of the whole model, for README.md.
        commit: its commit on the Hub, if it has one.
        tokenizer: name or folder of the tokenizer.
        batch: texts for the check; the first one is also timed.
        rounds: number of timed calls of each model.

    Raises:
        InputError: the folder exists (an earlier export is replaced if `overwrite`), or the model cannot be cut (see
            `remove_blocks`).
        RuntimeError: the reopened model gives other logits.
    """
    refuse_taken(folder, overwrite)
    cut = remove_blocks(view.model, pruned.blocks)
    with draft_of(folder) as draft:
        save(cut, draft)
        save_tokenizer(load_tokenizer(tokenizer), draft)
        again: Network = load(draft, dtype=view.dtype).to(view.device)
        again.set_attn_implementation(view.attention)
        _verify(view, pruned, LayeredModel(again), batch)
        one = {name: rows[:1] for name, rows in batch.items()}
        pruned = replace(pruned, seconds=_seconds(view, again, one, rounds), num_tokens=one["input_ids"].shape[1])
        content = {"source": source, "commit": commit, "weights_hash": weights_hash(view.model), **pruned.content()}
        (draft / PRUNED).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        page = fill_page("pruned_page.md.jinja", source, "transformers", ["pruned"], source=source, pruned=pruned)
        (draft / PAGE).write_text(page, encoding="utf-8")
        publish(folder, draft)
    return pruned


@torch.no_grad()
def _verify(view: LayeredModel, pruned: Pruned, copy: LayeredModel, batch: Batch) -> None:
    kept = [block for block in range(1, pruned.num_blocks + 1) if block not in pruned.blocks]
    whole, cut = call_of(view.model, batch), call_of(copy.model, batch)
    with running_order(view.model, kept), evaluating(view.model):
        expected = whole()
    got = cut()
    difference = (got.logits.double() - expected.logits.double()).abs().max().item()
    limit = min(ROUNDING * torch.finfo(view.dtype).eps, 0.05) * expected.logits.abs().max().item()
    if not difference <= limit:
        raise RuntimeError(
            f"the exported model gives other logits than the model that skips its blocks: {difference:.3g}"
        )


def _seconds(view: LayeredModel, cut: Any, one: Batch, rounds: int) -> tuple[float, float]:
    calls = {"full": [call_of(view.model, one)], "cut": [call_of(cut, one)]}
    with evaluating(view.model):
        times = interleaved(calls, num_rounds=rounds, num_warm_up=3, device=view.device.type)
    return float(np.median(times["full"])), float(np.median(times["cut"]))
