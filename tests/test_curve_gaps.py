"""A layer that a checkpoint has no value of: its line, and the band around it, break there."""

import re

from lit_layers import plots, records
from tests.support.charts import line, svgs
from tests.support.layer_results import LAYERS, layer_results

GAP = 2


def table(steps, gaps: dict[int | str, list[int]], **runs: int):
    """Probe scores of checkpoints or models, without those of some layers, random labels among them."""
    found = [layer_results("probe/topics", step=step, layers=LAYERS) for step in steps]
    found += [layer_results("probe/topics", step=None, run=f"lab/{name}", layers=depth) for name, depth in runs.items()]
    for each in found:
        missing = gaps.get(each.run if each.step is None else each.step, [])
        each.records[:] = [record for record in each.records if record.layer not in missing]
    return records.frame(found)


def pieces(picture: str, mark: str, color: str) -> int:
    """Of how many pieces a line or band of this colour is in a picture."""
    side = "stroke" if mark == "line" else "fill"
    groups = re.findall(rf"mark-{mark} role-mark[^>]*>(.*?)</g>", picture, re.S)
    paths = [path for group in groups for path in re.findall(r"<path[^>]*>", group) if f'{side}="{color}"' in path]
    return sum(re.findall(r' d="([^"]*)"', path)[0].count("M") for path in paths)


def test_a_line_and_its_band_break_at_a_layer_that_only_others_have():
    of_models = table([], {"lab/large": [GAP]}, small=2, large=4, other=4)
    charts = [
        plots.layer_profile(table([0, 64], {64: [GAP]}), "accuracy", controls=["random_labels"]),
        plots.layer_profile(table([0, 64], {0: [LAYERS]}), "accuracy"),
        plots.layer_profile(of_models, "accuracy"),
    ]
    inner, last, models = zip(charts, svgs(charts), strict=True)

    chart, picture = inner
    whole, broken, control = (line(chart, name) for name in ("step 0", "step 64", "random labels"))
    assert whole.x == broken.x == control.x == list(range(LAYERS + 1))
    assert [series.y[GAP] is None for series in (whole, broken, control)] == [False, True, True]
    for mark in ("line", "area"):
        assert (pieces(picture, mark, whole.color), pieces(picture, mark, broken.color)) == (1, 2), mark

    chart, picture = last
    assert [line(chart, name).y[-1] is None for name in ("step 0", "step 64")] == [True, False]
    assert pieces(picture, "line", line(chart, "step 0").color) == 1, "a last layer does not stretch the others"

    chart, picture = models
    small, large = line(chart, "small"), line(chart, "large")
    assert (small.x, [y is None for y in small.y]) == ([0, 50, 100], [False] * 3)
    assert (large.x, [y is None for y in large.y]) == ([0, 25, 50, 75, 100], [False, False, True, False, False])
    assert pieces(picture, "line", large.color) == 2
