"""Every layer of a model measured in one call, for a notebook: a table, pictures, a comparison."""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from lit_layers import plots, records
from lit_layers.analyses import metric_names
from lit_layers.data.batches import Batches, GivenBatches, encode_texts, to_batches
from lit_layers.errors import InputError
from lit_layers.figures.chart import Chart, Panels
from lit_layers.measuring.one_model import measure
from lit_layers.metrics import METRICS, rank
from lit_layers.models.build import plain_model, weights_hash
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement
from lit_layers.report.sections import shapes

logger = logging.getLogger(__name__)
DEFAULT_TEXTS = Path(__file__).parent / "data" / "default_texts.txt"
_TOKENS, _BATCH = 128, 8
_FEW_TEXTS, _FEW_TOKENS = 8, 64  # for analyses that take derivatives, of the default texts
_SHOWN = 6  # panels of a picture


@dataclass(frozen=True)
class LayerResult:
    """What was measured of every layer of one model, or of several that are compared.

    In a notebook it shows itself: what it is of, and a picture of each metric over the layers.

    Args:
        measurements: one for each model and analysis, with the numbers that were asked for; none failed.
    """

    measurements: tuple[Measurement, ...]

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """The tidy table of `records.frame`, a row a number: run, metric, layer, value, its error, tags."""
        return records.frame(self.measurements)

    @property
    def metrics(self) -> list[str]:
        """What is drawn over the layers, in the order of pages; what is secondary only where there is nothing else."""
        usual = {name for name in self._profiles if not METRICS[name].secondary}
        return sorted(usual or self._profiles, key=rank)

    @property
    def _profiles(self) -> set[str]:
        """The metrics with values at several layers, or at distances of layers."""
        table: Any = self.frame
        in_tables = table[["other_layer", *table.columns.intersection(records.AXES)]].notna().any(axis=1)
        positions = table["layer"].fillna(table["distance"]) if "distance" in table else table["layer"]
        counts = positions[~in_tables].groupby(table["metric"]).nunique()
        return {name for name, count in counts.items() if count > 1} & metric_names.metric_names().keys()

    def plot(self, metric: str | None = None, **options: Any) -> Chart | Panels:
        """A metric over the layers, a line a model; without a name a panel for each of up to six.

        The name of an analysis stands for the first of its metrics. A metric of pairs of layers, heads or tokens is a
        map of each model, one of whole models a row for each.
        `options` are those of the figure, e.g. `tags={"k": 12}` or `layer=3`. It shows itself in a notebook, and
        writes itself: `result.plot("logit_lens_loss").write("lens.pdf")`.

        Raises:
            InputError: a metric that was not measured.
        """
        measured, usual = {*self.frame["metric"]}, self.metrics
        if metric not in measured and (own := {*self.frame["metric"][self.frame["analysis"] == metric]}):
            metric = next((name for name in usual if name in own), min(own, key=rank))
        if metric is not None and not (isinstance(metric, str) and metric in measured):
            listed = ", ".join(sorted(measured, key=rank))
            raise InputError(f"metric: expected one of {listed}, got {metric!r}")
        names = [metric] if metric is not None else (usual or sorted(measured, key=rank))[:_SHOWN]
        charts = [chart for name in names for chart in self._charts(name, options)]
        return charts[0] if len(charts) == 1 else Panels(title="", charts=charts, columns=min(3, len(charts)))

    def _charts(self, metric: str, options: Mapping[str, Any]) -> list[Chart]:
        """The profile of all models, or else a map of each, or else their values in a table; of each analysis."""
        table: Any = self.frame
        analyses = (
            [options["analysis"]] if "analysis" in options else table["analysis"][table["metric"] == metric].unique()
        )
        charts = []
        for analysis in analyses:
            chosen = {**options, "analysis": analysis}
            if metric in self._profiles:
                own = [plots.layer_profile(table, metric, **chosen)]
            else:
                own = self._maps(metric, analysis, chosen) or [plots.models_in_rows(table, metric, **chosen)]
            several = len(analyses) > 1
            charts += [plots.titled(chart, metric, analysis) if several else chart for chart in own]
        return charts

    def _maps(self, metric: str, analysis: str | None, chosen: Mapping[str, Any]) -> list[Chart]:
        table: Any = self.frame
        charts = []
        for run, part in table[table["metric"].isin([metric, METRICS[metric].baseline])].groupby("run", sort=False):
            choices: Any = shapes(part[part["analysis"] == analysis], metric, analysis or "", comparing=True)
            for _, draw in list(choices[0][1])[:1] if choices else ():
                chart = draw(**chosen)
                charts.append(replace(chart, title=f"{run}: {chart.title}"))
        return charts

    def compare(self, other: "LayerResult") -> "LayerResult":
        """Both together: one table, and one line for each in the pictures; models of one name are numbered.

        Raises:
            InputError: nothing was measured of both.
        """
        if not {m.analysis for m in self.measurements} & {m.analysis for m in other.measurements}:
            raise InputError("compare: expected an analysis that was made of both, there is none")
        taken, theirs = {m.run for m in self.measurements}, {m.run for m in other.measurements}
        numbers = ("", *(f" ({number})" for number in range(2, len(taken) + 3)))
        number = next(each for each in numbers if not taken & {f"{run}{each}" for run in theirs})
        renamed = [replace(m, run=f"{m.run}{number}") for m in other.measurements]
        return LayerResult((*self.measurements, *renamed))

    def __repr__(self) -> str:
        runs = ", ".join(dict.fromkeys(m.run for m in self.measurements))
        analyses = ", ".join(dict.fromkeys(m.analysis for m in self.measurements))
        deepest = max(int(m.provenance.get("depth", 0)) for m in self.measurements)
        return f"LayerResult({runs}: {analyses}; {deepest} blocks, {len(self.frame):,} numbers in .frame)"

    def _repr_svg_(self) -> str | None:
        if self.frame.empty:
            return None
        drawn = self.plot()
        charts = drawn.charts if isinstance(drawn, Panels) else [drawn]
        return Panels(title=repr(self), charts=charts, columns=min(3, len(charts))).picture(".svg").decode()


