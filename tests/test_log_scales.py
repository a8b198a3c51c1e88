"""Figures of numbers over many decades: logarithmic axes and colours, and readable ticks."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from lit_layers import plots, records
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.theme import Axis
from lit_layers.functional.block_schedules import variants
from lit_layers.records import Measurement, Record
from tests.support.charts import svg_texts, svgs
from tests.support.written import measured

LAYERS, HIGHEST = 6, 1e43
LENS, TASK = "logit_lens_perplexity", "task_perplexity"


def lens(step: int | None) -> Measurement:
    values = [HIGHEST ** (1 - layer / (LAYERS + 1)) for layer in range(LAYERS + 1)]
    return measured("lens", [Record(metric=LENS, value=value, layer=n) for n, value in enumerate(values)], step=step)


def task(step: int | None) -> Measurement:
    rows = []
    for index, variant in enumerate(variants(LAYERS, middles=[1, 3, 5], seeds=(0,), loops=(2, 3))):
        tags = {name: value for name, value in variant.tags.items() if name != "schedule"}
        rows.append(Record(metric=TASK, value=HIGHEST ** ((index + 1) / 30), layer=variant.block, tags=tags))
    rows.append(Record(metric=TASK, value=HIGHEST, tags={"variant": "custom", "schedule": "1 1 1"}))
    return measured("intervene/lambada", rows, step=step)


@pytest.fixture(scope="module")
def step_frame() -> pd.DataFrame:
    return records.frame(make(step) for make in (lens, task) for step in (1, 8, 64))


@pytest.fixture(scope="module")
def models() -> pd.DataFrame:
    return records.frame([lens(None), task(None)])


def test_every_curve_of_perplexities_has_a_log_axis(step_frame, models):
    scalars = [{"step": n, "validation/perplexity": 10.0 ** (43 - n)} for n in range(1, 43)]
    figures = {
        "emergence_curves": plots.emergence_curves(step_frame, LENS),
        "layer_profile": plots.layer_profile(step_frame, LENS),
        "layer_profile_of_models": plots.layer_profile(models, LENS),
        "variant_curves": plots.variant_curves(step_frame, TASK),
        "variant_curves_of_blocks": plots.variant_curves(step_frame, TASK, blocks=True),
        "models_by_middle": plots.models_by_middle(models, TASK, variant="skip"),
        "training_curves": plots.training_curves(scalars, ["validation/perplexity"]),
    }
    for name, fig in figures.items():
        assert fig.spec()["encoding"]["y"]["scale"]["type"] == "log", name
    assert plots.models_in_rows(models, TASK).spec()["encoding"]["x"]["scale"]["type"] == "log"


def test_a_log_axis_has_a_few_numbers_to_read_it_by():
    ratios = (1.00001, 2.0, 12.0, 1e40)
    series = [Series(x=[0, 1], y=[3.0, 3.0 * ratio], width=2) for ratio in ratios]
    pictures = svgs(Chart(title="", x=Axis(), y=Axis(log=True), series=[one]) for one in series)
    for ratio, texts in zip(ratios, map(svg_texts, pictures), strict=True):
        numbers = [float(text.replace(",", "")) for text in texts if text not in ("0", "1") or ratio > 1e3]
        assert 2 <= len({*numbers} & {n for n in numbers if 2.9 <= n <= 3.1 * ratio}) <= 12, (ratio, texts)


def layer_records(analysis: str, metric: str, *values: float) -> pd.DataFrame:
    """Return records of the layers at two steps."""
    rows = [Record(metric=metric, value=value, layer=layer) for layer, value in enumerate(values)]
    return records.frame(measured(analysis, rows, step=step) for step in (1, 2))


def test_numbers_beside_the_colours_of_a_map_differ():
    frame = layer_records("representation", "token_curvature", 2.076, 2.084, 2.1)
    texts = svg_texts(plots.layer_surface(frame, "token_curvature"))
    numbers = [text for text in texts if text.startswith("2.0")]
    assert len(numbers) >= 3
    assert len({*numbers}) == len(numbers)


def test_heat_maps_are_coloured_by_the_logarithm(step_frame):
    for fig in (plots.layer_surface(step_frame, LENS), plots.loop_map(step_frame, TASK)):
        (scale,) = [
            layer["encoding"]["fill"]["scale"] for layer in fig.spec()["layer"] if layer["mark"]["type"] == "rect"
        ]
        shown = [cell for row in fig.cells.values[-1] for cell in row if cell is not None]
        assert scale["type"] == "log"
        assert scale["domain"] == pytest.approx([min(shown), max(shown)], rel=1e-3), "four digits"
    loss = plots.layer_surface(layer_records("lens", "logit_lens_loss", 2.0, 3.0, 4.0), "logit_lens_loss")
    assert (loss.cells.values[0][2][0], bool(loss.cells.log)) == (4.0, False)


VALUES = [1.0, 10.0, 5.0, 10.0, 100.0]


def on_log_axis(values: list[float], low: Sequence[float] = (), high: Sequence[float] = (), **look: Any) -> Chart:
    series = Series(x=[0, 1, 2, 3, 4], y=values, low=low, high=high, width=2, mark="circle", color="#0b62a4", **look)
    return Chart(title="", x=Axis(), y=Axis(log=True), series=[series])


def heights(path: str) -> list[float]:
    return [float(point.split(",")[1]) for point in re.findall(r"[ML]([-\d.,]+)", path)]


def test_values_up_to_0_are_left_out_of_log_axes_and_reported_where_vega_would_draw_them_as_the_largest():
    low, half, below = [0.5, 8.0, -1.0, 9.0, 90.0], [2.0, 12.0, 11.0, 11.0, 120.0], [2.0, 12.0, -0.5, 11.0, 120.0]
    zero, plain, *intervals = svgs(
        [
            on_log_axis([1.0, 10.0, 0.0, 10.0, 100.0]),
            on_log_axis(VALUES),
            *(on_log_axis(VALUES, low, high, **look) for high in (half, below) for look in ({}, {"interval": "bars"})),
        ]
    )
    lines = re.findall(r'mark-line[^>]*><path[^>]* d="([^"]*)"', zero)
    assert "".join(lines).count("M") == 2, "two parts"
    assert len(re.findall(r'fill="#0b62a4"', zero)) == 4
    assert ("Not shown on the log axis: 1 of 0 or below" in zero, "Not shown on the log axis" in plain) == (True, False)
    for number, (band, bars) in enumerate((intervals[:2], intervals[2:])):
        (area,) = re.findall(r'mark-area[^>]*><path[^>]* d="(M[^"]*Z)"', band)
        assert number or heights(area)[2] == max(heights(area)), "at the lowest number that is drawn"
        assert min(heights(area)) > 0, "nothing goes to the top"
        assert bars.count('stroke-width="1.2"') == 5 - number
