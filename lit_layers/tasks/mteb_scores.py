"""MTEB tasks as analyses: the official score at every layer of a model, and means over tasks at each layer."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from lit_layers.analyses.base import Analysis, Dtype
from lit_layers.analyses.changed_texts import Invariance
from lit_layers.analyses.representation import Representation
from lit_layers.data.batches import encode_texts
from lit_layers.data.prompt_texts import GivenTexts, TextBatches
from lit_layers.data.tokenization import TokenizerMixin
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import write_json
from lit_layers.identity import hash_of
from lit_layers.models.build import weights_hash
from lit_layers.models.copies import BFloat16View
from lit_layers.models.view import LayeredModel, States, upcast
from lit_layers.records import Record
from lit_layers.tasks.catalogue import DOMAINS, ScoredTask
from lit_layers.tasks.embeddings import LayerEncoder, NotFiniteError, SentenceEncoder, TaskEmbeddings
from lit_layers.tasks.mteb_tasks import MtebScorer, data_hash, describe, open_task
from lit_layers.tasks.task_files import read_result, version_of
from lit_layers.tasks.text_features import TextPooling

RESULTS = "mteb"
NUM_METRIC_TEXTS = 1000
CURVE = ["run", "step", "pooling", "states"]  # with `OPTIONS`, these columns identify a curve over layers
OPTIONS = ("dtype", "max_tokens", "mteb_seed", "modules")
MAX_TOKENS, SEED = 2048, 42
_COUNTS = ("num_texts", "num_cut", "num_empty")  # attributes of `TaskEmbeddings` that records report


@dataclass(kw_only=True)
class MtebTask(TokenizerMixin, Analysis):
    """The main score of an MTEB task at each layer, 0 to L. All layers share one forward pass per text.

    The full result of each layer is saved in a file below `results` and not computed again. The score of a layer can be
    undefined: equal vectors have no rank correlation, and non-finite hidden states have no cosine. Such layers give no
    record, and the records of the other layers count them as `num_undefined`.

    Args:
        task: The task to score.
        tokenizer: A local path or a name on the Hub.
        results: The folder of the layers' results.
        layers: The layers to score. None means all layers.
        pooling: "mean", "last" or "cls".
        encoder: The model's sentence-encoder settings. Its prompts and its limit of tokens apply at every layer.
        modules: Where the encoder's pooling, normalisation and similarity also apply: "last" for the last layer, which
            is then read after the final norm, or "all" for all layers.
        states: The convention of hidden states, "resid", "hf" or "normed". With `encoder`, "resid" becomes "hf".
        max_tokens: Longer texts are truncated. The model's own limit also applies.
        seed: The seed of mteb's random draws.
        dtype: `float32` runs the model in float32 or wider. `bfloat16` runs matrix products and attention within blocks
            in bfloat16.
        tell: Callback that receives one line of progress at a time.
    """

    SEES, LEAST = "text", {"max_tokens": 1, "seed": 0}
    UNMEASURED = ("results", "tell")

    task: ScoredTask
    tokenizer: str
    results: Path
    name: str = ""
    layers: tuple[int, ...] | None = None
    pooling: TextPooling = "mean"
    states: States = "resid"
    max_tokens: int = MAX_TOKENS
    seed: int = SEED
    encoder: SentenceEncoder | None = None
    modules: Literal["last", "all"] = "last"
    dtype: Dtype = "float32"
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.name = self.name or f"mteb/{self.task.name}"
        if self.encoder is not None:
            self.states = "hf" if self.states == "resid" else self.states
            self.pooling = self.encoder.pooling if self.modules == "all" else self.pooling
            self.max_tokens = min(self.max_tokens, self.encoder.max_tokens or self.max_tokens)

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        for layer in self.layers or ():
            if not 0 <= layer <= model.num_layers:
                raise InputError(f"layers: this model has layers 0 to {model.num_layers}, got {layer}")
        # Call this without texts, only to raise an error if `max_tokens` leaves no room for text beside special tokens.
        encode_texts(self.text_tokenizer, (), max_tokens=self.max_tokens)

    def config(self) -> dict[str, Any]:
        """Return all options that affect the scores, with the version of mteb."""
        config = super().config()
        task = {name: getattr(self.task, name) for name in ("name", "domain", "score", "subset")}
        config["init_args"] |= {"task": task, "mteb": version_of("mteb")}
        return config

    def data_hash(self) -> str | None:
        return data_hash(self.task)

    def compute(self, model: LayeredModel) -> Iterator[Record]:
        layers = list(range(model.num_layers + 1)) if self.layers is None else sorted(set(self.layers))
        limit = min(self.max_tokens, model.max_tokens or self.max_tokens)
        folder = self.results / weights_hash(model.model) / self.task.name / self._key(model, limit)
        saved = {layer: read_result(_file(folder, layer)) for layer in range(model.num_layers + 1)}
        results = {layer: result for layer, result in saved.items() if result}
        if missing := [layer for layer in layers if layer not in results]:
            self._say("reading the data")
            scorer = MtebScorer(open_task(self.task, seed=self.seed), self.task)
            how: dict[str, Any] = {"tokenizer": self.text_tokenizer, "max_tokens": limit, "states": self.states}
            how |= {"pooling": self.pooling, "last_pooling": None if self.encoder is None else self.encoder.pooling}
            view = BFloat16View(upcast(model)) if self.dtype == "bfloat16" else model
            embeddings = TaskEmbeddings(view, **how)
            for index, layer in enumerate(missing):
                self._say(f"layer {layer} of {model.num_layers}" if index else "embedding, and its first layer")
                follows = self._follows(layer, model)
                try:
                    scores = scorer.evaluate(LayerEncoder(embeddings, layer, self.encoder, follows=follows))
                except NotFiniteError as error:
                    scores = {"main_score": None, "undefined": str(error)}
                facts = {"layer": layer, "num_layers": model.num_layers, "n": scorer.num_rows()}
                facts |= {name: getattr(embeddings, name) for name in _COUNTS}
                results[layer] = self._header(follows) | facts | scores
                with refused(f"root: cannot write {folder}"):
                    folder.mkdir(parents=True, exist_ok=True)
                    write_json(_file(folder, layer), results[layer])
        if all("undefined" in results[layer] for layer in layers):
            raise InputError(results[layers[0]]["undefined"])
        num_undefined = sum(result["main_score"] is None for result in results.values())
        for layer, result in sorted(results.items()):
            if result["main_score"] is not None:
                tags = {name: getattr(self.task, name) for name in ("domain", "score")}
                tags = {"task": self.task.name, **tags, "pooling": self.pooling, "states": self.states}
                tags |= self._option_tags() | {name: result[name] for name in _COUNTS if result[name]}
                tags |= {"num_undefined": num_undefined} if num_undefined else {}
                yield Record(metric="main_score", value=result["main_score"], layer=layer, n=result["n"], tags=tags)

    def _option_tags(self) -> dict[str, Any]:
        """Return the tags of the records for options that differ from their defaults.

        `averages` combines only tasks with equal tags.
        """
        # The tag is named `mteb_seed`, because pages, exports and `correlate` ignore records with the tag `seed`: it
        # marks one of several random draws.
        seed = {} if self.seed == SEED else {"mteb_seed": self.seed}
        where = "the last layer" if self.modules == "last" else "every layer"
        encoder = {} if self.encoder is None else {"modules": f"{self.encoder} at {where}"}
        return self.tags_of("dtype", "max_tokens") | seed | encoder

    def _follows(self, layer: int, model: LayeredModel) -> bool:
        """Return whether a layer uses the encoder's pooling, normalisation and similarity."""
        return self.encoder is not None and (self.modules == "all" or layer == model.num_layers)

    def _header(self, follows: bool) -> dict[str, Any]:
        """Return the first entries of a layer's result file: the task, its data and how texts are embedded.

        `follows` says whether the layer uses the encoder's pooling, normalisation and similarity.
        """
        facts = {"task": self.task.name} | {name: getattr(self.task, name) for name in ("domain", "score", "subset")}
        encoder = {} if self.encoder is None else self.encoder.facts(follows)
        return facts | {"pooling": self.pooling, "states": self.states} | encoder | describe(self.task)

    def _key(self, model: LayeredModel, limit: int) -> str:
        """Return a hash, for the folder of the result files, of all that affects a layer's score except the weights."""
        options = {name: each for name, each in self.config()["init_args"].items() if name not in ("layers", "name")}
        dtype = self.dtype if self.dtype == "bfloat16" else model.precision
        # Replace the tokenizer's path by a hash of its content, so that a copy elsewhere gives the same results.
        options |= {"tokenizer": self.tokenizer_hash(), "max_tokens": limit, "dtype": dtype}
        options |= {"data": self.data_hash(), "attention": model.attention}
        return hash_of(options)

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.task.name}: {what}")


