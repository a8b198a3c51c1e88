"""Files over which a library that is not written in Python stops: a sentence, and no end of the process."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_layers.cli.main import main
from lit_layers.errors import InputError, panics_as_errors
from tests.support.labelled_texts import labelled, saved_gpt2, write_csv

# What `tokenizers` panics over, which no `except Exception` sees: as it reads the file, and as it encodes a text.
AS_IT_IS_READ: dict[str, Any] = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}
IN_A_TEXT: dict[str, Any] = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}


@pytest.fixture
def series(tmp_path: Path) -> Path:
    for step in (0, 1):
        saved_gpt2(tmp_path / "series" / f"step-{step:09d}")
    write_csv(tmp_path / "songs.csv", labelled(40))
    rows = (json.dumps({"text": f"Text number {number}. " * 20}) for number in range(600))
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    return tmp_path / "series"


def damage(folder: Path, part: dict[str, Any]) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **part}))


@pytest.mark.parametrize("part", [AS_IT_IS_READ, IN_A_TEXT], ids=["as it is read", "in a text"])
def test_a_tokenizer_over_which_its_library_panics_is_a_sentence(part, series, tmp_path, capfd):
    model = series / "step-000000001"
    damage(model, part)
    for words in (
        ["analyze", model, "--corpus", tmp_path / "text.jsonl", "--metrics=coupling", "--root", tmp_path / "out"],
        ["select", model, "--task", tmp_path / "songs.csv", "--out", tmp_path / "out"],
        ["prepare", "--source", tmp_path / "text.jsonl", "--tokenizer", model, "--out", tmp_path / "shards"],
    ):
        code = main([*map(str, words)])
        said = capfd.readouterr().err
        (sentence,) = (line for line in said.splitlines() if line.startswith(f"lit-layers {words[0]}: error: "))
        assert (code, "Traceback" in said) == (2, False), words
        named = f"{model / 'tokenizer.json'} is no tokenizer" if part is AS_IT_IS_READ else "a library stopped"
        assert named in sentence, words


def test_an_audit_names_the_step_with_such_a_tokenizer(series, capfd):
    damage(series / "step-000000001", AS_IT_IS_READ)
    assert main(["audit", str(series), "--level", "listing"]) == 1
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["damaged", "1", "its", "tokenizer.json", "is", "damaged"] in rows


def test_another_error_is_left_as_it_is():
    for error in (KeyboardInterrupt, KeyError, InputError):
        with pytest.raises(error), panics_as_errors():
            raise error


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
@pytest.mark.parametrize("device", ["/proc/self/mem", "/dev/zero"])
def test_a_file_of_a_checkpoint_that_links_to_what_has_no_end_is_refused(device, series, tmp_path, capfd):
    """Memory is a regular file for the system, and zeros never end."""
    model, text = series / "step-000000001", str(tmp_path / "text.jsonl")
    weights = model / "model.safetensors"
    weights.unlink()
    os.symlink(device, weights)
    for option in ([], ["--offload", str(tmp_path / "scratch")]):
        words = ["analyze", str(model), "--corpus", text, "--metrics=coupling", "--root", str(tmp_path / "out")]
        assert main([*words, *option]) == 2, option
        said = capfd.readouterr().err
        assert str(model) in said, option
        assert "Traceback" not in said, option
    code = main(["audit", str(series)])
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said
    if device == "/dev/zero":
        assert (code, "no weights  1 " in said) == (1, True)
    else:
        assert (code, f"cannot read {weights}: input/output error" in said) == (2, True)
