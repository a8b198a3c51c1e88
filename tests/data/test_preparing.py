import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lit_layers.data import preparing, tokenization
from lit_layers.data.preparing import prepare, prepared
from lit_layers.data.shards import ShardWriter, TokenShards
from lit_layers.data.tokenization import encoded
from lit_layers.errors import InputError

SMALL_STEPS = "import lit_layers.data.preparing as p; p.PART_SECONDS = 0; p.CHUNK_BYTES = 2**12; "


class Crash(Exception):
    """Stands for a power cut."""


@pytest.fixture
def small_steps(monkeypatch):
    """Tiny chunks, and a closed part after each."""
    monkeypatch.setattr(preparing, "PART_SECONDS", 0)
    monkeypatch.setattr(preparing, "CHUNK_BYTES", 2**12)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def tokenizer_of(made: TokenShards) -> str:
    return str(made.tokenizer_path)


def test_chunks_and_parts_leave_no_trace_in_the_result(made, jsonl, tmp_path, small_steps):
    again = prepare(str(jsonl), "bpe:300", tmp_path / "again", validation=0.2)
    assert content(again.folder) == content(made.folder)


@pytest.mark.slow
def test_several_threads_give_what_one_gives_in_the_same_order(made, jsonl, tmp_path, small_steps):
    again = prepare(str(jsonl), "bpe:300", tmp_path / "again", validation=0.2, workers=3)
    assert content(again.folder) == content(made.folder)


def crash_on_call(monkeypatch, owner, name: str, call: int) -> None:
    real, calls = getattr(owner, name), [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (ShardWriter, "append", range(1, 14, 3)),
        (ShardWriter, "sync", range(1, 8, 2)),
        (tokenization, "save_tokenizer", [1]),
        (preparing, "finish", [1]),
        (Path, "rename", range(1, 99)),
        (Path, "replace", range(1, 99)),
    ],
)
def test_a_run_cut_anywhere_and_run_again_gives_the_same_files(
    made, jsonl, tmp_path, monkeypatch, small_steps, owner, name, calls
):
    for call in calls:
        out = tmp_path / f"cut{call}"
        with monkeypatch.context() as cut:
            crash_on_call(cut, owner, name, call)
            try:
                prepare(str(jsonl), "bpe:300", out, validation=0.2)
            except Crash:
                pass
            else:
                assert call > 4, "the run ended before it could be cut"
                break
        if not (out / "meta.json").exists():
            with pytest.raises(InputError, match=r"interrupted: run the same|holds no token shards"):
                TokenShards.open(out)
        prepare(str(jsonl), "bpe:300", out, validation=0.2)
        assert content(out) == content(made.folder)


def test_a_source_with_its_own_splits_can_be_cut_in_either(texts, made, tmp_path, monkeypatch, small_steps):
    write_jsonl(tmp_path / "in" / "validation.jsonl", texts[:80])
    write_jsonl(tmp_path / "in" / "train.jsonl", [*texts[80:], *texts[70:80]])
    options = {"max_documents": 110}
    whole = prepare(str(tmp_path / "in"), tokenizer_of(made), tmp_path / "whole", **options)
    assert (whole.num_documents("validation"), whole.num_documents("train")) == (80, 110)
    stages = set()
    for call in range(1, 8):
        out = tmp_path / f"cut{call}"
        with monkeypatch.context() as cut:
            crash_on_call(cut, ShardWriter, "append", call)
            with pytest.raises(Crash):
                prepare(str(tmp_path / "in"), tokenizer_of(made), out, **options)
        stages.add(json.loads((out / "progress.json").read_text())["stage"])
        prepare(str(tmp_path / "in"), tokenizer_of(made), out, **options)
        assert content(out) == content(whole.folder)
    assert stages == {0, 1}


