"""Run the analyses of which a checkpoint has no measurement yet, on one or more ranks.

Analyses that read the same batches share the forward passes of the model.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lit_layers.analyses.base import Analysis, Jobs, Precision, Rows, Values, joined
from lit_layers.analyses.statistics import require_values
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError, kind_and_words
from lit_layers.identity import versions
from lit_layers.measuring.ranks import OneProcess, Ranks
from lit_layers.measuring.undisturbed import DisturbedError, undisturbed
from lit_layers.models.build import weights_hash as hash_weights
from lit_layers.models.copies import BFloat16View
from lit_layers.models.offload import is_offloaded
from lit_layers.models.view import Batch, LayeredModel, Trajectory, upcast
from lit_layers.records import Measurement, Record, Store

logger = logging.getLogger(__name__)

# Upper limit in bytes of the states of a microbatch. The first value is for a CPU. The second is for a GPU, or for
# blocks that are offloaded to disk.
STATE_BYTES = 2**26, 2**28


def measure(
    model: nn.Module | LayeredModel,
    analysis: Analysis,
    *,
    run: str,
    step: int | None,
    tokens: int | None = None,
    provenance: dict[str, Any] | None = None,
    weights_hash: str | None = None,
    raises: bool = False,
) -> Measurement:
    """Run one analysis on one checkpoint, and return its measurement.

    If the analysis fails, the measurement contains its error; with `raises=True`, the error is raised instead. The
    model and all global state are restored.

    Args:
        weights_hash: hash of the weights, if it is known; otherwise, they are hashed here.

    Raises:
        InputError: if `analysis` is not an analysis, or the model has no layered view.
    """
    if not isinstance(analysis, Analysis):
        raise InputError(f"analysis: expected one, such as Lens(batches=data), got a {type(analysis).__name__}")
    step, tokens = (None if number is None else int(number) for number in (step, tokens))
    (outcome,) = outcomes(model, [analysis], weights_hash=weights_hash)
    if raises and outcome.failure is not None:
        raise outcome.failure
    return outcome.measurement(run=run, step=step, tokens=tokens, provenance=provenance)


def refuse_same_names(analyses: Iterable[Analysis]) -> None:
    """Refuse two analyses of the same name, because measurements are stored under the name of their analysis.

    Raises:
        InputError: if two analyses have the same name. The message contains the name.
    """
    names = sorted(analysis.name for analysis in analyses)
    if double := next((name for name, following in itertools.pairwise(names) if name == following), None):
        raise InputError(f"analyses: two are named {double!r}; give each a name of its own")


class Opened(NamedTuple):
    """A checkpoint in memory.

    Args:
        model: the model.
        weights_hash: hash of its weights.
        provenance: facts about its origin, for the provenance of its measurements.
    """

    model: Any
    weights_hash: str
    provenance: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A checkpoint to measure. Its model is in memory inside the context `opened()`."""

    run: str
    step: int | None
    analyses: Sequence[Analysis]
    name: str = ""
    opened: Callable[[], contextlib.AbstractContextManager[Opened]]
    tokens: int | None = None


def not_done(store: Store, run: str, step: int | None, analyses: Sequence[Analysis], **facts: Any) -> list[Analysis]:
    """Return the analyses that must still measure a step of a run.

    An analysis is done if the store holds its measurement of that step with the same options, data and `facts`.

    Args:
        facts: known facts about the weights, such as their hash.
    """
    return [each for each in analyses if not store.is_done(run, step, each, **facts)]


