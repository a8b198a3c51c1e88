"""A layer that is enough, as a folder: the model up to it, its probe, tokenizer and page; and how it is put to work."""

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
    def from_probes(cls, probes: LogisticProbes | RidgeProbes, facts: HeadFacts, row: int = 0) -> Self:
        """The probe in a row of `probes`, on the CPU."""
        weight, bias, mean, scale = (getattr(probes, name)[row].detach().cpu().clone() for name in NAMES[:4])
        seen = probes.classes.cpu().clone() if isinstance(probes, LogisticProbes) else torch.empty(0, dtype=torch.int64)
        return cls(facts, weight, bias, mean, scale, seen)

    def outputs(self, features: Tensor) -> Tensor:
        """Logits, or the values of a regression: (n, dim) -> (n, outputs). In the precision of the weights."""
        device = features.device
        rows = (features.double() - self.mean.to(device)) / self.scale.to(device)
        return rows.to(self.weight.dtype) @ self.weight.to(device) + self.bias.to(device)

    def log_proba(self, features: Tensor) -> Tensor:
        """Natural logarithms of the classes' probabilities: (n, dim) -> (n, classes); -inf for one never seen."""
        logits = self.outputs(features)
        if len(self.seen) == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        log_proba = logits.new_full((len(logits), len(self.facts.classes or ())), -torch.inf)
        return log_proba.index_copy(1, self.seen.to(log_proba.device), logits.log_softmax(-1))

    def save(self, folder: Path) -> None:
        """Write probe.safetensors and probe.json."""
        with naming(folder / TENSORS):
            save_file({name: getattr(self, name).cpu().contiguous() for name in NAMES}, folder / TENSORS)
        (folder / TENSORS).chmod(0o644)
        facts = json.dumps(asdict(self.facts), indent=2, ensure_ascii=False) + "\n"
        (folder / FACTS).write_text(facts, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return what `save` wrote.

        Raises:
            InputError: a file is missing or damaged.
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
NO_LIMIT = 2**30  # tokens


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

    def predict(self, inputs: Inputs) -> list[str] | list[float]:
        """Return the name of the most probable class of each input, or the value of a regression.

        Raises:
            InputError: inputs of another kind, or a text that is no token.
        """
        if (names := self.facts.classes) is not None:
            return [names[number] for number in self.probabilities(inputs).argmax(-1).tolist()]
        return self.head.outputs(self.features(inputs))[:, 0].tolist()

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
    """The classifier (or regression) that `export` wrote to a folder; it computes in float32 or wider.

    No code of the folder is run.

    Raises:
        InputError: no export there, or a damaged one.
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
    """What is known of an exported model beside the model itself."""

    source: str  # name of the model on the Hub, or a folder
    choice: Choice
    tolerance: float | None  # None of a rule that has none
    revision: str | None = None
    commit: str | None = None
    weights_hash: str | None = None  # of the source model, found by the export
    picture: str | Path | None = None  # of the validation curve
    notes: Sequence[str] = ()  # sentences for the reader


def render(
    card: Card, facts: HeadFacts, *, package: str, picture: str | None, final_norm: bool = True, of_images: bool = False
) -> str:
    """Return the README.md of an export, in Markdown with the header that model pages of the Hub begin with.

    `package` is the one that opens the model, `picture` the name of a file beside it; `final_norm` says whether the
    model has a norm behind its last block, `of_images` whether it takes images.
    """
    header: dict[str, Any] = {"library_name": package, "tags": ["lit_layers", "truncated", facts.kind]}
    if ON_HUB.fullmatch(card.source) and not Path(card.source).exists():
        header["base_model"] = card.source
    template = files("lit_layers.select").joinpath("model_page.md.jinja").read_text(encoding="utf-8")
    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    page = jinja2.Environment(undefined=jinja2.StrictUndefined, **options).from_string(template)
    about: Any = {"card": card, "facts": facts, "choice": card.choice, "package": package, "picture": picture}
    about |= {"of_images": of_images, "final_norm": final_norm}
    return page.render(header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True), **about)


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
    overwrite: bool = False,
) -> Path:
    """Write a folder with the blocks of `model` up to `layer` and its probe; returns its path.

    `AutoModel.from_pretrained` (of a timm model `timm.create_model("local-dir:...")`) opens it, `load_classifier` opens
    all of it. It holds config.json, the weights in safetensors, the tokenizer, probe.safetensors, probe.json and
    README.md, in the precision that the model is in.

    The folder appears as a whole or not at all. Before it does, it is read again, and the hidden states of `batches` at
    every layer are compared with those of `model` up to rounding, and the weights bit by bit. With `overwrite` an
    earlier export gives way; a folder that is none is never removed.

    Raises:
        InputError: a layer that is none of 1..L, a folder that is there, a model that cannot be cut.
        RuntimeError: the folder gives other hidden states than the model; nothing is left behind.
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
    with _draft_of(folder) as draft:
        save(cut, draft)
        fingerprint = weights_hash(cut)
        del cut
        if text_tokenizer is not None:
            save_tokenizer(text_tokenizer, draft)
        head.save(draft)
        _verify(draft, view, layer, batches, fingerprint)
        _write_page(card, head, view, draft)
        _publish(folder, draft)
    return folder


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
    again = LayeredModel(reloaded)
    for batch in batches:
        expected, got = view.trajectory(batch).hidden[: layer + 1], again.trajectory(batch).hidden
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            largest = (one.double() - other.double()).abs().max().item()
            if not largest <= min(ROUNDING * torch.finfo(one.dtype).eps, 0.05) * one.abs().max().item():
                raise RuntimeError(f"the exported model differs at layer {number}, by up to {largest:.3g}")
    if weights_hash(again.model) != fingerprint:
        raise RuntimeError("the exported weights differ from those of the model itself")


def _publish(folder: Path, draft: Path) -> None:
    """The draft, which is on the disk, becomes the folder."""
    for file in draft.iterdir():
        sync(file)
    sync(draft)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    sync(folder.absolute().parent)
