"""Measure the null of a run, which is a baseline for its curves.

It holds the values of the metrics on the run's last model with random weights, or of probes with permuted labels.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.measuring.one_model import Opened, not_done, outcomes
from lit_layers.measuring.ranks import OneProcess, Ranks
from lit_layers.models.build import weights_hash
from lit_layers.models.null import SEED, Null, null_model, refuse_unknown_constructor
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement, Record, Store, lineage_in, null_folder

logger = logging.getLogger(__name__)
_PERMUTED = "random_labels"  # option of probes that fits them to permuted labels, and value of their tag `control`


def check_null(null: Null, analyses: Sequence[Analysis], model: nn.Module) -> None:
    """Check that the null can be measured.

    Raises:
        InputError: if the model cannot be built with new weights, or no analysis fits a probe to labels.
    """
    if null != "labels":
        refuse_unknown_constructor(model)
    elif not _label_probes(analyses):
        raise InputError("null: labels permutes the labels of probes, and no analysis has any: choose blocks or all")


def measure_null(
    null: Null,
    opened: Opened,
    analyses: Sequence[Analysis],
    root: Path,
    *,
    run: str,
    step: int | None,
    tokens: int | None = None,
    ranks: OneProcess | Ranks | None = None,
) -> list[Measurement]:
    """Measure the null of a run on the data of its analyses, and return the new measurements.

    They are written to `measurements.jsonl` in `null_folder(root, null)`. A measurement that this file already contains
    is not repeated. Every rank must call this.

    Args:
        null: the kind of null, as `null_model` explains. "labels" measures only analyses that fit probes to labels.
        opened: the last model of the run.
        step, tokens: step and number of tokens of the last model.

    Raises:
        InputError: if the model cannot be built with new weights.
    """
    ranks = ranks or OneProcess()
    model = opened.model.model if isinstance(opened.model, LayeredModel) else opened.model
    network, is_of_labels = null_model(model, null), null == "labels"
    weights = ranks.from_first(lambda: opened.weights_hash if is_of_labels else weights_hash(network))
    store = Store(null_folder(root, null) / "measurements.jsonl", lineage=lineage_in(root))
    chosen = _label_probes(analyses) if is_of_labels else analyses
    lacking = ranks.from_first(lambda: [each.name for each in not_done(store, run, step, chosen, weights_hash=weights)])
    due: list[Any] = [each for each in chosen if each.name in lacking]
    about = {**opened.provenance, "null": {"kind": null, "seed": SEED, "of": opened.weights_hash}}
    measured = []
    changed = [dataclasses.replace(each, **{_PERMUTED: True}) for each in due] if is_of_labels else due
    # Only the first rank gets outcomes. `outcomes` comes first in `zip`, so that it runs to its end on every rank.
    found = outcomes(network, changed, ranks, weights_hash=weights)
    for outcome, analysis in zip(found, due, strict=False):
        measurement = outcome.measurement(run=run, step=step, tokens=tokens, provenance=about)
        if measurement.error is not None:
            logger.warning("the null of %s failed: %s", measurement.analysis, measurement.error)
        measured.append(store.add(_only_permuted(measurement, analysis) if is_of_labels else measurement))
    return measured


def _label_probes(analyses: Sequence[Analysis]) -> list[Any]:
    return [analysis for analysis in analyses if hasattr(analysis, _PERMUTED)]


def _only_permuted(measurement: Measurement, analysis: Analysis) -> Measurement:
    """Return the measurement with only the values of permuted labels, and with the hash of the analysis's options."""

    def plain(record: Record) -> Record:
        return replace(record, tags={name: value for name, value in record.tags.items() if name != "control"})

    permuted = [plain(record) for record in measurement.records if record.tags.get("control") == _PERMUTED]
    provenance = {**measurement.provenance, "config_hash": analysis.config_hash()}
    return replace(measurement, records=permuted, provenance=provenance)
