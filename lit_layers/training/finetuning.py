"""A model trained on while its blocks run in another order: how much of the loss that heals, as an analysis."""

import copy
import hashlib
import json
import re
import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_layers import schema
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.speed import variants_of
from lit_layers.data.preparing import prepared
from lit_layers.data.shards import TokenShards
from lit_layers.errors import InputError
from lit_layers.files.durable import write_json
from lit_layers.functional.block_schedules import (
    LOOPS,
    SEEDS,
    VARIANTS,
    Variant,
    baseline,
    block_runs,
    format_schedule,
)
from lit_layers.models.build import architecture_hash, save, true_vocab_size, weights_hash
from lit_layers.models.families import Network
from lit_layers.models.running_order import Parallel, running_order
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import Work, bytes_of_model, trained
from lit_layers.records import Record
from lit_layers.schema import (
    BATCH,
    COUNT,
    COUNT_OR_NONE,
    LEARNING_RATE,
    MANY,
    SEED,
    SHARE,
    WEIGHT_DECAY,
    Range,
    refuse_outside,
)
from lit_layers.training.checkpoints import writable_folder, write_folder
from lit_layers.training.datamodules import LitTextData
from lit_layers.training.modules import LitCausalLM
from lit_layers.training.trainer import StepSeed, new_trainer
from lit_layers.undisturbed import kept_random_state

