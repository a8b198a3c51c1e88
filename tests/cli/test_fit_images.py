"""`lit-layers fit` on images: a watched run, its resume, and what is said of wrong input."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.images import image_source
from lit_layers.training.run_folder import saved_steps, step_folder
from tests.data.test_image_sources import write_arrays, write_folders

ROOT = Path(__file__).parents[2]
IMAGES = {"class_path": "lit_layers.data.EvalImages", "init_args": {"source": "${corpus}", "num_images": 8}}
RECIPE = {
    "corpus": "digits",
    "steps": {"every": 2},
    "trainer": {"max_steps": 3, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "val_check_interval": 3},
    "model": {
        "class_path": "lit_layers.training.LitImageClassifier",
        "init_args": {
            "config": {"embed_dim": 16, "depth": 2, "num_heads": 2},
            "patch_size": 4,
            "drop_path_rate": 0.2,
            "warmup_steps": 1,
            "mixup": 0.8,
            "decay_steps": 5,
        },
    },
    "data": {
        "class_path": "lit_layers.training.LitImageData",
        "init_args": {"source": "${corpus}", "global_batch_size": 4, "num_validation_images": 20, "erasing": 0.5},
    },
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


def test_a_recipe_becomes_a_run_that_says_what_it_saw_and_resumes_to_the_same_bits(recipe, tmp_path):
    assert main(["fit", "--config", str(recipe)]) == 0
    root, whole = tmp_path / "run", tmp_path / "whole"
    facts = json.loads((root / "run.json").read_text())
    assert facts["data"]["classes"] == list("0123456789")
    assert facts["data"]["train_images"] == 1442
    assert facts["data"]["data_hash"]["train"] == image_source("digits").train.content_hash()
    assert facts["tokens_per_step"] is None
    assert facts["model"]["class"] == "VisionTransformer"
    assert "vocab_size" not in facts["model"]
    row = records.rows(root / "metrics.jsonl")[-1]
    assert row.keys() >= {"validation/accuracy", "train/images_per_second"}
    page = (root / "report.html").read_text()
    assert "digits" in page
    assert main(["fit", "--config", str(recipe), "--trainer.max_steps", "5", "--resume", "last"]) == 0
    assert main(["fit", "--config", str(recipe), "--trainer.max_steps", "5", "--root", str(whole)]) == 0
    assert saved_steps(root) == [0, 2, 3, 4, 5]
    for step in (4, 5):
        files = [(step_folder(each, step) / "model.safetensors").read_bytes() for each in (root, whole)]
        assert files[0] == files[1]


def test_a_resumed_run_refuses_other_images_under_the_old_name(recipe, tmp_path, capsys):
    generator, path = np.random.default_rng(0), tmp_path / "images"

    def write():
        labels = np.arange(12) % 3
        images = generator.integers(0, 256, (12, 8, 8), dtype=np.uint8)
        write_arrays(path, (images, labels), (images, labels))
        image_source.cache_clear()

    write()
    arguments = ["fit", "--config", str(recipe), "--corpus", str(path), "--data.num_validation_images", "8"]
    assert main(arguments) == 0
    write()
    assert main([*arguments, "--resume", "last", "--trainer.max_steps", "4"]) == 2
    assert "data.source: the run in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model.patch_size", "3"], "model.patch_size: expected a divisor of the image size 8, got 3"),
        (["--data.image_size", "9"], "model.patch_size: expected a divisor of the image size 9, got 4"),
        (["--model.lr", "-1"], "model.lr: expected more than 0, got -1"),
        (["--model.architecture", "vit_tini"], "no model named 'vit_tini' in timm"),
        (["--model.config.embed_dims", "16"], "embed_dims"),
        (["--model.config.num_heads", "3"], "cannot build vit_tiny_patch16_224"),
        (["--model.config.num_classes", "3"], "model.config.num_classes: the module or the data says it"),
        (["--model.cutmix", "-1"], "model.cutmix: expected at least 0, got -1"),
        (["--data.global_batch_size", "5", "--trainer.accumulate_grad_batches", "2"], "take a multiple of 2"),
        (["--data.erasing", "2"], "data.erasing: expected at most 1, got 2"),
        (["--data.rand_augment", "strong"], "data.rand_augment: timm does not know"),
        (["--data.normalisation", "clip"], "clip"),
        (["--corpus", "cifar11"], "expected digits, cifar10, cifar100, an existing path or ORG/NAME"),
        (["--analyses.init_args.batches.num_images", "356"], "356"),
    ],
)
def test_wrong_input_is_answered_with_one_sentence(arguments, sentence, recipe, capsys):
    assert main(["fit", "--config", str(recipe), *arguments]) == 2
    assert sentence in one_sentence(capsys)


def one_sentence(capsys) -> str:
    said = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in said if line.startswith("lit-layers fit: error: ")]
    assert len(errors) == 1, said
    assert "Traceback" not in "".join(said)
    return errors[0]


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_corrupt_image_ends_a_run_with_the_name_of_its_file(workers, recipe, tmp_path, capsys):
    write_folders(tmp_path / "images")
    for file in (tmp_path / "images" / "train" / "dog").iterdir():
        file.write_bytes(file.read_bytes()[:200])
    options = ["--data.normalisation", "half", "--data.image_size", "16", "--data.num_workers", workers]
    options += ["--data.num_validation_images", "2", "--analyses", "[]"]
    assert main(["fit", "--config", str(recipe), "--corpus", str(tmp_path / "images"), *options]) == 2
    said = one_sentence(capsys)
    assert "train/dog/" in said
    assert "is no image that can be read" in said


def test_a_class_that_is_missing_is_named(recipe, tmp_path, capsys):
    write_folders(tmp_path / "images", size=8)
    (tmp_path / "images" / "train" / "emu").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "train" / "emu" / "0.png")
    options = ["--data.normalisation", "half", "--data.image_size", "16"]
    assert main(["fit", "--config", str(recipe), "--corpus", str(tmp_path / "images"), *options]) == 2
    assert "class 'emu' is not in both train and val" in one_sentence(capsys)


@pytest.mark.parametrize("name", ["deit/tiny_cifar10", "deit/small_imagenet"])
def test_the_recipes_of_deit_can_be_read_with_their_analyses(name, capsys):
    recipes = [ROOT / "recipes" / f"{name}.yaml", ROOT / "recipes" / "analyses" / "images.yaml"]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *(word for path in recipes for word in ("--config", str(path))), "--print_config"])
    assert ended.value.code == 0
    found = yaml.safe_load(capsys.readouterr().out)
    steps = {"deit/tiny_cifar10": 50_000 * 500 / 512, "deit/small_imagenet": 1_281_167 * 300 / 1024}[name]
    assert found["trainer"]["max_steps"] == round(steps)
    images = [part for each in found["analyses"] for part in each["init_args"].values() if isinstance(part, dict)]
    assert len(images) == 6
    assert {each["init_args"]["source"] for each in images} == {found["corpus"]}


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
