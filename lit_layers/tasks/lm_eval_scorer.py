"""Scores of a task by lm-eval, on data from the Hub or a local copy.

lm-eval is optional and takes seconds to import, so only the functions that need it import it.
"""

import functools
import inspect
import math
import re
import tempfile
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError, refused
from lit_layers.files.hub import HUB_ERRORS, reason
from lit_layers.identity import sha16
from lit_layers.models.build import true_vocab_size
from lit_layers.models.families import Network
from lit_layers.tasks.catalogue import LOCAL_TASKS, ScoredTask, find, unknown_task
from lit_layers.tasks.task_files import quiet, version_of

SCORE, NORMED, FLEXIBLE, PERPLEXITY = "task_score", "task_score_norm", "task_score_flexible", "task_perplexity"
EXAMPLES = "train"  # split that the few-shot examples are drawn from
SHOT_SEED = 1234  # seed for drawing the few-shot examples; lm-eval uses this seed, too
NAMES = {"lambada": "lambada_openai"}  # task name in this package -> its name in lm-eval
_STRICT, _FLEXIBLE = "strict-match", "flexible-extract"


def refuse_unknown(task: str, folder: Path | None = None) -> None:
    """Check that a task exists: in lm-eval, as a task file, or in a folder of local data.

    Raises:
        InputError: The task does not exist, or lm-eval is not installed.
    """
    version_of("lm_eval")
    if folder is not None and not task.endswith(".yaml"):
        local_task(task, folder)
    elif task.endswith(".yaml"):
        if not Path(task).is_file():
            raise InputError(f"task: expected a task file of lm-eval, {task} does not exist")
    # Tasks of the catalogue are known to exist. For others, read the names in lm-eval's task files, which takes ten
    # seconds.
    elif task not in LOCAL_TASKS:
        with quiet():
            names = _manager(defaults=True).all_tasks
        if task not in names:
            raise unknown_task(task, names)


def task_file_hash(path: Path) -> str:
    """Return a hash of a task file, the files that it includes, and the scripts that it calls, as 16 hex digits.

    Raises:
        InputError: A file cannot be read.
    """
    with refused(f"task: cannot read {path}"):
        text = path.read_text(encoding="utf-8")
    included = re.findall(r"^include:\s*(.+)$", text, re.MULTILINE)
    scripts = [f"{name}.py" for name in re.findall(r"!function\s+(\w+)\.", text)]
    files = [path.parent / name.strip().strip("'\"") for name in (*included, *scripts)]
    return sha16(f"{len(text)} {text}", *(task_file_hash(file) for file in files if file.is_file()))


def local_task(name: str, folder: Path, *, training: bool = False) -> ScoredTask:
    """Return a benchmark task of the catalogue that reads from a folder of local data.

    With `training`, its training rows are also required.

    Raises:
        InputError: The task does not exist, files or columns are missing, or a row is invalid.
    """
    task = find("benchmark", name, "give a task file of lm-eval (yaml)")
    task = replace(task, examples=max(task.examples, int(training))).localized(folder)
    if training and task.copy and task.copy.paths(EXAMPLES) == task.copy.paths(task.split):
        raise InputError(f"task {name}: {task.copy.files} holds the rows that are scored: list files of train")
    _local_rows(task)
    return task


