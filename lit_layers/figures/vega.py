"""Parts of Vega-Lite: axes, layers and what they say on touch; and a specification as a picture."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.figures.axes import Axis

SUFFIXES = (".png", ".svg", ".pdf")
NUMBER = "'.4~g'"
DETAIL = [{"field": "k", "type": "nominal"}, {"field": "u", "type": "nominal"}]
ORDER = {"field": "i", "type": "quantitative"}


def area(size: float) -> float:
    return round(0.8 * size**2, 1)


def encoded(axis: Axis, side: str) -> dict[str, Any]:
    """An axis as an encoding of x or y."""
    scale: dict[str, Any] = {"reverse": True} if axis.reverse else {}
    look: dict[str, Any] = {"title": axis.title or None, "grid": axis.grid}
    if axis.keys is not None:
        return {
            "field": side,
            "type": "ordinal",
            "scale": {**scale, "domain": list(axis.keys)},
            "axis": look | _labels(axis),
        }
    scale |= {"zero": axis.zero} if not axis.log else {"type": "log"}
    if axis.ends is not None:
        scale |= {"domain": list(axis.ends), "nice": False}
    whole = {"tickMinStep": 1, "labelExpr": "datum.value == floor(datum.value) ? format(datum.value, ',d') : ''"}
    look |= whole if axis.whole else {"format": ",.6~g"}
    look |= {"tickCount": {"expr": "ceil(width / 80)"} if side == "x" else 5}
    look |= _labels(axis)
    return {"field": side, "type": "quantitative", "scale": scale, "axis": None if axis.hidden else look}


def _labels(axis: Axis) -> dict[str, Any]:
    if axis.labels is None:
        return {"labelAngle": 0} if axis.keys is not None else {}
    places, texts = json.dumps(list(axis.labels)), json.dumps(list(axis.labels.values()))
    found: dict[str, Any] = {"values": list(axis.labels), "labelExpr": f"{texts}[indexof({places}, datum.value)]"}
    found |= {"labelAngle": 0, "labelOverlap": axis.keys is None, "labelLimit": 330}
    if axis.strong:
        test = f"indexof({json.dumps(list(axis.strong))}, datum.value) >= 0"
        found["labelFontWeight"] = {"condition": {"test": test, "value": "bold"}, "value": "normal"}
    return found


def phrase(template: str) -> str:
    """`layer {x}` as an expression of Vega."""
    parts = re.split(r"\{(\w+)\}", template)
    return " + ".join(f"datum.{part}" if n % 2 else json.dumps(part) for n, part in enumerate(parts) if part)


def layer(kept: str, mark: dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    return {"transform": [{"filter": kept}], "mark": mark, "encoding": encoding}


def touched(layer: dict[str, Any], tip: str) -> dict[str, Any]:
    """A layer that says something where it is touched."""
    tooltip = {"field": "tip", "type": "nominal"}
    transform = [*layer["transform"], {"calculate": tip, "as": "tip"}]
    return {**layer, "transform": transform, "encoding": {**layer["encoding"], "tooltip": tooltip}}


def of_row(field: str) -> dict[str, Any]:
    kind = "quantitative" if field in "zo" else "nominal"
    return {"field": field, "type": kind, "scale": None, "legend": None}


def rule(side: str, at: float, color: str, width: float) -> dict[str, Any]:
    """A line across the plot at a place of one axis."""
    across, long = ("y", "height") if side == "x" else ("x", "width")
    other = {across: {"value": 0}, f"{across}2": {"value": {"expr": long}}}
    mark = {"type": "rule", "color": color, "strokeWidth": width, "tooltip": None}
    place = {"field": "at", "type": "quantitative"}
    return {"data": {"values": [{"at": at}]}, "mark": mark, "encoding": {side: place, **other}}


def write_spec(spec: dict[str, Any], path: str | Path) -> None:
    """Writes Vega-Lite as a picture: no browser, no display, no network. Equal numbers give equal files.

    Raises:
        InputError: where it cannot be written.
        ValueError: for another suffix than .png, .svg and .pdf.
    """
    path = Path(path)
    content = picture_of(spec, path.suffix)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from error


def picture_of(spec: dict[str, Any], suffix: str) -> bytes:
    """Returns Vega-Lite as a picture.

    Raises:
        ValueError: for another suffix than .png, .svg and .pdf.
    """
    if suffix not in SUFFIXES:
        raise ValueError(f"expected a picture that ends in {', '.join(SUFFIXES)}, got {suffix!r}")
    svg = _svg(json.dumps(spec))
    if suffix == ".svg":
        return svg.encode()
    import vl_convert

    return vl_convert.svg_to_png(svg, scale=2) if suffix == ".png" else vl_convert.svg_to_pdf(svg)


@functools.lru_cache(maxsize=4)  # one picture comes out in several formats
def _svg(spec: str) -> str:
    import vl_convert  # a tenth of a second, which the command line alone does not need

    svg = vl_convert.vegalite_to_svg(json.loads(spec))
    numbers: dict[str, int] = {}  # of clips, which count on from picture to picture
    return re.sub(r'((?:id="|url\(#)clip)(\d+)', lambda at: f"{at[1]}{numbers.setdefault(at[2], len(numbers))}", svg)
