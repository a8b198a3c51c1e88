"""Figures and tables of a frame of records by their names: see `lit_layers.figures`."""

from lit_layers.figures import *  # noqa: F403
from lit_layers.figures import __all__ as _figures
from lit_layers.figures.pictures import (
    write_block_curves,
    write_concept_map,
    write_front,
    write_layer_curves,
    write_loop_map,
    write_sample_sizes,
    write_surface,
    write_variant_curves,
    write_variants_over_training,
)
from lit_layers.figures.tables import change_table, model_table, variants
from lit_layers.figures.task_means import with_task_means
from lit_layers.figures.variant_scores import with_task_medians

__path__: list[str] = []  # its former files are imported by their former names: `lit_layers.moved`
__all__ = [
    *_figures,
    "change_table",
    "model_table",
    "variants",
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
