"""Export a model, cut after a layer, with its probe, tokenizer and README.md, and load it as a classifier."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

import jinja2
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_layers import schema
from lit_layers.data.batches import EncodedTexts, encode_texts
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, save_tokenizer
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import draft_path, naming, sync
from lit_layers.functional.geometry import Pooling, pool
from lit_layers.functional.probes.logistic import LogisticProbes
from lit_layers.functional.probes.regression import RidgeProbes
from lit_layers.models.build import save, weights_hash
from lit_layers.models.copies import truncate
from lit_layers.models.families import Network, trunk_of
from lit_layers.models.saved import load
from lit_layers.models.view import Batch, LayeredModel, upcast
from lit_layers.select.choosing import Choice

Kind = Literal["classification", "regression"]
TENSORS, FACTS = "probe.safetensors", "probe.json"
PRUNED = "pruned.json"  # facts about a model without some of its blocks (`pruning`)
NAMES = ("weight", "bias", "mean", "scale", "seen")


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """Facts about a probe: its task, its layer and the vector that it reads."""

    kind: Kind
    task: str
    layer: int
    pooling: Pooling
    max_tokens: int | None  # longer texts are truncated; None for images
    classes: tuple[str, ...] | None  # class names, by class index; None for a regression


@dataclass(frozen=True, eq=False)
class ProbeHead:
    """A linear probe of one layer.

    For two classes there is one output, the logit of the second class against the first. `seen` are the indices of the
    classes that have training rows. The other classes have probability 0.
    """

    facts: HeadFacts
    weight: Tensor  # (dim, outputs), applied to (features - mean) / scale
    bias: Tensor  # (outputs,)
    mean: Tensor  # (dim,), float64
    scale: Tensor  # (dim,), float64
    seen: Tensor  # (seen classes,); empty for a regression

    @classmethod
    def from_probes(cls, probes: LogisticProbes | RidgeProbes, facts: HeadFacts, row: int = 0) -> Self:
        """Return the probe with index `row` in a batch of fitted probes, on the CPU."""
        weight, bias, mean, scale = (getattr(probes, name)[row].detach().cpu().clone() for name in NAMES[:4])
        seen = probes.classes.cpu().clone() if isinstance(probes, LogisticProbes) else torch.empty(0, dtype=torch.int64)
        return cls(facts, weight, bias, mean, scale, seen)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the probe's logits, or its predicted values for a regression: (n, dim) -> (n, outputs).

        `features` are pooled states. The outputs have the dtype of the weights.
        """
        device = features.device
        rows = (features.double() - self.mean.to(device)) / self.scale.to(device)
        return rows.to(self.weight.dtype) @ self.weight.to(device) + self.bias.to(device)

    def log_proba(self, features: Tensor) -> Tensor:
        """Return the log-probabilities of the classes from pooled states: (n, dim) -> (n, classes).

        A class without training rows has -inf.
        """
        logits = self.outputs(features)
        if len(self.seen) == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        log_proba = logits.new_full((len(logits), len(self.facts.classes or ())), -torch.inf)
        return log_proba.index_copy(1, self.seen.to(log_proba.device), logits.log_softmax(-1))

    def save(self, folder: Path) -> None:
        """Write the probe to probe.safetensors and probe.json in a folder."""
        with naming(folder / TENSORS):
            save_file({name: getattr(self, name).cpu().contiguous() for name in NAMES}, folder / TENSORS)
        (folder / TENSORS).chmod(0o644)
        facts = json.dumps(asdict(self.facts), indent=2, ensure_ascii=False) + "\n"
        (folder / FACTS).write_text(facts, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a probe that `save` wrote.

        Raises:
            InputError: A file is missing or damaged.
        """
        folder = Path(folder)
        for name in (FACTS, TENSORS):
            if not (folder / name).is_file():
                raise InputError(f"expected an exported classifier in {folder}, found no {name} there")
        try:
            content = HeadFacts(**json.loads((folder / FACTS).read_text(encoding="utf-8")))
            facts = schema.check(vars(content), HeadFacts, folder / FACTS, "export it again")
            tensors = load_file(folder / TENSORS)
            return cls(facts, *(tensors[name] for name in NAMES))
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the probe in {folder} is damaged ({reason}): export it again") from error


Inputs = Sequence[str] | Tensor
NO_LIMIT = 2**30  # largest number of tokens of a text, if nothing limits it


@dataclass(frozen=True, eq=False)
class LayerClassifier:
    """A model cut after a layer, with the probe of that layer, as returned by `load_classifier`.

    Inputs are a list of texts, or pixel values (n, channels, height, width), normalised as the model expects. Texts are
    tokenized with special tokens and truncated to `max_tokens` tokens.
    """

    model: LayeredModel
    head: ProbeHead
    tokenizer: TextTokenizer | None
    batch_size: int = 16

    @property
    def facts(self) -> HeadFacts:
        return self.head.facts

    def predict(self, inputs: Inputs) -> list[str] | list[float]:
        """Return the name of the most probable class of each input, or the predicted value if the task is a regression.

        Raises:
            InputError: The inputs have the wrong type or shape, or a text has no tokens.
        """
        if (names := self.facts.classes) is not None:
            return [names[index] for index in self.probabilities(inputs).argmax(-1).tolist()]
        return self.head.outputs(self.features(inputs))[:, 0].tolist()

    def probabilities(self, inputs: Inputs) -> Tensor:
        """Return the probability of each class in the order of `facts.classes`, (n, classes), on the CPU.

        Raises:
            InputError: The task is a regression, the inputs have the wrong type or shape, or a text has no tokens.
        """
        if self.facts.classes is None:
            raise InputError(f"{self.facts.task} is a regression and has no probabilities: use predict")
        return self.head.log_proba(self.features(inputs)).exp()

    def features(self, inputs: Inputs) -> Tensor:
        """Return the input of the probe: the pooled state after the last block, (n, dim), on the CPU.

        Raises:
            InputError: The inputs have the wrong type or shape, or a text has no tokens.
        """
        # Texts are batched by length to reduce padding. The last line restores the order of the inputs.
        order, rows = [], []
        for indices, batch in self._batches(inputs):
            order += indices
            rows.append(self._pooled(batch))
        if not rows:
            return torch.empty(0, self.model.dim, dtype=self.model.dtype)
        return torch.cat(rows)[torch.tensor(order).argsort()]

    def _pooled(self, batch: Batch) -> Tensor:
        averages_patches = self.model.family.sees_images and self.facts.pooling == "mean"
        first = self.model.num_prefix_tokens if averages_patches else 0
        pooled: list[Tensor] = []

        def collect(layer: int, hidden: Tensor, mask: Tensor) -> None:
            if layer == self.model.num_layers:
                pooled.append(pool(hidden[:, first:], mask[:, first:], pooling=self.facts.pooling))

        self.model.pass_states(batch, collect)
        return pooled[0].to(self.model.dtype).cpu()

    def _batches(self, inputs: Inputs) -> Iterator[tuple[list[int], Batch]]:
        """Yield batches of texts or images, each with the indices of its rows in `inputs`."""
        if self.tokenizer is None:
            pixels = self._checked_pixels(inputs)
            for rows in torch.arange(len(pixels)).split(self.batch_size):
                yield rows.tolist(), {"pixel_values": pixels[rows]}
            return
        texts = self._encoded(self.tokenizer, inputs)
        yield from texts.batches(self.batch_size * max(map(len, texts.ids), default=1))

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
    """Load a classifier or regression that `export` wrote; the loaded model computes in float32 or wider.

    No code in the folder is run.

    Raises:
        InputError: The folder holds no export, or the export is damaged.
    """
    head = ProbeHead.load(folder)
    model = upcast(LayeredModel(trunk_of(load(Path(folder))).to(device)))
    if (model.num_layers, model.dim) != (head.facts.layer, len(head.weight)):
        raise InputError(
            f"{folder}: its probe reads layer {head.facts.layer} of width {len(head.weight)}, its model ends at layer "
            f"{model.num_layers} of width {model.dim}: export it again"
        )
    tokenizer = None if model.family.sees_images else load_tokenizer(str(folder))
    return LayerClassifier(model, head, tokenizer, batch_size)


ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts about an exported model, shown in its model card (README.md)."""

    source: str  # name of the model on the Hub, or a folder
    choice: Choice
    tolerance: float | None  # None for a rule without tolerance
    revision: str | None = None
    commit: str | None = None
    weights_hash: str | None = None  # hash of the source model's weights; set by `export`
    picture: str | Path | None = None  # file with a picture of the validation scores
    notes: Sequence[str] = ()  # sentences for the reader


def render(
    card: Card, facts: HeadFacts, *, package: str, picture: str | None, final_norm: bool = True, of_images: bool = False
) -> str:
    """Return the README.md of an export: Markdown with the YAML header of model pages on the Hub.

    Args:
        card: Facts about the model.
        facts: Facts about the probe.
        package: The package that loads the model, transformers or timm.
        picture: Name of the picture file next to README.md; None: no picture.
        final_norm: Whether the model has a norm after its last block.
        of_images: Whether the model reads images.
    """
    about: Any = {"card": card, "facts": facts, "choice": card.choice, "package": package, "picture": picture}
    about |= {"of_images": of_images, "final_norm": final_norm}
    return fill_page("model_page.md.jinja", card.source, package, ["truncated", facts.kind], **about)


def fill_page(template: str, source: str, package: str, tags: Sequence[str], /, **about: Any) -> str:
    """Return a README.md: a template of this folder, filled in, below the YAML header of model pages on the Hub."""
    header: dict[str, Any] = {"library_name": package, "tags": ["lit_layers", *tags]}
    if ON_HUB.fullmatch(source) and not Path(source).exists():
        header["base_model"] = source
    text = files("lit_layers.select").joinpath(template).read_text(encoding="utf-8")
    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    page = jinja2.Environment(undefined=jinja2.StrictUndefined, **options).from_string(text)
    return page.render(header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True), **about)


