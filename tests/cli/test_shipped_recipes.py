"""Recipes of the package are found by name, from any folder and in a wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lit_layers.cli.options import Recipe, find_recipe, shipped_recipes
from lit_layers.cli.verbs.analyze import analyze
from lit_layers.cli.verbs.fit import fit
from lit_layers.errors import InputError

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = str(REPOSITORY / "recipes/quickstart/gpt2.yaml")
TEXT = str(REPOSITORY / "recipes/analyses/text.yaml")


def test_every_recipe_of_the_repository_has_its_name():
    files = {*REPOSITORY.glob("recipes/**/*.yaml"), *REPOSITORY.glob("wandb_configs/**/*.yaml")}
    assert {*shipped_recipes().values()} == files
    assert str(shipped_recipes()["quickstart/gpt2"]) == QUICKSTART


@pytest.mark.soak
def test_a_name_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("quickstart/gpt2", "recipes/quickstart/gpt2.yaml", "quickstart/gpt2.yaml")
    for verb, words, file in ((fit, [], QUICKSTART), (analyze, ["model"], TEXT)):
        whole = Recipe(verb, [*words, "--config", file]).options
        called = names if verb is fit else [each.replace("quickstart/gpt2", "analyses/text") for each in names]
        assert [str(find_recipe(name)) for name in called] == [file] * 3
        for named in (["--config", called[0]], [f"--config={called[1]}"], ["-c", called[2]]):
            assert Recipe(verb, [*words, *named]).options == whole
    whole = Recipe(fit, ["-c", QUICKSTART, "--root", "x"]).options
    assert Recipe(fit, [names[0], "--root", "x"]).options == whole


def test_a_local_file_comes_before_a_recipe_of_the_package_and_a_folder_hides_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "analyses").mkdir(parents=True)
    (tmp_path / "recipes/analyses/text.yaml").write_text("analyses: []\n")
    assert find_recipe("recipes/analyses/text.yaml") == Path("recipes/analyses/text.yaml")
    assert find_recipe("analyses/text") == Path(TEXT)
    (tmp_path / "quickstart" / "gpt2").mkdir(parents=True)
    assert find_recipe("quickstart/gpt2") == Path(QUICKSTART)
    for name in ("quickstart/gpt2.json", "", "x" * 5000):
        with pytest.raises(InputError, match="no recipe"):
            find_recipe(name)


@pytest.mark.soak
def test_a_wheel_trains_the_quickstart_outside_the_repository(tmp_path):
    """The built wheel is imported instead of the checkout, and no file of the checkout is accessible."""
    build = [sys.executable, "-m", "pip", "wheel", str(REPOSITORY), "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    manifests = (tmp_path / "installed/lit_layers/series/manifests").glob("*.yaml")
    assert {path.name for path in manifests} == {path.name for path in (REPOSITORY / "checkpoints").glob("*.yaml")}
    words = ["fit", "quickstart/gpt2", "--trainer.max_steps", "2", "--steps", "[0,2]", "--analyses", "[]"]
    code = (
        "import lit_layers; print(lit_layers.__file__);"
        f"from lit_layers.cli.main import main; raise SystemExit(main({words}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.startswith(str(tmp_path / "installed"))
    assert (tmp_path / "checkpoints/quickstart/step-000000002/model.safetensors").is_file()
