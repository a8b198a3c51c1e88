"""The layer that is enough for a task: exported as a model of its own, with its probe, and put to work."""

from lit_layers.select.export import load_classifier as load_classifier
