"""Vega-Lite building blocks: axes, layers and tooltips; and rendering of specifications as pictures."""

import base64
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError, refused
from lit_layers.figures.theme import INK, Axis
from lit_layers.files.durable import replace_file

SUFFIXES = (".png", ".svg", ".pdf")
_LONG_NAME = 120  # largest number of characters in a file name
_PATIENCE = 600.0  # seconds to wait for all pictures; a hundred take about ten
NUMBER = "'.4~g'"
DETAIL = [{"field": "k", "type": "nominal"}, {"field": "u", "type": "nominal"}]
ORDER = {"field": "i", "type": "quantitative"}
LABELS = {
    "transform": [{"filter": "datum.q"}],
    "mark": {"type": "text", "fontSize": 10.5, "color": INK, "tooltip": None, "align": "left", "dx": 8},
    "encoding": {"text": {"field": "q"}},
}


def area(size: float) -> float:
    return round(0.8 * size**2, 1)


def encoded(axis: Axis, side: str) -> dict[str, Any]:
    """Return the Vega-Lite encoding of an axis; `side` is x or y."""
    scale: dict[str, Any] = {"reverse": True} if axis.reverse else {}
    look: dict[str, Any] = {"title": axis.title or None, "grid": axis.grid}
    if axis.keys is not None:
        # Without padding, rounding can place the first key below 0, and Vega then drops its label.
        return {
            "field": side,
            "type": "ordinal",
            "scale": {**scale, "domain": list(axis.keys), "paddingOuter": 1e-9},
            "axis": look | _labels(axis, side),
        }
    scale |= {"zero": False} if not axis.log else {"type": "log", "nice": False, "padding": 10}
    if axis.ends is not None:
        scale |= {"domain": list(axis.ends), "nice": False}
    whole = {"tickMinStep": 1, "labelExpr": "datum.value == floor(datum.value) ? format(datum.value, ',d') : ''"}
    look |= whole if axis.whole else {"format": ",.6~g"}
    if side == "x" or axis.labels is None:  # a tick count would make Vega drop labels of a y-axis
        look |= {"tickCount": {"expr": "ceil(width / 80)"} if side == "x" else 5}
    look |= _labels(axis, side)
    return {"field": side, "type": "quantitative", "scale": scale, "axis": look}


def _labels(axis: Axis, side: str) -> dict[str, Any]:
    if axis.labels is None:
        return {"labelAngle": 0} if axis.keys is not None else {}
    texts = f"{json.dumps(list(axis.labels.values()))}[indexof({json.dumps(list(axis.labels))}, datum.value)]"
    look: dict[str, Any] = {"values": list(axis.labels), "labelExpr": texts, "labelAngle": 0, "labelLimit": 460}
    return look | {"labelOverlap": side == "x" or axis.keys is None}


def phrase(template: str) -> str:
    """Return a template such as `layer {x}` as a Vega expression that inserts the fields of a data row."""
    parts = re.split(r"\{(\w+)\}", template)
    return " + ".join(f"datum.{part}" if n % 2 else json.dumps(part) for n, part in enumerate(parts) if part)


