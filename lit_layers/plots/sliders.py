"""A slider over the checkpoints of a run."""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from lit_layers.plots.theme import ACCENT, INK

FRAMES = 30  # places of a slider


def spread(numbers: list[int], most: int) -> list[int]:
    """Returns at most so many of the numbers, evenly spread, the first and the last among them."""
    if len(numbers) <= most:
        return numbers
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]


def add_slider(
    fig: go.Figure,
    steps: list[int],
    data: Callable[[int], list[dict[str, Any]]],
    layout: Callable[[int], dict[str, Any]] = lambda step: {},
) -> None:
    """Adds a frame for each step, and a slider over them that is at the last one to begin with."""
    if len(steps) < 2:
        return
    fig.frames = [{"name": str(step), "data": data(step), "layout": layout(step)} for step in steps]
    moves = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    slider = {
        "active": len(steps) - 1,
        "steps": [{"label": f"{step:,}", "method": "animate", "args": [[str(step)], moves]} for step in steps],
        "currentvalue": {"prefix": "Step ", "font": {"size": 13, "color": INK}, "xanchor": "left"},
        "font": {"size": 1, "color": "rgba(0,0,0,0)"},  # the labels would overlap; the current one is shown
        "ticklen": 0,
        "minorticklen": 0,
        "pad": {"t": 34, "b": 0, "l": 0, "r": 0},
        "len": 1.0,
        "x": 0,
        "bgcolor": "#b9cbe0",
        "activebgcolor": ACCENT,
        "bordercolor": "#b9cbe0",
        "borderwidth": 1,
    }
    fig.update_layout(sliders=[slider])
