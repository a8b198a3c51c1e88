"""What shared beginnings save: all variants of a running order on one batch, against a forward pass for each.

    OMP_NUM_THREADS=1 python benchmarks/interventions.py                  # 12 and 24 blocks of 256, about 4 minutes
    OMP_NUM_THREADS=1 python benchmarks/interventions.py --layers 12      # about a minute
    python benchmarks/interventions.py --device cuda --batch_size 16 --tokens 256 --batches 4

Both sides take the same batches in turn, judge the same tokens with the same code and must agree. "shared" is all that
`Interventions` does with a batch, the full model's own pass and log-probabilities included; "each" runs the model once
for each variant in `running_order`, and is given the full model's log-probabilities. (`running_order` itself runs one
block more each time it is entered, to see what it returns: that is in the seconds, and not in the block runs.)
`--check` exits with 1 where the share of the time is more than 1.1 times the share of the block runs.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_layers.analyses.readout_scores import FullModel, Interventions, Sums, rows_of
from lit_layers.data.batches import Batches
from lit_layers.models import LayeredModel, causal_lm
from lit_layers.models.running_order import SharedPrefixes, running_order

NOISE = 1.1  # and what the head costs, which is run for each different order
SETS = {"all variants": {}, "loops 3 alone": {"loops": (3,)}}


@dataclass
class Cost:
    """Of one side, over all batches."""

    seconds: float = 0.0
    peak_memory: int = 0  # bytes beyond what was held before, on CUDA


class NoData(Batches):
    """The batches are handed over one by one."""

    def __iter__(self):
        return iter(())

    def __len__(self) -> int:
        return 0

    def content_hash(self) -> str:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24], help="numbers of blocks (default: 12 24)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    print("blocks  set             variants  block runs: each  shared  ratio   seconds: each  shared  ratio")
    late = False
    for num_layers in options.layers:
        model = causal_lm(
            "gpt2",
            n_layer=num_layers,
            n_embd=options.width,
            n_head=max(1, options.width // 64),
            vocab_size=options.vocabulary,
            n_positions=options.tokens,
        ).eval()
        for name, chosen in SETS.items():
            late |= compare(model.to(options.device), name, Interventions(batches=NoData(), **chosen), options)
    return int(options.check and late)


def compare(model: torch.nn.Module, name: str, analysis: Interventions, options: argparse.Namespace) -> bool:
    """Prints a line and returns whether the time saved is less than the runs saved."""
    view = LayeredModel(model)
    chosen = analysis.chosen(view)
    each, shared, cuda = Cost(), Cost(), options.device != "cpu"
    generator = torch.Generator().manual_seed(0)
    for number in range(options.batches + 1):  # the first warms up, on few tokens
        size = (options.batch_size, options.tokens) if number else (1, 2)
        batch = {"input_ids": torch.randint(options.vocabulary, size, generator=generator).to(options.device)}
        sides = {
            "each": lambda batch=batch: from_scratch(model, view, analysis, batch),
            "shared": lambda batch=batch: lambda: analysis.of_part(view, batch),
        }
        found = {}
        for side in ("each", "shared") if number % 2 else ("shared", "each"):
            found[side] = timed(sides[side](), {"each": each, "shared": shared}[side] if number else Cost(), cuda)
        for one, other in zip(found["each"], found["shared"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    num_each = sum(len(step) if isinstance(step, tuple) else 1 for variant in chosen for step in variant.schedule)
    num_shared = SharedPrefixes([variant.schedule for variant in chosen], view.num_layers).num_block_runs
    num_shared += view.num_layers  # the full model's own
    ratio = shared.seconds / each.seconds
    print(
        f"{view.num_layers:6d}  {name:14s}  {len(chosen):8d}  {num_each:16d}  {num_shared:6d}  "
        f"{num_shared / num_each:5.3f}  {each.seconds / options.batches:14.2f}  "
        f"{shared.seconds / options.batches:6.2f}  {ratio:5.3f}"
    )
    if cuda:
        print(
            f"        peak memory: each {each.peak_memory / 2**20:.0f} MiB, shared {shared.peak_memory / 2**20:.0f} MiB"
        )
    return ratio > NOISE * num_shared / num_each


def from_scratch(
    model: torch.nn.Module, view: LayeredModel, analysis: Interventions, batch: dict[str, Tensor]
) -> Callable[[], Sums]:
    """One forward pass for each variant; what is known of the full model is not timed."""
    trajectory = view.trajectory(batch)
    rows = rows_of(analysis.name, view, trajectory, batch)
    full = FullModel(trajectory.logits[rows.index], rows)
    chosen, num_prompts = analysis.chosen(view), len(trajectory.mask)

    @torch.no_grad()
    def run() -> Sums:
        values = []
        for variant in chosen:
            with running_order(model, variant.schedule):
                logits = model(**batch, use_cache=False).logits
            values.append(full.compared(logits[rows.index]))
        return Sums.of(torch.stack(values, dim=1), rows, num_prompts)

    return run


def timed(run: Callable[[], Sums], cost: Cost, cuda: bool) -> Sums:
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    # Of this process where it alone works, as others use the machine.
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    found = run()
    if cuda:
        torch.cuda.synchronize()
        cost.peak_memory = max(cost.peak_memory, torch.cuda.max_memory_allocated() - before)
    cost.seconds += clock() - start
    return found


if __name__ == "__main__":
    raise SystemExit(main())
