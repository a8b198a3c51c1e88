"""What commands measure: a model, or all checkpoints of a series, and the analyses that are made for them."""

import copy
import functools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_layers.analyses.base import Analysis
from lit_layers.data import EvalText
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.files.gguf_files import is_gguf
from lit_layers.measuring.measuring_options import MeasuringOptions
from lit_layers.measuring.offline import Analyses, SeriesResult, analyze_series
from lit_layers.measuring.plan import Plan, sampled
from lit_layers.records import Measurement
from lit_layers.series import Checkpoint, Series
from lit_layers.series.local_series import training_of
from lit_layers.series.weight_files import Memory

LIMITS = ("n_positions", "max_position_embeddings", "max_seq_len")  # how config.json names the longest text


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
    def carried(self) -> str | None:
        """The tokenizer that the checkpoints carry.

        Raises:
            InputError: it cannot be had.
        """
        return self.series.tokenizer(self.checkpoint)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """What config.json says; nothing where it is damaged, which is told when the model is loaded."""
        return self.checkpoint.config()

    @property
    def length_limit(self) -> int | None:
        """How many tokens its models take."""
        return length_limit(self.config)

    @property
    def sees_images(self) -> bool:
        """Whether its models take images alone, by the config.json of transformers or of timm."""
        return "vocab_size" not in self.config and ("image_size" in self.config or "architecture" in self.config)

    def own_tokenizer(self) -> str:
        """Its tokenizer: the one that was named, or that it carries.

        Raises:
            InputError: neither.
        """
        named = self.trained.get("tokenizer")
        tokenizer = self.tokenizer or self.carried or (named if named and ":" not in named else None)
        if tokenizer is None:
            raise InputError(f"tokenizer: {self.name} carries none; name one with --tokenizer")
        return tokenizer


Make = Callable[[Target], Sequence[Analysis]]


@dataclass(frozen=True, kw_only=True)
class Targets:
    """A model, or each checkpoint of a series, the function that makes their analyses, and where the results go.

    Models without steps have a tokenizer each, and the same text is other tokens to each of them: analyses are made for
    each of these, and for all steps of one training together.
    """

    series: Series
    make: Make
    root: Path
    tokenizer: str | None
    options: MeasuringOptions

    def measure(
        self, progress: Callable[[int | None, int | None, str], None], *, beside_training: bool = False
    ) -> SeriesResult:
        """Makes the analyses and measures them: `analyze_series`, which raises what this does.

        Raises:
            InputError: a tokenizer that is not the models' own, texts longer than a model reads.
        """
        is_carried = self.options.engine != "process"  # what an analysis says is then heard by nobody
        analyses = self._analyses(_unheard if is_carried else lambda what: progress(None, None, what))
        how: Any = {"root": self.root, "beside_training": beside_training, "progress": progress}
        return analyze_series(self.series, analyses, self.options, **how)

    def plan(self) -> tuple[Plan, int]:
        """Measure the first checkpoint on a share of the data, and return the plan with the number of checkpoints.

        Raises:
            InputError: what measuring raises.
        """
        with tempfile.TemporaryDirectory() as folder:
            series = copy.copy(self.series)
            series.memory = series.memory and Memory(Path(folder))
            vars(series).pop("listing", None)
            number, vars(series)["checkpoints"] = len(series.checkpoints), series.checkpoints[:1]
            options = replace(self.options, engine="process", shard="0/1", keep_downloads=True)

            def measure(analyses: Sequence[Analysis]) -> Sequence[Measurement]:
                root = Path(tempfile.mkdtemp(dir=folder)) / self.root.name
                result = analyze_series(series, analyses, options, root=root)
                if result.failures:
                    raise InputError(result.failures[0])
                return result.measurements

            analyses = replace(self, root=Path(folder) / self.root.name, series=series)._analyses(_unheard)
            return sampled(analyses(series.checkpoints[0]) if callable(analyses) else analyses, measure), number

    def _analyses(self, tell: Callable[[str], None]) -> Analyses:
        """For all checkpoints, or a function that makes those of one."""
        folder = _folder_of(self.series)
        trained = training_of(folder) if folder else {}

        def target(checkpoint: Checkpoint, name: str) -> Target:
            about: Any = {"root": self.root, "series": self.series, "trained": trained, "tokenizer": self.tokenizer}
            return Target(name=name, checkpoint=checkpoint, tell=tell, **about)

        last = self.series.listing.checkpoints[-1]
        if self.series.is_alone or last.step is not None:  # the same one whichever steps are chosen
            whole = target(last, self.series.name)
            return _fitting(self.make(whole), whole)
        _refuse_a_foreign_tokenizer(self.tokenizer, self.series)
        return lambda checkpoint: self.make(target(checkpoint, checkpoint.name))


