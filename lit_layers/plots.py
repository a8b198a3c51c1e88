"""Public functions that draw figures and tables from a frame of records."""

from dataclasses import replace

from lit_layers.figures.chart import *  # noqa: F403
from lit_layers.figures.chart import Chart
from lit_layers.figures.maps import *  # noqa: F403
from lit_layers.figures.profiles import *  # noqa: F403
from lit_layers.figures.scatter import *  # noqa: F403
from lit_layers.figures.tables import add_task_means as add_task_means
from lit_layers.figures.tables import add_task_medians as add_task_medians
from lit_layers.figures.tables import change_table as change_table
from lit_layers.figures.tables import model_table as model_table
from lit_layers.figures.tables import variants as variants
from lit_layers.figures.training import *  # noqa: F403
from lit_layers.figures.variants import *  # noqa: F403
from lit_layers.metrics import look_up, sentence


def titled(chart: Chart, metric: str, analysis: str | None) -> Chart:
    """Return a chart whose title starts with the name of its analysis."""
    name = sentence(analysis or "")
    title = ": ".join(filter(None, [name if name != look_up(metric).title else "", chart.title]))
    return replace(chart, title=title)
