"""Unreadable files next to the weights of a model."""

from pathlib import Path

import pytest

from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.models.saved import load
from lit_layers.series.checkpoint_sources import FolderSource
from tests.hostile.test_recipes import refused
from tests.support.labelled_texts import saved_gpt2

READ = "config.json tokenizer_config.json generation_config.json model.safetensors.index.json preprocessor_config.json"
READ += " vocab.json merges.txt special_tokens_map.json tokenizer.json"


def test_a_broken_link_next_to_weights_is_reported_and_not_treated_as_missing(tmp_path, capsys):
    """A tokenizer without its config would silently end its documents with another token."""
    text = "{} is a link to nothing"
    for name in READ.split():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        for file in ("config.json", "tokenizer.json"):
            (folder / file).write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("nowhere")
        assert name not in FolderSource(folder).files
        for reads in (load, load_tokenizer):
            reader = str if reads is load_tokenizer else Path
            with pytest.raises(InputError) as sentence:
                reads(reader(folder))
            assert text.format(folder / name) in str(sentence.value), reads
    for name in ("config.json", "tokenizer_config.json"):
        folder = tmp_path / name.replace(".", "-")
        assert text.format(folder / name) in refused(["analyze", str(folder), "--root", str(tmp_path / "out")], capsys)


def test_a_model_with_links_and_a_readme_next_to_its_weights_is_opened(tmp_path):
    saved_gpt2(tmp_path)
    (tmp_path / "vocab.json").symlink_to("tokenizer.json")
    (tmp_path / "README.md").symlink_to("nowhere")
    assert load_tokenizer(str(tmp_path)).companions.keys() == {"tokenizer_config.json", "vocab.json"}
    assert load(tmp_path).config.n_layer == 3
