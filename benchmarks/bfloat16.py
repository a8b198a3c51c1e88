"""Time saved by blocks in bfloat16: forward passes of the view that `--dtype bfloat16` uses, against float32.

    python benchmarks/bfloat16.py --device cuda --layers 12 --width 768 --batch_size 32 --tokens 512 --rounds 9 --save
    OMP_NUM_THREADS=1 python benchmarks/bfloat16.py        # slower on a CPU without bfloat16 units

Both sides run on the same random batch in turn, without the head. The weights are also random. A round is one forward
pass of each side.
"""

import argparse
import time
from statistics import median

import torch
from rounds import Row, add_options, finish, ratios

from lit_layers.models import LayeredModel, causal_lm
from lit_layers.models.copies import BFloat16View


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=4)
    add_options(parser)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    shape = {"n_layer": options.layers, "n_embd": options.width, "n_head": max(1, options.width // 64)}
    model = causal_lm("gpt2", **shape, vocab_size=4096, n_positions=options.tokens).eval().to(options.device)
    exact = LayeredModel(model)
    views = {"float32": exact, "bfloat16": BFloat16View(exact)}
    batch = {"input_ids": torch.randint(4096, (options.batch_size, options.tokens))}
    seconds: dict[str, list[float]] = {name: [] for name in views}
    states: dict[str, torch.Tensor] = {}
    for number in range(options.rounds + 1):  # the first warms up
        for name in sorted(views, reverse=number % 2 == 1):
            took, states[name] = passed(views[name], batch)
            seconds[name] += [took] if number else []
    difference = (states["bfloat16"] - states["float32"]).norm() / states["float32"].norm()
    others = {
        "seconds: float32, bfloat16": ", ".join(f"{median(values):.3g}" for values in seconds.values()),
        "relative difference of the last layer": f"{difference.item():.1e}",
    }
    share = ratios(seconds["float32"], seconds["bfloat16"])
    name = f"{options.layers} blocks of {options.width}: float32 over bfloat16"
    return finish("bfloat16", [Row(name, share, others=others)], options, device=options.device)


def passed(view: LayeredModel, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the seconds of a forward pass, and its last states."""
    last = torch.empty(0)

    def look(layer: int, hidden: torch.Tensor, mask: torch.Tensor) -> None:
        nonlocal last
        last = hidden

    cuda = view.device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    started = clock()
    view.pass_states(batch, look)
    if cuda:
        torch.cuda.synchronize()
    return clock() - started, last


if __name__ == "__main__":
    raise SystemExit(main())
