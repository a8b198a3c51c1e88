"""No error of W&B stops a training, and an upload that hangs is abandoned."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.report import WandbMirror, wandb_mirror
from lit_layers.training.run_folder import saved_steps, step_folder
from tests.cli.test_fit import RECIPE
from tests.support.runs import make_run
from tests.support.undrawn import leave_undrawn

wandb = pytest.importorskip("wandb")


@pytest.fixture
def release():
    """An event that lets hanging calls return after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def no_abandoned_mirrors(monkeypatch):
    monkeypatch.setattr(wandb_mirror, "abandoned", [])
    leave_undrawn(monkeypatch)


class FakeRun:
    """A fake run that executes `what` at the call named `where`."""

    id, url, entity, starting_step = "a1b2c3d4", "https://wandb.example/run", "someone", 0

    def __init__(self, where: str, what) -> None:
        self.where, self.what, self.rows, self.dir = where, what, [], ""
        self.settings = SimpleNamespace(mode="online")

    def init(self, dir: str = "", **_: object) -> "FakeRun":
        self._do("init")
        self.dir = f"{dir}/files"
        return self

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, row: dict, **_: object) -> None:
        if len(self.rows) == 2:
            self._do("log")
        self.rows.append(row)

    def finish(self, **_: object) -> None:
        self._do("finish")

    def _do(self, here: str) -> None:
        if here == self.where:
            self.what()


def raising(error: BaseException):
    def what() -> None:
        raise error

    return what


def fake(monkeypatch, where: str, what) -> FakeRun:
    run = FakeRun(where, what)
    monkeypatch.setattr(wandb, "init", run.init)
    return run


def test_any_error_of_wandb_is_one_sentence_and_not_raised(tmp_path, monkeypatch):
    root = make_run(tmp_path / "run", steps=(0, 1, 2, 4), layers=2)
    for where, error in (
        ("init", RuntimeError("one\ntwo")),
        ("log", TypeError("one")),
        ("log", SystemExit("one")),
        ("finish", AssertionError("one")),
    ):
        fake(monkeypatch, where, raising(error))
        mirror = WandbMirror(mode="online")
        mirror.open(root, run_id="a1b2c3d4", config={})
        mirror.log_step(5, None, {"train/loss": 1.0}, [])
        mirror.finish()
        later = f"the run goes on, `lit-layers report {root} --wandb` adds what is missing later"
        assert mirror.closing_line == f"W&B: stopped (one); {later}", (where, error)


def test_a_finish_that_hangs_is_abandoned_after_its_limit(tmp_path, monkeypatch, release):
    monkeypatch.setattr(wandb_mirror, "LIMIT", 0.5)
    fake(monkeypatch, "finish", release.wait)
    root = make_run(tmp_path / "run", steps=(0, 1), layers=2)
    mirror = WandbMirror(mode="online")
    mirror.open(root, run_id="a1b2c3d4", config={})
    started = time.monotonic()
    mirror.finish()
    assert time.monotonic() - started < 60
    assert "W&B: stopped (not all was sent within 0 s)" in mirror.closing_line
    assert f"`lit-layers report {root} --wandb` adds what is missing later" in mirror.closing_line
    assert wandb_mirror.abandoned == [mirror]


def test_a_slow_finish_is_waited_for(tmp_path, monkeypatch):
    run = fake(monkeypatch, "finish", lambda: time.sleep(2))
    mirror = WandbMirror(mode="online")
    mirror.open(make_run(tmp_path / "run", steps=(0, 1), layers=2), run_id="a1b2c3d4", config={})
    mirror.finish()
    assert mirror.closing_line.startswith(f"W&B          {run.url}")


def test_the_long_table_is_sent_once_at_the_end_of_an_interrupted_run(tmp_path, monkeypatch):
    run, root = fake(monkeypatch, "nowhere", None), make_run(tmp_path / "run", steps=(0, 1), layers=2)
    for exit_code, tables in ((143, 0), (130, 0), (0, 1)):
        mirror = WandbMirror(mode="online")
        mirror.open(root, run_id="a1b2c3d4", config={})
        mirror.finish(exit_code)
        assert sum("emergence" in row for row in run.rows) == tables


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("mirrors", [{"hangs": "finish"}, {"with": "nowhere", "raises": "init"}], ids=" ".join)
def test_a_training_is_bit_for_bit_the_same_without_wandb_with_it_and_if_it_hangs_or_raises(
    mirrors, tmp_path, corpus, monkeypatch, release, capsys
):
    monkeypatch.setattr(wandb_mirror, "LIMIT", 2.0)
    options = {**RECIPE, "corpus": str(corpus), "analyses": RECIPE["analyses"][:1]}
    mirror = {"class_path": "lit_layers.report.WandbMirror", "init_args": {"mode": "online"}}
    left = {}
    for name, where in {"without": None, **mirrors}.items():
        fake(monkeypatch, where or "", raising(RuntimeError("x")) if where == "init" else release.wait)
        recipe, root = tmp_path / f"{name}.yaml", tmp_path / name
        recipe.write_text(yaml.safe_dump({**options, **({"wandb": mirror} if where else {})}))
        assert main(["fit", "--config", str(recipe), "--root", str(root)]) == 0
        losses = [row["train/loss"] for row in records.rows(root / "metrics.jsonl")]
        weights = [(step_folder(root, step) / "model.safetensors").read_bytes() for step in saved_steps(root)]
        left[name] = losses, weights, [m.records for m in records.read(root / "measurements.jsonl")]
    assert all(each == left["without"] for each in left.values())
    output = capsys.readouterr().out
    assert ("W&B: stopped (not all was sent within 2 s)" in output) == ("hangs" in mirrors)
    assert ("W&B: stopped (x)" in output) == ("raises" in mirrors)
    assert all(Path(tmp_path / name / "report.html").exists() for name in mirrors)
