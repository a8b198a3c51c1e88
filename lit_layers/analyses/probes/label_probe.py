"""Linear or attentive probes that predict the label of a text or image from the states of each layer."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_layers.analyses.base import Analysis, Jobs, Rows, Values
from lit_layers.analyses.probes.probe_fits import Fitting, ProbeAnalysis, probe_jobs
from lit_layers.analyses.representation import prompt_vectors
from lit_layers.analyses.statistics import TagDict, all_undefined, comparable, missing_tag, summarize
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.curves import wilson_interval
from lit_layers.functional.geometry import pool
from lit_layers.functional.probes.logistic import fit_attentive_probe, macro_f1
from lit_layers.models.view import Batch, LayeredModel, Trajectory, real_tokens
from lit_layers.records import Record

Pooling = Literal["cls", "mean", "last"]


@dataclass(kw_only=True)
class LabelProbe(ProbeAnalysis):
    """A logistic probe per layer, 0 to L, that predicts the `labels` of texts or images.

    The feature of a row is one vector per layer, chosen by the option and tag `pooling`. "mean" averages its real
    tokens (in an image, only the patches: no class, distillation or register token). "cls" is the first token, and
    "last" the last real one (in an image, the last patch). If there are several poolings, each has its own probes.
    Layer 0 under "cls" is the same vector for every image, so its probe only learns the class frequencies.

    Per layer: `accuracy`, `log_loss` (nats) and `macro_f1` on the test rows. Records tagged `reference="majority"`
    score a baseline on the same rows, which always predicts the class frequencies of the training rows. Records tagged
    `control="random_labels"` come from probes fitted to permuted labels. A training row that is equal to a test row,
    pixel for pixel or token for token, is left out; `num_duplicates` counts these. Every label of the test rows must
    occur in training. A layer at which fewer than half of all rows have finite features has no probe. A row whose
    features are not finite at a layer with a probe is left out at all layers and counted in `num_undefined`.

    Features are standardised. As in `lit_layers.functional.fit_logistic_probes`, `c` multiplies the sum of the losses,
    and a probe has converged if no entry of the gradient exceeds `tolerance` x c x rows. A layer whose probe did not
    converge has the tag `num_not_converged`. Intervals: Wilson's for the accuracy, bootstrap over test rows for the
    loss. The model runs in float32 or wider. Memory: layers x rows x width for each pooling and split (13 x 10,000 x
    192 x 4 B = 0.1 GB).

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), section 3, on texts.
    """

    train: Batches
    test: Batches
    name: str = "label_probe"
    pooling: Pooling | tuple[Pooling, ...] = "mean"
    random_labels: bool = True

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self.problem(model)

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"train": Rows(self.train), "test": Rows(self.test)}

    def jobs(self, model: LayeredModel, train: Values, test: Values) -> Jobs:
        problem = self.problem(model)
        train, test = ({name: prompt_vectors(each) for name, each in split.items()} for split in (train, test))
        train = {pooling: features[:, problem.distinct] for pooling, features in train.items()}
        finite = [torch.stack([*each.values()]).isfinite().all(-1).all(0) for each in (train, test)]
        layers, used = comparable(torch.cat(finite, dim=1))  # every pooling uses the same rows
        in_train, in_test = used.split([len(problem.train), len(problem.test)])
        if not in_train.any() or not in_test.any():
            raise all_undefined(self.name)
        problem = problem.select(in_train, in_test)
        fittings = []
        for pooling in self._poolings():
            tags: TagDict = {"pooling": pooling, **missing_tag("", ~used)}
            features, held_out = train[pooling][layers][:, in_train], test[pooling][layers][:, in_test]
            scores = partial(label_scores, problem)
            fittings.append(Fitting(features, problem.train, held_out, layers, problem.num_classes, tags, scores))
        seed = self.seed if self.random_labels else None
        return probe_jobs(model, [*self.majority(problem)], fittings, self, seed)

    def _poolings(self) -> tuple[Pooling, ...]:
        return (self.pooling,) if isinstance(self.pooling, str) else tuple(self.pooling)

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if "cls" in self._poolings() and model.family.sees_images and not model.has_class_token:
            kind = type(model.model).__name__
            raise InputError(f"{self.name}: this {kind} has no class token: choose pooling 'mean' instead of 'cls'")

    def problem(self, model: LayeredModel) -> "LabelProblem":
        """Return the labels of both splits as class indices."""
        (train, keys), (test, test_keys) = (self._rows(model, split) for split in ("train", "test"))
        test_keys = set(test_keys)
        distinct = torch.tensor([key not in test_keys for key in keys])
        num_duplicates = int((~distinct).sum())
        extra = f" beside {num_duplicates} rows that are test rows too" if num_duplicates else ""
        classes, train_classes = train[distinct].unique(return_inverse=True)
        if len(classes) < 2:
            raise InputError(f"{self.name}: train holds labels {classes.tolist()}{extra}, and a probe needs two")
        indices = torch.searchsorted(classes, test).clamp(max=len(classes) - 1)
        if (unseen := test[classes[indices] != test]).numel():
            count = f"{len(unseen)} of the {len(test)} test rows{extra}"
            raise InputError(f"{self.name}: no training row has the label {unseen[0].item()} of {count}")
        scored = torch.ones(len(indices), dtype=torch.bool)
        fitted = torch.ones(len(train_classes), dtype=torch.bool)
        return LabelProblem(distinct, train_classes, indices, fitted, scored, len(classes), num_duplicates)

    def _rows(self, model: LayeredModel, split: str) -> tuple[Tensor, list[bytes]]:
        """Return the labels (rows,) of a split, and keys that are equal for equal rows."""
        all_labels: list[Tensor] = []
        keys: list[bytes] = []
        for batch in getattr(self, split):
            if "labels" not in batch:
                raise InputError(f"{self.name}: the batches of {split} have no labels, they hold {sorted(batch)}")
            labels = batch["labels"]
            inputs = batch["pixel_values"] if model.family.sees_images else real_tokens(batch)
            if labels.is_floating_point() or labels.shape != (len(inputs),) or labels.min() < 0:
                got = f"{labels.dtype} of shape {tuple(labels.shape)}, the least {labels.min()}"
                raise InputError(f"{self.name}: expected an integer label for each of {len(inputs)} rows, got {got}")
            all_labels.append(labels.cpu().long())
            keys += [row.contiguous().view(torch.uint8).numpy().tobytes() for row in inputs]
        return torch.cat(all_labels), [hashlib.blake2b(key, digest_size=16).digest() for key in keys]

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the vectors (layers + 1, dim, rows) of each pooling."""
        features = Values()
        for pooling in self._poolings():
            first = seen.model.num_prefix_tokens if pooling == "mean" else 0
            mask = seen.mask[:, first:]
            pooled = [pool(hidden[:, first:], mask, pooling=pooling, undefined="nan") for hidden in seen.hidden]
            features[pooling] = torch.stack(pooled).to(seen.model.dtype).mT.cpu()
        return features

    def majority(self, problem: "LabelProblem") -> Iterator[Record]:
        share = torch.bincount(problem.train).double() / len(problem.train)
        tags: TagDict = {
            "reference": "majority",
            "num_classes": problem.num_classes,
            "num_train_rows": len(problem.train),
            "num_duplicates": problem.num_duplicates,
            **missing_tag("", ~torch.cat([problem.fitted, problem.scored])),
        }
        yield from label_scores(problem, share.log().expand(len(problem.test), -1), tags)