def test_what_is_done_is_not_done_again(jsonl, made, tmp_path, monkeypatch, small_steps):
    with monkeypatch.context() as cut:
        crash_on_call(cut, ShardWriter, "append", 9)
        with pytest.raises(Crash):
            prepare(str(jsonl), tokenizer_of(made), tmp_path / "out")
    before = sum(json.loads((tmp_path / "out" / "progress.json").read_text())["bytes"].values())
    assert before > 0
    seen = []
    real = preparing._note
    monkeypatch.setattr(preparing, "_note", lambda state, *rest: seen.append(real(state, *rest)) or seen[-1])
    prepare(str(jsonl), tokenizer_of(made), tmp_path / "out")
    assert sum(seen) + before == sum(
        TokenShards.open(tmp_path / "out").header["splits"][s]["bytes"] for s in ("train", "validation")
    )


def living(group: int) -> list[str]:
    """The processes of a group, as Linux lists them; zombies no longer count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat.parent.name] if int(number) == group and state != "Z" else []
    return found


def wait_for_the_end_of_group(group: int) -> None:
    """Returns once the workers of a killed process are gone, too: they must not wait for work for ever."""
    deadline = time.monotonic() + 300
    while living(group):
        assert time.monotonic() < deadline, "workers outlive the process that started them"
        time.sleep(0.02)


def noted(out: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return (out / "progress.json").read_text()
    return None


@pytest.mark.soak
@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(made, jsonl, tmp_path):
    out = tmp_path / "killed"
    code = SMALL_STEPS + "import time, sys; real = p.write_json; "
    code += "p.write_json = lambda *a, **k: (real(*a, **k), time.sleep(0.02)); "  # leaves time to be killed in
    code += "p.prepare(sys.argv[1], 'bpe:300', sys.argv[2], validation=0.2, workers=int(sys.argv[3]))"
    rng, kills, places = random.Random(0), 0, set()
    for attempt in range(40):
        command = [sys.executable, "-c", code, str(jsonl), str(out), str(1 + attempt % 2)]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        start = noted(out)
        while process.poll() is None and noted(out) in (None, start):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        if process.poll() is not None:
            assert process.returncode == 0
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for_the_end_of_group(process.pid)
        kills += 1
        places.add(noted(out))
    assert kills >= 3
    assert len(places) >= 3
    prepare(str(jsonl), "bpe:300", out, validation=0.2)
    assert content(out) == content(made.folder)


def counted(number: int, pulled: list[int]) -> Iterator[int]:
    for item in range(number):
        pulled.append(item)
        yield item


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_only_a_few_chunks_are_under_way_at_any_time(made, workers):
    pulled = []
    work = encoded(
        counted(40, pulled),
        lambda item: [("train", f"document {item}")],
        workers=workers,
        tokenizer=made.tokenizer_path / "tokenizer.json",
        end=0,
        dtype=np.dtype("<u2"),
    )
    for index, (item, found) in enumerate(work):
        assert item == index
        assert found["train"][1].tolist() == [len(found["train"][0])]
        assert len(pulled) - index <= 2 * workers + 1
    assert len(pulled) == 40


@pytest.mark.slow
def test_a_script_that_prepares_is_not_run_again_by_the_workers(made, jsonl, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        SMALL_STEPS + "import sys\nprint('once')\n"
        "print(p.prepare(sys.argv[1], 'bpe:300', sys.argv[2], validation=0.2, workers=2).checksum)\n"
    )
    done = subprocess.run(
        [sys.executable, script, jsonl, tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["once", made.checksum]
    assert done.stderr == ""


@pytest.mark.slow
def test_of_two_processes_for_one_folder_one_works_and_both_get_the_result(made, jsonl, tmp_path):
    code = SMALL_STEPS + "import sys; print(p.prepare(sys.argv[1], 'bpe:300', sys.argv[2], validation=0.2).checksum)"
    command = [sys.executable, "-c", code, str(jsonl), str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [made.checksum] * 2
    assert content(tmp_path / "out") == content(made.folder)


def test_a_finished_folder_is_opened_and_not_made_again(made, jsonl, monkeypatch):
    monkeypatch.setattr(preparing, "_fill", lambda *args: pytest.fail("prepared again"))
    assert prepare(str(jsonl), "bpe:300", made.folder, validation=0.2) == made


def test_other_settings_for_a_folder_are_refused_by_name(made, jsonl, tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match=r"holds shards with source.validation 0.2, and 0.1 was asked for: choose another"
    ):
        prepare(str(jsonl), "bpe:300", made.folder, validation=0.1)
    with monkeypatch.context() as cut:
        crash_on_call(cut, ShardWriter, "append", 1)
        with pytest.raises(Crash):
            prepare(str(jsonl), "bpe:300", tmp_path / "out")
    with pytest.raises(
        InputError, match=r"unfinished preparation with tokenizer.spec 'bpe:300', and 'bpe:299' was asked"
    ):
        prepare(str(jsonl), "bpe:299", tmp_path / "out")


def test_an_interrupted_preparation_goes_on_with_a_copy_of_its_tokenizer(made, jsonl, tmp_path, monkeypatch):
    copies = [shutil.copytree(made.tokenizer_path, tmp_path / place / "model") for place in ("a", "b")]
    with monkeypatch.context() as cut:
        crash_on_call(cut, ShardWriter, "append", 1)
        with pytest.raises(Crash):
            prepare(str(jsonl), str(copies[0]), tmp_path / "out", validation=0.2)
    again = prepare(str(jsonl), str(copies[1]), tmp_path / "out", validation=0.2)
    assert again.tokens("train").tolist() == made.tokens("train").tolist()


def test_a_corpus_that_changed_since_the_interruption_is_refused(texts, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    with monkeypatch.context() as cut:
        crash_on_call(cut, ShardWriter, "append", 1)
        with pytest.raises(Crash):
            prepare(str(path), "bpe:300", tmp_path / "out")
    write_jsonl(path, texts[:-1])
    with pytest.raises(InputError, match=r"with source.bytes \d+, and \d+ was asked for"):
        prepare(str(path), "bpe:300", tmp_path / "out")


def test_documents_of_validation_are_dropped_from_training_and_counted(texts, tmp_path, made):
    write_jsonl(tmp_path / "in" / "validation.jsonl", [*texts[:5], " \n"])
    write_jsonl(tmp_path / "in" / "train.jsonl", [texts[2], *texts[5:50], texts[0], texts[7], ""])
    shards = prepare(str(tmp_path / "in"), tokenizer_of(made), tmp_path / "out")
    assert shards.header["left_out"] == {"duplicate": 2, "empty": 2}
    assert shards.num_documents("validation") == 5
    assert shards.num_documents("train") == 45 + 1  # a text that training has twice stays twice


def test_equal_documents_of_one_stream_fall_into_one_split(texts, tmp_path, made):
    path = write_jsonl(tmp_path / "in.jsonl", texts * 2)
    shards = prepare(str(path), tokenizer_of(made), tmp_path / "out", validation=0.2)
    documents = {}
    for split in ("train", "validation"):
        tokens, starts = shards.tokens(split).tolist(), [*shards.document_starts(split), shards.num_tokens(split)]
        documents[split] = {tuple(tokens[a:b]) for a, b in pairwise(starts)}
    assert not documents["train"] & documents["validation"]
    assert shards.num_documents("validation") == 2 * made.num_documents("validation")


def test_at_most_so_many_documents_are_read(jsonl, made, tmp_path):
    shards = prepare(str(jsonl), tokenizer_of(made), tmp_path / "out", validation=0.2, max_documents=50)
    assert shards.num_documents("train") + shards.num_documents("validation") == 50
    assert shards.tokens("train").tolist() == made.tokens("train")[: shards.num_tokens("train")].tolist()


def test_the_corpus_hash_sees_the_text_and_not_the_tokenizer(texts, made, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    same = prepare(str(path), "bpe:290", tmp_path / "same", validation=0.2)
    assert same.corpus_hash == made.corpus_hash
    assert same.tokenizer_hash != made.tokenizer_hash
    path = write_jsonl(tmp_path / "other.jsonl", [texts[0] + "!", *texts[1:]])
    assert prepare(str(path), "bpe:290", tmp_path / "other", validation=0.2).corpus_hash != made.corpus_hash


def test_an_empty_split_is_refused_and_leaves_the_folder_free(texts, tmp_path, made):
    path = write_jsonl(tmp_path / "in.jsonl", texts[:1])
    with pytest.raises(InputError, match=r"the (train|validation) split of .*in.jsonl is empty \(1 documents in all\)"):
        prepare(str(path), tokenizer_of(made), tmp_path / "out")
    assert content(tmp_path / "out") == {}


def test_a_wrong_column_leaves_the_folder_free_for_the_right_one(jsonl, texts, tmp_path, made):
    with pytest.raises(InputError, match=r"no column 'body'"):
        prepare(str(jsonl), "bpe:300", tmp_path / "out", column="body", validation=0.2)
    assert prepare(str(jsonl), "bpe:300", tmp_path / "out", validation=0.2).checksum == made.checksum


def test_a_folder_of_something_else_is_left_alone(jsonl, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(
        InputError, match=r"is not empty \(it holds thesis.tex\) and no token shards: choose another folder"
    ):
        prepare(str(jsonl), "bpe:300", tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_named(jsonl, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot prepare .*file/out .*Not a directory"):
        prepare(str(jsonl), "bpe:300", tmp_path / "file" / "out")


def test_a_full_disk_is_named_and_the_run_can_go_on(jsonl, made, tmp_path, monkeypatch, small_steps):
    def full(self, *args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(ShardWriter, "sync", full)
        with pytest.raises(InputError, match=r"No space left on device.* or run again to continue"):
            prepare(str(jsonl), "bpe:300", tmp_path / "out", validation=0.2)
    assert prepare(str(jsonl), "bpe:300", tmp_path / "out", validation=0.2).checksum == made.checksum


def test_a_damaged_note_of_progress_is_named(jsonl, tmp_path):
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(InputError, match=r"progress.json is damaged .* and start again"):
        prepare(str(jsonl), "bpe:300", tmp_path)


@pytest.mark.parametrize(
    ("option", "message"), [("workers", "workers: expected at least 1"), ("max_documents", "max_documents: expected")]
)
def test_counts_below_one_are_refused(jsonl, tmp_path, option, message):
    with pytest.raises(InputError, match=message):
        prepare(str(jsonl), "bpe:300", tmp_path, **{option: 0})


def test_a_corpus_is_prepared_once_and_then_found(texts, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", texts * 3)
    first = prepared(str(path), "bpe:300")
    assert first.folder.is_relative_to(os.environ["LIT_LAYERS_CACHE"])
    with monkeypatch.context() as again:
        again.setattr(preparing, "prepare", lambda *args, **options: pytest.fail("prepared again"))
        assert prepared(str(path), "bpe:300") == first
    assert prepared(str(path), "bpe:299").folder != first.folder
    write_jsonl(path, texts * 4)
    assert prepared(str(path), "bpe:300").folder != first.folder


def test_a_prepared_folder_serves_as_a_corpus_with_its_own_tokenizer_only(made, tmp_path, texts):
    assert prepared(str(made.folder), "bpe:300") == made
    assert prepared(str(made.folder), tokenizer_of(made)) == made
    for other in ("bpe:299", tokenizer_of(prepared(str(write_jsonl(tmp_path / "in.jsonl", texts)), "bpe:280"))):
        with pytest.raises(
            InputError, match=r"was made with the tokenizer 'bpe:300' .*, not .* name .*tokenizer, or prepare"
        ):
            prepared(str(made.folder), other)


@pytest.mark.soak
def test_the_embedded_corpus_is_ready_at_once_the_second_time(python_shards, shared_cache, monkeypatch):
    monkeypatch.setattr(preparing, "prepare", lambda *args, **options: pytest.fail("prepared again"))
    assert prepared("python", "bpe:2048", cache=shared_cache) == python_shards
    assert python_shards.vocab_size == 2048
    assert python_shards.num_tokens("train") > 1e6
    assert python_shards.num_tokens("validation") > 5e4


@pytest.mark.soak
@pytest.mark.realdata
def test_wikitext2_with_the_gpt2_tokenizer_has_the_known_number_of_tokens(realdata, tmp_path):
    shards = prepare(
        str(realdata / "wikitext2"), str(realdata / "tokenizers" / "gpt2"), tmp_path / "out", max_documents=100
    )
    assert shards.num_documents("train") == 100
    assert shards.num_documents("validation") == 60
    # The data's own notes count 258,659; ours add an end to each document.
    assert shards.num_tokens("validation") == 258_659 + 60
    assert shards.header["dtype"] == "uint16"
    TokenShards.open(shards.folder)
