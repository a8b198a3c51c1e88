"""How much, and in how many directions, each earlier token reaches the last one through a block."""

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.states import States, final_norm
from lit_layers.analyses.summary import left_out, summarize
from lit_layers.analyses.token_jacobians import (
    check_choice,
    check_counts,
    first_prompts,
    num_real_tokens,
    with_preset,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.coupling import Influence, cross_token_influence
from lit_layers.functional.jacobian import block_jacobian, token_places
from lit_layers.models.view import LayeredModel, Trajectory
from lit_layers.records import Record

# What published code does where it departs from our defaults.
PRESETS: dict[str, dict[str, Any]] = {"released_code": {"identity": "always", "eps": 1e-10, "states": "hf"}}
# The least distance of each group: single tokens up to 8, then two groups an octave.
GROUPS = [*range(8), *(edge for octave in range(3, 24) for edge in (2**octave, 3 * 2 ** (octave - 1)))]
_ENTRIES = 2**25  # of the Jacobians held at once: 128 MB in float32, 56 of width 768


@dataclass(kw_only=True)
class CrossTokenInfluence(DividedAnalysis):
    """Size and rank of the Jacobians from tokens s <= t to the last real token t, per layer and distance t - s.

    `influence_frobenius`, `influence_spectral`, `influence_participation_ratio`, `influence_entropy_rank`: with the tag
    `token_distance`, the least distance of a group (each up to 8 alone, then 8-11, 12-15, 16-23, 24-31, ..; all alone
    with `group_distances=False`), averaged over the group's tokens per prompt, then over prompts; and without the tag,
    averaged over all measured s < t. Ranks of a zero Jacobian are undefined: left out, and counted per prompt in the
    tag `num_undefined_tokens`.

    `num_inputs`: at most so many input tokens a prompt, spread evenly over log(1 + distance); None: all of them.
    `states="hf"` puts the final norm into the last block. `identity="always"` subtracts the identity also where s < t,
    and then reports |J - I|: for comparison with published values alone (preset `released_code`).

    Cost: a Jacobian and its singular values for each layer, prompt and input token; at width 768 one takes 0.1 s on a
    CPU core, so 12 layers and 128 tokens take 2.6 min a prompt, 32 of them 40 s.
    Source: definitions and departures as in `lit_layers.functional.coupling.cross_token_influence`.
    """

    batches: Batches
    name: str = "cross_token_influence"
    num_prompts: int = 4
    num_inputs: int | None = None
    group_distances: bool = True
    identity: Literal["same_token", "always"] = "same_token"
    eps: float = 0.0
    states: States = "resid"
    preset: Literal["released_code"] | None = None

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._resolved()

    def parts(self, model: LayeredModel) -> Iterable[Trajectory]:
        self._resolved()
        return first_prompts(model, self.batches, self.num_prompts)

    def of_part(self, model: LayeredModel, part: Trajectory) -> dict[tuple[int, int | None], Influence]:
        """Per layer and group (None: all s < t) the values of its tokens."""
        options, found = self._resolved(), {}
        distances = options._distances(num_real_tokens(part) - 1)
        for layer in range(1, model.num_layers + 1):
            influence = options._influence(model, part, layer, distances)
            for group, rows in options._groups(distances).items():
                found[layer, group] = Influence(*(values[rows] for values in influence))
        return found

    def combine(self, model: LayeredModel, found: list[dict[tuple[int, int | None], Influence]]) -> Iterable[Record]:
        for layer, group in dict.fromkeys(place for prompt in found for place in prompt):
            prompts = [prompt[layer, group] for prompt in found if (layer, group) in prompt]
            for name in Influence._fields:
                tags: dict[str, str | int | float] = {} if group is None else {"token_distance": group}
                of_tokens = [getattr(prompt, name) for prompt in prompts]
                tags |= left_out("tokens", torch.cat(of_tokens).isnan())
                values = torch.tensor([float(values.nanmean()) for values in of_tokens], dtype=torch.float64)
                yield from summarize(f"influence_{name}", values, layer=layer, tags=tags)

    def _resolved(self) -> "CrossTokenInfluence":
        """With the preset's options in place, once every option fits."""
        check_counts(self.name, num_prompts=self.num_prompts, num_inputs=self.num_inputs)
        check_choice(self.name, "identity", self.identity, ("same_token", "always"))
        check_choice(self.name, "states", self.states, ("resid", "hf"))
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise InputError(f"{self.name}: expected eps of at least 0, got {self.eps}")
        return with_preset(self, PRESETS)

    def _distances(self, most: int) -> list[int]:
        """The distances that are measured, ascending, 0 and the first token's among them where there is room."""
        count = self.num_inputs
        if count is None or count > most:
            return list(range(most + 1))
        steps = [math.expm1(math.log1p(most) * index / max(count - 1, 1)) for index in range(count)]
        distances: list[int] = []
        for index, step in enumerate(steps):  # neighbours that round to one distance move apart
            least = distances[-1] + 1 if distances else 0
            distances.append(min(max(round(step), least), most - (count - 1 - index)))
        return distances

    def _groups(self, distances: list[int]) -> dict[int | None, list[int]]:
        """For each group, and for None (all s < t), the places of its distances."""
        groups: dict[int | None, list[int]] = defaultdict(list)
        for place, distance in enumerate(distances):
            edge = GROUPS[bisect.bisect_right(GROUPS, distance) - 1] if self.group_distances else distance
            groups[edge].append(place)
            if distance > 0:
                groups[None].append(place)
        return groups

    def _influence(self, model: LayeredModel, trajectory: Trajectory, layer: int, distances: list[int]) -> Influence:
        """Over the distances, in float64 on the CPU, a few Jacobians at a time."""
        size = max(1, _ENTRIES // model.dim**2)
        parts = []
        for start in range(0, len(distances), size):
            tokens = [-1 - distance for distance in distances[start : start + size]]
            jacobians = block_jacobian(
                trajectory.block(layer),
                trajectory.hidden[layer - 1],
                out_tokens=-1,
                in_tokens=tokens,
                mask=trajectory.mask,
                identity=self.identity,
            )[0, 0]  # (tokens, dim, dim)
            norm = final_norm(model)
            if self.states == "hf" and layer == model.num_layers and norm is not None:
                jacobians = self._through(norm, trajectory, jacobians, tokens)
            parts.append(cross_token_influence(jacobians, eps=self.eps, undefined="nan"))
        return Influence(*(torch.cat(part).double().cpu() for part in zip(*parts, strict=True)))

    def _through(self, norm: nn.Module, trajectory: Trajectory, jacobians: Tensor, tokens: list[int]) -> Tensor:
        """Of the last block with the norm behind it, by the chain rule; the identity is subtracted where it was."""
        last = trajectory.hidden[-1][0, token_places(-1, trajectory.mask)[0, 0]]
        (outer,) = block_jacobian(norm, last[None, None], residual=False)
        skip = torch.tensor([self.identity == "always" or token == -1 for token in tokens], device=outer.device)
        identity = torch.eye(len(outer), device=outer.device, dtype=outer.dtype) * skip[:, None, None]
        return outer @ (jacobians + identity) - identity
