"""Linear probes of each layer on a downstream task, fitted to all of its training texts or to a part of them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from lit_layers.analyses.base import Jobs, Rows, Values
from lit_layers.analyses.probes.probe_fits import (
    MAX_SENT,
    ProbeAnalysis,
    RowScores,
    curve_records,
    fit_layer,
    score_log_proba,
    score_records,
    score_rows,
    vector_bytes,
)
from lit_layers.analyses.statistics import TagDict, Tags, all_undefined, clip_interval, comparable, missing_tag
from lit_layers.errors import InputError
from lit_layers.functional.probes.logistic import LogisticProbes
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record
from lit_layers.tasks.probe_task import ProbeTask
from lit_layers.tasks.text_features import (
    LayerFeatures,
    TaskReader,
    TaskRows,
    TextPooling,
    length_batches,
    permuted,
    pool_texts,
    store_features,
    text_features,
)


@dataclass(kw_only=True)
class TaskTexts:
    """Base of the analyses that probe the texts of a downstream task.

    A layer at which fewer than half of all rows have finite features has no probe. A row whose features are not finite
    at a layer with a probe is left out at all layers and counted in `num_undefined`.

    Ranks share the work: each runs the model on some of the texts, then fits the probes of some of the layers. If the
    vectors take more than 1 GB, each rank runs the model on all texts.

    Args:
        task: a name of the catalogue, or a `ProbeTask`.
        tokenizer: a local path, a name on the Hub, or bpe:SIZE.
        corpus: the text on which the tokenizer bpe:SIZE is trained.
        folder: local folder with the task's files. None means the Hub.
        name: name of the analysis; by default its kind and the task.
        pooling: "last", "mean" or "cls".
        max_tokens: longer texts are cut at their end. The model's own limit applies if it is lower.
        c, tolerance, max_iterations: options of `fit_logistic_probes`.
        penalty: option of `fit_ridge_probes`, for regressions; 0 is least squares.
        seed: seed of all random draws.
        estimator: "logistic", or "watch", which tunes the penalty of each layer and takes a fraction of the work
            (`fit_watching_probes`). With "watch", the penalty of a regression is chosen by leave-one-out
            cross-validation, and `c`, `penalty`, `tolerance` and `max_iterations` are not used.
    """

    kind: ClassVar[str]  # first part of an analysis's default name
    SEES: ClassVar = "text"
    LEAST: ClassVar = {**ProbeAnalysis.LEAST, "penalty": 0}

    task: str | ProbeTask
    tokenizer: str
    corpus: str | None = None
    folder: str | None = None
    name: str = ""
    pooling: TextPooling = "last"
    max_tokens: int = 512
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            self.name = f"{self.kind}/{self.task if isinstance(self.task, str) else self.task.name}"

    def data_hash(self) -> str | None:
        return self._reader.content_hash()

    def tokenizer_hash(self) -> str | None:
        return self._reader.tokenizer_hash()

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        """Return the texts of each split, to be read in the forward pass that analyses share.

        The dict is empty if the vectors of the texts are too large to send between ranks. `jobs` then runs the model
        itself.
        """
        texts = self._rows(model).texts
        if vector_bytes(model, sum(map(len, texts.values()))) > MAX_SENT:
            return {}
        return {split: Rows(length_batches(each)) for split, each in texts.items()}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return pool_texts(seen, batch, self.pooling, "resid")

    def _rows(self, model: LayeredModel) -> TaskRows:
        """Return the training and test rows of the task; the validation rows are added to the training rows."""
        return self._reader.rows(model, join_validation=True)

    def _features(self, model: LayeredModel, rows: TaskRows, values: dict[str, Values]) -> dict[str, LayerFeatures]:
        """Return the features of all splits.

        They come from the values of the forward pass that analyses share or, if there are none, from forward passes
        that run now.
        """
        if values:
            return {split: store_features(values.pop(split)) for split in rows.texts}
        how: Any = {"pooling": self.pooling, "undefined": "nan"}
        return {split: text_features(model, texts, **how) for split, texts in rows.texts.items()}

    def _comparable(self, features: Mapping[str, LayerFeatures]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return which layers (layers + 1,) are measured, and which rows of each split have a vector at each of them.

        Raises:
            ValueError: if no layer can be measured, or no row of a split is left.
        """
        defined = {split: layers.defined() for split, layers in features.items()}
        layers, used = comparable(torch.cat(list(defined.values()), dim=1))
        masks = used.split([rows.shape[1] for rows in defined.values()])
        if not all(each.any() for each in masks):
            raise all_undefined(self.name)
        return layers, dict(zip(defined, masks, strict=True))

    @cached_property
    def _reader(self) -> TaskReader:
        about: Any = {name: getattr(self, name) for name in ("corpus", "folder", "max_tokens")}
        return TaskReader(self.name, self.task, self.tokenizer, **about)


