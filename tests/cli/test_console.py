"""The bar, also of a training."""

import io
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lit_layers.cli.console import bar, show_table
from lit_layers.cli.verbs.fit import StepProgress
from lit_layers.records import Measurement
from lit_layers.training import run_log


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_left_of_checkpoints_that_take_long_is_said_in_a_terminal_and_in_a_log(is_terminal):
    """Two workers: a checkpoint each in 80 s is one in 40 s."""
    now, said = [0.0], io.StringIO()
    console = Console(file=said, get_time=lambda: now[0], force_terminal=is_terminal, width=100)
    with bar("auditing", console=console) as show:
        show(0, 10, "waiting for workers")
        for done in range(1, 7):
            for _ in range(40):
                now[0] += 1
                show(done - 1, 10, f"2 workers: step {done}")
            show(done, 10, f"2 workers: step {done}")
        written = said.getvalue()
    if is_terminal:
        assert "6/10 0:04:00 0:02:40" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    else:
        lines = [
            "1 of 10 after 0:01:00: 2 workers: step 2",
            "2 of 10 after 0:02:00, about 0:05:20 left: 2 workers: step 3",
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


@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_narrow_terminal_cuts_no_number(width, monkeypatch, capsys):
    rows = [{"run": "a run of a long name", "lr": 0.00012345, "max_steps": 143000, "seconds": 12345.6, "error": "none"}]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    show_table(rows, text=("error",))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("0.00012345", "143000", "12345.6", "none", "long", "max_steps"))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_shows_a_bar_in_a_terminal_and_lines_elsewhere(terminal):
    log: Any = SimpleNamespace(shown={"train/loss": 2.34567, "train/tokens_per_second": 12345.6})
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)
    module: Any = None
    trainer: Any = SimpleNamespace(is_global_zero=True, max_steps=7, global_step=3)
    progress = StepProgress(log, console=console)
    progress.on_train_start(trainer, module)
    progress.on_train_batch_end(trainer, module)
    progress.on_train_batch_end(trainer, module)  # at once: not shown again
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
    progress.on_train_end(trainer, module)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "trajectory failed at step 3: [oh] no" in shown
    assert "3/7" in shown
    assert "loss 2.346  12,346 tokens/s" in shown
    assert ("measuring trajectory at step 3" in shown) == terminal
    assert ("trajectory measured in 1.0 s" in shown) != terminal
    assert shown.count("step 3/7 loss") == (0 if terminal else 1)


def a_measurement(step: int) -> Measurement:
    facts: Any = {"run": "run", "tokens": None, "analysis": "lens", "records": [], "provenance": {}}
    return Measurement(step=step, seconds=1.0, **facts)


def test_long_measuring_says_how_long_it_still_takes_by_the_checkpoint_before(monkeypatch):
    """Of 40 s: 30 after the first ten. The first checkpoint has none before it, and the line comes all the same."""
    now, said = [100.0], []
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_log, "rank_zero_info", said.append)
    lines = run_log.TimeLines()
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
        "measuring coupling at step 1, about 40 s left",
        "measuring lens at step 1, about 30 s left",
        "measuring probe at step 1, about 20 s left",
        "measuring lens at step 1, about 10 s left",
    ]


def test_measuring_of_seconds_is_no_news(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_log, "rank_zero_info", said.append)
    lines = run_log.TimeLines()
    for step in range(20):
        lines.measuring(step, "lens")
        now[0] += 3.0
        lines.measured(a_measurement(step))
    assert said == []


def test_without_a_terminal_a_training_says_how_long_a_checkpoint_takes(monkeypatch):
    now, console = [100.0], Console(file=io.StringIO(), force_terminal=False, width=200, color_system=None)
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    log: Any = SimpleNamespace(shown={})
    progress = StepProgress(log, console=console)
    for step in (0, 1):
        progress.measuring(step, "lens")
        now[0] += 40.0
        progress.measured(a_measurement(step))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert shown.splitlines() == [
        "step 0: lens measured in 1.0 s",
        "measuring lens at step 1, about 40 s left",
        "step 1: lens measured in 1.0 s",
    ]
