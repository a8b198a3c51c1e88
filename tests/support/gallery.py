"""Draw the pictures of docs/gallery.md with the code on that page: `python -m tests.support.gallery`.

`python -m docs.studies.released_models` measures the released models in these pictures.
"""

import importlib
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import plots, records
from lit_layers.figures.vega import pictures_of
from tests.support import layer_results, runs, variant_results

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
RELEASED = PICTURES / "released.parquet"  # measurements of MiniLM and SmolLM2
_FIGURE = re.compile(r"^### (?P<name>\w+)\n.*?^```py\n(?P<code>.*?)\n```\n", re.MULTILINE | re.DOTALL)


def lines() -> dict[str, str]:
    """Return the code on the page that draws each kind of figure."""
    return {match["name"]: match["code"] for match in _FIGURE.finditer(PAGE.read_text(encoding="utf-8"))}


def picture_of(name: str) -> Path:
    return PICTURES / f"{name}.svg"


def drawn(code: str) -> Any:
    """Return the figure that this code of the page draws."""
    return eval(code, {"plots": plots, **tables()})


@cache
def tables() -> dict[str, Any]:
    """Return the data that the page's code draws, by variable name."""
    if (studies := str(ROOT / "docs" / "studies")) not in sys.path:
        sys.path.append(studies)
    study: Any = importlib.import_module("four_papers")
    run = records.frame(study.unpack(study.DATA, study.SAMPLE)[study.SAMPLE])
    return {"run": run, "points": _points(run), "models": pd.read_parquet(RELEASED), **_synthetic_data()}


def _points(run: Any) -> plots.Scatter:
    """Return a scatter plot with a point per checkpoint."""
    last = run[(run["layer"] == 12) & run["other_layer"].isna()].groupby(["metric", "step"])["value"].first()
    return plots.Scatter(
        x=last["logit_lens_loss"].tolist(),
        y=last["effective_rank"].tolist(),
        names=[f"step {step:,}" for step in last["logit_lens_loss"].index],
        x_title="Logit-lens loss of layer 12 (nats)",
        y_title="Effective rank of layer 12",
        title="A point a checkpoint",
        path=True,
    )


def _synthetic_data() -> dict[str, Any]:
    """Return synthetic measurements of probes and of models whose blocks run in another order."""
    orders = ("1 2 3 4 5 6 6 7 8 9 10 11 12", "1 2 3 4 5 9 10 11 12")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs.write_scalars(root / "metrics.jsonl", 400)
        scalars = [*records.rows(root / "metrics.jsonl")]
        changed = variant_results.write(root / "changed", custom=orders)
        probes = layer_results.write_layer_results(root / "probes")
        for name, blocks in {"small": 12, "medium": 24, "large": 36}.items():
            variant_results.write(root / "sizes", steps=(None,), analyses=("tasks",), run=name, blocks=blocks)
        read = {path.name: records.frame(path / "measurements.jsonl") for path in (changed, probes, root / "sizes")}
    return {"scalars": scalars, **read}


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    figures = lines()
    pictures = pictures_of([drawn(code).whole() for code in figures.values()], [".svg"])
    for name, (picture,) in zip(figures, pictures, strict=True):
        picture_of(name).write_bytes(picture)


if __name__ == "__main__":
    main()
