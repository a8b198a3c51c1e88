"""How single tokens travel through the layers."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis
from lit_layers.analyses.states import States, at_least_float32, layer_states
from lit_layers.analyses.summary import mean_of_defined, median_of_defined, summarize, summarize_median
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional import trajectory as functional
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

OF_THE_PATH = ("line_shape_score", "expodistance", "equidistance")
# Metrics whose tokens have outliers or differ by orders of magnitude: a median stands beside the mean.
WITH_MEDIAN = ("line_shape_score", "expodistance", "state_norm", "step_norm")


@dataclass(kw_only=True)
class Trajectory(Analysis):
    """Shape, growth and steps of the paths that tokens take through the layers.

    Over the whole path: `line_shape_score`, `expodistance`, `equidistance`. Per layer: `line_shape_score` of the path
    so far (from layer 2), `growth_rate` and `step_norm` (of the block that ends there), `state_norm`. Each is averaged
    over the tokens of a prompt, then over prompts; a median (tag `statistic`) is the median over prompts of the median
    over tokens. The tag `num_undefined_tokens` counts tokens without a value, of all prompts.

    `tokens` "all" are the real ones without the first `drop_first` (mostly a sink, whose path is unlike any other),
    "last" the last of these alone. The model runs in float32 or wider. `states="hf"` ends each path after the final
    norm (preset "paper"): one large last step.
    """

    batches: Batches
    name: str = "trajectory"
    tokens: Literal["all", "last"] = "all"
    drop_first: int = 1
    states: States = "resid"
    preset: Literal["paper"] | None = None

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options()

    def run(self, model: LayeredModel) -> Iterable[Record]:
        self._check_options()
        model = at_least_float32(model)
        states: States = "hf" if self.preset == "paper" else self.states
        tags: dict[str, str | int | float] = {} if states == "resid" else {"states": states}
        found: dict[str, list[Tensor]] = defaultdict(list)
        for batch in self.batches:
            hidden, mask = layer_states(model, batch, states)
            for metric, statistics in _of_prompts(hidden, self._kept(mask)).items():
                found[metric].append(statistics.cpu())
        if not found:
            raise InputError(f"{self.name}: the data holds no prompts")
        for metric, groups in found.items():
            yield from _records(metric, torch.cat(groups, dim=-1), tags)

    def _kept(self, mask: Tensor) -> Tensor:
        position = mask.cumsum(-1)
        kept = mask & (position > self.drop_first)
        return kept & (position == position[:, -1:]) if self.tokens == "last" else kept

    def _check_options(self) -> None:
        for option, allowed in (("tokens", ("all", "last")), ("states", ("resid", "hf")), ("preset", (None, "paper"))):
            if (value := getattr(self, option)) not in allowed:
                raise InputError(f"{self.name}: expected {option} to be one of {list(allowed)}, got {value!r}")
        if self.drop_first < 0:
            raise InputError(f"{self.name}: expected drop_first of at least 0, got {self.drop_first}")


def _of_prompts(hidden: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Per metric and row (layer): mean over a prompt's tokens, median, number of tokens without a value."""
    found = {}
    for metric, values in _of_tokens(hidden[:, kept]).items():
        kept = kept.to(values.device)  # where there is no float64, values are on the CPU
        placed = values.new_full((len(values), *kept.shape), torch.nan)
        placed[:, kept] = values  # (rows, batch, tokens)
        missing = (placed.isnan() & kept).sum(-1)
        found[metric] = torch.stack([mean_of_defined(placed), median_of_defined(placed), missing.double()])
    return found  # (3, rows, batch) each


def _of_tokens(paths: Tensor) -> dict[str, Tensor]:
    """Per metric the values (rows, paths) of paths (layers + 1, paths, dim); metrics of a whole path have one row."""
    norms = functional.state_norms(paths)
    found = {
        "line_shape_score": functional.running_line_shape_score(paths, undefined="nan"),
        "equidistance": functional.equidistance(paths, undefined="nan")[None],
        "growth_rate": functional.growth_rates(paths, undefined="nan"),
        "state_norm": norms.where(norms.isfinite(), torch.nan),
    }
    if len(paths) > 2:  # one block has no deviation of growth
        found["expodistance"] = functional.expodistance(paths, undefined="nan")[None]
    steps = functional.step_norms(paths)
    return found | {"step_norm": steps.where(steps.isfinite(), torch.nan)}


def _records(metric: str, statistics: Tensor, tags: dict[str, str | int | float]) -> Iterable[Record]:
    means, medians, missing = statistics  # (rows, prompts) each
    rows: list[tuple[int, int | None]] = [(-1, None)] if metric in OF_THE_PATH else []
    if metric not in ("expodistance", "equidistance"):
        first = 0 if metric == "state_norm" else 1
        rows += [(row, row + first) for row in range(len(means))]
    for row, layer in rows:
        if metric == "line_shape_score" and layer == 1:
            continue  # one step is straight
        counted = int(missing[row].sum())
        counts = {"num_undefined_tokens": counted} if counted else {}
        yield from summarize(metric, means[row], layer=layer, tags=tags | counts)
        if metric in WITH_MEDIAN and (layer is None or metric not in OF_THE_PATH):
            yield from summarize_median(metric, medians[row], layer=layer, tags=tags | counts)
