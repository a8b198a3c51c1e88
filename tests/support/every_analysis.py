"""Build every analysis of the package with small inputs, for tests of what must hold for all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import lit_layers.analyses
from lit_layers.analyses.base import Analysis, Jobs, Rows, Values
from lit_layers.data import GivenTexts
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.data.word_pairs import WordPairs
from lit_layers.functional.entropy import effective_rank
from lit_layers.tasks.benchmarks import Benchmarks
from lit_layers.tasks.catalogue import resolve
from lit_layers.tasks.mteb_scores import MtebTask
from lit_layers.tasks.probe_task import ProbeTask
from tests.support.benchmark_rows import write_tasks
from tests.support.data_mapping import write_mapping
from tests.support.labelled_texts import labelled, write_csv
from tests.support.listed_batches import Listed
from tests.support.tiny_models import IMAGE

VOCABULARY = 300  # tokens of the tokenizer; text models need as many: `tiny(name, vocab_size=VOCABULARY)`
_WORDS = {
    "plural": [("song", "songs"), ("number", "numbers"), ("verb", "verbs")],
    "past": [("play", "played"), ("sing", "sang"), ("hear", "heard")],
}
_PAIRS = "good,bad,condition\nShe sings.,She sing.,verb\nThey sing.,They sings.,verb\nA song.,A songs.,noun\n"
# Public names of `lit_layers.analyses` that are not analyses.
_BASES = (Analysis, Jobs, Rows, Values)


def analysis_classes() -> set[type[Analysis]]:
    """Return the classes of the package's analyses."""
    public = (getattr(lit_layers.analyses, name) for name in lit_layers.analyses.__all__)
    return {kind for kind in public if kind not in _BASES} | {MtebTask, Benchmarks}


def prompts() -> Listed:
    """Return batches of prompts of different lengths; one batch has a single prompt."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for lengths in ((9, 7), (9,), (5, 8)):
        mask = torch.tensor([[1] * length + [0] * (9 - length) for length in lengths])
        batches.append({"input_ids": torch.randint(3, 60, mask.shape, generator=generator), "attention_mask": mask})
    return Listed(*batches)


def pictures(count: int = 12, size: int = 6) -> Listed:
    """Return batches of images: noise with a bright band whose position depends on the label."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(count) % 3
    pixels = torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        image[:, 4 * label : 4 * label + 4] += 0.7
    starts = range(0, count, size)
    return Listed(*({"pixel_values": pixels[i : i + size], "labels": labels[i : i + size]} for i in starts))


def save_inputs(folder: Path) -> Path:
    """Write the tokenizer, task, word pairs and MTEB data that text analyses read, and return `folder`."""
    save_tokenizer(train_bpe([text for text, _ in labelled(60)] * 2, VOCABULARY), folder / "tokenizer")
    write_csv(folder / "moods" / "train.csv", labelled(36))
    write_csv(folder / "moods" / "test.csv", labelled(18, first=36))
    rows = [
        {"group": "I", "category_id": f"I0{number}", "category": name, "word": one, "answers": [other]}
        for number, (name, pairs) in enumerate(_WORDS.items())
        for one, other in pairs
    ]
    pd.DataFrame(rows).to_parquet(folder / "pairs.parquet")
    (folder / "minimal_pairs.csv").write_text(_PAIRS)
    draw = np.random.default_rng(0)
    songs = [text for text, _ in labelled(20)]
    stsb = {"sentence1": songs, "sentence2": songs[::-1], "score": draw.integers(0, 5, len(songs)).astype(float)}
    (write_mapping(folder / "mteb") / "glue").mkdir()
    pd.DataFrame(stsb).to_parquet(folder / "mteb" / "glue" / "stsb_test.parquet")
    write_tasks(folder / "mteb" / "benchmarks")
    return folder


