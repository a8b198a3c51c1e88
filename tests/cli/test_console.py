"""The bar, also of a training."""

import io
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lit_layers.cli import process as console
from lit_layers.cli.process import bar, show_table
from lit_layers.cli.verbs.fit import StepProgress
from lit_layers.records import Measurement
from lit_layers.training import run_log


class Stream(io.StringIO):
    """Standard error, in a terminal or in a log file."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_left_of_checkpoints_that_take_long_is_said_in_a_terminal_and_in_a_log(is_terminal, monkeypatch):
    """Two workers: a checkpoint each in 80 s is one in 40 s."""
    now, said = [100.0], Stream(is_terminal)
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", said)
    with bar("auditing") as show:
        show(0, 10, "waiting for workers")
        for done in range(1, 7):
            for _ in range(40):
                now[0] += 1
                show(done - 1, 10, f"2 workers: step {done}")
            show(done, 10, f"2 workers: step {done}")
        now[0] += 1
        show(6, 10, "")
        written = said.getvalue()
    if is_terminal:
        assert written.endswith("6 of 10 after 0:04:01, about 0:02:40 left: 2 workers: step 6")
        assert "\n" not in written
    else:
        lines = [
            "1 of 10 after 0:01:00, about 0:09:00 left: 2 workers: step 2",
            "2 of 10 after 0:02:00, about 0:08:00 left: 2 workers: step 3",
        ]
        assert written.splitlines()[:2] == lines
        assert len(written.splitlines()) == 4


def test_a_bar_may_be_drawn_by_another_thread():
    shown = []

    def work() -> None:
        with bar("at work", hidden=True) as show:
            show(1, 2, "next")
            shown.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert shown == [True]


def test_a_table_cuts_no_number_and_has_texts_to_the_left(capsys):
    rows = [{"run": "a run of a long name", "lr": 0.00012345, "error": "none"}, {"run": "b", "lr": 1, "error": "x\ny"}]
    show_table(rows, "title", text=("error",))
    expected = ["title", "run                           lr  error", "a run of a long name  0.00012345  none"]
    assert capsys.readouterr().out.splitlines() == [*expected, "b                              1  x y"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_shows_a_live_line_in_a_terminal_and_lines_elsewhere(terminal):
    log: Any = SimpleNamespace(shown={"train/loss": 2.34567, "train/tokens_per_second": 12345.6})
    stream, module = Stream(terminal), None
    trainer: Any = SimpleNamespace(is_global_zero=True, max_steps=7, global_step=3)
    progress = StepProgress(log, stream)
    progress.on_train_batch_end(trainer, module)  # pyright: ignore
    progress.on_train_batch_end(trainer, module)  # pyright: ignore - at once: not shown again
    progress.status.last = -math.inf if terminal else progress.status.last
    progress.measuring(3, "trajectory")
    for error in (None, "[oh] no"):
        facts: Any = {
            "run": "run",
            "step": 3,
            "tokens": None,
            "analysis": "trajectory",
            "records": [],
            "provenance": {},
        }
        progress.measured(Measurement(**facts, seconds=1.0, error=error))
    progress.on_train_end(trainer, module)  # pyright: ignore
    shown = stream.getvalue()
    assert "trajectory failed at step 3: [oh] no" in shown
    assert shown.count("step 3/7 loss 2.346  12,346 tokens/s") == 1
    assert ("step 3 measuring trajectory" in shown) == terminal
    assert ("trajectory measured in 1.0 s" in shown) != terminal
    assert shown.endswith("\r\x1b[2K") == terminal


def a_measurement(step: int) -> Measurement:
    facts: Any = {"run": "run", "tokens": None, "analysis": "lens", "records": [], "provenance": {}}
    return Measurement(step=step, seconds=1.0, **facts)


def test_long_measuring_says_what_is_measured(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_log, "rank_zero_info", said.append)
    lines = run_log.LongMeasuring()
    for step in (0, 1):
        for analysis in ("coupling", "lens", "probe", "lens"):
            lines.measuring(step, analysis)
            now[0] += 10.0
        lines.measured(a_measurement(step))
        now[0] += 1000.0  # of training, which is no measuring
    assert said == [
        "measuring lens at step 0",
        "measuring probe at step 0",
        "measuring lens at step 0",
        "measuring lens at step 1",
        "measuring probe at step 1",
        "measuring lens at step 1",
    ]


def test_measuring_of_seconds_is_no_news(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_log, "rank_zero_info", said.append)
    lines = run_log.LongMeasuring()
    for step in range(20):
        lines.measuring(step, "lens")
        now[0] += 3.0
        lines.measured(a_measurement(step))
    assert said == []
