"""Seconds of the probes for the record, true and permuted labels, begun anew and at the last checkpoint's.

    OMP_NUM_THREADS=1 python benchmarks/record_probes.py                 a layer of 10,000 x 768, 1,000 classes
    python benchmarks/record_probes.py --device cuda

Features are correlated, their principal components decay as 1/k; a class is drawn from a softmax of them, as uneven as
tokens are, so that it is never certain and the best c lies between the ends. "Warm" are features that moved by a tenth
of their deviation, from the probes of those before. The seconds of 13 layers are those of the layer measured, times 13.
"""

import argparse
from collections.abc import Sequence

import torch
from rounds import Row, add_options, clock, finish
from torch import Tensor

from lit_layers.functional.probes.record_probe import RecordProbes, fit_record_probes

WANTED = {"cold": 20.0, "warm": 5.0}  # minutes for 13 layers
LAYERS = 13


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser, rounds=1)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for number in range(options.rounds):
        features, labellings = problem(options, number)
        features, labellings = features.to(options.device), [each.to(options.device) for each in labellings]
        deviation = features.std(0)
        noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(options.device)
        moved = features + 0.1 * deviation * noise
        starts, spent = fitted(features, labellings, [None, None])
        seconds["cold"].append(spent)
        again, spent = fitted(moved, labellings, starts)
        seconds["warm"].append(spent)
        for name, each in (("cold", starts), ("warm", again)):
            print(f"{name}: {seconds[name][-1]:.1f} s, c {[float(probes.c) for probes in each]}", flush=True)
    shape = f"{options.rows:,} x {options.dim}, {options.classes:,} classes, two label sets"
    rows = [Row(f"{way}, a layer of {shape}", values, unit=" s") for way, values in seconds.items()]
    rows += [
        Row(f"{way}, {LAYERS} layers (scaled)", [LAYERS * each / 60 for each in values], WANTED[way], True, unit=" min")
        for way, values in seconds.items()
    ]
    return finish("record_probes", rows, options, device=options.device, least_rounds=1)


def problem(options: argparse.Namespace, seed: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(options.rows, options.dim, generator=generator) / torch.arange(1, options.dim + 1)
    weights = 3 * torch.randn(options.dim, options.classes, generator=generator)
    logits = parts @ weights - 0.8 * torch.arange(1, options.classes + 1).log()
    labels = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    mixed = parts @ torch.linalg.qr(torch.randn(options.dim, options.dim, generator=generator)).Q
    return mixed, [labels, labels[torch.randperm(options.rows, generator=generator)]]


def fitted(
    features: Tensor, labellings: Sequence[Tensor], starts: Sequence[RecordProbes | None]
) -> tuple[list[RecordProbes], float]:
    since = clock(features.device)
    pairs = zip(labellings, starts, strict=True)
    probes = [fit_record_probes(features[None], labels, start=start) for labels, start in pairs]
    return probes, clock(features.device) - since


if __name__ == "__main__":
    raise SystemExit(main())
