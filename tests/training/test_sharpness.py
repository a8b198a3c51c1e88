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
from tests.support.tiny_training import fit, module

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
