"""A model trained on for some steps while its blocks run in another order: how much of the loss that heals."""

import copy
import hashlib
import json
import logging
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_layers import schema
from lit_layers.data.preparing import prepared
from lit_layers.durable import write_json
from lit_layers.emergence import kept_random_state
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import baseline, format_schedule
from lit_layers.functional.variants import Variant
from lit_layers.models.build import architecture_hash, save, weights_hash
from lit_layers.models.families import Network
from lit_layers.models.running_order import Parallel, running_order
from lit_layers.models.view import LayeredModel
from lit_layers.models.vocabulary import true_vocab_size
from lit_layers.records import Record
from lit_layers.training.checkpoint_io import writable_folder, write_folder
from lit_layers.training.datamodules import LitTextData
from lit_layers.training.loss import next_token_loss
from lit_layers.training.optim import adamw, may_fuse, warmup_cosine
from lit_layers.training.resume import StepSeed

_AGAIN = "take it away to train that variant again"
ANALYSIS, RESULT, MODEL = "intervene/finetune", "finetuned.json", "model"
BETAS = (0.9, 0.999)
When = Literal["before", "after"]


class Recipe:
    """Options that a YAML file may give; subclasses are dataclasses."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The options in a YAML file.

        Raises:
            InputError: no such file, no mapping in it, an unknown key, a key that is missing, a wrong value.
        """
        return cls.of(schema.read_yaml(Path(path), dict[str, Any], "write KEY: VALUE lines"))

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """The options of a mapping.

        Raises:
            InputError: an unknown key, a key that is missing, a wrong value.
        """
        known = {field.name: field for field in fields(cls)}  # pyright: ignore[reportArgumentType]
        for key in content:
            if key not in known:
                raise InputError(f"recipe: there is no key {key!r}; the keys are {', '.join(known)}")
        try:
            return cls(**content)
        except TypeError as error:
            missing = re.findall(r"'(\w+)'", str(error))
            raise InputError(f"recipe: expected a value for {', '.join(missing)}") from error


@dataclass(frozen=True, kw_only=True)
class FinetuningRecipe(Recipe):
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
        whole("steps", "batch_size", "num_tokens", "num_validation_sequences", "validation_batch_size", of=self)
        whole("warmup_steps", "seed", of=self, least=0)
        number("learning_rate", of=self, right=lambda value: value > 0, expected="a positive number")
        number("weight_decay", of=self, right=lambda value: value >= 0, expected="a number of at least 0")
        number("min_lr_ratio", of=self, right=lambda value: 0 <= value <= 1, expected="a share from 0 to 1")
        if self.gradient_clip is not None:
            number("gradient_clip", of=self, right=lambda value: value > 0, expected="a positive number or null")
        words("corpus", "precision", of=self)
        if self.tokenizer is not None:
            words("tokenizer", of=self)


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


class LitVariant(L.LightningModule):
    """Next-token training of a causal language model, in whichever order its blocks run."""

    def __init__(self, model: Network, recipe: FinetuningRecipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        self.losses: list[Tensor] = []
        self.accuracies: list[Tensor] = []

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(input_ids=batch["input_ids"][:, :-1], use_cache=False).logits

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        return next_token_loss(self.logits(batch), batch["input_ids"][:, 1:], true_vocab_size(self.model))

    def on_validation_epoch_start(self) -> None:
        self.losses, self.accuracies = [], []

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        targets = batch["input_ids"][:, 1:]
        logits = self.logits(batch)[..., : true_vocab_size(self.model)]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        self.losses.append(losses.double().mean(1).cpu())
        self.accuracies.append((wide.argmax(-1) == targets).double().mean(1).cpu())

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

    def configure_optimizers(self) -> Any:
        recipe = self.recipe
        optimizer = adamw(
            self.model,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            betas=BETAS,
            fused=may_fuse(self.trainer),
        )
        factor = warmup_cosine(
            warmup_steps=recipe.warmup_steps, decay_steps=recipe.steps, min_ratio=recipe.min_lr_ratio
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


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


def whole(*names: str, of: Any, least: int = 1) -> None:
    """Refuses options that are no integers of at least `least`."""
    for name in names:
        value = getattr(of, name)
        if type(value) is not int or value < least:
            raise InputError(f"recipe: {name}: expected an integer of at least {least}, got {value!r}")


def number(name: str, *, of: Any, right: Callable[[float], bool], expected: str) -> None:
    """Refuses an option that is no number, or not a right one."""
    value = getattr(of, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not right(value):
        hint = " (YAML takes 5e-5 for text: write 5.0e-5)" if isinstance(value, str) else ""
        raise InputError(f"recipe: {name}: expected {expected}, got {value!r}{hint}")


def words(*names: str, of: Any) -> None:
    """Refuses options that are no text."""
    for name in names:
        if not isinstance(getattr(of, name), str) or not getattr(of, name):
            raise InputError(f"recipe: {name}: expected a text, got {getattr(of, name)!r}")


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
