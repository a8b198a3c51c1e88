"""Predictions from every layer's readout (logit lens), and from a model whose blocks run in another order."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from lit_layers.analyses.base import NUM_CHECKED, Analysis, Dtype, Values
from lit_layers.analyses.base import Rows as RowsRead
from lit_layers.analyses.statistics import Tags, exponential, rounding_records, summarize_ratio
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import LOOPS, SEEDS, VARIANTS, Variant, baseline, kendall_distance, start_of
from lit_layers.models.contributions import contributions
from lit_layers.models.running_order import SharedPrefixes, variants_of
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

NO_LABEL = -100


class Rows(NamedTuple):
    """The tokens that are scored.

    If the head gives one prediction per prompt, the rows are the prompts, and `position` is 0.
    """

    prompt: Tensor  # (rows,) index of the prompt in its batch
    position: Tensor  # (rows,) position in the prompt
    target: Tensor  # (rows,) NO_LABEL where a row has no label
    per_token: bool

    @property
    def index(self) -> tuple[Tensor, ...]:
        """Return the index that selects the rows from logits, and equally from hidden states."""
        return (self.prompt, self.position) if self.per_token else (self.prompt,)

    @property
    def labelled(self) -> Tensor:
        return self.target != NO_LABEL

    def chunks(self, size: int) -> "Iterator[Rows]":
        """Yield the rows in order, at most `size` at a time; yield nothing if there are no rows."""
        for start in range(0, len(self.prompt), size):
            yield Rows(*(column[start : start + size] for column in self[:3]), per_token=self.per_token)


class Sums(NamedTuple):
    """Sums of each score over each prompt's rows, in float64 on the CPU.

    The dimensions `*n` run over the readouts, such as layers.
    """

    loss: Tensor  # (*n, prompts)
    hits: Tensor  # (*n, prompts)
    divergence: Tensor  # (*n, prompts)
    num_rows: Tensor  # (prompts,) number of rows of each prompt
    num_labels: Tensor  # (prompts,) number of rows with a label

    @classmethod
    def add_up(cls, values: Tensor, rows: Rows, num_prompts: int) -> "Sums":
        """Sum the scores (3, *n, rows) of several readouts, as `FullModel.scores` returns them, over each prompt."""
        prompt = rows.prompt.cpu()
        values = values.double().cpu()
        loss, hits, divergence = values.new_zeros(*values.shape[:-1], num_prompts).index_add_(-1, prompt, values)
        num_rows, num_labels = (each.bincount(minlength=num_prompts) for each in (prompt, prompt[rows.labelled.cpu()]))
        return cls(loss, hits, divergence, num_rows, num_labels)


def rows_of(name: str, trajectory: Trajectory, batch: Batch) -> Rows:
    """Return the rows to score.

    For a model that predicts the next token, these are the real tokens followed by a real token, which is the target.
    For other models, they are all real tokens, or the prompts if the head pools, with the batch's `labels` as targets.

    Raises:
        InputError: if the labels do not fit the head, or the head has a single output. The message names the analysis
            `name`.
    """
    mask, model = trajectory.mask, trajectory.model
    if model.predicts_next_token:
        prompt, position = (mask[:, :-1] & mask[:, 1:]).nonzero().T
        return Rows(prompt, position, batch["input_ids"].to(prompt.device)[prompt, position + 1], True)
    per_token, num_classes = trajectory.logits.ndim == 3, trajectory.logits.shape[-1]
    if num_classes == 1:  # the log-softmax of a single output is always 0
        raise InputError(f"{name}: {type(model.model).__name__} gives one number, a regression, and no classes")
    if per_token:
        prompt, position = mask.nonzero().T
    else:
        prompt = torch.arange(len(mask), device=mask.device)
        position = torch.zeros_like(prompt)
    target = torch.full_like(prompt, NO_LABEL)
    if "labels" in batch:
        labels = batch["labels"].to(prompt.device)
        expected = mask.shape if per_token else mask.shape[:1]
        if labels.is_floating_point() or labels.shape != expected:
            got = f"{labels.dtype} of shape {tuple(labels.shape)}"
            raise InputError(f"{name}: expected integer labels of shape {tuple(expected)}, got {got}")
        target = labels[prompt, position] if per_token else labels
        if len(target) and target.max() >= num_classes:
            raise InputError(f"{name}: expected labels of {num_classes} classes, got {int(target.max())}")
    return Rows(prompt, position, target, per_token)


def check_head(name: str, model: LayeredModel) -> None:
    """Check that the model has a head.

    Raises:
        InputError: if it has none. The message names the analysis `name` and the model.
    """
    # The head of CLIP's text model gives a state and no logits.
    scores_texts = model.has_head and "logits" in model.family.results
    if model.num_classes == 0 if model.family.sees_images else not scores_texts:
        raise InputError(f"{name}: {type(model.model).__name__} has no head to read its layers with")


MAX_LOGITS = 2**23  # largest number of logits in memory at a time: 32 MB in float32, 166 tokens of GPT-2's vocabulary


class FullModel:
    """The full model's predictions on some rows, with which other readouts of these rows are compared."""

    def __init__(self, logits: Tensor, rows: Rows) -> None:
        log_proba = _log_softmax(logits)  # (rows, classes)
        self.rows, self._share = rows, log_proba.exp()
        self._negative_entropy = torch.linalg.vecdot(self._share, log_proba)
        nothing = torch.zeros_like(self._negative_entropy).masked_fill(self._negative_entropy.isnan(), torch.nan)
        # What `scores` returns for the full model's own logits: its loss and hit, and a divergence of 0.
        self.own_scores = torch.stack([*_loss_and_hit(rows, log_proba), nothing])

    def scores(self, logits: Tensor) -> Tensor:
        """Return loss, hit and KL(full model || these logits) of each row, (3, rows).

        The hit is 1 if the class with the largest logit is the target, otherwise 0. Loss and hit are 0 without a label,
        and NaN if the logits are. The log-softmax is in float32 or wider. The divergence of equal logits is exactly 0.
        """
        log_proba = _log_softmax(logits)
        divergence = self._negative_entropy - torch.linalg.vecdot(self._share, log_proba)
        return torch.stack([*_loss_and_hit(self.rows, log_proba), divergence])


