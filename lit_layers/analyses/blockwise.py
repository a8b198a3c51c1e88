"""Analyses that look at one block at a time: on a model at hand, or on one that is read block by block.

A measurement of the latter goes on from where it was interrupted.
"""

import hashlib
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, DividedAnalysis
from lit_layers.analyses.states import States, in_convention
from lit_layers.analyses.statistics import with_a_value
from lit_layers.errors import InputError, kind_and_words, refused
from lit_layers.files.durable import own_draft_of
from lit_layers.models.shared_pass import pieces, row_digests
from lit_layers.models.streaming import Entered, StreamedModel
from lit_layers.models.view import Batch, BlockCall, LayeredModel
from lit_layers.records import Record


@dataclass(frozen=True, eq=False)
class Visit:
    """One block on one batch: what an analysis that goes layer by layer is shown."""

    layer: int  # of the block, 1..L
    batch: int
    block: Callable[[Tensor], Tensor]  # the batch's other arguments are in it
    before: Tensor  # (batch, tokens, dim): layer - 1
    after: Tensor
    mask: Tensor  # (batch, tokens), False on padding


class LayerwiseRun(ABC):
    """One measurement under way, shown every block on every batch: `start` a batch, then `visit` its blocks in order.

    Which comes first, the next block or the next batch, makes no difference. `state` is all that was computed so far,
    plain tensors by key: a run that is given the state of another, which then lies on the CPU, goes on from there.
    """

    def __init__(self) -> None:
        self.state: dict[Any, Tensor] = {}

    @abstractmethod
    def start(self, batch: int, hidden: Tensor, mask: Tensor) -> None:
        """Takes layer 0 (batch, tokens, dim) of a batch."""

    @abstractmethod
    def visit(self, visit: Visit) -> None:
        """Takes one block on one batch."""

    def revisit(self, visit: Visit) -> None:
        """Takes it again, once every block has been visited: only for analyses of two passes."""
        raise NotImplementedError(f"{type(self).__name__} needs one pass")

    @abstractmethod
    def records(self) -> Iterable[Record]:
        """Yields what all visits together gave."""

    def of_batch(self, batch: int) -> dict[Any, Tensor]:
        """The state of one batch, by the second part of its keys."""
        return {key: tensor for (number, key), tensor in self.state.items() if number == batch}

    def batches(self) -> list[dict[Any, Tensor]]:
        """The state of every batch in their order, where all is kept under (BATCH, KEY)."""
        return [self.of_batch(batch) for batch in sorted({batch for batch, _ in self.state})]

    def append(self, batch: int, rows: Mapping[Any, Tensor]) -> None:
        """Adds the next layer's rows to what is kept of a batch, on the CPU."""
        for key, row in rows.items():
            before, row = self.state.get((batch, key)), row[None].cpu()
            self.state[batch, key] = row if before is None else torch.cat([before, row])


class LayerwiseAnalysis(DividedAnalysis):
    """An analysis that looks at one block at a time, so that a model need never be in memory as a whole.

    Subclasses have the field `batches` and say how a run begins; `run` shows it a model that is at hand, and
    `walk` one that is read block by block: the numbers come from the same code.
    """

    passes: ClassVar[int] = 1  # 2: every block is shown again when all have been seen
    carried: ClassVar[int] = 0  # bytes a token and width that wait between two blocks

    @abstractmethod
    def begin(self, model: LayeredModel, store: "TensorFolder | None" = None) -> LayerwiseRun:
        """A measurement that has seen nothing yet.

        `store` takes what is large and needed again in the second pass. None: all blocks of a batch come one after the
        other, and what is costly to compute twice is kept in memory meanwhile.
        """

    def prompts(self, model: LayeredModel) -> Iterable[Batch]:
        """The batches as they are measured."""
        return self.batches

    def parts(self, model: LayeredModel) -> Iterator[tuple[int, Batch]]:
        return enumerate(pieces(model, self.prompts(model)))

    def reads(self, model: LayeredModel, part: tuple[int, Batch]) -> Sequence[Batch]:
        return [part[1]]

    def of_part(self, model: LayeredModel, part: tuple[int, Batch]) -> dict[str, Tensor]:
        number, batch = part
        run, trajectory = self.begin(model), model.trajectory(batch)
        hidden = trajectory.hidden
        visits = [
            Visit(layer, number, trajectory.block(layer), hidden[layer - 1], hidden[layer], trajectory.mask)
            for layer in range(1, model.num_layers + 1)
        ]
        run.start(number, hidden[0], trajectory.mask)
        for visit in visits:
            run.visit(visit)
        if self.passes == 2:
            for visit in visits:
                run.revisit(visit)
        return {name: tensor.cpu() for name, tensor in run.state.items()}

    def combine(self, model: LayeredModel, results: list[dict[str, Tensor]]) -> Iterable[Record]:
        run = self.begin(model)
        for state in results:
            run.state.update(state)
        yield from run.records()


