"""Correlation of a metric with a score, over models or over the layers of each model."""

from lit_layers.correlate.findings import correlate as correlate
from lit_layers.correlate.findings import correlate_layers as correlate_layers
from lit_layers.correlate.layer_tables import read_layers as read_layers
from lit_layers.correlate.model_table import published as published
