"""`lit-layers select`: its output, files and exports, and errors for wrong input."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_layers.cli.main import main
from lit_layers.data import TASKS, ProbeTask
from lit_layers.data.batches import EvalText, encode_texts
from lit_layers.figures.labels import value
from lit_layers.functional.probes.logistic import fit_logistic_probes
from lit_layers.functional.probes.regression import fit_ridge_probes
from lit_layers.models.build import save, vit
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.select import load_classifier
from lit_layers.tasks.text_features import text_features
from tests.support.charts import page_figures
from tests.support.labelled_texts import labelled, saved_bert, saved_gpt2, scaled, write_banking77, write_csv
from tests.support.rounding import assert_rounded
from tests.support.skipping import skipping

QUICK = ["--rounds", "2"]
VIT = {"depth": 3, "embed_dim": 32, "num_heads": 4, "img_size": 8, "patch_size": 4, "num_classes": 10}
TEXTS = ["A merry song they sang tonight", "A sad song for number 7", "A calm song they heard by the sea"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A checkpoint of a run, a vision model, and labelled texts."""
    root = tmp_path_factory.mktemp("select")
    saved_gpt2(root / "run" / "step-000000400")
    save(scaled(vit("deit_tiny_patch16_224", seed=1, **VIT)), root / "vit")
    write_banking77(root / "data", labelled(90), labelled(30, first=90))
    write_csv(root / "songs.csv", labelled(90), ("title", "mood"))
    return root


@pytest.fixture(scope="module")
def selected(home, tmp_path_factory) -> tuple[Path, Path, str]:
    """A choice with its export: the folder of numbers and pictures, the folder of the model, the printed output."""
    root = tmp_path_factory.mktemp("found")
    log = root / "said.txt"
    command = ["select", str(home / "run" / "step-000000400"), "--task", "banking77", "--folder", str(home / "data")]
    with pytest.MonkeyPatch.context() as patch, log.open("w") as file:
        patch.setattr("sys.stdout", file)
        patch.setenv("COLUMNS", "120")
        command += ["--root", str(root / "out"), "--export", str(root / "cut"), "--tolerance", "0.1", *QUICK]
        assert main(command) == 0
    return root / "out", root / "cut", log.read_text()


def content(out: Path) -> dict[str, Any]:
    return json.loads((out / "select.json").read_text())