def _loss_and_hit(rows: Rows, log_proba: Tensor) -> tuple[Tensor, Tensor]:
    labelled = rows.labelled
    target = rows.target.where(labelled, 0)
    scores = log_proba.gather(1, target[:, None])[:, 0]
    # Among equal logits, the first one is the prediction.
    if log_proba.device.type == "cpu":  # argmax is slow on a CPU: run it only where the target has the maximum
        hit = labelled & (scores == log_proba.amax(-1))
        close = hit.nonzero()[:, 0]
        hit[close] = log_proba[close].argmax(-1) == target[close]
    else:
        hit = labelled & (log_proba.argmax(-1) == target)
    hits = hit.to(scores).where(scores.isfinite() | scores.isinf(), scores)
    return (-scores).where(labelled, 0.0), hits.where(labelled, 0.0)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


@dataclass(kw_only=True)
class ReadoutAnalysis(Analysis):
    """Base of the analyses that compare several predictions of the same tokens, such as those read out at each layer.

    The model runs in its own precision, because rounding is much smaller than the differences that are compared.

    Args:
        batches: the data to measure on.
        dtype: "bfloat16" computes the matrix products inside blocks in bfloat16 (`BFloat16View`). All records then have
            the tag `dtype`. The first prompts are also measured in float32; `bf16_difference` and
            `bf16_largest_difference` compare their losses (or, without labels, divergences).
    """

    PRECISION = "own"

    batches: Batches
    dtype: Dtype = "float32"

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        check_head(self.name, model)

    @abstractmethod
    def records(self, model: LayeredModel, sums: Sums) -> Iterable[Record]:
        """Yield the records from the sums of all prompts."""

    @abstractmethod
    def readouts(self, model: LayeredModel) -> Sequence[tuple[int | None, Tags]]:
        """Return layer and tags of each readout, in the order of the first dimension of `Sums.loss`."""

    def reads(self, model: LayeredModel) -> dict[str, RowsRead]:
        if self.dtype == "float32":
            return {"batches": RowsRead(self.batches, precision="own")}
        rounded = RowsRead(self.batches, precision="bfloat16")
        return {"batches": rounded, "checked": RowsRead(self.batches, limit=NUM_CHECKED)}

    def compute(self, model: LayeredModel, batches: Values, checked: Values | None = None) -> Iterator[Record]:
        sums = Sums(**batches)
        if not sums.num_rows.any():
            raise InputError(f"{self.name}: no text has a next token to predict: give texts of two tokens or more")
        for record in self.records(model, sums):
            yield replace(record, tags=record.tags | self.tags_of("dtype"))
        if checked is None:
            return
        exact = Sums(**checked)
        num_prompts, has_labels = len(exact.num_rows), bool(exact.num_labels.any())
        kind, counts = ("loss", exact.num_labels) if has_labels else ("divergence", exact.num_rows)
        differences = (getattr(sums, kind)[:, :num_prompts] - getattr(exact, kind)) / counts
        for (layer, tags), of_readout in zip(self.readouts(model), differences, strict=True):
            yield from rounding_records(of_readout[counts > 0], kind, layer=layer, tags=tags)


