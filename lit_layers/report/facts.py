"""What a run folder tells about itself: where its numbers come from, what failed, what measuring cost."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.plots.labels import count, sentence
from lit_layers.records import Measurement


@dataclass(frozen=True)
class RunData:
    """All that a run folder holds for a report."""

    root: Path
    about: dict[str, Any]
    measurements: list[Measurement]  # the last of each step and analysis, of one run
    scalars: list[dict[str, float]]
    other_runs: list[str]

    @property
    def name(self) -> str:
        return self.measurements[-1].run if self.measurements else str(self.about.get("run") or self.root.name)

    @property
    def tokens_per_step(self) -> int | None:
        known = self.about.get("tokens_per_step")
        return known if isinstance(known, int) else None

    @property
    def failures(self) -> list[Measurement]:
        return [m for m in self.measurements if m.error is not None]


def read_run(root: str | Path) -> RunData:
    """Returns what a run folder holds, however little an interrupted run has left.

    Raises:
        InputError: where the folder is no run's, or one of its files is corrupt.
    """
    root = Path(root)
    files = root / "measurements.jsonl", root / "metrics.jsonl"
    if not any(file.is_file() for file in files):
        what = "no such folder" if not root.is_dir() else "it has neither"
        raise InputError(f"expected a run's folder with measurements.jsonl or metrics.jsonl, got {root}: {what}")
    about = _about(root / "run.json")
    measurements = records.latest(records.read(files[0]))
    runs = list(dict.fromkeys(m.run for m in measurements))
    shown = about.get("run") if about.get("run") in runs else (runs[-1] if runs else None)
    mine = sorted((m for m in measurements if m.run == shown), key=lambda m: -1 if m.step is None else m.step)
    return RunData(root, about, mine, records.rows(files[1]), [run for run in runs if run != shown])


def headline_facts(run: RunData) -> list[tuple[str, str]]:
    """Returns what stands at the head of the page, as (name, value)."""
    about, model = run.about, run.about.get("model") or {}
    steps = [m.step for m in run.measurements if m.step is not None] + [int(row["step"]) for row in run.scalars]
    last = max(steps, default=None)
    tokens = [m.tokens for m in run.measurements if m.tokens is not None]
    tokens += [last * run.tokens_per_step] if last is not None and run.tokens_per_step else []
    data = about.get("data") or {}
    planned = about.get("max_steps")
    unfinished = isinstance(planned, int) and last is not None and last < planned
    checkpoints = len({m.step for m in run.measurements})
    found = [
        ("Model", str(model.get("class", "")) if isinstance(model, dict) else str(model)),
        ("Parameters", count(model.get("parameters")) if isinstance(model, dict) else ""),
        ("Steps", "" if last is None else f"{last:,}" + (f" of {planned:,}" if unfinished else "")),
        ("Tokens", count(max(tokens)) if tokens else ""),
        ("Checkpoints measured", str(checkpoints) if checkpoints else ""),
        ("Data", str(data.get("corpus", "")) if isinstance(data, dict) else ""),
        ("Device", " ".join(str(about[name]) for name in ("device", "precision") if about.get(name))),
        ("Wall time", duration(seconds) if (seconds := wall_seconds(run)) is not None else ""),
        ("Started", _date(about.get("started"))),
    ]
    return [(name, value) for name, value in found if value]


def wall_seconds(run: RunData) -> float | None:
    """Returns the wall time of the whole run, once it has ended."""
    seconds = run.about.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and seconds > 0 else None


def cost(run: RunData) -> list[dict[str, Any]]:
    """Returns for each analysis how often it ran, for how long, and its share of the wall time where that is known."""
    wall = wall_seconds(run)
    rows = []
    for analysis in dict.fromkeys(m.analysis for m in run.measurements):
        seconds = [m.seconds for m in run.measurements if m.analysis == analysis]
        share = sum(seconds) / wall if wall else None
        rows.append({"name": section_title(analysis), "times": len(seconds), "seconds": sum(seconds), "share": share})
    rows.append({"name": "All analyses", "times": None, "seconds": sum(row["seconds"] for row in rows)})
    rows[-1]["share"] = rows[-1]["seconds"] / wall if wall else None
    saving = run.about.get("checkpoint_seconds")
    if isinstance(saving, int | float) and saving > 0:
        share = saving / wall if wall else None
        rows.append({"name": "Saving checkpoints", "times": None, "seconds": saving, "share": share})
    return rows


def provenance(run: RunData) -> dict[str, Any]:
    """Returns where the numbers come from.

    `shared`: what all measurements have in common; `analyses`: what differs between analyses; `weights`: the hash of
    each checkpoint; `run`: what the run's own file says.
    """
    per_step = {"weights_hash"}
    names = dict.fromkeys(n for m in run.measurements for n in m.provenance if n not in per_step)
    found = {n: _distinct(m.provenance.get(n) for m in run.measurements) for n in names}
    shared = {n: values[0] for n, values in found.items() if len(values) == 1}
    analyses = {}
    for analysis in dict.fromkeys(m.analysis for m in run.measurements):
        mine = [m.provenance for m in run.measurements if m.analysis == analysis]
        analyses[analysis] = {n: _distinct(p.get(n) for p in mine) for n in names if n not in shared}
    weights: dict[str, list] = {}
    for m in run.measurements:
        if "weights_hash" in m.provenance:
            weights.setdefault(str(m.step), []).append(m.provenance["weights_hash"])
    about = {n: value for n, value in run.about.items() if n != "config"}
    return {
        "shared": shared,
        "analyses": analyses,
        "weights": {step: _distinct(hashes) for step, hashes in weights.items()},
        "run": about,
        "config": run.about.get("config"),
    }


def flat(content: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Returns nested data as rows of (dotted name, text)."""
    if isinstance(content, dict) and content:
        return [row for name, value in content.items() for row in flat(value, f"{prefix}.{name}" if prefix else name)]
    if isinstance(content, list):
        return [(prefix, ", ".join(json.dumps(v) if isinstance(v, dict | list) else str(v) for v in content))]
    return [(prefix, "–" if content is None else str(content))]  # noqa: RUF001


def duration(seconds: float) -> str:
    """Returns 42 s, 3 min 07 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours:,} h {left:02d} min" if hours else f"{minutes} min {rest:02d} s"


def section_title(analysis: str) -> str:
    """Returns an analysis' name as a heading."""
    return sentence(analysis)


def _about(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); restore it, or delete it to go on without it") from error
    return content if isinstance(content, dict) else {}


def _distinct(values: Iterable[Any]) -> list[Any]:
    seen: dict[str, Any] = {}
    for value in values:
        if value is not None:
            seen.setdefault(json.dumps(value, sort_keys=True, default=str), value)
    return list(seen.values())


def _date(text: Any) -> str:
    try:
        return datetime.fromisoformat(str(text)).astimezone().strftime("%d %B %Y, %H:%M").lstrip("0")
    except ValueError:
        return ""
