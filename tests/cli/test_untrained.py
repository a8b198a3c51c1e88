"""`lit-layers analyze MODEL --untrained SEED`: a row of the same architecture as its library initialises it."""

import json
from pathlib import Path

import pytest
import torch

from lit_layers import records
from lit_layers.analyses import Trajectory
from lit_layers.cli.main import main
from lit_layers.measuring.offline import analyze_series
from lit_layers.models import save, vit, weights_hash
from lit_layers.models.build import untrained
from lit_layers.models.saved import load
from lit_layers.run_data import read_run
from lit_layers.series import OneModel, StepFolders
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from tests.support.random_text import RandomText
from tests.support.rounding import close_records
from tests.support.saved_models import saved
from tests.support.tiny_training import fit

pytestmark = pytest.mark.usefixtures("no_page")
DATA = {"class_path": "tests.support.random_text.RandomText"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    saved(folder, "gpt2")
    return folder


@pytest.fixture
def words(tmp_path) -> list[str]:
    recipe = {"analyses": [{"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": DATA}}]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return ["--config", str(tmp_path / "recipe.yaml"), "--code", "tests", "--root", str(tmp_path / "run")]


def measured(tmp_path: Path) -> list:
    return records.read(tmp_path / "run" / "measurements.jsonl")


def test_a_row_of_its_own_beside_the_trained_models(model, words, tmp_path):
    assert main(["analyze", str(model), *words]) == 0
    assert main(["analyze", str(model), "--untrained", "3", *words]) == 0
    assert main(["analyze", str(model), "--untrained", "4", *words]) == 0
    trained, three, four = measured(tmp_path)
    assert [m.run for m in (trained, three, four)] == ["run", f"{model}@untrained-3", f"{model}@untrained-4"]
    assert [m.step for m in (three, four)] == [None, None]
    fresh = untrained(load(model), seed=3)
    assert three.provenance["weights_hash"] == weights_hash(fresh)
    assert [m.provenance.get("untrained") for m in (trained, three, four)] == [None, {"seed": 3}, {"seed": 4}]
    assert len({m.provenance["weights_hash"] for m in (trained, three, four)}) == 3
    save(fresh, tmp_path / "fresh")
    (expected,) = analyze_series(
        OneModel(tmp_path / "fresh"), [Trajectory(batches=RandomText())], root=tmp_path / "other"
    ).measurements
    close_records(three.records, expected.records)  # of weights in memory, and of a mapped file
    assert main(["analyze", str(model), "--untrained", "3", *words]) == 0
    assert len(measured(tmp_path)) == 3
    assert set(read_run(tmp_path / "run").models.values()) == {"run", "tiny-gpt2@untrained-3", "tiny-gpt2@untrained-4"}


def test_weights_need_not_be_there_and_images_too(tmp_path):
    vit_folder = tmp_path / "vit"
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7}
    save(vit("vit_tiny_patch16_224", **size), vit_folder)
    expected = weights_hash(vit("vit_tiny_patch16_224", seed=5, **size))
    (vit_folder / "model.safetensors").unlink()
    (checkpoint,) = OneModel(vit_folder, untrained=5)
    assert weights_hash(checkpoint.load()) == expected
    state = torch.get_rng_state()
    assert weights_hash(checkpoint.load(dtype=torch.float64)) != expected  # other bytes of the same numbers
    assert torch.equal(torch.get_rng_state(), state)


def test_it_never_enters_the_curve_of_a_run_with_steps(words, tmp_path):
    root = tmp_path / "run"
    watch = EmergenceCallback([Trajectory(batches=RandomText())], [0, 2], root)
    fit(root, [SeriesCheckpoint([0, 2], root), watch], steps=2)
    assert main(["analyze", str(root / "step-000000002"), "--untrained", "0", *words]) == 0
    (row,) = [m for m in measured(tmp_path) if m.step is None]
    assert row.run == f"{root / 'step-000000002'}@untrained-0"
    run = read_run(root)
    assert [m.step for m in run.measurements] == [0, 2]
    assert run.other_runs == [row.run]
    assert analyze_series(StepFolders(root), [Trajectory(batches=RandomText())], root=root).num_known == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--untrained", "yes"], "untrained"),
        (["--untrained", "0", "--offload", "x"], "untrained: new weights are in no file that --offload could read"),
        (["--untrained", "0", "--steps", "all"], "untrained: is for one model, and "),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_exit_code_2(model, words, capsys, options, sentence):
    assert main(["analyze", str(model), *options, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"lit-layers analyze: error: {sentence}")
