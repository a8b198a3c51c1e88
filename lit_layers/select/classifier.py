"""Classification with an exported model: the probe of its layer, in two files, applied to texts or images."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_layers import schema
from lit_layers.data.batches import EncodedTexts, encode_texts
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer
from lit_layers.errors import InputError
from lit_layers.files.durable import naming
from lit_layers.functional.geometry import Pooling, pool
from lit_layers.functional.probes.logistic import LogisticProbes
from lit_layers.functional.probes.regression import RidgeProbes
from lit_layers.models.families import trunk_of
from lit_layers.models.saved import load
from lit_layers.models.view import Batch, LayeredModel, at_least_float32

Kind = Literal["classification", "regression"]
TENSORS, FACTS = "probe.safetensors", "probe.json"
FORMAT = 1  # of these two files
NAMES = ("weight", "bias", "mean", "scale", "seen")


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What a head belongs to, and which vector it reads."""

    kind: Kind
    task: str
    layer: int
    pooling: Pooling
    max_tokens: int | None  # a longer text loses its end; None for images
    classes: tuple[str, ...] | None  # names, by number; None for a regression


@dataclass(frozen=True, eq=False)
class ProbeHead:
    """A linear probe of one layer.

    Two classes have one output, the logit of the second against the first. `seen` are the classes that had a training
    row, by number; the others have probability 0.
    """

    facts: HeadFacts
    weight: Tensor  # (dim, outputs), of the features minus `mean`, over `scale`
    bias: Tensor  # (outputs,)
    mean: Tensor  # (dim,), float64
    scale: Tensor  # (dim,), float64
    seen: Tensor  # (classes seen,); empty for a regression

    @classmethod
    def of(cls, probes: LogisticProbes | RidgeProbes, facts: HeadFacts, row: int = 0) -> Self:
        """The probe in a row of `probes`, on the CPU."""
        weight, bias, mean, scale = (getattr(probes, name)[row].detach().cpu().clone() for name in NAMES[:4])
        seen = probes.classes.cpu().clone() if isinstance(probes, LogisticProbes) else torch.empty(0, dtype=torch.int64)
        return cls(facts, weight, bias, mean, scale, seen)

    @property
    def dim(self) -> int:
        return self.weight.shape[0]

    def outputs(self, features: Tensor) -> Tensor:
        """Logits, or the values of a regression: (n, dim) -> (n, outputs). In the precision of the weights."""
        device = features.device
        rows = (features.double() - self.mean.to(device)) / self.scale.to(device)
        return rows.to(self.weight.dtype) @ self.weight.to(device) + self.bias.to(device)

    def log_proba(self, features: Tensor) -> Tensor:
        """Natural logarithms of the classes' probabilities: (n, dim) -> (n, classes); -inf for one never seen."""
        assert self.facts.classes is not None, "a regression has no classes"
        logits = self.outputs(features)
        if len(self.seen) == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        log_proba = logits.new_full((len(logits), len(self.facts.classes)), -torch.inf)
        return log_proba.index_copy(1, self.seen.to(log_proba.device), logits.log_softmax(-1))

    def save(self, folder: Path) -> None:
        """Write probe.safetensors and probe.json."""
        with naming(folder / TENSORS):
            save_file({name: getattr(self, name).cpu().contiguous() for name in NAMES}, folder / TENSORS)
        (folder / TENSORS).chmod(0o644)
        content = {"format": FORMAT, **asdict(self.facts)}
        (folder / FACTS).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return what `save` wrote.

        Raises:
            InputError: a file is missing, damaged or of a later format.
        """
        folder = Path(folder)
        for name in (FACTS, TENSORS):
            if not (folder / name).is_file():
                raise InputError(f"expected an exported classifier in {folder}, found no {name} there")
        try:
            content = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise InputError(f"{folder / FACTS}: expected format {FORMAT}: open it with the version that wrote it")
            facts = schema.check(vars(HeadFacts(**content)), HeadFacts, folder / FACTS, "export it again")
            tensors = load_file(folder / TENSORS)
            return cls(facts, *(tensors[name] for name in NAMES))
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the probe in {folder} is damaged ({reason}): export it again") from error


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
        if (names := self.facts.classes) is not None:
            return [names[number] for number in self.probabilities(inputs).argmax(-1).tolist()]
        values = self.head.outputs(self.features(inputs))
        return values[:, 0].tolist() if values.shape[1] == 1 else values.tolist()

    def probabilities(self, inputs: Inputs) -> Tensor:
        """Probability of each class, in the order of `facts.classes`: (n, classes), on the CPU.

        Raises:
            InputError: a regression; inputs of another kind, or a text that is no token.
        """
        if self.facts.classes is None:
            raise InputError(f"{self.facts.task} is a regression and has no probabilities: use predict")
        return self.head.log_proba(self.features(inputs)).exp()

    def features(self, inputs: Inputs) -> Tensor:
        """Return what the probe reads: the pooled state of each input behind the last block kept, (n, dim), on the CPU.

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

    def _pooled(self, batch: Batch) -> Tensor:
        averages_patches = self.model.family.sees_images and self.facts.pooling == "mean"
        first = self.model.num_prefix_tokens if averages_patches else 0
        pooled: list[Tensor] = []

        def look(layer: int, hidden: Tensor, mask: Tensor) -> None:
            if layer == self.model.num_layers:
                pooled.append(pool(hidden[:, first:], mask[:, first:], pooling=self.facts.pooling))

        self.model.pass_states(batch, look)
        return pooled[0].to(self.model.dtype).cpu()

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
        if not isinstance(inputs, Tensor) or inputs.ndim != 4 or (side and inputs.shape[2:] != (side, side)):
            got = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
            size = f"{side}, {side}" if side else "height, width"
            raise InputError(f"inputs: expected pixel values (n, channels, {size}), got {got}")
        return inputs

    def _encoded(self, tokenizer: TextTokenizer, inputs: Inputs) -> EncodedTexts:
        if isinstance(inputs, str | Tensor) or not all(isinstance(text, str) for text in inputs):
            raise InputError(f"inputs: expected a list of texts, got {type(inputs).__name__}")
        limits = [limit for limit in (self.facts.max_tokens, self.model.max_tokens) if limit is not None]
        return encode_texts(tokenizer, list(inputs), max_tokens=min(limits, default=NO_LIMIT))


def load_classifier(folder: str | Path, *, device: str = "cpu", batch_size: int = 16) -> LayerClassifier:
    """The classifier (or regression) that `export` wrote to a folder; it computes in float32 or wider.

    No code of the folder is run.

    Raises:
        InputError: no export there, or a damaged one.
    """
    head = ProbeHead.load(folder)
    model = at_least_float32(LayeredModel(trunk_of(load(Path(folder))).to(device)))
    if (model.num_layers, model.dim) != (head.facts.layer, head.dim):
        raise InputError(
            f"{folder}: its probe reads layer {head.facts.layer} of width {head.dim}, its model ends at layer "
            f"{model.num_layers} of width {model.dim}: export it again"
        )
    tokenizer = None if model.family.sees_images else load_tokenizer(str(folder))
    return LayerClassifier(model, head, tokenizer, batch_size)
