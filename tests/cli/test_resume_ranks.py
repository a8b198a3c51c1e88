"""A killed run on two ranks resumes as if uninterrupted: on two ranks bit for bit, on one up to rounding."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.analyses import Coupling
from lit_layers.cli.main import main
from lit_layers.training import LitCausalLM
from lit_layers.training.resuming import STATE, resume_point
from lit_layers.training.run_folder import step_folder
from tests.cli.test_resume import LAST, PREEMPTION, assert_equal, recipe, results_of, signal_at  # noqa: F401 fixture
from tests.support.forked import run_forked, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_page")]
TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]


def fit(recipe: Path, root: Path, *arguments: str, **options) -> list[int]:  # noqa: F811
    command = ["fit", "--config", str(recipe), "--root", str(root), *TWO, *arguments]
    return run_ranks(lambda: main(command), **options)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:  # noqa: F811
    root = tmp_path_factory.mktemp("ranks") / "whole"
    assert fit(recipe, root) == [0, 0]
    return root


@pytest.mark.soak
def test_if_one_rank_dies_the_other_ends_and_the_run_can_be_resumed(recipe, whole, tmp_path):  # noqa: F811
    root = tmp_path / "run"
    command = ["fit", "--config", str(recipe), "--root", str(root), *TWO]

    def one_dies() -> int:
        if os.environ["RANK"] == "1":
            signal_at(LitCausalLM, "training_step", 10)(False)
        return main(command)

    codes = run_ranks(one_dies)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    assert fit(recipe, root, "--resume", "last") == [0, 0]
    assert_equal(results_of(root), results_of(whole))


@pytest.mark.soak
def test_both_ranks_use_the_previous_checkpoint_if_the_last_one_is_truncated(recipe, whole, tmp_path):  # noqa: F811
    """No rank may conclude that the run has ended."""
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    state = step_folder(root / "resume", LAST) / STATE
    os.truncate(state, state.stat().st_size - 100)
    assert fit(recipe, root, "--resume", "last") == [0, 0]
    found, expected = results_of(root), results_of(whole)
    for key in ("weights", "losses", "measured"):
        assert found[key] == expected[key], key


@pytest.mark.soak
@pytest.mark.parametrize("only", [None, 1])
def test_sigterm_to_any_rank_saves_one_step_and_all_exit_with_143(only, recipe, whole, tmp_path):  # noqa: F811
    root = tmp_path / "run"
    command = ["fit", "--config", str(recipe), "--root", str(root), *TWO, "--resume_every", "1000"]

    def preempted() -> int:
        if only is None or os.environ["RANK"] == str(only):
            PREEMPTION(False)
        return main(command)

    assert run_ranks(preempted) == [143, 143]
    point = resume_point(root, "last")
    assert point is not None
    assert 8 <= point.step < LAST
    assert fit(recipe, root, "--resume", "last") == [0, 0]
    found, expected = results_of(root), results_of(whole)
    assert found["losses"] == expected["losses"]
    assert found["weights"][LAST] == expected["weights"][LAST]


@pytest.mark.soak
@pytest.mark.parametrize("only", [None, 1])
def test_sigterm_in_the_first_measurement_ends_all_ranks(only, recipe, whole, tmp_path, monkeypatch):  # noqa: F811
    root, begun, real = tmp_path / "run", tmp_path / "begun", Coupling.update

    def slow(self, seen, batch):
        begun.touch()
        time.sleep(1)
        return real(self, seen, batch)

    monkeypatch.setattr(Coupling, "update", slow)
    assert fit(recipe, root, when=begun.exists, signal_number=signal.SIGTERM, only=only) == [143, 143]
    monkeypatch.undo()
    assert {m.step for m in records.read(root / "measurements.jsonl")} == {0}
    assert fit(recipe, root, "--resume", "last") == [0, 0]
    assert_equal(results_of(root), results_of(whole))


@pytest.fixture(scope="module")
def no_dropout(recipe, tmp_path_factory) -> Path:  # noqa: F811
    """The recipe without dropout, because each rank draws its own."""
    options = yaml.safe_load(recipe.read_text())
    for rate in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        options["model"]["init_args"]["config"][rate] = 0.0
    del options["wandb"]
    path = tmp_path_factory.mktemp("still") / "still.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


@pytest.fixture(scope="module")
def one(no_dropout, tmp_path_factory) -> Path:
    """The complete run on one rank."""
    root = tmp_path_factory.mktemp("one")
    assert run_forked(lambda: main(["fit", "--config", str(no_dropout), "--resume", "last", "--root", str(root)])) == 0
    return root


@pytest.mark.soak  # what another number of ranks reads is tested in tests/training/test_sharding.py
@pytest.mark.parametrize("first", [2, 1])
def test_a_run_resumes_on_another_number_of_ranks_with_the_same_batches(first, no_dropout, one, tmp_path):
    one_rank = ["fit", "--config", str(no_dropout), "--resume", "last"]
    root = tmp_path / "run"
    half = ["--trainer.max_steps", "7", "--model.decay_steps", str(LAST)]
    if first == 2:
        assert fit(no_dropout, root, *half) == [0, 0]
        four = ["--trainer.accumulate_grad_batches", "4", "--trainer.val_check_interval", "12"]
        assert run_forked(lambda: main([*one_rank, "--root", str(root), *four, *half[2:]])) == 0
    else:
        assert run_forked(lambda: main([*one_rank, "--root", str(root), *half])) == 0
        assert fit(no_dropout, root, "--resume", "last", *half[2:]) == [0, 0]
    rows, expected = (records.rows(each / "metrics.jsonl") for each in (root, one))
    assert [row["step"] for row in rows] == list(range(1, LAST + 1))
    for name in ("train/loss", "train/grad_norm", "validation/loss"):
        found, right = ({row["step"]: row[name] for row in those if name in row} for those in (rows, expected))
        first_end = {7} if name == "validation/loss" else set()  # a run is validated where it ends
        assert found.keys() == right.keys() | first_end, name
        assert [found[step] for step in right] == pytest.approx([*right.values()], abs=3e-5), name
    measured = [(m.step, m.analysis, m.error) for m in records.read(root / "measurements.jsonl")]
    assert set(measured) == {(m.step, m.analysis, None) for m in records.read(one / "measurements.jsonl")} | {
        (7, name, None) for name in ("trajectory", "coupling")
    }
    shutil.rmtree(root)
