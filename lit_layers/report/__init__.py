"""Reports of a run: one self-contained HTML page, and a mirror of its numbers at W&B."""

from pathlib import Path

from lit_layers import run_data
from lit_layers.identity import Settings
from lit_layers.report.rendering import render
from lit_layers.report.template import write_page
from lit_layers.report.wandb_mirror import WandbMirror

__all__ = ["WandbMirror", "write_report"]


def write_report(
    root: str | Path, out: str | Path | None = None, *, allow_suspect: bool = False, settings: Settings = ()
) -> Path:
    """Write the HTML page of a run, by default `root/report.html`, and return its path.

    The page is written atomically and needs no network. A missing `.html` suffix is added to `out`; if `out` is a
    folder, the page is `report.html` in it.

    The page can also be written for an interrupted run. If no measurement in the folder has a step, the page compares
    the models in it. Otherwise measurements without a step are only counted. Checkpoints that an audit found suspect
    are left out of all curves and tables, unless `allow_suspect`. The page lists them in any case.

    If an analysis was measured with several settings (options and data), one of them is drawn, and the page lists the
    others. `settings` selects which one, as `lit_layers.identity` describes.

    Raises:
        InputError: `root` is not a run folder, one of its files is corrupt, or the page cannot be written.
    """
    run = run_data.read_run(root, settings=settings)
    page = render(run, allow_suspect=allow_suspect)
    return write_page(page, Path(out) if out is not None else run.root / "report.html")
