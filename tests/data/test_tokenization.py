import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from lit_layers.data.preparing import prepare
from lit_layers.data.tokenization import (
    END_OF_TEXT,
    bpe_size,
    load_tokenizer,
    save_tokenizer,
    tokenizer_hash,
    train_bpe,
)
from lit_layers.errors import InputError


def test_a_trained_tokenizer_has_the_requested_size_and_decodes_any_text(texts):
    trained = train_bpe(texts, 300)
    assert trained.vocab_size == 300
    assert (trained.end_of_text, trained.end_of_text_id) == (END_OF_TEXT, 0)
    odd = "tabs\t\r\n  spaces \x00 日本 🙂"
    assert trained.tokenizer.decode(trained.tokenizer.encode(odd).ids) == odd
    long = train_bpe(["ab" * 1500] * 3, 258)  # read in pieces of 1,000 characters, in which "ab" is most frequent
    assert json.loads(long.tokenizer.to_str())["model"]["merges"] == [["a", "b"]]


def test_an_invalid_size_and_a_corpus_too_small_for_it_are_refused():
    for spec in ("bpe:", "bpe:many"):
        with pytest.raises(InputError, match=r"expected bpe:SIZE with a size over 256"):
            bpe_size(spec)
    assert bpe_size("bpe:257") == 257
    with pytest.raises(InputError, match=r"pairs for 25[89] tokens only, not for bpe:2000: ask for bpe:25"):
        train_bpe(["abab abab"], 2000)


def test_transformers_opens_a_saved_tokenizer(texts, tmp_path):
    from transformers import AutoTokenizer, GPT2Config

    trained = train_bpe(texts, 300)
    save_tokenizer(trained, tmp_path)
    GPT2Config().save_pretrained(tmp_path)  # as in a checkpoint
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened(texts[3])["input_ids"] == trained.tokenizer.encode(texts[3]).ids
    assert opened.eos_token_id == 0
    assert len(opened) == 300


def test_a_saved_tokenizer_is_the_same_when_loaded_by_folder_or_file(texts, tmp_path):
    trained = train_bpe(texts, 300)
    save_tokenizer(trained, tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizer_hash(load_tokenizer(str(path)).tokenizer) == tokenizer_hash(trained.tokenizer)
    assert tokenizer_hash(train_bpe(texts, 301).tokenizer) != tokenizer_hash(trained.tokenizer)


def test_the_hash_depends_only_on_what_changes_the_ids(texts):
    tokenizer = train_bpe(texts, 300).tokenizer
    parts, before = json.loads(tokenizer.to_str()), tokenizer_hash(tokenizer)
    parts["pre_tokenizer"]["trim_offsets"] = False
    parts["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    assert tokenizer_hash(Tokenizer.from_str(json.dumps(parts))) == before
    parts["pre_tokenizer"]["add_prefix_space"] = True
    assert tokenizer_hash(Tokenizer.from_str(json.dumps(parts))) != before
    tokenizer.add_tokens(["a token"])
    assert tokenizer_hash(tokenizer) != before


def test_a_saved_copy_of_a_tokenizer_keeps_its_config(texts, tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    save_tokenizer(train_bpe([*texts, "<stop>"], 300), source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(str(source / "tokenizer.json"))
    config = {"eos_token": {"content": "<stop>"}, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 7}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(str(source))
    assert (found.end_of_text, found.end_of_text_id, found.vocab_size) == ("<stop>", 300, 301)
    save_tokenizer(found, copy)
    assert json.loads((copy / "tokenizer_config.json").read_text()) == config


def test_an_invalid_tokenizer_is_refused(tmp_path, monkeypatch):
    def refused(sentence: str, spec: str = str(tmp_path)) -> None:
        with pytest.raises(InputError, match=sentence):
            load_tokenizer(spec)

    for spec in ("", " ", "no/such/folder", "missing.json", "./here", "a b"):
        refused(f"no tokenizer '{spec}': expected an existing path, a name on the Hub", spec)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refused(r"'nobody/nothing' .* cannot be had from the Hub \(.* or give a local folder", "nobody/nothing")
    refused(r"has no tokenizer.json .* save it as a fast tokenizer")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused("is no fast tokenizer of the `tokenizers` library")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    refused("has no token to end a document: name one as eos_token")
    (tmp_path / "tokenizer_config.json").write_text("{")
    refused("tokenizer_config.json: not valid JSON .* mend it")


def test_no_text_produces_the_end_of_text_token(tmp_path, texts):
    rows = ["a<|endoftext|>b", "c", *texts] * 3
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    shards = prepare(str(tmp_path / "corpus.jsonl"), "bpe:300", tmp_path / "shards", validation=0.5)
    ends = [np.flatnonzero(shards.tokens(split) == 0) + 1 for split in ("train", "validation")]
    starts = [shards.document_starts(split).tolist() for split in ("train", "validation")]
    assert [[0, *each[:-1]] for each in ends] == starts


@pytest.mark.soak
@pytest.mark.realdata
def test_the_real_tokenizers_give_the_published_ids(realdata, tmp_path):
    for name, ids in (("gpt2", [15496, 995]), ("gpt_neox_20b", [12092, 1533])):
        found = load_tokenizer(str(realdata / "tokenizers" / name))
        assert found.end_of_text == END_OF_TEXT
        assert found.tokenizer.encode("Hello world").ids == ids
        save_tokenizer(found, tmp_path / name)
        assert tokenizer_hash(load_tokenizer(str(tmp_path / name)).tokenizer) == tokenizer_hash(found.tokenizer)
    assert load_tokenizer(str(realdata / "tokenizers" / "gpt2" / "tokenizer.json")).vocab_size == 50257


def test_the_end_token_that_a_config_requests_ends_each_text(texts, tmp_path):
    trained = train_bpe(texts, 300).tokenizer
    trained.add_special_tokens(["<s>", "</s>"])
    plain, (start, end) = trained.encode("a b").ids, [trained.token_to_id(token) for token in ("<s>", "</s>")]
    for before in (None, "<s> $A", "<s> $A </s>"):
        if before is not None:
            tokens = [("<s>", start), ("</s>", end)]
            trained.post_processor = processors.TemplateProcessing(single=before, special_tokens=tokens)
        trained.save(str(tmp_path / "tokenizer.json"))
        for asked in (True, False):
            config = {"eos_token": "</s>", "add_eos_token": asked}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
            expected = [*([] if before is None else [start]), *plain]
            expected += [end] if asked or before == "<s> $A </s>" else []
            tokenizer = load_tokenizer(str(tmp_path)).tokenizer
            assert tokenizer.encode("a b").ids == expected, (before, asked)
            assert tokenizer.encode("a b", add_special_tokens=False).ids == plain
