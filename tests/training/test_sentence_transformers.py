"""The trainer of sentence-transformers accepts the callback, which measures the network inside the encoder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

import lit_layers
from lit_layers import records
from lit_layers.analyses import PooledStates, Trajectory
from lit_layers.data import GivenTexts, TextBatches
from lit_layers.errors import InputError
from lit_layers.integrations import EmergenceTrainerCallback
from lit_layers.models.build import plain_model, weights_hash
from tests.support.labelled_texts import labelled, saved_bert

# sentence-transformers takes seconds to import, and uses functions that transformers warns about.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

TEXTS = [text for text, _ in labelled(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    saved_bert(folder := tmp_path_factory.mktemp("bert"))
    return folder


def test_its_training_is_measured_and_does_not_change(folder, tmp_path):
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    held_out = TextBatches(GivenTexts(TEXTS[:4]), str(folder))
    pairs = Dataset.from_dict({"anchor": TEXTS[4:14], "positive": TEXTS[14:24]})

    def trained(root: Path | None) -> SentenceTransformer:
        torch.manual_seed(0)
        model = SentenceTransformer(str(folder), device="cpu")
        arguments = Arguments(
            str(tmp_path / "hf"), max_steps=2, per_device_train_batch_size=4, learning_rate=0.05, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", seed=7,
        )  # fmt: skip
        watch = [EmergenceTrainerCallback([PooledStates(batches=held_out)], [0], root)] if root else []
        loss = losses.MultipleNegativesRankingLoss(model)
        SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss, callbacks=watch).train()
        return model.eval()

    watched, alone = trained(tmp_path / "run"), trained(None).state_dict()
    assert all(torch.equal(value, alone[name]) for name, value in watched.state_dict().items())
    first, last = records.read(tmp_path / "run" / "measurements.jsonl")
    assert (first.step, last.step) == (0, 2)
    assert last.provenance["weights_hash"] == weights_hash(plain_model(watched)) != first.provenance["weights_hash"]
    # The encoder's vectors are means over the last layer's tokens. An SVD gives their effective dimension.
    vectors = watched.encode(TEXTS[:4]).astype(np.float64)
    squares = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False) ** 2
    dimensions = {record.layer: record.value for record in last.records if record.metric == "pooled_dimension"}
    expected = squares.sum() ** 2 / (squares**2).sum()
    assert dimensions[len(plain_model(watched).encoder.layer)] == pytest.approx(expected, rel=1e-4)  # float32 states


def test_a_module_around_a_known_model_is_refused_with_its_name(folder, tmp_path):
    from transformers import AutoModel

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = AutoModel.from_pretrained(folder), nn.Linear(32, 2)

        def forward(self, features, other):
            return self.head(self.encoder(**features).pooler_output)

    batches = list(TextBatches(GivenTexts(TEXTS[:4]), str(folder)))
    with pytest.raises(InputError, match="it holds BertModel as 'encoder': give that part alone"):
        lit_layers.watch(Scorer(), [Trajectory(batches=batches)], steps=[0], root=tmp_path)


def test_an_encoder_in_memory_has_the_values_of_its_folder(folder):
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(folder), device="cpu")
    of_both = [lit_layers.layers(each, ["prompt_entropy"], texts=TEXTS[:2]) for each in (encoder, str(folder))]
    columns = ["metric", "layer", "value"]
    first, second = (result.frame[columns].dropna().to_numpy()[:, 2].astype(float) for result in of_both)
    # Both load float32 weights, but their alignment in memory may differ: equal to rounding.
    np.testing.assert_allclose(first, second, rtol=1e-5)
