"""Analyses on a model, or on each checkpoint of a series: what the commands that measure have in common."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.cli import FAILED, process
from lit_layers.cli.options import Steps
from lit_layers.cli.process import bar, note, show_audit
from lit_layers.errors import InputError, refuse_odd_files
from lit_layers.identity import settings_of, shown
from lit_layers.measuring import MeasuringOptions
from lit_layers.measuring.offline import Analyses, SeriesResult, analyze_series, silent
from lit_layers.records import Measurement
from lit_layers.run_data import duration
from lit_layers.schema import run_facts
from lit_layers.series import Checkpoint, OneModel, Series, open_series

LIMITS = ("n_positions", "max_position_embeddings", "max_seq_len")  # how config.json names the longest text


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured: folder and result, and the steps of one model (None: of a series all)."""

    root: Path
    result: SeriesResult
    steps: list[int | None] | None = None

    @functools.cached_property
    def measurements(self) -> list[Measurement]:
        """Return all that the root holds."""
        return records.read(self.root / "measurements.jsonl")

    @property
    def settings(self) -> list[str]:
        """The settings of this call of which something is there: an analysis may fail before they are known."""
        there = {settings_of(each) for each in self.measurements}
        return [name for name in self.result.settings if name in there]

    def complete(self, prefix: str = "") -> tuple[list[Measurement], list[Measurement]]:
        """Return the measurements with numbers whose analysis begins so: all, and those of the steps of this call.

        Of the analyses that this call measured they are those of its settings, of others the usual. The last of each
        counts, also one that failed: an older one may be of other weights.
        """
        complete = [each for each in shown(self.measurements, self.settings) if each.error is None and each.records]
        complete = [each for each in complete if each.analysis.startswith(prefix)]
        return complete, [each for each in complete if self.steps is None or each.step in self.steps]

    def report(self) -> bool:
        """Print what failed, and the file of all measurements; return whether anything failed."""
        failures = list[str]()
        for each in self.result.measurements:
            if each.error is not None:
                at = "" if self.steps is not None else f" at {each.run if each.step is None else f'step {each.step}'}"
                failures.append(f"{each.analysis}{at}: {each.error}")
        failures += self.result.failures
        for failure in failures:
            note(f"failed: {failure}")
        print(self.root / "measurements.jsonl")
        return bool(failures)


@dataclass(frozen=True, kw_only=True)
class Checkpoints(MeasuringOptions):
    """Which checkpoints are measured, how, and where the results go.

    Args:
        steps: which checkpoints of a series: all, a list such as 0,1,1000, {log_spaced: N}, pythia, {every: N}
        revision: a branch, tag or commit of the Hub
        submodule: in a folder of *.ckpt files: which submodule is the network (default: found by its tensors)
        untrained: a seed: measure the model with new random weights in path of its own, as a model of its own
        plan: measure only the first checkpoint of a series, and say how long all of them would take
    """

    steps: Steps | None = None
    revision: str | None = None
    submodule: str | None = None
    untrained: int | None = None
    plan: bool = False

    def is_series(self, model: str) -> bool:
        """Whether a series is meant, not one model.

        Raises:
            InputError: an option that is for the other of them.
        """
        folder = Path(model)
        if folder.is_dir():
            refuse_odd_files(folder)
        is_steps = folder.is_dir() and not (folder / "config.json").is_file()
        if folder.is_dir() and any(folder.glob("*.ckpt")):  # whose config.json may lie beside them
            is_steps |= not any(any(folder.glob(weights)) for weights in ("*.safetensors", "*.bin"))
        is_series = self.steps is not None or is_steps or model.endswith((".yaml", ".yml"))
        for name in ("revision", "untrained"):
            if is_series and getattr(self, name) is not None:
                raise InputError(f"{name}: is for one model, and {model} is a series: leave it out")
        if self.untrained is not None and self.offload is not None:
            raise InputError("untrained: new weights are in no file that --offload could read: leave it out")
        return is_series

    def open(self, model: str) -> list[Series]:
        """The model, or each series that is meant.

        Raises:
            InputError: there is none, or an option does not fit it.
        """
        if not self.is_series(model):
            return [OneModel(model, revision=self.revision, untrained=self.untrained)]
        return open_series(model, "all" if self.steps is None else self.steps, model=self.submodule)


def measure(
    all_series: Sequence[Series],
    options: Checkpoints,
    make: "Make",
    report: Callable[[Outcome], bool],
    *,
    tokenizer: str | None = None,
    beside_training: bool = False,
) -> int:
    """Measure the model, or each series that is meant, have `tell` print each result, and return the exit code.

    `tell` returns whether anything failed. While a training goes on, it is called again and again.

    Raises:
        InputError: a model or series that is not there, options that do not fit it.
    """
    if not beside_training:
        process.set_threads(options.device)
    failed = False
    for series in all_series:
        root, number = root_of(series, options.root, is_only=len(all_series) == 1), len(series.checkpoints)
        if options.plan:
            vars(series)["checkpoints"] = series.checkpoints[:1]
        with bar("opening the model" if series.is_alone else "auditing the series", hidden=beside_training) as show:
            update = silent if options.engine == "ray" else functools.partial(show, None, None)
            analyses = analyses_for(series, make, tell=update, root=root, tokenizer=tokenizer)
            extra: Any = {"progress": show, "beside_training": beside_training}
            result = analyze_series(series, analyses, options, root=root, **extra)
        if not beside_training and not series.is_alone:
            show_audit(result.audit)
        if result.left_out:
            names = ", ".join(suspect.name for suspect in result.left_out)
            print(f"left out as suspect: {names}; --allow_suspect measures them")
        is_one = series.is_alone or options.plan
        outcome = Outcome(root=root, result=result, steps=[one.step for one in series.checkpoints] if is_one else None)
        failed |= report(outcome)
        if options.plan:
            _show_plan(outcome, number)
    return FAILED if failed else 0


