"""What pictures by matplotlib have in common: the canvas, the look of axes, legends, and how they are written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotly.colors import unlabel_rgb

from lit_layers.errors import InputError
from lit_layers.plots.theme import DECADES, GRID, INK, MUTED, colors_of

_DPI = 200


def rgb(stops: list[str], number: int) -> list[tuple[float, ...]]:
    """Returns so many colours along a scale, as matplotlib takes them."""
    return [tuple(part / 255 for part in unlabel_rgb(color)) for color in colors_of(stops, number)]


def canvas(width: float, height: float) -> Any:
    """Returns an empty picture of so many inches, whose parts make room for each other."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white", layout="constrained")


def dress(axes: Any, across: str, up: str) -> None:
    """Gives axes the look of the theme and their titles."""
    axes.set_xlabel(across, fontsize=9, color=MUTED, parse_math=False)
    axes.set_ylabel(up, fontsize=9, color=MUTED, parse_math=False)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#9aa5b0")
    axes.tick_params(which="both", colors=INK, labelsize=8, length=3, color="#9aa5b0")
    axes.tick_params(axis="y", which="both", length=0)


def whole_layers(axes: Any) -> None:
    """Has ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plain_log(axes: Any) -> None:
    """Numbers as they are, also between powers of ten: most curves stay within one. Over many, matplotlib's powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    low, high = axes.get_ylim()
    if high / low > 10**DECADES:
        return
    axes.yaxis.set_minor_formatter(NullFormatter())
    if high / low < 10:
        axes.yaxis.set_major_locator(LogLocator(subs="all"))
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())


def legend_beside(axes: Any, handles: Sequence[Any] | None = None, texts: Sequence[str] = ()) -> None:
    """Writes a legend to the right of the axes."""
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "frameon": False, "fontsize": 8, "labelcolor": INK}
    legend = axes.legend(handles, texts, **place) if handles is not None else axes.legend(**place)
    for text in legend.get_texts():
        text.set_parse_math(False)


def save(fig: Any, path: Path, title: str) -> None:
    """Writes a picture, .png or .svg, with a title at its top left.

    Raises:
        InputError: where it cannot be written.
        ValueError: for another suffix.
    """
    from matplotlib import rc_context

    kind = path.suffix.removeprefix(".")
    if kind not in ("png", "svg"):
        raise ValueError(f"expected a picture that ends in .png or .svg, got {path.name}")
    fig.suptitle(title, fontsize=10.5, color=INK, x=0.01, ha="left", parse_math=False)
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lit_layers"}):
            # no date: equal numbers give equal files
            fig.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else {})
    except OSError as error:
        raise InputError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from error
