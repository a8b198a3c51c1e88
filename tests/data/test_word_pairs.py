"""Word pairs: reading files, dropped pairs, and each word alone in the tokens of its tokenizer."""

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, processors

from lit_layers.data.tokenization import load_tokenizer, save_tokenizer, tokenizer_hash, train_bpe
from lit_layers.data.word_pairs import WordPairs
from lit_layers.errors import InputError

NOUNS = [("cat", ["cats"]), ("dog", ["dogs", "hounds"]), ("tree", ["trees"]), ("sheep", ["sheep"])]
ODD = [("mouse", ["mice"]), ("man", ["men"]), ("cat", ["kitten", "kitty"])]
SAME = [("good", ["fine", "well"]), ("bad", ["ill"]), ("big", ["large"])]


def write_bats(path, **changes):
    rows = [
        {"group": group, "category_id": id_, "category": name, "index": n, "word": word, "answers": answers}
        for group, id_, name, pairs in (
            ("Inflectional", "I01", "noun - plural_reg", NOUNS),
            ("Inflectional", "I02", "noun - plural_irreg", ODD),
            ("Lexicographic", "L08", "synonyms - exact", SAME),
        )
        for n, (word, answers) in enumerate(pairs)
    ]
    pd.DataFrame(rows).assign(**changes).to_parquet(path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(["a cat, the cats and a dog: dogs, trees and a tree"] * 9, 275), path)
    return str(path)


@pytest.fixture
def source(tmp_path) -> str:
    return write_bats(tmp_path / "bats.parquet")


def test_the_categories_of_bats_are_separate_and_have_the_first_listed_answers(source, tokenizer):
    found = WordPairs(source, tokenizer).category_pairs()
    assert [(c.id, c.name, c.group) for c in found] == [
        ("I01", "noun - plural_reg", "Inflectional"),
        ("I02", "noun - plural_irreg", "Inflectional"),
        ("L08", "synonyms - exact", "Lexicographic"),
    ]
    assert found[0].pairs == (("cat", "cats"), ("dog", "dogs"), ("tree", "trees"))
    assert found[1].pairs == (("mouse", "mice"), ("man", "men"), ("cat", "kitten"))
    assert found[2].pairs[0] == ("good", "fine")
    assert [category.num_dropped for category in found] == [1, 0, 0]  # sheep and its plural have equal token ids


def test_every_word_is_read_after_a_space_at_its_last_sub_token(source, tokenizer):
    pairs, encode = WordPairs(source, tokenizer), Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode
    words = pairs.words()
    assert len(set(words)) == len(words)
    for category in pairs.category_pairs():
        for side, rows in ((0, category.first), (1, category.second)):
            for pair, row in zip(category.pairs, rows.tolist(), strict=True):
                assert list(words[row].ids) == encode(" " + pair[side]).ids
                assert words[row].position == len(words[row].ids) - 1
    assert encode(" cat").ids != encode("cat").ids, "the space makes no difference"
    assert pairs.category_pairs()[0].first[0] == pairs.category_pairs()[1].first[2]  # one row for cat


def test_the_batches_hold_every_word_once_in_order_and_without_padding(source, tokenizer):
    pairs = WordPairs(source, tokenizer, batch_size=3)
    batches, words = list(pairs), pairs.words()
    assert len(batches) == len(pairs)
    assert max(len(batch["input_ids"]) for batch in batches) == 3
    rows = [tuple(ids.tolist()) for batch in batches for ids in batch["input_ids"]]
    assert rows == [word.ids for word in words]
    assert torch.cat([batch["positions"] for batch in batches]).tolist() == [word.position for word in words]
    assert all(batch["attention_mask"].all() for batch in batches)


def test_special_tokens_are_kept_and_the_position_is_that_of_the_word(source, tokenizer, tmp_path):
    framed = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    framed.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    framed.save(str(tmp_path / "tokenizer.json"))
    plain, found = WordPairs(source, tokenizer), WordPairs(source, str(tmp_path))
    assert [word.ids for word in found.words()] == [(0, *word.ids, 0) for word in plain.words()]
    assert [word.position for word in found.words()] == [len(word.ids) for word in plain.words()]
    assert found.content_hash() != plain.content_hash()


def test_a_tokenizer_that_adds_the_space_itself_gets_none(source, tmp_path):
    letters = sorted({letter for pair in SAME for word in (pair[0], pair[1][0]) for letter in word})
    vocabulary = {token: n for n, token in enumerate(["</s>", "<unk>", "\u2581", *letters])}
    own = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    own.save(str(tmp_path / "tokenizer.json"))
    words = WordPairs(source, str(tmp_path), categories=("L08",)).words()
    space = own.token_to_id("\u2581")
    assert all(word.ids[0] == space and space not in word.ids[1:] for word in words)