_AGAIN = "take it away to train that variant again"
ANALYSIS, RESULT, MODEL = "intervene/finetune", "finetuned.json", "model"
BETAS = (0.9, 0.999)
_RANGES = {
    **dict.fromkeys(("num_tokens", "num_epochs", "steps", "max_steps", "num_train", "num_validation"), COUNT),
    **dict.fromkeys(("learning_rate", "frozen_learning_rate"), LEARNING_RATE),
    **dict.fromkeys(("batch_size", "validation_batch_size"), BATCH),
    "num_validation_sequences": COUNT,
    "warmup_steps": COUNT_OR_NONE,
    "seed": SEED,
    "weight_decay": WEIGHT_DECAY,
    "min_lr_ratio": SHARE,
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


@dataclass(frozen=True, kw_only=True)
class FinetuningRecipe(TrainingRecipe):
    """How a causal language model is trained on; after the warm-up the learning rate falls on a cosine.

    Args:
        corpus: as for `LitTextData`; validation is on its validation split.
        tokenizer: None: the model's own, which whoever calls must name.
        steps: of the optimizer.
        min_lr_ratio: final learning rate over the peak; 1 keeps it.
        num_validation_sequences: the first ones of the validation split.
        validation_batch_size: sequences at once.
    """

    corpus: str
    tokenizer: str | None = None
    steps: int = 500
    min_lr_ratio: float = 0.0
    num_validation_sequences: int = 256
    validation_batch_size: int = 16


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What a variant makes of the validation sequences."""

    loss: float  # nats a token
    accuracy: float  # share of next tokens that are the most probable one
    loss_stderr: float | None  # over sequences; None of one
    accuracy_stderr: float | None
    num_sequences: int


class LitVariant(LitCausalLM):
    """Training of a model that is there already, in whichever order its blocks run; validated sequence by sequence."""

    def __init__(self, model: Network, recipe: FinetuningRecipe) -> None:
        super().__init__(
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            betas=BETAS,
            warmup_steps=recipe.warmup_steps,
            decay_steps=recipe.steps,
            min_lr_ratio=recipe.min_lr_ratio,
        )
        self.model = model
        self._rows: list[Tensor] = []  # loss and accuracy of the sequences

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        targets = batch["input_ids"][:, 1:]
        logits = self(batch["input_ids"][:, :-1])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        hits = wide.argmax(-1) == targets
        self._rows.append(torch.stack([losses.double().mean(1), hits.double().mean(1)]).cpu())

    def on_validation_epoch_end(self) -> None:
        """Logs nothing. Sequences are of one length, so that their mean is that of the tokens."""
        (loss, accuracy), self._rows = torch.cat(self._rows, dim=1), []
        count = len(loss)
        errors = [None if count < 2 else (each.std() / count**0.5).item() for each in (loss, accuracy)]
        self.result = Quality(
            loss=loss.mean().item(),
            accuracy=accuracy.mean().item(),
            loss_stderr=errors[0],
            accuracy_stderr=errors[1],
            num_sequences=count,
        )


def train(
    module: Any,
    data: L.LightningDataModule,
    recipe: TrainingRecipe,
    *,
    steps: int,
    root: str | Path,
    accelerator: str,
    first: bool = True,
) -> tuple[Any, Any]:
    """Trains and writes nothing; what the module makes of the validation data (its `result`) before, where that is
    asked for, and after. The global random state stays as it is."""

    def validated() -> Any:
        recipe.trainer(root, accelerator, max_steps=1).validate(module, datamodule=data, verbose=False)
        return module.result

    with kept_random_state():
        before = validated() if first else None
        module.model.train()
        options: dict[str, Any] = {"limit_val_batches": 0, "gradient_clip_val": recipe.gradient_clip}
        recipe.trainer(root, accelerator, max_steps=steps, **options).fit(module, datamodule=data)
        return before, validated()


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
    result: Any = schema.read(file, dict[str, Any], _AGAIN)
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
    its standard error over them."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        if record.tags.get("variant") == "random":
            others = {key: value for key, value in record.tags.items() if key not in ("seed", "schedule")}
            groups.setdefault((record.metric, *sorted(others.items())), []).append(record)
    unchanged = format_schedule(baseline(num_blocks))
    for (metric, *others), orders in groups.items():
        values = [record.value for record in orders]
        counts = {
            "num_seeds": len(orders),
            "num_identical": sum(record.tags["schedule"] == unchanged for record in orders),
        }
        yield Record(
            metric=metric,
            value=statistics.fmean(values),
            stderr=statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None,
            n=orders[0].n,
            tags={**dict(others), **counts},
        )


def before_and_after(
    folder: Path, settings: Mapping[str, Any], kind: Any, network: Network, make: Callable[[Any], tuple[Any, Any]]
) -> dict[str, Any]:
    """What `make` finds of a copy of a network before and after it trains it; read where the folder has it already.

    The folder gets the trained weights, as any saved model, and both results with the settings.

    Raises:
        InputError: a folder with the result of other settings.
    """
    file = folder / RESULT
    if (result := finished(file, settings)) is not None:
        return {when: schema.check(result.get(when), kind, f"{file}: {when}", _AGAIN) for when in ("before", "after")}
    writable_folder(folder.parent, "root")
    trained: Any = copy.deepcopy(getattr(network, "_orig_mod", network)).requires_grad_(True)
    before, after = make(trained)
    results: dict[str, Any] = {"before": before, "after": after}

    def fill(part: Path) -> None:
        save(trained, part / MODEL)
        plain = {when: asdict(each) if isinstance(each, Quality) else each for when, each in results.items()}
        write_json(part / RESULT, {**settings, **plain})

    write_folder(folder, fill)
    return results


def check_generator(model: LayeredModel, num_tokens: int, tokenizer: str, size: int) -> None:
    """Refuses a model that is no causal language model, rows that it does not read, and another's tokenizer."""
    if model.family.sees_images or not model.model.can_generate():
        kind = type(model.model).__name__
        raise InputError(f"model: expected a causal language model, which predicts the next token, got {kind}")
    check_texts(model, num_tokens, size, known=true_vocab_size(model.model), tokenizer=tokenizer)


def check_texts(
    model: LayeredModel, num_tokens: int, size: int, *, known: int, tokenizer: str, place: str = "recipe: "
) -> None:
    """Refuses rows that are longer than the model reads, and a tokenizer of more tokens than it knows.

    Raises:
        InputError: naming the option.
    """
    kind = type(model.model).__name__
    if model.max_tokens is not None and num_tokens > model.max_tokens:
        raise InputError(f"{place}num_tokens: {kind} takes at most {model.max_tokens} tokens, got {num_tokens}")
    if size > known:
        raise InputError(f"tokenizer: {kind} knows {known} tokens, {tokenizer} has {size}: name the model's own")


@dataclass(kw_only=True)
class TrainedVariants(Analysis):
    """A model that is trained in each variant of its running order, as an analysis. Options of the variants are those
    of `lit_layers.functional.block_schedules.variants`.

    Args:
        root: of what each variant leaves behind, so that a finished one is not trained again.
        tokenizer: a local path or a name of the Hub.
        variants, middles, seeds, loops, custom: which orders; the full model is always one.
        tell: told what is trained now.
    """

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

    def chosen(self, model: LayeredModel) -> list[Variant]:
        """The variants of this model, the full one first.

        Raises:
            InputError: options that do not fit the model.
        """
        return variants_of(self, model)

    def of_variants(
        self, model: LayeredModel, *, tokens: int, samples: int, judged: int, judged_at_once: int, passes: int = 3
    ) -> Work:
        """Each variant trained and judged, those included that are there already, on a copy of the model."""
        whole, options = Work(), {"tokens": tokens}
        for variant in self.chosen(model):
            options["block_runs"] = block_runs(variant.schedule)
            whole += trained(model, samples=samples, micro_batch=self.recipe.batch_size, passes=passes, **options)
            whole += trained(model, samples=judged, micro_batch=judged_at_once, passes=1, **options)
        return replace(whole, device=whole.device + bytes_of_model(model))

    def run(self, model: LayeredModel) -> Iterator[Record]:
        """Yields the records of each variant, and at last the means over the seeds of random orders."""
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
        """Yields what each variant gives, trained now where that is not done."""

    def say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(what)


@dataclass(kw_only=True)
class Finetuning(TrainedVariants):
    """Loss and accuracy of each variant of a causal language model before and after it is trained:
    `variant_loss` and `variant_accuracy`, tagged `when`.

    Each variant begins with the weights of the model that is measured, which is not changed. What is trained:
    embeddings, head and the blocks that run; the others have no gradient and stay. The trained weights lie in
    `root/NAME/model` as any saved model does (which runs in its plain order unless told otherwise: `finetuned.json`
    beside it says the schedule). Where that folder is there already for the same weights, schedule and recipe, it is
    not trained again. All is a function of the recipe's seed, the global random state stays as it is.

    Args:
        recipe: corpus, steps, learning rate, ...
        parallel: how parallel groups run.
    """

    recipe: FinetuningRecipe
    name: str = ANALYSIS
    parallel: Parallel = "loop"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        check_generator(model, self.recipe.num_tokens, self._tokenizer(), self._shards().vocab_size)

    def work(self, model: LayeredModel) -> Work:
        recipe, number = self.recipe, 2 * self.recipe.num_validation_sequences  # before and after
        work = self.of_variants(
            model,
            tokens=recipe.num_tokens,
            samples=recipe.steps * recipe.batch_size,
            judged=number,
            judged_at_once=recipe.validation_batch_size,
        )
        return replace(work, disk=float(len(self.chosen(model)) * bytes_of_model(model)))

    def data_hash(self) -> str | None:
        shards = self._shards()
        return f"{shards.corpus_hash[:16]}-{shards.tokenizer_hash}"

    def tokenizer_hash(self) -> str | None:
        return self._shards().tokenizer_hash

    def trained(self, model: LayeredModel) -> Iterator[list[Record]]:
        compared = self.chosen(model)
        for number, variant in enumerate(compared, 1):
            self.say(f"training {variant} ({number} of {len(compared)})")
            yield [
                Record(
                    metric=f"variant_{metric}",
                    value=getattr(quality, metric),
                    stderr=getattr(quality, f"{metric}_stderr"),
                    n=quality.num_sequences,
                    layer=variant.block,
                    tags={**variant.tags, "when": when},
                )
                for when, quality in self.qualities(model, variant).items()
                for metric in ("loss", "accuracy")
            ]

    def qualities(self, model: LayeredModel, variant: Variant) -> dict[str, Quality]:
        """Trains a copy with the variant active in every forward pass; its quality "before" and "after", on the same
        sequences with the variant active.

        Raises:
            InputError: a folder with the result of other options.
        """
        recipe, tokenizer, network = self.recipe, self._tokenizer(), model.model
        folder = Path(self.root) / name_of(variant)
        settings = {
            "schedule": format_schedule(variant.schedule),
            "variant": variant.tags,
            "parallel": self.parallel,
            "recipe": {**asdict(recipe), "tokenizer": tokenizer},
            "weights": weights_hash(network),
            "architecture": architecture_hash(network),
            "corpus": self._shards().corpus_hash,
        }

        def make(network: Any) -> tuple[Any, Any]:
            data = LitTextData(
                recipe.corpus,
                tokenizer,
                num_tokens=recipe.num_tokens,
                global_batch_size=recipe.batch_size,
                num_validation_sequences=recipe.num_validation_sequences,
                validation_batch_size=recipe.validation_batch_size,
                seed=recipe.seed,
            )
            module, options = LitVariant(network, recipe), {"root": self.root, "accelerator": accelerator_of(model)}
            with running_order(network, variant.schedule, parallel=self.parallel):
                return train(module, data, recipe, steps=recipe.steps, **options)

        return before_and_after(folder, settings, Quality, network, make)

    def _tokenizer(self) -> str:
        return self.recipe.tokenizer or self.tokenizer

    def _shards(self) -> TokenShards:
        return prepared(self.recipe.corpus, self._tokenizer())


def accelerator_of(model: LayeredModel) -> str:
    """Lightning's word for where a model is."""
    return "gpu" if model.device.type == "cuda" else "cpu"
