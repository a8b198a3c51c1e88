"""A parallel group of blocks one after the other against all of them in one batched computation.

    OMP_NUM_THREADS=1 python benchmarks/parallel_blocks.py                 # GPT-2 blocks of several widths, on a CPU
    OMP_NUM_THREADS=1 python benchmarks/parallel_blocks.py --device cuda --widths 768 --groups 8 --tokens 1 128

Both run the same forward pass of a random GPT-2 whose middle is one group, in three turns each; `loop / stacked` above
1 means that stacking is quicker. `stacking once` is what the first pass takes longer: the weights are copied then.
"""

import argparse
import statistics
import time

import torch

from lit_layers.models.build import causal_lm
from lit_layers.models.costs import interleaved, this_machine
from lit_layers.models.running_order import running_order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 768])
    parser.add_argument("--groups", type=int, nargs="+", default=[3, 9], help="members of the group")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"])
    options = parser.parse_args()
    machine = this_machine(options.device)
    print(
        f"{machine.processor}, {machine.num_threads} threads, torch {machine.torch}, {options.rounds} rounds, medians"
    )
    print("width group tokens attention   loop ms  stacked ms  loop / stacked  stacking once ms  largest difference")
    for width in options.widths:
        for group in options.groups:
            for attention in options.attention:
                model = _model(width, group, attention, options.device)
                for tokens in options.tokens:
                    print(_row(model, width, group, tokens, attention, options), flush=True)


def _model(width: int, group: int, attention: str, device: str) -> torch.nn.Module:
    size = {"n_embd": width, "n_layer": group + 2, "n_head": max(1, width // 64), "vocab_size": 256}
    return causal_lm("gpt2", attention_implementation=attention, **size).eval().to(device)


def _row(model, width: int, group: int, tokens: int, attention: str, options) -> str:
    ids = torch.randint(256, (options.batch_size, tokens), device=options.device)
    schedule = (1, tuple(range(2, group + 2)), group + 2)
    outputs = {}

    def run(parallel: str) -> None:
        outputs[parallel] = model(input_ids=ids, use_cache=False).logits

    seconds: dict[str, list[float]] = {"loop": [], "stacked": []}
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
    loop, stacked = (1e3 * statistics.median(seconds[each]) for each in ("loop", "stacked"))
    apart = (outputs["loop"] - outputs["stacked"]).abs().max().item() / outputs["loop"].abs().max().item()
    return (
        f"{width:5} {group:5} {tokens:6} {attention:>9} {loop:9.2f} {stacked:11.2f} {loop / stacked:15.2f} "
        f"{1e3 * statistics.median(once):17.2f} {apart:19.1e}"
    )


if __name__ == "__main__":
    main()
