"""Invariance of each layer to typing errors in a text, and entropy of prompts made less natural."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Jobs, Rows, Values
from lit_layers.analyses.probes.probe_fits import MAX_SENT, vector_bytes
from lit_layers.analyses.statistics import (
    all_undefined,
    comparable,
    layer_records,
    missing_tag,
    random_halves,
    summarize_layers,
)
from lit_layers.data.batches import Batches, EncodedTexts, encode_texts, tokenizer_of
from lit_layers.data.prompt_texts import Texts, Views, make_views
from lit_layers.errors import InputError
from lit_layers.functional.entropy import Alpha2, LidarSums, Normalization, Side, dime, infonce, lidar, spectrum
from lit_layers.functional.geometry import Pooling
from lit_layers.models.view import Batch, LayeredModel, States, Trajectory, special_tokens, states_of_layers
from lit_layers.records import Record
from lit_layers.tasks.text_features import (
    LayerFeatures,
    length_batches,
    pool_texts,
    store_features,
    text_features,
)

CHUNK = 64  # prompts per update of LiDAR's sums: 64 x 16 views x 4,096 x 8 B = 34 MB
NEAR_DELTA = 10.0  # if the scatter within prompts is less than this many times `delta`, then `delta` influences LiDAR

_LayerValues = tuple[int, dict[str, list[float]]]
WITHIN = "lidar_within_over_delta"


@dataclass(kw_only=True)
class Invariance(Analysis):
    """InfoNCE, LiDAR and DiME of changed copies of texts at every layer 0..L, and their means over layers 1..L.

    Each text gets `num_views` copies with typing errors, its views (`data.make_views`). The model runs once on each
    view, which gives one pooled vector. `infonce` (lower is more invariant) and `dime` compare the first two views.
    `lidar` and `lidar_rank` use all views. `infonce_chance` is the loss if all states are equal. With form "cross",
    `infonce_share` is 1 - loss / log N for N prompts. `lidar_within_over_delta` is the mean variance within prompts,
    divided by `delta`. The tag `num_layers_near_delta` counts the layers where this ratio is below 10; LiDAR says
    little about such a layer. `changed_fraction` is the share of words that a view changes. Records of means over
    layers have no `layer`.

    Each value is one number for the whole set of prompts, with an interval from `num_halves` random halves. The mean of
    a metric over these halves is `METRIC_of_half`. Values depend on the number of prompts, so compare them at equal
    `n`.

    A layer where a metric is undefined has no record of it. One example is layer 0 under pooling "cls", where all
    prompts have the same vector. Another is a layer at which fewer than half of the prompts have a vector. The mean
    over layers 1..L is then NaN, and its tag `num_undefined_layers` counts such layers. A prompt that lacks a vector at
    a measured layer is left out at all layers and counted in `num_undefined`. The model runs in float32 or wider.

    Preset "released_code" computes what the code of Skean et al. (arXiv 2502.02013) computed in 2024-09.

    Args:
        texts: source of the texts.
        tokenizer: a local path, a name on the Hub, or bpe:SIZE.
        corpus: the text on which the tokenizer bpe:SIZE is trained.
        num_views: views per text.
        max_tokens: longer views are cut at their end. The model's own limit applies if it is lower.
        unit, temperature, form: options of `infonce`; `unit` is also an option of `dime`.
        delta: option of `lidar`.
        alpha, alpha2: options of the entropies in `lidar` and `dime`.
        permutations, side: options of `dime`.
        seed: seed of views and permutations.
    """

    SEES = "text"
    LEAST: ClassVar = {"alpha": 1e-6, "temperature": 1e-6, "num_views": 2}
    PRESETS: ClassVar = {
        "released_code": {
            "states": "hf",
            "pooling": "centered_unit_mean",
            "unit": False,
            "form": "ntxent",
            "side": "smaller",
            "alpha2": "frobenius",
        }
    }

    texts: Texts
    tokenizer: str
    corpus: str | None = None
    name: str = "invariance"
    num_views: int = 16
    max_tokens: int = 512
    states: States = "resid"
    pooling: Pooling = "mean"
    unit: bool = True
    form: Literal["ntxent", "cross"] = "ntxent"
    temperature: float = 0.1
    delta: float = 1e-4
    alpha: float = 1.0
    alpha2: Alpha2 = "spectrum"
    side: Side = "rows"
    permutations: int = 10
    seed: int = 0
    num_halves: int = 20
    preset: Literal["released_code"] | None = None
    _encoded: dict[int, EncodedTexts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check(self, model: LayeredModel) -> None:
        self.check_options(model)
        self._encoded_for(model)

    def data_hash(self) -> str | None:
        """Return a hash of the texts and of the token ids of their views (copies with typing errors)."""
        ids = self._encode(self.max_tokens).content_hash()
        return hashlib.sha256(f"{self.texts.content_hash()}/{ids}".encode()).hexdigest()[:16]

    def tokenizer_hash(self) -> str | None:
        return self._encode(self.max_tokens).tokenizer_hash

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        """Return the batches of views (copies of texts with typing errors) on which the model runs.

        The dict is empty if their vectors are too large to send between ranks. `jobs` then runs the model itself.
        """
        is_large = vector_bytes(model, len(self.texts.texts()) * self.num_views) > MAX_SENT
        return {} if is_large else {"views": Rows(length_batches(self._encoded_for(model)))}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return pool_texts(seen, batch, self.pooling, self.states)

    def jobs(self, model: LayeredModel, views: Values | None = None) -> Jobs:
        encoded = self._encoded_for(model)
        if views is None:
            features = text_features(model, encoded, pooling=self.pooling, states=self.states, undefined="nan")
        else:
            features = store_features(views)
        layers, chosen = self._comparable(features)
        halves = random_halves(len(chosen), self.num_halves)
        device = torch.device("cpu") if model.device.type == "mps" else model.device  # not MPS, as it has no float64

        def layer_values(layer: int) -> _LayerValues:
            vectors = features.layer(layer).unflatten(0, (self.num_views, -1))[:, chosen]
            vectors = vectors.to(device)
            found = [self._values(vectors[:, rows]) for rows in (slice(None), *halves)]
            return layer, {key: [values[key] for values in found] for key in found[0]}

        def records(by_layer: list[_LayerValues]) -> Iterator[Record]:
            return self._records(dict(by_layer), len(layers), len(chosen), encoded.num_cut)

        return Jobs([partial(layer_values, layer) for layer in layers.nonzero()[:, 0].tolist()], records)

    @cached_property
    def views(self) -> Views:
        """The views of all texts: copies with typing errors."""
        return make_views(self.texts.texts(), self.num_views, seed=self.seed)

    def _encoded_for(self, model: LayeredModel) -> EncodedTexts:
        """Return the token ids of all views: first those of view 1 of all texts, then those of view 2, and so on.

        Each is cut at `max_tokens`, or at the model's limit if that is lower.
        """
        return self._encode(min(self.max_tokens, model.max_tokens or self.max_tokens))

    def _encode(self, limit: int) -> EncodedTexts:
        if limit not in self._encoded:
            texts = [text for view in self.views.texts for text in view]
            self._encoded[limit] = encode_texts(tokenizer_of(self.tokenizer, self.corpus), texts, max_tokens=limit)
        return self._encoded[limit]

    def _comparable(self, features: LayerFeatures) -> tuple[Tensor, Tensor]:
        """Return a mask of the layers to measure, (layers + 1,), and the indices of the prompts to use.

        A prompt is used if all its views have a finite vector at every measured layer.
        """
        layers, prompts = comparable(features.defined().unflatten(1, (self.num_views, -1)).all(1))
        if not layers.any():
            raise all_undefined(self.name)
        if int(prompts.sum()) < 2:
            raise InputError(f"{self.name}: expected 2 texts or more with a vector at each layer, got {prompts.sum()}")
        return layers, prompts.nonzero().squeeze(-1)

    def _records(
        self, by_layer: dict[int, dict[str, list[float]]], num_layers: int, n: int, num_cut: int
    ) -> Iterator[Record]:
        """Yield all records.

        `by_layer` maps the index of each measured layer to a list per metric. The first entry is the value over all
        prompts, and the others are the values over random halves of the prompts.
        """
        views = self.views
        num_texts = len(views.texts[0])
        missing = missing_tag("", num_texts - n)
        counts = {"num_equal": views.num_equal, "num_unchanged": views.num_unchanged, "num_cut": num_cut}
        tags: dict[str, Any] = {name: count for name, count in counts.items() if count} | missing
        yield Record(metric="changed_fraction", value=views.changed_fraction, n=num_texts, tags=tags)
        has_halves = n >= 4 and self.num_halves > 0
        for metric, size in (("infonce_chance", n), ("infonce_chance_of_half", n // 2))[: 1 + has_halves]:
            chance = math.log(size if self.form == "cross" else 2 * size - 1)
            yield Record(metric=metric, value=chance, n=size, tags=self._tags(metric) | missing)

        values: dict[str, Tensor] = {}  # (layers + 1, 1 + halves): column 0 is of all prompts
        for key, columns in next(iter(by_layer.values())).items():
            values[key] = torch.full((num_layers, len(columns)), math.nan, dtype=torch.float64)
            for layer, layer_values in by_layer.items():
                values[key][layer] = torch.tensor(layer_values[key], dtype=torch.float64)
        within = values.pop(WITHIN)[:, 0]
        for layer in by_layer:
            tags = self._tags(WITHIN) | missing
            yield Record(metric=WITHIN, value=within[layer].item(), layer=layer, n=n, tags=tags)
        for metric, columns in values.items():
            counted = {"num_layers_near_delta": (within < NEAR_DELTA).tolist()} if metric.startswith("lidar") else {}
            halves = columns[:, 1:] if has_halves else None
            tags = self._tags(metric) | missing
            yield from layer_records(metric, columns[:, 0], halves, n, tags, counted)

    def _values(self, vectors: Tensor) -> dict[str, float]:
        """Return the values of one layer's vectors (views, prompts, dim), by metric; NaN if undefined."""
        pair: dict[str, Any] = {"view_a": vectors[0], "view_b": vectors[1], "unit": self.unit, "undefined": "nan"}
        loss = infonce(**pair, temperature=self.temperature, form=self.form).item()
        values = {"infonce": loss}
        if self.form == "cross":
            values["infonce_share"] = 1 - loss / math.log(vectors.shape[1])
        sums = LidarSums()
        for rows in range(0, vectors.shape[1], CHUNK):
            sums.update(vectors[:, rows : rows + CHUNK].transpose(0, 1))
        entropy: dict[str, Any] = {"alpha": self.alpha, "alpha2": self.alpha2}
        values["lidar"] = lidar(sums, delta=self.delta, undefined="nan", **entropy).item()
        entropy |= {"permutations": self.permutations, "seed": self.seed, "side": self.side}
        values["dime"] = dime(**pair, **entropy).item()
        values["lidar_rank"] = lidar(sums, delta=self.delta, output="rank", undefined="nan").item()
        values[WITHIN] = sums.scatter_over_delta(self.delta)
        return values

    def _tags(self, metric: str) -> dict[str, Any]:
        """Return tags for the options that differ from their defaults and affect the metric."""
        kind, is_chance = metric.split("_")[0], "chance" in metric
        options = {"infonce": ["temperature"], "lidar": ["delta", "num_views"], "dime": ["permutations"]}.get(kind, [])
        options += ["alpha"] if metric in ("lidar", "dime") else []
        if not self.preset:
            options += [] if is_chance else ["states", "pooling"]
            of_kind = {"infonce": ["unit", "form"], "lidar": ["alpha2"], "dime": ["unit", "side", "alpha2"]}
            options += of_kind.get(kind, [])
        tags: dict[str, Any] = {}
        for option, value in self.tags_of("preset", *options).items():
            # Remove `num_` from the name, because a tag that begins with it would be read as a count.
            tags[option.removeprefix("num_")] = value
        return tags


