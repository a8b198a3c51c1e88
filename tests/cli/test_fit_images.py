"""`lit-layers fit` on images: a measured run, and errors for wrong input."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.images import image_source
from lit_layers.training.run_folder import saved_steps
from tests.data.test_image_sources import write_folders

ROOT = Path(__file__).parents[2]
IMAGES = {"class_path": "lit_layers.data.EvalImages", "init_args": {"source": "${corpus}", "num_images": 8}}
MODEL = {"patch_size": 4, "drop_path_rate": 0.2, "warmup_steps": 1, "mixup": 0.8, "decay_steps": 5}
MODEL |= {"config": {"embed_dim": 16, "depth": 2, "num_heads": 2}}
DATA = {"source": "${corpus}", "global_batch_size": 4, "num_validation_images": 20, "erasing": 0.5}
RECIPE = {
    "corpus": "digits",
    "steps": {"every": 2},
    "trainer": {"max_steps": 3, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "val_check_interval": 3},
    "model": {"class_path": "lit_layers.training.LitImageClassifier", "init_args": MODEL},
    "data": {"class_path": "lit_layers.training.LitImageData", "init_args": DATA},
    "analyses": [
        {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": IMAGES}},
        {"class_path": "lit_layers.analyses.Lens", "init_args": {"batches": IMAGES}},
    ],
}


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "root": str(tmp_path / "run")}))
    return path


@pytest.mark.soak
def test_a_run_records_its_images(recipe, tmp_path):
    """tests/training/test_images.py resumes such a run."""
    assert main(["fit", "--config", str(recipe)]) == 0
    root = tmp_path / "run"
    facts = json.loads((root / "run.json").read_text())
    assert facts["data"]["classes"] == list("0123456789")
    assert facts["data"]["train_images"] == 1442
    assert facts["data"]["data_hash"]["train"] == image_source("digits").train.content_hash()
    assert facts["tokens_per_step"] is None
    assert facts["model"]["class"] == "VisionTransformer"
    assert "vocab_size" not in facts["model"]
    row = records.rows(root / "metrics.jsonl")[-1]
    assert row.keys() >= {"validation/accuracy", "train/images_per_second"}
    assert "digits" in (root / "report.html").read_text()
    assert saved_steps(root) == [0, 2, 3]


@pytest.mark.soak
@pytest.mark.slow
def test_a_corrupt_image_ends_a_run_with_the_name_of_its_file(recipe, tmp_path, capsys):
    write_folders(tmp_path / "images")
    for file in (tmp_path / "images" / "train" / "dog").iterdir():
        file.write_bytes(file.read_bytes()[:200])
    options = ["--data.normalisation", "half", "--data.image_size", "16", "--analyses", "[]"]
    options += ["--data.num_validation_images", "2", "--corpus", str(tmp_path / "images")]
    for workers in ("0", "2"):
        words = ["--root", str(tmp_path / workers), "--data.num_workers", workers]
        assert main(["fit", "--config", str(recipe), *options, *words]) == 2
        output = capsys.readouterr().err
        assert "Traceback" not in output, workers
        (sentence,) = [line for line in output.splitlines() if line.startswith("lit-layers fit: error: ")]
        assert "train/dog/" in sentence, workers
        assert "is no image that can be read" in sentence, workers


@pytest.mark.slow
@pytest.mark.soak
def test_the_quickstart_learns_the_digits(tmp_path):
    recipe = str(ROOT / "recipes" / "quickstart" / "vit.yaml")
    options = ["--root", str(tmp_path / "run"), "--analyses", "[]", "--steps", "{every: 9999}", "--wandb", "null"]
    options += ["--trainer.max_steps", "1000", "--trainer.accelerator", "cpu"]
    assert main(["fit", "--config", recipe, *options]) == 0
    last = [row for row in records.rows(tmp_path / "run" / "metrics.jsonl") if "validation/accuracy" in row][-1]
    assert last["validation/accuracy"] > 0.9
    assert torch.isfinite(torch.tensor(last["validation/loss"]))
