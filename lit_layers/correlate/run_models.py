"""Models as run folders and files describe them, and the query for one number: `ANALYSIS/METRIC[tag=value,...]`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import identity, records
from lit_layers.errors import InputError, did_you_mean
from lit_layers.figures.tables import plainest
from lit_layers.identity import BESIDE, same_tag
from lit_layers.records import Measurement, Record
from lit_layers.schema import run_facts

NAMES = ("model", "run", "name")  # of the column that names the models
# What a model's size is called: the name here, then what configurations of the known families call it.
SIZES = {
    "width": ("width", "hidden_size", "n_embd", "embed_dim", "d_model"),
    "depth": ("depth", "num_hidden_layers", "n_layer", "num_layers"),
    "parameters": ("parameters",),
    "tokens": ("training_tokens",),
}
_FORM = re.compile(r"\s*([^\[\],]+?)\s*(?:\[([^\[\]]*)\])?\s*")


@dataclass(frozen=True, kw_only=True)
class MetricQuery:
    """A metric by its name, with its analysis and tags where they are given."""

    text: str
    name: str
    analysis: str | None = None
    tags: Mapping[str, str | int | float] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, option: str = "metrics") -> "MetricQuery":
        """Read `NAME`, `ANALYSIS/NAME` or either with `[tag=value,...]`.

        Raises:
            InputError: for a text of another form.
        """
        form = _FORM.fullmatch(text)
        parts = [part.partition("=") for part in (form[2] or "").split(",") if part.strip()] if form else []
        if form is None or not all(name.strip() and value.strip() for name, _, value in parts):
            raise InputError(f"{option}: expected NAME, ANALYSIS/NAME or NAME[tag=value,...], got {text!r}")
        analysis, _, name = form[1].rpartition("/")
        tags = {name.strip(): value.strip() for name, _, value in parts}
        return cls(text=text.strip(), name=name, analysis=analysis or None, tags=tags)

    def fits(self, tags: Mapping[str, Any]) -> bool:
        """Return whether a record with these tags is meant; numbers are written in any way: `k=0.10`."""
        return all(name in tags and same_tag(tags[name], value) for name, value in self.tags.items())


def split(text: str) -> list[str]:
    """Return the parts between the commas that stand outside brackets."""
    parts = (part.strip() for part in re.split(r",(?![^\[\]]*\])", text))
    return [part for part in parts if part]


# ------------------------------------------------------------------------------------------------ run folders


@dataclass(frozen=True)
class RunModel:
    """One model of a study: a training run at one step, or a pretrained model."""

    name: str
    folder: Path
    measurements: list[Measurement]  # those of its curves, without failed and suspect ones
    num_suspect: int
    scalars: list[dict[str, float]]
    about: dict[str, Any]
    has_steps: bool

    def at(self, step: int | None, analysis: str | None = None) -> list[Measurement]:
        """The measurements at a step; without one at the last step that has this analysis."""
        if not self.has_steps:
            return self.measurements
        steps = [m.step for m in self.measurements if m.step is not None and analysis in (None, m.analysis)]
        chosen = step if step is not None else max(steps, default=None)
        return [m for m in self.measurements if m.step == chosen and chosen is not None]

    def pairs(self) -> dict[tuple[str, str], None]:
        """Each analysis with its metrics."""
        return dict.fromkeys((m.analysis, r.metric) for m in self.measurements for r in m.records)

    def sizes(self) -> dict[str, float]:
        """Width, depth and parameters, each where it is known.

        From what the run or its measurements say of the model, else from its configuration; the depth else from the
        last layer that was measured.
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
        """The scalar options of a run's model, data and schedule, by their last name where only one has it."""
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
        """Return the last value of a scalar of training up to a step; None without any, and where it is NaN."""
        values = [row[name] for row in self.scalars if name in row and (step is None or row["step"] <= step)]
        return values[-1] if values and values[-1] == values[-1] else None


def read_run_models(folders: Sequence[Path]) -> list[RunModel]:
    """Return the models of run folders, comparisons and folders that hold such, in this order.

    Raises:
        InputError: for a folder that holds no measurements, or two models of one name in one folder.
    """
    models = [model for folder in folders for root in _roots(folder) for model in _models(root)]
    names = [model.name for model in models]
    models = [replace(m, name=str(m.folder)) if names.count(m.name) > 1 else m for m in models]
    if len({model.name for model in models}) < len(models):
        raise InputError(f"models: {', '.join(map(str, folders))} hold one model more than once: name each folder once")
    return models


def _roots(folder: Path) -> list[Path]:
    if (folder / "measurements.jsonl").is_file():
        return [folder]
    # A run that has not measured anything is to be named, not passed over.
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
        of_run = (scalars, about) if about.get("run") in (None, name) else ([], {})
        yield RunModel(name, root, sound, num_suspect, *of_run, not whole or any(m.step is not None for m in whole))


