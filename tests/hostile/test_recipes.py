"""Untrusted recipes: a class that a recipe names is executed only if it is on the allow-list."""

import contextlib
import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_layers.cli.main import main
from lit_layers.cli.measuring import Checkpoints
from lit_layers.cli.verbs.analyze import Command
from lit_layers.models.build import causal_lm, save
from tests.cli.test_fit import RECIPE

ROOT = Path(__file__).parents[2]
ANYTHING = "model.init_args.config.id2label"
CALLBACK = "trainer.callbacks"
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
ONLY = "and your own code, with --code PACKAGE"


def spec(path: str, **options: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": options} if options else {"class_path": path}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """A function that writes a recipe of a run of one step with one changed field, and returns its path."""

    def written(key: str | None = None, value: Any = None, **changes: Any) -> str:
        recipe = copy.deepcopy({**RECIPE, "corpus": "python", "root": str(tmp_path / "run"), "steps": [0], **changes})
        recipe["trainer"]["max_steps"], recipe["analyses"] = 1, recipe["analyses"][:1]
        if key is not None:
            *branches, last = key.split(".")
            branch = recipe
            for name in branches:
                branch = branch[name]
            branch[last] = value
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return str(file)

    return written


@pytest.fixture(params=[3, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
def weapons(request: pytest.FixtureRequest, tmp_path: Path, canary: Path, payload: str) -> dict[str, Any]:
    """Classes and functions that would write the canary or empty a file of the user when they are called."""
    (tmp_path / "hubconf.py").write_text(f"{payload}\ndef x(): pass\n")

    class Loaded:
        def __reduce__(self):
            return exec, (payload,)

    stored = str(tmp_path / "x.ckpt")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6", "hyper_parameters": Loaded()}, stored)
    shell = {"args": f"echo ran > {canary}", "shell": True}
    every = {
        "popen": spec("subprocess.Popen", **shell),
        "zip": spec("zipfile.ZipFile", file=str(canary), mode="w"),
        "log": spec("logging.FileHandler", filename=str(canary)),
        "popen of torch": spec("torch.utils.collect_env.subprocess.Popen", **shell),
        "popen of lightning": spec("lightning.fabric.strategies.launchers.subprocess_script.subprocess.Popen", **shell),
        "system of torch": spec("torch.os.system", command=f"echo ran > {canary}"),
        "hub": spec("torch.hub.load", repo_or_dir=str(tmp_path), model="x", source="local"),
        "load": spec("torch.load", f=stored, weights_only=False),
        "checkpoint": spec("lightning.pytorch.LightningModule.load_from_checkpoint", checkpoint_path=stored),
        "own checkpoint": spec("lit_layers.training.LitCausalLM.load_from_checkpoint", checkpoint_path=stored),
        "import": spec("transformers.utils.import_utils.importlib.import_module", name="hubconf"),
        "policy": spec("lightning.pytorch.cli.set_parsing_settings", import_path_allowlist=["subprocess"]),
        "layer": spec("torch.nn.Linear", in_features=1, out_features=1),
    }  # fmt: skip
    return {name: every[name] for name in [*every][:: request.param]}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused, and return its sentence."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"lit-layers {arguments[0]}: error: "), lines
    return lines[-1].split(": error: ", 1)[1]


def test_nothing_is_instantiated_in_a_field_of_plain_values(weapons, write, corpus, canary):
    for given in ({str(n): weapon for n, weapon in enumerate(weapons.values())}, [[*weapons.values()]]):
        with contextlib.suppress(TypeError):  # json cannot write such a value into config.json
            main(["fit", "--config", write(ANYTHING, given, corpus=str(corpus))])
    assert not canary.exists()


def test_a_field_takes_only_classes_of_its_kind_from_listed_modules(weapons, write, canary, capsys):
    for name, weapon in weapons.items():
        for key, kind in ((CALLBACK, "Callback"), ("model", "LightningModule"), ("analyses", "Analysis")):
            refusal = refused(["fit", "--config", write(key, weapon if key == "model" else [weapon])], capsys)
            is_listed = "a recipe names no " in refusal and refusal.endswith(ONLY)
            assert is_listed or f"does not correspond to a subclass of {kind}" in refusal, (name, refusal)
    assert not canary.exists()


def test_a_field_for_a_function_takes_only_functions_of_the_users_own_code(weapons, write, canary, capsys):
    weapons.pop("layer", None)  # allowed in a recipe, and only a TypeError as a function
    for name, weapon in weapons.items():
        for given in (weapon, weapon["class_path"]):
            refused(["fit", "--config", write(CALLBACK, [spec(LAMBDA, on_fit_start=given)])], capsys)
        assert not canary.exists(), name


def test_a_key_that_only_ends_like_a_class_is_not_a_class(
    downloaded, payload, write, corpus, canary, capsys, monkeypatch
):
    (downloaded / "hidden_module.py").write_text(payload)
    monkeypatch.setattr(sys, "path", [*sys.path, str(downloaded)])
    for value in ("hidden_module", "no_such_module.x", "not a path!"):
        recipe = write("model.init_args.config", {"x.class_path": value}, corpus=str(corpus))
        refusal = refused(["fit", "--config", recipe], capsys)
        assert "'x.class_path' is no option of gpt2" in refusal
    assert not canary.exists()
    assert "hidden_module" not in sys.modules


def test_analyze_checks_recipes_as_fit_does(weapons, tmp_path, canary, capsys):
    file = tmp_path / "recipe.yaml"
    for weapon in weapons.values():
        for content in ({"analyses": [weapon]}, {"series": weapon}):
            file.write_text(yaml.safe_dump(content))
            refused(["analyze", "model", "--tokenizer", "bpe:300", "--config", str(file)], capsys)
    assert not canary.exists()


def test_code_of_the_user_is_named_only_on_the_command_line_and_must_exist(write, capsys):
    for key in ("code", "trainer.code", "model.init_args.code"):
        assert "code" in refused(["fit", "--config", write(key, "subprocess")], capsys), key
    words = ("no_such_package", "lit_layers.nothing", "../x.py", "a b", "", " ")
    for named in (*(["--code", word] for word in words), ["--code"], ["--code="]):
        refusal = refused(["fit", "--config", write(), *named], capsys)
        assert refusal.startswith("--code: expected an importable package or module, or a folder such as ."), named


def test_an_error_in_code_of_the_user_is_reported_in_one_sentence(write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own").mkdir()
    callback = "from lightning.pytorch.callbacks import Callback\nclass Thing(Callback):\n    def __init__(self):\n"
    for module, code, sentence in (
        ("failing_import_of_a_user", "raise RuntimeError('no luck')", "trainer.callbacks: RuntimeError: no luck"),
        ("failing_class_of_a_user", f"{callback}        raise KeyError('a')", "FILE, line 4: KeyError: 'a'"),
    ):
        file = tmp_path / "own" / f"{module}.py"
        file.write_text(code)
        recipe = write(CALLBACK, [spec(f"{module}.Thing")])
        refusal = refused(["fit", "--config", recipe, "--code", str(tmp_path / "own")], capsys)
        assert refusal == sentence.replace("FILE", str(file))


def test_user_code_is_imported_only_if_the_command_line_names_it(
    downloaded, write, payload, canary, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = f"{payload}from lightning.pytorch import Callback\n\nclass Own(Callback):\n    pass\n"
    (downloaded / "own_code_of_a_user.py").write_text(own)
    recipe = write(CALLBACK, [spec("own_code_of_a_user.Own")])
    refusal = refused(["fit", "--config", recipe], capsys)
    assert refusal.startswith("trainer.callbacks: a recipe names no own_code_of_a_user.Own: only lit_layers, ")
    assert refusal.endswith(ONLY)
    assert not canary.exists()
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--code", ".", "--config", recipe, "--print_config"])
    assert ended.value.code == 0
    assert canary.read_text() == "ran"


@pytest.mark.soak
def test_a_harmless_recipe_trains_and_changes_in_its_stored_copy_are_only_data(
    weapons, write, corpus, tmp_path, canary, capsys
):
    assert main(["fit", "--config", write(corpus=str(corpus))]) == 0
    stored = tmp_path / "run" / "config.yaml"
    again = ["fit", "--config", str(stored), "--root", str(tmp_path / "again")]
    with pytest.raises(SystemExit) as ended:
        main([*again, "--print_config"])
    assert ended.value.code == 0
    content = yaml.safe_load(stored.read_text())
    content["model"]["init_args"]["config"]["id2label"] = {"0": weapons["popen"]}
    stored.write_text(yaml.safe_dump(content))
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert main(again) == 0
    assert not canary.exists()


def test_a_class_with_a_function_as_default_is_created_and_its_errors_are_one_sentence(write, capsys):
    recipe = write(CALLBACK, [spec("lightning.pytorch.callbacks.BackboneFinetuning")])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", recipe, "--print_config"])
    assert ended.value.code == 0
    recipe = write(CALLBACK, [spec("lightning.pytorch.callbacks.EarlyStopping", monitor="loss", mode="sideways")])
    refusal = refused(["fit", "--config", recipe], capsys)
    assert "early_stopping.py, line " in refusal
    assert "MisconfigurationException: `mode` can be min, max, got sideways" in refusal


def test_a_task_file_of_lm_eval_is_code_and_a_recipe_may_not_name_it(write, tmp_path, canary, payload, capsys):
    (tmp_path / "utils.py").write_text(payload)
    (tmp_path / "evil.yaml").write_text("task: evil\nprocess_docs: !function utils.attack\n")
    options = {"task": str(tmp_path / "evil.yaml"), "tokenizer": "${tokenizer}", "results": str(tmp_path / "results")}
    scores = spec("lit_layers.tasks.benchmark_scores.BenchmarkScores", **options)
    recipe = write("analyses", [scores])
    assert "a recipe names no task file, which is code" in refused(["fit", "--config", recipe], capsys)
    file = tmp_path / "analyses.yaml"
    file.write_text(yaml.safe_dump({"analyses": [scores]}))
    save(causal_lm("gpt2", n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=300), tmp_path / "model")
    command = ["analyze", str(tmp_path / "model"), "--tokenizer", "bpe:300", "--config", str(file)]
    assert "a recipe names no task file, which is code" in refused([*command, "--root", str(tmp_path / "run")], capsys)
    assert not canary.exists()


def test_yaml_creates_only_plain_values(write, tmp_path, canary, payload, capsys):
    file = tmp_path / "tagged.yaml"
    tag = f"!!python/object/apply:os.system ['echo ran > {canary}']"
    for text in (f"model: {tag}", f"corpus: {tag}", f"? {tag}\n: 1", f"method: {tag}", f"steps: {tag}"):
        file.write_text(text)
        refused(["fit", "--config", str(file)], capsys)
        refused(["analyze", "model", "--config", str(file)], capsys)
        refused(["analyze", str(file)], capsys)
    assert not canary.exists()


@pytest.mark.parametrize("every", [pytest.param(4, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.nightly)])
def test_every_recipe_of_the_package_can_be_read(every, tmp_path, capsys):
    fits = [*sorted(ROOT.glob("recipes/gpt2/*.yaml")), *sorted(ROOT.glob("recipes/deit/*.yaml"))]
    fits += sorted(ROOT.glob("recipes/quickstart/*.yaml"))
    for path in fits[::every]:
        words = ["fit", "--config", str(path), "--root", str(tmp_path), "--print_config"]
        text = "images" if "deit" in path.parts or path.stem == "vit" else "text"
        more = [ROOT / "recipes" / "analyses" / f"{text}.yaml", ROOT / "recipes" / "trainer" / "ddp.yaml"]
        with pytest.raises(SystemExit) as ended:
            main([*words, *(word for recipe in more for word in ("--config", str(recipe)))])
        assert ended.value.code == 0, path
    for path in sorted(ROOT.glob("recipes/analyses/*.yaml"))[::every]:
        assert Command(["model", "--tokenizer", "bpe:300", "--config", str(path)]).options.analyses, path
    for path in sorted(ROOT.glob("recipes/series/*.yaml"))[::every]:
        assert Command(["--config", str(path)]).series(Checkpoints()), path


def test_every_parser_of_recipes_is_the_safe_one():
    """No other file creates a parser that builds classes, reads YAML with tags or executes text."""
    unsafe = re.compile(
        r"yaml\.(?!safe_|YAMLError|SafeLoader"
        r"|load\(text, getattr\(yaml, .CSafeLoader)\w+"
        r"|(?<![\w.])(eval|exec|__import__)\(|from jsonargparse import (.*)"
    )
    for path in sorted((ROOT / "lit_layers").rglob("*.py")):
        for found in unsafe.finditer(path.read_text()):
            harmless = found[2] in ("Namespace", "ActionConfigFile, ArgumentParser, Namespace")
            assert harmless or path.name == "options.py", f"{path}: {found[0]}"
