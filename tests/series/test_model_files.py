"""The files of one model, in a folder or on the Hub."""

import shutil

import pytest

from lit_layers.errors import InputError
from lit_layers.series.checkpoint_sources import ModelFiles
from tests.support.saved_models import saved
from tests.support.series_hub import served


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
