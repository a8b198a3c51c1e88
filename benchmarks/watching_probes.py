"""Time of fast probes (`estimator="watch"`) on true and permuted labels, without the forward pass.

    OMP_NUM_THREADS=1 python benchmarks/watching_probes.py                 2 layers of 10,000 x 768, 1,000 classes
    OMP_NUM_THREADS=1 python benchmarks/watching_probes.py --layers 13
    python benchmarks/watching_probes.py --device cuda --layers 13

The features are correlated: their principal components decay as k^-0.7. Classes are as unbalanced as tokens, and their
distance grows from layer to layer. The time for 13 layers is the mean over the measured layers, times 13.
"""

import argparse

import torch
from rounds import Row, add_options, clock, finish

from lit_layers.functional.probes.logistic import fit_watching_probes

WANTED = 60.0  # seconds for 13 layers
LAYERS = 13


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser)
    options = parser.parse_args()
    small = torch.randn(1, 200, 8, generator=torch.Generator().manual_seed(0)).to(options.device)
    fit_watching_probes(small, [torch.arange(200, device=options.device) % 3])  # warm-up: imports
    rounds = [[seconds_of(layer, options) for layer in range(options.layers)] for _ in range(options.rounds)]
    shape = f"{options.rows:,} x {options.dim}, {options.classes:,} classes, two label sets"
    rows = [
        Row(f"layer {layer} of {shape}", [seconds[layer] for seconds in rounds], unit=" s")
        for layer in range(options.layers)
    ]
    whole = [LAYERS * sum(seconds) / len(seconds) for seconds in rounds]
    rows.append(Row(f"{LAYERS} layers (scaled)", whole, WANTED, at_most=True, unit=" s"))
    return finish("watching_probes", rows, options, device=options.device)


def seconds_of(layer: int, options: argparse.Namespace) -> float:
    generator = torch.Generator().manual_seed(layer)
    labels = (options.classes * torch.rand(options.rows, generator=generator) ** 3).long()
    centers = torch.randn(options.classes, options.dim, generator=generator)
    distance = 0.3 + 0.3 * layer / max(1, options.layers - 1)
    features = torch.randn(options.rows, options.dim, generator=generator).add_(centers[labels], alpha=distance)
    features *= torch.arange(1, options.dim + 1).pow(-0.7)
    shuffled = labels[torch.randperm(options.rows, generator=generator)]
    layers, label_sets = features[None].to(options.device), [each.to(options.device) for each in (labels, shuffled)]
    since = clock(options.device)
    fit_watching_probes(layers, label_sets, num_classes=options.classes)
    return clock(options.device) - since


if __name__ == "__main__":
    raise SystemExit(main())
