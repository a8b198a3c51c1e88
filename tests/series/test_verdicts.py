"""Verdicts on a checkpoint over several audits, and steps that training itself recorded."""

from types import SimpleNamespace
from typing import Any

import pytest

from lit_layers import records
from lit_layers.records import Measurement, Record
from lit_layers.series.auditing import SeriesMeasurements, mislabelled_steps


def checkpoint(step: int, recorded: int | None = None) -> Any:
    source = SimpleNamespace(recorded_step=lambda: recorded, weights=lambda: {"model.safetensors": "a"})
    return SimpleNamespace(name=f"step-{step}", step=step, source=source, has_series=True, run=None)


@pytest.mark.parametrize(
    ("earlier", "today", "whole", "verdict"),
    [
        # A suspicion from weights is not cleared by a listing of files.
        ("suspect: out of line", "clean (level: listing)", True, "suspect: out of line"),
        ("suspect: other config", "clean (level: listing)", False, "suspect: other config"),
        ("suspect: out of line", "clean (level: weights)", True, "clean (level: weights)"),
        ("clean", "suspect: gap", False, "suspect: gap"),
    ],
)
def test_an_audit_that_checks_less_clears_no_suspicion(tmp_path, earlier, today, whole, verdict):
    rows = [Record(metric="m", value=1.0)]
    provenance = {"audit": earlier, "weight_files": {"model.safetensors": "a"}}
    measured = Measurement(run="r", step=1, tokens=None, analysis="a", records=rows, seconds=0.0, provenance=provenance)
    records.append(tmp_path / "r" / "measurements.jsonl", measured)
    assert SeriesMeasurements(tmp_path / "r").verdict(checkpoint(1), today, whole=whole) == verdict


def test_a_step_that_recorded_another_number_is_suspect_and_a_restarted_count_is_not():
    for recorded, suspects, notes in (
        ([1, 2, 3, 4, 5, 6], [], []),
        ([1, 2, 5, 4, 5, 6], [3], []),  # one step has the files of another
        ([1, 2, 3, 4, 1, 2], [], [5, 6]),  # the optimizer was restarted
        ([2, 4, 6, 8, 10, 12], [], []),  # training counts something else
    ):
        found = list(mislabelled_steps([checkpoint(step, own) for step, own in enumerate(recorded, start=1)]))
        assert [step for each in found if not each.note for step in each.steps] == suspects, recorded
        assert [step for each in found if each.note for step in each.steps] == notes, recorded
