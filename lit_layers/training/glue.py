"""Tasks of GLUE: their rows, the module that is fine-tuned on them, its scores while blocks run in another order."""

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from lit_layers.data.tokenization import TextTokenizer, WithTokenizer, load_tokenizer, one_thread, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.files.durable import write_json
from lit_layers.functional.block_schedules import Variant
from lit_layers.models.build import architecture_hash, weights_hash
from lit_layers.models.families import Network, trunk_of
from lit_layers.models.running_order import running_order
from lit_layers.models.saved import ENCODERS, sequence_classifier
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.schema import refuse_outside
from lit_layers.tasks.benchmark_rows import interval
from lit_layers.tasks.catalogue import SPLITS, GlueRows, ScoredTask, find, glue_metrics, read_rows
from lit_layers.training import variant_training
from lit_layers.training.datamodules import DATA_RANGES, LitStepData
from lit_layers.training.modules import MODEL_RANGES, LitModule, warmup_linear
from lit_layers.training.run_folder import writable_folder

ANALYSIS, SCORE = "intervene/glue", "task_score"
Training = Literal["full", "frozen"]
_CHOOSING = ("tasks", "training")  # which results are asked for, not what they are


class EncodedRows:
    """Rows as token ids, with the tokenizer's special tokens; of a pair too long the longer text loses its end.

    Raises:
        InputError: a limit that leaves no room beside special tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, rows: GlueRows, *, max_tokens: int) -> None:
        self.words, self.rows, self.max_tokens = tokenizer.tokenizer, rows, max_tokens
        self.is_pair = len(rows.task.text) == 2
        kind = torch.float32 if rows.task.num_classes is None else torch.int64
        self.targets = torch.tensor(rows.targets).to(kind)
        added = self.words.num_special_tokens_to_add(is_pair=self.is_pair)
        if max_tokens <= added + self.is_pair:
            raise InputError(
                f"max_tokens: expected more than {added + self.is_pair}, {added} of which are special tokens, got "
                f"{max_tokens}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int], filler: int) -> dict[str, Tensor]:
        """Some rows, filled up on the right to the longest of them."""
        texts = [self.rows.texts[number] for number in numbers]
        self.words.enable_truncation(self.max_tokens, strategy="longest_first")
        self.words.enable_padding(pad_id=filler)
        try:
            with one_thread():
                encodings = self.words.encode_batch([pair if self.is_pair else pair[0] for pair in texts])
        finally:
            self.words.no_truncation()
            self.words.no_padding()
        return {
            "input_ids": torch.tensor([each.ids for each in encodings]),
            "attention_mask": torch.tensor([each.attention_mask for each in encodings]),
            "token_type_ids": torch.tensor([each.type_ids for each in encodings]),
            "labels": self.targets[torch.tensor(numbers)],
        }


class LitGlueData(LitStepData):
    """Rows of a task of GLUE: `{"input_ids": (batch, tokens), "attention_mask", "token_type_ids", "labels": (batch,)}`.

    Args:
        task: a name of `lit_layers.tasks.catalogue.GLUE`.
        tokenizer: a local path or a name of the Hub: the model's own.
        folder: of local data, whose `tasks.yaml` says where they lie; None: the Hub.
        num_tokens: of a row; a longer one is cut.
        num_train: random rows to train on; None: all.
        num_validation: random rows to judge by; None: all.
        global_batch_size: rows per optimizer step, over all ranks and micro-batches.
        validation_batch_size: rows per validation batch and rank.
        seed: of the rows that are drawn and their order.
        num_workers: loader processes.
    """

    def __init__(
        self,
        task: str,
        tokenizer: str,
        *,
        folder: str | Path | None = None,
        num_tokens: int = 128,
        num_train: int | None = None,
        num_validation: int | None = None,
        global_batch_size: int = 32,
        validation_batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.task, self.tokenizer, self.folder, self.num_tokens = find("glue", task), tokenizer, folder, num_tokens
        self.num_train, self.num_validation, self.seed = num_train, num_validation, seed
        self.global_batch_size, self.validation_batch_size = global_batch_size, validation_batch_size
        self.num_workers = num_workers
        refuse_outside("data.", DATA_RANGES, vars(self))
        self.rows: dict[str, GlueRows] = {}

    def prepare_data(self) -> None:
        for split in () if self.rows else SPLITS:  # one process of a machine downloads
            read_rows(self.task, split, self.folder)

    def setup(self, stage: str | None = None) -> None:
        if self.rows:
            return
        self.words = load_tokenizer(self.tokenizer)
        for split, count in zip(SPLITS, (self.num_train, self.num_validation), strict=True):
            self.rows[split] = read_rows(self.task, split, self.folder).take(count, seed=self.seed)
        self.task = self.rows["train"].task  # with the options of the folder
        self.encoded = {
            split: EncodedRows(self.words, rows, max_tokens=self.num_tokens) for split, rows in self.rows.items()
        }

    def describe(self) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "tokenizer": self.tokenizer,
            "tokenizer_hash": tokenizer_hash(self.words.tokenizer),
            "data_hash": {split: rows.content_hash() for split, rows in self.rows.items()},
        }

    def train_dataloader(self) -> DataLoader:
        return self._rows_loader("train", self._steps(len(self.rows["train"])))

    def val_dataloader(self) -> DataLoader:
        return self._rows_loader("validation", self._validation_batches(len(self.rows["validation"]), "num_validation"))

    def _rows_loader(self, split: str, batches: Any) -> DataLoader:
        model: Any = self._loop().lightning_module.model
        collate = partial(self.encoded[split].batch, filler=model.config.pad_token_id or 0)
        return self._loader(range(len(self.rows[split])), batches, collate_fn=collate)


@dataclass(frozen=True, kw_only=True)
class GlueRecipe(variant_training.TrainingRecipe):
    """How an encoder is fine-tuned on tasks of GLUE; after the warm-up the learning rate falls on a line to zero.

    Args:
        tasks: names of `lit_layers.tasks.catalogue.GLUE`.
        training: full, every weight; frozen, the new head alone; or both.
        num_epochs: over the training rows.
        max_steps: no more of them; None: as many as the epochs have.
        learning_rate: at its peak, of full training.
        frozen_learning_rate: the same with a frozen trunk.
        num_train: random rows to train on; None: all.
        num_validation: random rows to judge by; None: all.
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
        """Optimizer steps over so many training rows."""
        all_epochs = -(-num_rows * self.num_epochs // self.batch_size)
        return all_epochs if self.max_steps is None else min(all_epochs, self.max_steps)


class _Kept(CatMetric):
    """Numbers of the validation rows of all ranks together, in float64, which torchmetrics forgets in a move."""

    dtype = torch.float64  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]


