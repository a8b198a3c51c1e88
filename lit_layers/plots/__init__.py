"""Figures of a frame of records: pure functions from a table to a plotly figure."""

from lit_layers.plots.emergence import emergence_curves
from lit_layers.plots.graph import coupling_graph
from lit_layers.plots.layers import distance_profile, layer_profile, spectrum
from lit_layers.plots.matrices import compression_matrix, layer_matrix, token_map
from lit_layers.plots.models import model_profile
from lit_layers.plots.paths import paths_in_plane
from lit_layers.plots.scatter import Scatter, scatter_plot
from lit_layers.plots.tables import change_table, model_table, variants
from lit_layers.plots.training import training_curves

__all__ = [
    "Scatter",
    "change_table",
    "compression_matrix",
    "coupling_graph",
    "distance_profile",
    "emergence_curves",
    "layer_matrix",
    "layer_profile",
    "model_profile",
    "model_table",
    "paths_in_plane",
    "scatter_plot",
    "spectrum",
    "token_map",
    "training_curves",
    "variants",
]
