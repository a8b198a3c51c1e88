"""Write synthetic run folders with measurements like those of a small GPT-2."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lit_layers import records
from lit_layers.records import Measurement, Record, ScalarLog

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 400)
LAYERS = 6
TOKENS_PER_STEP = 2048
K = (4, 12)


def make_run(
    root: Path,
    *,
    steps: tuple[int, ...] = STEPS,
    layers: int = LAYERS,
    analyses: tuple[str, ...] = ("trajectory", "coupling", "representation", "next_token_probe", "lens"),
    failing: tuple[tuple[int, str, str], ...] = (),
    scalars: bool = True,
    run: str = "quickstart",
    seed: int = 0,
) -> Path:
    """Write measurements.jsonl, metrics.jsonl and run.json; `failing` has (step, analysis, error) tuples."""
    root.mkdir(parents=True, exist_ok=True)
    errors = {(step, analysis): error for step, analysis, error in failing}
    options = {"layers": layers, "seed": seed, "slower": seed / 50}
    for step, analysis in itertools.product(steps, analyses):
        found = measurement(run, step, analysis, error=errors.get((step, analysis)), **options)
        records.append(root / "measurements.jsonl", found)
    if scalars:
        write_scalars(root / "metrics.jsonl", steps[-1])
    about = {
        "run": run,
        "id": "a1b2c3d4",
        "started": "2026-03-01T12:00:00+00:00",
        "max_steps": steps[-1],
        "tokens_per_step": TOKENS_PER_STEP,
        "world_size": 1,
        "device": "cpu",
        "precision": "32-true",
        "model": {"class": "GPT2LMHeadModel", "parameters": 1_468_416, "vocab_size": 2048},
        "config": {"model": {"class_path": "lit_layers.training.LitCausalLM", "init_args": {"name": "gpt2"}}},
        "data": {"corpus": "python", "tokenizer": "bpe:2048", "unigram_entropy": 5.87},
        "seconds": 187.5,
        "last_step": steps[-1],
        "checkpoint_seconds": 3.1,
        "analysis_seconds": 41.0,
    }
    (root / "run.json").write_text(json.dumps(about))
    return root


PYTHIA = (0, *(2**power for power in range(10)), *range(1000, 143_001, 1000))  # 154 steps
MODELS = {"EleutherAI/pythia-70m": 6, "EleutherAI/pythia-160m": 12, "openai-community/gpt2": 12, "models/tiny": 4}


def make_series(
    root: Path,
    *,
    steps: tuple[int, ...] = PYTHIA,
    layers: int = 2,
    analyses: tuple[str, ...] = ("trajectory", "lens"),
    suspect: tuple[int, ...] = (),
) -> Path:
    """Write the measurements of a checkpoint series; suspect steps have the weights of the last step."""
    for step in steps:
        weights = hashlib.sha256(str(steps[-1] if step in suspect else step).encode()).hexdigest()
        source = dict.fromkeys(("series", "checkpoint"), "EleutherAI/pythia-70m") | {
            "revision": f"step{step}",
            "commit": hashlib.sha1(str(step).encode()).hexdigest(),
            "weight_files": {"model.safetensors": weights},
            "weights_hash": weights[:16],
            "audit": "suspect: equal to the final step" if step in suspect else "clean",
        }
        for analysis in analyses:
            found = measurement("pythia-70m", step, analysis, layers=layers)
            records.append(root / "measurements.jsonl", replace(found, provenance=found.provenance | source))
    return root


def make_models(
    root: Path,
    *,
    models: Mapping[str, int] = MODELS,
    analyses: tuple[str, ...] = ("trajectory", "coupling", "representation", "next_token_probe", "lens"),
    suspect: tuple[str, ...] = (),
) -> Path:
    """Write the measurements of pretrained models, each a run without steps; `models` maps names to layers."""
    for number, (name, layers) in enumerate(models.items(), start=1):
        is_local = name.startswith("models/")
        source: dict[str, object] = {"series": "models", "checkpoint": name}
        source |= {} if is_local else {"revision": "main", "commit": f"{number:040x}"}
        source["weight_files"] = {"model.safetensors": f"{number:064x}"}
        source["audit"] = "suspect: identical weights" if name in suspect else "clean"
        source |= {"weights_hash": f"{number:016x}", "tokenizer_hash": f"{number // 3:016x}"}
        for analysis in analyses:
            found = measurement(name, 100 * number, analysis, layers=layers, seed=number)
            own = found.provenance | source
            own["data_hash"] = f"{number // 3 + 16 * len(analysis):016x}"
            found = replace(found, step=None, tokens=None, provenance=own)
            records.append(root / "measurements.jsonl", found)
    return root


def measurement(
    run: str,
    step: int,
    analysis: str,
    *,
    layers: int = LAYERS,
    error: str | None = None,
    seed: int = 0,
    slower: float = 0.0,
) -> Measurement:
    """Return one analysis of one checkpoint, determined by step and seed.

    `slower` is the fraction of the training progress that is missing.
    """
    rng = np.random.default_rng([seed, step, *analysis.encode()])
    progress = math.log1p(step) / math.log1p(512) * (1 - slower)
    made = [] if error else list(RECORDS_OF[analysis](rng, progress, layers))
    return Measurement(
        run=run,
        step=step,
        tokens=step * TOKENS_PER_STEP,
        analysis=analysis,
        records=made,
        seconds=0.4 + 0.2 * rng.random(),
        error=error,
        provenance={
            "weights_hash": f"{step:016x}",
            "config_hash": f"{len(analysis):016x}",
            "data_hash": "00ff00ff00ff00ff",
            "tokenizer_hash": "0f0f0f0f0f0f0f0f",
            "dtype": "float32",
            "attention": "eager",
            "device": "cpu",
            "versions": {"torch": "2.15.0", "transformers": "5.23.0"},
        },
    )


def write_scalars(path: Path, last: int) -> None:
    log, rng = ScalarLog(path), np.random.default_rng(1)
    log.log(0, {"tokens": 0, "validation/loss": 7.63, "validation/perplexity": math.exp(7.63)})
    for step in range(1, last + 1):
        loss = 3.9 + 3.7 * math.exp(-step / 60) + 0.08 * rng.standard_normal()
        row = {"tokens": step * TOKENS_PER_STEP, "train/loss": loss, "train/grad_norm": 1.0 + rng.random()}
        row["train/learning_rate"] = 2e-3 * min(step / 40, 0.55 + 0.45 * math.cos(math.pi * step / last))
        if step % 10 == 0:
            row["train/tokens_per_second"] = 9000 + 300 * rng.standard_normal()
        if step % 50 == 0:
            row |= {"validation/loss": loss + 0.1, "validation/perplexity": math.exp(loss + 0.1)}
        log.log(step, row)
    log.close()


def _mean(metric: str, value: float, spread: float, layer: int | None = None, **tags: str | int | float) -> Record:
    return Record(
        metric=metric,
        value=value,
        layer=layer,
        stderr=spread,
        low=value - 1.96 * spread,
        high=value + 1.96 * spread,
        n=64,
        tags=tags,
    )


def _trajectory(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    shape = 2.3 - 1.1 * math.sin(2.2 * progress) + 0.02 * rng.standard_normal()
    yield _mean("line_shape_score", shape, 0.04)
    yield _mean("line_shape_score", shape - 0.1, 0.04, statistic="median")
    yield _mean("expodistance", 1.8 - progress, 0.08)
    yield _mean("equidistance", 0.3 + 0.4 * progress, 0.02)
    for layer in range(layers + 1):
        yield _mean("state_norm", 1 + (0.2 + 3 * progress) * layer**1.2, 0.05, layer)
        yield _mean("state_norm", 0.9 + (0.2 + 3 * progress) * layer**1.2, 0.05, layer, statistic="median")
        if layer > 1:
            yield _mean("line_shape_score", 1 + (shape - 1) * layer / layers, 0.04, layer)
        if layer:
            yield _mean("step_norm", 0.5 + progress * layer, 0.03, layer)
            yield _mean("growth_rate", 0.5 / layer + 0.1 * progress, 0.01, layer)


def _coupling(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    for k in K:
        level = 0.02 + 0.33 * math.sin(2.6 * progress) * (1 + 2 / k)
        chance = -0.04 * k / 12
        yield _mean("coupling", level, 0.01, k=k)
        yield _mean("coupling_with_diagonal", level + (1 - level) / layers, 0.01, k=k)
        yield _mean("random_coupling", chance, 0.01, k=k)
        yield _mean("excess_coupling", (level - chance) / (1 - chance), 0.01, k=k)
        for distance in range(layers):
            value = 1.0 if distance == 0 else level * 1.4 * 0.75 ** (distance - 1)
            yield _mean("coupling_by_distance", value, 0.01, k=k, distance=distance)
        for layer, other in itertools.product(range(1, layers + 1), repeat=2):
            near = level * 1.4 * 0.75 ** (abs(layer - other) - 1) + 0.03 * rng.standard_normal()
            value = 1.0 if layer == other else near
            yield Record(metric="coupling_pair", value=value, layer=layer, other_layer=other, n=4, tags={"k": k})
        yield Record(metric="min_gap", value=0.01 * rng.random(), n=4, tags={"k": k})
    for layer in range(1, layers + 1):
        for index in range(1, 16):
            value = (1 + 6 * progress) * math.exp(-index / (3 + layer))
            yield _mean("singular_value", value, 0.01, layer, index=index)
        yield _mean("linearized_rollout", 1 - 0.1 * layer * (1 - 0.5 * progress), 0.02, layer)
    yield _mean("linearized_rollout", 1 - 0.1 * layers * (1 - 0.5 * progress), 0.02)


def _representation(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    for layer in (*range(layers + 1), None):
        depth = 0.5 if layer is None else layer / layers
        valley = 3.9 - progress * (1.6 * math.sin(math.pi * depth) + 0.4 * depth)
        for drop_first, normalization in itertools.product((0, 1), ("raw", "maxEntropy")):
            most = {"raw": 1.0, "maxEntropy": 4.6}[normalization]
            entropy = (valley + 0.3 * drop_first * progress) / most
            tags: dict[str, str | int] = {"normalization": normalization, "drop_first": drop_first}
            yield _mean("prompt_entropy", entropy, 0.02 / most, layer, **tags)
        if layer is not None:
            yield _mean("effective_rank", math.exp(valley) * 1.3, 1.0, layer)
            yield _mean("participation_ratio", math.exp(valley) * 0.6, 0.8, layer)
            yield _mean("token_curvature", 2.09 - 0.5 * progress * depth, 0.01, layer, num_undefined=3)
            yield Record(metric="dataset_entropy", value=3.2 - progress * depth, layer=layer, n=64)


def _probe(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    for layer in range(layers + 1):
        value = 0.16 + 0.25 * progress * (0.3 + 0.7 * layer / layers) + 0.004 * rng.standard_normal()
        yield _mean("accuracy", value, 0.01, layer)
        yield _mean("accuracy_all", value * 0.8, 0.01, layer)
        yield _mean("log_loss", 5 - 6 * value, 0.05, layer)
        yield _mean("accuracy", 0.05 + 0.004 * rng.standard_normal(), 0.01, layer, control="random_labels")
    yield _mean("accuracy", 0.16, 0.01, reference="majority")
    yield _mean("accuracy", 0.1 + 0.3 * progress, 0.01, reference="lm_head")
    yield _mean("accuracy", 0.1 + 0.33 * progress, 0.01, reference="lm_head_closed")
    yield Record(metric="coverage", value=0.82, n=1000)


def _lens(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    for layer in range(layers + 1):
        loss = 7.63 - 3.7 * progress * (0.2 + 0.8 * layer / layers)
        yield _mean("logit_lens_loss", loss, 0.03, layer)
        yield _mean("logit_lens_accuracy", 0.02 + 0.3 * progress * layer / layers, 0.01, layer)
        yield Record(metric="logit_lens_perplexity", value=math.exp(loss), layer=layer, n=64)
        yield _mean("kl_to_final", 3 * progress * (1 - layer / layers), 0.02, layer)


def _token_coupling(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    shares = {"token": 1.0, "input_context": 0.7, "output_context": 0.5}
    for layer, (table, share) in itertools.product(range(1, layers + 1), shares.items()):
        level = share * (0.05 + 0.6 * progress * layer / layers)
        yield _mean(f"{table}_coupling", level, 0.01, layer, k=4)
        yield _mean(f"random_{table}_coupling", -0.05, 0.001, layer, k=4)
        yield _mean(f"excess_{table}_coupling", (level + 0.05) / 1.05, 0.01, layer, k=4)
        for row, column in itertools.product(range(8), repeat=2):
            value = 1.0 if row == column else level * 0.9 ** abs(row - column) + 0.05 * (row > column)
            positions = {"token": round(100 * row / 7), "other_token": round(100 * column / 7)}
            yield _mean(f"{table}_coupling_pair", value, 0.01, layer, k=4, **positions)
    yield Record(metric="num_tied", value=0.0, n=4, tags={"k": 4})


def _coupling_matrices(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    for layer, other in ((1, 1), (1, layers), (layers, 1)):
        for row, column in itertools.product(range(1, 31), repeat=2):
            diagonal = 3 * row**-0.6 * (row == column)
            noise = 0.15 * rng.standard_normal() / (row * column) ** 0.2
            value = diagonal if layer == other else progress * diagonal + noise
            tags = {"row": row, "column": column, "k": 30, "prompt": 1}
            yield Record(metric="compression", value=value, layer=layer, other_layer=other, tags=tags)


def _influence(rng: np.random.Generator, progress: float, layers: int) -> Iterator[Record]:
    sizes = {"frobenius": 2.0, "spectral": 0.5, "participation_ratio": 30.0, "entropy_rank": 40.0}
    for layer, (name, size) in itertools.product(range(1, layers + 1), sizes.items()):
        near, slope = size * (0.3 + progress) * layer**-0.5, -0.8 if size < 10 else -0.1
        yield _mean(f"influence_{name}", near / 3, near / 90, layer)
        for distance in (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96):
            value = near * (8 if distance == 0 else distance**slope)
            yield _mean(f"influence_{name}", value, value / 30, layer, token_distance=distance)


RECORDS_OF: dict[str, Callable[[np.random.Generator, float, int], Iterator[Record]]] = {
    "trajectory": _trajectory,
    "coupling": _coupling,
    "representation": _representation,
    "next_token_probe": _probe,
    "lens": _lens,
    "token_coupling": _token_coupling,
    "coupling_matrices": _coupling_matrices,
    "cross_token_influence": _influence,
}
