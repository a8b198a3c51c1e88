"""Models compared once the layer of each is chosen: a row a model, and what each scores for the time that it takes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from lit_layers.figures.chart import Chart
from lit_layers.figures.models import ChosenLayer, chosen_layers
from lit_layers.figures.vega import write_charts
from lit_layers.functional.curves import bootstrap_interval
from lit_layers.metrics import look_up
from lit_layers.records import write_files
from lit_layers.select.choosing import Score
from lit_layers.select.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A model at the layer chosen for it, with the scores of the test rows there; without the model itself."""

    name: str
    metric: str
    layer: int
    num_layers: int
    validation: float
    test: Score
    test_last: Score
    difference_to_last: Score
    seconds: float  # to the chosen layer
    seconds_last: float
    tokens: int | None  # of the text that was timed; None for an image
    test_rows: Tensor  # (rows): scores at the chosen layer
    test_targets: Tensor  # (rows)

    @classmethod
    def of(cls, selection: Selection) -> "Candidate":
        choice, ids = selection.choice, selection.task.batch.get("input_ids")
        layer, last = choice.layer, choice.num_layers
        return cls(
            name=selection.name,
            metric=choice.metric,
            layer=layer,
            num_layers=last,
            validation=choice.validation[layer].value,
            test=choice.test[layer],
            test_last=choice.test[last],
            difference_to_last=choice.difference,
            seconds=selection.seconds[layer],
            seconds_last=selection.seconds[last],
            tokens=None if ids is None else ids.shape[1],
            test_rows=choice.test_rows,
            test_targets=selection.task.targets["test"],
        )


def reference(models: Sequence[Candidate]) -> Candidate:
    """The model with the best validation score at its layer, the first of several: test rows choose nothing."""
    sign = 1 if look_up(models[0].metric).higher_is_better else -1
    return max(models, key=lambda model: sign * model.validation)


def difference(model: Candidate, other: Candidate) -> Score | None:
    """Test score of a model less another's, paired over the rows; None where their rows are not the same."""
    if model.test_targets.shape != other.test_targets.shape or not bool(
        (model.test_targets == other.test_targets).all()
    ):
        return None
    gaps = model.test_rows - other.test_rows
    low, high = bootstrap_interval(gaps)
    return Score(float(gaps.mean()), float(low), float(high))


def table(models: Sequence[Candidate], left_out: Mapping[str, str]) -> pd.DataFrame:
    """A row a model: its layer, scores with their 95% intervals, milliseconds; and why another has none."""
    best, rows = reference(models), list[dict[str, Any]]()
    for model in models:
        row: dict[str, Any] = {"model": model.name, "metric": model.metric, "layer": model.layer}
        row |= {"num_layers": model.num_layers, "validation": model.validation}
        scores: dict[str, Score | None] = {"test": model.test, "test_last": model.test_last}
        scores["difference_to_last"] = model.difference_to_last
        scores["difference_to_reference"] = None if model is best else difference(model, best)
        for name, score in scores.items():
            ends = (math.nan,) * 3 if score is None else (score.value, score.low, score.high)
            row |= zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
        row |= {"reference": best.name, "milliseconds": 1e3 * model.seconds}
        row |= {"milliseconds_last": 1e3 * model.seconds_last, "tokens": model.tokens}
        rows.append(row)
    rows += [{"model": name, "left_out": why} for name, why in left_out.items()]
    return pd.DataFrame(rows).astype(dict.fromkeys(("layer", "num_layers", "tokens"), "Int64"))


def write(models: Sequence[Candidate], left_out: Mapping[str, str], task: str, folder: Path) -> list[Path]:
    """Writes models.png, .svg, .pdf and .csv, and returns their paths, in that order."""
    numbers = write_files(folder, {"models.csv": table(models, left_out)})  # before the pictures, which may fail
    return [*write_charts({folder / "models": _figure(models, task)}), *numbers]


def _figure(models: Sequence[Candidate], task: str) -> Chart:
    points = [
        ChosenLayer(
            name=model.name,
            layer=model.layer,
            num_layers=model.num_layers,
            score=(model.test.value, model.test.low, model.test.high),
            score_last=(model.test_last.value, model.test_last.low, model.test_last.high),
            milliseconds=1e3 * model.seconds,
            milliseconds_last=1e3 * model.seconds_last,
        )
        for model in models
    ]
    timed = "an image" if models[0].tokens is None else "the longest of a few texts"
    score = f"test {look_up(models[0].metric).title.lower()}"
    title = f"{task}: the layer chosen (filled) and the last (hollow); bars: 95% intervals over test rows"
    return chosen_layers(title, points, score=score, timed=timed)
