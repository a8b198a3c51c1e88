"""Precision and clipping options for GPUs, tested without a GPU."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_layers.training import LitCausalLM
from lit_layers.training import trainer as trainers
from lit_layers.training.resuming import DivergedError, refuse_diverged_losses
from tests.support.tiny_training import CONFIG, RandomTokens

SCALE = 65536.0
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class NormOfSteps(L.Callback):
    """A callback that records each step's norm before clipping, from the module, and after it, from the gradients."""

    def __init__(self) -> None:
        self.told: list[float] = []
        self.met: list[float] = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
        if pl_module.grad_norm is not None:
            self.told.append(float(pl_module.grad_norm))
            grads = [each.grad for each in pl_module.model.parameters() if each.grad is not None]
            self.met.append(float(torch.nn.utils.get_total_norm(grads)))


def trained(*plugins: object) -> tuple[NormOfSteps, dict[str, torch.Tensor], torch.optim.Optimizer]:
    norms = NormOfSteps()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, gradient_clip_val=0.1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=list(plugins), callbacks=[norms],
        limit_val_batches=0,
    )  # fmt: skip
    module = LitCausalLM(architecture="gpt2", config=CONFIG | NO_DROPOUT, lr=1e-3, warmup_steps=1)
    trainer.fit(module, datamodule=RandomTokens())
    return norms, module.model.state_dict(), trainer.optimizers[0]


def test_gradients_are_unscaled_before_clipping_in_16_mixed():
    plain, weights, optimizer = trained()
    assert optimizer.defaults["fused"], "one kernel a step where nothing is scaled"
    scaled, weights_scaled, optimizer = trained(
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    )
    # Products of 16-bit numbers give two digits of the gradient.
    assert scaled.told == pytest.approx(plain.told, rel=0.02)
    assert scaled.met[-1] == pytest.approx(0.1, rel=0.01)
    moved = torch.cat([(weights_scaled[name] - value).abs().flatten() for name, value in weights.items()])
    assert moved.mean() < 1e-5  # steps are 1e-3; a gradient close to 0 may have the other sign
    assert not optimizer.defaults["fused"]


def test_a_nan_loss_ends_a_run_unless_a_loss_scaler_skips_the_step(tmp_path):
    network = torch.nn.Linear(2, 2)

    def refuse(precision: str) -> None:
        one_rank = SimpleNamespace(reduce=lambda finite, reduce_op: finite)
        refuse_diverged_losses(
            SimpleNamespace(precision=precision, callbacks=[], strategy=one_rank), network, {3: float("nan")}, tmp_path
        )

    refuse("16-mixed")
    for precision in ("bf16-mixed", "32-true"):
        with pytest.raises(DivergedError, match="the loss of step 3 is nan"):
            refuse(precision)
    torch.nn.init.constant_(network.bias, float("nan"))
    with pytest.raises(DivergedError, match="the loss of step 3 is nan"):
        refuse("16-mixed")


@pytest.mark.parametrize(("computes", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_bfloat16_is_chosen_on_gpus_with_native_support_only(monkeypatch, computes, precision):
    def is_supported(including_emulation: bool = True) -> bool:
        return computes or including_emulation  # torch reports this for a V100 or T4

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    before = torch.get_float32_matmul_precision()
    try:
        assert trainers.best_precision("auto") == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert trainers.best_precision("cpu") == "32-true"