@dataclass(kw_only=True)
class Lens(ReadoutAnalysis):
    """The logit lens: final norm and head applied to every layer, 0 to L.

    A model that predicts the next token is scored over all predicted tokens (every real token but the first of a text).
    Per layer: `logit_lens_loss` (nats per token), `logit_lens_accuracy` (top-1), `logit_lens_perplexity` = exp(loss),
    and `kl_to_final` = KL(last layer || layer) in nats. With states "resid", at layer L the first three are the
    model's own, and `kl_to_final` is 0. Uniform logits have a perplexity of the vocabulary's size.

    For other models (classifiers, encoders, ViTs) the readout is their own pooler, norm and head. `kl_to_final` is over
    prompts, or over real tokens if the head acts on tokens. Loss and accuracy are against the batch's `labels`, if it
    has them (-100 for no label).

    Every token has equal weight. `stderr`, the interval and `n` are over prompts, and the tag `num_tokens` counts
    tokens (prompts for a pooling head). A prompt is left out of a metric and layer if it has nothing to predict or a
    value that is not finite. `num_undefined` counts these prompts. If the last layer is not finite, no layer has a
    divergence. The log-softmax is in float32 or wider.

    Source: nostalgebraist, interpreting GPT: the logit lens; Skean et al., Layer by Layer, arXiv 2502.02013.

    Args:
        batches: the data to measure on.
        dtype: "bfloat16" computes the matrix products inside blocks in bfloat16, and also reports how far the loss of
            the first prompts is from that in float32.
        states: "resid" reads out the output of each block. "after_attention" reads out the middle of each block: its
            input plus what its attention adds, at layers 1 to L and in float32. The readout cannot read the output of
            an attention without its input, because it is no state. A model is refused if its blocks do not add
            attention and MLP to the state (see `contributions`).
    """

    name: str = "lens"
    states: Literal["resid", "after_attention"] = "resid"

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if self.states != "resid" and self.dtype != "float32":
            raise InputError(f"{self.name}: states {self.states} needs dtype float32, got {self.dtype}")

    def reads(self, model: LayeredModel) -> dict[str, RowsRead]:
        # Rounding errors in 16 bits are too large for the check that blocks add attention and MLP to the state.
        return super().reads(model) if self.states == "resid" else {"batches": RowsRead(self.batches)}

    def readouts(self, model: LayeredModel) -> Sequence[tuple[int | None, Tags]]:
        return [(layer, {}) for layer in range(model.num_layers + 1)]

    def records(self, model: LayeredModel, sums: Sums) -> Iterable[Record]:
        for layer in range(model.num_layers + 1):
            fields: dict[str, Any] = {"layer": layer, "counted": "num_tokens", "tags": self.tags_of("states")}
            if sums.num_labels.any():
                loss = summarize_ratio("logit_lens_loss", sums.loss[layer], sums.num_labels, **fields)
                yield from loss
                yield from summarize_ratio("logit_lens_accuracy", sums.hits[layer], sums.num_labels, **fields)
                if model.predicts_next_token:
                    yield from map(_perplexity, loss)
            yield from summarize_ratio("kl_to_final", sums.divergence[layer], sums.num_rows, **fields)

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        states = None
        if self.states == "after_attention":
            inner = range(1, seen.num_layers + 1)
            attention = [seen.hidden[layer - 1] + contributions(seen, layer)[0] for layer in inner]
            states = [torch.full_like(seen.hidden[0], torch.nan), *attention]
        return layer_sums(self.name, seen, batch, states)._asdict()


