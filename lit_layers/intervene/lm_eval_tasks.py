"""Scores of a task by lm-eval itself, with its data of the Hub: the only file that imports it."""

import contextlib
import difflib
import functools
import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.intervene.scores import FLEXIBLE, NORMED, PERPLEXITY, SCORE, TaskScores
from lit_layers.intervene.task_prompts import SHOT_SEED
from lit_layers.models.families import Network

INSTALL = "lm-eval is needed to score with scorer lm_eval: pip install 'lit_layers[eval]'"
NAMES = {"lambada": "lambada_openai"}  # there: any other name is lm-eval's own
_STRICT, _FLEXIBLE = "strict-match", "flexible-extract"


def lm_eval_version() -> str:
    """The installed version.

    Raises:
        InputError: there is none, or accelerate is missing, without which lm-eval opens no model of transformers.
    """
    try:
        version("accelerate")
        return version("lm_eval")
    except PackageNotFoundError as error:
        raise InputError(INSTALL) from error


def refuse_unknown(task: str) -> None:
    """Refuses what is neither a name of lm-eval's nor a task file.

    Raises:
        InputError: it, or where lm-eval is not installed.
    """
    lm_eval_version()
    name = NAMES.get(task, task)
    if name.endswith(".yaml"):
        if not Path(name).is_file():
            raise InputError(f"task: expected a task file of lm-eval, {name} does not exist")
        return
    with _quiet():
        known = _manager(defaults=True).all_tasks
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise InputError(
            f"task: lm-eval has no task {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
        )


def task_file_hash(path: Path) -> str:
    """Sixteen hex digits over a task file and the files that it includes.

    Raises:
        InputError: one of them cannot be read.
    """
    digest, waiting, seen = hashlib.sha256(), [path], set()
    while waiting:
        file = waiting.pop().resolve()
        if file in seen:
            continue
        seen.add(file)
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"task: cannot read {file}: {(error.strerror or str(error)).lower()}") from error
        digest.update(f"{len(text)} {text}".encode())
        included = re.findall(r"^include:\s*(.+)$", text, re.MULTILINE)
        scripts = [f"{name}.py" for name in re.findall(r"!function\s+(\w+)\.", text)]
        found = [file.parent / name.strip().strip("'\"") for name in (*included, *scripts)]
        waiting += [each for each in found if each.is_file()]
    return digest.hexdigest()[:16]