# Largest accepted difference between the hidden states of an export and of its source model, in units of the dtype's
# eps times the largest state. They differ a little because on many CPUs, MKL's matrix products depend in the last bits
# on the memory addresses of the weights, and blocks accumulate this.
ROUNDING = 256

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
    overwrite: bool = False,
) -> Path:
    """Write a folder with the blocks of `model` up to `layer` and the probe, and return its path.

    The folder holds config.json, the weights in safetensors, the tokenizer, probe.safetensors, probe.json and
    README.md. The weights have the dtype of `model`. `AutoModel.from_pretrained` or
    `timm.create_model("local-dir:...")` loads the model, and `load_classifier` loads the model with its probe.

    The folder is created completely or not at all. The export is first written to a draft folder, loaded from there and
    compared with `model`: its hidden states of `batches` must be equal up to rounding, and its weights exactly.

    Args:
        model: The source model.
        layer: The last block to export, 1 to L.
        head: The probe of this layer.
        folder: The folder to create.
        tokenizer: The tokenizer, or the folder or name to load it from; None for image models.
        card: Facts for README.md.
        batches: Batches to check the export with.
        overwrite: Whether to replace an earlier export. Other folders are never replaced.

    Raises:
        InputError: The layer is not in 1..L, the folder already exists, or the model cannot be cut.
        RuntimeError: The exported model gives different hidden states or weights. The draft is removed.
    """
    folder, view = Path(folder), LayeredModel(model)
    if not 1 <= layer <= view.num_layers:
        kind = type(view.model).__name__
        raise InputError(f"layer: {kind} is exported up to one of its blocks 1..{view.num_layers}, got {layer}")
    text_tokenizer = None
    if not view.family.sees_images:
        text_tokenizer = tokenizer if isinstance(tokenizer, TextTokenizer) else load_tokenizer(str(tokenizer))
    refuse_taken(folder, overwrite)
    cut = truncate(view.model, layer, head=False)
    card = replace(card, weights_hash=weights_hash(view.model))
    with draft_of(folder) as draft:
        save(cut, draft)
        fingerprint = weights_hash(cut)
        del cut
        if text_tokenizer is not None:
            save_tokenizer(text_tokenizer, draft)
        head.save(draft)
        _verify(draft, view, layer, batches, fingerprint)
        _write_page(card, head, view, draft)
        publish(folder, draft)
    return folder


