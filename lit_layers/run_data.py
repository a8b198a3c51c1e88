"""What a run folder tells about itself: what it is, what failed, what measuring cost, where its numbers come from."""

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
    """All that a run folder holds for a report.

    `measurements` are those of its curves, of one run; in a folder of models without steps, of all. `others` are those
    of other settings.
    """

    root: Path
    about: dict[str, Any]
    measurements: list[Measurement]
    scalars: list[dict[str, float]]
    other_runs: list[str]
    others: list[Measurement]

    @property
    def compares_models(self) -> bool:
        """Whether these are models side by side, not a run over its steps."""
        return bool(self.measurements) and all(m.step is None for m in self.measurements)

    @property
    def models(self) -> dict[str, str]:
        """The models of a comparison, and what they are called."""
        return short_names(list(dict.fromkeys(m.run for m in self.measurements))) if self.compares_models else {}

    def label(self, measurement: Measurement) -> str:
        """What a measurement's checkpoint is called: its step, or its model."""
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
    """Return what a run folder holds, however little an interrupted run has left.

    `settings` chooses other numbers than those that `lit_layers.identity` says.

    Raises:
        InputError: where the folder is no run's, or one of its files is corrupt; for settings that are not there.
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
    scalars = records.rows(files[1])
    if measurements and all(m.step is None for m in measurements):
        return RunData(root, about, measurements, scalars, [], others)
    # a row without a step beside a curve, such as untrained weights, is never taken for the run
    runs = list(dict.fromkeys(m.run for m in sorted(measurements, key=lambda m: m.step is not None)))
    shown = about.get("run") if about.get("run") in runs else (runs[-1] if runs else None)
    mine, others = (
        sorted((m for m in each if m.run == shown), key=lambda m: -1 if m.step is None else m.step)
        for each in (measurements, others)
    )
    return RunData(root, about, mine, scalars, [run for run in runs if run != shown], others)


def other_settings(run: RunData) -> list[str]:
    """Return for each analysis that was measured with several settings which is shown, and which others there are."""
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
    """Return the steps (or models) that an audit found suspect, by its verdict."""
    suspect = [m for m in run.measurements if records.is_suspect(m)]
    by_verdict = grouped(suspect, lambda m: " ".join(m.provenance[records.AUDIT].removeprefix("suspect: ").split()))
    return {verdict: list(dict.fromkeys(map(run.label, these))) for verdict, these in by_verdict.items()}


def summary(run: RunData) -> list[tuple[str, str]]:
    """Return what stands at the head of the page, as (name, value)."""
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
    """Return for each analysis how often it ran, for how long, and its share of the wall time where that is known."""
    by_analysis = grouped(run.measurements, lambda m: m.analysis)
    seconds = {name: [m.seconds for m in these] for name, these in by_analysis.items()}
    total, wall = sum(map(sum, seconds.values())), run.about.get("seconds")
    if wall and total > wall:  # other processes measured, too: of a time that is not known
        wall = None
    rows: list[tuple[str, int | None, float]] = [
        (sentence(name), len(each), sum(each)) for name, each in seconds.items()
    ]
    rows.append(("All analyses", None, total))
    if saving := run.about.get("checkpoint_seconds"):
        rows.append(("Saving checkpoints", None, saving))
    return [{"name": n, "times": t, "seconds": s, "share": s / wall if wall else None} for n, t, s in rows]


def duration(seconds: float) -> str:
    """Return 42 s, 3 min 07 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours:,} h {left:02d} min" if hours else f"{minutes} min {rest:02d} s"


# ------------------------------------------------------------------------------------------------ provenance

_LONG_HASH = re.compile(r"\b[0-9a-f]{32,}\b")
_DIGITS, _FILES = 12, 2  # of a long hash, and of one checkpoint, that a table shows


def provenance(run: RunData) -> dict[str, Any]:
    """Return where the numbers come from.

    `shared`: what all measurements have in common; `checkpoints`: a row for each step or model, with what differs only
    between these; `analyses`: all values of the rest by analysis; `run`: what the run's file says.
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
    """Return text whose long hashes are cut: commits, and the sums of files; of many files only their number."""
    if len(files := text.split(", ")) > _FILES and all(map(_LONG_HASH.search, files)):
        return f"{len(files)} files"
    return _LONG_HASH.sub(lambda match: match[0][:_DIGITS], text)


def flat(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Return nested data as rows of (dotted name, text)."""
    (row,) = pd.json_normalize(content).to_dict("records")
    return [(str(name), _text(value)) for name, value in row.items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return DASH if value is None else str(value)
