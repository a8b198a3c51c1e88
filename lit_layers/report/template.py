"""Parts of all HTML pages: tables, figure blocks, and the template with script and style."""

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
Figures = list[dict[str, Any]]  # all figures of a page, as its script expects them
Captioned = tuple[str, Chart | Callable[[], Chart]]  # a caption, and a chart or a function that draws it
Choice = tuple[str, Iterable[Captioned]]  # text of a choice, and its figures


class Block(dict[str, Any]):
    """Figures that share a title and a note on a page, with a menu from which the reader chooses."""


class Cells(NamedTuple):
    """A table row; each cell is a text with an optional small text, and `strong` highlights the row."""

    cells: Sequence[tuple[str, str]]
    strong: bool = False


class Group(NamedTuple):
    """Table rows under a common heading, with a note next to the heading."""

    heading: str
    note: str
    rows: Sequence[Cells]


class Table(NamedTuple):
    """A table for pages and for the terminal; all columns except the first hold numbers."""

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
    """Return a figure block with drawn figures; the reader selects one of `choices`.

    All choices get the same number of places for figures, and unused places are hidden. A choice without figures shows
    a sentence instead. A block with several places is wide, unless `wide` says otherwise. `metrics` adds explanations
    of these metrics below the figures. `kind` is a CSS class.
    """
    shown = [{"text": text, "figures": [_draw(*each, kind) for each in figures]} for text, figures in choices]
    slots = max([1, *(len(choice["figures"]) for choice in shown)])
    for choice in shown:
        choice["figures"] = choice["figures"] or [_figure(problem=_NO_FIGURE)]
        choice["figures"] += [_figure()] * (slots - len(choice["figures"]))
    wide = slots > 1 if wide is None else wide
    readings = [each for metric in metrics if (each := reading(metric)) is not None]
    return Block(title=title, note=note, wide=wide, choices=shown, readings=readings)


def _draw(caption: str, chart: Chart | Callable[[], Chart], kind: str) -> dict[str, Any]:
    """Return a drawn figure with its caption, or with the reason why drawing failed."""
    try:
        return _figure(chart if isinstance(chart, Chart) else chart(), caption, kind=kind)
    except Exception as error:  # show the reason instead of this figure, and draw the others
        logger.debug("a figure could not be drawn", exc_info=True)
        return _figure(caption=caption, problem=f"This figure could not be drawn: {kind_and_words(error)}")


def _figure(chart: Chart | None = None, caption: str = "", *, kind: str = "", problem: str = "") -> dict[str, Any]:
    """Return the content of one figure on a page: a chart, or the text of a problem.

    The page hides a figure that has neither.
    """
    absent = chart is None and not problem
    return {"caption": caption, "chart": chart, "problem": problem, "absent": absent, "kind": kind}


def charts_in(name: str, blocks: Iterable[Block]) -> Iterator[tuple[str, Chart]]:
    """Yield the charts of figure blocks, each with a name that is unique in its section."""
    for block in blocks:
        for choice in block["choices"]:
            for each in choice["figures"]:
                if each["chart"] is not None:
                    yield "_".join(filter(None, [name, block["title"], choice["text"], each["caption"]])), each["chart"]


def content_of(chart: Chart) -> dict[str, Any]:
    """Return what the page's script needs to draw a chart: the Vega-Lite specification and the rows."""
    spec = chart.spec(width="container", height="container", still=False) | {"config": CONFIG}
    del spec["data"]
    frames = {"frames": list(chart.frames)} if len(chart.frames) > 1 else {}
    return {"square": chart.square, "rows": rows_of(chart), "spec": spec, **frames}


def fill(template: str, **content: Any) -> str:
    """Return the HTML page of a template filled with `content`; it embeds the data of all figures in `content`."""
    page, figures = files("lit_layers.report").joinpath("page"), Figures()
    content = number_figures(content, figures)
    specs = json.dumps(figures, separators=(",", ":")).encode()  # the figures are similar, so gzip shrinks them tenfold
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
    """Return the Jinja environment, cached because compiling the templates takes longer than rendering them."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("lit_layers.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def number_figures(content: Any, figures: Figures) -> Any:
    """Return `content` with the figures of each figure block replaced by their indices in `figures`.

    The figures are appended to `figures`.
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
    # Heights of the plots in pixels, without the 36 pixels of a slider.
    heights = [40 if chart is None else chart.height - (36 if len(chart.frames) > 1 else 0) for chart in charts]
    slots = [
        {
            "captions": [choice["figures"][slot]["caption"] for choice in choices],
            "numbers": [choice[slot] for choice in numbers],
            "problem": each["problem"],
            "absent": each["absent"],
            "height": height,
            "kind": each["kind"],
        }
        for slot, (each, height) in enumerate(zip(first, heights, strict=True))
    ]
    texts = [choice["text"] for choice in choices]
    return {**content, "texts": texts if len(texts) > 1 else [], "fixed": texts[0], "figures": slots}


def _add_figure(drawn: Mapping[str, Any], figures: Figures) -> int:
    content = {name: drawn[name] for name in ("absent", "problem") if drawn[name]}
    if drawn["chart"] is not None:
        try:
            content = content_of(drawn["chart"])
        except Exception as error:  # show the reason instead of this figure, and draw the others
            content = {"problem": f"This figure could not be drawn: {type(error).__name__}: {error}"}
    figures.append(content)
    return len(figures) - 1


def write_page(page: str, out: Path) -> Path:
    """Write a page atomically, and return its path.

    The path is `out` with the suffix `.html`, or `report.html` in `out` if `out` is a folder.

    Raises:
        InputError: the page cannot be written.
    """
    with refused(f"cannot write {out}", "; --root names another place"):
        path = out / "report.html" if out.is_dir() else out
        if path.suffix.lower() not in (".html", ".htm"):
            path = path.with_name(f"{path.name}.html")
        replace_file(path, page)
    return path
