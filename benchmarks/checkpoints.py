"""Cost of saving in a run: the series, and the checkpoints to resume from, with the size and schedule of the demo.

    OMP_NUM_THREADS=1 python benchmarks/checkpoints.py

The result is the time that training waits for each of the two, as a share of the run's wall time without start-up. The
target is a sum below 2%. A round is one run. The run has no analyses, because they would only make the share smaller.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rounds import Row, add_options, finish
from training import SIZES, RandomText

from lit_layers.schedule import Schedule
from lit_layers.training import LitCausalLM, SeriesCheckpoint
from lit_layers.training.resuming import ResumeCheckpoint
from lit_layers.training.run_folder import saved_steps
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import DEFAULTS, StepSeed

WANTED = 0.02
DEMO: dict[str, Any] = {"log": 2, "until": 256, "then_every": 256}  # recipes/quickstart/gpt2.yaml


class Clock(L.Callback):
    """Callback that measures the wall time from the first step to the end."""

    def on_train_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.start


def main() -> int:
    options = _options()
    runs = [one_run(options) for _ in range(options.rounds)]
    facts = {
        "seconds of a run": f"{statistics.median(run['seconds'] for run in runs):.0f}",
        "MB of each to resume from": f"{runs[0]['size'] / 1e6:.1f}",
    }
    rows = []
    for part in ("series", "resume", "both"):
        shares = [100 * run[part] / run["seconds"] for run in runs]
        target = 100 * WANTED if part == "both" else None
        rows.append(Row(f"{options.size}, {part}", shares, target, at_most=True, others=facts, unit="%"))
    return finish("checkpoints", rows, options, device=options.device)


def one_run(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a run and of its pauses, and the bytes of a checkpoint to resume from."""
    size = SIZES[options.size]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        series = SeriesCheckpoint(DEMO, root)
        resumable = ResumeCheckpoint(root, every=options.resume_every)
        clock = Clock()
        # The clock is the last callback, because the other two write their last checkpoint when training ends.
        callbacks = [StepSeed(0), RunLog(root), series, resumable, clock]
        trainer = L.Trainer(
            **DEFAULTS,
            accelerator=options.device,
            devices=1,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            max_steps=options.steps,
            default_root_dir=folder,
            callbacks=callbacks,
        )
        shape = {"n_layer": size.layers, "n_embd": size.dim, "n_head": size.heads, "n_positions": size.context}
        trainer.fit(LitCausalLM("gpt2", shape, warmup_steps=40), datamodule=RandomText(size))
        saved, resume = saved_steps(root), saved_steps(root / "resume")
        expected = list(Schedule(DEMO).steps_to(options.steps))
        if saved != expected or not resume:
            raise SystemExit(f"expected the steps {expected} and one to resume from, found {saved} and {resume}")
        sizes = [sum(file.stat().st_size for file in path.rglob("*")) for path in (root / "resume").iterdir()]
    pauses = {"series": series.paused_seconds, "resume": resumable.paused_seconds}
    return {**pauses, "both": sum(pauses.values()), "seconds": clock.seconds, "size": float(sizes[0])}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (the demo: 400)")
    parser.add_argument("--resume-every", type=int, default=500, help="as `lit-layers fit --resume_every`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
