"""A model trained on the training rows of a task while its blocks run in another order: what score that heals."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Variant, format_schedule
from lit_layers.models.build import architecture_hash, weights_hash
from lit_layers.models.families import Network
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel, evaluating
from lit_layers.models.workload import Work, bytes_of_model
from lit_layers.records import Record
from lit_layers.tasks.benchmark_rows import LocalRows, local_rows, mean_and_error
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, lm_eval_version, refuse_unknown
from lit_layers.training.datamodules import LitStepData
from lit_layers.training.finetuning import (
    BETAS,
    TrainedVariants,
    TrainingRecipe,
    accelerator_of,
    before_and_after,
    check_generator,
    name_of,
)
from lit_layers.training.modules import LitCausalLM
from lit_layers.undisturbed import kept_random_state

_IGNORED = -100
_SCORED_AT_ONCE = 16


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
        if self.limit is not None and self.limit < 1:
            raise InputError(f"recipe: limit: expected at least 1, got {self.limit}")


class LitAnswers(LitCausalLM):
    """Training of a model that is there already on answers: the tokens of what is asked have no loss."""

    def __init__(self, model: Network, recipe: TaskFinetuningRecipe, steps: int) -> None:
        rates: dict[str, Any] = {"warmup_steps": recipe.warmup_steps, "decay_steps": steps}
        rates |= {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, "betas": BETAS}
        super().__init__(min_lr_ratio=recipe.min_lr_ratio, **rates)
        self.model = model

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
class TaskFinetuning(TrainedVariants):
    """The score of a task before and after each variant of a causal language model is trained on the task's training
    rows: `task_score`, and `task_score_norm` and the like where the task has them, tagged `when` and `task`.

    A row is what lm-eval asks without examples, then the right answer and the end of text; the loss is that of the
    answer's tokens. What is trained, and where the weights are left, is as for `Finetuning`. A task's training rows and
    those that are scored are the two splits of its data set.
    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, A.2 (one epoch of ARC; which tokens have a
    loss, and the prompt, are ours).

    Args:
        recipe: task, epochs, learning rate, ...
        folder: of local data, whose `tasks.yaml` says where the task lies, its `train` rows, too; None: the Hub.
    """

    UNMEASURED = ("root", "tell", "folder")

    recipe: TaskFinetuningRecipe
    folder: Path | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or f"intervene/finetune_{self.recipe.task}"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        check_generator(model, self.recipe.num_tokens, self.tokenizer, self._words.vocab_size)
        lm_eval_version()
        if self.folder is None:
            refuse_unknown(self.recipe.task)
        self.texts  # noqa: B018 - a task without training rows is refused now

    def work(self, model: LayeredModel) -> Work:
        scored = len(self._local.rows[self._local.split]) if self._local else self.recipe.limit or 1000
        work = self.of_variants(
            model,
            tokens=self.recipe.num_tokens,
            samples=self.steps * self.recipe.batch_size,
            judged=8 * scored,  # four answers a row, before and after
            judged_at_once=_SCORED_AT_ONCE,
        )
        return replace(work, disk=float(len(self.chosen(model)) * bytes_of_model(model)))

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

    def tokenizer_hash(self) -> str | None:
        return tokenizer_hash(self._words.tokenizer)

    def trained(self, model: LayeredModel) -> Iterator[list[Record]]:
        compared = self.chosen(model)
        for number, variant in enumerate(compared, 1):
            self.say(f"training {variant} on {self.recipe.task} ({number} of {len(compared)})")
            tags = {**variant.tags, "task": self.recipe.task}
            yield [
                Record(metric=metric, value=value, stderr=error, n=n, layer=variant.block, tags={**tags, "when": when})
                for when, scores in self.scores(model, variant).items()
                for metric, (value, error, n) in scores.items()
            ]

    def scores(self, model: LayeredModel, variant: Variant) -> dict[str, dict[str, tuple[float, float | None, int]]]:
        """Trains a copy with the variant active; each metric "before" and "after" with its standard error and rows.

        Raises:
            InputError: a folder with the result of other options.
        """
        network, folder = model.model, Path(self.root) / name_of(variant)
        settings = {
            "schedule": format_schedule(variant.schedule),
            "variant": variant.tags,
            "recipe": asdict(self.recipe),
            "tokenizer": self.tokenizer_hash(),
            "data": self.data_hash(),
            "scorer": f"lm-eval {lm_eval_version()}",
            "weights": weights_hash(network),
            "architecture": architecture_hash(network),
        }

        def make(network: Any) -> tuple[Any, Any]:
            with running_order(network, variant.schedule):
                before = self._scored(network, model.max_tokens)
                self._train(network, accelerator_of(model))
                return before, self._scored(network.to(model.device), model.max_tokens)

        return before_and_after(folder, settings, dict[str, tuple[float, float | None, int]], network, make)

    def _train(self, network: Network, accelerator: str) -> None:
        rows = [self._tokens_of(*texts) for texts in self.texts]
        with kept_random_state():
            network.train()
            options: dict[str, Any] = {"limit_val_batches": 0, "gradient_clip_val": self.recipe.gradient_clip}
            trainer = self.recipe.trainer(self.root, accelerator, max_steps=self.steps, **options)
            trainer.fit(LitAnswers(network, self.recipe, self.steps), datamodule=AnswerData(rows, self.recipe))

    def _tokens_of(self, asked: str, answer: str) -> tuple[list[int], list[int]]:
        """Those of the answer as they are after what is asked, where that leaves the latter's as they are."""
        encode, end = self._words.tokenizer.encode, self._words.end_of_text_id
        whole, before = encode(asked + answer).ids, encode(asked).ids
        if whole[: len(before)] != before:
            return before, [*encode(answer, add_special_tokens=False).ids, end]
        return before, [*whole[len(before) :], end]

    def _scored(self, network: Network, longest: int | None) -> dict[str, tuple[float, float | None, int]]:
        with evaluating(network), torch.no_grad():
            values = self._scorer(longest).score(network).values
        return {metric: (*mean_and_error(metric, [rows]), len(rows)) for metric, rows in values.items()}

    def _scorer(self, longest: int | None) -> LmEvalScorer:
        rows = self._local or self.recipe.task
        options: dict[str, Any] = {"batch_size": _SCORED_AT_ONCE, "max_length": longest}
        return LmEvalScorer(rows, self.tokenizer, limit=self.recipe.limit, **options)

    @cached_property
    def _words(self) -> TextTokenizer:
        return load_tokenizer(self.tokenizer)
