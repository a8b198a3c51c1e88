"""What run folders tell of their models: one value of a metric at one checkpoint, and what the model is."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers import identity, records
from lit_layers.errors import InputError
from lit_layers.figures.labels import tag_text
from lit_layers.figures.tables import plainest
from lit_layers.records import PLACES, Measurement, Record
from lit_layers.run_file import run_facts

ORDINALS = ("distance", "index", "reference")
# What a model's size is called: the name here, then what configurations of the known families call it.
SIZES = {
    "width": ("width", "hidden_size", "n_embd", "embed_dim", "d_model"),
    "depth": ("depth", "num_hidden_layers", "n_layer", "num_layers"),
    "parameters": ("parameters",),
}


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
        wanted = step if step is not None else max(steps, default=None)
        return [m for m in self.measurements if m.step == wanted and wanted is not None]


def read_run_models(folders: Sequence[Path]) -> list[RunModel]:
    """Returns the models of run folders, comparisons and folders that hold such, in this order.

    Raises:
        InputError: for a folder that holds no measurements, or two models of one name in one folder.
    """
    found = [model for folder in folders for root in _roots(folder) for model in _models(root)]
    names = [model.name for model in found]
    shared = {name for name in names if names.count(name) > 1}
    renamed = [
        RunModel(**{**vars(model), "name": str(model.folder)}) if model.name in shared else model for model in found
    ]
    if len({model.name for model in renamed}) < len(renamed):
        twice = next(model.name for model in renamed if [m.name for m in renamed].count(model.name) > 1)
        raise InputError(f"expected every model once, got {twice} more than once: name each folder once")
    return renamed


def _roots(folder: Path) -> list[Path]:
    if (folder / "measurements.jsonl").is_file():
        return [folder]
    # A run that has not measured anything is to be named, not passed over.
    inner = sorted({path.parent for name in ("measurements.jsonl", "run.json") for path in folder.glob(f"*/{name}")})
    if not inner:
        what = "it and the folders in it have none" if folder.is_dir() else "no such folder"
        raise InputError(f"expected a folder with measurements.jsonl, or a .csv or .parquet file, got {folder}: {what}")
    return inner


def _models(root: Path) -> list[RunModel]:
    every = identity.shown(records.read(root / "measurements.jsonl"))
    about, scalars = run_facts(root), records.rows(root / "metrics.jsonl")
    found = []
    for name in dict.fromkeys(m.run for m in every) or [str(about.get("run") or root.name)]:
        own = [m for m in every if m.run == name and m.error is None]
        sound = [m for m in own if not records.is_suspect(m)]
        is_trained_here = about.get("run") in (None, name)
        found.append(
            RunModel(
                name=name,
                folder=root,
                measurements=sound,
                num_suspect=len({m.step for m in own if records.is_suspect(m)}),
                scalars=scalars if is_trained_here else [],
                about=about if is_trained_here else {},
                has_steps=not own or any(m.step is not None for m in own),
            )
        )
    return found


def metric_of(models: Iterable[RunModel], wanted: str) -> tuple[str, str]:
    """Returns the analysis and metric of `ANALYSIS/METRIC`, or of a metric's name alone where one analysis has it.

    Raises:
        InputError: for one that no model has, with those that are called nearly so; for one of several analyses.
    """
    known = dict.fromkeys((m.analysis, r.metric) for model in models for m in model.measurements for r in m.records)
    fitting = [pair for pair in known if "/".join(pair) == wanted] or [pair for pair in known if pair[1] == wanted]
    if len(fitting) == 1:
        return fitting[0]
    names = ["/".join(pair) for pair in known]
    if fitting:
        raise InputError(f"metric: {wanted} is in more than one analysis: {', '.join(map('/'.join, fitting))}")
    raise InputError(f"metric: no model has {wanted!r}{nearest(wanted, names)}")


def nearest(word: str, known: Iterable[str], most: int = 12) -> str:
    """Returns `; did you mean ...?`, or what there is."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if not near:
        last = {name.split("/")[-1]: name for name in known}
        near = [last[name] for name in difflib.get_close_matches(word.split("/")[-1], last, n=3, cutoff=0.6)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there is: {', '.join(known[:most])}{' ...' if len(known) > most else ''}" if known else ""


def value_of(
    model: RunModel, found: Sequence[Measurement], analysis: str, metric: str, options: "Choice"
) -> Record | None:
    """Returns the one record of a metric that the options leave, None where there is none.

    Raises:
        InputError: where they leave several variants.
    """
    own = [r for m in found if m.analysis == analysis for r in m.records if r.metric == metric and _is_plain(r)]
    own = [record for record in own if options.fits(record, model)]
    if options.layer is not None:
        layers = [record.layer for record in own if record.layer is not None]
        wanted = max(layers, default=None) if options.layer == "last" else options.layer
        own = [record for record in own if record.layer is not None and record.layer == wanted]
    else:
        whole = [record for record in own if record.layer is None]
        last = max((record.layer for record in own if record.layer is not None), default=None)
        own = whole or [record for record in own if record.layer == last]
    if not own:
        return None
    variants = list({str(_identity(record)): _identity(record) for record in own}.values())
    best = plainest(variants)
    variants = [tags for tags in variants if plainest([tags, best]) is tags]  # as plain as the plainest
    if len(variants) > 1:
        listed = "; ".join(tag_text(tags) or "no tag" for tags in variants)
        example = ",".join(f"{name}={value}" for name, value in variants[0].items())
        raise InputError(
            f"tags: {analysis}/{metric} of {model.name} has {len(variants)} variants ({listed}): choose one, "
            f"e.g. --tags {example}"
        )
    return next(record for record in own if _identity(record) == variants[0])


def tags_of(models: Iterable[RunModel], analysis: str, metric: str) -> dict[str, list[str | int | float]]:
    """Returns the tags of a metric, and the values that each has somewhere."""
    found: dict[str, dict[str | int | float, None]] = {}
    for model in models:
        for record in (r for m in model.measurements if m.analysis == analysis for r in m.records):
            if record.metric == metric and _is_plain(record):
                for tag, value in _identity(record).items():
                    found.setdefault(tag, {})[value] = None
    return {tag: list(values) for tag, values in found.items()}


def _identity(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.tags.items() if not name.startswith("num_")}


def _is_plain(record: Record) -> bool:
    return record.other_layer is None and not record.tags.keys() & {*PLACES, *ORDINALS}


@dataclass(frozen=True)
class Choice:
    """Which of a metric's values is meant: its tags, and the layer where it has layers (None: of the whole model)."""

    tags: Mapping[str, str | int | float]
    layer: int | str | None = None

    def fits(self, record: Record, model: RunModel) -> bool:
        return all(self._matches(name, wanted, record, model) for name, wanted in self.tags.items())

    def _matches(self, name: str, wanted: str | int | float, record: Record, model: RunModel) -> bool:
        own = record.tags.get(name)
        if name == "k" and isinstance(wanted, float) and 0 < wanted < 1:
            return own == int(wanted * _width(model) + 1e-9)  # the share of directions that functional.coupling counts
        return own == wanted or str(own) == str(wanted)


def _width(model: RunModel) -> float:
    width = sizes(model).get("width")
    if width is None:
        raise InputError(f"tags: k as a share needs the width of {model.name}, which is not known: give k as a count")
    return width


def sizes(model: RunModel) -> dict[str, float]:
    """Returns width, depth and parameters, each where it is known.

    From what the run or its measurements say of the model, else from its configuration; the depth else from the last
    layer that was measured.
    """
    described = [model.about.get("model", {})]
    described += [m.provenance for m in model.measurements]
    described.append(settings(model))
    found = {}
    for size, names in SIZES.items():
        values = [source[name] for source in described for name in names if _is_number(source.get(name))]
        if values:
            found[size] = values[0]
    layers = [r.layer for m in model.measurements for r in m.records if r.layer is not None]
    if "depth" not in found and layers and max(layers) > 0:
        found["depth"] = max(layers)
    return found


def settings(model: RunModel) -> dict[str, Any]:
    """Returns the scalar options of a run's model, data and schedule, by their last name where only one has it."""
    config = model.about.get("config", {})
    leaves = [leaf for part in ("model", "data") for leaf in _leaves(config.get(part), (part,))]
    leaves += [(("seed_everything",), config["seed_everything"])] if "seed_everything" in config else []
    last = [path[-1] for path, _ in leaves]
    return {path[-1] if last.count(path[-1]) == 1 else ".".join(path): value for path, value in leaves}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, path if name == "init_args" else (*path, str(name)))
    elif isinstance(value, str | int | float) and path[-1] != "class_path":
        yield path, value


def has_p_1(model: RunModel, analysis: str) -> bool:
    """Whether a coupling was measured with p = 1, by its tags or the run's configuration."""
    if any(r.tags.get("p") == 1 for m in model.measurements if m.analysis == analysis for r in m.records):
        return True
    for one in model.about.get("config", {}).get("analyses") or []:
        options = (one.get("init_args") or {}) if isinstance(one, dict) else {}
        if str(one.get("class_path", "")).endswith("Coupling") and options.get("p") == 1:
            return options.get("name", analysis) == analysis
    return False


def scalar_of(model: RunModel, name: str, step: int | None, take: str) -> float | None:
    """Returns a scalar of training, up to a step: the last, the highest or the lowest value; None without any."""
    values = [row[name] for row in model.scalars if name in row and (step is None or row["step"] <= step)]
    if take == "last":
        return values[-1] if values and values[-1] == values[-1] else None  # a run that ends in NaN has no score
    values = [value for value in values if value == value]
    if not values:
        return None
    return max(values) if take == "highest" else min(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
