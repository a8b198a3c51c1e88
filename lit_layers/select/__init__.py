"""The layer that is enough for a task: exported as a model of its own, with its probe, and put to work."""

from lit_layers.select.classifier import HeadFacts, LayerClassifier, ProbeHead, load_classifier
from lit_layers.select.export import Card, compare_costs, cost_table, export, measured_on, score_table

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
