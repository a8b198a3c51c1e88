"""The emergence clock: when each number of a run changes, in which order, and how sure that is."""

from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.layer_statistics import LayerCurve, layer_curves, layer_table, over_the_seeds
from lit_layers.clock.step_curves import StepCurve, curves_in, over_seeds
from lit_layers.clock.times_and_order import (
    Clock,
    agreement_table,
    layer_order_table,
    measure_times,
    order_table,
    times_of_run,
    times_table,
)

__all__ = [
    "Clock",
    "LayerCurve",
    "StepCurve",
    "agreement_table",
    "curves_in",
    "curves_of",
    "layer_curves",
    "layer_order_table",
    "layer_table",
    "measure_times",
    "order_table",
    "over_seeds",
    "over_the_seeds",
    "times_of_run",
    "times_table",
]