def _file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:03d}.json"


def mteb_analyses(
    tasks: Sequence[ScoredTask],
    *,
    tokenizer: str,
    root: str | Path,
    metrics: bool = False,
    model_limit: int | None = None,
    **options: Any,
) -> list[Analysis]:
    """Return an analysis for each task, to be measured by `offline.analyze_series`.

    Args:
        tasks: The tasks, as returned by `resolve`.
        tokenizer: A local path or a name on the Hub.
        root: The folder of the measurements. Results of layers are saved in its subfolder `mteb`.
        metrics: Whether to add label-free metrics on the first 1,000 texts of each task, `representation/TASK` and
            `invariance/TASK`. Pair classification is skipped, because it has no column of single texts.
        model_limit: Maximum number of tokens that the model accepts, for the label-free metrics. If it is None or
            larger than the option `max_tokens` of `MtebTask`, that option is the limit.
        options: Further options of `MtebTask`, such as `layers`, `pooling` and `encoder`.
    """
    analyses: list[Analysis] = []
    for task in tasks:
        scored = MtebTask(task=task, tokenizer=tokenizer, results=Path(root) / RESULTS, **options)
        analyses.append(scored)
        if metrics:
            analyses += _text_analyses(scored, min(scored.max_tokens, model_limit or scored.max_tokens))
    return analyses


