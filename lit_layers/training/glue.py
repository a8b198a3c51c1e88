"""Fine-tuning on tasks of GLUE with blocks in another order: rows, training module, scores."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_layers.data.tokenization import TextTokenizer, TokenizerMixin, tokenizer_threads
from lit_layers.errors import InputError
from lit_layers.files.durable import write_json
from lit_layers.functional.block_schedules import Variant
from lit_layers.measuring.undisturbed import restore_random_state
from lit_layers.models.build import architecture_hash, weights_hash
from lit_layers.models.families import Network, trunk_of
from lit_layers.models.running_order import running_order
from lit_layers.models.saved import ENCODERS, sequence_classifier
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.tasks.benchmark_scores import interval
from lit_layers.tasks.catalogue import SPLITS, GlueRows, ScoredTask, find, glue_metrics, read_rows
from lit_layers.training.datamodules import LitStepData
from lit_layers.training.finetuning import (
    BETAS,
    TrainedVariants,
    TrainingRecipe,
    accelerator_of,
    cached_result,
    check_texts,
    name_of,
)
from lit_layers.training.modules import LitModule, warmup_linear

ANALYSIS, SCORE = "intervene/glue", "task_score"
Training = Literal["full", "frozen"]
# Options that select which results are computed. They do not affect the results themselves, so a saved result does not
# list them.
_CHOOSING = ("tasks", "training")


class EncodedRows:
    """Rows of a task (a text or a pair of texts each) as token ids with special tokens.

    If a pair is too long, the longer of its texts is truncated.
    """

    def __init__(self, tokenizer: TextTokenizer, rows: GlueRows, *, max_tokens: int) -> None:
        self.tokenizer, self.rows, self.max_tokens = tokenizer.tokenizer, rows, max_tokens
        self.is_pair = len(rows.task.text) == 2
        kind = torch.float32 if rows.task.num_classes is None else torch.int64
        self.targets = torch.tensor(rows.targets).to(kind)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], pad_id: int) -> dict[str, Tensor]:
        """Return a batch of rows, padded on the right to the longest row."""
        texts = [self.rows.texts[index] for index in indices]
        self.tokenizer.enable_truncation(self.max_tokens, strategy="longest_first")
        self.tokenizer.enable_padding(pad_id=pad_id)
        try:
            with tokenizer_threads():
                encodings = self.tokenizer.encode_batch([pair if self.is_pair else pair[0] for pair in texts])
        finally:
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
        return {
            "input_ids": torch.tensor([each.ids for each in encodings]),
            "attention_mask": torch.tensor([each.attention_mask for each in encodings]),
            "token_type_ids": torch.tensor([each.type_ids for each in encodings]),
            "labels": self.targets[torch.tensor(indices)],
        }


@dataclass(frozen=True, kw_only=True)
class GlueRecipe(TrainingRecipe):
    """Options for fine-tuning an encoder on tasks of GLUE, with warm-up and linear decay to zero.

    Args:
        tasks: names in `lit_layers.tasks.catalogue.GLUE`.
        training: `full` trains every weight, `frozen` only the new head; both may be given.
        num_epochs: passes over the training rows.
        max_steps: largest number of optimizer steps; None sets no limit.
        learning_rate: peak learning rate of full training.
        frozen_learning_rate: peak learning rate with a frozen trunk.
        num_train: number of training rows, which are drawn at random; None uses all.
        num_validation: number of validation rows, which are drawn at random; None uses all.
    """

    tasks: Sequence[str] = ("cola", "mrpc", "rte", "sst2", "stsb")
    training: Sequence[Training] = ("full",)
    num_epochs: int = 3
    max_steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 2e-5
    frozen_learning_rate: float = 3e-2
    num_train: int | None = None
    num_validation: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for task in self.tasks:
            find("glue", task)

    def steps(self, num_rows: int) -> int:
        all_epochs = -(-num_rows * self.num_epochs // self.batch_size)
        return all_epochs if self.max_steps is None else min(all_epochs, self.max_steps)


class GlueData(LitStepData):
    """Rows of a task: `{"input_ids": (batch, tokens), "attention_mask", "token_type_ids", "labels": (batch,)}`."""

    def __init__(self, rows: Mapping[str, GlueRows], tokenizer: TextTokenizer, recipe: GlueRecipe) -> None:
        super().__init__()
        self.global_batch_size = self.validation_batch_size = recipe.batch_size
        self.num_workers, self.seed = 0, recipe.seed
        self.rows, self.task = rows, rows["train"].task
        self.encoded = {
            split: EncodedRows(tokenizer, each, max_tokens=recipe.num_tokens) for split, each in rows.items()
        }

    def train_dataloader(self) -> DataLoader:
        return self._rows_loader("train", self._sampler(len(self.rows["train"])))

    def val_dataloader(self) -> DataLoader:
        return self._rows_loader("validation", self._validation_batches(len(self.rows["validation"]), "num_validation"))

    def _rows_loader(self, split: str, batches: Any) -> DataLoader:
        model: Any = self._get_trainer().lightning_module.model
        collate = partial(self.encoded[split].batch, pad_id=model.config.pad_token_id or 0)
        return self._loader(range(len(self.rows[split])), batches, collate_fn=collate)


class LitGlue(LitModule):
    """A training module for an encoder with a new head. It predicts a class or a value for one or two texts."""

    def __init__(self, network: Network, task: ScoredTask, recipe: GlueRecipe, training: Training) -> None:
        super().__init__({})
        self.task, self.betas, self.decay_steps = task, BETAS, None
        self.weight_decay, self.warmup_steps = recipe.weight_decay, recipe.warmup_steps
        self.lr = recipe.learning_rate if training == "full" else recipe.frozen_learning_rate
        self.model = network.train().requires_grad_(True)
        trunk_of(network).requires_grad_(training == "full")
        self.predictions, self.targets = list[Tensor](), list[Tensor]()  # one tensor per validation batch

    def build(self) -> nn.Module:
        return self.model

    def outputs(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits of classes (rows, classes), or values (rows,)."""
        config: Any = self.model.config
        # Read the names of the inputs from the signature. Building a `LayeredModel` would check the network again at
        # every step, because the weights have changed. The check fails if blocks run in another order.
        takes = set(inspect.signature(type(trunk_of(self.model)).forward).parameters)
        if getattr(config, "type_vocab_size", 0) < 2:
            takes.discard("token_type_ids")
        columns = takes & {"input_ids", "attention_mask", "token_type_ids"}
        network: Any = self.model
        logits = network(**{name: batch[name] for name in columns if name in batch}).logits
        return logits if self.task.num_classes else logits.squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        outputs, labels = self.outputs(batch), batch["labels"]
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.task.num_classes:
            return F.cross_entropy(outputs, labels)
        return F.mse_loss(outputs, labels.to(outputs.dtype))

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        outputs = self.outputs(batch)
        # The argmax of NaN logits is the first class, so a diverged model would score at chance. Predict NaN instead.
        broken = outputs.isnan().any(-1) if self.task.num_classes else outputs.isnan()
        predictions = (outputs.argmax(-1) if self.task.num_classes else outputs).double()
        self.predictions.append(predictions.masked_fill(broken, torch.nan).cpu())
        self.targets.append(batch["labels"].double().cpu())

    def scores(self) -> dict[str, Any]:
        return glue_metrics(self.task, torch.cat(self.predictions).numpy(), torch.cat(self.targets).numpy())

    def lr_factor(self, decay_steps: int) -> Callable[[int], float]:
        return warmup_linear(warmup_steps=self.warmup_steps, steps=decay_steps)


