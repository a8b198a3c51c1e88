"""`lit-layers watch`: measure the checkpoints that appear in a folder, while somebody trains."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Annotated

from lit_layers.cli import FAILED, threads
from lit_layers.cli.console import note
from lit_layers.cli.measuring import take_own_gpu, wait_for_the_others
from lit_layers.cli.options import Recipe, given
from lit_layers.cli.refusals import refuse_beside, refuse_unwritable
from lit_layers.cli.verbs.analyze import AnalysisOptions, Command
from lit_layers.errors import InputError
from lit_layers.measuring.following import EVERY, SETTLED, follow
from lit_layers.measuring.measuring_options import AUTO, MeasuringOptions
from lit_layers.measuring.offline import SeriesResult
from lit_layers.measuring.targets import targets_of
from lit_layers.schema import Range
from lit_layers.series.checkpoint import Series

INTERVAL = Range(0, 86_400, above=True, words="a positive number of seconds, at most 86,400 (a day)")
SECONDS = Range(0, math.inf, words="a number of seconds of at least 0")


def watch(
    recipe: Recipe,
    folder: Path,
    measuring: MeasuringOptions,
    measured: AnalysisOptions,
    *,
    every: Annotated[float, INTERVAL] = EVERY,
    settled: Annotated[float, SECONDS] = SETTLED,
    patience: Annotated[float | None, SECONDS] = None,
) -> int:
    """Measure the checkpoints in a folder, and those that come, until Ctrl-C or for as long as --patience says. Results
    go to the folder itself unless --root names another.

    Exit code: 0, 1 if anything failed, 2 wrong input, 130 after Ctrl-C.

    Args:
        folder: where checkpoints appear: of the HF Trainer (checkpoint-500), of fit --measure async, or of others
        every: seconds between two looks at the folder
        settled: seconds that the files of a checkpoint must be unchanged before it is measured, as it may be half
            written
        patience: end when nothing came for so many seconds, and no fit --measure async goes on there; null: never
    """
    no_downloads = "is for series of the Hub, and what appears in a folder of this machine is never removed"
    refuse_beside(given(measuring), [(("keep_downloads",), True, no_downloads)])
    if not folder.is_dir():
        raise InputError(f"folder: expected a folder in which checkpoints appear, {folder} is none")
    command, failures = Command(recipe), set[str]()
    root = measuring.root or folder
    refuse_unwritable("root", root)
    measuring = dataclasses.replace(measuring, root=root)
    take_own_gpu(measuring.device, os.environ)
    if not measuring.is_hidden:
        threads.tell(measuring.device, f"; watching {folder}")

    def measure(series: Series) -> SeriesResult:
        (target,) = targets_of([series], command.analyses, measuring, tokenizer=measured.named_tokenizer)
        result = target.measure(lambda *_: None, beside_training=True)
        failures.clear()
        failures.update(
            result.failures, (f"{each.analysis}: {each.error}" for each in result.measurements if each.error)
        )
        _tell(result)
        return result

    if follow(folder, measure, kept_in=root, every=every, settled=settled, patience=patience) is None:
        note(f"{folder}: no checkpoint appeared, nothing is measured")
        return 0
    for failure in sorted(failures):
        note(f"failed: {failure}")
    print(root / "measurements.jsonl", flush=True)  # torchrun may end this process as soon as another one ends
    if measuring.shard == AUTO:
        wait_for_the_others(os.environ)
    return FAILED if failures else 0


def _tell(result: SeriesResult) -> None:
    steps = sorted({each.step for each in result.measurements if each.step is not None})
    if steps:
        print(f"step {', '.join(map(str, steps))}: {len(result.measurements)} measured", flush=True)
    if result.left_out:
        names = ", ".join(one.name for one in result.left_out)
        print(f"left out as suspect: {names}; --allow-suspect measures them", flush=True)
