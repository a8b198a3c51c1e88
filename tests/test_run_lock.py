"""One writer per run: refusals, and the end of a lock with its process."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lit_layers.errors import InputError
from lit_layers.files.run_lock import is_held, is_training, writing


@contextmanager
def another_writer(root: Path, **how: Any) -> Iterator[int]:
    """Start a process that holds `root` until it is killed, at the latest at the end of the test."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with writing(root, **how):
                os.write(told, b"x")
                time.sleep(60)
        finally:
            os._exit(1)
    os.read(ready, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def is_refused(root: Path, **how: Any) -> bool:
    try:
        with writing(root, **how):
            return False
    except InputError as error:
        return f"root: {root} is being written by process " in str(error)


def test_a_second_process_is_refused_with_host_and_id_of_the_first_until_that_is_killed(tmp_path):
    root = tmp_path / "run"
    with another_writer(root) as pid:
        with pytest.raises(InputError) as refused, writing(root):
            pytest.fail("two writers")
        holder = f"process {pid} on host {socket.gethostname()}"
        assert f"root: {root} is being written by {holder}: wait, or choose" in str(refused.value)
        assert is_refused(root, shard=(0, 2))
        assert is_refused(root, part="training")
        assert not is_held(root)
    assert (root / ".writer.lock").exists(), "what a killed holder left"
    with writing(root):
        assert is_held(root)
    assert list(root.iterdir()) == []


def test_the_same_process_is_also_refused_and_a_child_neither_holds_nor_frees_the_lock(tmp_path):
    with writing(tmp_path):
        assert is_refused(tmp_path)
        assert is_refused(tmp_path), "a refusal takes nothing from the holder"
        assert is_held(tmp_path)
        child = os.fork()
        if child == 0:
            os._exit(0 if not is_held(tmp_path) and is_refused(tmp_path) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_refused(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not is_refused(tmp_path)


def test_shards_of_one_count_write_together_and_others_are_refused(tmp_path):
    with another_writer(tmp_path, shard=(0, 2)), writing(tmp_path, shard=(1, 2)):
        assert all(is_refused(tmp_path, shard=other) for other in ((0, 1), (0, 2), (1, 2), (0, 3)))
    assert not is_refused(tmp_path)


@pytest.mark.soak
def test_a_living_training_is_detected_and_shards_of_one_count_measure_next_to_it(tmp_path):
    assert not is_training(tmp_path)
    with another_writer(tmp_path, part="training"):
        assert is_training(tmp_path)
        assert not is_refused(tmp_path, part="measuring")
        assert is_refused(tmp_path)
        with writing(tmp_path, part="measuring", shard=(0, 2)), writing(tmp_path, part="measuring", shard=(1, 2)):
            assert all(is_refused(tmp_path, part="measuring", shard=other) for other in ((1, 2), (1, 3), (0, 1)))
    assert not is_training(tmp_path)
    with writing(tmp_path, part="measuring", shard=(0, 2)):
        assert is_refused(tmp_path, shard=(1, 2))
    with writing(tmp_path):
        assert is_refused(tmp_path, part="measuring")


def test_a_command_that_ends_before_it_writes_leaves_no_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "run"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_refused_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for root in ("s3://bucket/run", Path("gs://bucket/run")):
        with pytest.raises(InputError, match="mount the store, or copy the run"), writing(root):
            pytest.fail("an address")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="root: cannot write to .*choose another folder"), writing(tmp_path / "file"):
        pytest.fail("a file is no folder")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(InputError, match=r"cannot write to .* \(Read-only file system\)"), writing(tmp_path):
        pytest.fail("read-only")
