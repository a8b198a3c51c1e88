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
from lit_layers.plots.similarity import similarity_matrix, stages_over_training
from lit_layers.plots.surfaces import best_layers, layer_surface, write_surface
from lit_layers.plots.tables import change_table, model_table, variants
from lit_layers.plots.task_means import with_task_means
from lit_layers.plots.training import training_curves
from lit_layers.plots.variant_figures import (
    block_curves,
    loop_map,
    models_by_middle,
    quality_front,
    schedule_scores,
    variant_curves,
    variants_over_training,
)
from lit_layers.plots.variant_pictures import (
    write_block_curves,
    write_front,
    write_loop_map,
    write_variant_curves,
    write_variants_over_training,
)
from lit_layers.plots.variant_scores import with_task_medians

__all__ = [
    "Scatter",
    "best_layers",
    "block_curves",
    "change_table",
    "compression_matrix",
    "concept_map",
    "coupling_graph",
    "distance_profile",
    "emergence_curves",
    "layer_matrix",
    "layer_profile",
    "layer_surface",
    "loop_map",
    "model_profile",
    "model_table",
    "models_by_middle",
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
    "variants",
    "variants_over_training",
    "with_task_means",
    "with_task_medians",
    "write_block_curves",
    "write_concept_map",
    "write_front",
    "write_layer_curves",
    "write_loop_map",
    "write_sample_sizes",
    "write_surface",
    "write_variant_curves",
    "write_variants_over_training",
]
