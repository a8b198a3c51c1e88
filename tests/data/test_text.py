import pytest
import torch

from lit_layers.data.batches import EvalText
from lit_layers.errors import InputError


def make(shards, **options) -> EvalText:
    options = {"split": "train", "num_sequences": 20, "num_tokens": 12, "batch_size": 8, **options}
    return EvalText(str(shards.folder), "bpe:300", **options)


def documents(shards, split: str = "train") -> list[list[int]]:
    end, found = shards.header["end_of_text_id"], [[]]
    for token in shards.tokens(split).tolist():
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    return found[:-1]


def all_windows(shards, size: int, split: str = "train") -> list[tuple[int, ...]]:
    """Return every window: within a document, from its first token on, without the incomplete rest."""
    return [tuple(d[i : i + size]) for d in documents(shards, split) for i in range(0, len(d) - size + 1, size)]


def test_all_windows_together_equal_the_documents_cut_by_hand(made):
    expected = all_windows(made, 12)
    windows = make(made, num_sequences=len(expected)).windows()
    assert sorted(map(tuple, windows.tolist())) == sorted(expected)


def test_a_drawn_window_is_inside_one_document_and_none_is_drawn_twice(made):
    positions = {window: index for index, window in enumerate(all_windows(made, 12))}
    drawn = [positions[tuple(row)] for row in make(made).windows().tolist()]
    assert len(set(drawn)) == 20
    assert made.header["end_of_text_id"] not in make(made).windows()


def test_batches_are_int64_with_a_full_mask_and_equal_on_a_second_iteration(made):
    text = make(made)
    assert [batch["input_ids"].shape for batch in text] == [(8, 12), (8, 12), (4, 12)]
    assert len(text) == 3
    first = [batch["input_ids"].clone() for batch in text]
    for batch in text:
        assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
        assert batch["attention_mask"].bool().all()
        batch["input_ids"].zero_()
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(first, text, strict=True))


def test_more_sequences_keep_the_earlier_ones_and_another_seed_draws_others(made):
    few, many = make(made).windows(), make(made, num_sequences=40).windows()
    assert torch.equal(many[:20], few)
    assert not torch.equal(make(made, seed=1).windows(), few)


def test_disjoint_shares_of_documents_have_no_document_in_common(made):
    total = documents(made)
    half = len(total) // 2
    first = all_windows(made, 12)[: sum(len(d) // 12 for d in total[:half])]
    low = make(made, documents=(0.0, half / len(total) + 1e-9), num_sequences=len(first)).windows()
    assert sorted(map(tuple, low.tolist())) == sorted(first)
    rest = len(all_windows(made, 12)) - len(first)
    high = make(made, documents=(half / len(total) + 1e-9, 1.0), num_sequences=rest).windows()
    assert sorted(map(tuple, torch.cat([low, high]).tolist())) == sorted(all_windows(made, 12))


def test_the_content_hash_depends_on_the_data_and_the_batches(made):
    options = [{}, {"seed": 1}, {"num_tokens": 13}, {"batch_size": 4}, {"num_sequences": 19}]
    assert len({make(made, **each).content_hash() for each in options}) == 5
    assert make(made).content_hash() == make(made).content_hash()
    assert len(make(made).content_hash()) == 16


def test_too_few_windows_are_refused_with_their_number(made):
    total = len(all_windows(made, 12))
    with pytest.raises(InputError, match=rf"has {total} windows of 12 .* of train, and num_sequences is {total + 1}"):
        make(made, num_sequences=total + 1).windows()
    with pytest.raises(InputError, match="has 0 windows of 5000 tokens"):
        make(made, num_tokens=5000).windows()


def test_origins_give_the_document_of_each_window(made):
    text, whole = make(made), [found for found in documents(made) if len(found) >= 12]
    for window, number in zip(text.windows().tolist(), text.origins().tolist(), strict=True):
        assert " ".join(map(str, window)) in " ".join(map(str, whole[number]))


def test_the_constructor_reads_nothing():
    text = EvalText("no such corpus", "no such tokenizer")
    assert len(text) == 4
    with pytest.raises(InputError, match="no corpus"):
        next(iter(text))


def test_options_out_of_range_are_refused_at_once():
    cases = [
        ({"documents": (0.5, 0.5)}, r"documents: expected a share .* got \(0.5, 0.5\)"),
        ({"documents": (-0.1, 1)}, "documents: expected a share"),
        ({"num_sequences": 0}, "num_sequences: expected at least 1, got 0"),
        ({"num_tokens": 0}, "num_tokens: expected at least 1"),
        ({"num_tokens": 0.5}, "num_tokens: expected a whole number, got 0.5"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
    ]
    for options, message in cases:
        with pytest.raises(InputError, match=message):
            EvalText("python", "bpe:2048", **options)


@pytest.mark.soak
def test_the_embedded_corpus_gives_windows_of_code():
    start = EvalText("python", "bpe:2048", num_sequences=500, documents=(0.0, 0.6))
    end = EvalText("python", "bpe:2048", num_sequences=100, documents=(0.6, 1.0))
    assert start.windows().shape == (500, 128)
    assert int(torch.cat([start.windows(), end.windows()]).max()) < 2048
    seen = {tuple(row) for row in start.windows().tolist()}
    assert sum(tuple(row) in seen for row in end.windows().tolist()) < 10
