"""A causal language model trained, in each running order, on a corpus or on a task: what that heals."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lit_layers.data.preparing import prepared
from lit_layers.data.shards import TokenShards
from lit_layers.data.tokenization import WithTokenizer
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Variant
from lit_layers.models.build import true_vocab_size
from lit_layers.models.families import Network
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel, evaluating
from lit_layers.records import Record
from lit_layers.tasks.benchmark_rows import LocalRows, interval, local_rows, mean_and_error
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, lm_eval_version, refuse_unknown
from lit_layers.training.datamodules import LitStepData, LitTextData
from lit_layers.training.modules import LitCausalLM
from lit_layers.training.variant_training import BETAS, SavedVariants, TrainingRecipe, check_texts

ANALYSIS = "intervene/finetune"
_IGNORED = -100
_SCORED_AT_ONCE = 16
Scores = dict[str, tuple[float, float | None, int]]  # of each metric the value, its standard error, the rows


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

    def __init__(self, model: Network, recipe: Any, steps: int) -> None:
        super().__init__(
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            betas=BETAS,
            warmup_steps=recipe.warmup_steps,
            decay_steps=steps,
            min_lr_ratio=recipe.min_lr_ratio,
        )
        self.model = model
        self._rows: list[Tensor] = []  # loss and accuracy of the sequences

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        targets = batch["input_ids"][:, 1:]
        logits = self(batch["input_ids"][:, :-1])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        hits = (wide.argmax(-1) == targets).double().masked_fill(losses.isnan(), torch.nan)
        self._rows.append(torch.stack([losses.double().mean(1), hits.mean(1)]).cpu())

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


def check_generator(model: LayeredModel, num_tokens: int, tokenizer: str, size: int) -> None:
    """Refuses a model that is no causal language model, rows that it does not read, and another's tokenizer."""
    if model.family.sees_images or not model.model.can_generate():
        kind = type(model.model).__name__
        raise InputError(f"model: expected a causal language model, which predicts the next token, got {kind}")
    check_texts(model, num_tokens, size, vocabulary=true_vocab_size(model.model), tokenizer=tokenizer)


@dataclass(kw_only=True)
class Finetuning(SavedVariants):
    """Loss and accuracy of each variant of a causal language model before and after it is trained:
    `variant_loss` and `variant_accuracy`, tagged `when`.

    What is trained, and where the weights are left, is as for `SavedVariants`.

    Args:
        recipe: corpus, steps, learning rate, ...
    """

    RESULT_TYPE = Quality

    recipe: FinetuningRecipe
    name: str = ANALYSIS

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        check_generator(model, self.recipe.num_tokens, self._tokenizer(), self._shards().vocab_size)

    def data_hash(self) -> str | None:
        shards = self._shards()
        return f"{shards.corpus_hash[:16]}-{shards.tokenizer_hash}"

    def tokenizer_hash(self) -> str | None:
        return self._shards().tokenizer_hash

    def settings(self, model: LayeredModel, variant: Variant) -> dict[str, Any]:
        recipe = {**asdict(self.recipe), "tokenizer": self._tokenizer()}
        options = {"recipe": recipe, "corpus": self._shards().corpus_hash}
        return super().settings(model, variant) | options

    def train(self, network: Network, model: LayeredModel, variant: Variant) -> tuple[Quality, Quality]:
        recipe = self.recipe
        data = LitTextData(
            recipe.corpus,
            self._tokenizer(),
            num_tokens=recipe.num_tokens,
            global_batch_size=recipe.batch_size,
            num_validation_sequences=recipe.num_validation_sequences,
            validation_batch_size=recipe.validation_batch_size,
            seed=recipe.seed,
        )
        module = LitVariant(network, recipe, recipe.steps)
        with running_order(network, variant.schedule):
            before = self.validated(module, data, model)
            self.fit(module, data, model, steps=recipe.steps)
            return before, self.validated(module, data, model)

    def records(self, variant: Variant, when: str, result: Quality) -> Iterator[Record]:
        tags, n = {**variant.tags, "when": when}, result.num_sequences
        for name in ("loss", "accuracy"):
            metric, value, error = f"variant_{name}", getattr(result, name), getattr(result, f"{name}_stderr")
            ends = interval(metric, value, error, n)
            yield Record(metric=metric, value=value, stderr=error, n=n, layer=variant.block, tags=tags, **ends)

    def _tokenizer(self) -> str:
        return self.recipe.tokenizer or self.tokenizer

    def _shards(self) -> TokenShards:
        return prepared(self.recipe.corpus, self._tokenizer())


# On the training rows of a task.


@dataclass(frozen=True, kw_only=True)
class TaskFinetuningRecipe(TrainingRecipe):
    """How a causal language model is trained on the rows of a task; after the warm-up the learning rate falls on a
    cosine.

    Args:
        task: of lm-eval, or with a folder of local data one that is there; it has training rows.
        num_epochs: passes over the training rows; the last batch is filled up with rows of the next pass.
        num_train: the first training rows only; None: all.
        limit: only the first rows are scored; None: all.
        min_lr_ratio: final learning rate over the peak; 1 keeps it.
    """

    task: str
    num_epochs: int = 1
    num_train: int | None = None
    limit: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w-]+", self.task):  # a task file is code, which a recipe does not name
            raise InputError(f"recipe: task: expected a name of lm-eval such as arc_challenge, got {self.task!r}")


