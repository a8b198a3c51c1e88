"""Savings by truncating a model: the whole model, its trunk without a head, and its first blocks, in one run.

    OMP_NUM_THREADS=1 python benchmarks/truncation.py               # GPT-2 small, random, cut at 9, 6, 3
    OMP_NUM_THREADS=1 python benchmarks/truncation.py --layers 4 --model FOLDER

Rounds alternate between the models. Memory is measured in a separate process for each. Target: the time of a truncated
model, as a share of the whole model's time, is at most its share of the blocks.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch
from rounds import Row, add_options, finish, ratios

from lit_layers.models import LayeredModel, causal_lm, load, save, truncate
from lit_layers.models.costs import call_of, interleaved, peak_bytes
from lit_layers.models.families import trunk_of

NOISE = 1.1  # tolerance for medians on a shared machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder (default: GPT-2 small, random)")
    parser.add_argument("--layers", type=int, nargs="+", default=[9, 6, 3], help="blocks to keep (default: 9 6 3)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=4)
    add_options(parser, rounds=15)
    parser.add_argument("--device", default="cpu")
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
        # All models but the first are trunks without a head.
        models = {
            name: (trunk_of(load(saved)) if number else load(saved)).to(options.device)
            for number, (name, saved) in enumerate(variants.items())
        }
        vocabulary = LayeredModel(model).model.config.vocab_size
        batch = {"input_ids": torch.randint(vocabulary, (options.batch_size, options.tokens))}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        calls = {name: [call_of(each, {key: rows[:1] for key, rows in batch.items()})] for name, each in models.items()}
        seconds = interleaved(calls, num_rounds=options.rounds, num_warm_up=2, device=options.device)
        first, *cuts = variants
        rows = []
        for name, kept in zip(cuts, [num_layers, *options.layers], strict=True):
            peak = peak_bytes(call_of(models[name], batch))
            parameters = sum(parameter.numel() for parameter in models[name].parameters())
            others = {
                "parameters": f"{parameters / 1e6:.1f} M",
                "peak MB of a batch": f"{peak / 1e6:,.0f}",
                "ms a text: whole, this": ", ".join(f"{1e3 * median(seconds[each][0]):.0f}" for each in (first, name)),
            }
            # The share of the time may not exceed the share of the blocks.
            target = NOISE * kept / num_layers
            rows.append(Row(name, ratios(seconds[name][0], seconds[first][0]), target, at_most=True, others=others))
    return finish("truncation", rows, options, device=options.device)


if __name__ == "__main__":
    raise SystemExit(main())
