"""Weights on disk, tensor by tensor, and what is said where they are missing or damaged."""

import functools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_layers.errors import InputError
from lit_layers.files import hub
from lit_layers.models.shard_files import INDEX, PIECE, WHOLE, ShardFiles
from tests.support.same_times import exchange
from tests.support.saved_models import saved
from tests.support.series_hub import served


@pytest.fixture
def folder(tmp_path) -> Path:
    saved(tmp_path / "model")
    return tmp_path / "model"


def test_every_tensor_is_read_from_the_shard_that_has_it(folder):
    files = ShardFiles(folder)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 5
    expected = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert files.shard_of.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(files.read(name), tensor)
        assert files.shape(name) == tuple(tensor.shape)
        assert torch.equal(torch.cat(list(files.pieces(name))), tensor.reshape(-1))
        files.warm(name)


def test_a_single_file_is_read_as_well_and_large_tensors_come_in_pieces(tmp_path):
    large = torch.arange(PIECE // 4 + 5, dtype=torch.float32)
    save_file({"large": large, "none": torch.empty(0, 3)}, tmp_path / WHOLE)
    (tmp_path / "config.json").write_text("{}")
    files = ShardFiles(tmp_path)
    pieces = list(files.pieces("large"))
    assert [len(piece) for piece in pieces] == [PIECE // 4, 5]
    assert torch.equal(torch.cat(pieces), large)
    assert sum(map(len, files.pieces("none"))) == 0


def test_reading_leaves_no_pages_behind(tmp_path):
    save_file({"large": torch.ones(2**24)}, tmp_path / WHOLE)  # 64 MiB
    (tmp_path / "config.json").write_text("{}")
    files = ShardFiles(tmp_path)
    assert files.read("large").sum() == 2**24
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert not mapped


def test_the_fingerprint_changes_with_any_shard(folder):
    before = ShardFiles(folder).fingerprint()
    assert ShardFiles(folder).fingerprint() == before
    shard = sorted(folder.glob("*.safetensors"))[1]
    os.utime(shard, (1, 1))
    assert ShardFiles(folder).fingerprint() != before


def test_the_fingerprint_tells_a_checkpoint_from_another_of_the_same_size_and_time(folder):
    """Blocks measured before an interruption are taken by it: those of the other would be wrong numbers."""
    before, shard = ShardFiles(folder).fingerprint(), sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    exchange(shard, content[:-1] + bytes([content[-1] ^ 1]))
    assert ShardFiles(folder).fingerprint() != before


def refusal(model, *, revision=None) -> str:
    with pytest.raises(InputError) as raised:
        _ = ShardFiles(model, revision=revision).shard_of
    return str(raised.value)


@pytest.mark.parametrize("kind", [Path, str])
def test_a_folder_that_is_not_there_is_refused_without_asking_the_hub(tmp_path, kind):
    missing = kind(tmp_path / "nothing")
    assert refusal(missing) == f"expected a folder with a model or a name on the Hub, {missing} does not exist"


def test_a_path_into_a_folder_that_is_there_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("checkpoints").mkdir()
    assert refusal("checkpoints/nothing").endswith("checkpoints/nothing does not exist")


def test_a_folder_without_a_config_and_one_without_weights_are_refused(tmp_path):
    assert refusal(tmp_path) == f"expected a model in {tmp_path}, found no config.json there"
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == f"{tmp_path} holds no weights: expected {WHOLE} or {INDEX}"
    (tmp_path / "pytorch_model.bin").touch()
    assert refusal(tmp_path) == (
        f"{tmp_path} holds its weights as a pickle (pytorch_model.bin); only safetensors are read: save the model "
        "again with save_pretrained"
    )


def test_a_local_folder_has_no_revision(folder):
    assert refusal(folder, revision="step1") == (
        f"revision: {folder} is a local folder and has no revision 'step1': leave it out"
    )


def test_a_missing_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    assert refusal(folder) == f"{folder} lacks the shard {shard.name} that its {INDEX} names: download it again"


@pytest.mark.parametrize("size", [4, 5000, -3])
def test_a_shard_that_is_cut_short_is_named(folder, size):
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:size])
    assert re.fullmatch(f"{shard} is damaged or cut short \\(.*\\): download or save it again", refusal(folder))


@pytest.mark.parametrize("content", ["{", json.dumps({"metadata": {}}), "[]"])
def test_a_damaged_index_is_named(folder, content):
    (folder / INDEX).write_text(content)
    assert refusal(folder) == f"{folder}: {INDEX} is damaged; download or save the model again"


def test_a_model_of_the_hub_is_asked_for_again_and_what_arrives_is_compared_by_hash(folder, tmp_path, monkeypatch):
    repository, waits = tmp_path / "hub" / "org" / "tiny" / "main", list[float]()
    shutil.copytree(folder, repository)
    monkeypatch.setattr(hub, "Retry", functools.partial(hub.Retry, sleep=waits.append))
    hashed = hub.content_hash
    wrong = iter(["0" * 64])
    monkeypatch.setattr(hub, "content_hash", lambda path, like: next(wrong, hashed(path, like)))
    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch):
        files = ShardFiles("org/tiny")
        assert waits == [1]  # the config arrived with another hash
        for shard in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(shard).items():
                assert torch.equal(files.read(name), tensor)
        assert not files.has("no such file")
        with pytest.raises(InputError, match="no such file cannot be had from the Hub") as raised:
            files.fetch("no such file")
        assert isinstance(raised.value.__cause__, FileNotFoundError)