class LitAnswers(LitVariant):
    """Training of a model that is there already on answers: the tokens of what is asked have no loss."""

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        """The mean cross-entropy of the answers' tokens, in nats; padding stands after and is never looked at."""
        logits = self(batch["input_ids"][:, :-1])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=_IGNORED)


class AnswerData(LitStepData):
    """Rows of what is asked and its answer, as tokens: each longer than `num_tokens` + 1 loses its beginning."""

    def __init__(self, rows: list[tuple[list[int], list[int]]], recipe: TaskFinetuningRecipe) -> None:
        super().__init__()
        self.global_batch_size = self.validation_batch_size = recipe.batch_size
        self.num_workers, self.seed = 0, recipe.seed
        self.rows = [_row(*row, recipe.num_tokens + 1) for row in rows]

    def describe(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.rows, self._steps(len(self.rows)), collate_fn=_padded)


def _row(asked: list[int], answer: list[int], longest: int) -> dict[str, Tensor]:
    ids = torch.tensor([*asked, *answer])
    return {"input_ids": ids[-longest:], "labels": torch.tensor([_IGNORED] * len(asked) + answer)[-longest:]}


def _padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fills = {"input_ids": 0, "labels": _IGNORED}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


@dataclass(kw_only=True)
class TaskFinetuning(WithTokenizer, SavedVariants):
    """The score of a task before and after each variant of a causal language model is trained on the task's training
    rows: `task_score`, and `task_score_norm` and the like where the task has them, tagged `when` and `task`.

    A row is what lm-eval asks without examples, then the right answer and the end of text; the loss is that of the
    answer's tokens. What is trained, and where the weights are left, is as for `SavedVariants`. A task's training rows
    and those that are scored are the two splits of its data set.
    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, A.2 (one epoch of ARC; which tokens have a
    loss, and the prompt, are ours).

    Args:
        recipe: task, epochs, learning rate, ...
        folder: of local data, whose `tasks.yaml` says where the task lies, its `train` rows, too; None: the Hub.
    """

    UNMEASURED = (*SavedVariants.UNMEASURED, "folder")
    RESULT_TYPE = Scores

    recipe: TaskFinetuningRecipe
    folder: Path | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or f"intervene/finetune_{self.recipe.task}"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        check_generator(model, self.recipe.num_tokens, self.tokenizer, self.words.vocab_size)
        lm_eval_version()
        if self.folder is None:
            refuse_unknown(self.recipe.task)
        self.texts  # noqa: B018 - a task without training rows is refused now

    @cached_property
    def texts(self) -> list[tuple[str, str]]:
        """What is asked, and its answer, of each training row.

        Raises:
            InputError: a task without training rows, or whose prompts are no text before an answer.
        """
        return self._scorer(None).training_texts()[: self.recipe.num_train]

    @property
    def steps(self) -> int:
        """Of the optimizer."""
        return math.ceil(self.recipe.num_epochs * len(self.texts) / self.recipe.batch_size)

    @cached_property
    def _local(self) -> LocalRows | None:
        task, limit = self.recipe.task, self.recipe.limit
        return None if self.folder is None else local_rows(task, self.folder, limit, training=True)

    def data_hash(self) -> str | None:
        return None if self._local is None else self._local.content_hash()

    def on(self) -> str:
        return f" on {self.recipe.task}"

    def settings(self, model: LayeredModel, variant: Variant) -> dict[str, Any]:
        scorer = f"lm-eval {lm_eval_version()}"
        options = {"tokenizer": self.tokenizer_hash(), "data": self.data_hash(), "scorer": scorer}
        return super().settings(model, variant) | options

    def train(self, network: Network, model: LayeredModel, variant: Variant) -> tuple[Scores, Scores]:
        rows = [self._tokens_of(*texts) for texts in self.texts]
        with running_order(network, variant.schedule):
            before = self._scored(network, model.max_tokens)
            module, data = LitAnswers(network, self.recipe, self.steps), AnswerData(rows, self.recipe)
            self.fit(module, data, model, steps=self.steps)
            return before, self._scored(network.to(model.device), model.max_tokens)

    def records(self, variant: Variant, when: str, result: Scores) -> Iterator[Record]:
        """Each metric with its standard error over the rows."""
        tags = {**variant.tags, "task": self.recipe.task, "when": when}
        for metric, (value, error, n) in result.items():
            ends = interval(metric, value, error, n)
            yield Record(metric=metric, value=value, stderr=error, n=n, layer=variant.block, tags=tags, **ends)

    def _tokens_of(self, asked: str, answer: str) -> tuple[list[int], list[int]]:
        """Those of the answer as they are after what is asked, where that leaves the latter's as they are."""
        encode, end = self.words.tokenizer.encode, self.words.end_of_text_id
        whole, before = encode(asked + answer).ids, encode(asked).ids
        if whole[: len(before)] != before:
            return before, [*encode(answer, add_special_tokens=False).ids, end]
        return before, [*whole[len(before) :], end]

    def _scored(self, network: Network, longest: int | None) -> Scores:
        with evaluating(network), torch.no_grad():
            values = self._scorer(longest).score(network).values
        return {metric: (*mean_and_error(metric, [rows]), len(rows)) for metric, rows in values.items()}

    def _scorer(self, longest: int | None) -> LmEvalScorer:
        rows = self._local or self.recipe.task
        options: dict[str, Any] = {"batch_size": _SCORED_AT_ONCE, "max_length": longest}
        return LmEvalScorer(rows, self.tokenizer, limit=self.recipe.limit, **options)
