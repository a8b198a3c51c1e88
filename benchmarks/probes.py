"""Logistic probes of scikit-learn against ours: one run, same features, same objective.

    python benchmarks/probes.py                                     2 layers of 10,000 x 768, 77 classes: 2 minutes
    python benchmarks/probes.py --dim 2048 --layers 2 --rounds 1
    python benchmarks/probes.py --rows 100000 --layers 1 --rounds 1 --no-tight     to measure memory

The features are correlated: their principal components decay as k^-0.7. The distance between classes grows from layer
to layer. Each way fits each layer in a separate process, in turns, from float32 features, including standardisation.
Times are process times, so other work on the machine does not count: run it with OMP_NUM_THREADS=1. Memory is the peak
above the memory of the process with the features loaded. "Objective" is the excess over the lowest objective of the
run, all evaluated in float64.

Only compare rows of equal objective. scikit-learn's default stops early, at a gradient 100 times ours, so each library
has a row for each of the two tolerances. "Ours, as low" is our loosest tolerance that reaches the objective of
scikit-learn's default. "Tight" is scikit-learn in float64.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rounds import Row, add_options, finish, ratios
from torch import Tensor

DEFAULT, FINE = 1e-4, 1e-6
LADDER = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6]


def problem(options: argparse.Namespace, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training features (rows, dim) and labels, and the same for 2,000 test rows."""
    generator = torch.Generator().manual_seed(layer)
    rows, dim = options.rows + 2000, options.dim
    axes = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0]
    labels = torch.randint(options.classes, (rows,), generator=generator)
    labels[: options.classes] = torch.arange(options.classes)
    centers = torch.randn(options.classes, dim, generator=generator)
    distance = options.apart[0] + (options.apart[1] - options.apart[0]) * layer / max(1, options.layers - 1)
    features = torch.randn(rows, dim, generator=generator).add_(centers[labels], alpha=distance)
    features = (features * torch.arange(1, dim + 1).pow(-0.7)) @ axes * 5 + torch.randn(dim, generator=generator)
    train = slice(0, options.rows)
    return features[train].clone(), labels[train], features[options.rows :].clone(), labels[options.rows :]


def peak() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def one_way(options: argparse.Namespace) -> dict[str, Any]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    from lit_layers.functional.probes.logistic import fit_logistic_probes

    warnings.simplefilter("ignore")
    features, labels, test, test_labels = problem(options, options.layer)
    small = torch.randn(1, 50, 4), torch.arange(50) % 3  # a warm-up excludes imports at first use
    fit_logistic_probes(*small)
    LogisticRegression().fit(small[0][0].numpy(), small[1].numpy())
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    before, since = peak(), time.process_time()
    if options.way.startswith("ours"):
        probes = fit_logistic_probes(features[None], labels, tolerance=options.tolerance)
        spent, used = time.process_time() - since, peak() - before
        correct = probes.predict(test[None])[0] == test_labels
        mean, scale, weight, bias = probes.mean[0], probes.scale[0], probes.weight[0], probes.bias[0]
    else:
        scaler = StandardScaler()
        rows = features.double().numpy() if options.way.endswith("tight") else features.numpy()
        rows = scaler.fit_transform(rows)
        model = LogisticRegression(tol=options.tolerance, max_iter=20_000).fit(rows, labels.numpy())
        spent, used = time.process_time() - since, peak() - before
        correct = torch.from_numpy(model.predict(scaler.transform(test.numpy()))) == test_labels
        mean, scale = torch.from_numpy(scaler.mean_), torch.from_numpy(scaler.scale_)
        weight, bias = torch.from_numpy(model.coef_.T), torch.from_numpy(model.intercept_)
    total = weight.double().square().sum().item() / 2
    for rows, targets in zip(features.split(5000), labels.split(5000), strict=True):
        logits = ((rows.double() - mean) / scale) @ weight.double() + bias
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    accuracy = correct.double().mean().item()
    return {"seconds": spent, "MiB": used, "objective": total, "accuracy": accuracy}


def run(way: str, layer: int, tolerance: float) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--layer", str(layer)]
    done = subprocess.run([*command, "--tolerance", str(tolerance)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def race(options: argparse.Namespace, layer: int) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each way on one layer, one per round."""
    default = run("scikit-learn, default", layer, DEFAULT)
    as_low = FINE
    for as_low in LADDER:
        if run("ours, as low", layer, as_low)["objective"] <= default["objective"]:
            break
    ways = {
        "scikit-learn, default": DEFAULT,
        "ours, as low": as_low,
        f"scikit-learn, {FINE:g}": FINE,
        f"ours, {FINE:g}": FINE,
    }
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, tolerance in ways.items():
            found[way].append(run(way, layer, tolerance) | {"tolerance": tolerance})
    if options.tight:
        found["scikit-learn, tight"] = [run("scikit-learn, tight", layer, 1e-9) | {"tolerance": 1e-9}]
    return found


def rows_of(layer: int, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return rows for one layer: scikit-learn's time over ours, and the excess of our objective over the lowest."""
    middle = {
        way: {name: statistics.median(one[name] for one in runs) for name in runs[0]} for way, runs in found.items()
    }
    races = {  # what is compared -> (slower way, faster way, target)
        "at the objective of scikit-learn's default": ("scikit-learn, default", "ours, as low", 1.0),
        "at the same small gradient": (f"scikit-learn, {FINE:g}", f"ours, {FINE:g}", 1.0),
        "defaults of both (ours is lower)": ("scikit-learn, default", f"ours, {FINE:g}", None),
    }
    rows = []
    for race, (slower, faster, wanted) in races.items():
        others = {
            part: ", ".join(f"{middle[way][part]:.{digits}f}" for way in (slower, faster))
            for part, digits in (("seconds", 2), ("MiB", 0), ("accuracy", 4))
        }
        seconds = ratios(*([run["seconds"] for run in found[way]] for way in (slower, faster)))
        rows.append(Row(f"layer {layer}, {race}", seconds, wanted, others=others))
    lowest = min(one["objective"] for one in middle.values())
    above = [run["objective"] / lowest - 1 for run in found[f"ours, {FINE:g}"]]
    return [*rows, Row(f"layer {layer}, our objective above the lowest", above, 1e-6, at_most=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Logistic probes: scikit-learn against ours.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="go on with this one of the layers")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--classes", type=int, default=77)
    add_options(parser)
    parser.add_argument(
        "--apart", type=float, nargs=2, default=[0.12, 0.3], help="distance of classes at the first and last layer"
    )
    parser.add_argument("--no-tight", dest="tight", action="store_false", help="leave the slow reference out")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--layer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tolerance", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(one_way(options)))
        return 0
    rows = [row for layer in range(options.first, options.layers) for row in rows_of(layer, race(options, layer))]
    return finish("probes", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
