"""Build the tokenizer, features, probes and model card that tests of lit_layers.select export."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.data.tokenization import TextTokenizer, save_tokenizer, train_bpe
from lit_layers.functional.geometry import Pooling, pool
from lit_layers.functional.probes.logistic import LogisticProbes, fit_logistic_probes
from lit_layers.models.view import LayeredModel
from lit_layers.select.choosing import Choice, Score
from lit_layers.select.export import Card, HeadFacts, ProbeHead

CLASSES = ("joy", "anger", "none")
TEXTS = [f"{word} the {other} {'very ' * number}much" for number, word in enumerate(("we like", "they hate", "a"))
         for other in ("train", "tram", "boat", "plane", "night boat")]  # fmt: skip


def tokenizer() -> TextTokenizer:
    """Return a byte-level BPE of 270 tokens."""
    return train_bpe(TEXTS * 2, 270)


def saved_tokenizer(folder: Path) -> Path:
    save_tokenizer(tokenizer(), folder)
    return folder


def token_batch(text: str, max_tokens: int | None = None) -> dict[str, Tensor]:
    """Return one text as a batch without padding."""
    return {"input_ids": torch.tensor([tokenizer().tokenizer.encode(text).ids[:max_tokens]])}


def features(model: nn.Module, batches: list[dict[str, Tensor]], pooling: Pooling = "last") -> Tensor:
    """Return the pooled vector of each one-row batch at each layer, (layers + 1, rows, dim) in float32.

    The whole model computes it, not an exported one.
    """
    view, found = LayeredModel(model), []
    first = view.model.num_prefix_tokens if view.family.sees_images and pooling == "mean" else 0
    for batch in batches:
        seen = view.trajectory(batch)
        found.append(pool(seen.hidden[:, :, first:], seen.mask[None, :, first:].expand(len(seen.hidden), -1, -1),
                          pooling=pooling))  # fmt: skip
    return torch.cat(found, dim=1).float()


def probes_of(features: Tensor, num_classes: int = 3) -> LogisticProbes:
    labels = torch.arange(features.shape[1]) % num_classes
    return fit_logistic_probes(features, labels, num_classes=num_classes)


def head_of(probes: LogisticProbes, layer: int, pooling: Pooling = "last", max_tokens: int | None = 20) -> ProbeHead:
    facts: dict[str, Any] = {"kind": "classification", "task": "moods", "pooling": pooling, "max_tokens": max_tokens}
    return ProbeHead.from_probes(probes, HeadFacts(**facts, layer=layer, classes=CLASSES[: probes.num_classes]), layer)


def card(**changes) -> Card:
    values = {1: 0.5, 2: 0.75, 3: 0.7525}
    choice = Choice(
        layer=2,
        num_layers=3,
        metric="accuracy",
        rule="within_tolerance",
        tolerance=0.01,
        validation={layer: Score(value, value, value) for layer, value in values.items()},
        baseline=0.3,
        shares={},
        test={layer: Score(value - 0.01, 0, 1) for layer, value in values.items()},
        difference=Score(0, 0, 0),
        probe=None,
    )
    content: dict[str, Any] = {"source": "someone/tiny", "choice": choice, "tolerance": 0.01}
    return Card(**content | changes)
