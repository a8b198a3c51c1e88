"""Time and peak memory of each number of `Representation` and `Invariance`, for one layer.

    OMP_NUM_THREADS=1 python benchmarks/representation.py --compared  # time of plain numpy and torch over ours
    OMP_NUM_THREADS=1 python benchmarks/representation.py           # 512 tokens, 1,000 prompts, 16 views, width 4,096
    OMP_NUM_THREADS=1 python benchmarks/representation.py --quick   # 64 tokens, 50 prompts, 4 views, width 128

The input is random rows of the right shape, with a separate process for each metric. `--device cuda` puts the rows on a
GPU. Seconds are process time on a CPU and wall time on a GPU. Peak memory is the memory that the metric adds to its
input. Both sides of a comparison take turns, and their results must be equal.
"""

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import torch
from rounds import Row, add_options, clock, finish, ratios
from torch import Tensor

from lit_layers.functional.curves import bootstrap_interval
from lit_layers.functional.entropy import (
    LidarSums,
    dataset_entropy,
    dime,
    effective_rank,
    infonce,
    lidar,
    matrix_entropy,
    participation_ratio,
    rankme,
    singular_values,
)
from lit_layers.functional.geometry import pool, token_angle, token_curvature

CHUNK = 64  # prompts per chunk of LiDAR


class Shape(NamedTuple):
    tokens: int
    prompts: int
    views: int
    dim: int


def _lidar(views: Tensor) -> Tensor:
    sums = LidarSums()
    for part in views.split(CHUNK):
        sums.update(part)
    return lidar(sums)


def _released(rows: Tensor) -> Tensor:
    return matrix_entropy(rows, center=True, unit=True, clamp=True, side="smaller")


