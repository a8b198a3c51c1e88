"""Train a tiny series of checkpoints and measure it, for tests of engines."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.analyses import Coupling, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.measuring import MeasuringOptions
from lit_layers.measuring.offline import analyze_series, to_dtype
from lit_layers.records import Measurement
from lit_layers.series import OneModel
from lit_layers.series.auditing import SeriesMeasurements
from lit_layers.training import SeriesCheckpoint
from tests.support.random_text import RandomText
from tests.support.tiny_training import fit


def trained(root: Path, steps: int = 4, every: int = 2) -> Path:
    fit(root, [SeriesCheckpoint({"every": every}, root)], steps=steps)
    return root


def two_groups() -> list:
    text, other = RandomText(), RandomText(num_batches=1)
    return [Trajectory(batches=text), Trajectory(batches=other, name="other"), Coupling(batches=text, k=(2,))]


def sorted_lines(root: Path) -> list[Measurement]:
    """Return the measurements of a root without their seconds, sorted by step and analysis."""
    found = [replace(each, seconds=0.0) for each in records.read(root / "measurements.jsonl")]
    return sorted(found, key=lambda each: (each.step or 0, each.analysis))


def new_recipe(folder: Path) -> Path:
    """Write a recipe with one quick analysis of texts, for models with 300 tokens, and return its path."""
    save_tokenizer(train_bpe(["one text", "and one more"], 258), folder / "tokenizer")
    texts = {"corpus": write_texts(folder / "texts"), "tokenizer": str(folder / "tokenizer")}
    texts |= {"num_sequences": 2, "num_tokens": 8}
    batches = {"class_path": "lit_layers.data.EvalText", "init_args": texts}
    recipe = {"analyses": [{"class_path": "Trajectory", "init_args": {"batches": batches}}]}
    (folder / "texts.yaml").write_text(json.dumps(recipe))
    return folder / "texts.yaml"


def analyze(
    model: str | Path, analyses: Sequence[Analysis], *, root: str | Path, revision: str | None = None, **options: Any
) -> list[Measurement]:
    """Measure one model, and return the last measurement of each of these analyses in the root."""
    series = OneModel(model, revision=revision)
    analyze_series(series, analyses, root=root, **options)
    earlier, (checkpoint,) = SeriesMeasurements(Path(root)), series.checkpoints
    run, step = earlier.run_of(checkpoint), checkpoint.step
    measured = to_dtype(analyses, MeasuringOptions(**options))
    return [last for each in measured if (last := earlier.store.last(run, step, each))]


def write_texts(folder: Path, words: int = 100) -> str:
    """Write a corpus with one training text and one validation text, and return its folder."""
    folder.mkdir()
    for split in ("train", "validation"):
        text = " ".join(f"{split} {number}" for number in range(words))
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return str(folder)
