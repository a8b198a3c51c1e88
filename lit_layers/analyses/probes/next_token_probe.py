"""Linear probes of each layer that predict the next token."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_layers.analyses.base import Jobs
from lit_layers.analyses.base import Rows as RowsRead
from lit_layers.analyses.probes.probe_fits import Fitting, ProbeAnalysis, probe_jobs
from lit_layers.analyses.statistics import TagDict, all_undefined, comparable, missing_tag, summarize_ratio
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.curves import wilson_interval
from lit_layers.functional.probes.logistic import NUM_FOLDS, macro_f1
from lit_layers.models.view import LayeredModel, real_tokens
from lit_layers.records import Record


@dataclass(frozen=True, eq=False)
class Rows:
    """Positions in texts, in the order of the texts."""

    texts: Sequence[Tensor]  # real tokens of every text of the split, (tokens,) each
    text: Tensor  # (n,) index of the row's text
    position: Tensor  # (n,) position of the row in its text, from 0, without padding

    def __len__(self) -> int:
        return len(self.text)

    @cached_property
    def targets(self) -> Tensor:
        """The next tokens (n,)."""
        where = zip(self.text.tolist(), self.position.tolist(), strict=True)
        return torch.tensor([int(self.texts[text][position + 1]) for text, position in where], dtype=torch.long)

    def where(self, chosen: Tensor) -> "Rows":
        """Return the rows selected by a mask (n,) or by indices."""
        return replace(self, text=self.text[chosen], position=self.position[chosen])


class Pass(NamedTuple):
    """Contexts of one length for one forward pass, without padding, and the rows to read from their states."""

    input_ids: Tensor  # (batch, tokens)
    row: Tensor  # (k,) indices into the rows
    context: Tensor  # (k,) index of the context that holds the row
    position: Tensor  # (k,) position of the row in its context


def duplicates(texts: Sequence[Tensor], others: Sequence[Tensor]) -> set[int]:
    """Return the indices of the texts that also occur in `others`, token for token."""
    other_texts = {text.numpy().tobytes() for text in others}
    return {i for i, text in enumerate(texts) if text.numpy().tobytes() in other_texts}


def draw_rows(
    texts: Sequence[Tensor],
    *,
    min_context: int,
    per_text: int = 1,
    seed: int = 0,
    skip: Collection[int] = (),
) -> Rows:
    """Draw up to `per_text` different positions of each text, uniformly.

    A position needs `min_context` tokens up to and including it, and a next token. Positions depend only on the seed
    and the index of the text. Texts whose index is in `skip` have no rows.
    """
    chosen = []
    for i, text in enumerate(texts):
        num_allowed = len(text) - min_context
        if i in skip or num_allowed < 1:
            continue
        drawn = np.random.default_rng([seed, i]).choice(num_allowed, min(per_text, num_allowed), replace=False)
        chosen += [(i, min_context - 1 + int(position)) for position in np.sort(drawn)]
    text, position = torch.tensor(chosen, dtype=torch.long).reshape(-1, 2).T
    return Rows(texts, text, position)


def most_frequent(targets: Tensor, num_classes: int) -> Tensor:
    """Return the most frequent tokens in descending order; the lower id wins a tie."""
    tokens, counts = targets.unique(return_counts=True)
    return tokens[counts.argsort(descending=True, stable=True)[:num_classes]]


def class_of(targets: Tensor, classes: Tensor) -> Tensor:
    """Return the index of each target among the classes; -1 for a target outside them."""
    size = int(torch.cat([targets, classes]).max()) + 1
    index = torch.full((size,), -1)
    index[classes] = torch.arange(len(classes))
    return index[targets]


def passes(rows: Rows, *, max_tokens: int, together: bool) -> Iterator[Pass]:
    """Yield all rows, in forward passes of at most `max_tokens` tokens (or one context).

    A context ends at its row's position. The model then cannot see the target, even if it is not causal, and does no
    work on later tokens. With `together`, all rows of a text are read from the context of its last row, which is valid
    for causal models.
    """
    contexts: dict[tuple[int, int], list[int]] = defaultdict(list)
    texts, positions = rows.text.tolist(), rows.position.tolist()
    for row, (text, position) in enumerate(zip(texts, positions, strict=True)):
        contexts[text, -1 if together else position].append(row)
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for members in contexts.values():
        by_length[max(positions[row] for row in members) + 1].append(members)
    for length, groups in sorted(by_length.items()):
        size = max(1, max_tokens // length)
        for start in range(0, len(groups), size):
            chunk = groups[start : start + size]
            row = torch.tensor([row for members in chunk for row in members])
            yield Pass(
                input_ids=torch.stack([rows.texts[texts[members[0]]][:length] for members in chunk]),
                row=row,
                context=torch.tensor([i for i, members in enumerate(chunk) for _ in members]),
                position=rows.position[row],
            )


MAX_LOGITS = 2**28  # largest number of logits in one forward pass: 1 GB in float32


@dataclass(kw_only=True)
class NextTokenProbe(ProbeAnalysis):
    """A logistic probe per layer that predicts the next token among the most frequent ones.

    One position is drawn from each text (`positions_per_sequence` for more), uniformly over those with `min_context`
    tokens of context and a next token. Features are the states at that position; the target is the next token. Classes
    are the `num_classes` most frequent training targets, or as many as there are. `train` and `test` should come from
    different documents. A training text that is equal to a test text, token for token, is left out.

    Per layer: `accuracy`, `log_loss` (nats) and `macro_f1` on the test rows whose target is a class. `accuracy_all` is
    over all test rows; rows whose target is not a class count as errors. `coverage` is the share of test rows whose
    target is a class.

    The tags of the record `coverage` are the numbers of classes, of training rows and of texts left out. If fewer texts
    exist than were requested, the tags `num_train_wanted` and `num_test_wanted` are the requested numbers.

    Records tagged `reference` score other predictions on the same test rows. "majority" always predicts the class
    frequencies in training. For a model that predicts the next token, "lm_head" is its own head over its vocabulary.
    "lm_head_closed" is the same head limited to the classes, like the probe. Records tagged `control="random_labels"`
    come from probes fitted to permuted labels.

    Intervals: Wilson's for shares, bootstrap over test rows for the loss, none for `macro_f1`. With several positions
    per text, the rows are not independent, so all intervals are then bootstrapped over texts. `n` counts rows. A layer
    whose states are not finite for most rows has no probe. `num_undefined` counts the rows whose states are not finite
    at a layer with a probe; all rows of their texts are left out. A layer whose probe did not converge has the tag
    `num_not_converged`.

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), section 2. Its settings are unpublished; the
    defaults are ours.
    """

    SEES = "text"
    train: Batches
    test: Batches
    name: str = "next_token_probe"
    num_classes: int = 1000
    min_context: int = 16
    positions_per_sequence: int = 1
    random_labels: bool = True

    def check_data(self) -> None:
        super().check_data()
        self._problem  # noqa: B018

    def reads(self, model: LayeredModel) -> dict[str, RowsRead]:
        """Return an empty dict, because the analysis does not read its data in the forward pass that analyses share.

        `jobs` runs the model itself. It may have to run twice, because contexts with non-finite states are replaced.
        """
        return {}

    def jobs(self, model: LayeredModel) -> Jobs:
        problem = self._problem
        train, test, head = self._features(model, problem)
        layers, used = comparable(torch.cat([states.isfinite().all(-1) for states in (train, test)], dim=1))
        in_train, in_test = used.split([len(problem.train), len(problem.test)])
        if not in_train.any() or not in_test.any():
            raise all_undefined(self.name)
        tags: TagDict = {**missing_tag("", ~used)}
        if tags:  # some rows have undefined states: draw all rows again, from the other texts
            problem = self._draw({*problem.train.text[~in_train].tolist()}, {*problem.test.text[~in_test].tolist()})
            train, test, head = self._features(model, problem)
        references = self._coverage(problem, tags)
        for reference, predicted, log_proba in _references(problem, head):
            references += self._scores(problem, predicted, log_proba, {"reference": reference, **tags})
        references += self._head_scores(problem, head, tags)
        if not layers.all():
            train, test = train[layers], test[layers]

        def scores(log_proba: Tensor, tags: TagDict, layer: int) -> Iterator[Record]:
            return self._scores(problem, log_proba.argmax(-1), log_proba, tags, layer)

        labels, num_classes, groups = problem.train_classes, len(problem.classes), self._fold_groups(problem.train.text)
        fitting = Fitting(train, labels, test, layers, num_classes, tags, scores, groups)
        seed = self.seed if self.random_labels else None
        return probe_jobs(model, references, [fitting], self, seed)

    def _fold_groups(self, text: Tensor) -> Tensor:
        """Return the group id (n,) of each training row.

        `fit_watching_probes` chooses its penalty on held-out rows. It holds out all rows of a group together. The
        groups are the documents. If a document has more rows than are held out at a time, the groups are the texts,
        which are pieces of documents.
        """
        # A plain list of batches does not know the documents of its texts.
        origins = self.train.origins() if isinstance(self.train, Batches) else None
        if origins is None or origins[text].bincount().max() > len(text) / NUM_FOLDS:
            return text
        return origins[text]

    def _features(self, model: LayeredModel, problem: "_Problem") -> tuple[Tensor, Tensor, "_Head | None"]:
        """Return the states of the training rows, those of the test rows, and the head's predictions on the test rows.

        Both tensors of states are (layers + 1, rows, dim). The predictions are None if the model does not predict the
        next token.
        """
        max_tokens = max(batch["input_ids"].numel() for batch in self.test)
        how: dict[str, Any] = {"max_tokens": min(max_tokens, MAX_LOGITS // (model.vocab_size or model.dim))}
        how["together"] = model.predicts_next_token
        return _states(model, problem.train, None, **how)[0], *_states(model, problem.test, problem.classes, **how)

    @cached_property
    def _problem(self) -> "_Problem":
        """Rows of both splits and their classes, which depend only on tokens."""
        return self._draw(set(), set())

    def _draw(self, broken_train: set[int], broken_test: set[int]) -> "_Problem":
        """Draw the rows of both splits, without the texts of these indices, which have states that are not finite."""
        train_texts, test_texts = (
            [text for batch in split for text in real_tokens(batch)] for split in (self.train, self.test)
        )
        doubles = duplicates(train_texts, test_texts)
        how: dict[str, Any] = {"min_context": self.min_context, "per_text": self.positions_per_sequence}
        drawn, test = (
            draw_rows(texts, seed=self.seed, skip=without, **how)
            for texts, without in ((train_texts, doubles | broken_train), (test_texts, broken_test))
        )
        for split, rows in (("train", drawn), ("test", test)):
            if not len(rows):
                also = f" beside {len(doubles)} that are test texts too" if split == "train" and doubles else ""
                raise InputError(f"{self.name}: {split} has no text of over {self.min_context} tokens{also}")
        classes = most_frequent(drawn.targets, self.num_classes)
        if len(classes) < 2:
            raise InputError(f"{self.name}: all training rows have one next token, and a probe needs two classes")
        train_classes, test_classes = class_of(drawn.targets, classes), class_of(test.targets, classes)
        if not (test_classes >= 0).any():
            raise InputError(f"{self.name}: no test row has one of the {len(classes)} classes as its next token")
        covered = train_classes >= 0
        num_short = sum(len(text) <= self.min_context for text in [*train_texts, *test_texts])
        counts = len(doubles), num_short, (len(train_texts), len(test_texts))
        return _Problem(drawn.where(covered), test, classes, train_classes[covered], test_classes, *counts)

    def _coverage(self, problem: "_Problem", tags: TagDict) -> list[Record]:
        tags = tags | {"num_classes": len(problem.classes), "num_train_rows": len(problem.train)}
        tags |= {"num_duplicates": problem.num_duplicates, "num_too_short": problem.num_too_short}
        for name, batches, count in zip(("train", "test"), (self.train, self.test), problem.num_texts, strict=True):
            requested = getattr(batches, "num_sequences", count)
            if requested > count:
                tags[f"num_{name}_wanted"] = requested
        return self._mean("coverage", problem.test_classes >= 0, problem.test.text, tags=tags)

    def _head_scores(self, problem: "_Problem", head: "_Head | None", counts: TagDict) -> Iterator[Record]:
        if head is not None:
            tags: TagDict = {"reference": "lm_head", **counts}
            covered, text = problem.test_classes >= 0, problem.test.text
            hit = head.top == problem.test.targets
            yield from self._mean("accuracy", hit[covered], text[covered], tags=tags)
            yield from self._mean("accuracy_all", hit, text, tags=tags)
            yield from self._mean("log_loss", head.log_loss[covered], text[covered], tags=tags)

    def _scores(
        self, problem: "_Problem", predicted: Tensor, log_proba: Tensor, tags: TagDict, layer: int | None = None
    ) -> Iterator[Record]:
        """Yield the records that score predictions (test rows,) and log-probabilities (test rows, classes)."""
        covered = problem.test_classes >= 0
        truth, text = problem.test_classes[covered], problem.test.text
        hit = predicted == problem.test_classes  # False for rows whose next token is not a class (-1)
        fields: dict[str, Any] = {"layer": layer, "tags": tags}
        yield from self._mean("accuracy", hit[covered], text[covered], **fields)
        yield from self._mean("accuracy_all", hit, text, **fields)
        losses = -log_proba[covered].gather(1, truth[:, None])[:, 0]
        yield from self._mean("log_loss", losses, text[covered], **fields)
        yield Record(metric="macro_f1", value=macro_f1(truth, predicted[covered]), n=len(truth), **fields)

    def _mean(self, metric: str, values: Tensor, text: Tensor, **fields: Any) -> list[Record]:
        """Return the record of a mean over rows, with an interval over texts.

        The interval is Wilson's if the values are booleans and each text has one row.
        """
        _, num_texts = self._problem.num_texts
        counts = torch.bincount(text, minlength=num_texts)
        sums = torch.zeros(num_texts, dtype=torch.float64).index_add_(0, text, values.double())
        records = summarize_ratio(metric, sums, counts, empty_is_undefined=False, **fields)
        ends: dict[str, float] = {}
        if values.dtype == torch.bool and self.positions_per_sequence == 1:
            ends = dict(zip(("low", "high"), wilson_interval(int(values.sum()), len(values)), strict=True))
        return [replace(record, n=len(values), **ends) for record in records]


class _Problem(NamedTuple):
    train: Rows  # only training rows whose target is a class
    test: Rows
    classes: Tensor  # (classes,) token ids, the most frequent first
    train_classes: Tensor  # (train rows,)
    test_classes: Tensor  # (test rows,), -1 for targets outside the classes
    num_duplicates: int
    num_too_short: int
    num_texts: tuple[int, int]  # number of texts in train and in test


class _Head(NamedTuple):
    """Predictions of the next token by the model's own head."""

    top: Tensor  # (rows,) the most probable token
    log_loss: Tensor  # (rows,) negative log-probability of the next token, in nats
    closed: Tensor  # (rows, classes) logits of the tokens that are classes


