"""A metric against a score: of models, with what width alone would say, or of the layers of each model."""

from lit_layers.correlate.findings import Findings, LayerFindings, correlate, correlate_layers
from lit_layers.correlate.layer_tables import LayerTables, read_layers
from lit_layers.correlate.model_table import ModelTable, published, read_file, read_runs

__all__ = [
    "Findings",
    "LayerFindings",
    "LayerTables",
    "ModelTable",
    "correlate",
    "correlate_layers",
    "published",
    "read_file",
    "read_layers",
    "read_runs",
]
