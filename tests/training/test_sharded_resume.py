"""Sharded runs that go on with another number of ranks, or after the first died while it wrote."""

import os
import signal
from pathlib import Path

import pytest

from lit_layers.training import resuming
from lit_layers.training.run_folder import saved_steps
from tests.support import sharded_run
from tests.support.forked import run_ranks
from tests.training.test_sharding import column, saved_state, weights

pytestmark = pytest.mark.soak
STILL = {"dropout": 0.0, "accumulate_grad_batches": 1}  # each rank draws its own


def part(root: Path, steps: int, ranks: int, **options) -> list[int]:
    def fit() -> int:
        sharded_run.part(root, steps, ranks=ranks, **STILL, **options)
        return 0

    return run_ranks(fit, ranks)


@pytest.mark.parametrize("ranks", [(2, 4), (4, 1)])
def test_on_another_number_of_ranks_a_sharded_run_goes_on(ranks, tmp_path):
    before, after = ranks
    assert set(part(tmp_path / "parts", 3, before) + part(tmp_path / "whole", 6, after)) == {0}
    assert set(part(tmp_path / "parts", 6, after, resume=True)) == {0}
    losses = [column(tmp_path / root, "train/loss") for root in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)  # sums over other ranks
    assert len(losses[1]) == 6


def test_a_rank_that_dies_inside_a_save_leaves_the_checkpoint_before_and_the_run_goes_on(tmp_path):
    def dies() -> int:
        save, count = resuming._save, [0]

        def dying(path: Path, content) -> str:
            count[0] += 1
            if count[0] > 1:
                path.write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            return save(path, content)

        resuming._save = dying
        sharded_run.part(tmp_path / "parts", 6, every=2)
        return 0

    codes = run_ranks(dies)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0
    assert saved_steps(tmp_path / "parts" / "resume") == [2]

    def whole() -> int:
        sharded_run.part(tmp_path / "parts", 6, resume=True)
        sharded_run.part(tmp_path / "whole", 6)
        return 0

    assert run_ranks(whole) == [0, 0]
    assert weights(tmp_path / "parts", 6) == weights(tmp_path / "whole", 6)
    assert saved_state(tmp_path / "parts", 6).keys() == saved_state(tmp_path / "whole", 6).keys()
    assert not list((tmp_path / "parts" / "resume").glob(".tmp*"))
