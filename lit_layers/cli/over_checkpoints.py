"""One model, or each checkpoint of a series, under analyses made for it: what commands that score have in common."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.cli.bar import bar
from lit_layers.errors import InputError
from lit_layers.identity import divided, settings_name, settings_of, short, shown

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.records import Measurement
    from lit_layers.series import Series

LIMITS = ("n_positions", "max_position_embeddings", "max_seq_len")  # how config.json names the longest text


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the analyses are made for: a model, or all checkpoints of a series."""

    name: str
    root: Path
    tokenizer: str | None
    config: Mapping[str, Any]  # of config.json
    tell: Callable[[str], None]  # shows what an analysis says of itself

    def own_tokenizer(self) -> str:
        """Its tokenizer.

        Raises:
            InputError: it carries none, and none was named.
        """
        if self.tokenizer is None:
            raise InputError(f"tokenizer: {self.name} carries none; name one with --tokenizer")
        return self.tokenizer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it: folder and settings of the measurements, the steps of one model (None: all), and what failed."""

    root: Path
    errors: list[str]
    settings: list[str]
    steps: "list[int | None] | None" = None


def add_options(add: Callable[..., Any], *, root: str) -> None:
    """Adds what such a command asks for: the model, its revision or steps, where results go, the device."""
    add("model", metavar="MODEL|SERIES", help="a folder with config.json and weights, or a name on the Hub; of a "
        "series a folder of steps, a name on the Hub with --steps, or a manifest")  # fmt: skip
    add("--tokenizer", help="default: the model's own")
    add("--revision", help="branch, tag or commit of the Hub")
    add("--steps", help="of a series: all, a list, {log_spaced: N}, pythia, {every: N}")
    add("--allow_suspect", action="store_true", help="checkpoints, too, that the audit of a series found suspect")
    add("--root", type=Path, help=root)
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    add("--dtype", choices=["float32", "float64"], default="float32", help="what weights are converted to")


def settle(options: argparse.Namespace) -> None:
    """Adds `is_series` to options, and refuses those that are for the other.

    Raises:
        InputError: one of them.
    """
    folder = Path(options.model)
    is_steps = folder.is_dir() and not (folder / "config.json").is_file()
    options.is_series = options.steps is not None or is_steps or options.model.endswith((".yaml", ".yml"))
    if options.is_series and options.revision is not None:
        raise InputError(f"revision: {options.revision} is one model: leave it out, or leave --steps out")
    if not options.is_series and options.allow_suspect:
        raise InputError("allow_suspect: is for series, and one model was named: leave it out")


def measured(options: argparse.Namespace, make: "Callable[[Target], list[Analysis]]") -> Iterator[Outcome]:
    """Yields what came of the model, or of each series that is meant, once it is measured.

    Raises:
        InputError: a model or series that is not there, options that do not fit it.
    """
    return _of_series(options, make) if options.is_series else _of_one(options, make)


def length_limit(config: Mapping[str, Any]) -> int | None:
    """How many tokens a model takes; RoBERTa's positions begin behind the number of the padding token."""
    found = min((config[name] for name in LIMITS if isinstance(config.get(name), int)), default=None)
    behind = config.get("model_type") in ("roberta", "xlm-roberta", "camembert")
    return found - config.get("pad_token_id", 1) - 1 if found is not None and behind else found


def _of_one(options: argparse.Namespace, make: "Callable[[Target], list[Analysis]]") -> Iterator[Outcome]:
    from lit_layers.models.shard_files import ShardFiles
    from lit_layers.offline import analyze, own_tokenizer

    root = options.root or Path("checkpoints") / name_of(options.model)
    tokenizer = options.tokenizer or own_tokenizer(options.model, options.revision)
    config = ShardFiles(options.model, revision=options.revision).config
    with bar("opening the model") as show:
        told = _Told(show)
        analyses = make(Target(name=options.model, root=root, tokenizer=tokenizer, config=config, tell=told.detail))
        found = analyze(
            options.model,
            analyses,
            root=root,
            revision=options.revision,
            device=options.device,
            dtype=options.dtype,
            progress=told,
        )
    errors = [f"{each.analysis}: {each.error}" for each in found if each.error is not None]
    yield Outcome(root=root, errors=errors, settings=settings_of_all(analyses), steps=[each.step for each in found])


