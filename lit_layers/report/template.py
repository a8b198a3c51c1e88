"""The one template of all pages, filled: figures, script and look stand in the page itself."""

import base64
import functools
import gzip
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import jinja2

from lit_layers.figures.axes import AxisName
from lit_layers.figures.chart import Chart, columns_of
from lit_layers.figures.vega import script

Figures = list[dict[str, Any]]  # of one page, as its script takes them


def content_of(chart: Chart) -> dict[str, Any]:
    """Returns what the page holds of a chart: its specification on each axis, and its points by column."""
    content: dict[str, Any] = {"square": chart.square, **columns_of(chart)}
    axes: Sequence[AxisName] = chart.training.names if chart.training else ["step"]
    for axis in axes:
        spec = chart.spec(axis, width="container", height="container", still=False)
        content[axis] = {name: part for name, part in spec.items() if name != "data"} | {"config": chart.config}
    return content | ({"frames": list(chart.frames)} if len(chart.frames) > 1 else {})


def fill(template: str, figures: Figures, **content: Any) -> str:
    """Returns a page as text, with the figures that its blocks were `placed` with."""
    page = files("lit_layers.report").joinpath("page")
    specs = json.dumps(figures, separators=(",", ":")).encode()  # alike: compressed they are a tenth
    return (
        _environment()
        .get_template(template)
        .render(
            figures=base64.b64encode(gzip.compress(specs, mtime=0)).decode(),
            library=script(),
            css=page.joinpath("page.css").read_text(encoding="utf-8"),
            js=page.joinpath("page.js").read_text(encoding="utf-8"),
            written=datetime.now().astimezone().strftime("%d %B %Y, %H:%M").lstrip("0"),
            **content,
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    """One for all pages of a process: to compile their templates takes longer than to fill them."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("lit_layers.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def placed(blocks: Sequence[Mapping[str, Any]], figures: Figures) -> list[dict[str, Any]]:
    """Returns the blocks with, for each place of a figure, the numbers of the figures that the choices put there.

    All that the blocks show is added to `figures`.
    """
    shown = []
    for block in blocks:
        choices = block["choices"]
        numbers = [[_number(figure, figures) for figure in choice["figures"]] for choice in choices]
        first = choices[0]["figures"]
        heights = [_height(figure["chart"]) for figure in first]
        if not block.get("tall"):  # figures that stand side by side
            heights = [max(heights)] * len(heights)
        places = [
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
        shown.append({**block, "texts": texts if len(texts) > 1 else [], "fixed": texts[0], "figures": places})
    return shown


def _height(chart: Chart | None) -> int:
    """In pixels; a slider stands below the plot."""
    return 40 if chart is None else chart.height - (36 if len(chart.frames) > 1 else 0)


def _number(figure: Mapping[str, Any], figures: Figures) -> int:
    content = {"problem": figure["problem"]}
    if figure["chart"] is not None:
        try:
            content = content_of(figure["chart"])
        except Exception as error:  # the page's other figures are as good as before
            content = {"problem": f"This figure could not be drawn: {type(error).__name__}: {error}"}
    figures.append(content)
    return len(figures) - 1
