"""Analyses, which measure a layered model and return records."""

from lit_layers.analyses.base import Analysis, Jobs, Rows, Values
from lit_layers.analyses.changed_texts import Invariance, PromptStudies
from lit_layers.analyses.concept_alignment import ConceptAlignment
from lit_layers.analyses.context_use import AttentionPatterns, InContext, Induction, NgramAgreement
from lit_layers.analyses.depth_coupling import Coupling, CouplingMatrices
from lit_layers.analyses.effective_depth import EffectiveDepth
from lit_layers.analyses.jacobian_lens import JacobianLens
from lit_layers.analyses.minimal_pairs import MinimalPairs
from lit_layers.analyses.order_states import OrderStates
from lit_layers.analyses.probes.label_probe import AttentiveProbe, LabelProbe
from lit_layers.analyses.probes.next_token_probe import NextTokenProbe
from lit_layers.analyses.probes.next_token_residual import NextTokenResidual
from lit_layers.analyses.probes.task_probes import Probe, SampleSizeSweep
from lit_layers.analyses.readout_scores import Interventions, Lens
from lit_layers.analyses.representation import (
    LayerSimilarity,
    PooledStates,
    Representation,
    StateGeometry,
    StateMetric,
)
from lit_layers.analyses.token_jacobians import CrossTokenInfluence, TokenCoupling
from lit_layers.analyses.token_paths import PathsInPlane, Trajectory

__all__ = [
    "Analysis",
    "AttentionPatterns",
    "AttentiveProbe",
    "ConceptAlignment",
    "Coupling",
    "CouplingMatrices",
    "CrossTokenInfluence",
    "EffectiveDepth",
    "InContext",
    "Induction",
    "Interventions",
    "Invariance",
    "JacobianLens",
    "Jobs",
    "LabelProbe",
    "LayerSimilarity",
    "Lens",
    "MinimalPairs",
    "NextTokenProbe",
    "NextTokenResidual",
    "NgramAgreement",
    "OrderStates",
    "PathsInPlane",
    "PooledStates",
    "Probe",
    "PromptStudies",
    "Representation",
    "Rows",
    "SampleSizeSweep",
    "StateGeometry",
    "StateMetric",
    "TokenCoupling",
    "Trajectory",
    "Values",
]
