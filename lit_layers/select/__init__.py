"""The layer that is enough for a task: exported as a model of its own, with its probe, and put to work."""

from lit_layers.select.card import Card
from lit_layers.select.comparison import compare_costs
from lit_layers.select.export import export
from lit_layers.select.head import HeadFacts, ProbeHead
from lit_layers.select.predict import LayerClassifier, load_classifier
from lit_layers.select.table import cost_table, measured_on, score_table

__all__ = [
    "Card",
    "HeadFacts",
    "LayerClassifier",
    "ProbeHead",
    "compare_costs",
    "cost_table",
    "export",
    "load_classifier",
    "measured_on",
    "score_table",
]
