import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from lit_layers.data import preparing, tokenization
from lit_layers.data.preparing import TokenShards, prepare, prepared
from lit_layers.errors import InputError
from tests.support.forked import run_forked


@pytest.fixture
def small_steps(monkeypatch):
    """Make the chunks tiny."""
    monkeypatch.setattr(preparing, "CHUNK_BYTES", 2**12)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def tokenizer_path(made: TokenShards) -> str:
    return str(made.tokenizer_path)


def test_the_size_of_chunks_does_not_change_the_result(made, jsonl, tmp_path, small_steps):
    again = prepare(str(jsonl), "bpe:300", tmp_path / "again", validation=0.2)
    assert content(again.folder) == content(made.folder)


class Crash(BaseException):
    """A power failure."""


def test_an_interrupted_run_leaves_no_shards_and_the_next_one_writes_the_same_files(made, jsonl, tmp_path, monkeypatch):
    def cut(*args, **options):
        raise Crash

    for owner, name in ((preparing, "digest"), (tokenization, "save_tokenizer"), (Path, "rename")):
        out = tmp_path / name / "cut"
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, cut)
            patch.setattr(preparing.shutil, "rmtree", lambda *args, **options: None)  # a killed process removes nothing
            with pytest.raises(Crash):
                prepare(str(jsonl), "bpe:300", out, validation=0.2)
        with pytest.raises(InputError, match="holds no token shards"):
            TokenShards.open(out)
        prepare(str(jsonl), "bpe:300", out, validation=0.2)
        assert content(out) == content(made.folder)
        assert {path.name for path in out.parent.iterdir()} == {"cut", ".cut.lock"}


