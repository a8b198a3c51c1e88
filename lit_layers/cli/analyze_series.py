"""`lit-layers analyze` on a series of checkpoints: audited, measured, told."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lit_layers.cli.analyze_options import Command
from lit_layers.cli.audit import show_audit
from lit_layers.cli.bar import bar
from lit_layers.cli.over_checkpoints import settings_of_all, tell_settings
from lit_layers.cli.processes import AUTO, shard_of, take_own_gpu, wait_for_the_others
from lit_layers.errors import InputError
from lit_layers.series import Series
from lit_layers.series.local import training_of

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.offline_series import Analyses, SeriesResult

FAILED = 1


def run(command: Command) -> int:
    """Measures what the options say, prints what came out; 1 if anything failed."""
    from lit_layers.offline_series import analyze_series

    options, failed, everything = command.options, False, command.series()
    shard = shard_of(options.shard, os.environ)
    hidden = options.shard == AUTO and shard[0] > 0  # the first process of torchrun speaks for all
    take_own_gpu(options.device, os.environ)
    for series in everything:
        root = _root(options.root, series, alone=len(everything) == 1)
        analyses, without = _analyses(command, series)
        with bar("auditing the series", hidden=hidden) as show:
            result = analyze_series(
                series,
                analyses,
                root=root,
                allow_suspect=options.allow_suspect,
                keep_downloads=options.keep_downloads,
                shard=shard,
                device=options.device,
                dtype=options.dtype,
                progress=show,
                without=without,
            )
        if not hidden:
            show_audit(result.audit)
        every = analyses.values() if isinstance(analyses, Mapping) else [analyses]
        failed |= _tell(result, root, [name for each in every for name in settings_of_all(each)])
    sys.stdout.flush()  # torchrun may end this process as soon as another one ends
    if options.shard == AUTO:
        wait_for_the_others(os.environ)
    return FAILED if failed else 0


def _analyses(command: Command, series: Series) -> "tuple[Analyses, dict[str, str]]":
    """What to measure a series with where nothing is said: analyses, corpus and tokenizer of its training, if known.

    So numbers that training measured are known, and new ones belong to its curves.
    Models without steps have a tokenizer each, and the same text is other tokens to each of them; second comes which of
    them have none that can be had, each with why.
    """
    checkpoints = series.listing.checkpoints
    if any(found.step is None for found in checkpoints):
        if not command.wants_own_tokenizer:
            _refuse_a_foreign_tokenizer(command.options.tokenizer, series)
        return _analyses_of_each(command, series)
    if not command.wants_own_tokenizer:
        return command.analyses(series.name, None), {}
    folder = _folder(series)
    trained = training_of(folder) if folder else {}
    own = trained.get("tokenizer") or checkpoints[-1].source.tokenizer()  # the same one whichever steps are chosen
    return command.analyses(series.name, own, trained), {}


def _analyses_of_each(command: Command, series: Series) -> "tuple[Analyses, dict[str, str]]":
    found: dict[str, list[Analysis]] = {}
    without: dict[str, str] = {}
    for checkpoint in series.listing.checkpoints:
        try:
            found[checkpoint.name] = command.analyses(checkpoint.name, series.tokenizer(checkpoint))
        except InputError as error:
            without[checkpoint.name] = str(error)
    if not found:
        raise InputError(next(iter(without.values())))
    return found, without


def _refuse_a_foreign_tokenizer(name: str | None, series: Series) -> None:
    from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash

    if name is None:
        return
    given = tokenizer_hash(load_tokenizer(name).tokenizer)
    for found in series.listing.checkpoints:
        try:
            own = series.tokenizer(found)
        except InputError:  # said of it when its turn comes
            continue
        if own is not None and tokenizer_hash(load_tokenizer(own).tokenizer) != given:
            raise InputError(
                f"tokenizer: {name} is not that of {found.name}, to which its tokens mean something else: leave it "
                "out, and each model is measured with its own"
            )


def _folder(series: Series) -> Path | None:
    """Where a series of this machine lies."""
    return getattr(series, "root", None)


def _root(asked: str | None, series: Series, *, alone: bool) -> Path:
    """A run's numbers stand in its own folder; of a manifest each repository has one."""
    name = re.sub(r"[^\w.-]+", "-", series.name)
    if asked:
        return Path(asked) if alone else Path(asked) / name
    return _folder(series) or Path("checkpoints") / name


def _tell(result: "SeriesResult", root: Path, settings: list[str]) -> bool:
    """Prints what came of a series; whether anything failed."""
    if result.left_out:
        names = ", ".join(found.name for found in result.left_out)
        print(f"left out as suspect: {names}; --allow-suspect measures them")
    errors = [measurement for measurement in result.measurements if measurement.error is not None]
    for measurement in errors:
        where = measurement.run if measurement.step is None else f"step {measurement.step}"
        print(f"failed: {measurement.analysis} at {where}: {measurement.error}", file=sys.stderr)
    for sentence in result.failures:
        print(f"failed: {sentence}", file=sys.stderr)
    print(f"{len(result.measurements) - len(errors)} measured, {result.num_known} were known, not measured again")
    tell_settings(root, settings)
    print(f"{root / 'measurements.jsonl'}; draw them with `lit-layers report {root}`")
    return bool(errors or result.failures)
