"""Draws the picture of the README from a run: python docs/images/draw.py checkpoints/quickstart."""

import sys
from dataclasses import replace
from pathlib import Path

from lit_layers import plots, records


def panels(root: Path) -> plots.Panels:
    """Four questions to one run, under their titles."""
    frame = records.frame(root / "measurements.jsonl")
    middle = sorted(frame[frame["metric"] == "coupling"]["k"].dropna().unique())[1]
    charts = {
        "Logit lens: loss of each layer's readout": plots.layer_profile(frame, "logit_lens_loss"),
        "Linear probe: accuracy on the next token": plots.layer_profile(frame, "accuracy", tags={"control": None}),
        "Coupling of the blocks' Jacobians": plots.emergence_curves(
            frame, "coupling", tags={"k": middle}, baselines=["random_coupling"]
        ),
        "Line-shape score of a token's path": plots.emergence_curves(
            frame, "line_shape_score", tags={"statistic": None}
        ),
    }
    return plots.Panels(title="", charts=[replace(c, title=t) for t, c in charts.items()], columns=2, width=520)


if __name__ == "__main__":
    panels(Path(sys.argv[1])).write(Path(__file__).with_name("emergence.png"))
