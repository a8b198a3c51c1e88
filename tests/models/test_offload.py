"""Models whose blocks accelerate reads from the disk: measured as in memory, and restored."""

import gc
import importlib.util

import pytest
import torch
from torch import nn

import lit_layers
from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.errors import InputError
from lit_layers.measuring.one_model import STATE_BYTES, microbatches
from lit_layers.measuring.undisturbed import DisturbedError, undisturbed
from lit_layers.models import LayeredModel, load
from lit_layers.models.build import quiet, weights_hash
from lit_layers.models.offload import Offload
from tests.support.listed_batches import Listed
from tests.support.saved_models import saved
from tests.support.tiny_models import tiny_batch

CPU = torch.device("cpu")
pytest.importorskip("accelerate")


def batches(name: str) -> Listed:
    return Listed(tiny_batch(name, padding="left"), tiny_batch(name, batch=2, tokens=6, seed=2))


def analyses(name: str) -> list:
    data = batches(name)
    return [Trajectory(batches=data), Lens(batches=data), Coupling(batches=data, k=(3,), num_prompts=2)]


def on_meta(model: nn.Module) -> list[bool]:
    return [parameter.is_meta for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.soak)])
def test_every_number_equals_that_of_the_model_in_memory(tmp_path, name):
    saved(tmp_path / "model", name)
    whole, offloaded = (load(tmp_path / "model", offload=each) for each in (None, Offload(tmp_path / "scratch", CPU)))
    views = LayeredModel(whole), LayeredModel(offloaded)
    assert all(on_meta(block) == [True] * len(on_meta(block)) for block in views[1].blocks)
    assert views[1].device == CPU
    assert weights_hash(offloaded) == weights_hash(whole)
    for analysis in analyses(name):
        one, other = (lit_layers.measure(view, analysis, run="r", step=0, raises=True) for view in views)
        assert other.records == one.records
        assert other.provenance == one.provenance
    assert on_meta(offloaded).count(False) < len(on_meta(offloaded)) / 2, "nothing stays in memory"


@pytest.mark.soak
def test_a_model_with_a_device_map_of_transformers_is_measured(tmp_path):
    """Embedding and head are on the disk, one block is in memory and two are on the disk."""
    model = saved(tmp_path / "model", "llama")
    placed = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk", "model.rotary_emb": "cpu"}
    placed |= {"model.embed_tokens": "disk", "model.norm": "disk", "lm_head": "disk"}
    with quiet(reports=False):
        dispatched = type(model).from_pretrained(
            tmp_path / "model", device_map=placed, offload_folder=tmp_path / "scratch", dtype=torch.float32
        )
    whole = load(tmp_path / "model")
    for analysis in analyses("llama"):
        one, other = (lit_layers.measure(each, analysis, run="r", step=0, raises=True) for each in (whole, dispatched))
        assert other.records == one.records
        assert other.provenance == one.provenance


def test_an_offloaded_model_is_restored_and_writes_to_it_are_detected(tmp_path):
    saved(tmp_path / "model", "gpt2")
    model = load(tmp_path / "model", offload=Offload(tmp_path / "scratch", CPU)).train()
    model.transformer.h[0].eval()
    model.transformer.h[1].requires_grad_(False)
    ids, block = tiny_batch("gpt2"), model.transformer.h[2]

    def facts() -> list:
        modes = [module.training for module in model.modules()]
        return [modes, [parameter.requires_grad for parameter in model.parameters()], on_meta(model)]

    before = facts()
    with undisturbed(model):
        model(**ids)
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert facts() == before
    with pytest.raises(DisturbedError, match=r"transformer\.h\.2\.ln_1\.weight"), undisturbed(model):
        block.ln_1.weight = nn.Parameter(torch.zeros(block.ln_1.weight.shape))


def test_an_offloaded_model_runs_larger_microbatches(tmp_path, monkeypatch):
    saved(tmp_path / "model", "gpt2")
    views = [LayeredModel(load(tmp_path / "model", offload=each)) for each in (None, Offload(tmp_path / "s", CPU))]
    batch = tiny_batch("gpt2", batch=8, tokens=8)
    row = (views[0].num_layers + 1) * 8 * views[0].dim * 4
    monkeypatch.setattr(
        "lit_layers.measuring.one_model.STATE_BYTES", (2 * row, 2 * row * STATE_BYTES[1] // STATE_BYTES[0])
    )
    assert [len([*microbatches(view, [batch])]) for view in views] == [4, 1]


def test_weights_in_another_format_stay_in_the_folder_until_the_model_is_freed(tmp_path):
    model, scratch = saved(tmp_path / "model", "gpt2"), tmp_path / "scratch"
    for file in (tmp_path / "model").glob("*.safetensors*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    offloaded = load(tmp_path / "model", offload=Offload(scratch, CPU))
    assert weights_hash(offloaded) == weights_hash(model)
    assert [*scratch.rglob("*h.1.ln_1.weight*")]
    del offloaded
    gc.collect()
    assert [*scratch.iterdir()] == []


def test_missing_accelerate_is_reported_with_the_command_that_installs_it(tmp_path, monkeypatch):
    saved(tmp_path / "model", "gpt2")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "accelerate" else found(name))
    with pytest.raises(InputError, match=r"^offload: needs the package accelerate: pip install lit_layers\[offload\]$"):
        load(tmp_path / "model", offload=Offload(tmp_path / "scratch", CPU))
