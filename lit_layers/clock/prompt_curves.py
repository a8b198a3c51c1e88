"""The values of each prompt behind the curves of a run, as far as it keeps them."""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_layers.prompt_values import ByPrompt, key_of, read_values
from lit_layers.records import Measurement, Record

logger = logging.getLogger(__name__)
Array = NDArray[np.floating[Any]]


def rows_of_curves(
    root: Path,
    measurements: Sequence[Measurement],
    curves: Container[Any],
    curve_of: Callable[[str, Record], Any],
    *,
    axis: Literal["step", "tokens"] = "step",
) -> dict[Any, tuple[str, dict[int, ByPrompt]]]:
    """Returns for the wanted curves that have some what was measured on, and the values of prompts at each checkpoint.

    `curve_of` an analysis and a record says of which curve it is. What a folder holds in place of values is told in one
    warning.
    """
    measured = [m for m in measurements if m.error is None and m.step is not None]
    rows: dict[Any, tuple[str, dict[int, ByPrompt]]] = {}
    unread = []
    for m, values in zip(measured, read_values(root, measured), strict=True):
        if isinstance(values, str):
            unread.append(values)
            continue
        at: Any = m.step if axis == "step" else m.tokens
        about = m.provenance.get("data_hash") or f"{m.analysis} {m.provenance.get('config_hash')}"
        for record in m.records if values else ():
            key = curve_of(m.analysis, record)
            if key in curves and (by_prompt := values.get(key_of(record))) is not None:
                rows.setdefault(key, (f"{m.run} {about}", {}))[1][at] = by_prompt
    if unread:
        logger.warning(
            "%s: values of prompts are left out, and their curves compared without them: %s%s",
            *(root, unread[0], f"; and {len(unread) - 1} more" if len(unread) > 1 else ""),
        )
    return rows


def prompts_of_curve(at: Array, values: Array, rows: Mapping[int, ByPrompt]) -> Array | None:
    """Returns (prompts, checkpoints) of the same prompts wherever a curve has a value, NaN where a prompt has none.

    None where a checkpoint lacks them, or fewer than two prompts, or than half of those that have a value anywhere,
    have one everywhere.
    """
    there = np.isfinite(values)
    lengths = {len(rows[step]) if step in rows else 0 for step in at[there].tolist()}
    if len(lengths) != 1 or (count := lengths.pop()) < 2:
        return None
    nothing = np.full(count, np.nan, dtype=np.float32)
    prompts = np.stack([rows.get(step, nothing) for step in at.tolist()], axis=1)
    defined = np.isfinite(prompts[:, there])
    return prompts if defined.all(1).sum() >= max(2, defined.any(1).sum() / 2) else None
