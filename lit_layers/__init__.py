"""Show how structure emerges, layer by layer, while a transformer trains."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.layerwise import layers
    from lit_layers.measuring.one_model import measure
    from lit_layers.models.view import LayeredModel, Trajectory
    from lit_layers.records import Record
    from lit_layers.training.watching import watch

__all__ = ["Analysis", "LayeredModel", "Record", "Trajectory", "layers", "measure", "watch"]

_HOMES = {
    "Analysis": "lit_layers.analyses.base",
    "LayeredModel": "lit_layers.models.view",
    "Record": "lit_layers.records",
    "Trajectory": "lit_layers.models.view",
    "layers": "lit_layers.layerwise",
    "measure": "lit_layers.measuring.one_model",
    "watch": "lit_layers.training.watching",
}


def __getattr__(name: str) -> Any:
    # Imports happen on first use, so that `lit-layers --help` does not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_layers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
