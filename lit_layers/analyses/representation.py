"""How many directions the states fill at each layer, of a prompt and of all prompts, and how a prompt's tokens turn."""

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import LayerwiseAnalysis, LayerwiseRun, Visit
from lit_layers.analyses.states import States, in_convention
from lit_layers.analyses.summary import summarize
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.entropy import Normalization, dataset_entropy, matrix_entropy, spectrum
from lit_layers.functional.geometry import curvature_and_missing, token_angle
from lit_layers.functional.pooling import pool
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record

NORMALIZATIONS: tuple[Normalization, ...] = ("raw", "maxEntropy")
DROPPED = (0, 1)


class Kind(NamedTuple):
    """Which number: a metric and, where they apply, its normalization and how many first tokens are left out."""

    metric: str
    normalization: str | None = None
    drop_first: int | None = None

    def __str__(self) -> str:
        return " ".join(str(part) for part in self)

    @classmethod
    def of(cls, text: str) -> "Kind":
        """The kind that `str` turned into `text`."""
        metric, normalization, dropped = text.split()
        return cls(
            metric, None if normalization == "None" else normalization, None if dropped == "None" else int(dropped)
        )

    @property
    def tags(self) -> dict[str, Any]:
        return {name: tag for name, tag in self._asdict().items() if name != "metric" and tag is not None}


CURVATURE, MISSING_ANGLES = Kind("token_curvature"), Kind("num_missing_angles")


