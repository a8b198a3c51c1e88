"""The options of `lit-layers analyze`: read, refused where they do not fit, and made into analyses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_layers.analyses.base import Analysis
from lit_layers.cli.limits import other_encoding, refuse_wild_numbers
from lit_layers.cli.trust import HELP, RecipeParser, refuse_reach, trust_code
from lit_layers.errors import InputError
from lit_layers.series import Series, open_series, read_steps

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
        self.is_series = _is_series(self.options)
        _refuse_what_does_not_fit(self.options, self.is_series)

    @property
    def wants_own_tokenizer(self) -> bool:
        """Whether no tokenizer was named."""
        return self.options.tokenizer == OWN_TOKENIZER

    def series(self) -> list[Series]:
        """The series to measure: of a manifest one for each repository."""
        options = self.options
        if options.series is not None:
            alone = options.clone()
            alone.analyses = []
            return [self._made(alone).series]
        steps = "all" if options.steps is None else options.steps
        return open_series(
            options.model, read_steps(steps) if isinstance(steps, str) else steps, model=options.submodule
        )

    def analyses(
        self,
        owner: str,
        own_tokenizer: str | None,
        trained: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> list[Analysis]:
        """What to measure: with the owner's own tokenizer and corpus where none are named.

        `trained` are the options of the training that the owner comes from: where nothing is named, its analyses, or
        else the usual ones, of texts that fit a model of this `config`.

        Raises:
            InputError: an owner without a tokenizer, where one is needed.
        """
        options, trained = self.options, trained or {}
        is_open = self.wants_own_tokenizer and options.corpus == OWN_CORPUS and not options.analyses
        if is_open and trained.get("analyses") and not options.stream_blocks:
            return self._of_training(owner, trained["analyses"])
        self._parser.set_defaults(corpus=trained.get("corpus") or CORPUS)
        if self.wants_own_tokenizer:
            needed = not options.analyses or OWN_TOKENIZER in str(options.analyses)
            if own_tokenizer is None and needed:
                raise InputError(f"tokenizer: {owner} carries none; name one with --tokenizer")
            self._parser.set_defaults(tokenizer=own_tokenizer)
        options = self._read()
        alone = options.clone()
        alone.series = None
        return self._made(alone).analyses or _usual(options.corpus, options.tokenizer, config or {})

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
        help="A folder with config.json and weights, or a name on the Hub. Of a series: a folder of steps, a name on "
        "the Hub with --steps, or a manifest.",
    )
    parser.add_argument(
        "--series",
        type=Series,
        default=None,
        help="Instead of a model: a series by its class, with its own options.",
    )
    parser.add_argument(
        "--steps",
        type=list[int] | dict[str, int] | str | None,
        default=None,
        help="Of a model's series: all, a list, {log_spaced: N}, pythia, {every: N}.",
    )
    parser.add_argument(
        "--submodule",
        type=str | None,
        default=None,
        help="Of a folder of *.ckpt files: the submodule that is the network (default: found by its tensors).",
    )
    parser.add_argument(
        "--allow-suspect",
        "--allow_suspect",
        action="store_true",
        help="Measure checkpoints, too, that the audit of the series found suspect.",
    )
    parser.add_argument(
        "--keep-downloads",
        "--keep_downloads",
        type=bool,
        default=True,
        help="false: remove each checkpoint of a series from the Hub's cache once it is measured.",
    )
    parser.add_argument(
        "--shard",
        type=str,
        default="auto",
        help="i/n: every n-th checkpoint from the i-th, from 0. auto: a share for each process of torchrun.",
    )
    parser.add_argument(
        "--config", action="config", help="A recipe: recipes/series/*.yaml, recipes/analyses/*.yaml or both."
    )
    parser.add_argument(
        "--stream-blocks",
        "--stream_blocks",
        action="store_true",
        help="Read the model block by block: it is never in memory as a whole.",
    )
    parser.add_argument("--root", type=str | None, default=None, help="Results (default: checkpoints/NAME OF MODEL).")
    parser.add_argument("--revision", type=str | None, default=None, help="A branch, tag or commit of the Hub.")
    parser.add_argument(
        "--device", type=Literal["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one."
    )
    parser.add_argument(
        "--dtype", type=Literal["float32", "float64"], default="float32", help="What weights are converted to."
    )
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


def _is_series(options: Any) -> bool:
    if options.series is not None:
        return True
    if options.model is None:
        raise InputError("missing: model; name a model or a series of its checkpoints, or give --series")
    folder = Path(options.model)
    is_steps = folder.is_dir() and not (folder / "config.json").is_file()
    return options.steps is not None or is_steps or options.model.endswith((".yaml", ".yml"))


def _refuse_what_does_not_fit(options: Any, is_series: bool) -> None:
    if options.submodule is not None and (not is_series or options.series is not None):
        raise InputError("--submodule is for a folder of *.ckpt files; of --series it is --series.model")
    if not is_series:
        if options.allow_suspect or options.shard != "auto" or not options.keep_downloads:
            raise InputError("--allow-suspect, --keep-downloads and --shard are for series: name its --steps")
        return
    if options.series is not None and options.model is not None:
        raise InputError(f"model and series: expected one of them, got {options.model} and a series: leave one out")
    if options.series is not None and options.steps is not None:
        raise InputError(f"--steps {options.steps} belongs among the series' own options: say --series.steps")
    if options.stream_blocks:
        raise InputError("--stream-blocks reads one model: name one step's folder, or one --revision without --steps")
    if options.revision is not None:
        raise InputError(f"--revision {options.revision} is one model: leave it out, or leave --steps out")


def _usual(corpus: str, tokenizer: str, config: Mapping[str, Any]) -> list[Analysis]:
    """What is measured where no recipe says otherwise."""
    from lit_layers.analyses import Coupling, Representation, Trajectory
    from lit_layers.data import EvalText

    named = (config.get(name) for name in ("n_positions", "max_position_embeddings"))
    longest = next((size for size in named if isinstance(size, int) and size > 0), 128)
    text = EvalText(corpus, tokenizer, num_sequences=64, num_tokens=min(128, longest))
    few = EvalText(corpus, tokenizer, num_sequences=8, num_tokens=min(64, longest))
    return [Trajectory(batches=text), Representation(batches=text), Coupling(batches=few)]
