"""What all pages are made of, tables and blocks of figures, and their one template, which holds script and look."""

import base64
import functools
import gzip
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from lit_layers.errors import kind_and_words, refused
from lit_layers.figures.chart import Chart, rows_of
from lit_layers.figures.theme import CONFIG
from lit_layers.figures.vega import script
from lit_layers.files.durable import replace_file
from lit_layers.metrics import reading

logger = logging.getLogger(__name__)
_NO_FIGURE = "No figure shows these numbers; --export writes them."
Figures = list[dict[str, Any]]  # of one page, as its script takes them
Captioned = tuple[str, Chart | Callable[[], Chart]]  # a caption, and the figure below it or what draws it
Choice = tuple[str, Iterable[Captioned]]  # what the reader chooses, and its figures


class Block(dict[str, Any]):
    """The figures of a metric, with what stands above them: `fill` gives each figure its place on the page."""


class Cells(NamedTuple):
    """A row of a table: each cell is a text and what stands small beside it; a strong row is one to look at."""

    cells: Sequence[tuple[str, str]]
    strong: bool = False


class Group(NamedTuple):
    """The rows of a table below one heading, with a note beside that."""

    heading: str
    note: str
    rows: Sequence[Cells]


class Table(NamedTuple):
    """A table as a page and the terminal show it; all columns but the first hold numbers."""

    columns: Sequence[str]
    groups: Sequence[Group]


def block(
    title: str,
    note: str,
    choices: Iterable[Choice],
    *,
    wide: bool | None = None,
    kind: str = "",
    metrics: Sequence[str] = (),
) -> Block:
    """Return the figures of a metric, drawn, with a choice of texts; several figures are wide.

    `metrics` are the metrics that it shows: below the figures stands how they are to be read. All choices have as many
    places: one that a choice has no figure for is not shown with it. A sentence stands for a choice without any.
    `kind` is a class of the page.
    """
    shown = [{"text": text, "figures": [_draw(*each, kind) for each in figures]} for text, figures in choices]
    places = max([1, *(len(choice["figures"]) for choice in shown)])
    for choice in shown:
        choice["figures"] = choice["figures"] or [_figure(problem=_NO_FIGURE)]
        choice["figures"] += [_figure()] * (places - len(choice["figures"]))
    wide = places > 1 if wide is None else wide
    readings = [each for metric in metrics if (each := reading(metric)) is not None]
    return Block(title=title, note=note, wide=wide, choices=shown, readings=readings)


def _draw(caption: str, chart: Chart | Callable[[], Chart], kind: str) -> dict[str, Any]:
    """Return a figure with its caption; in the place of one that cannot be drawn stands why."""
    try:
        return _figure(chart if isinstance(chart, Chart) else chart(), caption, kind=kind)
    except Exception as error:  # whatever one figure stumbles over, the reader gets the others
        logger.debug("a figure could not be drawn", exc_info=True)
        return _figure(caption=caption, problem=f"This figure could not be drawn: {kind_and_words(error)}")


def _figure(chart: Chart | None = None, caption: str = "", *, kind: str = "", problem: str = "") -> dict[str, Any]:
    """Return a figure of a block. Without a chart the problem stands in its place, and without a problem nothing."""
    absent = chart is None and not problem
    return {"caption": caption, "chart": chart, "problem": problem, "absent": absent, "kind": kind}


def charts_in(name: str, blocks: Iterable[Block]) -> Iterator[tuple[str, Chart]]:
    """Yield the charts of a section's blocks, each with a text that tells it from the others."""
    for block in blocks:
        for choice in block["choices"]:
            for each in choice["figures"]:
                if each["chart"] is not None:
                    yield "_".join(filter(None, [name, block["title"], choice["text"], each["caption"]])), each["chart"]


def content_of(chart: Chart) -> dict[str, Any]:
    """Return what the page holds of a chart: its specification and its rows."""
    spec = chart.spec(width="container", height="container", still=False) | {"config": CONFIG}
    del spec["data"]
    frames = {"frames": list(chart.frames)} if len(chart.frames) > 1 else {}
    return {"square": chart.square, "rows": rows_of(chart), "spec": spec, **frames}


def fill(template: str, **content: Any) -> str:
    """Return a page as text, with the figures of all blocks in the lists and dictionaries of its content."""
    page, figures = files("lit_layers.report").joinpath("page"), Figures()
    content = number_figures(content, figures)
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


def number_figures(content: Any, figures: Figures) -> Any:
    """Return content whose blocks have, for each place of a figure, the numbers of what the choices put there.

    All that the blocks show is added to `figures`.
    """
    if isinstance(content, list):
        return [number_figures(part, figures) for part in content]
    if not isinstance(content, dict):
        return content
    if not isinstance(content, Block):
        return {name: number_figures(part, figures) for name, part in content.items()}
    choices = content["choices"]
    numbers = [[_add_figure(each, figures) for each in choice["figures"]] for choice in choices]
    first, charts = choices[0]["figures"], [each["chart"] for each in choices[0]["figures"]]
    # in pixels; a slider stands below the plot
    heights = [40 if chart is None else chart.height - (36 if len(chart.frames) > 1 else 0) for chart in charts]
    places = [
        {
            "captions": [choice["figures"][place]["caption"] for choice in choices],
            "numbers": [choice[place] for choice in numbers],
            "problem": each["problem"],
            "absent": each["absent"],
            "height": height,
            "kind": each["kind"],
        }
        for place, (each, height) in enumerate(zip(first, heights, strict=True))
    ]
    texts = [choice["text"] for choice in choices]
    return {**content, "texts": texts if len(texts) > 1 else [], "fixed": texts[0], "figures": places}


def _add_figure(drawn: Mapping[str, Any], figures: Figures) -> int:
    content = {name: drawn[name] for name in ("absent", "problem") if drawn[name]}
    if drawn["chart"] is not None:
        try:
            content = content_of(drawn["chart"])
        except Exception as error:  # the page's other figures are as good as before
            content = {"problem": f"This figure could not be drawn: {type(error).__name__}: {error}"}
    figures.append(content)
    return len(figures) - 1


def write_page(page: str, out: Path) -> Path:
    """Write a page, whole or not at all, and returns its path: `out` with `.html`, by which a browser knows a page,
    or `report.html` in it where that is a folder.

    Raises:
        InputError: it cannot be written there.
    """
    with refused(f"cannot write {out}", "; --root names another place"):
        path = out / "report.html" if out.is_dir() else out
        if path.suffix.lower() not in (".html", ".htm"):
            path = path.with_name(f"{path.name}.html")
        replace_file(path, page)
    return path
