"""Paths of tokens through the layers: their shape, and their projection onto a plane."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Rows, Values
from lit_layers.analyses.statistics import (
    Sample,
    mean_of_defined,
    median_of_defined,
    missing_tag,
    summarize,
    summarize_all,
)
from lit_layers.data.batches import Batches
from lit_layers.functional.trajectory import PathStats, principal_paths
from lit_layers.metrics import is_in, look_up
from lit_layers.models.view import Batch, LayeredModel, States, evenly_spread, states_of_layers
from lit_layers.models.view import Trajectory as Seen
from lit_layers.records import Record


@dataclass(kw_only=True)
class Trajectory(Analysis):
    """Straightness, growth of the norm and length of the steps of the paths that tokens take through the layers.

    A step is the change of a token's state in one block. For the whole path: `line_shape_score` (1 if it is straight),
    `expodistance` (0 if the norm grows by the same factor in every block) and `equidistance` (0 if all steps are
    equally long). Per layer: `state_norm`, `line_shape_score` of the path up to this layer (from layer 2), and
    `growth_rate` (of the norm) and `step_norm` of the step that ends at this layer.

    Each value is averaged over the tokens of a prompt, then over prompts. A median (tag `statistic`) is the median over
    prompts of the median over tokens.

    The tag `num_undefined_tokens` counts tokens without a value, over all prompts. A token has no value if its state is
    zero or not finite. Its line shape is also undefined at the layer where a step of length zero ends, and at all later
    layers. If no token has a value, a metric of the whole path is NaN, but layers at which tokens have values keep
    their records.

    `tokens="all"` measures the real tokens without the first `drop_first`; the first token is mostly a sink, whose path
    is unlike any other. `tokens="last"` measures only the last of these. The model runs in float32 or wider.
    `states="hf"` (preset "paper") ends each path after the final norm, which adds one large last step.
    """

    PRESETS: ClassVar = {"paper": {"states": "hf"}}

    batches: Batches
    name: str = "trajectory"
    tokens: Literal["all", "last"] = "all"
    drop_first: int = 1
    states: States = "resid"
    preset: Literal["paper"] | None = None

    def update(self, seen: Seen, batch: Batch) -> Values:
        position = seen.mask.cumsum(-1)
        used = seen.mask & (position > self.drop_first)
        if self.tokens == "last":
            used = used & (position == position[:, -1:])
        path = PathStats(of_layer[used] for of_layer in states_of_layers(seen, self.states))
        return {metric: _prompt_summaries(values, used) for metric, values in _token_values(path).items()}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        tags = self.tags_of("states")
        yield from summarize_all(
            sample for metric, values in batches.items() for sample in _samples(metric, values, tags)
        )


def _prompt_summaries(values: Tensor, used: Tensor) -> Tensor:
    """Return three summaries over the tokens of each prompt, (3, rows, prompts).

    They are the mean and the median of the defined values, and the number of tokens with an undefined value. The rows
    of `values` (rows, used tokens) are layers, or a single row for a metric of the whole path. The mask `used`
    (prompts, tokens) says to which prompts the tokens belong.
    """
    used = used.to(values.device)  # the CPU, if the device of the model has no float64
    padded = values.new_full((len(values), *used.shape), torch.nan)
    padded[:, used] = values  # (rows, batch, tokens)
    missing = (padded.isnan() & used).sum(-1)
    return torch.stack([mean_of_defined(padded), median_of_defined(padded), missing.double()]).cpu()


def _token_values(path: PathStats) -> dict[str, Tensor]:
    """Return the values (rows, paths) of each metric: one row per layer, or a single row for the whole path."""
    norms, lengths = path.norms, path.lengths
    values = {  # with "nan", layers before an undefined step keep their values
        "line_shape_score": path.running_line_shape_score("nan"),
        "equidistance": path.equidistance("nan")[None],
        "growth_rate": path.growth_rates("nan"),
        "state_norm": norms.where(norms.isfinite(), torch.nan),
    }
    if len(norms) > 2:  # expodistance needs two growth rates
        values["expodistance"] = path.expodistance("nan")[None]
    return values | {"step_norm": lengths.where(lengths.isfinite(), torch.nan)}


def _samples(metric: str, statistics: Tensor, tags: dict[str, Any]) -> Iterator[Sample]:
    means, medians, missing = statistics  # (rows, prompts) each
    about, is_path = look_up(metric), is_in(metric, "path")
    rows: list[Any] = [(-1, None)] if is_path else []  # (row in `statistics`, layer of the record)
    if about.first_layer is not None:  # metrics of states have a row for layer 0, metrics of steps do not
        layers = enumerate(range(len(means)), start=min(1, about.first_layer))
        rows += [(row, layer) for layer, row in layers if layer >= about.first_layer]
    for row, layer in rows:
        counts = missing_tag("tokens", int(missing[row].sum()))
        yield Sample(metric, means[row], layer, tags=tags | counts)
        if about.median and (layer is None or not is_path):
            yield Sample(metric, medians[row], layer, tags=tags | counts, statistic="median")


@dataclass(kw_only=True)
class PathsInPlane(Analysis):
    """Positions of tokens at every layer, in the plane of the last layer's first two principal components.

    Per prompt or image: `path` is the coordinate of a token at a layer along an axis. The tag `token` is the token's
    position among the real ones, the tag `axis` is 1 or 2. `path_variance` is the share of the last layer's variance
    along an axis. Both have the tag `prompt`, from 1. `plane_variance` is the share along both axes, averaged over
    prompts.

    Mean and axes of the plane are fitted to all real tokens of the prompt except the first `drop_first`. The first
    token is mostly a sink, whose state is far from all others; in an image, it is the class token. At most `num_tokens`
    of these tokens, evenly spread, are recorded. Each prompt and each checkpoint has its own axes. Only the first
    `num_prompts` prompts are measured. A prompt has no plane if it has fewer than 3 tokens, or if its final states lie
    on a line or are not finite. The tag `num_undefined` counts these prompts.

    `states="hf"` ends each path after the final norm. The model runs in float32 or wider.

    Source: definitions as in `lit_layers.functional.trajectory`.
    """

    batches: Batches
    name: str = "paths_in_plane"
    num_prompts: int = 2
    num_tokens: int = 24
    drop_first: int = 1
    states: Literal["resid", "hf"] = "resid"

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"batches": Rows(self.batches, limit=self.num_prompts, at_once=1)}

    def update(self, seen: Seen, batch: Batch) -> Values:
        """Return the recorded tokens of a prompt, their coordinates (padded to `num_tokens`) and shares of variance."""
        shown = torch.full((self.num_tokens, 1), -1)
        points = torch.full((seen.num_layers + 1, self.num_tokens, 2, 1), torch.nan, dtype=torch.float64)
        explained = torch.full((2, 1), torch.nan, dtype=torch.float64)
        tokens = range(self.drop_first, int(seen.mask.sum()))
        if len(tokens) >= 3:  # fewer tokens span no plane
            layers = states_of_layers(seen, self.states)
            used = torch.stack([states[0][seen.mask[0]][self.drop_first :] for states in layers])
            coordinates, shares = principal_paths(used, undefined="nan")
            spread = evenly_spread(0, len(tokens) - 1, self.num_tokens)
            shown[: len(spread), 0] = torch.tensor([tokens[i] for i in spread])
            points[:, : len(spread), :, 0], explained[:, 0] = coordinates[:, spread].cpu(), shares.cpu()
        return {"token": shown, "place": points, "explained": explained}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        shown, points, explained = (batches[name].movedim(-1, 0) for name in ("token", "place", "explained"))
        tags = self.tags_of("states")
        yield from summarize("plane_variance", explained.sum(-1), tags=tags)
        for prompt, share in enumerate(explained):
            if not share.isnan().any():
                yield from _plane_records(shown[prompt], points[prompt], share, {"prompt": prompt + 1, **tags})


def _plane_records(shown: Tensor, points: Tensor, explained: Tensor, tags: dict[str, Any]) -> Iterator[Record]:
    """Yield the records `path` and `path_variance` of one prompt.

    `points` (layers + 1, tokens, 2) are coordinates in the plane, `explained` (2,) the shares of variance of its axes.
    """
    for axis, share in enumerate(explained.tolist(), start=1):
        yield Record(metric="path_variance", value=share, n=1, tags={**tags, "axis": axis})
    for layer, of_layer in enumerate(points.tolist()):
        for token, point in zip(shown[shown >= 0].tolist(), of_layer, strict=False):  # skip the padding at the end
            for axis, value in enumerate(point, start=1):
                yield Record(metric="path", value=value, layer=layer, n=1, tags={**tags, "token": token, "axis": axis})
