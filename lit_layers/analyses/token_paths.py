"""How tokens travel through the layers, and their paths as a picture."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis, PromptAnalysis
from lit_layers.analyses.states import States, evenly_spread, in_convention
from lit_layers.analyses.statistics import (
    Sample,
    left_out,
    mean_of_defined,
    median_of_defined,
    summarize,
    summarize_all,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.trajectory import WalkedPath, principal_paths
from lit_layers.metrics import is_in, look_up
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.models.view import Trajectory as PromptTrajectory
from lit_layers.records import Record


@dataclass(kw_only=True)
class Trajectory(DividedAnalysis):
    """Shape, growth and steps of the paths that tokens take through the layers.

    Over the whole path: `line_shape_score`, `expodistance`, `equidistance`. Per layer: `line_shape_score` of the path
    so far (from layer 2), `growth_rate` and `step_norm` (of the block that ends there), `state_norm`. Each is averaged
    over the tokens of a prompt, then over prompts; a median (tag `statistic`) is the median over prompts of the median
    over tokens. The tag `num_undefined_tokens` counts tokens without a value, of all prompts: those whose state is zero
    or not finite, and from a step of length zero on for the line shape. A metric of the whole path is NaN where no
    token has one; the layers up to there keep theirs.

    `tokens` "all" are the real ones without the first `drop_first` (mostly a sink, whose path is unlike any other),
    "last" the last of these alone. The model runs in float32 or wider. `states="hf"` ends each path after the final
    norm (preset "paper"): one large last step.
    """

    LEAST: ClassVar = {"drop_first": 0}
    PRESETS: ClassVar = {"paper": {"states": "hf"}}

    batches: Batches
    name: str = "trajectory"
    tokens: Literal["all", "last"] = "all"
    drop_first: int = 1
    states: States = "resid"
    preset: Literal["paper"] | None = None

    def of_part(self, model: LayeredModel, part: Batch) -> dict[str, Tensor]:
        """Return the walked path of the kept tokens of a batch, and which tokens those are, `kept`."""
        options, trajectory = self.resolved(model), model.trajectory(part)
        position = trajectory.mask.cumsum(-1)
        kept = trajectory.mask & (position > options.drop_first)
        if options.tokens == "last":
            kept = kept & (position == position[:, -1:])
        path, before = WalkedPath(), None
        for layer, hidden in enumerate(trajectory.hidden):
            states = in_convention(model, options.states, layer, hidden)[kept]
            if before is None:
                path.start(states)
            else:
                path.step(before, states)
            before = states
        del path.state["total"]  # (tokens, dim), which no metric of a finished path needs
        return {name: tensor.cpu() for name, tensor in {"kept": kept, **path.state}.items()}

    def combine(self, model: LayeredModel, results: list[dict[str, Tensor]]) -> Iterator[Record]:
        tags = self.resolved(model).tags_of("states")
        groups = [_of_prompts(WalkedPath(state), state.pop("kept")) for state in results]
        samples: list[Sample] = []
        for metric in groups[0]:
            samples += _samples(metric, torch.cat([group[metric] for group in groups], dim=-1), tags)
        yield from summarize_all(samples)


def _of_prompts(path: WalkedPath, kept: Tensor) -> dict[str, Tensor]:
    """Per metric and row (layer): mean over a prompt's tokens, median, number of tokens without a value."""
    statistics = {}
    for metric, values in _of_tokens(path).items():
        kept = kept.to(values.device)  # where there is no float64, values are on the CPU
        placed = values.new_full((len(values), *kept.shape), torch.nan)
        placed[:, kept] = values  # (rows, batch, tokens)
        missing = (placed.isnan() & kept).sum(-1)
        statistics[metric] = torch.stack([mean_of_defined(placed), median_of_defined(placed), missing.double()]).cpu()
    return statistics  # (3, rows, batch) each


