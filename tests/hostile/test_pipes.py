"""A pipe, socket or device in place of a file: to read it may never end. Beside a model, whatever is no file."""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import yaml
from PIL import Image

from lit_layers.cli.command_line import COMMANDS
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError, refusing_pipes
from lit_layers.files.model_files import ModelFiles
from lit_layers.models.saved import load, open_plainly
from lit_layers.series.checkpoint_sources import FolderSource
from tests.hostile.test_recipes import refused
from tests.support.labelled_texts import saved_gpt2


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    os.mkfifo(tmp_path / "pipe.yaml")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket.yaml"))
    return [str(tmp_path / "pipe.yaml"), str(tmp_path / "socket.yaml"), "/dev/zero"]


def test_every_command_refuses_them(names, capsys):
    for command in COMMANDS:
        for name in names:
            for words in ([name], ["--config", name], [f"--config={name}"]):
                said = refused([command, *words], capsys)
                assert said == f"expected a file or folder, {name} is a pipe, a socket or a device"


def test_a_recipe_names_none(names, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    for name in names:
        recipe.write_text(yaml.safe_dump({"corpus": name, "root": str(tmp_path / "run")}))
        said = refused(["analyze", str(tmp_path), "--config", str(recipe)], capsys)
        assert said == f"corpus: expected a file or folder, {name} is a pipe, a socket or a device"


def test_what_a_shell_makes_of_a_command_is_read_where_the_command_line_names_it_and_no_recipe(tmp_path, capsys):
    """`<(COMMAND)` is /dev/fd/63; a recipe that names 0 would wait for what nobody types."""
    reader, writer = os.pipe()
    os.write(writer, b"resamples: 99\n")
    os.close(writer)
    words = ["correlate", "table.csv", "--metric", "a", "--score", "b", "--config"]
    assert refused([*words, f"/dev/fd/{reader}"], capsys) == "resamples: expected at least 100, got 99"
    os.close(reader)
    reader, writer = os.pipe()
    recipe, inner = tmp_path / "recipe.yaml", tmp_path / "inner.yaml"
    for name in (f"/dev/fd/{reader}", f"/proc/self/fd/{reader}"):
        for content in ({"corpus": name}, {"config": name}):
            recipe.write_text(yaml.safe_dump(content))
            said = refused(["analyze", str(tmp_path), "--config", str(recipe)], capsys)
            assert said.endswith(f"expected a file or folder, {name} is a pipe, a socket or a device")
        inner.write_text(yaml.safe_dump(PAPER | {"steps": [{"correlate": {"data": "published", "config": [name]}}]}))
        said = refused(["reproduce", str(inner), "--root", str(tmp_path / "out")], capsys)
        assert said.endswith(f"expected a file or folder, {name} is a pipe, a socket or a device")
    os.close(reader)
    os.close(writer)


PAPER = {"paper": "coupling", "item": "Figure 1", "shows": "nothing", "status": "here"}


def test_no_recipe_that_a_recipe_names_is_one(tmp_path, downloaded, capsys):
    """Each of these fields may name a file with what it holds, a link is one, too, and a recipe names the next."""
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    recipe, inner = tmp_path / "recipe.yaml", tmp_path / "inner.yaml"
    inner.write_text("config: downloaded/link\n")
    for command in ("fit", "analyze"):
        for named in ("downloaded/pipe", "downloaded/link", "inner.yaml"):
            recipe.write_text(yaml.safe_dump({"config": named}))
            said = refused([command, "--config", str(recipe)], capsys)
            assert said.startswith("expected a file or folder, ")
            assert said.endswith(" is a pipe, a socket or a device")
    for field in ("model", "data", "trainer", "trainer.callbacks"):
        outer, _, option = field.partition(".")
        recipe.write_text(yaml.safe_dump({outer: {option: "downloaded/pipe"} if option else "downloaded/pipe"}))
        said = refused(["fit", "--config", str(recipe)], capsys)
        assert said.endswith(f"expected a file or folder, {tmp_path}/downloaded/pipe is a pipe, a socket or a device")


def test_no_library_opens_one_either_and_only_inside_a_command(tmp_path):
    """Whatever a file of somebody else's leads to, Python opens it, and is asked."""
    os.mkfifo(tmp_path / "table.csv")
    with refusing_pipes():
        for opens in (pandas.read_csv, np.load, torch.load, Image.open):
            with pytest.raises(InputError, match=r"table\.csv is a pipe, a socket or a device$"):
                opens(tmp_path / "table.csv")
        with pytest.raises(InputError, match="/dev/zero is a pipe"), open("/dev/zero", "rb"):
            pass
        with open(os.devnull, "rb") as nothing:
            assert nothing.read() == b""
    os.close(os.open(tmp_path / "table.csv", os.O_RDONLY | os.O_NONBLOCK))


def test_a_run_has_none_among_its_files(tmp_path, capsys):
    os.mkfifo(tmp_path / "measurements.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    said = refused(["report", str(tmp_path)], capsys)
    assert said.endswith("measurements.jsonl is a pipe, a socket or a device")


def socket_at(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # a whole path may be too long for one


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**40)


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "device": (lambda path: path.symlink_to("/dev/zero"), "{} is a pipe, a socket or a device"),
    "memory": (lambda path: path.symlink_to("/proc/self/mem"), "cannot read {}: input/output error"),
    "pipe": (os.mkfifo, "{} is a pipe, a socket or a device"),
    "socket": (socket_at, "{} is a pipe, a socket or a device"),
    "folder": (Path.mkdir, "expected a file, {} is a folder"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "{} is a link to nothing"),
    "link to itself": (lambda path: path.symlink_to(path.name), "{} is a link to nothing"),
    "1 TB": (sparse, "{} has 1,099,511,627,776 bytes"),
}
READ = "config.json tokenizer_config.json generation_config.json model.safetensors.index.json preprocessor_config.json"
READ += " vocab.json merges.txt special_tokens_map.json tokenizer.json"


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_what_lies_beside_weights_and_is_no_file_is_named_and_not_taken_for_missing(kind, tmp_path, capsys):
    """A tokenizer whose config is left out silently ends its documents with another token."""
    make, said = NO_FILES[kind]
    for name in READ.split():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        for there in ("config.json", "tokenizer.json"):
            (folder / there).write_text("{}")
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        assert said.format(folder / name) in str(FolderSource(folder).damage())
        assert name not in FolderSource(folder).files
        for reads in (load, open_plainly, ModelFiles, load_tokenizer):
            reader = str if reads is load_tokenizer else Path
            with pytest.raises(InputError) as sentence:
                reads(reader(folder))
            assert said.format(folder / name) in str(sentence.value), reads
    for name in ("config.json", "tokenizer_config.json"):
        folder = tmp_path / name.replace(".", "-")
        assert said.format(folder / name) in refused(["analyze", str(folder), "--root", str(tmp_path / "out")], capsys)


def test_a_model_with_all_that_may_lie_beside_it_is_opened(tmp_path):
    saved_gpt2(tmp_path)
    (tmp_path / "vocab.json").symlink_to("tokenizer.json")
    (tmp_path / "README.md").symlink_to("nowhere")
    with open(tmp_path / "trainer_state.json", "wb") as file:  # of a million logged steps
        file.truncate(2**29)
    assert load_tokenizer(str(tmp_path)).companions.keys() == {"tokenizer_config.json", "vocab.json"}
    assert load(tmp_path).config.n_layer == 3
