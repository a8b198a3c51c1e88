"""Where curves over layers come from, run folders or a table in a file, and which: `ANALYSIS/METRIC[tag=value,...]`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from lit_layers.correlate.model_runs import ORDINALS, RunModel, nearest
from lit_layers.correlate.model_table import NAMES
from lit_layers.errors import InputError
from lit_layers.figures.labels import tag_text
from lit_layers.figures.tables import plainest
from lit_layers.records import PLACES, Record

TEXTS = ("task", "common")
_FORM = re.compile(r"\s*([^\[\],]+?)\s*(?:\[([^\[\]]*)\])?\s*")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A metric by its name, with its analysis and tags where they are given.

    `texts` is "task" or "common" where it is to be decided whether the metric was measured on each task's own texts.
    """

    text: str
    name: str
    analysis: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: str | None = None

    @classmethod
    def of(cls, text: str, option: str = "metrics") -> "Wanted":
        """Reads `NAME`, `ANALYSIS/NAME` or either with `[tag=value,...]`.

        Raises:
            InputError: for a text of another form.
        """
        form = _FORM.fullmatch(text)
        if form is None:
            raise InputError(f"{option}: expected NAME, ANALYSIS/NAME or NAME[tag=value,...], got {text!r}")
        analysis, _, name = form[1].rpartition("/")
        tags = {}
        for part in filter(None, (part.strip() for part in (form[2] or "").split(","))):
            tag, equals, value = (side.strip() for side in part.partition("="))
            if not (tag and equals and value):
                raise InputError(f"{option}: expected tag=value between the brackets of {text!r}, got {part!r}")
            tags[tag] = value
        texts = tags.pop("texts", None)
        if texts not in (None, *TEXTS):
            raise InputError(f"{option}: expected texts=task or texts=common in {text!r}, got {texts!r}")
        return cls(text=text.strip(), name=name, analysis=analysis or None, tags=tags, texts=texts)

    def fits(self, tags: Mapping[str, Any]) -> bool:
        """Whether a record with these tags is meant; numbers may be written in any way, `drop_first=1`, `k=0.10`."""
        return all(name in tags and _alike(tags[name], value) for name, value in self.tags.items())


def split(text: str) -> list[str]:
    """Returns the parts between the commas that stand outside brackets."""
    parts = [part.strip() for part in re.split(r",(?![^\[\]]*\])", text)]
    return [part for part in parts if part]


def _alike(own: Any, wanted: str) -> bool:
    try:
        return float(own) == float(wanted)
    except ValueError:
        return str(own) == wanted


# ------------------------------------------------------------------------------------------------ sources

