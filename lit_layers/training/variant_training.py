"""Analyses that train a model in each variant of its running order: their recipe, their results, what they leave."""

import hashlib
import json
import math
import re
import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L

from lit_layers import schema
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.statistics import left_out
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import (
    LOOPS,
    SEEDS,
    VARIANTS,
    Variant,
    baseline,
    format_schedule,
)
from lit_layers.measuring.undisturbed import kept_random_state
from lit_layers.models.running_order import variants_of
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.schema import BATCH, COUNT, LEARNING_RATE, MANY, Range, refuse_outside
from lit_layers.tasks.benchmark_scores import interval
from lit_layers.training.datamodules import DATA_RANGES
from lit_layers.training.modules import MODEL_RANGES, LitModule
from lit_layers.training.trainer import StepSeed, new_trainer

AGAIN = "take it away to train that variant again"
BETAS = (0.9, 0.999)
_RANGES = {
    **MODEL_RANGES,
    **DATA_RANGES,
    **dict.fromkeys(("num_epochs", "max_steps", "limit", "num_train", "num_validation"), COUNT),
    **dict.fromkeys(("learning_rate", "frozen_learning_rate"), LEARNING_RATE),
    "batch_size": BATCH,
    "gradient_clip": Range(0, MANY, above=True),
}


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How a model is trained on, whatever on.

    Args:
        learning_rate: at its peak.
        batch_size: sequences, or rows, a step.
        num_tokens: predictions a sequence; of a row, a longer one is cut.
        warmup_steps: of linear warm-up.
        weight_decay: on matrices and embeddings.
        gradient_clip: largest norm of the gradient; None: any.
        precision: of Lightning's Trainer.
        seed: of the order of the data and of dropout; of the rows that are drawn and of a new head.
    """

    learning_rate: float = 5e-5
    batch_size: int = 64
    num_tokens: int = 128
    warmup_steps: int = 0
    weight_decay: float = 0.0
    gradient_clip: float | None = 1.0
    precision: str = "32-true"
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_outside("recipe: ", _RANGES, vars(self))

    def trainer(self, root: str | Path, accelerator: str, **options: Any) -> L.Trainer:
        """As `lit-layers fit` makes it, in one process, of which nothing is written."""
        return new_trainer(
            accelerator=accelerator,
            devices=1,
            precision=self.precision,
            callbacks=[StepSeed(self.seed)],
            default_root_dir=root,
            **options,
        )


def name_of(variant: Variant) -> str:
    """The variant as a folder's or file's name: such as `skip_M_4`, or of a long schedule `custom_` and a hash."""
    if variant.name == "custom":
        return f"custom_{hashlib.sha256(format_schedule(variant.schedule).encode()).hexdigest()[:12]}"
    return re.sub(r"\W+", "_", str(variant))


def finished(file: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result in a file that was made with these settings; None where there is none.

    Raises:
        InputError: it was made with others, or is damaged.
    """
    if not file.is_file():
        return None
    result: Any = schema.read(file, dict[str, Any], AGAIN)
    for name, value in json.loads(json.dumps(settings)).items():
        if (held := result.get(name)) != value:
            options = value if isinstance(held, dict) and isinstance(value, dict) else {}
            part = next((key for key in options if held.get(key) != value[key]), name)
            raise InputError(
                f"{file} is the result of other settings ({part} differs): choose another root, or take it away"
            )
    return result