@dataclass(kw_only=True)
class Probe(TaskTexts, ProbeAnalysis):
    """A linear probe per layer, 0 to L, on a downstream task: logistic for classes, ridge for numbers.

    The feature of a text is one vector per layer: its "last" real token, the "mean" of its tokens, or the first
    ("cls"). The model runs once on each text. Per layer and split (tag `split`): `accuracy`, `macro_f1` and `log_loss`
    (nats), or `mean_squared_error` and `r_squared` (against predicting the training mean). Records tagged
    `reference="majority"` (or "mean") score a constant prediction, the training labels' frequencies (or mean), on the
    test rows. Records tagged `control="random_labels"` come from probes fitted to permuted labels. A test row of a
    class without training rows counts as an error and is left out of the log-loss. Records without a layer describe how
    a test score, which the tag `of` names, rises over layers: `monotonicity_...`, `plateau_layer`, `best_layer` and
    `inflection_layer`. After the plateau layer, the score never gains more than 0.01 from one layer to the next.

    If `fit_on` is "train", `validation` is also scored: choose layers by these scores. Test and validation scores have
    intervals: Wilson's for the accuracy, none for `r_squared`, bootstrap over rows for the others. Features of up to 1
    GB are collected in memory before they are stored on disk. One layer at a time is read (100,000 x 768 x 4 B = 0.3
    GB).

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), section 3.

    Args:
        fit_on: rows to which probes are fitted: "train_and_validation", as in the source, or "train".
        random_labels: whether to fit the control.
        seed: seed of the permuted labels.

    The other arguments are those of every analysis on a task (`TaskTexts`).
    """

    kind = "probe"

    fit_on: Literal["train", "train_and_validation"] = "train_and_validation"
    random_labels: bool = True

    def jobs(self, model: LayeredModel, **values: Values) -> Jobs:
        rows = self._rows(model)
        features = self._features(model, rows, values)
        layers, used = self._comparable(features)
        rows = rows.where(used)
        train = rows.targets["train"]
        labellings = {"": train, **({"random_labels": permuted(train, self.seed)} if self.random_labels else {})}
        missing = missing_tag("", ~torch.cat([*used.values()]))
        references = [*majority_records(rows, missing)]

        def layer_results(layer: int) -> list[_LayerScores]:
            data = {split: each.layer(layer) for split, each in features.items()}
            data = {split: each if used[split].all() else each[used[split]] for split, each in data.items()}
            found = []
            for control, labels in labellings.items():
                tags = {"task": rows.data.name, **({"control": control} if control else {}), **missing}
                found.append(self._layer_scores(data, labels, rows, used, layer, tags))
            return found

        def records(results: list[list[_LayerScores]]) -> Iterator[Record]:
            yield from references
            for control, column in zip(labellings, zip(*results, strict=True), strict=True):
                yield from (record for each in column for record in each.records)
                if not control:
                    tags = {"task": rows.data.name, **missing, "split": "test"}
                    yield from self._curves(rows, [each for each in column if each.layer], tags, ~layers[1:])

        return Jobs([partial(layer_results, layer) for layer in layers.nonzero()[:, 0].tolist()], records)

    def _layer_scores(
        self,
        data: Mapping[str, Tensor],
        labels: Tensor,
        rows: TaskRows,
        used: Mapping[str, Tensor],
        layer: int,
        tags: TagDict,
    ) -> "_LayerScores":
        """Fit a probe to the `labels` (true or permuted) of the training rows at one layer, and score it.

        `data` holds the features (rows, dim) of each split.
        """
        probe = fit_layer(data["train"], labels, self, num_classes=rows.num_classes or None)
        failed = isinstance(probe, LogisticProbes) and not bool(probe.converged.all())
        flag = {"num_not_converged": 1} if failed else {}
        records, scores = list[Record](), dict[str, RowScores]()
        for split in ("test",) if "control" in tags else rows.targets:
            scores[split], targets = score_rows(probe, data[split], rows.targets[split]), rows.targets[split]
            how = {"baseline": rows.errors_of_mean(split), "intervals": split != "train", "rows": used[split]}
            records += score_records(scores[split], targets, {**tags, "split": split, **flag}, layer=layer, **how)
        if self.estimator == "watch":
            c = float(probe.c if isinstance(probe, LogisticProbes) else 1 / probe.penalty)
            records.append(Record(metric="probe_c", value=c, layer=layer, n=len(labels), tags=tags))
        return _LayerScores(layer, records, scores["test"], failed)

    def _curves(self, rows: TaskRows, results: "list[_LayerScores]", tags: TagDict, gaps: Tensor) -> Iterator[Record]:
        """Yield the records of how each test score rises over layers 1 to L."""
        unconverged = sum(each.failed for each in results)
        tags = {**tags, **({"num_not_converged": unconverged} if unconverged else {}), **missing_tag("layers", gaps)}
        for metric in ("accuracy", "log_loss") if rows.is_classification else ("mean_squared_error",):
            yield from curve_records([each.test for each in results], tags, metric=metric)

    def _rows(self, model: LayeredModel) -> TaskRows:
        return self._reader.rows(model, join_validation=self.fit_on == "train_and_validation")


