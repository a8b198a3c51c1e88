"""What a linear probe of each layer can tell on a downstream task."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.encoded_task import TaskRows, permuted
from lit_layers.analyses.features import LayerFeatures
from lit_layers.analyses.on_task import OnTask
from lit_layers.analyses.probe_scores import (
    Fitted,
    RowScores,
    Tags,
    curve_records,
    fit_layer,
    of_log_proba,
    score_records,
    score_rows,
)
from lit_layers.analyses.states import at_least_float32
from lit_layers.analyses.summary import left_out
from lit_layers.analyses.token_jacobians import check_choice
from lit_layers.functional.probe import LogisticProbes
from lit_layers.models.build import untrained
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

FITTED_ON = ("train", "train_and_validation")


@dataclass(kw_only=True)
class Probe(OnTask):
    """A linear probe per layer, 0 to L, on a downstream task: logistic for classes, ridge for numbers.

    The feature of a text is one vector per layer: its "last" real token, the "mean" of its tokens, or the first
    ("cls"); every text passes the model once. Per layer and part, tag `split`: `accuracy`, `macro_f1` and `log_loss`
    (nats), or `mean_squared_error` and `r_squared` (against predicting the training mean). Rows tagged
    `reference="majority"` (or "mean") are what the training labels alone give on the same rows;
    `control="random_labels"` are probes fitted to permuted labels, `control="untrained_model"` probes on the same
    architecture with new weights. A test row of a class that no training row has counts as an error, and is left out of
    the log-loss. Without a layer: how steadily the test score rises (`monotonicity_...`, tag `of`), the layer from
    which no single step gains more than 0.01 (`plateau_layer`), the best one, the first inflection.

    Fitted on train alone, `validation` is scored as well: choose layers there. Test has intervals: Wilson's for the
    accuracy, bootstrap over its rows for the rest. Features lie on disk, a layer of them in memory at a time
    (100,000 x 768 x 4 B = 0.3 GB). Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), section 3.

    Args:
        fit_on: "train_and_validation", as published, or "train".
        random_labels: whether to fit the control.
        untrained: whether to measure new weights too; a series has its step 0 for that.
        warm_start: begins each fit at the last checkpoint's probe. Quicker; numbers then agree within `tolerance`.
        seed: of permuted labels and of new weights.
        task, tokenizer, corpus, folder, name, pooling, max_tokens, c, penalty, tolerance, max_iterations, cache: as for
            every analysis on a task (`lit_layers.analyses.on_task`).
    """

    kind = "probe"

    fit_on: Literal["train", "train_and_validation"] = "train_and_validation"
    random_labels: bool = True
    untrained: bool = False
    warm_start: bool = False
    _last: dict[tuple[str, int], LogisticProbes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check(self, model: LayeredModel) -> None:
        check_choice(self.name, "fit_on", self.fit_on, FITTED_ON)
        super().check(model)

    def run(self, model: LayeredModel) -> Iterable[Record]:
        self.check(model)
        rows, model = self._rows(model), at_least_float32(model)
        features = self._features(model, rows)
        layers, kept = self._complete(features)
        rows = rows.where(kept)
        labels = rows.targets["train"]
        yield from references(rows)
        yield from self._probes(_Kept(features, layers, kept), rows, labels, {})
        if self.random_labels:
            control = {"control": "random_labels"}
            yield from self._probes(_Kept(features, layers, kept), rows, permuted(labels, self.seed), control)
        if self.untrained:
            fresh = self._features(LayeredModel(untrained(model.model, seed=self.seed)), rows)
            control = {"control": "untrained_model"}
            yield from self._probes(_Kept(fresh, torch.ones_like(layers), kept), rows, labels, control)

    def _probes(self, features: "_Kept", rows: TaskRows, labels: Tensor, control: Tags) -> Iterator[Record]:
        tags: Tags = {"task": rows.data.name, **control, **left_out("", ~torch.cat([*features.rows.values()]))}
        curve: list[RowScores] = []
        unconverged = 0
        for layer in features.layers.nonzero()[:, 0].tolist():
            probe = self._fitted(features.layer("train", layer), labels, rows, (str(control), layer))
            failed = isinstance(probe, LogisticProbes) and not probe.converged.all()
            flag = {"num_not_converged": 1} if failed else {}
            unconverged += failed and layer > 0
            for part, targets in rows.targets.items():
                if control and part != "test":
                    continue
                scores = score_rows(probe, features.layer(part, layer), targets)
                yield from score_records(
                    scores,
                    targets,
                    {**tags, "split": part, **flag},
                    layer=layer,
                    baseline=rows.errors_of_mean(part),
                    intervals=part != "train",
                )
                if part == "test" and layer:
                    curve.append(scores)
        if not control:
            flag = {"num_not_converged": unconverged} if unconverged else {}
            for metric in ("accuracy", "log_loss") if rows.is_classification else ("mean_squared_error",):
                whole = {**tags, "split": "test", **flag, **left_out("layers", ~features.layers[1:])}
                yield from curve_records(curve, whole, metric=metric)

    def _fitted(self, features: Tensor, labels: Tensor, rows: TaskRows, key: tuple[str, int]) -> Fitted:
        start = self._last.get(key)
        if start is not None and start.weight.shape[1] != features.shape[1]:  # of another model
            start = None
        probe = fit_layer(features, labels, self._options(), num_classes=rows.num_classes or None, start=start)
        if self.warm_start and isinstance(probe, LogisticProbes):
            self._last[key] = probe
        return probe

    def _rows(self, model: LayeredModel) -> TaskRows:
        return self._read().rows(model, join_validation=self.fit_on == "train_and_validation")


class _Kept(NamedTuple):
    """Features of those layers that are no gap, of those rows of each part that have them."""

    parts: Mapping[str, LayerFeatures]
    layers: Tensor  # (layers + 1,)
    rows: Mapping[str, Tensor]  # (rows of the part,) each

    def layer(self, part: str, layer: int) -> Tensor:
        found, kept = self.parts[part].layer(layer), self.rows[part]
        return found if kept.all() else found[kept]  # a copy is a layer's features once more


def references(rows: TaskRows) -> Iterator[Record]:
    """What the training labels alone give on the test rows: class frequencies, or the mean."""
    train, targets = rows.targets["train"], rows.targets["test"]
    tags: Tags = {"task": rows.data.name, "split": "test", "num_train_rows": len(train), **rows.counts()}
    if rows.is_classification:
        share = torch.bincount(train, minlength=rows.num_classes).double() / len(train)
        scores = of_log_proba(share.log().expand(len(targets), -1), targets)
        tags = {**tags, "reference": "majority", "num_classes": rows.num_classes}
    else:
        errors = rows.errors_of_mean("test")
        assert errors is not None, "of a regression"
        scores, tags = RowScores(errors), {**tags, "reference": "mean"}
    yield from score_records(scores, targets, tags, layer=None, baseline=rows.errors_of_mean("test"), intervals=True)
