"""`lit-layers report`: a run's curves as one HTML page, its numbers as a table, its points at W&B."""

import hashlib
import inspect
from pathlib import Path
from typing import Any

from lit_layers import records, run_data
from lit_layers.cli.options import Names
from lit_layers.cli.process import note
from lit_layers.errors import InputError
from lit_layers.figures.labels import listing
from lit_layers.files import run_lock
from lit_layers.report import WandbMirror, rendering, side_by_side, write_report
from lit_layers.report.template import write_page
from lit_layers.report.wandb_mirror import save_workspace


def report(
    runs: list[Path],
    *,
    seeds: bool = False,
    group: str | None = None,
    root: Path | None = None,
    export: Path | None = None,
    pictures: Path | None = None,
    wandb: bool = False,
    workspace: str | None = None,
    allow_suspect: bool = False,
    settings: Names | None = None,
) -> int:
    """Write the page of a run, of models, or of several runs side by side. What an interrupted run has left is enough.

    Args:
        runs: a run's folder, with measurements.jsonl or metrics.jsonl; several are drawn side by side on one page
        seeds: the runs are seeds of one training: draw their mean, with a band over them
        group: runs with one value of this field of their recipe, such as data.shuffle_tokens, are seeds of one training
        root: the page, or the folder for report.html (default: RUN/report.html; of several runs.html)
        export: also write all numbers to this file, as .parquet or .csv
        pictures: also write every figure of the page as PNG, SVG and PDF to this folder
        wandb: also send W&B what it does not have yet
        workspace: also make a W&B workspace with the charts of this run, in ENTITY/PROJECT
        allow_suspect: also draw checkpoints that the audit of their series found suspect
        settings: where an analysis was measured with several settings (options, data), draw these, by the names that
            the page gives them, or `last`: those measured last (default: those of the most steps, which training's are)
    """
    chosen = settings or ()
    if len(runs) > 1:
        about: Any = {"seeds": seeds, "group": group, "settings": chosen, "allow_suspect": allow_suspect}
        return _side_by_side(side_by_side.read_side_by_side(runs, **about), root or Path("runs.html"), export, pictures)
    if not runs:
        raise InputError("missing: runs: expected a run's folder, or several")
    (folder,) = runs
    run = run_data.read_run(folder, settings=chosen)
    if not allow_suspect:
        for verdict, places in run_data.suspects(run).items():
            names = listing("model" if run.compares_models else "step", places)
            note(f"left out as suspect ({verdict}): {names}; --allow_suspect draws them")
    for sentence in run_data.other_settings(run):
        note(f"other settings: {sentence}; --settings NAME draws them")
    if export is not None:
        records.export(records.frame(run.measurements), export)
        print(export)
    if pictures is not None:
        print(*rendering.write_pictures(folder, pictures, allow_suspect=allow_suspect, settings=chosen), sep="\n")
    print(write_report(folder, root, allow_suspect=allow_suspect, settings=chosen))
    if wandb:
        mirror = _mirror(run.about)
        config = run.about.get("config", {})
        with run_lock.writing(folder):  # a training that mirrors itself has it: two would double its points
            mirror.open(folder, run_id=_run_id(run), config=config)
            mirror.finish()
        print(mirror.closing_line)
    if workspace is not None:
        print(save_workspace(folder, workspace))
    return 0


def _side_by_side(content: side_by_side.SideBySide, out: Path, export: Path | None, pictures: Path | None) -> int:
    for sentence in content.notes:
        note(sentence)
    if export is not None:
        records.export(side_by_side.last_values(content), export)
        print(export)
    if pictures is not None:
        print(*side_by_side.write_pictures(content, pictures), sep="\n")
    print(write_page(side_by_side.page_of(content), out))
    return 0


def _mirror(about: dict[str, Any]) -> Any:
    """A mirror with the options that the run's own had, where it had one."""
    options = (about.get("config", {}).get("wandb") or {}).get("init_args")
    parameters = inspect.signature(WandbMirror).parameters
    return WandbMirror(**{name: value for name, value in (options or {}).items() if name in parameters})


def _run_id(run: Any) -> str:
    """The id that the run's own mirror used; for a run without one an id that its first line decides."""
    if run.about.get("id"):
        return str(run.about["id"])
    files = (run.root / "measurements.jsonl", run.root / "metrics.jsonl")
    with next(file for file in files if file.is_file()).open("rb") as lines:
        return hashlib.sha256(lines.readline()).hexdigest()[:8]
