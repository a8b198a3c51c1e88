"""What cutting a model saves: the whole, its trunk without a head, and its first blocks, measured in one run.

    OMP_NUM_THREADS=1 python benchmarks/truncation.py               # GPT-2 small, random, cut at 9, 6, 3
    OMP_NUM_THREADS=1 python benchmarks/truncation.py --layers 4 --model FOLDER

Rounds alternate between the models; memory is that of a process for each. `--check` exits with 1 where the time of a
cut is a larger share of the whole model's than its share of the blocks.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from lit_layers.models import LayeredModel, causal_lm, load, save, truncate
from lit_layers.models.costs import Cost, measure_costs
from lit_layers.select import cost_table, measured_on

NOISE = 1.1  # of a median on a machine that others use


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder (default: GPT-2 small, random)")
    parser.add_argument("--layers", type=int, nargs="+", default=[9, 6, 3], help="blocks to keep (default: 9 6 3)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    model = load(options.model) if options.model else causal_lm("gpt2").eval()
    num_layers = LayeredModel(model).num_layers
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        save(model, whole)
        variants = {f"all {num_layers} blocks and head": whole, f"all {num_layers} blocks": whole}
        for kept in options.layers:
            variants[f"first {kept} blocks"] = Path(folder) / str(kept)
            with torch.no_grad():
                save(truncate(model, kept, head=False), variants[f"first {kept} blocks"])
        found = measure_costs(
            variants,
            trunks=list(variants)[1:],
            num_tokens=options.tokens,
            batch_size=options.batch_size,
            num_rounds=options.rounds,
            device=options.device,
        )
    print(cost_table(found), "", measured_on(found), sep="\n")
    late = [
        cost.name
        for cost, kept in zip(found[2:], options.layers, strict=True)
        if is_late(cost, found, kept, num_layers)
    ]
    for name in late:
        print(f"too slow: {name}")
    return int(options.check and bool(late))


def is_late(cost: Cost, found: list[Cost], kept: int, num_layers: int) -> bool:
    """Whether it takes more than its share of the blocks of the whole model's time."""
    return cost.latency / found[0].latency > NOISE * kept / num_layers


if __name__ == "__main__":
    raise SystemExit(main())
