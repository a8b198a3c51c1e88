"""`lit-layers mteb`: every layer of a model, or of each checkpoint of a series, as an embedding model."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.cli.bar import bar
from lit_layers.cli.mteb_options import read_options, sources_and_tasks
from lit_layers.errors import InputError

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.embeddings.task_list import TaskSpec
    from lit_layers.embeddings.task_sources import Sources
    from lit_layers.series import Series

FAILED, INTERRUPTED = 1, 130
LIMITS = ("n_positions", "max_position_embeddings", "max_seq_len")  # how config.json names the longest text


def main(argv: list[str]) -> int:
    """Scores what the options say, prints means and best layers; 130 where Ctrl-C cut it short, 1 if a task failed."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over ours; read at import
    options = read_options(argv)
    from lit_layers.embeddings.analysis import mteb_version

    mteb_version()  # before anything is loaded: it may not be installed
    sources, tasks = sources_and_tasks(options)
    try:
        return _series(options, sources, tasks) if options.is_series else _one_model(options, sources, tasks)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return INTERRUPTED


def _one_model(options: argparse.Namespace, sources: "Sources", tasks: "list[TaskSpec]") -> int:
    from lit_layers.models.shard_files import ShardFiles
    from lit_layers.offline import analyze, own_tokenizer

    root = options.root or Path("checkpoints") / _name(options.model)
    tokenizer = options.tokenizer or own_tokenizer(options.model, options.revision)
    if tokenizer is None:
        raise InputError(f"tokenizer: {options.model} carries none; name one with --tokenizer")
    config = ShardFiles(options.model, revision=options.revision).config
    with bar("opening the model") as show:
        told = _Told(show)
        found = analyze(
            options.model,
            _analyses(options, sources, tasks, tokenizer, root, config, told.detail),
            root=root,
            revision=options.revision,
            device=options.device,
            dtype=options.dtype,
            progress=told,
        )
    errors = [f"{each.analysis}: {each.error}" for each in found if each.error is not None]
    return _tell(root, tasks, errors, steps=[each.step for each in found])


def _series(options: argparse.Namespace, sources: "Sources", tasks: "list[TaskSpec]") -> int:
    from lit_layers.cli.audit import show_audit
    from lit_layers.offline_series import analyze_series
    from lit_layers.series import open_series, read_steps

    everything = open_series(options.model, "all" if options.steps is None else read_steps(options.steps))
    failed = False
    for series in everything:
        root = _root_of(options.root, series, alone=len(everything) == 1)
        tokenizer = options.tokenizer or _tokenizer_of(series)
        config = json.loads(series.listing.checkpoints[-1].source.read("config.json")) if options.metrics else {}
        with bar("auditing the series") as show:
            told = _Told(show)
            result = analyze_series(
                series,
                _analyses(options, sources, tasks, tokenizer, root, config, told.detail),
                root=root,
                allow_suspect=options.allow_suspect,
                device=options.device,
                dtype=options.dtype,
                progress=told,
            )
        show_audit(result.audit)
        if result.left_out:
            names = ", ".join(found.name for found in result.left_out)
            print(f"left out as suspect: {names}; --allow_suspect scores them")
        errors = [f"{m.analysis} at step {m.step}: {m.error}" for m in result.measurements if m.error is not None]
        failed |= bool(_tell(root, tasks, [*errors, *result.failures]))
    return FAILED if failed else 0


class _Told:
    """What is done and what comes next, with what the task that is under way says of itself."""

    def __init__(self, show: Callable[[int, int, str], None]) -> None:
        self._show, self._done, self._total = show, 0, 1

    def __call__(self, done: int, total: int, what: str) -> None:
        self._done, self._total = done, total
        self._show(done, total, what)

    def detail(self, what: str) -> None:
        self._show(self._done, self._total, what)


def _analyses(
    options: argparse.Namespace,
    sources: "Sources",
    tasks: "list[TaskSpec]",
    tokenizer: str,
    root: Path,
    config: Mapping[str, Any],
    tell: Callable[[str], None],
) -> "list[Analysis]":
    from lit_layers.embeddings.running import mteb_analyses

    return mteb_analyses(
        tasks,
        tokenizer=tokenizer,
        root=root,
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
        model_limit=_limit(config),
        tell=tell,
    )


def _limit(config: Mapping[str, Any]) -> int | None:
    """How many tokens a model takes; RoBERTa's positions begin behind the number of the padding token."""
    found = min((config[name] for name in LIMITS if isinstance(config.get(name), int)), default=None)
    behind = config.get("model_type") in ("roberta", "xlm-roberta", "camembert")
    return found - config.get("pad_token_id", 1) - 1 if found is not None and behind else found


def _tokenizer_of(series: "Series") -> str:
    """The one that a run was trained with, or that of its checkpoints."""
    from lit_layers.series.local import run_facts

    folder: Path | None = getattr(series, "root", None)
    said: Any = run_facts(folder).get("config", {}) if folder else {}
    named = said.get("tokenizer") if isinstance(said, dict) else None
    found = series.listing.checkpoints[-1].source.tokenizer() or (named if named and ":" not in named else None)
    if found is None:
        raise InputError(f"tokenizer: {series.name} carries none; name one with --tokenizer")
    return found


def _root_of(asked: Path | None, series: "Series", *, alone: bool) -> Path:
    name = re.sub(r"[^\w.-]+", "-", series.name)
    if asked:
        return asked if alone else asked / name
    return getattr(series, "root", None) or Path("checkpoints") / name


def _tell(root: Path, tasks: "list[TaskSpec]", errors: list[str], *, steps: "list[int | None] | None" = None) -> int:
    """Prints what the root holds of these tasks (and steps, if some are named), writes all; 1 if anything failed."""
    from rich.console import Console

    from lit_layers import records
    from lit_layers.cli.mteb_results import show_results, write_results
    from lit_layers.embeddings.averages import averages

    file = root / "measurements.jsonl"
    wanted = {spec.analysis for spec in tasks}
    # The last measurement counts, also one that failed: an older one may be of other weights.
    scored = [each for each in records.latest(records.read(file)) if each.analysis.startswith("mteb/")]
    scored = [each for each in scored if each.error is None and each.records]
    if shown := [each for each in scored if each.analysis in wanted and (steps is None or each.step in steps)]:
        for each in averages(records.frame(shown), expected=[spec.name for spec in tasks]):
            show_results(each, Console())
    if scored:
        print(*write_results(records.frame(scored), root / "mteb", tasks), sep="\n")
    for error in errors:
        print(f"failed: {error}", file=sys.stderr)
    print(file)
    return FAILED if errors else 0


def _name(model: str) -> str:
    """The folder's name or the repository's; step-000001000 alone would not say of which run."""
    path = Path(model).resolve()
    return f"{path.parent.name}-{path.name}" if path.name.startswith("step-") else path.name
