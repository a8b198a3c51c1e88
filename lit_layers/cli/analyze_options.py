"""The options of `lit-layers analyze`: read, refused where they do not fit, and made into analyses."""

from collections.abc import Mapping
from typing import Any, Literal

from jsonargparse import Namespace
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_layers.analyses.base import Analysis
from lit_layers.cli.limits import other_encoding, refuse_wild_numbers
from lit_layers.cli.measuring import MODEL, Target, add_options, settle
from lit_layers.cli.trust import HELP, RecipeParser, refuse_reach, trust_code
from lit_layers.errors import InputError
from lit_layers.series import Series

CORPUS = "python"
OWN_TOKENIZER = "<the model's own tokenizer>"
OWN_CORPUS = f"<what the run was trained on, else {CORPUS}>"


class Command:
    """What a command line asks for.

    Which tokenizer `${tokenizer}` stands for is known only when the model is: the analyses are made with it then.

    Raises:
        InputError: options that are unknown or do not fit together.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv, self._parser = trust_code(argv), _parser()
        self._parser.set_defaults(tokenizer=OWN_TOKENIZER, corpus=OWN_CORPUS)
        self.options = self._read()
        _settle(self.options)

    @property
    def wants_own_tokenizer(self) -> bool:
        """Whether no tokenizer was named."""
        return self.options.tokenizer == OWN_TOKENIZER

    def series(self) -> list[Series] | None:
        """The series that is named by its class; None where a model is, or its steps."""
        if self.options.series is None:
            return None
        alone = self._read()
        alone.analyses = []
        return [self._made(alone).series]

    def analyses(self, target: Target) -> list[Analysis]:
        """What to measure: with the target's own tokenizer and corpus where none are named.

        Where nothing is named, the analyses of the training that it comes from: so numbers that training measured are
        known, and new ones belong to its curves. Else the usual ones, of texts that fit the model.

        Raises:
            InputError: a target without a tokenizer, where one is needed.
        """
        options, trained = self.options, target.trained
        is_open = self.wants_own_tokenizer and options.corpus == OWN_CORPUS and not options.analyses
        if is_open and trained.get("analyses") and not options.stream_blocks:
            return self._of_training(target.name, trained["analyses"])
        self._parser.set_defaults(corpus=trained.get("corpus") or CORPUS)
        if self.wants_own_tokenizer:
            own = None if target.series.is_alone else trained.get("tokenizer")
            own = own or target.carried
            if own is None and (not options.analyses or OWN_TOKENIZER in str(options.analyses)):
                raise InputError(f"tokenizer: {target.name} carries none; name one with --tokenizer")
            self._parser.set_defaults(tokenizer=own)
        options = self._read()
        alone = options.clone()
        alone.series = None
        return self._made(alone).analyses or _usual(options.corpus, options.tokenizer, target.config)

    def _of_training(self, owner: str, analyses: Any) -> list[Analysis]:
        """By the same parser as any others: a run that somebody else made is data like a recipe."""
        try:
            return self._made(self._checked(self._parser.parse_object({"analyses": analyses}))).analyses
        except InputError as error:
            raise InputError(f"the analyses of {owner}, as its run.json has them: {error}; name others") from error

    def _read(self) -> Namespace:
        try:
            options: Namespace = self._parser.parse_args(self._argv)  # pyright: ignore[reportAssignmentType]
        except (OmegaConfBaseException, YAMLError) as error:
            raise InputError(" ".join(str(error).split())) from error
        except UnicodeDecodeError as error:
            raise other_encoding(self._argv, error) from error
        refuse_wild_numbers(options.as_dict())
        return self._checked(options)

    def _checked(self, options: Namespace) -> Namespace:
        refuse_reach(options.as_dict(), options.root or "checkpoints", self._argv)
        return options

    def _made(self, options: Namespace) -> Any:
        return self._parser.instantiate_classes(options)


def _parser() -> RecipeParser:
    parser = RecipeParser(
        prog="lit-layers analyze",
        description="Measure every layer of a model, or of each checkpoint of a series. Run again it continues.",
        exit_on_error=False,
        parser_mode="omegaconf+",
        epilog=f"--code PACKAGE: {HELP}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        type=str | None,
        nargs="?",
        default=None,
        help=MODEL,
    )
    parser.add_argument(
        "--series",
        type=Series,
        default=None,
        help="Instead of a model: a series by its class, with its own options.",
    )
    parser.add_argument(
        "--config", action="config", help="A recipe: recipes/series/*.yaml, recipes/analyses/*.yaml or both."
    )

    def add(*names: str, **given: Any) -> None:
        """Of argparse's way to say types in jsonargparse's."""
        kind: Any = list[int] | dict[str, int] | str if names[0] == "--steps" else given.pop("type", None)
        if "choices" in given:
            kind = Literal[tuple(given.pop("choices"))]
        if kind is not None:
            given["type"] = kind | None if given["default"] is None else kind
        parser.add_argument(*names, **given)

    add_options(add, root="Results (default: checkpoints/NAME OF MODEL).", boolean=bool)
    parser.add_argument("--corpus", type=str, default=CORPUS, help="Stands for ${corpus} in recipes.")
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="Stands for ${tokenizer} in recipes (default: the model's own; of several models each one's own).",
    )
    parser.add_argument(
        "--analyses",
        type=list[Analysis],
        default=[],
        help="Default: those of the run's training, elsewhere Trajectory, Representation, Coupling.",
    )
    return parser


def _settle(options: Any) -> None:
    """Refuses what does not fit together; `is_series` is added by `settle`, or told by the class of a series."""
    options.is_series = True
    if options.series is None:
        if options.model is None:
            raise InputError("missing: model; name a model or a series of its checkpoints, or give --series")
        settle(options)
        return
    if options.submodule is not None:
        raise InputError("submodule: is for a folder of *.ckpt files; of --series it is --series.model")
    if options.model is not None:
        raise InputError(f"model and series: expected one of them, got {options.model} and a series: leave one out")
    if options.steps is not None:
        raise InputError(f"steps: {options.steps} belongs among the series' own options: say --series.steps")
    if options.revision is not None:
        raise InputError(f"revision: {options.revision} is one model: leave it out, or leave --series out")


def _usual(corpus: str, tokenizer: str, config: Mapping[str, Any]) -> list[Analysis]:
    """What is measured where no recipe says otherwise."""
    from lit_layers.analyses import Coupling, Representation, Trajectory
    from lit_layers.data import EvalText

    named = (config.get(name) for name in ("n_positions", "max_position_embeddings"))
    longest = next((size for size in named if isinstance(size, int) and size > 0), 128)
    text = EvalText(corpus, tokenizer, num_sequences=64, num_tokens=min(128, longest))
    few = EvalText(corpus, tokenizer, num_sequences=8, num_tokens=min(64, longest))
    return [Trajectory(batches=text), Representation(batches=text), Coupling(batches=few)]