def measure_unless_done(
    visits: Iterable[Visit],
    store: Store,
    *,
    ranks: OneProcess | Ranks | None = None,
    on_start: Callable[[Visit, Analysis], None] = lambda visit, analysis: None,
    on_error: Callable[[Visit, InputError], None] | None = None,
) -> Iterator[Measurement]:
    """Run, for each checkpoint in turn, the analyses that have no measurement of it in the store.

    Each measurement is yielded once it is stored. Both training and `analyze` run this loop: in one process, on several
    ranks (only the first rank yields) or in a Ray worker.

    Args:
        visits: the checkpoints.
        store: the store of measurements.
        ranks: the processes that measure together; None if only this process measures.
        on_start: is called with the checkpoint and the analysis before each analysis starts.
        on_error: receives the error of a checkpoint that cannot be measured. The loop then continues. By default, the
            error is raised.
    """
    for visit in visits:
        try:
            with visit.opened() as opened:
                weights = opened.weights_hash
                due = not_done(store, visit.run, visit.step, visit.analyses, weights_hash=weights)
                begin = functools.partial(on_start, visit)
                for outcome in outcomes(opened.model, due, ranks, begin, weights_hash=weights):
                    about = {"run": visit.run, "step": visit.step, "tokens": visit.tokens}
                    measurement = outcome.measurement(**about, provenance=opened.provenance)
                    del outcome  # an exception stored in it refers to the model and would keep it in memory
                    took = f"{measurement.seconds:.1f} s, {len(measurement.records)} records"
                    logger.info("%s at step %s: %s", measurement.analysis, visit.step, measurement.error or took)
                    yield store.add(measurement)
        except InputError as error:
            if on_error is None:
                raise
            on_error(visit, error)
        finally:
            opened = None  # release the model before the next one is loaded


@dataclass
class Outcome:
    """The result of an analysis of one model, or the error with which the analysis failed."""

    analysis: Analysis  # `_prepare` replaces it by the analysis with the options of its preset
    records: list[Record] = field(default_factory=list)
    error: str | None = None
    failure: Exception | None = None  # the exception that `error` describes; None on ranks that did not raise it
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    # For each argument of the analysis's `compute`: index of a call of `update` -> values that this call returned.
    values: dict[str, dict[int, Values]] = field(default_factory=dict)

    @contextlib.contextmanager
    def attempt(self, view: LayeredModel) -> Iterator[None]:
        """Record the time that the code inside the context takes, and its exception if it raises one.

        The code must not change the model; if it does, this is recorded as a `DisturbedError`.
        """
        started = time.perf_counter()
        try:
            with undisturbed(view.model):
                yield
        except Exception as failure:
            logger.debug("%s failed", self.analysis.name, exc_info=True)
            self.error, self.failure = kind_and_words(failure), failure
        finally:
            self.seconds += time.perf_counter() - started

    def measurement(
        self, *, run: str, step: int | None, tokens: int | None = None, provenance: Mapping[str, Any] | None = None
    ) -> Measurement:
        """Return the outcome as a measurement of its checkpoint."""
        found: dict[str, Any] = {"records": self.records, "seconds": self.seconds, "error": self.error}
        facts = {**self.facts, **(provenance or {})}
        return Measurement(run=run, step=step, tokens=tokens, analysis=self.analysis.name, provenance=facts, **found)


def outcomes(
    model: nn.Module | LayeredModel,
    analyses: Sequence[Analysis],
    ranks: OneProcess | Ranks | None = None,
    on_start: Callable[[Analysis], None] = lambda analysis: None,
    *,
    weights_hash: str | None = None,
) -> Iterator[Outcome]:
    """Run analyses on a model, and yield the outcome of each on the first rank.

    Each rank runs the model on a share of the microbatches, then a share of the analysis's jobs (independent parts of
    the computation, such as one per layer). No collective operation runs inside an analysis, so a failing analysis
    blocks no rank. Numbers do not depend on the number of ranks.
    """
    ranks = ranks or OneProcess()
    views = _Views(model)
    due = [_prepare(views.own, analysis, weights_hash) for analysis in analyses]
    groups = _groups(due, views)
    waiting = {analysis.name: analysis for analysis in analyses}

    def begin(outcome: Outcome) -> None:
        if (analysis := waiting.pop(outcome.analysis.name, None)) is not None:
            on_start(analysis)

    for i, outcome in enumerate(due):
        for group in [group for group in groups if any(reader.outcome is outcome for reader in group.readers)]:
            groups.remove(group)
            for reader in group.readers:
                begin(reader.outcome)
            group.run(views, ranks)
        begin(outcome)
        _compute(outcome, views, ranks, i)
        if ranks.rank == 0:
            yield outcome
    ranks.gather(None, None)  # a barrier, so that no rank enters training's collectives early


