"""Training in other running orders as analyses, so that their numbers stand beside those of the model as it is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_layers.analyses.base import Analysis, describe
from lit_layers.data.preparing import prepared
from lit_layers.data.shards import TokenShards
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import LOOPS, SEEDS, VARIANTS, Variant, variants
from lit_layers.models.plain import ENCODERS
from lit_layers.models.running_order import Parallel
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.tasks.catalogue import find
from lit_layers.tasks.glue_rows import SPLITS, read_rows
from lit_layers.training.finetuning import ANALYSIS, FinetuningRecipe, check_model, finetune_variants, quiet_trainer
from lit_layers.training.glue import ANALYSIS as GLUE
from lit_layers.training.glue import GlueRecipe, check_encoder, glue_scores

_ELSEWHERE = ("root", "tell", "folder")  # decide where things lie, not the numbers


@dataclass(kw_only=True)
class _TrainedVariants(Analysis):
    """What both have in common. Options are those of `lit_layers.functional.block_schedules.variants`.

    Args:
        root: of what each variant leaves behind, so that a finished one is not trained again.
        tokenizer: a local path or a name of the Hub.
        variants, middles, seeds, loops, custom: which orders; the full model is always one.
        tell: told what is trained now.
    """

    root: Path
    tokenizer: str
    variants: Sequence[str] = VARIANTS
    middles: Sequence[int] | None = None
    seeds: Sequence[int] = SEEDS
    loops: Sequence[int] = LOOPS
    custom: Sequence[str] = ()
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    recipe: FinetuningRecipe | GlueRecipe

    def check(self, model: LayeredModel) -> None:
        self.chosen(model)
        try:
            quiet_trainer(steps=1, seed=0, root=self.root, precision=self.recipe.precision, accelerator=_device(model))
        except ValueError as error:
            raise InputError(f"recipe: precision: {' '.join(str(error).split())}") from error

    def chosen(self, model: LayeredModel) -> list[Variant]:
        """The variants of this model, the full one first.

        Raises:
            InputError: options that do not fit the model.
        """
        options: dict[str, Any] = {name: getattr(self, name) for name in ("middles", "seeds", "loops", "custom")}
        try:
            return variants(model.num_layers, self.variants, **options)
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from error

    def config(self) -> dict[str, Any]:
        whole = describe(self)
        return {**whole, "init_args": {n: each for n, each in whole["init_args"].items() if n not in _ELSEWHERE}}

    def say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(what)


@dataclass(kw_only=True)
class Finetuning(_TrainedVariants):
    """Loss and accuracy of each variant of a causal language model before and after it is trained: `finetune_variants`.

    Each variant begins with the weights of the model that is measured, which is not changed.

    Args:
        recipe: corpus, steps, learning rate, ...
        parallel: how parallel groups run.
    """

    recipe: FinetuningRecipe
    name: str = ANALYSIS
    parallel: Parallel = "loop"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        check_model(model.model, self.recipe, self._tokenizer())

    def data_hash(self) -> str | None:
        shards = self._shards()
        return f"{shards.corpus_hash[:16]}-{shards.tokenizer_hash}"

    def tokenizer_hash(self) -> str | None:
        return self._shards().tokenizer_hash

    def run(self, model: LayeredModel) -> Iterator[Record]:
        wanted = self.chosen(model)

        def told() -> Iterator[Variant]:
            for number, variant in enumerate(wanted, 1):
                self.say(f"training {variant} ({number} of {len(wanted)})")
                yield variant

        with _interruptible():
            yield from finetune_variants(
                model.model,
                told(),
                self.recipe,
                root=self.root,
                tokenizer=self.tokenizer,
                parallel=self.parallel,
                accelerator=_device(model),
            )

    def _tokenizer(self) -> str:
        return self.recipe.tokenizer or self.tokenizer

    def _shards(self) -> TokenShards:
        return prepared(self.recipe.corpus, self._tokenizer())


@dataclass(kw_only=True)
class GlueScores(_TrainedVariants):
    """Scores of an encoder on one task of GLUE, fine-tuned in each variant of its running order: `glue_scores`.

    The encoder is opened anew from `model`, with a new head; what is measured must be the same.

    Args:
        task: of `lit_layers.tasks.glue_rows.GLUE`.
        recipe: how it is trained.
        model: a folder with an encoder, or a name on the Hub.
        folder: of local data, whose `tasks.yaml` says where they lie; None: the Hub.
    """

    task: str
    recipe: GlueRecipe
    model: str
    folder: Path | None = None
    name: str = ""
    _data_hash: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.task_analysis
        self.recipe = replace(self.recipe, tasks=(self.task,))

    @property
    def task_analysis(self) -> str:
        """Under which name `glue_scores` yields it, whatever it is called here."""
        return f"{GLUE}/{self.task}"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        kind = getattr(getattr(model.model, "config", None), "model_type", None)
        if kind not in ENCODERS:
            raise InputError(f"glue: expected an encoder ({', '.join(ENCODERS)}), got {type(model.model).__name__}")
        check_encoder(model, self.recipe, load_tokenizer(self.tokenizer).vocab_size)
        self.data_hash()

    def data_hash(self) -> str | None:
        if self._data_hash is None:
            task = find("glue", self.task)
            self._data_hash = "-".join(read_rows(task, split, self.folder).content_hash() for split in SPLITS)
        return self._data_hash

    def tokenizer_hash(self) -> str | None:
        return tokenizer_hash(load_tokenizer(self.tokenizer).tokenizer)

    def run(self, model: LayeredModel) -> Iterator[Record]:
        found = glue_scores(
            self.model,
            self.recipe,
            root=self.root,
            folder=self.folder,
            names=self.variants,
            middles=self.middles,
            seeds=self.seeds,
            loops=self.loops,
            custom=self.custom,
            tokenizer=self.tokenizer,
            accelerator=_device(model),
            tell=self.say,
        )
        with _interruptible():
            for name, records in found:
                if name == self.task_analysis:
                    yield from records


def _device(model: LayeredModel) -> str:
    return "gpu" if model.device.type == "cuda" else "cpu"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C as KeyboardInterrupt again: Lightning makes it an exit of the process."""
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
