"""The `Chart` class: series and heat map cells on two axes, rendered as Vega-Lite, PNG, SVG and PDF."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lit_layers.errors import refused
from lit_layers.figures.theme import COLORS, CONFIG, DASHES, GRID, MARKS, MUTED, Axis, Training
from lit_layers.figures.vega import (
    DETAIL,
    LABELS,
    NUMBER,
    ORDER,
    area,
    color_bar,
    digits,
    encoded,
    hoverable,
    layer,
    phrase,
    pictures_of,
    row_field,
    rule,
    sized,
)

__all__ = ["Chart", "Panels", "Series"]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line or a set of marks. Points are in drawing order; None in `y` breaks the line.

    For charts over training, `x` holds optimizer steps. `frame` gives the slider index at which each point is shown;
    without `frame`, all points are always shown. `texts` are added to the tooltip, which shows name, value, interval
    and position.
    """

    x: Sequence[Any]
    y: Sequence[float | None]
    name: str = ""
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    interval: Literal["band", "bars", ""] = "band"
    texts: Sequence[str] = ()
    frame: Sequence[int] = ()
    color: str = MUTED
    colors: Sequence[str] = ()  # one per point, if the points differ in colour
    dash: str = ""
    width: float = 0.0  # line width; 0: no line
    mark: str = ""
    size: float = 5.0
    labels: Sequence[str] = ()  # one per point, drawn to its right
    legend: bool = False
    hover: bool = True
    texts_only: bool = False  # tooltips show only `texts`

    @property
    def has_interval(self) -> bool:
        return any(end is not None for end in self.low)


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A heat map: `values[frame][row][column]` over the `rows` and `columns`; None is a missing value."""

    values: Sequence[Sequence[Sequence[float | None]]]
    rows: Sequence[Any]
    columns: Sequence[Any]
    ends: tuple[float, float]
    scheme: Any  # name of a Vega colour scheme, or a list of colours
    log: bool = False
    scale: Sequence[float] = ()  # one per frame; values are divided by it before colouring
    hover: str = "{y}, {x}"
    texts: Sequence[str] = ()  # one per row, for tooltips


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A colour bar: its title, the colours from lowest to highest value, and texts at some values."""

    title: str
    stops: Sequence[str]
    labels: Mapping[int, str]


class Picture:
    """Base class of objects that notebooks display and that can be written as picture files."""

    def whole(self, *, still: bool = True) -> dict[str, Any]:
        """Return a self-contained Vega-Lite specification; `still` omits tooltips and sliders."""
        raise NotImplementedError

    def write(self, path: str | Path) -> None:
        """Write the picture to a file; the suffix selects the format: .png, .svg or .pdf.

        Raises:
            InputError: the picture cannot be drawn or written.
            ValueError: the suffix is none of these.
        """
        picture = self.picture(Path(path).suffix)
        with refused(f"cannot write {path}"):
            Path(path).write_bytes(picture)

    def picture(self, suffix: str) -> bytes:
        """Return the picture as bytes; `suffix` is .png, .svg or .pdf."""
        return pictures_of([self.whole()], [suffix])[0][0]

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        # A notebook shows the specification, or the SVG if it does not support Vega-Lite 6.
        spec = self.whole(still=False)
        return {"application/vnd.vegalite.v6+json": spec, "image/svg+xml": self.picture(".svg").decode()}


