"""Any function of hidden states as an analysis: a metric of one's own is that function alone."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import LayerwiseAnalysis, LayerwiseRun, States, StatesRun
from lit_layers.analyses.statistics import (
    check_num_halves,
    complete,
    left_out,
    random_halves,
    records_of_layers,
    summarize_layers,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional._checks import widened
from lit_layers.functional.geometry import Pooling, pool
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

# What a function is tried on: its layers are told from its points and dimensions by their number.
_LAYERS, _POINTS = 3, 64


@dataclass(kw_only=True)
class StateMetric(LayerwiseAnalysis):
    """A function of the hidden states at every layer, and its mean over layers 1..L (no layer).

    The function takes the states of one layer in float64, `(points, dim) -> ()`, or of several with a value for each,
    `(layers, points, dim) -> (layers)`; layers are handed over one at a time, so that a model can be streamed. NaN says
    that it is undefined. Its name is that of the metric; a row of that name in `lit_layers.metrics` gives it a title.

    With `points` "tokens" they are the real tokens of a prompt without the first `drop_first`, and values are averaged
    over prompts, with intervals by bootstrap over them. With "prompts" there is one pooled vector for each prompt, and
    one value for all of them, with intervals from `num_halves` random halves, whose mean is the metric `NAME_of_half`:
    values of more prompts and of fewer are not alike.

    Args:
        metric: the function; a recipe names it by its import path, `package.module.function`: one of
            `lit_layers.functional`, or of your own code (`--code`).
        batches: what is measured on.
        name: of the analysis; that of the function by default.
        options: keyword arguments of the function; they are tags of the numbers.
        points: what the points are.
        pooling: of the vectors of prompts.
        drop_first: how many first tokens are left out.
        num_halves: for intervals of "prompts"; 0: none.
        states: of which convention.
    """

    LEAST: ClassVar = {"drop_first": 0}

    metric: Callable[..., Any]  # not -> Tensor: a recipe could then name annotated functions alone
    batches: Batches
    name: str = ""
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    points: Literal["tokens", "prompts"] = "tokens"
    pooling: Pooling = "mean"
    drop_first: int = 0
    num_halves: int = 20
    states: States = "resid"

    def __post_init__(self) -> None:
        self.name = self.name or self.metric_name

    @property
    def metric_name(self) -> str:
        return getattr(self.metric, "__name__", "")

    def config(self) -> dict[str, Any]:
        """The options; of a function that is not the package's own its source, too: another one is another metric."""
        whole = super().config()
        module = getattr(self.metric, "__module__", None) or ""
        whole["init_args"]["metric"] = f"{module}.{self.metric_name}"
        if not module.startswith("lit_layers."):
            whole["init_args"]["source"] = hashlib.sha256(_source(self.metric).encode()).hexdigest()[:16]
        return whole

    def check_options(self, model: LayeredModel) -> None:
        if not self.metric_name.isidentifier():
            raise InputError(f"metric: expected a function that has a name, got {self.metric!r}")
        super().check_options(model)
        check_num_halves(self.name, self.num_halves)
        self._takes_layers(model.dim)

    def begin(self, model: LayeredModel, store: MutableMapping[str, Tensor] | None = None) -> LayerwiseRun:
        return _Run(model, self, self._takes_layers(model.dim))

    def tags(self) -> dict[str, str | int | float]:
        """What a result of other than the default options must say of itself."""
        tags = {name: int(value) if isinstance(value, bool) else value for name, value in self.options.items()}
        names = ("points", "states", *(("pooling",) if self.points == "prompts" else ("drop_first",)))
        defaults = type(self).__dataclass_fields__
        return tags | {name: value for name in names if (value := getattr(self, name)) != defaults[name].default}

    def _takes_layers(self, dim: int) -> bool:
        """Whether the function takes several layers at once, found out on random states.

        Raises:
            InputError: it takes neither one layer nor several, or gives anything but a number for each.
        """
        states = torch.randn(_LAYERS, _POINTS, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        several, reason = self._tried(states)
        if several is not None and several.shape == (_LAYERS,):
            alone, _ = self._tried(states[:1])
            if alone is not None and torch.allclose(alone, several[:1], rtol=1e-4, equal_nan=True):
                return True
            reason = "at one layer a value that changes with the other layers"
        one, why = self._tried(states[0])
        if one is not None and one.shape == ():
            return False
        got = reason or why if one is None else f"shape {tuple(one.shape)}"
        raise InputError(
            f"{self.name}: expected metric to turn states (points, dim) into one number, or (layers, points, dim) into "
            f"one a layer, got {got} from {self.metric_name} on states {(_POINTS, dim)}"
        )

    def _tried(self, states: Tensor) -> tuple[Tensor | None, str]:
        """What the function gives, or None and why there is nothing."""
        try:
            return self.value(states), ""
        except Exception as failure:  # of anyone's code
            return None, f"{type(failure).__name__}: {' '.join(str(failure).split())}"

    def value(self, states: Tensor) -> Tensor:
        """What the function gives, in float64.

        Raises:
            TypeError: no floating-point number.
        """
        with torch.no_grad():
            return widened(f"what {self.metric_name} returns", torch.as_tensor(self.metric(states, **self.options)))


class _Run(StatesRun):
    """A value for each prompt, or its pooled vector."""

    def __init__(self, model: LayeredModel, options: StateMetric, takes_layers: bool) -> None:
        super().__init__(model, options.states)
        self.options, self.takes_layers = options, takes_layers

    def values(self, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
        if self.options.points == "prompts":
            return {"pooled": pool(hidden, mask, pooling=self.options.pooling, undefined="nan")}
        kept = mask & (mask.cumsum(-1) > self.options.drop_first)
        prompts = zip(hidden, kept, strict=True)
        return {"values": torch.stack([self._value(tokens[real]) for tokens, real in prompts])}

    def records(self) -> Iterator[Record]:
        metric, tags = self.options.metric_name, self.options.tags()
        (rows,) = self.joined().values()
        if self.options.points == "tokens":
            yield from summarize_layers(metric, rows, tags=tags)
            return
        _, kept = complete(~rows.isnan().any(-1))
        pooled, tags = rows[:, kept], tags | left_out("", ~kept)
        subsets = random_halves(pooled.shape[1], self.options.num_halves)
        of_halves = torch.stack([self._of_layers(pooled[:, half]) for half in subsets], -1) if subsets else None
        yield from records_of_layers(metric, self._of_layers(pooled), of_halves, pooled.shape[1], tags)

    def _of_layers(self, states: Tensor) -> Tensor:
        return torch.stack([self._value(layer) for layer in states])

    def _value(self, points: Tensor) -> Tensor:
        """The function's value of (points, dim); NaN without any point."""
        if not len(points):
            return points.new_full((), torch.nan, dtype=torch.float64)
        points = widened("states", points)
        value = self.options.value(points[None])[0] if self.takes_layers else self.options.value(points)
        if value.shape != ():
            raise ValueError(f"expected {self.options.metric_name} to give one number, got shape {tuple(value.shape)}")
        return value


def _source(function: Callable[..., Any]) -> str:
    """The text of a function, or what it is compiled to where that cannot be read."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return f"{code.co_code.hex()} {code.co_consts} {code.co_names}" if code else repr(type(function))
