"""Benchmark scores as an analysis, for the model and for variants whose blocks run in another order.

Scores are means over rows with standard errors. A schedule is the order in which blocks run. Each task and schedule has
one JSON file of results, so an interrupted run continues with the missing schedules.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lit_layers.analyses.base import Analysis, Dtype
from lit_layers.data.tokenization import TokenizerMixin
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import write_json
from lit_layers.functional.block_schedules import MIDDLE_NAMES, SEEDS, Schedule, Variant, format_schedule
from lit_layers.functional.curves import wilson_interval
from lit_layers.identity import hash_of, sha16
from lit_layers.models.build import architecture_hash, weights_hash
from lit_layers.models.copies import BFloat16View
from lit_layers.models.running_order import running_order, variants_of
from lit_layers.models.view import LayeredModel, evaluating, upcast
from lit_layers.records import Record
from lit_layers.tasks.catalogue import ScoredTask
from lit_layers.tasks.lm_eval_scorer import (
    PERPLEXITY,
    SCORE,
    LmEvalScorer,
    TaskScores,
    local_task,
    refuse_unknown,
    task_file_hash,
)
from lit_layers.tasks.task_files import read_result, version_of

NORMALIZED = "normalized_score"
_SELECTION = ("name", "variants", "middles", "seeds", "loops", "custom")  # options that say which variants are scored
# If a variant raises one of these errors, it is recorded as failed and the others continue. Running out of memory
# raises a RuntimeError.
_FAILURES = (InputError, FloatingPointError, RuntimeError)


def mean_and_error(metric: str, runs: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Return a metric averaged over runs of a task, such as the seeds of a random order, with its standard error.

    The standard error is that of a mean over the rows of the task.

    Args:
        metric: Name of the metric. The perplexity is exp of the mean negative log-likelihood of a run. Its error is
            computed to first order in each row (delta method). Any other metric is the mean of its values.
        runs: Values of the metric, (runs, rows). For the perplexity, log-likelihoods in nats.

    Returns:
        The mean, and the standard error, which is None for a single row or an infinite perplexity.
    """
    rows = np.asarray(runs, dtype=np.float64)
    if metric != PERPLEXITY:
        return float(rows.mean()), _error(rows.mean(0))
    with np.errstate(over="ignore", invalid="ignore"):  # a broken model's perplexity may be infinite
        perplexities = np.exp(-rows.mean(1))
        moves = (perplexities[:, None] * (rows - rows.mean(1, keepdims=True))).mean(0)
    return float(perplexities.mean()), _error(moves) if np.isfinite(perplexities).all() else None


def _error(rows: np.ndarray) -> float | None:
    return float(rows.std(ddof=1) / math.sqrt(len(rows))) if len(rows) > 1 else None


def interval(metric: str, value: float, error: float | None, n: int) -> dict[str, Any]:
    """Return the 95% interval of a metric, a mean over n rows with the standard error `error`, as `low` and `high`.

    The dict is empty if `error` is None or the mean is NaN.

    The interval of a perplexity is symmetric on the log scale. Scores and accuracies have a Wilson interval, which has
    positive width even at 0 and 1. Its number of rows is the one for which a binomial share has the standard error
    `error`. That is more than n if the score of each row is a mean over several orders of the model's blocks. Other
    metrics use 1.96 standard errors.
    """
    if error is None or math.isnan(value):
        return {}
    if metric == PERPLEXITY:
        times = math.exp(min(1.96 * error / value, 700))
        return {"low": value / times, "high": value * times}
    if not metric.startswith(SCORE) and not metric.endswith("accuracy"):
        return {"low": value - 1.96 * error, "high": value + 1.96 * error}
    rows = max(value * (1 - value) / error**2 * n / max(n - 1, 1), 1) if error else n
    low, high = wilson_interval(value * rows, rows)
    return {"low": low, "high": high}


def normalized_score(score: float, random_score: float, full_score: float) -> float:
    """Return (score - random_score) / (full_score - random_score).

    The result is 0 for guessing, 1 for the full model, and may lie outside [0, 1]. It does not change if a constant is
    added to all three scores, or if all three are multiplied by a constant.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, section 2.
    """
    return (score - random_score) / (full_score - random_score)


