"""Temporary folders are removed with their owner."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lit_layers.analyses import Probe
from lit_layers.files.durable import Scratch
from lit_layers.measuring.one_model import measure
from tests.support.every_analysis import VOCABULARY, save_inputs, text_analyses
from tests.support.tiny_models import tiny

MAKES = """
import sys
from lit_layers.files.durable import Scratch
kept = Scratch()
(kept.folder / "a").write_text("x")
print(kept.folder, flush=True)
{end}
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def started(end: str) -> "tuple[subprocess.Popen[str], Path]":
    process = subprocess.Popen([sys.executable, "-c", MAKES.format(end=end)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_temporary_folder_is_removed_with_its_last_reference_or_its_process(place):
    kept, other = Scratch(), Scratch()
    kept.remove()
    folder = other.folder
    assert [*place.iterdir()] == [folder]
    del other
    assert not folder.exists()
    for end in ("", "sys.exit(3)"):
        process, folder = started(end)
        process.communicate()
        assert not folder.exists(), end


def test_a_probe_that_fails_leaves_no_folder(place, monkeypatch):
    (probe,) = (each for each in text_analyses(save_inputs(place / "inputs")) if type(each) is Probe)
    take = Probe._features

    def fill_the_disk(*given):
        take(*given)
        raise OSError("no space left on device")

    monkeypatch.setattr(Probe, "_features", fill_the_disk)
    failed = measure(tiny("gpt2", vocab_size=VOCABULARY), probe, run="r", step=0)
    assert failed.error == "OSError: no space left on device"
    assert not [*place.glob("lit_layers-*")]
