"""Figures of a frame of records: pure functions from a table to a plotly figure."""

from lit_layers.plots.emergence import emergence_curves
from lit_layers.plots.layers import layer_matrix, layer_profile, spectrum
from lit_layers.plots.tables import change_table, variants
from lit_layers.plots.training import training_curves

__all__ = [
    "change_table",
    "emergence_curves",
    "layer_matrix",
    "layer_profile",
    "spectrum",
    "training_curves",
    "variants",
]
