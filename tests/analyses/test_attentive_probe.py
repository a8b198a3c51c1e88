"""Attentive probes of layers: their scores are those of the probe fitted to the states of the model."""

import json

import pytest
import torch
import transformers

from lit_layers.analyses import AttentiveProbe, LabelProbe
from lit_layers.cli.main import main
from lit_layers.data import find_task
from lit_layers.data.batches import GivenBatches
from lit_layers.errors import InputError
from lit_layers.functional import fit_attentive_probe
from lit_layers.models.view import LayeredModel
from tests.support.labelled_texts import labelled, saved_gpt2, write_banking77
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny


def rows(number: int, seed: int, tokens: int = 9) -> Listed:
    ids = torch.randint(3, 60, (number, tokens), generator=torch.Generator().manual_seed(seed))
    labels = (ids == 5).any(-1).long()  # somewhere in the text
    labels[:2] = torch.tensor([0, 1])
    half = number // 2
    return Listed(
        {"input_ids": ids[:half], "labels": labels[:half]}, {"input_ids": ids[half:], "labels": labels[half:]}
    )


def probe(**options) -> AttentiveProbe:
    fixed = {"train": rows(40, 1), "test": rows(20, 2), "steps": 20, "num_heads": 2}
    return AttentiveProbe(**(fixed | options))


def test_scores_of_a_layer_are_those_of_the_function_on_its_states():
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


def test_what_the_class_frequencies_give_is_as_of_the_label_probe():
    view = LayeredModel(tiny("gpt2"))
    mine = [r for r in records_of(probe(), view) if r.tags.get("reference")]
    linear = LabelProbe(train=rows(40, 1), test=rows(20, 2), tolerance=1e-2)
    theirs = [r for r in records_of(linear, view) if r.tags.get("reference")]
    assert [(r.metric, r.value) for r in mine] == [(r.metric, r.value) for r in theirs]


def test_images_are_probed_too():
    view = LayeredModel(tiny("vit"))
    generator = torch.Generator().manual_seed(0)
    side = view.image_size or 16
    pictures = [torch.randn(12, 3, side, side, generator=generator) for _ in range(2)]
    labels = torch.arange(12) % 3
    train, test = (Listed({"pixel_values": each, "labels": labels}) for each in pictures)
    records = list(records_of(probe(train=train, test=test, steps=3), view))
    assert {r.layer for r in records} == {None, *range(view.num_layers + 1)}


@pytest.mark.soak
def test_a_recipe_probes_texts_of_a_task(tmp_path, monkeypatch, capsys):
    """As labelled rows given in Python, with the tokenizer's own account of each text."""
    model = saved_gpt2(tmp_path / "model").float()
    write_banking77(tmp_path / "tasks", labelled(30), labelled(12, first=30))
    monkeypatch.chdir(tmp_path)
    parts = {}
    for part in ("train", "test"):
        texts = {"class_path": "TaskTexts", "init_args": {"task": "banking77", "folder": "tasks", "part": part}}
        options = {"texts": texts, "tokenizer": "${tokenizer}", "max_tokens": 12, "batch_size": 5}
        parts[part] = {"class_path": "lit_layers.data.LabelledTexts", "init_args": options}
        texts["class_path"] = f"lit_layers.data.{texts['class_path']}"
    attentive = {"class_path": "lit_layers.analyses.AttentiveProbe", "init_args": {**parts, "steps": 3}}
    linear = {"class_path": "lit_layers.analyses.LabelProbe", "init_args": {**parts, "tolerance": 0.01}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"analyses": [attentive, linear]}))
    words = ["--config", "recipe.yaml", "--root", "out", "--device", "cpu"]
    assert main(["analyze", "model", *words]) == 0, capsys.readouterr().err
    lines = map(json.loads, (tmp_path / "out" / "measurements.jsonl").read_text().splitlines())
    found = {line["analysis"]: line["records"] for line in lines}
    # The same rows, one by one, of the texts and their moods.
    data = find_task("banking77").load("tasks")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    given = {}
    for part in ("train", "test"):
        split = getattr(data, part)
        ids = [torch.tensor([tokenizer(text).input_ids[:12]]) for text in split.texts]
        given[part] = [(row, label[None]) for row, label in zip(ids, split.targets, strict=True)]
    views = {part: GivenBatches(rows) for part, rows in given.items()}
    same = {
        "attentive_probe": AttentiveProbe(**views, steps=3),
        "label_probe": LabelProbe(**views, tolerance=0.01),
    }
    for name, analysis in same.items():
        expected = {
            (r.metric, r.layer, *sorted(map(str, r.tags.items()))): r.value
            for r in records_of(analysis, LayeredModel(model))
        }
        told = {
            (r["metric"], r.get("layer"), *sorted(map(str, r.get("tags", {}).items()))): r["value"] for r in found[name]
        }
        assert told == pytest.approx(expected, rel=1e-3), name  # texts of other widths, in other batches


def test_rows_without_labels_are_refused():
    given = probe(train=Listed({"input_ids": torch.ones(3, 4, dtype=torch.long)}))
    with pytest.raises(InputError, match="the batches of train have no labels"):
        given.check(LayeredModel(tiny("gpt2")))
