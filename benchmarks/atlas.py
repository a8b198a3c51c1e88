"""Time of coupling with the six metrics of the Jacobians' shape, divided by its time without them.

    OMP_NUM_THREADS=1 python benchmarks/atlas.py                  GPT-2 of 12 blocks, 768 and 128 wide, 4 prompts
    OMP_NUM_THREADS=1 python benchmarks/atlas.py --widths 64 --prompts 8
    python benchmarks/atlas.py --device cuda --prompts 8

A round measures each width both ways. The weights are random. All other records must be equal.
"""

import argparse
from statistics import median
from typing import Any
from unittest import mock

import torch
from rounds import Row, add_options, clock, finish, ratios

from lit_layers.analyses import Coupling, depth_coupling
from lit_layers.functional.jacobian.atlas import JacobianShape
from lit_layers.measuring.one_model import measure
from lit_layers.models import causal_lm
from lit_layers.records import Record

WANTED = 1.10
TOKENS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 128])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser)
    options = parser.parse_args()
    rows = []
    for width in options.widths:
        shape = {"n_layer": options.blocks, "n_embd": width, "n_head": max(1, width // 64), "n_positions": TOKENS}
        model = causal_lm("gpt2", **shape, vocab_size=1024).to(options.device)
        batch = {"input_ids": torch.randint(1024, (options.prompts, TOKENS), generator=torch.manual_seed(1))}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(options.rounds + 1):  # the first warms up
            found = {}
            for with_shape in (True, False) if number % 2 else (False, True):
                took, found[with_shape] = measured(model, batch, with_shape, options)
                seconds[with_shape] += [took] if number else []
            if found[True] != found[False]:
                raise SystemExit("the records of coupling differ")
        others = {"seconds: with, without": ", ".join(f"{median(values):.3g}" for values in seconds.values())}
        share = ratios(seconds[True], seconds[False])
        rows.append(Row(f"{options.blocks} blocks of {width}", share, WANTED, at_most=True, others=others))
    return finish("atlas", rows, options, device=options.device)


def measured(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], with_shape: bool, options: argparse.Namespace
) -> tuple[float, list[Record]]:
    """Return the seconds of the analysis, and its records without those of shape."""
    batches: Any = [batch]
    analysis = Coupling(batches=batches, num_prompts=options.prompts)
    shape = depth_coupling.jacobian_shape if with_shape else no_shape
    with mock.patch.object(depth_coupling, "jacobian_shape", shape):
        since = clock(options.device)
        measurement = measure(model, analysis, run="coupling", step=None)
        took = clock(options.device) - since
    if measurement.error is not None:
        raise SystemExit(measurement.error)
    return took, [record for record in measurement.records if record.metric not in depth_coupling.SHAPE]


def no_shape(jacobians: torch.Tensor, factors: object, **_: object) -> JacobianShape:
    return JacobianShape(*(jacobians.new_ones(jacobians.shape[:-2], dtype=torch.float64) for _ in range(7)))


if __name__ == "__main__":
    raise SystemExit(main())
