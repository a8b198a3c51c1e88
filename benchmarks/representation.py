"""Seconds and peak memory of each number of `Representation` and `Invariance`, for one layer.

    OMP_NUM_THREADS=1 python benchmarks/representation.py           # 512 tokens, 1,000 prompts, 16 views, width 4,096
    OMP_NUM_THREADS=1 python benchmarks/representation.py --quick   # 64 tokens, 50 prompts, 4 views, width 128

Random rows of the right shape, a process for each metric; `--device cuda` keeps the rows on a GPU (singular values are
found on the CPU all the same). Seconds are those of
the process, of a GPU those of the clock; peak memory is what the metric adds to its input.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from rounds import Row, add_options, finish
from torch import Tensor

from lit_layers.functional.entropy import (
    dataset_entropy,
    effective_rank,
    matrix_entropy,
    participation_ratio,
    rankme,
)
from lit_layers.functional.geometry import pool, token_angle, token_curvature
from lit_layers.functional.invariance import LidarSums, dime, infonce

AT_ONCE = 64  # prompts of LiDAR


class Shape(NamedTuple):
    tokens: int
    prompts: int
    views: int
    dim: int


def _lidar(views: Tensor) -> Tensor:
    sums = LidarSums()
    for part in views.split(AT_ONCE):
        sums.update(part)
    return sums.value()


def _released(rows: Tensor) -> Tensor:
    return matrix_entropy(rows, center=True, unit=True, clamp=True, side="smaller")


# name -> (which rows, metric)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    add_options(parser)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=METRICS, help="one metric")
    options = parser.parse_args()
    shape = Shape(64, 50, 4, 128) if options.quick else Shape(512, 1000, 16, 4096)
    rows = []
    for name in [options.only] if options.only else METRICS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool_of_one:
            size, seconds, peak = pool_of_one.submit(measured, name, shape, options.rounds, options.device).result()
        others = {"of": size, "peak MB above it": f"{peak:,.0f}"}
        rows.append(Row(name, seconds, others=others, unit=" s"))
    return finish("representation", rows, options, device=options.device)


def measured(name: str, shape: Shape, rounds: int, device: str) -> tuple[str, list[float], float]:
    """The shape of the input, the seconds of each round and the memory added, in MB."""
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
        began = _clock(device)
        metric(*arguments)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(_clock(device) - began)
    return " x ".join(f"{size:,}" for size in sizes[kind]), seconds, _peak(device) - before


def _clock(device: str) -> float:
    return time.perf_counter() if device.startswith("cuda") else time.process_time()


def _peak(device: str) -> float:
    """MB; Linux counts in KiB, macOS in bytes."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    raise SystemExit(main())