def _unheard(what: str) -> None:
    pass


def _fitting(analyses: Sequence[Analysis], target: Target) -> Sequence[Analysis]:
    """Refuses texts that are longer than what the model reads, before it is opened or downloaded."""
    for analysis in analyses:
        for text in (value for value in vars(analysis).values() if isinstance(value, EvalText)):
            limit = target.length_limit
            if limit is not None and text.num_tokens > limit:
                raise InputError(
                    f"{analysis.name}: num_tokens: {target.name} reads at most {limit} tokens, got {text.num_tokens}: "
                    f"ask for {limit} or fewer"
                )
    return analyses


def _refuse_a_foreign_tokenizer(name: str | None, series: Series) -> None:
    if name is None:
        return
    expected = tokenizer_hash(load_tokenizer(name).tokenizer)
    for checkpoint in series.listing.checkpoints:
        try:
            carried = series.tokenizer(checkpoint)
        except InputError:  # said of it when its turn comes
            continue
        if carried is not None and tokenizer_hash(load_tokenizer(carried).tokenizer) != expected:
            raise InputError(
                f"tokenizer: {name} is not that of {checkpoint.name}, to which its tokens mean something else: leave "
                "it out, and each model is measured with its own"
            )


def _folder_of(series: Series) -> Path | None:
    """Where the training that the checkpoints come from lies, if on this machine."""
    if series.is_alone:
        place = Path(series.name).resolve()
        return place.parent if place.is_dir() else None
    return getattr(series, "root", None)


def targets_of(
    everything: Sequence[Series], make: Make, options: MeasuringOptions, *, tokenizer: str | None
) -> list[Targets]:
    """One for each series, each with its root: the one that was named, of several each below it, or a run's own."""
    root = options.root

    def place(series: Series) -> Path:
        if series.is_alone:
            seed = "" if series.untrained is None else f"-untrained-{series.untrained}"
            return root or Path("checkpoints") / f"{name_of(series.name)}{seed}"
        name = re.sub(r"[^\w.-]+", "-", series.name)
        if root:
            return root if len(everything) == 1 else root / name
        return _folder_of(series) or Path("checkpoints") / name

    about: Any = {"make": make, "tokenizer": tokenizer, "options": options}
    return [Targets(series=series, root=place(series), **about) for series in everything]


def name_of(model: str) -> str:
    """The name of the folder, the file or the repository; step-000001000 alone would not say of which run."""
    path = Path(model).resolve()
    if is_gguf(path):
        return path.stem
    return f"{path.parent.name}-{path.name}" if path.name.startswith("step-") else path.name


def length_limit(config: Mapping[str, Any]) -> int | None:
    """How many tokens a model takes; RoBERTa's positions begin behind the number of the padding token."""
    named = [config[name] for name in LIMITS if isinstance(config.get(name), int)]
    limit = min((each for each in named if each > 0), default=None)  # others are refused when the model is made
    behind = config.get("model_type") in ("roberta", "xlm-roberta", "camembert")
    return limit - config.get("pad_token_id", 1) - 1 if limit is not None and behind else limit