Curve = dict[int, float]  # by layer
_BESIDE = ("task", "domain", "score", "states")  # tags that make no variant of a curve


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What one checkpoint has of one metric: a curve for each task, or for all tasks alike (None).

    `states` is the convention of the hidden states, None where a table does not tell.
    """

    by_task: dict[str | None, Curve]
    states: str | None
    variant: Mapping[str, Any] = field(default_factory=dict)
    domains: Mapping[str, str] = field(default_factory=dict)


class Source(Protocol):
    """Models with curves over layers."""

    names: list[str]

    def steps(self, model: str, wanted: Wanted) -> set[int | None]:
        """The checkpoints that have some of it; {None} where there are no steps, none where the model has none."""
        ...

    def curves(
        self, model: str, step: int | None, wanted: Wanted, *, tasks: Iterable[str] | None, states: str | None
    ) -> Curves | None:
        """The curves of one checkpoint; `tasks` are those that have scores (None: these are the scores)."""
        ...


class Runs:
    """The measurements of run folders."""

    def __init__(self, models: Sequence[RunModel], option: str) -> None:
        self._models = {model.name: model for model in models}
        self.names, self._option = list(self._models), option

    def steps(self, model: str, wanted: Wanted) -> set[int | None]:
        own = self._models.get(model)
        return set() if own is None else {m.step for m in own.measurements if _records(m, wanted)}

    def curves(
        self, model: str, step: int | None, wanted: Wanted, *, tasks: Iterable[str] | None, states: str | None
    ) -> Curves | None:
        found = [
            (m.analysis, record)
            for m in self._models[model].measurements
            if m.step == step
            for record in _records(m, wanted)
        ]
        found = self._of_one_analysis(found, wanted, None if tasks is None else set(tasks))
        found = [(task, record) for task, record in found if wanted.fits(_tags(record))]
        if not found:
            return None
        conventions = dict.fromkeys(_tags(record)["states"] for _, record in found)
        if len(conventions) > 1 and states not in conventions:
            self._refuse_variants(wanted, model, [{"states": convention} for convention in conventions])
        convention = states if states in conventions else next(iter(conventions))
        found = [(task, record) for task, record in found if _tags(record)["states"] == convention]
        variant = self._variant([record for _, record in found], wanted, model)
        by_task: dict[str | None, Curve] = {}
        for task, record in found:
            if _identity(record) == variant and record.layer is not None:
                by_task.setdefault(task, {})[record.layer] = record.value
        domains = {str(task): str(record.tags["domain"]) for task, record in found if "domain" in record.tags}
        return Curves(by_task=by_task, states=convention, variant=variant, domains=domains)

    def _of_one_analysis(
        self, found: list[tuple[str, Record]], wanted: Wanted, tasks: set[str] | None
    ) -> list[tuple[str | None, Record]]:
        """With the task of each record, None where it was measured on texts common to all."""
        exact = [(None, record) for analysis, record in found if "/" in analysis and analysis == wanted.analysis]
        if exact:
            return [*exact]
        bases = dict.fromkeys(analysis.partition("/")[0] for analysis, _ in found)
        if len(bases) > 1:
            listed = ", ".join(f"{base}/{wanted.name}" for base in bases)
            raise InputError(f"{self._option}: {wanted.text} is in more than one analysis: {listed}")
        own = [(analysis.partition("/")[2], record) for analysis, record in found]
        of_tasks = [(task, record) for task, record in own if task and (tasks is None or task in tasks)]
        common = [(None, record) for task, record in own if not task]
        if tasks is None or (of_tasks and wanted.texts != "common"):
            return [*of_tasks]
        return [*common] if wanted.texts != "task" else []

    def _variant(self, found: Sequence[Record], wanted: Wanted, model: str) -> dict[str, Any]:
        """The plainest, which is to be one."""
        variants = list({str(_identity(record)): _identity(record) for record in found}.values())
        best = plainest(variants)
        variants = [tags for tags in variants if plainest([tags, best]) is tags]
        if len(variants) > 1:
            self._refuse_variants(wanted, model, variants)
        return variants[0]

    def _refuse_variants(self, wanted: Wanted, model: str, variants: Sequence[Mapping[str, Any]]) -> None:
        listed = "; ".join(tag_text(dict(tags)) or "no tag" for tags in variants)
        example = ",".join(f"{name}={value}" for name, value in next(filter(None, variants)).items())
        raise InputError(
            f"{self._option}: {wanted.text} of {model} has {len(variants)} variants ({listed}): choose one, e.g. "
            f"{wanted.text.partition('[')[0]}[{example}]"
        )


class File:
    """A table with the columns model, task, layer and either one named like the value, or `metric` and `value`.

    Columns step, domain and states are read where they are there; a metric without a task belongs to all tasks.
    """

    def __init__(self, path: Path, option: str) -> None:
        self._path, self._option = path, option
        self._frame: Any = _read(path, option)
        name = next((name for name in NAMES if name in self._frame), None)
        for column, known in (("model", name), ("layer", "layer" if "layer" in self._frame else None)):
            if known is None:
                raise self._lacks(column)
        self._frame = self._frame.rename(columns={name: "model"}).astype({"model": str})
        self.names = list(dict.fromkeys(self._frame["model"]))

    def steps(self, model: str, wanted: Wanted) -> set[int | None]:
        rows = self._rows(model, wanted)
        if "step" not in rows or rows.empty:
            return {None} if len(rows) else set()
        return {None if pd.isna(step) else int(step) for step in rows["step"]}

    def curves(
        self, model: str, step: int | None, wanted: Wanted, *, tasks: Iterable[str] | None, states: str | None
    ) -> Curves | None:
        rows = self._rows(model, wanted)
        if "step" in rows and step is not None:
            rows = rows[rows["step"] == step]
        by_task: dict[str | None, Curve] = {}
        own: list[Any] = rows["task"].tolist() if "task" in rows else [None] * len(rows)
        for task, layer, value in zip(own, rows["layer"], rows["value"], strict=True):
            key = str(task) if pd.notna(task) else None
            curve = by_task.setdefault(key, {})
            if int(layer) in curve:
                raise InputError(
                    f"{self._option}: {self._path} has more than one {wanted.text} of {model}, "
                    f"{key or 'all tasks'}, layer {int(layer)}: choose with [column=value]"
                )
            curve[int(layer)] = float(value)
        if tasks is None and None in by_task:
            raise InputError(f"{self._option}: expected a task in every row of {self._path}")
        conventions = set(rows["states"].dropna().astype(str)) if "states" in rows else set()
        if len(conventions) > 1:
            raise InputError(f"{self._option}: {self._path} mixes states {', '.join(sorted(conventions))} of {model}")
        domains = {}
        if {"domain", "task"} <= {*rows.columns}:
            there = rows.dropna(subset=["domain", "task"])
            domains = dict(zip(there["task"].astype(str), there["domain"].astype(str), strict=True))
        return Curves(by_task=by_task, states=next(iter(conventions), None), domains=domains) if by_task else None

    def _rows(self, model: str, wanted: Wanted) -> Any:
        frame = self._frame[self._frame["model"] == model]
        for column in wanted.tags:
            if column not in frame:
                raise self._lacks(column)
            frame = frame[[wanted.fits({**wanted.tags, column: own}) for own in frame[column]]]
        if {"metric", "value"} <= {*frame.columns}:
            known = list(dict.fromkeys(self._frame["metric"].astype(str)))
            if wanted.name not in known:
                raise InputError(f"{self._option}: {self._path} has no {wanted.name!r}{nearest(wanted.name, known)}")
            rows = frame[frame["metric"] == wanted.name]
        elif wanted.name in frame:
            rows = frame.rename(columns={wanted.name: "value"})
        else:
            raise self._lacks(wanted.name)
        values: Any = pd.to_numeric(rows["value"], errors="coerce")
        if (rows["value"].notna() & values.isna()).any():
            bad = rows["value"][rows["value"].notna() & values.isna()].iloc[0]
            raise InputError(f"{self._option}: expected numbers of {wanted.name} in {self._path}, got {bad!r}")
        layers: Any = pd.to_numeric(rows["layer"], errors="coerce")
        if (wrong := rows["layer"].notna() & ~(layers.ge(0) & layers.mod(1).eq(0))).any():
            bad = rows["layer"][wrong].tolist()[0]
            raise InputError(f"{self._option}: expected numbers of layers in {self._path}, 0 or more, got {bad!r}")
        return rows.assign(value=values, layer=layers)[layers.notna()]  # a row without a layer is a mean over layers

    def _lacks(self, column: str) -> InputError:
        known = ", ".join(map(str, self._frame.columns))
        return InputError(f"{self._option}: {self._path} has no column {column!r}; it has: {known}")


def _records(measurement: Any, wanted: Wanted) -> list[Record]:
    """The records of a measurement that may be meant: one a layer, of the metric, in the analysis."""
    base = measurement.analysis.partition("/")[0]
    if wanted.analysis not in (None, base, measurement.analysis):
        return []
    return [
        r
        for r in measurement.records
        if r.metric == wanted.name
        and r.layer is not None
        and r.other_layer is None
        and not r.tags.keys() & {*PLACES, *ORDINALS, "control"}
    ]


def _tags(record: Record) -> dict[str, Any]:
    """With what records of the default options leave unsaid: the convention of the states, no normalization."""
    default = "hf" if str(record.tags.get("preset")).startswith("released_code") else "resid"
    return {"states": default, "normalization": "raw", **record.tags}


def _identity(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.tags.items() if not name.startswith("num_") and name not in _BESIDE}


def _read(path: Path, option: str) -> pd.DataFrame:
    if path.suffix not in (".csv", ".parquet"):
        raise InputError(f"{option}: expected a file that ends in .csv or .parquet, got {path}")
    if not path.is_file():
        raise InputError(f"{option}: expected a .csv or .parquet file, {path} does not exist")
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, comment="#")
    except (ValueError, OSError) as error:  # pandas' and pyarrow's errors of contents are ValueErrors
        raise InputError(f"{option}: cannot read {path}: {' '.join(str(error).split())}") from error
    if frame.empty:
        raise InputError(f"{option}: {path} has no rows")
    return frame