# name -> (kind of rows, metric)
METRICS: dict[str, tuple[str, Callable[..., Any]]] = {
    "prompt_entropy": ("tokens", matrix_entropy),
    "prompt_entropy, released_code": ("tokens", _released),
    "effective_rank": ("tokens", effective_rank),
    "rankme": ("tokens", rankme),
    "participation_ratio": ("tokens", participation_ratio),
    "token_curvature": ("tokens", token_curvature),
    "token_angle": ("tokens", token_angle),
    "pooling, mean": ("tokens", pool),
    "dataset_entropy": ("pooled", dataset_entropy),
    "infonce": ("pairs", infonce),
    "dime": ("pairs", dime),
    "lidar": ("views", _lidar),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def states(prompts: int, tokens: int, dim: int) -> Tensor:
    """Return random states whose singular values fall from 1 to 5e-4, as in a trained encoder on 256 tokens."""
    size = min(tokens, dim)
    left, right = torch.linalg.qr(random(prompts, tokens, size))[0], torch.linalg.qr(random(prompts, dim, size))[0]
    return left * torch.logspace(0, -3.3, size, dtype=torch.float64) @ right.mT


def svd_by_numpy(rows: Tensor) -> Tensor:
    tall = rows if rows.shape[-2] >= rows.shape[-1] else rows.mT
    return torch.from_numpy(np.linalg.svd(tall.numpy(), compute_uv=False))


def gathered(values: Tensor) -> Tensor:
    rows = torch.randint(len(values), (2000, len(values)), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return torch.stack([column[rows].mean(1).quantile(ends) for column in values.unbind(1)], dim=1)


def entropy(values: np.ndarray) -> float:
    shares = values[values > 1e-15 * values.max()] / values.sum()
    return -(shares * np.log(shares)).sum()


def plain_lidar(views: Tensor) -> Tensor:
    array = views.numpy()
    (num_prompts, num_views, dim), means = array.shape, array.mean(1)
    residuals, between = (array - means[:, None]).reshape(-1, dim), (means - means.mean(0)).T / len(means) ** 0.5
    within = residuals.T @ residuals / (num_prompts * num_views) + 1e-4 * np.eye(dim)
    whitened = scipy.linalg.solve_triangular(np.linalg.cholesky(within), between, lower=True)
    smaller = whitened.T @ whitened if num_prompts < dim else whitened @ whitened.T
    return torch.tensor(entropy(np.linalg.eigvalsh(smaller)))


def plain_dime(pairs: Tensor, orders: Tensor) -> Tensor:
    units = (pairs / pairs.norm(dim=-1, keepdim=True)).numpy()
    first, second = units[0] @ units[0].T, units[1] @ units[1].T
    shuffled = [entropy(np.linalg.eigvalsh(first * second[np.ix_(order, order)])) for order in orders.numpy()]
    return torch.tensor(np.mean(shuffled) - entropy(np.linalg.eigvalsh(first * second)))


def comparisons(rounds: int) -> list[Row]:
    """Return rows of the time of a plain implementation, or of an earlier version, over ours."""
    ways: list[tuple[str, str, float, Callable[[], Tensor], Callable[[], Tensor]]] = []
    for shape in ((8, 256, 768), (2, 1024, 768)):
        rows, name = states(*shape), f"singular values, {shape[1]} x {shape[2]}"
        ways.append(
            (name, "numpy's SVD (before)", 1.7, lambda r=rows: svd_by_numpy(r), lambda r=rows: singular_values(r))
        )
        ways.append(
            (name, "torch's svdvals", 1.7, lambda r=rows: torch.linalg.svdvals(r), lambda r=rows: singular_values(r))
        )
    for num in (128, 1001):
        values, name = random(num, 13), f"intervals of 13 layers, {num:,} prompts"
        ours = lambda v=values: torch.stack(bootstrap_interval(v))  # noqa: E731
        ways.append((name, "a gather for each (before)", 5.0, lambda v=values: gathered(v), ours))
    for dim in (256, 512, 1024):
        views = random(200, 1, dim) + 0.5 * random(200, 8, dim)
        ways.append(
            (
                f"LiDAR, 200 x 8 x {dim}",
                "numpy and scipy",
                1.0,
                lambda v=views: plain_lidar(v),
                lambda v=views: lidar(v),
            )
        )
    for num in (200, 500):
        pairs, orders = random(2, num, 768), torch.stack([torch.randperm(num) for _ in range(10)])
        ours = lambda p=pairs, o=orders: dime(*p, permutations=o)  # noqa: E731
        ways.append((f"DiME of 10 orders, {num} x 768", "numpy", 1.0, lambda p=pairs, o=orders: plain_dime(p, o), ours))
    table = []
    for name, peer, target, theirs, ours in ways:
        if not torch.allclose(theirs(), ours(), rtol=1e-7, atol=1e-10):
            raise SystemExit(f"{name}: {peer} and ours are not the same number")
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for seconds, way in zip(times, (theirs, ours), strict=True):
                began = clock()
                way()
                seconds.append(clock() - began)
        others = {"over": peer, "ours": f"{sorted(times[1])[rounds // 2] * 1e3:.1f} ms"}
        table.append(Row(name, ratios(*times), target, others=others))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    add_options(parser)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=METRICS, help="one metric")
    parser.add_argument("--compared", action="store_true", help="with plain routes and those of former versions")
    options = parser.parse_args()
    if options.compared:
        return finish("representation", comparisons(options.rounds), options)
    shape = Shape(64, 50, 4, 128) if options.quick else Shape(512, 1000, 16, 4096)
    rows = []
    for name in [options.only] if options.only else METRICS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool_of_one:
            size, seconds, peak = pool_of_one.submit(measured, name, shape, options.rounds, options.device).result()
        others = {"of": size, "peak MB above it": f"{peak:,.0f}"}
        rows.append(Row(name, seconds, others=others, unit=" s"))
    return finish("representation", rows, options, device=options.device)


def measured(name: str, shape: Shape, rounds: int, device: str) -> tuple[str, list[float], float]:
    """Return the shape of the input, the seconds of each round and the added memory in MB."""
    kind, metric = METRICS[name]
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "tokens": (shape.tokens, shape.dim),
        "pooled": (shape.prompts, shape.dim),
        "pairs": (2, shape.prompts, shape.dim),
        "views": (shape.prompts, shape.views, shape.dim),
    }
    rows = torch.randn(sizes[kind], generator=generator).to(device)
    arguments = rows.unbind(0) if kind == "pairs" else (rows,)
    before, seconds = _peak(device), list[float]()
    for _ in range(rounds):
        began = clock(device)
        metric(*arguments)
        seconds.append(clock(device) - began)
    return " x ".join(f"{size:,}" for size in sizes[kind]), seconds, _peak(device) - before


def _peak(device: str) -> float:
    """Return the peak memory in MB. Linux counts in KiB, macOS in bytes."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    raise SystemExit(main())
