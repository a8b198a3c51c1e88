import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_layers.data import text_sources
from lit_layers.data.preparing import prepared
from lit_layers.data.text_sources import LocalText, PythonSources, open_source
from lit_layers.errors import InputError
from tests.support.fake_hub import FakeHub


def ids(source, split):
    return [name for name, _ in source.documents(split)]


def held_out(name: str, share: float) -> bool:
    """Compute the split rule independently: the first 64 bits of BLAKE2b, little-endian, as a fraction."""
    value = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return value / 2**64 < share


def write_library(root: Path, num_files: int = 120) -> Path:
    """Write a stand-in for a standard library that is just large enough."""
    for index in range(num_files):
        path = root / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# module {index}\n" + "x = 1\n" * 1600)
    return root


def test_the_embedded_corpus_has_sources_and_topics_and_a_tenth_is_held_out_by_path():
    source: Any = open_source("python")
    train, validation = dict(source.documents("train")), dict(source.documents("validation"))
    documents = train | validation
    assert sum(map(len, documents.values())) > 5e6
    assert len(documents) == len(train) + len(validation)
    assert all(held_out(name, 0.1) == (name in validation) for name in documents)
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics/lambda"} <= set(documents)
    parts = {part for name in documents for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idle_test", "lib2to3", "encodings"}
    assert not any("_sysconfigdata" in name for name in documents)
    root = Path(sysconfig.get_paths()["stdlib"])
    assert documents["argparse.py"] == (root / "argparse.py").read_text(encoding="utf-8")


def test_the_split_of_a_library_does_not_depend_on_its_path(tmp_path):
    first = PythonSources(validation=0.3, root=write_library(tmp_path / "a"))
    second = PythonSources(validation=0.3, root=write_library(tmp_path / "b" / "c"))
    assert first.describe() == second.describe()
    assert ids(first, "validation") == ids(second, "validation")
    assert 0.15 < len(ids(first, "validation")) / 120 < 0.45
    names = [Path(name) for name in ids(first, "train")]
    assert names == sorted(names)
    (tmp_path / "a" / "package0" / "module0.py").write_text("shorter\n")
    assert PythonSources(validation=0.3, root=tmp_path / "a").describe() != second.describe()


def test_a_separator_line_divides_a_text_file(tmp_path):
    path, text = tmp_path / "a.txt", "one\n\nstill one\n<|endoftext|>\ntwo\n<|endoftext|>\n"
    path.write_text(text + "\n")
    assert [*open_source(str(path)).read(None)] == ["one\n\nstill one", "two", ""]
    path.write_text(text)
    blank = [*open_source(str(path), separator="").read(None)]
    assert blank == ["one", "still one\n<|endoftext|>\ntwo\n<|endoftext|>"]


def test_every_text_file_of_a_folder_is_a_document_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a.txt", "c/d.txt", ".hidden/e.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"I am {name}\n")
    source = open_source(str(tmp_path))
    assert [*source.read(None)] == ["I am a.txt", "I am b.txt", "I am c/d.txt"]


def test_a_very_long_text_document_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "LONGEST", 20)
    (tmp_path / "a.txt").write_text("".join(f"line {index}\n" for index in range(9)))
    pieces = [*open_source(str(tmp_path)).read(None)]
    assert pieces == ["line 0\nline 1\nline 2", "line 3\nline 4\nline 5", "line 6\nline 7\nline 8"]


def test_files_of_all_formats_are_read_in_the_order_of_names(tmp_path):
    texts = [f"document {index} ünicode" for index in range(23)]
    pq.write_table(pa.table({"id": range(24), "text": [*texts, None]}), tmp_path / "a.parquet", row_group_size=5)
    rows = [*(text + " b" for text in texts), None]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows) + "\n", "utf-8")
    (tmp_path / "c.txt").write_text("\n<|endoftext|>\n".join(t + " c" for t in texts), "utf-8")
    found = [*open_source(str(tmp_path)).read(None)]
    assert found == [*texts, "", *rows[:-1], "", *(text + " c" for text in texts)], "a null is an empty document"


def write_named(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / f"{name}.txt").write_text(f"in {name}")
    return str(folder)


