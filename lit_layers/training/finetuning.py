"""A model trained on for some steps while its blocks run in another order: how much of the loss that heals."""

import copy
import hashlib
import json
import logging
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_layers import schema
from lit_layers.data.preparing import prepared
from lit_layers.durable import write_json
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Variant, baseline, format_schedule
from lit_layers.models.build import architecture_hash, save, true_vocab_size, weights_hash
from lit_layers.models.families import Network
from lit_layers.models.running_order import Parallel, running_order
from lit_layers.models.view import LayeredModel
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
from lit_layers.training.resume import StepSeed
from lit_layers.undisturbed import kept_random_state

_AGAIN = "take it away to train that variant again"
ANALYSIS, RESULT, MODEL = "intervene/finetune", "finetuned.json", "model"
BETAS = (0.9, 0.999)
When = Literal["before", "after"]


GRADIENT_CLIP = Range(0, MANY, above=True)
_RANGES = {
    **dict.fromkeys(("steps", "num_tokens", "num_validation_sequences"), COUNT),
    **dict.fromkeys(("batch_size", "validation_batch_size"), BATCH),
    "warmup_steps": COUNT_OR_NONE,
    "seed": SEED,
    "learning_rate": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
    "min_lr_ratio": SHARE,
    "gradient_clip": GRADIENT_CLIP,
}


