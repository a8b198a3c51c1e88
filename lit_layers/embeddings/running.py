"""From names of tasks to the analyses that score every layer on them, and those that measure their texts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_layers.analyses.base import Analysis, States
from lit_layers.analyses.features import TextPooling
from lit_layers.analyses.representation import Representation
from lit_layers.analyses.text_invariance import Invariance
from lit_layers.data.prompt_texts import GivenTexts, TextBatches
from lit_layers.embeddings.analysis import MAX_TOKENS, SEED, MtebTask
from lit_layers.embeddings.evaluating import Prepared
from lit_layers.embeddings.store import GB, Store, StoreDtype
from lit_layers.embeddings.task_list import TaskSpec
from lit_layers.embeddings.task_sources import Sources
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

RESULTS, EMBEDDINGS = "mteb", "embeddings"
NUM_METRIC_TEXTS = 1000
METRICS = ("representation", "invariance")


def mteb_analyses(
    tasks: Sequence[TaskSpec],
    *,
    tokenizer: str,
    root: str | Path,
    sources: Sources | None = None,
    layers: Sequence[int] | None = None,
    pooling: TextPooling = "mean",
    states: States = "resid",
    max_tokens: int = MAX_TOKENS,
    seed: int = SEED,
    cache: str | Path | None = None,
    cache_gb: float = 20.0,
    store_dtype: StoreDtype = "float32",
    metrics: bool = False,
    model_limit: int | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Analysis]:
    """An analysis for each task, to be measured by `offline.analyze` or `offline.analyze_series`.

    Args:
        tasks: of `resolve`.
        root: the folder of the measurements; results of single layers lie below it, in `mteb`.
        cache: of embeddings; None: below `root`, too.
        cache_gb: how much it may hold.
        metrics: whether the texts of each task are measured without labels, too: see `metric_analyses`.
        model_limit: tokens that the model takes at most, for these metrics; None: `max_tokens`.
        tell: told what is done now.
    """
    results = Path(root) / RESULTS
    store = Store(Path(cache or results / EMBEDDINGS), dtype=store_dtype, max_bytes=cache_gb * GB)
    found: list[Analysis] = []
    for task in tasks:
        scored = MtebTask(
            task=task,
            tokenizer=tokenizer,
            sources=sources or Sources(),
            store=store,
            results=results,
            layers=None if layers is None else tuple(layers),
            pooling=pooling,
            states=states,
            max_tokens=max_tokens,
            seed=seed,
            tell=tell,
        )
        found.append(scored)
        if metrics:
            limit = min(max_tokens, model_limit or max_tokens)
            found += metric_analyses(
                task, scored.sources, tokenizer=tokenizer, states=states, pooling=pooling, max_tokens=limit
            )
    return found


def metric_analyses(
    task: TaskSpec,
    sources: Sources,
    *,
    tokenizer: str,
    states: States = "resid",
    pooling: TextPooling = "mean",
    max_tokens: int = MAX_TOKENS,
    num_texts: int = NUM_METRIC_TEXTS,
) -> list[Analysis]:
    """`representation/TASK` and `invariance/TASK`, of the first texts of the task's test split that have a word.

    None for pair classification, which has no column of texts of its own, and for a task whose data cannot be had: that
    is said when the task itself is scored.
    """
    if task.domain == "pair_classification":
        return []
    try:
        texts = Prepared(sources.open(task, seed=SEED), task).texts(num_texts) or []
    except InputError:
        return []
    given = GivenTexts([text for text in texts if text.strip()])
    batches = TextBatches(given, tokenizer, max_tokens=max_tokens)
    invariance = Invariance(
        texts=given,
        tokenizer=tokenizer,
        name=f"invariance/{task.name}",
        max_tokens=max_tokens,
        states=states,
        pooling=pooling,
    )
    representation = Representation(batches=batches, name=f"representation/{task.name}", states=states, pooling=pooling)
    try:
        invariance.make()
    except InputError as error:  # the texts of one task must not keep the others from being measured
        return [representation, Refused(name=invariance.name, reason=str(error))]
    return [representation, invariance]


@dataclass(kw_only=True)
class Refused(Analysis):
    """What cannot be measured on the data at hand: its line among the measurements says why."""

    name: str
    reason: str

    def run(self, model: LayeredModel) -> Iterable[Record]:
        raise InputError(self.reason)
