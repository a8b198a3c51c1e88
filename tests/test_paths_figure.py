"""The figure of paths: a line per token, a dot per layer, a frame per checkpoint, a choice per prompt."""

import pandas as pd
import pytest

from lit_layers import plots, records
from lit_layers.figures.chart import Series
from lit_layers.records import Measurement, Record
from lit_layers.report import write_report
from tests.support.charts import blocks

TOKENS, LAYERS = (1, 4, 7), 3


def place(step: int, prompt: int, token: int, layer: int, axis: int) -> float:
    return (step + 1) * (100 * prompt + 10 * token + layer) * (1 if axis == 1 else -0.5)


def measured(step: int | None, *, run: str = "r", prompts: tuple[int, ...] = (1, 2)) -> Measurement:
    """Return a measurement like the analysis', with coordinates that encode step, prompt and token."""
    number = step or 0
    found = [Record(metric="plane_variance", value=0.9, low=0.8, high=0.95, n=2)]
    for prompt in prompts:
        for axis, share in ((1, 0.5 + 0.1 * prompt + number / 100), (2, 0.2)):
            found.append(Record(metric="path_variance", value=share, tags={"prompt": prompt, "axis": axis}))
        for layer in range(LAYERS + 1):
            for token in TOKENS:
                for axis in (1, 2):
                    tags = {"prompt": prompt, "token": token, "axis": axis}
                    value = place(number, prompt, token, layer, axis)
                    found.append(Record(metric="path", value=value, layer=layer, tags=tags))
    return Measurement(run=run, step=step, tokens=None, analysis="paths_in_plane", records=found, seconds=0.1)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return records.frame(map(measured, (0, 1, 8)))


def lines(series: Series, frame: int = 0) -> list[list[tuple[float, float]]]:
    """Return the paths of a checkpoint, split at NaN."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y, number in zip(series.x, series.y, series.frame, strict=True):
        if number == frame:
            found.append([]) if x is None else found[-1].append((x, y))
    return found[:-1]


def test_every_path_visits_the_layers_in_order_with_a_frame_per_checkpoint(frame) -> None:
    fig = plots.paths_in_plane(frame, tags={"prompt": 2})
    assert (fig.title, fig.frames) == ("Paths of tokens through the layers, prompt 2", [0, 1, 8])
    (series,) = fig.series
    for number, step in enumerate(fig.frames):
        expected = [
            [tuple(place(step, 2, token, layer, axis) for axis in (1, 2)) for layer in range(LAYERS + 1)]
            for token in TOKENS
        ]
        for path, wanted in zip(lines(series, number), expected, strict=True):
            assert path == [pytest.approx(point, rel=1e-3) for point in wanted]
    dots = [n for n, x in enumerate(series.x) if x is not None]
    colors = [series.colors[n] for n in dots]
    assert (len({*colors}), colors) == (LAYERS + 1, colors[: LAYERS + 1] * len(TOKENS) * len(fig.frames))
    assert [series.texts[n] for n in dots[:5]] == [*(f"token 1, layer {n}" for n in range(4)), "token 4, layer 0"]


def test_one_checkpoint_has_no_slider() -> None:
    frame = records.frame([measured(4)])
    fig = plots.paths_in_plane(frame[frame["metric"] == "path"])
    assert "params" not in fig.spec(still=False)
    assert lines(fig.series[0])[0][0] == (place(4, 1, 1, 0, 1), place(4, 1, 1, 0, 2)), "the first prompt"


def test_runs_without_paths_are_refused_and_paths_are_neither_curves_nor_headlines(frame) -> None:
    with pytest.raises(ValueError, match="metric 'plane_variance' has no paths of tokens in a plane"):
        plots.paths_in_plane(frame, "plane_variance")
    with pytest.raises(ValueError, match="no rows of metric 'path' with prompt 9"):
        plots.paths_in_plane(frame, tags={"prompt": 9})
    assert plots.change_table(frame).empty
    for draw in (plots.emergence_curves, plots.layer_profile, plots.layer_matrix):
        with pytest.raises(ValueError, match="metric 'path'"):
            draw(frame, "path")


def test_the_report_has_the_picture_with_a_choice_of_models_and_prompts_and_no_figure_of_its_shares(tmp_path) -> None:
    for step in (0, 1, 8):
        records.append(tmp_path / "run" / "measurements.jsonl", measured(step))
    found = blocks(write_report(tmp_path / "run"))
    assert found.keys() == {"Paths of tokens through the layers", "Variance in the plane of the paths (share)"}
    choices, (figures,) = found["Paths of tokens through the layers"]
    assert choices == ["prompt 1", "prompt 2"]
    for prompt, figure in enumerate(figures, start=1):
        assert figure.frames == [0, 1, 8]
        assert next(row["x"] for row in figure.points if row["f"] == 1) == place(1, prompt, 1, 0, 1)
    for run in ("org/a", "org/b"):
        records.append(tmp_path / "models" / "measurements.jsonl", measured(None, run=run))
    choices, (figures,) = blocks(write_report(tmp_path / "models"))["Paths of tokens through the layers"]
    assert choices == ["a, prompt 1", "a, prompt 2", "b, prompt 1", "b, prompt 2"]
    assert [figure.frames for figure in figures] == [[]] * 4
