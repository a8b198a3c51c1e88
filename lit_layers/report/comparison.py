"""Which figures the page of several models shows: profiles of all together, other pictures one model at a time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots
from lit_layers.figures import Chart
from lit_layers.figures.models import short_names
from lit_layers.figures.tables import Point, is_on_axes, is_placed, select
from lit_layers.metrics import look_up
from lit_layers.report.figures import choices_of, drawn, is_pair, lists, pictures


def metric_block(part: pd.DataFrame, metric: str, analysis: str) -> dict[str, Any] | None:
    """Returns a metric of models without steps in all its shapes; None where the table of results says it all."""
    table: Any = part
    rows = table[table["metric"] == metric]
    points = {run: select(rows[rows["run"] == run], metric) for run in rows["run"].unique()}
    own = {run: those for run, those in points.items() if _is_drawn(those)}
    if not own:
        return None
    if not any(map(_has_pictures, own.values())):
        choices = [
            {"text": text, "figures": [("", _profile(part, metric, options))]}
            for options, text in choices_of([point for those in own.values() for point in those])
        ]
    else:
        choices = list(_by_model(part, metric, analysis, own))
    for choice in choices:
        choice["figures"] = drawn(choice["figures"])
    wide = len(choices[0]["figures"]) > 1
    return {"title": look_up(metric).with_unit, "note": look_up(metric).note, "wide": wide, "choices": choices}


def _by_model(
    part: pd.DataFrame, metric: str, analysis: str, points: dict[str, list[Point]]
) -> Iterator[dict[str, Any]]:
    """The choices of a metric whose pictures show one model."""
    names = short_names(list(points))
    has_profile = any(map(_has_profile, points.values()))
    # every choice has the same places: a graph only where every model has pairs of different blocks
    has_graph = all(any(is_pair(point) and point.layer != point.other_layer for point in p) for p in points.values())
    table: Any = part
    for run, mine in points.items():
        rows = table[table["run"] == run]
        for options, text in choices_of(mine):
            chosen = {"analysis": analysis, **options}
            figures = [*pictures(rows, metric, mine, chosen, has_graph=has_graph), *lists(rows, metric, mine, chosen)]
            if has_profile and "layer" not in options:
                figures.insert(0, ("", _profile(part, metric, options)))  # its legend tells what it shows
            if len(figures) == 1:
                figures = [("", figures[0][1])]
            yield {"text": ", ".join(filter(None, [names[run] if len(names) > 1 else "", text])), "figures": figures}


def _profile(part: pd.DataFrame, metric: str, options: dict[str, Any]) -> Callable[[], Chart]:
    table: Any = part
    baselines = [name for name in (look_up(metric).baseline,) if name in set(table["metric"])]
    return partial(plots.model_profile, part, metric, baselines=baselines, **options)


def _has_pictures(points: list[Point]) -> bool:
    return any(point.other_layer is not None or is_placed(point) or "index" in point.tags for point in points)


def _has_profile(points: list[Point]) -> bool:
    return any(
        is_on_axes(point) and point.other_layer is None and not is_placed(point) and "index" not in point.tags
        for point in points
    )


def _is_drawn(points: list[Point]) -> bool:
    return _has_pictures(points) or _has_profile(points)