def _text_analyses(scored: MtebTask, max_tokens: int) -> list[Analysis]:
    """Return the analyses of an MTEB task's texts that need no labels: `Representation` and `Invariance`.

    The list is empty if the task has only pairs of texts. It is also empty if the data cannot be loaded, because the
    analysis `scored` reports this error.
    """
    task = scored.task
    how: dict[str, Any] = {"states": scored.states, "pooling": scored.pooling}
    try:
        texts = MtebScorer(open_task(task, seed=SEED), task).texts()
    except InputError:
        return []
    if texts is None:
        return []
    sample = GivenTexts([text for text in texts[:NUM_METRIC_TEXTS] if text.strip()])
    batches = TextBatches(sample, scored.tokenizer, max_tokens=max_tokens)
    representation = Representation(batches=batches, name=f"representation/{task.name}", **how)
    about: Any = {"tokenizer": scored.tokenizer, "name": f"invariance/{task.name}", "max_tokens": max_tokens}
    invariance = Invariance(texts=sample, **about, **how)
    try:
        invariance.views  # noqa: B018
    except InputError as error:  # only warn, so that the other tasks are measured
        warnings.warn(f"{invariance.name} is not measured: {error}", stacklevel=3)
        return [representation]
    return [representation, invariance]


@dataclass(frozen=True, eq=False)
class Averages:
    """Mean scores over MTEB tasks at one checkpoint, for one set of options of `MtebTask`.

    `curve` has a row for each layer. Its column `average` is the unweighted mean over tasks, and each domain has a
    column with the mean over its tasks. `missing` names tasks that have no score at some layer from 1 on. They are left
    out of all means. At layer 0, a mean is NaN if one of the remaining tasks has no score there. `options` are the
    options that differ from their defaults.
    """

    run: str
    step: int | None
    pooling: str
    states: str
    scores: pd.DataFrame  # per task in the averages: name, domain, kind of score, n (rows), a column per layer
    curve: pd.DataFrame  # its columns: layer, average, classification, ...
    missing: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def best_per_task(self) -> float:
        """Return the mean over tasks of the score at each task's best layer from 1 on.

        This mean is too optimistic: each layer is chosen by the same score that is averaged.
        """
        scores: Any = self.scores
        return float(scores[[name for name in _layers(scores) if name > 0]].max(axis=1).mean())


