"""The emergence clock: when each number of a run changes, in which order, and how sure that is."""

from lit_layers.clock.block_prediction import BlockTable, block_tables, prediction_table
from lit_layers.clock.curve_sources import curves_of
from lit_layers.clock.layer_statistics import LayerCurve, layer_curves, layer_table, over_the_seeds
from lit_layers.clock.lead_lags import lead_lag_table
from lit_layers.clock.model_forecasts import ModelForecasts, early_parts, forecast_models
from lit_layers.clock.state_similarity import similar_states
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
    "BlockTable",
    "Clock",
    "LayerCurve",
    "ModelForecasts",
    "StepCurve",
    "agreement_table",
    "block_tables",
    "curves_in",
    "curves_of",
    "early_parts",
    "forecast_models",
    "layer_curves",
    "layer_order_table",
    "layer_table",
    "lead_lag_table",
    "measure_times",
    "order_table",
    "over_seeds",
    "over_the_seeds",
    "prediction_table",
    "similar_states",
    "times_of_run",
    "times_table",
]
