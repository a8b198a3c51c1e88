"""Every analysis of text on a released language model: all values are in their documented ranges."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from lit_layers import analyses
from lit_layers.analyses import Analysis
from lit_layers.data import ProbeTask, WordPairs
from lit_layers.data.prompt_texts import GivenTexts
from lit_layers.functional.entropy import effective_rank
from lit_layers.measuring.one_model import measure
from lit_layers.metrics import METRICS
from lit_layers.models.saved import load
from lit_layers.records import Measurement, Record

pytestmark = [pytest.mark.realmodel, pytest.mark.soak, pytest.mark.timeout(1800)]  # two minutes on one core
ROOT = Path(__file__).parents[2]
LAYERS, VOCABULARY = 30, 49152
TEXTS = 12  # for Invariance
ROUNDING = 1e-5  # of float32 states, for values at a bound


@pytest.fixture(scope="module")
def model(smollm2):
    return load(str(smollm2))


@pytest.fixture(scope="module")
def tokens(smollm2) -> Tensor:
    """Token ids of the documentation, which is English text in the repository."""
    from transformers import AutoTokenizer

    text = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    return AutoTokenizer.from_pretrained(smollm2)(text, return_tensors="pt").input_ids[0]


def windows(tokens: Tensor, number: int, length: int, first: int = 0) -> list[dict[str, Tensor]]:
    ids = tokens[first : first + number * length].view(number, length)
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(16)]


@pytest.fixture(scope="module")
def measured(model, tokens, smollm2, tmp_path_factory) -> dict[str, Measurement]:
    """A measurement of each analysis of text, with the smallest sizes that give a value."""
    folder = tmp_path_factory.mktemp("texts")
    prompts = windows(tokens, 2, 16)
    few = windows(tokens, 1, 4)
    tokenizer = str(smollm2)
    topics = {"food": ("bread", "soup", "rice", "fish"), "sport": ("tennis", "rugby", "golf", "chess")}
    rows = [(f"I like {word} {when}.", topic) for topic, words in topics.items() for word in words
            for when in ("today", "a lot", "in summer", "at home")]  # fmt: skip
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(folder / "topics.csv", index=False)
    pairs = [("car", "cars"), ("dog", "dogs"), ("house", "houses"), ("tree", "trees"), ("song", "songs")]
    pd.DataFrame(pairs, columns=["word1", "word2"]).to_csv(folder / "plurals.csv", index=False)
    task: dict[str, Any] = {"task": ProbeTask("topics", str(folder / "topics.csv"), test=None), "tokenizer": tokenizer}
    every: Sequence[Analysis] = [
        analyses.Trajectory(batches=prompts),
        analyses.Representation(batches=prompts),
        analyses.Lens(batches=prompts),
        analyses.JacobianLens(batches=prompts, num_prompts=1, skip_first=2, lenses=("logit",)),
        analyses.LayerSimilarity(batches=prompts),
        analyses.StateMetric(metric=effective_rank, batches=prompts, options={"undefined": "nan"}),
        analyses.PathsInPlane(batches=prompts),
        analyses.StateGeometry(batches=prompts),
        analyses.PooledStates(batches=prompts),
        analyses.AttentionPatterns(batches=prompts),
        analyses.InContext(batches=prompts, early=2, late=4),
        analyses.NgramAgreement(batches=prompts, corpus=prompts, num_tokens=4),
        analyses.Induction(num_prompts=1, num_tokens=8, repeats=2),
        analyses.PromptStudies(batches=prompts, p=(0.0, 0.5)),
        analyses.Interventions(batches=prompts, middles=(1, 27), seeds=(0,), loops=(2,)),
        analyses.OrderStates(batches=prompts, middles=(1, 27), seeds=(0,), loops=(2,)),
        analyses.Coupling(batches=prompts, k=(8,), num_prompts=1),
        analyses.EffectiveDepth(batches=few),
        analyses.MinimalPairs(tokenizer=tokenizer),
        analyses.CouplingMatrices(batches=prompts, pairs=[(1, 2)], k=4),
        analyses.TokenCoupling(batches=few, k=(8,), num_tokens=2, num_prompts=1),
        analyses.CrossTokenInfluence(batches=few, num_prompts=1, num_inputs=1),
        analyses.NextTokenProbe(
            train=windows(tokens, 120, 20), test=windows(tokens, 40, 20, 4000), num_classes=5, random_labels=False
        ),
        analyses.NextTokenResidual(batches=windows(tokens, 90, 16), num_halves=0),
        analyses.Probe(**task),
        analyses.SampleSizeSweep(**task, num_seeds=2, layers=[0, 15, 30]),
        analyses.ConceptAlignment(words=WordPairs(str(folder / "plurals.csv"), tokenizer)),
        analyses.Invariance(
            texts=GivenTexts([text for text, _ in rows[:TEXTS]]), tokenizer=tokenizer, num_views=3, num_halves=0
        ),
    ]
    labelled = {analyses.AttentiveProbe, analyses.LabelProbe, Analysis, analyses.Jobs, analyses.Rows, analyses.Values}
    assert {type(each) for each in every} == {getattr(analyses, name) for name in analyses.__all__} - labelled
    return {type(each).__name__: measure(model, each, run="smollm2", step=None) for each in every}


def test_the_model_knows_the_capital_of_france(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(smollm2)(**prompt).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_every_analysis_has_records_and_all_values_are_in_their_ranges(measured):
    for name, measurement in measured.items():
        assert measurement.error is None, f"{name}: {measurement.error}"
        assert measurement.records, name
        for record in measurement.records:
            assert record.metric in METRICS, f"{name}: {record.metric} has no row in metrics.toml"
            row = METRICS[record.metric]
            low, high = (0, 1) if record.tags.get("normalization") == "maxEntropy" else (row.low, row.high)
            assert low - ROUNDING <= record.value <= high + ROUNDING, f"{name}: {record}"


def test_the_lens_at_the_last_layer_has_the_loss_of_the_model(model, tokens, measured):
    batch = windows(tokens, 2, 16)[0]
    with torch.no_grad():
        loss = model(**batch, labels=batch["input_ids"]).loss.item()
    losses = {record.layer: record.value for record in metric_records(measured["Lens"], "logit_lens_loss")}
    assert losses[LAYERS] == pytest.approx(loss, rel=1e-4)  # the same logits, summed in another order
    assert loss < math.log(VOCABULARY) - 3
    assert losses[0] > 4 * math.log(VOCABULARY), "embeddings were not made for the head"


def test_cosine_entropy_and_path_shape_are_those_of_plain_transformers_in_float64(smollm2, model, tokens):
    from transformers import AutoModelForCausalLM

    batches: Any = windows(tokens, 4, 24)
    network = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float64).model
    with torch.no_grad():
        states = torch.stack(network(**batches[0], output_hidden_states=True).hidden_states)  # ends with the normed
    rows = unit(states[7] - states[7].mean(1, keepdim=True))  # (prompts, tokens, dim)
    gram = (rows @ rows.mT).clamp(min=0)
    growth = states[:, :, 1:].norm(dim=-1).log().diff(dim=0)  # without the first token
    entropy, cosine = -(gram.square().sum((-1, -2)) / 24**2).log() / math.log(24), unit(states[7]) * unit(states[22])
    expected = [
        ("layer_cosine", 7, 22, {"mode": "token"}, cosine.sum(-1)),
        ("prompt_entropy", 7, None, {"normalization": "maxEntropy", "drop_first": 0}, entropy),
        ("line_shape_score", None, None, {}, 30 / unit(states.diff(dim=0)[:, :, 1:]).sum(0).norm(dim=-1)),
        ("expodistance", None, None, {}, growth.std(0, correction=0) / growth.mean(0).abs()),
    ]
    similarity, path = analyses.LayerSimilarity(batches=batches), analyses.Trajectory(batches=batches, preset="paper")
    entropies = analyses.Representation(batches=batches, preset="released_code", alpha=2)
    found = [r for each in (similarity, path, entropies) for r in measure(model, each, run="r", step=None).records]
    for metric, layer, other, tags, values in expected:
        wanted = {"statistic": None, **tags}.items()
        matching = [r for r in found if (r.metric, r.layer, r.other_layer) == (metric, layer, other)]
        chosen = [r.value for r in matching if wanted <= {"statistic": None, **r.tags}.items()]
        assert chosen == [pytest.approx(values.mean().item(), rel=1e-5)], metric


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def metric_records(measurement: Measurement, metric: str) -> list[Record]:
    return [record for record in measurement.records if record.metric == metric]