def normalized_error(values: Sequence[float], full: Sequence[float], random_score: float) -> float | None:
    """Return the standard error of the normalised score, over rows that both models were scored on.

    To first order, this is the standard error of the mean of (x - b' y) / (b_full - b_random) over rows. Here x is the
    variant's score of a row, and y is the full model's score of this row. b' is the normalised score, b_full is the
    full model's mean score, and b_random is the random score. The random score is treated as a constant. One row gives
    None.
    """
    scores, base = np.asarray(values, dtype=np.float64), np.asarray(full, dtype=np.float64)
    span = base.mean() - random_score
    rows = (scores - (scores.mean() - random_score) / span * base) / span
    return _error(rows)


@dataclass(kw_only=True)
class BenchmarkScores(TokenizerMixin, Analysis):
    """Score of one benchmark task for the full model and for each variant of its block order.

    The records, each with a standard error over rows except `random_score` and `failed`:

    - `task_score`: the accuracy; for gsm8k the share of exact matches of the text after `####`.
    - `task_score_difference`: the score minus that of the full model, paired over rows. The full model and the
      single seeds of a random order have no such record.
    - `task_score_norm`: the accuracy by log-likelihood per character, if the task has it.
    - `task_score_flexible`: for gsm8k, the share of rows whose last number is right.
    - `task_perplexity`: the perplexity of lambada.
    - `random_score`: the score of guessing.
    - `normalized_score`: the fraction of the full model's lead over guessing that remains. It is omitted for all
      variants if the full model has no lead larger than its standard error. Then `random_score` has the tag
      `undefined`.

    Each seed of a random order has its own record, and there is one record for the mean over seeds.

    The result of every variant is saved in a file below `results` and not computed again. Variants with equal schedules
    are scored once. A variant that fails (for example because memory runs out or a log-likelihood is NaN) gives one
    record `failed` with the reason in the tag `error`. It leaves no file, and the other variants continue. If the full
    model fails, the analysis fails.

    Args:
        task: Name of an lm-eval task, or path of an lm-eval task file (yaml). With `folder`, a name in `LOCAL_TASKS`.
        tokenizer: A local path or a name on the Hub.
        results: The folder of the results.
        folder: A folder of local data, whose `tasks.yaml` names the files of the task. If None, lm-eval loads the data.
        variants: Names from `lit_layers.functional.block_schedules.NAMES`. The full model is always scored.
        middles: Numbers of middle blocks that the variants change. None means all possible numbers.
        seeds: Seeds of the random orders.
        loops: Numbers of loops of the variant looped_parallel.
        custom: Additional schedules, written as `1 2 (3,4,5) 6`.
        limit: Score only the first `limit` rows. None means all rows.
        batch_size: Inputs per batch.
        max_new_tokens: Maximum number of tokens to generate for a text. If None, the task's own limit applies, or else
            lm-eval's 256.
        dtype: `bfloat16` runs matrix products and attention within blocks in bfloat16.
        tell: Callback that receives one line of progress at a time.
    """

    PRECISION, NEXT_TOKEN = "own", True
    LEAST: ClassVar = {"limit": 1, "batch_size": 1, "max_new_tokens": 1}
    UNMEASURED = ("results", "folder", "tell", "batch_size")

    task: str
    tokenizer: str
    results: Path
    folder: Path | None = None
    name: str = ""
    variants: tuple[str, ...] = MIDDLE_NAMES
    middles: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = SEEDS
    loops: tuple[int, ...] = (3,)
    custom: tuple[str, ...] = ()
    limit: int | None = None
    batch_size: int = 16
    max_new_tokens: int | None = None
    dtype: Dtype = "float32"
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.name = self.name or f"intervene/{self.task_name}"

    @property
    def task_name(self) -> str:
        """Return the tag `task` of the records: the name of the task, or of its file without suffix."""
        return Path(self.task).stem if self.task.endswith(".yaml") else self.task

    @property
    def code_file(self) -> str | None:
        """Return the path of the lm-eval task file, if any.

        Such a file can run code, in its templates and in Python files next to it.
        """
        return self.task if self.task.endswith(".yaml") else None

    def check(self, model: LayeredModel) -> None:
        self.check_options(model)
        variants_of(self, model)
        num_tokens, vocab_size = self.text_tokenizer.vocab_size, model.vocab_size or 0
        if num_tokens > vocab_size:
            raise InputError(f"tokenizer: it has {num_tokens} tokens and the model {vocab_size}: give the model's own")
        if self.folder is None:
            refuse_unknown(self.task)
        self.data_hash()

    def config(self) -> dict[str, Any]:
        """Return all options that affect the scores, with the version of lm-eval and a hash of the task file."""
        config = super().config()
        if self.code_file is not None:
            config["init_args"]["task_file"] = task_file_hash(Path(self.task))
        config["init_args"]["version"] = version_of("lm_eval")
        return config

    def data_hash(self) -> str | None:
        """Return a hash of the task's local data, or None if lm-eval loads the data.

        In the second case, the result file of each variant has a hash of the rows.
        """
        return None if self._local is None else self._local.data_hash()

    def compute(self, model: LayeredModel) -> Iterator[Record]:
        self.check_options(model)
        variants = variants_of(self, model)
        scored, failed = self._scored(model, variants)
        for record in self._records(variants, scored, failed):
            yield replace(record, tags=record.tags | self.tags_of("dtype"))

    def _scored(
        self, model: LayeredModel, variants: Sequence[Variant]
    ) -> tuple[dict[Schedule, TaskScores], dict[Schedule, str]]:
        """Return the scores of each schedule, and the error message of each schedule that failed.

        Scores are read from result files. Missing scores are computed and saved.
        """
        folder = self._folder(model)
        # File names are hashes, because a schedule may be longer than a file name can be.
        files = {each.schedule: folder / f"{sha16(format_schedule(each.schedule))}.json" for each in variants}
        scored = dict[Schedule, TaskScores]()
        for schedule, file in files.items():
            if result := read_result(file):
                scored[schedule] = TaskScores(**{each.name: result[each.name] for each in fields(TaskScores)})
        missing = [schedule for schedule in files if schedule not in scored]
        failed: dict[Schedule, str] = {}
        scorer = self._scorer(model)
        model = BFloat16View(upcast(model)) if missing and self.dtype == "bfloat16" else model
        for index, variant in enumerate(variants, 1):
            schedule = variant.schedule
            if schedule in scored or schedule in failed:
                continue
            self._say(f"{variant} ({index} of {len(variants)})")
            try:
                with running_order(model.model, schedule), evaluating(model.model):
                    scores = scorer.score(model.model)
            except _FAILURES as error:
                if variant.name == "baseline":
                    raise
                failed[schedule] = f"{type(error).__name__}: {' '.join(str(error).split())}"
                self._say(f"{variant} failed: {failed[schedule]}")
                continue
            with refused(f"results: cannot write {files[schedule]}"):
                folder.mkdir(parents=True, exist_ok=True)
                write_json(files[schedule], self._facts(variant) | vars(scores))
            scored[schedule] = scores
        if len({each.rows_hash for each in scored.values()}) > 1:
            raise InputError(f"{self.name}: the task's rows changed between variants: remove {folder}")
        return scored, failed

    def _records(
        self, variants: Sequence[Variant], scored: dict[Schedule, TaskScores], failed: dict[Schedule, str]
    ) -> Iterator[Record]:
        full = scored[variants[0].schedule]
        score, error = mean_and_error(SCORE, [full.values[SCORE]])
        guessed = full.random_score
        lead = score - guessed > (error or 0.0)
        undefined: dict[str, str | int | float] = {} if lead else {"undefined": NORMALIZED}
        task: dict[str, str | int | float] = {"task": self.task_name}
        yield Record(metric="random_score", value=guessed, n=len(full.values[SCORE]), tags=task | undefined)
        per_seed: dict[int, list[Variant]] = {}
        for variant in variants:
            tags = variant.tags | task
            if variant.schedule in failed:
                tags |= {"error": failed[variant.schedule]}
                yield Record(metric="failed", value=1.0, layer=variant.block, tags=tags)
                continue
            yield from _variant_records(variant, tags, [scored[variant.schedule]], full, lead)
            if variant.name == "random" and variant.middle is not None:
                per_seed.setdefault(variant.middle, []).append(variant)
        for middle, seeds in per_seed.items():
            identical = sum(variant.schedule == variants[0].schedule for variant in seeds)
            tags = {"variant": "random", "middle": middle, "num_seeds": len(seeds), "num_identical": identical}
            scores = [scored[variant.schedule] for variant in seeds]
            yield from _variant_records(seeds[0], tags | task, scores, full, lead)

    def _scorer(self, model: LayeredModel) -> LmEvalScorer:
        return LmEvalScorer(
            self._local or self.task,
            self.tokenizer,
            limit=self.limit,
            batch_size=self.batch_size,
            max_new_tokens=self.max_new_tokens,
            max_length=model.max_tokens,
        )

    def _folder(self, model: LayeredModel) -> Path:
        """Return the folder for the result files of a model, one file for each order of its blocks.

        The path contains hashes of the weights and of all options that affect the scores.
        """
        options = {name: value for name, value in self.config()["init_args"].items() if name not in _SELECTION}
        options |= {"tokenizer": self.tokenizer_hash(), "data": self.data_hash(), "max_tokens": model.max_tokens}
        options |= {"dtype": self.dtype if self.dtype == "bfloat16" else model.precision, "attention": model.attention}
        options |= {"architecture": architecture_hash(model.model)}
        return self.results / weights_hash(model.model) / self.task_name / hash_of(options)

    def _facts(self, variant: Variant) -> dict[str, Any]:
        """Return what a result file says for human readers: the variant, its schedule and how it was scored."""
        facts = {"variant": str(variant), "schedule": format_schedule(variant.schedule)}
        facts["scorer"] = f"lm-eval {version_of('lm_eval')}"
        if self._local is not None and self._local.copy is not None:
            facts["difference"] = self._local.copy.difference
        return facts

    @functools.cached_property
    def _local(self) -> ScoredTask | None:
        return None if self.folder is None else local_task(self.task, self.folder)

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.task_name}: {what}")


