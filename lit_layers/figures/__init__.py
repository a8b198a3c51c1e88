"""Figures of a frame of records: functions from a table to a `Chart`, which is Vega-Lite, PNG, SVG and PDF."""

from lit_layers.figures.chart import Chart, Panels, Series
from lit_layers.figures.maps import (
    best_layers,
    compression_matrix,
    concept_map,
    head_map,
    layer_matrix,
    layer_surface,
    similarity_matrix,
    token_map,
)
from lit_layers.figures.models import model_profile, models_in_rows
from lit_layers.figures.profiles import distance_profile, layer_profile, residual_profile, sample_size_curves, spectrum
from lit_layers.figures.scatter import Scatter, coupling_graph, paths_in_plane, scatter_plot
from lit_layers.figures.training import emergence_curves, stages_over_training, training_curves
from lit_layers.figures.variant_figures import (
    block_curves,
    loop_map,
    models_by_middle,
    quality_front,
    schedule_scores,
    variant_curves,
    variants_over_training,
)

__all__ = [
    "Chart",
    "Panels",
    "Scatter",
    "Series",
    "best_layers",
    "block_curves",
    "compression_matrix",
    "concept_map",
    "coupling_graph",
    "distance_profile",
    "emergence_curves",
    "head_map",
    "layer_matrix",
    "layer_profile",
    "layer_surface",
    "loop_map",
    "model_profile",
    "models_by_middle",
    "models_in_rows",
    "paths_in_plane",
    "quality_front",
    "residual_profile",
    "sample_size_curves",
    "scatter_plot",
    "schedule_scores",
    "similarity_matrix",
    "spectrum",
    "stages_over_training",
    "token_map",
    "training_curves",
    "variant_curves",
    "variants_over_training",
]