Study = Literal["repetition", "randomness", "length"]
STUDIES: tuple[Study, ...] = get_args(Study)
NORMALIZATIONS: tuple[Normalization, ...] = ("raw", "maxEntropy")


@dataclass(kw_only=True)
class PromptStudies(Analysis):
    """`prompt_entropy` of changed prompts at every layer, and its mean over layers 1..L.

    The tag `study` says how prompts are changed. The record of the mean over layers has no `layer`.

    - "repetition": each token is replaced, with probability `p`, by one token drawn once from the prompt.
    - "randomness": each token is replaced, with probability `p`, by a random token of the vocabulary, excluding special
      tokens.
    - "length": only the first tokens of the prompt are kept, as many as the tag `length` says. Shorter prompts are left
      out.

    At p = 0 nothing changes, which is the control. The tokens changed at one `p` are also changed at every higher `p`.

    Values and the tags `normalization` and `drop_first` are as in `Representation`. The changes to prompt i depend only
    on the seed, the study and i. The model runs in float32 or wider.

    Source: Skean et al., arXiv 2502.02013, section 5 and appendix F.

    Args:
        batches: texts as token ids.
        p: probabilities with which a token is replaced.
        lengths: numbers of first tokens to keep. None means 8, 16, 32, ... up to the longest prompt.
        studies: which of the three studies to run.
        special_tokens: further tokens to exclude, in addition to those named in the model's config.
    """

    SEES = "text"
    batches: Batches
    name: str = "prompt_studies"
    studies: tuple[Study, ...] = STUDIES
    p: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    lengths: tuple[int, ...] | None = None
    special_tokens: tuple[int, ...] = ()
    drop_first: tuple[int, ...] = (0, 1)
    states: States = "resid"
    seed: int = 0

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        """Return the changed prompts, keyed by study and level (a probability or a length) with a space between."""
        changed: dict[tuple[Study, float], list[Batch]] = {}
        first = 0
        for batch in self.batches:
            for study in self.studies:
                for level, prompts in self._changed(model, study, first, batch):
                    changed.setdefault((study, level), []).append(prompts)
            first += len(batch["input_ids"])
        return {f"{study} {level}": Rows(prompts) for (study, level), prompts in changed.items()}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return entropies (layers + 1, prompts) by normalization and number of dropped first tokens."""
        entropies: dict[tuple[Normalization, int], list[Tensor]] = {}
        for states in states_of_layers(seen, self.states):
            for dropped in self.drop_first:
                sets = spectrum(states, seen.mask, drop_first=dropped)
                for normalization in NORMALIZATIONS:
                    values = sets.entropy(normalization=normalization, undefined="nan").cpu()
                    values = values.masked_fill((seen.mask.sum(-1) - dropped < 2).cpu(), torch.nan)
                    entropies.setdefault((normalization, dropped), []).append(values)
        return {kind: torch.stack(values) for kind, values in entropies.items()}

    def compute(self, model: LayeredModel, **changed: Values) -> Iterator[Record]:
        missing = [length for length in self.lengths or () if f"length {length}" not in changed]
        if missing and "length" in self.studies:
            raise InputError(f"{self.name}: no prompt has {min(missing)} tokens, which lengths asks for")
        for name, entropies in changed.items():
            study, level = name.split()
            of_study: dict[str, Any] = {"length": int(level)} if study == "length" else {"p": float(level)}
            for (normalization, dropped), values in entropies.items():
                tags = {"study": study, **of_study, "normalization": normalization, "drop_first": dropped}
                # All values are NaN if no prompt has the two tokens after `drop_first` that the entropy needs.
                if not values.isnan().all():
                    yield from summarize_layers("prompt_entropy", values, tags=tags | self.tags_of("states"))

    def _changed(self, model: LayeredModel, study: Study, first: int, batch: Batch) -> Iterator[tuple[float, Batch]]:
        """Yield each level of a study with the changed batch.

        The level is the probability that a token is replaced, or the length to which texts are cut. `first` is the
        index of the first prompt of the batch.
        """
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        if study == "length":
            counts = mask.sum(-1)
            for length in self.lengths or [2**octave for octave in range(3, int(counts.max()).bit_length())]:
                rows = (counts >= length).nonzero().squeeze(-1).tolist()
                if rows:
                    cut = torch.stack([ids[row][mask[row]][:length] for row in rows])
                    yield length, {"input_ids": cut, "attention_mask": torch.ones_like(cut)}
            return
        drawn, others = torch.full(ids.shape, np.inf, dtype=torch.float64), ids.clone()
        size = model.vocab_size or model.model.config.vocab_size
        allowed = np.array(sorted({*range(size)} - special_tokens(model) - {*self.special_tokens}))
        for row in range(len(ids)):
            draw, real = np.random.default_rng([self.seed, STUDIES.index(study), first + row]), ids[row][mask[row]]
            drawn[row, mask[row]] = torch.from_numpy(draw.random(len(real)))
            if study == "repetition":
                others[row, mask[row]] = real[int(draw.integers(len(real)))]
            else:
                others[row, mask[row]] = torch.from_numpy(draw.choice(allowed, len(real)))
        for p in self.p:
            yield p, {"input_ids": torch.where(drawn < p, others, ids), "attention_mask": mask.long()}