class LitSequenceClassifier(LitModule):
    """Fine-tuning of an encoder on a task of GLUE, kept eager at `.model`: classes, or a value, of one or two texts.

    Args:
        encoder: a folder or a name of the Hub; the head is new.
        training: full, every weight; frozen, the new head alone.
        init_seed: of the new head.
        lr: peak learning rate.
        weight_decay: on matrices and embeddings only.
        betas: of AdamW.
        warmup_steps: optimizer steps of linear warm-up; a straight line to zero follows.
        decay_steps: step at which it ends; None: the last step of the run.
    """

    def __init__(
        self,
        encoder: str | Path,
        *,
        training: Training = "full",
        init_seed: int = 0,
        lr: float = 2e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = variant_training.BETAS,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__({**locals(), "encoder": os.fspath(encoder)})
        self.encoder, self.trained_part, self.init_seed = encoder, training, init_seed
        self.lr, self.weight_decay, self.betas = lr, weight_decay, betas
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        refuse_outside("model.", MODEL_RANGES, vars(self))
        self.judged = nn.ModuleDict({name: _Kept(nan_strategy="disable") for name in ("predictions", "targets")})

    @property
    def task(self) -> ScoredTask:
        """That of the run's data.

        Raises:
            InputError: for data of another kind.
        """
        if not isinstance(self.data, LitGlueData):
            raise InputError(f"data: LitSequenceClassifier needs LitGlueData, got {type(self.data).__name__}")
        return self.data.task

    def build(self) -> Network:
        network, trunk = sequence_classifier(self.encoder, self.task.num_classes or 1, seed=self.init_seed)
        _check_encoder(LayeredModel(trunk), self.data.num_tokens, self.data.words.vocab_size, "data.")
        return self.prepared(network)

    def prepared(self, network: Network) -> Network:
        """The network with the weights that are to be trained."""
        network.train().requires_grad_(True)
        trunk_of(network).requires_grad_(self.trained_part == "full")
        return network

    def outputs(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Scores of classes (rows, classes), or values (rows,)."""
        config: Any = self.model.config
        # No view, whose proof is of the weights as they are: it would be made at every step, and in another order fail.
        takes = set(inspect.signature(type(trunk_of(self.model)).forward).parameters)
        if getattr(config, "type_vocab_size", 0) < 2:
            takes.discard("token_type_ids")
        columns = takes & {"input_ids", "attention_mask", "token_type_ids"}
        logits = self.model(**{name: batch[name] for name in columns if name in batch}).logits
        return logits if self.task.num_classes else logits.squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        outputs, labels = self.outputs(batch), batch["labels"]
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.task.num_classes:
            return F.cross_entropy(outputs, labels)
        return F.mse_loss(outputs, labels.to(outputs.dtype))

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        outputs = self.outputs(batch)
        # The highest of logits that are not numbers is the first class: that would be an accuracy of chance.
        broken = outputs.isnan().any(-1) if self.task.num_classes else outputs.isnan()
        predictions = (outputs.argmax(-1) if self.task.num_classes else outputs).double()
        predictions = predictions.masked_fill(broken, torch.nan)
        for metric, values in zip(self._judged(), (predictions, batch["labels"]), strict=True):
            metric.update(values)

    def scores(self) -> dict[str, Any]:
        predictions, targets = (metric.compute().cpu().numpy() for metric in self._judged())
        for metric in self._judged():
            metric.reset()
        self.result = glue_metrics(self.task, predictions, targets)
        return self.result

    def _judged(self) -> Iterable[Any]:
        return self.judged.values()

    def lr_factor(self, decay_steps: int) -> Callable[[int], float]:
        return warmup_linear(warmup_steps=self.warmup_steps, steps=decay_steps)


@dataclass(kw_only=True)
class GlueScores(WithTokenizer, variant_training.TrainedVariants):
    """Scores of an encoder on one task of GLUE, fine-tuned in each variant of its running order.

    `task_score` is the mean of the task's metrics, each of which is a record of its own. Tags are those of the variant
    and `training`. Every pair of a variant and a training begins with the same weights, new head included, and has a
    file `root/glue/TASK/TRAINING/VARIANT.json`, written when it is done: what has one is not trained again. The encoder
    is opened anew from `model`; what is measured must be the same.

    Args:
        task: a name of `lit_layers.tasks.catalogue.GLUE`.
        recipe: how it is trained.
        model: a folder with an encoder, or a name on the Hub.
        folder: of local data, whose `tasks.yaml` says where they lie; None: the Hub.
    """

    UNMEASURED = (*variant_training.TrainedVariants.UNMEASURED, "folder")

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
        _check_encoder(model, self.recipe.num_tokens, self.words.vocab_size, "recipe: ")
        self.data_hash()

    def data_hash(self) -> str | None:
        if self._data_hash is None:
            task = find("glue", self.task)
            self._data_hash = "-".join(read_rows(task, split, self.folder).content_hash() for split in SPLITS)
        return self._data_hash

    def data(self) -> LitGlueData:
        """The rows that are trained on and judged by."""
        recipe = self.recipe
        data = LitGlueData(
            self.task,
            self.tokenizer,
            folder=self.folder,
            num_tokens=recipe.num_tokens,
            num_train=recipe.num_train,
            num_validation=recipe.num_validation,
            global_batch_size=recipe.batch_size,
            validation_batch_size=recipe.batch_size,
            seed=recipe.seed,
        )
        data.setup()
        return data

    def trained(self, model: LayeredModel) -> Iterator[list[Record]]:
        writable_folder(self.root, "root")
        data, recipe = self.data(), self.recipe
        network, _ = sequence_classifier(self.model, data.task.num_classes or 1, seed=recipe.seed)
        options = {key: value for key, value in asdict(recipe).items() if key not in _CHOOSING}
        settings = {
            "task": self.task,
            "recipe": options,
            "weights": weights_hash(network),
            "architecture": architecture_hash(network),
            "tokenizer": tokenizer_hash(data.words.tokenizer),
            "rows": {split: rows.content_hash() for split, rows in data.rows.items()},
        }
        for training in dict.fromkeys(recipe.training):
            for variant in self.chosen(model):
                file = self.root / "glue" / self.task / training / f"{variant_training.name_of(variant)}.json"
                asked = {**settings, "training": training, "variant": variant.tags, "block": variant.block}
                result = variant_training.finished(file, asked)
                if result is None:
                    scores = self.score(network, variant, training, data, model)
                    counts = {"num_train": len(data.rows["train"]), "n": len(data.rows["validation"])}
                    result = {**asked, "metrics": scores, **counts}
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_json(file, result)
                self.say(f"{self.task}, {training}, {variant}: {result['metrics'][SCORE]:.4f}")
                yield _records(result, variant, training)

    def score(
        self, network: Network, variant: Variant, training: Training, data: LitGlueData, model: LayeredModel
    ) -> dict[str, float]:
        """The metrics of a copy of the network, trained and judged with the variant active where a model is."""
        recipe = self.recipe
        module = LitSequenceClassifier(
            self.model,
            training=training,
            lr=recipe.learning_rate if training == "full" else recipe.frozen_learning_rate,
            weight_decay=recipe.weight_decay,
            warmup_steps=recipe.warmup_steps,
        )
        module.model = module.prepared(copy.deepcopy(network))
        with running_order(trunk_of(module.model), variant.schedule):
            self.fit(module, data, model, steps=recipe.steps(len(data.rows["train"])))
            return self.validated(module, data, model)


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


def _check_encoder(view: LayeredModel, num_tokens: int, vocab_size: int, place: str) -> None:
    variant_training.check_texts(
        view, num_tokens, vocab_size, vocabulary=view.model.config.vocab_size, tokenizer="the tokenizer", place=place
    )