# ------------------------------------------------------------------------------------------------ which number


def candidates(measurements: Iterable[Measurement], query: MetricQuery) -> list[tuple[str, Record]]:
    """The records of a metric that may be meant, whatever their tags, with the analysis that each is of.

    An analysis `probe` is that of each of its tasks, too: `probe/banking77`.
    """
    return [
        (m.analysis, r)
        for m in measurements
        if query.analysis in (None, m.analysis, m.analysis.partition("/")[0])
        for r in m.records
        if r.metric == query.name and r.other_layer is None and not r.tags.keys() & BESIDE
    ]


def of_width(query: MetricQuery, model: RunModel) -> MetricQuery:
    """The same with `k` as a count, where it is given as a share of the model's width.

    Raises:
        InputError: where the width is not known.
    """
    k = pd.to_numeric(query.tags.get("k", 1), errors="coerce")
    if not 0 < k < 1:
        return query
    width = model.sizes().get("width")
    if width is None:
        raise InputError(f"tags: k as a share needs the width of {model.name}, which is not known: give k as a count")
    return replace(query, tags={**query.tags, "k": int(k * width + 1e-9)})  # as functional.coupling counts


def plainest_variant(variants: Iterable[Mapping[str, Any]], what: str, option: str) -> Mapping[str, Any]:
    """Return the plainest of some variants, by their tags.

    Raises:
        InputError: where several are as plain.
    """
    distinct = list({str(tags): tags for tags in variants}.values())
    best = plainest(distinct)
    plain = [tags for tags in distinct if plainest([tags, best]) is tags]  # as plain as the plainest
    if len(plain) > 1:
        listed = "; ".join(map(_written, plain))
        raise InputError(f"{option}: {what} has {len(plain)} variants ({listed}): choose one by its tags")
    return best


def refuse_unlike(variants: Mapping[str, Mapping[str, Any]], what: str, option: str) -> None:
    """Refuse variants, by the model, that differ in more than the number `k` of directions, which goes with the width.

    Raises:
        InputError: the tags that differ, with a model of each.
    """
    alike: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for model, tags in variants.items():
        alike[str(sorted((name, "" if name == "k" else value) for name, value in tags.items()))] = model, tags
    if len(alike) > 1:
        listed = "; ".join(f"{_written(tags)} of {model}" for model, tags in alike.values())
        raise InputError(
            f"{option}: {what} is {listed}: numbers of two kinds do not compare: measure all models alike, or choose "
            "one by its tags"
        )


def _written(tags: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in tags.items()) or "no tag"


def nearest(word: str, names: Iterable[str]) -> str:
    """Return `; did you mean ...?`, or what there is."""
    names = list(names)
    there = f"there is: {', '.join(names[:12])}{' ...' if len(names) > 12 else ''}"
    return f"; {did_you_mean(word, names, there)}" if names else ""


# ------------------------------------------------------------------------------------------------ files


def read_table(path: Path, option: str) -> pd.DataFrame:
    """Return the rows of a .csv or .parquet file, whose models stand in the column `model`, as text.

    Raises:
        InputError: for a file that cannot be read, or has no column that names the models.
    """
    try:
        frame: Any = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, comment="#")
    except (ValueError, OSError) as error:  # pandas' and pyarrow's errors of contents are ValueErrors
        raise InputError(f"{option}: cannot read {path}: {' '.join(str(error).split())}") from error
    name = next((name for name in NAMES if name in frame.columns), None)
    if name is None:
        there = ", ".join(map(str, frame.columns))
        raise InputError(f"{option}: {path} has no column that names the models ({', '.join(NAMES)}); it has: {there}")
    if (nameless := frame[name].isna()).any():
        raise InputError(f"{option}: {path}: row {nameless.to_numpy().argmax() + 1} has no name in column {name}")
    return frame.rename(columns={name: "model"}).astype({"model": str})


def numbers(column: Any, names: Any, expected: str) -> Any:
    """Return a column as float64, NaN where it has no value.

    Raises:
        InputError: for a value that is no number: `expected`, what it is, and of which of the `names`.
    """
    values: Any = pd.to_numeric(column, errors="coerce")
    if (wrong := column.notna() & values.isna()).any():
        raise InputError(f"{expected} {column[wrong].iloc[0]!r} for {names[wrong].iloc[0]}")
    return values.astype("float64")


def same_model(name: str, others: Sequence[str]) -> list[int]:
    """The places of a model among others: by its whole name, else by the last part of it."""
    short = name.rstrip("/").split("/")[-1]
    whole = [place for place, other in enumerate(others) if other == name]
    return whole or [place for place, other in enumerate(others) if other.rstrip("/").split("/")[-1] == short]
