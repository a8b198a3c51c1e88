"""How the states of each layer lie in their space, how far each block moves them; and one vector a prompt, kept."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Values
from lit_layers.analyses.representation import POOLED, pooled_vectors, vectors_of_prompts
from lit_layers.analyses.statistics import (
    complete,
    left_out,
    mean_of_defined,
    random_halves,
    records_of_layers,
    summarize_layers,
    values_of_halves,
)
from lit_layers.data.batches import Batches
from lit_layers.functional.entropy import participation_ratio
from lit_layers.functional.geometry import Pooling
from lit_layers.functional.state_geometry import (
    alpha_req,
    anisotropy,
    apart_of_different,
    block_influence,
    massive_activation,
    normal_massive_activation,
    shuffled_features,
    step_ratio,
    two_nn_of_distances,
)
from lit_layers.models.view import (
    Batch,
    LayeredModel,
    States,
    Trajectory,
    drop_first_tokens,
    evenly_spread,
    states_of_layers,
)
from lit_layers.prompt_values import DIMENSION
from lit_layers.records import Record

OF_PROMPTS = "massive_activation", "random_massive_activation", "block_influence", "step_ratio"


@dataclass(kw_only=True)
class StateGeometry(Analysis):
    """Spectrum, dimension and direction of the states at every layer, and what a block does to them.

    Of the tokens of all prompts as one set, from `num_tokens` of each prompt: `alpha_req`, `two_nn_dimension` and
    `anisotropy`; `random_alpha_req` and `random_two_nn_dimension` are of the same values with each feature dealt out
    anew among the tokens. Intervals come from `num_halves` random halves of the prompts, whose mean is the metric
    `NAME_of_half`: values of more tokens and of fewer are not alike.

    Of each prompt, then averaged over prompts: `massive_activation`, over all real tokens, with what normal entries
    give (`random_massive_activation`); `block_influence` and `step_ratio` of the block that ends there, means over
    tokens. The tag `num_undefined_tokens` counts tokens without a value. Means over layers 1..L have no layer.

    An untrained model is a baseline of all: step 0 of a run, or `analyze --untrained`. The states are those of the
    shared pass: no block runs again. The model runs in float32 or wider.
    Source: as the functions of `lit_layers.functional.state_geometry` say.

    Args:
        batches: what is measured on.
        num_tokens: of each prompt, evenly spread, for what is of all prompts; 1 takes the last. All layers' are kept
            in memory: 128 prompts x 8 tokens x 13 layers x 768 x 4 B = 41 MB.
        drop_first: how many first tokens are left out, mostly sinks, of all but `massive_activation`.
        first_rank, last_rank: of the eigenvalues that `alpha_req` is fitted to.
        num_halves: for intervals; 0: none.
        states: which convention.
    """

    LEAST: ClassVar = {"num_tokens": 1, "drop_first": 0, "first_rank": 1, "last_rank": 2}

    batches: Batches
    name: str = "state_geometry"
    num_tokens: int = 8
    drop_first: int = 1
    first_rank: int = 11
    last_rank: int = 100
    num_halves: int = 10
    states: States = "resid"

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the kept rows (layers + 1, dim, rows), `num_rows` of each prompt, and values of prompts."""
        mask = seen.mask
        chosen = [
            evenly_spread(self.drop_first, count - 1, self.num_tokens) if count > self.drop_first else []
            for count in mask.sum(-1).tolist()
        ]
        real = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]
        pairs = [(row, real[row][place]) for row, places in enumerate(chosen) for place in places]
        prompts, places = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).to(seen.hidden.device).T
        kept = drop_first_tokens(mask, self.drop_first).cpu()
        moved = torch.full((2, len(mask)), torch.nan, dtype=torch.float64)
        missing, before = moved[0], None
        rows: dict[str, list[Tensor]] = {}
        for states in states_of_layers(seen, self.states):
            if before is not None:
                steps = [each(before, states, undefined="nan").cpu() for each in (block_influence, step_ratio)]
                of_tokens = torch.stack(steps).masked_fill(~kept, torch.nan)
                moved, missing = mean_of_defined(of_tokens), (of_tokens.isnan() & kept).sum(-1)[0]
            size = massive_activation(states, mask, undefined="nan")
            normal = normal_massive_activation((mask.sum(-1) * states.shape[-1]).cpu())
            of_prompts = (size, normal.masked_fill(size.isnan().cpu(), torch.nan), *moved)
            values = dict(zip(OF_PROMPTS, of_prompts, strict=True))
            values |= {"num_undefined_tokens": missing.double(), "rows": states[prompts, places].T}
            for name, row in values.items():
                rows.setdefault(name, []).append(row.cpu())
            before = states
        stacked = {name: torch.stack(of_layers) for name, of_layers in rows.items()}
        return {"num_rows": torch.tensor([len(each) for each in chosen]), **stacked}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        missing = batches["num_undefined_tokens"].nan_to_num()
        for metric in OF_PROMPTS:
            counts = {} if metric.endswith("massive_activation") else {"num_undefined_tokens": missing}
            yield from summarize_layers(metric, batches[metric], tags=self.tags(metric), counts=counts)
        yield from self._set_records(vectors_of_prompts(batches["rows"]), batches["num_rows"])

    def _set_records(self, rows: Tensor, num_rows: Tensor) -> Iterator[Record]:
        """Yield the records of rows (layers + 1, rows, dim), given how many belong to each prompt."""
        owner = torch.arange(len(num_rows)).repeat_interleave(num_rows)
        broken = (~rows.isfinite().all(-1)).double()  # (layers + 1, rows)
        num_broken = broken.new_zeros(len(rows), len(num_rows)).index_add_(1, owner, broken)
        _, kept = complete((num_broken == 0) & (num_rows > 0))
        rows, owner = rows[:, kept[owner]], owner[kept[owner]]
        prompts = kept.nonzero()[:, 0]
        members = [prompts, *(prompts[half] for half in random_halves(len(prompts), self.num_halves))]
        choices = [torch.isin(owner, each).nonzero()[:, 0] for each in members]
        ranks = self.first_rank, self.last_rank
        by_layer = [_values(layer, choices, ranks) for layer in rows]
        for metric in by_layer[0]:
            values = torch.stack([of_layer[metric] for of_layer in by_layer])  # (layers + 1, 1 + halves)
            of_halves = values[:, 1:] if values.shape[1] > 1 else None
            tags = self.tags(metric) | left_out("", ~kept)
            yield from records_of_layers(metric, values[:, 0], of_halves, int(kept.sum()), tags)

    def tags(self, metric: str) -> dict[str, Any]:
        options = ["states"] if metric.endswith("massive_activation") else ["states", "drop_first"]
        options += ["first_rank", "last_rank"] if "alpha_req" in metric else []
        return self.tags_of(*options)


