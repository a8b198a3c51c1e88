"""Tasks of mteb over a local copy: official ones whose data set lies there, and tasks that mteb does not have."""

import functools
import random
from typing import Any

from lit_layers.embeddings.task_list import TaskSpec
from lit_layers.tasks.local_copies import LocalCopy

Columns = dict[str, list[Any]]
DOCUMENTS = 2048  # that a clustering is made of, as in mteb's own newer clusterings
_CLUSTERED = {
    "max_fraction_of_documents_to_embed": None,
    "max_document_to_embed": DOCUMENTS,
    "max_documents_per_cluster": DOCUMENTS,
}
_COLUMNS = {
    "classification": ("text", "label"),
    "clustering": ("sentences", "labels"),
    "pair_classification": ("sentence1", "sentence2", "labels"),
    "reranking": ("query_id", "query", "candidate", "relevant"),
    "sts": ("sentence1", "sentence2", "score"),
}


def open_copy(spec: TaskSpec, copy: LocalCopy, seed: int) -> Any:
    """The task of mteb with its data, as mteb's own reading would leave it."""
    import mteb
    from datasets import Dataset, DatasetDict

    kind: Any = type(mteb.get_task(spec.name)) if spec.official else _own_kind(spec)
    task = kind(seed=seed)
    task.hf_subsets = [spec.subset]
    names = dict.fromkeys(_COLUMNS[spec.domain], "columns")
    splits = {
        split: copy.read(split, names).values
        for split in (("train", "test") if spec.domain == "classification" else ("test",))
    }
    if "sets" in copy.options:
        splits["test"] = _sets(splits["test"], copy.options["sets"], copy.options["set_size"])
    if spec.domain == "reranking":
        task.dataset = {"default": {"test": _candidates(splits["test"])}}
    else:
        task.dataset = DatasetDict({split: Dataset.from_dict(columns) for split, columns in splits.items()})
        task.dataset_transform()
    task.data_loaded = True
    return task


def _sets(columns: Columns, number: int, size: int) -> Columns:
    """So many sets of sentences to cluster, each drawn without repetition."""
    rows, rng = range(len(columns["labels"])), random.Random(42)
    sets = [rng.sample(rows, min(size, len(rows))) for _ in range(number)]
    return {name: [[values[row] for row in chosen] for chosen in sets] for name, values in columns.items()}


def _candidates(columns: Columns) -> dict[str, Any]:
    """Questions with their candidates as mteb holds them; without those that have no right or no wrong answer.

    Right answers stand first, as in mteb's own reranking sets: that decides ties.
    """
    from datasets import Dataset

    questions: dict[Any, tuple[str, list[tuple[str, int]]]] = {}
    for number, query, candidate, relevant in zip(
        *(columns[name] for name in ("query_id", "query", "candidate", "relevant")), strict=True
    ):
        questions.setdefault(number, (query, []))[1].append((candidate, int(relevant > 0)))
    corpus: list[dict[str, str]] = []
    queries: list[dict[str, str]] = []
    relevant_docs: dict[str, dict[str, int]] = {}
    ranked: dict[str, list[str]] = {}
    for number, (query, candidates) in questions.items():
        if len({relevant for _, relevant in candidates}) < 2:
            continue
        name = f"query{number}"
        queries.append({"id": name, "text": query})
        ordered = sorted(candidates, key=lambda candidate: -candidate[1])
        relevant_docs[name] = {f"{name}-{place:05}": relevant for place, (_, relevant) in enumerate(ordered)}
        ranked[name] = list(relevant_docs[name])
        corpus += [{"id": doc, "title": "", "text": text} for doc, (text, _) in zip(ranked[name], ordered, strict=True)]
    return {
        "corpus": Dataset.from_list(corpus),
        "queries": Dataset.from_list(queries),
        "relevant_docs": relevant_docs,
        "top_ranked": ranked,
    }


@functools.cache
def _own_kind(spec: TaskSpec) -> Any:
    """A class of mteb for a task that it does not have."""
    from mteb import abstasks
    from mteb.abstasks.task_metadata import TaskMetadata

    bases = {
        "classification": (abstasks.AbsTaskClassification, "Classification"),
        "clustering": (abstasks.AbsTaskClustering, "Clustering"),
        "pair_classification": (abstasks.AbsTaskPairClassification, "PairClassification"),
        "reranking": (abstasks.AbsTaskRetrieval, "Reranking"),
        "sts": (abstasks.AbsTaskSTS, "STS"),
    }
    base, kind = bases[spec.domain]
    metadata = TaskMetadata(
        name=spec.name,
        description=f"{spec.name}, from local files.",
        dataset={"path": "local", "revision": "local"},
        type=kind,
        category="t2t" if spec.domain in ("reranking", "sts", "pair_classification") else "t2c",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=spec.score,
    )
    return type(spec.name, (base,), {"metadata": metadata, **(_CLUSTERED if spec.domain == "clustering" else {})})
