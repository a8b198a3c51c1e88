"""Critical sharpness of a quadratic is its curvature along the update; watching it leaves a training as it is."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lit_layers import records
from lit_layers.training import CriticalSharpness
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import StepSampler
from tests.support.random_text import VOCABULARY
from tests.support.tiny_training import RandomBlocks, fit, module

CURVATURES = torch.tensor([3.0, 1.0, 0.5])


class Quadratic(L.LightningModule):
    """0.5 w'Hw by gradient descent, with noise in training that would change a loss."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.weight, self.lr, self.losses = torch.nn.Parameter(torch.ones(3)), lr, 0
        self.dropout = torch.nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.losses += 1
        noise = self.dropout(torch.ones(1)).sum() - 1
        return (CURVATURES * self.weight**2).sum() / 2 + noise

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(8).tolist(), batch_size=1)  # pyright: ignore[reportArgumentType]


class Noted(Logger):
    """Keeps what is logged of each step."""

    name, version = "noted", 0  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.found[step] = metrics

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing to keep."""


@pytest.mark.parametrize("lr", [0.05, 0.4, 0.8])
def test_on_a_quadratic_it_is_the_curvature_along_the_gradient(tmp_path, lr):
    noted, quadratic = Noted(), Quadratic(lr)
    trainer = L.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=noted,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[CriticalSharpness([1, 2])],
    )
    trainer.fit(quadratic)
    weight = torch.ones(3)
    for step in (1, 2):
        gradient = CURVATURES * weight
        expected = ((CURVATURES * gradient**2).sum() / (gradient**2).sum()).item()
        assert noted.found[step]["train/critical_sharpness"] == pytest.approx(expected, rel=1e-3)
        assert noted.found[step]["train/critical_step"] == pytest.approx(2 / expected / lr, rel=1e-3)
        weight = weight - lr * gradient
    torch.testing.assert_close(quadratic.weight.detach(), weight)
    assert quadratic.losses <= 2 + 2 * 9


class Ends(L.Callback):
    """Keeps the weights before and after each step, in float64."""

    def __init__(self) -> None:
        self.before: list[list[torch.Tensor]] = []
        self.after: list[list[torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.before.append([parameter.detach().double() for parameter in pl_module.parameters()])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.after.append([parameter.detach().double() for parameter in pl_module.parameters()])


def test_of_a_transformer_it_is_the_first_of_many_steps_that_raise_the_loss_of_its_batch(tmp_path):
    """The loss in float64 and plain torch, at 200 steps along the update."""
    log, ends = RunLog(tmp_path), Ends()
    _, lit = fit(tmp_path, [ends, CriticalSharpness([4]), log], module=module(lr=0.03), log_every_n_steps=1)
    model = lit.model.double().eval()
    ids = RandomBlocks().tokens[StepSampler(40, global_batch_size=8).global_batch(3)]

    def loss(step: float) -> float:
        with torch.no_grad():
            for parameter, first, last in zip(model.parameters(), ends.before[3], ends.after[3], strict=True):
                parameter.copy_(first + step * (last - first))
            log_proba = model(input_ids=ids[:, :-1]).logits[..., :VOCABULARY].log_softmax(-1)
        return -log_proba.gather(-1, ids[:, 1:, None]).mean().item()

    (row,) = [each for each in records.rows(tmp_path / "metrics.jsonl") if "train/critical_step" in each]
    found, start = row["train/critical_step"], loss(0.0)
    scanned = [found * 4 ** (number / 100 - 1.5) for number in range(200)]  # from an eighth on, by 1.4%
    first = next(step for step in scanned if loss(step) > start)
    assert found == pytest.approx(first, rel=0.015)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_that_is_watched_ends_in_the_same_weights_and_random_state(tmp_path, accumulate):
    ends = []
    for watched in (False, True):
        root = tmp_path / str(watched)
        log = RunLog(root)
        callbacks = [CriticalSharpness({"every": 2})] if watched else []
        options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 1}
        _, lit = fit(root, [*callbacks, log], steps=5, **options)
        ends.append((lit.state_dict(), torch.get_rng_state(), [*records.rows(root / "metrics.jsonl")]))
    (plain, state, rows), (weights, state_too, noted) = ends
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert torch.equal(state, state_too)
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in noted]
    found = {row["step"]: row for row in noted if "train/critical_sharpness" in row}
    assert found.keys() <= {2, 4}
    assert found
    for row in found.values():
        product = row["train/critical_sharpness"] * row["train/critical_step"] * row["train/learning_rate"]
        assert product == pytest.approx(2, rel=1e-6)


def test_a_step_that_moves_nothing_has_none(tmp_path):
    log = RunLog(tmp_path)
    fit(tmp_path, [CriticalSharpness([1]), log], steps=2, module=module(lr=1e-30, warmup_steps=1), log_every_n_steps=1)
    assert not any("train/critical_step" in row for row in records.rows(tmp_path / "metrics.jsonl"))


class Broken(Quadratic):
    """Loses its loss, or its update, at the second of four steps."""

    def __init__(self, how: str) -> None:
        super().__init__(0.1)
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        factor = {"nan": torch.nan, "inf": torch.inf, "no update": 0.0}[self.how] if batch_idx == 1 else 1.0
        return loss * factor if self.how == "no update" else loss + (0.0 if factor == 1 else factor)


@pytest.mark.parametrize("how", ["nan", "inf", "no update"])
def test_a_step_without_a_value_is_a_gap_that_is_counted_and_changes_no_training(tmp_path, caplog, how):
    ends = []
    for callbacks in ([], [watched := CriticalSharpness({"every": 1})]):
        torch.manual_seed(3)
        noted, broken = Noted(), Broken(how)
        trainer = L.Trainer(
            max_steps=4, accelerator="cpu", logger=noted, log_every_n_steps=1, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(broken)
        ends.append((broken.weight.detach().clone(), torch.get_rng_state()))
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
    assert {step for step, row in noted.found.items() if "train/critical_sharpness" in row} == {1, 3, 4}
    assert (watched.num_undefined, watched.num_steps) == (1, 4)
    assert "critical sharpness: 1 of 4 steps have no value" in caplog.messages
