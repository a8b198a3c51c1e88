"""Saving and measuring during training: at the right steps, once, and without any change of the weights."""

import functools
import json
import random
from dataclasses import dataclass

import lightning as L
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_layers import records
from lit_layers.analyses import Coupling, Lens, NextTokenProbe, Representation, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.saved import load
from lit_layers.records import Record
from lit_layers.training import EmergenceCallback, SeriesCheckpoint, modules
from lit_layers.training.run_folder import saved_steps, step_folder
from tests.support.random_text import RandomText
from tests.support.tiny_models import tiny
from tests.support.tiny_training import CONTEXT, fit, module


@dataclass(kw_only=True)
class Noisy(Analysis):
    """An analysis that draws from every generator, runs a backward pass and changes the training mode."""

    name: str = "noisy"

    def compute(self, model):
        model.model.train().requires_grad_(True)
        batch = next(iter(RandomText()))
        loss = model.model(input_ids=batch["input_ids"]).logits.square().mean()
        loss.backward()
        yield Record(metric="noise", value=float(torch.rand(()) + np.random.rand() + random.random()))


@dataclass(kw_only=True)
class Failing(Analysis):
    """An analysis that yields one record and then fails."""

    name: str = "failing"

    def compute(self, model):
        torch.rand(7)
        yield Record(metric="half", value=1.0)
        raise RuntimeError("no numbers")


def everything() -> list[Analysis]:
    text = RandomText()
    return [
        Trajectory(batches=text),
        Noisy(),
        Coupling(batches=text, k=[2, 4]),
        Failing(),
        Representation(batches=text),
        Lens(batches=text),
        NextTokenProbe(train=RandomText(8), test=RandomText(3), num_classes=5, min_context=2),
    ]


class Checkpointing(L.Callback):
    """A callback that enables gradient checkpointing: the backward pass runs the blocks again."""

    def on_fit_start(self, trainer, pl_module):
        model = pl_module.model
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # newer name first

    def on_train_end(self, trainer, pl_module):
        assert all(block.gradient_checkpointing for block in pl_module.model.transformer.h)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "compiled", "others"),
    [
        (4, False, []),
        (1, True, []),  # torch.compile captures two graphs
        (1, False, [Checkpointing()]),
    ],
)
def test_training_ends_in_equal_bits_with_and_without_analyses(tmp_path, monkeypatch, accumulate, compiled, others):
    # Hooks and function modes could only disturb the graph capture of torch.compile, so no code is generated.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(modules, "_EAGER_LOSS", ())  # as on a GPU: the loss is in the graph
    watching = [
        SeriesCheckpoint({"every": 1}, tmp_path / "run"),
        EmergenceCallback(everything(), {"every": 1}, tmp_path / "run"),
    ]
    runs = []
    for callbacks in (watching, []):
        options = {"module": module(compile=compiled), "accumulate_grad_batches": accumulate}
        _, lit = fit(tmp_path, [*callbacks, *others], steps=3, **options)
        runs.append(lit.state_dict())
    for (name, first), second in zip(runs[0].items(), runs[1].values(), strict=True):
        assert torch.equal(first, second), name
    measurements = records.read(tmp_path / "run" / "measurements.jsonl")
    assert {m.analysis: m.error is None for m in measurements} == {
        analysis.name: analysis.name != "failing" for analysis in everything()
    }


