"""Draws the picture of the README from a run: python docs/images/draw.py checkpoints/quickstart (needs Chromium)."""

import subprocess
import sys
import tempfile
from pathlib import Path

import plotly.graph_objects as go

from lit_layers import plots, records

SIZE = (1280, 860)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]


def panels(root: Path) -> dict[str, go.Figure]:
    """Four questions to one run, under their titles."""
    frame = records.frame(root / "measurements.jsonl")
    middle = sorted(frame[frame["metric"] == "coupling"]["k"].dropna().unique())[1]
    coupling = plots.emergence_curves(frame, "coupling", tags={"k": middle}, baselines=["random_coupling"])
    return {
        "Logit lens: loss of each layer's readout": plots.layer_profile(frame, "logit_lens_loss"),
        "Linear probe: accuracy on the next token": plots.layer_profile(frame, "accuracy", tags={"control": None}),
        "Coupling of the blocks' Jacobians": coupling,
        "Line-shape score of a token's path": plots.emergence_curves(
            frame, "line_shape_score", tags={"statistic": None}
        ),
    }


def main(root: Path, picture: Path) -> None:
    width, height = SIZE[0] // 2 - 16, SIZE[1] // 2 - 48
    cells = []
    for number, (title, fig) in enumerate(panels(root).items()):
        fig.update_layout(title=None, width=width, height=height, margin_t=44)
        plot = fig.to_html(full_html=False, include_plotlyjs=number == 0, config={"displayModeBar": False})
        cells.append(f'<div><b style="margin-left:56px">{title}</b>{plot}</div>')
    style = "display:grid;grid-template-columns:1fr 1fr;gap:8px;background:white;font-family:sans-serif;color:#222"
    page = f'<div style="{style}">{"".join(cells)}</div>'
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "page.html"
        html.write_text(page)
        window = f"--window-size={SIZE[0]},{SIZE[1]}"
        options = [f"--user-data-dir={folder}/user", "--virtual-time-budget=9000", window, f"--screenshot={picture}"]
        subprocess.run(["chromium", *FLAGS, *options, html.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).with_name("emergence.png"))
