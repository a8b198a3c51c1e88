"""Speed of training on images: our trainer against a plain loop, in one run.

Contenders, with the same weights, images, augmentation, Mixup, AdamW and learning rates, on the same device:
  lit_layers   LitImageClassifier and LitImageData in a Lightning Trainer, with the options and callbacks of `fit`
  bare loop    a few lines of PyTorch around the very same timm model and the same augmentation

They take turns: the Trainer pauses after each step (after ten on a GPU, whose queue must stay filled) while the loop
runs as many steps. Each round of some steps gives one ratio, and the median over rounds is reported, so that other work
on the machine slows both. Both must reach the same loss, otherwise the run ends with an error. Peak memory is measured
in a separate process for each contender. The last row compares with a loop without augmentation.

    python benchmarks/images.py --size quickstart
    python benchmarks/images.py --size tiny_cifar10 --device cuda --batch 512
"""

import argparse
import copy
import hashlib
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch
from rounds import Row, add_options, clock, finish, ratios
from timm.data import Mixup
from torch import Tensor
from torch.nn import functional as F

from lit_layers import records
from lit_layers.data.images import ImageSource, SmallPictures
from lit_layers.training import LitImageClassifier, LitImageData
from lit_layers.training.datamodules import SampleOrder
from lit_layers.training.modules import parameter_groups, warmup_cosine
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import DEFAULTS, StepSeed

OURS, BARE, PLAIN = "lit_layers", "bare loop", "bare, no augmentation"
TARGETS = {"cpu": 0.95, "cuda": 0.97}
WARMUP = 40
DEIT = {"crop_padding": 4, "flip": True, "rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.25, "num_repeats": 3}
MIXING: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "drop_path_rate": 0.1}


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its batches, its augmentation, and the number of steps in a round."""

    architecture: str
    config: dict[str, int]
    image: int
    patch: int
    batch: int
    round: int
    deit: bool
    clip: float | None  # as in the recipe of that name


SIZES = {
    "quickstart": Size("vit_tiny_patch16_224", {"embed_dim": 64, "depth": 6, "num_heads": 4}, 8, 2, 64, 20, False, 1.0),
    "tiny_cifar10": Size("deit_tiny_patch16_224", {}, 32, 4, 16, 4, True, None),
}


class RandomImages(LitImageData):
    """The real data module with random smooth images in place of a source."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            "random", normalisation="imagenet", global_batch_size=size.batch, **(DEIT if size.deit else {})
        )
        generator = torch.Generator().manual_seed(7)
        coarse = torch.rand(2048, 3, size.image // 4, size.image // 4, generator=generator)
        pixels = F.interpolate(coarse, size=(size.image, size.image), mode="bicubic").clamp(0, 1).mul(255).byte()
        labels = torch.randint(10, (2048,), generator=generator)
        self.pictures, self.clip = SmallPictures(pixels, labels), size.clip

    def prepare_data(self) -> None:
        """Nothing to prepare."""

    def setup(self, stage: str) -> None:
        self.use(ImageSource("random", lambda split: (self.pictures, None)))


def module(size: Size, *, compile: bool = False) -> LitImageClassifier:
    mixing = MIXING if size.deit else {}
    return LitImageClassifier(
        size.architecture, size.config, patch_size=size.patch, warmup_steps=WARMUP, compile=compile, **mixing
    )


class Loop:
    """A bare training loop over the same batches as the Trainer."""

    def __init__(self, lit: LitImageClassifier, data: RandomImages, *, augmented: bool = True) -> None:
        self.model, self.device, self.data, self.augmented = copy.deepcopy(lit.model), lit.device, data, augmented
        self.network = torch.compile(self.model) if lit.compile_model else self.model
        self.pictures, self.clip = data.pictures, data.clip
        self.order = SampleOrder(len(data.pictures), seed=data.seed, num_repeats=data.num_repeats)
        self.mix = None
        if lit.mixup:
            options = {"label_smoothing": lit.label_smoothing, "num_classes": 10}
            self.mix = Mixup(mixup_alpha=lit.mixup, cutmix_alpha=lit.cutmix, **options)
        groups = parameter_groups(self.model, lit.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=lit.lr, betas=lit.betas, fused=True)
        factor = warmup_cosine(warmup_steps=WARMUP, decay_steps=lit.trainer.max_steps, min_ratio=lit.min_lr_ratio)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.autocast = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        self.losses: list[Tensor] = []

    def run(self, steps: int) -> None:
        batch, data = self.data.global_batch_size, self.data
        augmenting = data.training_images() if self.augmented and data.flip else None
        for _ in range(steps):
            step = len(self.losses)
            numbers = range(step * batch, (step + 1) * batch)
            if augmenting is not None:
                given: Any = augmenting.__getitems__(numbers)
                images, labels = (given[name].to(self.device) for name in ("pixel_values", "labels"))
            else:
                chosen = [self.order.image(number) for number in numbers]
                images = data._normalise(self.pictures.batch(chosen).to(self.device, non_blocking=True))
                labels = self.pictures.labels[chosen].to(self.device, non_blocking=True)
            seed = int.from_bytes(hashlib.blake2b(f"0/{step}/0/0".encode(), digest_size=8).digest(), "big")
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - what Mixup draws from
            with self.autocast:
                if self.mix is not None:
                    images, labels = self.mix(images, labels)
                loss = F.cross_entropy(self.network(images).float(), labels)
            loss.backward()
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())


