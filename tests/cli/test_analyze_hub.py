"""`lit-layers analyze` on a series of the Hub: complete, interrupted and with errors.

Every number equals a measurement of the local files.
"""

import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.analyses import Representation, Trajectory
from lit_layers.cli.main import main
from lit_layers.data import EvalText
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.series import HubRevisions
from lit_layers.series.checkpoint import THREAD, Checkpoint
from tests.cli.test_fit import TEXT
from tests.support.measured_series import analyze as analyze_one
from tests.support.series_hub import TWELVE, make_series, served, template

FEW = (0, 2, 4, 8)
SIZE = {"num_sequences": 4, "num_tokens": 16}
RECIPE = {
    "analyses": [
        {"class_path": f"lit_layers.analyses.{name}", "init_args": {"batches": TEXT}}
        for name in ("Trajectory", "Representation")
    ]
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus) -> Path:
    folder = template(tmp_path_factory.mktemp("template") / "model", vocab_size=300)
    for file in (corpus / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def repository(tmp_path) -> Path:
    return tmp_path / "hub" / "lab" / "tiny"


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    repository.mkdir(parents=True)
    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch) as hub:
        yield hub


@pytest.fixture
def command(tmp_path, corpus) -> list[str]:
    recipe = tmp_path / "recipe.yaml"
    series = {"class_path": "lit_layers.series.HubRevisions", "init_args": {"repo": "lab/tiny"}}
    recipe.write_text(yaml.safe_dump({**RECIPE, "series": series, "corpus": str(corpus)}))
    return ["analyze", "--config", str(recipe), "--root", str(tmp_path / "out"), "--device", "cpu"]


def saved_numbers(root: Path) -> dict:
    """Return the records per step and analysis, and check that none occurs twice."""
    measured = records.read(root / "measurements.jsonl")
    numbers = {(m.step, m.analysis): m.records for m in measured}
    assert len(numbers) == len(measured)
    return numbers


def measure_local_files(repository: Path, corpus: Path, root: Path, steps) -> dict:
    """Measure each step's folder as a single model."""
    text = EvalText(str(corpus), str(corpus / "tokenizer"), **SIZE)
    these = [Trajectory(batches=text), Representation(batches=text)]
    every = {step: analyze_one(repository / f"step{step}", these, root=root / str(step)) for step in steps}
    return {(step, m.analysis): m.records for step, measurements in every.items() for m in measurements}


@pytest.mark.soak
@pytest.mark.slow
def test_eight_steps_are_audited_measured_interrupted_and_continued(
    hub, repository, model, corpus, command, tmp_path, capsys, monkeypatch
):
    steps = TWELVE[:8]
    make_series(model, repository, steps, values={16: 0.25, 32: 0.25})  # 16 and 32 have equal weights
    loads: list[int] = []
    real = Checkpoint.load

    def interrupted(self, **options):
        loads.append(self.step)
        if len(loads) == 6:
            raise KeyboardInterrupt
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", interrupted)
        assert main(command) == 130
    assert "interrupted: run the same command again to go on" in capsys.readouterr().err
    assert list(saved_numbers(tmp_path / "out")) == [
        (s, n) for s in steps[:5] for n in ("trajectory", "representation")
    ]
    loads.clear()
    assert main([*command, "--keep_downloads", "false"]) == 0
    output = capsys.readouterr().out
    assert "lab/tiny: 8 checkpoints, suspect: steps 16, 32" in output
    assert "left out as suspect: step16, step32; --allow_suspect measures them" in output
    assert "2 measured, 10 were known" in output
    clean = [step for step in steps if step not in (16, 32)]
    expected = measure_local_files(repository, corpus, tmp_path / "local", steps)
    assert saved_numbers(tmp_path / "out") == {key: numbers for key, numbers in expected.items() if key[0] in clean}
    assert main([*command, "--allow_suspect", "--keep_downloads", "false"]) == 0
    assert saved_numbers(tmp_path / "out") == expected
    verdicts = {m.step: m.provenance["audit"] for m in records.read(tmp_path / "out" / "measurements.jsonl")}
    assert {step for step, verdict in verdicts.items() if verdict.split(" ")[0] != "clean"} == {16, 32}
    assert verdicts[1] == "clean (level: listing)", "of the moment when it was measured"
    assert verdicts[16] == "suspect: identical weights"


def test_the_tokenizer_of_a_series_is_named_by_its_commit(hub, repository, model, corpus, command, tmp_path):
    """The hash of the configuration does not depend on where a machine stores its downloads."""
    make_series(model, repository, (0, 1))
    series = HubRevisions("lab/tiny")
    last = series.listing.checkpoints[-1].source.describe()["commit"]
    named = series.listing.checkpoints[-1].source.tokenizer()
    assert named == f"lab/tiny@{last}"
    ours = load_tokenizer(str(corpus / "tokenizer"))
    assert tokenizer_hash(load_tokenizer(named).tokenizer) == tokenizer_hash(ours.tokenizer)
    assert main(command) == 0
    expected = Trajectory(batches=EvalText(str(corpus), named, **SIZE)).config_hash()
    hashes = {m.provenance["config_hash"] for m in records.read(tmp_path / "out" / "measurements.jsonl")}
    assert expected in hashes


def waits_in(function: str) -> bool:
    """Return whether the main thread is inside this function. Python drops a Ctrl-C that arrives in a finalizer."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


@pytest.mark.soak
def test_ctrl_c_does_not_wait_for_a_download(hub, repository, model, command, capsys):
    make_series(model, repository, FEW)
    hub.delay(r"_cdn/.*/step2/", 3600, times=1)
    ended = threading.Event()

    def press() -> None:
        while hub.rules[0].left or not waits_in("result"):  # waits for the result of the download
            if ended.wait(0.01):
                return
        # Sent to this thread: a signal that arrives just before the main thread waits wakes up no wait.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    try:
        assert main(command) == 130
    finally:
        ended.set()
        finger.join()
    assert [each["path"] for each in hub.requests if re.search(r"_cdn/.*/step2/", each["path"])] == []
    under_way = [thread for thread in threading.enumerate() if thread.name == THREAD]
    assert under_way
    assert all(thread.daemon for thread in under_way)  # the interpreter does not wait for daemon threads at its end
    assert "interrupted: run the same command again to go on" in capsys.readouterr().err
