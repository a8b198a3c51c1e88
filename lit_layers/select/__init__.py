"""Selection of the smallest sufficient layer for a task, and its export as a standalone model with a probe."""

from lit_layers.select.export import load_classifier as load_classifier
