"""`lit-layers audit`: its tables, exit codes, and errors for wrong input."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lit_layers.cli.main import main
from lit_layers.series import HubRevisions
from lit_layers.series.auditing import UNSEEN
from tests.support.series_hub import make_series, make_step, served, template


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return template(tmp_path_factory.mktemp("template") / "whole")


@pytest.fixture
def run(tmp_path, model) -> Path:
    root = tmp_path / "first"
    for index, step in enumerate((0, 1, 2, 4, 8)):
        make_step(model, root / f"step-{step:09d}", index / 16)
    return root


def replace_step(run: Path, one: int, other: int) -> None:
    shutil.rmtree(run / f"step-{other:09d}")
    shutil.copytree(run / f"step-{one:09d}", run / f"step-{other:09d}")


def test_a_clean_run_and_a_run_with_only_notes_exit_with_0(run, capsys):
    assert main(["audit", str(run)]) == 0
    first, unseen = capsys.readouterr().out.splitlines()
    assert first == "first: 5 checkpoints, clean (level: weights)"
    assert unseen == f"not checked at this level: {UNSEEN['weights']}"
    assert "scaled by one factor" in unseen
    replace_step(run, 0, 1)
    assert main(["audit", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "first: 5 checkpoints, clean" in out
    assert "note: identical weights" in out


def test_a_suspect_run_exits_with_1_and_lists_its_suspect_steps(run, capsys, tmp_path):
    replace_step(run, 8, 2)
    assert main(["audit", str(run), "--json", str(tmp_path / "audit.json")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "first: 5 checkpoints, suspect: step 2 " in out
    assert "equal to the final step" in out
    assert "serve the weights of step 8" in out
    found = json.loads((tmp_path / "audit.json").read_text())
    assert (found["suspect_steps"], found["unseen"]) == ([2], UNSEEN["weights"])
    assert found["findings"][0]["steps"] == [2]
    for steps in ("0,1,4", "[0, 1, 4]", "{log_spaced: 2}", "4"):
        assert main(["audit", str(run), "--steps", steps]) == 0, steps
    assert main(["audit", str(run), "--steps", "0,2"]) == 1


def test_the_repositories_of_a_manifest_are_audited_one_after_the_other(tmp_path, model, monkeypatch, capsys):
    manifest = tmp_path / "own.yaml"
    manifest.write_text("repositories: [{names: [org/one, org/two], ranges: [[0, 20, 10]]}]")
    make_series(model, tmp_path / "hub" / "org" / "one", [0, 10, 20])
    make_series(model, tmp_path / "hub" / "org" / "two", [0, 20])
    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch):
        assert main(["audit", str(manifest), "--json", str(tmp_path / "audit.json")]) == 1
        assert main(["audit", "org/one", "--grammar", "step"]) == 0
    first, second = json.loads((tmp_path / "audit.json").read_text())
    assert first["clean"]
    assert second["findings"][0]["kind"] == "gap"
    assert second["findings"][0]["steps"] == [10]
    assert "org/two: 2 checkpoints, suspect: see below" in capsys.readouterr().out


def test_weights_of_a_repository_in_the_local_cache_are_read_and_judged(tmp_path, model, monkeypatch, capsys):
    repository = make_series(model, tmp_path / "hub" / "org" / "tiny", [0, 1, 2, 4, 8], values={8: 0.5})
    (file,) = (repository / "step2").glob("*.safetensors")
    later = load_file(repository / "step8" / file.name)
    save_file({name: tensor.bfloat16().to(tensor.dtype) for name, tensor in later.items()}, file)
    monkeypatch.chdir(tmp_path)
    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch) as hub:
        assert main(["audit", "org/tiny"]) == 0  # no weights are in the cache, and none is downloaded
        out = capsys.readouterr().out
        assert "org/tiny: 5 checkpoints, clean (level: listing)" in out
        assert (
            f"not checked at this level: {UNSEEN['listing']}\nnot checked: weights of checkpoints step0, step1" in out
        )
        assert not [each for each in hub.requests if "_cdn" in each["path"]]
        checkpoints = HubRevisions("org/tiny").checkpoints
        for checkpoint in checkpoints:
            checkpoint.fetch()
        assert main(["audit", "org/tiny", "--json", "audit.json"]) == 1
        out = " ".join(capsys.readouterr().out.split())
        assert "org/tiny: 5 checkpoints, suspect: step 2 (level: weights)" in out
        assert "other precision" in out
        for checkpoint in checkpoints:
            checkpoint.source.drop()
        assert main(["audit", "org/tiny"]) == 1, "what was read is kept"
    found = json.loads((tmp_path / "audit.json").read_text())
    assert (found["level"], found["suspect_steps"]) == ("weights", [2])
