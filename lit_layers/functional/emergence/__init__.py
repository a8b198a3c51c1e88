"""When a curve over training steps emerges: verdict and times (`curve_times`), from curves drawn given its values."""

from lit_layers.functional.emergence.curve_times import (
    FEWEST_CHECKPOINTS,
    EmergenceTimes,
    Time,
    emergence_times,
)
from lit_layers.functional.emergence.replicates import bootstrap_counts

__all__ = [
    "FEWEST_CHECKPOINTS",
    "EmergenceTimes",
    "Time",
    "bootstrap_counts",
    "emergence_times",
]