def _local_rows(task: ScoredTask) -> dict[str, dict[str, list[Any]]]:
    """Return the columns of a local benchmark task by split, after checking the labels.

    The splits are the scored one, and the training split if the task needs it.
    """
    rows = {}
    for split in task.splits:
        read = task.read([split], dict.fromkeys(task.text, "columns"))
        choices, labels = read.values.get("choices", []), read.values.get("label", [])
        for index, (each, label) in enumerate(zip(choices, labels, strict=False)):
            if label not in range(len(each)):
                why = f"{len(each)} choices and the label {label}"
                raise InputError(f"task {task.name}: row {index} of {read.origin} has {why}")
        rows[split] = read.values
    return rows


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The results of a model on the rows of a task, in their order.

    `values` holds one number per row for each metric. For `task_perplexity` it is the log-likelihood in nats.
    """

    values: dict[str, list[float]]
    log_likelihoods: list[list[float]]  # for each row, one per choice; empty if the model generates texts
    texts: list[str]  # texts that the model generated; empty for other tasks
    random_score: float  # expected score of a random choice on these rows; 0 for tasks without choices
    rows_hash: str


@dataclass(eq=False)
class LmEvalScorer:
    """One lm-eval task, loaded once and scored for any number of models.

    Prompts, metrics, the number of examples and their seed are those of lm-eval, without a chat template and with
    greedy generation. Log-probabilities are in float32.

    Args:
        task: Name of an lm-eval task, path of an lm-eval task file, or the result of `local_task`.
        tokenizer: A folder, or NAME[@REVISION] on the Hub.
        limit: Score only the first `limit` rows. None means all rows.
        batch_size: Inputs per batch.
        max_new_tokens: Maximum number of tokens to generate. If None, the task's own limit applies, or else 256.
        max_length: Maximum number of tokens that the model accepts. If None, the limit in its config applies, or else
            2,048.
    """

    task: str | ScoredTask
    tokenizer: str
    _: KW_ONLY
    limit: int | None = None
    batch_size: int = 16
    max_new_tokens: int | None = None
    max_length: int | None = None
    _wrapped: tuple[Network, Any] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return NAMES.get(self.task, self.task) if isinstance(self.task, str) else self.task.name

    def score(self, model: Network) -> TaskScores:
        """Score the model on every row.

        Raises:
            InputError: lm-eval is not installed, does not know the task, or cannot load its data, or an input does not
                fit the model.
            FloatingPointError: A log-likelihood is NaN.
        """
        with quiet():
            loaded = self._load()
            from lm_eval.evaluator import evaluate

            results: Any = evaluate(
                lm=self._wrap(model),
                task_dict=loaded,
                limit=self.limit,
                # Turn off lm-eval's bootstrap, which starts one process per core. `mean_and_error` gives the errors.
                bootstrap_iters=0,
                log_samples=True,
            )
        (samples,), (task,) = results["samples"].values(), loaded["tasks"].values()
        return _scores(samples, task)

    def requests(self) -> list[Any]:
        """Return all requests that lm-eval makes to a model to score it, in any order. Their `arguments` are texts.

        Raises:
            InputError: lm-eval is not installed, does not know the task, or cannot load its data.
        """
        with quiet():
            (task,) = self._load()["tasks"].values()
            task.build_all_requests(limit=self.limit)
        return list(task.instances)

    def training_texts(self) -> list[tuple[str, str]]:
        """Return (question, right answer) of each training row, in order. Questions have no few-shot examples.

        Raises:
            InputError: lm-eval is not installed or cannot load the task, the task has no training rows, or its answers
                are not continuations of the question's text.
        """
        with quiet():
            (task,) = self._load()["tasks"].values()
            if not task.has_training_docs():
                raise InputError(f"task: {self.name} has no training rows: name another, such as arc_challenge")
            rows, delimiter = [], task.get_config("target_delimiter")
            for doc in task.training_docs():
                question, answer = task.doc_to_text(doc), task.doc_to_target(doc)
                if task.get_config("output_type") == "multiple_choice" and not isinstance(question, int):
                    answer = task.doc_to_choice(doc)[int(answer)]
                if not isinstance(question, str) or not isinstance(answer, str):
                    raise InputError(f"task: answers of {self.name} do not stand behind what is asked: name another")
                rows.append((question, f"{delimiter}{answer}"))
        return rows

    def _load(self) -> Any:
        """Return lm-eval's task dictionary, and reset its seed so that every model gets the same few-shot examples."""
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=SHOT_SEED)
        return self._loaded

    @functools.cached_property
    def _loaded(self) -> Any:
        version_of("lm_eval")
        _cache_templates()
        try:
            if isinstance(self.task, str):
                loaded = _manager(defaults=not self.name.endswith(".yaml")).load([self.name])
            else:
                loaded = _load_local(self.task)
        except KeyError as error:
            raise InputError(f"task: lm-eval has no task {self.name!r}: see lm-eval ls tasks") from error
        except HUB_ERRORS as error:
            what = f"the rows of {self.name!r} cannot be had from the Hub ({reason(error)})"
            raise InputError(f"{what}: check the network, or name a folder of local data") from error
        if len(loaded["tasks"]) != 1:
            raise InputError(f"task: {self.name!r} is {len(loaded['tasks'])} tasks of lm-eval: name one of them")
        (task,) = loaded["tasks"].values()
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        if self.max_new_tokens is not None and task.get_config("output_type") == "generate_until":
            task.set_config("generation_kwargs", {"max_gen_toks": self.max_new_tokens}, update=True)
        return loaded

    def _wrap(self, model: Network) -> Any:
        """Return the lm-eval wrapper of a model. It is reused if only the order of the model's blocks has changed."""
        if self._wrapped is None or self._wrapped[0] is not model:
            name, revision = _tokenizer_of(self.tokenizer)
            vars(model)["tie_weights"] = lambda: None  # lm-eval would tie weights that training has untied
            try:
                wrapped = _lm_eval_class()(
                    pretrained=model,
                    tokenizer=name,
                    revision=revision,
                    batch_size=self.batch_size,
                    max_length=self.max_length,
                    softmax_dtype="float32",
                    trust_remote_code=False,
                )
            finally:
                del vars(model)["tie_weights"]
            # If the tokenizer has no configured end token, use the one that `load_tokenizer` finds.
            if wrapped.tokenizer.eos_token is None:
                wrapped.tokenizer.eos_token = wrapped.tokenizer.pad_token = load_tokenizer(self.tokenizer).end_of_text
            self._wrapped = model, wrapped
        return self._wrapped[1]


