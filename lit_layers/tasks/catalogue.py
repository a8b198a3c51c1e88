"""The one catalogue of tasks: a row each, of whatever asks for labelled text, prompts, scores or embeddings."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from lit_layers.errors import InputError
from lit_layers.tasks.probe_task import ProbeTask
from lit_layers.tasks.task_files import Columns, Use, local_copy, read_columns

Domain = Literal["classification", "clustering", "pair_classification", "reranking", "sts"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
SUITE, LOCAL = "layerwise32", "local"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set and what is asked of it; a linear probe's row is a `ProbeTask`.

    Args:
        use: what asks for it: prompts to measure on, benchmark scores, fine-tuning on GLUE, MTEB.
        name: unique within its use.
        source: ORG/NAME[:CONFIG] of the Hub; of a benchmark its task file within lm-eval; mteb knows its own.
        text: columns of its texts; of a benchmark all that a local copy needs.
        split: that is measured or scored.
        num_classes: of GLUE; None: a number is predicted.
        scores: what it is judged by, the first one foremost.
        examples: worked ones that a benchmark's prompts begin with.
        settings: of lm-eval that are others for a local copy.
        domain: of MTEB.
        subset: the one of MTEB's that is scored.
        official: whether mteb has it; else its data is local data.
    """

    use: Use
    name: str
    source: str = ""
    text: tuple[str, ...] = ()
    split: str = "test"
    num_classes: int | None = None
    scores: tuple[str, ...] = ()
    examples: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    domain: Domain | Literal[""] = ""
    subset: str = "default"
    official: bool = True

    def read(self, split: str, columns: Mapping[str, str], folder: str | Path | None) -> Columns:
        """Columns of a split: of the files that the folder's `tasks.yaml` names, or with None of the Hub.

        Raises:
            InputError: a split, file or column is missing, or the Hub does not answer.
        """
        if folder is None:
            return read_columns(self.source, [split], columns)
        return local_copy(self.use, self.name, folder).read(split, columns)

    @property
    def analysis(self) -> str:
        """The name of the measurements of one of MTEB."""
        return f"{self.use}/{self.name}"

    @property
    def score(self) -> str:
        """The one it is judged by."""
        return self.scores[0]


class TaskSpec(Task):
    """A task of MTEB in the words that recipes and run folders had for one before."""

    def __init__(self, name: str, domain: Domain, score: str, subset: str = "default", official: bool = True) -> None:
        super().__init__(use="mteb", name=name, scores=(score,), domain=domain, subset=subset, official=official)


def tasks_of(use: Use) -> dict[str, Task]:
    """The tasks of a use by name, in the catalogue's order; those of probes are `TASKS`."""
    return {row.name: row for row in CATALOGUE if isinstance(row, Task) and row.use == use}


def find(use: Use, name: str, instead: str = "") -> Task:
    """The task of a name.

    Raises:
        InputError: there is none; the sentence ends in what may be given `instead`.
    """
    tasks = tasks_of(use)
    if name not in tasks:
        raise unknown_task(name, tasks, instead)
    return tasks[name]


def find_task(task: str | ProbeTask) -> ProbeTask:
    """The task of linear probes of a name; a task itself is checked and returned.

    Raises:
        InputError: the catalogue has no task of that name, or `ProbeTask.check` refuses.
    """
    if isinstance(task, ProbeTask):
        task.check()
        return task
    if task not in TASKS:
        raise unknown_task(task, TASKS, "give a ProbeTask")
    return TASKS[task]


