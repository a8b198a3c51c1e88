"""One vector for each prompt at every layer, kept: so checkpoints and seeds can be compared when weights are gone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from lit_layers.analyses.layerwise import Key, StatesAnalysis
from lit_layers.analyses.representation import POOLED
from lit_layers.analyses.states import States
from lit_layers.analyses.statistics import complete, left_out, over_halves, records_of_layers
from lit_layers.data.batches import Batches
from lit_layers.functional.entropy import participation_ratio
from lit_layers.functional.geometry import Pooling, pool
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import Part, Work
from lit_layers.prompt_values import DIMENSION
from lit_layers.records import Record


@dataclass(kw_only=True)
class PooledStates(StatesAnalysis):
    """The pooled state of each prompt at every layer, and on about how many dimensions the prompts lie.

    `pooled_dimension` is the participation ratio of the centred pooled states (prompts, dim): (sum l)^2 / sum l^2 of
    the eigenvalues l of their covariance, from 1 to the smaller of prompts - 1 and dim. Intervals come from
    `num_halves` random halves of the prompts, whose mean is `pooled_dimension_of_half`. Means over layers 1..L have no
    layer.

    The states themselves stay in the run's folder, as `lit_layers.prompt_values` says, within the run's `values_mb`:
    `lit-layers emerge` compares by them every two checkpoints of a run, and the runs of several seeds at each step.
    Only states of the same prompts are compared. A prompt whose states are not finite at some layer is left out of the
    dimension, and of comparisons of that layer.

    The model runs in float32 or wider; states are kept in float32.

    Args:
        batches: what is measured on; 64 prompts x 13 layers x 768 x 4 B = 2.6 MB are kept of a checkpoint.
        pooling: of a prompt's tokens.
        num_halves: for intervals; 0: none.
        states: which convention.
    """

    LEAST: ClassVar = {"num_halves": 0}

    batches: Batches
    name: str = "pooled_states"
    pooling: Pooling = "mean"
    num_halves: int = 10
    states: States = "resid"

    def extra_work(self, model: LayeredModel, passes: Work) -> Work:
        layers, texts = model.num_layers + 1, passes.texts
        parts = (
            Part("spectra", layers, (texts,)),
            Part("spectra", layers * self.num_halves, (max(1, texts // 2),)),
        )
        kept = 4.0 * layers * texts * model.dim
        return Work(parts=parts, host=2 * kept, disk=kept)

    def of_layer(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        return {POOLED: pool(hidden, mask, pooling=self.pooling, undefined="nan")}

    def of_prompts(self, values: dict[Key, Tensor]) -> Iterable[Record]:
        pooled = values[POOLED].double()  # (layers + 1, prompts, dim)
        _, kept = complete(~pooled.isnan().any(-1))
        tags = self.tags_of("pooling", "states") | left_out("", ~kept)
        finite = pooled[:, kept]
        of_halves = over_halves(_dimensions, finite, self.num_halves)
        for record in records_of_layers(DIMENSION, _dimensions(finite), of_halves, finite.shape[1], tags):
            is_kept = record.metric == DIMENSION and record.layer is not None
            yield replace(record, states=pooled[record.layer].float().numpy()) if is_kept else record


def _dimensions(pooled: Tensor) -> Tensor:
    return participation_ratio(pooled, center=True, undefined="nan")