class LabelProblem(NamedTuple):
    distinct: Tensor  # (rows of train,) False for rows that are also test rows
    train: Tensor  # (fitted rows,) class indices
    test: Tensor  # (test rows,) class indices
    fitted: Tensor  # (distinct rows,) False for undefined training rows
    scored: Tensor  # (test rows,) False for undefined test rows
    num_classes: int
    num_duplicates: int

    def select(self, in_train: Tensor, in_test: Tensor) -> "LabelProblem":
        """Return a copy with only the rows that the two masks select."""
        return self._replace(train=self.train[in_train], test=self.test[in_test], fitted=in_train, scored=in_test)


def label_scores(problem: LabelProblem, log_proba: Tensor, tags: TagDict, layer: int | None = None) -> Iterator[Record]:
    """Yield the records that score predictions, given as log-probabilities (test rows, classes)."""
    truth, predicted = problem.test, log_proba.argmax(-1)
    hits = predicted == truth
    fields: dict[str, Any] = {"layer": layer, "tags": tags, "rows": problem.scored}
    (accuracy,) = summarize("accuracy", hits, **fields)
    low, high = wilson_interval(int(hits.sum()), len(hits))
    yield replace(accuracy, low=low, high=high)
    yield from summarize("log_loss", -log_proba.gather(1, truth[:, None])[:, 0], **fields)
    yield Record(metric="macro_f1", value=macro_f1(truth, predicted), layer=layer, n=len(truth), tags=tags)


