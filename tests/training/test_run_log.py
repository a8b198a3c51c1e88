"""Scalars on disk and in the mirror: every step once, in order, with all its values."""

import json
import math
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from torchmetrics import MeanMetric

from lit_layers import records
from lit_layers.data import TokenShards
from lit_layers.errors import InputError
from lit_layers.report.sections import training
from lit_layers.run_data import read_run
from lit_layers.training import EmergenceCallback
from lit_layers.training import run_log as run_log_module
from lit_layers.training.run_folder import RunFolder, refuse_used_folder
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import StepSampler
from tests.support import tiny_training
from tests.support.tiny_training import CONTEXT, VOCABULARY, RandomBlocks, RandomTokens, fit, module
from tests.training.test_callback_lock import One


class Heard:
    """A mirror that records its calls."""

    def __init__(self):
        self.steps = []

    def log_step(self, step, tokens, scalars, measurements):
        self.steps.append((step, tokens, sorted(scalars), [m.step for m in measurements]))


def watched(root, mirror=None, **options):
    run_log = RunLog(root, mirror)
    watch = EmergenceCallback([One()], options.pop("schedule", [1]), root, watchers=[run_log])
    trainer, lit = fit(root, [run_log, watch], **options)
    return records.rows(root / "metrics.jsonl"), trainer, lit


@pytest.mark.parametrize("every", [2, 50])
def test_the_mirror_gets_every_step_once_in_order_with_its_measurements(tmp_path, every):
    mirror = Heard()
    watched(tmp_path, mirror, steps=5, log_every_n_steps=every)
    told = {}
    for step, tokens, scalars, measured in mirror.steps:
        assert step >= max(told, default=0)
        assert tokens == step * CONTEXT * 8
        told.setdefault(step, []).extend([*scalars, *measured])
    assert sorted(told) == [0, 1, 2, 3, 4, 5]
    # Step 5 is not scheduled: it is measured after training has ended, and the mirror still gets it.
    assert [step for step, content in told.items() if step in content] == [0, 1, 5]
    assert all(content.count("train/loss") == 1 for step, content in told.items() if step)


def test_the_loss_of_a_step_is_the_mean_over_its_global_batch(tmp_path):
    rows, _, _ = watched(tmp_path, steps=2, module=module(dropout=0.0), accumulate_grad_batches=4)
    _, same = fit(tmp_path, [], module=module(dropout=0.0, lr=1e-12), steps=1)  # so small that the weights stay
    first = StepSampler(40, global_batch_size=8).global_batch(0)
    with torch.no_grad():
        expected = same.eval().loss({"input_ids": RandomBlocks().tokens[first]}).item()
    assert rows[0]["train/loss"] == pytest.approx(expected, abs=1e-5)


class Logging(L.Callback):
    """A callback that logs the step, and the index of a validation batch, in every way that Lightning has."""

    def __init__(self):
        self.mean = MeanMetric()

    def setup(self, trainer, pl_module, stage):
        pl_module.mean = self.mean  # Lightning only accepts metrics of the module

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = float(trainer.global_step)
        pl_module.log("my/loss", step, on_step=True, on_epoch=True)
        pl_module.log("accuracy", 50 + step)
        pl_module.log("bar", step, prog_bar=True, logger=False)
        pl_module.log_dict({"tokens": 5.5, "train/learning_rate": 7.0})

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.mean.update(float(batch_idx))
        pl_module.log("my/batch", self.mean, on_epoch=True)


def test_logged_values_keep_their_names_in_the_row_of_their_step(tmp_path):
    mirror, accumulate = Heard(), 2
    callbacks = [RunLog(tmp_path, mirror), Logging(), LearningRateMonitor()]
    options = {"log_every_n_steps": 1, "limit_val_batches": 2, "val_check_interval": 2 * accumulate}
    fit(tmp_path, callbacks, steps=4, accumulate_grad_batches=accumulate, **options)
    rows = records.rows(tmp_path / "metrics.jsonl")
    assert [row["my/loss_step"] for row in rows] == [row["accuracy"] - 50 for row in rows] == [1, 2, 3, 4]
    assert [row.get("my/batch") for row in rows] == [None, 0.5, None, 0.5]
    assert [row.get("my/loss_epoch") for row in rows] == [None, None, None, 2]
    assert [row["lr-AdamW/pg1"] for row in rows] == [row["train/learning_rate"] for row in rows]
    assert [row["tokens"] for row in rows] == [96, 192, 288, 384]
    assert not {"bar", "epoch"} & rows[0].keys()
    assert {name for _, _, names, _ in mirror.steps for name in names} == {*rows[-1]} - {"step", "tokens"}
    shown = [block["title"] for block in training(read_run(tmp_path))]
    assert {"Loss (nats)", "my/loss_step", "my/batch", "accuracy", "lr-AdamW/pg1"} <= {*shown}


