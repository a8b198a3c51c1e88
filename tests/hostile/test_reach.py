"""What classes that a recipe may name would write, fetch, start or send: nothing outside the recipe's root."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import Namespace

from lit_layers.cli.main import main
from lit_layers.cli.options import placed
from lit_layers.errors import InputError
from lit_layers.report import WandbMirror
from tests.cli.conftest import corpus  # noqa: F401 - a fixture
from tests.cli.test_fit import RECIPE
from tests.hostile.test_recipes import refused, spec

CALLBACKS, LOGGERS, TRAINING = "lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lit_layers.training"
SCORES = "lit_layers.tasks.benchmark_scores"
WANDB = f"{LOGGERS}.WandbLogger"
SCORE = spec("torchmetrics.text.bert.BERTScore", model_name_or_path="evil/repo")
FINETUNED = {"task": "arc_challenge", "batch_size": 1, "num_tokens": 8}
PLACES = {  # each wrote there
    "trainer.default_root_dir": "OUTSIDE",
    "trainer.callbacks.dirpath": spec(f"{CALLBACKS}.ModelCheckpoint", dirpath="OUTSIDE"),
    "trainer.callbacks.filename": spec(f"{CALLBACKS}.ModelCheckpoint", dirpath="ROOT", filename="../../outside/x"),
    "trainer.callbacks.root": spec(f"{TRAINING}.run_log.RunLog", root="OUTSIDE", mirror=None),
    "trainer.logger.save_dir": spec(f"{LOGGERS}.CSVLogger", save_dir="OUTSIDE"),
    "trainer.logger.name": spec(f"{LOGGERS}.CSVLogger", save_dir="ROOT", name="OUTSIDE"),
    "trainer.logger.version": spec(f"{LOGGERS}.CSVLogger", save_dir="ROOT", version="~/x"),
    "trainer.profiler.dirpath": spec("lightning.pytorch.profilers.SimpleProfiler", dirpath="..", filename="x"),
    "analyses.root": spec(f"{TRAINING}.finetuning.TaskFinetuning", root="OUTSIDE", tokenizer="t", recipe=FINETUNED),
    "analyses.results": spec(f"{SCORES}.BenchmarkScores", task="t.csv", tokenizer="t", results="OUTSIDE"),
}  # fmt: skip
ADDRESSES = {
    "settings": spec(WANDB, save_dir="ROOT", settings={"api_key": "a" * 40}),
    "api_key": spec(f"{LOGGERS}.CometLogger", api_key="a" * 40),
}
FETCHING = {
    "data": [spec("lightning.pytorch.demos.mnist_datamodule.MNISTDataModule", data_dir="ROOT")],
    "model": [spec("lightning.pytorch.demos.transformer.LightningTransformer")],
    "trainer.callbacks": [spec("lightning.pytorch.serve.servable_module_validator.ServableModuleValidator")],
    "trainer.callbacks.parameters_to_prune": [
        spec(f"{CALLBACKS}.ModelPruning", pruning_fn="l1_unstructured", parameters_to_prune=[[SCORE, "weight"]])
    ],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes the recipe of a run of one step with one more option."""

    def written(key: str, value: Any) -> str:
        recipe = copy.deepcopy({**RECIPE, "corpus": "python", "root": str(tmp_path / "run"), "steps": [0]})
        recipe["trainer"]["max_steps"], recipe["analyses"] = 1, recipe["analyses"][:1]
        *branches, last = key.split(".")[:2]
        (recipe[branches[0]] if branches else recipe)[last] = value
        text = (
            yaml.safe_dump(recipe).replace("OUTSIDE", str(tmp_path / "outside")).replace("ROOT", str(tmp_path / "run"))
        )
        (tmp_path / "recipe.yaml").write_text(text)
        return str(tmp_path / "recipe.yaml")

    return written


def test_a_recipe_writes_to_its_root(write, tmp_path, downloaded, capsys):
    for place, value in PLACES.items():
        key = place.rpartition(".")[0] if place.startswith("analyses") else place
        value = [value] if key.split(".")[-1] == "analyses" or place.startswith("trainer.callbacks") else value
        said = refused(["fit", "--config", write(key, value)], capsys)
        assert said.startswith(f"{place}: a recipe reaches only its root, got "), said
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.yaml", "downloaded"}
    assert not any(downloaded.iterdir())


