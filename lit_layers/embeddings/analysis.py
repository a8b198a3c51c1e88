"""A task of MTEB as an analysis: the official score of every layer of a model."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lit_layers.analyses.base import STATES, Analysis, States, at_least_float32
from lit_layers.analyses.features import TextPooling
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, tokenizer_hash
from lit_layers.durable import write_json
from lit_layers.embeddings.encoder import LayerEncoder
from lit_layers.embeddings.evaluating import Prepared
from lit_layers.embeddings.store import STORE_DTYPES, Embedding, NotFiniteError, Store
from lit_layers.embeddings.task_list import TaskSpec
from lit_layers.embeddings.task_sources import INSTALL, Sources
from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

POOLINGS: tuple[TextPooling, ...] = ("mean", "last", "cls")
MAX_TOKENS, SEED = 2048, 42
_ELSEWHERE = ("results", "store", "sources")  # decide where things lie, not the numbers


@dataclass(kw_only=True)
class MtebTask(Analysis):
    """The main score of mteb for each layer, 0 to L: one forward pass per text gives all layers.

    Every layer's full result is a file below `results`, written as it is made; layers that have theirs are not scored
    again, nor are texts passed again whose embeddings the store still holds. A layer whose score is not defined (equal
    vectors have no rank correlation, states that are not finite no cosine) gives no record, and the others say how many
    there are of it (`num_undefined`). The model runs in float32 or wider.

    Args:
        task: what is scored.
        tokenizer: a local path or a name of the Hub.
        sources: where the data come from.
        store: of the embeddings.
        results: the folder of the layers' results.
        layers: which are scored; None: all.
        pooling: "mean", "last" or "cls".
        states: the convention, "resid", "hf" or "normed".
        max_tokens: a longer text loses its end; also at the model's own limit.
        seed: mteb's.
    """

    task: TaskSpec
    tokenizer: str
    sources: Sources
    store: Store
    results: Path
    name: str = ""
    layers: tuple[int, ...] | None = None
    pooling: TextPooling = "mean"
    states: States = "resid"
    max_tokens: int = MAX_TOKENS
    seed: int = SEED
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    _tokenizer: TextTokenizer | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.task.analysis

    def check(self, model: LayeredModel) -> None:
        """Refuses options that do not fit; data that are missing fail this one task, when its turn comes."""
        if model.family.sees_images:
            raise InputError(f"{self.name}: expected a model of text, got {type(model.model).__name__}")
        for option, allowed in (("pooling", POOLINGS), ("states", STATES)):
            if (value := getattr(self, option)) not in allowed:
                raise InputError(f"{option}: expected one of {', '.join(allowed)}, got {value!r}")
        if self.store.dtype not in STORE_DTYPES:
            raise InputError(f"store_dtype: expected one of {', '.join(STORE_DTYPES)}, got {self.store.dtype!r}")
        if self.max_tokens < 1 or self.seed < 0:
            wrong = "max_tokens: expected at least 1" if self.max_tokens < 1 else "seed: expected at least 0"
            raise InputError(f"{wrong}, got {self.max_tokens if self.max_tokens < 1 else self.seed}")
        for layer in self.layers or ():
            if not 0 <= layer <= model.num_layers:
                raise InputError(f"layers: this model has layers 0 to {model.num_layers}, got {layer}")
        self._read_tokenizer()

    def config(self) -> dict[str, Any]:
        """Of all that decides the numbers; mteb's own version, too."""
        whole = super().config()
        options = {name: each for name, each in whole["init_args"].items() if name not in (*_ELSEWHERE, "tell")}
        return {**whole, "init_args": options | {"store_dtype": self.store.dtype, "mteb": mteb_version()}}

    def data_hash(self) -> str | None:
        return self.sources.data_hash(self.task)

    def tokenizer_hash(self) -> str | None:
        return tokenizer_hash(self._read_tokenizer().tokenizer)

    def run(self, model: LayeredModel) -> Iterator[Record]:
        model = at_least_float32(model)
        wanted = list(range(model.num_layers + 1)) if self.layers is None else sorted(set(self.layers))
        hashed = weights_hash(model.model)
        limit = min(self.max_tokens, model.max_tokens or self.max_tokens)
        folder = self.results / hashed / self.task.name / self._key(model, limit)
        known = {layer: found for layer in range(model.num_layers + 1) if (found := _read(_file(folder, layer)))}
        if missing := [layer for layer in wanted if layer not in known]:
            self._say("reading the data")
            prepared = Prepared(self.sources.open(self.task, seed=self.seed), self.task)
            embedding = Embedding(self._read_tokenizer(), limit, self.pooling, self.states)
            with self.store.opened(model, embedding, task=self.task.name, weights_hash=hashed) as embeddings:
                for place, layer in enumerate(missing):
                    if found := _read(_file(folder, layer)):  # another process had the embeddings meanwhile
                        known[layer] = found
                        continue
                    self._say(f"layer {layer} of {model.num_layers}" if place else "embedding, and its first layer")
                    result = _evaluated(prepared, LayerEncoder(embeddings, layer))
                    facts = {
                        "n": prepared.num_rows(),
                        "num_texts": embeddings.num_texts,
                        "num_cut": embeddings.num_cut,
                        "num_empty": embeddings.num_empty,
                    }
                    known[layer] = self._described(layer, model.num_layers) | facts | result
                    write_json(_file(folder, layer), known[layer])
        if all("undefined" in known[layer] for layer in wanted):
            raise InputError(known[wanted[0]]["undefined"])
        yield from self._records(known)

    def _records(self, known: dict[int, dict[str, Any]]) -> Iterator[Record]:
        num_undefined = sum(found["main_score"] is None for found in known.values())
        for layer, found in sorted(known.items()):
            counts = {name: found[name] for name in ("num_texts", "num_cut", "num_empty") if found[name]}
            if num_undefined:
                counts["num_undefined"] = num_undefined
            if found["main_score"] is not None:
                tags = {"task": self.task.name, "domain": self.task.domain, "score": self.task.score}
                tags |= {"pooling": self.pooling, "states": self.states}
                value = found["main_score"]
                yield Record(metric="main_score", value=value, layer=layer, n=found["n"], tags=tags | counts)

    def _described(self, layer: int, num_layers: int) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "domain": self.task.domain,
            "score": self.task.score,
            "subset": self.task.subset,
            "layer": layer,
            "num_layers": num_layers,
            "pooling": self.pooling,
            "states": self.states,
            **self.sources.describe(self.task),
        }

    def _key(self, model: LayeredModel, limit: int) -> str:
        """Over all that decides a layer's score beside the weights; which layers are asked for does not."""
        options = {name: each for name, each in self.config()["init_args"].items() if name not in ("layers", "name")}
        # the path of a tokenizer decides nothing, the tokenizer does
        options |= {"tokenizer": self.tokenizer_hash(), "max_tokens": limit, "dtype": str(model.dtype)}
        options |= {"data": self.data_hash(), "attention": model.attention}
        return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _read_tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer)
        return self._tokenizer

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.task.name}: {what}")


def _evaluated(prepared: Prepared, encoder: LayerEncoder) -> dict[str, Any]:
    """mteb's result; of a layer at which a text has no finite embedding one without a score, that says so."""
    try:
        return prepared.evaluate(encoder)
    except NotFiniteError as error:
        return {"main_score": None, "undefined": str(error)}


def mteb_version() -> str:
    """The installed version.

    Raises:
        InputError: there is none.
    """
    try:
        return version("mteb")
    except PackageNotFoundError as error:
        raise InputError(INSTALL) from error


def _file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:03d}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """A layer's result; None where there is none, or a damaged one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"root: cannot write {path.parent}: {(error.strerror or str(error)).lower()}") from error
    except ValueError:
        return None
    return found if isinstance(found, dict) and "main_score" in found else None
