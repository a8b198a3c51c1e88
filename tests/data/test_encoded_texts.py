"""Texts as token ids: equal to the tokenizer's, in batches that hold every text once."""

import numpy as np
import pytest
import torch

from lit_layers.data.batches import encode_texts
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from tests.support.labelled_texts import labelled, saved_bert, saved_gpt2

TEXTS = [text for text, _ in labelled(40)]


@pytest.mark.parametrize("saved", [saved_gpt2, saved_bert])
def test_ids_equal_those_of_each_text_alone_and_long_texts_are_truncated(saved, tmp_path):
    saved(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path)).tokenizer
    whole = [tokenizer.encode(text).ids for text in TEXTS]
    free = encode_texts(str(tmp_path), TEXTS, max_tokens=100)
    assert [list(ids) for ids in free.ids] == whole
    assert free.num_cut == 0
    cut = encode_texts(str(tmp_path), TEXTS, max_tokens=12)
    assert cut.num_cut == sum(len(ids) > 12 for ids in whole) > 0
    for ids, all_ids in zip(cut.ids, whole, strict=True):
        if len(all_ids) <= 12:
            assert list(ids) == all_ids
        elif saved is saved_bert:
            assert list(ids) == [*all_ids[:11], 3], "[SEP] stays the last"
        else:
            assert list(ids) == all_ids[:12]
    assert len({free.content_hash(), cut.content_hash()}) == 2
    assert free.content_hash() == encode_texts(str(tmp_path), TEXTS, max_tokens=100).content_hash()


def test_batches_hold_every_text_once_longest_first_and_within_the_token_limit(tmp_path):
    saved_gpt2(tmp_path)
    texts = encode_texts(str(tmp_path), TEXTS, max_tokens=100)
    for max_tokens in (1, 30, 1000):
        seen, widths = [], []
        for rows, batch in texts.batches(max_tokens):
            ids, mask = batch["input_ids"], batch["attention_mask"]
            assert len(rows) == 1 or ids.numel() <= max_tokens
            assert (ids[~mask.bool()] == texts.pad_id).all()
            for row, tokens, real in zip(rows, ids, mask, strict=True):
                assert tokens[: int(real.sum())].tolist() == list(texts.ids[row])
                assert torch.equal(real, (torch.arange(len(real)) < real.sum()).long()), "padding is on the right"
            seen += rows
            widths += mask.sum(1).tolist()
        assert sorted(seen) == list(range(len(TEXTS)))
        assert (np.diff(widths) <= 0).all()


def test_a_text_without_tokens_and_a_limit_below_the_special_tokens_are_refused(tmp_path):
    saved_gpt2(tmp_path / "gpt2")
    saved_bert(tmp_path / "bert")
    with pytest.raises(InputError, match=r"makes no token of text 1: use another, or drop the text"):
        encode_texts(str(tmp_path / "gpt2"), ["a", ""], max_tokens=9)
    with pytest.raises(InputError, match="expected more than the 2 special tokens of every text, got 2"):
        encode_texts(str(tmp_path / "bert"), TEXTS, max_tokens=2)