def _references(problem: _Problem, head: _Head | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each reference with which probes are compared: its name, predictions and log-probabilities.

    Predictions are (test rows,), log-probabilities (test rows, classes).
    """
    share = torch.bincount(problem.train_classes).double() / len(problem.train)
    yield "majority", share.argmax().expand(len(problem.test)), share.log().expand(len(problem.test), -1)
    if head is not None:
        closed = head.closed.log_softmax(-1)
        yield "lm_head_closed", closed.argmax(-1), closed


def _states(model: LayeredModel, rows: Rows, classes: Tensor | None, **how: Any) -> tuple[Tensor, _Head | None]:
    """Return the states (layers + 1, rows, dim) at the rows' positions, on the CPU.

    Given classes and a model that predicts the next token, also return the predictions of its head.
    """
    states, heads = torch.empty(model.num_layers + 1, len(rows), model.dim, dtype=model.dtype), list[_Head]()
    order, targets = list[Tensor](), rows.targets
    for one in passes(rows, **how):
        trajectory = model.trajectory({"input_ids": one.input_ids})
        states[:, one.row] = trajectory.hidden[:, one.context, one.position].cpu()
        if classes is not None and model.predicts_next_token:
            logits = trajectory.logits_of((one.context, one.position)).cpu()  # (k, vocabulary)
            log_loss = -logits.log_softmax(-1).gather(1, targets[one.row, None])[:, 0]
            heads.append(_Head(logits.argmax(-1), log_loss, logits[:, classes]))
            order.append(one.row)
    if not heads:
        return states, None
    inverse = torch.cat(order).argsort()
    head = _Head(*(torch.cat(columns)[inverse] for columns in zip(*heads, strict=True)))
    # Leave out the head if a loss is not finite. The states of the last layer are then not finite either.
    return states, head if head.log_loss.isfinite().all() else None