class _Views:
    """Layered views of a model in the precisions that analyses request. Each copy is created at its first use."""

    def __init__(self, model: nn.Module | LayeredModel) -> None:
        self.own = model if isinstance(model, LayeredModel) else LayeredModel(model)
        self._made: dict[Precision, LayeredModel] = {"own": self.own}

    def __getitem__(self, precision: Precision) -> LayeredModel:
        if precision not in self._made:
            wide = upcast(self.own) if precision == "float32" else BFloat16View(self["float32"])
            self._made[precision] = wide
        return self._made[precision]

    def renew(self) -> None:
        """Discard the copies of the model, because an analysis may have changed them."""
        self._made = {"own": self.own}


def _prepare(view: LayeredModel, analysis: Analysis, weights_hash: str | None) -> Outcome:
    outcome = Outcome(analysis)
    with outcome.attempt(view):
        analysis.adopt_batches_()
        outcome.facts = describe_run(view, analysis, weights_hash)
        analysis.check_options(view)
        outcome.analysis = analysis.resolved(view)
        outcome.rows = outcome.analysis.reads(view)
    return outcome


@dataclass
class _Reader:
    """One data set (texts or images) that an analysis reads.

    The values of its rows become the argument `argument` of the analysis's `compute`.
    """

    outcome: Outcome
    argument: str
    rows: Rows
    num_updates: int = 0

    def due(self, ranks: OneProcess | Ranks, number: int, first: int, count: int) -> list[tuple[int, int, int]]:
        """Return the calls of `update` that this rank must make in a microbatch, each as (index, start, end).

        `index` numbers the calls of `update` over all microbatches. A call reads the rows start to end - 1 of the
        microbatch. Ranks take turns by microbatch. If the option `at_once` limits the rows of a call, the analysis is
        costly, so ranks take turns by call instead.

        Args:
            number: index of the microbatch.
            first: number of rows in earlier microbatches.
            count: number of rows in this microbatch.
        """
        count = count if self.rows.limit is None else max(0, min(count, self.rows.limit - first))
        size = self.rows.at_once or count
        updates: list[tuple[int, int, int]] = []
        for start in range(0, count, max(1, size)):
            turn = number if self.rows.at_once is None else self.num_updates
            if turn % ranks.size == ranks.rank and self.outcome.error is None:
                updates.append((self.num_updates, start, min(start + size, count)))
            self.num_updates += 1
        return updates


@dataclass
class _Group:
    """Analyses that read the same batches in the same precision, and therefore share one forward pass."""

    batches: Iterable[Batch]
    precision: Precision
    readers: list[_Reader] = field(default_factory=list)

    def run(self, views: _Views, ranks: OneProcess | Ranks) -> None:
        limits = [reader.rows.limit for reader in self.readers]
        most = None if None in limits else max(limit for limit in limits if limit is not None)
        first = 0
        try:
            for number, (batch, count) in enumerate(microbatches(views[self.precision], self.batches, most)):
                due = [
                    (reader, *update) for reader in self.readers for update in reader.due(ranks, number, first, count)
                ]
                self._show(views, batch, count, due)
                first += count
        except Exception as failure:  # the data could not be loaded, so every analysis of the group fails
            for reader in self.readers:
                reader.outcome.error, reader.outcome.failure = kind_and_words(failure), failure

    def _show(self, views: _Views, batch: Batch, count: int, due: list[tuple[_Reader, int, int, int]]) -> None:
        """Run the model on a microbatch of `count` rows, and make the calls of `Analysis.update` that `due` lists.

        Each call gets its own copy of the hidden states. If an analysis changes the model, the model runs again for the
        remaining analyses.
        """
        seen: Trajectory | None = None
        for position, (reader, i, start, stop) in enumerate(due):
            outcome, view = reader.outcome, views[self.precision]
            if outcome.error is not None:
                continue
            if seen is None:
                left = (other.outcome for other, *_ in due[position:])
                seen = _forward(view, batch, [*{id(each): each for each in left if each.error is None}.values()])
                if seen is None:
                    return
            with outcome.attempt(view):
                shown, rows = seen, batch
                if (start, stop) != (0, count):
                    shown, rows = seen.rows(start, stop), _slice(batch, slice(start, stop), count)
                # Copy these tensors, because `update` may write to them.
                shown = replace(shown, hidden=shown.hidden.clone(), mask=shown.mask.clone())
                outcome.values.setdefault(reader.argument, {})[i] = outcome.analysis.update(shown, rows)
            if isinstance(outcome.failure, DisturbedError):
                seen = None
                views.renew()


