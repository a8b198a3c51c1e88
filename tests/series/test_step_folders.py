"""Series of local folders: our own runs and folders of other programs."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.models.saved import load
from lit_layers.series import StepFolders, audit
from tests.support.series_hub import make_step


@pytest.fixture
def run(tmp_path, model) -> Path:
    """A run as training leaves it: a schedule, tokens per step, and step folders next to other files."""
    root = tmp_path / "first"
    for index, step in enumerate((0, 1, 2, 4, 8)):
        make_step(model, root / f"step-{step:09d}", index / 16)
    for name in ("resume", "wandb", ".tmp-step-000000016"):
        (root / name).mkdir()
    (root / "resume" / "step-000000008.ckpt").write_bytes(b"x")
    (root / "run.json").write_text(json.dumps({"tokens_per_step": 2048, "config": {"steps": {"log": 2}}}))
    return root


def test_our_own_run_is_a_series_with_tokens(run, model):
    series = StepFolders(run)
    assert [(found.step, found.tokens) for found in series] == [(step, step * 2048) for step in (0, 1, 2, 4, 8)]
    assert series.name == "first"
    third = series.checkpoints[2]
    assert third.fetch() == run / "step-000000002"
    expected = load(run / "step-000000002").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in third.load().state_dict().items())
    weights = run / "step-000000002" / "model.safetensors"
    assert third.provenance() == {
        "series": "first",
        "checkpoint": str(run / "step-000000002"),
        "weight_files": {weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()},
    }
    third.source.drop()
    assert weights.is_file()


def test_a_missing_step_of_the_schedule_is_a_gap(run):
    shutil.rmtree(run / "step-000000002")
    (finding,) = audit(StepFolders(run)).findings
    assert (finding.kind, finding.steps) == ("gap", (2,))


def test_folders_of_other_programs_are_series(tmp_path, model):
    for step in (500, 1000, 20):
        make_step(model, tmp_path / "run" / f"checkpoint-{step}", step / 64)
    series = StepFolders(tmp_path / "run", tokens_per_step=10)
    assert [(found.step, found.tokens) for found in series] == [(20, 200), (500, 5000), (1000, 10000)]
    assert [found.step for found in StepFolders(tmp_path / "run", {"log_spaced": 2})] == [20, 1000]
    assert [found.tokens for found in StepFolders(tmp_path / "run")] == [None, None, None]


def test_adapters_of_a_trainer_are_reported_as_adapters(tmp_path):
    for step in (500, 1000):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text("{}")
    (finding,) = audit(StepFolders(tmp_path)).findings
    assert (finding.kind, finding.steps) == ("no config", (500, 1000))
    assert finding.message.startswith("an adapter of peft without its model: merge it into its model")


def test_wrong_input_is_refused(tmp_path, run):
    """Other refusals are tested in tests/cli/test_refusals.py."""
    lone = "step-000000001 holds no folder that is a step, .*; it is one model: leave steps out, or name the folder"
    for series, sentence in (
        (lambda: StepFolders(run / "step-000000001", [5]), lone),
        (lambda: StepFolders(run, grammar="checkpoint"), "first holds no folder that is a step"),
    ):
        with pytest.raises(InputError, match=sentence):
            list(series())
    (run / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run.json: not valid JSON"):
        list(StepFolders(run))
