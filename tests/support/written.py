"""Measurements with records that a test supplies."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.records import Measurement, Record


def measured(
    analysis: str, found: Iterable[Record], *, run: str = "r", step: int | None = None, **more: Any
) -> Measurement:
    """Return a measurement with these records, at a step or of a model without steps."""
    return Measurement(
        run=run, step=step, analysis=analysis, records=[*found], **{"tokens": None, "seconds": 0.1, **more}
    )


def write(root: Path, analysis: str, found: Iterable[Record], **where: Any) -> None:
    records.append(root / "measurements.jsonl", measured(analysis, found, **where))