def test_files_named_after_splits_are_these_splits_and_others_are_one_stream(tmp_path):
    pairs = [("train", "validation"), ("train-00000", "val"), ("train/x", "dev/x"), ("train_a", "valid.1")]
    for number, (train, validation) in enumerate(pairs):
        folder = write_named(tmp_path / str(number), train, validation, "test")
        source = open_source(folder)
        assert source.splits == ("validation", "train")
        assert [*source.read("train")] == [f"in {train}"]
        assert [*source.read("validation")] == [f"in {validation}"]
        with pytest.raises(InputError, match="brings its own validation split .*: leave validation out"):
            open_source(folder, validation=0.1)
    for names in (("training_manual", "trainer"), ("trainer", "valid"), ("train", "more"), ("train", "test")):
        assert open_source(write_named(tmp_path / "-".join(names), *names)).splits == (None,)


def test_a_missing_corpus_and_a_share_out_of_range_are_refused(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("No corpus, though it lies in the working directory.")
    monkeypatch.chdir(tmp_path)
    for spec in ("", " ", "nowhere", "missing/file.txt", "/no/such/folder", "a/b/c"):
        with pytest.raises(InputError, match=f"no corpus '{spec}': expected python, openwebtext, wikitext, an exis"):
            open_source(spec)
    with pytest.raises(InputError, match=r"validation must lie between 0 and 1 .* not 1.5"):
        open_source("python", validation=1.5)
    with pytest.raises(InputError, match=r"Skylion007/openwebtext' .* be had from the Hub \(OfflineMode.* check"):
        open_source("openwebtext").pin()


def read_all(path: Path, **options) -> list[str]:
    return list(LocalText(path, **options).read(None))


def test_damaged_text_is_reported_with_its_position(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffd\n")
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n{"text": \n')
    (tmp_path / "c.jsonl").write_text('{"body": "good", "id": 1}\n')
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "image.png").write_bytes(b"")
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "d.parquet")
    (tmp_path / "e.parquet").write_bytes((tmp_path / "d.parquet").read_bytes()[:-20])
    cases = [
        ("a.txt", {}, r"a.txt is not UTF-8 \(byte 6 is 0xff\): convert it first"),
        ("b.jsonl", {}, r"b.jsonl, line 2: expected a JSON object"),
        ("c.jsonl", {}, "has no column 'text': it has body, id"),
        ("d.parquet", {}, "has no column 'text': it has body, id"),
        ("d.parquet", {"column": "id"}, r"column 'id' of .* holds int, not text"),
        ("e.parquet", {}, r"e.parquet is no parquet file, or only a part of one"),
        ("d", {}, r"is or holds no .txt, .jsonl, .parquet file"),
    ]
    for name, options, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            read_all(tmp_path / name, **options)


def test_a_byte_order_mark_is_removed_and_half_a_surrogate_pair_is_a_question_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n<|endoftext|>\ntwo \xef\xbb\xbf")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "a\\ud800b"}\n')
    assert read_all(tmp_path / "a.txt") == ["one", "two \ufeff"]
    assert read_all(tmp_path / "b.jsonl") == ["one", "a?b"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hub: parquet files on disk, streamed by the real `datasets`."""
    import datasets

    real, seen = datasets.load_dataset, SimpleNamespace(folders=[], listed={})  # files of each revision

    def make(**splits: list[list[str]]) -> SimpleNamespace:
        files = {split: [str(tmp_path / f"{split}-{n}.parquet") for n in range(len(splits[split]))] for split in splits}
        for split, parts in splits.items():
            for path, texts in zip(files[split], parts, strict=True):
                pq.write_table(pa.table({"text": texts}), path, row_group_size=3)

        def load_dataset(path, *, split, revision, streaming, name=None, data_dir=None):
            seen.folders.append(data_dir)
            if name not in (None, "wikitext-103-raw-v1"):
                raise ValueError(f"BuilderConfig {name!r} not found")
            return real("parquet", data_files=files, split=split, streaming=streaming)

        def dataset_info(_, name, revision=None, timeout=None):
            listed = [SimpleNamespace(rfilename=path) for path in seen.listed.get(revision, [])]
            return SimpleNamespace(sha=f"commit of {revision}" if revision else "abc123", siblings=listed)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        return seen

    return make


def test_rows_of_the_hub_come_in_the_order_of_its_files(hub):
    hub(train=[[f"document {index} of part {part}" for index in range(7)] for part in range(2)])
    source = open_source("some/corpus", validation=0.25)
    source.pin()
    assert (source.splits, source.validation, source.revision) == ((None,), 0.25, "abc123")
    assert list(source.read(None))[6:8] == ["document 6 of part 0", "document 0 of part 1"]


def test_two_revisions_of_a_data_set_have_different_tokens(hub, tmp_path, monkeypatch):
    hub(train=[[f"old {n}" for n in range(400)]])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    first = prepared("some/corpus", "bpe:280", cache=tmp_path / "cache")
    assert first.header.get("revision") == "abc123"
    assert prepared("some/corpus", "bpe:280", cache=tmp_path / "cache") == first

    pq.write_table(pa.table({"text": [f"new {n}" for n in range(400)]}), tmp_path / "train-0.parquet")
    named = prepared("some/corpus@v2", "bpe:280", cache=tmp_path / "cache")
    assert named.header.get("revision") == "commit of v2"
    assert named.corpus_hash != first.corpus_hash
    assert named.header["settings"]["source"]["revision"] == "v2"


CONVERTED = "refs/convert/parquet"


def test_a_data_set_with_a_script_is_read_from_the_parquet_conversion_of_the_hub(hub):
    stand_in = hub(train=[["a", "b"]])
    source = open_source(f"some/corpus@{CONVERTED}:en")
    source.pin()
    assert [*source.read(None)] == ["a", "b"]
    assert (source.revision, {*stand_in.folders}) == (f"commit of {CONVERTED}", {"en"})
    for part in ("partial-train", "partial/train"):  # the Hub's present name, and the one until 2023
        stand_in.listed = {CONVERTED: [f"en/{part}/0000.parquet", "en/test/0000.parquet"]}
        with pytest.raises(InputError, match="has converted only a part of some/corpus"):
            open_source(f"some/corpus@{CONVERTED}:en").pin()


@pytest.mark.soak
def test_openwebtext_is_read_by_the_real_client_as_the_hub_stores_it(tmp_path):
    repo = tmp_path / "hub" / "datasets" / "Skylion007" / "openwebtext"
    (repo / "main").mkdir(parents=True)
    (repo / "main" / "openwebtext.py").write_text("raise SystemExit('a program was run')\n")
    (repo / "main" / "README.md").write_text("---\nlicense: cc0-1.0\n---\n")
    folder = repo / CONVERTED.replace("/", "%2F") / "plain_text" / "train"
    folder.mkdir(parents=True)
    for part in range(2):
        rows = [f"text {part}.{row} " * 40 for row in range(50)]
        pq.write_table(pa.table({"text": rows}), folder / f"{part:04}.parquet")
    code = """
from lit_layers.data.text_sources import open_source
source = open_source("openwebtext")
source.pin()
rows = list(source.read(None))
print(source.splits, source.validation, len(rows), rows[59][:8])
"""
    with FakeHub(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.env(tmp_path / "home")}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "(None,) 0.01 100 text 1.9\n", done.stderr[-2000:]


def article(index: int) -> list[str]:
    return ["", f" = Title {index} = \n", "", f" Words of {index} . \n", "", " = = Part = = \n", "", " a = b \n"]


def test_lines_of_wikitext_are_joined_to_articles(hub):
    lines = [line for index in range(5) for line in article(index)]
    hub(train=[lines[:13], lines[13:]], validation=[article(9)])
    source = open_source("wikitext")
    source.pin()
    assert source.splits == ("validation", "train")
    titled = [text for text in source.read("train") if text]
    assert titled == [f" = Title {index} = \n Words of {index} . \n = = Part = = \n a = b \n" for index in range(5)]


def test_missing_data_of_the_hub_is_reported(hub):
    hub(train=[["a"]], validation=[["b"]])
    with pytest.raises(InputError, match=r"'some/corpus' is no local path and .* BuilderConfig 'other' not found"):
        open_source("some/corpus:other").pin()
    with pytest.raises(InputError, match=r"brings its own validation split: leave validation out"):
        open_source("some/corpus", validation=0.1).pin()
    source = open_source("some/corpus", column="body")
    source.pin()
    with pytest.raises(InputError, match="has no column 'body': it has text"):
        list(source.read("train"))