@dataclass(kw_only=True)
class AttentiveProbe(Analysis):
    """A probe per layer, 0 to L, that predicts the `labels` of texts or images by attending to tokens.

    The attention uses learned queries. `LabelProbe` reads one vector per row; this probe also finds information in
    tokens whose position differs between rows. Per layer: `accuracy`, `log_loss` (nats) and `macro_f1` on the test
    rows. Records tagged `reference="majority"` score a baseline on the same rows, which always predicts the class
    frequencies of the training rows. Rows, duplicates and intervals are as in `LabelProbe`. The probe attends to all
    tokens; in an image, to the class token and patches. A layer at which fewer than half of all rows have finite states
    has no probe. A row whose states are not finite at a layer with a probe is left out at all layers and counted in
    `num_undefined`.

    The states of one layer are in memory at a time (10,000 images x 65 tokens x 192 x 4 B = 0.5 GB). Each layer costs
    one forward pass over the rows, after a first pass that finds non-finite states. The model runs in float32 or wider.

    Source: as in `lit_layers.functional.fit_attentive_probe`; layer by layer in Skean et al., Layer by Layer, arXiv
    2502.02013, figure 14.

    Args:
        train: labelled rows to which the probes are fitted.
        test: labelled rows on which they are scored.
        num_heads: number of queries, each over a slice of the width; must divide the width.
        steps: number of optimizer steps (AdamW) for the probe of each layer.
        seed: seed of the probes' initial weights and of the order of rows.
    """

    LEAST: ClassVar = {"steps": 1}

    train: Batches
    test: Batches
    name: str = "attentive_probe"
    num_heads: int = 4
    steps: int = 500
    seed: int = 0

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._rows.problem(model)

    @property
    def _rows(self) -> LabelProbe:
        """Return a `LabelProbe` on the same data, whose rows, labels and references this analysis shares."""
        return LabelProbe(name=self.name, train=self.train, test=self.test)

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return self._rows.reads(model)

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return which rows have finite states at all their real tokens, (layers + 1, rows)."""
        return {"finite": (seen.hidden.isfinite().all(-1) | ~seen.mask).all(-1).cpu()}

    def jobs(self, model: LayeredModel, train: Values, test: Values) -> Jobs:
        """Return one job per layer, which runs the model on the rows and fits the probe."""
        problem = self._rows.problem(model)
        layers, used = comparable(torch.cat([train["finite"][:, problem.distinct], test["finite"]], dim=1))
        in_train, in_test = used.split([len(problem.train), len(problem.test)])
        if len(problem.train[in_train].unique()) < 2 or not in_test.any():
            raise all_undefined(self.name)
        problem = problem.select(in_train, in_test)
        tags: TagDict = {**missing_tag("", ~used)}
        rows = problem.distinct.nonzero()[:, 0][in_train]
        how = {name: getattr(self, name) for name in ("num_heads", "steps", "seed")}

        def layer_records(layer: int) -> list[Record]:
            states, mask = self._states(model, "train", layer)
            labels, num_classes = problem.train.to(states.device), problem.num_classes
            probe = fit_attentive_probe(states[rows], mask[rows], labels, num_classes=num_classes, **how)
            states, mask = self._states(model, "test", layer)
            log_proba = probe.log_proba(states[in_test], mask[in_test]).cpu()
            return [*label_scores(problem, log_proba, tags, layer)]

        references = [*self._rows.majority(problem)]
        jobs = [partial(layer_records, layer) for layer in layers.nonzero()[:, 0].tolist()]
        return Jobs(jobs, lambda of_layers: itertools.chain(references, *of_layers))

    def _states(self, view: LayeredModel, split: str, layer: int) -> tuple[Tensor, Tensor]:
        """Return the states (rows, tokens, dim) and mask (rows, tokens) of a split, padded at the end."""
        states: list[Tensor] = []
        masks: list[Tensor] = []
        for batch in getattr(self, split):
            trajectory = view.trajectory(batch)
            states += trajectory.hidden[layer].clone()
            masks += trajectory.mask
        return pad_sequence(states, batch_first=True), pad_sequence(masks, batch_first=True)