def resolve(names: Sequence[str], *, domains: Sequence[str] | None = None, local: Iterable[str] = ()) -> list[Task]:
    """The tasks of MTEB that names stand for, each once: `layerwise32`, `local` (those named in `local`), or single
    tasks.

    Raises:
        InputError: a name that is none, a domain that is none, or nothing left.
    """
    for domain in domains or ():
        if domain not in DOMAINS:
            raise InputError(f"domains: expected some of {', '.join(DOMAINS)}, got {domain!r}")
    tasks, local = tasks_of("mteb"), set(local)
    of_name = {name: [task] for name, task in tasks.items()} | {SUITE: list(LAYERWISE32)}
    of_name[LOCAL] = [task for task in tasks.values() if task.name in local]
    if unknown := [name for name in names if name not in of_name]:
        raise unknown_task(unknown[0], [SUITE, LOCAL, *tasks])
    chosen = dict.fromkeys(task.name for name in names for task in of_name[name])
    left = [tasks[name] for name in chosen if domains is None or tasks[name].domain in domains]
    if not left:
        raise InputError(f"tasks: none is left of {', '.join(names) or 'no name'} in the domains and data given")
    return left


def unknown_task(name: str, tasks: Iterable[str], instead: str = "") -> InputError:
    """What is said of a name that none of the tasks has: the nearest ones, or the first."""
    names = {each.lower(): each for each in tasks}
    near = [names[each] for each in difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)]
    first = list(names.values())[:12]
    remedy = f"did you mean {' or '.join(near)}?" if near else f"expected one such as {', '.join(first)}"
    return InputError(f"task: there is no {name!r}; {remedy}{'; or ' if instead else ''}{instead}")


