import hashlib
import pickle
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from lit_layers.data.preparing import TokenShards, token_dtype
from lit_layers.errors import InputError


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made.folder, tmp_path / "shards")


def expected_documents(texts: list[str], tokenizer: Tokenizer, split: str) -> list[list[int]]:
    """What the shards must hold, by another way: one text at a time, split by the hash of its bytes."""
    documents = []
    for text in texts:
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
        if (split == "validation") == (value < 0.2):
            documents.append([*tokenizer.encode(text).ids, 0])
    return documents


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_tokens_are_the_documents_one_after_the_other_each_closed_by_the_end_of_text(made, texts, split):
    tokenizer = Tokenizer.from_file(str(made.tokenizer_path / "tokenizer.json"))
    documents = expected_documents(texts, tokenizer, split)
    assert made.tokens(split).tolist() == [token for document in documents for token in document]
    starts = made.document_starts(split).tolist()
    assert starts == [sum(map(len, documents[:index])) for index in range(len(documents))]
    assert made.num_documents(split) == len(documents)
    assert made.num_tokens(split) == len(made.tokens(split))


def test_a_reader_that_knows_only_flat_files_of_uint16_can_read_them(made):
    """As nanoGPT does it: `np.memmap(os.path.join(data_dir, 'train.bin'), dtype=np.uint16, mode='r')`."""
    data = np.memmap(made.folder / "train.bin", dtype=np.uint16, mode="r")
    tokenizer = Tokenizer.from_file(str(made.tokenizer_path / "tokenizer.json"))
    block = data[: 64 + 1].astype(np.int64)
    assert tokenizer.decode(block.tolist()).startswith(tokenizer.decode(made.tokens("train")[:20].tolist()))
    assert int(data.max()) < made.vocab_size
    assert np.memmap(made.folder / "val.bin", dtype=np.uint16, mode="r")[-1] == made.header["end_of_text_id"]


@pytest.mark.parametrize(("vocab_size", "name"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_narrowest_type_that_holds_every_id_is_taken(vocab_size, name):
    assert token_dtype(vocab_size).name == name
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_the_header_tells_counts_hashes_and_the_size_of_the_text(made, texts):
    header = made.header
    assert header["dtype"] == "uint16"
    assert header["vocab_size"] == 300
    assert sum(entry["documents"] for entry in header["splits"].values()) == len(texts)
    assert sum(entry["bytes"] for entry in header["splits"].values()) == sum(len(text.encode()) for text in texts)
    for name in ("train.bin", "val.bin", "train.idx", "val.idx", "tokenizer/tokenizer.json"):
        content = (made.folder / name).read_bytes()
        assert header["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_shards_pass_a_full_check_and_travel_small(made):
    assert TokenShards.open(made.folder) == made
    assert len(pickle.dumps(made)) < 10_000


def test_a_truncated_file_is_found_at_once(copied):
    with (copied / "train.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(
        InputError, match=r"train.bin has not the \d+ bytes that its header says: remove the folder and run"
    ):
        TokenShards.open(copied)


def test_a_missing_file_is_named(copied):
    (copied / "val.idx").unlink()
    with pytest.raises(InputError, match=r"val.idx has not the"):
        TokenShards.open(copied)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"meta.json: not valid JSON .* remove the folder"),
        (
            '{"format": "other"}',
            r"meta.json: expected lit_layers token shards of version 1: remove the folder",
        ),
        ("[]", "meta.json: Input should be an object"),
    ],
)
def test_a_header_that_cannot_be_read_is_refused(copied, content, message):
    (copied / "meta.json").write_text(content)
    with pytest.raises(InputError, match=message):
        TokenShards.open(copied)


def test_a_folder_without_shards_says_how_to_make_them(tmp_path):
    with pytest.raises(
        InputError, match=r"holds no token shards \(meta.json is missing\): make them with `lit-layers prepare`"
    ):
        TokenShards.open(tmp_path / "nothing")


def test_an_unknown_split_is_refused(made):
    with pytest.raises(InputError, match=r"split: expected train or validation, got 'val'"):
        made.tokens("val")