def select(capsys, *command: object) -> str:
    assert main(["select", *map(str, command), *QUICK]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def fit_probes(model: Path, task: ProbeTask, folder: Path | None, **options) -> Any:
    """Return the task, the features of each split, and probes of all layers fitted on all training rows at once."""
    data, view = task.load(None if folder is None else str(folder)), LayeredModel(load(model))
    states = [
        text_features(view, encode_texts(str(model), split.texts, max_tokens=32), **options)
        for split in (data.train, data.validation, data.test)
    ]
    features = [torch.stack([each.layer(layer) for layer in range(each.num_layers + 1)]) for each in states]
    if data.classes is None:
        return data, features, fit_ridge_probes(features[0], data.train.targets)
    return data, features, fit_logistic_probes(features[0], data.train.targets, num_classes=len(data.classes))


def test_the_scores_are_those_of_probes_on_the_splits_of_the_task(home, selected):
    found = content(selected[0])
    checkpoint = home / "run" / "step-000000400"
    data, features, probes = fit_probes(checkpoint, TASKS["banking77"], home / "data")
    assert found["rows"] == {"train": 72, "validation": 18, "test": 30}
    for part, split, states in (("validation", data.validation, features[1]), ("test", data.test, features[2])):
        hits = (probes.predict(states) == split.targets).double().mean(1).tolist()
        for layer, score in found[part].items():
            assert score["value"] == pytest.approx(hits[int(layer)], abs=1e-9)
            assert score["low"] <= score["value"] <= score["high"]
    assert set(found["validation"]) == {"0", "1", "2", "3"}
    assert set(found["test"]) == {str(found["layer"]), "3"}
    curve = [found["validation"][str(layer)]["value"] for layer in (1, 2, 3)]
    assert found["layer"] == next(layer for layer in (1, 2, 3) if curve[layer - 1] >= curve[2] - 0.1 - 1e-9)
    assert 1 <= found["layer"] < 3, "else the export has nothing to cut"
    assert sum(found["chosen_in_share_of_resamples"].values()) == pytest.approx(1)
    times = list(found["seconds_to_layer"].values())
    assert times == sorted(times)
    assert (found["rule"], found["tolerance"]) == ("within_tolerance", 0.1)
    assert (found["pooling"], found["max_tokens"]) == ("last", 32)


def test_the_exported_classifier_equals_the_probe_of_that_layer(home, selected):
    out, cut, _ = selected
    layer, classifier = content(out)["layer"], load_classifier(cut)
    data, features, probes = fit_probes(home / "run" / "step-000000400", TASKS["banking77"], home / "data")
    texts = list(data.test.texts)
    expected = probes.log_proba(features[2])[layer].exp()
    torch.testing.assert_close(classifier.probabilities(texts), expected, rtol=1e-3, atol=1e-4)
    assert classifier.predict(texts) == [data.classes[number] for number in expected.argmax(-1)]
    right = [label == text.split()[1] for label, text in zip(classifier.predict(texts), texts, strict=True)]
    assert sum(right) / len(right) == pytest.approx(content(out)["test"][str(layer)]["value"])


def test_the_choice_is_printed_and_is_on_the_page_of_the_export(selected):
    out, cut, output = selected
    found = content(out)
    layer = found["layer"]
    score, baseline = found["validation"][str(layer)]["value"], found["baseline"]
    compared = f"accuracy {score:.4f} on validation rows, majority class {baseline:.4f}"
    assert f"banking77: layer {layer} of 3 is chosen: {compared}" in output
    test = found["test"][str(layer)]
    assert f"test, layer {layer}: {test['value']:.4f} ({test['low']:.4f} to {test['high']:.4f})" in output
    assert output.splitlines()[-1] == str(cut)
    page = (cut / "README.md").read_text()
    assert re.search(rf"\| layer +\| +{layer} of 3 \|", page)
    assert "run/step-000000400" in page
    assert (cut / "validation.png").read_bytes() == (out / "layers.png").read_bytes()


def test_the_page_shows_the_curve(selected):
    out, *_ = selected
    page, found = (out / "select.html").read_text(), content(out)
    assert f"<h2>Layer {found['layer']} of 3 is chosen (within tolerance 0.1)</h2>" in page
    assert value(found["test_difference_to_last"]["value"]) in page
    over_depth, _ = page_figures(out / "select.html")
    scores = [point["y"] for point in over_depth.points if point["k"] == 0]
    assert scores == pytest.approx([score["value"] for score in found["validation"].values()], rel=1e-3)
    drawn = (out / "layers.svg").read_text()
    assert f"run-step-000000400 on banking77: layer {found['layer']} of 3 is chosen (within tolerance 0.1)" in drawn


@pytest.mark.soak
def test_labelled_texts_of_the_user_are_a_task(home, tmp_path, capsys, monkeypatch):
    """An encoder reads them at its class token."""
    monkeypatch.chdir(tmp_path)
    saved_bert(tmp_path / "bert")
    task = ProbeTask("songs", str(home / "songs.csv"), text="title", label="mood", test=None)
    options = ["--text", "title", "--label", "mood", "--pooling", "cls"]
    output = select(capsys, tmp_path / "bert", "--task", task.source, *options)
    assert "songs: layer " in output
    data, features, probes = fit_probes(tmp_path / "bert", task, None, pooling="cls")
    found = content(tmp_path / "selected" / "bert-songs")
    assert list(found["rows"].values()) == [len(data.train), len(data.validation), len(data.test)]
    assert found["rows"]["validation"] == 13
    hits = (probes.predict(features[1]) == data.validation.targets).double().mean(1).tolist()
    assert [score["value"] for score in found["validation"].values()] == pytest.approx(hits)
    assert max(hits[1:]) > hits[0] + 0.1, "at layer 0 the class token knows nothing"


@pytest.mark.soak
def test_numeric_labels_are_a_regression_and_are_predicted(home, tmp_path, capsys):
    numbers = {"merry": 5.0, "calm": 3.0, "sad": 1.5}
    rows = [{"text": text, "label": numbers[mood] + len(text) / 100} for text, mood in labelled(90)]
    path = tmp_path / "stars.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = home / "run" / "step-000000400"
    folders = ["--root", tmp_path / "out", "--export", tmp_path / "cut"]
    output = select(capsys, model, "--task", path, "--regression", "--rule", "best", *folders)
    found = content(tmp_path / "out")
    assert "mean_squared_error" in output
    assert (found["rule"], found["tolerance"]) == ("best", None)
    assert re.search(r"\| chosen by +\| +best \|", (tmp_path / "cut" / "README.md").read_text())
    assert f"training mean {found['baseline']:.4f}" in output
    task = ProbeTask("stars", str(path), kind="regression", test=None)
    data, features, probes = fit_probes(model, task, None)
    errors = (probes.predict(features[1]) - data.validation.targets).square().mean(1).tolist()
    assert [score["value"] for score in found["validation"].values()] == pytest.approx(errors, rel=1e-4)
    assert found["layer"] == 1 + min(range(3), key=lambda index: errors[1 + index])
    expected = probes.predict(features[2])[found["layer"]].tolist()
    assert load_classifier(tmp_path / "cut").predict(list(data.test.texts)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.soak
def test_a_vision_transformer_is_cut_for_images(home, tmp_path, capsys):
    import timm

    folders = ["--root", tmp_path / "out", "--export", tmp_path / "cut"]
    options = ["--images", "digits", "--num_train", "200", "--num_test", "60", "--rule", "plateau"]
    output = select(capsys, home / "vit", *options, *folders)
    found, layer = content(tmp_path / "out"), content(tmp_path / "out")["layer"]
    assert "digits: layer " in output
    assert found["rows"] == {"train": 160, "validation": 40, "test": 60}
    assert (found["pooling"], found["max_tokens"]) == ("cls", None)
    assert "milliseconds to the layer, an image" in (tmp_path / "out" / "layers.svg").read_text()
    plain = timm.create_model(f"local-dir:{tmp_path / 'cut'}", pretrained=True).eval()
    pixels: Tensor = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = LayeredModel(load(home / "vit")).trajectory({"pixel_values": pixels}).hidden
    assert_rounded(LayeredModel(plain).trajectory({"pixel_values": pixels}).hidden, whole[: layer + 1])
    assert load_classifier(tmp_path / "cut").probabilities(pixels).shape == (5, 10)


@pytest.mark.soak
def test_models_are_compared_at_the_layer_chosen_for_each(home, tmp_path, capsys, monkeypatch):
    """The scores equal those of probes fitted here. A model without a tokenizer is reported and left out."""
    monkeypatch.chdir(tmp_path)
    saved_gpt2(tmp_path / "deep", n_layer=5)
    saved_gpt2(tmp_path / "mute", tokenizer=False)
    models = [str(home / "run" / "step-000000400"), "deep", "mute"]
    command = ["select", *models, "--task", "banking77", "--folder", str(home / "data"), "--tolerance", "0.1", *QUICK]
    assert main(command) == 1
    output = capsys.readouterr().out
    assert "left out: mute: tokenizer: mute carries none" in output
    out = Path("selected") / "models-banking77"
    rows = {row["model"]: row for row in pd.read_csv(out / "models.csv").to_dict("records")}
    assert [*rows] == ["run-step-000000400", "deep", "mute"]
    for name, model in zip(rows, models[:2], strict=False):
        chosen = content(out / name)
        data, features, probes = fit_probes(Path(model), TASKS["banking77"], home / "data")
        layer = chosen["layer"]
        assert (rows[name]["layer"], rows[name]["num_layers"]) == (layer, chosen["num_layers"])
        hits = (probes.predict(features[2]) == data.test.targets).double()[layer]
        assert rows[name]["test"] == pytest.approx(hits.mean().item(), abs=1e-9)
    assert rows["deep"]["milliseconds_last"] > 0
    assert all((out / name).stat().st_size for name in ("models.png", "deep/layers.png"))


def test_the_block_that_harms_least_is_removed_and_the_page_says_what_it_costs(home, tmp_path, capsys):
    """Losses compared with those of transformers, whose blocks are skipped by hooks."""
    source, corpus, folder = home / "run" / "step-000000400", tmp_path / "texts.jsonl", tmp_path / "pruned"
    corpus.write_text("\n".join(json.dumps({"text": text}) for text, _ in labelled(1500)))
    how = ["--max_tokens", "12", "--corpus", corpus, "--export", folder]
    out = select(capsys, source, "--without", "least:1", *how)
    saved, model = json.loads((folder / "pruned.json").read_text()), AutoModelForCausalLM.from_pretrained(source)
    ids = EvalText(str(corpus), str(source), num_tokens=12, min_sequences=2).windows()

    def loss(network) -> float:
        with torch.no_grad():
            logits = network(ids).logits[:, :-1].double().transpose(1, 2)
        return torch.nn.functional.cross_entropy(logits, ids[:, 1:]).item()

    full, harms = loss(model), {}
    for number, block in enumerate(model.transformer.h, start=1):
        with skipping(block):
            harms[str(number)] = loss(model) - full
    found = {block: score["value"] for block, score in saved["difference_without_block"].items()}
    assert found == pytest.approx(harms, abs=1e-5)
    best = min(harms, key=lambda block: harms[block])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert saved["without"] == [int(best)]
    assert (len(again.transformer.h), again.config.n_layer) == (saved["num_blocks"] - 1,) * 2
    losses = {name: score["value"] for name, score in saved["loss"].items()}
    assert losses == pytest.approx({"full": full, "without": loss(again), "difference": harms[best]}, abs=1e-5)
    page = (folder / "README.md").read_text()
    for text in (f"without block {best} of", f"| without {best} | {losses['without']:.4f} |", "ms without (medians)"):
        assert text in page
    assert f"without blocks {best}: loss {full:.4f} -> {losses['without']:.4f}" in out
    assert main(["select", str(source), "--without", "2", *map(str, how)]) == 2  # the folder is taken
    select(capsys, source, "--without", "2", *how, "--overwrite")
    assert json.loads((folder / "pruned.json").read_text())["without"] == [2]
