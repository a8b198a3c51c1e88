import hashlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lit_layers.data.preparing import TokenShards, token_dtype
from lit_layers.errors import InputError


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made.folder, tmp_path / "shards")


def expected_documents(texts: list[str], tokenizer: Tokenizer, split: str) -> list[list[int]]:
    """Compute the documents of the shards in another way: one text at a time, split by the hash of its bytes."""
    documents = []
    for text in texts:
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
        if (split == "validation") == (value < 0.2):
            documents.append([*tokenizer.encode(text).ids, 0])
    return documents


def test_the_tokens_are_the_documents_in_order_each_followed_by_the_end_of_text(made, texts):
    tokenizer = Tokenizer.from_file(str(made.tokenizer_path / "tokenizer.json"))
    for split in ("train", "validation"):
        documents = expected_documents(texts, tokenizer, split)
        assert made.tokens(split).tolist() == [token for document in documents for token in document]
        starts = made.document_starts(split).tolist()
        assert starts == [sum(map(len, documents[:index])) for index in range(len(documents))]
        assert made.num_documents(split) == len(documents)
        assert made.num_tokens(split) == len(made.tokens(split))
        # nanoGPT reads the files as `np.memmap(os.path.join(data_dir, 'train.bin'), dtype=np.uint16, mode='r')`.
        file = made.folder / {"train": "train.bin", "validation": "val.bin"}[split]
        assert np.array_equal(np.memmap(file, dtype=np.uint16, mode="r"), made.tokens(split))


def test_the_smallest_type_that_holds_every_id_is_used():
    assert [token_dtype(size).name for size in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]


def test_the_header_has_counts_hashes_and_the_size_of_the_text(made, texts):
    header = made.header
    assert header["dtype"] == "uint16"
    assert header["vocab_size"] == 300
    assert sum(entry["documents"] for entry in header["splits"].values()) == len(texts)
    assert sum(entry["bytes"] for entry in header["splits"].values()) == sum(len(text.encode()) for text in texts)
    for name in ("train.bin", "val.bin", "train.idx", "val.idx", "tokenizer/tokenizer.json"):
        content = (made.folder / name).read_bytes()
        assert header["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_shards_pass_a_full_check_and_their_pickle_is_small(made):
    assert TokenShards.open(made.folder) == made
    assert len(pickle.dumps(made)) < 10_000


def test_damaged_shards_are_refused(made, copied, tmp_path):
    def refused(sentence: str, folder: Path = copied) -> None:
        with pytest.raises(InputError, match=sentence):
            TokenShards.open(folder)

    (copied / "val.idx").rename(copied / "kept")
    refused("val.idx has not the")
    (copied / "kept").rename(copied / "val.idx")
    os.truncate(copied / "train.bin", 100)
    refused(r"train.bin has not the \d+ bytes that its header says: remove the folder and run")
    for content, sentence in (
        ("{", r"meta.json: not valid JSON .* remove the folder"),
        ('{"format": "other"}', "meta.json: expected lit_layers token shards of version 1: remove the folder"),
        ("[]", "meta.json: Input should be an object"),
    ):
        (copied / "meta.json").write_text(content)
        refused(sentence)
    refused(r"holds no token shards \(meta.json is missing\): make them with `lit-layers prepare`", tmp_path / "none")
    with pytest.raises(InputError, match=r"split: expected train or validation, got 'val'"):
        made.tokens("val")
