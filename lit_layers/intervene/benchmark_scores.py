"""A benchmark task as an analysis: its score while the model's blocks run in other orders."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lit_layers.analyses.base import Analysis
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.functional import variants as kinds
from lit_layers.functional.block_schedules import Schedule
from lit_layers.functional.variants import OF_MIDDLES, SEEDS, Variant
from lit_layers.intervene.lm_eval_tasks import LmEvalScorer, lm_eval_version, refuse_unknown, task_file_hash
from lit_layers.intervene.own_scorer import OwnScorer, refuse_unknown_tokens
from lit_layers.intervene.prompt_tokens import PromptTokenizer
from lit_layers.intervene.results import ResultFolder
from lit_layers.intervene.scores import (
    NORMALIZED,
    SCORE,
    TaskScores,
    mean_and_error,
    normalized_error,
    normalized_score,
)
from lit_layers.intervene.task_items import SUFFIXES
from lit_layers.intervene.task_prompts import LOCAL_TASKS, Item, items_hash, named
from lit_layers.models.build import architecture_hash, weights_hash
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel, evaluating
from lit_layers.models.vocabulary import is_padded
from lit_layers.records import Record

ScorerName = Literal["own", "lm_eval"]
SCORERS: tuple[ScorerName, ...] = ("own", "lm_eval")
OWN_VERSION = 1  # of our prompts and metrics: raised when a change of them alters numbers
_ELSEWHERE = ("results", "folder", "tell", "batch_size")  # decide where things lie and how fast, not the numbers
_CHOOSING = ("name", "variants", "middles", "seeds", "loops", "custom")  # which results are asked for
_FAILURES = (InputError, FloatingPointError, RuntimeError)  # of one variant; the last is also torch's lack of memory


class Scorer(Protocol):
    def score(self, model: Any) -> TaskScores: ...


@dataclass(kw_only=True)
class BenchmarkScores(Analysis):
    """The score of one task for the full model and for each variant of its running order.

    `task_score` is the accuracy (gsm8k: the exact match behind `####`), `task_score_norm` the accuracy by
    log-likelihood per character where the task has it, `task_perplexity` lambada's, `task_score_flexible` gsm8k's match
    of the last number; each with its standard error over the rows. `random_score` is what guessing scores,
    `normalized_score` the share of the full model's lead over guessing that is left. Where there is no lead, or one
    within its standard error, no variant has a normalised score and `random_score` is tagged `undefined`. Of the seeds
    of a random order there is one record each and one of their mean; its standard error is over the rows, too.

    Every variant's result is a file below `results`, written as it is made; variants that have theirs are not scored
    again, and variants of equal schedules are scored once. A variant that fails (not enough memory, scores that are not
    numbers) gives one record `failed` with the reason as tag `error`, and the others go on; where the full model
    fails, the whole analysis does. Failures leave no file.

    Args:
        task: a name of `LOCAL_TASKS`, or a file (parquet, jsonl, csv) with the columns context, choices and label;
            with scorer "lm_eval" any name that lm-eval knows, or a task file as it has them (yaml).
        tokenizer: a local path or a name of the Hub.
        results: the folder of the results.
        folder: of the local files; None with scorer "lm_eval", and for a task that is a file.
        scorer: "own", or "lm_eval" with data of the Hub.
        variants: which of `lit_layers.functional.variants.VARIANTS`; the full model is always scored.
        middles: numbers of middle blocks; None: all.
        seeds: of random orders.
        loops: of looped_parallel.
        custom: further schedules, written as `1 2 (3,4,5) 6`.
        limit: only the first rows; None: all.
        batch_size: inputs at once.
        max_new_tokens: of generated texts; None: lm-eval's 256.
        tell: is told what goes on, in one line.
    """

    task: str
    tokenizer: str
    results: Path
    folder: Path | None = None
    scorer: ScorerName = "own"
    name: str = ""
    variants: tuple[str, ...] = OF_MIDDLES
    middles: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = SEEDS
    loops: tuple[int, ...] = (3,)
    custom: tuple[str, ...] = ()
    limit: int | None = None
    batch_size: int = 16
    max_new_tokens: int | None = None
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    _tokens: PromptTokenizer | None = field(default=None, init=False, repr=False, compare=False)
    _items: list[Item] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.name = self.name or f"intervene/{self.task_name}"

    @property
    def task_name(self) -> str:
        """What records are tagged with; of a file its name without the ending."""
        return Path(self.task).stem if self.task.endswith((*SUFFIXES, ".yaml")) else self.task

    @property
    def code_file(self) -> str | None:
        """A task file of lm-eval, which may call Python beside it and whose templates are code."""
        return self.task if self.task.endswith(".yaml") else None

    def check(self, model: LayeredModel) -> None:
        self._check_options(model)
        self.variants_of(model)
        refuse_unknown_tokens(self._prompt_tokenizer(), model.vocab_size or 0)
        if self.scorer == "lm_eval":
            refuse_unknown(self.task)
        self.data_hash()

    def variants_of(self, model: LayeredModel) -> list[Variant]:
        """The variants that are scored of this model, the full one first.

        Raises:
            InputError: options that do not fit the model.
        """
        try:
            return kinds.variants(
                model.num_layers,
                self.variants,
                middles=self.middles,
                seeds=self.seeds,
                loops=self.loops,
                custom=self.custom,
            )
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from error

    def config(self) -> dict[str, Any]:
        """Of all that decides the numbers; the scorer's version, too."""
        whole = super().config()
        options = {name: value for name, value in whole["init_args"].items() if name not in _ELSEWHERE}
        if self.scorer == "own":
            return {**whole, "init_args": options | {"version": OWN_VERSION}}
        if self.task.endswith(".yaml"):
            options["task_file"] = task_file_hash(Path(self.task))
        return {**whole, "init_args": options | {"version": lm_eval_version()}}

    def data_hash(self) -> str | None:
        """Of the rows scored, with their prompts; None where lm-eval fetches them (each result has theirs)."""
        return items_hash(self._local_items()) if self.scorer == "own" else None

    def tokenizer_hash(self) -> str | None:
        return self._prompt_tokenizer().hash

    def run(self, model: LayeredModel) -> Iterator[Record]:
        self._check_options(model)
        wanted = self.variants_of(model)
        kept = ResultFolder(self._place(model))
        found: dict[Schedule, TaskScores] = {}
        failed: dict[Schedule, str] = {}
        scorer: Scorer | None = None
        for number, variant in enumerate(wanted, 1):
            schedule = variant.schedule
            if schedule in found or schedule in failed:
                continue
            if (known := kept.read(schedule)) is not None:
                found[schedule] = known
                continue
            self._say(f"{variant} ({number} of {len(wanted)})")
            scorer = scorer or self._scorer(model)
            start = time.perf_counter()
            try:
                with running_order(model.model, schedule), evaluating(model.model):
                    scores = scorer.score(model.model)
            except _FAILURES as error:
                if variant.name == "baseline":
                    raise
                failed[schedule] = f"{type(error).__name__}: {' '.join(str(error).split())}"
                self._say(f"{variant} failed: {failed[schedule]}")
                continue
            kept.write(schedule, scores, self._facts(variant, time.perf_counter() - start))
            found[schedule] = scores
        self._check_rows(found.values(), kept)
        yield from self._records(wanted, found, failed)

    def _records(
        self, wanted: Sequence[Variant], found: dict[Schedule, TaskScores], failed: dict[Schedule, str]
    ) -> Iterator[Record]:
        full = found[wanted[0].schedule]
        score, error = mean_and_error(SCORE, [full.values[SCORE]])
        guessed = full.random_score
        lead = score - guessed > (error or 0.0)
        undefined: dict[str, str | int | float] = {} if lead else {"undefined": NORMALIZED}
        task: dict[str, str | int | float] = {"task": self.task_name}
        yield Record(metric="random_score", value=guessed, n=len(full.values[SCORE]), tags=task | undefined)
        per_seed: dict[int, list[Variant]] = {}
        for variant in wanted:
            tags = variant.tags | task
            if variant.schedule in failed:
                tags |= {"error": failed[variant.schedule]}
                yield Record(metric="failed", value=1.0, layer=variant.block, tags=tags)
                continue
            yield from _of_variant(variant, tags, [found[variant.schedule]], full if lead else None)
            if variant.name == "random" and variant.middle is not None:
                per_seed.setdefault(variant.middle, []).append(variant)
        for middle, seeds in per_seed.items():
            identical = sum(variant.schedule == wanted[0].schedule for variant in seeds)
            tags = {"variant": "random", "middle": middle, "num_seeds": len(seeds), "num_identical": identical}
            scores = [found[variant.schedule] for variant in seeds]
            yield from _of_variant(seeds[0], tags | task, scores, full if lead else None)

    def _check_options(self, model: LayeredModel) -> None:
        network = model.model
        if model.vocab_size is None or not callable(getattr(network, "can_generate", None)):
            raise InputError(f"{self.name}: expected a language model, got {type(network).__name__}")
        if not network.can_generate():
            raise InputError(f"{self.name}: expected a causal language model, got {type(network).__name__}")
        if self.scorer not in SCORERS:
            raise InputError(f"scorer: expected one of {', '.join(SCORERS)}, got {self.scorer!r}")
        for option in ("limit", "batch_size", "max_new_tokens"):
            value = getattr(self, option)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{option}: expected at least 1, got {value!r}")
        if self.scorer == "own":
            named(self.task)
            if self.task in LOCAL_TASKS and self.folder is None:
                raise InputError(
                    f"folder: {self.task} is read from local files: name their folder, or take scorer lm_eval"
                )
            return
        if self.folder is not None or self.task.endswith(SUFFIXES):
            given = f"the folder {self.folder}" if self.folder is not None else f"the file {self.task}"
            raise InputError(f"scorer: lm_eval reads its data from the Hub, got {given}: take scorer own for it")
        if is_padded(network):
            raise InputError(f"{self.name}: lm_eval would score padding rows of the vocabulary: save the model first")

    def _scorer(self, model: LayeredModel) -> Scorer:
        if self.scorer == "lm_eval":
            return LmEvalScorer(
                self.task,
                self.tokenizer,
                limit=self.limit,
                batch_size=self.batch_size,
                max_new_tokens=self.max_new_tokens,
            )
        return OwnScorer(
            named(self.task),
            self._local_items(),
            self._prompt_tokenizer(),
            max_length=model.max_tokens,
            batch_size=self.batch_size,
            max_new_tokens=self.max_new_tokens,
            vocab_size=model.vocab_size,
        )

    def _place(self, model: LayeredModel) -> Path:
        """Over all that decides a result beside the schedule."""
        options = {name: value for name, value in self.config()["init_args"].items() if name not in _CHOOSING}
        options |= {"tokenizer": self.tokenizer_hash(), "data": self.data_hash(), "max_tokens": model.max_tokens}
        options |= {"dtype": str(model.dtype), "attention": model.attention}
        options |= {"architecture": architecture_hash(model.model)}
        if self.scorer == "own":  # the rows themselves count, not how they were asked for
            options |= {"limit": None, "task": self.task_name}
        key = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return self.results / weights_hash(model.model) / self.task_name / key

    def _facts(self, variant: Variant, seconds: float) -> dict[str, Any]:
        own = self.scorer == "own"
        version = f"own {OWN_VERSION}" if own else f"lm-eval {lm_eval_version()}"
        facts = {"task": self.task_name, "variant": str(variant), "scorer": version, "limit": self.limit}
        facts |= {"difference": named(self.task).difference} if own else {}
        return facts | {"seconds": round(seconds, 3)}

    def _check_rows(self, scores: Iterable[TaskScores], kept: ResultFolder) -> None:
        if len({each.rows_hash for each in scores}) > 1:
            raise InputError(
                f"{self.name}: the task's rows changed between variants: remove {kept.folder} and begin anew"
            )

    def _local_items(self) -> list[Item]:
        if self._items is None:
            self._items = named(self.task).items(self.folder or Path(), self.limit)
        return self._items

    def _prompt_tokenizer(self) -> PromptTokenizer:
        if self._tokens is None:
            self._tokens = PromptTokenizer.of(load_tokenizer(self.tokenizer))
        return self._tokens

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.task_name}: {what}")


def _of_variant(
    variant: Variant, tags: dict[str, str | int | float], scores: Sequence[TaskScores], full: TaskScores | None
) -> Iterator[Record]:
    """The records of one variant, or of the mean over several seeds: a row counts with its mean over them.

    Those of a normalised score only where the full model has a lead over guessing.
    """
    for metric in scores[0].values:
        rows = [each.values[metric] for each in scores]
        value, error = mean_and_error(metric, rows)
        yield Record(metric=metric, value=value, layer=variant.block, stderr=error, n=len(rows[0]), tags=tags)
    if full is not None:
        own = [statistics.fmean(row) for row in zip(*(each.values[SCORE] for each in scores), strict=True)]
        whole = full.values[SCORE]
        left = normalized_score(statistics.fmean(own), full.random_score, statistics.fmean(whole))
        error = normalized_error(own, whole, full.random_score)
        yield Record(metric=NORMALIZED, value=left, layer=variant.block, stderr=error, n=len(own), tags=tags)
