"""Figures of numbers many decades apart: a logarithmic axis or logarithmic colours, and ticks that have room."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lit_layers import plots, records
from lit_layers.functional.block_schedules import variants
from lit_layers.plots.canvas import canvas, plain_log
from lit_layers.records import Measurement, Record

LAYERS, HIGHEST = 6, 1e43
LENS, TASK = "logit_lens_perplexity", "task_perplexity"


def lens(step: int | None) -> Measurement:
    values = [HIGHEST ** (1 - layer / (LAYERS + 1)) for layer in range(LAYERS + 1)]
    return written("lens", step, [Record(metric=LENS, value=value, layer=n) for n, value in enumerate(values)])


def task(step: int | None) -> Measurement:
    rows = [
        Record(metric=TASK, value=HIGHEST ** ((index + 1) / 30), layer=variant.block, tags=variant.tags)
        for index, variant in enumerate(variants(LAYERS, middles=[1, 3, 5], seeds=(0,), loops=(2, 3)))
    ]
    rows = [dataclasses.replace(row, tags={k: v for k, v in row.tags.items() if k != "schedule"}) for row in rows]
    rows.append(Record(metric=TASK, value=HIGHEST, tags={"variant": "custom", "schedule": "1 1 1"}))
    return written("intervene/lambada", step, rows)


def written(analysis: str, step: int | None, rows: list[Record]) -> Measurement:
    return Measurement(run="r", step=step, tokens=None, analysis=analysis, records=rows, seconds=1.0, provenance={})


@pytest.fixture(scope="module")
def over_steps() -> pd.DataFrame:
    return records.frame(make(step) for make in (lens, task) for step in (1, 8, 64))


@pytest.fixture(scope="module")
def models() -> pd.DataFrame:
    return records.frame([lens(None), task(None)])


def test_every_curve_of_perplexities_has_a_log_axis_with_ticks_that_have_room(over_steps, models):
    figures = {
        "emergence_curves": plots.emergence_curves(over_steps, LENS),
        "layer_profile": plots.layer_profile(over_steps, LENS),
        "model_profile": plots.model_profile(models, LENS),
        "variant_curves": plots.variant_curves(over_steps, TASK),
        "block_curves": plots.block_curves(over_steps, TASK),
        "variants_over_training": plots.variants_over_training(over_steps, TASK, middle=3),
        "models_by_middle": plots.models_by_middle(models, TASK, variant="skip"),
        "training_curves": plots.training_curves(
            [{"step": n, "validation/perplexity": 10.0 ** (43 - n)} for n in range(1, 43)], ["validation/perplexity"]
        ),
    }
    for name, fig in figures.items():
        axis = fig.layout.yaxis
        assert (axis.type, axis.exponentformat) == ("log", "power"), name
        values = [y for trace in fig.data for y in trace.y if y is not None and y > 0]
        assert 3 <= math.log10(max(values) / min(values)) / axis.dtick <= 7, f"{name}: ticks"
        if axis.range is not None:  # of a log axis in powers of ten
            assert axis.range[1] <= 50, name
    across = plots.schedule_scores(models, TASK).layout.xaxis
    assert across.type == "log"


def test_few_decades_have_numbers_between_them(models):
    rows = [{"step": n, "validation/perplexity": value} for n, value in enumerate((9000.0, 1200.0, 90.0), 1)]
    axis = plots.training_curves(rows, ["validation/perplexity"]).layout.yaxis
    assert (axis.type, axis.dtick, axis.exponentformat) == ("log", "D2", "none")


def test_heat_maps_are_coloured_by_the_logarithm_and_their_bars_name_the_value(over_steps):
    for fig in (plots.layer_surface(over_steps, LENS), plots.loop_map(over_steps, TASK)):
        heat = fig.data[0]
        shown = [cell for row in heat.z for cell in row if cell is not None]
        assert max(shown) <= math.log10(HIGHEST) + 1e-9
        assert [float(text) for text in heat.colorbar.ticktext] == pytest.approx(
            [10**place for place in heat.colorbar.tickvals], rel=0.01
        )
        assert (
            min(shown) - 1e-2 <= heat.colorbar.tickvals[0] < heat.colorbar.tickvals[-1] <= max(shown) + 1e-2
        )  # four digits
    loss = plots.layer_surface(records.frame(written("lens", step, [
        Record(metric="logit_lens_loss", value=2.0 + layer, layer=layer) for layer in range(3)
    ]) for step in (1, 2)), "logit_lens_loss").data[0]  # fmt: skip
    assert loss.z[2][0] == 4.0
    assert loss.colorbar.ticktext is None


def test_pictures_have_log_axes_too(over_steps, models, tmp_path, monkeypatch):
    drawn = {}

    def keep(fig, path: Path, title: str) -> None:
        drawn[path.name] = fig

    for module in ("curve_pictures", "variant_pictures", "surfaces"):
        monkeypatch.setattr(f"lit_layers.plots.{module}.save", keep)
    plots.write_layer_curves(over_steps, Path("layers"), LENS)
    plots.write_variant_curves(over_steps, Path("variants"), TASK)
    plots.write_block_curves(over_steps, Path("blocks"), TASK)
    plots.write_variants_over_training(over_steps, Path("training"), TASK, middle=3)
    assert {name: fig.axes[0].get_yscale() for name, fig in drawn.items()} == dict.fromkeys(drawn, "log")
    plots.write_loop_map(over_steps, Path("loops"), TASK)
    plots.write_surface(over_steps, Path("surface"), LENS)
    for name in ("loops", "surface"):
        (image,) = drawn[name].axes[0].collections[:1]
        assert type(image.norm).__name__ == "LogNorm", name


@pytest.mark.parametrize(("low", "high", "digits"), [(2.0, 30.0, 3), (1.0, 1e43, 26)])
def test_ticks_of_pictures_are_numbers_within_few_decades_and_powers_over_many(low, high, digits):
    fig = canvas(4, 3)
    axes = fig.add_subplot()
    axes.plot([0, 1], [low, high])
    axes.set_yscale("log")
    plain_log(axes)
    fig.canvas.draw()
    texts = [text.get_text() for text in axes.get_yticklabels() if text.get_text()]
    assert 1 <= len(texts) <= 16
    assert max(map(len, texts)) <= digits
    assert np.isfinite(axes.get_ylim()).all()
