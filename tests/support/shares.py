"""What one process of several measures, without the process."""

from collections.abc import Container

from torch import nn

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.measuring.one_model import Attempt, Shares, sendable


def measure_share(
    model: nn.Module, analysis: DividedAnalysis, numbers: Container[int], *, weights_hash: str | None = None
) -> Attempt:
    """The share of those parts of an analysis, as it is sent to the process that joins."""
    shares = Shares(model, [analysis], lambda _: None, numbers={analysis.name: numbers}, weights_hash=weights_hash)
    return sendable(shares.of(analysis))
