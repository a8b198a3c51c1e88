"""Scores of each layer's probe on a downstream task with fewer labelled texts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lit_layers.analyses.base import Jobs, Values
from lit_layers.analyses.probes.probe_fits import ProbeAnalysis, fit_layer, score_rows
from lit_layers.analyses.probes.task_features import TaskRows
from lit_layers.analyses.probes.task_probes import TaskTexts
from lit_layers.analyses.statistics import in_range, left_out, nothing_defined
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(kw_only=True)
class SampleSizeSweep(TaskTexts, ProbeAnalysis):
    """The test score of each layer's probe with a 32nd, a 16th, ... and all of the training rows.

    The subsets of a seed are nested: the first rows of one permutation. Test rows and classes stay. Per layer and size,
    tag `train_rows`: mean over seeds of `accuracy` and `log_loss`, or of `mean_squared_error`, with Student's 95%
    interval over seeds and `n` seeds; all rows are the same rows under every seed and are fitted once. The tag
    `num_classes_seen` is the fewest classes that a subset held: a test row of another class counts as an error and is
    left out of the log-loss. `c` multiplies a sum and is the same for all sizes, so regularisation fades as rows are
    added. Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), whose sizes are unpublished: these are
    ours.

    Args:
        task, tokenizer, corpus, folder, pooling, max_tokens, c, penalty, tolerance, max_iterations, estimator: as for
            `Probe`.
        name: of the analysis; sample_sizes/TASK by default.
        layers: which layers; None: all, with layer 0.
        num_seeds: permutations.
        seed: of the first; the others follow it.
    """

    kind = "sample_sizes"
    LEAST: ClassVar = {**TaskTexts.LEAST, "num_seeds": 1}

    layers: list[int] | None = None
    num_seeds: int = 5

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        for layer in self.layers or ():
            if not 0 <= layer <= model.num_layers:
                raise InputError(f"{self.name}: expected layers from 0 to {model.num_layers}, got {layer}")
        if self.layers is not None and len(set(self.layers)) < len(self.layers):
            raise InputError(f"{self.name}: expected each layer once, got {self.layers}")

    def jobs(self, model: LayeredModel, **parts_read: Values) -> Jobs:
        rows = self._rows(model)
        parts = self._features_of(model, rows, parts_read)
        defined, kept = self._complete(parts)
        rows, counts = rows.where(kept), left_out("", ~torch.cat([*kept.values()]))

        def of_layer(layer: int) -> list[Record]:
            features, held_out = (parts[part].layer(layer)[kept[part]] for part in ("train", "test"))
            return [
                record
                for size in sizes(len(features))
                for record in self._of_size(rows, features, held_out, layer, size, counts)
            ]

        layers = range(model.num_layers + 1) if self.layers is None else self.layers
        if not (present := [layer for layer in layers if defined[layer]]):
            raise nothing_defined(self.name)
        return Jobs([partial(of_layer, layer) for layer in present])

    def _of_size(
        self, rows: TaskRows, features: Tensor, held_out: Tensor, layer: int, size: int, counts: dict[str, int]
    ) -> Iterable[Record]:
        labels, targets = rows.targets["train"], rows.targets["test"]
        by_metric: dict[str, list[float]] = {}
        seen, unconverged = [], 0
        for subset in subsets(len(features), size, self.num_seeds, self.seed):
            chosen = labels[subset]
            if rows.is_classification:
                seen.append(len(chosen.unique()))
                if seen[-1] < 2:
                    continue  # one class: no probe
            probe = fit_layer(features[subset], chosen, self.probe_options(), num_classes=rows.num_classes or None)
            unconverged += int(not getattr(probe, "converged", torch.ones(1)).all())
            scores = score_rows(probe, held_out, targets)
            if scores.hits is None:
                by_metric.setdefault("mean_squared_error", []).append(float(scores.losses.mean()))
                continue
            by_metric.setdefault("accuracy", []).append(float(scores.hits.double().mean()))
            losses = scores.losses[scores.losses.isfinite()]
            by_metric.setdefault("log_loss", []).append(float(losses.mean()) if len(losses) else math.nan)
        tags: dict[str, str | int | float] = {"task": rows.data.name, "split": "test", "train_rows": size, **counts}
        if seen:
            tags["num_classes_seen"] = min(seen)
        if unconverged:
            tags["num_not_converged"] = unconverged
        for metric, values in by_metric.items():
            defined = [value for value in values if not math.isnan(value)]
            if defined:
                yield over_seeds(metric, defined, layer=layer, tags=tags)


def sizes(num_rows: int) -> list[int]:
    """n/32, n/16, ..., n, rounded down, of at least 2 rows and each once."""
    return sorted({max(2, int(num_rows * share)) for share in SHARES if num_rows * share >= 2} | {num_rows})


def subsets(num_rows: int, size: int, num_seeds: int, seed: int) -> list[Tensor]:
    """The first `size` rows of a permutation for each seed; all rows once."""
    if size == num_rows:
        return [torch.arange(num_rows)]
    orders = [
        torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + turn)) for turn in range(num_seeds)
    ]
    return [order[:size] for order in orders]


def over_seeds(metric: str, values: list[float], *, layer: int, tags: dict[str, str | int | float]) -> Record:
    """Mean over seeds; with two or more of them stderr and Student's interval."""
    mean, n = sum(values) / len(values), len(values)
    if n < 2:
        return Record(metric=metric, value=mean, layer=layer, n=n, tags=tags)
    from scipy.stats import t

    stderr = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = stderr * float(t.ppf(0.975, n - 1))
    low, high = in_range(metric, mean, mean - half, mean + half)
    return Record(metric=metric, value=mean, stderr=stderr, low=low, high=high, layer=layer, n=n, tags=tags)
