"""The tasks that layers are scored on: the 32 of Skean et al. by domain, and those that lie in local data alone."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lit_layers.errors import InputError

Domain = Literal["classification", "clustering", "pair_classification", "reranking", "sts"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
SCORES: dict[Domain, str] = {
    "classification": "accuracy",
    "clustering": "v_measure",
    "pair_classification": "max_ap",
    "reranking": "map_at_1000",
    "sts": "cosine_spearman",
}
SUITE, LOCAL = "layerwise32", "local"


@dataclass(frozen=True)
class TaskSpec:
    """A task by its name, and what of it is scored: the test split of one subset, by one number."""

    name: str
    domain: Domain
    score: str
    subset: str = "default"
    official: bool = True  # of mteb; else its data is local data

    @property
    def analysis(self) -> str:
        """The name of its measurements."""
        return f"mteb/{self.name}"


def _classification(names: Iterable[str], subset: str = "default") -> list[TaskSpec]:
    return [TaskSpec(f"{name}Classification", "classification", "accuracy", subset) for name in names]


def _others(domain: Domain, *names: str, official: bool = True) -> list[TaskSpec]:
    return [TaskSpec(name, domain, SCORES[domain], official=official) for name in names]


# The English classic benchmark of mteb without retrieval, summarisation and paragraph tasks: Skean et al. 2025,
# arXiv 2502.02013. Of tasks in several languages the English subset.
LAYERWISE32: tuple[TaskSpec, ...] = (
    *_classification(["AmazonCounterfactual", "AmazonReviews"], "en"),
    *_classification(["Banking77", "Emotion"]),
    *_classification(["MTOPDomain", "MTOPIntent", "MassiveIntent", "MassiveScenario"], "en"),
    *_classification(["ToxicConversations", "TweetSentimentExtraction"]),
    *_others("clustering", "ArxivClusteringS2S", "BiorxivClusteringS2S", "MedrxivClusteringS2S"),
    *_others("clustering", "RedditClustering", "StackExchangeClustering", "TwentyNewsgroupsClustering"),
    *_others("pair_classification", "SprintDuplicateQuestions", "TwitterSemEval2015", "TwitterURLCorpus"),
    *_others("reranking", "AskUbuntuDupQuestions"),
    TaskSpec("MindSmallReranking", "reranking", "max_over_subqueries_map_at_1000"),
    *_others("reranking", "SciDocsRR", "StackOverflowDupQuestions"),
    *_others("sts", "BIOSSES", "SICK-R", "STS12", "STS13", "STS14", "STS15", "STS16"),
    TaskSpec("STS17", "sts", "cosine_spearman", "en-en"),
    *_others("sts", "STSBenchmark"),
)

# Tasks that mteb does not have, of open data sets; `local_tasks` says how they are read.
LOCAL_TASKS: tuple[TaskSpec, ...] = (
    *_others("classification", "AgNewsTopics", "TweetIrony", "ImdbReviews", official=False),
    *_others("clustering", "StackOverflowTitles", "BiomedicalTitles", "SearchSnippets", official=False),
    *_others("pair_classification", "MrpcParaphrases", official=False),
    *_others("reranking", "TrecQaAnswers", official=False),
)
TASKS: dict[str, TaskSpec] = {spec.name: spec for spec in (*LAYERWISE32, *LOCAL_TASKS)}


def resolve(names: Sequence[str], *, domains: Sequence[str] | None = None, local: Iterable[str] = ()) -> list[TaskSpec]:
    """The tasks that names stand for, each once: `layerwise32`, `local` (those named in `local`), or single tasks.

    Raises:
        InputError: a name that is none, a domain that is none, or nothing left.
    """
    for domain in domains or ():
        if domain not in DOMAINS:
            raise InputError(f"domains: expected some of {', '.join(DOMAINS)}, got {domain!r}{_near(domain, DOMAINS)}")
    local, found = set(local), dict[str, TaskSpec]()
    for name in names:
        if name == SUITE:
            found |= {spec.name: spec for spec in LAYERWISE32}
        elif name == LOCAL:
            found |= {spec.name: spec for spec in TASKS.values() if spec.name in local}
        elif name in TASKS:
            found[name] = TASKS[name]
        else:
            raise InputError(f"tasks: there is no task {name!r}{_near(name, [*TASKS, SUITE, LOCAL])}")
    left = [spec for spec in found.values() if domains is None or spec.domain in domains]
    if not left:
        raise InputError(f"tasks: none is left of {', '.join(names) or 'no name'} in the domains and data given")
    return left


def _near(name: str, known: Iterable[str]) -> str:
    known = list(known)
    folded = {each.lower(): each for each in known}
    near = [folded[each] for each in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    return (
        f"; did you mean {' or '.join(near)}?" if near else f"; expected {SUITE}, {LOCAL} or tasks such as {known[0]}"
    )
