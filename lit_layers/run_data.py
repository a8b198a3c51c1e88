"""The content of a run folder for reports: its measurements, failures, costs and provenance."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.figures.labels import DASH, count, listing
from lit_layers.figures.profiles import short_names
from lit_layers.figures.tables import grouped
from lit_layers.identity import ALL, LAST, Settings, settings_of, short, split_shown
from lit_layers.metrics import sentence
from lit_layers.records import Measurement
from lit_layers.schema import run_facts


@dataclass(frozen=True)
class RunData:
    """The content of a run folder for a report.

    Args:
        root: the folder.
        about: the content of run.json.
        measurements: the measurements that form the curves, and the values of their nulls. They are those of one run,
            or those of all models if the folder compares models without training steps.
        scalars: the rows of metrics.jsonl, one per step, with the scalars of training.
        other_runs: names of other runs in the folder, which are not shown.
        others: the measurements of other settings (options and data of an analysis), which are in no curve.
    """

    root: Path
    about: dict[str, Any]
    measurements: list[Measurement]
    scalars: list[dict[str, float]]
    other_runs: list[str]
    others: list[Measurement]

    @property
    def compares_models(self) -> bool:
        """Whether the folder compares models without steps, rather than the steps of a run."""
        return bool(self.measurements) and all(m.step is None for m in self.measurements)

    @property
    def models(self) -> dict[str, str]:
        """Short name of each model, by the name of its run; empty if the measurements are the steps of one run."""
        return short_names(list(dict.fromkeys(m.run for m in self.measurements))) if self.compares_models else {}

    def label(self, measurement: Measurement) -> str:
        """Return the name of a measurement's checkpoint in tables: its step or, for models without steps, its model."""
        if self.compares_models:
            return self.models[measurement.run]
        return "" if measurement.step is None else f"{measurement.step:,}"

    @property
    def name(self) -> str:
        if len(self.models) > 1:
            return self.root.resolve().name
        return self.measurements[-1].run if self.measurements else str(self.about.get("run") or self.root.name)

    @property
    def failures(self) -> list[Measurement]:
        return [m for m in self.measurements if m.error is not None]


def read_run(root: str | Path, *, settings: Settings = ()) -> RunData:
    """Return the content of a run folder, also that of an interrupted run.

    `settings` names the settings (options and data of an analysis) that form the curves. `lit_layers.identity`
    explains the default.

    Raises:
        InputError: the folder is not a run folder, a file is corrupt, or no analysis has these settings.
    """
    root = Path(root)
    files = root / "measurements.jsonl", root / "metrics.jsonl"
    if not any(file.is_file() for file in files):
        what = "no such folder" if not root.is_dir() else "it has neither"
        raise InputError(f"expected a run's folder with measurements.jsonl or metrics.jsonl, got {root}: {what}")
    about = run_facts(root)
    if ALL in settings:
        raise InputError(f"settings: a curve shows one of them, got {ALL}: name one, or {LAST}")
    measurements, others = split_shown(records.read(files[0]), settings)
    measurements = records.add_nulls(measurements, records.read_nulls(root))
    scalars = records.rows(files[1])
    if measurements and all(m.step is None for m in measurements):
        return RunData(root, about, measurements, scalars, [], others)
    # Sort runs with steps last: a model without steps, such as untrained weights, is shown only if no run has steps.
    runs = list(dict.fromkeys(m.run for m in sorted(measurements, key=lambda m: m.step is not None)))
    shown = about.get("run") if about.get("run") in runs else (runs[-1] if runs else None)
    mine, others = (
        sorted((m for m in each if m.run == shown), key=lambda m: -1 if m.step is None else m.step)
        for each in (measurements, others)
    )
    return RunData(root, about, mine, scalars, [run for run in runs if run != shown], others)


def other_settings(run: RunData) -> list[str]:
    """Return a sentence for each analysis with several settings, which names the shown settings and the others.

    Settings are the options of an analysis and its data.
    """
    chosen = {(m.run, m.analysis): short(settings_of(m)) for m in run.measurements if m.error is None}
    sentences = []
    for (name, analysis), measured in grouped(run.others, lambda m: (m.run, m.analysis)).items():
        whose = f" of {run.models[name]}" if run.compares_models else ""
        by_settings = grouped(measured, lambda m: short(settings_of(m)))
        others = [
            settings if run.compares_models else f"{settings} at {listing('step', map(run.label, these), most=8)}"
            for settings, these in by_settings.items()
        ]
        sentences.append(f"{analysis}{whose}: {chosen.get((name, analysis), 'none')} is shown, not {'; '.join(others)}")
    return sentences


def suspects(run: RunData) -> dict[str, list[str]]:
    """Return the steps, or names of models, that an audit found suspect, by the audit's verdict."""
    suspect = [m for m in run.measurements if records.is_suspect(m)]
    by_verdict = grouped(suspect, lambda m: " ".join(m.provenance[records.AUDIT].removeprefix("suspect: ").split()))
    return {verdict: list(dict.fromkeys(map(run.label, these))) for verdict, these in by_verdict.items()}


