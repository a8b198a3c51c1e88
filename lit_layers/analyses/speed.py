"""How fast a model is while its blocks run in another order, and what memory it takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lit_layers.analyses.base import Analysis
from lit_layers.functional.block_schedules import LOOPS, Schedule, Variant, members
from lit_layers.models.costs import call_of, interleaved, peak_bytes, random_inputs
from lit_layers.models.running_order import running_order, variants_of
from lit_layers.models.view import Batch, LayeredModel, evaluating
from lit_layers.records import Record


def measure_speed(
    model: nn.Module, compared: Sequence[Variant], batch: Batch, *, num_rounds: int = 20, num_warm_up: int = 3
) -> Iterator[Record]:
    """Yield the records of `Speed` for variants of a model on its device.

    The first variant is the full model, which runs as it is.

    In each round every variant runs the first row of the batch and then the whole batch, and each round begins with
    another variant, so that whatever else the machine does meets all of them alike. Changing the order is not timed.
    Memory is what torch's allocators had given out at most during one pass over the batch, by torch's profiler, on a
    CPU as on a GPU.
    """
    view = LayeredModel(model)
    view.refuse_reordered()
    one, many = call_of(model, {name: rows[:1] for name, rows in batch.items()}), call_of(model, batch)
    calls, memory = {}, []
    with evaluating(model), ExitStack() as open_orders:

        def enter(variant: Variant) -> None:
            if variant.name != "baseline":
                open_orders.enter_context(running_order(model, variant.schedule))
                one()  # finds out what blocks return

        def leave() -> None:
            open_orders.pop_all().close()

        for i, variant in enumerate(compared):
            enter(variant)
            with torch.inference_mode():
                one()
                memory.append(peak_bytes(many))
            leave()
            # Only the calls in the middle count: the others begin and end the order around them.
            calls[str(i)] = (partial(enter, variant), one, many, leave)
        seconds: Any = interleaved(calls, num_rounds=num_rounds, num_warm_up=num_warm_up, device=str(view.device))
    full = np.asarray(seconds["0"][1])
    for i, variant in enumerate(compared):
        _, of_one, of_many, _ = seconds[str(i)]
        low, middle, high = np.quantile(of_one, [0.25, 0.5, 0.75]).tolist()
        values = {
            "latency": middle,
            "latency_first_quartile": low,
            "latency_third_quartile": high,
            "relative_latency": float(np.median(np.asarray(of_one) / full)),
            "throughput": len(next(iter(batch.values()))) / float(np.median(of_many)),
            "peak_memory": memory[i],
            "weight_bytes": weight_bytes(view.blocks, variant.schedule),
        }
        for metric, value in values.items():
            yield Record(metric=metric, value=value, layer=variant.block, n=num_rounds, tags=variant.tags)


def weight_bytes(blocks: Sequence[nn.Module], schedule: Schedule) -> int:
    """Return the bytes of the parameters of the blocks in the schedule, without embedding and head."""
    used = {i for step in schedule for i in members(step)}
    parameters = {id(each): each for i in used for each in blocks[i - 1].parameters()}
    return sum(each.numel() * each.element_size() for each in parameters.values())


@dataclass(kw_only=True)
class Speed(Analysis):
    """Seconds, inputs a second and memory of each variant of the order of blocks, against the full model.

    Args:
        variants: names of variants, of `lit_layers.functional.block_schedules`; the full model is always one.
        middles: numbers of middle blocks; None: all.
        seeds: of random orders, whose speed is that of any order.
        loops: of looped_parallel.
        custom: further schedules, such as `1 2 (3,4,5) 6`.
        num_tokens: of each text.
        batch_size: texts or images of a batch; latency is that of one.
        num_rounds: over which medians are taken.
        num_warm_up: rounds before those.
        seed: of the random tokens or pixels, which cost what real ones do.
        tell: called with what is timed.

    Yields `latency` (seconds for one text or image, median), `latency_first_quartile`, `latency_third_quartile`,
    `relative_latency`, `throughput` (inputs a second in batches), `peak_memory` (bytes of a pass over a batch, weights
    apart) and `weight_bytes` (of the blocks that run), tagged with the variant.

    Raises:
        InputError: when run, options that do not fit the model, and what `measure_speed` refuses.
    """

    PRECISION = "own"

    UNMEASURED = ("tell",)
    variants: Sequence[str] = ("skip", "middle_repeat", "parallel", "looped_parallel")
    middles: Sequence[int] | None = None
    seeds: Sequence[int] = (0,)
    loops: Sequence[int] = LOOPS[1:2]
    custom: Sequence[str] = ()
    num_tokens: int = 128
    batch_size: int = 16
    num_rounds: int = 20
    num_warm_up: int = 3
    seed: int = 0
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    name = "intervene/speed"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        variants_of(self, model, f"{self.name}: ")
        self._batch(model)

    def compute(self, model: LayeredModel) -> Iterator[Record]:
        compared, batch = variants_of(self, model, f"{self.name}: "), self._batch(model)
        if self.tell is not None:
            self.tell(f"timing {len(compared)} orders, {self.num_warm_up + self.num_rounds} rounds")
        return measure_speed(model.model, compared, batch, num_rounds=self.num_rounds, num_warm_up=self.num_warm_up)

    def _batch(self, model: LayeredModel) -> Batch:
        return random_inputs(model.model, self.num_tokens, self.batch_size, self.seed)