def test_analyze_writes_no_further(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    analysis = yaml.safe_dump({"analyses": [PLACES["analyses.results"]]})
    file.write_text(analysis.replace("OUTSIDE", str(tmp_path / "outside")))
    said = refused(["analyze", "model", "--tokenizer", "bpe:300", "--config", str(file)], capsys)
    assert said.startswith("analyses.results: a recipe reaches only its root"), said


def test_a_relative_place_lies_below_the_root_and_a_default_is_not_judged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    deepspeed = {"stage": 2, "nvme_path": "/local_nvme", "config": {"any": [{"thing": "x"}]}}
    for typed in ([], [f"--trainer.callbacks.dirpath={tmp_path}/typed", "--trainer.logger.save_dir", "s3://mine"]):
        options = Namespace(
            trainer=Namespace(
                default_root_dir="out",
                strategy=spec("lightning.pytorch.strategies.DeepSpeedStrategy", **deepspeed),
                profiler=spec("lightning.pytorch.profilers.PyTorchProfiler", dirpath="prof", filename="a/b"),
                callbacks=[spec(f"{CALLBACKS}.ModelCheckpoint", dirpath="run/ckpts", filename="{step}")],
                logger=[
                    spec(WANDB, project="x", save_dir="."),
                    spec(f"{LOGGERS}.CSVLogger", save_dir="logs", name="a/b"),
                    {**spec(WANDB), "dict_kwargs": {"dir": Path("deep/er")}},
                ],
            ),
            analyses=[spec("lit_layers.analyses.Probe", task="/data/task.csv")],
            model=spec("lit_layers.training.LitCausalLM", init_from="/models/gpt2"),
        )
        trainer = placed(options, "run", typed).trainer
        assert trainer.default_root_dir == "run/out"
        assert trainer.strategy["init_args"] == deepspeed
        assert trainer.profiler["init_args"] == {"dirpath": "run/prof", "filename": "a/b"}
        assert trainer.callbacks[0]["init_args"]["dirpath"] == "run/ckpts"
        places = [{**each.get("init_args", {}), **each.get("dict_kwargs", {})} for each in trainer.logger]
        assert [place.get("save_dir", place.get("dir")) for place in places] == ["run", "run/logs", Path("run/deep/er")]
        assert options.trainer.default_root_dir == "out", "the recipe stays as it was written"
        for place in ("link/x", "../x", str(tmp_path / "typed"), "~/x", "file:///tmp/x", "s3://mine", "a/../../x"):
            options.trainer.logger[1]["init_args"]["save_dir"] = place
            if any(place in word for word in typed):
                assert placed(options, "run", typed).trainer.logger[1]["init_args"]["save_dir"] == place
            else:
                with pytest.raises(InputError, match=r"^trainer.logger.save_dir: a recipe reaches only its root, got"):
                    placed(options, "run", typed)


@pytest.mark.slow
def test_a_recipe_may_write_into_its_root_and_where_the_command_line_says(write, corpus, tmp_path, capsys):  # noqa: F811
    logger = spec(f"{LOGGERS}.CSVLogger", save_dir="${root}/logs", name="a")
    checkpoint = spec(f"{CALLBACKS}.ModelCheckpoint", dirpath="x", filename="last", every_n_train_steps=1)
    recipe = write("trainer.callbacks", [checkpoint])
    content = yaml.safe_load(Path(recipe).read_text())
    content["trainer"] |= {"logger": logger, "enable_checkpointing": True, "profiler": "simple"}
    Path(recipe).write_text(yaml.safe_dump(content))
    named = ["--trainer.default_root_dir", str(tmp_path / "outside")]
    assert main(["fit", "--config", recipe, "--corpus", str(corpus), *named]) == 0
    assert (tmp_path / "run" / "logs" / "a" / "version_0" / "metrics.csv").is_file()
    assert (tmp_path / "run" / "x" / "last.ckpt").is_file()


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_logger_of_a_recipe_has_no_address_and_no_key(name, write, downloaded, capsys):
    said = refused(["fit", "--config", write("trainer.logger", ADDRESSES[name])], capsys)
    assert f"{name}: a recipe names no address and no key: set a variable of " in said
    assert "a" * 40 not in said
    assert not any(downloaded.iterdir())


def test_what_fetches_or_starts_something_is_named_on_the_command_line(write, downloaded, capsys, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("it asked the network"))
    for place, (value,) in FETCHING.items():
        words = ["fit", "--config", write(place, [value] if "callbacks" in place else value)]
        assert "a recipe names no " in refused(words, capsys)
    assert not any(downloaded.iterdir())


def test_no_program_is_imported_for_the_sentence(write, capsys):
    for named in ("os.system", "antigravity.fly", "torch.hub.load"):
        said = refused(["fit", "--config", write("trainer.callbacks", [spec(named)])], capsys)
        assert f"a recipe names no {named}: only " in said
    assert "antigravity" not in sys.modules


def test_a_recipe_reads_no_variable_that_may_hold_a_secret(tmp_path, capsys, monkeypatch):
    """Its options are written down with the run, and sent to W&B."""
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


@pytest.mark.parametrize("setting", ["base_url = https://evil.example", "x_extra_http_headers = {}", "https_proxy = e"])
def test_settings_of_wandb_in_a_downloaded_folder_send_no_key_elsewhere(setting, downloaded, tmp_path, monkeypatch):
    """Weights & Biases reads them in the working directory, and every run's folder has such a one."""
    import wandb

    (downloaded / "wandb").mkdir()
    (downloaded / "wandb" / "settings").write_text(f"[default]\nentity = me\n{setting}\n")
    monkeypatch.setenv("WANDB_MODE", "auto")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("it starts"))
    for mode in ("auto", "online"):
        with pytest.raises(InputError, match=f"wandb/settings of this folder says {setting[:8]}.* your key there"):
            WandbMirror(mode=mode).open(tmp_path / "run", run_id="a1b2c3d4", config={})
