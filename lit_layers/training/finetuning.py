"""Analyses that train a model in each variant of its block order, and fine-tuning on a task of lm-eval."""

import copy
import hashlib
import json
import math
import re
import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from pydantic import ConfigDict
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lit_layers import schema
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.statistics import missing_tag
from lit_layers.data.tokenization import TokenizerMixin
from lit_layers.errors import InputError
from lit_layers.files.durable import write_json
from lit_layers.functional.block_schedules import LOOPS, SEEDS, VARIANTS, Variant, baseline, format_schedule
from lit_layers.measuring.undisturbed import restore_random_state
from lit_layers.models.build import architecture_hash, save, true_vocab_size, weights_hash
from lit_layers.models.families import Network
from lit_layers.models.running_order import running_order, variants_of
from lit_layers.models.view import LayeredModel, evaluating
from lit_layers.records import Record
from lit_layers.schema import refuse_outside
from lit_layers.tasks.benchmark_scores import interval, mean_and_error
from lit_layers.tasks.catalogue import ScoredTask
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, local_task, refuse_unknown
from lit_layers.tasks.task_files import version_of
from lit_layers.training.datamodules import LitStepData
from lit_layers.training.modules import LitCausalLM, LitModule
from lit_layers.training.run_folder import write_folder
from lit_layers.training.trainer import RANGES, StepSeed, new_trainer

RETRAIN = "take it away to train that variant again"
BETAS = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Options for training a given model further.

    Args:
        learning_rate: peak learning rate.
        batch_size: sequences or rows per optimizer step.
        num_tokens: predictions per sequence; longer rows are cut.
        warmup_steps: optimizer steps of linear warm-up.
        weight_decay: weight decay of matrices and embeddings.
        gradient_clip: norm to which larger gradients are clipped; None turns clipping off.
        precision: precision of Lightning's Trainer.
        seed: seed for the order of the data, for dropout, for the choice of random rows and for the weights of a new
            head.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    # pydantic converts the learning rate to a number, because YAML reads 5e-5 as text.
    learning_rate: float = 5e-5
    batch_size: int = 64
    num_tokens: int = 128
    warmup_steps: int = 0
    weight_decay: float = 0.0
    gradient_clip: float | None = 1.0
    precision: str = "32-true"
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_outside("recipe: ", RANGES, vars(self))

    def trainer(self, root: str | Path, accelerator: str, **options: Any) -> L.Trainer:
        """Return a Trainer with the defaults of `lit-layers fit`, in one process and without checkpoints or logs."""
        return new_trainer(
            accelerator=accelerator,
            devices=1,
            precision=self.precision,
            callbacks=[StepSeed(self.seed)],
            default_root_dir=root,
            **options,
        )


def name_of(variant: Variant) -> str:
    """Return the variant's name for folders and files, such as `skip_M_4`, or `custom_` and a hash."""
    if variant.name == "custom":
        return f"custom_{hashlib.sha256(format_schedule(variant.schedule).encode()).hexdigest()[:12]}"
    return re.sub(r"\W+", "_", str(variant))


def cached_result(file: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the saved result of a training run, or None if there is no such file.

    Args:
        file: the file of the result.
        settings: everything that determines the result (options, weights, data), as it must be in the file.

    Raises:
        InputError: if the file is damaged, or is the result of other settings.
    """
    if not file.is_file():
        return None
    result: Any = schema.read(file, dict[str, Any], RETRAIN)
    for name, value in json.loads(json.dumps(settings)).items():
        if (stored := result.get(name)) != value:
            options = value if isinstance(stored, dict) and isinstance(value, dict) else {}
            option = next((key for key in options if stored.get(key) != value[key]), name)
            raise InputError(
                f"{file} is the result of other settings ({option} differs): choose another root, or take it away"
            )
    return result


def seed_means(records: Iterable[Record], num_blocks: int) -> Iterator[Record]:
    """Yield the mean and standard error of each metric over models that run their middle blocks in a random order.

    These models differ in the seed of the order. There is one mean for each combination of the other tags, such as the
    number of middle blocks. NaN values are left out, and `num_undefined` counts them.
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
            **missing_tag("", len(orders) - len(values)),
        }
        value, n = statistics.fmean(values) if values else math.nan, orders[0].n
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        # `interval` chooses a Wilson interval by the metric's name, even if the metric is not a share of rows, such as
        # a correlation. Records of such a metric have no `low`. An empty name then avoids the Wilson interval.
        ends = interval("" if orders[0].low is None else metric, value, error, n or 1)
        yield Record(metric=metric, value=value, stderr=error, n=n, tags={**dict(others), **counts}, **ends)


