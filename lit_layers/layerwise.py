"""Measure every layer of a model in one call, for notebooks, with a table, figures and comparisons."""

import functools
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from lit_layers import plots, records
from lit_layers.analyses import metric_names
from lit_layers.analyses.minimal_pairs import MinimalPairs
from lit_layers.data.batches import Batches, GivenBatches, encode_texts, to_batches
from lit_layers.errors import InputError
from lit_layers.figures.chart import Chart, Panels
from lit_layers.measuring.nulls import check_null, measure_null
from lit_layers.measuring.one_model import Opened, measure
from lit_layers.metrics import METRICS, rank
from lit_layers.models.build import plain_model, weights_hash
from lit_layers.models.null import Null
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement
from lit_layers.report.sections import shapes

logger = logging.getLogger(__name__)
DEFAULT_TEXTS = Path(__file__).parent / "data" / "default_texts.txt"
_TOKENS, _BATCH = 128, 8
_FEW_TEXTS, _FEW_TOKENS = 8, 64  # number and length of the default texts for analyses with Jacobians, which are slow
_SHOWN = 6  # largest number of panels in a figure, one for each metric


@dataclass(frozen=True)
class LayerResult:
    """Measurements of every layer of one model, or of several models to be compared.

    A notebook shows it as a figure of each metric over the layers.

    Args:
        measurements: one for each model and analysis, with only the requested metrics; none of them failed.
    """

    measurements: tuple[Measurement, ...]

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """Tidy table, one row per number: run, metric, layer, value, standard error, interval and tags."""
        return records.frame(self.measurements)

    @property
    def metrics(self) -> list[str]:
        """Metrics that can be drawn over the layers, in the order of `metrics.toml`.

        Metrics marked as secondary in `metrics.toml` are included only if there are no others.
        """
        usual = {name for name in self._profiles if not METRICS[name].secondary}
        return sorted(usual or self._profiles, key=rank)

    @property
    def _profiles(self) -> set[str]:
        """Metrics with values at several layers, or at several distances between layers."""
        table: Any = self.frame
        in_tables = table[["other_layer", *table.columns.intersection(records.AXES)]].notna().any(axis=1)
        positions = table["layer"].fillna(table["distance"]) if "distance" in table else table["layer"]
        counts = positions[~in_tables].groupby(table["metric"]).nunique()
        return {name for name, count in counts.items() if count > 1} & metric_names.metric_names().keys()

    def plot(self, metric: str | None = None, **options: Any) -> Chart | Panels:
        """Return a figure of a metric over the layers, with a line per model.

        A notebook shows the figure; `result.plot("logit_lens_loss").write("lens.pdf")` writes it to a file. A metric of
        heads, tokens or pairs of layers is drawn as a map per model, a metric of the whole model as a row per model.

        Args:
            metric: name of a metric, or of an analysis, whose first metric is drawn; None: up to six metrics, each in a
                panel.
            options: options of the figure, such as `tags={"k": 12}` or `layer=3`.

        Raises:
            InputError: the metric was not measured.
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
        """Return the charts of a metric that `plot` shows, for each analysis that measures it.

        A metric with values at several layers is drawn as a profile over the layers. A metric of heads, tokens or pairs
        of layers is drawn as a map per model, and any other as a chart with a row per model.
        """
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
        """Return a result with the models of both results; figures draw one line per model.

        If a model's name occurs in both, all models of `other` get a number after their names.

        Raises:
            InputError: the two results have no analysis in common.
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
    null: Null | None = None,
) -> LayerResult:
    """Measure every layer of a model: `lit_layers.layers("gpt2", ["coupling", "prompt_entropy", "lens"])`.

    Nothing is written to disk, and the model is not changed.

    Args:
        model: a folder with config.json and weights, a name on the Hub, or a model in memory.
        metrics: names of metrics, or of analyses, which give all their metrics, as in `lit-layers analyze --metrics`.
        texts: texts for a language model; None: sixteen passages of English novels and speeches from the package.
        batches: a DataLoader, data set or list of batches to read instead of texts; required for images.
        tokenizer: a folder or a name on the Hub; None: the model's own.
        max_tokens: number of tokens to which each text is cut, or the model's own maximum if that is smaller.
        name: name of the model in the table and figures; None: its folder, its name on the Hub, or its class.
        null: the kind of null to measure also, and to draw as a grey line. A null is a baseline for the values.
            "blocks": the model with new random weights in its blocks. "all": the model with only new weights.
            "labels": probes with permuted labels. In the table, rows of the null have the tag `reference`.

    Raises:
        InputError: an argument is not valid, or does not fit the model.
        Exception: an analysis failed; its error is raised unchanged.
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
    pairs = lambda: MinimalPairs(tokenizer=_tokenizer(model, tokenizer))  # noqa: E731
    analyses = metric_names.make_analyses([*selected], given, few, pairs)
    run, fingerprint = name or _run_name(model), weights_hash(network)
    facts: dict[str, Any] = {"run": run, "step": None, "weights_hash": fingerprint}
    measurements = []
    if null is not None:
        check_null(null, analyses, network)
    for analysis in analyses:
        analysis.check(view)
        measurements.append(measure(view, analysis, raises=True, **facts))
    if null is not None:
        with tempfile.TemporaryDirectory() as root:
            nulls = measure_null(null, Opened(network, fingerprint), analyses, Path(root), run=run, step=None)
        measurements = records.add_nulls(measurements, nulls)
    return LayerResult(tuple(_only(each, selected[each.analysis]) for each in measurements))


def _only(measurement: Measurement, metrics: Any) -> Measurement:
    return replace(measurement, records=[r for r in measurement.records if metrics is None or r.metric in metrics])


def _text_batches(
    view: LayeredModel, texts: Sequence[str] | None, tokenizer: str, max_tokens: int
) -> tuple[Batches, Batches]:
    """Return the batches of texts for most analyses, and the batches for analyses with Jacobians.

    The two differ only for the default texts, of which analyses with Jacobians read fewer and shorter ones.
    """
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


def _tokenizer(model: Any, tokenizer: str | Path | None) -> str:
    if tokenizer is not None:
        return str(tokenizer)
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
