"""Audit rules on weights, one function each, which find checkpoints unlike those before and after them.

Training moves weights in small updates. The distance between two checkpoints therefore grows with the number of
optimizer steps between them, for every learning rate schedule. The checkpoints of a training run, in step order, form a
path through the space of weights, and a checkpoint far from it is suspect. Each threshold below lies between the values
of undamaged ("healthy") training runs and the values of the same runs with one planted defect.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lit_layers.series.checkpoint import Checkpoint, Listing, Series
from lit_layers.series.checkpoint_sources import Fingerprint, Format, ask_all, formats

# Detour ratio of checkpoint i: |w[i+1] - w[i-1]| / min(|w[i] - w[i-1]|, |w[i+1] - w[i]|). It is 0.75 or more in healthy
# training runs, mostly 1.4 to 2. A checkpoint with a ratio below LINE is off the path.
LINE = 0.5
TENSOR_LINE = 0.5  # like LINE, but for the distances between a single tensor's values in two checkpoints
# A detour ratio (as for LINE) below the limit is a fault only if it is also smaller than this share of the ratio of
# every other checkpoint.
FAR_LESS = 0.6
# Limit of |w[c] - w[a]| / max(|w[b] - w[a]|, |w[c] - w[b]|) for steps a < b < c. Below the limit, the weights have
# returned to old values. Healthy training runs have at least 0.67.
RETURN = 0.6
# Exchanging two checkpoints changes their distances to their neighbours. Two checkpoints may have been swapped if the
# exchange multiplies the sum of these distances by less than SWAP. Healthy runs have at least 0.96. The limit is
# SWAP_AT_END if one of the two is the first or last checkpoint, where healthy runs have at least 0.85.
SWAP, SWAP_AT_END = 0.9, 0.8
# A checkpoint may belong to another training run if d / m is above this limit. d is its cosine distance to the nearer
# one of the checkpoints before and after it. m is the median of its cosine distances to all other checkpoints. The
# ratio d / m is at most 0.84 in healthy runs, and at least 0.97 for a checkpoint of another training run.
STRANGER = 0.9
# A checkpoint is unlike its two neighbours if the cosine between the neighbours is above ALIKE, and its own cosines to
# both are below UNLIKE times that cosine.
UNLIKE, ALIKE = 0.3, 0.25
# STRANGERS: two checkpoints with a smaller cosine may come from two training runs. The measured cosines between runs
# were at most 0.09. FASTER: two groups of checkpoints come from two runs if weights change more than this many times
# faster between the groups than within each.
STRANGERS, FASTER = 0.15, 5.0
# Limit of |w[-1] - w[-2]| / |w[-2] - w[-3]| of a tensor, divided by the median of this ratio over all tensors. Healthy
# runs have at most 1.6.
JUMP = 5.0
FARTHER = 1.2  # limit of |w[-1] - w[-3]| / |w[-2] - w[-3]| of a tensor, divided by the median over all tensors
# Limit of a matrix's norm divided by its norm at the checkpoint before or after it, whichever norm is larger. A flipped
# exponent bit exceeds this limit.
OUTSIZED = 100.0
SEVERAL = 16  # smaller tensors are not compared, because few values may be equal by chance
# Equal consecutive checkpoints are no fault if the checkpoint before or after them differs from them in less than this
# share of the values.
HARDLY = 0.1
COARSE = {"bfloat16": 2**-6, "float16": 2**-9}  # smaller relative distances may be rounding in this precision
_FINE = 1e-5
_SAME = 1e-7  # tensors are equal up to this relative distance, which covers the rounding of products in float64


@dataclass(frozen=True)
class Finding:
    """One fault of a series, or a remark if `note` is set. `names` are the checkpoints that the fault makes suspect."""

    kind: str
    message: str
    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    note: bool = False


@dataclass(frozen=True)
class Listed:
    """The weight files of a series: those of each chosen checkpoint, of the last step and of the branch `main`."""

    series: Series
    chosen: Sequence[Checkpoint]
    compared: Mapping[str, Checkpoint]  # the last step, `main` and the chosen checkpoints, by name
    # hashes of the weight files, by checkpoint and by format; the format that is loaded comes first
    hashes: Mapping[str, Mapping[Format, frozenset[str]]]

    @classmethod
    def read(cls, series: Series, chosen: Sequence[Checkpoint]) -> "Listed":
        """List the files of each checkpoint; on the Hub, several lists are requested at a time."""
        ends = filter(None, (series.listing.last, series.listing.main))
        compared = {one.name: one for one in (*ends, *chosen)}
        hashes = ask_all(_hashes_of, compared.values())
        return cls(series, chosen, compared, dict(zip(compared, hashes, strict=True)))

    @property
    def listing(self) -> Listing:
        return self.series.listing

    def equal(self, one: str, other: str) -> bool | None:
        """Return whether two checkpoints, given by name, have equal weight files; None if they share no file format."""
        for kind, contents in self.hashes[one].items():
            if kind in self.hashes[other]:
                return contents == self.hashes[other][kind]
        return None


def _hashes_of(checkpoint: Checkpoint) -> Mapping[Format, frozenset[str]]:
    by_format = formats(checkpoint.source.files)
    return {kind: frozenset(file.hash for file in files.values()) for kind, files in by_format.items()}


def finding(kind: str, message: str, checkpoints: Iterable[Checkpoint], *, note: bool = False) -> Finding:
    """Return a finding that names these checkpoints and their steps."""
    checkpoints = list(checkpoints)
    steps = tuple(one.step for one in checkpoints if one.step is not None)
    return Finding(kind, message, steps, tuple(one.name for one in checkpoints), note)


@dataclass(frozen=True)
class Path:
    """Checkpoints in step order, with the inner products of their weights. All distances follow from these products.

    |a - b|^2 = <a, a> + <b, b> - 2 <a, b>, so the weights themselves need not stay in memory.
    """

    steps: Sequence[Checkpoint]
    products: Mapping[str, np.ndarray]  # inner products (steps, steps) of each tensor, by its name
    rounding: float  # a relative distance up to this may be rounding in the stored precision

    @classmethod
    def make(cls, steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint], *, vectors: bool = False) -> "Path":
        """Return the path of these checkpoints through the space of weights.

        Only tensors with the same shape in all checkpoints are used. Of these, the matrices are used, or with `vectors`
        only the other tensors, such as biases.
        """
        import torch

        shapes = [{(name, facts.shape) for name, facts in prints[one.name].tensors.items()} for one in steps]
        facts, products = prints[steps[0].name].tensors if steps else {}, {}
        for name, _ in sorted(set.intersection(*shapes)) if shapes else ():
            if facts[name].is_matrix != vectors and facts[name].count >= SEVERAL:
                samples = torch.stack([prints[one.name].samples[name] for one in steps])
                values = samples.double().nan_to_num(0.0, 0.0, 0.0).numpy()
                # Scale the inner products of the sampled values to the number of values of the whole tensor.
                products[name] = values @ values.T * (facts[name].count / values.shape[1])
        stored = {prints[one.name].precision for one in steps}
        return cls(steps, products, max((COARSE.get(each, _FINE) for each in stored), default=_FINE))

    @functools.cached_property
    def norms(self) -> Mapping[str, np.ndarray]:
        return {name: np.sqrt(np.diag(products)) for name, products in self.products.items()}

    @functools.cached_property
    def distances(self) -> Mapping[str, np.ndarray]:
        """Distances (steps, steps) between the values of each tensor in the checkpoints."""
        return {name: _distances(products) for name, products in self.products.items()}

    @functools.cached_property
    def distance(self) -> np.ndarray:
        """Distances (steps, steps) between the checkpoints, with each tensor scaled to a mean squared distance of 1."""
        squares = [each**2 / mean for each in self.distances.values() if (mean := (each**2).mean()) > 0]
        return np.sqrt(sum(squares, np.zeros((len(self.steps), len(self.steps)))))

    @functools.cached_property
    def cosine(self) -> np.ndarray:
        """Cosines (steps, steps) between the checkpoints, each seen as one vector of all its tensors."""
        inner = sum(self.products.values(), np.zeros((len(self.steps), len(self.steps))))
        lengths = np.sqrt(np.maximum(np.diag(inner), 1e-300))
        return inner / lengths[:, None] / lengths

    def likeness_in(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return two matrices (steps, steps) for one tensor: cosines, and <a, b> / min(|a|, |b|)^2.

        a and b are the tensor's values in two checkpoints. For |a| <= |b|, the second ratio is at least 1 exactly if
        <a, b - a> >= 0: b is a plus a change that does not point against a. Both ratios are 1 if a or b is all zeros.
        """
        inner, squares = self.products[name], np.diag(self.products[name])
        least, lengths = np.minimum.outer(squares, squares), np.sqrt(np.multiply.outer(squares, squares))
        cosine, common = (np.divide(inner, by, out=np.ones_like(inner), where=least > 0) for by in (lengths, least))
        return cosine, common

    @property
    def turns(self) -> float:
        """Length of the path if all checkpoints are scaled to the same norm, up to a constant factor."""
        return float(np.sqrt(np.maximum(1 - np.diag(self.cosine, 1), 0)).sum())

    def drop(self, names: Collection[str]) -> "Path":
        """Return the same series of checkpoints without these tensors, or `self` if no tensor would be left."""
        rest = {name: products for name, products in self.products.items() if name not in names}
        return replace(self, products=rest or self.products)

    def take(self, indices: Sequence[int]) -> "Path":
        """Return the path through the checkpoints at these indices, in this order."""
        products = {name: each[np.ix_(indices, indices)] for name, each in self.products.items()}
        return Path([self.steps[index] for index in indices], products, self.rounding)


