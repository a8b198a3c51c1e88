"""What would break on a GPU, found without one: every analysis, training and shares on a device that
has the values of the CPU and a GPU's rules (`tests.support.pretend_device`).

What is on the device runs in processes of its own, forked from one that has imported all and computed nothing: torch's
derivatives learn of devices once in a process, and of this one never again.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lit_layers import records
from lit_layers.analyses import Coupling, Lens, Representation, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.measuring import one_model
from lit_layers.records import Measurement
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.resuming import ResumeCheckpoint
from lit_layers.training.run_log import RunLog
from tests.support import tiny_images, tiny_training
from tests.support.every_analysis import (
    VOCABULARY,
    image_analyses,
    prompt_analyses,
    prompts,
    save_inputs,
    text_analyses,
)
from tests.support.listed_batches import Listed
from tests.support.random_text import RandomText
from tests.support.thread_ranks import outcomes_on_ranks
from tests.support.tiny_models import sees_images, tiny

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends written in Python",
)
CPU = torch.device("cpu")
LONG = {"prompt_studies", "next_token_probe", "sample_sizes/moods", "mteb/STSBenchmark"}  # on other models


def subprocess_result(function: Callable, *arguments: Any) -> Any:
    """Run a function of this module in a separate process; its first argument is `pretend_device`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_devices"])
    with ProcessPoolExecutor(1, mp_context=context) as processes:
        return processes.submit(pretending, function, arguments).result()


def pretending(function: Callable, arguments: tuple) -> Any:
    from tests.support import pretend_device

    with pretend_device.Pretend():
        return function(pretend_device, *arguments)


def made(name: str) -> torch.nn.Module:
    return tiny(name) if sees_images(name) else tiny(name, vocab_size=VOCABULARY)


def values(measurement: Measurement) -> list[float]:
    return [record.value for record in measurement.records]


def measured(model: torch.nn.Module, name: str, folder: Path) -> dict[str, Measurement]:
    analyses = image_analyses() if sees_images(name) else text_analyses(save_inputs(folder))
    if name == "gpt2":  # the other models run in shards, or in the soak tier
        left_out = {other.name for other in prompt_analyses(prompts())} | LONG
        analyses = [each for each in analyses if each.name not in left_out]
    return {analysis.name: one_model.measure(model, analysis, run="run", step=0) for analysis in analyses}


def measured_on_device(device, name: str, folder: Path) -> tuple[dict[str, Measurement], dict]:
    model = made(name).to(device.DEVICE).eval()
    device.reset()
    return measured(model, name, folder), dict(device.violations)


@pytest.mark.soak  # the quick tier has two analyses on the device, and training
@pytest.mark.parametrize("name", ["gpt2", "vit", "gemma2"])
def test_every_analysis_keeps_the_rules_of_a_device_and_its_numbers(tmp_path, name):
    on_device, violations = subprocess_result(measured_on_device, name, tmp_path / "device")
    assert violations == {}
    on_cpu = measured(made(name), name, tmp_path / "cpu")
    assert_close(on_device, on_cpu)


def assert_close(on_device: dict[str, Measurement], on_cpu: dict[str, Measurement]) -> None:
    assert on_device.keys() == on_cpu.keys()
    for analysis, expected in on_cpu.items():
        assert (expected.error, on_device[analysis].error) == (None, None), analysis
        # Other kernels (no fused attention on the device) round differently, most of all in float32 derivatives.
        close = pytest.approx(values(expected), rel=1e-3, abs=1e-5, nan_ok=True)
        assert values(on_device[analysis]) == close, analysis


def shared_on_device(device) -> tuple[dict[str, Measurement], dict]:
    model = made("gpt2").to(device.DEVICE).eval()
    device.reset()
    found, _ = outcomes_on_ranks(model, prompt_analyses(prompts()), 2)
    return {each.analysis.name: each.measurement(run="run", step=0) for each in found}, dict(device.violations)


@pytest.mark.soak
def test_results_of_a_rank_hold_no_tensor_of_the_device():
    joined, violations = subprocess_result(shared_on_device)
    assert violations == {}
    model = made("gpt2")
    alone = {each.name: one_model.measure(model, each, run="run", step=0) for each in prompt_analyses(prompts())}
    assert_close(joined, alone)


def three() -> list[Analysis]:
    batches = prompts()
    coupling = Coupling(batches=batches, k=(2, 5), num_prompts=3)
    return [Trajectory(batches=batches), Representation(batches=batches), coupling]


class WaitsOfSteps(L.Callback):
    """A counter, by line, of how often the host waited for the device in each of these optimizer steps."""

    def __init__(self, device: Any, steps: set[int]) -> None:
        self.device, self.steps, self.waits = device, steps, []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # From the start of a step to the start of the next: this includes other callbacks and loading the next batch.
        if trainer.global_step in self.steps:
            self.waits.append(dict(self.device.waits))
        self.device.waits.clear()


def callbacks_of(root: Path, batches: Any) -> list[L.Callback]:
    analyses = [Trajectory(batches=batches), Lens(batches=batches)]
    watch = EmergenceCallback(analyses, [0, 4], root)
    return [RunLog(root), SeriesCheckpoint([0, 4], root), watch, ResumeCheckpoint(root, every=4)]


OPTIONS: dict[str, Any] = {"steps": 6, "limit_val_batches": 1, "val_check_interval": 5, "log_every_n_steps": 5}
PLAIN = {2, 3}  # steps without a log, a validation, a checkpoint or a measurement


@contextlib.contextmanager
def loaders_that_pin() -> Iterator[None]:
    """Make loaders use pinned memory, as with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        each = _BaseDataLoaderIter.__next__

        def pinned(loader: Any) -> Any:
            return tree_map(lambda part: part.pin_memory() if isinstance(part, torch.Tensor) else part, each(loader))

        patch.setattr(_BaseDataLoaderIter, "__next__", pinned)
        yield


def trained(device, kind: str, root: Path) -> tuple[dict, list[dict]]:
    options = {**OPTIONS, "strategy": device.strategy(), "accelerator": "auto", "check_val_every_n_epoch": None}
    waits = WaitsOfSteps(device, PLAIN)
    pixels = Listed({"pixel_values": torch.randn(4, 3, 8, 8)})
    callbacks = [*callbacks_of(root, RandomText() if kind == "text" else pixels), waits]
    device.reset()
    with loaders_that_pin():
        if kind == "text":
            tiny_training.fit(root, callbacks, module=tiny_training.module(dropout=0.0), **options)
        else:
            lit = tiny_images.module(mixup=0.8, cutmix=1.0, drop_path_rate=0.0)
            augmented = {"flip": True, "crop_padding": 1, "rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5}
            tiny_images.fit(root, *callbacks, lit=lit, images=tiny_images.data(**augmented), **options)
    return dict(device.violations), waits.waits


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["text", "images"])
def test_training_keeps_the_rules_of_a_device_and_never_waits_for_it_between_logs(tmp_path, kind):
    violations, waits = subprocess_result(trained, kind, tmp_path)
    assert violations == {}
    assert waits == [{}] * len(PLAIN)  # neither in the package nor in a library
    logged = [row["step"] for row in records.rows(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert logged == [*range(1, 7)]
    measurements = records.read(tmp_path / "measurements.jsonl")
    assert [(m.step, m.error) for m in measurements] == [(step, None) for step in (0, 0, 4, 4, 6, 6)]
