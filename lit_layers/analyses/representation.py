"""Metrics of the geometry of the states at each layer, and similarity between layers."""

import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Key, Values, stack_layers
from lit_layers.analyses.statistics import (
    comparable,
    half_values,
    layer_records,
    mean_of_defined,
    missing_tag,
    nan_record,
    random_halves,
    summarize,
    summarize_layers,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError, kind_and_words
from lit_layers.functional import state_geometry as geometry
from lit_layers.functional._checks import widened
from lit_layers.functional.entropy import (
    Alpha2,
    Normalization,
    Side,
    dataset_entropy,
    matrix_entropy,
    normalized,
    participation_ratio,
    spectrum,
)
from lit_layers.functional.geometry import (
    Pooling,
    cosine_similarity_matrix,
    curvature_and_missing,
    layer_stages,
    linear_cka_matrix,
    pool,
    token_angle,
)
from lit_layers.models.contributions import StatesOrPart, states_or_parts
from lit_layers.models.view import (
    Batch,
    LayeredModel,
    States,
    Trajectory,
    drop_first_tokens,
    evenly_spread,
    states_of_layers,
)
from lit_layers.records import Record

# The options in which the code of Skean et al., arXiv 2502.02013, differs from our defaults.
_RELEASED = {"center": True, "unit": True, "clamp": True, "states": "hf", "side": "smaller", "alpha2": "frobenius"}


def pooled_vectors(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector per prompt, (dim, prompts), NaN if undefined."""
    return pool(hidden, mask, pooling=pooling, undefined="nan").T


def prompt_vectors(values: Tensor) -> Tensor:
    """Return the pooled vectors (layers + 1, prompts, dim) from the values of `update`."""
    return values.movedim(-1, 1).contiguous()


POOLED: Key = ("pooled", None, None)
MISSING_ANGLES: Key = ("num_missing_angles", None, None)


@dataclass(kw_only=True)
class Representation(Analysis):
    """Entropies, ranks and curvature of the states at every layer, and their means over layers 1..L.

    Records of means over layers have no `layer`. `prompt_entropy` (tag `normalization`), `effective_rank`,
    `participation_ratio` and, optionally, `rankme` are computed on each prompt's tokens, then averaged over prompts.
    Each is measured with all tokens and without the first (tag `drop_first`), because a single sink token of huge norm
    brings the entropy to about 0. `token_curvature` is a mean over defined angles; the tag `num_missing_angles` counts
    undefined ones. A prompt enters the mean over layers if it has a value at each of them. The entropy of one token is
    undefined: prompts of one token are left out of `prompt_entropy` in every normalization, and counted in
    `num_undefined`.

    `dataset_entropy` is computed on one pooled vector per prompt. `dataset_entropy_of_half` is its mean over
    `num_halves` random halves of the prompts. The spread over halves gives the intervals of both (delete-half
    jackknife), as resampling with replacement would repeat rows and lower the value.

    Options that differ from their defaults are tags. The model runs in float32 or wider.

    Preset "released_code" computes the two entropies as the code of Skean et al. (arXiv 2502.02013, release of
    2024-09): states "hf", centred unit tokens, negative Gram entries clamped. It measures `token_angle` instead of the
    curvature, and no ranks.

    Args:
        batches: the data to measure on.
        alpha, alpha2, clamp, side: options of the entropies, as in `matrix_entropy`.
        center, unit: whether to centre tokens, and scale them to unit norm, before entropies and ranks.
        pooling: how a prompt's tokens become the vector of `dataset_entropy`.
        normalizations: normalizations of the entropies.
        drop_first: numbers of first tokens to leave out of entropies and ranks; each gives its own records.
        rankme: whether to measure `rankme`.
        states: as in `StateMetric`.
    """

    LEAST: ClassVar = {"alpha": 1e-6}
    PRESETS: ClassVar = {"released_code": {**_RELEASED, "pooling": "centered_unit_mean"}}

    batches: Batches
    name: str = "representation"
    alpha: float = 1.0
    alpha2: Alpha2 = "spectrum"
    center: bool = False
    unit: bool = False
    clamp: bool = False
    side: Side = "rows"
    pooling: Pooling = "mean"
    normalizations: tuple[Normalization, ...] = ("raw", "maxEntropy")
    drop_first: tuple[int, ...] = (0, 1)
    rankme: bool = False
    num_halves: int = 20
    states: StatesOrPart = "resid"
    preset: Literal["released_code"] | None = None

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return stack_layers([self._layer_values(hidden, seen.mask) for hidden in states_or_parts(seen, self.states)])

    def _layer_values(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        """Return the values (batch,) of one layer, keyed by metric, normalization and drop_first.

        The key `POOLED` holds the pooled vectors (dim, batch).
        """
        values: dict[Key, Tensor] = {}
        # With these options, entropies need the entries of the Gram matrix; singular values are not enough.
        needs_entries = self.clamp or (self.alpha == 2 and self.alpha2 == "frobenius")
        for dropped in self.drop_first if needs_entries else ():
            values |= self._entropies(hidden, mask, dropped)
        if self.preset:
            values["token_angle", None, None] = token_angle(hidden, mask, undefined="nan")
        else:
            values |= self._ranks(hidden, mask, () if needs_entries else self.normalizations)
            angles = curvature_and_missing(hidden, mask, undefined="skip")
            values["token_curvature", None, None], values[MISSING_ANGLES] = angles
        return {**values, POOLED: pooled_vectors(hidden, mask, self.pooling)}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        pooled, missing = prompt_vectors(batches.pop(POOLED)), batches.pop(MISSING_ANGLES, None)
        for (metric, normalization, dropped), rows in batches.items():
            tags = {"normalization": normalization, "drop_first": dropped}
            tags = {name: tag for name, tag in tags.items() if tag is not None} | self.tags(str(metric))
            counts = {"num_missing_angles": missing} if metric == "token_curvature" and missing is not None else {}
            yield from summarize_layers(str(metric), rows, tags=tags, counts=counts)
        yield from self.dataset_records(pooled)

    def _entropies(self, states: Tensor, mask: Tensor, dropped: int) -> dict[Key, Tensor]:
        how: Any = {"center": self.center, "unit": self.unit, "drop_first": dropped, **self._matrix_options()}
        values = matrix_entropy(states, mask, **how)
        num_rows = (mask.sum(-1) - dropped).clamp(min=0).to(values.device)
        values = values.masked_fill(num_rows < 2, math.nan)
        how = {"num_rows": num_rows, "dim": states.shape[-1], "undefined": "nan"}
        return {
            ("prompt_entropy", each, dropped): normalized("prompt_entropy", values, {}, normalization=each, **how)
            for each in self.normalizations
        }

    def _ranks(self, states: Tensor, mask: Tensor, normalizations: tuple[Normalization, ...]) -> dict[Key, Tensor]:
        values: dict[Key, Tensor] = {}
        for dropped in self.drop_first:
            # one decomposition serves all metrics below
            sets = spectrum(states, mask, center=self.center, unit=self.unit, drop_first=dropped)
            single = mask.sum(-1) - dropped < 2
            for each in normalizations:
                entropies = sets.entropy(alpha=self.alpha, normalization=each, undefined="nan")
                values["prompt_entropy", each, dropped] = entropies.masked_fill(single.to(entropies.device), math.nan)
            for metric in ("effective_rank", "participation_ratio", "rankme")[: 3 if self.rankme else 2]:
                values[metric, None, dropped] = getattr(sets, metric)(undefined="nan")
        return values

    def _matrix_options(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("alpha", "alpha2", "clamp", "side")}
        return options | {"undefined": "nan"}

    def dataset_records(self, pooled: Tensor) -> Iterator[Record]:
        """Yield the records of pooled vectors (layers + 1, prompts, dim)."""
        _, used = comparable(~pooled.isnan().any(-1))
        pooled, dim = pooled[:, used], pooled.shape[-1]
        n = pooled.shape[1]
        if not n:
            return
        entropies = functools.partial(dataset_entropy, **self._matrix_options())
        tags, whole = self.tags("dataset_entropy") | missing_tag("", ~used), entropies(pooled)
        halves = half_values(entropies, pooled, self.num_halves)
        for normalization in self.normalizations:
            if n == 1 and normalization != "raw":
                continue  # the entropy of a single prompt cannot be normalized
            how: Any = {"dim": dim, "normalization": normalization, "undefined": "nan"}
            share, spread = normalized("dataset_entropy", whole, {}, torch.tensor(n), **how), halves
            if halves is not None:
                spread = normalized("dataset_entropy", halves, {}, torch.tensor(n // 2), **how)
            all_tags = {"normalization": normalization} | tags
            yield from layer_records("dataset_entropy", share, spread, n, all_tags)

    def tags(self, metric: str) -> dict[str, Any]:
        """Return tags for the options that differ from their defaults and affect the metric."""
        options = ["alpha", "alpha2", "clamp", "side"] if "entropy" in metric else []
        if self.preset:
            return self.tags_of(*options[:1], "preset")
        if metric == "dataset_entropy":
            options += ["pooling"]
        elif metric != "token_curvature":
            options += ["center", "unit"]
        return self.tags_of(*options, "states")


@dataclass(kw_only=True)
class StateMetric(Analysis):
    """The value of a function of the hidden states, at every layer.

    The function takes the states of one layer in float64, `(points, dim) -> ()`, and returns NaN if undefined. The
    metric has the function's name, and a row of that name in `lit_layers.metrics` gives it a title. One more record,
    without a layer, is the mean over layers 1..L.

    The points are the real tokens of a prompt without the first `drop_first`. Values are averaged over prompts, with
    bootstrap intervals over prompts.

    Args:
        metric: the function, from `lit_layers.functional` or your own code (`--code`). A recipe gives its import path,
            `package.module.function`.
        batches: the data to measure on.
        name: name of the analysis; by default that of the function.
        options: keyword arguments of the function; they become tags. A function with the argument `undefined`, such as
            those of `lit_layers.functional`, is called with `undefined="nan"`.
        drop_first: number of first tokens of each prompt to leave out.
        states: "resid" takes the output of each block. "hf" also applies the final norm to the last layer, "normed" to
            every layer. "attention" and "mlp" take what attention or MLP of each block adds to the state. Layer 0 then
            has no value. A model is refused if its blocks do not add them (see `contributions`).
    """

    metric: Callable[..., Any]  # not `Callable[..., Tensor]`, which would limit recipes to annotated functions
    batches: Batches
    name: str = ""
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    drop_first: int = 0
    states: StatesOrPart = "resid"

    def __post_init__(self) -> None:
        self.name = self.name or self.metric_name

    @property
    def metric_name(self) -> str:
        return getattr(self.metric, "__name__", "")

    def config(self) -> dict[str, Any]:
        """Return the options and, for a user's function, a hash of its source.

        Because of the hash, results of an earlier version of the function are not mistaken for results of this one.
        """
        whole = super().config()
        module = getattr(self.metric, "__module__", None) or ""
        whole["init_args"]["metric"] = f"{module}.{self.metric_name}"
        if not module.startswith("lit_layers."):
            whole["init_args"]["source"] = hashlib.sha256(_source(self.metric).encode()).hexdigest()[:16]
        return whole

    def check_options(self, model: LayeredModel) -> None:
        if not self.metric_name.isidentifier():
            raise InputError(f"metric: expected a function that has a name, got {self.metric!r}")
        super().check_options(model)
        generator, shape = torch.Generator().manual_seed(0), (64, model.dim)
        try:
            self._value_of_layer(torch.randn(shape, generator=generator, dtype=torch.float64))
        except Exception as failure:  # the user's function may raise any error
            raise InputError(
                f"{self.name}: expected metric to turn states (points, dim) into one number, got "
                f"{kind_and_words(failure)} from {self.metric_name} on states {shape}"
            ) from failure

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return stack_layers([self._layer_values(hidden, seen.mask) for hidden in states_or_parts(seen, self.states)])

    def tags(self) -> dict[str, str | int | float]:
        """Return tags for all `options`, and for `states` and `drop_first` if they differ from their defaults."""
        tags = {name: int(value) if isinstance(value, bool) else value for name, value in self.options.items()}
        return tags | self.tags_of("states", "drop_first")

    def _layer_values(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        prompts = zip(hidden, drop_first_tokens(mask, self.drop_first), strict=True)
        return {(self.metric_name,): torch.stack([self._value_of_layer(tokens[real]) for tokens, real in prompts])}

    def compute(self, model: LayeredModel, batches: Values) -> Iterable[Record]:
        (rows,) = batches.values()
        return summarize_layers(self.metric_name, rows, tags=self.tags())

    def _value_of_layer(self, points: Tensor) -> Tensor:
        """Return the function's value on points (points, dim) in float64; NaN if there are none, or one is not finite.

        Raises:
            TypeError, ValueError: if the function returns something other than one number.
        """
        if not len(points) or not points.isfinite().all():
            return points.new_full((), torch.nan, dtype=torch.float64)
        options: Any = {"undefined": "nan"} if "undefined" in inspect.signature(self.metric).parameters else {}
        with torch.no_grad():
            value = self.metric(widened(points), **(options | self.options))
        value = widened(torch.as_tensor(value))
        if value.shape != ():
            raise ValueError(f"shape {tuple(value.shape)}")
        return value


def _source(function: Callable[..., Any]) -> str:
    """Return the source of a function, or its bytecode if the source cannot be read."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return f"{code.co_code.hex()} {code.co_consts} {code.co_names}" if code else repr(type(function))


def _spread_tokens(mask: Tensor, first: int, count: int) -> Tensor:
    """Return a mask of at most `count` evenly spread real tokens of each prompt, from token `first` on."""
    chosen = torch.zeros_like(mask)
    for prompt, real in enumerate(mask):
        positions = real.nonzero()[:, 0]
        if len(positions) > first:
            chosen[prompt, positions[evenly_spread(first, len(positions) - 1, count)]] = True
    return chosen


PROMPT_METRICS = "massive_activation", "random_massive_activation", "block_influence", "step_ratio"
SET_METRICS = "alpha_req", "random_alpha_req", "two_nn_dimension", "random_two_nn_dimension", "anisotropy"


@dataclass(kw_only=True)
class StateGeometry(Analysis):
    """Spectrum, dimension and direction of the states at every layer, and how much each block changes them.

    `alpha_req`, `two_nn_dimension` and `anisotropy` are computed on one set of tokens, `num_tokens` from each prompt.
    `random_alpha_req` and `random_two_nn_dimension` are computed on the same set after each feature is shuffled over
    the tokens. Intervals come from `num_halves` random halves of the prompts. The mean over the halves is the metric
    `NAME_of_half`, which differs from the value of all prompts because a half has fewer tokens.

    `massive_activation` is computed on all real tokens of each prompt, then averaged over prompts.
    `random_massive_activation` is its value for normally distributed entries. `block_influence` and `step_ratio`
    describe the block whose output is the layer. They are averaged over the tokens of a prompt, then over prompts. The
    tag `num_undefined_tokens` counts tokens without a value. Records of means over layers 1..L have no `layer`.

    An untrained model is a baseline for all metrics: step 0 of a run, or `analyze --untrained`. States come from the
    forward pass that analyses share, so no block runs again. The model runs in float32 or wider.

    Source: as in the functions of `lit_layers.functional.state_geometry`.

    Args:
        batches: the data to measure on.
        num_tokens: number of evenly spread tokens taken from each prompt; 1 takes the last token. Their states at all
            layers are held in memory: 128 prompts x 8 tokens x 13 layers x 768 x 4 B = 41 MB.
        drop_first: number of first tokens of each prompt, mostly attention sinks, to leave out of everything except
            `massive_activation`.
        first_rank, last_rank: range of eigenvalues to which `alpha_req` is fitted.
        num_halves: number of halves for intervals. With 0, there are no intervals.
        states: "resid" takes the output of each block. "hf" also applies the final norm to the last layer, "normed" to
            every layer.
    """

    LEAST: ClassVar = {"first_rank": 1, "last_rank": 2}

    batches: Batches
    name: str = "state_geometry"
    num_tokens: int = 8
    drop_first: int = 1
    first_rank: int = 11
    last_rank: int = 100
    num_halves: int = 10
    states: States = "resid"

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the values of each prompt, and the states of up to `num_tokens` evenly spread tokens of each prompt.

        `rows` (layers + 1, dim, tokens) holds these states, prompt by prompt. `num_rows` (prompts,) is the number of
        these tokens in each prompt.
        """
        mask = seen.mask
        chosen = _spread_tokens(mask, self.drop_first, self.num_tokens)
        used = drop_first_tokens(mask, self.drop_first).cpu()
        changes = torch.full((2, len(mask)), torch.nan, dtype=torch.float64)
        missing, before = changes[0], None
        layers = list[dict[Any, Tensor]]()
        for states in states_of_layers(seen, self.states):
            if before is not None:
                kinds = (geometry.block_influence, geometry.step_ratio)
                steps = [each(before, states, undefined="nan").cpu() for each in kinds]
                by_token = torch.stack(steps).masked_fill(~used, torch.nan)
                changes, missing = mean_of_defined(by_token), (by_token.isnan() & used).sum(-1)[0]
            size = geometry.massive_activation(states, mask, undefined="nan")
            normal = geometry.normal_massive_activation((mask.sum(-1) * states.shape[-1]).cpu())
            by_prompt = (size, normal.masked_fill(size.isnan().cpu(), torch.nan), *changes)
            layers.append(dict(zip(PROMPT_METRICS, by_prompt, strict=True)))
            layers[-1] |= {"num_undefined_tokens": missing.double(), "rows": states[chosen].T}
            before = states
        return {"num_rows": chosen.sum(-1).cpu(), **stack_layers(layers)}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        missing = batches["num_undefined_tokens"].nan_to_num()
        for metric in PROMPT_METRICS:
            counts = {} if metric.endswith("massive_activation") else {"num_undefined_tokens": missing}
            yield from summarize_layers(metric, batches[metric], tags=self.tags(metric), counts=counts)
        yield from self._set_records(prompt_vectors(batches["rows"]), batches["num_rows"])

    def _set_records(self, rows: Tensor, num_rows: Tensor) -> Iterator[Record]:
        """Yield the records of the metrics that are computed on one set of tokens of all prompts.

        `rows` (layers + 1, tokens, dim) are its states. The first `num_rows[0]` tokens belong to the first prompt, the
        next `num_rows[1]` to the second, and so on.
        """
        owner = torch.arange(len(num_rows)).repeat_interleave(num_rows)
        # 1 for tokens whose states are not finite, otherwise 0, (layers + 1, tokens)
        broken = (~rows.isfinite().all(-1)).double()
        num_broken = broken.new_zeros(len(rows), len(num_rows)).index_add_(1, owner, broken)
        _, used = comparable((num_broken == 0) & (num_rows > 0))
        rows, owner = rows[:, used[owner]], owner[used[owner]]
        prompts = used.nonzero()[:, 0]
        members = [prompts, *(prompts[half] for half in random_halves(len(prompts), self.num_halves))]
        choices = [torch.isin(owner, each).nonzero()[:, 0] for each in members]
        by_layer = [_set_values(layer, choices, (self.first_rank, self.last_rank)) for layer in rows if len(prompts)]
        for metric in SET_METRICS:
            found = [row[metric] for row in by_layer] or [rows.new_tensor([torch.nan])] * len(rows)
            # (layers + 1, 1 + halves): column 0 is of all prompts, the others are of random halves
            values = torch.stack(found)
            halves = values[:, 1:] if values.shape[1] > 1 else None
            tags = self.tags(metric) | missing_tag("", ~used)
            yield from layer_records(metric, values[:, 0], halves, int(used.sum()), tags)

    def tags(self, metric: str) -> dict[str, Any]:
        of_sets = [] if metric.endswith("massive_activation") else ["drop_first"]
        return self.tags_of("states", *of_sets, *(["first_rank", "last_rank"] if "alpha_req" in metric else []))


def _set_values(points: Tensor, choices: list[Tensor], fit_range: tuple[int, int]) -> dict[str, Tensor]:
    """Return the values (choices,) of each metric at one layer, for several subsets of its points.

    `choices` are the indices of the points of each subset. The random baselines are computed for the first subset only.
    """
    computed_in, points = points.dtype, points.double()
    sets = [points[rows] for rows in choices]
    distances, point = geometry.merged_distances(points, computed_in)
    shuffled = geometry.shuffled_features(sets[0])
    unique = [point[each].unique() for each in choices]
    slope = functools.partial(geometry.alpha_req, fit_range=fit_range, undefined="nan")
    dimension = geometry.two_nn_of_distances
    return {
        "alpha_req": torch.stack([*map(slope, sets)]),
        "random_alpha_req": slope(shuffled)[None],
        "two_nn_dimension": torch.stack([dimension(distances[rows][:, rows]) for rows in unique]),
        "random_two_nn_dimension": dimension(geometry.merged_distances(shuffled, computed_in)[0])[None],
        "anisotropy": torch.stack([geometry.anisotropy(each, undefined="nan") for each in sets]),
    }


@dataclass(kw_only=True)
class PooledStates(Analysis):
    """The pooled state of each prompt at every layer, and the number of dimensions that the prompts span.

    `pooled_dimension` is the participation ratio of the centred pooled states (prompts, dim). It is (sum l)^2 / sum l^2
    over the eigenvalues l of their covariance, between 1 and the smaller of prompts - 1 and dim. Intervals come from
    `num_halves` random halves of the prompts. The mean of `pooled_dimension` over the halves is
    `pooled_dimension_of_half`. Records of means over layers 1..L have no `layer`.

    The states are also written to the run's folder (`lit_layers.records.write_values`), so that checkpoints and seeds
    can be compared later. A prompt whose states are not finite at some layer is left out of the dimension.

    The model runs in float32 or wider; states are stored in float32.

    Args:
        batches: the data to measure on; 64 prompts x 13 layers x 768 x 4 B = 2.6 MB are stored per checkpoint.
        pooling: how a prompt's tokens become one vector.
        num_halves: number of halves for intervals. With 0, there are no intervals.
        states: as in `StateMetric`.
    """

    batches: Batches
    name: str = "pooled_states"
    pooling: Pooling = "mean"
    num_halves: int = 10
    states: StatesOrPart = "resid"

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        layers = states_or_parts(seen, self.states)
        return stack_layers([{POOLED: pooled_vectors(hidden, seen.mask, self.pooling)} for hidden in layers])

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        pooled = prompt_vectors(batches[POOLED].double())
        _, used = comparable(~pooled.isnan().any(-1))
        tags = self.tags_of("pooling", "states") | missing_tag("", ~used)
        finite = pooled[:, used]
        dimensions = functools.partial(participation_ratio, center=True, undefined="nan")
        halves = half_values(dimensions, finite, self.num_halves)
        for record in layer_records("pooled_dimension", dimensions(finite), halves, finite.shape[1], tags):
            has_states = record.metric == "pooled_dimension" and record.layer is not None
            yield replace(record, states=pooled[record.layer].float().numpy()) if has_states else record


Mode = Literal["token", "flattened"]
SIZES = "num_beginning", "num_middle", "num_ending"


@dataclass(kw_only=True)
class LayerSimilarity(Analysis):
    """Similarity of each pair of layers 0 to L, and the division of the model into beginning, middle and ending.

    `layer_cosine` (tag `mode`) averages the cosine between a token's states at two layers within each prompt, then over
    prompts ("token"). With "flattened", all of a prompt's tokens form one vector, so tokens with a larger norm have
    more weight. `layer_cka` is the debiased linear centred kernel alignment. It may be negative and needs at least
    4 tokens. Both metrics have a record for every ordered pair of `layer` and `other_layer`.

    `num_beginning`, `num_middle`, `num_ending` and `block_contrast` describe how `layer_stages` divides layers 1..L
    (without the embedding) into three contiguous parts. The division uses the similarity that the tag `of` names, in
    its `mode`.

    If the similarity of a layer to itself is undefined, the layer has no value with any other layer, and the division
    is NaN. A layer at which the states of most prompts are not finite has no `layer_cka`. A prompt whose states are not
    finite at one of the remaining layers is left out of `layer_cka` at all layers.

    Prompts have equal weight in `layer_cosine`, which has intervals. `layer_cka` is over all rows together (tag
    `num_rows`), without intervals. Padding is never included. Options that differ from their defaults are tags. The
    model runs in float32 or wider.

    Source: Sun et al., arXiv 2407.09298 (cosine); Kornblith et al. 2019 (CKA).

    Args:
        batches: the data to measure on.
        num_tokens: number of evenly spread tokens taken from each prompt for `layer_cka`. Their states at all layers
            are held in memory: 128 prompts x 16 tokens x 13 layers x 768 x 4 B = 82 MB.
        drop_first: number of first tokens of each prompt to leave out. They are mostly attention sinks, whose norm
            dominates `layer_cka` and the mode "flattened".
        states: "resid" takes the output of each block. "hf" also applies the final norm to the last layer, "normed" to
            every layer.
    """

    batches: Batches
    name: str = "layer_similarity"
    num_tokens: int = 16
    drop_first: int = 0
    states: States = "resid"

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the cosines between all layers within each prompt, and the states from which `layer_cka` is computed.

        The keys "token" and "flattened" hold the cosines (layers + 1, layers + 1, prompts) of these modes. `rows`
        (layers + 1, dim, rows) holds the states, prompt by prompt. `num_rows` (prompts,) counts the states per prompt.
        """
        mask = drop_first_tokens(seen.mask, self.drop_first)
        left = mask.any(-1)
        hidden, mask = torch.stack([states[left] for states in states_of_layers(seen, self.states)]), mask[left]
        values = {mode: _cosines(hidden, mask, mode) for mode in get_args(Mode)}
        values["finite"] = (hidden.isfinite().all(-1) | ~mask).all(-1)
        used = _spread_tokens(mask, 0, self.num_tokens)
        values |= {"rows": hidden[:, used].mT, "num_rows": used.sum(-1)}
        return {key: value.cpu() for key, value in values.items()}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        _, used = comparable(batches["finite"])  # (prompts,) which prompts `layer_cka` uses
        rows = batches["rows"].mT[:, used.repeat_interleave(batches["num_rows"])].contiguous()
        prompts = int(used.sum())
        enough = rows.shape[1] >= 4
        if not enough and used.all():
            raise InputError(f"{self.name}: layer_cka needs 4 rows or more, got {rows.shape[1]}: give more texts")
        tags = self.tags_of("states", "drop_first")
        for mode in get_args(Mode):
            values = batches[mode].movedim(-1, 0).contiguous()  # (prompts, layers + 1, layers + 1)
            mode_tags = {"mode": mode, **tags}
            yield from _cosine_records(values, mode_tags)
            whole = values.isfinite().flatten(1).all(1)  # prompts with a value at every layer
            means = mean_of_defined(values[whole] if whole.any() else values, dim=0)
            stage_tags = {**mode_tags, **missing_tag("", ~whole)}
            yield from _stage_records("layer_cosine", means, int(whole.sum()), stage_tags)
        tags |= missing_tag("", ~used)
        alignment = torch.full((len(rows), len(rows)), math.nan)
        if enough:
            alignment = linear_cka_matrix(rows.to(model.device), debiased=True, undefined="nan").cpu()
        fields: dict[str, Any] = {"metric": "layer_cka", "n": prompts, "tags": {**tags, "num_rows": rows.shape[1]}}
        for layer, other in (~alignment.isnan()).nonzero().tolist():
            yield Record(value=alignment[layer, other].item(), layer=layer, other_layer=other, **fields)
        yield from _stage_records("layer_cka", alignment, prompts, tags)


def _cosines(hidden: Tensor, mask: Tensor, mode: Mode) -> Tensor:
    """Return the cosine matrices (layers + 1, layers + 1, prompts) in float64, NaN if a state is zero.

    Each prompt has its own matrix, so that both the mean over prompts and its interval can be computed.
    """
    matrices = torch.zeros(len(hidden), len(hidden), len(mask), dtype=torch.float64)
    for row in range(len(mask)):
        matrices[..., row] = cosine_similarity_matrix(hidden[:, [row]], mask[[row]], mode=mode, undefined="nan")
    return matrices


def _cosine_records(values: Tensor, tags: dict[str, Any]) -> Iterator[Record]:
    for layer, other in itertools.combinations_with_replacement(range(values.shape[-1]), 2):
        records = summarize("layer_cosine", values[:, layer, other], layer=layer, other_layer=other, tags=tags)
        yield from records
        if other != layer:
            yield from (replace(record, layer=other, other_layer=layer) for record in records)


def _stage_records(of: str, matrix: Tensor, num_prompts: int, tags: dict[str, Any]) -> Iterator[Record]:
    missing = matrix[1:, 1:].diagonal().isnan()
    if missing.any() or not num_prompts:
        for metric in (*SIZES, "block_contrast"):
            yield nan_record(metric, tags={"of": of, **tags, **missing_tag("layers", missing)})
        return
    stages = layer_stages(matrix[1:, 1:])
    for metric in (*SIZES, "block_contrast"):
        value = float(getattr(stages, metric.removeprefix("block_")))
        yield Record(metric=metric, value=value, n=num_prompts, tags={"of": of, **tags})
