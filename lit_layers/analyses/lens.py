"""What the model's own readout makes of each layer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.next_token_rows import predicts_next_token
from lit_layers.analyses.ratios import summarize_ratio
from lit_layers.analyses.readout_rows import MAX_LOGITS, FullModel, Rows, Sums, check_head, rows_of
from lit_layers.data.batches import Batches
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record


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
    tokens (or, of a pooling head, prompts). A prompt with a value that is not finite is left out of that metric and
    layer and counted in `num_undefined`; where the last layer is not finite, no layer has a divergence. log-softmax in
    float32 or wider. Sources: nostalgebraist, interpreting GPT: the logit lens; Skean et al., Layer by Layer, arXiv
    2502.02013.
    """

    batches: Batches
    name: str = "lens"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        check_head(self.name, model)

    def prepared(self, model: LayeredModel) -> LayeredModel:
        return model  # the loss that the model itself has

    def parts(self, model: LayeredModel) -> Iterable[Batch]:
        check_head(self.name, model)
        return self.batches

    def combine(self, model: LayeredModel, found: list[Sums]) -> Iterable[Record]:
        sums = Sums.joined(self.name, found)
        for layer in range(model.num_layers + 1):
            place: dict[str, Any] = {"layer": layer, "counted": "num_tokens"}
            if sums.num_labels.any():
                loss = summarize_ratio("logit_lens_loss", sums.loss[layer], sums.num_labels, **place)
                yield from loss
                yield from summarize_ratio("logit_lens_accuracy", sums.hits[layer], sums.num_labels, **place)
                if predicts_next_token(model):
                    yield from map(_perplexity, loss)
            yield from summarize_ratio("kl_to_final", sums.divergence[layer], sums.num_rows, **place)

    def of_part(self, model: LayeredModel, part: Batch) -> Sums:
        trajectory = model.trajectory(part)
        rows = rows_of(self.name, model, trajectory, part)
        size = max(1, MAX_LOGITS // trajectory.logits.shape[-1])
        parts = [torch.zeros(3, model.num_layers + 1, 0, dtype=torch.float64)]  # a batch may predict nothing
        parts += [_compare(model, trajectory, chunk).double().cpu() for chunk in rows.chunks(size)]
        return Sums.of(torch.cat(parts, dim=-1), rows, len(trajectory.mask))


@torch.no_grad()
def _compare(model: LayeredModel, trajectory: Trajectory, rows: Rows) -> Tensor:
    """Loss, hit and divergence of some rows at every layer, (3, layers + 1, rows): one layer's logits at a time."""
    full = FullModel(trajectory.logits[rows.index], rows)
    early = [full.compared(model.readout(hidden[rows.index])) for hidden in trajectory.hidden[:-1]]
    return torch.stack([*early, full.own], dim=1)  # the last by the model's own logits: its divergence is 0 exactly


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
