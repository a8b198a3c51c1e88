"""Coupling of blocks over depth: which singular directions their Jacobians share, and how linear the blocks are."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Rows, Values
from lit_layers.analyses.statistics import Sample, TagDict, Tags, missing_tag, summarize_all
from lit_layers.analyses.token_jacobians import (
    check_pairs,
    direction_counts,
    finite_or_zero,
    gap_records,
    same_token_jacobians,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional import coupling as functional
from lit_layers.functional.coupling import (
    Factors,
    compressions,
    inverse_norm_line,
    linearized_rollout,
    singular_factors,
)
from lit_layers.functional.jacobian.atlas import JacobianShape, jacobian_shape
from lit_layers.functional.jacobian.block_jacobians import block_jacobian, token_positions
from lit_layers.models.view import Batch, LayeredModel, Trajectory, convert_states, evenly_spread, final_norm
from lit_layers.records import Record

# Position of each named token. "mean_patch" is left out because it means several tokens.
TOKENS = {"last": -1, "first": 0, "cls": 0, "last_patch": -1}
SHAPE = tuple(f"jacobian_{field}" for field in JacobianShape._fields[:-1])  # all but the residual


@dataclass(kw_only=True)
class Coupling(Analysis):
    """Coupling of the blocks over depth at one token, with its random baseline and the blocks' singular values.

    The coupling of a pair of blocks compares the Jacobian of the first block's residual branch with the K leading
    singular vectors (the bases) of the second block's Jacobian. For each number K of directions (tag `k`):

    - `coupling`, the mean over pairs of different blocks, and `coupling_with_diagonal`, the mean over all pairs;
    - `coupling_by_distance`, the mean over pairs whose blocks are `distance` (tag) apart;
    - `coupling_pair`, the value of one pair: `layer` is its first block, and `other_layer` gives the bases;
    - `random_coupling`, expected for unrelated bases, and `excess_coupling` (0 if unrelated, 1 if shared);
    - `min_gap`, the smallest gap between neighbours among the K + 1 largest singular values, relative to the largest;
    - `num_tied`, the number of Jacobians whose gap is below 1e-4, so that their directions are not well determined.

    Per layer: `singular_value` (tag `index`), `jacobian_norm` and `linearized_rollout`, the cosine of the token's state
    with the state that linearized blocks reach. Over depth: `spectrum_slope` and `spectrum_r_squared`. They describe a
    line fitted over depth to the reciprocal of the largest singular value of each block's Jacobian.

    Six metrics per layer describe the shape of the block's Jacobian (see `functional.jacobian.atlas.jacobian_shape`):
    `jacobian_non_normality`, `jacobian_symmetric_share`, `jacobian_effective_rank`, and `jacobian_leading_eigenvalue`,
    which is relative to the largest singular value. `jacobian_eigenvector_output_cosine` and
    `jacobian_eigenvector_input_cosine` compare its eigenvector with the leading singular directions. The eigenvalue and
    the cosines are undefined for prompts whose iteration did not converge (tag `num_undefined`). Their means then cover
    only prompts whose leading eigenvalue stands out. The iteration converged for all 156 Jacobians of two trained
    models (widths 128 and 576), and for 25 of 32 of an untrained GPT-2 of width 768. With `states="hf"`, the cosines
    are undefined at the last block, because its Jacobian has no single leading eigenvector after the final norm.

    An integer in `k` is a number of directions; a float is a share of the width. `token` is a position among the real
    tokens. With `token="mean_patch"`, every metric is computed at `num_patches` evenly spread patches of an image (None
    means all patches) and averaged over them. Jacobians are not averaged. The first `num_prompts` prompts are measured.
    With `states="hf"`, the last block includes the final norm.

    Preset "released_code" does what the authors' code does. For text, `k` is 10, 30 and 50, `sign` is "absolute" and
    `states` is "hf". For images, `k` and `sign` are the same, and only the last patch of the first image is measured,
    without the final norm. The authors' script for images ran its model with drop-path on; here it is always off.

    A pair that contains a zero or non-finite Jacobian is undefined, and so are the means over pairs or blocks that
    include it, for that prompt. `num_undefined_pairs` and `num_undefined_blocks` count undefined pairs and blocks over
    all prompts.

    With the default norm (`p=2`), the value of a pair differs by at most 1e-3 from the value with exact singular
    vectors, unless `num_tied` is above 0.

    Source: definitions and departures as in `lit_layers.functional.coupling`.
    """

    LEAST: ClassVar = {"p": 1, "num_singular_values": 1, "fit_from": 1}
    # The options with which the authors' code departs from our defaults.
    PRESETS: ClassVar = {
        "released_code": {"k": (10, 30, 50), "sign": "absolute", "states": "hf", "fit_from": 10, "skip_last": True}
    }

    batches: Batches
    name: str = "coupling"
    k: tuple[int | float, ...] = (0.05, 0.1, 0.25)
    p: float = 2.0
    sign: Literal["signed", "absolute"] = "signed"
    token: int | Literal["last", "first", "cls", "last_patch", "mean_patch"] = "last"
    num_patches: int | None = 16
    num_prompts: int = 8
    num_singular_values: int = 15
    fit_from: int = 1
    skip_last: bool = False
    states: Literal["resid", "hf"] = "resid"
    preset: Literal["released_code"] | None = None

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        direction_counts(self.name, self.resolved(model).k, model)
        is_image, token = model.family.sees_images, self.token
        if (token == "mean_patch" and not is_image) or (token == "cls" and is_image and not model.has_class_token):
            raise InputError(f"{self.name}: {type(model.model).__name__} has no {token}: choose another token")

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        # Largest number of Jacobian entries in memory at once. In float32 they take 32 MB on a CPU (one prompt of GPT-2
        # small, 12 x 768 x 768) and 1 GB on a GPU (37 prompts).
        entries = 2**28 if model.device.type == "cuda" else 2**23
        at_once = max(1, entries // (model.num_layers * model.dim**2 * len(self.tokens(model))))
        return {"batches": Rows(self.batches, limit=self.num_prompts, at_once=at_once)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return _Blocks(self, seen).values()

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        num_tokens = len(self.tokens(model))
        samples: list[Sample | Record] = []
        for i, count in enumerate(direction_counts(self.name, self.k, model)):
            samples += _pair_samples(batches, i, {"k": count}, num_tokens)
        samples += _block_samples(batches, self.fit_from, num_tokens)
        yield from summarize_all(samples)

    def preset_options(self, preset: str, model: LayeredModel) -> dict[str, Any]:
        """Return the options that a preset sets.

        For images, "released_code" measures the last patch of the first image, without the final norm. The published
        script of Aubry et al. does the same.
        """
        image_options = {"states": "resid", "token": "last_patch", "num_prompts": 1}
        return {**self.PRESETS[preset], **(image_options if model.family.sees_images else {})}

    def tokens(self, model: LayeredModel) -> list[int]:
        """Return the positions that each metric of a prompt is averaged over: one token, or several patches."""
        if self.token != "mean_patch":
            return [TOKENS[self.token] if isinstance(self.token, str) else self.token]
        side = next(iter(self.batches))["pixel_values"].shape[-1]
        first, patches = model.num_prefix_tokens, model.num_patches(side)
        return evenly_spread(first, first + patches - 1, patches if self.num_patches is None else self.num_patches)


class _Blocks:
    """The Jacobians of all blocks on one batch, held in memory together."""

    def __init__(self, options: Coupling, trajectory: Trajectory) -> None:
        model = trajectory.model
        self.model, self.options, self.trajectory = model, options, trajectory
        self.counts = direction_counts(options.name, options.k, model)
        self.top = min(options.num_singular_values, model.dim)
        # one direction more than the largest K, which min_gap needs
        self.num_factors = min(max(self.counts[-1] + 1, self.top), model.dim)
        self.tokens = options.tokens(model)
        self.positions = token_positions(self.tokens, trajectory.mask)

    def values(self) -> dict[str, Tensor]:
        """Return the values that the records need, one row per block, in float64 on the CPU.

        The last dimension runs over the tokens of the first prompt, then over those of the second, and so on.
        """
        rows = defaultdict[str, list[Tensor]](list)
        jacobians, all_factors = list[Tensor](), list[Factors]()
        carried = self._token_states(self.trajectory.hidden[0]).double()
        for layer in range(1, self.model.num_layers + 1):
            jacobian = self._jacobian(layer)
            cosines, carried = self._carry(layer, jacobian, carried)
            finite, factors, of_block = self._factors_and_values(jacobian)
            if self.options.states == "hf" and layer == self.model.num_layers and final_norm(self.model) is not None:
                # LayerNorm's Jacobian has the eigenvalue 0 twice, so J has -1 twice, with a plane of eigenvectors.
                of_block |= {name: torch.full_like(of_block[name], math.nan) for name in SHAPE[-2:]}
            jacobians.append(finite)
            all_factors.append(factors)
            _append(rows, {**of_block, "rollout": cosines})
        bases = Factors(*(torch.stack(each, 1) for each in zip(*all_factors, strict=True)))
        undefined = torch.stack(rows["undefined"], 1).bool().to(bases.left.device)  # (prompts, blocks)
        for i, jacobian in enumerate(jacobians):
            _append(rows, self._coupling_row(i, jacobian, bases, undefined))
        return {name: torch.stack(blocks) for name, blocks in rows.items()}

    def _factors_and_values(self, jacobian: Tensor) -> tuple[Tensor, Factors, dict[str, Tensor]]:
        """Return a block's Jacobians, their leading singular vectors and values, and the values for the records.

        Jacobians that are not finite are replaced by zeros.
        """
        options = self.options
        finite, undefined = finite_or_zero(jacobian)  # undefined: (prompts,)
        broken = ~jacobian.isfinite().all(-1).all(-1)
        factors = functional.singular_factors(finite, self.num_factors)
        norms = torch.linalg.matrix_norm(finite.to(factors.left.dtype))
        how: dict[str, Any] = {"dim": self.model.dim, "p": options.p, "sign": options.sign, "undefined": "nan"}
        random, gaps = list[Tensor](), list[Tensor]()
        for count in self.counts:
            random.append(functional.random_miscoupling_from_norms(factors.values[..., :count], norms, **how))
            gaps.append(functional.min_gap(factors.values, k=count))
        values = {
            "random": torch.stack(random).masked_fill(undefined, math.nan),
            "gaps": torch.stack(gaps).masked_fill(undefined, math.nan),
            "values": factors.values[..., : self.top].masked_fill(broken[:, None], math.nan).T,
            "norms": norms.masked_fill(broken, math.nan),
            "undefined": undefined,
        }
        values |= zip(SHAPE, jacobian_shape(finite, factors, undefined="nan")[:-1], strict=True)
        return finite, factors, values

    def _coupling_row(self, i: int, jacobian: Tensor, bases: Factors, undefined: Tensor) -> dict[str, Tensor]:
        """Return the miscoupling, 1 - coupling, of block `i` (from 0) in the bases of every block."""
        no_direction = undefined[:, i]
        rows = functional.miscoupling_of_factors(
            jacobian.masked_fill(no_direction[:, None, None], 0)[:, None].to(bases.left.dtype),
            bases.values[:, i, None],
            bases,
            k=self.counts,
            p=self.options.p,
            sign=self.options.sign,
            undefined="nan",
        )
        # Set pairs with an undefined Jacobian to NaN, because a zero Jacobian has no directions.
        rows = rows[:, :, 0].masked_fill(no_direction[:, None] | undefined, math.nan)  # (k, prompts, blocks)
        return {"miscoupling": rows.movedim(1, -1)}

    def _token_states(self, hidden: Tensor) -> Tensor:
        prompts = torch.arange(len(self.positions))[:, None]
        return hidden[prompts, self.positions].flatten(0, 1)  # (prompts x tokens, dim)

    def _jacobian(self, layer: int) -> Tensor:
        """Return the Jacobian of a block from each measured token to itself, (prompts x tokens, dim, dim).

        With `states="hf"`, the last block includes the final norm.
        """
        block, before, mask = self.trajectory.block(layer), self.trajectory.hidden[layer - 1], self.trajectory.mask
        jacobian = block_jacobian(block, before, out_tokens=self.tokens, mask=mask).flatten(0, 1)
        norm = final_norm(self.model)
        if self.options.states == "resid" or norm is None or layer < self.model.num_layers:
            return jacobian
        # Treat each token as a prompt of its own, as the norm acts on each token separately.
        last = self._token_states(self.trajectory.hidden[layer])[:, None]
        outer = block_jacobian(norm, last, residual=False)
        # The result is d norm(x + f(x)) / dx - I by the chain rule, where f is the residual branch of the last block.
        return outer @ jacobian + outer - torch.eye(self.model.dim).to(outer)

    def _carry(self, layer: int, jacobian: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the vectors `carried` by I + J, with the block's Jacobian J (see `linearized_rollout`).

        Returns:
            The cosines between the products and the model's states after the block, and the products.
        """
        is_last = layer == self.model.num_layers
        after = convert_states(self.model, self.options.states, layer, self.trajectory.hidden[layer])
        states = torch.stack([carried, self._token_states(after).double()])
        skip = self.options.skip_last and is_last
        cosines = linearized_rollout(jacobian[None], states, skip_last=skip, undefined="nan")[0]
        return cosines, carried + (jacobian.double() @ carried[..., None])[..., 0]


