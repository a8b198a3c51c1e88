"""What saving costs a run: the series and the checkpoints to resume from, in a run of the demo's size and schedule.

    OMP_NUM_THREADS=1 python benchmarks/checkpoints.py

Seconds that training waited for each of the two, over the run's wall time without start-up; wanted: together below 2%.
Nothing is measured meanwhile, as that would only make the share smaller.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from training import SIZES, RandomText

from lit_layers.schedule import Schedule
from lit_layers.training import LitCausalLM, SeriesCheckpoint
from lit_layers.training.checkpoints import saved_steps
from lit_layers.training.resume import ResumeCheckpoint, StepSeed
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import DEFAULTS

WANTED = 0.02
DEMO: dict[str, Any] = {"log": 2, "until": 256, "then_every": 256}  # recipes/quickstart/gpt2.yaml


class Clock(L.Callback):
    """The wall time from the first step to the end."""

    def on_train_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.start


def main() -> int:
    options = _options()
    size = SIZES[options.size]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        series = SeriesCheckpoint(DEMO, root)
        resumable = ResumeCheckpoint(root, every=options.resume_every)
        clock = Clock()
        # The clock is last: the two write their last checkpoint when the training ends.
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
        expected = list(Schedule(DEMO).until(options.steps))
        if saved != expected or not resume:
            raise SystemExit(f"expected the steps {expected} and one to resume from, found {saved} and {resume}")
        sizes = [sum(file.stat().st_size for file in path.rglob("*")) for path in (root / "resume").iterdir()]
    _report(options, clock.seconds, {"series": series, "resume": resumable}, len(saved), sizes[0])
    share = (series.paused_seconds + resumable.paused_seconds) / clock.seconds
    return int(options.check and share >= WANTED)


def _report(options: argparse.Namespace, seconds: float, parts: dict[str, Any], num_saved: int, size: int) -> None:
    table = Table(title=f"{options.steps} steps, {seconds:.1f} s of wall time", title_justify="left", box=None)
    for column in ("", "seconds", "share"):
        table.add_column(column, justify="right" if column else "left")
    for name, part in parts.items():
        table.add_row(name, f"{part.paused_seconds:.3f}", f"{part.paused_seconds / seconds:.2%}")
    both = sum(part.paused_seconds for part in parts.values())
    table.add_row("both (wanted: below 2%)", f"{both:.3f}", f"{both / seconds:.2%}")
    console = Console()
    console.print(table)
    every = f"every {options.resume_every} steps and at the end" if options.resume_every else "at the end"
    console.print(f"{num_saved} steps of the series; resume checkpoints of {size / 1e6:.1f} MB {every}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (the demo: 400)")
    parser.add_argument("--resume-every", type=int, default=500, help="as `lit-layers fit --resume_every`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--check", action="store_true", help="exit with 1 from 2 percent on")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
