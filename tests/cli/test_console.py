"""The bar's second duty: a Ctrl-C that Python drops ends the work all the same."""

import signal
import threading
import weakref

import pytest

from lit_layers.cli.console import bar, show_table


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_in_the_callback_of_a_weak_reference_is_raised_at_the_next_progress():
    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    with bar("at work", hidden=True) as show:
        del thing  # the interrupt comes here, and Python only prints it
        assert reference() is None
        with pytest.raises(KeyboardInterrupt):
            show(1, 2, "next")


def test_without_a_ctrl_c_nothing_is_raised_and_the_handler_is_back():
    before = signal.getsignal(signal.SIGINT)
    with bar("at work", hidden=True) as show:
        assert signal.getsignal(signal.SIGINT) is not before
        show(1, 2, "next")
    assert signal.getsignal(signal.SIGINT) is before


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


def test_a_ctrl_c_that_is_noted_by_someone_else_is_theirs():
    """A handler installed inside, as that of a sweep, which ends what runs first, takes the place of ours."""
    noted = []
    with bar("at work", hidden=True) as show:
        before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
        show(1, 2, "next")
    assert noted == [signal.SIGINT]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_narrow_terminal_cuts_no_number(width, monkeypatch, capsys):
    rows = [{"run": "a run of a long name", "lr": 0.00012345, "max_steps": 143000, "seconds": 12345.6, "error": "none"}]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    show_table(rows, text=("error",))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("0.00012345", "143000", "12345.6", "none", "long", "max_steps"))
