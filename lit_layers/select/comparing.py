"""Models compared once the layer of each is chosen: a row a model, and what each scores for the time that it takes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from lit_layers.figures.axes import Axis
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.models import color_of, symbol_of
from lit_layers.figures.theme import MUTED, rounded
from lit_layers.figures.vega import write_charts
from lit_layers.functional.curves import bootstrap_interval
from lit_layers.metrics import look_up
from lit_layers.records import write_files
from lit_layers.select.choosing import Choice, Score
from lit_layers.select.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A model with the layer chosen for it; without the model itself."""

    name: str
    choice: Choice
    seconds: Mapping[int, float]  # to each layer
    tokens: int | None  # of the text that was timed; None for an image
    test_targets: Tensor  # (rows)

    @classmethod
    def of(cls, selection: Selection) -> "Candidate":
        ids, targets = selection.task.batch.get("input_ids"), selection.task.targets["test"]
        tokens = None if ids is None else ids.shape[1]
        facts = {"choice": selection.choice, "seconds": selection.seconds, "tokens": tokens, "test_targets": targets}
        return cls(name=selection.name, **facts)

    def milliseconds(self, layer: int) -> float:
        """To get to a layer."""
        return 1e3 * self.seconds[layer]


def reference(models: Sequence[Candidate]) -> Candidate:
    """The model with the best validation score at its layer, the first of several: test rows choose nothing."""
    sign = 1 if models[0].choice.higher_is_better else -1
    return max(models, key=lambda model: sign * model.choice.validation[model.choice.layer].value)


def difference(model: Candidate, other: Candidate) -> Score | None:
    """Test score of a model less another's, paired over the rows; None where their rows are not the same."""
    if model.test_targets.shape != other.test_targets.shape or not bool(
        (model.test_targets == other.test_targets).all()
    ):
        return None
    gaps = model.choice.test_rows - other.choice.test_rows
    low, high = bootstrap_interval(gaps)
    return Score(float(gaps.mean()), float(low), float(high))


def table(models: Sequence[Candidate], left_out: Mapping[str, str]) -> pd.DataFrame:
    """A row a model: its layer, scores with their 95% intervals, milliseconds; and why another has none."""
    best, rows = reference(models), list[dict[str, Any]]()
    for model in models:
        choice = model.choice
        layer, last = choice.layer, choice.num_layers
        row: dict[str, Any] = {"model": model.name, "metric": choice.metric, "layer": layer}
        row |= {"test_metric": choice.test_metric, "num_layers": last, "validation": choice.validation[layer].value}
        scores: dict[str, Score | None] = {"test": choice.test[layer], "test_last": choice.test[last]}
        scores["difference_to_last"] = choice.difference
        scores["difference_to_reference"] = None if model is best else difference(model, best)
        for name, score in scores.items():
            ends = (math.nan,) * 3 if score is None else (score.value, score.low, score.high)
            row |= zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
        row |= {"reference": best.name, "milliseconds": model.milliseconds(layer)}
        row |= {"milliseconds_last": model.milliseconds(last), "tokens": model.tokens}
        rows.append(row)
    rows += [{"model": name, "left_out": why} for name, why in left_out.items()]
    return pd.DataFrame(rows).astype(dict.fromkeys(("layer", "num_layers", "tokens"), "Int64"))


def write(models: Sequence[Candidate], left_out: Mapping[str, str], task: str, folder: Path) -> list[Path]:
    """Writes models.png, .svg, .pdf and .csv, and returns their paths, in that order."""
    numbers = write_files(folder, {"models.csv": table(models, left_out)})  # before the pictures, which may fail
    return [*write_charts({folder / "models": chosen_layers(models, task)}), *numbers]


def chosen_layers(models: Sequence[Candidate], task: str) -> Chart:
    """Returns test scores over milliseconds: of each model the chosen layer, filled, and its last layer, hollow."""
    series = []
    for index, model in enumerate(models):
        choice, last = model.choice, model.choice.num_layers
        look: dict[str, Any] = {"name": model.name, "color": color_of(index)}
        ends = (choice.layer, last)
        values = rounded(choice.test[layer].value for layer in ends)
        series.append(Series(x=[*map(model.milliseconds, ends)], y=values, width=1.2, dash="dot", legend=True, **look))
        for kind, layer in (("-open", last), ("", choice.layer)):
            text, score = f"{layer} of {last}", choice.test[layer]
            mark: dict[str, Any] = {"mark": f"{symbol_of(index)}{kind}", "size": 8, "texts": [f"layer {text}"]}
            mark |= {"labels": ["" if kind else text], "sides": [(-1, 1)], "label_color": MUTED, "interval": "bars"}
            mark |= {"low": rounded([score.low]), "high": rounded([score.high])}
            series.append(Series(x=[model.milliseconds(layer)], y=rounded([score.value]), **mark, **look))
    furthest = max(model.milliseconds(layer) for model in models for layer in model.choice.test)
    timed = "an image" if models[0].tokens is None else "the longest of a few texts"
    return Chart(
        title=f"{task}: the layer chosen (filled) and the last (hollow); bars: 95% intervals over test rows",
        x=Axis(title=f"milliseconds to the layer, {timed}", ends=(0, 1.1 * furthest)),
        y=Axis(title=f"test {look_up(models[0].choice.test_metric).title.lower()}"),
        series=series,
        place="",
        height=420,
    )
