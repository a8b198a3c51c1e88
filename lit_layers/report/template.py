"""The one template of all pages, filled: its figures, script and look stand in the page itself."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import jinja2

from lit_layers.figures import Chart
from lit_layers.figures.embed import Feed
from lit_layers.figures.vega import script


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
        feed.add(figure["chart"])
    return len(feed.figures) - 1
