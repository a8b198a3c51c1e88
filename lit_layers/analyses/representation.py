"""Entropies, ranks and curvature of the states at every layer, and any metric of one's own."""

import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Key, Values, stack_layers
from lit_layers.analyses.statistics import complete, left_out, records_of_layers, summarize_layers, values_of_halves
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError, kind_and_words
from lit_layers.functional._checks import widened
from lit_layers.functional.entropy import AtTwo, Normalization, Side, dataset_entropy, divided, matrix_entropy, spectrum
from lit_layers.functional.geometry import Pooling, curvature_and_missing, pool, token_angle
from lit_layers.models.view import Batch, LayeredModel, States, Trajectory, drop_first_tokens, states_of_layers
from lit_layers.records import Record

# Skean et al., releases of 2024-09 and of 2025, of arXiv 2502.02013.
_FLAGS: dict[str, Any] = dict.fromkeys(("center", "unit", "clamp"), True)
_RELEASED: dict[str, Any] = {**_FLAGS, "states": "hf", "side": "smaller", "alpha2": "frobenius"}


def pooled_vectors(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector per prompt (dim, prompts), NaN where it is undefined."""
    return pool(hidden, mask, pooling=pooling, undefined="nan").T


def vectors_of_prompts(values: Tensor) -> Tensor:
    """Return the vectors (layers + 1, prompts, dim) of what `update` gives of all layers."""
    return values.movedim(-1, 1).contiguous()


POOLED: Key = ("pooled", None, None)
MISSING_ANGLES: Key = ("num_missing_angles", None, None)


@dataclass(kw_only=True)
class Representation(Analysis):
    """Entropies, ranks and curvature of the states at every layer, and their means over layers 1..L (no layer).

    Of each prompt's tokens, then averaged over prompts: `prompt_entropy` (tag `normalization`), `effective_rank`,
    `participation_ratio` and, on demand, `rankme`, each with all tokens and without the first (tag `drop_first`: one
    sink token of huge norm sends the entropy to 0); `token_curvature`, over the angles that exist (the tag
    `num_missing_angles` counts the others). A prompt enters the mean over layers if it has a value at each of them. One
    token has no entropy: such a prompt is left out of `prompt_entropy` in every normalization alike, and counted.

    Of one mean-pooled vector per prompt: `dataset_entropy`, and `dataset_entropy_of_half`, the mean over `num_halves`
    random halves of the prompts. The spread of the halves estimates that of the whole (delete-half jackknife) and gives
    both their intervals: resampling with replacement would repeat rows and lower the value.

    A result of other than the default options says so in tags. The model runs in float32 or wider.

    Preset "released_code" gives the two entropies, and `token_angle` in place of the curvature, as the code of Skean et
    al. did (arXiv 2502.02013, release of 2024-09): states "hf", centred unit tokens, negative Gram entries clamped.
    "released_code_later" is the release of 2025, with its `token_curvature` of centred unit tokens; for alpha 2 its
    entropies are too high by 2 log of the rows. It centres and scales pooled vectors within each mini-batch: here the
    batch is all prompts. Neither preset has the ranks.

    Args:
        batches: what is measured on.
        alpha, alpha2, clamp, side: of the entropies, as in `matrix_entropy`.
        center, unit: of the tokens, before entropies and ranks.
        pooling: of the vectors of `dataset_entropy`; `center_pooled` and `unit_pooled` are done to them.
        normalizations: of the entropies.
        drop_first: how many first tokens are left out of entropies and ranks; each number gives its own.
        rankme: whether that is measured, too.
    """

    LEAST: ClassVar = {"drop_first": 0}
    POSITIVE = ("alpha",)
    LISTS = ("normalizations", "drop_first")
    PRESETS: ClassVar = {
        "released_code": {**_RELEASED, "pooling": "centered_unit_mean"},
        "released_code_later": {**_RELEASED, "pooling": "mean", "center_pooled": True, "unit_pooled": True},
    }

    batches: Batches
    name: str = "representation"
    alpha: float = 1.0
    alpha2: AtTwo = "spectrum"
    center: bool = False
    unit: bool = False
    clamp: bool = False
    side: Side = "rows"
    pooling: Pooling = "mean"
    center_pooled: bool = False
    unit_pooled: bool = False
    normalizations: tuple[Normalization, ...] = ("raw", "maxEntropy")
    drop_first: tuple[int, ...] = (0, 1)
    rankme: bool = False
    num_halves: int = 20
    states: States = "resid"
    preset: Literal["released_code", "released_code_later"] | None = None

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        layers = list[dict[Key, Tensor]]()
        for hidden in states_of_layers(seen, self.states):
            layers.append(self._layer_values(hidden, seen.mask))
        return stack_layers(layers)

    def _layer_values(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        """Return the values (batch,) by (metric, normalization, drop_first), and the pooled vectors."""
        values: dict[Key, Tensor] = {}
        for dropped in self.drop_first if self._needs_entries() else ():
            values |= self._entropies(hidden, mask, dropped)
        if not self.preset:
            values |= self._ranks(hidden, mask)
        if self.preset == "released_code":
            values["token_angle", None, None] = token_angle(hidden, mask, undefined="nan")
        else:
            as_later: Any = {"center": True, "unit": True, "fold": True, "undefined": "zero"}
            angles = curvature_and_missing(hidden, mask, **(as_later if self.preset else {"undefined": "skip"}))  # pyright: ignore
            values["token_curvature", None, None], values[MISSING_ANGLES] = angles
        return {**values, POOLED: pooled_vectors(hidden, mask, self.pooling)}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        pooled, missing = vectors_of_prompts(batches.pop(POOLED)), batches.pop(MISSING_ANGLES, None)
        for (metric, normalization, dropped), rows in batches.items():
            assert isinstance(metric, str)
            tags = {"normalization": normalization, "drop_first": dropped}
            tags = {name: tag for name, tag in tags.items() if tag is not None} | self.tags(metric)
            counts = {"num_missing_angles": missing} if metric == "token_curvature" and missing is not None else {}
            yield from summarize_layers(metric, rows, tags=tags, counts=counts)
        yield from self.dataset_records(pooled)

    def _needs_entries(self) -> bool:
        """Whether entropies need more than the singular values."""
        return self.clamp or (self.alpha == 2 and self.alpha2 == "frobenius")

    def _entropies(self, states: Tensor, mask: Tensor, dropped: int) -> dict[Key, Tensor]:
        how: dict[str, Any] = {"center": self.center, "unit": self.unit, **self._matrix_options()}
        values = matrix_entropy(states, mask, drop_first=dropped, undefined="nan", **how)
        num_rows = (mask.sum(-1) - dropped).clamp(min=0)
        single = num_rows < 2
        values = (values + self._excess(num_rows).to(values.device)).masked_fill(single.to(values.device), math.nan)
        how = {"num_rows": num_rows.to(values.device), "dim": states.shape[-1], "undefined": "nan"}
        return {
            ("prompt_entropy", each, dropped): divided("prompt_entropy", values, {}, normalization=each, **how)
            for each in self.normalizations
        }

    def _ranks(self, states: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        values: dict[Key, Tensor] = {}
        for dropped in self.drop_first:
            # one decomposition for all that follows
            sets = spectrum(states, mask, center=self.center, unit=self.unit, drop_first=dropped)
            single = mask.sum(-1) - dropped < 2
            for each in () if self._needs_entries() else self.normalizations:
                entropies = sets.entropy(alpha=self.alpha, normalization=each, undefined="nan")
                values["prompt_entropy", each, dropped] = entropies.masked_fill(single.to(entropies.device), math.nan)
            for metric in ("effective_rank", "participation_ratio", *(("rankme",) if self.rankme else ())):
                values[metric, None, dropped] = getattr(sets, metric)(undefined="nan")
        return values

    def _matrix_options(self) -> dict[str, Any]:
        return {"alpha": self.alpha} | {name: getattr(self, name) for name in ("alpha2", "clamp", "side")}

    def _excess(self, num_rows: Tensor) -> Tensor:
        """Return what dividing the Gram matrix of unit rows by its trace, and then by its size, adds at order 2."""
        off = self.preset == "released_code_later" and self.alpha == 2
        return 2 * num_rows.clamp(min=1).double().log() * off

    def dataset_records(self, pooled: Tensor) -> Iterator[Record]:
        """Yield the records of pooled vectors (layers + 1, prompts, dim)."""
        _, kept = complete(~pooled.isnan().any(-1))
        pooled, dim = pooled[:, kept], pooled.shape[-1]
        n = pooled.shape[1]
        tags = self.tags("dataset_entropy") | left_out("", ~kept)
        if not n:
            return
        whole = self._dataset_entropy(pooled)  # (layers + 1,)
        of_halves = values_of_halves(self._dataset_entropy, pooled, self.num_halves)
        for normalization in self.normalizations:
            most, most_of_half = _most(normalization, n, dim), _most(normalization, n // 2, dim)
            if most == 0:
                continue  # one prompt, whose entropy is no share of anything
            spread = of_halves / most_of_half if of_halves is not None and most_of_half else None
            all_tags = {"normalization": normalization} | tags
            yield from records_of_layers("dataset_entropy", whole / most, spread, n, all_tags)

    def _dataset_entropy(self, pooled: Tensor) -> Tensor:
        how: dict[str, Any] = {"center": self.center_pooled, "unit": self.unit_pooled, **self._matrix_options()}
        values = dataset_entropy(pooled, undefined="nan", **how)
        return values + self._excess(torch.tensor(pooled.shape[-2])).to(values.device)

    def tags(self, metric: str) -> dict[str, Any]:
        """Return tags for the options that differ from their defaults."""
        options = ["alpha"] if "entropy" in metric else []
        if self.preset:
            return self.tags_of(*options, "preset")
        options += ["alpha2", "clamp", "side"] if "entropy" in metric else []
        if metric == "dataset_entropy":
            options += ["pooling", "center_pooled", "unit_pooled"]
        elif metric in ("prompt_entropy", "effective_rank", "participation_ratio", "rankme"):
            options += ["center", "unit"]
        return self.tags_of(*options, "states")


def _most(normalization: Normalization, n: int, dim: int) -> float:
    """Return the maximum that a value is a share of; 0 if the share is undefined."""
    one, how = torch.ones((), dtype=torch.float64), {"num_rows": torch.tensor(n), "undefined": "nan"}
    share = divided("dataset_entropy", one, {}, dim=dim, normalization=normalization, **how).item()
    return 0.0 if math.isnan(share) else 1 / share


_POINTS = 64  # that a function is tried on


@dataclass(kw_only=True)
class StateMetric(Analysis):
    """A function of the hidden states at every layer, and its mean over layers 1..L (no layer).

    The function takes the states of one layer in float64, `(points, dim) -> ()`. NaN says that it is undefined. Its
    name is that of the metric; a row of that name in `lit_layers.metrics` gives it a title.

    With `points` "tokens" they are the real tokens of a prompt without the first `drop_first`, and values are averaged
    over prompts, with intervals by bootstrap over them. With "prompts" there is one pooled vector for each prompt, and
    one value for all of them, with intervals from `num_halves` random halves, whose mean is the metric `NAME_of_half`:
    values of more prompts and of fewer are not alike.

    Args:
        metric: the function; a recipe names it by its import path, `package.module.function`: one of
            `lit_layers.functional`, or of your own code (`--code`).
        batches: what is measured on.
        name: of the analysis; that of the function by default.
        options: keyword arguments of the function; they are tags of the numbers. One that takes `undefined`, as those
            of `lit_layers.functional` do, is given "nan" for it.
        points: what the points are.
        pooling: of the vectors of prompts.
        drop_first: how many first tokens are left out.
        num_halves: for intervals of "prompts"; 0: none.
        states: of which convention.
    """

    LEAST: ClassVar = {"drop_first": 0}

    metric: Callable[..., Any]  # not -> Tensor: a recipe could then name annotated functions alone
    batches: Batches
    name: str = ""
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    points: Literal["tokens", "prompts"] = "tokens"
    pooling: Pooling = "mean"
    drop_first: int = 0
    num_halves: int = 20
    states: States = "resid"

    def __post_init__(self) -> None:
        self.name = self.name or self.metric_name

    @property
    def metric_name(self) -> str:
        return getattr(self.metric, "__name__", "")

    def config(self) -> dict[str, Any]:
        """Return the options, with the source of a foreign function: another source is another metric."""
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
        self._try(model.dim)

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        layers = list[dict[Key, Tensor]]()
        for hidden in states_of_layers(seen, self.states):
            layers.append(self._layer_values(hidden, seen.mask))
        return stack_layers(layers)

    def tags(self) -> dict[str, str | int | float]:
        """Return tags for the options that differ from their defaults."""
        tags = {name: int(value) if isinstance(value, bool) else value for name, value in self.options.items()}
        return tags | self.tags_of("points", "states", "pooling" if self.points == "prompts" else "drop_first")

    def _layer_values(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        if self.points == "prompts":
            return {POOLED: pooled_vectors(hidden, mask, self.pooling)}
        kept = drop_first_tokens(mask, self.drop_first)
        prompts = zip(hidden, kept, strict=True)
        return {(self.metric_name,): torch.stack([self._value_of_layer(tokens[real]) for tokens, real in prompts])}

    def compute(self, model: LayeredModel, batches: Values) -> Iterable[Record]:
        metric, tags = self.metric_name, self.tags()
        (rows,) = batches.values()
        if self.points == "tokens":
            return summarize_layers(metric, rows, tags=tags)
        rows = vectors_of_prompts(rows)
        _, kept = complete(~rows.isnan().any(-1))
        pooled, tags = rows[:, kept], tags | left_out("", ~kept)
        of_halves = values_of_halves(self._values_of_layers, pooled, self.num_halves)
        return records_of_layers(metric, self._values_of_layers(pooled), of_halves, pooled.shape[1], tags)

    def _values_of_layers(self, states: Tensor) -> Tensor:
        return torch.stack([self._value_of_layer(points) for points in states])

    def _value_of_layer(self, points: Tensor) -> Tensor:
        """Return the function's value of points (points, dim), in float64; NaN without any point.

        Raises:
            TypeError, ValueError: something other than one number.
        """
        if not len(points):
            return points.new_full((), torch.nan, dtype=torch.float64)
        options: dict[str, Any] = {"undefined": "nan"} if "undefined" in _parameters(self.metric) else {}
        with torch.no_grad():
            value = self.metric(widened(points), **(options | self.options))
        value = widened(torch.as_tensor(value))
        if value.shape != ():
            raise ValueError(f"shape {tuple(value.shape)}")
        return value

    def _try(self, dim: int) -> None:
        """Refuse a function that gives anything but a number of random states.

        Raises:
            InputError: what it gives, or why it fails.
        """
        try:
            self._value_of_layer(
                torch.randn(_POINTS, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            )
        except Exception as failure:  # of anyone's code
            raise InputError(
                f"{self.name}: expected metric to turn states (points, dim) into one number, got "
                f"{kind_and_words(failure)} from {self.metric_name} on states {(_POINTS, dim)}"
            ) from failure


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # of one that is compiled
        return ()


def _source(function: Callable[..., Any]) -> str:
    """Return the source of a function, or its bytecode if the source cannot be read."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return f"{code.co_code.hex()} {code.co_consts} {code.co_names}" if code else repr(type(function))
