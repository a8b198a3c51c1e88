"""An exported model at work: texts or images in, classes or values out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lit_layers.analyses.states import at_least_float32
from lit_layers.data.encoded_texts import EncodedTexts, encode_texts
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer
from lit_layers.errors import InputError
from lit_layers.functional.geometry import pool
from lit_layers.models.plain import open_plainly
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.select.head import HeadFacts, ProbeHead

Inputs = Sequence[str] | Tensor
NO_LIMIT = 2**30  # tokens
CHUNK = 10_000  # texts that are sorted by length together


@dataclass(frozen=True, eq=False)
class LayerClassifier:
    """A model cut after a layer, with the probe of that layer; see `load_classifier`.

    Inputs are a list of texts, or pixel values (n, channels, height, width), normalised as the model's own. A text
    becomes the tokens that its tokenizer makes of it, the special ones included, the first `max_tokens` of them.
    """

    model: LayeredModel
    head: ProbeHead
    tokenizer: TextTokenizer | None
    batch_size: int = 16

    @property
    def facts(self) -> HeadFacts:
        return self.head.facts

    def predict(self, inputs: Inputs) -> list[str] | list[float] | list[list[float]]:
        """The name of the most probable class of each input; of a regression its value, or its values if several.

        Raises:
            InputError: inputs of another kind, or a text that is no token.
        """
        if self.facts.classes is not None:
            names = self.facts.classes
            return [names[number] for number in self.probabilities(inputs).argmax(-1).tolist()]
        values = self._apply(inputs)
        return values[:, 0].tolist() if values.shape[1] == 1 else values.tolist()

    def probabilities(self, inputs: Inputs) -> Tensor:
        """Probability of each class, in the order of `facts.classes`: (n, classes), on the CPU.

        Raises:
            InputError: a regression; inputs of another kind, or a text that is no token.
        """
        if self.facts.classes is None:
            raise InputError(f"{self.facts.task} is a regression and has no probabilities: use predict")
        return self._apply(inputs).exp()

    def features(self, inputs: Inputs) -> Tensor:
        """What the probe reads: the pooled state of each input behind the last block kept, (n, dim), on the CPU.

        Raises:
            InputError: inputs of another kind, or a text that is no token.
        """
        # Batches go by length, so that little is padded; back to the order of the inputs at the end.
        order, rows = [], []
        for places, batch in self._batches(inputs):
            order += places
            rows.append(self._pooled(batch))
        if not rows:
            return torch.empty(0, self.model.dim, dtype=self.model.dtype)
        return torch.cat(rows)[torch.tensor(order).argsort()]

    def _apply(self, inputs: Inputs) -> Tensor:
        features = self.features(inputs)
        return self.head.outputs(features) if self.facts.classes is None else self.head.log_proba(features)

    def _pooled(self, batch: Batch) -> Tensor:
        averages_patches = self.model.family.sees_images and self.facts.pooling == "mean"
        first = self.model.num_prefix_tokens if averages_patches else 0
        found: list[Tensor] = []

        def look(layer: int, hidden: Tensor, mask: Tensor) -> None:
            if layer == self.model.num_layers:
                found.append(pool(hidden[:, first:], mask[:, first:], pooling=self.facts.pooling))

        self.model.pass_states(batch, look)
        return found[0].to(self.model.dtype).cpu()

    def _batches(self, inputs: Inputs) -> Iterator[tuple[list[int], Batch]]:
        """Batches with the places of their rows among the inputs."""
        if self.tokenizer is None:
            pixels = self._checked_pixels(inputs)
            for part in torch.arange(len(pixels)).split(self.batch_size):
                yield part.tolist(), {"pixel_values": pixels[part]}
            return
        texts = self._encoded(self.tokenizer, inputs)
        for start in range(0, len(texts), CHUNK):
            part = replace(texts, ids=texts.ids[start : start + CHUNK])
            for rows, batch in part.batches(self.batch_size * max(map(len, part.ids))):
                yield [start + row for row in rows], batch

    def _checked_pixels(self, inputs: Inputs) -> Tensor:
        side = self.model.image_size
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            got = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
            raise InputError(f"inputs: expected pixel values (n, channels, height, width), got {got}")
        if side is not None and inputs.shape[2:] != (side, side):
            raise InputError(f"inputs: expected images of {side} x {side} px, got shape {tuple(inputs.shape)}")
        return inputs

    def _encoded(self, tokenizer: TextTokenizer, inputs: Inputs) -> EncodedTexts:
        if isinstance(inputs, str | Tensor) or not all(isinstance(text, str) for text in inputs):
            raise InputError(f"inputs: expected a list of texts, got {type(inputs).__name__}")
        limits = [limit for limit in (self.facts.max_tokens, self.model.max_tokens) if limit is not None]
        return encode_texts(tokenizer, list(inputs), max_tokens=min(limits, default=NO_LIMIT))


def load_classifier(folder: str | Path, *, device: str = "cpu", batch_size: int = 16) -> LayerClassifier:
    """The classifier (or regression) that `export` wrote to a folder; it computes in float32 or wider.

    Reads safetensors and JSON alone: no pickle, no code of the folder.

    Raises:
        InputError: no export there, a damaged one, a batch_size below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, not {batch_size}")
    head = ProbeHead.load(folder)
    model = at_least_float32(LayeredModel(open_plainly(folder, head=False, safetensors_only=True).to(device)))
    if (model.num_layers, model.dim) != (head.facts.layer, head.dim):
        raise InputError(
            f"{folder}: its probe reads layer {head.facts.layer} of width {head.dim}, its model ends at layer "
            f"{model.num_layers} of width {model.dim}: export it again"
        )
    tokenizer = None if model.family.sees_images else load_tokenizer(str(folder))
    return LayerClassifier(model, head, tokenizer, batch_size)
