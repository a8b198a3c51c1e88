"""Figures as PNG pictures, drawn by matplotlib: no browser, no display, no network."""

from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.plots.scatter import Scatter, label_places, label_step
from lit_layers.plots.theme import ACCENT, GRID, INK, MUTED

_INCHES, _DPI = (7.2, 5.0), 200
_AXES = (0.1, 0.115, 0.87, 0.76)  # left, bottom, width, height, as shares of the picture
_TEXT = 7.5
_LISTED = 7


def write_scatter(content: Scatter, path: Path) -> None:
    """Writes a scatter plot with its line, band and names as a PNG of 1440 x 1000.

    Raises:
        InputError: where it cannot be written.
    """
    from matplotlib.figure import Figure  # half a second to import; without pyplot it has no global state

    fig = Figure(figsize=_INCHES, dpi=_DPI, facecolor="white")
    axes = fig.add_axes(_AXES)
    _frame(axes, content)
    if (line := content.line()) is not None:
        at, middle, low, high = line
        axes.fill_between(at, low, high, color=ACCENT, alpha=0.12, linewidth=0)
        axes.plot(at, middle, color=ACCENT, linewidth=1.5)
    if content.path:
        axes.plot(content.x, content.y, color="#c4ccd4", linewidth=1.2)
    axes.scatter(content.x, content.y, s=30, c=content.colors(), edgecolors="white", linewidths=0.7, zorder=3)
    _names(axes, content)
    _legend(axes, content)
    fig.text(_AXES[0], 0.972, content.title, fontsize=10.5, color=INK, va="top", ha="left", parse_math=False)
    try:
        fig.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from error


def _frame(axes: Any, content: Scatter) -> None:
    (left, right), (low, high) = content.limits()
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#9aa5b0")
    axes.tick_params(colors=INK, labelsize=8, length=3, color="#9aa5b0")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(content.x_title, fontsize=9, color=MUTED, parse_math=False)
    axes.set_ylabel(content.y_title, fontsize=9, color=MUTED, parse_math=False)


def _names(axes: Any, content: Scatter) -> None:
    width, height = (inches * 72 * share for inches, share in zip(_INCHES, _AXES[2:], strict=True))
    places = label_places(content, width, height, size=_TEXT)
    for x, y, name, place in zip(content.x, content.y, content.names, places, strict=True):
        if place is None:
            continue
        across, up = label_step(place)
        gap = 3.2 if across and up else 4.5
        axes.annotate(
            name,
            (x, y),
            xytext=(across * gap, up * gap),
            textcoords="offset points",
            ha={-1: "right", 0: "center", 1: "left"}[across],
            va={-1: "top", 0: "center", 1: "bottom"}[up],
            fontsize=_TEXT,
            color=INK,
            parse_math=False,
        )


def _legend(axes: Any, content: Scatter) -> None:
    """The groups above the plot; of many on a scale the first, one in the middle and the last."""
    from matplotlib.lines import Line2D

    kinds, colors, groups = content.kinds(), content.colors(), list(content.groups or [])
    if len(kinds) < 2:
        return
    shown = kinds
    if len(kinds) > _LISTED:
        places = range(0, len(kinds), -(-len(kinds) // _LISTED))
        shown = [kinds[number] for number in sorted({*places, len(kinds) - 1})]
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=5.5, color=colors[groups.index(kind)], label=_text(kind))
        for kind in shown
    ]
    if handles:
        name = Line2D([], [], linestyle="", label=content.group_title)
        legend = axes.legend(
            handles=[name, *handles],
            loc="lower left",
            bbox_to_anchor=(-0.06, 1.0),
            ncols=len(handles) + 1,
            frameon=False,
            fontsize=8,
            handletextpad=0.1,
            columnspacing=1.2,
            borderaxespad=0.1,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
            text.set_color(MUTED)


def _text(kind: Any) -> str:
    return f"{kind:g}" if isinstance(kind, float) else str(kind)
