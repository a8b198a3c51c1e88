"""What analyses of a downstream task share: its options, and the task read once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis
from lit_layers.analyses.encoded_task import TaskReader, TaskRows
from lit_layers.analyses.features import LayerFeatures, TextPooling, text_features
from lit_layers.analyses.probe_scores import ProbeOptions
from lit_layers.analyses.summary import complete, nothing_defined
from lit_layers.analyses.token_jacobians import check_choice, check_counts
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.probe import ProbeTask

POOLINGS = ("last", "mean", "cls")


@dataclass(kw_only=True)
class OnTask(Analysis):
    """Linear probes on a downstream task.

    A layer at which fewer than half of all rows have finite features has no probe. A row whose features are not finite
    at another layer is left out of every part and layer, and counted in `num_undefined`.

    Args:
        task: a name of the catalogue, or a `ProbeTask`.
        tokenizer: a local path, a name of the Hub, or bpe:SIZE.
        corpus: which the tokenizer bpe:SIZE is trained on.
        folder: local data, where the task's files lie; None: the Hub.
        name: of the analysis; its kind and the task by default.
        pooling: "last", "mean" or "cls".
        max_tokens: a longer text loses its end; also at the model's own limit.
        c, tolerance, max_iterations: of `fit_logistic_probes`.
        penalty: of `fit_ridge_probes`, for regressions; 0 is least squares.
        seed: of whatever is drawn.
        cache: a folder in which features are kept and found again; None: nowhere.
    """

    kind: ClassVar[str]  # first part of the name

    task: str | ProbeTask
    tokenizer: str
    corpus: str | None = None
    folder: str | None = None
    name: str = ""
    pooling: TextPooling = "last"
    max_tokens: int = 512
    c: float = 1.0
    penalty: float = 1.0
    tolerance: float = 1e-6
    max_iterations: int = 1000
    seed: int = 0
    cache: str | None = None
    _reader: TaskReader | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            self.name = f"{self.kind}/{self.task if isinstance(self.task, str) else self.task.name}"

    def check(self, model: LayeredModel) -> None:
        check_probe_options(self.name, c=self.c, penalty=self.penalty, tolerance=self.tolerance, seed=self.seed)
        check_counts(self.name, max_iterations=self.max_iterations)
        check_choice(self.name, "pooling", self.pooling, POOLINGS)
        if self.cache is not None and Path(self.cache).exists() and not Path(self.cache).is_dir():
            raise InputError(f"{self.name}: expected cache to be a folder, {self.cache} is a file")
        self._rows(model)

    def config(self) -> dict[str, Any]:
        """Without `cache`: where features are kept decides no number."""
        whole = super().config()
        return {**whole, "init_args": {name: each for name, each in whole["init_args"].items() if name != "cache"}}

    def data_hash(self) -> str | None:
        return self._read().content_hash()

    def tokenizer_hash(self) -> str | None:
        return self._read().tokenizer_hash()

    def _rows(self, model: LayeredModel) -> TaskRows:
        """The parts that are measured on; train holds the validation rows."""
        return self._read().rows(model, join_validation=True)

    def _features(self, model: LayeredModel, rows: TaskRows) -> dict[str, LayerFeatures]:
        return {
            part: text_features(model, texts, pooling=self.pooling, cache=self.cache, undefined="nan")
            for part, texts in rows.texts.items()
        }

    def _complete(self, features: Mapping[str, LayerFeatures]) -> tuple[Tensor, dict[str, Tensor]]:
        """Which layers (layers + 1,) are no gap, and which rows of each part have a vector at each of these.

        Raises:
            ValueError: no layer is left.
        """
        defined = {part: found.defined() for part, found in features.items()}
        layers, kept = complete(torch.cat(list(defined.values()), dim=1))
        if not layers.any():
            raise nothing_defined(self.name)
        parts = kept.split([found.shape[1] for found in defined.values()])
        return layers, dict(zip(defined, parts, strict=True))

    def _options(self) -> ProbeOptions:
        return ProbeOptions(self.c, self.penalty, self.tolerance, self.max_iterations)

    def _read(self) -> TaskReader:
        if self._reader is None:
            self._reader = TaskReader(
                self.name,
                self.task,
                self.tokenizer,
                corpus=self.corpus,
                folder=self.folder,
                max_tokens=self.max_tokens,
            )
        return self._reader


def check_probe_options(name: str, *, c: float, penalty: float, tolerance: float, seed: int) -> None:
    """Refuses what is out of range."""
    for option, value in (("c", c), ("tolerance", tolerance)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name}: expected a positive {option}, got {value}")
    if not (penalty >= 0 and math.isfinite(penalty)):
        raise InputError(f"{name}: expected penalty of at least 0, got {penalty}")
    if seed < 0:
        raise InputError(f"{name}: expected seed of at least 0, got {seed}")
