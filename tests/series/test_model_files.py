"""The files of one model, in a folder or on the Hub."""

import shutil
from pathlib import Path

import pytest

from lit_layers.errors import InputError
from lit_layers.series.checkpoint_sources import ModelFiles
from tests.support.saved_models import saved
from tests.support.series_hub import served


@pytest.fixture
def folder(tmp_path) -> Path:
    saved(tmp_path / "model")
    return tmp_path / "model"


def refusal(model, *, revision=None) -> str:
    with pytest.raises(InputError) as raised:
        ModelFiles(model, revision=revision)
    return str(raised.value)


@pytest.mark.parametrize("kind", [Path, str])
def test_a_folder_that_is_not_there_is_refused_without_asking_the_hub(tmp_path, kind):
    missing = kind(tmp_path / "nothing")
    assert refusal(missing) == f"expected a folder with a model or a name on the Hub, {missing} does not exist"


def test_a_path_into_a_folder_that_is_there_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("checkpoints").mkdir()
    assert refusal("checkpoints/nothing").endswith("checkpoints/nothing does not exist")


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert refusal(tmp_path) == f"expected a model in {tmp_path}, found no config.json there"


def test_a_local_folder_has_no_revision(folder):
    assert refusal(folder, revision="step1") == (
        f"revision: {folder} is a local folder and has no revision 'step1': leave it out"
    )


def test_files_come_from_the_hub_when_they_are_asked_for(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "hub" / "org" / "tiny" / "main")
    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch):
        files = ModelFiles("org/tiny")
        for shard in folder.glob("*.safetensors"):
            assert files.read(shard.name) == shard.read_bytes()
        assert not files.has("no such file")
        with pytest.raises(InputError, match="no such file cannot be had from the Hub") as raised:
            files.read("no such file")
        assert isinstance(raised.value.__cause__, FileNotFoundError)
