"""What a run tells: one self-contained HTML page, and a mirror of its numbers at W&B."""

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
    """Write a run's page, by default `root/report.html`, whole or not at all, and returns its path. `out`
    need not end with `.html`, and may be a folder, which then has the page as report.html.

    The page opens anywhere, without a network. Whatever an interrupted run has left is drawn. A folder whose
    measurements all lack a step compares their models; in a run's folder they are counted, not drawn. Checkpoints that
    an audit found suspect are left out of all curves and tables, unless `allow_suspect`; the page names them either
    way. So it does numbers of other settings than its curves have, of which `settings` chooses
    (`lit_layers.identity`).

    Raises:
        InputError: where `root` is no run's folder, one of its files is corrupt, or the page cannot be written.
    """
    run = run_data.read_run(root, settings=settings)
    page = render(run, allow_suspect=allow_suspect)
    return write_page(page, Path(out) if out is not None else run.root / "report.html")
