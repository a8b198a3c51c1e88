"""Who measures what: no rank is busy for longer than a fair share and the longest part."""

import datetime
import random
import time
from unittest.mock import Mock

import pytest
from torch import distributed

from lit_layers.analyses import Trajectory
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.training import watching
from lit_layers.training.rank_assignment import Part, Ranks, assign_parts, ranks_of
from lit_layers.training.watching import watch
from tests.support.forked import run_ranks
from tests.support.random_text import RandomText
from tests.support.tiny_models import tiny


def text_recipe(draw: random.Random) -> tuple[dict[Part, float], dict[Part, list[str]]]:
    """Seconds like those of GPT-2 small: three analyses of the same 16 batches, few dear parts, many cheap ones."""
    seconds, texts = {}, {}

    def add(analysis: str, count: int, each: float, common: str = "") -> None:
        for number in range(count):
            part = Part(analysis, number)
            seconds[part] = each * draw.uniform(0.5, 2.0)
            texts[part] = [f"{common or analysis} {number} {row}" for row in range(4)]

    for analysis, each in (("trajectory", 0.2), ("representation", 3.0), ("lens", 2.0)):
        add(analysis, 16, each, "text")
    add("coupling", 8, 9.0)
    add("probe passes", 120, 1.5)
    add("probe fits", 13, 7.0)
    add("alone", 1, 4.0)
    return seconds, texts


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_no_rank_has_more_than_a_fair_share_and_the_longest_part(num_ranks):
    for seed in range(5):
        seconds, texts = text_recipe(random.Random(seed))
        assigned = assign_parts(seconds, texts, num_ranks)
        assert sorted(part for parts in assigned for part in parts) == sorted(seconds)
        slowest = max(sum(seconds[part] for part in parts) for parts in assigned)
        assert slowest <= sum(seconds.values()) / num_ranks + max(seconds.values())
        if num_ranks == 8:  # parts are small here: about an eighth
            assert slowest < 1.05 * sum(seconds.values()) / 8
        for number in range(16):  # read once, as no rank has too much by it
            assert sum(Part("lens", number) in parts and Part("trajectory", number) in parts for parts in assigned) == 1


def test_parts_of_a_text_are_parted_where_one_rank_would_have_them_all():
    seconds = {Part("jacobians", number): 1.0 for number in range(8)}
    texts = {part: ["the only batch"] for part in seconds}
    assert [len(parts) for parts in assign_parts(seconds, texts, 4)] == [2, 2, 2, 2]
    assert assign_parts(seconds, texts, 1) == [set(seconds)]
    assert assign_parts({}, {}, 2) == [set(), set()]


def test_texts_hang_together_over_several_parts():
    seconds = {Part("all", number): 1.0 for number in range(6)} | {Part("long", 0): 6.0}
    texts = {Part("all", n): [str(n), str(n + 1)] for n in range(6)} | {Part("long", 0): ["else"]}
    assigned = assign_parts(seconds, texts, 2)
    assert {frozenset(parts) for parts in assigned} == {
        frozenset([Part("long", 0)]),
        frozenset(seconds) - {Part("long", 0)},
    }


def test_parts_stay_with_their_rank_while_that_is_hardly_slower():
    seconds = {Part("fits", number): 1.0 for number in range(4)}
    texts = {part: [part] for part in seconds}
    before = [{Part("fits", 0), Part("fits", 3)}, {Part("fits", 1), Part("fits", 2)}]
    fresh = assign_parts(seconds, texts, 2)
    assert fresh != before
    assert assign_parts(seconds, texts, 2, before) == before
    assert assign_parts(seconds | {Part("fits", 0): 1.15}, texts, 2, before) == before  # 2.15 s, and 2.15 at best
    moved = seconds | {Part("fits", 0): 3.0}  # 4 s, where 3 are enough
    assert assign_parts(moved, texts, 2, before) == assign_parts(moved, texts, 2) != before


def test_the_same_parts_are_dealt_as_at_the_last_checkpoint():
    view, analysis = LayeredModel(tiny("gpt2")), Trajectory(batches=RandomText(num_batches=4))
    ranks = Ranks.__new__(Ranks)  # of a group that this process does not have
    ranks.size, ranks._owners = 2, {}
    assigned = []
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):  # of two that are hardly apart the longer one is assigned first
        ranks._seconds = {Part("trajectory", number): 1 + 0.01 * place for number, place in enumerate(order)}
        assigned.append(ranks._assigned(view, {"trajectory": analysis}, [], 0))
        ranks._seconds = {Part("trajectory", 0): 9.0}
        ranks._assigned(view, {"trajectory": Trajectory(batches=RandomText(num_batches=1))}, [], 0)
    assert assigned[0] == assigned[1]
    assert [len(of_rank["trajectory"]) for of_rank in assigned[0][0]] == [2, 2]


def fail_on_first_rank() -> int:
    """0 where each failure of rank 0 came as it should on this rank, and the group goes on."""
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    ranks = Ranks(distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=300)))
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


def test_what_the_first_rank_fails_with_ends_all_ranks():
    assert run_ranks(fail_on_first_rank) == [0, 0]


def watch_on_first_rank() -> int:
    """0 where the rank that watches alone is told so in a second."""
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    watching.RENDEZVOUS = datetime.timedelta(seconds=1)
    if distributed.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(InputError, match="each of the 2 processes, but after 1 s not all have called"):
            watch(tiny("gpt2"), [Trajectory(batches=RandomText(num_batches=1))], steps=[1], root="never_written")
        assert time.monotonic() - began < 10
    return 0


def slow_after_the_first_meeting() -> int:
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    ranks = ranks_of(2, first=datetime.timedelta(seconds=1))
    time.sleep(1.5 * distributed.get_rank())
    return 0 if ranks.from_first(lambda: 7) == 7 else 1


def test_a_rank_that_watches_alone_is_told_so_and_does_not_wait():
    assert run_ranks(watch_on_first_rank) == [0, 0]


def test_ranks_that_are_slow_later_are_waited_for():
    assert run_ranks(slow_after_the_first_meeting) == [0, 0]
