"""Share of the download time that prefetching hides behind measuring, in one run on one series.

    OMP_NUM_THREADS=1 python benchmarks/prefetch.py

A local Hub in a separate process serves a series of small random models at a fixed rate. Three ways are timed:

  download    download every checkpoint, one after the other, into an empty cache, without measuring
  measure     run `analyze_series` on the checkpoints in that cache
  together    run `analyze_series` with an empty cache: it downloads the next checkpoint while it measures one

The number of prompts is chosen so that measuring a checkpoint takes about as long as downloading one. The share that
prefetching hides is (download + measure - together) / download. The first of N downloads cannot be hidden. The run ends
with an error if the two measurements differ in any number.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rounds import Row, add_options, finish
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the local Hub is part of the tests

from lit_layers import records
from lit_layers.analyses import Representation, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.data import Batches
from lit_layers.measuring.offline import analyze_series
from lit_layers.models import causal_lm, save
from lit_layers.series import HubRevisions
from tests.support.fake_hub import FakeHub

TARGET = 0.5
VOCABULARY = 1024
WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}


class Prompts(Batches):
    """Random tokens, the same in each iteration."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.ids = torch.randint(1, VOCABULARY, (count, 64), generator=generator)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"input_ids": ids} for ids in self.ids.split(8)])

    def __len__(self) -> int:
        return -(-len(self.ids) // 8)

    def content_hash(self) -> str:
        return f"random-{len(self.ids)}"


def analyses(count: int) -> list[Analysis]:
    return [Trajectory(batches=Prompts(count)), Representation(batches=Prompts(count))]


def make(repository: Path, checkpoints: int) -> float:
    """Write a branch for each checkpoint, and `main`. Return the megabytes of one checkpoint."""
    for step in range(checkpoints):
        model = causal_lm("gpt_neox", seed=step, hidden_size=256, num_attention_heads=4, num_hidden_layers=4,
                          intermediate_size=1024, max_position_embeddings=64, **WORDS)  # fmt: skip
        save(model, repository / f"step{step}")
    save(causal_lm(repository / "step0", seed=checkpoints), repository / "main")
    return (repository / "step0" / "model.safetensors").stat().st_size / 1e6


@contextlib.contextmanager
def served(root: Path, bytes_per_second: float) -> Iterator[None]:
    """Serve the local Hub, and make this process use it as the real Hub."""
    from huggingface_hub import constants

    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(root, bytes_per_second, its), daemon=True
    )
    process.start()
    constants.ENDPOINT = ours.recv()
    constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    try:
        yield
    finally:
        ours.send("done")
        process.join()


def serve(root: Path, bytes_per_second: float, pipe: Any) -> None:
    with FakeHub(root) as hub:
        hub.throttle("_cdn", bytes_per_second)
        pipe.send(hub.url)
        pipe.recv()


@contextlib.contextmanager
def cache(folder: Path) -> Iterator[None]:
    """Set the cache folder of huggingface_hub temporarily.

    The library reads the environment variable only at import.
    """
    from huggingface_hub import constants

    before, constants.HF_HUB_CACHE = constants.HF_HUB_CACHE, str(folder)
    try:
        yield
    finally:
        constants.HF_HUB_CACHE = before


def series() -> HubRevisions:
    found = HubRevisions("lab/series")
    assert all(checkpoint.source.files for checkpoint in found)  # files are listed before the timing starts
    return found


def downloading(folder: Path) -> float:
    with cache(folder):
        checkpoints, since = series(), time.perf_counter()
        for checkpoint in checkpoints:
            checkpoint.fetch()
        return time.perf_counter() - since


def measuring(folder: Path, root: Path, count: int) -> float:
    with cache(folder):
        checkpoints, since = series(), time.perf_counter()
        result = analyze_series(checkpoints, analyses(count), root=root, device="cpu")
        spent = time.perf_counter() - since
    assert not result.failures, result.failures
    return spent


def fitting(folder: Path, root: Path, seconds: float) -> int:
    """Return how many prompts take about `seconds` per checkpoint, from two prompt counts on two checkpoints."""
    few, many = (measuring(folder, root / str(count), count) for count in (16, 80))
    per_prompt = max((many - few) / 64, 1e-6)
    return max(8, round(16 + (seconds - few) / per_prompt))


def numbers(root: Path) -> dict:
    return {(m.step, m.analysis): m.records for m in records.read(root / "measurements.jsonl")}


def main() -> int:
    parser = argparse.ArgumentParser(description="How much of the download time the prefetch hides.")
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--rate", type=float, default=10.0, help="megabytes a second (default: 10)")
    add_options(parser)
    options = parser.parse_args()
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with tempfile.TemporaryDirectory() as name, served(Path(name) / "hub", options.rate * 1e6):
        place = Path(name)
        megabytes = make(place / "hub" / "lab" / "series", options.checkpoints)
        print(f"{options.checkpoints} checkpoints of {megabytes:.1f} MB at {options.rate:g} MB/s", flush=True)
        download = downloading(place / "first")
        count = fitting(place / "first", place / "trial", download)
        rounds = [one_round(place / str(number), count) for number in range(options.rounds)]
    hidden = [100 * (round["download"] + round["measure"] - round["together"]) / round["download"] for round in rounds]
    middle = {part: statistics.median(round[part] for round in rounds) for part in rounds[0]}
    most = min(middle["download"], middle["measure"]) / middle["download"] * (1 - 1 / options.checkpoints)
    others = {f"{part}, s": f"{seconds:.1f}" for part, seconds in middle.items()} | {"possible": f"{most:.0%}"}
    what = f"{options.checkpoints} checkpoints of {megabytes:.1f} MB at {options.rate:g} MB/s, {count} prompts"
    return finish("prefetch", [Row(what, hidden, 100 * TARGET, others=others, unit="%")], options)


def one_round(place: Path, count: int) -> dict[str, float]:
    """Return the seconds of only downloading, of only measuring, and of both together."""
    download = downloading(place / "first")
    measure = measuring(place / "first", place / "alone", count)
    together = measuring(place / "second", place / "together", count)
    if numbers(place / "alone") != numbers(place / "together"):
        sys.exit("the numbers differ")
    return {"download": download, "measure": measure, "together": together}


if __name__ == "__main__":
    raise SystemExit(main())