# What MMLU calls humanities; the Hub's copy has the subjects alone.
HUMANITIES = [
    "formal_logic", "high_school_european_history", "high_school_us_history", "high_school_world_history",
    "international_law", "jurisprudence", "logical_fallacies", "moral_disputes", "moral_scenarios", "philosophy",
    "prehistory", "professional_law", "world_religions",
]  # fmt: skip
_PROBES = (
    ProbeTask(
        "banking77",
        "mteb/banking77",
        label="label_text",
        description="Intents of questions to a bank (Casanueva et al. 2020).",
    ),
    ProbeTask(
        "ag_news",
        "fancyzhx/ag_news",
        num_train=10_000,
        classes=("World", "Sports", "Business", "Sci/Tech"),
        description="Topics of news (Zhang, Zhao, LeCun 2015).",
    ),
    ProbeTask(
        "tweet_sentiment",
        "mteb/tweet_sentiment_extraction",
        label="label_text",
        where={"label_text": ["negative", "positive"]},
        classes=("negative", "positive"),
        test=None,
        num_train=10_223,
        num_test=4_382,
        drop_empty=True,
        description="Sentiment of tweets. The paper names two classes and 14,605 rows cut 70/30, but no corpus: the "
        "rows, from the training split of tweet_sentiment_extraction without its neutral ones, are ours.",
    ),
    ProbeTask(
        "tweet_sentiment_extraction",
        "mteb/tweet_sentiment_extraction",
        label="label_text",
        classes=("negative", "neutral", "positive"),
        drop_empty=True,
        description="Sentiment of tweets (Kaggle 2020, as in MTEB); one training row has no text.",
    ),
    ProbeTask(
        "sst2",
        "nyu-mll/glue:sst2",
        text="sentence",
        test="validation",
        classes=("negative", "positive"),
        description="Sentiment of phrases from film reviews (Socher et al. 2013). GLUE keeps the labels of its test "
        "split, so its validation split is the test here.",
    ),
    ProbeTask(
        "emotion",
        "dair-ai/emotion:split",
        validation="validation",
        classes=("sadness", "joy", "love", "anger", "fear", "surprise"),
        description="Emotions of tweets (Saravia et al. 2018).",
    ),
    ProbeTask(
        "trec",
        "SetFit/TREC-QC",
        label="label_coarse_original",
        classes=("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
        description="What a question asks for (Li, Roth 2002).",
    ),
    ProbeTask(
        "yelp",
        "Yelp/yelp_review_full",
        kind="regression",
        test=None,
        label_offset=1.0,
        balance=2_000,
        description="Stars of reviews, 1 to 5 (Zhang, Zhao, LeCun 2015); 2,000 of each, cut 70/30.",
    ),
    ProbeTask(
        "mmlu_humanities",
        "cais/mmlu:all",
        text="question: {question} answer: A. {choices[0]}, B. {choices[1]}, C. {choices[2]}, D. {choices[3]}",
        label="answer",
        train="test",
        test=None,
        where={"subject": HUMANITIES},
        classes=("A", "B", "C", "D"),
        description="The right one of four answers (Hendrycks et al. 2021). MMLU has no training split: its test "
        "split is cut 70/30, which is ours, as the paper does not say how many rows it used.",
    ),
    ProbeTask(
        "imdb", "stanfordnlp/imdb", classes=("neg", "pos"), description="Sentiment of film reviews (Maas et al. 2011)."
    ),
    ProbeTask(
        "twenty_newsgroups",
        "SetFit/20_newsgroups",
        label="label_text",
        drop_empty=True,
        description="Groups of Usenet posts (Lang 1995), parted by date. The Hub's copy is without quotations and "
        "signatures; a local copy may have them.",
    ),
    ProbeTask(
        "cola",
        "nyu-mll/glue:cola",
        text="sentence",
        test="validation",
        classes=("unacceptable", "acceptable"),
        description="Whether a sentence is grammatical (Warstadt et al. 2019); the test is GLUE's validation split.",
    ),
    ProbeTask(
        "tweeteval_emotion",
        "cardiffnlp/tweet_eval:emotion",
        validation="validation",
        classes=("anger", "joy", "optimism", "sadness"),
        description="Emotions of tweets (Barbieri et al. 2020).",
    ),
    ProbeTask(
        "tweeteval_irony",
        "cardiffnlp/tweet_eval:irony",
        validation="validation",
        classes=("non_irony", "irony"),
        description="Irony of tweets (Barbieri et al. 2020).",
    ),
)


def _classification(*names: str, subset: str = "default") -> list[Task]:
    return _mteb("classification", "accuracy", *(f"{name}Classification" for name in names), subset=subset)


def _mteb(domain: Domain, score: str, *names: str, subset: str = "default", official: bool = True) -> list[Task]:
    return [
        Task(use="mteb", name=name, scores=(score,), domain=domain, subset=subset, official=official) for name in names
    ]


# The English classic benchmark of mteb without retrieval, summarisation and paragraph tasks: Skean et al. 2025,
# arXiv 2502.02013. Of tasks in several languages the English subset. The last four lines: tasks that mteb does not
# have, of open data sets that lie in local data.
_MTEB = [
    *_classification("AmazonCounterfactual", "AmazonReviews", subset="en"),
    *_classification("Banking77", "Emotion"),
    *_classification("MTOPDomain", "MTOPIntent", "MassiveIntent", "MassiveScenario", subset="en"),
    *_classification("ToxicConversations", "TweetSentimentExtraction"),
    *_mteb("clustering", "v_measure", "ArxivClusteringS2S", "BiorxivClusteringS2S", "MedrxivClusteringS2S"),
    *_mteb("clustering", "v_measure", "RedditClustering", "StackExchangeClustering", "TwentyNewsgroupsClustering"),
    *_mteb("pair_classification", "max_ap", "SprintDuplicateQuestions", "TwitterSemEval2015", "TwitterURLCorpus"),
    *_mteb("reranking", "map_at_1000", "AskUbuntuDupQuestions"),
    *_mteb("reranking", "max_over_subqueries_map_at_1000", "MindSmallReranking"),
    *_mteb("reranking", "map_at_1000", "SciDocsRR", "StackOverflowDupQuestions"),
    *_mteb("sts", "cosine_spearman", "BIOSSES", "SICK-R", "STS12", "STS13", "STS14", "STS15", "STS16"),
    *_mteb("sts", "cosine_spearman", "STS17", subset="en-en"),
    *_mteb("sts", "cosine_spearman", "STSBenchmark"),
    *_mteb("classification", "accuracy", "AgNewsTopics", "TweetIrony", "ImdbReviews", official=False),
    *_mteb("clustering", "v_measure", "StackOverflowTitles", "BiomedicalTitles", "SearchSnippets", official=False),
    *_mteb("pair_classification", "max_ap", "MrpcParaphrases", official=False),
    *_mteb("reranking", "map_at_1000", "TrecQaAnswers", official=False),
]


def _prompts(name: str, source: str, column: str = "question", split: str = "test") -> Task:
    return Task(use="prompts", name=name, source=source, text=(column,), split=split)


def _glue(name: str, *text: str, scores: tuple[str, ...] = ("accuracy",), num_classes: int | None = 2) -> Task:
    return Task(use="glue", name=name, source=f"nyu-mll/glue:{name}", text=text, scores=scores, num_classes=num_classes)


def _benchmark(name: str, source: str, *columns: str, **options: Any) -> Task:
    return Task(use="benchmark", name=name, source=source, text=columns, **options)


_CHOICES = ("question", "choices", "label")
_PAIR = ("sentence1", "sentence2")
CATALOGUE: tuple[Task | ProbeTask, ...] = (
    *_PROBES,
    # A prompt is the question or the context alone, without choices and examples. HellaSwag, Winogrande and TruthfulQA:
    # the split that everybody tests on (of the first two the test split's answers are secret, the last has one split).
    _prompts("arc", "allenai/ai2_arc:ARC-Challenge"),
    _prompts("gsm8k", "openai/gsm8k:main"),
    _prompts("hellaswag", "Rowan/hellaswag:default", "ctx", "validation"),
    _prompts("mmlu", "cais/mmlu:all"),
    _prompts("truthfulqa", "truthfulqa/truthful_qa:generation", split="validation"),
    _prompts("winogrande", "allenai/winogrande:winogrande_xl", "sentence", "validation"),
    # Prompts and metrics are lm-eval's; the columns are those of a local copy. The first five: the published figures.
    _benchmark("lambada", "lambada/lambada_openai.yaml", "text"),
    _benchmark("arc_challenge", "arc/arc_challenge.yaml", *_CHOICES),
    _benchmark(  # its contexts as lm-eval's process_docs makes them
        "hellaswag",
        "hellaswag/hellaswag.yaml",
        *("query", "choices", "label"),
        split="validation",
        settings={"process_docs": None},
    ),
    _benchmark("winogrande", "winogrande/default.yaml", "sentence", "choices", "label", split="validation"),
    _benchmark("gsm8k", "gsm8k/gsm8k.yaml", "question", "answer", examples=5),
    _benchmark("arc_easy", "arc/arc_easy.yaml", *_CHOICES),
    _benchmark("piqa", "piqa/piqa.yaml", "goal", "choices", "label", split="validation"),
    _benchmark("openbookqa", "openbookqa/openbookqa.yaml", *_CHOICES),
    _benchmark("sciq", "sciq/sciq.yaml", "question", "support", "correct_answer", "distractors"),
    _benchmark("boolq", "super_glue/boolq/default.yaml", "passage", "question", "label", split="validation"),
    _glue("cola", "sentence", scores=("matthews",)),
    _glue("mrpc", *_PAIR, scores=("accuracy", "f1")),
    _glue("qnli", "question", "sentence"),
    _glue("rte", *_PAIR),
    _glue("sst2", "sentence"),
    _glue("stsb", *_PAIR, scores=("pearson", "spearman"), num_classes=None),
    _glue("wnli", *_PAIR),
    *_MTEB,
)
TASKS: Mapping[str, ProbeTask] = MappingProxyType({row.name: row for row in CATALOGUE if isinstance(row, ProbeTask)})
LAYERWISE32: tuple[Task, ...] = tuple(task for task in tasks_of("mteb").values() if task.official)
LOCAL_TASKS: Mapping[str, Task] = MappingProxyType(tasks_of("benchmark"))
PAINTED = tuple(LOCAL_TASKS)[:5]  # whose normalised scores have a median, in the published figures
