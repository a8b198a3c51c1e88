"""The probe of one layer as a thing of its own: kept in two files, applied to vectors of that layer."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.functional.geometry import Pooling
from lit_layers.functional.probe import LogisticProbes
from lit_layers.functional.regression import RidgeProbes

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
    def of_logistic(
        cls,
        probes: LogisticProbes,
        layer: int,
        *,
        classes: Sequence[str],
        task: str,
        pooling: Pooling,
        max_tokens: int | None,
        row: int | None = None,
    ) -> Self:
        """The probe of a layer; `classes` are the names, by number. `row` is its place in `probes`: `layer` if not
        given, as where these are of all layers from 0 on.

        Raises:
            IndexError: no such row.
            ValueError: another number of names than of classes, or a name that is there twice.
        """
        if len(classes) != probes.num_classes:
            raise ValueError(f"expected a name for each of {probes.num_classes} classes, got {len(classes)}")
        if len(set(classes)) < len(classes):
            raise ValueError(f"expected a name of its own for each class, got {list(classes)}")
        facts = HeadFacts(
            kind="classification",
            task=task,
            layer=layer,
            pooling=pooling,
            max_tokens=max_tokens,
            classes=tuple(classes),
        )
        return cls(facts, *_row(probes, layer if row is None else row), probes.classes.cpu().clone())

    @classmethod
    def of_ridge(
        cls,
        probes: RidgeProbes,
        layer: int,
        *,
        task: str,
        pooling: Pooling,
        max_tokens: int | None,
        row: int | None = None,
    ) -> Self:
        """The ridge regression of a layer; `row` is its place in `probes`: `layer` if not given.

        Raises:
            IndexError: no such row.
        """
        facts = HeadFacts(
            kind="regression", task=task, layer=layer, pooling=pooling, max_tokens=max_tokens, classes=None
        )
        return cls(facts, *_row(probes, layer if row is None else row), torch.empty(0, dtype=torch.int64))

    @property
    def dim(self) -> int:
        return self.weight.shape[0]

    def outputs(self, features: Tensor) -> Tensor:
        """Logits, or the values of a regression: (n, dim) -> (n, outputs). In the precision of the weights.

        Raises:
            ValueError: features of another width.
        """
        if features.ndim != 2 or features.shape[1] != self.dim:
            raise ValueError(f"expected features of shape (n, {self.dim}), got {tuple(features.shape)}")
        device = features.device
        rows = (features.double() - self.mean.to(device)) / self.scale.to(device)
        return rows.to(self.weight.dtype) @ self.weight.to(device) + self.bias.to(device)

    def log_proba(self, features: Tensor) -> Tensor:
        """Natural logarithms of the classes' probabilities: (n, dim) -> (n, classes); -inf for one never seen.

        Raises:
            ValueError: a regression, or features of another width.
        """
        if self.facts.classes is None:
            raise ValueError("this probe is a regression and has no classes")
        logits = self.outputs(features)
        if len(self.seen) == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        found = logits.new_full((len(logits), len(self.facts.classes)), -torch.inf)
        return found.index_copy(1, self.seen.to(found.device), logits.log_softmax(-1))

    def save(self, folder: Path) -> None:
        """Writes probe.safetensors and probe.json."""
        save_file({name: getattr(self, name).cpu().contiguous() for name in NAMES}, folder / TENSORS)
        (folder / TENSORS).chmod(0o644)
        content = {"format": FORMAT, **asdict(self.facts)}
        (folder / FACTS).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """What `save` wrote.

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
            said = " ".join(str(error).split())[:200]
            raise InputError(f"the probe in {folder} is damaged ({said}): export it again") from error


def _row(probes: LogisticProbes | RidgeProbes, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, bias, mean and scale, on the CPU."""
    count = len(probes.weight)
    if not 0 <= row < count:
        raise IndexError(f"these probes have rows 0..{count - 1}, got {row}")
    weight, bias, mean, scale = (getattr(probes, name)[row].detach().cpu().clone() for name in NAMES[:4])
    return weight, bias, mean, scale
