"""Training in other running orders as analyses, so that their numbers stand beside those of the model as it is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_layers.analyses.base import Analysis, describe
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.functional.variants import LOOPS, SEEDS, VARIANTS, Variant, variants
from lit_layers.models.running_order import Parallel
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.training.finetuning import ANALYSIS, FinetuningRecipe, finetune_variants
from lit_layers.training.glue import GlueRecipe, glue_scores

_ELSEWHERE = ("root", "tell", "folder")  # decide where things lie, not the numbers


@dataclass(kw_only=True)
class _TrainedVariants(Analysis):
    """What both have in common. Options are those of `lit_layers.functional.variants.variants`.

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

    def check(self, model: LayeredModel) -> None:
        self.chosen(model)

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

    def tokenizer_hash(self) -> str | None:
        return tokenizer_hash(load_tokenizer(self.tokenizer).tokenizer)

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

    def run(self, model: LayeredModel) -> Iterator[Record]:
        wanted = self.chosen(model)

        def told() -> Iterator[Variant]:
            for number, variant in enumerate(wanted, 1):
                self.say(f"training {variant} ({number} of {len(wanted)})")
                yield variant

        yield from finetune_variants(
            model.model,
            told(),
            self.recipe,
            root=self.root,
            tokenizer=self.tokenizer,
            parallel=self.parallel,
            accelerator="gpu" if model.device.type == "cuda" else "cpu",
        )


@dataclass(kw_only=True)
class GlueScores(_TrainedVariants):
    """Scores of an encoder on one task of GLUE, fine-tuned in each variant of its running order: `glue_scores`.

    The encoder is opened anew from `model`, with a new head; what is measured must be the same.

    Args:
        task: of `lit_layers.intervene.glue_tasks.GLUE`.
        recipe: how it is trained.
        model: a folder with an encoder, or a name on the Hub.
        folder: of local data, with `glue/TASK_SPLIT.parquet`; None: the Hub.
    """

    task: str
    recipe: GlueRecipe
    model: str
    folder: Path | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or f"intervene/glue/{self.task}"
        self.recipe = replace(self.recipe, tasks=(self.task,))

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
            accelerator="gpu" if model.device.type == "cuda" else "cpu",
            tell=self.say,
        )
        for name, records in found:
            if name == self.name:
                yield from records