def test_a_module_with_manual_optimization_and_no_loss_is_logged(tmp_path):
    class Manual(L.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.model = torch.nn.Embedding(VOCABULARY, 1)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.model(batch["input_ids"]).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            self.log("mine", batch_idx)

        def validation_step(self, *_): ...

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit(tmp_path, [RunLog(tmp_path)], steps=3, module=Manual(), log_every_n_steps=1, gradient_clip_val=None)
    assert [(row["step"], row["mine"]) for row in records.rows(tmp_path / "metrics.jsonl")] == [(1, 0), (2, 1), (3, 2)]


def test_rows_hold_speed_gradient_norm_and_the_learning_rate_that_the_update_used(tmp_path):
    rows, _, _ = watched(tmp_path, steps=4, log_every_n_steps=2, module=module(lr=0.01, warmup_steps=4))
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert ["train/tokens_per_second" in row for row in rows] == [False, True, False, True]


def test_the_speed_does_not_count_validation_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_log_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Clock(L.Callback):
        """A callback that advances the clock by 1 s per step and 100 s per validation batch."""

        def on_train_batch_end(self, *_):
            now[0] += 1

        def on_validation_batch_end(self, *_):
            now[0] += 100

    often = {"limit_val_batches": 1, "val_check_interval": 1, "check_val_every_n_epoch": None}
    fit(tmp_path, [Clock(), RunLog(tmp_path)], steps=4, log_every_n_steps=2, **often)
    rows = records.rows(tmp_path / "metrics.jsonl")
    speeds = [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row]
    assert speeds == [96.0, 96.0]  # tokens per step


def test_an_interruption_writes_the_rows_of_all_finished_steps(tmp_path):
    class Stop(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 3:
                raise RuntimeError("stopped")

    run_log = RunLog(tmp_path)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path, [run_log, Stop()], steps=9, log_every_n_steps=50)
    assert [row["step"] for row in records.rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_failing_mirror_loses_no_row(tmp_path):
    class Broken:
        def log_step(self, *_):
            raise RuntimeError("no connection")

    with pytest.raises(RuntimeError, match="no connection"):
        watched(tmp_path, Broken(), steps=3, log_every_n_steps=2)
    assert [row["step"] for row in records.rows(tmp_path / "metrics.jsonl")][:2] == [1, 2]


class Refusing:
    def open(self, root, *, run_id, config):
        raise InputError("wandb.mode: no server")


def test_a_refusing_mirror_leaves_the_earlier_run_unchanged(tmp_path):
    fit(tmp_path, [RunFolder(tmp_path, config="a: 1", options={}, mirror=None)], steps=1)
    (tmp_path / "measurements.jsonl").write_text("kept\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(InputError, match="no server"):
        fit(tmp_path, [RunFolder(tmp_path, config="b: 2", options={}, mirror=Refusing())], steps=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert not list(tmp_path.glob(".old-*"))


def test_a_new_run_replaces_the_old_one_and_keeps_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("old\n")
    (tmp_path / "step-000000007").mkdir()
    fit(tmp_path, [RunFolder(tmp_path, config="b: 2", options={}, mirror=None)], steps=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "notes.txt", "run.json"]


def test_files_of_the_new_runs_logger_are_not_taken_for_the_old_run(tmp_path):
    class Begun(DummyLogger):
        @property
        def experiment(self):  # Lightning reads it before any callback
            (tmp_path / "wandb" / "live").mkdir(exist_ok=True)
            return super().experiment

    (tmp_path / "wandb" / "old").mkdir(parents=True)
    folder = RunFolder(tmp_path, config="b: 2", options={}, mirror=None)
    fit(tmp_path, [folder], steps=1, logger=Begun(), log_every_n_steps=1)
    assert [path.name for path in (tmp_path / "wandb").iterdir()] == ["live"]


def test_any_file_of_a_run_makes_a_folder_used(tmp_path):
    for name in ("measurements.jsonl", "run.json", "metrics.jsonl"):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match="already holds a run without checkpoints; choose another folder"):
            refuse_used_folder(tmp_path, "refuse", is_fit=True)
        refuse_used_folder(tmp_path, "overwrite")
        (tmp_path / name).unlink()


def test_a_user_data_module_describes_its_prepared_text(tmp_path, monkeypatch):
    class OwnText(RandomTokens):
        corpus, tokenizer = "mine", "letters"

        def __init__(self):
            super().__init__()
            np.array([0, 1, 2, 3] * 4, dtype="<u2").tofile(tmp_path / "train.bin")
            header: Any = {"vocab_size": VOCABULARY, "dtype": "<u2", "tokenizer": {"hash": "of letters"}}
            self.shards = TokenShards(tmp_path, header | {"corpus_hash": "of text"})

    monkeypatch.setattr(tiny_training, "RandomTokens", OwnText)
    fit(tmp_path, [RunFolder(tmp_path, config="", options={}, mirror=None)], steps=1)
    assert json.loads((tmp_path / "run.json").read_text())["data"] == {
        "corpus": "mine",
        "tokenizer": "letters",
        "corpus_hash": "of text",
        "tokenizer_hash": "of letters",
        "unigram_entropy": pytest.approx(math.log(4)),
    }
