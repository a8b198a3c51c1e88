"""`lit-layers analyze` on a series of checkpoints: audited, measured, told."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.analyses.base import Analysis
from lit_layers.cli.audit import show_audit
from lit_layers.errors import InputError

if TYPE_CHECKING:
    from lit_layers.offline_series import SeriesResult
    from lit_layers.series import Series

FAILED, INTERRUPTED = 1, 130
Bar = Callable[[str], AbstractContextManager[Callable[[int, int, str], None]]]


def run(options: Any, analyses: Sequence[Analysis], bar: Bar) -> int:
    """Measures what the options say, prints what came out; 130 where Ctrl-C cut it short, 1 if anything failed."""
    from lit_layers.offline_series import analyze_series

    failed, everything = False, _series(options)
    for series in everything:
        root = _root(options, series, alone=len(everything) == 1)
        try:
            with bar("auditing the series") as show:
                result = analyze_series(
                    series,
                    analyses,
                    root=root,
                    allow_suspect=options.allow_suspect,
                    keep_downloads=options.keep_downloads,
                    shard=_shard(options.shard),
                    device=options.device,
                    dtype=options.dtype,
                    progress=show,
                )
        except KeyboardInterrupt:
            print(f"interrupted: run the same command again to go on in {root}", file=sys.stderr)
            return INTERRUPTED
        failed |= _tell(result, root)
    return FAILED if failed else 0


def text_of(options: Any) -> tuple[str | None, str | None]:
    """Corpus and tokenizer that a series is measured with where nothing is said: those it was trained with, if known.

    With a run's own, its numbers have the names that training gave them, and are known if training measured them.
    """
    run = Path(options.model) / "run.json"
    known = json.loads(run.read_text()).get("config", {}) if run.is_file() else {}
    tokenizer = known.get("tokenizer")
    if tokenizer is None:
        from lit_layers.offline import own_tokenizer

        # the same one whichever steps are chosen
        last = _series(options)[0].listing.checkpoints[-1].source.describe()
        tokenizer = own_tokenizer(last["checkpoint"], last.get("commit"))
    return known.get("corpus"), tokenizer


def _series(options: Any) -> "list[Series]":
    from lit_layers.series import open_series, read_steps

    steps = "all" if options.steps is None else options.steps
    return open_series(options.model, read_steps(steps) if isinstance(steps, str) else steps)


def _root(options: Any, series: "Series", *, alone: bool) -> Path:
    """A run's numbers stand in its own folder; of a manifest each repository has one."""
    if Path(options.model).is_dir():
        return Path(options.root or options.model)
    name = series.name.replace("/", "-")
    if options.root:
        return Path(options.root) if alone else Path(options.root) / name
    return Path("checkpoints") / name


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None:
        raise InputError(f"shard: expected i/n, such as 0/4, got {text!r}")
    return int(found[1]), int(found[2])


def _tell(result: "SeriesResult", root: Path) -> bool:
    """Prints what came of a series; whether anything failed."""
    show_audit(result.verdict)
    if result.left_out:
        names = ", ".join(found.name for found in result.left_out)
        print(f"left out as suspect: {names}; --allow-suspect measures them")
    errors = [measurement for measurement in result.measurements if measurement.error is not None]
    for measurement in errors:
        print(f"failed: {measurement.analysis} at step {measurement.step}: {measurement.error}", file=sys.stderr)
    for sentence in result.failures:
        print(f"failed: {sentence}", file=sys.stderr)
    print(f"{len(result.measurements) - len(errors)} measured, {result.num_known} were known")
    print(f"{root / 'measurements.jsonl'}; draw them with `lit-layers report {root}`")
    return bool(errors or result.failures)
