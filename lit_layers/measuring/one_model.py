"""Analyses on one model in memory: one at a time, or all in one pass over their texts; here, or a share of them."""

import functools
import importlib.metadata
import itertools
import logging
import math
import pickle
import platform
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lit_layers.analyses.base import ALL, Analysis, DividedAnalysis
from lit_layers.analyses.states import at_least_float32
from lit_layers.analyses.statistics import with_a_value
from lit_layers.errors import InputError, kind_and_words
from lit_layers.measuring.undisturbed import undisturbed
from lit_layers.models.build import weights_hash as hash_weights
from lit_layers.models.shared_pass import SharedPass
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement, Record, Store
from lit_layers.schema import Range, refuse_outside

logger = logging.getLogger(__name__)

PACKAGES = (
    *("lit_layers", "lightning", "transformers", "timm", "tokenizers", "safetensors"),
    *("numpy", "scipy", "mteb"),
)


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
    """What one analysis finds on one checkpoint. A failing analysis gives a measurement with `error`, and raises only
    where that is asked for.

    The model and all global state are left as they were found. `weights_hash` saves hashing the weights once for each
    of several analyses of one checkpoint.
    """
    if not isinstance(analysis, Analysis):
        raise InputError(f"analysis: expected one, such as Lens(batches=data), got a {type(analysis).__name__}")
    refuse_outside(
        "", dict.fromkeys(("step", "tokens"), Range(0, math.inf, whole=True)), {"step": step, "tokens": tokens}
    )
    step, tokens = (None if number is None else int(number) for number in (step, tokens))
    attempt = Attempt()
    attempt.make(model, analysis, lambda view: collect(analysis, analysis.run(view)), weights_hash)
    attempt.end(model, analysis)
    if raises and attempt.failure is not None:
        raise attempt.failure
    return _measurement(attempt, analysis, run=run, step=step, tokens=tokens, provenance=provenance)


def refuse_same_names(analyses: Iterable[Analysis]) -> None:
    """Refuses analyses two of which would write under one name.

    Raises:
        InputError: with that name.
    """
    names = sorted(analysis.name for analysis in analyses)
    if double := next((name for name, following in itertools.pairwise(names) if name == following), None):
        raise InputError(f"analyses: two are named {double!r}; give each a name of its own")


def in_one_pass(
    model: nn.Module | LayeredModel,
    analyses: Sequence[Analysis],
    starting: Callable[[Analysis], None],
    **facts: Any,
) -> Iterator[Measurement]:
    """Yields the measurement of each analysis, in one process, of a model that is in memory whole."""
    shares = Shares(model, analyses, starting, weights_hash=facts["weights_hash"])
    for analysis in analyses:
        if is_divided(analysis):
            yield join_shares(shares.model, analysis, [shares.of(analysis)], **facts)
        else:
            starting(analysis)
            yield measure(shares.model, analysis, **facts)