class _LayerScores(NamedTuple):
    layer: int
    records: list[Record]
    test: RowScores
    failed: bool  # whether the probe did not converge


def majority_records(rows: TaskRows, missing: Tags) -> Iterator[Record]:
    """Yield the test scores of a constant prediction, the same for all rows.

    For classes, the prediction is the class frequencies of the training labels. For a regression, it is their mean.
    `missing` holds tags with the numbers of rows left out.
    """
    train, targets = rows.targets["train"], rows.targets["test"]
    tags: Tags = {"task": rows.data.name, "split": "test", "num_train_rows": len(train), **rows.counts(), **missing}
    if rows.is_classification:
        share = torch.bincount(train, minlength=rows.num_classes).double() / len(train)
        scores = score_log_proba(share.log().expand(len(targets), -1), targets)
        tags = {**tags, "reference": "majority", "num_classes": rows.num_classes}
    else:
        scores, tags = RowScores(cast("Tensor", rows.errors_of_mean("test"))), {**tags, "reference": "mean"}
    yield from score_records(scores, targets, tags, layer=None, baseline=rows.errors_of_mean("test"), intervals=True)


SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(kw_only=True)
class SampleSizeSweep(TaskTexts, ProbeAnalysis):
    """The test score of each layer's probe with a 32nd, a 16th, ... and all of the training rows.

    The subsets of a seed are nested: they are the first rows of one permutation. Test rows and classes stay the same.
    Per layer and size (tag `train_rows`): the mean over seeds of `accuracy` and `log_loss`, or of `mean_squared_error`.
    Student's 95% interval is over seeds, which `n` counts. The full set is the same for every seed and is fitted once.
    The tag `num_classes_seen` is the smallest number of classes in a subset. A test row of another class counts as an
    error and is left out of the log-loss. `c` multiplies the sum of the rows' losses and is the same for all sizes, so
    regularisation weakens as rows are added.

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6). Its sizes are unpublished; the sizes here are
    ours.

    Args:
        task, tokenizer, corpus, folder, pooling, max_tokens, c, penalty, tolerance, max_iterations, estimator: as for
            `Probe`.
        name: name of the analysis; sample_sizes/TASK by default.
        layers: layers to measure. None means all, including layer 0.
        num_seeds: number of permutations.
        seed: the first seed; the others are the numbers that follow it.
    """

    kind = "sample_sizes"
    layers: list[int] | None = None
    num_seeds: int = 5

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if not {*(self.layers or ())} <= {*range(model.num_layers + 1)}:
            raise InputError(f"{self.name}: expected layers from 0 to {model.num_layers}, got {self.layers}")

    def jobs(self, model: LayeredModel, **values: Values) -> Jobs:
        rows = self._rows(model)
        data = self._features(model, rows, values)
        defined, used = self._comparable(data)
        rows, counts = rows.where(used), missing_tag("", ~torch.cat([*used.values()]))

        def layer_results(layer: int) -> list[Record]:
            features, held_out = (data[split].layer(layer)[used[split]] for split in ("train", "test"))
            return [
                record
                for size in sizes(len(features))
                for record in self._size_records(rows, features, held_out, layer, size, counts)
            ]

        layers = range(model.num_layers + 1) if self.layers is None else self.layers
        if not (present := [layer for layer in layers if defined[layer]]):
            raise all_undefined(self.name)
        return Jobs([partial(layer_results, layer) for layer in present])

    def _size_records(
        self, rows: TaskRows, features: Tensor, held_out: Tensor, layer: int, size: int, counts: dict[str, int]
    ) -> Iterable[Record]:
        labels, targets = rows.targets["train"], rows.targets["test"]
        by_metric = defaultdict[str, list[float]](list)
        seen, unconverged = [], 0
        for subset in subsets(len(features), size, self.num_seeds, self.seed):
            chosen = labels[subset]
            if rows.is_classification:
                seen.append(len(chosen.unique()))
                if seen[-1] < 2:
                    continue  # a probe needs two classes, so this subset does not enter the means
            probe = fit_layer(features[subset], chosen, self, num_classes=rows.num_classes or None)
            unconverged += int(not getattr(probe, "converged", torch.ones(1)).all())
            scores = score_rows(probe, held_out, targets)
            if scores.hits is None:
                by_metric["mean_squared_error"].append(float(scores.losses.mean()))
                continue
            by_metric["accuracy"].append(float(scores.hits.double().mean()))
            by_metric["log_loss"].append(float(scores.losses[scores.losses.isfinite()].mean()))  # NaN if none is finite
        tags: TagDict = {"task": rows.data.name, "split": "test", "train_rows": size, **counts}
        tags |= {"num_classes_seen": min(seen)} if seen else {}
        tags |= {"num_not_converged": unconverged} if unconverged else {}
        for metric, values in by_metric.items():
            if defined := [value for value in values if not math.isnan(value)]:
                yield summarize_seeds(metric, defined, layer=layer, tags=tags)


