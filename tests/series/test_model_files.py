"""The files of one model, in a folder or on the Hub."""

import shutil
from pathlib import Path

import pytest

from lit_layers.errors import InputError
from lit_layers.series.checkpoint_sources import ModelFiles
from tests.support.saved_models import saved
from tests.support.series_hub import served


def test_a_missing_path_is_refused_without_a_request_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("checkpoints").mkdir()
    for missing in (tmp_path / "nothing", str(tmp_path / "nothing"), "checkpoints/nothing"):
        sentence = f"^expected a folder with a model or a name on the Hub, {missing} does not exist$"
        with pytest.raises(InputError, match=sentence):
            ModelFiles(missing)


def test_files_are_downloaded_from_the_hub_on_request(tmp_path, monkeypatch):
    saved(folder := tmp_path / "model")
    shutil.copytree(folder, tmp_path / "hub" / "org" / "tiny" / "main")
    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch):
        files = ModelFiles("org/tiny")
        for shard in folder.glob("*.safetensors"):
            assert files.read(shard.name) == shard.read_bytes()
        assert not files.has("no such file")
        with pytest.raises(InputError, match="no such file cannot be had from the Hub") as raised:
            files.read("no such file")
        assert isinstance(raised.value.__cause__, FileNotFoundError)