@dataclass(kw_only=True)
class TrainedVariants(Analysis):
    """The base of analyses that train a model in each of several variants.

    A variant is the model with its blocks in a certain order (skipped, repeated, shuffled, ...). The function
    `lit_layers.functional.block_schedules.variants` explains the options that select variants.

    Args:
        root: the folder for the result of each variant; a variant with a result is not trained again.
        tokenizer: a local path or a name on the Hub.
        variants, middles, seeds, loops, custom: options that select the variants; the full model is always included.
        tell: callback that receives a message about each training run.
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

    def chosen(self, model: LayeredModel) -> list[Variant]:
        """Return the variants of this model that the options select. The full model comes first.

        Raises:
            InputError: if options do not fit the model.
        """
        return variants_of(self, model)

    def compute(self, model: LayeredModel) -> Iterator[Record]:
        """Yield the records of each order of the blocks, then their means over random orders with different seeds."""
        records: list[Record] = []
        try:
            for results in self.train_all(model):
                records += results
                yield from results
        except SystemExit as error:  # undo what Lightning does: it turns Ctrl-C into SystemExit
            raise KeyboardInterrupt from error
        yield from seed_means(records, model.num_layers)

    @abstractmethod
    def train_all(self, model: LayeredModel) -> Iterator[list[Record]]:
        """Yield the records of each variant; a variant without a saved result is trained first."""

    def notify(self, message: str) -> None:
        if self.tell is not None:
            self.tell(message)

    def fit(self, module: LitModule, data: L.LightningDataModule, model: LayeredModel, *, steps: int) -> None:
        """Train the module on the model's device, without logs or checkpoints, and restore the global random state."""
        options: dict[str, Any] = {"limit_val_batches": 0, "gradient_clip_val": self.recipe.gradient_clip}
        with restore_random_state():
            module.model.train()
            trainer = self.recipe.trainer(self.root, accelerator_of(model), max_steps=steps, **options)
            trainer.fit(module, datamodule=data)


def accelerator_of(model: LayeredModel) -> str:
    """Return Lightning's name of the accelerator that a model is on."""
    return "gpu" if model.device.type == "cuda" else "cpu"


def check_texts(model: LayeredModel, num_tokens: int, size: int, *, vocabulary: int, tokenizer: str) -> None:
    """Check that a model takes texts of `num_tokens` tokens, and has at least as many token ids as a tokenizer.

    Args:
        size: number of tokens of the tokenizer.
        vocabulary: number of tokens that the model knows.
        tokenizer: name of the tokenizer in error messages.

    Raises:
        InputError: if one of the two is not the case; the message names the option to change.
    """
    kind = type(model.model).__name__
    if model.max_tokens is not None and num_tokens > model.max_tokens:
        raise InputError(f"recipe: num_tokens: {kind} takes at most {model.max_tokens} tokens, got {num_tokens}")
    if size > vocabulary:
        raise InputError(f"tokenizer: {kind} knows {vocabulary} tokens, {tokenizer} has {size}: name the model's own")


# Fine-tuning on the training rows of a task of lm-eval.

RESULT, WHEN = "finetuned.json", ("before", "after")
_IGNORED = -100
_SCORE_BATCH = 16
Scores = dict[str, tuple[float, float | None, int]]  # metric -> (value, standard error, number of rows)


@dataclass(frozen=True, kw_only=True)
class TaskFinetuningRecipe(TrainingRecipe):
    """Options for training a causal language model on the rows of a task, with warm-up and cosine decay.

    Args:
        task: a task of lm-eval, or of the folder of local data, with training rows.
        num_epochs: passes over the training rows. The last batch is filled up with rows of the next pass.
        num_train: use only the first `num_train` training rows; None uses all.
        limit: score only the first `limit` rows; None scores all.
        min_lr_ratio: final learning rate divided by the peak; with 1, the learning rate is constant.
    """

    task: str
    num_epochs: int = 1
    num_train: int | None = None
    limit: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w-]+", self.task):  # refuse paths: they could name a task file, which can run code
            raise InputError(f"recipe: task: expected a name of lm-eval such as arc_challenge, got {self.task!r}")


