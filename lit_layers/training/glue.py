"""GLUE with an encoder whose blocks run in another order, in training and in evaluation."""

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_layers.data.batches import tokenizer_of
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, one_thread, tokenizer_hash
from lit_layers.durable import write_json
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import LOOPS, SEEDS, Variant, variants
from lit_layers.models.build import architecture_hash, weights_hash
from lit_layers.models.families import Network, trunk_of
from lit_layers.models.plain import sequence_classifier
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.schema import BATCH, COUNT, COUNT_OR_NONE, LEARNING_RATE, SEED, WEIGHT_DECAY, refuse_outside
from lit_layers.tasks.catalogue import Task, find
from lit_layers.tasks.glue_rows import GlueRows, glue_metrics, read_rows
from lit_layers.training.checkpoints import writable_folder
from lit_layers.training.datamodules import StepSampler
from lit_layers.training.finetuning import (
    BETAS,
    GRADIENT_CLIP,
    finished,
    means_of_seeds,
    name_of,
    quiet_trainer,
)
from lit_layers.training.modules import adamw, may_fuse, scheduled, warmup_linear
from lit_layers.undisturbed import kept_random_state

ANALYSIS, SCORE, MEAN = "intervene/glue", "task_score", "glue_score"
Training = Literal["full", "frozen"]
TRAININGS: tuple[Training, ...] = ("full", "frozen")
_RANGES = {
    **dict.fromkeys(("num_epochs", "num_tokens", "max_steps", "num_train", "num_validation"), COUNT),
    **dict.fromkeys(("learning_rate", "frozen_learning_rate"), LEARNING_RATE),
    "batch_size": BATCH,
    "warmup_steps": COUNT_OR_NONE,
    "seed": SEED,
    "weight_decay": WEIGHT_DECAY,
    "gradient_clip": GRADIENT_CLIP,
}
_CHOOSING = ("tasks", "training")  # which results are asked for, not what they are


