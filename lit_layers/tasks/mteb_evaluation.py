"""One layer of a model as an encoder that mteb can evaluate, and its scores on one task by mteb's own evaluation.

mteb is optional and takes seconds to import: functions do, where they need it.
"""

import contextlib
import copy
import math
import random
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_layers.tasks.catalogue import ScoredTask
from lit_layers.tasks.embedding_store import TaskEmbeddings
from lit_layers.tasks.mteb_tasks import no_bars
from lit_layers.tasks.sentence_encoder import SentenceEncoder

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta

SPLIT = "test"
_SHORTEST = 1e-12  # a vector that is shorter is divided by this, as torch.nn.functional.normalize does
# What mteb's evaluations say of embeddings that a layer just has: a probe of 100 iterations is part of their
# definition, and a class that is never predicted, or vectors that are all alike, show in the score.
_SAID_BY_SCORES = ("lbfgs failed to converge", "Precision is ill-defined", "Recall is ill-defined", "An input array is")
_SAID_BY_SCORES += ("No positive class found in y_true", "Number of distinct clusters", "A single label was found")


class LayerEncoder:
    """What mteb's `EncoderProtocol` asks for: the embeddings of one layer, in float32.

    Args:
        encoder: what the model says of itself: its prompts stand before every text. None: the text goes in as it is.
        follows: whether vectors are normalised and compared as the encoder says; else they come out as they are pooled
            and are compared by their cosine.
    """

    def __init__(
        self, embeddings: TaskEmbeddings, layer: int, encoder: SentenceEncoder | None = None, *, follows: bool = True
    ) -> None:
        self.embeddings, self.layer = embeddings, layer
        self.encoder, self.followed = encoder, encoder if follows else None

    def encode(self, inputs: Any, *, task_metadata: Any = None, prompt_type: Any = None, **_: Any) -> np.ndarray:
        """The embeddings (texts, dim) of the texts that mteb hands over in batches."""
        from mteb.models.abs_encoder import get_prompt_name

        texts = [text for batch in inputs for text in batch["text"]]
        if self.encoder is not None:
            name = get_prompt_name(self.encoder.named, task_metadata, prompt_type)
            texts = [self.encoder.text(text, name) for text in texts]
        vectors = self.embeddings.of(texts, self.layer)
        if self.followed is None or not self.followed.normalizes:
            return vectors
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(norms, _SHORTEST)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines (first, second), or what the encoder compares by."""
        from mteb.similarity_functions import cos_sim, dot_score

        return (dot_score if self._by_dot else cos_sim)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines (pairs,), or what the encoder compares by."""
        from mteb.similarity_functions import pairwise_cos_sim, pairwise_dot_score

        return (pairwise_dot_score if self._by_dot else pairwise_cos_sim)(embeddings1, embeddings2)

    @property
    def _by_dot(self) -> bool:
        return self.followed is not None and self.followed.similarity == "dot"

    @property
    def mteb_model_meta(self) -> "ModelMeta":
        from mteb.models.model_meta import ModelMeta

        return ModelMeta.create_empty({"name": f"lit_layers/layer_{self.layer:03d}", "revision": "no_revision"})


class Prepared:
    """A task of mteb that is scored once for each layer, each time as if it were new.

    mteb draws at random while it evaluates, and one evaluation would change the next: here every layer meets the same
    draws, whichever layers were scored before.
    """

    def __init__(self, task: Any, spec: ScoredTask) -> None:
        self.task, self.spec = task, spec
        if spec.domain == "classification":
            task._undersample_data = _remembering(task._undersample_data)
            task._calculate_scores = _of_lists(task._calculate_scores)

    def evaluate(self, encoder: LayerEncoder) -> dict[str, Any]:
        """mteb's result: all scores of the split, and the main one as `main_score`; NaN is None."""
        from mteb.results.task_result import TaskResult

        task, start = copy.copy(self.task), time.perf_counter()
        task.rng_state, task.np_rng = random.Random(task.seed), np.random.default_rng(task.seed)
        with _seeded(task.seed), _quiet():
            scores = task.evaluate(
                encoder,
                split=SPLIT,
                subsets_to_run=[self.spec.subset],
                encode_kwargs={"batch_size": 1024, "show_progress_bar": False},
            )
        if self.spec.subset not in scores:
            raise ValueError(f"{self.spec.name}: mteb gave no scores of the subset {self.spec.subset}")
        result = TaskResult.from_task_results(task, {SPLIT: scores}, evaluation_time=time.perf_counter() - start)
        (row,) = result.scores[SPLIT]
        return {
            "main_score": _finite(row["main_score"]),
            "mteb_version": result.mteb_version,
            "dataset_revision": result.dataset_revision,
            "seconds": result.evaluation_time,
            "scores": _plain(row),
        }

    def num_rows(self) -> int:
        """How many texts, pairs or questions are scored."""
        part = self._part()
        if self.spec.domain == "reranking":
            return len(part["queries"])
        sentences = part["sentences"] if "sentences" in part.column_names else None
        if sentences is not None and len(part) and isinstance(part[0]["sentences"], list):
            return sum(len(row) for row in sentences)
        return len(part[0]["labels"]) if self._is_one_row(part) else len(part)

    def texts(self, number: int) -> list[str] | None:
        """The first texts of the test split: of pairs with a similarity the first text, of questions these; None for
        pairs that are alike or not, which have no column of texts of their own."""
        part, domain = self._part(), self.spec.domain
        if domain == "pair_classification":
            return None
        if domain == "reranking":
            return [str(text) for text in part["queries"]["text"][:number]]
        if domain == "sts":
            return list(part["sentence1"][:number])
        if domain == "classification":
            return list(part["text"][:number])
        texts: list[str] = []
        for row in part:
            texts += row["sentences"] if isinstance(row["sentences"], list) else [row["sentences"]]
            if len(texts) >= number:
                break
        return texts[:number]

    def _part(self) -> Any:
        data = self.task.dataset
        return data.get(self.spec.subset, data)[SPLIT]  # one subset alone has no level of its own

    @staticmethod
    def _is_one_row(part: Any) -> bool:
        """Whether all pairs stand in one row, as in mteb's older sets."""
        return len(part) == 1 and isinstance(part[0].get("labels"), list)


def _remembering(undersample: Any) -> Any:
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


def _of_lists(calculate_scores: Any) -> Any:
    """mteb's scores of predictions, with the labels read once: each of its seven metrics reads them one by one."""

    def calculated(truth: Any, predicted: Any) -> Any:
        return calculate_scores(np.asarray(truth[:]), predicted)

    return calculated


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of what the scores say themselves."""
    with no_bars(), warnings.catch_warnings():
        for words in _SAID_BY_SCORES:
            warnings.filterwarnings("ignore", message=words)
        yield


def _plain(value: Any) -> Any:
    """As JSON has it: numbers of numpy as Python's, what is not finite as None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return _finite(value) if isinstance(value, float) else value


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