def _load_local(task: ScoredTask) -> Any:
    """Load the local copy of a benchmark task as an lm-eval task.

    The data is passed in temporary parquet files. A temporary task file includes lm-eval's own task file.
    """
    import lm_eval
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The files can be deleted after loading, because lm-eval has memory-mapped the data by then.
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), dict[str, str]()
        for split, columns in _local_rows(task).items():
            files[split] = str(folder / f"{split}.parquet")
            pq.write_table(pa.table(columns), files[split])
        content: dict[str, Any] = {
            "training_split": EXAMPLES if EXAMPLES in files else None,
            **{f"{each}_split": each if each in files else None for each in ("validation", "test")},
            **task.settings,
            "task": f"{task.name}_rows",
            "dataset_path": "parquet",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "include": str(Path(lm_eval.__file__).parent / "tasks" / task.source),
        }
        (folder / "task.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        return _manager(defaults=False).load([str(folder / "task.yaml")])


@functools.cache
def _cache_templates() -> None:
    """Make lm-eval cache compiled prompt templates.

    Without this cache, lm-eval compiles the templates again for each row, and again each time that a task is scored.
    Compiling takes nine tenths of the time to build the prompts.
    """
    from lm_eval.utils import env

    vars(env)["from_string"] = functools.lru_cache(maxsize=1000)(env.from_string)


@functools.cache
def _manager(defaults: bool) -> Any:
    """Return lm-eval's task manager, which loads tasks.

    With `defaults`, it knows lm-eval's own tasks. For this it reads thousands of task files, which takes many seconds.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=defaults)


def _tokenizer_of(spec: str) -> tuple[Any, str]:
    path = Path(spec)
    if path.exists():
        return str(path.parent if path.is_file() else path.absolute()), "main"
    name, _, revision = spec.partition("@")
    return name, revision or "main"


def _scores(samples: list[dict[str, Any]], task: Any) -> TaskScores:
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    first = _STRICT if _STRICT in filters else filters[0]
    rows = _sorted_rows(samples, first)
    metrics = rows[0]["metrics"]
    main = next((metric for metric in ("acc", "exact_match") if metric in metrics), None)
    if main is None:
        raise InputError(f"task: expected one with acc or exact_match, {task.task_name} has {', '.join(metrics)}")
    values = {SCORE: [float(row[main]) for row in rows]}
    for metric, name in (("acc_norm", NORMED), ("perplexity", PERPLEXITY)):
        if metric in metrics:
            values[name] = [float(row[metric]) for row in rows]
    if _FLEXIBLE in filters and first == _STRICT:
        values[FLEXIBLE] = [float(row[main]) for row in _sorted_rows(samples, _FLEXIBLE)]
    generates = task.get_config("output_type") == "generate_until"
    has_choices = task.get_config("output_type") == "multiple_choice"
    likelihoods = [] if generates else [[float(each[0]) for each in row["filtered_resps"]] for row in rows]
    if wrong := sum(any(math.isnan(value) for value in row) for row in likelihoods):
        raise FloatingPointError(f"{wrong} of {len(rows)} rows have a log-likelihood that is not a number")
    return TaskScores(
        values=values,
        log_likelihoods=likelihoods,
        texts=[str(row["resps"][0][0]) for row in rows] if generates else [],
        random_score=sum(1 / len(row["filtered_resps"]) for row in rows) / len(rows) if has_choices else 0.0,
        rows_hash=sha16(*(row["doc_hash"] + row["target_hash"] for row in rows)),
    )


def _sorted_rows(samples: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return sorted((sample for sample in samples if sample["filter"] == name), key=lambda sample: sample["doc_id"])


@functools.cache
def _lm_eval_class() -> Any:
    """Return a faster subclass of lm-eval's wrapper of transformers models.

    The subclass tokenizes each text once and ignores padding rows of the vocabulary. If the model supports
    `logits_to_keep`, logits start at the earliest position in the batch that predicts a token of a continuation.
    """
    from lm_eval.models.huggingface import HFLM

    base: Any = HFLM

    class FastHFLM(base):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._encoded: dict[tuple[str, bool | None], list[int]] = {}
            self._takes_keep = "logits_to_keep" in inspect.signature(self.model.forward).parameters
            self._keep = 0  # number of positions at the end of a batch whose logits are needed

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            key = (string, add_special_tokens)
            if key not in self._encoded:
                self._encoded[key] = super().tok_encode(string, add_special_tokens=add_special_tokens, **options)
            return self._encoded[key]

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            likelihoods: list[Any] = [None] * len(requests)
            lengths = [len(context) + len(continuation) for _, context, continuation in requests]
            order = sorted(range(len(requests)), key=lambda row: (-lengths[row], *requests[row][1:]))
            for start in range(0, len(order), int(self.batch_size)):
                rows = order[start : start + int(self.batch_size)]
                longest = min(lengths[rows[0]], self.max_length + 1)
                self._keep = max(longest - min(lengths[row], longest) + len(requests[row][2]) for row in rows)
                found = super()._loglikelihood_tokens([requests[row] for row in rows], disable_tqdm=True)
                for row, likelihood in zip(rows, found, strict=True):
                    likelihoods[row] = likelihood
            return likelihoods

        def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
            options = {"logits_to_keep": self._keep} if self._takes_keep else {}
            with torch.no_grad():
                return self.model(inps, use_cache=False, **options).logits[..., : true_vocab_size(self.model)]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            longest = max(request.args[1].get("max_gen_toks", self.max_gen_toks) for request in requests)
            if longest >= self.max_length:
                raise InputError(
                    f"max_new_tokens: {longest} leave no room for a prompt in a model of {self.max_length} tokens"
                )
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
            padding = list(range(true_vocab_size(self.model), self.model.config.vocab_size)) or None
            return super()._model_generate(context, max_length, stop, suppress_tokens=padding, **options)

    return FastHFLM
