"""Run one analysis on a model."""

from torch import nn

from lit_layers.analyses.base import Analysis
from lit_layers.measuring.one_model import outcomes
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record


def records_of(analysis: Analysis, model: nn.Module | LayeredModel) -> list[Record]:
    """Return the records of an analysis, or raise its error."""
    (outcome,) = outcomes(model, [analysis])
    if outcome.failure is not None:
        raise outcome.failure
    return outcome.records