def sizes(num_rows: int) -> list[int]:
    """Return n/32, n/16, ..., n for n = `num_rows`, rounded down, without repetition and without values below 2."""
    return sorted({max(2, int(num_rows * share)) for share in SHARES if num_rows * share >= 2} | {num_rows})


def subsets(num_rows: int, size: int, num_seeds: int, seed: int) -> list[Tensor]:
    """Return the first `size` rows of a permutation for each seed.

    If `size` is `num_rows`, return a single tensor with all rows.
    """
    if size == num_rows:
        return [torch.arange(num_rows)]
    generators = (torch.Generator().manual_seed(seed + turn) for turn in range(num_seeds))
    return [torch.randperm(num_rows, generator=each)[:size] for each in generators]


def summarize_seeds(metric: str, values: list[float], *, layer: int, tags: TagDict) -> Record:
    """Return the mean over seeds; with two seeds or more, also stderr and Student's interval."""
    mean, n = sum(values) / len(values), len(values)
    if n < 2:
        return Record(metric=metric, value=mean, layer=layer, n=n, tags=tags)
    from scipy.stats import t

    stderr = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = stderr * float(t.ppf(0.975, n - 1))
    low, high = clip_interval(metric, mean, mean - half, mean + half)
    return Record(metric=metric, value=mean, stderr=stderr, low=low, high=high, layer=layer, n=n, tags=tags)
