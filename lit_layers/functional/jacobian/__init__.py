"""Block Jacobians: how they are computed (`block_jacobians`), their leading singular directions (`singular`), and what
they show by themselves (`summaries`)."""

from lit_layers.functional.jacobian.block_jacobians import block_jacobian, token_places
from lit_layers.functional.jacobian.summaries import (
    Influence,
    JacobianSpectrum,
    cross_token_influence,
    inverse_norm_line,
    jacobian_spectrum,
    linearized_rollout,
)

__all__ = [
    "Influence",
    "JacobianSpectrum",
    "block_jacobian",
    "cross_token_influence",
    "inverse_norm_line",
    "jacobian_spectrum",
    "linearized_rollout",
    "token_places",
]
