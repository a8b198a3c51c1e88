"""On a real GPU: every analysis gives the CPU's numbers, training is bit for bit the same with analyses and after a
resume, an offloaded model has the same numbers. Without a GPU `test_devices.py` looks for the same faults on a
pretended one."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from lit_layers import records
from lit_layers.analyses import Lens, Trajectory
from lit_layers.measuring import one_model
from lit_layers.models import load
from lit_layers.models.offload import Offload
from lit_layers.tasks.mteb_scores import MtebTask
from lit_layers.training import EmergenceCallback
from lit_layers.training.losses import next_token_loss
from lit_layers.training.resuming import ResumeCheckpoint, resume_point
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import StepSeed
from tests.support import tiny_training
from tests.support.every_analysis import image_analyses, save_inputs, text_analyses
from tests.support.random_text import RandomText
from tests.support.saved_models import saved
from tests.support.tiny_models import sees_images
from tests.test_devices import assert_close, made, three, values

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    # torch.compile issues warnings. As errors they would stop the compilation, and the loss would use slower kernels.
    pytest.mark.filterwarnings("ignore"),
]


def has_mteb() -> bool:
    return importlib.util.find_spec("mteb") is not None


def measured(model: torch.nn.Module, name: str, folder: Path) -> dict[str, records.Measurement]:
    analyses = image_analyses() if sees_images(name) else text_analyses(save_inputs(folder))
    if not has_mteb():
        analyses = [each for each in analyses if not isinstance(each, MtebTask)]
    return {analysis.name: one_model.measure(model, analysis, run="run", step=0) for analysis in analyses}


@pytest.mark.parametrize("name", ["gpt2", "vit", "gemma2"])
def test_every_analysis_has_the_numbers_of_the_cpu(tmp_path, name):
    on_gpu = measured(made(name).to("cuda").eval(), name, tmp_path / "gpu")
    assert_close(on_gpu, measured(made(name).eval(), name, tmp_path / "cpu"))


def test_an_offloaded_model_has_the_numbers_of_the_model_on_the_gpu(tmp_path):
    saved(tmp_path / "model", "gpt2")
    whole = load(tmp_path / "model").to("cuda")
    offloaded = load(tmp_path / "model", offload=Offload(tmp_path / "scratch", torch.device("cuda")))
    for analysis in three():
        one, other = (one_model.measure(model, analysis, run="run", step=0) for model in (whole, offloaded))
        assert one.error is None
        assert other.provenance == one.provenance
        assert values(other) == pytest.approx(values(one), rel=1e-3, abs=1e-5), analysis.name


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def on_text(root: Path, *, watched: bool, steps: int = 6, state: Path | None = None) -> dict[str, torch.Tensor]:
    analyses = [Trajectory(batches=RandomText()), Lens(batches=RandomText())]
    watch = [EmergenceCallback(analyses, [0, 2, 4], root)] if watched else []
    callbacks = [RunLog(root, resume=state is not None), *watch, ResumeCheckpoint(root, every=3)]
    lit = tiny_training.module(decay_steps=6, init_seed=5)
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "resume_from": state, "module": lit}
    return weights(tiny_training.fit(root, [StepSeed(0), *callbacks], steps=steps, **options)[1])


def test_training_ends_in_the_same_weights_with_analyses_and_without(tmp_path):
    plain = on_text(tmp_path / "plain", watched=False)
    watched = on_text(tmp_path / "watched", watched=True)
    measurements = records.read(tmp_path / "watched" / "measurements.jsonl")
    assert measurements
    assert {each.error for each in measurements} == {None}
    assert {each.provenance["device"] for each in measurements} == {torch.cuda.get_device_name()}
    for name, expected in plain.items():
        assert torch.equal(watched[name], expected), name  # the same kernels in the same order


def test_a_resumed_run_ends_in_the_same_weights(tmp_path):
    whole = on_text(tmp_path / "whole", watched=True)
    on_text(tmp_path / "stopped", watched=True, steps=3)
    point = resume_point(tmp_path / "stopped", "last")
    assert point is not None
    assert point.step == 3
    resumed = on_text(tmp_path / "stopped", watched=True, state=point.state)
    for name, expected in whole.items():
        assert torch.equal(resumed[name], expected), name


@pytest.mark.parametrize(("dtype", "num_words"), [(torch.float32, 50257), (torch.bfloat16, 50304)])
def test_the_loss_is_cross_entropy_in_float64(dtype, num_words):
    generator = torch.Generator("cuda").manual_seed(0)
    leaf = (3 * torch.randn(2, 100, 50304, generator=generator, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(num_words, (2, 100), generator=generator, device="cuda")
    wide = leaf.detach().double().requires_grad_()
    expected = cross_entropy(wide[..., :num_words].flatten(0, 1), targets.flatten())
    expected.backward()
    loss = next_token_loss(leaf * 1, targets, num_words)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    rounding = {torch.float32: 1e-4, torch.bfloat16: 2**-6}[dtype]  # bfloat16 rounds twice: softmax, then its scale
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=rounding, atol=1e-9)
