"""Ranges of options: one table for each class that has them, and one sentence for a value outside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_layers.errors import InputError

MANY = 10**9  # steps, sequences, tokens: more is a slip of the pen, and some loop would count them all


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both of them in it unless `above` or `below` leaves them out.

    `words` say what is expected, `low_words` where a number is too low or none; without them it is the bound passed.
    """

    low: float
    high: float
    whole: bool = False
    above: bool = False
    below: bool = False
    words: str | None = None
    low_words: str | None = None

    def expected(self, value: Any) -> str | None:
        """What is expected in place of `value`; None where it is in the range."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return self.words or self.low_words or ("a whole number" if self.whole else "a number")
        if not (value > self.low if self.above else value >= self.low):
            return self.words or self.low_words or f"{'more than' if self.above else 'at least'} {self.low:,}"
        if not (value < self.high if self.below else value <= self.high):
            return self.words or f"{'less than' if self.below else 'at most'} {self.high:,}"
        return None


COUNT = Range(1, MANY, whole=True)
COUNT_OR_NONE = Range(0, MANY, whole=True)
SHARE = Range(0, 1, words="a share from 0 to 1")
SHARE_BELOW_1 = Range(0, 1, below=True, words="a share of at least 0 and below 1")
LEARNING_RATE = Range(0, 1, above=True, below=True, low_words="a positive learning rate")
WEIGHT_DECAY = Range(0, 100)
BETA = Range(0, 1, below=True, words="two numbers of at least 0 and below 1")
BATCH = Range(1, 2**24, whole=True)  # its numbers are listed before they are cut into micro-batches
WORKERS = Range(0, 256, whole=True)  # processes
SEED = Range(0, 2**32 - 1, whole=True)


def refuse_outside(place: str, ranges: Mapping[str, Range], values: Mapping[str, Any]) -> None:
    """Refuses the first value outside its range; None and what is not there are left to the types.

    Raises:
        InputError: naming it, what is expected and what came.
    """
    for name, allowed in ranges.items():
        value = values.get(name)
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if each is not None and (expected := allowed.expected(each)) is not None:
                raise InputError(f"{place}{name}: expected {expected}, got {value}")
