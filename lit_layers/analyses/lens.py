"""What the model's own readout makes of each layer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.next_token_rows import predicts_next_token
from lit_layers.analyses.ratios import summarize_ratio
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

MAX_LOGITS = 2**24  # held at a time: 64 MB in float32, 333 tokens of GPT-2's vocabulary
NO_LABEL = -100


@dataclass(kw_only=True)
class Lens(DividedAnalysis):
    """The logit lens: final norm and head applied to every layer, 0 to L.

    Of a model that generates, per layer over all predicted tokens (every real one but a text's first):
    `logit_lens_loss` (nats per token), `logit_lens_accuracy` (top-1), `logit_lens_perplexity` = exp(loss) and
    `kl_to_final` = KL(last layer, layer) in nats. At layer L these are the model's own loss and perplexity, and 0.
    Uniform logits have a perplexity of the vocabulary's size.

    Of other models (classifiers, encoders, ViTs) the readout is their own pooler, norm and head: `kl_to_final` over
    prompts, or over real tokens where the head acts on tokens, and loss and accuracy against the batch's `labels` where
    it has them (-100 for none).

    Values weigh every token alike; `stderr`, the interval and `n` are over prompts, and the tag `num_tokens` counts
    tokens (or, of a pooling head, prompts). log-softmax in float32 or wider. Sources: nostalgebraist, interpreting GPT:
    the logit lens; Skean et al., Layer by Layer, arXiv 2502.02013.
    """

    batches: Batches
    name: str = "lens"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_head(model)

    def prepared(self, model: LayeredModel) -> LayeredModel:
        return model  # the loss that the model itself has

    def parts(self, model: LayeredModel) -> Iterable[Batch]:
        self._check_head(model)
        return self.batches

    def combine(self, model: LayeredModel, found: "list[_Sums]") -> Iterable[Record]:
        sums = _Sums(*(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)))
        if not sums.num_rows.any():
            raise InputError(f"{self.name}: no text has a next token to predict: give texts of two tokens or more")
        tags = {"num_tokens": int(sums.num_rows.sum())}
        labelled = {"num_tokens": int(sums.num_labels.sum())}
        for layer in range(model.num_layers + 1):
            if sums.num_labels.any():
                loss = summarize_ratio("logit_lens_loss", sums.loss[layer], sums.num_labels, layer=layer, tags=labelled)
                yield loss
                yield summarize_ratio(
                    "logit_lens_accuracy", sums.hits[layer], sums.num_labels, layer=layer, tags=labelled
                )
                if predicts_next_token(model):
                    yield _perplexity(loss)
            yield summarize_ratio("kl_to_final", sums.divergence[layer], sums.num_rows, layer=layer, tags=tags)

    def _check_head(self, model: LayeredModel) -> None:
        bare = model.num_classes == 0 if model.family.sees_images else not model.has_head
        if bare:
            raise InputError(f"{self.name}: {type(model.model).__name__} has no head to read its layers with")

    def of_part(self, model: LayeredModel, part: Batch) -> "_Sums":
        trajectory = model.trajectory(part)
        rows = self._rows(model, trajectory, part)
        size = max(1, MAX_LOGITS // trajectory.logits.shape[-1])
        parts = [torch.zeros(3, model.num_layers + 1, 0, dtype=torch.float64)]  # a batch may predict nothing
        for pieces in zip(*(column.split(size) for column in rows), strict=True):
            if len(pieces[0]):
                parts.append(_compare(model, trajectory, _Rows(*pieces)).double().cpu())
        values = torch.cat(parts, dim=-1)  # (3, layers + 1, rows)
        prompt, num_prompts = rows.prompt.cpu(), len(trajectory.mask)
        loss, hits, divergence = values.new_zeros(*values.shape[:-1], num_prompts).index_add_(-1, prompt, values)
        labelled = prompt[(rows.target != NO_LABEL).cpu()]
        return _Sums(
            loss=loss,
            hits=hits,
            divergence=divergence,
            num_rows=prompt.bincount(minlength=num_prompts),
            num_labels=labelled.bincount(minlength=num_prompts),
        )

    def _rows(self, model: LayeredModel, trajectory: Trajectory, batch: Batch) -> "_Rows":
        mask, per_token = trajectory.mask, trajectory.logits.ndim == 3
        if predicts_next_token(model):
            prompt, place = (mask[:, :-1] & mask[:, 1:]).nonzero().T
            return _Rows(prompt, place, batch["input_ids"].to(prompt.device)[prompt, place + 1])
        if per_token:
            prompt, place = mask.nonzero().T
        else:
            prompt = torch.arange(len(mask), device=mask.device)
            place = torch.zeros_like(prompt)
        target = torch.full_like(prompt, NO_LABEL)
        if "labels" in batch:
            labels = batch["labels"].to(prompt.device)
            expected = mask.shape if per_token else mask.shape[:1]
            if labels.is_floating_point() or labels.shape != expected:
                kind = type(model.model).__name__
                raise InputError(
                    f"{self.name}: expected integer labels of shape {tuple(expected)} for {kind}, "
                    f"got {labels.dtype} of shape {tuple(labels.shape)}"
                )
            target = labels[prompt, place] if per_token else labels
        return _Rows(prompt, place, target)


class _Rows(NamedTuple):
    """What is compared with the last layer: tokens, or whole prompts where the head pools (`place` is 0 then)."""

    prompt: Tensor  # (rows,)
    place: Tensor  # (rows,)
    target: Tensor  # (rows,) NO_LABEL where there is none


class _Sums(NamedTuple):
    """Over each prompt's rows, float64 on the CPU."""

    loss: Tensor  # (layers + 1, prompts)
    hits: Tensor  # (layers + 1, prompts)
    divergence: Tensor  # (layers + 1, prompts)
    num_rows: Tensor  # (prompts,)
    num_labels: Tensor  # (prompts,)


@torch.no_grad()
def _compare(model: LayeredModel, trajectory: Trajectory, rows: _Rows) -> Tensor:
    """Loss, hit and divergence of some rows at every layer, (3, layers + 1, rows): one layer's logits at a time."""
    index = (rows.prompt, rows.place) if trajectory.logits.ndim == 3 else (rows.prompt,)
    final = _log_softmax(trajectory.logits[index])
    share = final.exp()
    labelled = rows.target != NO_LABEL
    target = rows.target.where(labelled, 0)
    found = []
    for layer, hidden in enumerate(trajectory.hidden):
        last = layer == trajectory.num_layers  # the model's own logits, so that its divergence is 0 exactly
        log_proba = final if last else _log_softmax(model.readout(hidden[index]))
        loss = -log_proba.gather(1, target[:, None])[:, 0]
        hit = (log_proba.argmax(-1) == target) & labelled
        divergence = (share * (final - log_proba)).sum(-1)
        found.append(torch.stack([loss * labelled, hit.to(loss), divergence]))
    return torch.stack(found, dim=1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _perplexity(loss: Record) -> Record:
    """exp of the loss and of its interval; the standard error to first order."""
    value = _exp(loss.value)
    return replace(
        loss,
        metric="logit_lens_perplexity",
        value=value,
        stderr=None if loss.stderr is None else value * loss.stderr,
        low=None if loss.low is None else _exp(loss.low),
        high=None if loss.high is None else _exp(loss.high),
    )


def _exp(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).exp().item()  # inf where math.exp would raise
