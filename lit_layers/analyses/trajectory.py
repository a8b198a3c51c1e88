"""How single tokens travel through the layers."""

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import LayerwiseAnalysis, LayerwiseRun, Visit
from lit_layers.analyses.states import STATES, States, in_convention
from lit_layers.analyses.summary import left_out, mean_of_defined, median_of_defined, summarize, summarize_median
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.trajectory import WalkedPath
from lit_layers.metrics import is_in, look_up
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record


@dataclass(kw_only=True)
class Trajectory(LayerwiseAnalysis):
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

    batches: Batches
    name: str = "trajectory"
    tokens: Literal["all", "last"] = "all"
    drop_first: int = 1
    states: States = "resid"
    preset: Literal["paper"] | None = None

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options()

    def begin(self, model: LayeredModel, store: MutableMapping[str, Tensor] | None = None) -> LayerwiseRun:
        self._check_options()
        return _Run(model, self)

    def _check_options(self) -> None:
        for option, allowed in (("tokens", ("all", "last")), ("states", STATES), ("preset", (None, "paper"))):
            if (value := getattr(self, option)) not in allowed:
                raise InputError(f"{self.name}: expected {option} to be one of {list(allowed)}, got {value!r}")
        if self.drop_first < 0:
            raise InputError(f"{self.name}: expected drop_first of at least 0, got {self.drop_first}")


class _Run(LayerwiseRun):
    """Per batch the paths of its kept tokens, `path/...`, and which tokens those are, `kept`."""

    def __init__(self, model: LayeredModel, options: Trajectory) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.states: States = "hf" if options.preset == "paper" else options.states

    def start(self, batch: int, hidden: Tensor, mask: Tensor) -> None:
        position = mask.cumsum(-1)
        kept = mask & (position > self.options.drop_first)
        if self.options.tokens == "last":
            kept = kept & (position == position[:, -1:])
        self.state[f"kept/{batch}"] = kept
        path = WalkedPath()
        path.start(in_convention(self.model, self.states, 0, hidden)[kept])
        self._keep(batch, path)

    def visit(self, visit: Visit) -> None:
        kept, path = self.state[f"kept/{visit.batch}"].to(visit.mask.device), self._path(visit.batch)
        before = in_convention(self.model, self.states, visit.layer - 1, visit.before)
        after = in_convention(self.model, self.states, visit.layer, visit.after)
        path.step(before[kept], after[kept])
        self._keep(visit.batch, path)

    def release(self, batch: int) -> None:
        self.state.pop(f"path/{batch}/total", None)

    def records(self) -> Iterator[Record]:
        tags: dict[str, str | int | float] = {} if self.states == "resid" else {"states": self.states}
        batches = [int(name.removeprefix("kept/")) for name in self.state if name.startswith("kept/")]
        groups = [_of_prompts(self._path(batch), self.state[f"kept/{batch}"]) for batch in batches]
        for metric in groups[0]:
            yield from _records(metric, torch.cat([group[metric] for group in groups], dim=-1), tags)

    def _path(self, batch: int) -> WalkedPath:
        start = f"path/{batch}/"
        return WalkedPath({n.removeprefix(start): t for n, t in self.state.items() if n.startswith(start)})

    def _keep(self, batch: int, path: WalkedPath) -> None:
        self.state.update({f"path/{batch}/{name}": tensor for name, tensor in path.state.items()})


def _of_prompts(path: WalkedPath, kept: Tensor) -> dict[str, Tensor]:
    """Per metric and row (layer): mean over a prompt's tokens, median, number of tokens without a value."""
    found = {}
    for metric, values in _of_tokens(path).items():
        kept = kept.to(values.device)  # where there is no float64, values are on the CPU
        placed = values.new_full((len(values), *kept.shape), torch.nan)
        placed[:, kept] = values  # (rows, batch, tokens)
        missing = (placed.isnan() & kept).sum(-1)
        found[metric] = torch.stack([mean_of_defined(placed), median_of_defined(placed), missing.double()]).cpu()
    return found  # (3, rows, batch) each


def _of_tokens(path: WalkedPath) -> dict[str, Tensor]:
    """Per metric the values (rows, paths); metrics of a whole path have one row."""
    norms, lengths = path.state["norms"], path.state["lengths"]
    found = {  # what breaks off leaves the layers before alone
        "line_shape_score": path.running_line_shape_score("nan", so_far=True),
        "equidistance": path.equidistance("nan")[None],
        "growth_rate": path.growth_rates("nan", so_far=True),
        "state_norm": norms.where(norms.isfinite(), torch.nan),
    }
    if len(norms) > 2:  # one block has no deviation of growth
        found["expodistance"] = path.expodistance("nan")[None]
    return found | {"step_norm": lengths.where(lengths.isfinite(), torch.nan)}


def _records(metric: str, statistics: Tensor, tags: dict[str, str | int | float]) -> Iterable[Record]:
    means, medians, missing = statistics  # (rows, prompts) each
    about, of_path = look_up(metric), is_in(metric, "path")
    rows: list[tuple[int, int | None]] = [(-1, None)] if of_path else []
    if about.first_layer is not None:  # the row of layer 0 is there for states, not for steps
        places = enumerate(range(len(means)), start=min(1, about.first_layer))
        rows += [(row, layer) for layer, row in places if layer >= about.first_layer]
    for row, layer in rows:
        counts = left_out("tokens", int(missing[row].sum()))
        yield from summarize(metric, means[row], layer=layer, tags=tags | counts)
        if about.median and (layer is None or not of_path):
            yield from summarize_median(metric, medians[row], layer=layer, tags=tags | counts)
