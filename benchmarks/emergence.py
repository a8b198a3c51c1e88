"""Coverage of intervals of emergence times, and false alarms on flat curves, on simulated noisy curves.

    OMP_NUM_THREADS=1 python benchmarks/emergence.py --curves 20     a quick look
    OMP_NUM_THREADS=1 python benchmarks/emergence.py --errors stderr --save    2,000 curves: 9 CPU minutes
    OMP_NUM_THREADS=1 python benchmarks/emergence.py --shapes corners --save   2,000 rises with a corner: 9 CPU minutes
    ... --shapes steps, cut, flat    2,000 instant steps; 2,000 partial rises; 40 x 400 flat curves, 15 CPU minutes

A curve that is judged flat has no interval. It counts only in the first rows.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from drawn_emergence import CORNERS, KINDS, covered, cut, drawn, flat_noise, instant_steps
from rounds import Row, add_options, finish

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_layers.functional import emergence_times

ERRORS = {"stderr": "known errors", "replicates": "replicates", "neither": "no errors given"}
TIMES = ("onset", "halfway", "peak", "plateau")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=400, help="curves per round, over all shapes")
    parser.add_argument("--errors", nargs="+", choices=ERRORS, default=[*ERRORS], help="what is known about the errors")
    parser.add_argument("--shapes", choices=OTHERS, help="only these shapes, in a separate table")
    add_options(parser)
    options = parser.parse_args()
    if options.shapes:
        return finish(f"emergence_{options.shapes}", list(OTHERS[options.shapes](options)), options)
    rows, shapes = [], []
    for errors in options.errors:
        words = ERRORS[errors]
        flat = [false_alarms(round_, errors, options.curves) for round_ in range(options.rounds)]
        rows.append(Row(f"{words}: flat curves said to emerge", flat, 0.05, at_most=True))
        rounds = [round_coverage(round_, errors, options.curves, KINDS) for round_ in range(options.rounds)]
        emerged = [sum(map(len, each.values())) / options.curves for each in rounds]
        rows.append(Row(f"{words}: curves that change said to", emerged))
        rows += coverage(words, [np.concatenate([*each.values()]) for each in rounds])
        settled = [np.concatenate([each[kind] for kind in KINDS if kind != "drift"]) for each in rounds]
        for column, end in (-2, "an onset"), (-1, "a plateau"):
            shares = [float(each[:, column].mean()) for each in settled]
            rows.append(Row(f"{words}: given {end} (drifts excluded)", shares))
        for kind in KINDS if errors == "stderr" else ():
            shapes += coverage(f"{words}, {kind}", [each[kind] for each in rounds])
    return finish("emergence", rows + shapes, options)


def corner_rows(options: argparse.Namespace) -> Iterator[Row]:
    rounds = [round_coverage(round_, "stderr", options.curves, CORNERS) for round_ in range(options.rounds)]
    for kind in CORNERS:
        yield from coverage(kind, [each[kind] for each in rounds])


def step_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the coverage for instant steps, half of them on 14 checkpoints and half on 30."""
    for checkpoints in (14, 30):
        rounds = []
        for round_ in range(options.rounds):
            steps = instant_steps(options.curves // 2, checkpoints, np.random.default_rng([round_, 2, checkpoints]))
            found = [(emergence_times(*given, **errors), truth) for given, errors, truth in steps]
            rounds.append(np.array([covered(*each) for each in found]))
        yield from coverage(f"{checkpoints} checkpoints", rounds)


def cut_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield how often partial rises get an onset and a plateau, and how often intervals contain the true times."""
    rounds, inside = [], []
    for round_ in range(options.rounds):
        found = []
        for given, errors, truth, moves in cut(options.curves, np.random.default_rng([round_, 3])):
            times = emergence_times(*given, **errors)
            if times.changes:
                found.append((*moves, times.before, times.not_yet, given[0][0] == 0, *covered(times, truth)))
        table = np.array(found, dtype=float)
        late, early = table[:, 1] > 0, (table[:, 0] > 0) & (table[:, 4] == 0)
        within = (table[:, 0] == 0) & (table[:, 4] == 0)
        shares = (1 - table[late, 3], 1 - table[early, 2], 1 - table[~late, 3], 1 - table[within, 2])
        rounds.append([float(each.mean()) for each in shares])
        inside.append(table[:, 5:])
    names = ("move at the last checkpoint: given a plateau", "move at the first: given an onset")
    others = ("have settled: given a plateau", "have not moved yet at the first: given an onset")
    for name, values in zip((*names, *others), zip(*rounds, strict=True), strict=True):
        yield Row(name, list(values), 0.05 if name in names else None, at_most=True)
    yield from (row for row in coverage("all", inside) if "peak" not in row.what)  # the true peak is never observed


def flat_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the share of flat curves that are judged to change, by noise and number of checkpoints."""
    for errors in ("neither", "stderr"):
        for noise in ("normal", "t3", "0.3", "0.7", "0.9"):
            for checkpoints in (8, 15, 29, 55):
                said = []
                for round_ in range(options.rounds):
                    rng = np.random.default_rng([round_, 4, checkpoints])
                    curves = flat_noise(options.curves // 5, checkpoints, noise, rng)
                    known: Any = {"stderr": np.ones(checkpoints)} if errors == "stderr" else {}
                    steps = np.geomspace(1, 143_000, checkpoints)
                    said.append(float(np.mean([emergence_times(steps, each, **known).changes for each in curves])))
                named = noise if noise in ("normal", "t3") else f"AR(1) {noise}"
                yield Row(f"{ERRORS[errors]}, {named}: {checkpoints} checkpoints", said, 0.08, at_most=True)


OTHERS = {"corners": corner_rows, "steps": step_rows, "cut": cut_rows, "flat": flat_rows}


def coverage(words: str, rounds: list[np.ndarray]) -> Iterator[Row]:
    """Yield the share of intervals that contain the true time, from arrays (curves, times and more) of each round."""
    means = np.array([each[:, : len(TIMES)].mean(0) for each in rounds])
    for name, shares in zip(TIMES, means.T.tolist(), strict=True):
        yield Row(f"{words}: interval of {name} holds", shares, 0.93)


def false_alarms(round_: int, errors: str, curves: int) -> float:
    """Return the share of flat curves that are judged to emerge."""
    flat = drawn(curves, np.random.default_rng([round_, 0]), errors, flat=True)
    return float(np.mean([emergence_times(*given, **options).changes for given, options, _ in flat]))


def round_coverage(round_: int, errors: str, curves: int, kinds: Sequence[str]) -> dict[str, np.ndarray]:
    """Return for each shape an array (curves, 4 + 2) of the curves that are judged to change.

    The first four columns say which intervals contain the true time. The last two say whether the curve has an onset,
    rather than "before", and a plateau, rather than "not yet". All shapes have the same number of curves.
    """
    rng = np.random.default_rng([round_, 1])
    inside: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for kind in kinds:
        for given, options, truth in drawn(curves // len(kinds), rng, errors, kind=kind):
            times = emergence_times(*given, **options)
            if times.changes:
                inside[kind].append([*covered(times, truth), not times.before, not times.not_yet])
    return {kind: np.array(each, dtype=float) for kind, each in inside.items()}


if __name__ == "__main__":
    raise SystemExit(main())
