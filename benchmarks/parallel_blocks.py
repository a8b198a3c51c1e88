"""A parallel group of blocks one after the other against all of them in one batched computation.

    OMP_NUM_THREADS=1 python benchmarks/parallel_blocks.py                 # GPT-2 blocks of several widths, on a CPU
    OMP_NUM_THREADS=1 python benchmarks/parallel_blocks.py --device cuda --widths 768 --groups 8 --tokens 1 128

Both run the same forward pass of a random GPT-2 whose middle is one group, in three turns each; `loop / stacked` above
1 means that stacking is quicker. `stacking once` is what the first pass takes longer: the weights are copied then.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from rounds import Row, add_options, finish, ratios

from lit_layers.models.build import causal_lm
from lit_layers.models.costs import interleaved
from lit_layers.models.running_order import Parallel, running_order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 768])
    parser.add_argument("--groups", type=int, nargs="+", default=[3, 9], help="members of the group")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--batch_size", type=int, default=1)
    add_options(parser, rounds=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"])
    options = parser.parse_args()
    rows = []
    for width in options.widths:
        for group in options.groups:
            for attention in options.attention:
                model = _model(width, group, attention, options.device)
                for tokens in options.tokens:
                    rows.append(_row(model, width, group, tokens, attention, options))
    return finish("parallel_blocks", rows, options, device=options.device)


def _model(width: int, group: int, attention: str, device: str) -> torch.nn.Module:
    size: dict[str, Any] = {"n_embd": width, "n_layer": group + 2, "n_head": max(1, width // 64), "vocab_size": 256}
    return causal_lm("gpt2", attention_implementation=attention, **size).eval().to(device)


def _row(model, width: int, group: int, tokens: int, attention: str, options) -> Row:
    ids = torch.randint(256, (options.batch_size, tokens), device=options.device)
    schedule = (1, tuple(range(2, group + 2)), group + 2)
    outputs = {}

    def run(parallel: Parallel) -> None:
        outputs[parallel] = model(input_ids=ids, use_cache=False).logits

    seconds: dict[Parallel, list[float]] = {"loop": [], "stacked": []}
    once = []
    for _ in range(3):  # thirds, so that slow minutes of the machine meet both
        for parallel in seconds:
            with torch.inference_mode(), running_order(model, schedule, parallel=parallel):
                start = time.perf_counter()
                run(parallel)
                first = time.perf_counter() - start
                found = interleaved(
                    {parallel: [lambda parallel=parallel: run(parallel)]},
                    num_rounds=-(-options.rounds // 3),
                    num_warm_up=1,
                    device=options.device,
                )[parallel][0]
                seconds[parallel] += found
                if parallel == "stacked":
                    once.append(first - statistics.median(found))
    loop, stacked = (f"{1e3 * statistics.median(seconds[each]):.2f}" for each in ("loop", "stacked"))
    apart = (outputs["loop"] - outputs["stacked"]).abs().max().item() / outputs["loop"].abs().max().item()
    others = {
        "ms: loop, stacked": f"{loop}, {stacked}",
        "ms of stacking once": f"{1e3 * statistics.median(once):.2f}",
        "outputs differ by": f"{apart:.1e}",
    }
    what = f"width {width}, {group} blocks, {tokens} tokens, {attention}"
    return Row(what, ratios(seconds["loop"], seconds["stacked"]), others=others)


if __name__ == "__main__":
    raise SystemExit(main())
