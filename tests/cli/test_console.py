"""The progress bar of commands and of a training."""

import io
from typing import Any

import pytest
import yaml

from lit_layers.cli import process as console
from lit_layers.cli.main import main
from lit_layers.cli.process import bar
from lit_layers.records import Measurement
from lit_layers.training import run_log
from tests.cli.test_fit import RECIPE


def fake_terminal(monkeypatch) -> io.StringIO:
    """Replace standard error by a terminal that keeps its text."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(console, "REDRAWN", 0.0)
    return stream


def test_the_bar_shows_progress_and_the_current_message(monkeypatch):
    stream = fake_terminal(monkeypatch)
    with bar("auditing") as show:
        show(0, 10, "waiting for workers")
        show(6, 10, "2 workers: step 6")
        show(None, None, "step\n7")
        show(7, None, "")
        written = stream.getvalue()
    assert "2 workers: step 6:  60%" in written
    assert "step 7:  60%" in written
    assert "step 7:  70%" in written
    assert "6/10" in written
    assert "\n" not in written


@pytest.mark.soak
@pytest.mark.slow
def test_a_training_shows_a_bar_of_its_steps(tmp_path, corpus, no_page, monkeypatch):
    stream = fake_terminal(monkeypatch)
    recipe = {**RECIPE, "corpus": str(corpus), "analyses": [], "root": str(tmp_path / "run")}
    recipe["trainer"] = RECIPE["trainer"] | {"max_steps": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["fit", "--config", str(tmp_path / "recipe.yaml")]) == 0
    assert "2/2" in stream.getvalue()
    assert "loss " in stream.getvalue()


def make_measurement(step: int) -> Measurement:
    facts: Any = {"run": "run", "tokens": None, "analysis": "lens", "records": [], "provenance": {}}
    return Measurement(step=step, seconds=1.0, **facts)


def test_long_measurements_are_announced_and_short_ones_are_not(monkeypatch):
    now, messages = [100.0], []
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_log, "rank_zero_info", messages.append)
    for seconds in (3.0, 10.0):
        lines = run_log.LongMeasuring()
        for step in (0, 1):
            for analysis in ("coupling", "lens", "probe", "lens"):
                lines.measuring(step, analysis)
                now[0] += seconds
            lines.measured(make_measurement(step))
            now[0] += 1000.0  # training time, which is not measuring time
    assert messages == [f"measuring {name} at step {step}" for step in (0, 1) for name in ("lens", "probe", "lens")]