class LitAnswers(LitCausalLM):
    """A training module that trains a given model on prompts with answers. Only tokens of answers enter the loss."""

    def __init__(self, model: Network, recipe: TaskFinetuningRecipe, steps: int) -> None:
        super().__init__(
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            betas=BETAS,
            warmup_steps=recipe.warmup_steps,
            decay_steps=steps,
            min_lr_ratio=recipe.min_lr_ratio,
        )
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        """Return the mean cross-entropy of the answers' tokens in nats.

        Rows are padded on the right, so causal attention never reads the padding.
        """
        logits = self(batch["input_ids"][:, :-1])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=_IGNORED)


class AnswerData(LitStepData):
    """Prompts with answers as token ids. A row keeps only its last `num_tokens` + 1 tokens."""

    def __init__(self, rows: list[tuple[list[int], list[int]]], recipe: TaskFinetuningRecipe) -> None:
        super().__init__()
        self.global_batch_size = self.validation_batch_size = recipe.batch_size
        self.num_workers, self.seed = 0, recipe.seed
        self.rows = [_row(*row, recipe.num_tokens + 1) for row in rows]

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.rows, self._sampler(len(self.rows)), collate_fn=_collate)


def _row(prompt: list[int], answer: list[int], max_tokens: int) -> dict[str, Tensor]:
    ids = torch.tensor([*prompt, *answer])
    return {"input_ids": ids[-max_tokens:], "labels": torch.tensor([_IGNORED] * len(prompt) + answer)[-max_tokens:]}


def _collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fills = {"input_ids": 0, "labels": _IGNORED}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


