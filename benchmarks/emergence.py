"""How often intervals of emergence times hold, and how often a flat curve is said to emerge: curves drawn with errors.

    OMP_NUM_THREADS=1 python benchmarks/emergence.py --save          2,000 curves of each kind: 20 CPU minutes
    OMP_NUM_THREADS=1 python benchmarks/emergence.py --curves 20     a look
    OMP_NUM_THREADS=1 python benchmarks/emergence.py --corners --curves 100 --save    rises that begin in a corner

A curve that is said not to emerge has no interval and counts in the first rows alone.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rounds import Row, add_options, finish

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_layers.functional import emergence_times
from tests.support.drawn_emergence import covered, drawn

ERRORS = {"stderr": "known errors", "replicates": "replicates", "neither": "no errors given"}
TIMES = ("onset", "halfway", "peak", "plateau")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=400, help="of each kind in a round")
    parser.add_argument("--corners", action="store_true", help="known errors alone, of curves of another kind")
    add_options(parser)
    options = parser.parse_args()
    if options.corners:
        return finish("emergence_corners", list(of_corners(options)), options)
    rows = []
    for errors, words in ERRORS.items():
        rng = np.random.default_rng(0)
        flat = [
            np.mean([found(*each).emerges for each in drawn(options.curves, rng, errors, flat=True)])
            for _ in range(options.rounds)
        ]
        rows.append(Row(f"{words}: flat curves said to emerge", list(map(float, flat)), 0.05, at_most=True))
        inside, emerged = zip(*(of_round(rng, errors, options.curves) for _ in range(options.rounds)), strict=True)
        rows.append(Row(f"{words}: curves that emerge said to", list(emerged)))
        for place, name in enumerate(TIMES):
            rows.append(Row(f"{words}: 95% interval of {name} holds", [each[place] for each in inside], 0.93))
    return finish("emergence", rows, options)


def of_corners(options: argparse.Namespace) -> Iterator[Row]:
    """Of rises that are steepest where they begin, which no drawn curve is quite like."""
    rng = np.random.default_rng(0)
    rounds = [of_round(rng, "stderr", options.curves, "corner")[0] for _ in range(options.rounds)]
    for place, name in enumerate(TIMES):
        yield Row(f"rises from a corner: 95% interval of {name} holds", [each[place] for each in rounds], 0.93)


def found(given, options, truth):
    return emergence_times(*given, **options)


def of_round(rng: np.random.Generator, errors: str, curves: int, kind: str = "") -> tuple[list[float], float]:
    """The share of intervals that hold, by time, and of curves that are said to emerge."""
    inside = []
    for given, options, truth in drawn(curves, rng, errors, kind=kind):
        times = emergence_times(*given, **options)
        if times.emerges:
            inside.append(covered(times, truth))
    return np.mean(inside, 0).tolist(), len(inside) / curves


if __name__ == "__main__":
    raise SystemExit(main())
