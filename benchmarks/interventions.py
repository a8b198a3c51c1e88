"""Time saved by sharing prefixes: all variants of the block order on one batch, against one forward pass per variant.

    OMP_NUM_THREADS=1 python benchmarks/interventions.py                  # 12 and 24 blocks of 256, about 6 CPU minutes
    OMP_NUM_THREADS=1 python benchmarks/interventions.py --layers 12      # about 1 CPU minute
    python benchmarks/interventions.py --device cuda --batch_size 16 --tokens 256

Both sides use the same batches in turn, score the same tokens with the same code and must agree. "shared" is all work
of `Interventions` on a batch, including the forward pass and log-probabilities of the full model. "each" runs the model
once for each variant in `running_order`, and gets the full model's log-probabilities as input. A round is a batch. Both
sides run the head once for each order.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from rounds import Row, add_options, finish, ratios
from torch import Tensor

from lit_layers.analyses.readout_scores import FullModel, Interventions, Sums, rows_of
from lit_layers.data.batches import Batches
from lit_layers.functional.block_schedules import members
from lit_layers.models import LayeredModel, causal_lm
from lit_layers.models.running_order import SharedPrefixes, running_order

WANTED = {12: 0.35, 24: 0.40}  # share of the time of separate passes, by the number of blocks


def num_block_runs(shared: SharedPrefixes) -> int:
    """Return how often a block runs for one batch, without the runs of the trajectory."""
    beginnings = {order[:end] for order in shared.indices for end in range(1, len(order) + 1)}
    passed = {tuple(range(1, end + 1)) for end in range(1, shared.num_blocks + 1)}
    return sum(len(members(beginning[-1])) for beginning in beginnings - passed)


@dataclass
class Cost:
    """Cost of one side over all batches."""

    seconds: list[float] = field(default_factory=list)
    peak_memory: int = 0  # bytes above those allocated before, on CUDA


class NoData(Batches):
    """Empty batches, because the benchmark passes its batches one by one."""

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
    parser.add_argument("--batch_size", type=int, default=2)
    add_options(parser)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = []
    for num_layers in options.layers:
        model = causal_lm(
            "gpt2",
            n_layer=num_layers,
            n_embd=options.width,
            n_head=max(1, options.width // 64),
            vocab_size=options.vocabulary,
            n_positions=options.tokens,
        ).eval()
        rows.append(compare(model.to(options.device), Interventions(batches=NoData()), options))
    return finish("interventions", rows, options, device=options.device)


def compare(model: torch.nn.Module, analysis: Interventions, options: argparse.Namespace) -> Row:
    """Return the time of the shared way over that of separate passes, one round per batch."""
    view = LayeredModel(model)
    chosen = analysis.chosen(view)
    each, shared, cuda = Cost(), Cost(), options.device != "cpu"
    generator = torch.Generator().manual_seed(0)
    for number in range(options.rounds + 1):  # the first warms up, on few tokens
        size = (options.batch_size, options.tokens) if number else (1, 2)
        batch = {"input_ids": torch.randint(options.vocabulary, size, generator=generator).to(options.device)}
        sides = {
            "each": lambda batch=batch: separate_passes(model, view, analysis, batch),
            "shared": lambda batch=batch: lambda: analysis.update(view.trajectory(batch), batch).values(),
        }
        sums = {}
        for side in ("each", "shared") if number % 2 else ("shared", "each"):
            sums[side] = timed(sides[side](), {"each": each, "shared": shared}[side] if number else Cost(), cuda)
        for one, other in zip(sums["each"], sums["shared"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    num_each = sum(len(step) if isinstance(step, tuple) else 1 for variant in chosen for step in variant.schedule)
    num_shared = num_block_runs(SharedPrefixes([variant.schedule for variant in chosen], view.num_layers))
    num_shared += view.num_layers  # the full model's own
    others = {
        "variants": str(len(chosen)),
        "block runs: each, shared": f"{num_each:,}, {num_shared:,}",
        "seconds: each, shared": f"{median(each.seconds):.1f}, {median(shared.seconds):.1f}",
    }
    if cuda:
        others["peak MiB: each, shared"] = f"{each.peak_memory / 2**20:.0f}, {shared.peak_memory / 2**20:.0f}"
    share = ratios(shared.seconds, each.seconds)
    return Row(f"{view.num_layers} blocks", share, WANTED.get(view.num_layers), at_most=True, others=others)


def separate_passes(
    model: torch.nn.Module, view: LayeredModel, analysis: Interventions, batch: dict[str, Tensor]
) -> Callable[[], Sums]:
    """Return a function that runs one forward pass per variant. The pass of the full model is not timed."""
    trajectory = view.trajectory(batch)
    rows = rows_of(analysis.name, trajectory, batch)
    full = FullModel(trajectory.logits[rows.index], rows)
    chosen, num_prompts = analysis.chosen(view), len(trajectory.mask)

    @torch.no_grad()
    def run() -> Sums:
        values = []
        for variant in chosen:
            with running_order(model, variant.schedule):
                logits = model(**batch, use_cache=False).logits
            values.append(full.scores(logits[rows.index]))
        return Sums.add_up(torch.stack(values, dim=1), rows, num_prompts)

    return run


def timed(run: Callable[[], Sums], cost: Cost, cuda: bool) -> Sums:
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    # Process time on a CPU, because other processes use the machine.
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    sums = run()
    if cuda:
        torch.cuda.synchronize()
        cost.peak_memory = max(cost.peak_memory, torch.cuda.max_memory_allocated() - before)
    cost.seconds.append(clock() - start)
    return sums


if __name__ == "__main__":
    raise SystemExit(main())
