"""A run on an S3 server whose writer is killed at any moment and goes on, here or on another machine, is whole."""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.files import remote_copy, remote_runs, remote_store, run_lock
from lit_layers.identity import Measurement, Record
from lit_layers.training.checkpoints import remove_folder, saved_steps, step_folder, write_folder
from tests.support.forked import run_forked
from tests.support.s3_server import s3_server

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
KILLS = int(os.environ.get("LIT_LAYERS_KILLS", 24))
LINES = "measurements.jsonl"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A writer that was killed on another machine is waited for as long as its claim lasts."""
    for name, seconds in {"LEASE": 4.0, "HEARTBEAT": 0.3, "LOOK": 0.05}.items():
        monkeypatch.setattr(remote_runs, name, seconds)
    monkeypatch.setattr(remote_copy, "SETTLED", 0.05)


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_LAYERS_REMOTE", str(folder))
        yield


def measurement(step: int) -> Measurement:
    numbers = [Record(metric="number", value=step / 7, layer=layer) for layer in range(3)]
    return Measurement(run="run", step=step, tokens=None, analysis="one", records=numbers, seconds=0.0, provenance={})


def train(url: str, steps: int) -> int:
    """What `fit --resume last` writes, with nothing computed: rows, checkpoints, measurements, states to go on from."""
    with remote_runs.written(url, remote_copy.to_resume) as root, run_lock.writing(root):
        (root / "run.json").write_text('{"run": "run"}')
        known = {each.step for each in records.read(root / "measurements.jsonl")}
        log, resume, facts = records.ScalarLog(root / "metrics.jsonl"), root / "resume", {"step": 0, "offset": 0}
        if there := saved_steps(resume):
            facts = json.loads((step_folder(resume, there[-1]) / "meta.json").read_text())
        log.truncate(facts["offset"])
        for step in range(facts["step"] + 1, steps + 1):
            log.log(step, {"loss": 1 / step, "draw": random.random()})  # another one the second time
            if step % 4 == 0:
                save(step_folder(root, step), "config.json", {"step": step})
                if step not in known:
                    records.append(root / "measurements.jsonl", measurement(step))
            if step % 10 == 0:
                log.close()
                save(step_folder(resume, step), "meta.json", {"step": step, "offset": log.offset})
                for old in saved_steps(resume)[:-2]:
                    remove_folder(step_folder(resume, old))
            (root / "report.html").write_text(f"page of {step}")
            remote_runs.time.sleep(0.01)
        log.close()
    return 0


def save(folder: Path, last: str, facts: dict) -> None:
    def fill(draft: Path) -> None:
        (draft / "weights").write_bytes(bytes([facts["step"] % 251]) * 20_000)
        (draft / last).write_text(json.dumps(facts))

    write_folder(folder, fill)


def refuse_torn(root: Path) -> None:
    """What anybody sees at that moment: the beginning of a run."""
    steps = [row["step"] for row in records.rows(root / "metrics.jsonl")]
    assert steps == [*range(1, len(steps) + 1)]
    measured = [each.step for each in records.read(root / "measurements.jsonl")]
    assert measured == [*range(4, 4 * len(measured) + 1, 4)]
    for folder in [*root.glob("step-*"), *root.glob("resume/step-*")]:
        (facts,) = (json.loads(each.read_text()) for each in folder.glob("*.json"))
        assert (folder / "weights").read_bytes() == bytes([facts["step"] % 251]) * 20_000
        if "offset" in facts:
            there = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.json*"))
            assert {"run.json", "metrics.jsonl"} <= {*there}, there
            content = (root / "metrics.jsonl").read_bytes()[: facts["offset"]]
            assert json.loads(content.splitlines()[-1])["step"] == facts["step"]


@pytest.mark.soak  # two kills at chosen moments are in the next one
def test_killed_at_random_it_goes_on_here_or_elsewhere_and_loses_and_doubles_nothing(bucket, tmp_path):
    url, draws, done, moves, steps, code = f"{bucket}/{KILLS}/run", random.Random(KILLS), 0, 0, 40 * KILLS, -9
    here, onlooker = tmp_path / "0", tmp_path / "onlooker"
    while done < KILLS or code or not is_whole(url, onlooker, steps):  # the last one ends by itself, and tidies up
        with machine(here):
            after = draws.uniform(0.5, 2.5) if done < KILLS else float("inf")
            code = run_forked(functools.partial(train, url, steps), kill_after=after)
        assert code in (0, -9)
        done += code == -9
        if code == 0 and done < KILLS:
            steps += 40  # it was over before it could be killed
        shutil.rmtree(onlooker, ignore_errors=True)
        with machine(onlooker), contextlib.suppress(records.InputError):  # killed before anything was there
            root = remote_runs.read(url, bool)
            refuse_torn(root)
            for mine in here.rglob("run/*.jsonl") if code == 0 else ():
                assert (root / mine.name).read_bytes() == mine.read_bytes()
        if draws.random() < 0.4:
            here, moves = tmp_path / str(moves + 1), moves + 1
    sys.stdout.write(f"{done} kills, {moves} moves to another machine, {steps} steps\n")
    names = remote_copy.LocalCopy(url).store.listing()
    assert not [name for name in names if ".parts/" in name]
    assert [name for name in names if name.startswith("resume/")]


def is_whole(url: str, folder: Path, steps: int) -> bool:
    with machine(folder):
        root = remote_runs.read(url, bool)
    rows = [row["step"] for row in records.rows(root / "metrics.jsonl")]
    every_fourth = [*range(4, steps + 1, 4)]
    return (
        rows == [*range(1, steps + 1)]
        and [each.step for each in records.read(root / "measurements.jsonl")] == every_fourth
        and saved_steps(root) == every_fourth
        and saved_steps(root / "resume") == [steps - 10, steps]
    )


def test_a_log_is_cut_once_though_its_writer_is_killed_before_all_is_sent(bucket, tmp_path):
    """Cut again to where it began anew, it would lack what a checkpoint sent since refers to."""
    url = f"{bucket}/cut/run"

    def train_until(method: str, starts: str) -> int:
        real, send = getattr(remote_copy.LocalCopy, method), remote_copy.LocalCopy.send

        def and_die(self: remote_copy.LocalCopy, name: str, *others: object) -> None:
            real(self, name, *others)
            if name.startswith(starts):
                os.kill(os.getpid(), signal.SIGKILL)

        def send_all(self: remote_copy.LocalCopy, *others: Any, **more: Any) -> bool:
            return bool(saved_steps(self.folder / "resume")) and send(self, *others, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote_copy.LocalCopy, method, and_die)
            patch.setattr(remote_copy.LocalCopy, "send", send_all)  # what is cut and what is saved at once
            return train(url, 12)

    with machine(tmp_path / "here"):
        assert run_forked(functools.partial(train, url, 7)) == 0  # nothing to go on from: the next one begins anew
        assert run_forked(functools.partial(train_until, "_send_folder", "resume/")) == -9
        assert run_forked(functools.partial(train_until, "_cut", "metrics")) == -9
    with machine(tmp_path / "onlooker"):
        root = remote_runs.read(url, bool)
        assert saved_steps(root / "resume") == [10]
        refuse_torn(root)


def test_what_was_given_up_and_arrives_late_is_older_than_nothing_at_the_end(bucket, tmp_path, monkeypatch):
    """The page is given up and replaces the next one; the first lines arrive, of which the answer is lost; a
    removal arrives when the file is there again.
    """
    url, put, write = f"{bucket}/late/run", remote_store.Store.put, remote_store.Store.write
    pages: list[bytes] = []
    overwritten: list[str] = []

    def late_page(self: remote_store.Store, path: Path, name: str) -> None:
        if name == "report.html" and not pages:
            pages.append(path.read_bytes())
            raise InputError("it gives no answer")
        put(self, path, name)
        if name == "report.html" and len(pages) == 1 and path.read_bytes() != pages[0]:
            pages.append(path.read_bytes())
            write(self, name, pages[0])
        if name == "values/kept":
            self.remove(name)
            monkeypatch.setattr(remote_store.Store, "put", put)

    def answer_lost(self: remote_store.Store, name: str, content: bytes, *, is_new: bool = False) -> None:
        write(self, name, content, is_new=is_new)
        overwritten.extend([name] * (".parts/" in name and not is_new))
        if name.endswith("000000000000.jsonl") and is_new:
            raise InputError("it gives no answer")

    monkeypatch.setattr(remote_store.Store, "put", late_page)
    monkeypatch.setattr(remote_store.Store, "write", answer_lost)
    with machine(tmp_path / "here"), remote_runs.written(url) as root, run_lock.writing(root):
        records.append(root / "measurements.jsonl", measurement(0))
        (root / "report.html").write_text("page 1")
        while not (pages and remote_copy.LocalCopy(url).store.listing().keys() & {f"{LINES}.parts/{0:012d}.jsonl"}):
            remote_runs.time.sleep(0.01)
        records.append(root / "measurements.jsonl", measurement(1))
        (root / "report.html").write_text("page 2")
        while len(pages) < 2:
            remote_runs.time.sleep(0.01)
        (root / "values").mkdir()
        (root / "values" / "kept").write_text("values")
        log = (root / LINES).read_bytes()
    store = remote_copy.LocalCopy(url).store
    assert pages == [b"page 1", b"page 2"]
    assert overwritten == []
    there = {name: store.read(name) for name in store.listing() if not name.startswith(".")}
    assert there == {LINES: log, "report.html": b"page 2", "values/kept": b"values"}


def test_lines_beyond_a_gap_are_no_end_of_what_is_written_later(bucket, tmp_path):
    url = f"{bucket}/gap/run"
    store = remote_copy.LocalCopy(url).store
    store.write(f"{LINES}.parts/{12:012d}.jsonl", b'{"step": 9}\n' * 1000)
    with machine(tmp_path / "here"), remote_runs.written(url) as root, run_lock.writing(root):
        records.append(root / LINES, measurement(0))
        while len(store.listing()) < 2:
            remote_runs.time.sleep(0.01)
        with machine(tmp_path / "onlooker"):
            assert (remote_runs.read(url) / LINES).read_bytes() == (root / LINES).read_bytes()
