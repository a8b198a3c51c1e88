"""Analysis that scores every checkpoint on benchmark tasks of lm-eval."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lit_layers.analyses.base import Analysis, Jobs
from lit_layers.data.batches import tokenizer_of
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.identity import sha16
from lit_layers.models.view import LayeredModel, evaluating
from lit_layers.records import Record
from lit_layers.tasks.benchmark_scores import interval, mean_and_error
from lit_layers.tasks.catalogue import ScoredTask
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, local_task, refuse_unknown, task_file_hash
from lit_layers.tasks.task_files import version_of


@dataclass(kw_only=True)
class Benchmarks(Analysis):
    """Scores of each checkpoint on tasks of lm-eval. They equal the scores of lm-eval itself on the same rows.

    Each record has the tag `task`, a standard error and an interval over rows (except `random_score`); `n` counts rows:

    - `task_score`: the accuracy, or the share of exact matches of a task that generates texts.
    - `task_score_norm`: the accuracy by log-likelihood per character, if the task has it.
    - `task_score_flexible`, `task_perplexity`: as in `BenchmarkScores`.
    - `random_score`: the score of guessing.

    Prompts, few-shot examples and metrics are those of lm-eval (`LmEvalScorer`). The model runs in its own precision.
    Tasks are loaded once for all checkpoints. Ranks share the tasks.

    Args:
        tasks: names in lm-eval, or paths of its task files (yaml). A recipe may not name task files, because they can
            run code.
        tokenizer: a local path, a name on the Hub, or bpe:SIZE.
        corpus: the text on which the tokenizer bpe:SIZE is trained.
        folder: a folder of local data, whose `tasks.yaml` names the files of each task. If None, lm-eval loads the
            data.
        limit: score only the first `limit` rows of each task. None means all rows.
        batch_size: inputs per batch.
        max_new_tokens: maximum number of tokens to generate for a text. If None, the task's own limit applies.

    Raises:
        InputError: lm-eval is not installed or does not know a task, or files or columns are missing.
    """

    PRECISION, NEXT_TOKEN = "own", True
    LEAST: ClassVar = {"limit": 1, "batch_size": 1, "max_new_tokens": 1}
    UNMEASURED = ("folder", "batch_size")

    tasks: tuple[str, ...]
    tokenizer: str
    corpus: str | None = None
    name: str = "benchmarks"
    folder: Path | None = None
    limit: int | None = None
    batch_size: int = 16
    max_new_tokens: int | None = None

    @property
    def code_file(self) -> str | None:
        """Return the path of the first lm-eval task file, if any; such a file can run code."""
        return next((task for task in self.tasks if task.endswith(".yaml")), None)

    def check(self, model: LayeredModel) -> None:
        self.check_options(model)
        num_tokens, vocab_size = load_tokenizer(self._tokenizer).vocab_size, model.vocab_size or 0
        if num_tokens > vocab_size:
            raise InputError(f"tokenizer: it has {num_tokens} tokens and the model {vocab_size}: give the model's own")
        if len({Path(task).stem for task in self.tasks}) < len(self.tasks):
            raise InputError(f"{self.name}: expected tasks of different names, got {', '.join(self.tasks)}")
        for task in self.tasks:
            refuse_unknown(task, self.folder)
        self.check_data()

    def config(self) -> dict[str, Any]:
        """Return all options that affect the scores, with the version of lm-eval and hashes of the task files."""
        config = super().config()
        files = {task: task_file_hash(Path(task)) for task in self.tasks if task.endswith(".yaml")}
        config["init_args"] |= {"version": version_of("lm_eval"), "task_files": files}
        return config

    def data_hash(self) -> str | None:
        """Return a hash of the tasks' local data, or None if lm-eval loads the data."""
        return sha16(*(str(task.data_hash()) for task in self._rows.values())) if self.folder else None

    def tokenizer_hash(self) -> str | None:
        return tokenizer_hash(load_tokenizer(self._tokenizer).tokenizer)

    def jobs(self, model: LayeredModel) -> Jobs:
        return Jobs([functools.partial(self._records, model, task) for task in self.tasks])

    def _records(self, model: LayeredModel, task: str) -> Iterator[Record]:
        with evaluating(model.model):
            scores = self._scorer(task, model.max_tokens).score(model.model)
        tags: dict[str, str | int | float] = {"task": Path(task).stem if task.endswith(".yaml") else task}
        for metric, rows in scores.values.items():
            (value, error), n = mean_and_error(metric, [rows]), len(rows)
            ends = interval(metric, value, error, n)
            yield Record(metric=metric, value=value, stderr=error, n=n, tags=tags, **ends)
        yield Record(metric="random_score", value=scores.random_score, n=n, tags=tags)

    def _scorer(self, task: str, max_tokens: int | None) -> LmEvalScorer:
        if task not in self._scorers:
            options: Any = {"limit": self.limit, "batch_size": self.batch_size, "max_new_tokens": self.max_new_tokens}
            rows = self._rows.get(task, task)
            self._scorers[task] = LmEvalScorer(rows, self._tokenizer, max_length=max_tokens, **options)
        return self._scorers[task]

    @functools.cached_property
    def _scorers(self) -> dict[str, LmEvalScorer]:
        return {}

    @functools.cached_property
    def _rows(self) -> dict[str, ScoredTask]:
        names = [task for task in self.tasks if not task.endswith(".yaml")]
        return {task: local_task(task, self.folder) for task in names} if self.folder else {}

    @functools.cached_property
    def _tokenizer(self) -> str:
        return tokenizer_of(self.tokenizer, self.corpus)
