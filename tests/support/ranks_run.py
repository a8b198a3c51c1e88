"""Run as a script by a test: a tiny watched run on some ranks. Arguments: root, number of ranks."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lit_layers.analyses import Lens, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.run_log import RunLog
from tests.support.tiny_training import RandomText, fit, module


@dataclass(kw_only=True)
class Failing(Analysis):
    name: str = "failing"

    def run(self, model):
        raise RuntimeError("no numbers")


if __name__ == "__main__":
    root, ranks = Path(sys.argv[1]), int(sys.argv[2])
    text = RandomText()
    run_log = RunLog(root)
    watch = EmergenceCallback([Failing(), Trajectory(batches=text), Lens(batches=text)], [1], root, watchers=[run_log])
    fit(
        root,
        [run_log, SeriesCheckpoint([1], root), watch],
        steps=3,
        module=module(dropout=0.0),
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        log_every_n_steps=1,
    )
