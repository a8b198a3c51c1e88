"""Latency, throughput and memory of a model whose blocks run in another order."""

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
    """Yield the records of `Speed` for variants (block orders) of a model, on the model's device.

    The first variant is the full model, which runs unchanged.

    In each round every variant runs the first row of the batch, then the whole batch. Each round starts with another
    variant, so that other load on the machine affects all variants equally. The time for changing the order of the
    blocks is not counted. Memory is the peak that torch's allocators held during one pass over the batch. Torch's
    profiler reports it, on a CPU and on a GPU.
    """
    view = LayeredModel(model)
    view.refuse_reordered()
    one, many = call_of(model, {name: rows[:1] for name, rows in batch.items()}), call_of(model, batch)
    calls, memory = {}, []
    with evaluating(model), ExitStack() as open_orders:

        def enter(variant: Variant) -> None:
            if variant.name != "baseline":
                open_orders.enter_context(running_order(model, variant.schedule))
                one()  # `running_order` learns in this call what blocks return

        def leave() -> None:
            open_orders.pop_all().close()

        for i, variant in enumerate(compared):
            enter(variant)
            with torch.inference_mode():
                one()
                memory.append(peak_bytes(many))
            leave()
            # Only the middle two calls are timed; the first sets the variant's order and the last restores the model's.
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
    """Return the bytes of the parameters of the blocks that run, each counted once, without embedding and head."""
    used = {i for step in schedule for i in members(step)}
    parameters = {id(each): each for i in used for each in blocks[i - 1].parameters()}
    return sum(each.numel() * each.element_size() for each in parameters.values())


@dataclass(kw_only=True)
class Speed(Analysis):
    """Latency, throughput and memory of each variant (block order), and latency relative to the full model.

    Records are tagged with the variant:

    - `latency` (median seconds for one text or image), `latency_first_quartile` and `latency_third_quartile`;
    - `relative_latency`, the median over rounds of the ratio of the variant's latency to the full model's;
    - `throughput` (inputs per second in batches);
    - `peak_memory` (bytes during a pass over a batch, without the weights), and `weight_bytes` of the blocks that run.

    Args:
        variants: names of variants in `lit_layers.functional.block_schedules`; the full model is always added.
        middles: numbers of blocks in the middle of the model. Variants that change the middle are timed for each
            number. None means all possible numbers.
        seeds: seeds of random orders, which all run equally fast.
        loops: numbers of loops of the variant looped_parallel.
        custom: further schedules, such as `1 2 (3,4,5) 6`.
        num_tokens: tokens per text.
        batch_size: texts or images per batch; latency is measured on a single one.
        num_rounds: rounds over which medians are taken.
        num_warm_up: rounds that run before those and are not counted.
        seed: seed of the random tokens or pixels, which take as long as real ones.
        tell: receives a message about what is timed.

    Raises:
        InputError: when run, if options do not fit the model, or `measure_speed` refuses it.
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