def test_an_extra_random_draw_changes_the_trained_weights(tmp_path):
    class Draw(L.Callback):
        def on_train_batch_end(self, *_):
            torch.rand(1)

    (_, one), (_, other) = (fit(tmp_path, callbacks) for callbacks in ([], [Draw()]))
    assert not torch.equal(one.model.lm_head.weight, other.model.lm_head.weight)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of five steps, two of them scheduled, and the trained module."""
    root = tmp_path_factory.mktemp("run")
    (root / ".tmp-step-000000002").mkdir()  # left by a killed save
    assert saved_steps(root) == []
    logger = L.pytorch.loggers.CSVLogger(root, name="log", version="")
    callbacks = [SeriesCheckpoint([2, 3], root), EmergenceCallback([Noisy()], [2, 3], root)]
    _, lit = fit(root, callbacks, steps=5, accumulate_grad_batches=4, logger=logger, log_every_n_steps=1)
    logger.save()
    return root, lit


def test_every_scheduled_optimizer_step_is_measured_once(run):
    root, _ = run
    measurements = records.read(root / "measurements.jsonl")
    assert [m.step for m in measurements] == [0, 2, 3, 5] == saved_steps(root)
    assert [m.tokens for m in measurements] == [step * CONTEXT * 8 for step in (0, 2, 3, 5)]
    lines = (root / "measurements.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 3, 5]
    assert not list(root.glob(".tmp-*")), "what a killed save left is cleared"
    assert "noisy/noise" in (root / "log" / "metrics.csv").read_text().splitlines()[0]


class Manual(L.LightningModule):
    """A module with manual optimization: optimizers of parts of the network, and one for other weights.

    Each of them steps several times in a batch.
    """

    def __init__(self, shares: int, steps: int = 1, others: int = 0):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.other = tiny("gpt2").train(), torch.nn.Linear(2, 2)
        self.shares, self.steps, self.others = shares, steps, others

    def training_step(self, batch, _):
        self.manual_backward(self.model(input_ids=batch, labels=batch).loss)
        *of_network, other = self.optimizers()
        for each in of_network * self.steps + [other] * self.others:
            each.step()

    def configure_optimizers(self):
        shares = [[*self.model.parameters()][at :: self.shares] for at in range(self.shares)]
        return [torch.optim.SGD(each, lr=0.01) for each in [*shares, [*self.other.parameters()]]]


def fit_manual(root, steps, network, batches=20, epochs=1, **options):
    callbacks = [SeriesCheckpoint(steps, root), EmergenceCallback([Noisy()], steps, root)]
    trainer = L.Trainer(
        max_epochs=epochs, limit_train_batches=batches, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(network, torch.utils.data.DataLoader(torch.arange(160).reshape(20, 8) % 30), **options)
    measured = [m.step for m in records.read(root / "measurements.jsonl")]
    assert measured == saved_steps(root)
    return trainer, measured


@pytest.mark.parametrize(
    ("network", "steps", "measured"),
    [
        ({"shares": 2}, [1, 3, 5, 7], [0, 1, 3, 5, 7, 20]),
        ({"shares": 3}, "pythia", [0, 1, 2, 4, 8, 16, 20]),
        ({"shares": 1, "others": 5}, {"every": 8}, [0, 8, 16, 20]),
        ({"shares": 2, "steps": 3}, [1, 6, 7, 8, 60], [0, 3, 6, 9, 60]),
    ],
)
def test_with_several_optimizers_a_step_is_an_update_of_the_network(network, steps, measured, tmp_path):
    assert fit_manual(tmp_path, steps, Manual(**network))[1] == measured


def test_a_training_logs_what_it_will_measure_and_what_it_measured(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit_manual(tmp_path / "all", [1, 3], Manual(2), batches=4)
        fit_manual(tmp_path / "passed", [1, 6, 7, 8], Manual(2, 3), batches=4)
    assert f"measures noisy at the first step, the last and 1, 3, into {tmp_path / 'all'}" in caplog.text
    assert f"measured 4 of 4 scheduled steps: lit-layers report {tmp_path / 'all'} draws them" in caplog.text
    assert "measured 3 of 6 scheduled steps, not 1, 7, 8: lit-layers report" in caplog.text


def test_a_resumed_training_continues_the_step_count(tmp_path):
    trainer, _ = fit_manual(tmp_path / "one", [3], Manual(2), batches=5)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = {"ckpt_path": tmp_path / "last.ckpt", "weights_only": False}
    assert fit_manual(tmp_path / "two", [7], Manual(2), batches=5, epochs=2, **resumed)[1] == [7, 10]


def test_a_saved_step_is_the_measured_model_and_loads_anywhere(run):
    root, lit = run
    hashes = {m.step: m.provenance["weights_hash"] for m in records.read(root / "measurements.jsonl")}
    assert len(set(hashes.values())) == 4
    for step, measured in hashes.items():
        assert weights_hash(load(step_folder(root, step))) == measured
    reloaded = AutoModelForCausalLM.from_pretrained(step_folder(root, 5)).eval()
    assert reloaded.config.vocab_size == 61
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens).logits, lit.eval()(tokens), atol=1e-6, rtol=0)


def test_a_failing_analysis_is_recorded_and_training_continues(tmp_path, caplog):
    trainer, _ = fit(tmp_path, [EmergenceCallback([Failing(), Noisy()], [1], tmp_path)], steps=2)
    assert trainer.global_step == 2
    failed = [m for m in records.read(tmp_path / "measurements.jsonl") if m.analysis == "failing"]
    assert [m.error for m in failed] == ["RuntimeError: no numbers"] * 3
    assert "failing failed at step 1: RuntimeError: no numbers" in caplog.text


def test_the_network_of_a_user_module_can_be_named(tmp_path):
    class Own(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.ModuleDict({"network": _network()})

        def training_step(self, batch, _):
            return self.inner["network"](input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

        def validation_step(self, batch, _):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = EmergenceCallback([Noisy()], [0], tmp_path, model="inner.network", run="mine", tokens_per_step=7)
    fit(tmp_path, [callback], steps=1, module=Own())
    last = records.read(tmp_path / "measurements.jsonl")[-1]
    assert (last.run, last.step, last.tokens, last.error) == ("mine", 1, 7, None)


def _network():
    from lit_layers.models.build import causal_lm

    return causal_lm("gpt2", n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=61)


def test_wrong_options_and_folders_are_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    wide = Coupling(batches=RandomText(), k=[17])
    for made, sentence in (
        (lambda: EmergenceCallback([Noisy()], [0], tmp_path, model="network"), "LM has no submodule 'network'"),
        (lambda: EmergenceCallback([wide], [0], tmp_path), "17"),
        (lambda: SeriesCheckpoint([0], tmp_path / "file" / "run"), "root: cannot write to .*file"),
        (lambda: EmergenceCallback([Noisy(), Noisy()], [0], tmp_path), "two are named 'noisy'; give each a name of"),
        (lambda: SeriesCheckpoint([0], ""), "^root: expected a folder, got ''$"),
    ):
        with pytest.raises(InputError, match=sentence):
            fit(tmp_path, [made()])
    assert not (tmp_path / "measurements.jsonl").exists()
