"""The ranks of a run meet in time, and an error on the first rank ends all ranks."""

import datetime
import time
from unittest.mock import Mock

import pytest
from torch import distributed

from lit_layers.analyses import Trajectory
from lit_layers.errors import InputError
from lit_layers.measuring.ranks import Ranks, ranks_of
from lit_layers.training import watching
from lit_layers.training.watching import watch
from tests.support.forked import run_ranks
from tests.support.random_text import RandomText
from tests.support.tiny_models import tiny

pytestmark = pytest.mark.soak
MINUTES = datetime.timedelta(minutes=5)


def fail_on_first_rank() -> int:
    """Return 0 if this rank gets each failure of rank 0, and the group still works afterwards."""
    distributed.init_process_group("gloo", timeout=MINUTES)
    ranks = Ranks(distributed.new_group(backend="gloo", timeout=MINUTES))
    first = ranks.rank == 0
    for error, elsewhere in (
        (InputError("root: taken"), (InputError, "root: taken")),
        (KeyError("weight"), (RuntimeError, "rank 0: KeyError: 'weight'")),
    ):
        compute = Mock(side_effect=error)
        with pytest.raises(Exception) as raised:
            ranks.from_first(compute)
        assert raised.value is error if first else (type(raised.value), str(raised.value)) == elsewhere
        assert compute.call_count == first
    return 0 if ranks.from_first(lambda: 7) == 7 else 1


def test_an_error_on_the_first_rank_ends_all_ranks():
    assert run_ranks(fail_on_first_rank) == [0, 0]


def watch_on_first_rank() -> int:
    """Return 0 if a rank that watches without the others gets an error soon after the timeout of a second."""
    distributed.init_process_group("gloo", timeout=MINUTES)
    watching.START_TIMEOUT = datetime.timedelta(seconds=1)
    if distributed.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(InputError, match="each of the 2 processes, but after 1 s not all have called"):
            watch(tiny("gpt2"), [Trajectory(batches=RandomText(num_batches=1))], steps=[1], root="never_written")
        assert time.monotonic() - began < 10
    return 0


def slow_after_the_first_meeting() -> int:
    distributed.init_process_group("gloo", timeout=MINUTES)
    ranks = ranks_of(2, timeout=datetime.timedelta(seconds=1))
    time.sleep(1.5 * distributed.get_rank())
    return 0 if ranks.from_first(lambda: 7) == 7 else 1


def test_a_rank_that_watches_without_the_others_gets_an_error():
    assert run_ranks(watch_on_first_rank) == [0, 0]


def test_after_the_first_call_slow_ranks_do_not_time_out():
    assert run_ranks(slow_after_the_first_meeting) == [0, 0]
