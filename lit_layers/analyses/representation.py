"""How many directions the states fill at each layer: of a prompt, of all prompts, and of changed prompts."""

import math
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_layers.analyses.base import (
    DividedAnalysis,
    LayerwiseAnalysis,
    LayerwiseRun,
    States,
    StatesRun,
    in_convention,
)
from lit_layers.analyses.statistics import (
    check_num_halves,
    complete,
    left_out,
    random_halves,
    records_of_layers,
    summarize,
    summarize_layers,
    summarize_over_layers,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.entropy import AtTwo, Normalization, Side, dataset_entropy, divided, matrix_entropy, spectrum
from lit_layers.functional.geometry import Pooling, curvature_and_missing, pool, token_angle
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.records import Record

# Skean et al., releases of 2024-09 and of 2025, of arXiv 2502.02013.
_RELEASED: dict[str, Any] = {
    "states": "hf",
    "center": True,
    "unit": True,
    "clamp": True,
    "side": "smaller",
    "alpha2": "frobenius",
}
PRESETS: dict[str, dict[str, Any]] = {
    "released_code": {**_RELEASED, "pooling": "centered_unit_mean"},
    "released_code_later": {**_RELEASED, "pooling": "mean", "center_pooled": True, "unit_pooled": True},
}


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

    POSITIVE = ("alpha",)

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

    def begin(self, model: LayeredModel, store: MutableMapping[str, Tensor] | None = None) -> LayerwiseRun:
        return _Run(model, replace(self, **PRESETS[self.preset]) if self.preset else self)

    def of_prompts(self, states: Tensor, mask: Tensor) -> dict[Kind, Tensor]:
        """The values (batch,) of one layer's states (batch, tokens, dim)."""
        values = {}
        for dropped in self.drop_first:
            values |= self._entropies(states, mask, dropped) if self._by_entries() else {}
            if not self.preset:
                values |= self._ranks(states, mask, dropped)
        if self.preset == "released_code":
            return values | {Kind("token_angle"): token_angle(states, mask, undefined="nan")}
        if self.preset:
            angles = curvature_and_missing(states, mask, center=True, unit=True, fold=True, undefined="zero")
        else:
            angles = curvature_and_missing(states, mask, undefined="skip")
        values[CURVATURE], missing = angles
        return values | {MISSING_ANGLES: missing}

    def _by_entries(self) -> bool:
        """Whether entropies need more than the singular values."""
        return self.clamp or (self.alpha == 2 and self.alpha2 == "frobenius")

    def _entropies(self, states: Tensor, mask: Tensor, dropped: int) -> dict[Kind, Tensor]:
        values = matrix_entropy(
            states,
            mask,
            drop_first=dropped,
            undefined="nan",
            center=self.center,
            unit=self.unit,
            **self._of_matrix(),
        )
        num_rows = (mask.sum(-1) - dropped).clamp(min=0)
        single = num_rows < 2
        values = (values + self._excess(num_rows).to(values.device)).masked_fill(single.to(values.device), math.nan)
        size = {"num_rows": num_rows.to(values.device), "dim": states.shape[-1]}
        return {
            Kind("prompt_entropy", normalization, dropped): divided(
                "prompt_entropy", values, {}, normalization=normalization, undefined="nan", **size
            )
            for normalization in self.normalizations
        }

    def _ranks(self, states: Tensor, mask: Tensor, dropped: int) -> dict[Kind, Tensor]:
        sets = spectrum(
            states, mask, center=self.center, unit=self.unit, drop_first=dropped
        )  # one for all that follows
        values, single = {}, mask.sum(-1) - dropped < 2
        for normalization in () if self._by_entries() else self.normalizations:
            kind = Kind("prompt_entropy", normalization, dropped)
            entropies = sets.entropy(alpha=self.alpha, normalization=normalization, undefined="nan")
            values[kind] = entropies.masked_fill(single.to(entropies.device), math.nan)
        values[Kind("effective_rank", None, dropped)] = sets.effective_rank(undefined="nan")
        values[Kind("participation_ratio", None, dropped)] = sets.participation_ratio(undefined="nan")
        if self.rankme:
            values[Kind("rankme", None, dropped)] = sets.rankme(undefined="nan")
        return values

    def _of_matrix(self) -> dict[str, Any]:
        return {"alpha": self.alpha} | {name: getattr(self, name) for name in ("alpha2", "clamp", "side")}

    def _excess(self, num_rows: Tensor) -> Tensor:
        """What dividing the Gram matrix of unit rows by its trace, and then by its size, adds at order 2."""
        off = self.preset == "released_code_later" and self.alpha == 2
        return 2 * num_rows.clamp(min=1).double().log() * off

    def pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        """One vector (batch, dim) for each prompt, of one layer's states."""
        return pool(states, mask, pooling=self.pooling, undefined="nan")

    def dataset_records(self, pooled: Tensor) -> Iterator[Record]:
        """Of the pooled vectors (layers + 1, prompts, dim)."""
        _, kept = complete(~pooled.isnan().any(-1))
        pooled, dim = pooled[:, kept], pooled.shape[-1]
        n = pooled.shape[1]
        tags = self.tags("dataset_entropy") | left_out("", ~kept)
        if not n:
            return
        whole = self._dataset_entropy(pooled)  # (layers + 1,)
        half_values = [self._dataset_entropy(pooled[:, rows]) for rows in random_halves(n, self.num_halves)]
        of_halves = torch.stack(half_values, -1) if half_values else None  # (layers + 1, halves)
        for normalization in self.normalizations:
            most, most_of_half = _most(normalization, n, dim), _most(normalization, n // 2, dim)
            if most == 0:
                continue  # one prompt, whose entropy is no share of anything
            spread = of_halves / most_of_half if of_halves is not None and most_of_half else None
            all_tags = {"normalization": normalization} | tags
            yield from records_of_layers("dataset_entropy", whole / most, spread, n, all_tags)

    def _dataset_entropy(self, pooled: Tensor) -> Tensor:
        values = dataset_entropy(
            pooled,
            center=self.center_pooled,
            unit=self.unit_pooled,
            undefined="nan",
            **self._of_matrix(),
        )
        return values + self._excess(torch.tensor(pooled.shape[-2])).to(values.device)

    def tags(self, metric: str) -> dict[str, Any]:
        """What a result of other than the default options must say of itself."""
        tags: dict[str, Any] = {"alpha": self.alpha} if self.alpha != 1 and "entropy" in metric else {}
        if self.preset:
            return tags | {"preset": self.preset}
        names = ["alpha2", "clamp", "side"] if "entropy" in metric else []
        if metric == "dataset_entropy":
            names += ["pooling", "center_pooled", "unit_pooled"]
        elif metric in ("prompt_entropy", "effective_rank", "participation_ratio", "rankme"):
            names += ["center", "unit"]
        for name in [*names, "states"]:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                tags[name] = int(value) if isinstance(value, bool) else value
        return tags

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if not self.normalizations or not self.drop_first:
            raise InputError(f"{self.name}: expected at least one of normalizations and of drop_first, got none")
        if min(self.drop_first) < 0 or len(set(self.drop_first)) < len(self.drop_first):
            raise InputError(
                f"{self.name}: expected drop_first to be different numbers of at least 0, got {list(self.drop_first)}"
            )
        check_num_halves(self.name, self.num_halves)


class _Run(StatesRun):
    """The value of each prompt by kind, and the pooled vectors."""

    def __init__(self, model: LayeredModel, options: Representation) -> None:
        super().__init__(model, options.states)
        self.options = options

    def values(self, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
        rows = {str(kind): values for kind, values in self.options.of_prompts(hidden, mask).items()}
        return rows | {"pooled": self.options.pooled(hidden, mask)}

    def records(self) -> Iterator[Record]:
        rows = self.joined()
        pooled = rows.pop("pooled")
        values = {Kind.of(name): row for name, row in rows.items()}
        missing = values.pop(MISSING_ANGLES, None)
        for kind, row in values.items():
            tags = kind.tags | self.options.tags(kind.metric)
            yield from _prompt_records(kind.metric, row, tags, missing if kind == CURVATURE else None)
        yield from self.options.dataset_records(pooled)


def _prompt_records(metric: str, values: Tensor, tags: dict[str, Any], missing: Tensor | None) -> Iterator[Record]:
    """Of the values (layers + 1, prompts) of one metric: a record per layer and one of the mean over layers 1..L."""
    missing = torch.zeros_like(values) if missing is None else missing
    for layer, (row, absent) in enumerate(zip(values, missing, strict=True)):
        yield from summarize(metric, row, layer=layer, tags=tags | _count(absent))
    yield from summarize_over_layers(metric, values[1:], tags=tags | _count(missing[1:]))


def _count(missing: Tensor) -> dict[str, int]:
    total = int(missing.sum())
    return {MISSING_ANGLES.metric: total} if total else {}


def _most(normalization: Normalization, n: int, dim: int) -> float:
    """What a value is a share of; 0 where that is nothing."""
    one, rows = torch.ones((), dtype=torch.float64), torch.tensor(n)
    share = divided(
        "dataset_entropy", one, {}, num_rows=rows, dim=dim, normalization=normalization, undefined="nan"
    ).item()
    return 0.0 if math.isnan(share) else 1 / share


Study = Literal["repetition", "randomness", "length"]
STUDIES: tuple[Study, ...] = ("repetition", "randomness", "length")
NORMALIZATIONS: tuple[Normalization, ...] = ("raw", "maxEntropy")
SHORTEST = 8  # of the lengths that are chosen by themselves

Key = tuple[str, float, Normalization, int]  # study, its level, normalization, first tokens left out


@dataclass(kw_only=True)
class PromptStudies(DividedAnalysis):
    """`prompt_entropy` of changed prompts at every layer, and its mean over layers 1..L (no layer), by tag `study`.

    "repetition": each token becomes, with probability `p`, one token that is drawn once from the prompt. "randomness":
    it becomes any token of the vocabulary but the special ones. "length": the first tokens of the prompt alone, as many
    as the tag `length` says; a prompt with fewer is left out. At p = 0 nothing is changed: the control. The tokens
    changed at one p are among those changed at a higher one.

    Values and tags `normalization` and `drop_first` are as in `Representation`. What prompt i becomes depends on (seed,
    study, i) alone. The model runs in float32 or wider.

    Source: Skean et al., arXiv 2502.02013, section 5 and appendix F.

    Args:
        batches: texts as token ids.
        p: probabilities.
        lengths: numbers of tokens; None: 8, 16, 32, ... as far as prompts go.
        studies: some of the three.
        special_tokens: not to be drawn, beside those that the model's config names.
    """

    LEAST: ClassVar = {"seed": 0}

    batches: Batches
    name: str = "prompt_studies"
    studies: tuple[Study, ...] = STUDIES
    p: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    lengths: tuple[int, ...] | None = None
    special_tokens: tuple[int, ...] = ()
    drop_first: tuple[int, ...] = (0, 1)
    states: States = "resid"
    seed: int = 0

    def parts(self, model: LayeredModel) -> Iterator[tuple[int, Batch]]:
        first = 0
        for batch in self.batches:
            yield first, batch
            first += len(batch["input_ids"])

    def of_part(self, model: LayeredModel, part: tuple[int, Batch]) -> dict[Key, Tensor]:
        """Values (layers + 1, prompts)."""
        first, batch = part
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        entropies: dict[Key, Tensor] = {}
        for study in self.studies:
            for level, changed in self._changed(model, study, ids, mask, first):
                entropies |= {(study, level, *kind): rows for kind, rows in self._entropies(model, changed).items()}
        return entropies

    def combine(self, model: LayeredModel, results: list[dict[Key, Tensor]]) -> Iterable[Record]:
        groups: dict[Key, list[Tensor]] = {}
        for result in results:
            for key, values in result.items():
                groups.setdefault(key, []).append(values)
        self._check_lengths({level for study, level, *_ in groups if study == "length"})
        for study, level, normalization, dropped in sorted(groups, key=_place):
            values = torch.cat(groups[study, level, normalization, dropped], dim=1)
            tags: dict[str, Any] = {"study": study, ("length" if study == "length" else "p"): level}
            tags |= {"normalization": normalization, "drop_first": dropped}
            tags |= {"states": self.states} if self.states != "resid" else {}
            if bool(values.isnan().all()):
                continue  # of one token, say, or of two without the first
            yield from summarize_layers("prompt_entropy", values, tags=tags)

    def _changed(
        self, model: LayeredModel, study: Study, ids: Tensor, mask: Tensor, first: int
    ) -> Iterator[tuple[float, Batch]]:
        """The batch at every level of a study."""
        if study == "length":
            counts = mask.sum(-1)
            for length in self.lengths or _powers(int(counts.max())):
                rows = (counts >= length).nonzero().squeeze(-1).tolist()
                if rows:
                    cut = torch.stack([ids[row][mask[row]][:length] for row in rows])
                    yield length, {"input_ids": cut, "attention_mask": torch.ones_like(cut)}
            return
        drawn, others = torch.full(ids.shape, np.inf, dtype=torch.float64), ids.clone()
        allowed = self._ordinary(model) if study == "randomness" else np.empty(0)
        for row in range(len(ids)):
            draw, real = np.random.default_rng([self.seed, STUDIES.index(study), first + row]), ids[row][mask[row]]
            drawn[row, mask[row]] = torch.from_numpy(draw.random(len(real)))
            if study == "repetition":
                others[row, mask[row]] = real[int(draw.integers(len(real)))]
            else:
                others[row, mask[row]] = torch.from_numpy(draw.choice(allowed, len(real)))
        for p in self.p:
            yield p, {"input_ids": torch.where(drawn < p, others, ids), "attention_mask": mask.long()}

    def _entropies(self, model: LayeredModel, batch: Batch) -> dict[tuple[Normalization, int], Tensor]:
        entropies: dict[tuple[Normalization, int], list[Tensor]] = {}

        def look(layer: int, hidden: Tensor, mask: Tensor) -> None:
            hidden = in_convention(model, self.states, layer, hidden)
            for dropped in self.drop_first:
                sets, single = spectrum(hidden, mask, drop_first=dropped), mask.sum(-1) - dropped < 2
                for normalization in NORMALIZATIONS:
                    values = sets.entropy(normalization=normalization, undefined="nan").cpu()
                    entropies.setdefault((normalization, dropped), []).append(
                        values.masked_fill(single.cpu(), torch.nan)
                    )

        model.pass_states(batch, look)
        return {kind: torch.stack(values) for kind, values in entropies.items()}

    def _ordinary(self, model: LayeredModel) -> np.ndarray:
        """The numbers of the vocabulary's tokens without the special ones."""
        special = set(self.special_tokens)
        for name, value in vars(model.model.config).items():
            if name.endswith("_token_id") and value is not None:
                special |= set(value) if isinstance(value, list | tuple) else {value}
        size = model.vocab_size or model.model.config.vocab_size
        ordinary = np.array(sorted(set(range(size)) - special), dtype=np.int64)
        if not len(ordinary):
            raise InputError(f"{self.name}: expected some tokens beside special_tokens, the vocabulary has {size}")
        return ordinary

    def _check_lengths(self, measured: set[float]) -> None:
        if "length" in self.studies and (missing := sorted(set(self.lengths or ()) - measured)):
            raise InputError(f"{self.name}: no prompt has {int(missing[0])} tokens, which lengths asks for")

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if model.family.sees_images:
            raise InputError(f"{self.name}: expected a model of text, got {type(model.model).__name__}")
        for option in ("studies", "p", "drop_first"):
            if not getattr(self, option) or len(set(getattr(self, option))) < len(getattr(self, option)):
                raise InputError(f"{self.name}: expected {option} to be different values, got {getattr(self, option)}")
        if any(not 0 <= p <= 1 for p in self.p):
            raise InputError(f"{self.name}: expected each p to be within 0 and 1, got {list(self.p)}")
        if min(self.drop_first) < 0:
            raise InputError(f"{self.name}: expected drop_first of at least 0, got {list(self.drop_first)}")
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            raise InputError(f"{self.name}: expected lengths of at least 1, got {list(self.lengths)}")


def _powers(most: int) -> list[int]:
    lengths = []
    while (length := SHORTEST * 2 ** len(lengths)) <= most:
        lengths.append(length)
    return lengths


def _place(key: Key) -> tuple:
    study, level, normalization, dropped = key
    return STUDIES.index(study), level, dropped, NORMALIZATIONS.index(normalization)  # pyright: ignore[reportArgumentType]