def _forward(view: LayeredModel, batch: Batch, sharing: list[Outcome]) -> Trajectory | None:
    """Run the model on a microbatch for several analyses.

    An equal share of the time is added to the seconds of each analysis. If the forward pass fails, all of them record
    the exception.
    """
    shared, seen = Outcome(sharing[0].analysis), None
    with shared.attempt(view):
        seen = view.trajectory(batch)
    for outcome in sharing:
        outcome.seconds += shared.seconds / len(sharing)
        outcome.error, outcome.failure = shared.error, shared.failure
    return seen


def _compute(outcome: Outcome, views: _Views, ranks: OneProcess | Ranks, offset: int) -> None:
    """Gather the values of an analysis from all ranks, run this rank's share of its jobs, and make its records.

    Values are gathered before the jobs run, and the jobs' results afterwards. Every rank takes part in both gathers,
    even if something fails, so that no rank waits for another one forever.
    """
    gathered = ranks.gather(outcome.error, outcome.values)
    outcome.values = {}
    outcome.error = next((error for error, _ in gathered if error), None)
    analysis, jobs, done = outcome.analysis, Jobs([]), dict[int, Any]()
    if outcome.error is None:
        with outcome.attempt(view := views[analysis.PRECISION]):
            values = {
                name: _joined(analysis, [of_rank[name] for _, of_rank in gathered if name in of_rank])
                for name in outcome.rows
            }
            gathered.clear()
            jobs = analysis.jobs(view, **values)
            for job, run_job in enumerate(jobs.calls):
                if (job + offset) % ranks.size == ranks.rank:
                    result = run_job()
                    done[job] = [*result] if isinstance(result, Iterator) else result
    gathered = ranks.gather(outcome.error, ({} if outcome.error else done, outcome.seconds))
    outcome.error = next((error for error, _ in gathered if error), None)
    outcome.seconds = max([outcome.seconds, *(found[1] for _, found in gathered if found is not None)])
    if outcome.error is None and ranks.rank == 0:
        results = {job: result for _, (of_rank, _) in gathered for job, result in of_rank.items()}
        with outcome.attempt(views.own):
            outcome.records = collect(analysis, jobs.records([results[job] for job in sorted(results)]))
    if isinstance(outcome.failure, DisturbedError):
        views.renew()


def _joined(analysis: Analysis, by_rank: list[dict[int, Values]]) -> Values:
    """Join the values that the calls of `update` returned on all ranks.

    They are joined in the order of the data, so that numbers do not depend on the number of ranks.
    """
    updates = {i: values for each in by_rank for i, values in each.items()}
    if not updates:
        raise InputError(f"{analysis.name}: the data holds no prompts")
    return joined([updates[i] for i in sorted(updates)])


def _groups(due: Sequence[Outcome], views: _Views) -> list[_Group]:
    groups: dict[tuple, _Group] = {}
    for outcome in due:
        for argument, rows in outcome.rows.items() if outcome.error is None else ():
            try:
                # The views "own" and "float32" are the same object unless the model is in half precision.
                key = _key(rows.batches), id(views[rows.precision])
            except Exception as failure:  # the data could not be loaded
                outcome.error, outcome.failure = kind_and_words(failure), failure
                break
            group = groups.setdefault(key, _Group(rows.batches, rows.precision))
            group.readers.append(_Reader(outcome, argument, rows))
    return list(groups.values())