@dataclass(kw_only=True)
class GlueScores(TokenizerMixin, TrainedVariants):
    """Scores of an encoder on one task of GLUE after fine-tuning with its blocks in several orders (variants).

    `task_score` is the mean of the task's metrics. Each metric also has its own record. Records are tagged with the
    variant and with `training` (full or frozen). Each combination of variant and `training` starts from the same
    weights, with the same new head. Its result is saved in `root/glue/TASK/TRAINING/VARIANT.json`. A combination with a
    result is not trained again. The encoder is loaded again from `model`, which must be the measured model.

    Args:
        task: a name in `lit_layers.tasks.catalogue.GLUE`.
        recipe: the training options.
        model: a folder with an encoder, or a name on the Hub.
        folder: a folder of local data, whose `tasks.yaml` names the files. With None, the data come from the Hub.
    """

    UNMEASURED = (*TrainedVariants.UNMEASURED, "folder")

    task: str
    recipe: GlueRecipe
    model: str
    folder: Path | None = None
    name: str = ""
    _data_hash: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.name = self.name or f"{ANALYSIS}/{self.task}"
        self.recipe = replace(self.recipe, tasks=(self.task,))

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        kind = getattr(getattr(model.model, "config", None), "model_type", None)
        if kind not in ENCODERS:
            raise InputError(f"glue: expected an encoder ({', '.join(ENCODERS)}), got {type(model.model).__name__}")
        vocabulary = model.model.config.vocab_size
        tokens = {"vocabulary": vocabulary, "tokenizer": "the tokenizer"}
        check_texts(model, self.recipe.num_tokens, self.text_tokenizer.vocab_size, **tokens)
        self.data_hash()

    def data_hash(self) -> str | None:
        if self._data_hash is None:
            task = find("glue", self.task)
            self._data_hash = "-".join(read_rows(task, split, self.folder).content_hash() for split in SPLITS)
        return self._data_hash

    def data(self) -> GlueData:
        """Return the training and validation rows."""
        recipe, task = self.recipe, find("glue", self.task)
        counts = {"train": recipe.num_train, "validation": recipe.num_validation}
        rows = {split: read_rows(task, split, self.folder).take(counts[split], seed=recipe.seed) for split in SPLITS}
        return GlueData(rows, self.text_tokenizer, recipe)

    def train_all(self, model: LayeredModel) -> Iterator[list[Record]]:
        data, recipe = self.data(), self.recipe
        network, _ = sequence_classifier(self.model, data.task.num_classes or 1, seed=recipe.seed)
        options = {key: value for key, value in asdict(recipe).items() if key not in _CHOOSING}
        settings = {
            "task": self.task,
            "recipe": options,
            "weights": weights_hash(network),
            "architecture": architecture_hash(network),
            "tokenizer": self.tokenizer_hash(),
            "rows": {split: rows.content_hash() for split, rows in data.rows.items()},
        }
        for training in dict.fromkeys(recipe.training):
            for variant in self.chosen(model):
                file = self.root / "glue" / self.task / training / f"{name_of(variant)}.json"
                key = {**settings, "training": training, "variant": variant.tags, "block": variant.block}
                result = cached_result(file, key)
                if result is None:
                    scores = self.score(network, variant, training, data, model)
                    counts = {"num_train": len(data.rows["train"]), "n": len(data.rows["validation"])}
                    result = {**key, "metrics": scores, **counts}
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_json(file, result)
                self.notify(f"{self.task}, {training}, {variant}: {result['metrics'][SCORE]:.4f}")
                yield _records(result, variant, training)

    def score(
        self, network: Network, variant: Variant, training: Training, data: GlueData, model: LayeredModel
    ) -> dict[str, float]:
        """Train a copy of the network with its blocks in the variant's order, and return its scores by metric.

        The training runs on the device of `model`.
        """
        module = LitGlue(copy.deepcopy(network), data.task, self.recipe, training)
        with running_order(trunk_of(module.model), variant.schedule):
            self.fit(module, data, model, steps=self.recipe.steps(len(data.rows["train"])))
            with restore_random_state():
                trainer = self.recipe.trainer(self.root, accelerator_of(model), max_steps=1)
                trainer.validate(module, datamodule=data, verbose=False)
        return module.scores()


def _records(result: Mapping[str, Any], variant: Variant, training: Training) -> list[Record]:
    rows, scores = result["n"], result["metrics"]
    shares = set(scores) if set(scores) == {"accuracy", SCORE} else {"accuracy"}
    tags = {**variant.tags, "task": result["task"], "training": training}
    records = []
    for metric, value in ((metric, float(value)) for metric, value in scores.items()):
        error = math.sqrt(value * (1 - value) / (rows - 1)) if metric in shares and rows > 1 else None
        ends = interval(metric, value, error, rows)
        records += [Record(metric=metric, value=value, stderr=error, layer=variant.block, n=rows, tags=tags, **ends)]
    return records
