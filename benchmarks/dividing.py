"""How evenly two processes share a checkpoint's measuring: CPU seconds of each, dealt in a fixed order and by seconds.

    OMP_NUM_THREADS=1 python benchmarks/dividing.py

The analyses of recipes/analyses/text.yaml on fewer and shorter random texts and a small GPT-2. "Fixed order" is what
was done before: every second part of an analysis to the second process, and the whole of the probe to one. Both ways
have to give the numbers of one process; the balance is the slower process over the mean of both, 1 at best.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from measuring_pass import Windows
from rounds import Row, add_options, finish, ratios
from torch import distributed, multiprocessing

from lit_layers.analyses import Coupling, Lens, NextTokenProbe, Representation, Trajectory
from lit_layers.analyses.base import Analysis, StagedAnalysis
from lit_layers.measuring.one_model import in_one_pass
from lit_layers.models.build import weights_hash
from lit_layers.models.shared_pass import SharedPass
from lit_layers.training.rank_assignment import Ranks

RANKS = 2
WANTED = 1.1  # the slower process over the mean


class InFixedOrder(Ranks):
    """As before parts were dealt by seconds."""

    def _assigned(
        self, view: SharedPass, due: Mapping[str, Any], failed: Container[str], stage: int
    ) -> tuple[list[dict[str, Container[int]]], list[str]]:
        _, staged = super()._assigned(view, due, failed, stage)
        is_whole = {name: stage > 0 or isinstance(analysis, StagedAnalysis) for name, analysis in due.items()}
        return [
            {
                name: (range(1000 if rank == 0 else 0) if is_whole[name] else range(rank, 1000, self.size))
                for name in due
            }
            for rank in range(self.size)
        ], staged


def analyses_of(options: argparse.Namespace) -> list[Analysis]:
    def windows(count: int, tokens: int, size: int, seed: int) -> Windows:
        return Windows(options.vocabulary, count, tokens, size, seed)

    text = windows(options.sequences, 64, 4, 0)
    train, test = windows(options.probe_texts, 32, 50, 2), windows(options.probe_texts // 3, 32, 50, 3)
    return [
        Trajectory(batches=text),
        Representation(batches=text),
        Lens(batches=text),
        Coupling(batches=windows(8, 32, 1, 1), k=(4, 12, 32)),
        NextTokenProbe(train=train, test=test, num_classes=50, positions_per_sequence=2, estimator="watch"),
    ]


def process(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measures in both ways, and on rank 0 alone; leaves its CPU seconds by way."""
    import transformers

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    size = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, vocab_size=options.vocabulary)).eval()
    analyses = analyses_of(options)
    facts: dict[str, Any] = {"run": "run", "step": 0, "weights_hash": weights_hash(model), "kept_mb": 256}
    group = distributed.group.WORLD

    def alone(*given: Any, **facts: Any) -> list[Any]:
        return list(in_one_pass(*given, **facts)) if rank == 0 else []

    ways = {"alone": alone, "fixed order": InFixedOrder(group).measure, "by seconds": Ranks(group).measure}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    values: dict[str, list[float]] = {}
    for _ in range(1 + options.rounds):  # what is loaded at first use is no part, and there are no seconds yet
        for way, measure in ways.items():
            distributed.barrier()
            started = time.process_time()
            measurements = measure(model, analyses, lambda analysis: None, **facts)
            seconds[way].append(time.process_time() - started)
            assert not any(each.error for each in measurements), [each.error for each in measurements]
            values[way] = [record.value for each in measurements for record in each.records]
            expected, actual = torch.tensor(values["alone"]), torch.tensor(values[way])
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    Path(folder, f"{rank}.json").write_text(json.dumps({way: each[1:] for way, each in seconds.items()}))
    distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 6, "width": 128, "vocabulary": 1024, "sequences": 32, "probe-texts": 600}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(process, (options, folder), nprocs=RANKS)
        of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    one, rows = of_ranks[0]["alone"], []
    for way, target in (("fixed order", None), ("by seconds", WANTED)):
        both = list(zip(*(of_rank[way] for of_rank in of_ranks), strict=True))
        slower, mean = [max(each) for each in both], [statistics.mean(each) for each in both]
        rows.append(Row(f"{way}: slower process over the mean", ratios(slower, mean), target, at_most=True))
        rows.append(Row(f"{way}: slower process over one process alone", ratios(slower, one)))
    rows.append(Row("one process alone", one, unit=" s"))
    return finish("dividing", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