def test_tokenized_documents_are_not_tokenized_again(made, jsonl, tmp_path, monkeypatch, small_steps):
    class Encoder:
        def __init__(self, inner) -> None:
            self.inner = inner

        def encode_batch_fast(self, texts, **options):
            if len(tokenized) == num_calls:
                raise Crash
            tokenized.append(len(texts))
            return self.inner.encode_batch_fast(texts, **options)

    monkeypatch.setattr(preparing, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(preparing.copy, "deepcopy", lambda inner: Encoder(inner))
    for cut in (1, 2):
        out, tokenized, num_calls = tmp_path / str(cut), [], cut
        with pytest.raises(Crash):
            prepare(str(jsonl), "bpe:300", out, validation=0.2)
        assert not out.exists()
        num_calls = None
        prepare(str(jsonl), "bpe:300", out, validation=0.2)
        assert content(out) == content(made.folder)
        assert sum(tokenized) == made.num_documents("train") + made.num_documents("validation")


def test_a_corpus_that_changed_since_an_interrupted_run_is_prepared_again(texts, tmp_path, monkeypatch, small_steps):
    path, out = write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out"
    monkeypatch.setattr(preparing, "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            prepare(str(path), "bpe:300", out, validation=0.2)
    assert (tmp_path / ".out.draft" / preparing.PROGRESS).is_file()
    write_jsonl(path, [texts[0][::-1], *texts[1:]])
    whole = prepare(str(path), "bpe:300", out, validation=0.2)
    assert whole.checksum == prepare(str(path), "bpe:300", tmp_path / "again", validation=0.2).checksum


PRINT = "print(prepare(sys.argv[1], 'bpe:300', sys.argv[2], validation=0.2).checksum)\n"


def start_script(code: str, *arguments: Path) -> subprocess.Popen[str]:
    code = f"import sys\nfrom lit_layers.data.preparing import prepare\n{code}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.soak
def test_data_loaders_of_a_script_that_prepares_print_nothing(made, jsonl, tmp_path):
    loaders = "from torch.utils.data import DataLoader\nprint(len([*DataLoader(range(4), num_workers=2)]))\n"
    printed, errors = start_script(f"print('once')\n{PRINT}{loaders}", jsonl, tmp_path / "out").communicate()
    assert printed.split() == ["once", made.checksum, "4"]
    assert errors == ""


@pytest.mark.slow
def test_a_fork_of_a_process_that_has_prepared_can_prepare(jsonl, tmp_path):
    for size in (280, 290):
        prepare(str(jsonl), f"bpe:{size}", tmp_path / str(size), validation=0.2)

    def again() -> int:
        return int(not prepare(str(jsonl), "bpe:300", tmp_path / "fork", validation=0.2).checksum)

    assert run_forked(again, kill_after=120) == 0  # a negative signal number if it hangs


@pytest.mark.soak
def test_one_of_two_processes_for_one_folder_works_and_both_get_the_result(made, jsonl, tmp_path):
    both = [start_script(PRINT, jsonl, tmp_path / "out") for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [made.checksum] * 2
    assert content(tmp_path / "out") == content(made.folder)


def test_documents_of_validation_are_removed_from_training_and_counted(texts, tmp_path, made):
    write_jsonl(tmp_path / "in" / "validation.jsonl", [*texts[:5], " \n"])
    write_jsonl(tmp_path / "in" / "train.jsonl", [texts[2], *texts[5:50], texts[0], texts[7], ""])
    shards = prepare(str(tmp_path / "in"), tokenizer_path(made), tmp_path / "out")
    assert shards.header["left_out"] == {"duplicate": 2, "empty": 2}
    assert shards.num_documents("validation") == 5
    assert shards.num_documents("train") == 45 + 1  # a text that occurs twice in training stays twice


def test_equal_documents_of_one_stream_are_in_one_split(texts, tmp_path, made):
    path = write_jsonl(tmp_path / "in.jsonl", texts * 2)
    shards = prepare(str(path), tokenizer_path(made), tmp_path / "out", validation=0.2)
    documents = {}
    for split in ("train", "validation"):
        tokens, starts = shards.tokens(split).tolist(), [*shards.document_starts(split), shards.num_tokens(split)]
        documents[split] = {tuple(tokens[a:b]) for a, b in pairwise(starts)}
    assert not documents["train"] & documents["validation"]
    assert shards.num_documents("validation") == 2 * made.num_documents("validation")


def test_max_documents_limits_the_documents_that_are_read(jsonl, made, tmp_path):
    shards = prepare(str(jsonl), tokenizer_path(made), tmp_path / "out", validation=0.2, max_documents=50)
    assert shards.tokens("train").tolist() == made.tokens("train")[: shards.num_tokens("train")].tolist()


def test_the_corpus_hash_depends_on_the_text_and_not_on_the_tokenizer(texts, made, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    same = prepare(str(path), "bpe:290", tmp_path / "same", validation=0.2)
    assert same.corpus_hash == made.corpus_hash
    assert same.tokenizer_hash != made.tokenizer_hash
    path = write_jsonl(tmp_path / "other.jsonl", [texts[0] + "!", *texts[1:]])
    assert prepare(str(path), "bpe:290", tmp_path / "other", validation=0.2).corpus_hash != made.corpus_hash


def test_invalid_requests_are_refused_and_leave_the_folder_unchanged(jsonl, texts, tmp_path, made):
    one = write_jsonl(tmp_path / "in.jsonl", texts[:1])
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("precious")
    out, tokenizer = tmp_path / "out", tokenizer_path(made)
    other = "holds shards with validation 0.2, and 0.1 was asked for: choose another"
    cases = [
        (one, tokenizer, out, {}, r"the (train|validation) split of .*in.jsonl is empty \(1 documents in all\)"),
        (jsonl, "bpe:300", out, {"max_documents": 0}, "max_documents: expected at least 1"),
        (jsonl, "bpe:300", tmp_path / "thesis", {}, r"not empty \(it holds thesis.tex\) and no token shards: choose"),
        (jsonl, "bpe:300", made.folder, {"validation": 0.1}, other),
    ]
    for source, name, folder, options, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            prepare(str(source), name, folder, **options)
        assert not out.exists()
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "precious"
    assert prepare(str(jsonl), "bpe:300", out, validation=0.2).checksum == made.checksum, "the folder is free"


def test_a_full_disk_is_reported(jsonl, made, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(preparing, "sync", full)
        with pytest.raises(InputError, match=r"No space left on device.* or run again"):
            prepare(str(jsonl), "bpe:300", tmp_path / "out", validation=0.2)
    assert prepare(str(jsonl), "bpe:300", tmp_path / "out", validation=0.2).checksum == made.checksum


def test_a_corpus_is_prepared_once_and_then_read_from_the_cache(texts, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", texts * 3)
    first = prepared(str(path), "bpe:300")
    assert first.folder.is_relative_to(os.environ["LIT_LAYERS_CACHE"])
    with monkeypatch.context() as again:
        again.setattr(preparing, "_write", lambda *args: pytest.fail("prepared again"))
        assert prepared(str(path), "bpe:300") == prepare(str(path), "bpe:300", first.folder) == first
    assert prepared(str(path), "bpe:299").folder != first.folder
    write_jsonl(path, texts * 4)
    assert prepared(str(path), "bpe:300").folder != first.folder


def test_a_prepared_folder_is_a_corpus_only_with_its_own_tokenizer(made, tmp_path, texts):
    assert prepared(str(made.folder), "bpe:300") == made
    assert prepared(str(made.folder), tokenizer_path(made)) == made
    for other in ("bpe:299", tokenizer_path(prepared(str(write_jsonl(tmp_path / "in.jsonl", texts)), "bpe:280"))):
        with pytest.raises(InputError, match=r"with the tokenizer 'bpe:300', not .* name .*tokenizer, or prepare"):
            prepared(str(made.folder), other)


@pytest.mark.soak
@pytest.mark.realdata
def test_wikitext2_with_the_gpt2_tokenizer_has_the_known_number_of_tokens(realdata, tmp_path):
    source, gpt2 = str(realdata / "wikitext2"), str(realdata / "tokenizers" / "gpt2")
    shards = prepare(source, gpt2, tmp_path / "out", max_documents=100)
    assert [shards.num_documents(split) for split in ("train", "validation")] == [100, 60]
    # The notes of the data count 258,659 tokens. Ours have an additional end of text per document.
    assert shards.num_tokens("validation") == 258_659 + 60
    assert TokenShards.open(shards.folder).header["dtype"] == "uint16"
