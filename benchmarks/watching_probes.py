"""CPU seconds of the probes for watching, true and permuted labels, beyond the forward pass.

    OMP_NUM_THREADS=1 python benchmarks/watching_probes.py                 2 layers of 10,000 x 768, 1,000 classes
    OMP_NUM_THREADS=1 python benchmarks/watching_probes.py --layers 13 --json watching.json

Features are correlated, their principal components decay as k^-0.7; classes are as uneven as tokens and move apart from
layer to layer. The seconds of 13 layers are those of a layer, their mean over the layers measured, times 13.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from lit_layers.functional.watching_probe import fit_watching_probes


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of the probes for watching.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="writes the results here, too")
    options = parser.parse_args()
    seconds = []
    for layer in range(options.layers):
        generator = torch.Generator().manual_seed(layer)
        labels = (options.classes * torch.rand(options.rows, generator=generator) ** 3).long()
        centers = torch.randn(options.classes, options.dim, generator=generator)
        apart = 0.3 + 0.3 * layer / max(1, options.layers - 1)
        features = torch.randn(options.rows, options.dim, generator=generator).add_(centers[labels], alpha=apart)
        features *= torch.arange(1, options.dim + 1).pow(-0.7)
        shuffled = labels[torch.randperm(options.rows, generator=generator)]
        if not layer:
            fit_watching_probes(features[None, :200, :8], [labels[:200]])  # what is loaded at first use is no part
        since = time.process_time()
        fit_watching_probes(features[None], [labels, shuffled], num_classes=options.classes)
        seconds.append(round(time.process_time() - since, 2))
        print(f"layer {layer}: {seconds[-1]:.2f} CPU seconds", flush=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    result = {
        "rows": options.rows,
        "dim": options.dim,
        "classes": options.classes,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "seconds_of_layers": seconds,
        "seconds_of_13_layers": round(13 * sum(seconds) / len(seconds), 1),
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
