"""Each feature of LightningCLI works in `fit` or is refused with the reason."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.models import load, weights_hash
from lit_layers.training import LitCausalLM, LitTextData
from lit_layers.training.trainer import StepSeed
from tests.cli.test_fit import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_page")]
DRY = "--trainer.fast_dev_run=true"
CALLBACK = "--trainer.callbacks+=lightning.pytorch.callbacks."
SCHEDULER = "torch.optim.lr_scheduler."
WORKS = {
    "an optimizer by its path, a schedule, precision": [
        *("--optimizer", "torch.optim.RMSprop", "--optimizer.lr", "0.02", "--trainer.precision", "bf16-mixed"),
        *("--lr_scheduler", f"{SCHEDULER}StepLR", "--lr_scheduler.step_size", "2"),
    ],
    "an optimizer by its name, a schedule by a score, a profiler": [
        *("--optimizer", "SGD", "--optimizer.momentum", "0.9", "--trainer.profiler", "simple"),
        f"--lr_scheduler={SCHEDULER}ReduceLROnPlateau",
    ],
    "both from YAML, EarlyStopping and ModelCheckpoint": [
        *("--config", "OVERLAY", f"{CALLBACK}EarlyStopping", "--trainer.callbacks.monitor=validation/loss"),
        f"{CALLBACK}ModelCheckpoint",
    ],
    "LightningCLI's own class of a schedule by a score, Timer, max_time": [
        "--lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau",
        *("--lr_scheduler.monitor=validation/perplexity", "--trainer.max_time", "00:00:10:00"),
        *(f"{CALLBACK}Timer", "--trainer.callbacks.duration=00:00:10:00"),
    ],
    "epochs, --seed_everything": ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--seed_everything=3"],
}


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory) -> Path:
    """A recipe without analyses, and files of a plain Trainer that has trained two steps of the same model."""
    workdir = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    options = RECIPE["model"]["init_args"] | {"decay_steps": 4}
    recipe = {**RECIPE, "analyses": [], "corpus": str(corpus), "root": str(workdir / "run")}
    recipe["trainer"] = recipe["trainer"] | {"max_steps": 4}
    recipe["model"] = recipe["model"] | {"init_args": options}
    (workdir / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    adagrad = {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1}}
    step = {"class_path": f"{SCHEDULER}ExponentialLR", "init_args": {"gamma": 0.5}}
    (workdir / "overlay.yaml").write_text(yaml.safe_dump({"optimizer": adagrad, "lr_scheduler": step}))
    train_plainly(workdir, corpus, options, 2)
    return workdir


def train_plainly(workdir: Path, corpus: Path, options, steps: int) -> L.Trainer:
    module = LitCausalLM("gpt2", **options)
    data = LitTextData(str(corpus), "bpe:300", num_tokens=16, global_batch_size=4, num_validation_sequences=4)
    files = ModelCheckpoint(workdir / "files", save_top_k=-1, every_n_train_steps=2, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    unvalidated = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
    callbacks = [files, StepSeed(0)]
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=callbacks, default_root_dir=workdir, **quiet, **unvalidated
    )
    trainer.fit(module, datamodule=data)
    return trainer


def command(workdir: Path, words) -> list[str]:
    for name, file in {"OVERLAY": "overlay.yaml", "CHECKPOINT": "files/step=2.ckpt"}.items():
        words = [word.replace(name, str(workdir / file)) for word in words]
    return ["fit", "--config", str(workdir / "recipe.yaml"), *words]


@pytest.mark.soak
def test_features_work_and_a_dry_run_leaves_nothing(workdir, capsys):
    before = {*workdir.rglob("*")}
    for features, words in WORKS.items():
        assert main(command(workdir, [DRY, *words, f"--root={workdir / 'dry'}"])) == 0, features
        assert {*workdir.rglob("*")} == before, features
        assert "fast_dev_run: nothing is kept" in capsys.readouterr().out, features


@pytest.mark.soak
def test_fit_continues_a_training_of_a_plain_trainer_to_the_same_weights(workdir, corpus, tmp_path, capsys):
    options = RECIPE["model"]["init_args"] | {"decay_steps": 4}
    (tmp_path / "plain").mkdir()
    whole = train_plainly(tmp_path / "plain", corpus, options, 4)
    root = tmp_path / "run"
    words = command(workdir, ["--ckpt_path", "CHECKPOINT", "--root", str(root)])
    assert main(words) == 0
    assert weights_hash(load(root / "step-000000004")) == weights_hash(whole.lightning_module.model)
    assert [row["step"] for row in records.rows(root / "metrics.jsonl")] == [3, 4]
    # A job script repeats the same command.
    assert main([*words, "--resume", "last"]) == 0
    assert "trained up to step 4 already" in capsys.readouterr().out


@pytest.mark.soak
def test_a_run_begins_with_the_weights_of_a_file(workdir, tmp_path, capsys):
    root = tmp_path / "run"
    assert main(command(workdir, ["--model.init_from", str(workdir / "files/step=2.ckpt"), "--root", str(root)])) == 0
    sentence = f"begins at step 2 with the weights of {workdir / 'files/step=2.ckpt'}; the optimizer starts afresh"
    assert sentence in capsys.readouterr().out.replace("\n", "")
    about = json.loads((root / "run.json").read_text())["origin"]
    assert (about["step"], about["checkpoint"]) == (2, str(workdir / "files/step=2.ckpt"))
    module = LitCausalLM.load_from_checkpoint(workdir / "files/step=2.ckpt", weights_only=True)
    assert weights_hash(load(root / "step-000000002")) == weights_hash(module.model)


@pytest.mark.soak
def test_a_run_with_another_optimizer_resumes_bit_for_bit(workdir, tmp_path):
    roots = [tmp_path / name for name in ("whole", "parts")]
    words = ["--optimizer", "Adagrad", f"--lr_scheduler={SCHEDULER}StepLR", "--lr_scheduler.step_size=3"]
    assert main(command(workdir, [*words, "--root", str(roots[0])])) == 0
    parts = command(workdir, [*words, "--root", str(roots[1]), "--resume", "last"])
    for steps in (2, 4):
        assert main([*parts, f"--trainer.max_steps={steps}"]) == 0
    hashes = {weights_hash(load(root / "step-000000004")) for root in roots}
    assert len(hashes) == 1
    rates = [row["train/learning_rate"] for row in records.rows(roots[1] / "metrics.jsonl")]
    assert rates == pytest.approx([rates[0]] * 3 + [rates[0] / 10])
