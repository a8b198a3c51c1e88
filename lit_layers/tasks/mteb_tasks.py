"""Tasks of mteb with their data, of a local copy or the Hub, and their evaluation by mteb.

mteb is optional, and like `datasets` takes seconds to import: functions do, where they need it.
"""

import contextlib
import functools
import json
import random
import time
from collections.abc import Iterator
from copy import copy as cloned
from typing import Any

import numpy as np
import pandas as pd
import torch

from lit_layers.errors import InputError
from lit_layers.identity import sha16
from lit_layers.tasks.catalogue import ScoredTask
from lit_layers.tasks.embeddings import LayerEncoder
from lit_layers.tasks.task_files import quiet, version_of

SPLIT = "test"
_COLUMNS = {
    "classification": ("text", "label"),
    "clustering": ("sentences", "labels"),
    "pair_classification": ("sentence1", "sentence2", "labels"),
    "reranking": ("query_id", "query", "candidate", "relevant"),
    "sts": ("sentence1", "sentence2", "score"),
}


def data_hash(spec: ScoredTask) -> str | None:
    """Return a hash over the local data, or over the revision of the Hub; None where files are missing."""
    if spec.copy is not None:
        return spec.data_hash() if spec.has_files else None
    return sha16(repr(sorted(_official(spec.name).metadata.dataset.items())))


def describe(spec: ScoredTask) -> dict[str, Any]:
    """Return where the data come from and how they differ from the official ones, for the results."""
    source: dict[str, Any] = {"source": "hub"}
    if spec.copy is not None:
        source = {"source": "folder", "difference": spec.copy.difference}
    return source | {"dataset": dict(_official(spec.name).metadata.dataset)}


def open_task(spec: ScoredTask, *, seed: int) -> Any:
    """Return the task of mteb with its data.

    Raises:
        InputError: data that are not there.
    """
    if spec.copy is not None:
        return _open_copy(spec, seed)
    task = type(_official(spec.name))(seed=seed)
    task.hf_subsets = [spec.subset]
    try:
        with quiet():
            task.load_data()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        path = task.metadata.dataset["path"]
        why = " ".join(str(error).split())[:200]
        what = f"{spec.name}: its data set {path} cannot be had ({why})"
        raise InputError(f"{what}: check the network, or name a --folder with it") from error
    return task


@functools.cache
def _official(name: str) -> Any:
    version_of("mteb")
    import mteb

    return mteb.get_task(name)


def _open_copy(spec: ScoredTask, seed: int) -> Any:
    """The task of mteb with its data, as mteb's own reading would leave it."""
    from datasets import Dataset, DatasetDict

    task = type(_official(spec.name))(seed=seed)
    task.hf_subsets = [spec.subset]
    names = dict.fromkeys(_COLUMNS[spec.domain], "columns")
    splits = {split: spec.read([split], names).values for split in spec.splits}
    if spec.domain == "reranking":
        task.dataset = {"default": {"test": _candidates(splits["test"])}}
    else:
        task.dataset = DatasetDict({split: Dataset.from_dict(columns) for split, columns in splits.items()})
        if spec.domain != "pair_classification":  # whose columns have their final names
            task.dataset_transform()
    task.data_loaded = True
    return task


