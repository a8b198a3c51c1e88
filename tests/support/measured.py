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


def keyed_records(analysis: Analysis, model: nn.Module | LayeredModel, *tags: str) -> dict[tuple, Record]:
    """Return the records by metric, layer and the values of these tags, and check that no two have one key.

    By default a key has the values of all tags that are no counts. A tag that a record lacks is None.
    """
    found = {}
    for record in records_of(analysis, model):
        own = [value for name, value in record.tags.items() if not name.startswith("num_")]
        key = record.metric, record.layer, *(map(record.tags.get, tags) if tags else own)
        assert key not in found, key
        found[key] = record
    return found
