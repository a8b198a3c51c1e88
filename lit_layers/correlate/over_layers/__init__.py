"""A metric of the layers against task scores of the layers: do they go together, and which layer would it choose?"""

from lit_layers.correlate.over_layers.findings import LayerFindings, correlate_layers
from lit_layers.correlate.over_layers.reading import LayerTables, read_layers

__all__ = ["LayerFindings", "LayerTables", "correlate_layers", "read_layers"]
