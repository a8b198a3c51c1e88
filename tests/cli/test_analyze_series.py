"""`lit-layers analyze` on a run's folder: what training measured is known, and wrong input is told."""

import shutil
from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from tests.cli.test_fit import RECIPE


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus) -> Path:
    folder = tmp_path_factory.mktemp("series")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "root": str(folder / "run")}))
    assert main(["fit", "--config", str(recipe)]) == 0
    return folder / "run"


@pytest.fixture
def recipe(tmp_path) -> Path:
    """The same analyses as in training."""
    path = tmp_path / "analyses.yaml"
    path.write_text(yaml.safe_dump({"analyses": RECIPE["analyses"]}))
    return path


def analyze(root: Path, *arguments) -> int:
    return main(["analyze", str(root), *map(str, arguments), "--device", "cpu"])


@pytest.mark.slow
def test_what_training_measured_is_known_and_elsewhere_comes_out_the_same(trained, recipe, tmp_path, capsys):
    before = (trained / "measurements.jsonl").read_bytes()
    assert analyze(trained, "--config", recipe) == 0
    assert "0 measured, 6 were known" in capsys.readouterr().out
    assert (trained / "measurements.jsonl").read_bytes() == before
    assert analyze(trained, "--config", recipe, "--root", tmp_path / "again", "--steps", "0,3") == 0
    written = {(m.step, m.analysis): m for m in records.read(trained / "measurements.jsonl")}
    found = records.read(tmp_path / "again" / "measurements.jsonl")
    assert [(m.step, m.analysis) for m in found] == [(s, n) for s in (0, 3) for n in ("trajectory", "coupling")]
    for measurement in found:
        training = written[measurement.step, measurement.analysis]
        assert measurement.records == training.records
        assert measurement.tokens == training.tokens
        assert measurement.provenance["config_hash"] == training.provenance["config_hash"]


@pytest.mark.slow
def test_a_suspect_checkpoint_is_left_out_and_said(trained, recipe, tmp_path, capsys):
    root = tmp_path / "run"
    shutil.copytree(trained, root)
    shutil.copy(root / "step-000000003" / "model.safetensors", root / "step-000000002")
    out = tmp_path / "out"
    assert analyze(root, "--config", recipe, "--root", out) == 0
    assert "left out as suspect: step-000000002; --allow-suspect measures them" in capsys.readouterr().out
    assert {m.step for m in records.read(out / "measurements.jsonl")} == {0, 3}
    assert analyze(root, "--config", recipe, "--root", out, "--allow-suspect", "--shard", "1/3") == 0
    assert {m.step for m in records.read(out / "measurements.jsonl")} == {0, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0,9"], "steps: "),
        (["--steps", "sometimes"], "got 'sometimes'"),
        (["--shard", "3"], "shard: expected i/n, such as 0/4, got '3'"),
        (["--shard", "4/4"], "shard: expected i/n with i from 0 to n - 1, got 4/4"),
        (["--stream-blocks"], "--stream-blocks reads one model"),
        (["--revision", "step0"], "--revision step0 is one model"),
        (["--keep-downloads", "perhaps"], "perhaps"),
        (["--analyses.k", "[99]"], "99"),
    ],
)
def test_wrong_input_is_one_sentence_and_nothing_is_written(trained, recipe, tmp_path, capsys, arguments, sentence):
    root = tmp_path / "out"
    assert analyze(trained, "--config", recipe, "--root", root, *arguments) == 2
    errors = [x for x in capsys.readouterr().err.splitlines() if "lit-layers analyze: error: " in x]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert not root.exists()


def test_options_of_a_series_are_refused_for_one_model(trained, capsys):
    assert analyze(trained / "step-000000002", "--allow-suspect") == 2
    assert "--allow-suspect, --keep-downloads and --shard are for series" in capsys.readouterr().err