def _candidates(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Questions with their candidates as mteb holds them; without those that have no right or no wrong answer.

    Right answers stand first, as in mteb's own reranking sets: that decides ties.
    """
    from datasets import Dataset

    corpus: list[dict[str, str]] = []
    queries: list[dict[str, str]] = []
    relevant_docs: dict[str, dict[str, int]] = {}
    for number, rows in pd.DataFrame(columns).groupby("query_id", sort=False):
        relevant = (rows["relevant"] > 0).astype(int).sort_values(ascending=False, kind="stable")
        if relevant.nunique() < 2:
            continue
        name = f"query{number}"
        queries.append({"id": name, "text": rows["query"].iloc[0]})
        relevant_docs[name] = {f"{name}-{place:05}": value for place, value in enumerate(relevant.tolist())}
        texts = zip(relevant_docs[name], rows["candidate"][relevant.index], strict=True)
        corpus += [{"id": doc, "title": "", "text": text} for doc, text in texts]
    return {
        "corpus": Dataset.from_list(corpus),
        "queries": Dataset.from_list(queries),
        "relevant_docs": relevant_docs,
        "top_ranked": {name: [*docs] for name, docs in relevant_docs.items()},
    }


class MtebScorer:
    """A task of mteb that is scored once for each layer, each time as if it were new.

    mteb draws at random while it evaluates, and one evaluation would change the next: here every layer meets the same
    draws, whichever layers were scored before.
    """

    def __init__(self, task: Any, spec: ScoredTask) -> None:
        self.task, self.spec = task, spec
        if spec.domain == "classification":
            task._undersample_data = _cache_draws(task._undersample_data)
            scores = task._calculate_scores  # each of its seven metrics reads the labels one by one
            task._calculate_scores = lambda truth, predicted: scores(np.asarray(truth[:]), predicted)

    def evaluate(self, encoder: LayerEncoder) -> dict[str, Any]:
        """Return mteb's scores of the split, and the main one as `main_score`; NaN is None."""
        task, start = cloned(self.task), time.perf_counter()
        task.rng_state, task.np_rng = random.Random(task.seed), np.random.default_rng(task.seed)
        with _seeded(task.seed), quiet():
            scores = task.evaluate(
                encoder,
                split=SPLIT,
                subsets_to_run=[self.spec.subset],
                encode_kwargs={"batch_size": 1024, "show_progress_bar": False},
            )
        written = json.dumps(scores[self.spec.subset], default=lambda value: value.tolist())
        row = json.loads(written, parse_constant=lambda _: None)
        return {
            "main_score": row["main_score"],
            "mteb_version": version_of("mteb"),
            "dataset_revision": task.metadata.revision,
            "seconds": time.perf_counter() - start,
            "scores": row,
        }

    def num_rows(self) -> int:
        """How many texts, pairs or questions are scored."""
        part = self._test_rows()
        if self.spec.domain == "reranking":
            return len(part["queries"])
        first = part[0] if len(part) else {}
        if isinstance(first.get("sentences"), list):
            return sum(map(len, part["sentences"]))
        is_one_row = len(part) == 1 and isinstance(first.get("labels"), list)  # of all pairs, as in mteb's older sets
        return len(first["labels"]) if is_one_row else len(part)

    def texts(self) -> list[str] | None:
        """Return the texts of the test split: of pairs with a similarity the first text, of questions these; None for
        pairs that are alike or not, which have no column of texts of their own."""
        columns = {"reranking": "text", "sts": "sentence1", "classification": "text", "clustering": "sentences"}
        if (column := columns.get(self.spec.domain)) is None:
            return None
        part = self._test_rows()
        rows = (part["queries"] if self.spec.domain == "reranking" else part)[column]
        return [text for row in rows for text in ([row] if isinstance(row, str) else row)]

    def _test_rows(self) -> Any:
        data = self.task.dataset
        return data.get(self.spec.subset, data)[SPLIT]  # one subset alone has no level of its own


def _cache_draws(undersample: Any) -> Any:
    """mteb's choice of training rows, which is the same for every layer, made once for each experiment.

    It reads the labels one by one, which takes more time than all else of a small layer's evaluation.
    """
    choices: dict[int, tuple[Any, list[int], list[int]]] = {}

    def remembered(dataset: Any, experiment: int, idxs: list[int] | None = None) -> tuple[Any, list[int], list[int]]:
        if experiment not in choices:
            chosen, order, rows = undersample(dataset, experiment, idxs)
            choices[experiment] = (chosen, list(order), rows)
        chosen, order, rows = choices[experiment]
        return chosen, list(order), list(rows)  # the next call shuffles the order in place

    return remembered


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators start from the seed inside and go on from where they were afterwards."""
    in_numpy, in_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            np.random.set_state(in_numpy)  # noqa: NPY002
            random.setstate(in_python)
