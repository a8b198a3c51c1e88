"""Sentence encoders are probed with the pooling that their modules.json defines."""

import json

import pytest

from lit_layers.cli.main import main
from tests.support.labelled_texts import labelled, saved_bert, write_banking77
from tests.tasks.test_sentence_encoder import write_encoder

pytestmark = pytest.mark.soak  # two runs of `select`


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_encoder_is_pooled_as_its_modules_define(pooling, tmp_path):
    saved_bert(tmp_path / "bert")
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    write_encoder(tmp_path / "bert", pooling=modes)
    write_banking77(tmp_path / "data", labelled(90), labelled(30, first=90))
    command = ["select", tmp_path / "bert", "--task", "banking77", "--folder", tmp_path / "data"]
    command += ["--root", tmp_path / "out", "--rounds", 1, "--rule", "best", "--by", "accuracy", "--max_tokens", 6]
    assert main([str(part) for part in command]) == 0
    assert json.loads((tmp_path / "out" / "select.json").read_text())["pooling"] == pooling
