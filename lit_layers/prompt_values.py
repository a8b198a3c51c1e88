"""The value of each prompt or test row behind the means of a measurement, in a Parquet file beside it.

`values/step-000001000/ANALYSIS-DIGEST-WEIGHTS.parquet` in the run's folder belongs to one line of `measurements.jsonl`,
and so to the training and the weights that it names: a row a
number, with `metric`, `layer`, `tags` (JSON) and `values`, a list of one float32 a prompt in the order of the data, NaN
where a prompt has none. Kept are the values of numbers that make curves, not those of matrices and maps, nor of the
rows that a probe was fitted to. Vectors that a number is of (`PooledStates`) are in a file of the same name that ends
in `.safetensors`: `layer-L` (prompts, dim) in float32. These files can be deleted, lost or torn: then orders in time
are compared without them, and states not at all.
"""

import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_layers.errors import InputError, first_line, is_full
from lit_layers.files.durable import replace_file
from lit_layers.identity import PLACES, Measurement, Record, settings_of

logger = logging.getLogger(__name__)
FOLDER = "values"
DIMENSION = "pooled_dimension"  # the metric whose numbers, of layers, have the states that they are of
VALUES, STATES = ".parquet", ".safetensors"  # what the files end in
COLUMNS = ("metric", "layer", "tags", "values")
_ROUNDING = 1e-5  # of float32, of a mean of many

Key = tuple[str, int | None, str]
ByPrompt = NDArray[np.float32]


def key_of(record: Record) -> Key:
    """Return what tells a number from the others of its measurement."""
    tags = {name: tag if isinstance(tag, str | int | float) else str(tag) for name, tag in record.tags.items()}
    return record.metric, record.layer, json.dumps(tags, sort_keys=True)


def path_of(root: Path, measurement: Measurement, kind: str = VALUES) -> Path:
    """Return where the values of a measurement are, or with `kind` its states: one place for each training, run, step,
    analysis, settings and weights."""
    identity = json.dumps([measurement.training, measurement.run, measurement.analysis, settings_of(measurement)])
    digest = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:10]
    step = "no-step" if measurement.step is None else f"step-{measurement.step:09d}"
    name = re.sub(r"[^\w.-]", "_", measurement.analysis)[:80]
    weights = str(measurement.provenance.get("weights_hash"))[:8]
    return root / FOLDER / step / f"{name}-{digest}-{weights}{kind}"


class ValueFiles:
    """The files of a run as they are written.

    Args:
        root: the run's folder.
        insist: whether a full disk refuses them, where nothing is lost by it: the command is run again.
    """

    def __init__(self, root: str | Path, *, insist: bool = False) -> None:
        self.root, self.insist, self._has_warned = Path(root), insist, False

    def write(self, measurement: Measurement) -> None:
        """Write the values of a measurement, whole or not at all; where there are none, what is there stays.

        Raises:
            InputError: the disk is full, and it was to be insisted.
        """
        for path, content in _contents(self.root, measurement):
            try:
                for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*{path.suffix}"):  # of weights before
                    other.unlink()
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, content)
            except OSError as error:
                if self.insist and is_full(error):  # else they would be missing for good: the numbers are known then
                    raise InputError(f"cannot write {path}: {str(error.strerror).lower()}") from error
                # The numbers themselves matter more, and are refused where the disk takes nothing
                if not self._has_warned:
                    logger.warning("the values of prompts cannot be written to %s: %s", path, error.strerror or error)
                self._has_warned = True


def without_values(measurement: Measurement) -> Measurement:
    """Return a measurement as it is in `measurements.jsonl`."""
    return replace(
        measurement, records=[replace(record, by_prompt=None, states=None) for record in measurement.records]
    )


def read_values(root: Path, measurements: Sequence[Measurement]) -> list[dict[Key, ByPrompt] | str]:
    """Return for each measurement the values behind its numbers, as far as they were kept; none without a file.

    Values count only for a number whose mean they have. In place of the values of a file that is damaged or of other
    weights stands the sentence that says so.
    """
    return [_read_means(path_of(root, m), m) for m in measurements]


def _read_means(path: Path, measurement: Measurement) -> dict[Key, ByPrompt] | str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not os.path.isfile(path):  # False also for a folder that may not be read
        return {}
    try:
        table = pq.ParquetFile(path).read()
        metrics, layers, tags = (table[name].to_pylist() for name in COLUMNS[:3])
        there = dict(zip(zip(metrics, layers, tags, strict=True), table["values"].to_numpy(), strict=True))
    except (pa.ArrowException, OSError, KeyError) as error:
        return f"{path.name} is damaged: {first_line(error)}"
    values = {key_of(record): record.value for record in measurement.records}
    means = {key: there[key] for key, value in values.items() if key in there and _is_mean(there[key], value)}
    if means or not there.keys() & values.keys():
        return means
    return f"{path.name} is of other weights: its means are not the measurement's"


def _is_kept(record: Record) -> bool:
    if record.by_prompt is None or record.other_layer is not None or not record.tags.keys().isdisjoint(PLACES):
        return False
    return record.tags.get("split") != "train" and _is_mean(record.by_prompt, record.value)


def _is_mean(values: ByPrompt, value: float) -> bool:
    """Whether the values are those of a mean over two prompts or more."""
    defined = values[~np.isnan(values)].astype(np.float64)
    if len(defined) < 2 or not np.isfinite(defined).all():
        return False
    return bool(abs(defined.mean() - value) <= _ROUNDING * max(np.abs(defined).max(), 1e-30))


def _contents(root: Path, measurement: Measurement) -> Iterator[tuple[Path, bytes]]:
    records = [record for record in measurement.records if _is_kept(record)]
    if records:
        yield path_of(root, measurement), _content(records)
    states = {f"layer-{record.layer}": record.states for record in measurement.records if record.states is not None}
    if states:
        from safetensors.numpy import save

        yield path_of(root, measurement, STATES), save(states)


def _content(records: list[Record]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metrics, layers, tags = zip(*map(key_of, records), strict=True)
    vectors = pa.array([record.by_prompt for record in records], pa.list_(pa.float32()))
    table = pa.table([pa.array(metrics), pa.array(layers, pa.int32()), pa.array(tags), vectors], names=[*COLUMNS])
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()