@dataclass(frozen=True, kw_only=True)
class Chart(Picture):
    """A figure. `frames` are the checkpoints of its slider, which starts at the last one; empty without a slider."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    cells: Cells | None = None
    training: Training | None = None
    bar: Bar | None = None
    frames: Sequence[int] = ()
    hover: str = "{w}"  # tooltip template for the position of a point
    height: int = 340
    square: bool = False
    horizontal: bool = False  # swap the axes: values are on the horizontal axis
    legend_title: str = ""
    background: str = ""

    def spec(self, *, width: Any = 640, height: Any = None, still: bool = True) -> Any:
        """Return the Vega-Lite specification; `still` omits tooltips and the slider, and shows the last frame."""
        last = max(0, len(self.frames) - 1)
        rows = rows_of(self)
        spec: dict[str, Any] = {
            "width": self.height - 70 if self.square and width != "container" else width,
            "height": height or self.height - 70,
            "data": {"values": [row for row in rows if row.get("f") in (None, last)] if still else []},
            "transform": self._lookups(),
            "encoding": self._encoding(),
            "layer": [*self._cells(still=still), *self._marks(still=still)],
        }
        if not still and last > 0:
            place = {"input": "range", "min": 0, "max": last, "step": 1, "name": "Checkpoint "}
            spec["params"] = [{"name": "frame", "value": last, "bind": place}]
            spec["transform"].insert(0, {"filter": "!isValid(datum.f) || datum.f == frame"})
        if self.background:
            spec["view"] = {"fill": self.background}
        return spec

    def whole(self, *, still: bool = True) -> dict[str, Any]:
        """Return the Vega-Lite specification with title, data and theme, so that it can be drawn on its own.

        `still` omits tooltips and the slider, and shows the last frame.
        """
        spec = self.spec(still=still)
        spec["data"]["values"] = spec["data"]["values"] or rows_of(self)
        at = [f"Step {self.frames[-1]:,}"] if still and len(self.frames) > 1 else []
        title = {"title": {"text": self.title, "subtitle": at, "subtitleColor": MUTED}}
        # Add one pixel per letter of the longest row label: with a wide font, the labels need more room.
        wider = max(map(len, (self.x.labels or {}).values()), default=0) if self.horizontal else 0
        room = {"padding": {"left": 5 + wider, "right": 5, "top": 5, "bottom": 5}} if wider else {}
        return {"$schema": _SCHEMA, **title, **room, **spec, "config": CONFIG}

    def _axes(self) -> tuple[Axis, Axis]:
        if self.training is None:
            return self.x, self.y
        return replace(self.training.axis(cells=self.cells is not None), grid=self.x.grid), self.y

    def _encoding(self) -> dict[str, Any]:
        across, up = self._axes()
        sides = [encoded(across, "x"), encoded(up, "y")]
        if self.horizontal:
            sides[0]["axis"].pop("tickCount", None)  # show every row label
            sides[0]["axis"]["labelOverlap"] = False
        return dict(zip("yx" if self.horizontal else "xy", sides, strict=True))

    def _lookups(self) -> list[dict[str, Any]]:
        """Return transforms that add to each data row the style of its series and the position of its checkpoint."""
        lookups = []
        if self.series:
            table = [{"k": number, **_common(series)} for number, series in enumerate(self.series)]
            lookups.append({"lookup": "k", "from": {"data": {"values": table}, "key": "k", "fields": [*"scmpzeod"]}})
        if self.training is not None:
            at, edges = self.training.places, self.training.edges
            names = zip(self.training.steps, at, edges, edges[1:], self.training.texts(), strict=False)
            table = [
                {"n": number, "x": x, "w": text, "u": step <= 0}
                | ({"x0": left, "x1": right} if self.cells is not None else {})
                for number, (step, x, left, right, text) in enumerate(names)
            ]
            fields = ["x", "w", "u", *(["x0", "x1"] if self.cells is not None else [])]
            lookups.append({"lookup": "n", "from": {"data": {"values": table}, "key": "n", "fields": fields}})
        if self.series:
            lookups += [{"calculate": each, "as": name} for name, each in _ROW_FIELDS.items()]
        if self._num_unplaced:
            lookups.append({"calculate": "datum.y > 0 ? datum.y : null", "as": "y"})
        return lookups

    @property
    def _num_unplaced(self) -> int:
        """Number of values <= 0 on a log axis. They are not drawn: Vega would draw them at the top, as if largest."""
        return sum(v is not None and v <= 0 for s in self.series for v in s.y) if self.y.log else 0

    def _cells(self, *, still: bool) -> list[dict[str, Any]]:
        if self.cells is None:
            return []
        cells = self.cells
        colors = {"range": cells.scheme} if isinstance(cells.scheme, list) else {"scheme": cells.scheme}
        colors |= {"clamp": True, "interpolate": "rgb"}
        scale = {"domain": list(cells.ends), **({"type": "log"} if cells.log else {}), **colors}
        legend: dict[str, Any] = {"title": None, "gradientThickness": 9, "tickCount": 5, "format": digits(cells.ends)}
        legend |= {"gradientLength": {"expr": "height"}}
        if cells.scale:
            full = cells.scale[-1] if still or len(self.frames) < 2 else f"{json.dumps(list(cells.scale))}[frame]"
            legend = {**legend, "format": None, "labelExpr": f"format(datum.value * {full}, '.2~g')"}
        tip = f"format(datum.z, {NUMBER}) + '\\n' + {phrase(cells.hover)}"
        filled = {"field": "v", "type": "quantitative", "scale": scale, "legend": legend}
        line = {"stroke": "white", "strokeWidth": 1} if self.training is None and len(cells.columns) <= 24 else {}
        rect: dict[str, Any] = {"mark": {"type": "rect", **line}, "encoding": {"fill": filled}}
        if self.training is not None:
            rect["encoding"] |= {"x": {"field": "x0", "type": "quantitative"}, "x2": {"field": "x1"}}
            rect["encoding"] |= {"y": {"field": "y0", "type": "quantitative"}, "y2": {"field": "y1"}}
        rect["transform"] = [{"filter": "isValid(datum.v)"}]
        return [rect if still else hoverable(rect, tip)]

    def _marks(self, *, still: bool) -> list[dict[str, Any]]:
        """Return the Vega-Lite layers of the chart, except its cells, from bottom to top; `still` omits tooltips.

        The order is: divider, intervals, lines, marks, tooltips, labels, notes, colour bar.
        """
        layers: list[dict[str, Any]] = []
        divider = self._axes()[0].divider
        if divider is not None:
            color, width = ("white", 5) if self.cells is not None else (GRID, 6)
            layers.append(rule("x", divider, color, width))
        if self.cells is not None and self.training is not None:
            layers.append(rule("y", 0.5, "white", 3))
        if self.series:
            layers += [*self._intervals(), *self._lines(), *self._points()]
        if not still and any(s.hover for s in self.series):
            layers.append(self._hover_layer())
        if any(s.labels for s in self.series):
            layers.append(LABELS)
        if self._num_unplaced:
            text = f"Not shown on the log axis: {self._num_unplaced} of 0 or below"
            mark = {"type": "text", "text": text, "align": "left", "color": MUTED, "fontSize": 11, "tooltip": None}
            places = {"x": {"value": 2}, "y": {"value": {"expr": "height - 4"}}}
            layers.append({"data": {"values": [{}]}, "mark": mark, "encoding": places})
        return [*layers, *([color_bar(bar.title, bar.labels, bar.stops)] if (bar := self.bar) is not None else [])]

    def _intervals(self) -> list[dict[str, Any]]:
        """Return the layers of bands and error bars, if any point has them: Vega warns about layers without points."""
        at = [(s, x) for s in self.series if s.interval for x, end in zip(s.x, s.low, strict=False) if end is not None]
        bars = {s.interval == "bars" or (self.training is not None and x <= 0) for s, x in at}
        value = "x" if self.horizontal else "y"
        ends = {value: {"field": "l", "type": "quantitative"}, f"{value}2": {"field": "h"}}
        layers = []
        if False in bars:
            mark = {"type": "area", "opacity": 0.16, "tooltip": None, "clip": self.y.ends is not None}
            look = {**ends, "color": self._name_scale("color"), "detail": DETAIL}
            layers.append(layer("datum.e == 'band' && !datum.u", mark, look))
        if True in bars:
            where = "(datum.e == 'bars' || (datum.e && datum.u)) && isValid(datum.l) && isValid(datum.h)"
            mark = {"type": "rule", "tooltip": None, "strokeWidth": 1.2}
            layers.append(layer(where, mark, {**ends, "color": row_field("c")}))
        if self.y.log and any(end is not None and end <= 0 for s in self.series for end in s.low):
            ends = [end for s in self.series for part in (s.y, s.low, s.high) for end in part]
            lowest = min((end for end in ends if end is not None and end > 0), default=1.0)
            inside = f"isValid(datum.l) && datum.h > 0 ? max(datum.l, {lowest}) : null"
            for each in layers:
                each["transform"][:0] = [
                    {"calculate": inside, "as": "l"},
                    {"calculate": "datum.h > 0 ? datum.h : null", "as": "h"},
                ]
        return layers

    def _lines(self) -> list[dict[str, Any]]:
        if not any(s.width for s in self.series):
            return []
        encoding = {"color": self._name_scale("color"), "strokeDash": self._name_scale("dash")}
        encoding |= {"strokeWidth": {"field": "o", "type": "quantitative", "scale": None}}
        line = {"type": "line", "tooltip": None, "clip": self.y.ends is not None}
        return [layer("datum.o", line, {**encoding, "detail": DETAIL, "order": ORDER})]

    def _points(self) -> list[dict[str, Any]]:
        layers = []
        marks = [mark for s in self.series for mark in (s.mark, _untrained_mark(s)) if mark]
        encoding = {
            "color": self._name_scale("color", points=True),
            "shape": self._name_scale("mark") if self._marks_in_legend else row_field("m"),
            "size": row_field("z"),
        }
        for hollow in sorted({mark.endswith("-open") for mark in marks}):
            look = {"filled": not hollow, "strokeWidth": 1.4, **({"fill": "white"} if hollow else {})}
            where = f"datum.m && isValid(datum.y) && indexof(datum.m, '-open') {'>' if hollow else '<'} 0"
            points = layer(where, {"type": "point", "opacity": 1, "tooltip": None, **look}, encoding)
            name = "replace(datum.m, '-open', '')"
            points["transform"].append({"calculate": f"{json.dumps(MARKS)}[{name}] || {name}", "as": "m"})
            layers.append(points)
        return layers

    def _name_scale(self, what: str, *, points: bool = False) -> dict[str, Any]:
        """Return the encoding that gives each series name its colour, dash or mark (`what`), with the legend."""
        if points and not (self.legend_of_marks and any(s.legend for s in self.series)):
            return row_field("c")
        looks = {"color": lambda s: s.color, "dash": lambda s: DASHES[s.dash]}
        look = looks.get(what, lambda s: s.mark.removesuffix("-open"))
        looks = {s.name: look(s) for s in reversed(self.series)}
        names = [*dict.fromkeys(s.name for s in self.series)]
        scale = {"domain": names, "range": [looks[name] for name in names]}
        return {"field": "s", "type": "nominal", "scale": scale, "legend": self._legend()}

    @property
    def legend_of_marks(self) -> bool:
        return not any(s.width for s in self.series if s.legend)

    @property
    def _marks_in_legend(self) -> bool:
        """Whether the legend shows marks, because there are more names than colours."""
        return self.legend_of_marks and len({s.name for s in self.series if s.mark}) > len(COLORS)

    def _legend(self) -> dict[str, Any] | None:
        shown = [*dict.fromkeys(s.name for s in self.series if s.legend)]
        if not shown:
            return None
        pixels = 6.5 * max(map(len, shown)) + 48
        look = {"values": shown, "title": self.legend_title or None, "direction": "horizontal", "symbolOpacity": 1}
        look |= {"orient": "bottom" if self.bar is not None else "top", "columnPadding": 26}  # room for wide fonts
        look |= {} if self._marks_in_legend else {"symbolType": "circle" if self.legend_of_marks else "stroke"}
        look |= {"symbolSize": 70 if self.legend_of_marks else 220}
        return {**look, "columns": {"expr": f"max(1, floor(width / {pixels:.0f}))"}}

    def _hover_layer(self) -> dict[str, Any]:
        """Return a layer that shows the tooltip of the point nearest to the mouse, with a ring around it."""
        interval = f"'\\n95% interval ' + format(datum.l, {NUMBER}) + ' to ' + format(datum.h, {NUMBER})"
        tip = f"(datum.s ? datum.s + '\\n' : '') + format(datum.y, {NUMBER})"
        tip += f" + (isValid(datum.l) && isValid(datum.h) ? {interval} : '')"
        tip += f" + '\\n' + {phrase(self.hover)}" if self.hover else ""
        tip = f"datum.d == 'text' ? datum.t : {tip} + (datum.t ? '\\n' + datum.t : '')"
        near = {"type": "point", "nearest": True, "on": "pointerover", "fields": ["i"], "clear": "pointerout"}
        ring = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
        mark = {"type": "point", "size": 110, "strokeWidth": 1.6, "filled": False}
        target = layer("isValid(datum.y) && datum.d", mark, {"opacity": ring, "color": row_field("c")})
        return {**hoverable(target, tip), "params": [{"name": "near", "select": near}]}


# Vega expressions for each data row: its own colour if it has one, and another mark and size for the untrained model.
_ROW_FIELDS = {"c": "isValid(datum.ci) ? datum.ci : datum.c", "m": "datum.u ? datum.p : datum.m"}
_ROW_FIELDS |= {"z": "datum.u ? 2.6 * datum.z : datum.z"}


def rows_of(chart: Chart) -> list[dict[str, Any]]:
    """Return the cells and points of a chart as data rows.

    The keys of a row are short: k is the series index, i the row index, n the checkpoint index, f the frame
    index. x, y, l(ow) and h(igh) are values. z is the value of a cell, v the value that its colour shows, and y0 and y1
    are its edges. t(ext) is a tooltip text, q the label next to a point, and ci the point's own colour.
    """
    rows = list[dict[str, Any]]()
    cells, several = chart.cells, len(chart.frames) > 1
    for frame, grid in enumerate(cells.values if cells is not None else ()):
        assert cells is not None
        full = cells.scale[frame] if cells.scale else 1
        for down, (row, values) in enumerate(zip(cells.rows, grid, strict=True)):
            common = {"t": cells.texts[down]} if cells.texts else {}
            common |= {"y0": row - 0.5, "y1": row + 0.5} if chart.training else {"f": frame} if several else {}
            for number, (column, value) in enumerate(zip(cells.columns, values, strict=True)):
                cell = {"x": column, "y": row, "z": value, "v": value if value is None else value / full}
                rows.append(cell | common | ({"n": number} if chart.training else {}))
    places = {step: n for n, step in enumerate(chart.training.steps)} if chart.training else {}
    for k, s in enumerate(chart.series):
        table: dict[str, Sequence[Any]] = {"y": s.y, "l": s.low, "h": s.high, "t": s.texts, "ci": s.colors}
        table |= {"n": [places[step] for step in s.x]} if chart.training else {"x": s.x}
        table |= {"f": s.frame if several else (), "q": s.labels}
        table = {name: part for name, part in table.items() if len(part)}
        for values in zip(*table.values(), strict=True):
            rows.append({"k": k, "i": len(rows), **dict(zip(table, values, strict=True))})
    return rows


def _untrained_mark(s: Series) -> str:
    """Return the mark of the point at step 0, the untrained model."""
    return s.mark if not s.width else "line-ew" if s.dash or s.mark == "line-ew" else "diamond"


def _common(s: Series) -> dict[str, Any]:
    """Return the fields that all points of a series share: name, colour, marks, size, interval, width, tooltip."""
    interval = s.interval if s.has_interval else ""
    tells = "" if not s.hover else "text" if s.texts_only else "all"
    values = (s.name, s.color, s.mark, _untrained_mark(s), area(s.size), interval, s.width, tells)
    return dict(zip("scmpzeod", values, strict=True))


@dataclass(frozen=True, kw_only=True)
class Panels(Picture):
    """Charts in a grid, drawn as one picture without interaction."""

    title: str
    charts: Sequence[Chart]
    columns: int = 3
    width: int = 300

    def whole(self, *, still: bool = True) -> dict[str, Any]:
        specs = [chart.spec(width=self.width) for chart in self.charts]
        titles = [{"title": {"text": chart.title, "fontSize": 11}} for chart in self.charts]
        parts = [{**sized(spec, spec), **title} for spec, title in zip(specs, titles, strict=True)]
        own = dict.fromkeys(("color", "fill", "strokeDash", "shape"), "independent")
        content = {"concat": parts, "columns": self.columns, "resolve": {"scale": own, "legend": own}}
        return {"$schema": _SCHEMA, "title": self.title, **content, "config": CONFIG}