def _of_tokens(path: WalkedPath) -> dict[str, Tensor]:
    """Per metric the values (rows, paths); metrics of a whole path have one row."""
    norms, lengths = path.state["norms"], path.state["lengths"]
    values = {  # what breaks off leaves the layers before alone
        "line_shape_score": path.running_line_shape_score("nan", so_far=True),
        "equidistance": path.equidistance("nan")[None],
        "growth_rate": path.growth_rates("nan", so_far=True),
        "state_norm": norms.where(norms.isfinite(), torch.nan),
    }
    if len(norms) > 2:  # one block has no deviation of growth
        values["expodistance"] = path.expodistance("nan")[None]
    return values | {"step_norm": lengths.where(lengths.isfinite(), torch.nan)}


def _samples(metric: str, statistics: Tensor, tags: dict[str, str | int | float]) -> Iterator[Sample]:
    means, medians, missing = statistics  # (rows, prompts) each
    about, of_path = look_up(metric), is_in(metric, "path")
    rows: list[tuple[int, int | None]] = [(-1, None)] if of_path else []
    if about.first_layer is not None:  # the row of layer 0 is there for states, not for steps
        places = enumerate(range(len(means)), start=min(1, about.first_layer))
        rows += [(row, layer) for layer, row in places if layer >= about.first_layer]
    for row, layer in rows:
        counts = left_out("tokens", int(missing[row].sum()))
        yield Sample(metric, means[row], layer, tags=tags | counts)
        if about.median and (layer is None or not of_path):
            yield Sample(metric, medians[row], layer, tags=tags | counts, statistic="median")


LEAST_TOKENS = 3  # a plane needs them


@dataclass(kw_only=True)
class PathsInPlane(PromptAnalysis):
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

    LEAST: ClassVar = {"num_prompts": 1, "num_tokens": 1, "drop_first": 0}

    batches: Batches
    name: str = "paths_in_plane"
    num_prompts: int = 2
    num_tokens: int = 24
    drop_first: int = 1
    states: Literal["resid", "hf"] = "resid"

    def of_prompt(self, model: LayeredModel, trajectory: PromptTrajectory) -> "_Paths":
        tokens = list(range(self.drop_first, int(trajectory.mask.sum())))
        if len(tokens) < LEAST_TOKENS:
            nowhere = torch.full((2,), torch.nan, dtype=torch.float64)
            return _Paths([], nowhere.new_empty(trajectory.num_layers + 1, 0, 2), nowhere)
        kept = torch.stack(
            [
                in_convention(model, self.states, layer, hidden)[0][trajectory.mask[0]][self.drop_first :]
                for layer, hidden in enumerate(trajectory.hidden)
            ]
        )
        places, explained = principal_paths(kept, undefined="nan")
        shown = evenly_spread(0, len(tokens) - 1, self.num_tokens)
        return _Paths([tokens[index] for index in shown], places[:, shown].cpu(), explained.cpu())

    def combine(self, model: LayeredModel, prompts: "list[_Paths]") -> Iterable[Record]:
        if not any(paths.tokens for paths in prompts):
            raise InputError(
                f"{self.name}: no prompt has {LEAST_TOKENS} tokens after the first {self.drop_first}: give longer "
                "prompts or a smaller drop_first"
            )
        tags = self.tags_of("states")
        yield from summarize("plane_variance", torch.stack([paths.explained.sum() for paths in prompts]), tags=tags)
        for prompt, paths in enumerate(prompts, start=1):
            if not paths.explained.isnan().any():
                yield from _plane_records(paths, {"prompt": prompt, **tags})


class _Paths(NamedTuple):
    """Of one prompt, in float64 on the CPU."""

    tokens: list[int]
    places: Tensor  # (layers + 1, tokens, 2)
    explained: Tensor  # (2,) NaN where there is no plane


def _plane_records(paths: _Paths, tags: dict[str, str | int | float]) -> Iterable[Record]:
    for axis, share in enumerate(paths.explained.tolist(), start=1):
        yield Record(metric="path_variance", value=share, n=1, tags={**tags, "axis": axis})
    for layer, places in enumerate(paths.places.tolist()):
        for token, place in zip(paths.tokens, places, strict=True):
            for axis, value in enumerate(place, start=1):
                yield Record(metric="path", value=value, layer=layer, n=1, tags={**tags, "token": token, "axis": axis})