def _values(points: Tensor, choices: list[Tensor], fit_range: tuple[int, int]) -> dict[str, Tensor]:
    """Return values of some choices of one layer's points, (choices,) each; the baselines only for the first choice."""
    computed_in, points = points.dtype, points.double()
    sets = [points[rows] for rows in choices]
    apart, number = apart_of_different(points, computed_in)
    shuffled = shuffled_features(sets[0])
    dimensions = [two_nn_of_distances(apart[rows][:, rows]) for rows in (number[each].unique() for each in choices)]
    return {
        "alpha_req": torch.stack([alpha_req(each, fit_range=fit_range, undefined="nan") for each in sets]),
        "random_alpha_req": alpha_req(shuffled, fit_range=fit_range, undefined="nan")[None],
        "two_nn_dimension": torch.stack(dimensions),
        "random_two_nn_dimension": two_nn_of_distances(apart_of_different(shuffled, computed_in)[0])[None],
        "anisotropy": torch.stack([anisotropy(each, undefined="nan") for each in sets]),
    }


@dataclass(kw_only=True)
class PooledStates(Analysis):
    """The pooled state of each prompt at every layer, and on about how many dimensions the prompts lie.

    `pooled_dimension` is the participation ratio of the centred pooled states (prompts, dim): (sum l)^2 / sum l^2 of
    the eigenvalues l of their covariance, from 1 to the smaller of prompts - 1 and dim. Intervals come from
    `num_halves` random halves of the prompts, whose mean is `pooled_dimension_of_half`. Means over layers 1..L have no
    layer.

    The states themselves stay in the run's folder, as `lit_layers.prompt_values` says:
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

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        layers = list[Tensor]()
        for hidden in states_of_layers(seen, self.states):
            layers.append(pooled_vectors(hidden, seen.mask, self.pooling).cpu())
        return {POOLED: torch.stack(layers)}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        pooled = vectors_of_prompts(batches[POOLED].double())
        _, kept = complete(~pooled.isnan().any(-1))
        tags = self.tags_of("pooling", "states") | left_out("", ~kept)
        finite = pooled[:, kept]
        of_halves = values_of_halves(_dimensions, finite, self.num_halves)
        for record in records_of_layers(DIMENSION, _dimensions(finite), of_halves, finite.shape[1], tags):
            is_kept = record.metric == DIMENSION and record.layer is not None
            yield replace(record, states=pooled[record.layer].float().numpy()) if is_kept else record


def _dimensions(pooled: Tensor) -> Tensor:
    return participation_ratio(pooled, center=True, undefined="nan")
