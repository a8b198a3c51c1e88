"""Folders of somebody else's hold links; what is written there stays there."""

import os
import secrets
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from lit_layers.cli.main import main
from lit_layers.data.shards import _FILES, ShardWriter
from lit_layers.errors import InputError
from lit_layers.figures import vega
from lit_layers.files.durable import no_link, replace_file, write_json
from lit_layers.records import Measurement, ScalarLog, Store
from lit_layers.report.wandb_mirror import WandbMirror
from tests.cli.test_fit import RECIPE


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "file of the user"
    file.write_text("precious")
    return file


def test_nothing_is_written_or_emptied_through_a_link(victim: Path, tmp_path: Path, monkeypatch) -> None:
    root = tmp_path / "downloaded"
    (root / "wandb").mkdir(parents=True)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    places = (".run.json.draft", ".report.html.guessed.draft", "cell.log", "wandb/.mirror.lock")
    for place in places:
        (root / place).symlink_to(victim)
    write_json(root / "run.json", {"run": "new"})
    replace_file(root / "report.html", "new")
    assert '"new"' in (root / "run.json").read_text()
    assert (root / "report.html").read_text() == "new"
    mirror = WandbMirror.__new__(WandbMirror)
    mirror.root = root
    for name, write in (
        ("wandb/.mirror.lock", mirror._take_lock),
        ("cell.log", lambda: os.close(no_link(str(root / "cell.log"), os.O_WRONLY | os.O_APPEND))),
    ):
        with pytest.raises(InputError, match=f"{name} is a link, and nothing is written through links: remove it"):
            write()
    assert victim.read_text() == "precious"
    assert not [path for path in root.iterdir() if path.name in places[:2]]


def test_no_record_is_added_to_a_file_behind_a_link_nor_its_last_line_taken_for_a_torn_one(
    victim: Path, tmp_path: Path
) -> None:
    """A line without its newline, such as a token is."""
    root = tmp_path / "downloaded"
    root.mkdir()
    for name in ("measurements.jsonl", "log.jsonl", f"{_FILES[0]}.partial"):
        (root / name).symlink_to(victim)
    measurement = Measurement(run="r", step=0, tokens=None, analysis="a", records=[], seconds=0.0)
    for write in (
        lambda: Store(root / "measurements.jsonl").add(measurement),
        lambda: ScalarLog(root / "log.jsonl").log(0, {"loss": 1.0}),
        lambda: ShardWriter(root, np.dtype("uint16"), {}),
    ):
        with pytest.raises(InputError, match="is a link, and nothing is written through links: remove it"):
            write()
    assert victim.read_text() == "precious"


def test_a_picture_takes_the_place_of_a_link(victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "downloaded"
    root.mkdir()
    (root / "loss.svg").symlink_to(victim)
    monkeypatch.setattr(vega, "pictures_of", lambda specs, suffixes: [[b"drawn" for _ in suffixes] for _ in specs])
    vega.write_pictures([("loss", SimpleNamespace(whole=dict))], root)
    assert victim.read_text() == "precious"
    assert (root / "loss.svg").read_text() == "drawn"
    assert not (root / "loss.svg").is_symlink()


@pytest.mark.soak
def test_a_run_begins_in_a_folder_whose_recipe_is_a_link_to_nothing(corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "downloaded"
    root.mkdir()
    (root / "config.yaml").symlink_to(tmp_path / "made elsewhere")
    recipe = {**RECIPE, "corpus": str(corpus), "root": str(root)}
    recipe["trainer"] = {**recipe["trainer"], "max_steps": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "analyses": recipe["analyses"][:1], "steps": [0]}))
    assert main(["fit", "--config", str(tmp_path / "recipe.yaml")]) == 0
    assert not (tmp_path / "made elsewhere").exists()
    assert (root / "config.yaml").is_file()
    assert not (root / "config.yaml").is_symlink()
