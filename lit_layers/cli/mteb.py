"""`lit-layers mteb`: every layer of a model, or of each checkpoint of a series, as an embedding model."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_layers.cli.measuring import (
    Checkpoints,
    Outcome,
    Target,
    length_limit,
    measured,
    measurements_of,
    run,
    tell_settings,
)
from lit_layers.cli.options import Names, Numbers
from lit_layers.errors import InputError
from lit_layers.schema import COUNT, COUNT_OR_NONE, Range, refuse_outside

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.tasks.catalogue import Task

TASKS = Names(("layerwise32",))


def mteb(
    model: str,
    checkpoints: Checkpoints,
    *,
    tokenizer: str | None = None,
    tasks: Names = TASKS,
    domains: Names | None = None,
    layers: Numbers | Literal["all"] = "all",
    folder: Path | None = None,
    mirror: Path | None = None,
    pooling: Literal["mean", "last", "cls"] = "mean",
    states: Literal["resid", "normed", "hf"] = "resid",
    max_tokens: int = 2048,
    metrics: bool = False,
    cache: Path | None = None,
    cache_gb: float = 20.0,
    store_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    seed: int = 42,
) -> int:
    """Score every layer of a model, or of each checkpoint of a series, on tasks of MTEB. Run again it continues.

    Exit code: 0, 1 if a task failed, 2 wrong input, 130 after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub. Of a series: a folder of steps, a name on
            the Hub with --steps, or a manifest
        tokenizer: its name or folder (default: the model's own)
        tasks: layerwise32, local (all that --folder holds), or names, with commas between them
        domains: of these tasks only some: classification, clustering, pair_classification, reranking, sts
        layers: all, or numbers such as 0,3,6; 0 is the embedding output
        folder: local data in their own layout (docs/mteb.md); looked at first
        mirror: a folder with copies of data sets of the Hub, as ORGANIZATION/NAME; next
        pooling: mean is over real tokens
        states: the convention: resid, as a block leaves them; normed, each after the final norm; hf, only the last
        max_tokens: a longer text loses its end; also at the model's limit
        metrics: measure the first 1,000 texts of each task without labels, too
        cache: folder of embeddings (default: below the root)
        cache_gb: how much it may hold; the oldest task gives way
        store_dtype: of embeddings that are kept; the halves change scores a little
        seed: of mteb's draws, 42 as mteb's
    """
    ranges = {
        "max_tokens": COUNT,
        "seed": COUNT_OR_NONE,
        "cache_gb": Range(0, math.inf, above=True, words="a positive number"),
    }
    refuse_outside("", ranges, {"max_tokens": max_tokens, "seed": seed, "cache_gb": cache_gb})
    checkpoints.are_series(model)
    from lit_layers.tasks.catalogue import LOCAL, resolve
    from lit_layers.tasks.mteb_scores import mteb_analyses, mteb_version
    from lit_layers.tasks.mteb_tasks import Sources

    mteb_version()  # before anything is loaded: it may not be installed
    sources = Sources(folder=folder, mirror=mirror)
    sources.check()
    if LOCAL in tasks and folder is None:
        raise InputError("tasks: local means all tasks whose data lie in --folder, which was not given")
    resolved = resolve(tasks, domains=domains, local=sources.local_names())

    def analyses(target: Target) -> "list[Analysis]":
        return mteb_analyses(
            resolved,
            tokenizer=target.own_tokenizer(),
            root=target.root,
            sources=sources,
            layers=None if layers == "all" else tuple(sorted(layers)),
            pooling=pooling,
            states=states,
            max_tokens=max_tokens,
            seed=seed,
            cache=cache,
            cache_gb=cache_gb,
            store_dtype=store_dtype,
            metrics=metrics,
            model_limit=length_limit(target.config),
            tell=target.tell,
        )

    outcomes = measured(checkpoints.opened(model), checkpoints, analyses, tokenizer=tokenizer)
    return run(outcomes, lambda outcome: _tell(outcome, resolved))


def _tell(outcome: Outcome, tasks: "list[Task]") -> bool:
    """Prints what the root holds of these tasks (and steps, if some are named), writes all; whether anything failed."""
    from rich.console import Console

    from lit_layers import records
    from lit_layers.cli.mteb_results import show_results, write_results
    from lit_layers.tasks.mteb_scores import averages

    root, steps = outcome.root, outcome.steps
    file = root / "measurements.jsonl"
    wanted = {spec.analysis for spec in tasks}
    scored = [each for each in measurements_of(outcome) if each.analysis.startswith("mteb/")]
    scored = [each for each in scored if each.error is None and each.records]
    if shown := [each for each in scored if each.analysis in wanted and (steps is None or each.step in steps)]:
        for each in averages(records.frame(shown), expected=[spec.name for spec in tasks]):
            show_results(each, Console())
    if scored:
        print(*write_results(records.frame(scored), root / "mteb", tasks), sep="\n")
    tell_settings(outcome.root, outcome.settings)
    for error in outcome.errors:
        print(f"failed: {error}", file=sys.stderr)
    print(file)
    return bool(outcome.errors)