@dataclass(frozen=True, kw_only=True)
class FinetuningRecipe:
    """How a model is trained on.

    Args:
        corpus: as for `LitTextData`; validation is on its validation split.
        tokenizer: None: the model's own, which whoever calls must name.
        steps: of the optimizer.
        learning_rate: at its peak.
        batch_size: sequences a step.
        num_tokens: predictions a sequence.
        warmup_steps: of linear warm-up; a cosine follows.
        min_lr_ratio: final learning rate over the peak; 1 keeps it.
        weight_decay: on matrices and embeddings.
        gradient_clip: largest norm of the gradient; None: any.
        num_validation_sequences: the first ones of the validation split.
        validation_batch_size: sequences at once.
        precision: of Lightning's Trainer.
        seed: of the order of the data and of dropout.
    """

    corpus: str
    tokenizer: str | None = None
    steps: int = 500
    learning_rate: float = 5e-5
    batch_size: int = 64
    num_tokens: int = 128
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    gradient_clip: float | None = 1.0
    num_validation_sequences: int = 256
    validation_batch_size: int = 16
    precision: str = "32-true"
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_outside("recipe: ", _RANGES, vars(self))


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What a variant makes of the validation sequences."""

    loss: float  # nats a token
    accuracy: float  # share of next tokens that are the most probable one
    loss_stderr: float | None  # over sequences; None of one
    accuracy_stderr: float | None
    num_sequences: int


def finetune(
    model: Network,
    variant: Variant,
    recipe: FinetuningRecipe,
    *,
    root: str | Path,
    tokenizer: str | None = None,
    parallel: Parallel = "loop",
    accelerator: str = "auto",
) -> tuple[Quality, Quality]:
    """Trains a copy of the model with the variant active in every forward pass; its quality before and after, on the
    same sequences with the variant active.

    What is trained: embeddings, head and the blocks that run; the others have no gradient and stay. The model that is
    given is not changed. The trained weights lie in `root/NAME/model` as any saved model does (which runs in its plain
    order unless told otherwise: `finetuned.json` beside it says the schedule). Where that folder is there already for
    the same weights, schedule and recipe, it is not trained again. All is a function of the recipe's seed, the global
    random state stays as it is.

    Raises:
        InputError: no causal language model, one that takes shorter texts or knows fewer tokens; a folder with the
            result of other options.
    """
    tokenizer = recipe.tokenizer or tokenizer
    if tokenizer is None:
        raise InputError("tokenizer: expected one in the recipe, or the model's own")
    check_model(model, recipe, tokenizer)
    folder = Path(root) / name_of(variant)
    settings = {
        "schedule": format_schedule(variant.schedule),
        "variant": variant.tags,
        "parallel": parallel,
        "recipe": {**asdict(recipe), "tokenizer": tokenizer},
        "weights": weights_hash(model),
        "architecture": architecture_hash(model),
        "corpus": prepared(recipe.corpus, tokenizer).corpus_hash,
    }
    if (kept := finished(folder / RESULT, settings)) is not None:
        before, after = (
            schema.check(kept.get(when), Quality, f"{folder / RESULT}: {when}", _AGAIN) for when in ("before", "after")
        )
        return before, after
    writable_folder(Path(root), "root")
    data = LitTextData(
        recipe.corpus,
        tokenizer,
        num_tokens=recipe.num_tokens,
        global_batch_size=recipe.batch_size,
        num_validation_sequences=recipe.num_validation_sequences,
        validation_batch_size=recipe.validation_batch_size,
        seed=recipe.seed,
    )
    trained = copy.deepcopy(getattr(model, "_orig_mod", model)).requires_grad_(True)
    module = LitVariant(trained, recipe)
    options = {"accelerator": accelerator, "precision": recipe.precision, "root": root}
    with kept_random_state(), running_order(trained, variant.schedule, parallel=parallel):
        before = _validate(module, data, options)
        trainer = quiet_trainer(steps=recipe.steps, seed=recipe.seed, gradient_clip_val=recipe.gradient_clip, **options)
        trained.train()
        trainer.fit(module, datamodule=data)
        after = _validate(module, data, options)
    found = {**settings, "before": asdict(before), "after": asdict(after)}

    def fill(part: Path) -> None:
        save(trained, part / MODEL)
        write_json(part / RESULT, found)

    write_folder(folder, fill)
    return before, after


def finetune_variants(
    model: Network, compared: Iterable[Variant], recipe: FinetuningRecipe, *, root: str | Path, **options: Any
) -> Iterator[Record]:
    """Yields `variant_loss` and `variant_accuracy` of each variant, tagged `when` before and after; each begins with
    the same weights. Options and errors are those of `finetune`.

    Of several seeds of a random order the records of their mean come last.
    """
    found: list[Record] = []
    for variant in compared:
        for when, quality in zip(
            ("before", "after"), finetune(model, variant, recipe, root=root, **options), strict=True
        ):
            tags = {**variant.tags, "when": when}
            for metric in ("loss", "accuracy"):
                found.append(
                    Record(
                        metric=f"variant_{metric}",
                        value=getattr(quality, metric),
                        stderr=getattr(quality, f"{metric}_stderr"),
                        n=quality.num_sequences,
                        layer=variant.block,
                        tags=tags,
                    )
                )
        yield from found[-4:]
    yield from means_of_seeds(found, LayeredModel(model).num_layers)


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
        self.train_given(model)
        self.losses: list[Tensor] = []
        self.accuracies: list[Tensor] = []

    def on_validation_epoch_start(self) -> None:
        self.losses, self.accuracies = [], []

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        targets = batch["input_ids"][:, 1:]
        logits = self(batch["input_ids"][:, :-1])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        self.losses.append(losses.double().mean(1).cpu())
        self.accuracies.append((wide.argmax(-1) == targets).double().mean(1).cpu())

    def on_validation_epoch_end(self) -> None:
        """Nothing is logged: `quality` has it."""

    def quality(self) -> Quality:
        """Of the last validation. Sequences are of one length, so that their mean is that of the tokens."""
        loss, accuracy = torch.cat(self.losses), torch.cat(self.accuracies)
        return Quality(
            loss=loss.mean().item(),
            accuracy=accuracy.mean().item(),
            loss_stderr=standard_error(loss),
            accuracy_stderr=standard_error(accuracy),
            num_sequences=len(loss),
        )


def quiet_trainer(*, steps: int, seed: int, root: str | Path, **options: Any) -> L.Trainer:
    """A Trainer of one process that takes so many steps and neither logs, shows nor writes anything."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        devices=1,
        callbacks=[StepSeed(seed)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        limit_val_batches=options.pop("limit_val_batches", 0),
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
    found: Any = schema.read(file, dict[str, Any], _AGAIN)
    for name, value in json.loads(json.dumps(settings)).items():
        if (held := found.get(name)) != value:
            part = (
                next((key for key in value if held.get(key) != value[key]), name) if _both_dicts(held, value) else name
            )
            raise InputError(
                f"{file} is the result of other settings ({part} differs): choose another root, or take it away"
            )
    return found


def means_of_seeds(records: Iterable[Record], num_blocks: int) -> Iterator[Record]:
    """Yields, for each metric and the other tags, the mean over the random orders of one number of middle blocks, with
    its standard error over them."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        if record.tags.get("variant") == "random":
            others = {key: value for key, value in record.tags.items() if key not in ("seed", "schedule")}
            groups.setdefault((record.metric, *sorted(others.items())), []).append(record)
    unchanged = format_schedule(baseline(num_blocks))
    for (metric, *others), found in groups.items():
        values = [record.value for record in found]
        counts = {
            "num_seeds": len(found),
            "num_identical": sum(record.tags["schedule"] == unchanged for record in found),
        }
        yield Record(
            metric=metric,
            value=statistics.fmean(values),
            stderr=statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None,
            n=found[0].n,
            tags={**dict(others), **counts},
        )


def standard_error(values: Tensor) -> float | None:
    """Of the mean; None of a single value."""
    return None if len(values) < 2 else (values.std() / len(values) ** 0.5).item()


def _validate(module: LitVariant, data: L.LightningDataModule, options: Mapping[str, Any]) -> Quality:
    trainer = quiet_trainer(steps=1, seed=0, limit_val_batches=1.0, **options)
    trainer.validate(module, datamodule=data, verbose=False)
    return module.quality()


def check_model(model: Network, recipe: FinetuningRecipe, tokenizer: str) -> None:
    view, kind = LayeredModel(model), type(model).__name__
    if view.family.sees_images or not model.can_generate():
        raise InputError(f"model: expected a causal language model, which predicts the next token, got {kind}")
    if view.max_tokens is not None and recipe.num_tokens > view.max_tokens:
        raise InputError(f"recipe: num_tokens: {kind} takes at most {view.max_tokens} tokens, got {recipe.num_tokens}")
    known, size = true_vocab_size(model), prepared(recipe.corpus, tokenizer).vocab_size
    if size > known:
        raise InputError(f"tokenizer: {kind} knows {known} tokens, {tokenizer} has {size}: name the model's own")


def _both_dicts(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)