def layer(where: str, mark: dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    return {"transform": [{"filter": where}], "mark": mark, "encoding": encoding}


def hoverable(layer: dict[str, Any], tip: str) -> dict[str, Any]:
    """Return a Vega-Lite layer with a tooltip, whose text is the Vega expression `tip`."""
    tooltip = {"field": "tip", "type": "nominal"}
    transform = [*layer["transform"], {"calculate": tip, "as": "tip"}]
    return {**layer, "transform": transform, "encoding": {**layer["encoding"], "tooltip": tooltip}}


def digits(ends: tuple[float, float]) -> str:
    """Return a number format for a colour bar, with enough digits to distinguish a sixth of its range."""
    span, largest = abs(ends[1] - ends[0]), max(map(abs, ends))
    return f".{max(3, math.ceil(math.log10(largest / span)) + 2) if span else 3}~g"


def row_field(field: str) -> dict[str, Any]:
    """Return an encoding that reads its value from each row, without scale and legend."""
    return {"field": field, "type": "quantitative" if field in "zo" else "nominal", "scale": None}


def rule(side: str, at: float, color: str, width: float) -> dict[str, Any]:
    """Return a Vega-Lite layer with a straight line across the plot, at position `at` of axis `side`."""
    across, long = ("y", "height") if side == "x" else ("x", "width")
    other = {across: {"value": 0}, f"{across}2": {"value": {"expr": long}}}
    mark = {"type": "rule", "color": color, "strokeWidth": width, "tooltip": None}
    place = {"field": "at", "type": "quantitative"}
    return {"data": {"values": [{"at": at}]}, "mark": mark, "encoding": {side: place, **other}}


def color_bar(title: str, labels: Mapping[int, str], stops: Sequence[str]) -> dict[str, Any]:
    """Return a layer that draws a colour bar above the plot, with labels at some values."""
    numbers = list(labels)
    texts = f"{json.dumps(list(labels.values()))}[indexof({json.dumps(numbers)}, datum.value)]"
    legend = {"title": title, "orient": "top", "direction": "horizontal", "gradientLength": 150}
    legend |= {"gradientThickness": 7, "values": numbers, "labelExpr": texts, "gradientOpacity": 1}
    scale = {"domain": [min(numbers), max(numbers)], "range": list(stops)}
    fill = {"field": "v", "type": "quantitative", "scale": scale, "legend": legend}
    places = {"x": {"value": 0}, "y": {"value": 0}}
    data = {"values": [{"v": number} for number in numbers]}
    mark = {"type": "point", "opacity": 0, "tooltip": None}
    return {"data": data, "mark": mark, "encoding": {"fill": fill, **places}}


def sized(part: Any, sizes: Mapping[str, float]) -> Any:
    """Return part of a specification with numbers instead of the signals `width` and `height`.

    Vega-Lite does not define these signals for charts in a grid.
    """
    if isinstance(part, list):
        return [sized(each, sizes) for each in part]
    if not isinstance(part, dict):
        return part
    in_numbers = {name: sized(each, sizes) for name, each in part.items()}
    if "expr" in part:
        in_numbers["expr"] = re.sub(r"\b(width|height)\b", lambda name: str(sizes[name[0]]), part["expr"])
    return in_numbers


def write_pictures(charts: Iterable[tuple[str, Any]], folder: Path) -> list[Path]:
    """Write charts as PNG, SVG and PDF into a folder; return the paths.

    `charts` holds pairs of a title and a chart. The file name of a chart is made from its title. Drawing needs no
    browser, display or network. The folder is created if needed; other files in it are not touched.

    Raises:
        InputError: the folder cannot be created, or a chart cannot be drawn or written.
    """
    names: set[str] = set()
    named = {file_name(text, names): chart for text, chart in charts}
    with refused(f"cannot make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    drawings = pictures_of([chart.whole() for chart in named.values()], SUFFIXES) if named else []
    for name, pictures in zip(named, drawings, strict=True):
        for suffix, picture in zip(SUFFIXES, pictures, strict=True):
            paths.append(folder / f"{name}{suffix}")
            with refused(f"cannot write {paths[-1]}"):
                replace_file(paths[-1], picture)
    return paths


def pictures_of(specs: Sequence[Any], suffixes: Sequence[str]) -> list[list[bytes]]:
    """Return the content of a file in each format for each Vega-Lite specification.

    Raises:
        ValueError: a suffix is not .png, .svg or .pdf.
        InputError: vl-convert fails.
    """
    for suffix in suffixes:
        if suffix not in SUFFIXES:
            raise ValueError(f"expected a picture that ends in {', '.join(SUFFIXES)}, got {suffix!r}")
    return [[base64.b64decode(picture) for picture in each] for each in _drawing(*suffixes, specs=specs)]


@functools.cache
def script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script that needs no network.

    The result is cached, because building it takes two seconds.
    """
    return _drawing()


def _drawing(*suffixes: str, specs: Sequence[Any] = ()) -> Any:
    """Run `drawing.py` as a process and return its answer. Ctrl-C in the terminal does not reach it.

    Raises:
        InputError: vl-convert cannot draw a specification, crashes, or takes too long.
    """
    # Replace control characters, which are escaped as \u00.. in JSON: they crash vl-convert.
    task = re.sub(r"\\u00[01].", r"\\ufffd", json.dumps([suffixes, specs], ensure_ascii=False)).encode(errors="replace")
    command = isolated_command(Path(__file__).with_name("drawing.py"), ["vl_convert"])
    options: dict[str, Any] = {"capture_output": True, "timeout": _PATIENCE, "start_new_session": True}
    try:
        done = subprocess.run(command, input=task, **options)
        answer = json.loads(done.stdout or "{}")
        reason = (
            answer.get("error")
            or f"vl-convert's process ended with {done.returncode}: {done.stderr[-300:].decode(errors='replace')}"
        )
    except subprocess.TimeoutExpired:
        answer, reason = {}, f"vl-convert took more than {_PATIENCE:g} s"
    except OSError as error:
        answer, reason = {}, f"{error.__class__.__name__} of vl-convert's process"
    if "drawn" not in answer:
        raise InputError(f"nothing can be drawn: {reason}")
    return answer["drawn"]


def file_name(text: str, names: set[str]) -> str:
    """Return a unique file name made from a text, and add it to `names`.

    Names of analyses and runs may contain characters that are unsafe in file names. These are replaced, so two names
    can become equal; a number is then appended.
    """
    name, number = re.sub(r"[^a-z\d.-]+", "_", text.lower()).strip("_.")[:_LONG_NAME], 1
    while (unique := name if number == 1 else f"{name}_{number}") in names:
        number += 1
    names.add(unique)
    return unique


def isolated_command(program: Path, packages: Sequence[str], *arguments: str) -> list[str]:
    """Return a Python command line that can import only the standard library and these packages of this process.

    Python runs isolated (`-I`), so modules of the working directory and of PYTHONPATH cannot replace others.
    """
    specs = filter(None, map(find_spec, packages))
    places = [*dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec.origin)]
    start = f"import runpy, sys; sys.path += {places}; runpy.run_path({str(program)!r}, run_name='__main__')"
    return [sys.executable, "-I", "-c", start, *arguments]
