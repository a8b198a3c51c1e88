"""Block schedules against hand-written lists, the 0-based ranges of the released code, and identities."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_layers.functional import block_schedules as schedules

SIZES = st.integers(2, 40).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(0, (blocks - 2) // 2)))


def test_schedules_of_eight_blocks_equal_hand_written_ones():
    assert schedules.baseline(8) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert schedules.skip(8, 1) == (1, 2, 8)
    assert schedules.middle_repeat(8, 1) == (1, 2, 5, 5, 5, 5, 5, 8)
    assert schedules.reverse(8, 1) == (1, 2, 7, 6, 5, 4, 3, 8)
    assert schedules.parallel(8, 1) == (1, 2, (3, 4, 5, 6, 7), 8)
    assert schedules.looped_parallel(8, 2) == (1, 2, 3, (4, 5, 6), (4, 5, 6), (4, 5, 6), 7, 8)
    assert schedules.looped_parallel(7, 2, loops=2) == (1, 2, 3, (4, 5), (4, 5), 6, 7)
    assert schedules.skip_one(4, 2) == (1, 3, 4)
    assert schedules.switch(4, 3) == (1, 2, 4, 3)
    assert [schedules.repeat_one(3, block) for block in (1, 2, 3)] == [(1, 1, 2, 3), (1, 2, 2, 3), (1, 2, 3, 3)]
    assert schedules.skip(5, 0) == (1,)  # T = 5, N = 0: prefix 1, middle 2..5, no suffix


@given(SIZES, st.integers(0, 9))
def test_a_random_order_equals_pythons_shuffle_and_keeps_the_global_random_state(blocks_and_start, seed):
    blocks, start = blocks_and_start
    state = random.getstate()
    middle = list(range(start + 2, blocks - start + 1))
    random.Random(seed).shuffle(middle)
    expected = (*range(1, start + 2), *middle, *range(blocks - start + 1, blocks + 1))
    assert schedules.random(blocks, start, seed=seed) == expected
    assert random.getstate() == state


@given(SIZES)
def test_prefix_middle_and_suffix_have_the_released_lengths(blocks_and_start):
    blocks, start = blocks_and_start
    middle = schedules.middle(blocks, start)
    assert len(middle) == blocks - 2 * start - 1 >= 1
    assert len(schedules.skip(blocks, start)) == 2 * start + 1
    # counted from 0, the released code changes positions start + 1 to blocks - start - 1
    assert [number - 1 for number in middle] == list(range(start + 1, blocks - start))
    assert schedules.start_of(blocks, len(middle)) == start
    assert sorted(schedules.reverse(blocks, start)) == list(range(1, blocks + 1))


@given(SIZES, st.integers(0, 99))
def test_no_order_is_farther_from_the_baseline_than_the_reverse(blocks_and_start, seed):
    blocks, start = blocks_and_start
    num_middle = blocks - 2 * start - 1
    assert schedules.kendall_distance(schedules.reverse(blocks, start)) == num_middle * (num_middle - 1) // 2
    shuffled = schedules.kendall_distance(schedules.random(blocks, start, seed=seed))
    assert 0 <= shuffled <= num_middle * (num_middle - 1) // 2
    assert schedules.kendall_distance(schedules.baseline(blocks)) == 0
    assert schedules.kendall_distance([2, 3, 1]) == 2


def test_a_schedule_text_is_parsed_and_formatted():
    text = "1 2 (3,4,5) (3,4,5) 6"
    assert schedules.parse_schedule(text, 6) == (1, 2, (3, 4, 5), (3, 4, 5), 6)
    assert schedules.format_schedule(schedules.parse_schedule(text, 6)) == text
    assert schedules.parse_schedule(" 1 ( 2 , 3 )(4) 4 ", 4) == (1, (2, 3), 4, 4)


@given(st.lists(st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple), min_size=1))
def test_formatting_and_parsing_returns_any_schedule(steps):
    assert schedules.parse_schedule(schedules.format_schedule(steps), 9) == tuple(steps)


def test_invalid_schedules_are_refused():
    for call, sentence in (
        (lambda: schedules.skip(8, 4), "start: of 8 blocks expected 0..3, got 4"),
        (lambda: schedules.skip(8, -1), "start: of 8 blocks expected 0..3, got -1"),
        (lambda: schedules.start_of(8, 4), "middle: of 8 blocks the middle has 1, 3, 5, 7 blocks, got 4"),
        (lambda: schedules.looped_parallel(8, 1, loops=0), "loops: expected at least 1, got 0"),
        (lambda: schedules.skip_one(4, 5), "block: expected 1..4, got 5"),
        (lambda: schedules.repeat_one(4, 0), "block: expected 1..4, got 0"),
        (lambda: schedules.switch(4, 4), "block: expected 1..3, which have a next one, got 4"),
        (lambda: schedules.parse_schedule("1 () 2", 4), "numbers and groups such as 1 2 (3,4,5) 6, got '1 () 2'"),
        (lambda: schedules.parse_schedule(" ", 4), "numbers and groups such as 1 2 (3,4,5) 6, got ' '"),
        (lambda: schedules.checked([1, ()], 4), "schedule: a parallel group is empty: name its blocks"),
        (lambda: schedules.parse_schedule("1 9", 4), "block: expected 1..4, got 9"),
        (lambda: schedules.checked([1, "2"], 4), "schedule: a step is a block number or a tuple of them, got '2'"),
        (lambda: schedules.parse_schedule("1 -2", 4), "numbers and groups such as 1 2 (3,4,5) 6, got '1 -2'"),
    ):
        with pytest.raises((ValueError, TypeError)) as refused:
            call()
        assert sentence in str(refused.value)
