"""Measuring checkpoints, during training and afterwards, and the options for measuring saved checkpoints."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_layers.errors import InputError
from lit_layers.schema import Device, Engine


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """Options for measuring checkpoints, and for the folder of the results.

    Args:
        allow_suspect: also measure checkpoints that the audit of the series found suspect
        offload: folder on a disk that holds the blocks of a model that does not fit into memory; they are read for each
            batch (docs/offload.md)
        keep_downloads: whether downloaded checkpoints of a series stay in the Hub's cache; if false, each one is
            removed once it is measured
        shard: i/n measures only every n-th checkpoint, from the i-th on, counted from 0
        root: folder of the results (default: checkpoints/NAME OF MODEL, or a run's own folder)
        device: where the model runs; auto selects a GPU if there is one
        dtype: dtype of the weights; bfloat16 keeps float32 weights and computes the products inside blocks in bfloat16
            (docs/interventions.md)
        engine: process measures in this process; ray measures with workers on a Ray cluster or on this machine
            (docs/clusters.md)
    """

    allow_suspect: bool = False
    offload: Path | None = None
    keep_downloads: bool = True
    shard: str = "0/1"
    root: Path | None = None
    device: Device = "auto"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    engine: Engine = "process"

    @property
    def share(self) -> tuple[int, int]:
        """The index i of this process's shard, and the number n of shards.

        The process measures every n-th checkpoint, from the i-th on, counted from 0.

        Raises:
            InputError: if the shard is not i/n with i below n.
        """
        numbers = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        index, count = map(int, numbers.groups()) if numbers else (0, 0)
        if not index < count:
            raise InputError(f"shard: expected i/n with i from 0 to n - 1, such as 0/4, got {self.shard!r}")
        return index, count

    @property
    def weights_dtype(self) -> Literal["float32", "float64"]:
        """The dtype in which weights are loaded.

        It is float32 if `dtype` is bfloat16, because analyses then run on a copy whose blocks compute in bfloat16.
        """
        return "float32" if self.dtype == "bfloat16" else self.dtype