def prompt_analyses(batches: Any) -> list[Analysis]:
    """Return the analyses that read prompts, which may be texts or images."""
    return [
        lit_layers.analyses.Trajectory(batches=batches),
        lit_layers.analyses.Representation(batches=batches),
        lit_layers.analyses.Lens(batches=batches),
        lit_layers.analyses.StateMetric(metric=effective_rank, batches=batches, options={"undefined": "nan"}),
        lit_layers.analyses.StateMetric(name="mlp", metric=effective_rank, batches=batches, states="mlp"),
        lit_layers.analyses.Lens(name="lens/after_attention", batches=batches, states="after_attention"),
        lit_layers.analyses.Representation(name="representation/attention", batches=batches, states="attention"),
        lit_layers.analyses.Coupling(batches=batches, k=(2, 5), num_prompts=3),
        lit_layers.analyses.Coupling(
            name="coupling/hf", batches=batches, k=(2,), num_prompts=3, states="hf", sign="absolute"
        ),
        lit_layers.analyses.TokenCoupling(batches=batches, k=(2,), num_tokens=2, num_prompts=2),
        lit_layers.analyses.CouplingMatrices(batches=batches, pairs=[(1, 2)], k=3, num_prompts=2),
        lit_layers.analyses.LayerSimilarity(batches=batches),
        lit_layers.analyses.Interventions(batches=batches, seeds=(0,), loops=(2,)),
        lit_layers.analyses.OrderStates(batches=batches, seeds=(0,), loops=(2,)),
        lit_layers.analyses.PathsInPlane(batches=batches),
        lit_layers.analyses.StateGeometry(batches=batches),
        lit_layers.analyses.PooledStates(batches=batches),
        lit_layers.analyses.EffectiveDepth(batches=batches),
        lit_layers.analyses.AttentionPatterns(batches=batches),
    ]


def image_analyses() -> list[Analysis]:
    """Return the analyses for a vision model."""
    rows = {"train": pictures(24), "test": pictures()}
    probe = lit_layers.analyses.LabelProbe(**rows, tolerance=1e-6)
    return [*prompt_analyses(pictures()), probe, lit_layers.analyses.AttentiveProbe(**rows, steps=2)]


def text_analyses(folder: Path) -> list[Analysis]:
    """Return the analyses for a causal language model; `folder` was filled by `save_inputs`."""
    batches, tokenizer = prompts(), str(folder / "tokenizer")
    task = ProbeTask("moods", str(folder / "moods"))
    rows = {"train": _rows(80, 1), "test": _rows(40, 2)}
    classes = {name: Listed(*(b | {"labels": b["input_ids"][:, 0] % 2} for b in r)) for name, r in rows.items()}
    texts, views = GivenTexts([text for text, _ in labelled(8)]), {"num_views": 3, "max_tokens": 30, "permutations": 2}
    (spec,) = resolve(["STSBenchmark"], folder / "mteb")
    return [
        *prompt_analyses(batches),
        lit_layers.analyses.Induction(num_prompts=3, num_tokens=4, repeats=2),
        lit_layers.analyses.NgramAgreement(batches=batches, corpus=batches, num_tokens=3),
        lit_layers.analyses.InContext(batches=batches, early=2, late=5),
        lit_layers.analyses.CrossTokenInfluence(batches=batches, num_prompts=2),
        lit_layers.analyses.JacobianLens(batches=batches, num_prompts=2, skip_first=1),
        lit_layers.analyses.PromptStudies(batches=batches, special_tokens=(0, 5)),
        lit_layers.analyses.NextTokenResidual(batches=rows["train"], num_halves=0),
        lit_layers.analyses.NextTokenProbe(**rows, num_classes=6, min_context=3, tolerance=1e-6),
        lit_layers.analyses.LabelProbe(**classes, tolerance=1e-6),
        lit_layers.analyses.AttentiveProbe(**classes, steps=2),
        lit_layers.analyses.Probe(task=task, tokenizer=tokenizer, tolerance=1e-4),
        lit_layers.analyses.SampleSizeSweep(task=task, tokenizer=tokenizer, layers=[0, 2], num_seeds=2),
        lit_layers.analyses.ConceptAlignment(words=WordPairs(str(folder / "pairs.parquet"), tokenizer, batch_size=4)),
        lit_layers.analyses.MinimalPairs(tokenizer=tokenizer, pairs=str(folder / "minimal_pairs.csv")),
        lit_layers.analyses.Invariance(texts=texts, tokenizer=tokenizer, num_halves=2, **views),
        Benchmarks(tasks=("arc_challenge", "lambada"), tokenizer=tokenizer, folder=folder / "mteb", limit=2),
        MtebTask(task=spec, tokenizer=tokenizer, results=folder / "results"),
    ]


def _rows(count: int, seed: int) -> Listed:
    """Return windows of eight tokens in which low ids are frequent."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 3 + (torch.rand(count, 8, generator=generator) ** 4 * 50).long()
    return Listed(*({"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens.split(10)))
