"""Figures of a frame of records: pure functions from a table to a plotly figure."""

from lit_layers.plots.concepts import concept_map
from lit_layers.plots.curve_pictures import write_concept_map, write_layer_curves, write_sample_sizes
from lit_layers.plots.emergence import emergence_curves
from lit_layers.plots.graph import coupling_graph
from lit_layers.plots.layers import distance_profile, layer_profile, residual_profile, spectrum
from lit_layers.plots.matrices import compression_matrix, layer_matrix, token_map
from lit_layers.plots.models import model_profile
from lit_layers.plots.paths import paths_in_plane
from lit_layers.plots.sample_sizes import sample_size_curves
from lit_layers.plots.scatter import Scatter, scatter_plot
from lit_layers.plots.surfaces import best_layers, layer_surface, write_surface
from lit_layers.plots.tables import change_table, model_table, variants
from lit_layers.plots.task_means import with_task_means
from lit_layers.plots.training import training_curves

__all__ = [
    "Scatter",
    "best_layers",
    "change_table",
    "compression_matrix",
    "concept_map",
    "coupling_graph",
    "distance_profile",
    "emergence_curves",
    "layer_matrix",
    "layer_profile",
    "layer_surface",
    "model_profile",
    "model_table",
    "paths_in_plane",
    "residual_profile",
    "sample_size_curves",
    "scatter_plot",
    "spectrum",
    "token_map",
    "training_curves",
    "variants",
    "with_task_means",
    "write_concept_map",
    "write_layer_curves",
    "write_sample_sizes",
    "write_surface",
]
