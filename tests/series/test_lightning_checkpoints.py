"""Series of `.ckpt` files as Lightning's ModelCheckpoint writes them for our module."""

import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.saved import load
from lit_layers.series import LightningCheckpoints, audit
from lit_layers.training import LitCausalLM, SeriesCheckpoint
from tests.support.tiny_training import CONFIG, VOCABULARY, RandomTokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Three steps, each saved as a folder by us and as a file by Lightning. The vocabulary is padded in the file."""
    root = tmp_path_factory.mktemp("run")
    lightning = ModelCheckpoint(root / "lightning", save_top_k=-1, every_n_train_steps=1, save_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [SeriesCheckpoint([0, 1, 2, 3], root), lightning]
    trainer = L.Trainer(max_steps=3, callbacks=callbacks, accelerator="cpu", default_root_dir=root, **quiet)
    trainer.fit(LitCausalLM("gpt2", CONFIG, warmup_steps=0), RandomTokens())
    return root


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_file_of_lightning_has_the_model_that_we_saved_at_that_step(run):
    series = LightningCheckpoints(run / "lightning", tokens_per_step=96)
    assert [(found.step, found.tokens) for found in series] == [(1, 96), (2, 192), (3, 288)]
    for checkpoint in series:
        given = torch.load(run / "lightning" / checkpoint.name, weights_only=True)["state_dict"]
        assert given["model.transformer.wte.weight"].shape[0] == 64 > VOCABULARY
        ours = load(run / f"step-{checkpoint.step:09d}")
        assert weights_hash(checkpoint.load()) == weights_hash(ours)


def test_steps_and_tokens_of_a_run_continue_those_of_its_initial_checkpoint(run):
    (run / "lightning" / "run.json").write_text('{"origin": {"step": 100, "tokens": 5000}}')
    series = LightningCheckpoints(run / "lightning", tokens_per_step=96)
    assert [(found.step, found.tokens) for found in series] == [(101, 5096), (102, 5192), (103, 5288)]


def test_copies_are_found_although_the_optimizer_states_differ(run):
    assert audit(LightningCheckpoints(run / "lightning")).findings == ()
    first, second, _ = (run / "lightning" / found.name for found in LightningCheckpoints(run / "lightning"))
    content = torch.load(second, weights_only=True)
    content["state_dict"] = torch.load(first, weights_only=True)["state_dict"]
    torch.save(content, second)
    assert audit(LightningCheckpoints(run / "lightning")).suspect_steps == (1, 2)


def test_the_copy_named_last_is_not_used(run):
    files = run / "lightning"
    name = LightningCheckpoints(files).checkpoints[-1].name
    assert (files / "last.ckpt").is_file()
    (files / name).rename(files / "step=3.ckpt")  # after `last` in alphabetical order
    assert [found.name for found in LightningCheckpoints(files)][-1] == "step=3.ckpt"


def test_wrong_input_is_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    files = run / "lightning"
    for series, sentence in (
        (lambda: LightningCheckpoints(tmp_path / "empty"), r"expected Lightning checkpoints \(\*.ckpt\) below"),
        (lambda: LightningCheckpoints(files, config=tmp_path), "config: expected the config.json of the models in"),
        (lambda: LightningCheckpoints(files, [7]), "has no step 7; it has 3 steps from 1 to 3"),
    ):
        with pytest.raises(InputError, match=sentence):
            list(series())
    torch.save({"state_dict": {}}, files / "other.ckpt")
    with pytest.raises(InputError, match="other.ckpt is no checkpoint of Lightning: it lacks state_dict or global_st"):
        list(LightningCheckpoints(files))
    torch.save({"state_dict": Path("x"), "global_step": 1}, files / "other.ckpt")
    with pytest.raises(InputError, match="other.ckpt: its weights hold pathlib.*, and loading them would run code"):
        list(LightningCheckpoints(files))
    (files / "other.ckpt").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(InputError, match="other.ckpt cannot be read|other.ckpt: its weights are more than plain"):
        list(LightningCheckpoints(files))


def test_weights_that_do_not_fit_the_config_are_refused(run, tmp_path):
    from lit_layers.models.build import causal_lm, save

    save(causal_lm("gpt2", **{**CONFIG, "n_embd": 8}, vocab_size=VOCABULARY), tmp_path / "narrow")
    series = LightningCheckpoints(run / "lightning", config=tmp_path / "narrow")
    with pytest.raises(
        InputError, match=r"does not fit the config.json of .*narrow: lm_head.weight is \(61, 16\), not"
    ):
        series.checkpoints[0].load()
