"""The thread that writes resume checkpoints: their content, and the calls that wait for it."""

import os
import signal
import threading

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_layers.errors import InputError
from lit_layers.training import resuming
from lit_layers.training.resuming import ResumeCheckpoint, resume_point
from lit_layers.training.run_folder import saved_steps, write_folder
from tests.support.forked import run_forked
from tests.support.tiny_training import fit, module


class Weights(L.Callback):
    """A callback that records the weights after each step, and the optimizer's first moments by parameter index."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, torch.Tensor]] = {}
        self.moments: dict[int, dict[int, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.after[trainer.global_step] = {name: each.clone() for name, each in pl_module.state_dict().items()}
        state = trainer.optimizers[0].state_dict()["state"]
        self.moments[trainer.global_step] = {name: each["exp_avg"].clone() for name, each in state.items()}


def test_training_continues_while_a_checkpoint_with_its_own_step_is_written(tmp_path, monkeypatch):
    trained_on, save = threading.Event(), resuming._save

    def slow(path, content):
        assert trained_on.wait(60)  # training would wait forever if it waited for the writer
        return save(path, content)

    class Release(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                assert not saved_steps(tmp_path / "resume")
                trained_on.set()

    monkeypatch.setattr(resuming, "_save", slow)
    weights = Weights()
    fit(tmp_path, [weights, Release(), ResumeCheckpoint(tmp_path, every=2)], module=module(), steps=4)
    assert saved_steps(tmp_path / "resume") == [2, 4]  # the end of the run waits
    for step in (2, 4):  # the second copy may reuse the memory of the first
        point = resume_point(tmp_path, str(step))
        assert point is not None
        saved = torch.load(point.state, weights_only=True)
        for name, tensor in weights.after[step].items():
            assert torch.equal(saved["state_dict"][name], tensor), (step, name)
        tied = saved["state_dict"]["model.lm_head.weight"], saved["state_dict"]["model.transformer.wte.weight"]
        assert tied[0].data_ptr() == tied[1].data_ptr()
        moments = saved["optimizer_states"][0]["state"]
        assert {float(entry["step"]) for entry in moments.values()} == {step}
        assert all(torch.equal(moments[name]["exp_avg"], each) for name, each in weights.moments[step].items())


def test_an_error_of_the_writer_ends_the_run_in_one_sentence(tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = Weights()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # like a disk that fills up in the middle of the state
    try:
        with pytest.raises(InputError, match=r"cannot write .*step-000000002: file too large; what was saved before"):
            fit(tmp_path, [weights, ResumeCheckpoint(tmp_path, every=2)], module=module(), steps=8)
        with pytest.raises(InputError, match="file too large"):  # a write larger than the buffer
            write_folder(tmp_path / "large", lambda folder: resuming._save(folder / "state", {"x": torch.zeros(9_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert max(weights.after) == 4  # the next checkpoint raises it
    assert not list((tmp_path / "resume").glob("*step-*"))


def test_sigterm_ends_the_run_after_the_current_step_and_saves_it(tmp_path):
    """Steps have two batches; the signal comes between those of step 3. tests/cli/test_resume_ranks.py resumes."""

    class Preempted(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    def preempted() -> int:
        callbacks = [Preempted(), ResumeCheckpoint(tmp_path, every=None)]
        with pytest.raises(SIGTERMException):
            fit(tmp_path, callbacks, module=module(), steps=6, accumulate_grad_batches=2)
        return 7

    assert run_forked(preempted) == 7
    weights = Weights()
    fit(tmp_path / "whole", [weights], module=module(), steps=4, accumulate_grad_batches=2)
    assert saved_steps(tmp_path / "resume") == [3]
    point = resume_point(tmp_path, "last")
    assert point is not None
    saved = torch.load(point.state, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.after[3].items())
    assert any(not torch.equal(saved[name], tensor) for name, tensor in weights.after[4].items())