def measure_missing(
    model: Any,
    analyses: Sequence[Analysis],
    store: Store,
    *,
    run: str,
    step: int | None,
    weights_hash: str,
    way: Callable[..., Iterable[Measurement]] = in_one_pass,
    starting: Callable[[Analysis], None] = lambda analysis: None,
    same: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Iterator[Measurement]:
    """Measures what is not done on one checkpoint, and yields each measurement once the store has it.

    Whatever measures a checkpoint goes this way: in training and after it, in one process or divided over several,
    whole or block by block. `same` is what provenance must say besides of what counts as done.
    """
    due = [a for a in analyses if not store.is_done(run, step, a, weights_hash=weights_hash, **(same or {}))]
    for measurement in way(model, due, starting, run=run, step=step, weights_hash=weights_hash, **facts):
        about = f"{measurement.seconds:.1f} s, {len(measurement.records)} records"
        logger.info("%s at step %s: %s", measurement.analysis, step, measurement.error or about)
        yield store.add(measurement)


@dataclass
class Attempt:
    """The result of an analysis of an undisturbed model, made at once or in turns: `result`, or else why it failed."""

    result: Any = None
    error: str | None = None
    failure: Exception | None = None  # what `error` says, in the process where it was raised
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    random_state: list[Any] = field(default_factory=list)  # where its generators stand between two turns

    def make(
        self,
        model: nn.Module | LayeredModel,
        analysis: Analysis,
        action: Callable[[Any], Any],
        weights_hash: str | None = None,
    ) -> Any:
        """Does something with the model and leaves no trace of it, whatever happens; returns the result."""
        started = time.perf_counter()
        try:
            analysis.adopt_batches_()
            view = model if isinstance(model, LayeredModel) else LayeredModel(model)
            if isinstance(view, SharedPass):
                view.turn(analysis.name)
            with undisturbed(view.model, self.random_state):
                self.facts = self.facts or describe_run(view, analysis, weights_hash)
                self.result = action(view)
        except Exception as failure:
            logger.debug("%s failed", analysis.name, exc_info=True)
            self.result, self.error, self.failure = None, kind_and_words(failure), failure
        if isinstance(model, SharedPass):
            model.renew()
        self.seconds += time.perf_counter() - started
        return self.result

    def end(self, model: nn.Module | LayeredModel, analysis: Analysis) -> None:
        """Nothing more is asked of the model: what a pass kept for the analysis is let go."""
        if isinstance(model, SharedPass):
            self.seconds += model.leave(analysis.name)
        self.random_state = []


def is_divided(analysis: Analysis) -> bool:
    """Whether an analysis is measured in parts, and not as a whole in a way of its own."""
    return isinstance(analysis, DividedAnalysis) and type(analysis).run is DividedAnalysis.run


class Shares:
    """What one process of several finds of the analyses that are divided, all in one pass over their texts.

    `numbers` are those of the parts that it measures of each analysis, by name; None: all.

    They take turns, a part each, the one next whose texts come first. So a text is held for as long as the analyses
    that look at it take for it; an analysis that fails is left out from there on. Each turn is undisturbed by others.
    """

    def __init__(
        self,
        model: nn.Module | LayeredModel,
        analyses: Sequence[Analysis],
        starting: Callable[[Analysis], None],
        *,
        numbers: Mapping[str, Container[int]] | None = None,
        weights_hash: str | None = None,
    ) -> None:
        view = model if isinstance(model, LayeredModel) else LayeredModel(model)
        self.model = SharedPass.of(view)
        self.starting, self.weights_hash = starting, weights_hash
        self.analyses: dict[str, Any] = {analysis.name: analysis for analysis in analyses}
        self.attempts = {analysis.name: Attempt() for analysis in analyses}
        self._parts: dict[str, dict[int, Any]] = {name: {} for name in self.attempts}
        self._turns: dict[str, Iterator[float]] = {}
        self._places: dict[str, float] = {}  # where in the pass each that is not done asks next
        self._begun: set[str] = set()
        for name, analysis in self.analyses.items():
            if is_divided(analysis):
                mine = ALL if numbers is None else numbers[name]
                self._turns[name] = analysis.turns(self.model, mine, self._parts[name])
                self._turn(name)  # announces what it will read
            else:
                # What it cannot say now is no error: it asks for its texts itself when it runs.
                Attempt().make(self.model, analysis, functools.partial(_announce, analysis), weights_hash)

    def of(self, analysis: Analysis) -> Attempt:
        """The share of one analysis; others come as far as their texts are the same or come before."""
        self._begin(analysis.name)
        while analysis.name in self._places:
            following = min(self._places, key=lambda name: self._places[name])
            self._begin(following)
            self._turn(following)
        return self.attempts[analysis.name]

    def _begin(self, name: str) -> None:
        if name not in self._begun:
            self._begun.add(name)
            self.starting(self.analyses[name])

    def _turn(self, name: str) -> None:
        attempt, analysis = self.attempts[name], self.analyses[name]
        others = min((place for other, place in self._places.items() if other != name), default=math.inf)
        is_first = name not in self._places

        def advance(_: Any) -> float | None:
            """Goes on with its parts for as long as no other's texts come before."""
            for place in self._turns[name]:
                if is_first or place > others:
                    return place
            return None

        place = attempt.make(self.model, analysis, advance, self.weights_hash)
        if place is not None:
            self._places[name] = place
            return
        self._places.pop(name, None)
        if attempt.error is None:
            attempt.result = self._parts.pop(name)
        if attempt.error is not None or type(analysis).announced is Analysis.announced:
            attempt.end(self.model, analysis)  # else what follows on the parts reads more


def _announce(analysis: Analysis, model: SharedPass) -> None:
    if type(analysis).announced is not Analysis.announced:
        SharedPass.of(at_least_float32(model)).announce(analysis.name, analysis.announced())


def sendable(attempt: Attempt) -> Attempt:
    """An attempt as it is sent to another process: a value that cannot be sent is an error of its own."""
    try:
        return replace(attempt, result=pickle.dumps(attempt.result), failure=None)
    except Exception as failure:
        return replace(attempt, result=None, error=attempt.error or kind_and_words(failure), failure=None)


def join_shares(
    model: nn.Module | LayeredModel,
    analysis: Any,
    shares: Sequence[Attempt],
    *,
    weights_hash: str | None = None,
    **facts: Any,
) -> Measurement:
    """The measurement that the shares of all processes make, equal to that of `measure`, whose `facts` they are.

    Its error is that of the first share that failed, its seconds those of the slowest process and of joining.
    """

    def join(view: LayeredModel) -> list[Record]:
        results = [pickle.loads(each.result) if isinstance(each.result, bytes) else each.result for each in shares]
        return collect(analysis, analysis.join(view, results))

    seconds = max(share.seconds for share in shares)
    attempt = next((share for share in shares if share.error is not None), None)
    if attempt is None:
        attempt = Attempt()
        attempt.make(model, analysis, join, weights_hash)
        attempt.end(model, analysis)
        seconds += attempt.seconds
    return _measurement(replace(attempt, seconds=seconds), analysis, **facts)


def _measurement(
    attempt: Attempt,
    analysis: Analysis,
    *,
    run: str,
    step: int | None,
    tokens: int | None = None,
    provenance: dict[str, Any] | None = None,
) -> Measurement:
    records = [] if attempt.error is not None else attempt.result
    outcome: dict[str, Any] = {"records": records, "seconds": attempt.seconds, "error": attempt.error}
    facts = {**attempt.facts, **(provenance or {})}
    return Measurement(run=run, step=step, tokens=tokens, analysis=analysis.name, provenance=facts, **outcome)


def collect(analysis: Analysis, results: Iterable[Record]) -> list[Record]:
    """The records of an analysis, all of them made now.

    Raises:
        TypeError: something other than a record.
        ValueError: no record at all, or none with a value.
    """
    records = list(results)
    for record in records:
        if not isinstance(record, Record):
            raise TypeError(f"{analysis.name} should give records, got a {type(record).__name__}")
    if not records:
        raise ValueError(f"{analysis.name} gave no record")
    return with_a_value(analysis.name, records)


def describe_run(view: LayeredModel, analysis: Analysis, weights_hash: str | None = None) -> dict[str, Any]:
    """All that decides the numbers of a measurement, and on what they were computed."""
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


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers or training depend on.

    Packages that only bring files or texts are left out: what they brought is known by its hash.
    """
    installed = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
            continue
    return installed
