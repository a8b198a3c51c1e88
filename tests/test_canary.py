"""A curve is not half measured under one version of the libraries and half under another that computes other states."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from lit_layers import records
from lit_layers.analyses import Trajectory
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.identity import drift
from lit_layers.measuring import canary, one_model
from lit_layers.measuring.offline import analyze, analyze_series
from lit_layers.models import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.series import StepFolders
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from tests.support.random_text import RandomText
from tests.support.saved_models import saved
from tests.support.tiny_models import tiny
from tests.support.tiny_training import fit

SUMS = 8


def analyses() -> list:
    return [Trajectory(batches=RandomText())]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A series of steps 0, 2 and 4, of which steps 0 and 2 are measured in the folder `half` beside it."""
    root = tmp_path_factory.mktemp("runs") / "run"
    fit(root, [SeriesCheckpoint({"every": 2}, root)], steps=4)
    analyze_series(StepFolders(root, steps=[0, 2]), analyses(), root=root.parent / "half")
    return root


@pytest.fixture
def half(run, tmp_path) -> Path:
    return Path(shutil.copytree(run.parent / "half", tmp_path / "half"))


def under_other_versions(monkeypatch, **other: str) -> None:
    known = {**one_model.versions(), **(other or {"transformers": "99.1.0"})}
    monkeypatch.setattr(one_model, "versions", lambda: known)


def drifted(monkeypatch, factor: float = 1.01) -> None:
    """A library whose blocks add a little more to their input than they did."""
    plain = GPT2Block.forward

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states + factor * (plain(self, hidden_states, *args, **kwargs) - hidden_states)

    monkeypatch.setattr(GPT2Block, "forward", forward)


