"""Find analyses by their own names or by the names of their metrics.

Analyses that need data other than batches are not included, except `MinimalPairs`, whose data comes with the package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from lit_layers import functional, metrics
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.context_use import AttentionPatterns
from lit_layers.analyses.depth_coupling import Coupling
from lit_layers.analyses.effective_depth import EffectiveDepth
from lit_layers.analyses.minimal_pairs import MinimalPairs
from lit_layers.analyses.probes.next_token_residual import NextTokenResidual
from lit_layers.analyses.readout_scores import Lens
from lit_layers.analyses.representation import (
    LayerSimilarity,
    PooledStates,
    Representation,
    StateGeometry,
    StateMetric,
)
from lit_layers.analyses.token_jacobians import CrossTokenInfluence, TokenCoupling
from lit_layers.analyses.token_paths import PathsInPlane, Trajectory
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError, did_you_mean

# Each analysis with the groups of `metrics.toml` that list its metrics.
_ANALYSES: dict[type[Analysis], tuple[str, ...]] = {
    Trajectory: ("trajectory",),
    Representation: ("representation",),
    Coupling: ("coupling",),
    Lens: ("lens",),
    MinimalPairs: ("minimal_pairs",),
    StateGeometry: ("geometry",),
    EffectiveDepth: ("depth",),
    PooledStates: ("pooled",),
    AttentionPatterns: ("attention",),
    LayerSimilarity: ("similarity",),
    TokenCoupling: ("token_coupling",),
    CrossTokenInfluence: ("influence",),
    NextTokenResidual: ("residual",),
    PathsInPlane: ("plane",),
}
NAMES: Mapping[str, type[Analysis]] = {analysis.name: analysis for analysis in _ANALYSES}
# These are expensive because they compute derivatives, so they run on a few short texts only.
COSTLY = (Coupling, TokenCoupling, CrossTokenInfluence)
# Metrics in the groups above that cannot be requested here: only other analyses, or other options, produce them.
_ELSEWHERE = {
    *("rankme", "token_angle", "compression"),
    *("prefix_matching_score", "best_prefix_matching_score", "random_prefix_matching_score", "in_context_score"),
    *("ngram_divergence", "random_ngram_divergence"),
}


def metric_names() -> dict[str, str]:
    """Return the metrics that can be requested by name, each with the name of the analysis that measures it."""
    return {
        metric: analysis.name
        for analysis, groups in _ANALYSES.items()
        for group in groups
        for metric in metrics.names(group)
        if metric not in _ELSEWHERE
    } | {name: name for name, row in metrics.METRICS.items() if row.of_states}


def find_analyses(names: Sequence[str]) -> dict[str, set[str] | None]:
    """Return a dict from the name of each requested analysis to its requested metrics. None means all its metrics.

    Raises:
        InputError: if there is no name, or an unknown one. The message suggests similar names.
    """
    if isinstance(names, str) or not names:
        raise InputError(f"metrics: expected a list of names such as ['coupling', 'lens'], got {names!r}")
    of_metrics, chosen_metrics = metric_names(), dict[str, set[str] | None]()
    for name in names:
        if name in NAMES:
            chosen_metrics[name] = None
        elif name in of_metrics:
            chosen = chosen_metrics.setdefault(of_metrics[name], set())
            if chosen is not None:
                chosen.add(name)
        else:
            remedy = did_you_mean(name, [*NAMES, *of_metrics], f"expected one of {', '.join(NAMES)}")
            raise InputError(f"metrics: unknown name {name!r}; {remedy}")
    return chosen_metrics


def make_analyses(
    names: Sequence[str], batches: Batches, few: Batches, pairs: Callable[[], MinimalPairs]
) -> list[Analysis]:
    """Return the requested analyses with default options; costly ones read the `few` batches.

    `pairs` makes `MinimalPairs`, which needs the tokenizer of the model instead of batches.

    Raises:
        InputError: if there is no name, or an unknown one.
    """
    return [
        pairs()
        if name == MinimalPairs.name
        else cast("Any", NAMES[name])(batches=few if issubclass(NAMES[name], COSTLY) else batches)
        if name in NAMES
        else StateMetric(metric=getattr(functional, name), batches=batches)
        for name in find_analyses(names)
    ]
