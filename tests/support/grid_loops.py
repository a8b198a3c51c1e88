"""Run the grids of `recipes/`, shell loops over `lit-layers fit`, with a program that logs its arguments instead."""

import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOPS = [*sorted((ROOT / "recipes" / "sweeps").glob("*_grid.sh")), *sorted((ROOT / "recipes" / "studies").glob("*.sh"))]
PROGRAM = """#!/usr/bin/env bash
for word in "$@"; do if [ "$last" = --root ]; then run=$word; fi; last=$word; done
printf '%s\\t' "$@" >> "$NOTES"; echo >> "$NOTES"
mkdir -p "$run"
case "$run" in *"$BROKEN"*) exit 2;; *"$SLOW"*)
  trap 'touch "$run/saved"; exit 143' TERM
  touch "$run/begun"
  while true; do sleep 0.05; done;;
esac
"""


class Loop:
    """A grid script whose run folders and log (`notes`) are in `folder`."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.runs, self.notes = script, folder / "runs", folder / "notes"
        program = folder / "bin" / "lit-layers"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(PROGRAM)
        table = program.with_name("python")  # prints the table of a study
        table.write_text("#!/bin/sh\n")
        for each in (program, table):
            each.chmod(0o755)

    def start(self, *options: str, **variables: str) -> subprocess.Popen:
        path = f"{self.notes.parent / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "ROOT": str(self.runs), "NOTES": str(self.notes)}
        environment |= {"BROKEN": "none", "SLOW": "none", **variables}
        return subprocess.Popen(["bash", str(self.script), *options], env=environment, cwd=ROOT)

    def run(self, *options: str, **variables: str) -> int:
        return self.start(*options, **variables).wait(60)

    def stop(self, number: signal.Signals, run: str, **variables: str) -> int:
        """Start the script, send a signal once the run with `run` in its name has begun, and return the exit code."""
        process = self.start(SLOW=run, **variables)
        deadline = time.monotonic() + 30
        while not list(self.runs.glob(f"*{run}*/begun")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        return process.wait(30)

    def commands(self) -> list[list[str]]:
        """Return the arguments of each run that was started since the last call."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.unlink(missing_ok=True)
        return [line.rstrip("\t").split("\t") for line in lines]


def name_of(command: list[str]) -> str:
    """Return the name of the run folder of a command."""
    return Path(command[command.index("--root") + 1]).name
