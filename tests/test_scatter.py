"""Scatter plots: colours, lines, and names that do not overlap."""

import itertools

import numpy as np
import pytest

from lit_layers.figures.scatter import Scatter, labelled, scatter_plot
from lit_layers.functional.correlation import fit_line


def content(n: int = 20, **more) -> Scatter:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(n)
    y = x + 0.5 * rng.standard_normal(n)
    names = [f"model-{number}" for number in range(n)]
    told = {"names": names, "x_title": "Metric", "y_title": "Score", **more}
    return Scatter(x=x.tolist(), y=y.tolist(), **told)


def test_the_line_is_the_least_squares_line_and_lies_in_its_band() -> None:
    one = content()
    at, middle, low, high = one.line()
    fitted = fit_line(one.x, one.y)
    assert middle[0] == pytest.approx(fitted.intercept + fitted.slope * at[0])
    assert all(a < b < c for a, b, c in zip(low, middle, high, strict=True))
    widths = [c - a for a, c in zip(low, high, strict=True)]
    assert widths.index(min(widths)) not in (0, len(widths) - 1), "narrowest at the mean, not at an end"


def test_equal_values_of_x_have_no_line_and_are_drawn_all_the_same() -> None:
    flat = Scatter(x=[1, 1, 1], y=[1, 2, 3], names=["a", "b", "c"], x_title="x", y_title="y")
    assert flat.line() is None
    (points,) = scatter_plot(flat).series
    assert (points.mark, points.width, points.y) == ("circle", 0, [1, 2, 3])


def test_numbers_have_a_colour_scale_and_words_a_colour_each() -> None:
    numbers = content(4, groups=[3, 1, 2, 1])
    assert numbers.kinds() == [1, 2, 3]
    assert numbers.colors()[1] == numbers.colors()[3] == "#440154"
    words = content(4, groups=["b", "a", None, "b"])
    assert words.kinds() == ["a", "b"]
    assert len(set(words.colors())) == 3
    many = content(20, groups=[f"family {n}" for n in range(10)] * 2)
    assert (many.kinds(), len(set(many.colors()))) == ([], 1), "more words than colours are drawn alike"
    (points,) = [series for series in scatter_plot(many).series if series.mark]
    assert len(points.x) == 20


def test_few_groups_are_in_the_legend_and_many_numbers_on_a_bar() -> None:
    few = scatter_plot(content(6, groups=[1, 2, 3] * 2))
    assert [series.name for series in few.series if series.legend] == ["1", "2", "3"]
    many = scatter_plot(content(20, groups=[2**n for n in range(10)] * 2))
    assert not any(series.legend for series in many.series)
    assert list(many.bar.labels.values()) == ["1", "16", "512"]


def test_hover_has_the_name_and_all_lines() -> None:
    fig = scatter_plot(content(3, names=["a<b", "c", "d"], hover=[["width: 1 < 2"], ["x"], ["y"]]))
    assert fig.series[-1].texts[0] == "a<b\nwidth: 1 < 2"
    assert fig.series[-1].texts_only, "and no coordinates behind them"


@pytest.mark.parametrize("n", [5, 80])
def test_names_touch_no_point_no_other_name_and_not_the_edge(n) -> None:
    one, (width, height) = content(n), (560, 400)
    (left, right), (low, high) = one.limits()
    x = (np.array(one.x) - left) / (right - left) * width
    y = (np.array(one.y) - low) / (high - low) * height
    names = zip(x, y, one.names, labelled(one, width, height), strict=True)
    boxes = [(a + 8, b - 6, a + 8 + 6 * len(name), b + 6) for a, b, name, is_shown in names if is_shown]
    assert len(boxes) >= min(n, 3)
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for box in boxes:
        assert box[2] <= width
        assert not ((box[0] < x) & (x < box[2]) & (box[1] < y) & (y < box[3])).any()
    assert all(labelled(content(5), 1100, 600)), "where there is room every model is named"
