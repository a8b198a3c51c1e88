"""Sentence encoders are probed as their modules.json says, and exported to sentence-transformers with these vectors."""

import json

import pytest
import torch

from lit_layers.cli.main import main
from lit_layers.data.batches import encode_texts
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.text_features import text_features
from tests.support.labelled_texts import labelled, saved_bert, write_banking77
from tests.tasks.test_sentence_encoder import write_encoder

pytestmark = pytest.mark.soak  # two selections with their exports
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
TEXTS = [text for text, _ in labelled(6)]


@pytest.fixture(scope="module", params=["mean", "cls"])
def selected(request, tmp_path_factory):
    """The way of pooling, the model, the numbers of its selection, its export, and what was printed."""
    root = tmp_path_factory.mktemp("encoder")
    saved_bert(root / "bert")
    pooling = {name: on == (request.param == "mean") for name, on in MEAN.items()}
    write_encoder(root / "bert", pooling=pooling)
    write_banking77(root / "data", labelled(90), labelled(30, first=90))
    command = ["select", root / "bert", "--task", "banking77", "--folder", root / "data", "--root", root / "out"]
    command += ["--export", root / "cut", "--rounds", 1, "--rule", "best", "--by", "accuracy", "--max_tokens", 6]
    assert main([str(part) for part in command]) == 0
    return (
        request.param,
        root / "bert",
        json.loads((root / "out" / "select.json").read_text()),
        root / "cut",
    )


@pytest.mark.filterwarnings("ignore")
def test_the_export_gives_sentence_transformers_the_vectors_that_were_probed(selected):
    from sentence_transformers import SentenceTransformer

    pooling, source, found, cut = selected
    assert found["pooling"] == pooling
    texts = encode_texts(str(source), TEXTS, max_tokens=6)
    expected = text_features(LayeredModel(load(source)), texts, pooling=pooling).layer(found["layer"])
    vectors = SentenceTransformer(str(cut), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert torch.allclose(vectors, torch.as_tensor(expected[:]), atol=1e-5)


def test_where_nothing_can_be_cut_no_costs_are_compared(selected):
    _, _, found, cut = selected
    is_last = found["layer"] == found["num_layers"]
    assert ("## Costs" in (cut / "README.md").read_text()) != is_last
