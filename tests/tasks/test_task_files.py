"""Files of each task in a local folder: the entries of `tasks.yaml`, and the catalogue of tasks."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_layers.data.prompt_texts import BenchmarkPrompts
from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import (
    CATALOGUE,
    GlueRows,
    ScoredTask,
    find,
    find_task,
    glue_metrics,
    read_rows,
    resolve,
)
from lit_layers.tasks.task_files import local_copies, local_copy


def replace_keeping_time(path: Path, content: bytes) -> None:
    """Replace a file by one of equal size and time, as `cp --preserve`, an archive or a very fast writer does."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def write(folder: Path, text: str) -> Path:
    (folder / "tasks.yaml").write_text(text)
    return folder


def test_columns_are_renamed_rows_selected_and_files_joined(tmp_path):
    for number in (1, 2):
        columns = {"a": [f"{number}{row}" for row in range(4)], "year": [2012, 2013, 2013, 2012], "score": [1.0] * 4}
        pq.write_table(pa.table(columns), tmp_path / f"part{number}.parquet")
    files = "files: {test: [part2.parquet, part1.parquet]}, columns: {sentence1: a}"
    write(tmp_path, f"mteb: {{STS13: {{{files}, where: {{year: 2013}}, difference: two rows}}}}")
    copy = local_copy("mteb", "STS13", tmp_path)
    assert copy.read(["test"], {"sentence1": "text", "score": "label"}).values == {
        "sentence1": ["21", "22", "11", "12"],
        "score": [1.0] * 4,
    }
    assert copy.paths("test") == [tmp_path / "part2.parquet", tmp_path / "part1.parquet"]
    assert copy.difference == "two rows"
    with pytest.raises(InputError, match="expected files of the split 'train', got test"):
        copy.paths("train")
    pq.write_table(pa.table({"a": ["x", "y"], "kept": [False, True]}), tmp_path / "rows.parquet")
    write(tmp_path, "glue: {sst2: {files: rows.parquet, where: {kept: true}}}")
    assert local_copy("glue", "sst2", tmp_path).read(["train"], {"a": "text"}).values == {"a": ["y"]}


def test_a_mapping_that_changes_is_read_again(tmp_path):
    write(tmp_path, "probe: {sst2: 'a_{split}.csv'}")
    assert local_copy("probe", "sst2", tmp_path).paths("train") == [tmp_path / "a_train.csv"]
    assert local_copies("glue", tmp_path) == {}
    (tmp_path / "tasks.yaml").unlink()
    write(tmp_path, "probe: {sst2: 'longer_{split}.csv'}")
    assert local_copy("probe", "sst2", tmp_path).paths("test") == [tmp_path / "longer_test.csv"]
    replace_keeping_time(tmp_path / "tasks.yaml", b"probe: {sst2: 'others_{split}.csv'}")
    assert local_copy("probe", "sst2", tmp_path).paths("test") == [tmp_path / "others_test.csv"]


def test_invalid_mappings_are_refused(tmp_path):
    with pytest.raises(InputError, match="folder: expected a file tasks.yaml in .*, there is none"):
        local_copy("probe", "sst2", tmp_path)
    expected = "tasks.yaml: probe.sst2: expected a path, or files "
    cases = [
        ("probe: [", "tasks.yaml: not valid YAML "),
        ("- probe", r"tasks.yaml: Input should be an object, got \['probe'\]; write it as docs/tasks.md shows"),
        ("probes: {a: b}", "tasks.yaml: probes.*: Input should be 'probe', 'prompts', .* or 'mteb', got 'probes'"),
        ("probe: [sst2]", r"tasks.yaml: probe.*: Input should be an object, got \['sst2'\]"),
        ("probe: {sst2: {file: a}}", f"{expected}and where they differ "),
        ("probe: {sst2: {columns: {a: b}}}", expected),
        ("probe: {sst2: {files: a.csv, columns: {text: 3}}}", expected),
        ("probe: {sst2: {files: a.csv, where: [label]}}", expected),
        ("probe: {sst2: {files: {test: 3}}}", expected),
        ("probe: {../../x: a.csv}", "tasks.yaml: probe: expected names of letters, .*, got '../../x'$"),
        ("probe: {cola: a.csv}", "tasks.yaml has no probe 'sst2', it has cola: add it"),
    ]
    for text, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            local_copy("probe", "sst2", write(tmp_path, text))


def test_a_mapping_may_name_every_task_of_the_catalogue(tmp_path):
    names: dict[Any, list[str]] = {}
    for task in CATALOGUE:
        names.setdefault(task.use, []).append(task.name)
    write(tmp_path, json.dumps({use: dict.fromkeys(names_of_use, "a.csv") for use, names_of_use in names.items()}))
    assert {use: [*local_copies(use, tmp_path)] for use in names} == names


def write_rows(folder: Path, name: str, entry: str) -> Path:
    """Write a folder with twenty labelled lines of two years, in the columns words and mood."""
    lines = [f"line {row},{row % 2},{2012 + row // 10}" for row in range(20)]
    (folder / f"{name}.csv").write_text("\n".join(["words,mood,year", *lines]))
    return write(folder, entry)


