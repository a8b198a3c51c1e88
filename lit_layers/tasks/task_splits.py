"""The parts of a task, and how rows are drawn and cut off: by the seed and the texts, not by the order of the rows."""

import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_layers.identity import sha16


@dataclass(frozen=True, eq=False)
class TaskSplit:
    """Texts with what is to be told from them."""

    texts: tuple[str, ...]
    targets: Tensor  # (rows,) int64 numbers of classes, or float64 values
    rows: tuple[int, ...]
    """Where each text stands in its source, counted from 0; over several files in their order."""

    def __len__(self) -> int:
        return len(self.texts)

    def __add__(self, other: "TaskSplit") -> "TaskSplit":
        targets = torch.cat([self.targets, other.targets])
        return TaskSplit(self.texts + other.texts, targets, self.rows + other.rows)


@dataclass(frozen=True, eq=False)
class TaskData:
    """The parts of a task. No text is in two of them; texts are compared without case, white space and form (NFKC)."""

    name: str
    kind: Literal["classification", "regression"]
    train: TaskSplit
    validation: TaskSplit
    test: TaskSplit
    classes: tuple[str, ...] | None
    """Names of the classes, by number; None for a regression."""
    num_duplicates: int = 0
    """Rows of train, and of a validation split that came with the task, left out because test has their text."""
    num_validation_duplicates: int = 0
    """Rows of train left out because the validation split that came with the task has their text."""
    num_empty: int = 0
    """Rows without text that were left out of all parts."""
    num_conflicting: int = 0
    """Rows of train and validation, all kept, whose text also stands there with another target."""
    num_unseen_test_rows: int = 0
    """Test rows of a class that train lacks: no probe can get them right."""
    num_train_wanted: int | None = None
    """Rows that the task asks for in training (with the validation cut from it) if the local copy has fewer."""
    num_test_wanted: int | None = None
    """Test rows that the task asks for if the local copy has fewer."""

    def train_and_validation(self) -> TaskSplit:
        return self.train + self.validation

    def content_hash(self) -> str:
        """Sixteen hex digits over the kind, the classes, and the texts and targets of each part."""
        parts = ([part.texts, part.targets.tolist()] for part in (self.train, self.validation, self.test))
        return sha16(*map(json.dumps, ([self.kind, self.classes], *parts)))


def normalised(text: str) -> str:
    """What equal texts share: compatibility forms (NFKC), case and white space are of no account."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def draw(keys: Sequence[str], number: int, *, seed: int, purpose: str) -> list[int]:
    """Indices of `number` rows, in rising order.

    Each row has a random place of its own, which (seed, purpose, key) decides, so the rows drawn do not depend on the
    order of the rows, and fewer of them are a part of more. Equal keys are told apart by their count so far.
    """
    seen: Counter[str] = Counter()
    places = []
    for key in keys:
        places.append(_place(seed, purpose, f"{seen[key]}/{key}"))
        seen[key] += 1
    return sorted(sorted(range(len(keys)), key=places.__getitem__)[:number])


def hold_out(keys: Sequence[str], strata: Sequence[Hashable], share: float, *, seed: int, purpose: str) -> list[bool]:
    """Which rows to hold out: `share` of each stratum, with equal keys on one side.

    Rows of one key are one unit. Units stand in an order that (seed, purpose, keys) decides; the first that fit into
    what is left of the strata's shares are held out. Shares are rounded so that the total is the rounded share of all
    rows, and each stratum keeps a row on the other side. Where units are larger than what is left, those that bring the
    counts of the strata closer to the shares are also held out. Returns False throughout if there is only one unit.
    """
    by_key: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        by_key.setdefault(key, []).append(row)
    units = [by_key[key] for key in sorted(by_key, key=lambda key: _place(seed, purpose, key))]
    counts = [Counter(strata[row] for row in unit) for unit in units]
    sizes = Counter(strata)
    quotas, taken, held = _quotas(sizes, share), Counter[Hashable](), set[int]()

    def gain(count: Counter[Hashable]) -> int:
        """How much the sum of squared differences from the shares falls with a unit."""
        return sum(rows * (2 * (quotas[stratum] - taken[stratum]) - rows) for stratum, rows in count.items())

    def fits(count: Counter[Hashable]) -> bool:
        return all(taken[stratum] + rows <= quotas[stratum] for stratum, rows in count.items())

    def helps(count: Counter[Hashable]) -> bool:
        return all(taken[stratum] + rows < sizes[stratum] for stratum, rows in count.items()) and gain(count) > 0

    for rule in (fits, helps):
        for number, count in enumerate(counts):
            if number not in held and rule(count):
                held.add(number)
                taken.update(count)
    if not held and len(units) > 1:  # every unit is far too large
        held.add(max(range(len(units)), key=lambda number: gain(counts[number])))
    chosen = {row for number in held for row in units[number]}
    return [row in chosen for row in range(len(keys))]


def _place(seed: int, purpose: str, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{purpose}/{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _quotas(sizes: Counter[Hashable], share: float) -> dict[Hashable, int]:
    """Rows of each stratum, by largest remainders."""
    exact = {stratum: share * rows for stratum, rows in sizes.items()}
    quotas = {stratum: math.floor(rows) for stratum, rows in exact.items()}
    missing = max(1, round(share * sizes.total())) - sum(quotas.values())
    for stratum in sorted(exact, key=lambda each: (round(quotas[each] - exact[each], 9), str(each))):
        if missing > 0 and quotas[stratum] < sizes[stratum] - 1:
            quotas[stratum] += 1
            missing -= 1
    return quotas
