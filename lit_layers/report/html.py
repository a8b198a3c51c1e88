"""One self-contained HTML page about a run: it opens anywhere, without a network."""

from pathlib import Path

from lit_layers.durable import replace_file
from lit_layers.errors import InputError
from lit_layers.identity import Settings


def write_report(
    root: str | Path, out: str | Path | None = None, *, allow_suspect: bool = False, settings: Settings = ()
) -> Path:
    """Writes a run's page, by default `root/report.html`, whole or not at all, and returns its path.

    Whatever an interrupted run has left is drawn. A folder whose measurements all lack a step compares their models; in
    a run's folder they are counted, not drawn. Checkpoints that an audit found suspect are left out of all curves and
    tables, unless `allow_suspect`; the page names them either way. So it does numbers of other settings than its curves
    have, of which `settings` chooses (`lit_layers.identity`).

    Raises:
        InputError: where `root` is no run's folder, one of its files is corrupt, the page cannot be written, or
            vl-convert-python or jinja2 is not installed.
    """
    try:  # here, so that a training process without them can import this package
        from lit_layers.report import facts, rendering

        run = facts.read_run(root, settings=settings)
        page = rendering.render(run, allow_suspect=allow_suspect)
    except ImportError as error:
        raise InputError(
            f"a report needs {error.name}: pip install vl-convert-python jinja2, then run `lit-layers report {root}`"
        ) from error
    out = Path(out) if out is not None else run.root / "report.html"
    try:
        replace_file(out, page)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot write {out}: {reason}; --out names another place") from error
    return out
