"""Intervals of scores that are no mean over rows."""

import torch
from jaxtyping import Int
from torch import Tensor

from lit_layers.functional.layer_choice import row_counts


def macro_f1_interval(
    labels: Int[Tensor, " n"],
    predictions: Int[Tensor, " n"],
    *,
    resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile bootstrap interval over rows, low and high, of `macro_f1`; each resample over the classes it has.

    The rows of a seed are those of `bootstrap_interval`. 10,000 rows of 77 classes: a few seconds.

    Raises:
        ValueError: fewer than 2 rows, labels and predictions of different shapes, an option out of range.
    """
    if labels.shape != predictions.shape or labels.ndim != 1 or len(labels) < 2:
        raise ValueError(
            f"expected labels and predictions of at least 2 rows, got {tuple(labels.shape)} and "
            f"{tuple(predictions.shape)}"
        )
    if resamples < 1 or not 0 < confidence < 1:
        raise ValueError(f"expected resamples of at least 1 and a confidence in (0, 1), got {resamples}, {confidence}")
    classes, labels = labels.cpu().unique(return_inverse=True)
    predictions = predictions.cpu()
    known = classes[torch.searchsorted(classes, predictions).clamp(max=len(classes) - 1)] == predictions
    predicted = torch.where(known, torch.searchsorted(classes, predictions), len(classes))  # others: one class more
    rows = torch.arange(len(labels))
    is_class = torch.zeros(len(labels), len(classes) + 1, dtype=torch.float64)
    is_predicted = is_class.clone()
    is_class[rows, labels], is_predicted[rows, predicted] = 1, 1
    sums = torch.cat([is_class * is_predicted, is_class, is_predicted], dim=1)  # (rows, 3 x (classes + 1))
    found = []
    for counts in row_counts(len(labels), resamples, seed):
        hits, there, said = (counts @ sums).chunk(3, dim=1)
        present = there[:, :-1] > 0
        scores = 2 * hits[:, :-1] / (there + said)[:, :-1].clamp(min=1)
        found.append((scores * present).sum(1) / present.sum(1))
    low_and_high = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.cat(found).quantile(low_and_high).tolist()
    return low, high