class LmEvalScorer:
    """One task of lm-eval, loaded on the first score and scored as often as wanted.

    Its defaults throughout: prompts, metrics, number of examples and their seed, no chat template, greedy generation.
    Log-probabilities are in float32, as this package's own are.

    Args:
        task: a name of lm-eval, or the path of a task file as lm-eval has them.
        tokenizer: a folder, or NAME[@REVISION] of the Hub.
        limit: only the first rows; None: all.
        batch_size: inputs at once.
        max_new_tokens: None: the task's own, or 256.
    """

    def __init__(
        self,
        task: str,
        tokenizer: str,
        *,
        limit: int | None = None,
        batch_size: int = 16,
        max_new_tokens: int | None = None,
    ) -> None:
        self.name = NAMES.get(task, task)
        self.tokenizer, self.limit = tokenizer, limit
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self._loaded: Any = None

    def score(self, model: Network) -> TaskScores:
        """What the model makes of every row.

        Raises:
            InputError: lm-eval is not installed, does not know the task, or cannot have its data.
        """
        lm_eval_version()
        from lm_eval.evaluator import evaluate

        with _quiet():
            loaded = self._load()
            for task in loaded["tasks"].values():
                task.set_fewshot_seed(seed=SHOT_SEED)  # every score draws the same examples
            found: Any = evaluate(
                lm=self._wrapped(model),
                task_dict=loaded,
                limit=self.limit,
                bootstrap_iters=0,  # errors are taken from the rows; it would start a process for each core
                log_samples=True,
            )
        (samples,) = found["samples"].values()
        return _scores(samples, next(iter(loaded["tasks"].values())))

    def _load(self) -> Any:
        if self._loaded is None:
            from lit_layers.hub_errors import HUB_ERRORS, reason

            try:
                loaded = _manager(defaults=not self.name.endswith(".yaml")).load([self.name])
            except KeyError as error:
                raise InputError(f"task: lm-eval has no task {self.name!r}: see lm-eval ls tasks") from error
            except HUB_ERRORS as error:
                raise InputError(
                    f"the rows of {self.name!r} cannot be had from the Hub ({reason(error)}): check the network, or "
                    "score local files with scorer own"
                ) from error
            if len(loaded["tasks"]) != 1:
                raise InputError(f"task: {self.name!r} is {len(loaded['tasks'])} tasks of lm-eval: name one of them")
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                if self.max_new_tokens is not None and task.get_config("output_type") == "generate_until":
                    task.set_config("generation_kwargs", {"max_gen_toks": self.max_new_tokens}, update=True)
            self._loaded = loaded
        return self._loaded

    def _wrapped(self, model: Network) -> Any:
        from lm_eval.models.huggingface import HFLM

        name, revision = _tokenizer_of(self.tokenizer)
        make: Any = HFLM
        wrapped = make(
            pretrained=model,
            tokenizer=name,
            revision=revision,
            batch_size=self.batch_size,
            softmax_dtype="float32",
            trust_remote_code=False,
        )
        if wrapped.tokenizer.eos_token is None:  # a folder that names no tokens: the end that this package finds in it
            wrapped.tokenizer.eos_token = wrapped.tokenizer.pad_token = load_tokenizer(self.tokenizer).end_of_text
        return wrapped


@functools.cache
def _manager(defaults: bool) -> Any:
    """With `defaults` it reads thousands of task files for their names: many seconds, once."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=defaults)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval draws bars and prints on both streams."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _tokenizer_of(spec: str) -> tuple[str, str]:
    path = Path(spec)
    if path.is_file():
        if path.name != "tokenizer.json":
            raise InputError(f"tokenizer: lm-eval reads a folder with a tokenizer.json, got the file {path}")
        return str(path.parent), "main"
    if path.exists():
        return spec, "main"
    name, _, revision = spec.partition("@")
    return name, revision or "main"


def _scores(samples: list[dict[str, Any]], task: Any) -> TaskScores:
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    first = _STRICT if _STRICT in filters else filters[0]
    rows = _in_order(samples, first)
    metrics = rows[0]["metrics"]
    main = next((metric for metric in ("acc", "exact_match") if metric in metrics), None)
    if main is None:
        raise InputError(f"task: expected one with acc or exact_match, {task.task_name} has {', '.join(metrics)}")
    values = {SCORE: _column(rows, main)}
    for metric, name in (("acc_norm", NORMED), ("perplexity", PERPLEXITY)):
        if metric in metrics:
            values[name] = _column(rows, metric)
    if _FLEXIBLE in filters and first == _STRICT:
        values[FLEXIBLE] = _column(_in_order(samples, _FLEXIBLE), main)
    written = task.get_config("output_type") == "generate_until"
    chosen = task.get_config("output_type") == "multiple_choice"
    digest = hashlib.sha256("".join(row["doc_hash"] + row["target_hash"] for row in rows).encode())
    return TaskScores(
        values=values,
        log_likelihoods=[] if written else [[float(each[0]) for each in row["filtered_resps"]] for row in rows],
        texts=[str(row["resps"][0][0]) for row in rows] if written else [],
        random_score=sum(1 / len(row["filtered_resps"]) for row in rows) / len(rows) if chosen else 0.0,
        rows_hash=digest.hexdigest()[:16],
    )


def _in_order(samples: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return sorted((sample for sample in samples if sample["filter"] == name), key=lambda sample: sample["doc_id"])


def _column(rows: list[dict[str, Any]], metric: str) -> list[float]:
    return [float(row[metric]) for row in rows]
