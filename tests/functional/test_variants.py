"""The variants of a model, their names and tags, and refusals."""

import itertools
import random

import pytest

from lit_layers.functional import block_schedules as schedules
from lit_layers.functional.block_schedules import LOOPS, MIDDLE_NAMES, SEEDS, VARIANTS, Variant, variants


def named(found, name):
    return [variant for variant in found if variant.name == name]


def test_the_variants_of_six_blocks_are_the_schedules_of_their_middles_and_blocks():
    found = variants(6, seeds=(4,), loops=(3,))
    single_blocks = {"skip_one": range(1, 7), "switch": range(1, 6)}
    for name in VARIANTS:
        expected, schedule = [], getattr(schedules, name)
        if name in single_blocks:
            expected = [(None, block, schedule(6, block)) for block in single_blocks[name]]
        elif name == "baseline":
            expected = [(None, None, schedule(6))]
        else:
            more = {"random": {"seed": 4}, "looped_parallel": {"loops": 3}}.get(name, {})
            expected = [(middle, None, schedule(6, 2 - middle // 2, **more)) for middle in (1, 3, 5)]
        assert [(v.middle, v.block, v.schedule) for v in named(found, name)] == expected, name
    for name in ("middle_repeat", "reverse", "parallel", "random"):
        assert named(found, name)[0].schedule == (1, 2, 3, 4, 5, 6), name
    assert {v.seed for v in named(found, "random")} == {4}
    assert [v.loops for v in named(found, "looped_parallel")] == [3, 3, 3]


def test_every_name_has_a_variant_for_each_middle_seed_and_number_of_loops():
    for num_blocks in [2, 3, 8, 12, 13]:
        found = variants(num_blocks)
        middles = [num for num in range(1, num_blocks) if num % 2 == (num_blocks + 1) % 2]
        counts = {"random": len(SEEDS), "looped_parallel": len(LOOPS)}
        for name in MIDDLE_NAMES:
            assert [v.middle for v in named(found, name)] == [m for m in middles for _ in range(counts.get(name, 1))]
        assert [v.seed for v in named(found, "random")] == [*SEEDS] * len(middles)
        assert [v.loops for v in named(found, "looped_parallel")] == [*LOOPS] * len(middles)
        assert not named(found, "repeat_one")  # not published
        repeats = variants(num_blocks, ["repeat_one"])[1:]
        assert [(v.block, len(v.schedule)) for v in repeats] == [(n, num_blocks + 1) for n in range(1, num_blocks + 1)]
        assert found[0].name == "baseline"
        assert len({str(v) for v in found}) == len(found)  # a reader can distinguish them
        tags = [(v.block, *sorted(v.tags.items())) for v in found]
        assert len(set(tags)) == len(tags)  # and so can a table


def test_requested_names_middles_seeds_and_loops_occur_once_each():
    found = variants(9, ["skip", "random", "skip"], middles=[4, 2, 4], seeds=(3, 3, 1), loops=(1,))
    assert [(v.name, v.middle, v.seed) for v in found] == [
        ("baseline", None, None),
        ("skip", 2, None),
        ("skip", 4, None),
        *[("random", middle, seed) for middle, seed in itertools.product((2, 4), (3, 1))],
    ]
    (looped,) = variants(8, ["looped_parallel"], middles=[3], loops=(1,))[1:]
    (parallel,) = variants(8, ["parallel"], middles=[3])[1:]
    assert looped.schedule == parallel.schedule == (1, 2, 3, (4, 5, 6), 7, 8)


def test_tags_describe_a_variant():
    found = variants(
        6, ["looped_parallel", "random", "skip_one"], middles=[3], seeds=[1], loops=[2], custom=["1 (2,3)"]
    )
    order = [3, 4, 5]
    random.Random(1).shuffle(order)
    assert [v.tags for v in found[:3]] == [
        {"variant": "baseline"},
        {"variant": "looped_parallel", "middle": 3, "loops": 2},
        {"variant": "random", "middle": 3, "seed": 1, "schedule": " ".join(map(str, [1, 2, *order, 6]))},
    ]
    assert found[3].tags == {"variant": "skip_one"}
    assert found[3].block == 1
    assert found[-1] == Variant(name="custom", schedule=(1, (2, 3)))
    assert found[-1].tags == {"variant": "custom", "schedule": "1 (2,3)"}
    assert [str(v) for v in (found[1], found[4])] == ["looped_parallel M=3 k=2", "skip_one block=2"]


def test_the_same_order_written_twice_is_one_variant():
    found = variants(4, [], custom=["1 2", " 1  2 ", "1 (2)", "2 1"])
    assert [v.schedule for v in found] == [(1, 2, 3, 4), (1, 2), (2, 1)]


def test_unknown_names_middles_loops_and_blocks_are_refused():
    for options, message in (
        ({"names": ["skips"]}, "^variants: there is no 'skips'; choose from baseline, middle_repeat"),
        ({"middles": [3, 4]}, "^middles: of 6 blocks the middle has 1, 3, 5 blocks, got 4"),
        ({"loops": (0, 2)}, "^loops: expected at least 1, got 0"),
        ({"custom": ["1 7"]}, r"^block: expected 1\.\.6, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            variants(**({"num_blocks": 6} | options))
