"""Analyses: from a layered model to records."""

from lit_layers.analyses.base import Analysis
from lit_layers.analyses.coupling import Coupling
from lit_layers.analyses.lens import Lens
from lit_layers.analyses.next_token_probe import NextTokenProbe
from lit_layers.analyses.representation import Representation
from lit_layers.analyses.trajectory import Trajectory

__all__ = ["Analysis", "Coupling", "Lens", "NextTokenProbe", "Representation", "Trajectory"]
