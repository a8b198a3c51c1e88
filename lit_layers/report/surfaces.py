"""The section of surfaces: metrics of representations, invariance and task scores over steps and layers at once."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures.maps import has_surface
from lit_layers.figures.tables import choice_text, is_placed, matching, plainest, select, variant_text, variants_of
from lit_layers.figures.task_means import BASES
from lit_layers.metrics import is_in, look_up, sentence
from lit_layers.report.figures import Block, drawn


def surface_section(frame: pd.DataFrame) -> dict[str, Any] | None:
    """Returns the section; None for a run without two steps of such an analysis."""
    table: Any = frame
    steps = [int(step) for step in sorted(table["step"].dropna().unique())]
    blocks = [_block(part, analysis, metric, steps) for analysis, metric, part in layered(frame)]
    if not blocks:
        return None
    note = (
        "Across: training steps, the untrained model apart; up: layers, the embedding apart. Grey was not measured. "
        "Of task scores white dots are the best layer from 1 on, rings where the embedding is better than any."
    )
    return {"name": "surfaces", "title": "Layers over steps", "note": note, "metrics": blocks}


def layered(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yields analysis, metric and rows of what has a surface: a variant with values per layer at two steps or more."""
    table: Any = frame
    table = table[table["step"].notna()]
    for analysis in dict.fromkeys(table["analysis"]):
        if analysis.split("/")[0] not in BASES:
            continue
        part = table[table["analysis"] == analysis]
        for metric in dict.fromkeys(part["metric"]):
            rows = part[(part["metric"] == metric) & part["layer"].notna() & part["other_layer"].isna()]
            is_other = look_up(metric).unlisted or is_in(metric, "half")
            if not is_other and rows["step"].nunique() > 1 and variants(rows, metric):
                yield analysis, metric, rows


def variants(rows: pd.DataFrame, metric: str) -> list[tuple[dict[str, Any], str]]:
    """Returns the tags and texts of a metric's variants that have a surface, the plainest first."""
    points = [point for point in select(rows, metric) if not is_placed(point)]
    found = [tags for tags in variants_of(points) if has_surface(matching(points, tags))]
    if not found:
        return []
    first = plainest(found)
    if len(found) == 1:
        return [(dict(first), variant_text(first))]
    told = [name for name in first if len({str(tags[name]) for tags in found}) > 1]
    ordered = sorted(found, key=lambda tags: tags != first)
    return [(dict(tags), choice_text({name: tags[name] for name in told})) for tags in ordered]


def _block(rows: pd.DataFrame, analysis: str, metric: str, steps: list[int]) -> Block:
    choices = []
    for tags, text in variants(rows, metric):
        figures = [("", partial(plots.layer_surface, rows, metric, tags=tags, steps=steps))]
        if look_up(metric).better is not None:
            figures.append(("", partial(plots.best_layers, rows, metric, tags=tags)))
        choices.append({"text": text, "figures": drawn(figures)})
    wide = len(choices[0]["figures"]) > 1
    return {"title": look_up(metric).with_unit, "note": sentence(analysis), "wide": wide, "choices": choices}
