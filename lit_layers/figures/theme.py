"""The look of every figure: dark text on white, thin grid, colours that colour-blind readers tell apart."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

INK, MUTED, GRID, EDGE = "#1c2530", "#5b6774", "#e6eaee", "#9aa5b0"
ACCENT, MISSING = "#1f5fa8", "#d5dae0"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Okabe and Ito's colours, the light ones darkened to be read on white.
COLORS = ["#0b62a4", "#c4510a", "#00805c", "#a83279", "#8a6100", "#3b3f99", "#4d5761"]
# After viridis and plasma, without their light ends, which vanish on white.
DEPTH = ["#440154", "#433d84", "#2f6b8e", "#1f958b", "#3fae5a", "#86bc25"]
TIME = ["#0d0887", "#5b01a5", "#9a179b", "#cb4678", "#e8704a", "#f0921f"]
SIZES = ["#a6c4e4", "#5b92c9", "#1f5fa8", "#0a2f5c"]  # few rows to many
DIVERGING = ["#a8480a", "#e3a46f", "#f7f7f5", "#7aaed6", "#0b4f8a"]
DASHES = {"": [1, 0], "dash": [6, 4], "dot": [2, 3], "dashdot": [7, 3, 2, 3]}
DASHED = ("dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up")  # of the first models that there are colours for, the next...


def _star(points: int, inner: float) -> str:
    """An SVG path of a star with so many points, within the unit circle."""
    angles = [math.pi * index / points for index in range(2 * points)]
    sizes = itertools.cycle((0.9, inner))
    corners = [(size * math.sin(a), -size * math.cos(a)) for a, size in zip(angles, sizes, strict=False)]
    return "M" + "L".join(f"{x:.3f},{y:.3f}" for x, y in corners) + "Z"


# What Vega has no symbol for, as SVG paths.
MARKS = {"star": _star(5, 0.4), "hexagon": _star(3, 0.9), "hexagram": _star(6, 0.5)}
MARKS |= {
    "x": "M-.7,-.4L-.4,-.7L0,-.3L.4,-.7L.7,-.4L.3,0L.7,.4L.4,.7L0,.3L-.4,.7L-.7,.4L-.3,0Z",
    "line-ew": "M-1,-.14L1,-.14L1,.14L-1,.14Z",
}
MARKS |= {"ring": "M0,-1A1,1,0,1,1,0,1A1,1,0,1,1,0,-1ZM0,-.7A.7,.7,0,1,0,0,.7A.7,.7,0,1,0,0,-.7Z"}
MARKS |= {"line-ns": "M-.1,-1L.1,-1L.1,1L-.1,1Z"}

_AXIS = {"gridColor": GRID, "domainColor": EDGE, "tickColor": EDGE, "labelColor": INK, "titleColor": MUTED}
_AXIS |= {"titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12, "labelFlush": False}
CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": "white",
    "aria": False,
    "view": {"stroke": None},
    "axis": _AXIS,
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6, "titlePadding": 8},
    "axisX": {"grid": True, "tickSize": 4},
    "title": {"anchor": "start", "color": INK, "fontSize": 13, "fontWeight": 600, "offset": 8},
    "legend": {"labelColor": INK, "titleColor": MUTED, "titleFontWeight": "normal", "labelFontSize": 11}
    | {"titleFontSize": 11, "labelLimit": 320, "symbolStrokeWidth": 2, "gradientStrokeWidth": 0},
    "line": {"strokeCap": "round", "strokeJoin": "round"},
}


def colors_of(stops: Sequence[str], count: int) -> list[str]:
    """Returns `count` colours along a scale, the last at its end."""
    colors = []
    for index in range(count):
        place = index / max(count - 1, 1) * (len(stops) - 1)
        left = min(int(place), len(stops) - 2)
        pairs = zip(_parts(stops[left]), _parts(stops[left + 1]), strict=True)
        colors.append("#" + "".join(f"{round(a + (place - left) * (b - a)):02x}" for a, b in pairs))
    return colors


def symbol(mark: str) -> str:
    """Returns what Vega draws a mark as, hollow or not."""
    name = mark.removesuffix("-open")
    return MARKS.get(name, name)


def rounded(numbers: Iterable[float | None], digits: int = 5) -> list[float | None]:
    """Returns plain floats of so many digits, None for what cannot be drawn: pages stay small."""
    return [float(f"{x:.{digits}g}") if x is not None and math.isfinite(x) else None for x in numbers]


def spread(numbers: Sequence[Any], most: int) -> list[Any]:
    """Returns at most so many of the numbers, evenly spread, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]


def _parts(color: str) -> list[int]:
    return [int(color[place : place + 2], 16) for place in (1, 3, 5)]