def _show_plan(outcome: Outcome, number: int) -> None:
    """Print how long all checkpoints would take, by the mean of those that are measured."""
    measured = pd.DataFrame(outcome.complete()[0], columns=["analysis", "seconds"])
    times = number * measured.groupby("analysis", sort=False)["seconds"].mean()
    times[f"in all, {number} checkpoints"] = times.sum()
    print(times.map(duration).to_string(header=False))


@dataclass(frozen=True, kw_only=True)
class Target:
    """What analyses are made for: a model, or all checkpoints of a series.

    `trained` are the options of the training that the checkpoints come from, as far as they are known; `tokenizer` is
    the one that was named; `tell` shows what an analysis says of itself.
    """

    name: str
    root: Path
    series: Series
    checkpoint: Checkpoint
    trained: Mapping[str, Any]
    tokenizer: str | None
    tell: Callable[[str], None]

    @functools.cached_property
    def saved_tokenizer(self) -> str | None:
        """The tokenizer that the checkpoints carry."""
        return self.series.tokenizer(self.checkpoint)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, empty if it is damaged, which loading the model reports."""
        return self.checkpoint.config()

    @property
    def length_limit(self) -> int | None:
        """Return how many tokens its models take."""
        return length_limit(self.config)

    @property
    def is_vision(self) -> bool:
        """Return whether its models take only images, by the config.json of transformers or of timm."""
        return "vocab_size" not in self.config and ("image_size" in self.config or "architecture" in self.config)

    def get_tokenizer(self) -> str:
        """Return its tokenizer: the one that was named, or the one that it carries.

        Raises:
            InputError: neither.
        """
        named = self.trained.get("tokenizer")
        tokenizer = self.tokenizer or self.saved_tokenizer or (named if named and ":" not in named else None)
        if tokenizer is None:
            raise InputError(f"tokenizer: {self.name} carries none; name one with --tokenizer")
        return tokenizer


Make = Callable[[Target], Sequence[Analysis]]


def analyses_for(
    series: Series, make: Make, *, root: Path, tokenizer: str | None, tell: Callable[[str], None] = silent
) -> Analyses:
    """Make the analyses of all checkpoints of a series, or a function that makes those of one.

    Models without steps have a tokenizer each, and the same text is other tokens to each of them: analyses are made for
    each of these, and for all steps of one training together.

    Raises:
        InputError: a tokenizer of models that have one each.
    """
    folder = _folder_of(series)
    trained = run_facts(folder).get("config", {}) if folder else {}

    def target(checkpoint: Checkpoint, name: str) -> Target:
        known: Any = {"trained": trained, "tokenizer": tokenizer, "tell": tell}
        return Target(name=name, root=root, series=series, checkpoint=checkpoint, **known)

    last = series.listing.checkpoints[-1]
    if series.is_alone or last.step is not None:  # the same one whichever steps are chosen
        return make(target(last, series.name))
    if tokenizer is not None and any(map(series.tokenizer, series.listing.checkpoints)):
        raise InputError("tokenizer: each of these models reads with its own: leave it out")
    return lambda checkpoint: make(target(checkpoint, checkpoint.name))


def _folder_of(series: Series) -> Path | None:
    """Return the folder of the training that the checkpoints come from, if it is on this machine."""
    if series.is_alone:
        path = Path(series.name).resolve()
        return path.parent if path.is_dir() else None
    return getattr(series, "root", None)


def root_of(series: Series, root: Path | None, *, is_only: bool) -> Path:
    """Return the folder of a series' results: the one that was named, of several each below it, or a run's own."""
    if series.is_alone:
        seed = "" if series.untrained is None else f"-untrained-{series.untrained}"
        return root or Path("checkpoints") / f"{name_of(series.name)}{seed}"
    name = re.sub(r"[^\w.-]+", "-", series.name)
    if root:
        return root if is_only else root / name
    return _folder_of(series) or Path("checkpoints") / name


def name_of(model: str) -> str:
    """Return the name of the folder or the repository; step-000001000 alone would not name the run."""
    path = Path(model).resolve()
    return f"{path.parent.name}-{path.name}" if path.name.startswith("step-") else path.name


def length_limit(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model takes. RoBERTa's positions begin behind the index of the padding token."""
    named = [config[name] for name in LIMITS if isinstance(config.get(name), int)]
    limit = min((each for each in named if each > 0), default=None)  # others are refused when the model is made
    is_roberta = config.get("model_type") in ("roberta", "xlm-roberta", "camembert")
    return limit - config.get("pad_token_id", 1) - 1 if limit is not None and is_roberta else limit
