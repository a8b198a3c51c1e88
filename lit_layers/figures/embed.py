"""Charts inside a page: their specifications, each shape of them once, and their rows by column."""

import json
from collections.abc import Sequence
from typing import Any

from lit_layers.figures.chart import Chart, columns_of

# What differs between charts of one shape: it stands in a pool of all such parts, each there once.
_OWN = {
    "title",
    "subtitle",
    "domain",
    "domainMin",
    "domainMax",
    "range",
    "values",
    "value",
    "expr",
    "text",
    "calculate",
}
_OWN |= {"labelExpr", "labelFontWeight", "reverse", "format", "columns", "max", "signal"}


class Feed:
    """The figures of one page, as its script takes them."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []
        self._shapes: dict[str, int] = {}
        self._parts: dict[str, int] = {}

    def add(self, chart: Chart) -> dict[str, Any]:
        """Adds a chart; returns what stands for it."""
        named = {name: self._split(chart, name) for name in (chart.training.names if chart.training else ["step"])}
        shape, own = named["step"]
        content: dict[str, Any] = {"shape": shape, "own": own, "height": chart.height, **columns_of(chart)}
        if "tokens" in named:
            pairs = enumerate(zip(own, named["tokens"][1], strict=True))
            content["tokens"] = {number: there for number, (here, there) in pairs if here != there}
        if len(chart.frames) > 1:
            content["frames"] = list(chart.frames)
        if chart.square:
            content["square"] = True
        self.figures.append(content)
        return content

    def fail(self, reason: str) -> dict[str, Any]:
        """Adds what stands in the place of a chart that cannot be drawn."""
        self.figures.append({"problem": reason, "height": 0})
        return self.figures[-1]

    def content(self) -> dict[str, Any]:
        shapes, parts = ([json.loads(each) for each in own] for own in (self._shapes, self._parts))
        return {"shapes": shapes, "parts": parts, "figures": self.figures}

    def _split(self, chart: Chart, axis: Any) -> tuple[int, list[int]]:
        """The number of the shape of a chart on an axis, and those of the parts that are put into it."""
        spec = {**chart.spec(axis, width="container", height="container", still=False), "config": chart.config}
        spec.pop("data")
        own: list[Any] = []
        shape = json.dumps(_shape(spec, own))
        numbers = [self._parts.setdefault(json.dumps(part), len(self._parts)) for part in own]
        return self._shapes.setdefault(shape, len(self._shapes)), numbers


def _shape(part: Any, own: list[Any], key: str = "") -> Any:
    if key in _OWN:
        own.append(part)
        return {"$": len(own) - 1}
    if isinstance(part, dict):
        return {name: _shape(each, own, name) for name, each in part.items()}
    return [_shape(each, own) for each in part] if isinstance(part, Sequence) and not isinstance(part, str) else part
