import pickle

import pytest
import torch

from lit_layers.data.batches import TokenBlocks
from lit_layers.errors import InputError
from lit_layers.training import LitTextData


def test_the_blocks_tile_the_split_and_predict_every_token_once(made):
    blocks = TokenBlocks(made, "train", num_tokens=16)
    tokens = torch.tensor(made.tokens("train").tolist())
    assert len(blocks) == (len(tokens) - 1) // 16
    targets = torch.cat([blocks[index]["input_ids"][1:] for index in range(len(blocks))])
    inputs = torch.cat([blocks[index]["input_ids"][:-1] for index in range(len(blocks))])
    assert torch.equal(targets, tokens[1 : len(targets) + 1])
    assert torch.equal(inputs, tokens[: len(inputs)])
    assert targets.dtype == torch.int64


def test_the_last_block_is_complete_and_invalid_indices_and_sizes_are_refused(made):
    total = made.num_tokens("validation")
    blocks = TokenBlocks(made, "validation", num_tokens=total - 1)
    assert len(blocks) == 1
    assert blocks[0]["input_ids"].shape == (total,)
    for index in (1, -1):
        with pytest.raises(IndexError, match=rf"block {index} of 1"):
            blocks[index]
    too_few = rf"{total} tokens in the validation split of .* are too few for one block of {total} \+ 1"
    with pytest.raises(InputError, match=too_few):
        TokenBlocks(made, "validation", num_tokens=total)
    with pytest.raises(InputError, match="num_tokens: expected at least 1"):
        TokenBlocks(made, num_tokens=0)


def test_pickled_blocks_do_not_contain_their_tokens(made):
    blocks = TokenBlocks(made, num_tokens=128)
    first = blocks[0]["input_ids"]
    assert 2 * made.num_tokens("train") > 20_000  # bytes
    sent = pickle.dumps(blocks)
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent)[0]["input_ids"], first)


def test_shuffled_blocks_hold_the_same_tokens_each_in_its_own_order(made):
    data = [
        LitTextData(str(made.folder), str(made.tokenizer_path), num_tokens=32, shuffle_tokens=shuffle, seed=3)
        for shuffle in (False, True, True)
    ]
    for each in data:
        each.setup("fit")
    plain, shuffled, again = ([each.train[index]["input_ids"] for index in range(len(each.train))] for each in data)
    assert all(torch.equal(one, other) for one, other in zip(shuffled, again, strict=True))
    assert all(torch.equal(one.sort()[0], other.sort()[0]) for one, other in zip(plain, shuffled, strict=True))
    moved = torch.cat([one != other for one, other in zip(plain, shuffled, strict=True)]).double().mean()
    assert moved > 0.8  # equal tokens of a block may be exchanged without a visible change
    orders = {tuple(block.argsort(stable=True).tolist()) for block in shuffled}
    assert len(orders) == len(shuffled)
    assert torch.equal(*(each.validation[0]["input_ids"] for each in data[:2]))
    assert data[1].describe() == {**data[0].describe(), "shuffle_tokens": True}
