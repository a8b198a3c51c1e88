"""Measuring one checkpoint by several processes, each of which holds the model."""

import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed, nn

from lit_layers import emergence
from lit_layers.analyses.base import Analysis, DividedAnalysis
from lit_layers.emergence import Attempt
from lit_layers.records import Measurement

_PATIENCE = datetime.timedelta(hours=12)


def new_group() -> Any:
    """A group of its own on the CPU: results are objects, and training's collectives stay undisturbed."""
    return distributed.new_group(backend="gloo", timeout=_PATIENCE)


def measure_together(
    model: nn.Module, analyses: Sequence[Analysis], starting: Callable[[Analysis], None], *, group: Any, **facts: Any
) -> list[Measurement]:
    """On rank 0 the measurements, in the order of the analyses, equal to those of one process; elsewhere none.

    The parts of an analysis that can be divided are dealt over the ranks, the others one by one. No collective runs
    inside an analysis, so that one that fails hangs no rank; nor does a slow one: all ranks leave together, and none
    waits for another in training's own collectives, which have less patience. `facts` are those of `measure`.
    """
    rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)
    mine: dict[str, Attempt | Measurement] = {}
    turns = itertools.cycle(range(world_size))
    for analysis in analyses:
        if isinstance(analysis, DividedAnalysis):
            starting(analysis)
            mine[analysis.name] = emergence.measure_share(
                model, analysis, rank=rank, world_size=world_size, weights_hash=facts["weights_hash"]
            )
        elif next(turns) == rank:
            starting(analysis)
            mine[analysis.name] = emergence.measure(model, analysis, **facts)
    everybodys: list[Any] | None = [None] * world_size if rank == 0 else None
    distributed.gather_object(mine, everybodys, dst=0, group=group)
    found = [] if everybodys is None else [_joined(model, analysis, everybodys, **facts) for analysis in analyses]
    distributed.barrier(group=group)
    return found


def _joined(model: nn.Module, analysis: Analysis, everybodys: list[dict[str, Any]], **facts: Any) -> Measurement:
    found = [mine[analysis.name] for mine in everybodys if analysis.name in mine]
    if isinstance(analysis, DividedAnalysis):
        return emergence.join_shares(model, analysis, found, **facts)
    (measurement,) = found
    return measurement
