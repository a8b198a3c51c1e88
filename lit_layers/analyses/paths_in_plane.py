"""The paths of a prompt's tokens through the layers, as a picture."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.states import States, in_convention
from lit_layers.analyses.summary import summarize
from lit_layers.analyses.token_jacobians import check_choice, check_counts, evenly_spread, first_prompts
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.trajectory import principal_paths
from lit_layers.models.view import LayeredModel, Trajectory
from lit_layers.records import Record

LEAST_TOKENS = 3  # a plane needs them


@dataclass(kw_only=True)
class PathsInPlane(DividedAnalysis):
    """Where tokens are at every layer, in the plane of the last layer's first two principal components.

    Per prompt or image: `path`, the coordinate of a token (tag `token`, counted among the real ones) at a layer along
    an axis (tag `axis`, 1 or 2), and `path_variance`, the share of the last layer's variance along it; both with the
    tag `prompt`, from 1. `plane_variance` is the share along both axes, averaged over prompts.

    Mean and axes are fitted to all real tokens of the prompt but the first `drop_first` (mostly a sink far from all
    others; of an image the class token); of these at most `num_tokens`, evenly spread, are recorded. Each prompt, and
    each checkpoint, has axes of its own. Only the first `num_prompts` prompts are measured; one of fewer than 3 tokens,
    or whose tokens end on a line or nowhere, has no plane and is counted in the tag `num_undefined`. `states="hf"` ends
    each path after the final norm. The model runs in float32 or wider. Source: definitions as in
    `lit_layers.functional.trajectory`.
    """

    batches: Batches
    name: str = "paths_in_plane"
    num_prompts: int = 2
    num_tokens: int = 24
    drop_first: int = 1
    states: States = "resid"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options()

    def parts(self, model: LayeredModel) -> Iterable[Trajectory]:
        self._check_options()
        return first_prompts(model, self.batches, self.num_prompts)

    def of_part(self, model: LayeredModel, part: Trajectory) -> "_Paths":
        tokens = list(range(self.drop_first, int(part.mask.sum())))
        if len(tokens) < LEAST_TOKENS:
            nowhere = torch.full((2,), torch.nan, dtype=torch.float64)
            return _Paths([], nowhere.new_empty(part.num_layers + 1, 0, 2), nowhere)
        kept = torch.stack(
            [
                in_convention(model, self.states, layer, hidden)[0][part.mask[0]][self.drop_first :]
                for layer, hidden in enumerate(part.hidden)
            ]
        )
        places, explained = principal_paths(kept, undefined="nan")
        shown = evenly_spread(0, len(tokens) - 1, self.num_tokens)
        return _Paths([tokens[index] for index in shown], places[:, shown].cpu(), explained.cpu())

    def combine(self, model: LayeredModel, found: "list[_Paths]") -> Iterable[Record]:
        if not any(paths.tokens for paths in found):
            raise InputError(
                f"{self.name}: no prompt has {LEAST_TOKENS} tokens behind the first {self.drop_first}: give longer "
                "prompts or a smaller drop_first"
            )
        tags = {"states": self.states} if self.states != "resid" else {}
        yield from summarize("plane_variance", torch.stack([paths.explained.sum() for paths in found]), tags=tags)
        for prompt, paths in enumerate(found, start=1):
            if not paths.explained.isnan().any():
                yield from _records(paths, {"prompt": prompt, **tags})

    def _check_options(self) -> None:
        check_counts(self.name, num_prompts=self.num_prompts, num_tokens=self.num_tokens)
        check_choice(self.name, "states", self.states, ("resid", "hf"))
        if self.drop_first < 0:
            raise InputError(f"{self.name}: expected drop_first of at least 0, got {self.drop_first}")


class _Paths(NamedTuple):
    """Of one prompt, in float64 on the CPU."""

    tokens: list[int]
    places: Tensor  # (layers + 1, tokens, 2)
    explained: Tensor  # (2,) NaN where there is no plane


def _records(paths: _Paths, tags: dict[str, str | int | float]) -> Iterable[Record]:
    for axis, share in enumerate(paths.explained.tolist(), start=1):
        yield Record(metric="path_variance", value=share, n=1, tags={**tags, "axis": axis})
    for layer, places in enumerate(paths.places.tolist()):
        for token, place in zip(paths.tokens, places, strict=True):
            for axis, value in enumerate(place, start=1):
                yield Record(metric="path", value=value, layer=layer, n=1, tags={**tags, "token": token, "axis": axis})
