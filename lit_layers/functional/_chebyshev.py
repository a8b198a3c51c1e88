"""Leading eigenvectors of J'J by Chebyshev-filtered subspace iteration, each with a proven bound."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lit_layers.functional._certificate import (
    Ritz,
    ceiling,
    miscoupling_bounds,
    nothing_missed,
    rayleigh_ritz,
    vector_errors,
)

MAX_ROUNDS, MAX_DEGREE, MAX_PRODUCTS = 12, 20, 100
# how much more a filter may amplify the first direction than the last wanted one: what exceeds it is lost to rounding
RANGE = {torch.float32: 1e5, torch.float64: 1e11}


class Leading(NamedTuple):
    """Leading right singular vectors (n, dim, count), and how far their left ones and they may be off (n, count).

    The errors are infinite where nothing was proven. `products` counts products of J'J with the block of vectors.
    """

    right: Tensor
    left_errors: Tensor
    right_errors: Tensor
    products: int


class _Plan(NamedTuple):
    """What to do next: a filter of this degree, in float64 if `precise`, and whether it may be the last.

    Out of reach are matrices (n) that would take too many products (`slow`), or whose bound rounding alone forbids
    (`barred`). `worst` (n): how far off the worst vector is, about.
    """

    degree: int
    precise: bool
    last: bool
    slow: Tensor
    barred: Tensor
    worst: Tensor


def starting_block(start: Tensor | None, num: int, dim: int, count: int) -> Tensor:
    """Vectors to start from (num, dim, q) in float32 on the CPU: `start` as far as it goes, else seeded random ones."""
    size = min(dim, count + 1 + max(8, count // 4))
    known = torch.empty(num, dim, 0) if start is None else start[..., :size].float().cpu()
    generator = torch.Generator().manual_seed(0)
    fill = torch.randn(dim, size - known.shape[-1], generator=generator) / math.sqrt(dim)
    return torch.cat([known, fill.expand(num, -1, -1)], -1)


def leading_vectors(gram: Tensor, count: int, tolerance: float, start: Tensor) -> Leading:
    """Of `gram` = J'J (n, dim, dim), float64 and of trace about 1, from the block `start` (n, dim, more than count).

    Each round filters the block with a Chebyshev polynomial that damps [0, its least Ritz value], in float32 as long as
    that is precise enough, and takes Ritz pairs, in float64 from when they may be the last. A matrix is done when the
    miscoupling in all `count` directions is proven to within `tolerance`. Where that would take too many products the
    vectors are those of the whole `gram`, held to the same proof.
    """
    right = gram.new_zeros(len(gram), gram.shape[-1], count)
    errors = gram.new_full((2, len(gram), count), math.inf)
    undecided = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    active = torch.arange(len(gram), device=gram.device)
    worst = gram.new_full((len(gram),), math.inf)

    def prove(grams: Tensor, ritz: Ritz, places: Tensor) -> Tensor:
        split = ceiling(ritz, count)
        found = torch.stack(vector_errors(ritz, split, count))
        proven = miscoupling_bounds(*found)[:, -1] <= tolerance
        if bool(proven.any()):
            proven &= nothing_missed(grams, ritz, split)
            done = places[proven]
            right[done], errors[:, done] = ritz.vectors[proven, :, :count], found[:, proven]
        undecided[places] &= ~proven
        return proven

    grams, rough = gram, gram.float()
    basis = start.to(rough)
    # A proof works on a copy of its own: without `rough` beside it the most that is held is three of `gram`.
    for _ in range(2):  # a random block holds too little of the leading directions to tell where to filter
        basis = torch.linalg.qr(rough @ basis).Q
    products, precise, last = 2, False, False
    for number in range(MAX_ROUNDS):
        if last:
            rough = None
        ritz = _ritz(grams if rough is None else rough, basis)
        products += 1
        going = ~prove(grams, ritz, active) if last else torch.ones_like(active, dtype=torch.bool)
        if not bool(going.any()):
            break
        plan = _plan(ritz, tolerance, worst, precise, count)
        undecided[active] &= ~plan.barred
        going &= ~(plan.slow | plan.barred)
        if not bool(going.any()):
            break
        # after some rounds in any case: products in "float32" may be in TF32
        precise, worst, last = plan.precise or number >= 4, plan.worst, last or plan.last
        if not bool(going.all()):
            active, grams, worst = active[going], grams[going], worst[going]
            ritz, rough = Ritz(*(part[going] for part in ritz)), None
        rough = grams.float() if rough is None else rough
        basis = _filtered(grams if precise else rough, ritz, count, plan.degree)
        products += plan.degree
    rest = undecided.nonzero()[:, 0]
    if len(rest):
        vectors = torch.linalg.eigh(gram[rest]).eigenvectors[..., -start.shape[-1] :]
        prove(gram[rest], rayleigh_ritz(gram[rest], vectors), rest)
    return Leading(right, errors[0], errors[1], products)


def _ritz(gram: Tensor, basis: Tensor) -> Ritz:
    """In float64, from one in float32 for a `gram` in float32: good enough to choose the next filter by."""
    ritz = rayleigh_ritz(gram, torch.linalg.qr(basis.to(gram)).Q)
    if gram.dtype == torch.float64:
        return ritz
    return Ritz(*(part.double() for part in ritz))._replace(rounding=torch.zeros(len(gram)).to(ritz.values.double()))


def _plan(ritz: Ritz, tolerance: float, before: Tensor, precise: bool, count: int) -> _Plan:
    """`before` is what `worst` was a round ago."""
    split = ceiling(ritz, count)
    bound = miscoupling_bounds(*vector_errors(ritz, split, count))[:, -1]
    values = ritz.values[:, :count]
    room = values - split[:, None]
    residuals = torch.linalg.vector_norm(ritz.residuals[..., :count], dim=-2)
    worst, place = (residuals / room).max(-1)
    rate = _growth(ritz, count)[1]
    goal = worst * torch.where(bound.isfinite(), 0.3 * tolerance / bound, 1e-5).clamp(max=0.1)
    stalled = worst > 0.5 * before
    slow = ~((worst / goal).log() <= MAX_PRODUCTS * rate) | (stalled & precise)
    # what rounding alone leaves open, above all ties, once the Ritz values are as exact as they can be
    limit = vector_errors(ritz._replace(residuals=torch.zeros_like(ritz.residuals)), split, count)
    barred = (residuals.square() / room).amax(-1) <= ritz.rounding
    barred &= miscoupling_bounds(*limit)[:, -1] > tolerance
    barred |= ~(values[:, -1] > 1e-12 * values[:, 0])
    # residuals that products in float32 leave, by experience
    noise = (2e-7 * values + 1e-7 / math.sqrt(ritz.vectors.shape[-2]) * values[:, :1]) / room
    noise = noise.gather(-1, place[:, None])[:, 0]
    going = ~(slow | barred)
    precise = precise or bool((worst <= torch.where(stalled, 100, 5) * noise)[going].any())
    degrees = (worst / (goal if precise else goal.maximum(noise))).log() / rate
    degree = max([2.0, *degrees[going].tolist()])
    # the first Ritz values of a random block promise too much
    last = degree <= MAX_DEGREE and bool((bound.isfinite() | before.isfinite())[going].all())
    return _Plan(min(math.ceil(degree), MAX_DEGREE), precise, last, slow, barred, worst)


def _growth(ritz: Ritz, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of what one degree makes of the first and of the last wanted direction, and the interval's end (n)."""
    first, last = ritz.values[:, 0], ritz.values[:, count - 1]
    end = torch.maximum(ritz.values[:, -1], 1e-3 * last)
    return torch.acosh(2 * first / end - 1), torch.acosh(2 * last / end - 1), end


def _filtered(gram: Tensor, ritz: Ritz, count: int, degree: int) -> Tensor:
    """The Ritz vectors filtered by Chebyshev polynomials of this degree in all, in the precision of `gram`."""
    first, last, end = _growth(ritz, count)
    spread = math.log(RANGE[gram.dtype]) / (first - last).clamp(min=1e-9)
    most = max(2, int(spread.min().clamp(max=degree)))
    mapped = gram * (2 / end).to(gram)[:, None, None]  # [0, end] to [-1, 1]
    mapped.diagonal(dim1=-2, dim2=-1).sub_(1)
    basis = ritz.vectors.to(gram)
    for done in range(0, degree, most):
        basis = torch.linalg.qr(basis).Q if done else basis
        before, basis = basis, mapped @ basis
        for _ in range(min(most, degree - done) - 1):
            before, basis = basis, torch.baddbmm(before, mapped, basis, beta=-1, alpha=2)
    return basis / torch.linalg.vector_norm(basis, dim=-2, keepdim=True)