def test_every_key_of_an_entry_applies_to_every_use(tmp_path):
    files, columns = "{train: all.csv, validation: all.csv}", "{sentence: words, label: mood}"
    entry = f"{{files: {files}, columns: {columns}, where: {{year: 2013}}"
    write_rows(tmp_path, "all", f"glue: {{sst2: {entry}}}}}\nprobe: {{sst2: {entry}, options: {{test: null}}}}}}")
    written = [f"line {row}" for row in range(10, 20)]
    rows = read_rows(find("glue", "sst2"), "train", tmp_path)
    assert [text for (text,) in rows.texts] == written
    data = find_task("sst2").load(str(tmp_path))
    assert sorted(text for part in (data.train, data.validation, data.test) for text in part.texts) == written
    assert data.classes == ("negative", "positive")


def test_unknown_options_of_a_task_are_refused_for_every_use(tmp_path):
    cases = [
        ("{foo: 1}", "options: foo: Extra inputs are not permitted, got 1; see the options of "),
        ("{text: 3}", "options: text: Input should be a valid string, got 3; see the options of "),
        ("{source: other.csv}", "options: source: Extra inputs are not permitted"),
        ("{where: {label: 1.5}}", "options: where"),
    ]
    for options, sentence in cases:
        entry = f"{{files: all.csv, options: {options}}}"
        write_rows(tmp_path, "all", f"glue: {{sst2: {entry}}}\nprobe: {{sst2: {entry}}}\nprompts: {{arc: {entry}}}")
        with pytest.raises(InputError, match=f"^task sst2: .*tasks.yaml: {sentence}"):
            find_task("sst2").load(str(tmp_path))
        with pytest.raises(InputError, match="^task sst2: .*tasks.yaml: options: "):
            read_rows(find("glue", "sst2"), "train", tmp_path)
        with pytest.raises(InputError, match="^task arc: .*tasks.yaml: options: "):
            BenchmarkPrompts("tokenizer", folder=str(tmp_path), num_prompts=1).texts()
    write(tmp_path, "mteb: {STS12: {files: a.csv, options: {subset: 3}}}")
    with pytest.raises(InputError, match="^task STS12: .*options: subset: Input should be a valid string, got 3"):
        resolve(["STS12"], tmp_path)


def test_a_copy_with_another_score_has_another_hash_and_is_scored_by_it(tmp_path):
    hashes = {}
    for score in (None, "accuracy", "f1"):
        options = "" if score is None else f", options: {{score: {score}}}"
        write_rows(tmp_path, "all", f"glue: {{mrpc: {{files: all.csv, columns: {{sentence1: words}}{options}}}}}")
        copy = local_copy("glue", "mrpc", tmp_path)
        task = replace(find("glue", "mrpc"), text=("sentence1",)).use_copy(copy)
        assert task.scores == ((score,) if score else ("accuracy", "f1"))
        rows = GlueRows(task, (("a",),), (1.0,))
        hashes[score] = rows.content_hash()
        # accuracy: three of four. F1 of class 1: two found, one wrong
        measured = glue_metrics(task, [1, 1, 0, 0], [1, 1, 1, 0])
        assert measured["task_score"] == pytest.approx({None: (0.75 + 0.8) / 2, "accuracy": 0.75, "f1": 0.8}[score])
    assert len({*hashes.values()}) == 3


def test_names_are_unique_within_a_use_and_the_error_for_an_unknown_one_suggests_similar_names():
    assert len({(task.use, task.name) for task in CATALOGUE}) == len(CATALOGUE)
    sentence = "^task: there is no '{}'; did you mean .*{}"
    for refuse, wrong, near in (
        (lambda: find("glue", "colla"), "colla", "cola"),
        (lambda: find("mteb", "sts12"), "sts12", "STS12"),
        (lambda: resolve(["Banking77"]), "Banking77", "Banking77Classification"),
    ):
        with pytest.raises(InputError, match=sentence.format(wrong, near)):
            refuse()
    with pytest.raises(InputError, match=sentence.format("Bankin77", r"banking77\?; or give a ProbeTask")):
        find_task("Bankin77")
    with pytest.raises(InputError, match="expected one such as arc, gsm8k, .*; or name a file$"):
        find("prompts", "xyz", "name a file")
    with pytest.raises(InputError, match="task: there is no 'xyz'; expected one such as layerwise32, local, "):
        resolve(["xyz"])


def test_a_pattern_of_splits_gives_the_existing_files(tmp_path: Path) -> None:
    def songs(files: Any) -> ScoredTask:
        write(tmp_path, json.dumps({"mteb": {"EmotionClassification": {"files": files}}}))
        return resolve(["EmotionClassification"], tmp_path)[0]

    assert songs("{split}.csv").copy is None
    for split in ("test", "train"):
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{split},1\n")
    assert songs("{split}.csv").has_files
    each = songs({"test": "test.csv", "train": "train.csv"}).data_hash()
    assert songs("{split}.csv").data_hash() == each
    replace_keeping_time(tmp_path / "train.csv", b"text,label\nother,1\n")
    assert songs("{split}.csv").data_hash() != each
