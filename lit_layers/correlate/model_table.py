"""Models read from run folders and files, and their table with one row per model: metric, score and more."""

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from lit_layers import identity, records
from lit_layers.errors import InputError, did_you_mean
from lit_layers.figures.labels import mid_sentence, tag_text
from lit_layers.figures.profiles import short_names
from lit_layers.figures.tables import plainest
from lit_layers.identity import NO_CURVE, same_tag, variant_of
from lit_layers.metrics import METRICS, is_in, look_up, scalar_row, sentence
from lit_layers.records import Measurement, Record
from lit_layers.schema import run_facts

NAMES = ("model", "run", "name")  # accepted names of the column that names the models
# Sizes of a model. Each name is mapped to the names of the same size in run.json and in config.json files.
SIZES = {
    "width": ("width", "hidden_size", "n_embd", "embed_dim", "d_model"),
    "depth": ("depth", "num_hidden_layers", "n_layer", "num_layers"),
    "parameters": ("parameters",),
    "tokens": ("training_tokens",),
}
_FORM = re.compile(r"\s*([^\[\],]+?)\s*(?:\[([^\[\]]*)\])?\s*")


@dataclass(frozen=True, kw_only=True)
class MetricQuery:
    """A metric requested by the user: its name, and optionally its analysis and tags."""

    text: str
    name: str
    analysis: str | None = None
    tags: Mapping[str, str | int | float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, option: str = "metrics") -> "MetricQuery":
        """Parse `NAME` or `ANALYSIS/NAME`, either with `[tag=value,...]`.

        Raises:
            InputError: The text has neither of these forms.
        """
        form = _FORM.fullmatch(text)
        parts = [part.partition("=") for part in (form[2] or "").split(",") if part.strip()] if form else []
        if form is None or not all(name.strip() and value.strip() for name, _, value in parts):
            raise InputError(f"{option}: expected NAME, ANALYSIS/NAME or NAME[tag=value,...], got {text!r}")
        analysis, _, name = form[1].rpartition("/")
        tags = {name.strip(): value.strip() for name, _, value in parts}
        return cls(text=text.strip(), name=name, analysis=analysis or None, tags=tags)

    def fits(self, tags: Mapping[str, Any]) -> bool:
        """Return whether the tags of a record include all tags of the query.

        Numbers are compared by value: `k=0.10` matches 0.1.
        """
        return all(name in tags and same_tag(tags[name], value) for name, value in self.tags.items())


