"""Gain of comparing two curves prompt by prompt, on simulated rises of known order.

The result is a table of docs/emergence_accuracy.md.

OMP_NUM_THREADS=1 python benchmarks/paired_order.py             30 pairs per row: two CPU minutes
OMP_NUM_THREADS=1 python benchmarks/paired_order.py --pairs 4   a quick look
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_layers.clock.times_and_order import probability_before
from lit_layers.functional.emergence.curve_times import bootstrap_counts, emergence_times
from tests.test_paired_order import PROMPTS, STEPS, two_curves

PAGE = Path(__file__).parents[1] / "docs" / "emergence_accuracy.md"
HEAD = (
    *("noise that both share", "half-way points apart", "mean P, paired", "independent"),
    "deviation of the difference to that of independent draws",
    *("root mean square of error over deviation", "P outside 0.05 to 0.95, paired", "independent"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="of a row")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a row is not the page's")
    options = parser.parse_args()
    page, same = PAGE.read_text(encoding="utf-8"), True
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for shift in (0.3, 0.0):
        for shared in (0.0, 0.9, 0.99):
            pairs = (compared(two_curves(seed, shift=shift, shared=shared), seed) for seed in range(options.pairs))
            paired, alone, difference, spread, spread_alone = np.array([*pairs]).T
            error = np.sqrt(np.mean(((difference - shift) / spread) ** 2))
            cells = f"{shared:.0%}", f"{shift:g} octaves", f"{paired.mean():.2f}", f"{alone.mean():.2f}"
            errors = f"{np.median(spread / spread_alone):.2f}", f"{error:.2f}"
            sure = (f"{(np.abs(p - 0.5) > 0.45).sum()} of {options.pairs}" for p in (paired, alone))
            row = f"| {' | '.join([*cells, *errors, *sure])} |"
            same = same and row in page
            print(row, flush=True)
    return int(options.check and not same)


def compared(rows: list[np.ndarray], seed: int) -> tuple[float, float, float, float, float]:
    """Compare two curves with and without pairing their prompts.

    Returns P(first before second) paired and unpaired, the difference of the half-way points in octaves, and its
    standard deviation paired and unpaired.
    """
    counts = bootstrap_counts(PROMPTS, seed=seed)
    first, second = (
        emergence_times(STEPS, each.mean(0), replicates=each, counts=counts, seed=[seed, number])
        for number, each in enumerate(rows)
    )
    a, b = (np.log2(1 + found.halfway_draws) for found in (first, second))
    paired, alone = (probability_before(first, second, paired=together) for together in (True, False))
    return paired, alone, float(np.median(b) - np.median(a)), float((b - a).std()), float((a.var() + b.var()) ** 0.5)


if __name__ == "__main__":
    raise SystemExit(main())
