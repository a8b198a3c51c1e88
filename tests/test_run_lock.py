"""One writer a run: who is refused, when a lock ends without its holder, and what a holder notices."""

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_layers import records
from lit_layers.errors import InputError, RunLostError
from lit_layers.files import run_lock
from lit_layers.files.run_lock import writing
from tests.support.runs import measurement

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of leases that a test can wait for."""
    monkeypatch.setattr(run_lock, "LEASE", 2.0)  # a busy machine may keep a holder waiting for a second
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.1)
    monkeypatch.setattr(run_lock, "LOOK", 0.02)


def append(root: Path, step: int = 0) -> None:
    records.append(root / "measurements.jsonl", measurement("r", step, "lens", layers=2))


class Holder:
    """A process that holds `root`, then does `then` upon SIGCONT or waits to be killed."""

    def __init__(
        self, root: Path, *, host: str | None = None, then: Callable[[], int] | None = None, **how: Any
    ) -> None:
        ready, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                if host is not None:
                    socket.gethostname = lambda: host
                with writing(root, **how):
                    os.write(told, b"x")
                    if then is None:
                        time.sleep(60)
                    else:
                        os.kill(os.getpid(), signal.SIGSTOP)
                        code = then()
            except RunLostError:
                code = 7
            finally:
                os._exit(code)
        os.read(ready, 1)
        if then is not None:
            os.waitpid(self.pid, os.WUNTRACED)  # it has stopped

    def end(self, number: int) -> int:
        os.kill(self.pid, number)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_second_writer_is_refused_by_the_name_of_the_first_until_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "LEASE", 60.0)  # a busy machine makes no holder look dead
    root = tmp_path / "run"
    holder = Holder(root)
    try:
        with pytest.raises(InputError) as refused, writing(root):
            pytest.fail("two writers")
        said = str(refused.value)
        assert f"root: {root} is being written by `" in said
        assert f"(host {socket.gethostname()}, process {holder.pid}, since 20" in said
        with pytest.raises(InputError, match="is being written by"), writing(root, shard=(0, 2)):
            pytest.fail("two writers")
    finally:
        holder.end(signal.SIGKILL)
    since = time.monotonic()
    with writing(root):
        append(root)
    assert time.monotonic() - since < run_lock.LEASE  # nobody waited for the lease
    assert [path.name for path in root.iterdir()] == ["measurements.jsonl"]


def test_the_lock_of_a_holder_that_died_on_another_machine_ends_with_its_lease(tmp_path, caplog):
    holder = Holder(tmp_path, host="elsewhere")
    with pytest.raises(InputError, match="host elsewhere"), writing(tmp_path):
        pytest.fail("two writers")
    since = time.monotonic()
    holder.end(signal.SIGKILL)
    with writing(tmp_path):
        assert time.monotonic() - since > run_lock.LEASE / 2
    assert "no sign of life from `" in caplog.text


def test_a_holder_that_was_paused_and_lost_its_lease_writes_nothing_more(tmp_path):
    def go_on() -> int:
        append(tmp_path, step=1)
        return 0

    paused = Holder(tmp_path, then=go_on)
    with writing(tmp_path):
        append(tmp_path, step=0)
        assert paused.end(signal.SIGCONT) == 7
    assert [each.step for each in records.read(tmp_path / "measurements.jsonl")] == [0]
    resumed = Holder(tmp_path, then=go_on)
    assert resumed.end(signal.SIGCONT) == 0  # nobody had taken it over


def test_shards_of_one_job_write_together_and_nobody_beside_them(tmp_path):
    with writing(tmp_path, shard=(0, 2)), writing(tmp_path, shard=(1, 2)):
        append(tmp_path)
        for other in ((0, 1), (1, 2), (0, 3)):
            with pytest.raises(InputError, match="is being written by"), writing(tmp_path, shard=other):
                pytest.fail("two writers")
    with writing(tmp_path):
        append(tmp_path)


def test_a_shard_sees_another_that_computes_by_other_versions_as_long_as_that_lives(tmp_path):
    """One that was killed leaves its account, and hinders nobody."""
    old, new = {"torch": "2.8.0"}, {"torch": "2.9.0"}
    holder = Holder(tmp_path, shard=(0, 3), computes=old)
    with writing(tmp_path, shard=(1, 3), computes=old):
        assert [*run_lock.beside(tmp_path)] == []
    with writing(tmp_path, shard=(1, 3), computes=new):
        ((theirs, who),) = run_lock.beside(tmp_path)
        assert (theirs, f"process {holder.pid}" in who) == (old, True)
        holder.end(signal.SIGKILL)
        assert [*run_lock.beside(tmp_path)] == []


def remove_file(root: Path) -> None:
    (root / "measurements.jsonl").unlink()


def replace_file(root: Path) -> None:
    remove_file(root)
    append(root)


def cut_file(root: Path) -> None:
    os.truncate(root / "measurements.jsonl", 10)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (remove_file, "others removed or cut measurements.jsonl"),
        (replace_file, "others removed or cut measurements.jsonl"),
        (cut_file, "others removed or cut measurements.jsonl"),
        (lambda root: shutil.rmtree(root / "step-000000001"), "others removed or cut step-000000001"),
        (shutil.rmtree, "was removed or moved"),
        (lambda root: root.rename(root.with_name("moved")), "was removed or moved"),
    ],
)
def test_what_vanished_meanwhile_is_named_at_the_end(harm, said, tmp_path):
    root = tmp_path / "run"

    def write_and_lose() -> None:
        append(root)
        append(root, step=1)
        (root / "step-000000001").mkdir()
        (root / "step-000000001" / "config.json").touch()
        run_lock.wrote(root / "step-000000001")
        harm(root)

    with pytest.raises(RunLostError, match=said), writing(root):
        write_and_lose()
    assert not (root / ".writer.lock").exists()


def test_nothing_is_written_into_a_folder_that_was_removed_and_what_was_removed_on_purpose_is_not_missed(tmp_path):
    root = tmp_path / "run"
    with writing(root):
        append(root)
        run_lock.forget(root / "measurements.jsonl")
        remove_file(root)

    def write_after_loss() -> None:
        shutil.rmtree(root)
        append(root)

    with pytest.raises(RunLostError, match="was removed or moved"), writing(root):
        write_after_loss()
    assert not root.exists()


def test_a_refused_command_leaves_no_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "new" / "run"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="root: cannot write to .*choose another folder"), writing(tmp_path / "file"):
        pytest.fail("a file is no folder")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_lock.SoftFileLease, "acquire", refuse)
    with pytest.raises(InputError, match=r"cannot write to .* \(Read-only file system\)"), writing(tmp_path):
        pytest.fail("read-only")
