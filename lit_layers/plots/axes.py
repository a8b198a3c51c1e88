"""The axis of training: log(1 + step) or log(1 + tokens), with the untrained model apart on the left."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lit_layers.plots.labels import count
from lit_layers.plots.theme import GRID

AxisName = Literal["step", "tokens"]
DEPTH_TITLE = "Depth (100 layer / number of layers)"  # of models that are not equally deep
TITLES = {"step": "Optimizer step", "tokens": "Tokens seen"}


@dataclass(frozen=True)
class Grid:
    """The checkpoints that a trace has points at; `tokens` is None where they are not known."""

    steps: list[int]
    tokens: list[int] | None

    @classmethod
    def of(cls, steps: Sequence[int], tokens_of: Mapping[int, int | None]) -> "Grid":
        tokens = [tokens_of.get(step) for step in steps]
        known = [number for number in tokens if number is not None]
        return cls(list(steps), known if len(known) == len(tokens) else None)

    def values(self, axis: AxisName) -> list[int]:
        return self.steps if axis == "step" or self.tokens is None else self.tokens

    def hover(self) -> list[list[str]]:
        """Per point: the step and, where known, the tokens."""
        if self.tokens is None:
            return [[f"step {step:,}"] for step in self.steps]
        return [[f"step {step:,} · {count(t)} tokens"] for step, t in zip(self.steps, self.tokens, strict=True)]


def on_axis(traces: list[dict[str, Any]], grids: list[Grid], axis: AxisName) -> dict[str, Any]:
    """Puts each trace whose `meta` is the number of a grid on the axis; returns the layout of the axis.

    What a page needs to change the axis by itself is left in the layout's `meta`.

    Raises:
        ValueError: for the token axis where tokens are not known.
    """
    has_tokens = all(grid.tokens is not None for grid in grids)
    if axis == "tokens" and not has_tokens:
        raise ValueError("the token axis needs the tokens of every step; these records do not have them")
    names: list[AxisName] = ["step", "tokens"] if has_tokens else ["step"]
    specs = {name: _spec(name, [value for grid in grids for value in grid.values(name)]) for name in names}
    spec = specs[axis]
    for trace in traces:
        if (number := trace.get("meta")) is not None:
            trace["x"] = [position(value, spec["apart"]) for value in grids[number].values(axis)]
            trace["customdata"] = grids[number].hover()
    divider = {"type": "line", "x0": spec["divider"], "x1": spec["divider"], "y0": 0, "y1": 1, "yref": "paper"}
    divider |= {"line": {"color": GRID, "width": 6}, "layer": "below"}
    return {
        "xaxis": {"title": {"text": spec["title"]}, **{name: spec[name] for name in ("tickvals", "ticktext", "range")}},
        "shapes": [divider] if spec["divider"] is not None else [],
        "meta": {"grids": [vars(grid) for grid in grids], "axes": specs},
    }


def position(value: float, apart: float) -> float:
    """Returns log10(1 + value), or the place apart for 0."""
    return round(math.log10(1 + value), 5) if value > 0 else apart


def whole_ticks(first: int, last: int) -> dict[str, Any]:
    """Returns ticks at whole numbers only, at most about nine of them."""
    step = next(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 10**6) if (last - first) / size <= 9)
    return {"tick0": 0, "dtick": step}


def _spec(name: AxisName, values: list[int]) -> dict[str, Any]:
    positive = sorted({value for value in values if value > 0})
    has_zero = any(value <= 0 for value in values)
    places = [position(value, 0.0) for value in positive]
    span = places[-1] - places[0] if places else 0.0
    gap = 0.13 * span or 1.0
    apart = round(places[0] - gap, 5) if places else 0.0
    first, last = (apart if has_zero or not places else places[0]), (places[-1] if places else apart)
    pad = 0.03 * (last - first) or 0.5
    ticks = _ticks(positive, places)
    if has_zero:
        ticks = [(apart, "0"), *[tick for tick in ticks if tick[0] - apart > 0.1 * span]]
    return {
        "title": TITLES[name],
        "apart": apart,
        "divider": round(places[0] - gap / 2, 5) if has_zero and places else None,
        "tickvals": [at for at, _ in ticks],
        "ticktext": [text for _, text in ticks],
        "range": [round(first - pad, 5), round(last + pad, 5)],
    }


def _ticks(values: list[int], places: list[float]) -> list[tuple[float, str]]:
    """Labels for some of the checkpoints, round numbers first, far enough apart for a narrow screen."""
    if not values:
        return []
    distance = (places[-1] - places[0]) / 6.5
    chosen: list[int] = []
    for index in sorted(range(len(values)), key=lambda i: (i not in (0, len(values) - 1), _roughness(values[i]), -i)):
        if all(abs(places[index] - places[other]) >= distance for other in chosen):
            chosen.append(index)
    return [(places[index], count(values[index])) for index in sorted(chosen)]


def _roughness(value: int) -> int:
    """0 for powers of two, else the digits of a label without its last zeros."""
    return 0 if value & (value - 1) == 0 else len(str(value).rstrip("0"))