def refuse_taken(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that exists, unless it is an earlier export and `overwrite` is set.

    Raises:
        InputError: The folder exists, and `overwrite` is not set or the folder is not an export.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not overwrite:
        raise InputError(f"{folder} is there already: choose another folder, or allow to overwrite it")
    is_export = any((folder / name).is_file() for name in (FACTS, PRUNED))
    if not folder.is_dir() or folder.is_symlink() or (any(folder.iterdir()) and not is_export):
        raise InputError(f"{folder} is no earlier export (it has no {FACTS}) and is not overwritten: choose another")


@contextmanager
def draft_of(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to `folder` in which to write an export.

    The new folder is removed at the end, unless `publish` has renamed it to `folder`.
    """
    draft = draft_path(folder.absolute())
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
    copy = LayeredModel(reloaded)
    for batch in batches:
        expected, got = view.trajectory(batch).hidden[: layer + 1], copy.trajectory(batch).hidden
        for index, (one, other) in enumerate(zip(expected, got, strict=True)):
            largest = (one.double() - other.double()).abs().max().item()
            if not largest <= min(ROUNDING * torch.finfo(one.dtype).eps, 0.05) * one.abs().max().item():
                raise RuntimeError(f"the exported model differs at layer {index}, by up to {largest:.3g}")
    if weights_hash(copy.model) != fingerprint:
        raise RuntimeError("the exported weights differ from those of the model itself")


def publish(folder: Path, draft: Path) -> None:
    """Flush the complete export in `draft` to disk and rename it to `folder`, replacing an earlier export."""
    for file in draft.iterdir():
        sync(file)
    sync(draft)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    sync(folder.absolute().parent)
