"""The gallery shows every kind of figure as its code draws it."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from lit_layers import plots
from lit_layers.errors import InputError
from lit_layers.figures import chart, maps, profiles, scatter, training, variants
from lit_layers.figures.chart import Chart
from tests.support import gallery

FIGURES = {name for file in (chart, maps, profiles, scatter, training, variants) for name in file.__all__}
FIGURES -= {"Chart", "Panels", "Scatter", "Series"}
AGAIN = "to draw the pictures again: python -m tests.support.gallery"


def test_every_kind_of_figure_is_on_the_page_with_its_line_and_its_picture():
    lines, page = gallery.lines(), gallery.PAGE.read_text()
    assert sorted(lines) == sorted(FIGURES)
    assert page.count("\n### ") == len(lines)
    for name, line in lines.items():
        assert line.startswith(f"plots.{name}(")
        assert page.count(f"](images/gallery/{name}.svg)") == 1


def test_a_line_of_the_page_draws_its_picture():
    for name, line in gallery.lines().items():
        chart = gallery.drawn(line)
        assert isinstance(chart, Chart), name
        picture = gallery.picture_of(name).read_text()
        texts = re.findall(r"<text[^>]*>([^<]*)", picture)
        assert chart.title in texts, (name, AGAIN)
        titles = {axis.title for axis in (chart.x, chart.y) if axis.title}
        assert titles - {"Layer"} <= {*texts}, (name, AGAIN)
        assert chart.series or chart.cells is not None, name


def test_suspect_checkpoints_and_models_are_drawn_only_if_allowed():
    tables: dict[str, Any] = {key: each for key, each in gallery.tables().items() if isinstance(each, pd.DataFrame)}
    suspect = {key: table.assign(audit="suspect: no weights") for key, table in tables.items()}
    for name, line in gallery.lines().items():
        if name not in ("scatter_plot", "training_curves"):
            with pytest.raises(InputError, match="no curve is drawn through the suspect (step|model)"):
                eval(line, {"plots": plots, **suspect})
            allowing = SimpleNamespace(**{name: partial(getattr(plots, name), allow_suspect=True)})
            assert isinstance(eval(line, {"plots": allowing, **suspect}), Chart), name
