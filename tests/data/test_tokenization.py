import json
import subprocess
import sys

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


def test_a_trained_tokenizer_has_the_size_asked_for_and_reads_back_any_text(texts):
    trained = train_bpe(texts, 300)
    assert trained.vocab_size == 300
    assert (trained.end_of_text, trained.end_of_text_id) == (END_OF_TEXT, 0)
    odd = "tabs\t\r\n  spaces \x00 日本 🙂"
    assert trained.tokenizer.decode(trained.tokenizer.encode(odd).ids) == odd


def test_the_first_merge_joins_the_commonest_pair():
    trained = train_bpe(["abab ab abab"] * 3, 258)
    assert json.loads(trained.tokenizer.to_str())["model"]["merges"] == [["a", "b"]]


@pytest.mark.slow
def test_another_process_trains_the_same_tokenizer(texts, tmp_path):
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = (
        "import json, sys; from lit_layers.data.tokenization import *; "
        "print(tokenizer_hash(train_bpe(json.load(open(sys.argv[1])), 300).tokenizer))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "texts.json"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == tokenizer_hash(train_bpe(texts, 300).tokenizer)


def test_a_corpus_too_small_for_the_size_is_refused():
    with pytest.raises(InputError, match=r"pairs for 25[89] tokens only, not for bpe:2000: ask for bpe:25"):
        train_bpe(["abab abab"], 2000)


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:256", "bpe:-5"])
def test_a_size_that_is_none_is_refused(spec):
    with pytest.raises(InputError, match=r"expected bpe:SIZE with a size over 256"):
        bpe_size(spec)


def test_a_saved_tokenizer_is_one_that_transformers_opens(texts, tmp_path):
    from transformers import AutoTokenizer, GPT2Config

    trained = train_bpe(texts, 300)
    save_tokenizer(trained, tmp_path)
    GPT2Config().save_pretrained(tmp_path)  # as in a checkpoint
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened(texts[3])["input_ids"] == trained.tokenizer.encode(texts[3]).ids
    assert opened.eos_token_id == 0
    assert len(opened) == 300


def test_a_tokenizer_saved_and_loaded_by_folder_or_file_is_the_same_one(texts, tmp_path):
    trained = train_bpe(texts, 300)
    save_tokenizer(trained, tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizer_hash(load_tokenizer(str(path)).tokenizer) == tokenizer_hash(trained.tokenizer)
    assert tokenizer_hash(train_bpe(texts, 301).tokenizer) != tokenizer_hash(trained.tokenizer)


def test_the_hash_does_not_see_how_a_tokenizer_is_written(texts):
    parts = json.loads(train_bpe(texts, 300).tokenizer.to_str())
    before = tokenizer_hash(Tokenizer.from_str(json.dumps(parts)))
    parts["pre_tokenizer"]["trim_offsets"] = False
    parts["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    assert tokenizer_hash(Tokenizer.from_str(json.dumps(parts))) == before
    parts["pre_tokenizer"]["add_prefix_space"] = True
    assert tokenizer_hash(Tokenizer.from_str(json.dumps(parts))) != before


def test_a_tokenizer_that_gained_a_token_has_another_hash(texts):
    tokenizer = train_bpe(texts, 300).tokenizer
    before = tokenizer_hash(tokenizer)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["a token"])
    assert tokenizer_hash(tokenizer) != before


def test_a_tokenizer_keeps_what_its_folder_says_about_it(texts, tmp_path):
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


@pytest.mark.parametrize("spec", ["", " ", "no/such/folder", "missing.json", "./here", "a b"])
def test_a_missing_tokenizer_is_named(spec):
    with pytest.raises(InputError, match=f"no tokenizer '{spec}': expected an existing path, a name on the Hub"):
        load_tokenizer(spec)


def test_without_a_network_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"'nobody/nothing' .* cannot be had from the Hub \(.* or give a local folder"):
        load_tokenizer("nobody/nothing")


def test_a_folder_or_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no tokenizer.json .* save it as a fast tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"is no fast tokenizer of the `tokenizers` library"):
        load_tokenizer(str(tmp_path))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"has no token to end a document: name one as eos_token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config.json: not valid JSON .* mend it"):
        load_tokenizer(str(tmp_path))


def test_the_end_of_text_never_arises_from_a_text(tmp_path, texts):
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


@pytest.mark.parametrize("before", [None, "<s> $A", "<s> $A </s>"])
def test_the_end_token_that_a_config_asks_for_ends_each_text(texts, tmp_path, before):
    trained = train_bpe(texts, 300).tokenizer
    trained.add_special_tokens(["<s>", "</s>"])
    plain, (start, end) = trained.encode("a b").ids, [trained.token_to_id(token) for token in ("<s>", "</s>")]
    if before is not None:
        trained.post_processor = processors.TemplateProcessing(
            single=before, special_tokens=[("<s>", start), ("</s>", end)]
        )
    trained.save(str(tmp_path / "tokenizer.json"))
    for asked in (True, False):
        said = {"eos_token": "</s>", "add_eos_token": asked}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        expected = [*([] if before is None else [start]), *plain]
        expected += [end] if asked or before == "<s> $A </s>" else []
        tokenizer = load_tokenizer(str(tmp_path)).tokenizer
        assert tokenizer.encode("a b").ids == expected
        assert tokenizer.encode("a b", add_special_tokens=False).ids == plain
