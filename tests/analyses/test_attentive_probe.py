"""Attentive probes of layers against probes fitted to the states of the model."""

import pytest
import torch

from lit_layers.analyses import AttentiveProbe, LabelProbe
from lit_layers.errors import InputError
from lit_layers.functional import fit_attentive_probe
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny


def rows(number: int, seed: int, tokens: int = 9) -> Listed:
    ids = torch.randint(3, 60, (number, tokens), generator=torch.Generator().manual_seed(seed))
    labels = (ids == 5).any(-1).long()  # class 1 has token 5 somewhere
    labels[:2] = torch.tensor([0, 1])
    half = number // 2
    return Listed(
        {"input_ids": ids[:half], "labels": labels[:half]}, {"input_ids": ids[half:], "labels": labels[half:]}
    )


def probe(**options) -> AttentiveProbe:
    fixed = {"train": rows(40, 1), "test": rows(20, 2), "steps": 20, "num_heads": 2}
    return AttentiveProbe(**(fixed | options))


def test_scores_of_a_layer_equal_those_of_the_function_on_its_states():
    view = LayeredModel(tiny("gpt2", torch.float64))
    records = {(r.metric, r.layer): r for r in records_of(probe(), view) if not r.tags.get("reference")}
    for layer in range(view.num_layers + 1):
        splits = {}
        for split, data in (("train", rows(40, 1)), ("test", rows(20, 2))):
            ids, labels = (torch.cat([b[name] for b in data]) for name in ("input_ids", "labels"))
            splits[split] = view.trajectory({"input_ids": ids}).hidden[layer], torch.ones_like(ids).bool(), labels
        fitted = fit_attentive_probe(*splits["train"], num_classes=2, num_heads=2, steps=20)
        states, mask, labels = splits["test"]
        log_proba = fitted.log_proba(states, mask)
        assert records["accuracy", layer].value == pytest.approx(
            (log_proba.argmax(-1) == labels).double().mean().item()
        )
        expected = -log_proba[torch.arange(20), labels].mean().item()
        assert records["log_loss", layer].value == pytest.approx(expected, rel=1e-6)
        assert records["accuracy", layer].low < records["accuracy", layer].value < records["accuracy", layer].high


def test_references_equal_those_of_the_label_probe():
    view = LayeredModel(tiny("gpt2"))
    mine = [r for r in records_of(probe(), view) if r.tags.get("reference")]
    linear = LabelProbe(train=rows(40, 1), test=rows(20, 2), tolerance=1e-2)
    theirs = [r for r in records_of(linear, view) if r.tags.get("reference")]
    assert [(r.metric, r.value) for r in mine] == [(r.metric, r.value) for r in theirs]


def test_rows_without_labels_are_refused():
    given = probe(train=Listed({"input_ids": torch.ones(3, 4, dtype=torch.long)}))
    with pytest.raises(InputError, match="the batches of train have no labels"):
        given.check(LayeredModel(tiny("gpt2")))