class TakeTurns(L.Callback):
    """Callback that stops the trainer's clock every `turn` steps and runs the plain loops for as many steps.

    Attributes:
        seconds: per contender, the seconds of each of its turns.
        paused_seconds: time that RunLog excludes from its own images per second.
    """

    def __init__(self, turn: int, *, alone: bool) -> None:
        self._clock = partial(clock, "cuda" if torch.cuda.is_available() else "cpu")
        self.turn, self.alone, self.paused_seconds = turn, alone, 0.0
        self.seconds: dict[str, list[float]] = {}
        self.loops: dict[str, Loop] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not self.alone:
            self.loops = {BARE: Loop(pl_module, data), PLAIN: Loop(pl_module, data, augmented=False)}
        self.seconds = {name: [] for name in (OURS, *self.loops)}
        self._started = self._clock()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx and batch_idx % self.turn == 0:
            self._others_turn()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._others_turn()

    def _others_turn(self) -> None:
        began, now = time.perf_counter(), self._clock()
        self.seconds[OURS].append(now - self._started)
        backwards = -1 if len(self.seconds[OURS]) % 2 else 1
        for name, loop in list(self.loops.items())[::backwards]:
            started = self._clock()
            loop.run(self.turn)
            self.seconds[name].append(self._clock() - started)
        self._started = self._clock()
        self.paused_seconds += time.perf_counter() - began


def train(size: Size, turns: TakeTurns, *, steps: int, device: str, compile: bool) -> Tensor:
    """Train with our trainer, run the loops in its pauses, and return the losses that the trainer logged."""
    with tempfile.TemporaryDirectory() as root:
        run_log = RunLog(root)
        trainer = L.Trainer(
            **DEFAULTS,
            accelerator=device,
            devices=1,
            precision="bf16-mixed" if device == "cuda" else "32-true",
            gradient_clip_val=size.clip,
            limit_val_batches=0,
            max_steps=steps,
            default_root_dir=root,
            # Seed last, so that random numbers drawn by the loops in a pause do not change the trainer's.
            callbacks=[turns, run_log, StepSeed(0)],
        )
        trainer.fit(module(size, compile=compile), datamodule=RandomImages(size))
        return torch.tensor([row["train/loss"] for row in records.rows(run_log.file)], dtype=torch.float64)


