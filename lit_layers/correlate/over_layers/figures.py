"""What is drawn of metrics and scores over layers: curves over depth, scatter plots, coefficients, choices."""

import numpy as np

from lit_layers.correlate.over_layers.findings import LayerFindings, MetricFindings, ModelFindings, rule_text
from lit_layers.correlate.over_layers.reading import LayerTables, ModelTables
from lit_layers.figures.labels import value
from lit_layers.figures.models import DepthCurve, DepthPanel, IntervalRow, Mark
from lit_layers.figures.scatter import Scatter
from lit_layers.functional.layer_selection import COEFFICIENTS, FORMS

COEFFICIENT_TITLES = {
    "distance_correlation": "Distance correlation",
    "spearman": "Spearman rho",
    "kendall": "Kendall tau",
}
FORM_TITLES = {"per_task_mean": "mean over tasks of the coefficient", "of_task_means": "coefficient of the mean curves"}
NULLS = ("independent noise, mean", "random walks, mean")
CHOICES = (
    "layer chosen by the metric",
    "chosen on other models or tasks",
    "middle layer",
    "best single layer",
    "best layer of each task",
)


def depth_panels(tables: LayerTables) -> list[DepthPanel]:
    """Returns the scores, then each metric, averaged over the tasks that a model has of it, over depth."""
    scores = [DepthCurve(model.name, _mean(model.scores)) for model in tables.models]
    found = [DepthPanel(f"{tables.score_title}, mean over tasks", scores)]
    for key, title in tables.titles.items():
        own = [DepthCurve(m.name, _mean(m.metrics[key])) for m in tables.models if key in m.metrics]
        found.append(DepthPanel(title, own))
    return found


def scatters(tables: LayerTables, findings: ModelFindings, model: ModelTables) -> dict[str, Scatter]:
    """Returns each metric against the scores, a point a layer, both averaged over the same tasks."""
    found = {}
    for one in findings.metrics:
        _, metric, scores = model.tables(one.metric, tables.first_layer)
        layers = range(tables.first_layer, model.num_layers + 1)
        found[one.metric] = Scatter(
            x=metric.mean(0).tolist(),
            y=scores.mean(0).tolist(),
            names=[str(layer) for layer in layers],
            x_title=tables.titles[one.metric],
            y_title=tables.score_title,
            title=_headline(one, findings),
            groups=list(layers),
            group_title="Layer",
            hover=[[f"layer {layer} of {model.num_layers}"] for layer in layers],
            path=True,
        )
    return found


def correlation_rows(tables: LayerTables, findings: LayerFindings) -> list[IntervalRow]:
    """Returns a row a metric of each model, with both forms of each coefficient and the null of the first."""
    rows = []
    for model in findings.models:
        rows.append(IntervalRow(heading(model)))
        for one in model.metrics:
            panels = []
            for coefficient in COEFFICIENTS:
                own = [c for c in one.correlations if c.coefficient == coefficient]
                marks = [Mark(FORM_TITLES[c.form], *c.estimate) for c in own]
                if coefficient == "distance_correlation":
                    marks += [Mark(NULLS[0], model.null.noise), Mark(NULLS[1], model.null.walk)]
                panels.append(marks)
            rows.append(IntervalRow(tables.titles[one.metric], panels, f"{len(one.tasks)} tasks"))
    return rows


def correlation_kinds() -> list[str]:
    """Returns what the marks of `correlation_rows` are, in the order of the legend."""
    return [*(FORM_TITLES[form] for form in FORMS), *NULLS]


def choice_rows(tables: LayerTables, findings: LayerFindings) -> list[IntervalRow]:
    """Returns a row a way of choosing: what it scores above the last layer, and what else does."""
    rows = []
    for model in findings.models:
        rows.append(IntervalRow(heading(model)))
        for choice in model.choices:
            found = choice.result
            above = found.last.value
            marks = [
                Mark(CHOICES[1 if choice.is_chosen else 0], *found.minus_last),
                Mark(CHOICES[2], found.middle.value - above),
                Mark(CHOICES[3], found.best.value - above),
                Mark(CHOICES[4], found.oracle.value - above),
            ]
            text = ": ".join(filter(None, [tables.titles.get(choice.metric or ""), rule_text(choice, tables.titles)]))
            note = f"{value(found.score.value)}, last {value(above)}, {found.num_tasks} tasks"
            rows.append(IntervalRow(text, [marks], note))
    return rows


def heading(model: ModelFindings) -> str:
    """Returns what a model is called above its rows."""
    return f"{model.model}{f', step {model.step:,}' if model.step is not None else ''}, {model.num_layers} layers"


def _headline(one: MetricFindings, model: ModelFindings) -> str:
    own = {c.coefficient: c.estimate.value for c in one.correlations if c.form == "of_task_means"}
    if not own:
        return one.note
    text = f"dCor {value(own['distance_correlation'])} (noise {model.null.noise:.2f}, walks {model.null.walk:.2f})"
    return f"{text}; rho {value(own['spearman'])}, tau {value(own['kendall'])}"


def _mean(curves: dict[str, np.ndarray]) -> list[float]:
    """Over tasks that all have a value; layer 0 may have none."""
    return np.stack(list(curves.values())).mean(0).tolist()
