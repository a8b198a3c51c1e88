"""Tasks of mteb over local files: the official ones whose data set lies there, and tasks that mteb does not have."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers.data.task_files import read_columns
from lit_layers.embeddings.task_list import TASKS, TaskSpec

Columns = dict[str, list[Any]]
Splits = dict[str, Columns]
SETS, SET_SIZE = 10, 5954  # of subjects: mteb's own ten hold 59,545
DOCUMENTS = 2048  # that a clustering is made of, as in mteb's own newer clusterings


@dataclass(frozen=True)
class LocalData:
    """The files of one task below the folder of local data, and how they are read."""

    files: tuple[str, ...]
    read: Callable[[Path], Splits]
    difference: str = ""  # from the official data
    settings: tuple[tuple[str, Any], ...] = ()  # of a task that mteb does not have

    def missing(self, folder: Path) -> list[str]:
        return [file for file in self.files if not (folder / file).is_file()]

    def open(self, spec: TaskSpec, folder: Path, seed: int) -> Any:
        """The task with its data, as mteb's own reading would leave it."""
        import mteb
        from datasets import Dataset, DatasetDict

        kind: Any = type(mteb.get_task(spec.name)) if spec.official else _own_kind(spec, self.settings)
        task = kind(seed=seed)
        task.hf_subsets = [spec.subset]
        splits = self.read(folder)
        if spec.domain == "reranking":
            task.dataset = {"default": {"test": _candidates(splits["test"])}}
        else:
            task.dataset = DatasetDict({split: Dataset.from_dict(columns) for split, columns in splits.items()})
            task.dataset_transform()
        task.data_loaded = True
        return task


def _classification(name: str, *, train: str = "train", test: str = "test") -> Callable[[Path], Splits]:
    def read(folder: Path) -> Splits:
        files = {"train": train, "test": test}
        return {split: _columns(folder / name / f"{file}.parquet", "text", "label") for split, file in files.items()}

    return read


def _pairs(file: str, label: str) -> Callable[[Path], Splits]:
    def read(folder: Path) -> Splits:
        columns = _columns(folder / file, "sentence1", "sentence2", label)
        return {"test": {("labels" if name == "label" else name): values for name, values in columns.items()}}

    return read


def _semeval(year: int) -> Callable[[Path], Splits]:
    def read(folder: Path) -> Splits:
        columns = _columns(folder / SEMEVAL, "sentence1", "sentence2", "score", "year", "split")
        kept = [
            row
            for row, (of, split) in enumerate(zip(columns["year"], columns["split"], strict=True))
            if of == year and split == "test"
        ]
        return {"test": {name: [columns[name][row] for row in kept] for name in ("sentence1", "sentence2", "score")}}

    return read


def _sick(folder: Path) -> Splits:
    """All three parts: the official test split is the whole of SICK."""
    parts = [_columns(folder / file, "sentence1", "sentence2", "score") for file in SICK]
    return {"test": {name: [value for part in parts for value in part[name]] for name in parts[0]}}


def _clustering(name: str) -> Callable[[Path], Splits]:
    def read(folder: Path) -> Splits:
        columns = _columns(folder / f"{name}.parquet", "text", "label")
        return {"test": {"sentences": columns["text"], "labels": columns["label"]}}

    return read


def _subjects(folder: Path) -> Splits:
    """Ten sets of subject lines, each drawn from the test part without repetition."""
    columns = _columns(folder / NEWSGROUPS, "subject", "label")
    rows, rng = range(len(columns["label"])), random.Random(42)
    sets = [rng.sample(rows, min(SET_SIZE, len(rows))) for _ in range(SETS)]
    return {
        "test": {
            "sentences": [[columns["subject"][row] for row in chosen] for chosen in sets],
            "labels": [[columns["label"][row] for row in chosen] for chosen in sets],
        }
    }


def _answers(folder: Path) -> Splits:
    return {"test": _columns(folder / TRECQA, "query_id", "query", "candidate", "relevant")}


def _columns(path: Path, *names: str) -> Columns:
    return read_columns(str(path), ["test"], dict.fromkeys(names, "local data"), None).values


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
def _own_kind(spec: TaskSpec, settings: tuple[tuple[str, Any], ...]) -> Any:
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
    return type(spec.name, (base,), {"metadata": metadata, **dict(settings)})


SEMEVAL, NEWSGROUPS, TRECQA = (
    "sts/semeval_sts12_16.parquet",
    "twenty_newsgroups/test.parquet",
    "trecqa_reranking/test.parquet",
)
SHORTER = "As many pairs with the same mean score; the texts are about one character shorter (2% of all characters)."
SICK = ("sts/sick_train.parquet", "sts/sick_validation.parquet", "sts/sick_test.parquet")
_CLUSTERED = (
    ("max_fraction_of_documents_to_embed", None),
    ("max_document_to_embed", DOCUMENTS),
    ("max_documents_per_cluster", DOCUMENTS),
)


def _short_texts(name: str) -> LocalData:
    path = f"short_text_clustering/{name}"
    return LocalData((f"{path}.parquet",), _clustering(path), settings=_CLUSTERED)


def _labelled(name: str, difference: str = "", *, train: str = "train", test: str = "test") -> LocalData:
    files = tuple(f"{name}/{file}.parquet" for file in (train, test))
    return LocalData(files, _classification(name, train=train, test=test), difference)


LOCAL_DATA: dict[str, LocalData] = {
    "Banking77Classification": _labelled("banking77"),
    "EmotionClassification": _labelled("emotion"),
    "TweetSentimentExtractionClassification": _labelled(
        "tweet_sentiment", "27,480 training rows of 27,481: the empty one is missing; order of rows as in the source."
    ),
    "AgNewsTopics": _labelled("ag_news"),
    "ImdbReviews": _labelled("imdb"),
    "TweetIrony": _labelled("tweeteval", train="irony_train", test="irony_test"),
    "TwentyNewsgroupsClustering": LocalData(
        (NEWSGROUPS,),
        _subjects,
        f"Ten sets of {SET_SIZE} subjects drawn from the 7,532 of the bydate test part; the official ten sets hold "
        "59,545 rows of 5,242 distinct subjects, another draw.",
    ),
    "StackOverflowTitles": _short_texts("stackoverflow"),
    "BiomedicalTitles": _short_texts("biomedical"),
    "SearchSnippets": _short_texts("search_snippets"),
    "MrpcParaphrases": LocalData(("glue/mrpc_test.parquet",), _pairs("glue/mrpc_test.parquet", "label")),
    "TrecQaAnswers": LocalData((TRECQA,), _answers),
    "SICK-R": LocalData(SICK, _sick),
    "STS12": LocalData((SEMEVAL,), _semeval(2012), "2,358 pairs of 3,108: MSRvid (750 pairs) is missing."),
    **{f"STS{year - 2000}": LocalData((SEMEVAL,), _semeval(year), SHORTER) for year in (2013, 2014, 2015, 2016)},
    "STSBenchmark": LocalData(("glue/stsb_test.parquet",), _pairs("glue/stsb_test.parquet", "score")),
}
assert set(LOCAL_DATA) <= set(TASKS)