def split(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    parts = (part.strip() for part in re.split(r",(?![^\[\]]*\])", text))
    return [part for part in parts if part]


# ------------------------------------------------------------------------------------------------ run folders


@dataclass(frozen=True)
class RunModel:
    """The measurements of one model: of a training run at all its steps, or of a pretrained model."""

    name: str
    folder: Path
    measurements: list[Measurement]  # without failed ones and those that an audit found suspect
    num_suspect: int
    scalars: list[dict[str, float]]
    about: dict[str, Any]
    has_steps: bool

    def select(self, step: int | None, analysis: str | None = None) -> list[Measurement]:
        """Return the measurements at `step` or, if it is None, at the last step that has the analysis `analysis`.

        A model without steps returns all its measurements.
        """
        if not self.has_steps:
            return self.measurements
        steps = [m.step for m in self.measurements if m.step is not None and analysis in (None, m.analysis)]
        chosen = step if step is not None else max(steps, default=None)
        return [m for m in self.measurements if m.step == chosen and chosen is not None]

    def pairs(self) -> dict[tuple[str, str], None]:
        """Return each (analysis, metric) that was measured, in order, as the keys of a dict."""
        return dict.fromkeys((m.analysis, r.metric) for m in self.measurements for r in m.records)

    def sizes(self) -> dict[str, float]:
        """Return the known sizes of the model, by the names in `SIZES`.

        They come from the description of the model in run.json, the provenance of the measurements, or the options of
        the recipe: the first that has the size. An unknown depth is replaced by the last layer measured.
        """
        described = [self.about.get("model", {}), *(m.provenance for m in self.measurements), self.settings()]
        sizes = {}
        for size, names in SIZES.items():
            values = (source.get(name) for source in described for name in names)
            if (number := next((v for v in values if type(v) in (int, float)), None)) is not None:
                sizes[size] = number
        last = max((r.layer or 0 for m in self.measurements for r in m.records), default=0)
        return {**sizes, "depth": last} if "depth" not in sizes and last else sizes

    def settings(self) -> dict[str, Any]:
        """Return the scalar options of a run's model and data, and its seed.

        The keys are the last components of the options' names, such as `num_layers`. Options with equal last components
        keep their full names.
        """
        config = self.about.get("config", {})
        rows = pd.json_normalize({part: config[part] for part in ("model", "data") if part in config}).to_dict(
            "records"
        )
        found = {str(name).replace(".init_args", ""): value for row in rows for name, value in row.items()}
        found |= {"seed_everything": config.get("seed_everything")}
        found = {name: value for name, value in found.items() if isinstance(value, str | int | float)}
        last = {name: name.rpartition(".")[-1] for name in found if not name.endswith("class_path")}
        several = Counter(last.values())
        return {name if several[end] > 1 else end: found[name] for name, end in last.items()}

    def scalar(self, name: str, step: int | None) -> float | None:
        """Return the last value of a scalar logged in training, up to a step if `step` is given.

        Return None if there is no value or it is NaN.
        """
        values = [row[name] for row in self.scalars if name in row and (step is None or row["step"] <= step)]
        return values[-1] if values and values[-1] == values[-1] else None


def read_run_models(folders: Sequence[Path]) -> list[RunModel]:
    """Return the models in run folders, in model comparisons and in folders that contain these, in the given order.

    Raises:
        InputError: A folder holds no measurements, or a model occurs more than once.
    """
    models = [model for folder in folders for root in _roots(folder) for model in _models(root)]
    names = [model.name for model in models]
    models = [replace(m, name=str(m.folder)) if names.count(m.name) > 1 else m for m in models]
    if len({model.name for model in models}) < len(models):
        raise InputError("models: the folders hold one model more than once: name each folder once")
    return models


def _roots(folder: Path) -> list[Path]:
    if (folder / "measurements.jsonl").is_file():
        return [folder]
    # Include runs without measurements, so that they are reported as left out instead of silently ignored.
    inner = sorted({path.parent for name in ("measurements.jsonl", "run.json") for path in folder.glob(f"*/{name}")})
    if not inner:
        what = "it and the folders in it have none" if folder.is_dir() else "no such folder"
        raise InputError(f"expected a folder with measurements.jsonl, or a .csv or .parquet file, got {folder}: {what}")
    return inner


def _models(root: Path) -> Iterable[RunModel]:
    measurements = identity.shown(records.read(root / "measurements.jsonl"))
    about, scalars = run_facts(root), records.rows(root / "metrics.jsonl")
    for name in dict.fromkeys(m.run for m in measurements) or [str(about.get("run") or root.name)]:
        whole = [m for m in measurements if m.run == name and m.error is None]
        sound = [m for m in whole if not records.is_suspect(m)]
        num_suspect = len({m.step for m in whole if records.is_suspect(m)})
        facts = (scalars, about) if about.get("run") in (None, name) else ([], {})
        yield RunModel(name, root, sound, num_suspect, *facts, not whole or any(m.step is not None for m in whole))


# ------------------------------------------------------------------------------------------------ which number


def candidates(measurements: Iterable[Measurement], query: MetricQuery) -> list[tuple[str, Record]]:
    """Return the records of the metric that a query names, each with the name of its analysis.

    The tags of the query are ignored. A query for the analysis `probe` also matches its tasks, such as
    `probe/banking77`. Records that are not points of a curve over layers are left out, such as those of single seeds.
    """
    return [
        (m.analysis, r)
        for m in measurements
        if query.analysis in (None, m.analysis, m.analysis.partition("/")[0])
        for r in m.records
        if r.metric == query.name and r.other_layer is None and not r.tags.keys() & NO_CURVE
    ]


def resolve_k(query: MetricQuery, model: RunModel) -> MetricQuery:
    """Convert the tag `k` of a query from a fraction of the model's width to a count, if it is a fraction.

    Raises:
        InputError: The width is unknown.
    """
    k = pd.to_numeric(query.tags.get("k", 1), errors="coerce")
    if not 0 < k < 1:
        return query
    width = model.sizes().get("width")
    if width is None:
        raise InputError(f"tags: k as a share needs the width of {model.name}, which is not known: give k as a count")
    return replace(query, tags={**query.tags, "k": int(k * width + 1e-9)})  # same rounding as in functional.coupling


def plainest_variant(variants: Iterable[Mapping[str, Any]], what: str, option: str) -> Mapping[str, Any]:
    """Return the tags that differ least from those of a plain mean without normalization.

    `variants` are the tags of the values of one metric, one of which must be chosen.

    Raises:
        InputError: Several variants differ equally little.
    """
    distinct = list({str(tags): tags for tags in variants}.values())
    best = plainest(distinct)
    # the variants (tags) between which `plainest` does not decide
    plain = [tags for tags in distinct if plainest([tags, best]) is tags]
    if len(plain) > 1:
        listed = "; ".join(map(_written, plain))
        raise InputError(f"{option}: {what} has {len(plain)} variants ({listed}): choose one by its tags")
    return best


def refuse_unlike(variants: Mapping[str, Mapping[str, Any]], what: str, option: str) -> None:
    """Raise an error if the metric has different tags in different models.

    The tag `k` may differ, because it depends on the width of the model.

    Args:
        variants: Maps each model to the tags of its metric.
        what: Name of the metric, for the message.
        option: Name of the option, for the message.

    Raises:
        InputError: Tags differ. The message lists the different tags, each with one model that has them.
    """
    alike: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for model, tags in variants.items():
        alike[str(sorted((name, "" if name == "k" else value) for name, value in tags.items()))] = model, tags
    if len(alike) > 1:
        listed = "; ".join(f"{_written(tags)} of {model}" for model, tags in alike.values())
        raise InputError(f"{option}: {what} is {listed}: measure all models alike, or choose one by its tags")


def _written(tags: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in tags.items()) or "no tag"


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown word.

    It is `; did you mean ...?` with similar names, or a list of the names if none is similar. It is empty if there are
    no names.
    """
    names = list(names)
    there = f"there is: {', '.join(names[:12])}{' ...' if len(names) > 12 else ''}"
    return f"; {did_you_mean(word, names, there)}" if names else ""


# ------------------------------------------------------------------------------------------------ files


def read_table(path: Path, option: str) -> pd.DataFrame:
    """Read a .csv or .parquet file, with the names of the models as text in the column `model`.

    Raises:
        InputError: The file cannot be read, has no column with the names of the models, or has a row without a name.
    """
    try:
        frame: Any = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, comment="#")
    except (ValueError, OSError) as error:  # pandas and pyarrow raise ValueErrors for bad contents
        raise InputError(f"{option}: cannot read {path}: {' '.join(str(error).split())}") from error
    name = next((name for name in NAMES if name in frame.columns), None)
    if name is None:
        there = ", ".join(map(str, frame.columns))
        raise InputError(f"{option}: {path} has no column that names the models ({', '.join(NAMES)}); it has: {there}")
    if (nameless := frame[name].isna()).any():
        raise InputError(f"{option}: {path}: row {nameless.to_numpy().argmax() + 1} has no name in column {name}")
    return frame.rename(columns={name: "model"}).astype({"model": str})


def numeric(column: Any, names: Any, expected: str) -> Any:
    """Return a column as float64, with NaN for missing values.

    Raises:
        InputError: A value is not a number. The message has `expected`, the value and the entry of `names` for its row.
    """
    values: Any = pd.to_numeric(column, errors="coerce")
    if (wrong := column.notna() & values.isna()).any():
        raise InputError(f"{expected} {column[wrong].iloc[0]!r} for {names[wrong].iloc[0]}")
    return values.astype("float64")


def find_model(name: str, others: Sequence[str]) -> list[int]:
    """Return the indices of the names in `others` that equal `name`.

    If there is none, compare only the parts after the last `/`, and return the indices of the names that agree.
    """
    short = name.rstrip("/").split("/")[-1]
    whole = [index for index, other in enumerate(others) if other == name]
    return whole or [index for index, other in enumerate(others) if other.rstrip("/").split("/")[-1] == short]


# ------------------------------------------------------------------------------------------------ the table

FEWEST = 3
LOGS = (*SIZES, "k")  # columns whose logarithms are used, because sizes differ by factors


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """A table of models for a correlation: `frame` has a row per model with its name, metric, score and other columns.

    `baseline` is the column with the value that the metric has by chance, or that the model's width predicts.
    `corrected` is the column with the metric minus this value. Both may be None. `left_out` maps each model that lacks
    a value to the reason.
    """

    frame: pd.DataFrame
    metric: str
    score: str
    baseline: str | None = None
    corrected: str | None = None
    group: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    source: str = ""
    titles: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def title(self, column: str) -> str:
        """Return the title of a column in figures and tables; the name of the column if no title is known."""
        known = {name: sentence(name) for name in (*SIZES, "model", "step", "layer")} | {"tokens": "Training tokens"}
        return self.titles.get(column) or known.get(column, column)

    def covariate_title(self, column: str) -> str:
        """Return the title of a column that is held fixed: `Log ...` for sizes, which are used as logarithms."""
        return f"Log {mid_sentence(self.title(column))}" if column in LOGS else self.title(column)

    def values(self, column: str) -> NDArray[np.float64]:
        """Return a column as numbers, with sizes as logarithms and NaN for missing values.

        Raises:
            InputError: The column holds text.
        """
        expected = f"given: expected a column of numbers, {column!r} has"
        values = numeric(self.frame[column], self.frame["model"], expected).to_numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.log(values) if column in LOGS else values
        return np.where(np.isfinite(values), values, math.nan)

    def missing_notes(self, given: Sequence[str], group: str | None) -> list[str]:
        """Return notes that name the models without a value in a column of `given` or in the column `group`.

        Coefficients that hold such a column fixed, or group by it, leave these models out.
        """
        lack = {name: np.isnan(self.values(name)) for name in given}
        lack |= {group: self.frame[group].isna().to_numpy()} if group else {}
        return [
            f"{self.title(name)}: left out where it is held fixed, because they have none"
            f"{' above 0' if name in LOGS else ''}: {', '.join(self.frame['model'][missing])}."
            for name, missing in lack.items()
            if missing.any()
        ]


def published() -> ModelTable:
    """Return the 28 language models in the figure of the coupling paper, with the coupling predicted from width.

    The column `width_alone` is 1 - 1/sqrt(K), where K = int(0.1 width) is the number of compared singular vectors. Two
    blocks that share no directions and have equal singular values have this coupling, in the nuclear norm (p = 1).
    """
    folder = files("lit_layers.correlate")
    frame: Any = pd.read_csv(io.StringIO(folder.joinpath("published.csv").read_text(encoding="utf-8")), comment="#")
    frame["width_alone"] = [1 - 1 / math.sqrt(int(0.1 * width)) for width in frame["width"]]
    return ModelTable(frame=frame, **yaml.safe_load(folder.joinpath("published.yaml").read_text(encoding="utf-8")))


def read_file(path: Path, *, metric: str, score: str) -> ModelTable:
    """Read a table of models from a .csv or .parquet file with one row per model.

    The baseline and the corrected metric are the columns `random_<metric>` and `excess_<metric>`, if the file has them.
    The metric's entry in `lit_layers.metrics` may name other columns.

    Raises:
        InputError: The file cannot be read, a column is missing or not numeric, or a model occurs twice.
    """
    frame = read_table(path, "models")
    for option, column in (("metric", metric), ("score", score)):
        _refuse_missing(column, frame.columns.drop("model"), option, path)
    titles = {column: look_up(column).title for column in frame.columns if is_in(column, "coupling", "token_coupling")}
    return _table(frame, metric, score, where=path, source=path.name, titles=titles)


def table_of_models(
    models: Sequence[RunModel],
    *,
    metric: str,
    score: str,
    layer: int | str | None = None,
    step: int | None = None,
    source: str = "",
) -> ModelTable:
    """Make a table of models from run folders.

    Its columns also include the sizes of the models, recipe options in which they differ, and the columns of the score
    file.

    Args:
        models: The models, as returned by `read_run_models`.
        metric: The metric, `ANALYSIS/METRIC` or `METRIC`, optionally with `[tag=value,...]`.
        score: `FILE:COLUMN` of a table with one row per model; a scalar logged in training; or another metric.
        layer: The layer of the metric. If it is None, the value for the whole model is used or, if there is none, that
            of the last layer.
        step: The checkpoint of training runs. If it is None, the last one that has the metric is used.
        source: Where the runs come from, as shown on the report page.

    Raises:
        InputError: No model has the metric or score, or several values with different tags remain.
    """
    query = _resolve(models, metric)
    rows, left_out, variants = [], {}, {}
    for model in models:
        at = model.select(step, query.analysis)
        record = _record(model, at, query, layer)
        rows.append({"model": model.name, **model.sizes()})
        if record is None:
            left_out[model.name] = _reason(model, query, step, layer)
        else:
            variants[model.name] = variant_of(record.tags)
            rows[-1] |= _measured(model, at, query, layer, record)
    refuse_unlike(variants, query.text, "metric")
    column, title = _add_scores(rows, models, score, query)
    settings = [model.settings() for model in models]
    for name in dict.fromkeys(name for each in settings for name in each):
        if len({str(each.get(name)) for each in settings}) > 1:  # options in which the models differ
            for row, each in zip(rows, settings, strict=True):
                row |= {name: each[name]} if name in each and name not in row else {}
    frame, name, definition = pd.DataFrame(rows), query.name, look_up(query.name)
    if name not in frame.columns:
        reasons = "; ".join(f"{model}: {why}" for model, why in list(left_out.items())[:3])
        raise InputError(f"metric: no model has a value of {metric} ({reasons})")
    titles = {each: METRICS[each].title for each in (definition.baseline, definition.excess) if each in METRICS}
    titles |= {column: title, name: ", ".join(filter(None, [definition.title, tag_text(dict(query.tags))]))}
    facts: Any = {"left_out": left_out, "titles": titles, "source": source}
    return _table(frame, name, column, where="these models", **facts)


def _resolve(models: Sequence[RunModel], text: str) -> MetricQuery:
    """Parse the metric or score that the user asked for, and find its analysis in the measurements.

    The text is `ANALYSIS/METRIC`, or `METRIC` if only one analysis has it, and may end with `[tag=value,...]`.
    """
    query = MetricQuery.parse(text, "metric")
    text = query.text.partition("[")[0]
    pairs = {"/".join(pair): pair for model in models for pair in model.pairs()}
    fitting = [text] if text in pairs else [name for name, pair in pairs.items() if pair[1] == text]
    if not fitting:
        raise InputError(f"metric: no model has {text!r}{nearest(text, pairs)}")
    if len(fitting) > 1:
        raise InputError(f"metric: {text} is in more than one analysis: {', '.join(fitting)}")
    analysis, name = pairs[fitting[0]]
    return replace(query, text=fitting[0], analysis=analysis, name=name)


def _record(
    model: RunModel, measurements: Sequence[Measurement], query: MetricQuery, layer: int | str | None = None
) -> Record | None:
    """Return the record with the value of a metric for a model's row in the table of models.

    It is the record of the requested layer. If `layer` is None, it is the record for the whole model or, if there is
    none, for the last layer. Return None if there is no such record.
    """
    resolved = resolve_k(query, model)
    records = [r for analysis, r in candidates(measurements, query) if analysis == query.analysis]
    records = [r for r in records if resolved.fits(r.tags)]
    at = None
    if layer is not None or all(r.layer is not None for r in records):
        at = max((r.layer for r in records if r.layer is not None), default=-1) if layer in (None, "last") else layer
    records = [r for r in records if r.layer == at]
    if not records:
        return None
    variants = [variant_of(r.tags) for r in records]
    what = f"{query.text} of {model.name}"
    return records[variants.index({**plainest_variant(variants, what, "metric")})]


def _measured(
    model: RunModel, measurements: Sequence[Measurement], query: MetricQuery, layer: int | str | None, record: Record
) -> dict[str, Any]:
    """Return what the metric adds to a model's row in the table of models, by column.

    These are its value, interval, layer, tags and step, and its baseline and corrected value if they were measured.
    """
    name, tags, first = query.name, variant_of(record.tags), measurements[0]
    facts = {f"{name}_low": record.low, f"{name}_high": record.high, "layer": record.layer}
    facts |= {"step": first.step, "tokens": first.tokens}
    for other in (look_up(name).baseline, look_up(name).excess):
        related = _record(model, measurements, replace(query, name=other, tags=tags), layer)
        facts[other] = related and related.value
    return {name: record.value, **tags, **{each: value for each, value in facts.items() if value is not None}}


def _tags(models: Sequence[RunModel], query: MetricQuery) -> dict[str, dict[Any, None]]:
    """Return the tags that records of a metric have in some model, each with all its values as the keys of a dict."""
    tags: dict[str, dict[Any, None]] = {}
    for analysis, record in (pair for model in models for pair in candidates(model.measurements, query)):
        for tag, value in variant_of(record.tags).items() if analysis == query.analysis else ():
            tags.setdefault(tag, {})[value] = None
    return tags


def _reason(model: RunModel, query: MetricQuery, step: int | None, layer: int | str | None) -> str:
    if not model.measurements and model.num_suspect:
        return "all its checkpoints are suspect"
    at = [f"layer {layer}" if layer is not None else "", f"step {step}" if step is not None else ""]
    text = ", ".join(filter(None, [tag_text(dict(query.tags)), *at]))
    there = _tags([model], query)
    has = ", ".join(tag_text({tag: value}) for tag in query.tags for value in there.get(tag, ()))
    return f"no {query.text}{f' with {text}' if text else ''}{f', it has {has}' if has else ''}"


def _add_scores(
    rows: list[dict[str, Any]], models: Sequence[RunModel], score: str, query: MetricQuery
) -> tuple[str, str]:
    """Add the score to each model's row in the table of models, and return the name and title of its column.

    The score of a training run is read at the same step as its metric.
    """
    path, colon, column = score.rpartition(":")
    if colon and Path(path).suffix in (".csv", ".parquet"):
        _join(rows, Path(path), column)
        return column, column
    scalars = {name for model in models for scalars in model.scalars for name in scalars}
    if score in scalars:
        values = [m.scalar(score, row.get("step")) for row, m in zip(rows, models, strict=True)]
        title = scalar_row(score).title
    else:
        pairs = ["/".join(pair) for model in models for pair in model.pairs()]
        if score not in pairs:
            raise InputError(
                f"score: no model has {score!r}, neither as a scalar of training nor as ANALYSIS/METRIC, and it is no "
                f"FILE.csv:COLUMN{nearest(score, sorted({*scalars, *pairs} - {'step', 'tokens'}))}"
            )
        other = _resolve(models, score)
        tags = {tag: value for tag, value in query.tags.items() if tag in _tags(models, other)}
        other, title = replace(other, tags=tags), look_up(other.name).title
        at = [model.select(row.get("step"), other.analysis) for row, model in zip(rows, models, strict=True)]
        records = [_record(*each, other) for each in zip(models, at, strict=True)]
        variants = {m.name: variant_of(r.tags) for m, r in zip(models, records, strict=True) if r is not None}
        refuse_unlike(variants, other.text, "score")
        values = [record and record.value for record in records]
    for row, value in zip(rows, values, strict=True):
        row |= {score: value} if value is not None else {}
    return score, title


def _join(rows: list[dict[str, Any]], path: Path, column: str) -> None:
    """Add the columns of the score file to the rows of the table of models. `find_model` matches the models by name."""
    table: Any = read_table(path, "score")
    _refuse_missing(column, table.columns.drop("model"), "score", path)
    if column in rows[0] or column in ("model", "metric"):
        raise InputError(f"score: column {column!r} of {path} is called like what is measured; rename it")
    names = table.pop("model").tolist()
    for row in rows:
        matches = find_model(row["model"], names)
        if len(matches) > 1:
            raise InputError(f"score: {path} has {len(matches)} rows for {row['model']}, expected one")
        for index in matches:
            row |= {name: cell for name, cell in table.iloc[index].dropna().items() if name not in row}


def _refuse_missing(column: str, columns: Any, option: str, where: object) -> None:
    if column not in columns:
        raise InputError(f"{option}: {where} has no column {column!r}{nearest(column, map(str, columns))}")


def _table(
    frame: Any,
    metric: str,
    score: str,
    *,
    where: object,
    left_out: Mapping[str, str] | None = None,
    **facts: Any,
) -> ModelTable:
    """Return the table of the models in `frame` that have both a metric and a score.

    The table's `left_out` holds the other models with the reasons.
    """
    if (twice := frame["model"].duplicated()).any():
        raise InputError(f"{where} has more than one row for {frame['model'][twice].iloc[0]}")
    missing = dict(left_out or {})
    for column, option in ((metric, "metric"), (score, "score")):
        values = frame.get(column, pd.Series(math.nan, frame.index))
        expected = f"{option}: expected numbers in column {column!r} of {where}, got"
        frame[column] = numeric(values, frame["model"], expected)
        for name in frame["model"][~np.isfinite(frame[column])]:
            missing.setdefault(name, f"no {column}")
    complete = frame[~frame["model"].isin(missing)].reset_index(drop=True)
    if len(complete) < FEWEST:
        lines = [f"{name}: {why}" for name, why in missing.items()]
        reasons = f" ({'; '.join(lines[:4])}{f' and {len(lines) - 4} more' if len(lines) > 4 else ''})" if lines else ""
        raise InputError(f"expected at least {FEWEST} models with a metric and a score, got {len(complete)}{reasons}")
    complete["model"] = complete["model"].map(short_names(list(complete["model"])))
    complete = complete.dropna(axis=1, how="all")
    related = {"baseline": look_up(metric).baseline, "corrected": look_up(metric).excess}
    related = {role: column if column in complete.columns else None for role, column in related.items()}
    return ModelTable(frame=complete, metric=metric, score=score, left_out=missing, **related, **facts)
