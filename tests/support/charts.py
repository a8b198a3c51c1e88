"""Read what a chart or the figures of a page show."""

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_layers.figures import vega
from lit_layers.figures.chart import Chart, Series


def line(chart: Chart, name: str) -> Series:
    """Return the only series of this name."""
    (found,) = [series for series in chart.series if series.name == name]
    return found


def names(chart: Chart) -> list[str]:
    return [series.name for series in chart.series]


def drawn(chart: Chart, name: str, frame: int | None = None) -> dict[Any, Any]:
    """Return all points of the series of one name as {x: y}; over training, x is the position on the axis."""
    found = {}
    for series in (each for each in chart.series if each.name == name):
        for n, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            if frame is None or not series.frame or series.frame[n] == frame:
                found[axis_position(chart, x)] = y
    return found


def values(chart: Chart, name: str, frame: int | None = None) -> list[Any]:
    return list(drawn(chart, name, frame).values())


def axis_position(chart: Chart, x: Any) -> Any:
    if chart.training is None:
        return x
    return chart.training.places[chart.training.steps.index(x)]


def axis(chart: Chart) -> Any:
    """Return the horizontal axis, also of a chart over training."""
    return chart.x if chart.training is None else chart.training.axis(cells=chart.cells is not None)


def svgs(charts: Iterable[Any]) -> list[str]:
    """Return each chart as SVG; one process draws them all."""
    return [picture.decode() for (picture,) in vega.pictures_of([chart.whole() for chart in charts], [".svg"])]


def svg_texts(chart: Chart | str) -> list[str]:
    """Return the texts of an SVG in the order of its source."""
    source = chart if isinstance(chart, str) else chart.picture(".svg").decode()
    return [re.sub("<[^>]*>", "", text) for text in re.findall(r"<text[^>]*>(.*?)</text>", source, re.S)]


class PageFigure:
    """A figure of a page as the browser receives it: its specification and its points."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.problem = content.get("problem", "")
        self.frames, rows = content.get("frames", []), content.get("rows", [])
        self.points, cells = [row for row in rows if "k" in row], [row for row in rows if "z" in row]
        self.columns = [*dict.fromkeys(row["x"] for row in cells)]
        by_row: dict[Any, dict[Any, list[Any]]] = {}
        for row in cells:
            by_row.setdefault(row.get("f"), {}).setdefault(row["y"], []).append(row["z"])
        self.z = [[*tables.values()] for tables in by_row.values()] or None
        self.spec: dict[str, Any] = content.get("spec", {})
        tables = {
            each["lookup"]: each["from"]["data"]["values"]
            for each in self.spec.get("transform", ())
            if "lookup" in each
        }
        self.series = tables.get("k", [])
        self.steps = [int(row["w"].split()[1].replace(",", "")) for row in tables.get("n", [])]

    @property
    def is_map(self) -> bool:
        return self.z is not None

    @property
    def names(self) -> list[str]:
        return [row["s"] for row in self.series]

    def line(self, name: str, frame: int | None = None) -> dict[Any, Any]:
        """Return the points of a series as {x: y}; over training, x is a step."""
        kept = {row["k"] for row in self.series if row["s"] == name}
        rows = [row for row in self.points if row["k"] in kept and frame in (None, row.get("f"))]
        return {self.steps[row["n"]] if self.steps else row["x"]: row["y"] for row in rows}

    @property
    def dashed(self) -> set[str]:
        for layer in self.spec["layer"]:
            if "strokeDash" in layer.get("encoding", {}):
                scale = layer["encoding"]["strokeDash"]["scale"]
                return {name for name, dash in zip(scale["domain"], scale["range"], strict=True) if dash != [1, 0]}
        return set()

    @property
    def legend(self) -> list[str]:
        for layer in self.spec["layer"]:
            if (legend := layer.get("encoding", {}).get("color", {}).get("legend")) is not None:
                return legend["values"]
        return []


def page_figures(page: Path) -> list[PageFigure]:
    return [PageFigure(content) for content in figure_data(page.read_text())]


def blocks(page: Path) -> dict[str, tuple[list[str], list[list[PageFigure]]]]:
    """Return the options of each block by its title, and for each slot the figures that the options show in it.

    The first block of a title counts.
    """
    text, drawn, found = page.read_text(), page_figures(page), {}
    for article in re.findall(r"<article.*?</article>", text, re.S):
        title = html.unescape(re.findall(r"<h3>(.*?)(?:<span|</h3>)", article, re.S)[0]).strip()
        slots = re.findall(r'data-figures="([\d ]+)"', article)
        figures_of = [[drawn[int(index)] for index in indices.split()] for indices in slots]
        found.setdefault(title, (re.findall(r"<option[^>]*>(.*?)</option>", article), figures_of))
    return found


def figure_data(page: str) -> list[dict[str, Any]]:
    """Return the data of all figures that a page holds for its script."""
    text = re.search(r'<script type="application/gzip" id="report-data">(.*?)</script>', page, re.S)
    return json.loads(gzip.decompress(base64.b64decode(text[1]))) if text is not None else []


def visible_text(page: Path) -> str:
    """Return the text of a page without its scripts and styles."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(), flags=re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))
