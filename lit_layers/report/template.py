"""The one template of all pages, filled: figures, script and look stand in the page itself, shapes of figures once."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import jinja2

from lit_layers.figures.chart import Chart, columns_of
from lit_layers.figures.vega import script

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


def fill(template: str, feed: Feed, **content: Any) -> str:
    """Returns a page as text, with the figures that were added to `feed`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lit_layers.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = files("lit_layers.report").joinpath("page")
    return environment.get_template(template).render(
        figures=feed.content(),
        library=script(),
        css=page.joinpath("page.css").read_text(encoding="utf-8"),
        js=page.joinpath("page.js").read_text(encoding="utf-8"),
        written=datetime.now().astimezone().strftime("%d %B %Y, %H:%M").lstrip("0"),
        **content,
    )


def placed(blocks: Sequence[Mapping[str, Any]], feed: Feed) -> list[dict[str, Any]]:
    """Returns the blocks with, for each place of a figure, the numbers of the figures that the choices put there."""
    found = []
    for block in blocks:
        choices = block["choices"]
        numbers = [[_number(figure, feed) for figure in choice["figures"]] for choice in choices]
        first = choices[0]["figures"]
        heights = [_height(figure["chart"]) for figure in first]
        if not block.get("tall"):  # figures that stand side by side
            heights = [max(heights)] * len(heights)
        figures = [
            {
                "caption": figure["caption"],
                "numbers": [choice[place] for choice in numbers],
                "problem": figure["problem"],
                "height": height,
                "kind": figure.get("kind", ""),
            }
            for place, (figure, height) in enumerate(zip(first, heights, strict=True))
        ]
        texts = [choice["text"] for choice in choices]
        found.append({**block, "texts": texts if len(texts) > 1 else [], "fixed": texts[0], "figures": figures})
    return found


def _height(chart: Chart | None) -> int:
    """In pixels; a slider stands below the plot."""
    return 40 if chart is None else chart.height - (36 if len(chart.frames) > 1 else 0)


def _number(figure: Mapping[str, Any], feed: Feed) -> int:
    if figure["chart"] is None:
        feed.fail(figure["problem"])
    else:
        try:
            feed.add(figure["chart"])
        except Exception as error:  # the page's other figures are as good as before
            feed.fail(f"This figure could not be drawn: {type(error).__name__}: {error}")
    return len(feed.figures) - 1