def means_of_seeds(records: Iterable[Record], num_blocks: int) -> Iterator[Record]:
    """Yields, for each metric and the other tags, the mean over the random orders of one number of middle blocks, with
    its standard error over them. Orders whose training came to no number are left out, and `num_undefined` counts them.
    """
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        if record.tags.get("variant") == "random":
            others = {key: value for key, value in record.tags.items() if key not in ("seed", "schedule")}
            groups.setdefault((record.metric, *sorted(others.items())), []).append(record)
    unchanged = format_schedule(baseline(num_blocks))
    for (metric, *others), orders in groups.items():
        values = [record.value for record in orders if not math.isnan(record.value)]
        counts = {
            "num_seeds": len(orders),
            "num_identical": sum(record.tags["schedule"] == unchanged for record in orders),
            **left_out("", len(orders) - len(values)),
        }
        value, n = statistics.fmean(values) if values else math.nan, orders[0].n
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        ends = interval("" if orders[0].low is None else metric, value, error, n or 1)  # one without is no share
        yield Record(metric=metric, value=value, stderr=error, n=n, tags={**dict(others), **counts}, **ends)


@dataclass(kw_only=True)
class TrainedVariants(Analysis):
    """A model that is trained in each variant of its running order, as an analysis. Options of the variants are those
    of `lit_layers.functional.block_schedules.variants`.

    Args:
        root: of what each variant leaves behind, so that a finished one is not trained again.
        tokenizer: a local path or a name of the Hub.
        variants, middles, seeds, loops, custom: which orders; the full model is always one.
        tell: called with what is trained now.
    """

    PRECISION = "own"

    UNMEASURED = ("root", "tell")

    root: Path
    tokenizer: str
    variants: Sequence[str] = VARIANTS
    middles: Sequence[int] | None = None
    seeds: Sequence[int] = SEEDS
    loops: Sequence[int] = LOOPS
    custom: Sequence[str] = ()
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    recipe: TrainingRecipe

    def check(self, model: LayeredModel) -> None:
        self.chosen(model)
        try:
            self.recipe.trainer(self.root, accelerator_of(model), max_steps=1)
        except ValueError as error:
            raise InputError(f"recipe: precision: {' '.join(str(error).split())}") from error

    def first_share(self, rows: int) -> None:
        return None

    def chosen(self, model: LayeredModel) -> list[Variant]:
        """The variants of this model, the full one first.

        Raises:
            InputError: options that do not fit the model.
        """
        return variants_of(self, model)

    def compute(self, model: LayeredModel) -> Iterator[Record]:
        """Yield the records of each variant, and at last the means over the seeds of random orders."""
        records: list[Record] = []
        try:
            for of_variant in self.trained(model):
                records += of_variant
                yield from of_variant
        except SystemExit as error:  # Lightning makes Ctrl-C an exit of the process
            raise KeyboardInterrupt from error
        yield from means_of_seeds(records, model.num_layers)

    @abstractmethod
    def trained(self, model: LayeredModel) -> Iterator[list[Record]]:
        """Yield what each variant gives, trained now where that is not done."""

    def say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(what)

    def fit(self, module: LitModule, data: L.LightningDataModule, model: LayeredModel, *, steps: int) -> None:
        """Train a module where a model is, and write nothing. The global random state stays as it is."""
        options: dict[str, Any] = {"limit_val_batches": 0, "gradient_clip_val": self.recipe.gradient_clip}
        with kept_random_state():
            module.model.train()
            trainer = self.recipe.trainer(self.root, accelerator_of(model), max_steps=steps, **options)
            trainer.fit(module, datamodule=data)


def accelerator_of(model: LayeredModel) -> str:
    """Lightning's word for where a model is."""
    return "gpu" if model.device.type == "cuda" else "cpu"


def check_texts(model: LayeredModel, num_tokens: int, size: int, *, vocabulary: int, tokenizer: str) -> None:
    """Refuse rows that are longer than the model reads, and a tokenizer of more tokens than it knows.

    Raises:
        InputError: naming the option.
    """
    kind = type(model.model).__name__
    if model.max_tokens is not None and num_tokens > model.max_tokens:
        raise InputError(f"recipe: num_tokens: {kind} takes at most {model.max_tokens} tokens, got {num_tokens}")
    if size > vocabulary:
        raise InputError(f"tokenizer: {kind} knows {vocabulary} tokens, {tokenizer} has {size}: name the model's own")
