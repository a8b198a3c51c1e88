"""A run whose loss becomes NaN or infinite ends with its own exit code and sentence."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.training import LitCausalLM
from lit_layers.training.run_folder import saved_steps
from tests.cli.test_fit import RECIPE
from tests.support.forked import run_ranks

pytestmark = pytest.mark.slow
LAST, BAD = 8, 7


@pytest.fixture
def command(tmp_path, corpus) -> list[str]:
    trainer = {**RECIPE["trainer"], "max_steps": LAST, "log_every_n_steps": 3, "gradient_clip_val": 1.0}
    options = {**RECIPE, "corpus": str(corpus), "resume_every": 2, "trainer": trainer}
    options["analyses"] = RECIPE["analyses"][:1]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(options))
    return ["fit", "--config", str(tmp_path / "recipe.yaml"), "--root", str(tmp_path / "run")]


def spoil(monkeypatch, factor: float, *, rank: int = 0) -> None:
    """Make the loss of step BAD infinite or NaN on one rank."""
    loss = LitCausalLM.loss

    def spoilt(self, batch):
        is_due = self.trainer.training and self.trainer.global_step == BAD - 1 and self.trainer.global_rank == rank
        return loss(self, batch) * (factor if is_due else 1.0)

    monkeypatch.setattr(LitCausalLM, "loss", spoilt)


def check_results_are_kept(root: Path) -> None:
    """Check that results are kept and that every state to resume from is finite."""
    rows = {int(row["step"]): row["train/loss"] for row in records.rows(root / "metrics.jsonl")}
    assert not math.isfinite(rows[BAD])
    assert all(math.isfinite(loss) for step, loss in rows.items() if step < BAD)
    assert set(saved_steps(root)) >= {0, 2, 4, 6}
    assert {m.step for m in records.read(root / "measurements.jsonl")} >= {0, 2, 4, 6}
    assert (root / "report.html").exists()
    assert saved_steps(root / "resume") == [4, 6]
    state = torch.load(root / "resume" / "step-000000006" / "trainer.ckpt", weights_only=True)["state_dict"]
    assert all(weights.isfinite().all() for weights in state.values())


@pytest.mark.soak
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_diverged_run_exits_with_3_names_the_step_and_keeps_results(factor, command, tmp_path, monkeypatch, capfd):
    spoil(monkeypatch, factor)
    assert main(command) == 3
    root = tmp_path / "run"
    output = next(line for line in capfd.readouterr().err.splitlines() if "diverged" in line)
    assert f"lit-layers fit: error: diverged: the loss of step {BAD} is {factor}; last healthy checkpoints: " in output
    assert f"{root}/step-000000004 and {root}/resume/step-000000006; begin anew with a lower model.lr" in output
    check_results_are_kept(root)
    monkeypatch.undo()
    assert main([*command, "--resume", "last"]) == 0  # without the modified loss
    assert [row["step"] for row in records.rows(root / "metrics.jsonl")] == list(range(1, LAST + 1))
    assert saved_steps(root) == list(range(0, LAST + 1, 2))


@pytest.mark.soak
def test_all_ranks_exit_with_3_if_one_rank_diverges(command, tmp_path, monkeypatch):
    spoil(monkeypatch, math.nan, rank=1)
    two = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    assert run_ranks(lambda: main([*command, *two])) == [3, 3]
    check_results_are_kept(tmp_path / "run")


@pytest.mark.soak
def test_weights_that_are_not_finite_are_not_saved_for_a_resume(command, tmp_path, monkeypatch, capfd):
    """The step that makes the weights infinite still has a finite loss."""

    def broken(self, *_: object) -> None:
        if self.trainer.global_step == BAD:
            with torch.no_grad():
                next(self.model.parameters())[0, 0] = math.inf

    monkeypatch.setattr(LitCausalLM, "on_train_batch_end", broken)
    assert main([*command, "--resume_every", str(BAD), "--trainer.log_every_n_steps", "100"]) == 3
    output = capfd.readouterr().err
    assert f"diverged: weights are not finite after step {BAD}; last healthy checkpoints: " in output
    assert saved_steps(tmp_path / "run" / "resume") == []
