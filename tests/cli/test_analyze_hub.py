"""`lit-layers analyze` on a series of the Hub: whole, interrupted, in trouble; every number as measured on the spot."""

import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from lit_layers import records
from lit_layers.analyses import Representation, Trajectory
from lit_layers.cli.main import main
from lit_layers.data import EvalText
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.series import HubRevisions
from lit_layers.series.checkpoint import THREAD, Checkpoint
from tests.support.fake_hub import Repo
from tests.support.measured_series import analyze as analyze_one
from tests.support.series_hub import TWELVE, make_series, served, template

FEW = (0, 2, 4, 8)
SIZE = {"num_sequences": 4, "num_tokens": 16}
TEXT = {
    "class_path": "lit_layers.data.EvalText",
    "init_args": {"corpus": "${corpus}", "tokenizer": "${tokenizer}", **SIZE},
}
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


def found(root: Path) -> dict:
    """What the file holds, and that it holds nothing twice."""
    measured = records.read(root / "measurements.jsonl")
    numbers = {(m.step, m.analysis): m.records for m in measured}
    assert len(numbers) == len(measured)
    return numbers


def measured_on_the_spot(repository: Path, corpus: Path, root: Path, steps) -> dict:
    """Each step's folder as a model by itself."""
    text = EvalText(str(corpus), str(corpus / "tokenizer"), **SIZE)
    these = [Trajectory(batches=text), Representation(batches=text)]
    every = {step: analyze_one(repository / f"step{step}", these, root=root / str(step)) for step in steps}
    return {(step, m.analysis): m.records for step, measurements in every.items() for m in measurements}


@pytest.fixture(scope="module")
def on_the_spot(model, corpus, tmp_path_factory) -> dict:
    """The same of the steps that most tests look at, once."""
    folder = tmp_path_factory.mktemp("few")
    make_series(model, folder, FEW)
    return measured_on_the_spot(folder, corpus, folder / "local", FEW)


@pytest.mark.soak
@pytest.mark.slow
def test_eight_steps_are_audited_measured_interrupted_and_continued(
    hub, repository, model, corpus, command, tmp_path, capsys, monkeypatch
):
    steps = TWELVE[:8]
    make_series(model, repository, steps, values={16: 0.25, 32: 0.25})  # one of the two is another step's
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
    assert list(found(tmp_path / "out")) == [(s, name) for s in steps[:5] for name in ("trajectory", "representation")]
    loads.clear()
    assert main([*command, "--keep_downloads", "false"]) == 0
    said = capsys.readouterr().out
    assert "lab/tiny: 8 checkpoints, suspect: steps 16, 32" in said
    assert "left out as suspect: step16, step32; --allow_suspect measures them" in said
    assert "2 measured, 10 were known" in said
    clean = [step for step in steps if step not in (16, 32)]
    expected = measured_on_the_spot(repository, corpus, tmp_path / "local", steps)
    assert found(tmp_path / "out") == {key: numbers for key, numbers in expected.items() if key[0] in clean}
    assert main([*command, "--allow_suspect"]) == 0
    assert found(tmp_path / "out") == expected
    verdicts = {m.step: m.provenance["audit"] for m in records.read(tmp_path / "out" / "measurements.jsonl")}
    assert {step for step, verdict in verdicts.items() if verdict.split(" ")[0] != "clean"} == {16, 32}
    assert verdicts[1] == "clean (level: listing)", "of the moment when it was measured"
    assert verdicts[16] == "suspect: identical weights"


def test_the_tokenizer_of_a_series_is_named_by_its_commit(hub, repository, model, corpus, command, tmp_path):
    """What a measurement is made with does not depend on where a machine keeps its downloads."""
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


WEIGHTS = r"_cdn/.*/step4/"


@pytest.mark.soak
@pytest.mark.parametrize("trouble", ["429", "503", "timeout"])
def test_trouble_is_met_with_patience_then_named_and_the_others_are_measured(
    trouble, hub, repository, model, on_the_spot, command, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub asks again at once
    make_series(model, repository, FEW)
    commit = Repo("models", "lab/tiny", repository).commit(repository / "step4")
    if trouble == "timeout":
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
        hub.delay(WEIGHTS, 0.5, times=1000)
    else:
        hub.fail(WEIGHTS if trouble == "429" else f"/tree/{commit}", int(trouble), times=1000)
    sentence = {"429": "cannot download model.safetensors of lab/tiny at step4", "timeout": "timed out"}
    assert main(command) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert sentence.get(trouble, "cannot list the files of lab/tiny at step4") in line
    assert "run the same command again later" in line
    assert found(tmp_path / "out") == {key: numbers for key, numbers in on_the_spot.items() if key[0] != 4}
    hub.rules.clear()
    assert main(command) == 0
    assert found(tmp_path / "out") == on_the_spot


def waits_in(function: str) -> bool:
    """Whether the main thread is inside a function: a Ctrl-C that finds it in a finalizer is dropped by Python."""
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
        while hub.rules[0].left or not waits_in("result"):  # of the download
            if ended.wait(0.01):
                return
        # To this thread: as one that comes just before the main thread waits, it wakes up no wait.
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
    assert all(thread.daemon for thread in under_way)  # nor does the interpreter wait for it
    assert "interrupted: run the same command again to go on" in capsys.readouterr().err