def test_categories_are_chosen_by_id_name_or_group(source, tokenizer):
    chosen = {("I01",): ["I01"], ("noun - plural_irreg",): ["I02"], ("Inflectional",): ["I01", "I02"]}
    for categories, expected in (chosen | {("L08", "I01"): ["I01", "L08"]}).items():
        pairs = WordPairs(source, tokenizer, categories=categories)
        assert [category.id for category in pairs.category_pairs()] == expected


def test_tables_with_two_words_per_row_are_read_in_any_format(tmp_path, tokenizer):
    pairs = [("cat", "cats"), ("dog", "dogs"), ("nan", "null"), ("tree", "trees/wood")]
    table = pd.DataFrame(pairs, columns=["word1", "word2"])
    table.to_parquet(tmp_path / "plurals.parquet", index=False)
    for ending, separator in (("csv", ","), ("tsv", "\t")):
        table.to_csv(tmp_path / f"plurals.{ending}", sep=separator, index=False)
    for ending in ("parquet", "csv", "tsv"):
        (found,) = WordPairs(str(tmp_path / f"plurals.{ending}"), tokenizer).category_pairs()
        assert (found.name, found.id, found.group) == ("plurals", None, None)
        assert found.pairs == (*pairs[:3], ("tree", "trees"))


def test_the_hash_depends_on_the_tokens_the_pairs_and_the_batches(source, tokenizer, tmp_path):
    def digest(source=source, **options):
        return WordPairs(source, tokenizer, **options).content_hash()

    turned = write_bats(tmp_path / "turned.parquet", category=["x"] * 4 + ["y"] * 6)
    others = [digest(batch_size=5), digest(categories=("I01", "L08")), digest(turned)]
    assert digest() == digest() == digest(categories=("I01", "I02", "L08"))
    assert len({digest(), *others}) == 4
    assert WordPairs(source, tokenizer).tokenizer_hash() == tokenizer_hash(load_tokenizer(tokenizer).tokenizer)


def test_an_invalid_file_of_word_pairs_is_refused_in_one_sentence(tmp_path, source, tokenizer):
    def refusal(name, text=None, **options):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(InputError) as caught:
            WordPairs(str(path), tokenizer, **options).words()
        return str(caught.value).replace(f"{tmp_path}/", "")

    with pytest.raises(InputError, match="batch_size: expected at least 1, got 0"):
        WordPairs("nowhere.csv", "nowhere", batch_size=0)
    assert refusal("none.csv").startswith("none.csv is no table of word pairs (")
    assert refusal("b.parquet", "x").startswith("b.parquet is no table of word pairs (")
    assert refusal("c.csv", "").startswith("c.csv is no table of word pairs (")
    expected = "expected the columns word and answers or word1 and word2, it has a, b"
    assert expected in refusal("e.csv", "a,b\n1,2\n")
    odd = refusal("g.csv", "word1,word2\nx,y\nu, \n")
    assert "g.csv, row 1: expected two words in 'word1' and 'word2', got ('u', '')" in odd
    few = refusal("h.csv", "word1,word2\nx,y\nu,v\nw,w\n")
    assert "category 'h' has 2 pairs of different token ids, expected 3: leave it out" in few
    assert refusal("bats.parquet", categories=("I03",)) == "categories: bats.parquet has no 'I03'; it has I01, I02, L08"


@pytest.mark.soak
@pytest.mark.realdata
def test_real_files_of_pairs_are_read_with_real_tokenizers(realdata):
    bats, others = (str(realdata / "analogies" / f"{name}.parquet") for name in ("bats3", "counterfactual_word_pairs"))
    for name in ("gpt2", "gpt_neox_20b"):
        found = WordPairs(bats, str(realdata / "tokenizers" / name)).category_pairs()
        assert len(found) == 38
        assert {c.id: c.num_dropped for c in found if c.num_dropped} == {"I02": 2}  # series, species
        assert found[0].pairs[:2] == (("album", "albums"), ("application", "applications"))
        regular, irregular = found[:2]
        assert (regular.id, irregular.id) == ("I01", "I02")
        assert not set(regular.pairs) & set(irregular.pairs)
    found = WordPairs(others, str(realdata / "tokenizers" / "gpt2")).category_pairs()
    assert (len(found), found[0].name, found[0].pairs[0]) == (25, "3pSg - Ved", ("adds", "added"))
    assert sum(len(c.pairs) + c.num_dropped for c in found) == 1922