def _distances(products: np.ndarray) -> np.ndarray:
    squares = np.diag(products)
    return np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0))


def broken_values(steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint]) -> Iterator[Finding]:
    """Find checkpoints with NaN or infinite values, or with a tensor of zeros that was not zero before."""
    weighted: set[str] = set()
    for one in steps:
        facts = prints[one.name].tensors
        if broken := sorted(name for name, tensor in facts.items() if tensor.num_broken):
            count = sum(facts[name].num_broken for name in broken)
            yield finding("not finite", f"{count:,} values are NaN or infinite, the first in {broken[0]}", [one])
        large = (name for name, tensor in facts.items() if tensor.count >= SEVERAL and not name.endswith("bias"))
        zero = sorted(name for name in large if facts[name].norm == 0 and not facts[name].num_broken)
        if cleared := [name for name in zero if name in weighted]:
            yield finding("zero weights", f"{cleared[0]} is 0 and was not before", [one])
        weighted |= {name for name, tensor in facts.items() if tensor.norm > 0}


def outsized_tensors(steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint]) -> Iterator[Finding]:
    """Find checkpoints with a matrix far larger than in both neighbours, as after a flipped exponent bit."""
    for index, one in enumerate(steps):
        nearby = [prints[steps[near].name].tensors for near in (index - 1, index + 1) if 0 <= near < len(steps)]
        for name, facts in prints[one.name].tensors.items():
            norms = [tensors[name].norm for tensors in nearby if name in tensors]
            if facts.is_matrix and norms and min(norms) > 0 and facts.norm > OUTSIZED * max(norms):
                says = f"{name} has {facts.norm / max(norms):.2g} times its norm beside"
                yield finding("value out of range", says, [one])
                break


