"""Metrics of torchmetrics: numbers of hidden states for `self.log`."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_layers.functional import entropy, trajectory
from lit_layers.models.view import drop_first_tokens
from lit_layers.training.losses import WeightedMean


class StatesMetric(WeightedMean):
    """Mean over prompts of a function of their hidden states, equal on any number of ranks to rounding.

    A prompt without a value is left out. Without any prompt the mean is NaN.

    Args:
        layer: of an entropy or a rank that layer, or with None the mean over layers 1..L; of a path its last layer.
        drop_first: first tokens of a prompt that are left out.
        options: keyword arguments of the function of that name in `lit_layers.functional`.
    """

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, *, layer: int | None = None, drop_first: int = 0, **options: Any) -> None:
        super().__init__()
        self.layer, self.drop_first, self.options = layer, drop_first, {"undefined": "nan", **options}
        # A MetricCollection updates only one of two metrics whose states are equal: this one tells them apart.
        label = zlib.crc32(repr((type(self).__name__, layer, drop_first, options)).encode())
        self.add_state("label", torch.tensor(label, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            hidden_states: (batch, tokens, dim) of each layer, the input of the first block first, as models of
                transformers return them with `output_hidden_states=True`.
            attention_mask: (batch, tokens), 0 where there is padding; None: nowhere.
        """
        hidden = [states.detach() for states in hidden_states]
        mask = torch.ones_like(hidden[0][..., 0]) if attention_mask is None else attention_mask
        values = self.of_prompts(hidden, drop_first_tokens(mask.bool(), self.drop_first))
        defined = values[~values.isnan()]
        if len(defined):
            super().update(defined.mean(), weight=len(defined))

    def of_prompts(self, hidden: Sequence[Tensor], kept: Tensor) -> Tensor:
        """Return the value of each prompt: here of all tokens at once, NaN where one of the layers has none."""
        chosen = hidden[1:] if self.layer is None else [hidden[self.layer]]
        return torch.stack([self.function(states, kept, **self.options) for states in chosen]).mean(0)


class PathMetric(StatesMetric):
    """Mean over prompts of the mean over their tokens of a function of the tokens' paths through the layers."""

    def of_prompts(self, hidden: Sequence[Tensor], kept: Tensor) -> Tensor:
        """Return the value of each prompt, without tokens that have none."""
        paths = torch.stack([states[kept] for states in hidden[: None if self.layer is None else self.layer + 1]])
        values = torch.full(kept.shape, torch.nan, dtype=torch.float64, device=kept.device)
        values[kept] = self.function(paths, **self.options)
        return values.nanmean(-1)


class LineShapeScore(PathMetric):
    """How crooked the paths of tokens through the layers are."""

    function = staticmethod(trajectory.line_shape_score)


class Expodistance(PathMetric):
    """How far the norms of tokens are from growing by one factor per block."""

    function = staticmethod(trajectory.expodistance)


class PromptEntropy(StatesMetric):
    """Matrix entropy of the tokens of a prompt."""

    function = staticmethod(entropy.matrix_entropy)


class EffectiveRank(StatesMetric):
    """Effective rank of the tokens of a prompt."""

    function = staticmethod(entropy.effective_rank)
