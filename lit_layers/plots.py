"""Figures and tables of a frame of records by their names."""

from dataclasses import replace

from lit_layers.figures import chart, maps, profiles, scatter, training
from lit_layers.figures import variants as _variants
from lit_layers.figures.chart import *  # noqa: F403
from lit_layers.figures.chart import Chart
from lit_layers.figures.maps import *  # noqa: F403
from lit_layers.figures.profiles import *  # noqa: F403
from lit_layers.figures.scatter import *  # noqa: F403
from lit_layers.figures.tables import (
    change_table,
    model_table,
    variants,
    with_task_means,
    with_task_medians,
)
from lit_layers.figures.training import *  # noqa: F403
from lit_layers.figures.variants import *  # noqa: F403
from lit_layers.metrics import look_up, sentence

__all__ = [
    "change_table",
    "model_table",
    "variants",
    "with_task_means",
    "with_task_medians",
]

__all__ += chart.__all__
__all__ += maps.__all__
__all__ += profiles.__all__
__all__ += scatter.__all__
__all__ += training.__all__
__all__ += _variants.__all__


def titled(chart: Chart, metric: str, analysis: str | None) -> Chart:
    """Return a chart whose title names its analysis, too."""
    name = sentence(analysis or "")
    title = ": ".join(filter(None, [name if name != look_up(metric).title else "", chart.title]))
    return replace(chart, title=title)