@dataclass(kw_only=True)
class TaskFinetuning(TokenizerMixin, TrainedVariants):
    """Scores of a task before and after fine-tuning each variant of a causal language model on the task.

    A variant is the model with its blocks in a certain order. The records are `task_score`, and `task_score_norm` and
    others if the task has them, tagged `when` and `task`.

    A training row is lm-eval's prompt without examples, the right answer and the end of text. The loss covers only the
    answer and the end of text. Training rows and scored rows come from different splits of the task's data set.

    Each variant starts from the weights of the measured model. Embeddings, head and the blocks that run are trained.
    Blocks that do not run have no gradient and do not change. All randomness comes from the recipe's seed.

    `root/VARIANT/model` holds the trained weights as a saved model, which by default runs its blocks in order, 1 to L.
    `root/VARIANT/finetuned.json` holds the schedule, the other settings and the scores. A variant with a result of the
    same settings is not trained again.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, A.2 (one epoch of ARC). The prompt and the
    choice of tokens for the loss are ours.

    Args:
        recipe: task, epochs, learning rate, ...
        folder: a folder of local data, whose `tasks.yaml` names the files of the task and of its `train` rows. With
            None, the data come from the Hub.
    """

    UNMEASURED = (*TrainedVariants.UNMEASURED, "folder")

    recipe: TaskFinetuningRecipe
    folder: Path | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or f"intervene/finetune_{self.recipe.task}"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        if model.family.sees_images or not model.model.can_generate():
            kind = type(model.model).__name__
            raise InputError(f"model: expected a causal language model, which predicts the next token, got {kind}")
        tokens = {"vocabulary": true_vocab_size(model.model), "tokenizer": self.tokenizer}
        check_texts(model, self.recipe.num_tokens, self.text_tokenizer.vocab_size, **tokens)
        version_of("lm_eval")
        if self.folder is None:
            refuse_unknown(self.recipe.task)
        self.texts  # noqa: B018 - refuses a task without training rows now

    @cached_property
    def texts(self) -> list[tuple[str, str]]:
        """Return the prompt and the answer of each training row.

        Raises:
            InputError: if the task has no training rows, or its prompts are not text followed by an answer.
        """
        return self._scorer(None).training_texts()[: self.recipe.num_train]

    @property
    def steps(self) -> int:
        return math.ceil(self.recipe.num_epochs * len(self.texts) / self.recipe.batch_size)

    @cached_property
    def _local(self) -> ScoredTask | None:
        return None if self.folder is None else local_task(self.recipe.task, self.folder, training=True)

    def data_hash(self) -> str | None:
        return None if self._local is None else self._local.data_hash()

    def settings(self, model: LayeredModel, variant: Variant) -> dict[str, Any]:
        """Return the settings that determine the result of a variant: options, weights and data."""
        return {
            "schedule": format_schedule(variant.schedule),
            "variant": variant.tags,
            "recipe": asdict(self.recipe),
            "weights": weights_hash(model.model),
            "architecture": architecture_hash(model.model),
            "tokenizer": self.tokenizer_hash(),
            "data": self.data_hash(),
            "scorer": f"lm-eval {version_of('lm_eval')}",
        }

    def train_all(self, model: LayeredModel) -> Iterator[list[Record]]:
        variants = self.chosen(model)
        for number, variant in enumerate(variants, 1):
            self.notify(f"training {variant} on {self.recipe.task} ({number} of {len(variants)})")
            scores = self.variant_scores(model, variant)
            yield [record for when in WHEN for record in self._records(variant, when, scores[when])]

    def variant_scores(self, model: LayeredModel, variant: Variant) -> dict[str, Scores]:
        """Return the scores "before" and "after" training a variant. Train only if no scores are saved.

        Raises:
            InputError: if the variant's folder holds the result of other settings (options, weights, data).
        """
        folder, settings = Path(self.root) / name_of(variant), self.settings(model, variant)
        file = folder / RESULT
        if (result := cached_result(file, settings)) is not None:
            return {when: schema.check(result.get(when), Scores, f"{file}: {when}", RETRAIN) for when in WHEN}
        network: Any = copy.deepcopy(model.model).requires_grad_(True)
        scores = dict(zip(WHEN, self._train(network, model, variant), strict=True))

        def fill(draft: Path) -> None:
            save(network, draft / "model")
            write_json(draft / RESULT, {**settings, **scores})

        write_folder(folder, fill)
        return scores

    def _train(self, network: Network, model: LayeredModel, variant: Variant) -> tuple[Scores, Scores]:
        """Train `network` (a copy of the model) with its blocks in the variant's order.

        Return its scores before and after the training.
        """
        rows = [self._token_ids(*texts) for texts in self.texts]
        with running_order(network, variant.schedule):
            before = self._scores(network, model.max_tokens)
            module, data = LitAnswers(network, self.recipe, self.steps), AnswerData(rows, self.recipe)
            self.fit(module, data, model, steps=self.steps)
            return before, self._scores(network.to(model.device), model.max_tokens)

    def _records(self, variant: Variant, when: str, scores: Scores) -> Iterator[Record]:
        """Yield one record per metric, with the standard error of its value over the scored rows."""
        tags = {**variant.tags, "task": self.recipe.task, "when": when}
        for metric, (value, error, n) in scores.items():
            ends = interval(metric, value, error, n)
            yield Record(metric=metric, value=value, stderr=error, n=n, layer=variant.block, tags=tags, **ends)

    def _token_ids(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the token ids of the prompt, and of the answer followed by the end-of-text token.

        The answer is tokenized together with the prompt, unless that changes the tokens of the prompt.
        """
        encode, end = self.text_tokenizer.tokenizer.encode, self.text_tokenizer.end_of_text_id
        whole, before = encode(prompt + answer).ids, encode(prompt).ids
        if whole[: len(before)] != before:
            return before, [*encode(answer, add_special_tokens=False).ids, end]
        return before, [*whole[len(before) :], end]

    def _scores(self, network: Network, max_tokens: int | None) -> Scores:
        with evaluating(network), torch.no_grad():
            values = self._scorer(max_tokens).score(network).values
        return {metric: (*mean_and_error(metric, [rows]), len(rows)) for metric, rows in values.items()}

    def _scorer(self, max_tokens: int | None) -> LmEvalScorer:
        task = self._local or self.recipe.task
        options: dict[str, Any] = {"batch_size": _SCORE_BATCH, "max_length": max_tokens}
        return LmEvalScorer(task, self.tokenizer, limit=self.recipe.limit, **options)
