"""Analyses on a model, or on each checkpoint of a series: what the commands that measure have in common."""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import distributed

from lit_layers import records
from lit_layers.cli import FAILED, process
from lit_layers.cli.console import bar, note, show_audit, show_table
from lit_layers.cli.options import Steps, given, refuse_beside
from lit_layers.cli.plan import Make, analyses_for, plan_of, root_of
from lit_layers.errors import refuse_odd_files
from lit_layers.identity import settings_of, shown
from lit_layers.measuring import AUTO, MeasuringOptions
from lit_layers.measuring.offline import SeriesResult, analyze_series, silent
from lit_layers.records import Measurement
from lit_layers.series import OneModel, Series, open_series


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured: folder and result, and the steps of one model (None: of a series all)."""

    root: Path
    result: "SeriesResult"
    steps: "list[int | None] | None" = None

    @property
    def settings(self) -> list[str]:
        """The settings of this call of which something is there: an analysis may fail before they are known."""
        there = {settings_of(each) for each in self.read()}
        return [name for name in self.result.settings if name in there]

    def read(self) -> "list[Measurement]":
        """All that the root holds."""
        return records.read(self.root / "measurements.jsonl")

    def measurements(self) -> "list[Measurement]":
        """The measurements of the root: of the analyses that this call measured those of its settings, of others the
        usual. The last of each counts, also one that failed: an older one may be of other weights.
        """
        return shown(self.read(), self.settings)

    def complete(self, of: str = "") -> "tuple[list[Measurement], list[Measurement]]":
        """The measurements with numbers whose analysis begins so: all, and those of the steps of this call."""
        complete = [each for each in self.measurements() if each.error is None and each.records]
        complete = [each for each in complete if each.analysis.startswith(of)]
        return complete, [each for each in complete if self.steps is None or each.step in self.steps]

    def write(self, folder: str, files: "Mapping[str, pd.DataFrame | list[dict[str, Any]]]") -> None:
        """Write files into a folder of the root, as `records.write_files`, and print their paths."""
        print(*records.write_files(self.root / folder, files), sep="\n")

    def tell(self) -> bool:
        """Print what failed, and the file of all measurements; return whether anything failed."""
        failures = list[str]()
        for each in self.result.measurements:
            if each.error is not None:
                at = "" if self.steps is not None else f" at {each.run if each.step is None else f'step {each.step}'}"
                failures.append(f"{each.analysis}{at}: {each.error}")
        failures += self.result.failures
        for failure in failures:
            note(f"failed: {failure}")
        print(self.root / "measurements.jsonl")
        return bool(failures)


@dataclass(frozen=True, kw_only=True)
class Checkpoints(MeasuringOptions):
    """Which checkpoints are measured, how, and where the results go.

    Args:
        steps: which checkpoints of a series: all, a list such as 0,1,1000, {log_spaced: N}, pythia, {every: N}
        revision: a branch, tag or commit of the Hub
        submodule: in a folder of *.ckpt files: which submodule is the network (default: found by its tensors)
        untrained: a seed: measure the model with new random weights in place of its own, as a model of its own
        plan: say what it would take, by a first share of the data; nothing is kept
    """

    steps: Steps | None = None
    revision: str | None = None
    submodule: str | None = None
    untrained: int | None = None
    plan: bool = False

    def are_series(self, model: str) -> bool:
        """Whether a series is meant, not one model.

        Raises:
            InputError: an option that is for the other of them.
        """
        folder = Path(model)
        if folder.is_dir():
            refuse_odd_files(folder)
        is_steps = folder.is_dir() and not (folder / "config.json").is_file()
        if folder.is_dir() and any(folder.glob("*.ckpt")):  # whose config.json may lie beside them
            is_steps |= not any(any(folder.glob(weights)) for weights in ("*.safetensors", "*.bin"))
        is_series = self.steps is not None or is_steps or model.endswith((".yaml", ".yml"))
        of_series = ("allow_suspect", "keep_downloads", "shard", "submodule")
        cases = [
            (of_series, not is_series, "is for series, and one model was named"),
            (("revision", "untrained"), is_series, f"is for one model, and {model} is a series"),
            (("untrained",), self.offload is not None, "new weights are in no file that --offload could read"),
        ]
        refuse_beside(given(self), cases)
        return is_series

    def opened(self, model: str) -> "list[Series]":
        """The model, or each series that is meant.

        Raises:
            InputError: there is none, or an option does not fit it.
        """
        if not self.are_series(model):
            return [OneModel(model, revision=self.revision, untrained=self.untrained)]
        steps = "all" if self.steps is None else self.steps
        return open_series(model, steps, model=self.submodule)


def measured(
    everything: "Sequence[Series]",
    options: Checkpoints,
    make: "Make",
    tell: Callable[[Outcome], bool],
    *,
    tokenizer: str | None = None,
    beside_training: bool = False,
) -> int:
    """Measure the model, or each series that is meant, have `tell` print each result, and return the exit code.

    `tell` returns whether anything failed. With --plan only say what it takes. While a training goes on, it is called
    again and again.

    Raises:
        InputError: a model or series that is not there, options that do not fit it.
    """
    hidden = options.is_hidden or beside_training
    take_own_gpu(options.device, os.environ)
    if not hidden and not options.plan:
        process.tell(options.device)
    failed = False
    for series in everything:
        about: Any = {"root": root_of(series, options.root, is_only=len(everything) == 1), "tokenizer": tokenizer}
        if options.plan:
            plan = plan_of(series, make, options, **about)
            show_table(plan.table(len(series.checkpoints)), series.name)
            print(*plan.notes(), sep="\n")
            continue
        with bar("opening the model" if series.is_alone else "auditing the series", hidden=hidden) as show:
            at_work = silent if options.engine == "ray" else functools.partial(show, None, None)
            analyses = analyses_for(series, make, tell=at_work, **about)
            placed: Any = {"root": about["root"], "beside_training": beside_training}
            result = analyze_series(series, analyses, options, progress=show, **placed)
        if not hidden and not series.is_alone:
            show_audit(result.audit)
        if result.left_out:
            names = ", ".join(suspect.name for suspect in result.left_out)
            print(f"left out as suspect: {names}; --allow_suspect measures them")
        steps = [one.step for one in series.checkpoints] if series.is_alone else None
        failed |= tell(Outcome(root=about["root"], result=result, steps=steps))
    sys.stdout.flush()  # torchrun may end this process as soon as another one ends
    if options.shard == AUTO and not options.plan and not beside_training:
        wait_for_the_others(os.environ)
    return FAILED if failed else 0


def take_own_gpu(device: str, environment: Mapping[str, str]) -> None:
    """Make `cuda` mean a GPU of its own for each process of torchrun on a machine."""
    if device == "cpu" or "LOCAL_RANK" not in environment:
        return
    if torch.cuda.is_available():  # fewer GPUs than processes are shared
        torch.cuda.set_device(int(environment["LOCAL_RANK"]) % torch.cuda.device_count())


def wait_for_the_others(environment: Mapping[str, str]) -> None:
    """Return when every process of torchrun is done: it ends all of them once one has ended with an error."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    distributed.init_process_group("gloo", timeout=timedelta(days=30))
    distributed.barrier()
    distributed.destroy_process_group()