def _of_series(options: argparse.Namespace, make: "Callable[[Target], list[Analysis]]") -> Iterator[Outcome]:
    from lit_layers.cli.audit import show_audit
    from lit_layers.offline_series import analyze_series
    from lit_layers.series import open_series, read_steps

    everything = open_series(options.model, "all" if options.steps is None else read_steps(options.steps))
    for series in everything:
        root = _root_of(options.root, series, alone=len(everything) == 1)
        tokenizer = options.tokenizer or _tokenizer_of(series)
        config = json.loads(series.listing.checkpoints[-1].source.read("config.json"))
        with bar("auditing the series") as show:
            told = _Told(show)
            analyses = make(Target(name=series.name, root=root, tokenizer=tokenizer, config=config, tell=told.detail))
            result = analyze_series(
                series,
                analyses,
                root=root,
                allow_suspect=options.allow_suspect,
                device=options.device,
                dtype=options.dtype,
                progress=told,
            )
        show_audit(result.audit)
        if result.left_out:
            names = ", ".join(found.name for found in result.left_out)
            print(f"left out as suspect: {names}; --allow_suspect takes them, too")
        errors = [f"{m.analysis} at step {m.step}: {m.error}" for m in result.measurements if m.error is not None]
        yield Outcome(root=root, errors=[*errors, *result.failures], settings=settings_of_all(analyses))


def measurements_of(outcome: Outcome) -> "list[Measurement]":
    """The measurements of the root: of the analyses that this call measured those of its settings, of others the usual.

    The last of each counts, also one that failed: an older one may be of other weights.
    """
    from lit_layers import records

    return shown(records.read(outcome.root / "measurements.jsonl"), settings_there(outcome))


def settings_there(outcome: Outcome) -> list[str]:
    """The settings of this call of which something is there: an analysis may fail before they are known."""
    from lit_layers import records

    there = {settings_of(each) for each in records.read(outcome.root / "measurements.jsonl")}
    return [name for name in outcome.settings if name in there]


def settings_of_all(analyses: "Sequence[Analysis]") -> list[str]:
    """The settings of each analysis whose data can be had: the others measured nothing."""
    settings = []
    for each in analyses:
        with suppress(InputError):
            settings.append(settings_name(each.config_hash(), each.data_hash()))
    return settings


def tell_settings(root: Path, settings: list[str]) -> None:
    """Prints which analyses were measured with other settings than those that the curves of the root show."""
    from lit_layers import records

    _, others = divided(records.read(root / "measurements.jsonl"))
    mine = {(each.analysis, settings_of(each)) for each in others if settings_of(each) in settings}
    for analysis, name in sorted(mine):
        print(
            f"{analysis}: other settings than those of its curves, which stay as they were; "
            f"`lit-layers report {root} --settings {short(name)}` draws these"
        )


class _Told:
    """What is done and what comes next, with what the analysis that is under way says of itself."""

    def __init__(self, show: Callable[[int, int, str], None]) -> None:
        self._show, self._done, self._total = show, 0, 1

    def __call__(self, done: int, total: int, what: str) -> None:
        self._done, self._total = done, total
        self._show(done, total, what)

    def detail(self, what: str) -> None:
        self._show(self._done, self._total, what)


def _tokenizer_of(series: "Series") -> str | None:
    """The one that a run was trained with, or that of its checkpoints."""
    from lit_layers.series.local import training_of

    folder: Path | None = getattr(series, "root", None)
    named = training_of(folder).get("tokenizer") if folder else None
    return series.listing.checkpoints[-1].source.tokenizer() or (named if named and ":" not in named else None)


def _root_of(asked: Path | None, series: "Series", *, alone: bool) -> Path:
    name = re.sub(r"[^\w.-]+", "-", series.name)
    if asked:
        return asked if alone else asked / name
    return getattr(series, "root", None) or Path("checkpoints") / name


def name_of(model: str) -> str:
    """The folder's name or the repository's; step-000001000 alone would not say of which run."""
    path = Path(model).resolve()
    return f"{path.parent.name}-{path.name}" if path.name.startswith("step-") else path.name