Key = tuple[str | float | None, ...]  # of values: a metric, say, and what else tells them apart


def joined(results: Sequence[Mapping[Key, Tensor]], dim: int = 1) -> dict[Key, Tensor]:
    """The values of all batches by their key, prompts along `dim`; a batch may lack some."""
    keys = dict.fromkeys(key for result in results for key in result)
    return {key: torch.cat([result[key] for result in results if key in result], dim) for key in keys}


class StatesAnalysis(LayerwiseAnalysis):
    """An analysis that needs each layer's states alone: values of prompts at every layer, then records of all of them.

    Subclasses have the field `states` beside `batches`.
    """

    states: States

    @abstractmethod
    def of_layer(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        """Values (batch, ...) by key, of one layer's states (batch, tokens, dim)."""

    @abstractmethod
    def of_prompts(self, values: dict[Key, Tensor]) -> Iterable[Record]:
        """Yields the records of the values (layers + 1, prompts, ...) of all prompts."""

    def begin(self, model: LayeredModel, store: "TensorFolder | None" = None) -> LayerwiseRun:
        return _StatesRun(model, self.resolved(model))


class _StatesRun(LayerwiseRun):
    """The state (BATCH, KEY) holds the values (layers so far, batch, ...)."""

    def __init__(self, model: LayeredModel, analysis: StatesAnalysis) -> None:
        super().__init__()
        self.model, self.analysis = model, analysis

    def start(self, batch: int, hidden: Tensor, mask: Tensor) -> None:
        self._take(batch, 0, hidden, mask)

    def visit(self, visit: Visit) -> None:
        self._take(visit.batch, visit.layer, visit.after, visit.mask)

    def records(self) -> Iterable[Record]:
        return self.analysis.of_prompts(joined(self.batches()))

    def _take(self, batch: int, layer: int, hidden: Tensor, mask: Tensor) -> None:
        states = in_convention(self.model, self.analysis.states, layer, hidden)
        self.append(batch, self.analysis.of_layer(states, mask))


STATE, FACTORS = "state.pt", "factors"
Progress = Callable[[int, int, str], None]  # blocks done, blocks in all, what is done next


@dataclass
class Outcome:
    """The records of one analysis, or why it failed."""

    seconds: float = 0.0
    error: str | None = None
    records: list[Record] = field(default_factory=list)


def layerwise(analyses: Sequence[Analysis]) -> list[LayerwiseAnalysis]:
    """The analyses, all of which look at one block at a time.

    Raises:
        InputError: one that does not; the sentence names it.
    """
    for analysis in analyses:
        if not isinstance(analysis, LayerwiseAnalysis):
            raise InputError(
                f"{analysis.name}: {type(analysis).__name__} needs the whole model and cannot be streamed; those that "
                "can are Trajectory, Representation, StateGeometry, PooledStates, StateMetric and Coupling: leave it "
                "out, or measure without --stream-blocks"
            )
    return [analysis for analysis in analyses if isinstance(analysis, LayerwiseAnalysis)]


def walk(
    model: StreamedModel, analyses: Sequence[LayerwiseAnalysis], folder: Path, progress: Progress | None = None
) -> dict[str, Outcome]:
    """What each analysis finds, by its name, from one walk over the blocks, or two where one of them needs it.

    Every finished block is kept in `folder`; called again with the same folder, the walk goes on after it. The folder
    belongs to one model and one list of analyses: that is the caller's care, as is removing it in the end.

    Raises:
        InputError: a block that cannot be read, prompts that the model does not take.
    """
    return _Walk(model, analyses, folder, progress or (lambda done, total, what: None)).run()


class TensorFolder:
    """Tensors by name, each in a file: as many as the disk holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        path = self._path(name)
        _make(path.parent)
        save(tensor.cpu(), path)

    def __getitem__(self, name: str) -> Tensor:
        return torch.load(self._path(name), weights_only=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"


def save(content: Any, path: Path) -> None:
    """Replaces `path` as a whole, and returns when it is on the disk."""
    partial = own_draft_of(path)
    with refused(f"cannot write {path}"):
        try:
            with open(partial, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


class _Walk:
    def __init__(
        self, model: StreamedModel, analyses: Sequence[LayerwiseAnalysis], folder: Path, progress: Progress
    ) -> None:
        self.model, self.folder, self.progress = model, folder, progress
        self.analyses = {analysis.name: analysis for analysis in analyses}
        for analysis in analyses:
            analysis.check_options(model)
        self.runs: dict[str, LayerwiseRun] = {
            name: analysis.begin(model, TensorFolder(folder / FACTORS / hashlib.sha256(name.encode()).hexdigest()[:8]))
            for name, analysis in self.analyses.items()
        }
        self.outcomes = {name: Outcome() for name in self.analyses}
        self.num_passes = max(analysis.passes for analysis in self.analyses.values())
        self.streams = _streams(model, analyses)
        self.hidden: dict[str, Tensor] = {}  # of every stream and batch, in front of the next block

    def run(self) -> dict[str, Outcome]:
        _make(self.folder)
        first_pass, first_layer = self._resume()
        for number in range(first_pass, self.num_passes + 1):
            entered = self._enter(number, fresh=first_layer == 1)
            for layer in range(first_layer, self.model.num_layers + 1):
                self._block(number, layer, entered)
            first_layer = 1
            self.hidden = {}
        for name, run in self.runs.items():
            if self.outcomes[name].error is None:
                self._guarded(name, self._finish, name, run)
        return self.outcomes

    def _finish(self, name: str, run: LayerwiseRun) -> None:
        self.outcomes[name].records += with_a_value(name, run.records())

    def _enter(self, number: int, *, fresh: bool) -> dict[str, Entered]:
        """All batches before block 1; their states are taken from there where the pass begins."""
        entered = {}
        for stream in self._active(number):
            for index, batch in enumerate(stream.batches):
                key = f"{stream.key}/{index}"
                entered[key] = self.model.enter(batch)
                if not fresh:
                    continue
                self.hidden[key] = entered[key].hidden
                if number == 1:
                    for name in stream.analyses:
                        self._guarded(name, self.runs[name].start, index, self.hidden[key], entered[key].mask)
        # layer 0 is in `hidden` now, and is let go with it
        return {key: Entered(one.hidden[:0], one.mask, one.calls) for key, one in entered.items()}

    def _block(self, number: int, layer: int, entered: dict[str, Entered]) -> None:
        last = self.model.num_layers
        done = (number - 1) * last + layer - 1
        self.progress(done, self.num_passes * last, f"pass {number} of {self.num_passes}, block {layer} of {last}")
        following = layer + 1 if layer < last else (1 if number < self.num_passes else None)
        passed: dict[bytes, tuple[str, int]] = {}  # by text its batch and row
        with self.model.resident(layer, following=following):
            for stream in self._active(number):
                for index, texts in enumerate(stream.texts):
                    key = f"{stream.key}/{index}"
                    call, before = entered[key].calls[layer - 1], self.hidden[key]
                    after = self._passed(call, before, texts, passed)
                    passed = {text: (key, row) for row, text in enumerate(texts)} | passed
                    visit = Visit(layer, index, call, before, after, entered[key].mask)
                    for name in stream.analyses:
                        run = self.runs[name]
                        if number == 1 or self.analyses[name].passes == 2:
                            self._guarded(name, run.visit if number == 1 else run.revisit, visit)
                    self.hidden[key] = after
        self._save(number, layer + 1)
        self.progress(done + 1, self.num_passes * last, "")

    def _passed(
        self, call: BlockCall, before: Tensor, texts: list[bytes], passed: dict[bytes, tuple[str, int]]
    ) -> Tensor:
        """A batch after a block, through which those of its texts go that were in no batch before."""
        with torch.no_grad():
            if not any(text in passed for text in texts):
                return call(before)
            rows = []
            for row, text in enumerate(texts):
                if text in passed:
                    key, place = passed[text]
                    rows.append(self.hidden[key][place])
                else:
                    rows.append(call.cut(row, len(texts))(before[row : row + 1])[0])
            return torch.stack(rows)

    def _active(self, number: int) -> list["_Stream"]:
        """The streams that a pass needs."""
        return [
            stream
            for stream in self.streams
            if any(
                self.outcomes[name].error is None and self.analyses[name].passes >= number for name in stream.analyses
            )
        ]

    def _guarded(self, name: str, call: Callable, *arguments: Any) -> None:
        """Calls an analysis; one that fails is left out from there on, and the others go on."""
        outcome = self.outcomes[name]
        if outcome.error is not None:
            return
        started = time.perf_counter()
        try:
            call(*arguments)
        except Exception as failure:
            outcome.error = kind_and_words(failure)
            self.runs[name].state.clear()
        outcome.seconds += time.perf_counter() - started

    def _save(self, number: int, layer: int) -> None:
        state = {
            "pass": number,
            "layer": layer,
            "hidden": {key: _compact(hidden) for key, hidden in self.hidden.items()},
            "runs": {name: {key: _compact(t) for key, t in run.state.items()} for name, run in self.runs.items()},
            "seconds": {name: outcome.seconds for name, outcome in self.outcomes.items()},
            "errors": {name: outcome.error for name, outcome in self.outcomes.items()},
        }
        save(state, self.folder / STATE)

    def _resume(self) -> tuple[int, int]:
        """Takes up what the folder holds; the pass and the block that come next."""
        path = self.folder / STATE
        if not path.is_file():
            shutil.rmtree(self.folder / FACTORS, ignore_errors=True)
            return 1, 1
        state = torch.load(path, weights_only=True)  # on the CPU: a run puts its part where it needs it
        self.hidden = {key: hidden.to(self.model.device) for key, hidden in state["hidden"].items()}
        for name, run in self.runs.items():
            run.state.update(state["runs"][name])
            self.outcomes[name] = Outcome(state["seconds"][name], state["errors"][name])
        if state["layer"] > self.model.num_layers:
            self.hidden = {}
            return state["pass"] + 1, 1
        return state["pass"], state["layer"]


@dataclass(frozen=True)
class _Stream:
    """Batches that go through the blocks together, and the analyses that look at them."""

    key: str
    batches: list[Batch]
    texts: list[list[bytes]]  # what tells the rows of each batch apart
    analyses: list[str]


def _streams(model: StreamedModel, analyses: Sequence[LayerwiseAnalysis]) -> list[_Stream]:
    """Analyses of the same batches share them, and those of the same texts the texts: each meets a block once."""
    streams: dict[str, _Stream] = {}
    for analysis in analyses:
        batches = list(analysis.prompts(model))
        if not batches:
            raise InputError(f"{analysis.name}: the data holds no prompts")
        digest = _digest(batches)
        if digest not in streams:
            columns = [{name: batch[name] for name in model.family.columns if name in batch} for batch in batches]
            streams[digest] = _Stream(str(len(streams)), batches, [*map(row_digests, columns)], [])
        streams[digest].analyses.append(analysis.name)
    return list(streams.values())


def _digest(batches: list[Batch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for name, values in sorted(batch.items()):
            digest.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
            digest.update(values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _make(folder: Path) -> None:
    with refused(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, with memory of its own: with a view, all that it looks at would be saved."""
    tensor = tensor.cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()
