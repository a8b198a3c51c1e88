"""Errors of the Hub become one sentence, which says how to log in if access is refused."""

from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest

from lit_layers.data.images import image_source
from lit_layers.data.text_sources import open_source
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError


class Forbidden(OSError):
    response = SimpleNamespace(status_code=403)


def test_unavailable_text_images_and_tokenizers_are_refused_in_one_sentence(monkeypatch):
    for error, advice in (
        (Forbidden("gated"), r"\(Forbidden: gated\): access is refused: .* `hf auth login`"),
        (RuntimeError("a script"), r"\(RuntimeError: a script\): check the name and the network"),
    ):

        def refuse(*args, error=error, **options):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", refuse)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        image_source.cache_clear()
        expected = rf"'lab/data' is no local path and cannot be had from the Hub {advice}"
        for ask in (
            lambda: image_source("lab/data").train,
            lambda: open_source("lab/data").pin(),
            lambda: load_tokenizer("lab/data"),
        ):
            with pytest.raises(InputError, match=expected):
                ask()
