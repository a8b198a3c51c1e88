"""The look of every figure: dark text on white, thin grid, colours that colour-blind readers tell apart."""

import math
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from lit_layers.plots.labels import escape

INK, MUTED, GRID = "#1c2530", "#5b6774", "#e6eaee"
ACCENT = "#1f5fa8"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Okabe and Ito's colours, the light ones darkened to be read on white.
COLORS = ["#0b62a4", "#c4510a", "#00805c", "#a83279", "#8a6100", "#3b3f99", "#4d5761"]
# After viridis and plasma, without their light ends, which vanish on white.
DEPTH = ["#440154", "#433d84", "#2f6b8e", "#1f958b", "#3fae5a", "#86bc25"]
TIME = ["#0d0887", "#5b01a5", "#9a179b", "#cb4678", "#e8704a", "#f0921f"]
DIVERGING = [[0.0, "#a8480a"], [0.25, "#e3a46f"], [0.5, "#f7f7f5"], [0.75, "#7aaed6"], [1.0, "#0b4f8a"]]

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 12, "color": INK},
        "title": {"font": {"size": 15}, "x": 0, "xref": "paper", "xanchor": "left", "y": 0.98, "yanchor": "top"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": COLORS,
        "margin": {"l": 52, "r": 14, "t": 64, "b": 46},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "white", "bordercolor": "#c4ccd4", "font": {"color": INK, "size": 12}},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.01,
            "yanchor": "bottom",
            "font": {"size": 11},
            "bgcolor": "rgba(0,0,0,0)",
            "itemwidth": 30,
        },
        "xaxis": {
            "gridcolor": GRID,
            "zeroline": False,
            "linecolor": "#9aa5b0",
            "ticks": "outside",
            "ticklen": 4,
            "tickcolor": "#9aa5b0",
            "title": {"font": {"color": MUTED}},
            "automargin": True,
        },
        "yaxis": {
            "gridcolor": GRID,
            "zeroline": False,
            "automargin": True,
            "nticks": 6,
            "exponentformat": "power",
            "minexponent": 4,
            "title": {"font": {"color": MUTED}},
        },
        "height": 340,
    }
)


# For figures with a colour bar above the plot.
LEGEND_BELOW = {"legend": {"y": -0.3, "yanchor": "top"}, "height": 380}
DASHES = ("dash", "dot", "dashdot")
DECADES = 4  # more tens than these have no room for numbers between them


def figure(title: str, traces: list[dict[str, Any]], *, unit: str = "", log: bool = False, **layout: Any) -> go.Figure:
    """Returns a figure of scatter traces (or of what their `type` says) in the theme."""
    yaxis = {"title": {"text": escape(unit)}, **layout.pop("yaxis", {})}
    if log:
        values = [math.log10(y) for trace in traces for y in trace["y"] if y is not None and y > 0]
        yaxis |= {"type": "log", **log_ticks(*yaxis.get("range", (min(values, default=0), max(values, default=0))))}
    layout = {"template": TEMPLATE, "title": {"text": escape(title)}, "yaxis": yaxis, **layout}
    return go.Figure([{"type": "scatter", **trace} for trace in traces], layout)


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Returns ticks between two powers of ten: 2 and 5 between tens; over many tens some of these alone.

    Without a ten in sight they are plotly's own, which are whole numbers.
    """
    if high - low > DECADES:
        return {"dtick": math.ceil((high - low) / 6), "exponentformat": "power"}
    return {"exponentformat": "none", **({"dtick": "D2"} if math.ceil(low) <= math.floor(high) else {})}


def log_colors(values: Iterable[float]) -> tuple[list[float], list[str]]:
    """Returns places of ticks, and their texts, for colours of log10 of values."""
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    low, high = (min(logs), max(logs)) if logs else (0.0, 1.0)
    places = [low + (high - low) * part / 4 for part in range(5 if high > low else 1)]
    return places, [f"{10**place:.3g}" for place in places]


def color_scale(stops: list[str]) -> list[list]:
    """Returns evenly spaced stops as plotly's colour scale."""
    return [[index / (len(stops) - 1), color] for index, color in enumerate(stops)]


def colors_of(stops: list[str], count: int) -> list[str]:
    """Returns `count` colours along a scale, the last at its end."""
    places = [index / max(count - 1, 1) for index in range(count)]
    return [str(color) for color in sample_colorscale(color_scale(stops), places)]


def bar_trace(title: str, stops: list[str], ticks: dict[int, str]) -> dict[str, Any]:
    """Returns a trace without points that carries a colour bar from the first tick to the last.

    The bar is thin and lies above the plot: it costs no width on a narrow screen.
    """
    bar = {
        "orientation": "h",
        "x": 1,
        "xanchor": "right",
        "y": 0.999,  # at 1 plotly pushes the title out of the figure
        "yanchor": "bottom",
        "len": 0.42,
        "thickness": 7,
        "tickvals": list(ticks),
        "ticktext": list(ticks.values()),
        "tickfont": {"size": 10, "color": MUTED},
        "title": {"text": title, "side": "top", "font": {"size": 11, "color": MUTED}},
        "outlinewidth": 0,
        "xpad": 0,
        "ypad": 4,
        "ticks": "",
    }
    scale = {"colorscale": color_scale(stops), "cmin": min(ticks), "cmax": max(ticks), "color": [min(ticks)]}
    marker = {**scale, "showscale": True, "colorbar": bar}
    return {"x": [None], "y": [None], "mode": "markers", "showlegend": False, "hoverinfo": "skip", "marker": marker}


def translucent(color: str, alpha: float) -> str:
    """Returns `#rrggbb` with an opacity."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def rounded(numbers: Iterable[float | None], digits: int = 5) -> list[float | None]:
    """Returns plain floats of so many digits, None for what cannot be drawn: pages stay small."""
    return [float(f"{x:.{digits}g}") if x is not None and math.isfinite(x) else None for x in numbers]