def _variant_records(
    variant: Variant, tags: dict[str, str | int | float], scores: Sequence[TaskScores], full: TaskScores, lead: bool
) -> Iterator[Record]:
    """Yield the records of `BenchmarkScores` for one variant (order of the blocks), or for the mean over random orders.

    `scores` has one item per seed. Scores are first averaged over seeds in each row of the task. The difference from
    the full model is paired over rows. For a random order, this difference is recorded only for the mean over seeds.
    Normalised scores are omitted unless `lead` is set, which means that the full model beats guessing.
    """
    if variant.name != "baseline" and "seed" not in tags:
        rows = np.mean([each.values[SCORE] for each in scores], 0) - np.asarray(full.values[SCORE])
        value, error = float(rows.mean()), _error(rows)
        ends = {} if error is None else {"low": value - 1.96 * error, "high": value + 1.96 * error}
        about: dict[str, Any] = {"layer": variant.block, "n": len(rows), "tags": tags, **ends}
        yield Record(metric=f"{SCORE}_difference", value=value, stderr=error, **about)
    for metric in scores[0].values:
        rows = [each.values[metric] for each in scores]
        value, error = mean_and_error(metric, rows)
        n = len(rows[0])
        ends = interval(metric, value, error, n)
        yield Record(metric=metric, value=value, layer=variant.block, stderr=error, n=n, tags=tags, **ends)
    if lead:
        values = [statistics.fmean(row) for row in zip(*(each.values[SCORE] for each in scores), strict=True)]
        base = full.values[SCORE]
        score = normalized_score(statistics.fmean(values), full.random_score, statistics.fmean(base))
        error = normalized_error(values, base, full.random_score)
        n = len(values)
        ends = interval(NORMALIZED, score, error, n)
        yield Record(metric=NORMALIZED, value=score, layer=variant.block, stderr=error, n=n, tags=tags, **ends)
