"""The variants of a model's running order that are compared: which there are, and how each is called."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_layers.functional import block_schedules
from lit_layers.functional.block_schedules import Schedule, baseline, middle, parse_schedule

# In the published order of harm, the full model first; the last two change single blocks.
OF_MIDDLES = ("middle_repeat", "skip", "parallel", "reverse", "random", "looped_parallel")
OF_BLOCKS = ("skip_one", "switch")
VARIANTS = ("baseline", *OF_MIDDLES, *OF_BLOCKS)
SEEDS, LOOPS = tuple(range(10)), (2, 3, 4, 5, 6, 7, 8)
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A schedule and what it is: which variant, and of how many middle blocks, loops, seed, or of which block."""

    name: str
    schedule: Schedule
    middle: int | None = None  # M, the number of blocks changed
    loops: int | None = None  # of looped_parallel
    seed: int | None = None  # of random
    block: int | None = None  # of skip_one, and the first of switch

    @property
    def tags(self) -> dict[str, str | int | float]:
        """What a record of it is tagged with; `block` is the record's layer. Custom and random orders are written out,
        as no other tag tells them."""
        found: dict[str, str | int | float] = {"variant": self.name}
        for name in ("middle", "loops", "seed"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.name in ("random", CUSTOM):
            found["schedule"] = block_schedules.format_schedule(self.schedule)
        return found

    def __str__(self) -> str:
        """Such as `looped_parallel M=5 k=3`: two variants of one model never have the same."""
        if self.name == CUSTOM:
            return f"{self.name} {block_schedules.format_schedule(self.schedule)}"
        told = {"M": self.middle, "k": self.loops, "seed": self.seed, "block": self.block}
        return " ".join([self.name, *(f"{name}={value}" for name, value in told.items() if value is not None)])


def variants(
    num_blocks: int,
    names: Sequence[str] = VARIANTS,
    *,
    middles: Sequence[int] | None = None,
    seeds: Sequence[int] = SEEDS,
    loops: Sequence[int] = LOOPS,
    custom: Sequence[str] = (),
) -> list[Variant]:
    """The variants of these names, each of every number of middle blocks, loops and seed asked for; the full model is
    always the first.

    Args:
        num_blocks: of the model.
        names: some of `VARIANTS`.
        middles: numbers M of middle blocks; None: all that there are.
        seeds: of random orders.
        loops: of looped_parallel; 1 is `parallel` itself.
        custom: further schedules, written as `1 2 (3,4,5) 6`.

    Raises:
        ValueError: an unknown name, a number of middle blocks that no start leaves, an empty list of numbers, seeds or
            loops, a further schedule without a step or what `parse_schedule` refuses.
    """
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variants: there is no {name!r}; choose from {', '.join(VARIANTS)}")
    for option, values, least in (("seeds", seeds, 0), ("loops", loops, 1)):
        if not values or any(type(value) is not int or value < least for value in values):
            raise ValueError(f"{option}: expected integers of at least {least}, got {list(values)}")
    starts = _starts(num_blocks, middles)
    found = [Variant(name="baseline", schedule=baseline(num_blocks))]
    for name in dict.fromkeys(names):
        if name in OF_MIDDLES:
            for start in starts:
                found += _of_middle(name, num_blocks, start, seeds, loops)
        elif name in OF_BLOCKS:
            make = getattr(block_schedules, name)
            last = num_blocks if name == "skip_one" else num_blocks - 1
            found += [Variant(name=name, schedule=make(num_blocks, block), block=block) for block in range(1, last + 1)]
    orders = dict.fromkeys(_custom(text, num_blocks) for text in custom)
    return found + [Variant(name=CUSTOM, schedule=schedule) for schedule in orders]


def _starts(num_blocks: int, middles: Sequence[int] | None) -> list[int]:
    """From the smallest middle to the largest."""
    if middles is None:
        return list(range((num_blocks - 2) // 2, -1, -1))
    if not middles:
        raise ValueError("middles: expected at least one number, or None for all, got none")
    known = {len(middle(num_blocks, start)): start for start in _starts(num_blocks, None)}
    for number in middles:
        if type(number) is not int or number not in known:
            told = ", ".join(map(str, known))
            raise ValueError(f"middles: of {num_blocks} blocks the middle has {told} blocks, got {number!r}")
    return [known[number] for number in sorted(set(middles))]


def _custom(text: str, num_blocks: int) -> Schedule:
    try:
        schedule = parse_schedule(text, num_blocks)
    except ValueError as error:
        raise ValueError(f"schedule {text!r}: {str(error).removeprefix('schedule: ')}") from error
    if not schedule:
        raise ValueError("schedule: expected at least one step, as in 1 2 (3,4,5) 6, got none")
    return schedule


def _of_middle(name: str, num_blocks: int, start: int, seeds: Sequence[int], loops: Sequence[int]) -> list[Variant]:
    size = len(middle(num_blocks, start))
    make = getattr(block_schedules, name)
    if name == "random":
        return [
            Variant(name=name, schedule=make(num_blocks, start, seed=seed), middle=size, seed=seed)
            for seed in dict.fromkeys(seeds)
        ]
    if name == "looped_parallel":
        return [
            Variant(name=name, schedule=make(num_blocks, start, loops=number), middle=size, loops=number)
            for number in dict.fromkeys(loops)
        ]
    return [Variant(name=name, schedule=make(num_blocks, start), middle=size)]
