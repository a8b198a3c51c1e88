"""How often unrelated curves are said to go together, and how often one that follows another is found to, and when.

    OMP_NUM_THREADS=1 python benchmarks/lead_lag.py --save          400 pairs of each kind: 12 CPU minutes
    OMP_NUM_THREADS=1 python benchmarks/lead_lag.py --pairs 20      a look

Curves are measured at 20 checkpoints. A pair without a p-value, of which one curve moves once, is said to go together
by nobody, and counts.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rounds import Row, add_options, finish

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_layers.functional.emergence.lead_lag import LeadLag
from tests.support.drawn_lead_lags import UNRELATED, driven, following, found, unrelated

HIGHEST = 0.06  # of tests at 0.05, some of which are exact, in rounds of some hundred pairs
RUNS = {1: "one run", 4: "4 seeds", 8: "8 seeds"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400, help="of each kind in a round")
    add_options(parser)
    options = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    for runs, of in RUNS.items():

        def rates(draw: Callable[[], LeadLag], told: Callable[[LeadLag], bool] = said) -> list[float]:
            return [float(np.mean([told(draw()) for _ in range(options.pairs)])) for _ in range(options.rounds)]

        for kind, words in UNRELATED.items():
            values = rates(lambda: found(unrelated(kind, rng, runs), unrelated(kind, rng, runs), seed=another(rng)))  # noqa: B023
            rows.append(Row(f"{of}: unrelated {words} said to go together", values, HIGHEST, at_most=True))
        values = rates(lambda: of_loss(rng, runs, given=False))  # noqa: B023
        rows.append(Row(f"{of}: two that follow the loss at once said to", values))
        values = rates(lambda: of_loss(rng, runs, given=True))  # noqa: B023
        rows.append(Row(f"{of}: the same, given the loss", values, HIGHEST, at_most=True))
        for error in (0.0, 0.2, 0.4):
            values = rates(lambda: found(*following(rng, error, runs), seed=another(rng)), in_time)  # noqa: B023
            rows.append(
                Row(f"{of}: copies an octave later, errors {error:g}, said to and half an octave off at most", values)
            )
    return finish("lead_lag", rows, options)


def another(rng: np.random.Generator) -> int:
    """Each pair has draws of its own; `emerge` takes the same seed for all pairs."""
    return int(rng.integers(2**32))


def said(result: LeadLag) -> bool:
    return result.p_value <= 0.05


def in_time(result: LeadLag) -> bool:
    return said(result) and 0.5 <= result.lag <= 1.5


def of_loss(rng: np.random.Generator, runs: int, *, given: bool) -> LeadLag:
    loss, first, second = driven(rng, runs)
    return found(first, second, loss if given else None, seed=another(rng))


if __name__ == "__main__":
    raise SystemExit(main())
