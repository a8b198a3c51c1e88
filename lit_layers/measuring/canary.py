"""What a model makes of a fixed input, so that a curve is never half measured under one version of a library and half
under another that computes something else.

A canary belongs to weights: of the same weights it is the same under every version, up to rounding
(`lit_layers.identity.DRIFT`). It stands in the provenance of every measurement. Where a run goes on under other
versions of torch, transformers or timm, a checkpoint that it has measured before is passed once more, and compared,
before anything new is measured.
"""

import contextlib
import hashlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_layers import identity
from lit_layers.analyses.blockwise import Key, StatesAnalysis, walk
from lit_layers.analyses.states import States
from lit_layers.measuring import one_model
from lit_layers.models.build import true_vocab_size
from lit_layers.models.streaming import StreamedModel
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.records import Measurement, Record
from lit_layers.series import Checkpoint

logger = logging.getLogger(__name__)

NUM_TOKENS = 32
DIGITS = 9  # significant ones that are kept
Opened = Callable[[Checkpoint, str], contextlib.AbstractContextManager[tuple[LayeredModel, str]]]


@dataclass(kw_only=True)
class Canary(StatesAnalysis):
    """Signed sums of the states of one fixed text (or image), in float64, at the first, middle and last layer.

    The differences of eight sums with random signs are, in the mean over signs, as long as the difference of the states
    themselves. Of the middle and the last token, each by itself: the first may be a thousand times as large as others.
    """

    name: str = "canary of the libraries"
    states: States = "resid"

    def prompts(self, model: LayeredModel) -> list[Batch]:
        if (vision := model.family.vision) is not None:
            shape = 1, vision.channels(model.model), *[vision.usual_side(model.model)] * 2
            values = 7919 * torch.arange(1, math.prod(shape) + 1) % 1021  # whole numbers: exact everywhere
            return [{"pixel_values": (values / 510 - 1).reshape(shape)}]
        length = min(NUM_TOKENS, model.max_tokens or NUM_TOKENS)
        return [{"input_ids": (7919 * torch.arange(1, length + 1) % true_vocab_size(model.model))[None]}]

    def of_layer(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        """(1, 2 x sums)"""
        num_tokens = hidden.shape[1]
        tokens = hidden[:, [num_tokens // 2, num_tokens - 1]].double().cpu()
        return {("sums",): (tokens @ _signs(hidden.shape[-1]).T).flatten(1)}

    def of_prompts(self, values: dict[Key, Tensor]) -> Iterable[Record]:
        (of_layers,) = values.values()  # (layers + 1, 1, 2 x sums)
        last = len(of_layers) - 1
        for layer in sorted({0, last // 2, last}):
            for value in of_layers[layer, 0].tolist():
                yield Record(metric="signed_sum", layer=layer, value=float(f"{value:.{DIGITS}g}"))


def _signs(dim: int) -> Tensor:
    """(sums, dim), the same everywhere: no generator of any library keeps its stream for ever."""
    content = hashlib.shake_256(b"canary").digest(math.ceil(identity.NUM_SUMS * dim / 8))
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8))[: identity.NUM_SUMS * dim]
    return torch.from_numpy(bits.astype(np.float64)).reshape(identity.NUM_SUMS, dim) * 2 - 1


def sums(records: Iterable[Record]) -> dict[str, list[float]]:
    """The canary of its records, as it stands in provenance: by layer; empty where a state is not finite."""
    by_layer: dict[str, list[float]] = {}
    for record in records:
        by_layer.setdefault(str(record.layer), []).append(record.value)
    return by_layer if all(math.isfinite(value) for of_layer in by_layer.values() for value in of_layer) else {}


def provenance_of(
    model: nn.Module | LayeredModel, weights_hash: str, measured: Iterable[Measurement] = ()
) -> dict[str, Any]:
    """What stands in the provenance of a checkpoint's measurements: its canary; nothing where the model has none.

    One pass of one short text, of a model that is read block by block too, which leaves no trace in the model.

    Raises:
        InputError: another one than that of the same weights among `measured`, under other versions.
    """
    name = Canary.name
    if isinstance(model, StreamedModel):
        with tempfile.TemporaryDirectory() as folder:
            records = walk(model, [Canary()], Path(folder))[name].records
    else:
        records = one_model.measure(model, Canary(), run=name, step=None, weights_hash=weights_hash).records
    return compared(sums(records), weights_hash, measured)


def compared(
    canary: Mapping[str, Sequence[float]], weights_hash: str, measured: Iterable[Measurement]
) -> dict[str, Any]:
    """A canary as it stands in provenance.

    Raises:
        InputError: as `provenance_of`.
    """
    if not canary:
        logger.debug("the model gives a fixed input no finite states: its numbers are kept without a canary")
        return {}
    before = [m for m in measured if m.provenance.get("weights_hash") == weights_hash]
    if before:
        identity.refuse_drift([*before, _now(before[-1], weights_hash, canary)])
    return {identity.CANARY: canary}


def _now(like: Measurement, weights_hash: str, canary: Any = None) -> Measurement:
    facts = {"weights_hash": weights_hash, identity.CANARY: canary, identity.VERSIONS: dict(one_model.versions())}
    return Measurement(
        run=like.run, step=like.step, tokens=None, analysis=like.analysis, records=[], seconds=0.0, provenance=facts
    )


def of_other_versions(measured: Iterable[Measurement], run: str) -> list[Measurement]:
    """The measurements of a run all of which are of other versions; none where it went on under these before."""
    mine = [
        m
        for m in measured
        if m.run == run and m.step is not None and m.error is None and identity.VERSIONS in m.provenance
    ]
    now = identity.computing_versions(_now(mine[0], "")) if mine else ()
    return [] if any(identity.computing_versions(m) == now for m in mine) else mine


def compare_with_earlier(
    measured: Iterable[Measurement], run: str, checkpoints: Iterable[Checkpoint], opened: Opened
) -> None:
    """Where a run is about to go on under other versions, passes one of its checkpoints again: the last that is here.

    `checkpoints` are all of the series; `opened` gives the model and the hash of its weights, in that precision.
    Where none can be compared, a warning says so.

    Raises:
        InputError: its states are not what they were.
    """
    others = of_other_versions(measured, run)
    if not others:
        return
    by_step = {m.step: m for m in others if m.provenance.get(identity.CANARY)}
    for checkpoint in reversed([*checkpoints]):
        earlier = by_step.get(checkpoint.step)
        if earlier is None or not checkpoint.source.is_here:
            continue
        with opened(checkpoint, earlier.provenance.get("dtype", "float32")) as (model, weights_hash):
            if weights_hash == earlier.provenance.get("weights_hash"):
                provenance_of(model, weights_hash, others)
                return
    warn_of(others)


def warn_of(others: Sequence[Measurement]) -> None:
    """Says that a run goes on under other versions, and that nobody knows whether they compute the same."""
    old, new = identity.differing_versions(others[-1], _now(others[-1], ""))
    logger.warning(
        "%s was measured under %s and goes on under %s: none of its measured checkpoints is here to tell whether both "
        "compute the same",
        others[-1].run,
        old,
        new,
    )