def alone(name: str, size: Size, *, steps: int, device: str, compile: bool) -> dict[str, float]:
    """Train one contender, and return its peak memory in bytes above that of a process that trains nothing."""
    before = _peak(device)
    if name == OURS:
        train(size, TakeTurns(steps, alone=True), steps=steps, device=device, compile=compile)
    else:
        data = RandomImages(size)
        data.setup("fit")
        lit = module(size, compile=compile)
        trainer = SimpleNamespace(
            max_steps=steps, world_size=1, accumulate_grad_batches=1, strategy=None, datamodule=data
        )
        object.__setattr__(lit, "_trainer", trainer)
        lit.configure_model()
        loop = Loop(lit.to(device), data)
        del lit.model
        loop.run(steps)
    return {"before": before, "peak": _peak(device)}


def _peak(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def memory(arguments: list[str]) -> dict[str, float]:
    """Return the peak memory of each contender in MB, each in a separate process."""
    found = {}
    for name in (OURS, BARE):
        command = [sys.executable, __file__, *arguments, "--alone", name]
        facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        found[name] = (facts["peak"] - facts["before"]) / 2**20
    return found


def compare_losses(turns: TakeTurns, losses: Tensor, device: str) -> float:
    """Return the largest relative difference between the losses of the bare loop and of the trainer.

    Raises:
        SystemExit: if the contenders did not do the same work.
    """
    theirs = torch.stack(turns.loops[BARE].losses).double().cpu()
    if len(theirs) != len(losses):
        sys.exit(f"the bare loop took {len(theirs)} steps, lit_layers {len(losses)}: the comparison is void")
    difference = (theirs / losses - 1).abs()
    if difference[0] > (1e-6 if device == "cpu" else 1e-3) or difference.mean() > (1e-3 if device == "cpu" else 3e-2):
        sys.exit(f"losses differ by {difference[0]:.1e} at first and {difference.mean():.1e} on average: void")
    return float(difference.max())


def rows_of(
    name: str, turns: TakeTurns, size: Size, peaks: dict[str, float], difference: float, skip: int, device: str
) -> list[Row]:
    """Return rows of our images per second over those of each loop."""
    per_round = size.round // turns.turn
    rounds = {
        of: [sum(taken[at : at + per_round]) for at in range(0, len(taken), per_round)][skip:]
        for of, taken in turns.seconds.items()
    }
    rows = []
    for other in (BARE, PLAIN):
        speeds = [f"{size.round * size.batch / statistics.median(rounds[of]):,.0f}" for of in (OURS, other)]
        others = {"images/s: ours, theirs": ", ".join(speeds)}
        if other == BARE:
            others["peak memory: ours, theirs"] = f"{peaks[OURS]:,.0f}, {peaks[BARE]:,.0f} MB"
            others["losses differ by"] = f"{difference:.0e}"
        target = TARGETS[device] if other == BARE else None
        rows.append(Row(f"{name}, over {other}", ratios(rounds[other], rounds[OURS]), target, others=others))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of training on images: lit_layers and a bare loop.")
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser, rounds=12)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them that do not")
    parser.add_argument("--batch", type=int, help="images a step, instead of the size's own")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on the CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile for both")
    parser.add_argument("--alone", choices=(OURS, BARE), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2 or options.warmup < 0 or min(options.threads, options.batch or 1) < 1:
        parser.error("expected at least 2 rounds, no negative warm-up, and positive threads and batch")
    size = SIZES[options.size]
    turn = 10 if options.device == "cuda" else 1
    size = replace(size, batch=options.batch or size.batch, round=max(size.round, turn))
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high" if options.device == "cuda" else "highest")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    common: dict[str, Any] = {"device": options.device, "compile": options.compile}
    if options.alone:
        print(json.dumps(alone(options.alone, size, steps=size.round, **common)))
        return 0
    peaks = memory(sys.argv[1:])
    turns = TakeTurns(turn, alone=False)
    losses = train(size, turns, steps=(options.warmup + options.rounds) * size.round, **common)
    print(f"{options.size}: {size}")
    rows = rows_of(
        options.size, turns, size, peaks, compare_losses(turns, losses, options.device), options.warmup, options.device
    )
    return finish("images", rows, options, device=options.device)


if __name__ == "__main__":
    sys.exit(main())