def copies(listed: Listed, prints: Mapping[str, Fingerprint], read: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Find checkpoints with equal weights, by the hashes of their files or by the values that were read.

    The last step and `main` are taken to be right. All other equal checkpoints become suspect, as nothing shows which
    one is right. Equal weights are only a note during warm-up, where the learning rate may be 0, and where weights
    hardly change.
    """
    digests = {one.name: prints[one.name].digest for one in read}

    def is_same(one: str, other: str) -> bool:
        return bool(listed.equal(one, other)) or digests.get(one, one) == digests.get(other)

    groups: list[set[str]] = []
    for name in listed.compared:
        alike = [group for group in groups if any(is_same(name, other) for other in group)]
        groups = [group for group in groups if group not in alike] + [{name}.union(*alike)]
    last, main = listed.listing.last, listed.listing.main
    for group in groups:
        same = [one for one in listed.chosen if one.name in group and one is not last]
        kind, message = "identical weights", "the same weights under several names"
        if last is not None and last.name in group:
            kind, message = "equal to the final step", f"serve the weights of {last.label}"
        elif main is not None and main.name in group:
            kind, message = "equal to main", "serve the weights of main"
        elif len(same) < 2:
            continue
        steps = [listed.compared[name].step for name in group]
        is_early = all(step is not None and step <= listed.listing.warm_up for step in steps)
        is_read = {one.name for one in same} <= digests.keys()
        excuse = ""
        if is_early:
            excuse = "may be genuine: the learning rate starts at 0"
        elif is_read and same and is_still(read, prints, [one for one in read if one.name in group]):
            excuse = "hardly anything changes here"
        if same:
            yield finding(kind, excuse or message, same, note=bool(excuse))


def is_still(steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint], group: Sequence[Checkpoint]) -> bool:
    """Return whether weights hardly change just before or just after a group of equal checkpoints.

    The equal checkpoints then need not be copies of one file. The group must be consecutive. The checkpoint before or
    after the group must differ from the group in less than the share `HARDLY` of the sampled values.
    """
    indices = sorted(steps.index(one) for one in group)
    if indices[-1] - indices[0] + 1 != len(indices):
        return False
    outside = [(indices[0] - 1, indices[0]), (indices[-1], indices[-1] + 1)]
    pairs = [(steps[before], steps[after]) for before, after in outside if before >= 0 and after < len(steps)]
    return any(_moved(prints[before.name], prints[after.name]) < HARDLY for before, after in pairs)


def _moved(one: Fingerprint, other: Fingerprint) -> float:
    """Return the share of the sampled values that differ between two checkpoints."""
    pairs = [
        (values, other.samples[name])
        for name, values in one.samples.items()
        if name in other.samples and values.shape == other.samples[name].shape
    ]
    total = sum(len(here) for here, _ in pairs)
    return sum(int((here != there).sum()) for here, there in pairs) / total if total else 1.0


def path_findings(path: Path) -> list[Finding]:
    """Find checkpoints that were swapped, or that lie off the path of the weights during training.

    Findings name checkpoints only if no fault is left after the swap is undone and the checkpoints off the path are
    left out. Otherwise a single finding says that several checkpoints are wrong, and names none.
    """
    exchange = swapped(path)
    found, straight = ([], path) if exchange is None else ([exchange[0]], exchange[1])
    strays = list(outlying_steps(straight))
    names = {name for each in strays for name in each.names}
    rest = straight.take([index for index, one in enumerate(straight.steps) if one.name not in names])
    if (found or strays) and (swapped(rest) or any(outlying_steps(rest)) or _comes_back(rest.distance)):
        says = "several steps do not lie on one way, and the weights do not show which: exchanged, of other trainings?"
        return [Finding("out of line", says)]
    return [*found, *strays]


def swapped(whole: Path) -> tuple[Finding, Path] | None:
    """Find two checkpoints that were swapped: exchanging them makes the path shorter and free of other faults.

    Return the finding and the path after the exchange. With four or five checkpoints, exchanging another pair can give
    the same path backwards. The weights then do not show which pair was swapped, and the finding names no checkpoint.
    """
    path = _unborrowed(whole)
    count = len(path.steps)
    best = max(_exchanges(path.distance), key=lambda exchange: exchange.saved, default=None)
    if best is None or best.ratio > (SWAP_AT_END if best.first == 0 or best.second == count - 1 else SWAP):
        return None
    order = best.order.tolist()
    after = path.take(order)
    regular = all(exchange.ratio > SWAP for exchange in _exchanges(after.distance)) and not any(
        _detour(after.distance, index) < LINE for index in range(1, count - 1)
    )
    # The path must also get shorter if all checkpoints are scaled to the same norm. Otherwise only norms have changed.
    regular &= after.turns < path.turns
    for index, neighbour in ((best.first, 1), (best.second, count - 2)):
        regular &= not _is_stranger(after.cosine[index], index)
        # A long distance at either end of the path shows a checkpoint of another run, not two swapped checkpoints.
        if index in (0, count - 1):
            regular &= after.distance[index, neighbour] <= 3 * np.sort(np.diag(after.distance, 1))[-2]
    if not regular:
        return None
    backwards = [each for each in _exchanges(path.distance) if each.order.tolist() == order[::-1]]
    pairs = [(path.steps[each.first], path.steps[each.second]) for each in (best, *backwards)]
    says = f"the weights of {', or of '.join(f'{a.label} and {b.label}' for a, b in pairs)} fit in each other's place"
    # Swapping another pair of checkpoints instead gives the same order of the checkpoints, but backwards.
    if backwards:
        return Finding("swapped", f"{says}, and the weights do not show which"), whole.take(order)
    return finding("swapped", says, pairs[0]), whole.take(order)


def _unborrowed(path: Path) -> Path:
    """Leave out the tensors that return to their values in an earlier checkpoint, because they may be copies."""
    return path.drop({name for names in _borrowed(path, ()).values() for name in names})


def _is_stranger(cosine: np.ndarray, index: int) -> bool:
    """Return whether a checkpoint is not much nearer to its neighbours than to most other checkpoints."""
    angles = np.delete(1 - cosine, index)
    return bool(angles[max(index - 1, 0) : index + 1].min() > STRANGER * np.median(angles))


class _Exchange(NamedTuple):
    first: int
    second: int
    order: np.ndarray  # index of the checkpoint at each position, after two checkpoints have changed places
    # Sum of the distances from the two checkpoints to their neighbours, after they change places divided by before.
    ratio: float
    saved: float  # how much shorter the path through all checkpoints becomes if the two checkpoints change places


def _exchanges(distance: np.ndarray) -> Iterator[_Exchange]:
    """Yield each exchange of two checkpoints, with its effect on the length of the path through all checkpoints.

    Nothing is yielded for fewer than four checkpoints.
    """
    count = len(distance)
    for first, second in itertools.combinations(range(count), 2) if count >= 4 else ():
        if (first, second) in ((0, 1), (count - 2, count - 1)):
            # Skip this pair. It also looks swapped if one of the two checkpoints is an average of several steps, or
            # if the weights hardly change at the end of training.
            continue
        edges = np.unique(np.clip([first - 1, first, second - 1, second], 0, count - 2))
        order = np.arange(count)
        order[[first, second]] = second, first
        old, new = distance[edges, edges + 1].sum(), distance[order[edges], order[edges + 1]].sum()
        if old > 0:
            yield _Exchange(first, second, order, new / old, old - new)


def _comes_back(distance: np.ndarray) -> bool:
    """Return whether the path comes back close to an earlier checkpoint after moving away from it.

    Two checkpoints are then much nearer to each other than one of them is to a checkpoint between them.
    """
    return any(
        distance[before, after] < RETURN * max(distance[before, index], distance[index, after])
        for before, index, after in itertools.combinations(range(len(distance)), 3)
    )


def _detour(distance: np.ndarray, index: int) -> float:
    """Return the distance between a checkpoint's two neighbours, divided by its distance to the nearer of them."""
    least = min(distance[index - 1, index], distance[index, index + 1])
    return float(distance[index - 1, index + 1] / least) if least > 0 else np.inf


def outlying_steps(path: Path) -> Iterator[Finding]:
    """Find checkpoints off the path between their neighbours, as a whole or in single tensors.

    Such weights or tensors may have been copied from another training run or another checkpoint.
    """
    count, whole = len(path.steps), path
    if count < 3:
        return
    path = _unborrowed(whole)
    inner = range(1, count - 1)
    detours = {index: _detour(path.distance, index) for index in inner}
    strange = {index for index in inner if _is_least(detours, index, LINE) or _is_unlike(path.cosine, index)}
    if len(strange) <= max(1, count // 4):
        for index in sorted(strange):
            before, after = path.steps[index - 1].label, path.steps[index + 1].label
            says = f"far from {before} and {after}, which are near each other"
            yield finding("out of line", f"{says}: of another training?", [path.steps[index]])
    if foreign := _foreign_steps(path):
        says = "nothing in common with the steps beside: of another training?"
        yield finding("out of line", says, [path.steps[index] for index in foreign])
    strange |= {*foreign}
    borrowed = _borrowed(whole, strange)
    yield from _returned(path.steps, borrowed)
    usable = whole.take([index for index in range(count) if index not in strange])
    yield from _tensors_out_of_line(usable, {*itertools.chain.from_iterable(borrowed.values())})


def returned_vectors(steps: Sequence[Checkpoint], prints: Mapping[str, Fingerprint]) -> Iterator[Finding]:
    """Find checkpoints in which a bias or the weight of a norm returns to its values in an earlier checkpoint.

    Such vectors move too noisily for the other rules, but in an undamaged run they never return to old values.
    """
    yield from _returned(steps, _borrowed(Path.make(steps, prints, vectors=True), ()))


def _returned(steps: Sequence[Checkpoint], borrowed: Mapping[tuple[int, ...], Sequence[str]]) -> Iterator[Finding]:
    for indices, names in borrowed.items():
        says = f"hold the same {', '.join(names[:3])}, which moved between: a part of another step's file?"
        yield finding("out of line", says, [steps[index] for index in indices])


def _borrowed(path: Path, strange: Collection[int]) -> dict[tuple[int, ...], list[str]]:
    """Find tensors that change and later return to the values of an earlier checkpoint.

    Return the names of the tensors, by the indices of the checkpoints in which they are equal. `strange` holds the
    indices of checkpoints that are left out. Tensors that are equal in most checkpoints were never trained, and are
    left out as well.
    """
    borrowed: dict[tuple[int, ...], list[str]] = {}
    usable = [index for index in range(len(path.steps)) if index not in strange]
    for name, distance in path.distances.items():
        groups: dict[int, list[int]] = {}  # indices of checkpoints with equal values, by the first of them
        for index in usable:
            first = next((one for one in groups if distance[one, index] <= _SAME * path.norms[name][one]), index)
            groups.setdefault(first, []).append(index)
        for first, same in groups.items():
            pairs = [(a, [one for one in usable if a < one < b], b) for a, b in itertools.pairwise(same)]
            least = path.rounding * path.norms[name][first]
            if least == 0 or (2 * len(same) > len(usable) and not all(between for _, between, _ in pairs)):
                continue
            again = {end for a, between, b in pairs if between and distance[a, between].min() > least for end in (a, b)}
            if again:
                borrowed.setdefault(tuple(sorted(again)), []).append(name)
    return borrowed


def _is_least(values: Mapping[int, float], index: int, limit: float) -> bool:
    """Return whether the value at `index` is below the limit, and below `FAR_LESS` times every other value.

    If there is no other value, the limit is multiplied by `FAR_LESS`.
    """
    rest = [value for other, value in values.items() if other != index]
    return values[index] < (min(limit, FAR_LESS * min(rest)) if rest else limit * FAR_LESS)


def _is_unlike(cosine: np.ndarray, index: int) -> bool:
    across = cosine[index - 1, index + 1]
    return across > ALIKE and max(cosine[index - 1, index], cosine[index, index + 1]) < UNLIKE * across


def _foreign_steps(path: Path) -> list[int]:
    """Return the indices of the checkpoints that belong to a different training run than most checkpoints.

    Checkpoints form a group if a chain of similar checkpoints connects them. One run can also make two groups: at
    its beginning, over a long gap between two checkpoints, or after a spike of the learning rate. Two neighbouring
    groups are two runs only if

    - the rate of change between them, -log(cosine) per optimizer step, is far above the rate within each group,
    - the gap between the groups, in optimizer steps, is not much longer than the gaps within them, and
    - the later weights do not contain the earlier ones as a component (see `Path.likeness_in`).
    """
    count, numbers = len(path.steps), [one.step or 0 for one in path.steps]
    likeness = [path.likeness_in(name) for name in path.distances] or [(path.cosine, path.cosine)]
    cosine, common = np.quantile(likeness, 0.75, axis=0)  # not the maximum, because a few matrices may be frozen
    # The power of the boolean matrix of similar checkpoints connects all checkpoints of a chain. Each group is named by
    # the index of its first checkpoint.
    groups = np.linalg.matrix_power(cosine > STRANGERS, count).argmax(1).tolist()

    def width(a: int, b: int) -> int:
        return max(numbers[b] - numbers[a], 1)

    def rate(a: int, b: int) -> float:
        return -math.log(min(max(cosine[a, b], 0.05), 1 - 1e-6)) / width(a, b)

    different: set[int] = set()
    for index in range(1, count - 1):
        here, there = groups[index : index + 2]
        nearby = [(a, index) for a in range(index) if groups[a] == here][-1:]
        nearby += [(index + 1, b) for b in range(index + 2, count) if groups[b] == there][:1]
        if here == there or len(nearby) < min(2, count - 1 - index) or common[index, index + 1] > STRANGERS:
            continue
        is_gap = width(index, index + 1) > 2 * max(width(*pair) for pair in nearby)
        if not is_gap and rate(index, index + 1) > FASTER * max(rate(*pair) for pair in nearby):
            different |= {here, there}
    sizes = sorted((groups.count(group), group) for group in different)
    if len(sizes) > 1 and sizes[-1][0] > sizes[-2][0]:
        different.remove(sizes[-1][1])
    return [index for index, group in enumerate(groups) if group in different]


def _tensors_out_of_line(path: Path, without: Collection[str]) -> Iterator[Finding]:
    count = len(path.steps)
    judged = {name: distance for name, distance in path.distances.items() if name not in without}
    # names of tensors with values that do not fit between those of the neighbouring checkpoints, by the indices of the
    # one or two checkpoints that may be wrong
    off: dict[tuple[int, ...], list[str]] = {}
    for name, distance in judged.items():
        detours = {index: _detour(distance, index) for index in range(1, count - 1)}
        for index in detours:
            least = min(distance[index - 1, index], distance[index, index + 1])
            is_off = _is_least(detours, index, TENSOR_LINE) or _is_unlike(path.likeness_in(name)[0], index)
            if least > path.rounding * path.norms[name][index] and is_off:
                off.setdefault((index,), []).append(name)
    # If a tensor is wrong in the last but one checkpoint, its return to correct values in the last one is not a jump.
    before = off.get((count - 2,), ())
    for name, indices in _jumping(path, {name: judged[name] for name in judged.keys() - {*before}}):
        off.setdefault(indices, []).append(name)
    for indices, names in sorted(off.items()):
        if len(names) <= max(1, len(path.distances) // 2):
            steps = [path.steps[index] for index in indices]
            which, where = ", ".join(names[:3]), " or ".join(one.label for one in steps)
            yield finding("out of line", f"only {which} jumps at {where}: rows in another order?", steps)


def _jumping(path: Path, judged: Mapping[str, np.ndarray]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each tensor that moves much more than the others between the last two checkpoints.

    Each name comes with the index of the checkpoint with wrong values. Of the last two checkpoints, this is the one
    farther from the third last, relative to the median over all tensors. Both indices are given if the distances are
    similar.
    """
    last = len(path.steps) - 1
    moved = {
        name: (distance[-2, -1] / distance[-3, -2], distance[-3, -1] / distance[-3, -2])
        for name, distance in judged.items()
        if last > 1 and distance[-3, -2] > path.rounding * path.norms[name][-2]
    }
    shrunk = [path.norms[name][-1] < 0.5 * path.norms[name][-3] for name in moved]
    # If most tensors collapse to less than half their norm, a tensor that goes on training seems to jump beside them.
    if len(moved) < 4 or sum(shrunk) * 2 > len(moved):
        return
    jump, away = np.median(list(moved.values()), axis=0).tolist()
    for name, (its_jump, its_way) in sorted(moved.items()):
        if its_jump > JUMP * jump:
            farther = its_way / away
            yield name, (last,) if farther > FARTHER else (last - 1,) if farther < 1 / FARTHER else (last - 1, last)
