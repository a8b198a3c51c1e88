"""`lit-layers watch`: measure the checkpoints that appear in a folder, while somebody trains."""

import math
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from lit_layers.analyses.base import Analysis
from lit_layers.cli import threads
from lit_layers.cli.main import FAILED, INTERRUPTED
from lit_layers.cli.options import Recipe
from lit_layers.cli.verbs.analyze import OWN_CORPUS, OWN_TOKENIZER, Command
from lit_layers.errors import InputError
from lit_layers.measuring.following import EVERY, SETTLED, follow
from lit_layers.measuring.offline import SeriesResult
from lit_layers.measuring.targets import targets_of
from lit_layers.schema import COUNT_OR_NONE, KEPT_MB, VALUES_MB, Device, Engine, Range
from lit_layers.series.checkpoint import Series

INTERVAL = Range(0, math.inf, above=True, words="a positive number of seconds")
SECONDS = Range(0, math.inf, words="a number of seconds of at least 0")


def watch(
    recipe: Recipe,
    folder: Path,
    *,
    root: Path | None = None,
    every: Annotated[float, INTERVAL] = EVERY,
    settled: Annotated[float, SECONDS] = SETTLED,
    patience: Annotated[float | None, SECONDS] = None,
    corpus: str = OWN_CORPUS,
    tokenizer: str | None = OWN_TOKENIZER,
    stream_blocks: bool = False,
    allow_suspect: bool = False,
    device: Device = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    kept_mb: Annotated[int, COUNT_OR_NONE] = KEPT_MB,
    values_mb: Annotated[int, COUNT_OR_NONE] = VALUES_MB,
    engine: Engine = "process",
    metrics: str | None = None,
    analyses: list[Analysis] = [],  # noqa: B006
) -> int:
    """Measure the checkpoints in a folder, and those that come, until Ctrl-C or for as long as --patience says.

    Exit code: 0, 1 if anything failed, 2 wrong input, 130 after Ctrl-C.

    Args:
        folder: where checkpoints appear: of the HF Trainer (checkpoint-500), of fit --measure async, or of others
        root: folder of the results (default: the folder itself)
        every: seconds between two looks
        settled: seconds that the files of a checkpoint must be unchanged, as it may be half written
        patience: ends when nothing came for so many seconds and no fit --measure async goes on there; null: never
        corpus: stands for ${corpus} in recipes
        tokenizer: stands for ${tokenizer} in recipes
        stream_blocks: read a model block by block: it is never in memory as a whole
        allow_suspect: measure checkpoints, too, that the audit of the series found suspect
        device: auto: a GPU if there is one
        dtype: what weights are converted to
        kept_mb: of states that several analyses look at, in memory between them; what is more lies on the disk
        values_mb: at most so much of each prompt's values is kept beside the measurements, for paired orders; 0: none
        engine: process: this one; ray: workers on the machines of a Ray cluster, or on this one (docs/clusters.md)
        metrics: what to measure, by names with commas between: coupling,lens,prompt_entropy; instead of analyses
        analyses: what to measure (default: those of the run's training, elsewhere Trajectory, Representation, Coupling)
    """
    if not folder.is_dir():
        raise InputError(f"folder: expected a folder in which checkpoints appear, {folder} is none")
    command, failures = Command(recipe), set[str]()
    print(f"{threads.description(device)}; watching {folder}", file=sys.stderr)

    def measure(series: Series) -> SeriesResult:
        how: Any = {"device": device, "stream_blocks": stream_blocks, "root": root or folder}
        named = None if command.wants_own_tokenizer else tokenizer
        (target,) = targets_of([series], command.analyses, tokenizer=named, **how)
        options = {"allow_suspect": allow_suspect, "kept_mb": kept_mb, "values_mb": values_mb, "engine": engine}
        result = target.measure(progress=lambda *_: None, beside_training=True, dtype=dtype, **options)
        failures.clear()
        failures.update(
            result.failures, (f"{each.analysis}: {each.error}" for each in result.measurements if each.error)
        )
        _tell(result)
        return result

    try:
        follow(folder, measure, every=every, settled=settled, patience=patience)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return INTERRUPTED
    for failure in sorted(failures):
        print(f"failed: {failure}", file=sys.stderr)
    print((root or folder) / "measurements.jsonl")
    return FAILED if failures else 0


def _tell(result: SeriesResult) -> None:
    steps = sorted({each.step for each in result.measurements if each.step is not None})
    if steps:
        print(f"step {', '.join(map(str, steps))}: {len(result.measurements)} measured", flush=True)
    if result.left_out:
        print(f"left out as suspect: {', '.join(one.name for one in result.left_out)}", flush=True)