def _key(batches: Iterable[Batch]) -> tuple:
    """Return a key that is equal for equal batches, so that analyses which read equal batches share forward passes.

    If the class of `batches` belongs to this package, the key contains its `content_hash`. Other classes may compute
    it wrongly, so their batches are hashed in full.
    """
    if isinstance(batches, Batches) and type(batches).__module__.startswith("lit_layers."):
        return type(batches).__name__, batches.content_hash(), getattr(batches, "batch_size", None)
    digest = hashlib.sha256()
    for batch in batches:
        for name, column in batch.items():
            values = np.asarray(column.cpu() if isinstance(column, torch.Tensor) else column)
            digest.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return (digest.hexdigest(),)


def microbatches(
    model: LayeredModel, batches: Iterable[Batch], limit: int | None = None
) -> Iterator[tuple[Batch, int]]:
    """Split batches into microbatches, and yield each with its number of rows.

    A microbatch is as large as `STATE_BYTES` allows. Its size does not depend on the values or on free memory.

    Args:
        limit: number of rows after which to stop; None yields all rows.
    """
    needed = model.family.inputs[0]
    most = STATE_BYTES[model.device.type != "cpu" or is_offloaded(model.model)]
    for batch in batches:
        column = batch[needed] if needed in batch else next(iter(batch.values()))
        count = len(column) if limit is None else min(len(column), limit)
        size = max(1, most // _row_bytes(model, column)) if needed in batch else count
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield _slice(batch, slice(start, stop), len(column)), stop - start
        limit = None if limit is None else limit - count
        if limit == 0:
            return


def _row_bytes(model: LayeredModel, column: torch.Tensor) -> int:
    """Return the number of bytes of the states of one text or image at all layers; `column` holds the inputs."""
    tokens = column.shape[1]
    if model.family.sees_images:
        tokens = model.num_patches(column.shape[-1]) + model.num_prefix_tokens
    itemsize = max(4, torch.empty((), dtype=model.dtype).element_size())
    return (model.num_layers + 1) * tokens * model.dim * itemsize


def _slice(batch: Batch, chosen: slice, count: int) -> Batch:
    """Return the rows `chosen` of a batch of `count` rows.

    Entries of the batch that are not tensors of `count` rows stay as they are.
    """
    rows = {name for name, values in batch.items() if isinstance(values, torch.Tensor) and values.shape[:1] == (count,)}
    return {name: values[chosen] if name in rows else values for name, values in batch.items()}


def collect(analysis: Analysis, results: Iterable[Record]) -> list[Record]:
    """Return the records of an analysis as a list.

    Raises:
        ValueError: if there is no record, or if an analysis that implements `update` has no record with a value.
    """
    records = list(results)
    if type(analysis).update is not Analysis.update:
        return require_values(analysis.name, records)
    if not records:
        raise ValueError(f"{analysis.name} gave no record")
    return records


def describe_run(view: LayeredModel, analysis: Analysis, weights_hash: str | None = None) -> dict[str, Any]:
    """Return facts about a measurement: all that determines its numbers, and where they were computed."""
    device = view.device
    return {
        "weights_hash": weights_hash or hash_weights(view.model),
        "config_hash": analysis.config_hash(),
        "data_hash": analysis.data_hash(),
        "tokenizer_hash": analysis.tokenizer_hash(),
        "origin": view.origin,
        **({} if view.family.proof is None else {"proof": dict(view.family.proof)}),
        "width": view.dim,
        "depth": view.num_layers,
        "parameters": sum(parameter.numel() for parameter in view.model.parameters()),
        "dtype": str(view.dtype).removeprefix("torch."),
        "attention": view.attention,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": dict(versions()),
    }
