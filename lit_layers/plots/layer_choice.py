"""Which layer is enough, as a picture: the score of each layer, over depth and over the time it takes to get there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.plots.theme import ACCENT, GRID, INK, MUTED

_INCHES, _DPI = (9.6, 4.2), 200
_PICK, _AXIS = "#c2410c", "#9aa5b0"
_NUMBERED = 13  # layers at most of which each has its number beside it


@dataclass(frozen=True, kw_only=True)
class LayerScores:
    """What is drawn: per layer a score with its interval, and seconds where they were measured."""

    title: str
    score: str  # name and part, such as "validation accuracy"
    values: Mapping[int, tuple[float, float, float]]  # layer -> value, low, high
    chosen: int
    baseline: float
    baseline_name: str
    shares: Mapping[int, float]  # of resamples that choose a layer
    seconds: Mapping[int, float] | None = None
    timed: str = "one input"  # what takes so long


def write_layer_scores(content: LayerScores, paths: Sequence[Path]) -> None:
    """Writes the picture once for each path, as its suffix says: .png or .svg.

    Raises:
        InputError: where it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no global state, no display
    from matplotlib.ticker import MaxNLocator

    fig = Figure(figsize=_INCHES, dpi=_DPI, facecolor="white")
    over_depth = fig.add_subplot(1, 1 if content.seconds is None else 2, 1)
    _scores(over_depth, content, {layer: float(layer) for layer in content.values})
    over_depth.set_title(_choice(content), loc="left", fontsize=8, color=_PICK)
    over_depth.set_xlabel("layer", fontsize=9, color=MUTED)
    over_depth.set_ylabel(content.score, fontsize=9, color=MUTED, parse_math=False)
    over_depth.xaxis.set_major_locator(MaxNLocator(integer=True))
    if content.seconds is not None:
        places = {layer: 1e3 * seconds for layer, seconds in content.seconds.items()}
        over_time = fig.add_subplot(1, 2, 2, sharey=over_depth)
        _scores(over_time, content, places)
        _number(over_time, content, places)
        over_time.set_title("shaded: 95% interval over the rows", loc="right", fontsize=8, color=MUTED)
        over_time.set_xlabel(f"milliseconds to the layer, {content.timed}", fontsize=9, color=MUTED)
        over_time.set_xlim(0, 1.06 * max(places.values()))
    fig.suptitle(content.title, fontsize=10.5, color=INK, x=0.01, ha="left", parse_math=False)
    fig.tight_layout()
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lit_layers"}):
            for path in paths:
                fig.savefig(path, format=path.suffix.removeprefix("."), metadata=_undated(path))
    except OSError as error:
        raise InputError(f"cannot write {paths[0].parent}: {(error.strerror or str(error)).lower()}") from error


def _choice(content: LayerScores) -> str:
    share = content.shares.get(content.chosen)
    return f"\u25cb layer {content.chosen}" + ("" if share is None else f", chosen in {share:.0%} of resamples")


def _scores(axes: Any, content: LayerScores, places: Mapping[int, float]) -> None:
    layers = sorted(content.values)
    at = [places[layer] for layer in layers]
    value, low, high = zip(*(content.values[layer] for layer in layers), strict=True)
    axes.fill_between(at, low, high, color=ACCENT, alpha=0.15, linewidth=0)
    axes.plot(at, value, color=ACCENT, linewidth=1.5, marker="o", markersize=4)
    axes.axhline(content.baseline, color=MUTED, linewidth=1, linestyle="--")
    axes.annotate(
        content.baseline_name,
        (0, content.baseline),
        xycoords=("axes fraction", "data"),
        xytext=(3, -3),
        textcoords="offset points",
        va="top",
        fontsize=7.5,
        color=MUTED,
    )
    chosen = content.chosen
    axes.plot([places[chosen]], [content.values[chosen][0]], marker="o", markersize=10, color=_PICK, fillstyle="none")
    axes.margins(x=0.06, y=0.08)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_AXIS)
    axes.tick_params(colors=INK, labelsize=8, length=3, color=_AXIS)


def _number(axes: Any, content: LayerScores, places: Mapping[int, float]) -> None:
    """Layers where the axis does not count them: all, or of many the first, the chosen and the last."""
    layers = sorted(content.values)
    for layer in layers if len(layers) <= _NUMBERED else {layers[0], content.chosen, layers[-1]}:
        at = (places[layer], content.values[layer][0])
        color = _PICK if layer == content.chosen else MUTED
        axes.annotate(str(layer), at, (-5, 5), textcoords="offset points", ha="right", fontsize=7.5, color=color)


def _undated(path: Path) -> dict[str, Any]:
    """No date: equal numbers give equal files."""
    return {"Date": None} if path.suffix == ".svg" else {}