def layer_sums(name: str, seen: Trajectory, batch: Batch, states: Sequence[Tensor] | None = None) -> Sums:
    """Return sums of scores over each prompt's rows, for the readout of every layer. Layer L is the model's own output.

    `states` are the states to read out. By default, they are the states of layers 0 to L - 1.

    Raises:
        InputError: as in `rows_of`.
    """
    rows = rows_of(name, seen, batch)
    states = [*seen.hidden[:-1]] if states is None else states  # without the last layer, see `_compare`
    values = [torch.zeros(3, seen.num_layers + 1, 0, dtype=torch.float64)]  # for a batch without rows to score
    values += [_compare(seen, chunk, states).double().cpu() for chunk in _chunks(seen, rows)]
    return Sums.add_up(torch.cat(values, dim=-1), rows, len(seen.mask))


def _chunks(trajectory: Trajectory, rows: Rows) -> Iterator[Rows]:
    """Yield the rows, as many at a time as `MAX_LOGITS` allows."""
    model = trajectory.model
    num_classes = model.vocab_size if model.predicts_next_token else trajectory.logits.shape[-1]
    return rows.chunks(max(1, MAX_LOGITS // (num_classes or 1)))


@torch.no_grad()
def _compare(trajectory: Trajectory, rows: Rows, states: Sequence[Tensor]) -> Tensor:
    """Return loss, hit and divergence of each row, for the readouts of L or L + 1 states, (3, layers + 1, rows).

    L states are those of layers 0 to L - 1. The last layer is then scored by the model's own logits, so its divergence
    is exactly 0. Only the logits of one layer are in memory at a time.
    """
    full = FullModel(trajectory.logits_of(rows.index), rows)
    scores = [full.scores(trajectory.readout(hidden, rows.index)) for hidden in states]
    if len(scores) == trajectory.num_layers:
        scores.append(full.own_scores)
    return torch.stack(scores, dim=1)


def _perplexity(loss: Record) -> Record:
    record = replace(exponential(loss), metric="logit_lens_perplexity")
    if loss.by_prompt is None or record.value > 1e30:
        return record
    return replace(record, by_prompt=record.value * (1 + loss.by_prompt - loss.value))


@dataclass(kw_only=True)
class Interventions(ReadoutAnalysis):
    """Loss, accuracy and divergence of a model whose blocks run in other orders.

    A model that predicts the next token is scored over all predicted tokens (every real token but the first of a text).
    Per variant: `variant_loss` (nats per token), `variant_accuracy` (top-1) and `kl_to_full` = KL(full model ||
    variant) in nats. `variant_loss_difference` and `variant_accuracy_difference` are the differences from the full
    model, taken within each prompt. For random orders, only the mean over seeds has them. For other models
    (classifiers, encoders, ViTs) `kl_to_full` is over prompts, or over real tokens if the head acts on tokens. Loss and
    accuracy are against the batch's `labels`, if it has them (-100 for no label).

    The tag `variant` names the order, `middle` counts the middle blocks, and `loops` counts the loops of the variant
    looped_parallel. For skip_one and repeat_one, the record's layer is the block that is skipped or repeated; for
    switch, it is the first of the two switched blocks. Random orders have records for each `seed`, with the `schedule`
    and its `kendall_distance` (pairs of blocks in reversed order). One more record is the mean over seeds, taken within
    each prompt; its tag `num_identical` counts the orders that are equal to the full model's. The full model is the
    variant `baseline`, with a divergence of 0.

    Every token has equal weight. `stderr`, the interval and `n` are over prompts, and `num_tokens` counts tokens
    (prompts for a pooling head). A prompt with nothing to predict, or with a value that is not finite, is left out and
    counted in `num_undefined`. If no prompt is left, a record without a layer has the value NaN, and a record with a
    layer is left out. The log-softmax is in float32 or wider; the model runs in its own precision.

    If several orders begin with the same blocks, these run only once per batch.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298.

    Args:
        batches: the data to measure on.
        variants: names of orders. The default is all except repeat_one.
        middles: numbers of middle blocks. None means all that are possible.
        seeds: seeds of random orders.
        loops: numbers of loops of the variant looped_parallel.
        custom: further orders, written as `1 2 (3,4,5) 6`.
        dtype: "bfloat16" computes the matrix products inside blocks in bfloat16, and also reports how far the loss of
            the first prompts is from that in float32.
    """

    name: str = "interventions"
    variants: tuple[str, ...] = VARIANTS
    middles: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = SEEDS
    loops: tuple[int, ...] = LOOPS
    custom: tuple[str, ...] = ()

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        self.chosen(model)

    def readouts(self, model: LayeredModel) -> Sequence[tuple[int | None, Tags]]:
        return [(variant.block, variant.tags) for variant in self.chosen(model)]

    def chosen(self, model: LayeredModel) -> list[Variant]:
        """Return the variants of this model, the full model first."""
        return variants_of(self, model, f"{self.name}: ")

    @torch.no_grad()
    def update(self, seen: Trajectory, batch: Batch) -> Values:
        model, trajectory, rows = seen.model, seen, rows_of(self.name, seen, batch)
        full = [FullModel(trajectory.logits_of(chunk.index), chunk) for chunk in _chunks(trajectory, rows)]
        trajectory = replace(trajectory)  # a copy without the logits, which are large and no longer needed
        chosen = self.chosen(model)
        by_variant: list[Tensor] = [torch.zeros(3, len(rows.prompt), dtype=torch.float64)] * len(chosen)
        if full:  # there are rows to score
            # The full model is scored by its own logits, so that its divergence is exactly 0.
            by_variant = [torch.cat([each.own_scores for each in full], dim=-1)] * len(chosen)
            orders = SharedPrefixes([variant.schedule for variant in chosen], model.num_layers)
            for indices, state in orders.states(trajectory):
                if 0 not in indices:
                    values = [each.scores(trajectory.readout(state, each.rows.index)) for each in full]
                    scores = torch.cat(values, dim=-1)
                    for i in indices:
                        by_variant[i] = scores
        return Sums.add_up(torch.stack(by_variant, dim=1), rows, len(seen.mask))._asdict()

    def records(self, model: LayeredModel, sums: Sums) -> Iterable[Record]:
        chosen = enumerate(self.chosen(model))
        for (name, middle), group in groupby(chosen, key=lambda item: (item[1].name, item[1].middle)):
            members = list(group)
            for i, variant in members:
                yield from _variant_records(sums, [i], variant.tags, variant.block)
                if name == "random":
                    yield _distance(variant, model.num_layers)
            if name == "random":
                whole = baseline(model.num_layers)
                identical = sum(variant.schedule == whole for _, variant in members)
                tags = {"variant": name, "middle": middle, "num_seeds": len(members), "num_identical": identical}
                yield from _variant_records(sums, [i for i, _ in members], tags)


def _variant_records(sums: Sums, indices: list[int], tags: Tags, layer: int | None = None) -> Iterator[Record]:
    """Yield the records of one order of the blocks, or of the mean over several orders.

    `indices` selects the orders in `sums`. The mean over orders is taken within each prompt.
    """
    kinds = [("variant_loss", sums.loss, sums.num_labels), ("variant_accuracy", sums.hits, sums.num_labels)]
    for metric, values, counts in (*kinds, ("kl_to_full", sums.divergence, sums.num_rows)):
        fields: Any = {"layer": layer, "tags": tags, "counted": "num_tokens"}
        if counts.any():
            yield from summarize_ratio(metric, values[indices].mean(0), counts, **fields)
            if metric != "kl_to_full" and tags["variant"] != "baseline" and "seed" not in tags:
                # The difference is taken within each prompt, so that the difficulty of the prompt cancels.
                difference = values[indices].mean(0) - values[0]
                yield from summarize_ratio(f"{metric}_difference", difference, counts, **fields)


def _distance(variant: Variant, num_blocks: int) -> Record:
    start = start_of(num_blocks, cast("int", variant.middle))
    order = [step for step in variant.schedule[start + 1 : num_blocks - start] if isinstance(step, int)]
    return Record(metric="kendall_distance", value=float(kendall_distance(order)), tags=dict(variant.tags))