def layers(
    model: str | Path | nn.Module,
    metrics: Sequence[str],
    *,
    texts: Sequence[str] | None = None,
    batches: Any = None,
    tokenizer: str | Path | None = None,
    max_tokens: int = _TOKENS,
    name: str | None = None,
) -> LayerResult:
    """What every layer of a model is like: `lit_layers.layers("gpt2", ["coupling", "prompt_entropy", "lens"])`.

    Names are those of `lit-layers analyze MODEL --metrics`: analyses, whose metrics are all measured, or single
    metrics. Nothing is written to disk, the model is left as it was, and whatever fails is raised.

    Args:
        model: a folder with config.json and weights, a name on the Hub, or a model in memory.
        metrics: names.
        texts: what a text model reads; None: sixteen passages of English novels and speeches that come with the
            package, which the log says. Each is cut to `max_tokens`, or to what the model takes.
        batches: instead of texts: what it reads, as a DataLoader, a data set or a list of batches; of images always.
        tokenizer: a folder or a name on the Hub; None: the model's own.
        name: what the model is called in table and pictures; None: its folder, name or class.

    Raises:
        InputError: a name, model, text or tokenizer that is none, options that do not fit the model.
        Exception: what an analysis raises.
    """
    selected = metric_names.find_analyses(metrics)
    network = model if isinstance(model, nn.Module) else load(model)
    view = LayeredModel(network)
    if batches is not None and texts is not None:
        raise InputError("texts and batches: expected one of them, got both: leave one out")
    if batches is not None:
        given = few = to_batches(batches)
    elif view.family.sees_images:
        raise InputError(f"batches: {type(network).__name__} sees images: give a DataLoader of them")
    else:
        given, few = _text_batches(view, texts, _tokenizer(model, tokenizer), max_tokens)
    analyses = metric_names.make_analyses([*selected], given, few)
    facts: dict[str, Any] = {"run": name or _run_name(model), "step": None, "weights_hash": weights_hash(network)}
    measurements = []
    for analysis in analyses:
        analysis.check(view)
        measured, names = measure(view, analysis, raises=True, **facts), selected[analysis.name]
        asked = [record for record in measured.records if names is None or record.metric in names]
        measurements.append(replace(measured, records=asked))
    return LayerResult(tuple(measurements))


def _text_batches(
    view: LayeredModel, texts: Sequence[str] | None, tokenizer: str, max_tokens: int
) -> tuple[Batches, Batches]:
    """The batches of texts, and those for analyses that take derivatives."""
    longest = min(max_tokens, view.max_tokens or max_tokens)
    if texts is not None:
        if isinstance(texts, str) or not len(texts):
            raise InputError(f"texts: expected a list of texts, got {texts!r:.60}")
        batches = _encoded(tokenizer, texts, longest)
        return batches, batches
    passages = DEFAULT_TEXTS.read_text(encoding="utf-8").strip().split("\n\n")
    logger.warning(
        "texts: none were given, so it reads %d passages of English novels and speeches, of up to %d tokens",
        len(passages),
        longest,
    )
    few = _encoded(tokenizer, passages[:_FEW_TEXTS], min(longest, _FEW_TOKENS))
    return _encoded(tokenizer, passages, longest), few


def _encoded(tokenizer: str, texts: Sequence[str], longest: int) -> Batches:
    encoded = encode_texts(tokenizer, texts, max_tokens=longest)
    return GivenBatches([*encoded.split(_BATCH)], tokenizer_hash=encoded.tokenizer_hash)


def _tokenizer(model: Any, find_analyses: str | Path | None) -> str:
    if find_analyses is not None:
        return str(find_analyses)
    carried = getattr(plain_model(model), "name_or_path", "") if isinstance(model, nn.Module) else str(model)
    if not carried:
        raise InputError(f"tokenizer: a {type(model).__name__} in memory carries none; name one, or give batches")
    return carried


def _run_name(model: Any) -> str:
    if isinstance(model, nn.Module):
        network = plain_model(model)
        return Path(getattr(network, "name_or_path", "") or type(network).__name__).name
    path = Path(model)
    return path.resolve().name if path.exists() else str(model)
