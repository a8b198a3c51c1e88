"""One checkpoint of a series in memory, and what its analyses find: here, or over workers.

Nothing here writes the record: the loop (`offline`) does, which runs this in its own process or carries it to the
workers of an engine. A task of theirs is a checkpoint and a group of its analyses: those that look at the same texts,
which go through the blocks once for all of them.
"""

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.measuring import one_model
from lit_layers.measuring.measuring_options import MeasuringOptions
from lit_layers.models.build import weights_hash
from lit_layers.models.offload import Offload
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement
from lit_layers.schema import Device
from lit_layers.series import Checkpoint, Series
from lit_layers.series.auditing import SeriesMeasurements
from lit_layers.series.opening import UNAUDITED

Dtype = Literal["float32", "float64", "bfloat16"]
Tell = Callable[[int, int, str], None]  # done, of how many, what comes next: checkpoints, or analyses of one


def device_of(name: Device) -> torch.device:
    """Returns the device that an option names.

    Raises:
        InputError: a GPU where torch sees none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: cuda was asked for and torch sees no GPU: use cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def silent(done: int, total: int, what: str) -> None:
    """Tells nobody."""


class DoesNotFit(InputError):
    """An analysis that does not fit a model that was loaded."""


@dataclass(kw_only=True)
class Measurer:
    """Measures the checkpoints of a series, one after the other; the last one stays loaded.

    `analyses` and `verdicts` are by the name of the checkpoint. `earlier.store` says what is done, and takes what is
    found.
    """

    series: Series
    root: Path
    options: MeasuringOptions
    device: torch.device
    earlier: SeriesMeasurements
    analyses: dict[str, Sequence[Analysis]] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    tell: Tell = silent
    fitting: set[int] = field(default_factory=set)  # lists of analyses that fit a model of this series
    _loaded: "tuple[str, LayeredModel, str] | None" = None  # name, model, and the hash of its weights

    def measure(
        self, checkpoint: Checkpoint, fetched: "Future[Path]", analyses: Sequence[Analysis] | None = None
    ) -> list[Measurement]:
        """Measures what is not done of a checkpoint: of all its analyses, or of these.

        Raises:
            InputError: a checkpoint that cannot be had, loaded or held.
            DoesNotFit: an analysis that does not fit it.
        """
        try:
            fetched.result()
        except OSError as error:  # a disk that is full
            raise InputError(f"{checkpoint.series} {checkpoint.name} cannot be fetched: {error}") from error
        everything = self.analyses[checkpoint.name]
        analyses = everything if analyses is None else analyses
        try:
            view, fingerprint = self._whole(checkpoint, everything)
            return self._keep(checkpoint, view, analyses, fingerprint)
        except torch.OutOfMemoryError as error:
            self.release()
            why = f"{checkpoint.series} {checkpoint.name} does not fit in the memory of {self.device}"
            raise InputError(why) from error

    def release(self) -> None:
        """Lets go of the model that is loaded."""
        self._loaded = None
        if self.options.offload is not None:
            gc.collect()  # accelerate's hooks and their model hold each other

    def _whole(self, checkpoint: Checkpoint, analyses: Sequence[Analysis]) -> tuple[LayeredModel, str]:
        """A checkpoint in memory, loaded unless it was the last one, and the hash of its weights."""
        if self._loaded is None or self._loaded[0] != checkpoint.name:
            self.release()
            view = LayeredModel(self._opened(checkpoint))
            self._check(view, analyses)
            self._loaded = checkpoint.name, view, weights_hash(view.model)
        return self._loaded[1:]

    def _opened(self, checkpoint: Checkpoint) -> nn.Module:
        """The model of a checkpoint on the device, or with its blocks on the disk."""
        dtype = getattr(torch, self.options.weights_dtype)
        if self.options.offload is None:
            return checkpoint.load(dtype=dtype).to(self.device)
        return checkpoint.load(dtype=dtype, offload=Offload(self.options.offload, self.device))

    def refuse_another(self, weights: Callable[[Checkpoint], tuple[str, Any]]) -> None:
        """Refuses a series that is not the one of the root, unless it lies there: then it is its own, whatever it was
        named before.
        """
        place: Path | None = getattr(self.series, "root", None)
        if place is None or place.resolve() != self.root.resolve():
            self.earlier.refuse_another(self.series.checkpoints, weights)

    def _keep(
        self,
        checkpoint: Checkpoint,
        view: Any,
        analyses: Sequence[Analysis],
        fingerprint: str,
    ) -> list[Measurement]:
        """Measures one checkpoint by these weights, whatever files they came in: training writes others."""
        source, same = checkpoint.provenance(), {}
        source |= {} if self.options.offload is None else {"offloaded": True}
        if self.series.is_alone:
            source["audit"] = UNAUDITED
            self.refuse_another(lambda _: ("weights_hash", fingerprint))
        else:
            source["audit"] = self.verdicts[checkpoint.name]
            same["model_tokenizer_hash"] = self.earlier.tokenizer_hash(checkpoint)
            source |= {name: value for name, value in same.items() if value is not None}
        measured = [
            *one_model.measure_missing(
                view,
                analyses,
                self.earlier.store,
                run=self.earlier.run_of(checkpoint),
                step=checkpoint.step,
                tokens=checkpoint.tokens,
                provenance=source,
                weights_hash=fingerprint,
                starting=lambda analysis: self.tell(analyses.index(analysis), len(analyses), analysis.name),
                same=same,
            )
        ]
        self.tell(len(analyses), len(analyses), "")
        return measured

    def _check(self, view: Any, analyses: Sequence[Analysis]) -> None:
        """Before the first number: what does not fit is refused."""
        if id(analyses) in self.fitting:
            return
        try:
            for analysis in analyses:
                analysis.check(view)
        except InputError as error:
            raise DoesNotFit(str(error)) from error.__cause__
        self.fitting.add(id(analyses))
