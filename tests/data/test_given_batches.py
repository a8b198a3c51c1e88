"""Batches of other projects: any common form gives the same batches, and others are refused in one sentence."""

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_layers.data import batches
from lit_layers.data.batches import GivenBatches, to_batches
from lit_layers.errors import InputError
from tests.support.tiny_training import CONTEXT, VOCABULARY

IDS = torch.randint(VOCABULARY, (20, CONTEXT), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(20)
IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def concatenate(batches, name="input_ids"):
    return torch.cat([batch[name] for batch in batches])


def test_token_ids_of_any_form_are_the_same_texts():
    cases = [
        list(IDS.split(8)),
        [(ids,) for ids in IDS.split(8)],
        [{"input_ids": ids, "idx": [1]} for ids in IDS.split(8)],
        [{"input_ids": IDS.tolist()}],
        IDS,
        TensorDataset(IDS),
        DataLoader(TensorDataset(IDS, LABELS), batch_size=7),
        DataLoader([{"input_ids": ids} for ids in IDS], batch_size=7),
        datasets.Dataset.from_dict({"input_ids": IDS.tolist(), "idx": LABELS.tolist()}),
        datasets.Dataset.from_dict({"input_ids": IDS.tolist()}).with_format("torch"),
    ]
    for number, given in enumerate(cases):
        batches = to_batches(given)
        assert torch.equal(concatenate(batches), IDS), number
        assert concatenate(batches, "attention_mask").all(), number
        assert batches.content_hash() == to_batches(list(batches)).content_hash(), number
    other = IDS.clone()
    other[3, 4] += 1
    assert GivenBatches([IDS]).content_hash() != GivenBatches([other]).content_hash()


def test_pairs_of_images_and_labels_are_batches_of_labelled_images():
    batches = GivenBatches(DataLoader(TensorDataset(IMAGES, LABELS[:6]), batch_size=4))
    assert torch.equal(concatenate(batches, "pixel_values"), IMAGES)
    assert torch.equal(concatenate(batches, "labels"), LABELS[:6])


def test_existing_attention_masks_of_padded_rows_are_kept():
    texts = [[5, 6, 7], [8, 9, 0]]
    masks = [[1, 1, 1], [1, 1, 0]]
    (batch,) = GivenBatches(datasets.Dataset.from_dict({"input_ids": texts, "attention_mask": masks}))
    assert batch["input_ids"].tolist() == texts
    assert batch["attention_mask"].tolist() == masks


def test_a_loader_that_shuffles_gives_the_same_batches_every_time():
    batches = GivenBatches(DataLoader(TensorDataset(IDS), batch_size=7, shuffle=True))
    assert torch.equal(concatenate(batches), concatenate(batches))


def test_other_forms_and_a_whole_training_set_are_refused_in_one_sentence(monkeypatch):
    cases = [
        ("text", "got a str"),
        ([], "at least one batch, got none"),
        (["text"], "batch 0 has neither"),
        ([{"ids": IDS}], "batch 0 has ids"),
        ([IDS[0]], r"input_ids of 2 dimensions, got \(12,\) in batch 0"),
        ([IMAGES[0]], r"pixel_values of 4 dimensions, got \(3, 8, 8\)"),
        ([{"input_ids": IDS[:, :0]}], r"input_ids of 2 dimensions, got \(20, 0\) in batch 0"),
        ([{"input_ids": IDS, "attention_mask": IDS * 0}], "a row of batch 0 has no 1 in its attention_mask"),
    ]
    for given, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            list(GivenBatches(given))
    monkeypatch.setattr(batches, "MAX", 19)
    with pytest.raises(InputError, match=r"at most 19 texts or images, got more.*Subset"):
        list(GivenBatches(TensorDataset(IDS)))
