"""Analyses that train a model in each variant of its running order, and the one on the training rows of a task."""

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
from lit_layers.analyses.statistics import left_out
from lit_layers.data.tokenization import TokenizerMixin
from lit_layers.errors import InputError
from lit_layers.files.durable import write_json
from lit_layers.functional.block_schedules import LOOPS, SEEDS, VARIANTS, Variant, baseline, format_schedule
from lit_layers.measuring.undisturbed import kept_random_state
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

    __pydantic_config__ = ConfigDict(extra="forbid")  # 5e-5 is text to YAML, and is read as a number
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


def cached_result(file: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result in a file that was made with these settings; None where there is none.

    Raises:
        InputError: it was made with others, or is damaged.
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
            for results in self.train_all(model):
                records += results
                yield from results
        except SystemExit as error:  # Lightning makes Ctrl-C an exit of the process
            raise KeyboardInterrupt from error
        yield from seed_means(records, model.num_layers)

    @abstractmethod
    def train_all(self, model: LayeredModel) -> Iterator[list[Record]]:
        """Yield what each variant gives, trained now where that is not done."""

    def notify(self, message: str) -> None:
        if self.tell is not None:
            self.tell(message)

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


# On the training rows of a task of lm-eval.

RESULT, WHEN = "finetuned.json", ("before", "after")
_IGNORED = -100
_SCORE_BATCH = 16
Scores = dict[str, tuple[float, float | None, int]]  # of each metric the value, its standard error, the rows


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


class LitAnswers(LitCausalLM):
    """Training of an existing model on answers: the tokens of what is asked have no loss."""

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
    """Scores of a task before and after each variant of a causal language model is trained on the task's training
    rows: `task_score`, and `task_score_norm` and the like where the task has them, tagged `when` and `task`.

    A row is what lm-eval asks without examples, then the right answer and the end of text; the loss is that of the
    answer's tokens. A task's training rows and those that are scored are the two splits of its data set.

    Each variant begins with a copy of the measured model's weights. What is trained: embeddings, head and the blocks
    that run; the others have no gradient and stay. The trained weights lie in `root/NAME/model` as any saved model does
    (which runs in its plain order by default: `finetuned.json` beside it says the schedule). Where that folder is there
    already for the same weights, schedule and recipe, it is not trained again. All is a function of the recipe's seed.
    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, A.2 (one epoch of ARC; which tokens have a
    loss, and the prompt, are ours).

    Args:
        recipe: task, epochs, learning rate, ...
        folder: of local data, whose `tasks.yaml` says where the task lies, its `train` rows, too; None: the Hub.
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
        check_texts(model, self.recipe.num_tokens, self.loaded_tokenizer.vocab_size, **tokens)
        version_of("lm_eval")
        if self.folder is None:
            refuse_unknown(self.recipe.task)
        self.texts  # noqa: B018 - a task without training rows is refused now

    @cached_property
    def texts(self) -> list[tuple[str, str]]:
        """Prompt and answer of each training row.

        Raises:
            InputError: a task without training rows, or whose prompts are no text before an answer.
        """
        return self._scorer(None).training_texts()[: self.recipe.num_train]

    @property
    def steps(self) -> int:
        """Of the optimizer."""
        return math.ceil(self.recipe.num_epochs * len(self.texts) / self.recipe.batch_size)

    @cached_property
    def _local(self) -> ScoredTask | None:
        return None if self.folder is None else local_task(self.recipe.task, self.folder, training=True)

    def data_hash(self) -> str | None:
        return None if self._local is None else self._local.data_hash()

    def settings(self, model: LayeredModel, variant: Variant) -> dict[str, Any]:
        """Return all that decides the result of a variant."""
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
        compared = self.chosen(model)
        for number, variant in enumerate(compared, 1):
            self.notify(f"training {variant} on {self.recipe.task} ({number} of {len(compared)})")
            scores = self.variant_scores(model, variant)
            yield [record for when in WHEN for record in self._records(variant, when, scores[when])]

    def variant_scores(self, model: LayeredModel, variant: Variant) -> dict[str, Scores]:
        """Return the scores "before" and "after" of a variant, read where its folder has them already.

        Raises:
            InputError: a folder with the result of other settings.
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
        """Train the copy of a model with the variant active; return its scores before and after."""
        rows = [self._token_ids(*texts) for texts in self.texts]
        with running_order(network, variant.schedule):
            before = self._scores(network, model.max_tokens)
            module, data = LitAnswers(network, self.recipe, self.steps), AnswerData(rows, self.recipe)
            self.fit(module, data, model, steps=self.steps)
            return before, self._scores(network.to(model.device), model.max_tokens)

    def _records(self, variant: Variant, when: str, scores: Scores) -> Iterator[Record]:
        """Yield each metric with its standard error over the rows."""
        tags = {**variant.tags, "task": self.recipe.task, "when": when}
        for metric, (value, error, n) in scores.items():
            ends = interval(metric, value, error, n)
            yield Record(metric=metric, value=value, stderr=error, n=n, layer=variant.block, tags=tags, **ends)

    def _token_ids(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Those of the answer as they are after the prompt, where that leaves the latter's as they are."""
        encode, end = self.loaded_tokenizer.tokenizer.encode, self.loaded_tokenizer.end_of_text_id
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
