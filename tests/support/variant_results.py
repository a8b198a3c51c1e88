"""Synthetic measurements of variants of a model, which rank the variants by harm as in the published results."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lit_layers.functional.block_schedules import Variant, variants
from lit_layers.records import Record
from tests.support import written

BLOCKS = 12
STEPS = (0, 64, 512, 2000, 8000, 32000, 143000)
TASKS = {"lambada": 0.0, "arc_challenge": 0.25, "winogrande": 0.5}
ANALYSES = ("interventions", "tasks", "speed", "finetune", "glue", "layer_similarity")
HARM = {"middle_repeat": 1.3, "skip": 0.7, "parallel": 0.5, "reverse": 0.36, "random": 0.3, "looped_parallel": 0.2}
_EXACT = ("parallel", "reverse", "random", "middle_repeat")  # equal to the full model at M = 1


def harm(variant: Variant, blocks: int = BLOCKS) -> float:
    """Return how much a variant harms the model; 0 is no harm."""
    if variant.name == "baseline":
        return 0.0
    if variant.name in ("skip_one", "switch"):
        return (0.06 if variant.name == "skip_one" else 0.02) + 0.9 * math.exp(-1.3 * ((variant.block or 1) - 1))
    if variant.name == "custom":
        return 0.4
    share = (variant.middle or 1) / blocks
    if variant.middle == 1 and variant.name in _EXACT:
        return 0.0
    off = 0.05 * (math.log2(variant.loops or 1) - math.log2(1 + (variant.middle or 1) / 2)) ** 2
    wobble = 0.0 if variant.seed is None else 0.08 * math.sin(7.1 * variant.seed + (variant.middle or 0))
    return HARM[variant.name] * share**1.5 * 2.2 + (off if variant.name == "looped_parallel" else 0) + wobble * share


def training_progress(step: int | None) -> float:
    """Return the progress of training at a step, from 0 to 1."""
    return 1.0 if step is None else math.log1p(step) / math.log1p(STEPS[-1])


def scores(variant: Variant, step: int | None, blocks: int = BLOCKS) -> dict[str, float]:
    """Return loss, accuracy and KL divergence of one variant at one step."""
    progress, lost = training_progress(step), harm(variant, blocks)
    full, worst = 10.8 - 7.9 * progress, 10.8
    kept = math.exp(-2.2 * lost * (1.6 - progress))
    return {
        "variant_loss": worst - (worst - full) * kept,
        "variant_accuracy": 0.002 + 0.45 * progress * kept,
        "kl_to_full": (worst - full) * (1 - kept),
    }


def records_and_means(
    variants: Sequence[Variant], values: dict[str, list[float]], metrics: Sequence[str], **tags: str
) -> Iterator[Record]:
    """Yield a record per variant and metric, and the mean over the seeds of each random order."""
    for metric in metrics:
        by_middle: dict[int, list[float]] = {}
        for index, variant in enumerate(variants):
            value = values[metric][index]
            yield Record(metric=metric, value=value, layer=variant.block, tags={**variant.tags, **tags})
            if variant.seed is not None:
                by_middle.setdefault(variant.middle or 0, []).append(value)
        for number, found in by_middle.items():
            deviation = float(np.std(found, ddof=1)) / math.sqrt(len(found))
            mean = float(np.mean(found))
            own = {"variant": "random", "middle": number, "num_seeds": len(found), "num_identical": 0, **tags}
            reach = 2.26 * deviation
            yield Record(metric=metric, value=mean, low=mean - reach, high=mean + reach, tags=own)


def interventions(
    step: int | None, *, blocks: int = BLOCKS, seeds: int = 10, custom: Sequence[str] = ()
) -> list[Record]:
    every = variants(blocks, seeds=range(seeds), custom=custom)
    found = [scores(variant, step, blocks) for variant in every]
    metrics = ("variant_loss", "variant_accuracy", "kl_to_full")
    return [*records_and_means(every, {name: [each[name] for each in found] for name in metrics}, metrics)]


def task(name: str, step: int | None, *, blocks: int = BLOCKS, seeds: int = 3) -> list[Record]:
    guess = TASKS[name]
    every = variants(blocks, seeds=range(seeds))
    full = guess + (0.72 - guess) * (0.05 + 0.9 * training_progress(step))
    kept = [math.exp(-2.2 * harm(variant, blocks)) for variant in every]
    values = {"task_score": [guess + (full - guess) * share for share in kept], "normalized_score": kept}
    rows = [*records_and_means(every, values, ("task_score", "normalized_score"), task=name)]
    rows = [replace(row, stderr=0.012, n=1000) for row in rows]
    return [*rows, Record(metric="random_score", value=guess, tags={"task": name})]


def speed(*, blocks: int = BLOCKS) -> list[Record]:
    rows = []
    for variant in variants(blocks, seeds=(0,), loops=(2, 3, 4)):
        stepwise = sum(len(step) if isinstance(step, tuple) else 1 for step in variant.schedule)
        tags = {name: value for name, value in variant.tags.items() if name not in ("seed", "schedule")}
        relative = (2 + stepwise) / (2 + blocks)
        metrics = {"latency": 0.021 * relative, "relative_latency": relative, "throughput": 900 / relative}
        metrics["peak_memory"] = 1.2e9
        rows += [Record(metric=m, value=v, layer=variant.block, tags=tags) for m, v in metrics.items()]
    return rows


def trained(
    task: str, names: Sequence[str], tag: str, losses: dict[str, float], blocks: int, *more: str
) -> list[Record]:
    """Return scores of trained variants.

    Args:
        tag: Tag whose value is the way of training, a key of `losses`.
        losses: Factor of the harm for each way of training.
        more: Metrics besides task_score.
    """
    every, metrics, rows = variants(blocks, names, loops=(3,)), ("task_score", *more), []
    for way, factor in losses.items():
        kept = [0.25 + 0.3 * math.exp(-factor * harm(variant, blocks)) for variant in every]
        rows += records_and_means(every, dict.fromkeys(metrics, kept), metrics, task=task, **{tag: way})
    return rows


def finetune(*, blocks: int = BLOCKS) -> list[Record]:
    losses, names = {"before": 2.2, "after": 1.0}, ("skip", "parallel", "reverse")
    return trained("arc_challenge", names, "when", losses, blocks, "task_score_norm")


def glue(name: str, *, blocks: int = BLOCKS) -> list[Record]:
    names = ("skip", "parallel", "looped_parallel")
    return trained(name, names, "training", {"full": 0.5, "frozen": 1.4}, blocks)


def similarity(step: int | None, *, blocks: int = BLOCKS) -> list[Record]:
    progress = training_progress(step)
    rows: list[Record] = []
    for metric, tags, base in (
        ("layer_cosine", {"mode": "token"}, 0.35),
        ("layer_cosine", {"mode": "flattened"}, 0.5),
        ("layer_cka", {}, 0.2),
    ):
        for i in range(blocks + 1):
            for j in range(blocks + 1):
                value = base + (1 - base) * math.exp(-(0.1 + progress) * abs(i - j))
                rows.append(Record(metric=metric, value=value, layer=i, other_layer=j, tags=tags))
        stages = {"num_beginning": 2, "num_middle": blocks - 2, "num_ending": 1, "block_contrast": 0.4 * progress}
        rows += [Record(metric=name, value=value, tags={"of": metric, **tags}) for name, value in stages.items()]
    return rows


def write(
    root: Path,
    *,
    steps: Sequence[int | None] = STEPS,
    analyses: Sequence[str] = ANALYSES,
    run: str = "painters",
    blocks: int = BLOCKS,
    seeds: int = 10,
    custom: Sequence[str] = (),
) -> Path:
    """Write a run of a model of `blocks` blocks; speed, fine-tuning and GLUE are only at the last step."""
    for step in steps:
        is_last = step == steps[-1]
        found = {
            "interventions": [("interventions", interventions(step, blocks=blocks, seeds=seeds, custom=custom))],
            "tasks": [(f"intervene/{name}", task(name, step, blocks=blocks)) for name in TASKS],
            "layer_similarity": [("layer_similarity", similarity(step, blocks=blocks))],
            "speed": [("intervene/speed", speed(blocks=blocks))] * is_last,
            "finetune": [("intervene/finetune_arc_challenge", finetune(blocks=blocks))] * is_last,
            "glue": [(f"intervene/glue/{name}", glue(name, blocks=blocks)) for name in ("cola", "rte")] * is_last,
        }
        for kind in analyses:
            for analysis, rows in found[kind]:
                written.write(root, analysis, rows, run=run, step=step, tokens=step and 2_097_152 * step)
    return root
