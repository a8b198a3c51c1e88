"""`lit-layers mteb`: every layer of a model, or of each checkpoint of a series, as an embedding model."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from lit_layers.cli.measuring import Outcome, Target, length_limit, measured, measurements_of, run, tell_settings
from lit_layers.cli.mteb_options import read_options, sources_and_tasks

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.tasks.catalogue import Task
    from lit_layers.tasks.mteb_tasks import Sources


def main(argv: list[str]) -> int:
    """Scores what the options say, prints means and best layers; 130 where Ctrl-C cut it short, 1 if a task failed."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over ours; read at import
    options = read_options(argv)
    from lit_layers.tasks.mteb_scores import mteb_version

    mteb_version()  # before anything is loaded: it may not be installed
    sources, tasks = sources_and_tasks(options)
    made = measured(options, lambda target: _analyses(options, sources, tasks, target), tokenizer=options.tokenizer)
    return run(made, lambda outcome: _tell(outcome, tasks))


def _analyses(options: argparse.Namespace, sources: "Sources", tasks: "list[Task]", target: Target) -> "list[Analysis]":
    from lit_layers.tasks.mteb_scores import mteb_analyses

    return mteb_analyses(
        tasks,
        tokenizer=target.own_tokenizer(),
        root=target.root,
        sources=sources,
        layers=options.layers,
        pooling=options.pooling,
        states=options.states,
        max_tokens=options.max_tokens,
        seed=options.seed,
        cache=options.cache,
        cache_gb=options.cache_gb,
        store_dtype=options.store_dtype,
        metrics=options.metrics,
        model_limit=length_limit(target.config),
        tell=target.tell,
    )


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