@dataclass(frozen=True, kw_only=True)
class GlueRecipe:
    """How an encoder is fine-tuned on tasks of GLUE.

    Args:
        tasks: names of `lit_layers.tasks.glue_rows.GLUE`.
        training: full, every weight; frozen, the new head alone; or both.
        num_epochs: over the training rows.
        max_steps: no more of them; None: as many as the epochs have.
        batch_size: rows a step.
        num_tokens: of a row; a longer one is cut.
        learning_rate: at its peak, of full training.
        frozen_learning_rate: the same with a frozen trunk.
        warmup_steps: of linear warm-up; a straight line to zero follows.
        weight_decay: on matrices and embeddings.
        gradient_clip: largest norm of the gradient; None: any.
        num_train: random rows to train on; None: all.
        num_validation: random rows to judge by; None: all.
        precision: of Lightning's Trainer.
        seed: of the head, the rows that are drawn, their order and dropout.
    """

    tasks: Sequence[str] = ("cola", "mrpc", "rte", "sst2", "stsb")
    training: Sequence[Training] = ("full",)
    num_epochs: int = 3
    max_steps: int | None = None
    batch_size: int = 32
    num_tokens: int = 128
    learning_rate: float = 2e-5
    frozen_learning_rate: float = 3e-2
    warmup_steps: int = 0
    weight_decay: float = 0.0
    gradient_clip: float | None = 1.0
    num_train: int | None = None
    num_validation: int | None = None
    precision: str = "32-true"
    seed: int = 0

    def __post_init__(self) -> None:
        for option, known in (("tasks", None), ("training", TRAININGS)):
            values = getattr(self, option)
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise InputError(f"recipe: {option}: expected a list of names, got {values!r}")
            for value in values:
                if known is None:
                    find("glue", value)
                elif value not in known:
                    raise InputError(f"recipe: {option}: expected {' or '.join(known)}, got {value!r}")
        refuse_outside("recipe: ", _RANGES, vars(self))

    def steps(self, num_rows: int) -> int:
        """Optimizer steps over so many training rows."""
        all_epochs = -(-num_rows * self.num_epochs // self.batch_size)
        return all_epochs if self.max_steps is None else min(all_epochs, self.max_steps)


def glue_scores(
    model: str | Path,
    recipe: GlueRecipe,
    *,
    root: str | Path,
    folder: str | Path | None,
    names: Sequence[str] = ("skip",),
    middles: Sequence[int] | None = None,
    seeds: Sequence[int] = SEEDS,
    loops: Sequence[int] = LOOPS,
    custom: Sequence[str] = (),
    tokenizer: str | None = None,
    accelerator: str = "auto",
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[str, list[Record]]]:
    """Yields `intervene/glue/TASK` and its records for each task in turn, and at last `intervene/glue` with the mean
    over the tasks.

    `task_score` is the mean of the task's metrics, each of which is a record of its own; `glue_score` the mean of the
    tasks' scores, not normalised. Tags are those of the variant and `training`. Every pair of a variant and a training
    begins with the same weights, new head included, and has a file `root/glue/TASK/TRAINING/VARIANT.json`, written when
    it is done: what has one is not trained again. Of several seeds of a random order there is also the mean.

    Args:
        model: a folder or Hub name of an encoder.
        recipe: how it is trained, on which tasks.
        root: of the results.
        folder: of local data, whose `tasks.yaml` says where they lie; None: the Hub.
        names: of variants; the full model is always one.
        middles: numbers of middle blocks; None: all.
        seeds: of random orders.
        loops: of looped_parallel.
        custom: further schedules, written as `1 2 (3,4,5) 6`.
        tokenizer: None: the model's own.
        accelerator: of Lightning's Trainer.
        tell: is given a line for each result.

    Raises:
        InputError: a model, task, variant or data that is not there or does not fit; results of other settings.
    """
    writable_folder(Path(root), "root")
    words_of = load_tokenizer(tokenizer_of(str(tokenizer or model), None))
    found: dict[str, list[Record]] = {}
    for name in dict.fromkeys(recipe.tasks):
        task = find("glue", name)
        network, trunk = sequence_classifier(model, task.num_classes or 1, seed=recipe.seed)
        view = LayeredModel(trunk)
        check_encoder(view, recipe, words_of.vocab_size)
        compared = _variants(view.num_layers, names, middles, seeds, loops, custom)
        rows = {
            split: read_rows(task, split, folder).take(count, seed=recipe.seed)
            for split, count in (("train", recipe.num_train), ("validation", recipe.num_validation))
        }
        encoded = {split: encode_rows(words_of, each, max_tokens=recipe.num_tokens) for split, each in rows.items()}
        options = {key: value for key, value in asdict(recipe).items() if key not in _CHOOSING}
        settings = {
            "task": name,
            "recipe": options,
            "weights": weights_hash(network),
            "architecture": architecture_hash(network),
            "tokenizer": tokenizer_hash(words_of.tokenizer),
            "rows": {split: each.content_hash() for split, each in rows.items()},
        }
        records = []
        for training in dict.fromkeys(recipe.training):
            for variant in compared:
                file = Path(root) / "glue" / name / training / f"{name_of(variant)}.json"
                asked = {**settings, "training": training, "variant": variant.tags, "block": variant.block}
                kept = finished(file, asked)
                if kept is None:
                    metrics = _score(network, variant, training, task, encoded, recipe, root, accelerator)
                    kept = {**asked, "metrics": metrics, "num_train": len(rows["train"]), "n": len(rows["validation"])}
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_json(file, kept)
                tell(f"{name}, {training}, {variant}: {kept['metrics'][SCORE]:.4f}")
                records += _records(kept, variant, training)
        found[name] = [*records, *means_of_seeds(records, view.num_layers)]
        yield f"{ANALYSIS}/{name}", found[name]
    yield ANALYSIS, list(_over_tasks(found))


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Rows as token ids, each without padding."""

    ids: tuple[np.ndarray, ...]
    segments: tuple[np.ndarray, ...]  # which text of a pair a token is of: 0 or 1
    targets: Tensor  # int64 classes, or float32 values
    num_cut: int  # rows that lost tokens to the limit

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int], filler: int) -> dict[str, Tensor]:
        """Some rows, filled up on the right to the longest of them."""
        width = max(len(self.ids[row]) for row in rows)
        ids = torch.full((len(rows), width), filler)
        segments, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        for place, row in enumerate(rows):
            size = len(self.ids[row])
            ids[place, :size] = torch.from_numpy(self.ids[row])
            segments[place, :size] = torch.from_numpy(self.segments[row])
            mask[place, :size] = 1
        targets = self.targets[torch.tensor(rows)]
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments, "labels": targets}


def encode_rows(tokenizer: TextTokenizer, rows: GlueRows, *, max_tokens: int) -> EncodedRows:
    """Token ids with the tokenizer's special tokens; of a pair too long the longer text loses its end.

    Raises:
        InputError: a limit that leaves no room beside special tokens.
    """
    found, is_pair = tokenizer.tokenizer, len(rows.task.text) == 2
    added = found.num_special_tokens_to_add(is_pair=is_pair)
    if max_tokens <= added + is_pair:
        raise InputError(
            f"max_tokens: expected more than {added + is_pair}, {added} of which are special tokens, got {max_tokens}"
        )
    found.enable_truncation(max_tokens, strategy="longest_first")
    try:
        with one_thread():
            encodings = found.encode_batch([pair if is_pair else pair[0] for pair in rows.texts])
    finally:
        found.no_truncation()
    kind = torch.float32 if rows.task.num_classes is None else torch.int64
    return EncodedRows(
        ids=tuple(np.array(each.ids, dtype=np.int64) for each in encodings),
        segments=tuple(np.array(each.type_ids, dtype=np.int64) for each in encodings),
        targets=torch.tensor(rows.targets).to(kind),
        num_cut=sum(bool(each.overflowing) for each in encodings),
    )


class LitSequenceClassifier(L.LightningModule):
    """Fine-tuning of a classifier of texts (or a regression), in whichever order the blocks of its trunk run."""

    def __init__(self, model: Network, task: Task, recipe: GlueRecipe, training: Training, *, steps: int) -> None:
        super().__init__()
        self.model, self.task, self.recipe, self.steps = model, task, recipe, steps
        self.learning_rate = recipe.learning_rate if training == "full" else recipe.frozen_learning_rate
        trunk = trunk_of(model)
        model.requires_grad_(True)
        trunk.requires_grad_(training == "full")
        has_segments = getattr(model.config, "type_vocab_size", 0) > 1
        columns = LayeredModel(trunk).family.inputs
        self.columns = [name for name in columns if name != "token_type_ids" or has_segments]
        self.predictions: list[Tensor] = []

    def outputs(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Scores of classes (rows, classes), or values (rows,)."""
        logits = self.model(**{name: batch[name] for name in self.columns if name in batch}).logits
        return logits if self.task.num_classes else logits.squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        outputs, labels = self.outputs(batch), batch["labels"]
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.task.num_classes:
            return F.cross_entropy(outputs, labels)
        return F.mse_loss(outputs, labels.to(outputs.dtype))

    def on_validation_epoch_start(self) -> None:
        self.predictions = []

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        outputs = self.outputs(batch)
        self.predictions.append((outputs.argmax(-1) if self.task.num_classes else outputs.double()).cpu())

    def configure_optimizers(self) -> Any:
        optimizer = adamw(
            self.model,
            lr=self.learning_rate,
            weight_decay=self.recipe.weight_decay,
            betas=BETAS,
            fused=may_fuse(self.trainer),
        )
        factor = warmup_linear(warmup_steps=self.recipe.warmup_steps, steps=self.steps)
        return scheduled(optimizer, factor)


def _score(
    network: Network,
    variant: Variant,
    training: Training,
    task: Task,
    encoded: Mapping[str, EncodedRows],
    recipe: GlueRecipe,
    root: str | Path,
    accelerator: str,
) -> dict[str, float]:
    """The metrics of a copy of the network, trained and judged with the variant active."""
    model = copy.deepcopy(network)
    steps = recipe.steps(len(encoded["train"]))
    module = LitSequenceClassifier(model, task, recipe, training, steps=steps)
    filler = model.config.pad_token_id or 0
    sampler = StepSampler(len(encoded["train"]), global_batch_size=recipe.batch_size, seed=recipe.seed)
    train = DataLoader(
        range(len(encoded["train"])),  # pyright: ignore[reportArgumentType]
        batch_sampler=sampler,
        collate_fn=lambda rows: encoded["train"].batch(rows, filler),
    )
    validation = DataLoader(
        range(len(encoded["validation"])),  # pyright: ignore[reportArgumentType]
        batch_size=recipe.batch_size,
        collate_fn=lambda rows: encoded["validation"].batch(rows, filler),
    )
    options = {"accelerator": accelerator, "precision": recipe.precision, "root": root, "seed": recipe.seed}
    with kept_random_state(), running_order(trunk_of(model), variant.schedule):
        model.train()
        trainer = quiet_trainer(steps=steps, gradient_clip_val=recipe.gradient_clip, **options)
        trainer.fit(module, train_dataloaders=train)
        judge = quiet_trainer(steps=1, limit_val_batches=1.0, **options)
        judge.validate(module, dataloaders=validation, verbose=False)
    return glue_metrics(task, torch.cat(module.predictions).numpy(), encoded["validation"].targets.numpy())


def _records(kept: Mapping[str, Any], variant: Variant, training: Training) -> Iterator[Record]:
    rows = kept["n"]
    for metric, value in kept["metrics"].items():
        is_share = set(kept["metrics"]) == {"accuracy", SCORE} or metric == "accuracy"
        yield Record(
            metric=metric,
            value=float(value),
            stderr=math.sqrt(value * (1 - value) / (rows - 1)) if is_share and rows > 1 else None,
            layer=variant.block,
            n=rows,
            tags={**variant.tags, "task": kept["task"], "training": training},
        )


def _over_tasks(found: Mapping[str, list[Record]]) -> Iterator[Record]:
    """The mean score of each variant and training over the tasks, each with equal weight."""
    groups: dict[tuple, list[Record]] = {}
    for record in (record for records in found.values() for record in records if record.metric == SCORE):
        tags = {key: value for key, value in record.tags.items() if key != "task"}
        groups.setdefault((record.layer, tuple(tags.items())), []).append(record)
    for (layer, tags), records in groups.items():
        value = statistics.fmean(record.value for record in records)
        yield Record(metric=MEAN, value=value, layer=layer, tags={**dict(tags), "num_tasks": len(records)})


def _variants(num_blocks: int, names, middles, seeds, loops, custom) -> list[Variant]:
    try:
        return variants(num_blocks, names, middles=middles, seeds=seeds, loops=loops, custom=custom)
    except (TypeError, ValueError) as error:
        raise InputError(f"glue: {error}") from error


def check_encoder(view: LayeredModel, recipe: GlueRecipe, vocab_size: int) -> None:
    kind = type(view.model).__name__
    if view.max_tokens is not None and recipe.num_tokens > view.max_tokens:
        raise InputError(f"recipe: num_tokens: {kind} takes at most {view.max_tokens} tokens, got {recipe.num_tokens}")
    if vocab_size > view.model.config.vocab_size:
        raise InputError(
            f"tokenizer: {kind} knows {view.model.config.vocab_size} tokens, the tokenizer has {vocab_size}: name the "
            "model's own"
        )
