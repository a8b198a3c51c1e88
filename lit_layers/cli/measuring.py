"""Code shared by the commands that run analyses on a model or on each checkpoint of a series."""

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
from lit_layers.models.null import Null
from lit_layers.records import Measurement
from lit_layers.run_data import duration
from lit_layers.schema import run_facts
from lit_layers.series import Checkpoint, OneModel, Series, open_series

LIMITS = ("n_positions", "max_position_embeddings", "max_seq_len")  # config.json keys for the largest number of tokens


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a command that runs analyses on a model or a series.

    `root` is the folder of the results. `steps` are the steps that the command measured; None: all steps of the series.
    """

    root: Path
    result: SeriesResult
    steps: list[int | None] | None = None

    @functools.cached_property
    def measurements(self) -> list[Measurement]:
        """All measurements in the root folder, including those of earlier runs."""
        return records.read(self.root / "measurements.jsonl")

    @property
    def settings(self) -> list[str]:
        """Names of those settings (options and data) of this command's analyses that have a measurement."""
        there = {settings_of(each) for each in self.measurements}
        return [name for name in self.result.settings if name in there]

    def complete(self, prefix: str = "") -> tuple[list[Measurement], list[Measurement]]:
        """Return two lists of successful measurements: of all steps in measurements.jsonl, and of this command's steps.

        Only analyses whose name starts with `prefix` are included. If an analysis was measured with several settings
        (options and data), this command's settings are used. For an analysis that this command did not measure,
        `lit_layers.identity` chooses the settings. Only the last measurement of each analysis and step counts. If it
        failed, earlier ones are not used, because the weights may have changed in between.
        """
        complete = [each for each in shown(self.measurements, self.settings) if each.error is None and each.records]
        complete = [each for each in complete if each.analysis.startswith(prefix)]
        return complete, [each for each in complete if self.steps is None or each.step in self.steps]

    def report(self) -> bool:
        """Print the failures and the path of the measurements file; return whether anything failed."""
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
    """Options that select checkpoints and the folder of the results.

    Args:
        steps: which checkpoints of a series: all, a list such as 0,1,1000, {every: N}, {log_spaced: N} (N of them,
            evenly spaced on a log scale), or pythia (0, 1, 2, 4, ... 512, 1000, 2000, ...)
        revision: branch, tag or commit of the model on the Hub
        submodule: name of the submodule to measure in *.ckpt files (default: found from the tensor names)
        untrained: seed of random weights that replace the model's own; the results get a separate name
        plan: measure only the first checkpoint of a series, and estimate the time for all of them
    """

    steps: Steps | None = None
    revision: str | None = None
    submodule: str | None = None
    untrained: int | None = None
    plan: bool = False

    def is_series(self, model: str) -> bool:
        """Return whether `model` and the options name a series instead of a single model.

        Raises:
            InputError: an option does not apply to a single model, or to a series.
        """
        folder = Path(model)
        if folder.is_dir():
            refuse_odd_files(folder)
        is_steps = folder.is_dir() and not (folder / "config.json").is_file()
        # *.ckpt files are a series even next to a config.json, but not next to the weights of a model.
        if folder.is_dir() and any(folder.glob("*.ckpt")):
            is_steps |= not any(any(folder.glob(weights)) for weights in ("*.safetensors", "*.bin"))
        is_series = self.steps is not None or is_steps or model.endswith((".yaml", ".yml"))
        for name in ("revision", "untrained"):
            if is_series and getattr(self, name) is not None:
                raise InputError(f"{name}: is for one model, and {model} is a series: leave it out")
        if self.untrained is not None and self.offload is not None:
            raise InputError("untrained: new weights are in no file that --offload could read: leave it out")
        return is_series

    def open(self, model: str) -> list[Series]:
        """Return the single model, or every series, that `model` names.

        Raises:
            InputError: no model or series was found, or an option does not apply to it.
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
    during_training: bool = False,
    null: Null | None = None,
) -> int:
    """Run analyses on each model or series, and return the exit code.

    `make` returns the analyses of a `Target`. `report` prints one result and returns whether anything failed. Set
    `during_training` to print less, for repeated calls while a training run writes checkpoints.

    Raises:
        InputError: the model or series does not exist, or options do not apply to it.
    """
    if not during_training:
        process.set_threads(options.device)
    failed = False
    for series in all_series:
        root, number = root_of(series, options.root, is_only=len(all_series) == 1), len(series.checkpoints)
        if options.plan:
            vars(series)["checkpoints"] = series.checkpoints[:1]
        with bar("opening the model" if series.is_single else "auditing the series", hidden=during_training) as show:
            update = silent if options.engine == "ray" else functools.partial(show, None, None)
            analyses = analyses_for(series, make, tell=update, root=root, tokenizer=tokenizer)
            extra: Any = {"progress": show, "during_training": during_training}
            extra["null"] = None if options.plan else null
            result = analyze_series(series, analyses, options, root=root, **extra)
        if not during_training and not series.is_single:
            show_audit(result.audit)
        if result.left_out:
            names = ", ".join(suspect.name for suspect in result.left_out)
            print(f"left out as suspect: {names}; --allow_suspect measures them")
        is_one = series.is_single or options.plan
        outcome = Outcome(root=root, result=result, steps=[one.step for one in series.checkpoints] if is_one else None)
        failed |= report(outcome)
        if options.plan:
            _show_plan(outcome, number)
    return FAILED if failed else 0


def _show_plan(outcome: Outcome, number: int) -> None:
    """Print the estimated time of each analysis, and of all analyses together, for `number` checkpoints.

    The estimate for an analysis is `number` times its mean time per checkpoint.
    """
    measured = pd.DataFrame(outcome.complete()[0], columns=["analysis", "seconds"])
    times = number * measured.groupby("analysis", sort=False)["seconds"].mean()
    times[f"in all, {number} checkpoints"] = times.sum()
    print(times.map(duration).to_string(header=False))


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model, or all checkpoints of a series, that a set of analyses is made for.

    `trained` holds the options of the training that wrote the checkpoints, if known. `tokenizer` is the one that the
    user named. `tell` prints progress messages of an analysis.
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
        """The tokenizer that is saved with the checkpoints, or None."""
        return self.series.tokenizer(self.checkpoint)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json; empty if the file is damaged, which is reported when the model is loaded."""
        return self.checkpoint.config()

    @property
    def length_limit(self) -> int | None:
        """The largest number of tokens that the model accepts, or None if unknown."""
        return length_limit(self.config)

    @property
    def is_vision(self) -> bool:
        """Whether the model takes only images, judged from the config.json of transformers or timm."""
        return "vocab_size" not in self.config and ("image_size" in self.config or "architecture" in self.config)

    def get_tokenizer(self) -> str:
        """Return the tokenizer to use: the one that the user named, else the saved one, else that of the training.

        Raises:
            InputError: there is no tokenizer.
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
    """Return the analyses for all checkpoints of a series, or a function that makes the analyses of one checkpoint.

    The checkpoints of one training share a tokenizer, so they share their analyses. In a comparison of models, each
    model may have its own tokenizer, and the same text then gives different tokens. The analyses are therefore made
    for each model.

    Raises:
        InputError: a tokenizer was named although each model has its own.
    """
    folder = _folder_of(series)
    trained = run_facts(folder).get("config", {}) if folder else {}

    def target(checkpoint: Checkpoint, name: str) -> Target:
        known: Any = {"trained": trained, "tokenizer": tokenizer, "tell": tell}
        return Target(name=name, root=root, series=series, checkpoint=checkpoint, **known)

    # Take the last checkpoint of the whole series, so that the analyses do not depend on which steps are measured.
    last = series.listing.checkpoints[-1]
    if series.is_single or last.step is not None:
        return make(target(last, series.name))
    if tokenizer is not None and any(map(series.tokenizer, series.listing.checkpoints)):
        raise InputError("tokenizer: each of these models reads with its own: leave it out")
    return lambda checkpoint: make(target(checkpoint, checkpoint.name))


def _folder_of(series: Series) -> Path | None:
    """Return the folder of the training that wrote the checkpoints, or None if it is not on this machine."""
    if series.is_single:
        path = Path(series.name).resolve()
        return path.parent if path.is_dir() else None
    return getattr(series, "root", None)


def root_of(series: Series, root: Path | None, *, is_only: bool) -> Path:
    """Return the folder for the results of a series.

    It is `root` if the user named one, with a subfolder for each series if there are several. Otherwise, it is the
    folder of the training that wrote the series, or, if there is none, a folder below `checkpoints/`.
    """
    if series.is_single:
        seed = "" if series.untrained is None else f"-untrained-{series.untrained}"
        return root or Path("checkpoints") / f"{name_of(series.name)}{seed}"
    name = re.sub(r"[^\w.-]+", "-", series.name)
    if root:
        return root if is_only else root / name
    return _folder_of(series) or Path("checkpoints") / name


def name_of(model: str) -> str:
    """Return the model's folder or repository name; for a folder `step-*` the name of its run is prepended."""
    path = Path(model).resolve()
    return f"{path.parent.name}-{path.name}" if path.name.startswith("step-") else path.name


def length_limit(config: Mapping[str, Any]) -> int | None:
    """Return the largest number of tokens that a model accepts, or None if unknown.

    RoBERTa-like models number their positions from `pad_token_id + 1`, so they accept fewer tokens than config.json
    says.
    """
    named = [config[name] for name in LIMITS if isinstance(config.get(name), int)]
    limit = min((each for each in named if each > 0), default=None)  # ignore values <= 0, which are refused later
    is_roberta = config.get("model_type") in ("roberta", "xlm-roberta", "camembert")
    return limit - config.get("pad_token_id", 1) - 1 if limit is not None and is_roberta else limit
