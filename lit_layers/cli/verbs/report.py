"""`lit-layers report`: write the HTML page of runs, export their numbers, and send them to W&B."""

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
from lit_layers.report.wandb_mirror import id_of_run, save_workspace


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
    """Write an HTML page of one run, of models, or of several runs side by side.

    The runs may be unfinished.

    Args:
        runs: a run's folder, with measurements.jsonl or metrics.jsonl; several runs are drawn side by side on one page
        seeds: the runs repeat one training with different seeds: draw their mean with an interval
        group: a field of the recipe, such as data.shuffle_tokens: runs with the same value are treated as repeats
            of one training with different seeds
        root: file of the page, or folder for report.html (default: RUN/report.html; for several runs: runs.html)
        export: also write all numbers to this .parquet or .csv file
        pictures: also write every figure of the page as PNG, SVG and PDF to this folder
        wandb: also send to W&B the numbers that it does not have yet
        workspace: also create a W&B workspace with the charts of this run, in ENTITY/PROJECT
        allow_suspect: also draw checkpoints that the audit of their series found suspect
        settings: which settings (options and data) to draw if an analysis was measured with several: names as shown on
            the page, or `last` for the most recent (default: those with the most steps, usually those of the training)
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
        with run_lock.writing(folder):  # lock the run: a second mirror would send points twice
            mirror.open(folder, run_id=id_of_run(folder), config=config)
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
    """Return a W&B mirror with the options that the training of the run used for its mirror, or the defaults."""
    options = (about.get("config", {}).get("wandb") or {}).get("init_args")
    parameters = inspect.signature(WandbMirror).parameters
    return WandbMirror(**{name: value for name, value in (options or {}).items() if name in parameters})
