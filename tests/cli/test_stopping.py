"""SIGTERM: a command cleans up and ends."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lit_layers.cli import options
from lit_layers.cli.main import main
from lit_layers.cli.verbs import fit
from lit_layers.training.run_folder import saved_steps
from tests.cli.test_fit import RECIPE
from tests.support.forked import run_forked

FOR_EVER = 3600  # seconds: a test that waits this long ends by its timeout


def terminate(*after: float) -> None:
    """Send this process SIGTERM after these numbers of seconds. A busy machine lengthens the time between two."""

    def send() -> None:
        for before, seconds in itertools.pairwise((0.0, *after)):
            time.sleep(seconds - before)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()


def exit_code(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *, signals: Sequence[float] = ()) -> int:
    """Return the exit code of a command that does `work`, in a separate process."""

    def run() -> int:
        terminate(*signals)
        work()
        return 0

    monkeypatch.setattr(fit, "fit", run)
    monkeypatch.setattr(options, "Recipe", lambda verb, words: SimpleNamespace(arguments=dict))
    return run_forked(lambda: main(["fit", "quickstart/gpt2"]))


@pytest.mark.parametrize("signals", [(0.1,), (0.1, 0.3)], ids=["one", "two of a scheduler"])
def test_a_command_cleans_up_after_sigterm(signals, tmp_path, monkeypatch):
    def work() -> None:
        try:
            terminate(*signals)
            time.sleep(FOR_EVER)
        finally:
            time.sleep(0.5)
            (tmp_path / "tidied").touch()

    assert exit_code(work, monkeypatch) == 143
    assert (tmp_path / "tidied").exists()


def test_the_signal_handler_is_restored_after_a_command(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(fit, "fit", lambda: 0)
    monkeypatch.setattr(options, "Recipe", lambda verb, words: SimpleNamespace(arguments=dict))
    assert main(["fit", "quickstart/gpt2"]) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.soak
@pytest.mark.slow
def test_a_page_in_progress_is_written_and_a_corpus_in_progress_is_not_waited_for(tmp_path, corpus, monkeypatch):
    recipe, write = tmp_path / "recipe.yaml", fit.write_report
    recipe.write_text(
        yaml.safe_dump({**RECIPE, "corpus": str(corpus), "trainer": {**RECIPE["trainer"], "max_steps": 1}})
    )

    def slow_page(root: Path) -> Path:
        terminate(0.0)
        time.sleep(0.2)
        return write(root)

    command = ["fit", "--config", str(recipe), "--root", str(tmp_path / "run")]
    monkeypatch.setattr(fit, "write_report", slow_page)
    assert run_forked(lambda: main(command)) == 143
    assert (tmp_path / "run" / "report.html").exists()
    assert saved_steps(tmp_path / "run") == [0, 1]

    def preparing(self) -> None:
        terminate(0.1)  # the sleep has begun: a signal just before it would not end it
        time.sleep(FOR_EVER)

    monkeypatch.setattr("lit_layers.training.datamodules.LitTextData.prepare_data", preparing)
    assert run_forked(lambda: main([*command, "--root", str(tmp_path / "other")])) == 143
    assert not (tmp_path / "other").exists()