@dataclass(kw_only=True)
class Representation(LayerwiseAnalysis):
    """Entropies, ranks and curvature of the states at every layer, and their means over layers 1..L (no layer).

    Of each prompt's tokens, then averaged over prompts: `prompt_entropy` (tag `normalization`), `effective_rank`,
    `participation_ratio` and, on demand, `rankme`, each with all tokens and without the first (tag `drop_first`: one
    sink token of huge norm sends the entropy to 0); `token_curvature`, over the angles that exist (the tag
    `num_missing_angles` counts the others). A prompt enters the mean over layers if it has a value at each of them.

    Of one mean-pooled vector per prompt: `dataset_entropy`, and `dataset_entropy_of_half`, the mean over `num_halves`
    random halves of the prompts. The spread of the halves estimates that of the whole (delete-half jackknife) and gives
    both their intervals: resampling with replacement would repeat rows and lower the value.

    `alpha` is the order of the entropies. The model runs in float32 or wider. Preset "released_code" gives the two
    entropies, and `token_angle` in place of the curvature, as the code of Skean et al. did (arXiv 2502.02013, release
    of 2024-09): states "hf", centred unit tokens, negative Gram entries clamped.
    """

    batches: Batches
    name: str = "representation"
    alpha: float = 1.0
    rankme: bool = False
    num_halves: int = 20
    states: States = "resid"
    preset: Literal["released_code"] | None = None

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options()

    def begin(self, model: LayeredModel, store: MutableMapping[str, Tensor] | None = None) -> LayerwiseRun:
        self._check_options()
        return _Run(model, self)

    def of_prompts(self, states: Tensor, mask: Tensor) -> dict[Kind, Tensor]:
        """The values (batch,) of one layer's states (batch, tokens, dim)."""
        return self._released(states, mask) if self.preset else self._ours(states, mask)

    def _ours(self, states: Tensor, mask: Tensor) -> dict[Kind, Tensor]:
        found = {}
        for dropped in DROPPED:
            sets = spectrum(states, mask, drop_first=dropped)  # one decomposition for all that follows
            for normalization in NORMALIZATIONS:
                kind = Kind("prompt_entropy", normalization, dropped)
                found[kind] = sets.entropy(alpha=self.alpha, normalization=normalization, undefined="nan")
            found[Kind("effective_rank", None, dropped)] = sets.effective_rank(undefined="nan")
            found[Kind("participation_ratio", None, dropped)] = sets.participation_ratio(undefined="nan")
            if self.rankme:
                found[Kind("rankme", None, dropped)] = sets.rankme(undefined="nan")
        found[CURVATURE], missing = curvature_and_missing(states, mask, undefined="skip")
        return found | {MISSING_ANGLES: missing}

    def _released(self, states: Tensor, mask: Tensor) -> dict[Kind, Tensor]:
        found = {}
        for dropped in DROPPED:
            for normalization in NORMALIZATIONS:
                found[Kind("prompt_entropy", normalization, dropped)] = matrix_entropy(
                    states,
                    mask,
                    alpha=self.alpha,
                    center=True,
                    unit=True,
                    clamp=True,
                    side="smaller",
                    alpha2="frobenius",
                    drop_first=dropped,
                    normalization=normalization,
                    undefined="nan",
                )
        return found | {Kind("token_angle"): token_angle(states, mask, undefined="nan")}

    def pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        """One vector (batch, dim) for each prompt, of one layer's states."""
        return pool(states, mask, pooling="centered_unit_mean" if self.preset else "mean", undefined="nan")

    def dataset_records(self, pooled: Tensor) -> Iterator[Record]:
        """Of the pooled vectors (layers + 1, prompts, dim)."""
        num_prompts, dim = pooled.shape[1:]
        pooled = pooled[:, ~pooled.isnan().any(-1).any(0)]
        n = pooled.shape[1]
        tags = self.tags("dataset_entropy") | ({"num_undefined": num_prompts - n} if n < num_prompts else {})
        whole = _and_mean(self._dataset_entropy(pooled))  # (layers + 2,)
        halves = [_and_mean(self._dataset_entropy(pooled[:, rows])) for rows in _halves(n, self.num_halves)]
        of_halves = torch.stack(halves) if halves else None
        for normalization in NORMALIZATIONS:
            most, most_of_half = _most(normalization, n, dim), _most(normalization, n // 2, dim)
            if most == 0:
                continue  # one prompt, whose entropy is no share of anything
            for position, layer in enumerate([*range(len(pooled)), None]):
                spread = of_halves[:, position] / most_of_half if of_halves is not None else None
                yield from _records_with_halves(
                    whole[position] / most, n, spread, layer, {"normalization": normalization} | tags
                )

    def _dataset_entropy(self, pooled: Tensor) -> Tensor:
        if self.preset:
            return dataset_entropy(pooled, alpha=self.alpha, clamp=True, side="smaller", alpha2="frobenius")
        return dataset_entropy(pooled, alpha=self.alpha)

    def tags(self, metric: str) -> dict[str, Any]:
        """What a result of other than the default options must say of itself."""
        tags: dict[str, Any] = {"alpha": self.alpha} if self.alpha != 1 and "entropy" in metric else {}
        if self.preset:
            return tags | {"preset": self.preset}
        return tags | ({"states": self.states} if self.states != "resid" else {})

    def _check_options(self) -> None:
        for option, allowed in (("states", ("resid", "hf")), ("preset", (None, "released_code"))):
            if (value := getattr(self, option)) not in allowed:
                raise InputError(f"{self.name}: expected {option} to be one of {list(allowed)}, got {value!r}")
        if not self.alpha > 0:
            raise InputError(f"{self.name}: expected alpha above 0, got {self.alpha}")
        if self.num_halves < 0 or self.num_halves == 1:
            raise InputError(f"{self.name}: expected num_halves to be 0 or at least 2, got {self.num_halves}")


class _Run(LayerwiseRun):
    """Per batch, and layer by layer, the value of each prompt by kind, and the pooled vectors."""

    def __init__(self, model: LayeredModel, options: Representation) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.states: States = "hf" if options.preset else options.states

    def start(self, batch: int, hidden: Tensor, mask: Tensor) -> None:
        self._measure(batch, hidden, mask)

    def visit(self, visit: Visit) -> None:
        hidden = in_convention(self.model, self.states, visit.layer, visit.after)
        self._measure(visit.batch, hidden, visit.mask)

    def records(self) -> Iterator[Record]:
        groups: dict[str, list[Tensor]] = {}
        for name, values in self.state.items():
            groups.setdefault(name.rpartition("/")[0], []).append(values)
        pooled = torch.cat(groups.pop("pooled"), dim=1)
        found = {Kind.of(name): torch.cat(rows, dim=1) for name, rows in groups.items()}
        missing = found.pop(MISSING_ANGLES, None)
        for kind, rows in found.items():
            tags = kind.tags | self.options.tags(kind.metric)
            yield from _prompt_records(kind.metric, rows, tags, missing if kind == CURVATURE else None)
        yield from self.options.dataset_records(pooled)

    def _measure(self, batch: int, hidden: Tensor, mask: Tensor) -> None:
        for kind, values in self.options.of_prompts(hidden, mask).items():
            self._append(f"{kind}/{batch}", values)
        self._append(f"pooled/{batch}", self.options.pooled(hidden, mask))

    def _append(self, name: str, values: Tensor) -> None:
        row = values[None].cpu()
        self.state[name] = torch.cat([self.state[name], row]) if name in self.state else row  # (layers so far, batch)


def _prompt_records(metric: str, values: Tensor, tags: dict[str, Any], missing: Tensor | None) -> Iterator[Record]:
    """Of the values (layers + 1, prompts) of one metric: a record per layer and one of the mean over layers 1..L."""
    missing = torch.zeros_like(values) if missing is None else missing
    for layer, (row, absent) in enumerate(zip(values, missing, strict=True)):
        yield from summarize(metric, row, layer=layer, tags=tags | _count(absent))
    yield from summarize(metric, values[1:].mean(0), tags=tags | _count(missing[1:]))


def _count(missing: Tensor) -> dict[str, int]:
    total = int(missing.sum())
    return {MISSING_ANGLES.metric: total} if total else {}


def _records_with_halves(
    value: Tensor, n: int, halves: Tensor | None, layer: int | None, tags: dict[str, Any]
) -> Iterator[Record]:
    """The value of all `n` prompts and the mean over halves of them, with intervals from the spread of the halves."""
    metric, options = "dataset_entropy", {"layer": layer, "tags": tags}
    if halves is None:
        yield Record(metric=metric, value=value.item(), n=n, **options)
        return
    mean, stderr = halves.mean().item(), halves.std().item()
    low, high = (bound - mean for bound in halves.quantile(halves.new_tensor([0.025, 0.975])).tolist())
    for name, center, count in ((metric, value.item(), n), (f"{metric}_of_half", mean, n // 2)):
        yield Record(metric=name, value=center, stderr=stderr, low=center + low, high=center + high, n=count, **options)


def _halves(n: int, num_halves: int) -> list[Tensor]:
    """Row numbers of random halves; none of fewer than four prompts."""
    if n < 4:
        return []
    return [torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: n // 2] for seed in range(num_halves)]


def _and_mean(of_layers: Tensor) -> Tensor:
    """With the mean over layers 1..L behind them."""
    return torch.cat([of_layers, of_layers[1:].mean(0, keepdim=True)])


def _most(normalization: str, n: int, dim: int) -> float:
    """What a value is a share of."""
    return 1.0 if normalization == "raw" else math.log(min(n, dim)) if n else 0.0
