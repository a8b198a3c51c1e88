"""A run that takes the options of a grid's cell and behaves as `lit-layers fit` does, without training.

python quick_run.py DIARY --lr=0.1 --seconds=0.2 --root FOLDER --resume last

What it does goes to DIARY, a line each: "began NAME", "trained NAME", "saved NAME".
"""

# ruff: noqa: T201
import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("diary", type=Path)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--model.lr", dest="lr", type=float)
    parser.add_argument("--config")
    parser.add_argument("--corpus", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--resume", choices=["last"], required=True)
    options = parser.parse_args()
    root, name = options.root, options.root.name

    def note(what: str) -> None:
        with open(options.diary, "a") as file:
            file.write(f"{what} {name}\n")

    def save(*_: object) -> None:
        note("saved")
        (root / "running").unlink()
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    if options.lr < 0 and not (options.diary.parent / "repaired").exists():
        print("\x1b[31mlooking at the options\x1b[0m")
        print(f"lit-layers fit: error: model.lr: expected a positive learning rate, got {options.lr}", file=sys.stderr)
        print("a last line", file=sys.stderr)
        return 2
    root.mkdir(exist_ok=True)
    (root / "running").touch(exist_ok=False)  # two at once in one folder end here
    note("began")
    print(f"gpus {os.environ.get('CUDA_VISIBLE_DEVICES')} id {os.environ.get('WANDB_RUN_ID')}", flush=True)
    until = time.monotonic() + options.seconds
    while time.monotonic() < until and not (root / "metrics.jsonl").exists():
        time.sleep(0.01)
    if not (root / "metrics.jsonl").exists():
        note("trained")
        best, last = 1 / (1 + abs(options.lr - 0.3)), 0.5
        rows = [{"step": 10, "validation/accuracy": best}, {"step": 20, "validation/accuracy": last}, {"step": 21}]
        (root / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "running").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