def _append(rows: dict[str, list[Tensor]], values: dict[str, Tensor]) -> None:
    for name, row in values.items():
        rows[name].append(row.double().cpu())


def _pair_samples(by_name: dict[Any, Tensor], i: int, tags: Tags, tokens: int) -> Iterator[Sample | Record]:
    """Yield the samples for the `i`-th number K of directions.

    They are the coupling of each pair of blocks, and its means over pairs of blocks within each prompt.
    """
    pairs = 1 - by_name["miscoupling"][:, i].movedim(-1, 0)  # (prompts, blocks, blocks)
    random = by_name["random"][:, i].T  # (prompts, blocks)
    excess = functional.excess_coupling(1 - pairs, random)
    depth = torch.arange(pairs.shape[-1])
    distances = (depth[:, None] - depth).abs()
    different = distances > 0
    for metric, values, chosen in (
        ("coupling", functional.mean_off_diagonal(pairs), different),
        ("excess_coupling", functional.mean_off_diagonal(excess), different),
        ("coupling_with_diagonal", pairs.nanmean((1, 2)), different | ~different),
    ):
        yield _complete_means(metric, values, pairs[:, chosen], "pairs", tags, tokens)
    yield _complete_means("random_coupling", (1 - random).nanmean(1), random, "blocks", tags, tokens)
    for distance, values in enumerate(functional.mean_by_distance(pairs).T):
        where = {**tags, "distance": distance}
        yield _complete_means("coupling_by_distance", values, pairs[:, distances == distance], "pairs", where, tokens)
    for block, row in enumerate(pairs.movedim(0, -1), start=1):
        for other, values in enumerate(row, start=1):
            yield _means("coupling_pair", values, layer=block, other_layer=other, tags=tags, tokens=tokens)
    gaps = by_name["gaps"][:, i]
    defined = ~gaps.isnan()
    counted = {**tags, **missing_tag("blocks", ~defined)}
    yield from gap_records(gaps[defined], defined.shape[-1] // tokens, counted)


def _block_samples(by_name: dict[Any, Tensor], fit_from: int, tokens: int) -> Iterator[Sample]:
    blocks = len(by_name["norms"])
    for block in range(blocks):
        yield _means("jacobian_norm", by_name["norms"][block], layer=block + 1, tokens=tokens)
        yield _means("linearized_rollout", by_name["rollout"][block], layer=block + 1, tokens=tokens)
        for metric in SHAPE:
            yield _means(metric, by_name[metric][block], layer=block + 1, tokens=tokens)
        for index, values in enumerate(by_name["values"][block], start=1):
            yield _means("singular_value", values, layer=block + 1, tags={"index": index}, tokens=tokens)
    yield _means("linearized_rollout", by_name["rollout"][-1], tokens=tokens)
    if blocks - fit_from + 1 >= 3:
        slope, _, r_squared = inverse_norm_line(by_name["values"][:, 0].T, fit_from, undefined="nan")
        yield _means("spectrum_slope", slope, tokens=tokens)
        yield _means("spectrum_r_squared", r_squared, tokens=tokens)


def _complete_means(metric: str, means: Tensor, members: Tensor, kind: str, tags: Tags, tokens: int) -> Sample:
    """Return the sample of `means` (prompts,), each a mean over pairs of blocks or over blocks.

    `members` (prompts, pairs or blocks) are the averaged values. If one of them is NaN for a prompt, the mean of this
    prompt is undefined.
    """
    nans = members.isnan()
    return _means(metric, means.masked_fill(nans.any(1), math.nan), tokens, tags={**tags, **missing_tag(kind, nans)})


def _means(metric: str, values: Tensor, tokens: int, *, tags: Tags | None = None, **kw: Any) -> Sample:
    """Return the mean over the measured tokens of each prompt, as a `Sample`. Undefined tokens are left out.

    `values` (prompts x tokens,) holds the `tokens` values of the first prompt, then those of the second, and so on.
    """
    values = values.unflatten(0, (-1, tokens))
    counts = missing_tag("tokens", values.isnan()) if tokens > 1 else {}
    return Sample(metric, values.nanmean(1), tags={**(tags or {}), **counts}, **kw)


@dataclass(kw_only=True)
class CouplingMatrices(Analysis):
    """The matrices behind coupling, at the last token: the Jacobian of one block in the bases of another.

    For the Jacobians J1 and J2 of a pair of blocks, the matrix is A = U' J1 V, where U and V are the K leading singular
    vectors of J2. The metric `compression` has one record per entry of A. The record's `layer` is the block of J1, its
    `other_layer` the block of J2. Tags are `row` and `column` (1..K, in the order of J2's singular values), `k` and
    `prompt` (from 1). A diagonal matrix of J1's singular values means full coupling, a matrix of noise no coupling.

    The largest entry of each column of U is made positive, so that signs do not differ between runs on equal weights.
    Signs of different prompts are unrelated, so matrices are not averaged. A pair with a zero or non-finite Jacobian
    has no records.

    An integer `k` is a number of directions; a float is a share of the width. Each pair and prompt has K^2 records.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", eq. 6 and the
    figures of its section 4.
    """

    batches: Batches
    pairs: list[tuple[int, int]]
    name: str = "coupling_matrices"
    k: int | float = 30
    num_prompts: int = 1

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        check_pairs(self.name, self.pairs, model.num_layers)
        direction_counts(self.name, [self.k], model)

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"batches": Rows(self.batches, limit=self.num_prompts, at_once=1)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return a dict from each pair of blocks to its matrix A (k, k, 1), which is NaN if undefined."""
        count = functional.num_directions(self.k, seen.model.dim)
        blocks = sorted({block for pair in self.pairs for block in pair})
        jacobians = torch.cat([same_token_jacobians(seen, block, [-1]) for block in blocks])  # (blocks, dim, dim)
        jacobians, undefined = finite_or_zero(jacobians)
        factors = singular_factors(jacobians, count)
        jacobians = jacobians.to(factors.left.dtype)
        largest = factors.left.gather(-2, factors.left.abs().argmax(-2, keepdim=True)).sign()
        factors = factors._replace(left=factors.left * largest, right=factors.right * largest)
        index_of = {block: index for index, block in enumerate(blocks)}
        matrices = {}
        for layer, other in self.pairs:
            first, second = index_of[layer], index_of[other]
            bases = Factors(*(each[[second]] for each in factors))
            (matrix,) = compressions(jacobians[[first]], bases, count=count)
            is_undefined = bool(undefined[first] or undefined[second])
            matrix = matrix.movedim(0, -1).double().cpu()
            matrices[layer, other] = torch.full_like(matrix, math.nan) if is_undefined else matrix
        return matrices

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        for prompt in range(self.num_prompts):
            for (layer, other), matrices in batches.items():
                if prompt < matrices.shape[-1] and not matrices[..., prompt].isnan().any():
                    yield from self._entries(matrices[..., prompt], layer, other, prompt + 1)

    def _entries(self, matrix: Tensor, layer: int, other: int, prompt: int) -> Iterator[Record]:
        for row, entries in enumerate(matrix.tolist(), start=1):
            for column, value in enumerate(entries, start=1):
                tags: TagDict = {"row": row, "column": column, "k": len(matrix), "prompt": prompt}
                yield Record(metric="compression", value=value, layer=layer, other_layer=other, tags=tags)
