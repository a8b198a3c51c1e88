"""A layer that a checkpoint has no value of: its line in a PNG or SVG picture breaks there, as on the page."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from lit_layers import plots, records
from lit_layers.plots import curve_pictures
from tests.support.layer_results import LAYERS, layer_results

GAP = 2


@pytest.fixture
def drawn(monkeypatch):
    """The axes of pictures instead of files."""
    axes = []
    monkeypatch.setattr(curve_pictures, "save", lambda fig, path, title: axes.append(fig.axes[0]))
    return axes


def table(steps, gaps: dict[int | str, list[int]], **runs: int):
    """Probe scores of checkpoints or models, without those of some layers, random labels among them."""
    found = [layer_results("probe/topics", step=step, layers=LAYERS) for step in steps]
    found += [layer_results("probe/topics", step=None, run=f"lab/{name}", layers=depth) for name, depth in runs.items()]
    for each in found:
        missing = gaps.get(each.run if each.step is None else each.step, [])
        each.records[:] = [record for record in each.records if record.layer not in missing]
    return records.frame(found)


def line(axes: Any, name: str) -> Any:
    (found,) = [line for line in axes.lines if line.get_label() == name]
    return found


def pieces(line: Any) -> list[list[float]]:
    """The layers of each piece of a line that is drawn in one go."""
    found, there = [[]], False
    for vertices, code in line.get_path().iter_segments(remove_nans=True):
        if code == line.get_path().MOVETO and there:
            found.append([])
        there = True
        found[-1].append(float(vertices[-2]))
    return found


def test_a_line_and_its_band_break_at_a_layer_that_only_other_checkpoints_have(drawn):
    frame = table([0, 64], {64: [GAP]})
    plots.write_layer_curves(frame, Path("a.png"), "accuracy", controls=["random_labels"])
    (axes,) = drawn
    whole, broken = list(range(LAYERS + 1)), [list(range(GAP)), list(range(GAP + 1, LAYERS + 1))]
    assert pieces(line(axes, "step 0")) == [whole]
    assert pieces(line(axes, "step 64")) == broken
    assert [len(band.get_paths()) for band in axes.collections] == [1, 2]
    page: Any = plots.layer_profile(frame, "accuracy").data
    assert [trace.y[GAP] for trace in page if len(trace.x) == len(whole)].count(None) == 1, "as the page's figure"
    dashed = [each for each in axes.lines if each.get_linestyle() != "-" and len(each.get_xdata()) > 2]
    assert [pieces(each) for each in dashed] == [broken], "what is compared with"


def test_a_last_layer_that_is_missing_does_not_stretch_the_others(drawn):
    plots.write_layer_curves(table([0, 64], {0: [LAYERS]}), Path("a.png"), "accuracy")
    (axes,) = drawn
    assert axes.get_xlabel() == "layer"
    assert pieces(line(axes, "step 0")) == [list(range(LAYERS))]


def test_models_that_are_not_equally_deep_break_at_their_own_layers(drawn):
    frame = table([], {"lab/large": [GAP]}, small=2, large=4, other=4)
    plots.write_layer_curves(frame, Path("a.png"), "accuracy")
    (axes,) = drawn
    assert pieces(line(axes, "small")) == [[0.0, 50.0, 100.0]]
    assert pieces(line(axes, "large")) == [[0.0, 25.0], [75.0, 100.0]]
    assert math.isnan(line(axes, "large").get_ydata()[GAP])
