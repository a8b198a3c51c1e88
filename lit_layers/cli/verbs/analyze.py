"""`lit-layers analyze`: measure a trained model, whole or block by block, or a series of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from lit_layers.analyses import metric_names
from lit_layers.analyses.base import Analysis
from lit_layers.cli.measuring import Checkpoints, Outcome, Target, measure
from lit_layers.cli.options import Recipe
from lit_layers.data import EvalText
from lit_layers.errors import InputError
from lit_layers.measuring.offline import follow as follow_folder
from lit_layers.schema import COUNT_OR_NONE
from lit_layers.series import Series

CORPUS = "python"
DEFAULT = ("trajectory", "representation", "coupling")
OWN_TOKENIZER = "<the model's own tokenizer>"
OWN_CORPUS = f"<what the run was trained on, else {CORPUS}>"


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    """What is measured.

    Args:
        corpus: the text to measure on; in recipes ${corpus} stands for it
        tokenizer: the tokenizer to read it with; in recipes ${tokenizer} stands for it. Of several models each reads
            with its own
        metrics: what to measure, by names with commas between: coupling,lens,prompt_entropy; in place of --analyses
        analyses: what to measure, as a list of classes with options (default: those of the run's training, elsewhere
            Trajectory, Representation, Coupling)
    """

    corpus: str = OWN_CORPUS
    tokenizer: str | None = OWN_TOKENIZER
    metrics: str | None = None
    analyses: list[Analysis] = field(default_factory=list)


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
    """Measure every layer of a model, or of each checkpoint of a series. Run it again to continue.

    Exit code: 0, 1 if anything failed, 2 wrong input, 130 after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub; for a series a folder of steps,
            a name on the Hub with --steps, or a manifest
        series: instead of a model: the class of a series, with its own options
        follow: measure the checkpoints in a folder, and those that a training writes there meanwhile, until Ctrl-C or
            until the fit without analyses that writes there has ended
        patience: with follow: end when nothing came for so many seconds
    """
    command = Command(recipe)
    tokenizer = None if chosen.tokenizer == OWN_TOKENIZER else chosen.tokenizer
    if follow or patience is not None:
        return _follow(command, checkpoints, tokenizer, patience)
    return measure(command.series(checkpoints), checkpoints, command.analyses, _report, tokenizer=tokenizer)


def _follow(command: "Command", options: Checkpoints, tokenizer: str | None, patience: int | None) -> int:
    """Measure a folder of checkpoints again whenever one came."""
    folder, codes = Path(str(command.options.model)), [0]
    if not folder.is_dir() or options.steps is not None or options.plan:
        raise InputError(f"follow: expected a folder, without --steps and --plan, got {folder}")

    def update(steps: list[int]) -> None:
        everything = command.series(replace(options, steps=steps))
        about: Any = {"tokenizer": tokenizer, "beside_training": True}
        codes.append(measure(everything, options, command.analyses, _report, **about))

    follow_folder(folder, update, patience)
    return codes[-1]


class Command:
    """What to measure on which series, by a command line and its recipes.

    Which tokenizer `${tokenizer}` stands for is known only when the model is: the analyses are made with it then.

    Raises:
        InputError: options that are unknown or do not fit together.
    """

    def __init__(self, recipe: Recipe | list[str]) -> None:
        self._recipe = recipe if isinstance(recipe, Recipe) else Recipe(analyze, recipe)
        self.options = options = self._recipe.options
        if options.metrics is not None and options.analyses:
            raise InputError("metrics and analyses: expected one of them, got both: leave one out")
        self._names = None if options.metrics is None else [*metric_names.named(options.metrics.split(","))]
        self._is_own = options.tokenizer == OWN_TOKENIZER

    def series(self, checkpoints: Checkpoints) -> list[Series]:
        """Return the model, or each series that is meant.

        Raises:
            InputError: none, several, or options that are for the other of a model and a series.
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
        """What to measure: with the target's own tokenizer and corpus where none are named.

        Where nothing is named, the analyses of the training that it comes from: so numbers that training measured are
        known, and new ones belong to its curves. Else the usual ones, of texts that fit the model.

        Raises:
            InputError: a target without a tokenizer, where one is needed.
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
            named = None if target.series.is_alone else trained.get("tokenizer")
            named = named or target.saved_tokenizer
            if named is None and (not options.analyses or OWN_TOKENIZER in str(options.analyses)):
                raise InputError(f"tokenizer: {target.name} carries none; name one with --tokenizer")
            defaults["tokenizer"] = named
        options = self._recipe.read(**defaults)
        if made := self._recipe.instantiate("analyses", options):
            return made
        return _default_analyses(names or DEFAULT, options.corpus, options.tokenizer, target.length_limit)

    def _training_analyses(self, owner: str, analyses: Any) -> list[Analysis]:
        """By the same parser as any others: a run that somebody else made is data like a recipe."""
        try:
            given = self._recipe.parser.parse_object({"analyses": analyses}, self.options)
            return self._recipe.instantiate("analyses", given)
        except InputError as error:
            raise InputError(f"the analyses of {owner}, as its run.json has them: {error}; name others") from error


def _default_analyses(names: Sequence[str], corpus: str, tokenizer: str, limit: int | None) -> list[Analysis]:
    """The analyses that are named, on texts of the length that the model reads."""
    text = EvalText(corpus, tokenizer, num_sequences=16, num_tokens=min(128, limit or 128))
    few = EvalText(corpus, tokenizer, num_sequences=8, num_tokens=min(64, limit or 64))
    return metric_names.made(names, text, few)


def _report(outcome: Outcome) -> bool:
    """Print how much was measured, and where it is, and return whether anything failed."""
    result = outcome.result
    measurements = [measurement for measurement in result.measurements if measurement.error is None]
    print(f"{len(measurements)} measured, {result.num_known} were known, not measured again")
    failed = outcome.report()
    print(f"draw them with `lit-layers report {outcome.root}`")
    return failed
