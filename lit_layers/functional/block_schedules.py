"""Orders in which the blocks of a frozen model run: its middle is skipped, reversed, shuffled, repeated or averaged.

Blocks are numbered 1..T. A schedule is a sequence of numbers and tuples. A number runs that block on the current state.
A tuple runs each of its blocks on the same state and averages their outputs. With T blocks, `start` = N keeps a prefix
1..N+1 and a suffix T-N+1..T, and changes the middle N+2..T-N of M = T - 2N - 1 blocks.

Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298; index ranges of the released code, which counts
blocks from 0.
"""

import random as _random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Step = int | tuple[int, ...]
Schedule = tuple[Step, ...]


def baseline(num_blocks: int) -> Schedule:
    """Return the schedule that runs every block once, in order."""
    return tuple(range(1, num_blocks + 1))


def middle(num_blocks: int, start: int) -> range:
    """Return the numbers of the middle blocks: N+2..T-N for T blocks and `start` = N.

    Raises:
        ValueError: a start outside 0..(T-2)//2. A larger start would leave no middle.
    """
    if not 0 <= start <= (num_blocks - 2) // 2:
        raise ValueError(f"start: of {num_blocks} blocks expected 0..{(num_blocks - 2) // 2}, got {start}")
    return range(start + 2, num_blocks - start + 1)


