"""Measuring a trained model, whole or offloaded: the same numbers, the same provenance, nothing measured twice."""

import json
from pathlib import Path

import pytest
import torch

from lit_layers import records
from lit_layers.analyses import Coupling, Lens, Representation, Trajectory
from lit_layers.errors import InputError
from lit_layers.series import OneModel
from tests.support.listed_batches import Listed
from tests.support.measured_series import analyze
from tests.support.rounding import assert_same_numbers
from tests.support.saved_models import saved, saved_vit
from tests.support.tiny_models import tiny_batch


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "step-000000500"
    saved(folder, "llama")
    return folder


def three(name: str = "llama", *, seed: int = 0, **options) -> list:
    data = Listed(tiny_batch(name, padding="left", seed=seed), tiny_batch(name, batch=2, tokens=6, seed=2))
    return [Trajectory(batches=data), Representation(batches=data), Coupling(batches=data, k=(3,), **options)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_and_analyze_write_the_same_measurements(model, tmp_path, dtype):
    whole = analyze(model, three(), root=tmp_path / "whole" / "run", dtype=dtype)
    offloaded = analyze(model, three(), root=tmp_path / "offloaded" / "run", offload=tmp_path / "scratch", dtype=dtype)
    for one, other in zip(whole, offloaded, strict=True):
        assert (one.run, one.step, one.analysis, one.error) == (other.run, other.step, other.analysis, other.error)
        assert (one.run, one.step, one.error) == ("run", 500, None)
        assert len(one.records) > 20
        assert one.provenance | {"offloaded": True} == other.provenance
        assert (len(one.provenance["weights_hash"]), one.provenance["dtype"]) == (16, dtype)
        assert other.seconds > 0
    assert_same_numbers(offloaded, whole, getattr(torch, dtype))
    again = analyze(model, three(), root=tmp_path / "whole" / "run", offload=tmp_path / "scratch", dtype=dtype)
    assert again == whole, "the same weights are known"
    assert records.read(tmp_path / "offloaded" / "run" / "measurements.jsonl") == offloaded
    assert sorted(path.name for path in (tmp_path / "offloaded" / "run").iterdir()) == ["measurements.jsonl", "values"]
    assert [*(tmp_path / "scratch").iterdir()] == []


def test_measurements_with_bfloat16_blocks_are_read_back(model, tmp_path):
    (found,) = analyze(model, [Lens(batches=three()[0].batches)], root=tmp_path / "run", dtype="bfloat16")
    assert found.provenance["dtype"] == "float32"
    assert "bf16_difference" in {record.metric for record in found.records}
    assert records.read(tmp_path / "run" / "measurements.jsonl") == [found]


def test_an_empty_root_does_not_mean_the_working_directory(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="^root: expected a folder, got ''$"):
        analyze(model, three(), root="")
    assert not (tmp_path / "measurements.jsonl").exists()


@pytest.mark.parametrize("offloads", [False, True])
def test_an_unmeasurable_model_is_refused_in_one_sentence(model, tmp_path, offloads):
    def refusal(analyses, folder=model, **options) -> str:
        with pytest.raises(InputError) as raised:
            analyze(folder, analyses, root=tmp_path / "run", offload=tmp_path / "x" if offloads else None, **options)
        assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.jsonl"))
        return str(raised.value)

    data = Listed(tiny_batch("llama"))
    assert "coupling: expected k between 1 and the dimension 32, got 33" in refusal([Coupling(batches=data, k=(33,))])
    assert "two are named 'trajectory'" in refusal([Trajectory(batches=data)] * 2)
    assert refusal([Trajectory(batches=data)], tmp_path / "none").endswith("none does not exist")
    if not torch.cuda.is_available():
        sentence = "device: cuda was asked for and torch sees no GPU: use cpu or auto"
        assert refusal([Trajectory(batches=data)], device="cuda") == sentence
    saved(tmp_path / "cut", "llama")
    shard = sorted((tmp_path / "cut").glob("*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:3000])
    assert "cut cannot be loaded: " in refusal([Trajectory(batches=data)], tmp_path / "cut")
    if offloads:
        saved_vit(tmp_path / "vit")
        images = [Trajectory(batches=Listed(tiny_batch("vit")))]
        assert "vit is a model of timm, which is only read whole" in refusal(images, tmp_path / "vit")


def test_a_saved_tokenizer_is_used_and_the_folder_name_gives_the_step(model, tmp_path):
    saved(tmp_path, "gpt2")
    for expected in (None, str(tmp_path)):
        series = OneModel(tmp_path)
        assert series.tokenizer(series.checkpoints[0]) == expected
        (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    for name, step in (("step-000001000", 1000), ("step64", 64), ("main", None), ("a-step-5", None)):
        (tmp_path / name).symlink_to(model)
        (checkpoint,) = OneModel(tmp_path / name).checkpoints
        assert checkpoint.step == step, name
