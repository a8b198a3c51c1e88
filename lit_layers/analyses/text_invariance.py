"""How well each layer tells prompts apart, and how little it minds their wording."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, States, at_least_float32
from lit_layers.analyses.features import LayerFeatures, text_features
from lit_layers.analyses.statistics import (
    check_num_halves,
    complete,
    left_out,
    nothing_defined,
    random_halves,
    records_of_layers,
)
from lit_layers.data.batches import EncodedTexts, encode_texts, tokenizer_of
from lit_layers.data.prompt_texts import Texts
from lit_layers.data.typo_views import Action, Views, make_views
from lit_layers.errors import InputError
from lit_layers.functional.entropy import AtTwo, Normalization, Side
from lit_layers.functional.geometry import Pooling
from lit_layers.functional.invariance import LidarSums, dime, infonce
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

PRESETS: dict[str, dict[str, Any]] = {
    "released_code": {
        "states": "hf",
        "pooling": "centered_unit_mean",
        "unit": False,
        "form": "ntxent",
        "side": "smaller",
        "alpha2": "frobenius",
    },
    "released_code_later": {
        "states": "hf",
        "pooling": "mean",
        "rescale": "centered_unit",
        "unit": False,
        "form": "cross",
        "side": "smaller",
        "alpha2": "frobenius",
    },
}
AT_ONCE = 64  # prompts: 64 x 16 views x 4,096 x 8 B = 34 MB
LITTLE = 10.0  # scatter within prompts over delta, below which delta decides along with the states


@dataclass(kw_only=True)
class Invariance(Analysis):
    """InfoNCE, LiDAR and DiME of views of texts at every layer 0..L, and their means over layers 1..L (no layer).

    `num_views` misprinted copies of each text are made (`data.make_views`), each is passed once, and one pooled
    vector is kept of each. `infonce` (lower is more invariant) and `dime` compare the first two views, `lidar` and
    `lidar_rank` take all. `infonce_chance` is what equal states give; for form "cross" `infonce_share` is 1 - loss /
    log N. `lidar_within_over_delta` is the mean variance within prompts over `delta`: the tag `num_layers_near_delta`
    counts the layers where it is below 10 and LiDAR says little. `changed_fraction` is the share of words that a view
    changes.

    Each is one number for the whole set, with an interval from `num_halves` random halves of the prompts; `..._of_half`
    is their mean. It depends on the number of prompts: compare at equal `n`.

    A layer where a metric is undefined (layer 0 under pooling "cls", where all prompts have one vector; one at which
    fewer than half of the prompts have a vector) has no record of it; the mean over layers 1..L is then NaN and counts
    such layers in the tag `num_undefined_layers`. Prompts without a vector at one of the other layers are left out of
    all, and counted in `num_undefined`. The model runs in float32 or wider.

    Presets are the code of Skean et al. (arXiv 2502.02013), "released_code" of 2024-09, "released_code_later" of 2025.
    The later code centres and scales vectors within each mini-batch; here the batch is all prompts.

    Args:
        texts: where the texts come from.
        tokenizer: a local path, a name of the Hub, or bpe:SIZE.
        corpus: which the tokenizer bpe:SIZE is trained on.
        num_views: of each text.
        share, max_words, actions: of `make_views`.
        max_tokens: a longer view loses its end; also at the model's own limit.
        rescale: "centered_unit" subtracts each view's mean over prompts and scales vectors to norm 1, before all else.
        unit, temperature, form: of `infonce`; `unit` also of `dime`.
        delta: of `lidar`.
        alpha, alpha2, normalizations: of the entropies of `lidar` and `dime`.
        permutations, side: of `dime`.
        seed: of views and permutations.
        cache: a folder in which features are kept and found again; None: nowhere.
    """

    LEAST: ClassVar = {"num_views": 1, "max_tokens": 1, "permutations": 1}
    POSITIVE = ("temperature", "alpha", "delta")

    texts: Texts
    tokenizer: str
    corpus: str | None = None
    name: str = "invariance"
    num_views: int = 16
    share: float = 0.3
    max_words: int = 10
    actions: tuple[Action, ...] = ("substitute",)
    max_tokens: int = 512
    states: States = "resid"
    pooling: Pooling = "mean"
    rescale: Literal["none", "centered_unit"] = "none"
    unit: bool = True
    form: Literal["ntxent", "cross"] = "ntxent"
    temperature: float = 0.1
    delta: float = 1e-4
    alpha: float = 1.0
    alpha2: AtTwo = "spectrum"
    side: Side = "rows"
    normalizations: tuple[Normalization, ...] = ("raw",)
    permutations: int = 10
    seed: int = 0
    num_halves: int = 20
    preset: Literal["released_code", "released_code_later"] | None = None
    cache: str | None = None
    _views: Views | None = field(default=None, init=False, repr=False, compare=False)
    _encoded: dict[int, EncodedTexts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check(self, model: LayeredModel) -> None:
        self.check_options(model)
        self._of(model)

    def config(self) -> dict[str, Any]:
        """Without `cache`: where features are kept decides no number."""
        whole = super().config()
        return {**whole, "init_args": {name: each for name, each in whole["init_args"].items() if name != "cache"}}

    def data_hash(self) -> str | None:
        """Over the texts and the token ids of their views."""
        ids = self._encode(self.max_tokens).content_hash()
        return hashlib.sha256(f"{self.texts.content_hash()}/{ids}".encode()).hexdigest()[:16]

    def tokenizer_hash(self) -> str | None:
        return self._encode(self.max_tokens).tokenizer_hash

    def run(self, model: LayeredModel) -> Iterator[Record]:
        self.check_options(model)
        encoded = self._of(model)
        chosen = replace(self, **PRESETS[self.preset]) if self.preset else self
        model = at_least_float32(model)
        features = text_features(
            model, encoded, pooling=chosen.pooling, states=chosen.states, cache=self.cache, undefined="nan"
        )
        layers, kept = self._kept(features)
        yield from self._of_views(encoded, len(kept))
        yield from _LayerValues(chosen, len(self.make().texts[0]), features, layers, kept, model.device).records()

    def make(self) -> Views:
        """The views; made on the first call."""
        if self._views is None:
            self._views = make_views(
                self.texts.texts(),
                self.num_views,
                seed=self.seed,
                share=self.share,
                max_words=self.max_words,
                actions=self.actions,
            )
        return self._views

    def _of(self, model: LayeredModel) -> EncodedTexts:
        """Token ids, view after view, at the model's own limit where that is lower."""
        if model.family.sees_images:
            raise InputError(f"{self.name}: expected a model of text, got {type(model.model).__name__}")
        return self._encode(min(self.max_tokens, model.max_tokens or self.max_tokens))

    def _encode(self, limit: int) -> EncodedTexts:
        if limit not in self._encoded:
            texts = [text for view in self.make().texts for text in view]
            self._encoded[limit] = encode_texts(tokenizer_of(self.tokenizer, self.corpus), texts, max_tokens=limit)
        return self._encoded[limit]

    def _kept(self, features: LayerFeatures) -> tuple[list[bool], Tensor]:
        """Which layers are no gap, and the prompts (kept,) all of whose views have a vector at each of these."""
        layers, prompts = complete(features.defined().unflatten(1, (self.num_views, -1)).all(1))
        if not layers.any():
            raise nothing_defined(self.name)
        if int(prompts.sum()) < 2:
            raise InputError(
                f"{self.name}: expected at least 2 texts with a vector at every layer, got {prompts.sum()}"
            )
        return layers.tolist(), prompts.nonzero().squeeze(-1)

    def _of_views(self, encoded: EncodedTexts, n: int) -> Iterator[Record]:
        views = self.make()
        counts = {
            "num_equal": views.num_equal,
            "num_unchanged": views.num_unchanged,
            "num_cut": encoded.num_cut,
            "num_undefined": len(views.texts[0]) - n,
        }
        tags: dict[str, Any] = {name: count for name, count in counts.items() if count}
        yield Record(metric="changed_fraction", value=views.changed_fraction, n=len(views.texts[0]), tags=tags)

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if not self.normalizations:
            raise InputError(f"{self.name}: expected at least one of normalizations, got none")
        check_num_halves(self.name, self.num_halves)