def start_of(num_blocks: int, num_middle: int, option: str = "middle") -> int:
    """Return the `start` for which `middle(num_blocks, start)` has `num_middle` blocks.

    It is (num_blocks - num_middle - 1) / 2. So `num_middle` must be odd if `num_blocks` is even, and even if it is odd.
    The error message calls `num_middle` by the name in `option`.

    Raises:
        ValueError: no `start` gives that number of blocks.
    """
    starts = {len(middle(num_blocks, start)): start for start in range((num_blocks - 2) // 2, -1, -1)}
    if num_middle not in starts:
        sizes = ", ".join(map(str, starts))
        raise ValueError(f"{option}: of {num_blocks} blocks the middle has {sizes} blocks, got {num_middle}")
    return starts[num_middle]


def skip(num_blocks: int, start: int) -> Schedule:
    """Return the schedule that runs all blocks in order, except blocks `start + 2` to `num_blocks - start`."""
    return _spliced(num_blocks, start, ())


def middle_repeat(num_blocks: int, start: int) -> Schedule:
    """Return the schedule that runs the central block, `num_blocks // 2 + 1`, in place of each middle block.

    The middle blocks are `start + 2` to `num_blocks - start`.
    """
    return _spliced(num_blocks, start, [num_blocks // 2 + 1] * len(middle(num_blocks, start)))


def reverse(num_blocks: int, start: int) -> Schedule:
    """Return the schedule that runs the middle blocks, `start + 2` to `num_blocks - start`, in reverse order."""
    return _spliced(num_blocks, start, middle(num_blocks, start)[::-1])


def random(num_blocks: int, start: int, *, seed: int) -> Schedule:
    """Return the schedule that runs the middle blocks in an order shuffled by `random.Random(seed)`.

    The middle blocks are `start + 2` to `num_blocks - start`. The schedule may equal the baseline, and always does if
    the middle is a single block.
    """
    order = list(middle(num_blocks, start))
    _random.Random(seed).shuffle(order)
    return _spliced(num_blocks, start, order)


def parallel(num_blocks: int, start: int) -> Schedule:
    """Return the schedule that runs all middle blocks on the same state and averages their outputs.

    The middle blocks are `start + 2` to `num_blocks - start`.
    """
    return looped_parallel(num_blocks, start, loops=1)


def looped_parallel(num_blocks: int, start: int, *, loops: int = 3) -> Schedule:
    """Return the schedule that runs all middle blocks on the same state and averages their outputs, `loops` times.

    Each time after the first, the state is the previous average. The middle blocks are `start + 2` to
    `num_blocks - start`.

    Raises:
        ValueError: fewer than one loop.
    """
    if loops < 1:
        raise ValueError(f"loops: expected at least 1, got {loops}")
    return _spliced(num_blocks, start, [tuple(middle(num_blocks, start))] * loops)


def skip_one(num_blocks: int, block: int) -> Schedule:
    """Return the schedule that runs every block once, in order, except `block`."""
    return tuple(number for number in baseline(num_blocks) if number != _checked_block(block, num_blocks))


def switch(num_blocks: int, block: int) -> Schedule:
    """Return the schedule in which `block` and the block after it swap positions."""
    if not 1 <= block < num_blocks:
        raise ValueError(f"block: expected 1..{num_blocks - 1}, which have a next one, got {block}")
    order = list(baseline(num_blocks))
    order[block - 1 : block + 1] = [block + 1, block]
    return tuple(order)


def repeat_one(num_blocks: int, block: int) -> Schedule:
    """Return the schedule that runs every block once, in order, except `block`, which runs twice in a row."""
    order = list(baseline(num_blocks))
    order.insert(_checked_block(block, num_blocks), block)
    return tuple(order)


def checked(schedule: Sequence[Step], num_blocks: int) -> Schedule:
    """Return a checked copy of a schedule, in which a tuple of one block is replaced by the number of that block.

    Raises:
        TypeError: an entry of the schedule that is neither a number nor a tuple of numbers.
        ValueError: a block that does not exist, or an empty tuple.
    """
    steps: list[Step] = []
    for step in schedule:
        group = members(step)
        if not all(type(number) is int for number in group):
            raise TypeError(f"schedule: a step is a block number or a tuple of them, got {step!r}")
        if not group:
            raise ValueError("schedule: a parallel group is empty: name its blocks, as in (3,4,5)")
        for number in group:
            _checked_block(number, num_blocks)
        steps.append(group[0] if len(group) == 1 else group)
    return tuple(steps)


_STEP = re.compile(r"\d+|\(\s*\d+(?:\s*,\s*\d+)*\s*\)")


def members(step: Step) -> tuple[int, ...]:
    """Return the numbers of the blocks that one entry of a schedule, a number or a tuple, runs on the same state."""
    return step if isinstance(step, tuple) else (step,)


def parse_schedule(text: str, num_blocks: int) -> Schedule:
    """Return the schedule that a text such as `1 2 (3,4,5) (3,4,5) 6` describes.

    Raises:
        ValueError: an empty text, a text of another form, or a schedule that `checked` refuses.
    """
    steps = [tuple(map(int, re.findall(r"\d+", step))) for step in _STEP.findall(text)]
    if not steps or _STEP.sub("", text).strip():
        raise ValueError(f"schedule: expected numbers and groups such as 1 2 (3,4,5) 6, got {text!r}")
    return checked(steps, num_blocks)


def format_schedule(schedule: Sequence[Step]) -> str:
    """Return the schedule as text that `parse_schedule` reads."""
    return " ".join(f"({','.join(map(str, step))})" if isinstance(step, tuple) else str(step) for step in schedule)


def kendall_distance(order: Sequence[int]) -> int:
    """Return how many pairs of numbers in the sequence are out of order.

    0 for n numbers in ascending order, n (n - 1) / 2 in descending order.
    """
    return sum(before > after for index, after in enumerate(order) for before in order[:index])


def _spliced(num_blocks: int, start: int, steps: Sequence[Step]) -> Schedule:
    """Return the schedule that runs all blocks in order, with `steps` in place of the middle blocks.

    The middle blocks are `start + 2` to `num_blocks - start`.
    """
    changed = middle(num_blocks, start)
    return checked([*range(1, changed.start), *steps, *range(changed.stop, num_blocks + 1)], num_blocks)


def _checked_block(number: int, num_blocks: int) -> int:
    if not 1 <= number <= num_blocks:
        raise ValueError(f"block: expected 1..{num_blocks}, got {number}")
    return number


# The variants of the block order that are compared.

# The functions that change the middle blocks, from the most to the least harmful in the paper. `_BLOCK_MAKERS` has the
# functions that change single blocks.
_MAKERS: dict[str, Callable[..., Schedule]] = {
    make.__name__: make for make in (middle_repeat, skip, parallel, reverse, random, looped_parallel)
}
_BLOCK_MAKERS = {make.__name__: make for make in (skip_one, switch, repeat_one)}
MIDDLE_NAMES, BLOCK_NAMES = tuple(_MAKERS), tuple(_BLOCK_MAKERS)
VARIANTS = ("baseline", *MIDDLE_NAMES, "skip_one", "switch")  # the published variants, which are measured by default
NAMES = ("baseline", *MIDDLE_NAMES, *BLOCK_NAMES)
SEEDS, LOOPS = tuple(range(10)), (2, 3, 4, 5, 6, 7, 8)
PUBLISHED_LOOPS = 3
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A schedule with the name of its kind, such as `skip`, and the options that produced it."""

    name: str
    schedule: Schedule
    middle: int | None = None  # the number of blocks in the middle
    loops: int | None = None  # for looped_parallel
    seed: int | None = None  # for random: the seed of the order of the middle blocks
    block: int | None = None  # the block that is skipped or repeated; for switch, the first of the two swapped blocks

    @property
    def tags(self) -> dict[str, str | int | float]:
        """Tags of the records that are measured with this schedule.

        `block` is not a tag, because the record stores it as its layer. The tag `schedule` spells out custom and random
        orders of the blocks, which the other tags do not describe.
        """
        tags: dict[str, str | int | float] = {"variant": self.name}
        for name in ("middle", "loops", "seed"):
            if (value := getattr(self, name)) is not None:
                tags[name] = value
        if self.name in ("random", CUSTOM):
            tags["schedule"] = format_schedule(self.schedule)
        return tags

    def __str__(self) -> str:
        """Return a name such as `looped_parallel M=5 k=3`, unique among the variants of a model."""
        if self.name == CUSTOM:
            return f"{self.name} {format_schedule(self.schedule)}"
        numbers = {"M": self.middle, "k": self.loops, "seed": self.seed, "block": self.block}
        return " ".join([self.name, *(f"{name}={value}" for name, value in numbers.items() if value is not None)])


def variants(
    num_blocks: int,
    names: Sequence[str] = VARIANTS,
    *,
    middles: Sequence[int] | None = None,
    seeds: Sequence[int] = SEEDS,
    loops: Sequence[int] = LOOPS,
    custom: Sequence[str] = (),
) -> list[Variant]:
    """Return the schedules of the named variants for every middle, number of loops, seed and block.

    The baseline comes first, whether it is named or not.

    Args:
        num_blocks: Number of blocks of the model.
        names: Names of variants, from `NAMES`.
        middles: Numbers of blocks in the middle; None for all possible numbers.
        seeds: Seeds of `random`.
        loops: Numbers of loops of `looped_parallel`; 1 gives the same schedule as `parallel`.
        custom: Further schedules, written as `1 2 (3,4,5) 6`.

    Raises:
        ValueError: an unknown name, a number of middle blocks that is impossible in this model, fewer than one loop, or
            a text that `parse_schedule` refuses.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"variants: there is no {name!r}; choose from {', '.join(NAMES)}")
    starts = list(range((num_blocks - 2) // 2, -1, -1))  # from the smallest middle to the largest
    if middles is not None:
        starts = sorted({start_of(num_blocks, number, "middles") for number in middles}, reverse=True)
    chosen = [Variant(name="baseline", schedule=baseline(num_blocks))]
    for name in dict.fromkeys(names):
        if name in MIDDLE_NAMES:
            for start in starts:
                chosen += _one_middle(name, num_blocks, start, seeds, loops)
        elif name in BLOCK_NAMES:
            make, last = _BLOCK_MAKERS[name], num_blocks - (name == "switch")
            chosen += [
                Variant(name=name, schedule=make(num_blocks, block), block=block) for block in range(1, last + 1)
            ]
    orders = dict.fromkeys(parse_schedule(text, num_blocks) for text in custom)
    return chosen + [Variant(name=CUSTOM, schedule=schedule) for schedule in orders]


def _one_middle(name: str, num_blocks: int, start: int, seeds: Sequence[int], loops: Sequence[int]) -> list[Variant]:
    """Return the variants called `name`, which change the middle blocks `start + 2` to `num_blocks - start`.

    `random` has one variant for each seed, and `looped_parallel` one for each number of loops. Every other name has a
    single variant.
    """
    options: list[dict[str, int]] = [{}]
    if name == "random":
        options = [{"seed": seed} for seed in dict.fromkeys(seeds)]
    elif name == "looped_parallel":
        options = [{"loops": number} for number in dict.fromkeys(loops)]
    make, size = _MAKERS[name], len(middle(num_blocks, start))
    return [Variant(name=name, schedule=make(num_blocks, start, **option), middle=size, **option) for option in options]
