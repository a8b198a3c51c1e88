"""What `measure: async` costs training, in CPU seconds of the training process.

    OMP_NUM_THREADS=1 python benchmarks/async_measuring.py      # about 13 minutes

A round trains the quickstart's model twice, in an order that alternates: with checkpoints saved alone, and with the
same checkpoints measured by the second process. Only the training process is counted: saving is in both. The second
ratio compares nothing but the CPU seconds inside the callback's hooks with the rest of the same training, which other
work on the machine disturbs less. The weights at the end must be bit-equal.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rounds import Row, add_options, finish, ratios
from training import SIZES, WARMUP, RandomText

sys.path.insert(0, str(Path(__file__).parents[1]))  # the texts are the tests'

from lit_layers import records
from lit_layers.analyses import Representation, Trajectory
from lit_layers.training import EmergenceCallback, LitCausalLM, SeriesCheckpoint
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import DEFAULTS
from tests.support.random_text import RandomText as EvalTexts

AT_MOST = 0.5  # percent
OTHERS = ("on_exception", "on_fit_end")
HOOKS = [name for name in dir(EmergenceCallback) if name.startswith("on_") and name not in OTHERS]


class Counted(EmergenceCallback):
    """Counts the CPU seconds of its own hooks."""

    hooks = 0.0

    def on_fit_end(self, *_: Any) -> None:
        """Nothing is waited for: what is measured when training has ended is no part of it."""


def _counted(name: str) -> Any:
    def hook(self: Counted, *arguments: Any, **named: Any) -> None:
        began = time.process_time()
        try:
            getattr(super(Counted, self), name)(*arguments, **named)
        finally:
            self.hooks += time.process_time() - began

    return hook


for hook in HOOKS:
    setattr(Counted, hook, _counted(hook))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=25, help="steps between checkpoints")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"saved": [], "measured": []}
    hooks, arrived = [], []
    for number in range(options.rounds):
        weights = {}
        for way in ("saved", "measured")[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder) / "run"
                aside = [measuring(root, options.every)] if way == "measured" else []
                seconds[way].append(trained(root, options.steps, options.every, aside))
                weights[way] = torch.load(root / "end.pt", weights_only=True)
                if aside:
                    hooks.append(aside[0].hooks)
                    arrived.append(float(len(records.read(root / "measurements.jsonl"))))
                    wait_for(aside[0])
        if any(not torch.equal(weights["saved"][name], each) for name, each in weights["measured"].items()):
            raise SystemExit("training that is measured gives other weights")
    rest = [all_of_it - own for all_of_it, own in zip(seconds["measured"], hooks, strict=True)]
    wanted: Any = {"target": AT_MOST, "at_most": True, "unit": "%"}
    rows = [
        Row("training that saves, CPU", seconds["saved"], unit=" s"),
        Row("the same, measured beside it: more CPU", slower(seconds["measured"], seconds["saved"]), **wanted),
        Row("of that in the callback's hooks", slower(seconds["measured"], rest), **wanted),
        Row("measurements that arrived while it trained", arrived),
    ]
    return finish("async_measuring", rows, options)


def slower(ours: list[float], others: list[float]) -> list[float]:
    """By how much more, in percent."""
    return [100 * (ratio - 1) for ratio in ratios(ours, others)]


def measuring(root: Path, every: int) -> Counted:
    texts = EvalTexts(4)
    analyses = [Trajectory(batches=texts), Representation(batches=texts)]
    return Counted(analyses, {"every": every}, root, measure="async")


def trained(root: Path, steps: int, every: int, aside: list[Counted]) -> float:
    """CPU seconds of the process from the first step to the end of the last one, with what is saved."""
    size = SIZES["quickstart"]
    L.seed_everything(0, verbose=False)
    shape = {"n_layer": size.layers, "n_embd": size.dim, "n_head": size.heads, "n_positions": size.context}
    lit = LitCausalLM("gpt2", shape, warmup_steps=WARMUP)
    trainer = L.Trainer(
        **DEFAULTS,
        accelerator="cpu",
        devices=1,
        limit_val_batches=0,
        max_steps=steps,
        default_root_dir=root,
        callbacks=[RunLog(root), SeriesCheckpoint({"every": every}, root), *aside],
    )
    began = time.process_time()
    trainer.fit(lit, datamodule=RandomText(size))
    seconds = time.process_time() - began
    torch.save(lit.model.state_dict(), root / "end.pt")
    return seconds


def wait_for(aside: Counted) -> None:
    """Until the second process has ended: the next training is not to begin beside it."""
    if aside._aside is not None and aside._aside._process.wait() != 0:
        raise SystemExit(f"the process that measures ended with an error: see {aside.root}/measuring.log")


if __name__ == "__main__":
    sys.exit(main())
