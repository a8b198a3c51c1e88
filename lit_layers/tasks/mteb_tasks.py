"""MTEB tasks with data from a local copy or the Hub, and their evaluation by mteb.

mteb is optional. Like `datasets` it takes seconds to import, so only the functions that need it import it.
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
    """Return a hash of the local files (None if files are missing), or of the data set's revision on the Hub."""
    if spec.copy is not None:
        return spec.data_hash() if spec.has_files else None
    return sha16(repr(sorted(_official(spec.name).metadata.dataset.items())))


def describe(spec: ScoredTask) -> dict[str, Any]:
    """Return what a result file says about a task's data: its origin and how it differs from the official data."""
    source: dict[str, Any] = {"source": "hub"}
    if spec.copy is not None:
        source = {"source": "folder", "difference": spec.copy.difference}
    return source | {"dataset": dict(_official(spec.name).metadata.dataset)}


def open_task(spec: ScoredTask, *, seed: int) -> Any:
    """Return the mteb task with its data loaded.

    Raises:
        InputError: The data cannot be loaded.
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
    """Return the mteb task with its data set from the local copy, in the format of mteb's own data set."""
    from datasets import Dataset, DatasetDict

    task = type(_official(spec.name))(seed=seed)
    task.hf_subsets = [spec.subset]
    names = dict.fromkeys(_COLUMNS[spec.domain], "columns")
    splits = {split: spec.read([split], names).values for split in spec.splits}
    if spec.domain == "reranking":
        task.dataset = {"default": {"test": _candidates(splits["test"])}}
    else:
        task.dataset = DatasetDict({split: Dataset.from_dict(columns) for split, columns in splits.items()})
        # mteb's transform renames the columns. Columns of pair classification already have their final names.
        if spec.domain != "pair_classification":
            task.dataset_transform()
    task.data_loaded = True
    return task


def _candidates(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Convert rows of queries and candidates to mteb's reranking format.

    Queries without a relevant or without an irrelevant candidate are dropped. Relevant candidates come first, as in
    mteb's own data sets, because the order decides ties.
    """
    from datasets import Dataset

    corpus: list[dict[str, str]] = []
    queries: list[dict[str, str]] = []
    relevant_docs: dict[str, dict[str, int]] = {}
    for query_id, rows in pd.DataFrame(columns).groupby("query_id", sort=False):
        relevant = (rows["relevant"] > 0).astype(int).sort_values(ascending=False, kind="stable")
        if relevant.nunique() < 2:
            continue
        name = f"query{query_id}"
        queries.append({"id": name, "text": rows["query"].iloc[0]})
        relevant_docs[name] = {f"{name}-{index:05}": value for index, value in enumerate(relevant.tolist())}
        texts = zip(relevant_docs[name], rows["candidate"][relevant.index], strict=True)
        corpus += [{"id": doc, "title": "", "text": text} for doc, text in texts]
    return {
        "corpus": Dataset.from_list(corpus),
        "queries": Dataset.from_list(queries),
        "relevant_docs": relevant_docs,
        "top_ranked": {name: [*docs] for name, docs in relevant_docs.items()},
    }


class MtebScorer:
    """An mteb task that scores every layer with the same random draws.

    mteb draws at random during an evaluation, so one evaluation would change the next. Here the score of a layer does
    not depend on the layers scored before it.
    """

    def __init__(self, task: Any, spec: ScoredTask) -> None:
        self.task, self.spec = task, spec
        if spec.domain == "classification":
            task._undersample_data = _cache_draws(task._undersample_data)
            # Pass the labels to mteb as an array. Otherwise each of its seven metrics would read them one by one.
            scores = task._calculate_scores
            task._calculate_scores = lambda truth, predicted: scores(np.asarray(truth[:]), predicted)

    def evaluate(self, encoder: LayerEncoder) -> dict[str, Any]:
        """Return mteb's scores on the test split, with the main score as `main_score`; NaN becomes None."""
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
        """Return the number of scored texts, pairs or queries."""
        rows = self._rows()
        if self.spec.domain == "reranking":
            return len(rows["queries"])
        first = rows[0] if len(rows) else {}
        if isinstance(first.get("sentences"), list):
            return sum(map(len, rows["sentences"]))
        # In older data sets, a single row contains lists of all pairs and labels.
        is_one_row = len(rows) == 1 and isinstance(first.get("labels"), list)
        return len(first["labels"]) if is_one_row else len(rows)

    def texts(self) -> list[str] | None:
        """Return the texts of the test split for label-free metrics, or None for pair classification.

        For STS (semantic textual similarity), these are the first texts of the pairs. For reranking, these are the
        queries.
        """
        columns = {"reranking": "text", "sts": "sentence1", "classification": "text", "clustering": "sentences"}
        if (column := columns.get(self.spec.domain)) is None:
            return None
        rows = self._rows()
        values = (rows["queries"] if self.spec.domain == "reranking" else rows)[column]
        return [text for row in values for text in ([row] if isinstance(row, str) else row)]

    def _rows(self) -> Any:
        data = self.task.dataset
        # A task with several subsets maps each subset to its splits. A task with one subset has the splits directly.
        return data.get(self.spec.subset, data)[SPLIT]


def _cache_draws(undersample: Any) -> Any:
    """Wrap mteb's function that draws training rows, so that it runs once per experiment and not once per layer.

    An experiment is one of mteb's repetitions with other training rows. Its rows are the same for every layer. Drawing
    them reads the labels one by one, which takes longer than the rest of the evaluation of a small model.
    """
    choices: dict[int, tuple[Any, list[int], list[int]]] = {}

    def cached(dataset: Any, experiment: int, idxs: list[int] | None = None) -> tuple[Any, list[int], list[int]]:
        if experiment not in choices:
            chosen, order, rows = undersample(dataset, experiment, idxs)
            choices[experiment] = (chosen, list(order), rows)
        chosen, order, rows = choices[experiment]
        return chosen, list(order), list(rows)  # return copies, because the next call shuffles the order in place

    return cached


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global random generators within the context, and restore their states afterwards."""
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