def averages(frame: pd.DataFrame, *, expected: Sequence[str] = ()) -> list[Averages]:
    """Return the mean scores of every checkpoint, sorted by run and step.

    Tasks that were measured with different options (`OPTIONS`) have separate means.

    Args:
        frame: A table from `lit_layers.records.frame`, which may also hold other analyses.
        expected: Names of the tasks that the means should include. Those without a score are reported as missing.

    Raises:
        InputError: The table has no MTEB score.
    """
    table: Any = score_table(frame)
    results = []
    names = [name for name in OPTIONS if name in table]
    for (run, step, pooling, states, *options), rows in table.groupby([*CURVE, *names], dropna=False, sort=False):
        layers = [layer for layer in _layers(rows) if rows[layer].notna().any()]
        later = [layer for layer in layers if layer > 0]
        complete = rows[rows[later].notna().all(axis=1)] if later else rows.iloc[:0]
        missing = [name for name in dict.fromkeys([*rows["task"], *expected]) if name not in set(complete["task"])]
        scores = complete[["task", "domain", "score", "n", *layers]].reset_index(drop=True)
        curve = pd.DataFrame({"layer": layers, "average": _mean(scores, layers)})
        for domain in DOMAINS:
            if (subset := scores[scores["domain"] == domain]).size:
                curve[domain] = _mean(subset, layers)
        number = None if pd.isna(step) else int(step)
        pairs = zip(names, options, strict=True)
        tags = {name: value if isinstance(value, str) else int(value) for name, value in pairs if not pd.isna(value)}
        key = str(run), number, str(pooling), str(states)
        results.append(Averages(*key, scores, curve, tuple(missing), tags))
    return sorted(results, key=lambda each: (each.run, -1 if each.step is None else each.step))


def score_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a wide table with a row per checkpoint and task, and a column per layer that is named by its index.

    Raises:
        InputError: The table has no MTEB score.
    """
    rows: Any = frame[frame["analysis"].str.startswith("mteb/") & (frame["metric"] == "main_score")]
    if not len(rows):
        raise InputError("expected scores of mteb, the measurements hold none: run `lit-layers mteb` first")
    ranks = {"domain": [*DOMAINS], "task": [*dict.fromkeys(rows["task"])]}
    index = [*CURVE, *(name for name in OPTIONS if name in rows and rows[name].notna().any())]
    index += ["task", "domain", "score", "n"]
    typed = rows.assign(step=rows["step"].astype("Int64"), layer=rows["layer"].astype(int))
    wide = typed.pivot(index=index, columns="layer", values="value").reset_index().rename_axis(columns=None)
    keys = wide.assign(**{name: wide[name].map(values.index) for name, values in ranks.items()})
    return wide.loc[keys.sort_values(["run", "step", *ranks], kind="stable").index].reset_index(drop=True)


def _layers(table: Any) -> list[int]:
    return sorted(name for name in table.columns if isinstance(name, int))


def _mean(scores: Any, layers: list[int]) -> np.ndarray:
    """Return the mean of a table of scores over tasks, (layers,). It is NaN at layers where a task has no score."""
    return scores[layers].to_numpy(dtype=float).mean(axis=0) if len(scores) else np.full(len(layers), np.nan)
