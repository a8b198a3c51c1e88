"""`lit-layers analyze`: measure a trained model, whole or block by block, or a series of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from lit_layers.analyses import metric_names
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.minimal_pairs import MinimalPairs
from lit_layers.cli.measuring import Checkpoints, Outcome, Target, measure
from lit_layers.cli.options import Recipe
from lit_layers.data import EvalText
from lit_layers.errors import InputError
from lit_layers.measuring.offline import follow as follow_folder
from lit_layers.models.null import Null
from lit_layers.schema import COUNT_OR_NONE
from lit_layers.series import Series

CORPUS = "python"
DEFAULT = ("trajectory", "representation", "coupling")
OWN_TOKENIZER = "<the model's own tokenizer>"
OWN_CORPUS = f"<what the run was trained on, else {CORPUS}>"


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    """Options that select what is measured.

    Args:
        corpus: the text to measure on; recipes refer to it as ${corpus}
        tokenizer: the tokenizer for this text; recipes refer to it as ${tokenizer}. In a comparison of models, each
            model uses its own tokenizer
        metrics: what to measure: comma-separated names of analyses or metrics (docs/metrics.md), such as
            coupling,lens,prompt_entropy; not together with --analyses
        analyses: what to measure, as a list of classes with options (default: the analyses of the training run,
            otherwise Trajectory, Representation and Coupling)
        null: also measure a null, which is a baseline for the curves. blocks: the last checkpoint with new random
            weights in its blocks. all: with only new weights. labels: its probes with permuted labels. Figures draw the
            null as a grey line
    """

    corpus: str = OWN_CORPUS
    tokenizer: str | None = OWN_TOKENIZER
    metrics: str | None = None
    analyses: list[Analysis] = field(default_factory=list)
    null: Null | None = None


def analyze(
    recipe: Recipe,
    checkpoints: Checkpoints,
    chosen: AnalysisOptions,
    model: str | None = None,
    *,
    series: Series | None = None,
    follow: bool = False,
    patience: Annotated[int | None, COUNT_OR_NONE] = None,
) -> int:
    """Measure every layer of a model, or of each checkpoint of a series.

    Run the command again to continue after an interruption. Exit code: 0; 1 if anything failed; 2 for wrong input; 130
    after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub; for a series: a folder of steps, a name on
            the Hub together with --steps, or a manifest of published series (*.yaml)
        series: use this instead of a model: a class that defines a series, with its own options
        follow: measure the checkpoints in a folder, and each new one that a training run writes there. If the training
            is a `fit` run without analyses, the command ends when that run ends; otherwise end it with Ctrl-C or
            --patience
        patience: with --follow, end after this many seconds without a new checkpoint
    """
    command = Command(recipe)
    tokenizer = None if chosen.tokenizer == OWN_TOKENIZER else chosen.tokenizer
    if follow or patience is not None:
        if chosen.null is not None:
            raise InputError("null: is measured on the last checkpoint: leave it out of --follow, and measure it later")
        return _follow(command, checkpoints, tokenizer, patience)
    about: Any = {"tokenizer": tokenizer, "null": chosen.null}
    return measure(command.series(checkpoints), checkpoints, command.analyses, _report, **about)


def _follow(command: "Command", options: Checkpoints, tokenizer: str | None, patience: int | None) -> int:
    """Measure the checkpoints of a folder, and measure again whenever a new checkpoint appears."""
    folder, codes = Path(str(command.options.model)), [0]
    if not folder.is_dir() or options.steps is not None or options.plan:
        raise InputError(f"follow: expected a folder, without --steps and --plan, got {folder}")

    def update(steps: list[int]) -> None:
        everything = command.series(replace(options, steps=steps))
        about: Any = {"tokenizer": tokenizer, "during_training": True}
        codes.append(measure(everything, options, command.analyses, _report, **about))

    follow_folder(folder, update, patience)
    return codes[-1]


class Command:
    """The analyses and series that a command line and its recipes ask for.

    The value of `${tokenizer}` is only known once the model is known. The analyses are therefore created later, by
    `analyses`.

    Raises:
        InputError: options are unknown or contradict each other.
    """

    def __init__(self, recipe: Recipe | list[str]) -> None:
        self._recipe = recipe if isinstance(recipe, Recipe) else Recipe(analyze, recipe)
        self.options = options = self._recipe.options
        if options.metrics is not None and options.analyses:
            raise InputError("metrics and analyses: expected one of them, got both: leave one out")
        self._names = None if options.metrics is None else [*metric_names.find_analyses(options.metrics.split(","))]
        self._is_own = options.tokenizer == OWN_TOKENIZER

    def series(self, checkpoints: Checkpoints) -> list[Series]:
        """Return the model, or each series, that the options name.

        Raises:
            InputError: the options name both a model and a series or neither, or an option does not apply.
        """
        options = self.options
        if (options.model is None) == (options.series is None):
            raise InputError("model: expected a model, a series of its checkpoints or --series, and not two of them")
        if options.model is not None:
            return checkpoints.open(options.model)
        for name in ("steps", "submodule", "revision", "untrained"):
            if getattr(checkpoints, name) is not None:
                raise InputError(f"{name}: the class of --series has options of its own, --series.steps: leave it out")
        return [self._recipe.instantiate("series", options)]

    def analyses(self, target: Target) -> list[Analysis]:
        """Return the analyses for a target, by default with the target's own tokenizer and corpus.

        If the options name no analyses, corpus or tokenizer, the analyses of the training run are used. Values that the
        training has measured are then not measured again, and new values extend its curves. If the training had no
        analyses either, the default is a few analyses on texts that fit the model's context length.

        Raises:
            InputError: a tokenizer is needed and the target has none, or no analyses are named for an image model.
        """
        options, trained, names = self.options, target.trained, self._names
        is_open = self._is_own and options.corpus == OWN_CORPUS and not options.analyses and not names
        if is_open and trained.get("analyses"):
            return self._training_analyses(target.name, trained["analyses"])
        if not options.analyses and target.is_vision:
            raise InputError(
                f"analyses: {target.name} is a model of images: name what to measure, e.g. --config analyses/images"
            )
        defaults = {"corpus": trained.get("corpus") or CORPUS}
        if self._is_own:
            named = None if target.series.is_single else trained.get("tokenizer")
            named = named or target.saved_tokenizer
            if named is None and (not options.analyses or OWN_TOKENIZER in str(options.analyses)):
                raise InputError(f"tokenizer: {target.name} carries none; name one with --tokenizer")
            defaults["tokenizer"] = named
        options = self._recipe.read(**defaults)
        if made := self._recipe.instantiate("analyses", options):
            return made
        return _default_analyses(names or DEFAULT, options.corpus, options.tokenizer, target.length_limit)

    def _training_analyses(self, owner: str, analyses: Any) -> list[Analysis]:
        """Return the analyses of a training run, as its run.json lists them.

        The analyses pass through the same parser as a recipe, because run.json may come from an untrusted run.
        """
        try:
            given = self._recipe.parser.parse_object({"analyses": analyses}, self.options)
            return self._recipe.instantiate("analyses", given)
        except InputError as error:
            raise InputError(f"the analyses of {owner}, as its run.json has them: {error}; name others") from error


def _default_analyses(names: Sequence[str], corpus: str, tokenizer: str, limit: int | None) -> list[Analysis]:
    """Return the named analyses, on texts no longer than the model's context."""
    text = EvalText(corpus, tokenizer, num_sequences=16, num_tokens=min(128, limit or 128))
    few = EvalText(corpus, tokenizer, num_sequences=8, num_tokens=min(64, limit or 64))
    return metric_names.make_analyses(names, text, few, lambda: MinimalPairs(tokenizer=tokenizer, corpus=corpus))


def _report(outcome: Outcome) -> bool:
    """Print how many measurements were made and where they are; return whether anything failed."""
    result = outcome.result
    measurements = [measurement for measurement in result.measurements if measurement.error is None]
    print(f"{len(measurements)} measured, {result.num_known} were known, not measured again")
    failed = outcome.report()
    print(f"draw them with `lit-layers report {outcome.root}`")
    return failed
