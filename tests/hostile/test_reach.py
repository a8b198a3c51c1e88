"""Classes that a recipe may name must not download, start or send anything."""

import itertools
import sys

import pytest
import yaml

from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.report import WandbMirror
from tests.cli.test_fit import RECIPE
from tests.hostile.test_recipes import refused, spec, write  # noqa: F401 - a fixture

CALLBACKS, LOGGERS = "lightning.pytorch.callbacks", "lightning.pytorch.loggers"
WANDB = f"{LOGGERS}.WandbLogger"
SCORE = spec("torchmetrics.text.bert.BERTScore", model_name_or_path="evil/repo")
ADDRESSES = {
    "settings": spec(WANDB, save_dir="logs", settings={"api_key": "a" * 40}),
    "api_key": spec(f"{LOGGERS}.CometLogger", api_key="a" * 40),
}
FETCHING = [
    ("data", spec("lightning.pytorch.demos.mnist_datamodule.MNISTDataModule", data_dir="data")),
    ("model", spec("lightning.pytorch.demos.transformer.LightningTransformer")),
    ("trainer.callbacks", [spec("lightning.pytorch.serve.servable_module_validator.ServableModuleValidator")]),
    (
        "trainer.callbacks",
        [spec(f"{CALLBACKS}.ModelPruning", pruning_fn="l1_unstructured", parameters_to_prune=[[SCORE, "weight"]])],
    ),
]


def test_a_logger_in_a_recipe_may_have_no_address_and_no_key(write, downloaded, capsys):  # noqa: F811
    for name, logger in ADDRESSES.items():
        refusal = refused(["fit", "--config", write("trainer.logger", logger)], capsys)
        assert f"{name}: a recipe names no address and no key: set a variable of " in refusal
        assert "a" * 40 not in refusal, name
    assert not any(downloaded.iterdir())


def test_classes_that_download_or_start_programs_are_refused(write, downloaded, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("it asked the network"))
    for key, value in FETCHING:
        assert "a recipe names no " in refused(["fit", "--config", write(key, value)], capsys), value
    assert not any(downloaded.iterdir())


def test_a_refused_program_is_not_imported_for_its_error_message(write, capsys):  # noqa: F811
    for named in ("os.system", "antigravity.fly", "torch.hub.load"):
        refusal = refused(["fit", "--config", write("trainer.callbacks", [spec(named)])], capsys)
        assert f"a recipe names no {named}: only " in refusal
    assert "antigravity" not in sys.modules


def test_a_recipe_may_not_read_variables_that_may_hold_a_secret(tmp_path, capsys, monkeypatch):
    """The options of a recipe are stored with the run and sent to W&B."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("MY_PLACE", str(tmp_path / "run"))
    recipe = tmp_path / "recipe.yaml"
    for root, sentence in (
        ("${oc.env:WANDB_API_KEY}", "a recipe reads no variable that may hold a secret, got ${oc.env:WANDB_API_KEY}"),
        ("${oc.env:HF_TOKEN,x}", "a recipe reads no variable that may hold a secret, got ${oc.env:HF_TOKEN}"),
        ("${oc.env:MY_PLACE}", "no corpus 'CORPUS'"),
    ):
        recipe.write_text(yaml.safe_dump({**RECIPE, "root": root}))
        assert main(["fit", "--config", str(recipe)]) == 2
        assert sentence in capsys.readouterr().err


def test_settings_of_wandb_in_a_downloaded_folder_cannot_redirect_the_key(downloaded, tmp_path, monkeypatch):
    """W&B reads its settings in the working directory, and the folder of every run can contain them."""
    import wandb

    (downloaded / "wandb").mkdir()
    monkeypatch.setenv("WANDB_MODE", "auto")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("it starts"))
    settings = ("base_url = https://evil.example", "x_extra_http_headers = {}", "https_proxy = e")
    for setting, mode in itertools.product(settings, ("auto", "online")):
        (downloaded / "wandb" / "settings").write_text(f"[default]\nentity = me\n{setting}\n")
        with pytest.raises(InputError, match=f"wandb/settings of this folder says {setting[:8]}.* your key elsewh"):
            WandbMirror(mode=mode).open(tmp_path / "run", run_id="a1b2c3d4", config={})
