import functools

import lightning as L
import pytest
import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.training.modules import adamw, use_optimizer_, warmup_cosine
from tests.support.tiny_training import fit, module
from tests.training.test_any_trainer import Noted


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    model[1].weight.requires_grad_(False)
    optimizer = adamw(model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert [p.shape for p in decayed["params"]] == [(7, 4)]
    assert [tuple(p.shape) for p in free["params"]] == [(3,), (3,), (3,)]


def test_one_step_is_adamw_by_hand():
    weight = nn.Parameter(torch.tensor([[2.0, -1.0]], dtype=torch.float64))
    model = nn.ParameterList([weight])
    optimizer = adamw(model, lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-8)
    weight.grad = torch.tensor([[0.3, -4.0]], dtype=torch.float64)
    optimizer.step()
    # After one step the bias-corrected moments are the gradient and its square, so that the update is the sign.
    expected = torch.tensor([[2.0 * (1 - 0.05) - 0.1, -1.0 * (1 - 0.05) + 0.1]], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), expected, atol=1e-7, rtol=0)


def test_the_schedule_has_its_closed_form():
    factor = warmup_cosine(warmup_steps=10, decay_steps=110, min_ratio=0.1)
    assert [factor(0), factor(4), factor(9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(10) == pytest.approx(1.0)
    assert factor(60) == pytest.approx(0.55)
    assert [factor(110), factor(5000)] == pytest.approx([0.1, 0.1])
    assert warmup_cosine(warmup_steps=0, decay_steps=10, min_ratio=0.0)(0) == 1.0


def test_another_optimizer_decays_only_matrices(tmp_path):
    lit = module()
    use_optimizer_(lit, functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.3), None)
    run, _ = fit(tmp_path, [], steps=1, module=lit)
    decayed, free = run.optimizers[0].param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert {each.ndim for each in free["params"]} == {1}


def test_a_schedule_that_reads_a_metric_steps_after_each_validation(tmp_path):
    """The rate falls tenfold after a validation that is not better. The first one has none to compare with."""

    class Scores(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.callback_metrics["validation/loss"] = torch.tensor(1.0)

    seen, lit = Noted(), module()
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
    use_optimizer_(lit, functools.partial(torch.optim.SGD, lr=1.0), plateau)
    every = {"val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    fit(tmp_path, [seen, Scores()], steps=7, module=lit, **every)
    assert seen.rates == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01])


class Own(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_user_module_takes_the_optimizer_of_the_command_line(tmp_path):
    seen, own = Noted(), Own()
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    use_optimizer_(own, functools.partial(torch.optim.SGD, lr=1.0), schedule)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    run = L.Trainer(max_steps=2, accelerator="cpu", devices=1, callbacks=[seen], default_root_dir=tmp_path, **quiet)
    run.fit(own, torch.utils.data.DataLoader(torch.ones(4, 2)))
    assert type(run.optimizers[0]) is torch.optim.SGD
    assert seen.rates == pytest.approx([1, 0.1])
    with pytest.raises(InputError, match="lr_scheduler: expected an optimizer with it, as Own makes its own"):
        use_optimizer_(Own(), None, schedule)
