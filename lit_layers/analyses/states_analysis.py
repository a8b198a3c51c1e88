"""Analyses that need nothing but the hidden states of each layer."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.states import States, in_convention
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.records import Record

Key = tuple[str | float | None, ...]  # of values: a metric, say, and what else tells them apart
Name = TypeVar("Name", Key, str)


def joined(results: Sequence[Mapping[Name, Tensor]], dim: int = 1) -> dict[Name, Tensor]:
    """Join the values of all batches by their key, prompts along `dim`; a batch may lack some keys."""
    keys = dict.fromkeys(key for result in results for key in result)
    return {key: torch.cat([result[key] for result in results if key in result], dim) for key in keys}


class StatesAnalysis(DividedAnalysis):
    """An analysis that computes values of each prompt at every layer, then records of all prompts.

    Subclasses have the field `states` beside `batches`.
    """

    states: States

    @abstractmethod
    def of_layer(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        """Values (batch, ...) by key, of one layer's states (batch, tokens, dim)."""

    @abstractmethod
    def of_prompts(self, values: dict[Key, Tensor]) -> Iterable[Record]:
        """Yield the records of the values (layers + 1, prompts, ...) of all prompts."""

    def of_part(self, model: LayeredModel, part: Batch) -> dict[Key, Tensor]:
        analysis, trajectory = self.resolved(model), model.trajectory(part)
        rows: dict[Key, list[Tensor]] = {}
        for layer, hidden in enumerate(trajectory.hidden):
            states = in_convention(model, analysis.states, layer, hidden)
            for key, row in analysis.of_layer(states, trajectory.mask).items():
                rows.setdefault(key, []).append(row.cpu())
        return {key: torch.stack(of_layers) for key, of_layers in rows.items()}

    def combine(self, model: LayeredModel, results: list[dict[Key, Tensor]]) -> Iterable[Record]:
        return self.resolved(model).of_prompts(joined(results))
