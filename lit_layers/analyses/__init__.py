"""Analyses: from a layered model to records."""

from lit_layers.analyses.base import Analysis, DividedAnalysis
from lit_layers.analyses.compressions import CouplingMatrices
from lit_layers.analyses.concept_alignment import ConceptAlignment
from lit_layers.analyses.coupling import Coupling
from lit_layers.analyses.cross_token_influence import CrossTokenInfluence
from lit_layers.analyses.interventions import Interventions
from lit_layers.analyses.invariance import Invariance
from lit_layers.analyses.label_probe import LabelProbe
from lit_layers.analyses.layer_similarity import LayerSimilarity
from lit_layers.analyses.lens import Lens
from lit_layers.analyses.next_token_probe import NextTokenProbe
from lit_layers.analyses.paths_in_plane import PathsInPlane
from lit_layers.analyses.prediction_residual import NextTokenResidual
from lit_layers.analyses.probe import Probe
from lit_layers.analyses.prompt_studies import PromptStudies
from lit_layers.analyses.representation import Representation
from lit_layers.analyses.sample_sizes import SampleSizeSweep
from lit_layers.analyses.state_metric import StateMetric
from lit_layers.analyses.token_coupling import TokenCoupling
from lit_layers.analyses.trajectory import Trajectory

__all__ = [
    "Analysis",
    "ConceptAlignment",
    "Coupling",
    "CouplingMatrices",
    "CrossTokenInfluence",
    "DividedAnalysis",
    "Interventions",
    "Invariance",
    "LabelProbe",
    "LayerSimilarity",
    "Lens",
    "NextTokenProbe",
    "NextTokenResidual",
    "PathsInPlane",
    "Probe",
    "PromptStudies",
    "Representation",
    "SampleSizeSweep",
    "StateMetric",
    "TokenCoupling",
    "Trajectory",
]
