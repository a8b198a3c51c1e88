"""Analyses: from a layered model to records."""

from lit_layers.analyses.attention import AttentionPatterns, InContext, Induction
from lit_layers.analyses.attentive_probe import AttentiveProbe
from lit_layers.analyses.base import Analysis, DividedAnalysis
from lit_layers.analyses.changed_texts import Invariance, PromptStudies
from lit_layers.analyses.depth_coupling import Coupling, CouplingMatrices
from lit_layers.analyses.jacobian_lens import JacobianLens
from lit_layers.analyses.jacobian_lens import fit_jacobian_lens as fit_jacobian_lens
from lit_layers.analyses.label_probe import LabelProbe
from lit_layers.analyses.layer_geometry import LayerSimilarity, OrderStates, PathsInPlane, Trajectory
from lit_layers.analyses.linear_structure import ConceptAlignment, NextTokenResidual
from lit_layers.analyses.next_token_probe import NextTokenProbe
from lit_layers.analyses.ngram_agreement import NgramAgreement
from lit_layers.analyses.readout_scores import Interventions, Lens
from lit_layers.analyses.representation import Representation, StateMetric
from lit_layers.analyses.state_geometry import StateGeometry
from lit_layers.analyses.task_probes import Probe, SampleSizeSweep
from lit_layers.analyses.token_jacobians import CrossTokenInfluence, TokenCoupling

__all__ = [
    "Analysis",
    "AttentionPatterns",
    "AttentiveProbe",
    "ConceptAlignment",
    "Coupling",
    "CouplingMatrices",
    "CrossTokenInfluence",
    "DividedAnalysis",
    "InContext",
    "Induction",
    "Interventions",
    "Invariance",
    "JacobianLens",
    "LabelProbe",
    "LayerSimilarity",
    "Lens",
    "NextTokenProbe",
    "NextTokenResidual",
    "NgramAgreement",
    "OrderStates",
    "PathsInPlane",
    "Probe",
    "PromptStudies",
    "Representation",
    "SampleSizeSweep",
    "StateGeometry",
    "StateMetric",
    "TokenCoupling",
    "Trajectory",
]
