"""The files that describe the layer chosen for a model, and those that compare several models.

The files about one model are its numbers, a picture, an HTML page and the exported model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.figures.chart import Chart, Panels, Series
from lit_layers.figures.labels import mid_sentence, value
from lit_layers.figures.profiles import color_of, level, symbol_of
from lit_layers.figures.theme import ACCENT, Axis, rounded
from lit_layers.figures.vega import write_pictures
from lit_layers.metrics import look_up
from lit_layers.models.view import LayeredModel
from lit_layers.records import write_files
from lit_layers.report.template import Cells, Group, Table, block, fill
from lit_layers.select.choosing import Choice, TaskFeatures
from lit_layers.select.export import Card, HeadFacts, ProbeHead, export
from lit_layers.series.checkpoint_sources import ModelFiles

_PICK = "#c2410c"


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The layer chosen for a model and a task, with its scores; `write` writes them to files."""

    name: str  # name of the model in the picture
    files: ModelFiles
    revision: str | None
    view: LayeredModel
    task: TaskFeatures
    tokenizer: str | None
    choice: Choice
    tolerance: float | None  # None for a rule without tolerance
    seconds: Mapping[int, float]  # computing time from the input to each layer

    def write(self, folder: Path) -> list[Path]:
        """Write layers.png, .svg, .pdf, select.html and select.json, and return their paths in this order.

        Raises:
            InputError: The folder cannot be created.
        """
        task, choice = self.task, self.choice
        content = {
            "model": self.files.model,
            "revision": self.revision,
            "task": task.name,
            **{name: getattr(choice, name) for name in ("layer", "num_layers", "rule")},
            "tolerance": self.tolerance,
            "metric": choice.metric,
            "pooling": task.pooling,
            "max_tokens": task.max_tokens,
            "validation": {str(layer): asdict(score) for layer, score in choice.validation.items()},
            "baseline": choice.baseline,
            "chosen_in_share_of_resamples": {str(layer): share for layer, share in choice.shares.items()},
            "test": {str(layer): asdict(score) for layer, score in sorted(choice.test.items())},
            "test_difference_to_last": asdict(choice.difference),
            "seconds_to_layer": {str(layer): each for layer, each in self.seconds.items()},
            "rows": {part: len(targets) for part, targets in task.targets.items()},
            "notes": list(task.notes),
        }
        files = {"select.html": self.page(), "select.json": content}
        numbers = write_files(folder, files)  # written first, because drawing pictures may fail
        return [*write_pictures([("layers", self.picture())], folder), *numbers]

    def page(self) -> str:
        """Return the HTML page: validation scores by layer and by computing time up to the layer, and test scores."""
        choice, picture = self.choice, self.picture()
        titles = ("Validation score over layers", "Validation score over time")
        rows = [*((f"Layer {layer}", score, layer == choice.layer) for layer, score in sorted(choice.test.items()))]
        if choice.layer != choice.num_layers:
            rows.append((f"Layer {choice.layer} less layer {choice.num_layers}, same rows", choice.difference, False))
        cells = [
            Cells([(name, ""), (value(score.value), f"{value(score.low)} to {value(score.high)}")], strong)
            for name, score, strong in rows
        ]
        facts = {"Task": self.task.name, "Rule": choice.rule.replace("_", " ")}
        facts |= {part.capitalize(): f"{len(rows):,} rows" for part, rows in self.task.targets.items()}
        return fill(
            "select.html.jinja",
            title=picture.title.partition(": ")[0],
            sentence=picture.title.partition(": ")[2].capitalize(),
            facts=[*facts.items()],
            blocks=[
                block(t, c.title, [("", [("", c)])], wide=False) for t, c in zip(titles, picture.charts, strict=True)
            ],
            scores=Table(["", look_up(choice.metric).unit_title], [Group("", "", cells)]),
            notes=self.task.notes,
        )

    def picture(self) -> Panels:
        """Return charts of the validation score of each layer over depth and over the time to reach the layer."""
        choice, ids = self.choice, self.task.batch.get("input_ids")
        by_time = {layer: 1e3 * seconds for layer, seconds in self.seconds.items()}
        timed = "an image" if ids is None else f"a text of {ids.shape[1]} tokens"
        axis = Axis(title=f"milliseconds to the layer, {timed}", ends=(0, 1.06 * max(by_time.values())))
        text = f"\u25cb layer {choice.layer}, chosen in {choice.shares[choice.layer]:.0%} of resamples"
        charts = [
            self._scores({layer: layer for layer in choice.validation}, text, Axis(title="layer", whole=True)),
            self._scores(by_time, "shaded: 95% interval over the rows", axis),
        ]
        rule = choice.rule if self.tolerance is None else f"{choice.rule} {choice.tolerance:g}"
        where = f"layer {choice.layer} of {choice.num_layers} is chosen ({rule.replace('_', ' ')})"
        return Panels(title=f"{self.name} on {self.task.name}: {where}", charts=charts, columns=2, width=400)

    def _scores(self, xs: Mapping[int, float], title: str, x: Axis) -> Chart:
        choice, layers = self.choice, sorted(self.choice.validation)
        scores, at = [choice.validation[layer] for layer in layers], [xs[layer] for layer in layers]
        ends: Any = {
            end: rounded(getattr(score, name) for score in scores)
            for end, name in {"y": "value", "low": "low", "high": "high"}.items()
        }
        what = f"validation {look_up(choice.metric).title.lower()}"
        texts = [f"layer {layer}" for layer in layers]
        chosen = {"x": [xs[choice.layer]], "y": rounded([choice.validation[choice.layer].value])}
        series = [
            Series(x=at, **ends, name=what, texts=texts, color=ACCENT, width=1.5, mark="circle"),
            level([min(at), max(at)], choice.baseline, choice.baseline_name),
            Series(**chosen, mark="circle-open", size=10, color=_PICK, name="chosen", legend=True),
        ]
        return Chart(title=title, x=x, y=Axis(title=what), series=series, height=380)

    def export(self, folder: Path, picture: Path, *, overwrite: bool) -> None:
        """Write the model cut after the chosen layer, with its probe and a README.md that shows `picture`."""
        task, choice = self.task, self.choice
        about: Any = {"task": task.name, **{name: getattr(task, name) for name in ("pooling", "max_tokens", "classes")}}
        about |= {"kind": "regression" if task.classes is None else "classification", "layer": choice.layer}
        head = ProbeHead.from_probes(choice.probe, HeadFacts(**about))
        about = {name: getattr(self, name) for name in ("revision", "choice", "tolerance")}
        card = Card(source=self.files.model, commit=self.files.commit, picture=picture, notes=task.notes, **about)
        how: Any = {"tokenizer": self.tokenizer, "card": card, "overwrite": overwrite}
        export(self.view.model, choice.layer, head, folder, batches=[task.batch], **how)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One of several models that are compared: its chosen layer and its computing times, without its weights."""

    name: str
    choice: Choice
    seconds: Mapping[int, float]  # computing time from the input to each layer
    tokens: int | None  # tokens of the text that the time was measured with; None for an image

    @classmethod
    def from_selection(cls, selection: Selection) -> "Candidate":
        ids = selection.task.batch.get("input_ids")
        tokens = None if ids is None else ids.shape[1]
        return cls(name=selection.name, choice=selection.choice, seconds=selection.seconds, tokens=tokens)

    def milliseconds(self, layer: int) -> float:
        return 1e3 * self.seconds[layer]


def comparison_table(models: Sequence[Candidate], left_out: Mapping[str, str]) -> pd.DataFrame:
    """Return a table with one row per model: its chosen layer, its scores with 95% intervals and its computing times.

    The row of a model in `left_out` has only the reason why it is left out.
    """
    rows = list[dict[str, Any]]()
    for model in models:
        choice = model.choice
        layer, last = choice.layer, choice.num_layers
        row: dict[str, Any] = {"model": model.name, "metric": choice.metric, "layer": layer}
        row |= {"num_layers": last, "validation": choice.validation[layer].value}
        scores = {"test": choice.test[layer], "test_last": choice.test[last], "difference_to_last": choice.difference}
        for name, score in scores.items():
            row |= {name: score.value, f"{name}_low": score.low, f"{name}_high": score.high}
        row |= {"milliseconds": model.milliseconds(layer), "milliseconds_last": model.milliseconds(last)}
        rows.append(row | {"tokens": model.tokens})
    rows += [{"model": name, "left_out": why} for name, why in left_out.items()]
    return pd.DataFrame(rows).astype(dict.fromkeys(("layer", "num_layers", "tokens"), "Int64"))


def write_comparison(models: Sequence[Candidate], left_out: Mapping[str, str], task: str, folder: Path) -> list[Path]:
    """Write a comparison of models to models.png, .svg, .pdf and .csv, and return their paths in this order."""
    # Write the numbers first, because drawing pictures may fail.
    numbers = write_files(folder, {"models.csv": comparison_table(models, left_out)})
    return [*write_pictures([("models", chosen_layers(models, task))], folder), *numbers]


def chosen_layers(models: Sequence[Candidate], task: str) -> Chart:
    """Return a chart of layers: test score against computing time from the input to the layer.

    Each model has a filled mark for its chosen layer and a hollow mark for its last layer.
    """
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
            mark |= {"labels": ["" if kind else text], "interval": "bars"}
            mark |= {"low": rounded([score.low]), "high": rounded([score.high])}
            series.append(Series(x=[model.milliseconds(layer)], y=rounded([score.value]), **mark, **look))
    furthest = max(model.milliseconds(layer) for model in models for layer in model.choice.test)
    timed = "an image" if models[0].tokens is None else "the longest of a few texts"
    return Chart(
        title=f"{task}: the layer chosen (filled) and the last (hollow); bars: 95% intervals over test rows",
        x=Axis(title=f"milliseconds to the layer, {timed}", ends=(0, 1.1 * furthest)),
        y=Axis(title=f"test {mid_sentence(look_up(models[0].choice.metric).title)}"),
        series=series,
        hover="",
        height=420,
    )
