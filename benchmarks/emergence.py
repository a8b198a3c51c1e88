"""How often intervals of emergence times hold, and how often a flat curve is said to emerge: curves drawn with errors.

    OMP_NUM_THREADS=1 python benchmarks/emergence.py --curves 20     a look
    OMP_NUM_THREADS=1 python benchmarks/emergence.py --errors stderr --save    2,000 curves: 9 CPU minutes
    OMP_NUM_THREADS=1 python benchmarks/emergence.py --corners --save          2,000 rises with a corner: 9 CPU minutes

A curve that is said not to emerge has no interval and counts in the first rows alone.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rounds import Row, add_options, finish

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_layers.functional import emergence_times
from tests.support.drawn_emergence import CORNERS, KINDS, covered, drawn

ERRORS = {"stderr": "known errors", "replicates": "replicates", "neither": "no errors given"}
TIMES = ("onset", "halfway", "peak", "plateau")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=400, help="in a round, of all shapes together")
    parser.add_argument("--errors", nargs="+", choices=ERRORS, default=[*ERRORS], help="what is known of them")
    parser.add_argument("--corners", action="store_true", help="known errors alone, of rises with a corner")
    add_options(parser)
    options = parser.parse_args()
    if options.corners:
        return finish("emergence_corners", list(of_corners(options)), options)
    rows, shapes = [], []
    for errors in options.errors:
        words = ERRORS[errors]
        flat = [false_alarms(round_, errors, options.curves) for round_ in range(options.rounds)]
        rows.append(Row(f"{words}: flat curves said to emerge", flat, 0.05, at_most=True))
        rounds = [of_round(round_, errors, options.curves, KINDS) for round_ in range(options.rounds)]
        emerged = [sum(map(len, each.values())) / options.curves for each in rounds]
        rows.append(Row(f"{words}: curves that emerge said to", emerged))
        rows += coverage(words, [np.concatenate([*each.values()]) for each in rounds])
        for kind in KINDS if errors == "stderr" else ():
            shapes += coverage(f"{words}, {kind}", [each[kind] for each in rounds])
    return finish("emergence", rows + shapes, options)


def of_corners(options: argparse.Namespace) -> Iterator[Row]:
    rounds = [of_round(round_, "stderr", options.curves, CORNERS) for round_ in range(options.rounds)]
    for kind in CORNERS:
        yield from coverage(kind, [each[kind] for each in rounds])


def coverage(words: str, rounds: list[np.ndarray]) -> Iterator[Row]:
    """Of what intervals hold in each round, (curves, times)."""
    for name, shares in zip(TIMES, np.array([each.mean(0) for each in rounds]).T.tolist(), strict=True):
        yield Row(f"{words}: 95% interval of {name} holds", shares, 0.93)


def false_alarms(round_: int, errors: str, curves: int) -> float:
    """The share of flat curves that are said to emerge."""
    flat = drawn(curves, np.random.default_rng([round_, 0]), errors, flat=True)
    return float(np.mean([emergence_times(*given, **options).emerges for given, options, _ in flat]))


def of_round(round_: int, errors: str, curves: int, kinds: Sequence[str]) -> dict[str, np.ndarray]:
    """By shape, as many curves of each: which intervals hold of those that are said to emerge, (curves, times)."""
    rng = np.random.default_rng([round_, 1])
    inside: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    for kind in kinds:
        for given, options, truth in drawn(curves // len(kinds), rng, errors, kind=kind):
            times = emergence_times(*given, **options)
            if times.emerges:
                inside[kind].append(covered(times, truth))
    return {kind: np.array(each) for kind, each in inside.items()}


if __name__ == "__main__":
    raise SystemExit(main())
