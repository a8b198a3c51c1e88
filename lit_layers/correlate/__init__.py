"""A metric of models against their score: who says what, how strongly, and what width alone would say."""

from lit_layers.correlate.findings import Findings, correlate
from lit_layers.correlate.table import ModelTable, published, read_file, read_runs

__all__ = ["Findings", "ModelTable", "correlate", "published", "read_file", "read_runs"]