def summary(run: RunData) -> list[tuple[str, str]]:
    """Return the facts about a run at the top of its report, as (name, value)."""
    about, model = run.about, run.about.get("model", {})
    steps = [m.step for m in run.measurements if m.step is not None] + [int(row["step"]) for row in run.scalars]
    last, planned, data = max(steps, default=None), about.get("max_steps"), about.get("data", {})
    tokens = [m.tokens for m in run.measurements if m.tokens is not None]
    tokens += [int(row["tokens"]) for row in run.scalars[-1:] if "tokens" in row]
    unfinished = planned is not None and last is not None and last < planned
    checkpoints = 0 if run.compares_models else len({m.step for m in run.measurements})
    devices = dict.fromkeys(m.provenance["device"] for m in run.measurements if m.provenance.get("device"))
    device = " ".join(str(about[name]) for name in ("device", "precision") if about.get(name))
    facts = [
        ("Models", str(len(run.models)) if run.models else ""),
        ("Model", str(model.get("class", ""))),
        ("Parameters", count(model.get("parameters"))),
        ("Steps", "" if last is None else f"{last:,}" + (f" of {planned:,}" if unfinished else "")),
        ("Tokens", count(max(tokens)) if tokens else ""),
        ("Checkpoints measured", str(checkpoints) if checkpoints else ""),
        ("Data", str(data.get("corpus") or data.get("source") or "")),
        ("Device", device or (", ".join(devices) if run.models else "")),
        ("Wall time", duration(about["seconds"]) if about.get("seconds") else ""),
        ("Started", str(about.get("started", ""))[:16].replace("T", " ")),
    ]
    return [(name, value) for name, value in facts if value]


def cost(run: RunData) -> list[dict[str, Any]]:
    """Return the rows of a report's table of costs: one per analysis, one for all analyses, one for saving checkpoints.

    Each row has the number of measurements, the seconds, and the share of the run's wall time, if known.
    """
    by_analysis = grouped(run.measurements, lambda m: m.analysis)
    seconds = {name: [m.seconds for m in these] for name, these in by_analysis.items()}
    total, wall = sum(map(sum, seconds.values())), run.about.get("seconds")
    # Leave out the shares of the wall time: other processes also measured, and their wall time is unknown.
    if wall and total > wall:
        wall = None
    rows: list[tuple[str, int | None, float]] = [
        (sentence(name), len(each), sum(each)) for name, each in seconds.items()
    ]
    rows.append(("All analyses", None, total))
    if saving := run.about.get("checkpoint_seconds"):
        rows.append(("Saving checkpoints", None, saving))
    return [{"name": n, "times": t, "seconds": s, "share": s / wall if wall else None} for n, t, s in rows]


def duration(seconds: float) -> str:
    """Return a duration as `42 s`, `3 min 07 s` or `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours:,} h {left:02d} min" if hours else f"{minutes} min {rest:02d} s"


# ------------------------------------------------------------------------------------------------ provenance

_LONG_HASH = re.compile(r"\b[0-9a-f]{32,}\b")
# In a table, a long hash is shortened to _DIGITS digits. More than _FILES files of a checkpoint are only counted.
_DIGITS, _FILES = 12, 2


def provenance(run: RunData) -> dict[str, Any]:
    """Return the provenance of a run's measured numbers in five parts, for its report.

    `shared` has the fields of provenance that are equal in all measurements. `checkpoints` has a row per step or model,
    with the other fields that are equal in all measurements of one step or model. `analyses` has all values of the
    remaining fields, by analysis. `config` is the configuration in run.json, and `run` is the rest of run.json.
    """
    measured = [m for m in run.measurements if m.error is None]
    first = "model" if run.compares_models else "step"
    texts = [{name: _text(value) for name, value in m.provenance.items()} for m in measured]
    rows = [{first: run.label(m), "analysis": m.analysis, **own} for m, own in zip(measured, texts, strict=True)]
    table = pd.DataFrame(rows, columns=None if rows else [first, "analysis"]).fillna(DASH)
    by_step, analyses = (table.groupby(name, sort=False) for name in (first, "analysis"))
    names = table.columns[2:]
    shared = [name for name in names if table[name].nunique() == 1]
    own = [name for name in names if name not in shared and by_step[name].nunique().max() == 1]
    others = [name for name in names if name not in shared and name not in own]
    own_rows = by_step[own].first().reset_index()
    return {
        "shared": {name: measured[0].provenance.get(name) for name in shared},
        "analyses": {
            analysis: {name: ", ".join(these[name].unique()) for name in others} for analysis, these in analyses
        },
        "checkpoints": {"columns": list(own_rows.columns), "rows": own_rows.to_numpy().tolist() if own else []},
        "run": {name: value for name, value in run.about.items() if name != "config"},
        "config": run.about.get("config"),
    }


def shortened(text: str) -> str:
    """Return a provenance text with its long hashes shortened, for a table.

    A list of more than two files with their hashes becomes the number of files.
    """
    if len(files := text.split(", ")) > _FILES and all(map(_LONG_HASH.search, files)):
        return f"{len(files)} files"
    return _LONG_HASH.sub(lambda match: match[0][:_DIGITS], text)


def flat(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Return nested data as a list of (name, text), where the name joins the keys by dots."""
    (row,) = pd.json_normalize(content).to_dict("records")
    return [(str(name), _text(value)) for name, value in row.items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return DASH if value is None else str(value)