def test_a_canary_is_signed_sums_of_the_models_own_hidden_states():
    model, states = tiny("gpt2", torch.float64), []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        block.register_forward_hook(lambda _, args, output: states.append(output))
    size = model.config.vocab_size
    length = min(32, model.config.n_positions)
    with torch.no_grad():
        model(torch.tensor([[7919 * place % size for place in range(1, length + 1)]]))
    found = canary.provenance_of(model, weights_hash(model))["canary"]
    digits = "".join(f"{byte:08b}" for byte in hashlib.shake_256(b"canary").digest(SUMS * 32 // 8))
    signs = np.array([1.0 if digit == "1" else -1.0 for digit in digits]).reshape(SUMS, 32)
    assert list(found) == ["0", "1", "3"]
    for layer, state in zip(("0", "1", "3"), (states[0], states[1], states[-1]), strict=True):
        expected = [signs @ state[0, place].numpy() for place in (length // 2, length - 1)]
        np.testing.assert_allclose(found[layer], np.concatenate(expected), rtol=1e-7, atol=1e-7)


def test_a_drift_is_the_largest_of_a_layer_and_token_however_large_another_is():
    before = {"0": [1.0] * SUMS + [1e6] * SUMS, "2": [1.0] * SUMS * 2}
    assert drift(before, before) == 0
    small = {**before, "0": [1.0] * (SUMS - 1) + [1.2] + [1e6] * SUMS}
    assert drift(before, small) == drift(small, before) == pytest.approx(0.2 / (7 + 1.2**2) ** 0.5)
    assert drift({"0": [0.0] * SUMS}, {"0": [0.0] * SUMS}) == 0
    assert drift(before, {"0": before["0"]}) == float("inf")


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_pass_leaves_no_trace_and_gives_what_reading_block_by_block_gives(name, tmp_path):
    model = saved(tmp_path / "model", "llama") if name == "llama" else tiny(name)
    model.train()
    state, version = torch.get_rng_state(), [p._version for p in model.parameters()]
    found = canary.provenance_of(LayeredModel(model), weights_hash(model))["canary"]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert [p._version for p in model.parameters()] == version
    assert canary.provenance_of(model, "other")["canary"] == found
    if name == "llama":
        (streamed,) = analyze(tmp_path / "model", analyses(), root=tmp_path / "run", stream_blocks=True)
        assert drift(streamed.provenance["canary"], found) < 1e-6


def test_a_series_goes_on_under_other_versions_that_compute_the_same(run, half, monkeypatch, caplog):
    under_other_versions(monkeypatch, torch="99.0", transformers="99.1.0")
    result = analyze_series(StepFolders(run), analyses(), root=half)
    assert [m.step for m in result.measurements] == [4]
    assert caplog.records == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_series_does_not_go_on_under_a_version_that_computes_other_states(run, half, monkeypatch, stream):
    lines = (half / "measurements.jsonl").read_bytes()
    under_other_versions(monkeypatch)
    drifted(monkeypatch)
    sentence = (
        r"^half, step 2: the same weights \(\w{16}\) have other hidden states under transformers 99.1.0 than under "
    )
    with pytest.raises(InputError, match=sentence):  # step 4 was never measured, and has nothing to be compared with
        analyze_series(StepFolders(run, steps=[4]), analyses(), root=half, stream_blocks=stream)
    assert (half / "measurements.jsonl").read_bytes() == lines


def test_it_is_one_sentence_and_exit_code_2(run, half, tmp_path, monkeypatch, capsys):
    under_other_versions(monkeypatch, timm="0.0")
    drifted(monkeypatch)
    data = {"class_path": "tests.support.random_text.RandomText"}
    recipe = {"analyses": [{"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": data}}]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    words = ["--config", str(tmp_path / "recipe.yaml"), "--code", "tests", "--steps", "[4]", "--root", str(half)]
    assert main(["analyze", str(run), *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "have other hidden states under timm 0.0 than under timm" in error
    assert "make a curve under one version, or use another root" in error


def test_under_the_same_versions_nobody_asks_and_another_build_is_the_same_version(run, half, monkeypatch):
    under_other_versions(monkeypatch, torch=one_model.versions()["torch"].partition("+")[0] + "+cu999")

    def refuse_to_compare(measured):
        if len(measured) < 2:
            pytest.fail("compared")

    monkeypatch.setattr(canary.identity, "refuse_drift", refuse_to_compare)
    assert [m.step for m in analyze_series(StepFolders(run), analyses(), root=half).measurements] == [4]


def test_where_nothing_measured_is_here_a_warning_names_both_versions(run, half, tmp_path, monkeypatch, caplog):
    series = tmp_path / "series" / "run"
    shutil.copytree(run, series)
    for step in (0, 2):
        shutil.rmtree(series / f"step-{step:09d}")
    old = (half / "measurements.jsonl").read_text().replace(str(run), str(series))
    (half / "measurements.jsonl").write_text(old)
    under_other_versions(monkeypatch)
    drifted(monkeypatch)
    analyze_series(StepFolders(series), analyses(), root=half)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        f"half was measured under transformers {one_model.importlib.metadata.version('transformers')} and"
    )
    assert "goes on under transformers 99.1.0: none of its measured checkpoints is here" in message
    assert [m.step for m in records.read(half / "measurements.jsonl")] == [0, 2, 4]


def test_a_model_measured_twice_is_compared_with_itself(run, tmp_path, monkeypatch):
    analyze(run / "step-000000004", analyses(), root=tmp_path / "one")
    under_other_versions(monkeypatch)
    analyze(run / "step-000000004", [Trajectory(name="again", batches=RandomText())], root=tmp_path / "one")
    under_other_versions(monkeypatch, transformers="99.2.0")
    drifted(monkeypatch)
    with pytest.raises(InputError, match="other hidden states under transformers 99.2.0"):
        analyze(run / "step-000000004", [Trajectory(name="more", batches=RandomText())], root=tmp_path / "one")


def test_curves_of_two_versions_are_refused_where_they_are_read(half, monkeypatch):
    first = records.read(half / "measurements.jsonl")[-1]
    canaries = {layer: [value * (1 + 3e-4) for value in values] for layer, values in first.provenance["canary"].items()}
    other = {**first.provenance, "canary": canaries, "versions": {**first.provenance["versions"], "transformers": "1"}}
    again = dataclasses.replace(first, analysis="other", provenance=other)
    records.append(half / "measurements.jsonl", again)
    with pytest.raises(InputError, match=r"by 3\.0e-04 where 0\.0001 is allowed"):
        records.frame(half / "measurements.jsonl")
    assert main(["report", str(half)]) == 2
    assert main(["emerge", str(half)]) == 2
    near = {layer: [value * (1 + 5e-5) for value in values] for layer, values in first.provenance["canary"].items()}
    records.append(half / "measurements.jsonl", dataclasses.replace(again, provenance={**other, "canary": near}))
    assert len(records.frame(half / "measurements.jsonl"))


def test_training_that_goes_on_is_refused_or_warned_of(tmp_path, monkeypatch, caplog):
    root = tmp_path / "run"

    def part(steps: int, resume_from: Path | None = None) -> None:
        watch = EmergenceCallback(analyses(), [0, 2, 4], root)
        trainer, _ = fit(root, [watch], steps=steps, resume_from=resume_from, logger=False)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")

    part(2)
    steps = [m.step for m in records.read(root / "measurements.jsonl")]
    under_other_versions(monkeypatch)
    with monkeypatch.context() as patch:
        drifted(patch)
        with pytest.raises(InputError, match="run, step 2: the same weights"):
            part(4, tmp_path / "2.ckpt")
    warned = lambda: [r.getMessage() for r in caplog.records if r.name == "lit_layers.measuring.canary"]  # noqa: E731
    assert (warned(), [m.step for m in records.read(root / "measurements.jsonl")]) == ([], steps)
    drifted(monkeypatch)
    kept = [m for m in records.read(root / "measurements.jsonl") if m.step == 0]
    (root / "measurements.jsonl").unlink()
    for m in kept:  # the step that it goes on from was not measured
        records.append(root / "measurements.jsonl", m)
    part(4, tmp_path / "2.ckpt")
    assert [each.partition(" ")[0] for each in warned()] == ["run"]
    measured = records.read(root / "measurements.jsonl")
    assert [m.step for m in measured] == [0, 2, 4]
    assert all(m.provenance["canary"] for m in measured)
