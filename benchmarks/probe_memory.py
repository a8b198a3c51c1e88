"""Peak memory of probes at all layers on many texts. Features are stored on disk and read one layer at a time.

    OMP_NUM_THREADS=1 python benchmarks/probe_memory.py    # 13 layers x 100,000 texts x 768: 4 GB on disk

The model is a stub that returns random states of the right shape, so the benchmark measures features, probes and scores
but no forward pass. Texts have 20 to 60 words. A round is a separate process.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rounds import Row, add_options, finish

from lit_layers.analyses import Probe
from lit_layers.data import ProbeTask
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.models import LayeredModel, causal_lm

LIMIT_MB = 2048
NUM_CLASSES = 77


class PassesRandomStates(LayeredModel):
    """Model of any width and depth that returns random states."""

    def __init__(self, num_layers: int, dim: int) -> None:
        super().__init__(causal_lm("gpt2", n_embd=8, n_layer=1, n_head=1, n_positions=512, vocab_size=512))
        self._layers, self._dim = num_layers, dim

    @property
    def num_layers(self) -> int:
        return self._layers

    @property
    def dim(self) -> int:
        return self._dim

    def pass_states(self, batch: Any, look: Any) -> None:
        mask = batch["attention_mask"].bool()
        for layer in range(self._layers + 1):
            look(layer, torch.randn(*mask.shape, self._dim), mask)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=13, help="with layer 0")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measured(options)))
        return 0
    command = [sys.executable, __file__, *sys.argv[1:], "--alone"]
    rounds = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(options.rounds)
    ]
    size = options.layers * options.rows * options.dim * 4 / 1e9
    others = {
        "features": f"{size:.1f} GB",
        "before (interpreter, libraries)": f"{statistics.median(each['before'] for each in rounds):,.0f} MB",
        "seconds": f"{statistics.median(each['seconds'] for each in rounds):,.0f}",
    }
    shape = f"{options.layers} layers x {options.rows:,} texts x {options.dim}"
    peaks = [each["peak"] for each in rounds]
    return finish("probe_memory", [Row(shape, peaks, LIMIT_MB, at_most=True, others=others, unit=" MB")], options)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Return the peak memory of this process in MB, its memory before, and the seconds of the probes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = ["a few words of text that nobody reads 0 1 2 3 4 5 6 7 8 9"] * 9
        save_tokenizer(train_bpe(corpus, 280), folder / "tokenizer")
        for split, rows in (("train", options.rows), ("test", 5000)):
            _write(folder / f"{split}.jsonl", split, rows)
        probe = Probe(
            task=ProbeTask("random", str(folder)),
            tokenizer=str(folder / "tokenizer"),
            random_labels=False,
            tolerance=1e-2,
        )
        model = PassesRandomStates(options.layers - 1, options.dim)
        before, began = _peak(), time.perf_counter()
        jobs = probe.jobs(model)
        assert list(jobs.records([job() for job in jobs.calls])), "no numbers"
    return {"before": before, "peak": _peak(), "seconds": time.perf_counter() - began}


def _write(file: Path, split: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(20, 60, (rows,), generator=generator).tolist()
    with open(file, "w", encoding="utf-8") as lines:
        for row, count in enumerate(words):
            lines.write(json.dumps({"text": f"{split} {row} " + "words " * count, "label": row % NUM_CLASSES}) + "\n")


def _peak() -> float:
    """Return the peak memory in MB. Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    raise SystemExit(main())