Key = tuple[str, Normalization]  # a metric and how it is normalized


class _LayerValues:
    """The values of every layer, of all prompts and of halves of them."""

    def __init__(
        self,
        options: Invariance,
        num_texts: int,
        features: LayerFeatures,
        layers: list[bool],
        kept: Tensor,
        device: torch.device,
    ) -> None:
        self.options, self.features, self.kept = options, features, kept
        self.num_undefined = num_texts - len(kept)
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.layers = layers
        self.rows = random_halves(len(kept), options.num_halves)

    def records(self) -> Iterator[Record]:
        whole: list[dict[Key, float]] = []
        of_halves: list[list[dict[Key, float]]] = []
        for layer, defined in enumerate(self.layers):
            vectors = self._vectors(layer) if defined else None
            whole.append(self._values(vectors))
            of_halves.append([self._values(None if vectors is None else vectors[:, rows]) for rows in self.rows])
        keys = dict.fromkeys(key for of_layer in whole for key in of_layer)
        yield from self._chance()
        near = [of_layer.get(_WITHIN, math.inf) < LITTLE for of_layer in whole]
        for layer, of_layer in enumerate(whole):
            if not of_layer:
                continue
            tags = self._tags(_WITHIN)
            yield Record(metric=_WITHIN[0], value=of_layer[_WITHIN], layer=layer, n=len(self.kept), tags=tags)
        for key in keys:
            if key == _WITHIN:
                continue
            values = torch.tensor(
                [of_layer.get(key, math.nan) for of_layer in whole], dtype=torch.float64
            )  # (layers + 1,)
            spread = torch.tensor(
                [[half.get(key, math.nan) for half in each] for each in of_halves], dtype=values.dtype
            )
            counted = {"num_layers_near_delta": near} if key[0].startswith("lidar") else {}
            of_halves_too = spread if self.rows else None
            yield from records_of_layers(key[0], values, of_halves_too, len(self.kept), self._tags(key), counted)

    def _vectors(self, layer: int) -> Tensor:
        """(views, prompts, dim)"""
        vectors = self.features.layer(layer).unflatten(0, (self.options.num_views, -1))[:, self.kept].to(self.device)
        if self.options.rescale == "none":
            return vectors
        vectors = vectors.double() - vectors.double().mean(1, keepdim=True)
        return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(torch.float64).tiny)

    def _values(self, vectors: Tensor | None) -> dict[Key, float]:
        """Of (views, prompts, dim), none of a layer that is a gap; NaN where undefined."""
        if vectors is None:
            return {}
        options = self.options
        first, second = vectors[0], vectors[1]
        loss = infonce(
            first, second, temperature=options.temperature, unit=options.unit, form=options.form, undefined="nan"
        ).item()
        values: dict[Key, float] = {("infonce", "raw"): loss}
        if options.form == "cross":
            values["infonce_share", "raw"] = 1 - loss / math.log(len(first))
        sums = LidarSums()
        for rows in range(0, vectors.shape[1], AT_ONCE):
            sums.update(vectors[:, rows : rows + AT_ONCE].transpose(0, 1))
        entropy: dict[str, Any] = {"alpha": options.alpha, "alpha2": options.alpha2, "undefined": "nan"}
        for normalization in options.normalizations:
            entropy["normalization"] = normalization
            values["lidar", normalization] = sums.value(delta=options.delta, **entropy).item()
            values["dime", normalization] = dime(
                first,
                second,
                unit=options.unit,
                permutations=options.permutations,
                seed=options.seed,
                side=options.side,
                **entropy,
            ).item()
        values["lidar_rank", "raw"] = sums.value(delta=options.delta, output="rank", undefined="nan").item()
        values[_WITHIN] = sums.within_over_delta(options.delta)
        return values

    def _chance(self) -> Iterable[Record]:
        counts = {"infonce_chance": len(self.kept)}
        if self.rows:
            counts["infonce_chance_of_half"] = len(self.kept) // 2
        for metric, n in counts.items():
            value = math.log(n if self.options.form == "cross" else 2 * n - 1)
            yield Record(metric=metric, value=value, n=n, tags=self._tags((metric, "raw")))

    def _tags(self, key: Key) -> dict[str, Any]:
        """What a result of other than the default options must say of itself."""
        metric, normalization = key
        options = self.options
        tags: dict[str, Any] = {} if normalization == "raw" else {"normalization": normalization}
        of_metric = {"infonce": ("temperature",), "lidar": ("delta", "num_views"), "dime": ("permutations",)}
        names = of_metric.get(metric.split("_")[0], ())
        names += ("share", "max_words", "actions") if "chance" not in metric else ()
        names += ("alpha",) if metric in ("lidar", "dime") else ()
        if options.preset:
            tags["preset"] = options.preset
        else:
            names += ("states", "pooling", "rescale") if "chance" not in metric else ()
            names += {"infonce": ("unit", "form"), "lidar": ("alpha2",), "dime": ("unit", "side", "alpha2")}.get(
                metric.split("_")[0], ()
            )
        for name in names:
            value = getattr(options, name)
            if value != Invariance.__dataclass_fields__[name].default:
                value = " ".join(value) if isinstance(value, tuple | list) else value
                # what begins with num_ is a count, not a variant
                tags["views" if name == "num_views" else name] = int(value) if isinstance(value, bool) else value
        return tags | left_out("", self.num_undefined)


_WITHIN: Key = ("lidar_within_over_delta", "raw")
