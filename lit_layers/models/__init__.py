"""Models: the layered view (`LayeredModel`), and functions that build, truncate, save, load and hash models."""

from lit_layers.models.build import causal_lm, save, true_vocab_size, vit, weights_hash
from lit_layers.models.copies import truncate
from lit_layers.models.saved import load
from lit_layers.models.view import Batch, BlockCall, LayeredModel, Trajectory

__all__ = [
    "Batch",
    "BlockCall",
    "LayeredModel",
    "Trajectory",
    "causal_lm",
    "load",
    "save",
    "true_vocab_size",
    "truncate",
    "vit",
    "weights_hash",
]
