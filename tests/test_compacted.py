"""Tables of numbers beside the lines: they answer as the lines do, and nothing rests on them."""

import io
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_layers import compacted, records
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.files import foreign_parquet, parquet_process
from lit_layers.records import Measurement, Record
from lit_layers.run_data import read_run

NAME = "measurements.parquet"


def measured(step: int | None, analysis: str, *values: float, config: str = "c", **given) -> Measurement:
    records_of = [
        Record(metric=metric, value=value + shift, layer=layer, n=3, tags={"k": layer, "task": "é\n<b>"}, low=-math.inf)
        for metric, shift in (("first", 0.0), ("second", 10.0))
        for layer, value in enumerate(values)
    ]
    provenance = {"config_hash": config, "data_hash": None, "weights_hash": f"w{step}"}
    facts = {"run": "r", "step": step, "tokens": None, "seconds": 0.25, "provenance": provenance}
    return Measurement(**{**facts, "analysis": analysis, "records": records_of, **given})


@pytest.fixture(autouse=True)
def in_this_process(request, monkeypatch) -> None:
    """Starting a process for each question takes half a second; what may end it does not run here."""
    if "harm" in request.fixturenames:
        return

    def ask(asked: bytes) -> bytes:
        answers = io.BytesIO()
        parquet_process.serve(io.BytesIO(asked), answers)
        return answers.getvalue()

    monkeypatch.setattr(foreign_parquet, "_ask", ask)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with whatever a log may hold: failures, numbers that are replaced, other settings, NaN."""
    root = tmp_path / "run"
    for each in (
        measured(0, "a", 0.1, 0.2, 0.3),
        measured(0, "b", 1.0, math.nan),
        measured(5, "a", 0.4, 0.5, math.inf),
        measured(5, "a", error="it failed", records=[]),
        measured(5, "a", 0.6, 0.7, 0.8),
        measured(5, "a", 7.0, config="other"),
        measured(None, "b", 2.0),
    ):
        records.append(root / "measurements.jsonl", each)
    return root


def rows(frame: pd.DataFrame) -> list[str]:
    """A table's rows, in an order of their own: of which columns and rows there are alone."""
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in frame.to_dict("records"))


def of_lines(root: Path, analysis: str, metric: str | None = None, layer: int | None = None, **options) -> list[str]:
    """The same numbers by pandas from all lines."""
    frame = records.frame(records.read(root / "measurements.jsonl"), **options)
    frame = frame[frame["analysis"] == analysis]
    frame = frame if metric is None else frame[frame["metric"] == metric]
    return rows(frame if layer is None else frame[frame["layer"] == layer])


@pytest.mark.parametrize("settings", [(), "last", "all", "other"])
def test_a_curve_of_a_table_is_that_of_the_lines_whatever_came_later(root, settings):
    log = root / "measurements.jsonl"
    before = log.read_bytes()
    made = records.compact(root)
    assert (made.measurements, made.log_bytes, log.read_bytes()) == (7, len(before), before)
    for _ in range(2):
        for metric, layer in ((None, None), ("first", 0), ("second", 2), ("second", None), (None, 1), ("third", 0)):
            found = records.frame(root, analysis="a", metric=metric, layer=layer, settings=settings)
            assert rows(found) == of_lines(root, "a", metric, layer, settings=settings)
        records.append(log, measured(5, "a", 0.9, 0.9, 0.9))  # in place of one that the table has
        records.append(log, measured(10, "a", 1.1, 1.2, 1.3))


def test_of_the_lines_only_what_came_later_is_read(root, monkeypatch):
    records.compact(root)
    size = (root / "measurements.jsonl").stat().st_size
    records.append(root / "measurements.jsonl", measured(10, "a", 1.1, 1.2, 1.3))
    offsets = []
    read_on = records.read_on
    monkeypatch.setattr(records, "read_on", lambda path, offset: offsets.append(offset) or read_on(path, offset))
    assert len(records.frame(root, analysis="a", metric="first", layer=np.int64(1))) == 3
    assert offsets == [size]


def test_one_question_to_many_runs_names_each(root, tmp_path):
    other = tmp_path / "other"
    records.append(other / "measurements.jsonl", measured(0, "a", 5.0))
    records.compact(root)  # the other has no table
    found = records.frame([root, other], analysis="a", metric="first", layer=0)
    assert found[["root", "step", "value"]].to_numpy().tolist() == [
        [str(root), 0, 0.1], [str(root), 5, 0.6], [str(other), 0, 5.0]
    ]  # fmt: skip
    whole = records.frame([root, other])
    assert len(whole) == len(records.frame(root)) + len(records.frame(other))


def test_a_tag_of_one_run_is_a_column_of_all_and_none_hides_which_run_a_row_is_of(root, tmp_path):
    other = tmp_path / "other"
    tagged = [records.Record(metric="first", value=5.0, layer=0, tags={"root": "x"})]
    records.append(other / "measurements.jsonl", measured(0, "a", records=tagged))
    found = records.frame([root, other], analysis="a", metric="first", layer=0)
    assert found["root"].tolist() == [str(root), str(root), str(other)]
    assert found["tag_root"].isna().tolist() == [True, True, False]
    assert found["tag_root"][2] == "x"


def test_other_tools_read_the_tables_of_many_runs_as_one(root, tmp_path):
    other = tmp_path / "other"
    records.append(other / "measurements.jsonl", measured(3, "a", 5.0))
    for each in (root, other):
        records.compact(each)
    tables = f"'{tmp_path}/*/{NAME}'"
    asked = f"select step, value from {tables} where analysis = 'a' and metric = 'first' and layer = 0 order by value"
    assert duckdb.sql(asked).fetchall() == [(0, 0.1), (5, 0.6), (3, 5.0), (5, 7.0)]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def scribbled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(4, len(content) - 8, 7):
        content[place] ^= 255
    path.write_bytes(bytes(content))


def of_something_else(path: Path) -> None:
    pq.write_table(pa.table({"value": [1.0]}), path)


def of_another_log(path: Path) -> None:
    other = path.parent.parent / "elsewhere"
    for step in range(9):
        records.append(other / "measurements.jsonl", measured(step, "a", 8.0, 8.0, 8.0))
    records.compact(other)
    path.write_bytes((other / NAME).read_bytes())


def rewritten(
    path: Path, column: str | None = None, value: Any = None, *, said: Any = None, names: list[str] | None = None
) -> None:
    """A table of the right columns and log, whose rows no run wrote, or that says something else of its log, or has
    columns in an order of their own."""
    table = pq.read_table(path, columns=names)
    log = json.loads((pq.read_metadata(path).metadata or {})[b"log"]) if said is None else said
    if column is not None:
        place = table.schema.get_field_index(column)
        values = pa.array([value] * table.num_rows, table.schema.field(place).type)
        table = table.set_column(place, column, values)
    with pq.ParquetWriter(path, table.schema, store_schema=False) as file:
        file.write_table(table, row_group_size=2)
        file.add_key_value_metadata({"log": json.dumps(log)})


OF_WRONG_ROWS = [("seconds", -1.0), ("tags", None), ("tags", "{"), ("provenance", None), ("provenance", "[" * 100_000)]
OF_NO_LOG = [[1], {"bytes": -5}, {"bytes": 2**80}]


@pytest.mark.parametrize("harm", [truncated, scribbled, of_something_else, of_another_log])
def test_a_table_that_cannot_be_trusted_is_told_and_the_lines_are_read(harm, root, caplog):
    records.compact(root)
    harm(root / NAME)
    with caplog.at_level(logging.WARNING):
        assert rows(records.frame(root, analysis="a")) == of_lines(root, "a")
    assert f"{root / NAME} " in caplog.text
    assert "make it again with lit-layers compact" in caplog.text


@pytest.mark.parametrize(("metric", "layer"), [(None, None), ("first", 0), ("second", 2), (None, 1), ("third", 0)])
def test_a_table_of_many_groups_with_columns_in_another_order_is_read_as_well(metric, layer, root, caplog):
    records.compact(root)
    rewritten(root / NAME, names=[*parquet_process.NUMBERS][::-1])
    found = records.frame(root, analysis="a", metric=metric, layer=layer, settings="all")
    assert rows(found) == of_lines(root, "a", metric, layer, settings="all")
    assert not caplog.records  # that the lines are read instead


@pytest.mark.parametrize("said", OF_NO_LOG)
def test_a_table_that_says_nothing_of_a_log_is_told(said, root, caplog):
    records.compact(root)
    rewritten(root / NAME, said=said)
    with caplog.at_level(logging.WARNING):
        assert rows(records.frame(root, analysis="a")) == of_lines(root, "a")
    assert f"{root / NAME} is not of this measurements.jsonl" in caplog.text


@pytest.mark.parametrize(("column", "value"), OF_WRONG_ROWS)
def test_a_table_of_rows_that_no_run_wrote_is_told(column, value, root, caplog):
    records.compact(root)
    rewritten(root / NAME, column, value)
    with caplog.at_level(logging.WARNING):
        assert rows(records.frame(root, analysis="a")) == of_lines(root, "a")
    assert f"{root / NAME} holds what no measurement is" in caplog.text


def test_a_log_that_was_cut_or_begun_anew_is_read_itself(root, caplog):
    records.compact(root)
    log = root / "measurements.jsonl"
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    with caplog.at_level(logging.WARNING):
        assert records.frame(root, analysis="a")["value"].tolist() == [0.1, 0.2, 0.3, 10.1, 10.2, 10.3]
    assert "is not of this measurements.jsonl" in caplog.text


def test_a_table_that_cannot_be_written_leaves_the_one_before(root, monkeypatch):
    records.compact(root)
    before = (root / NAME).read_bytes()
    records.append(root / "measurements.jsonl", measured(10, "a", 1.0))
    monkeypatch.setattr(compacted, "replace_file", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(InputError, match=r"cannot write beside .*: no space left"):
        records.compact(root)
    assert (root / NAME).read_bytes() == before
    assert rows(records.frame(root, analysis="a")) == of_lines(root, "a")


@pytest.mark.soak
def test_whenever_compacting_is_killed_every_curve_is_whole(root):
    program = "import sys; from lit_layers import records\nwhile True: records.compact(sys.argv[1])"
    draw = random.Random(0)
    for number in range(20):
        records.append(root / "measurements.jsonl", measured(20 + number, "a", 1.0, 2.0, 3.0))
        process = subprocess.Popen([sys.executable, "-c", program, str(root)], env={**os.environ, "PYTHONPATH": "."})
        time.sleep(1.0 + draw.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert rows(records.frame(root, analysis="a")) == of_lines(root, "a")


def test_the_page_knows_nothing_of_tables(root):
    before = repr(read_run(root))
    records.compact(root)
    assert repr(read_run(root)) == before


def test_the_command_tells_what_it_wrote(root, capsys):
    assert main(["compact", str(root)]) == 0
    assert capsys.readouterr().out.split()[-5:-2] == [str(root), "7", "20"]
    assert main(["compact", str(root / "nothing")]) == 2
    assert "expected a file of measurements, or a folder with measurements.jsonl" in capsys.readouterr().err
    with pytest.raises(InputError, match="metric and layer choose among the numbers of an analysis"):
        records.frame(root, metric="first")


# ------------------------------------------------------------------------------------------------ published


def test_what_is_published_loads_as_a_data_set(root, tmp_path, capsys):
    from datasets import load_dataset

    provenance = {"config_hash": "c", "checkpoint": "/home/somebody/run", "host": "secret", "weights_hash": "w"}
    records.append(root / "measurements.jsonl", measured(20, "a", 1.0, 2.0, 3.0, provenance=provenance))
    out = tmp_path / "data"
    for _ in range(2):  # again, in place of the first
        assert main(["publish", str(root), "--out", str(out), "--title", "Two: runs"]) == 0
    numbers = load_dataset(str(out), "numbers", split="train", cache_dir=str(tmp_path / "cache"))
    expected = records.frame(root, settings="all")
    assert f"Wrote {len(expected)} numbers of 1 run to {out}" in capsys.readouterr().out
    values = [math.nan if value is None else value for value in numbers["value"]]
    assert sorted(map(str, values)) == sorted(map(str, expected["value"].tolist()))
    assert json.loads(numbers[0]["tags"]) == {"k": 0, "task": "é\n<b>"}
    shared = load_dataset(str(out), "measurements", split="train", cache_dir=str(tmp_path / "cache"))
    assert len(shared) == 6, "of seven one failed, one took another's place, one came"
    everything = "".join(map(str, shared.to_list())) + (out / "README.md").read_text()
    assert "somebody" not in everything
    assert "secret" not in everything
    assert "| a | first | 10 |" in (out / "README.md").read_text()


def test_it_is_sent_to_a_private_repository_and_a_refusal_is_a_sentence(root, tmp_path, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub.errors import HTTPError

    class TimeoutException(HTTPError):
        """What the library of HTTP raises, which is no OSError."""

        def __init__(self, said):
            Exception.__init__(self, said)

    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options))
            if name == "no/access":
                raise OSError("403 Forbidden")
            if name == "no/network":
                raise TimeoutException("Name or service not known")

        def list_repo_files(self, name, **options):
            ours = ["README.md", ".gitattributes", "numbers/run.parquet", "LICENSE"]
            return {
                "me/numbers": [".gitattributes"],
                "me/again": ours,
                "me/tables": ["README.md", "data.csv"],
                "me/mixed": [*ours, "data/mine.parquet"],
            }.get(name, ["data.parquet"])

        def hf_hub_download(self, name, file, **options):
            return str(mine if name == "me/tables" else out / file)

        def upload_folder(self, **options):
            calls.append(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    out, mine = tmp_path / "data", tmp_path / "card.md"
    mine.write_text("# What I collected\n")
    assert main(["publish", str(root), "--out", str(out), "--hub", "me/numbers"]) == 0
    assert calls[0] == ("me/numbers", {"repo_type": "dataset", "private": True, "exist_ok": True})
    assert (calls[1]["folder_path"], calls[1]["repo_id"]) == (out, "me/numbers")
    assert calls[1]["allow_patterns"] == ["README.md", "numbers/*.parquet", "measurements/*.parquet"]
    assert "https://huggingface.co/datasets/me/numbers" in capsys.readouterr().out
    assert main(["publish", str(root), "--out", str(out), "--hub", "me/again"]) == 0
    for name, foreign in (("photos", "data.parquet"), ("tables", "data.csv"), ("mixed", "data/mine.parquet")):
        assert main(["publish", str(root), "--out", str(out), "--hub", f"me/{name}"]) == 2
        assert f"hub: me/{name} holds {foreign}, which this command did not write" in capsys.readouterr().err
    assert [each["repo_id"] for each in calls if isinstance(each, dict)] == ["me/numbers", "me/again"]
    assert main(["publish", str(root), "--out", str(out), "--hub", "no/access"]) == 2
    assert "hub: no/access took nothing (OSError: 403 Forbidden): run the same command" in capsys.readouterr().err
    assert main(["publish", str(root), "--out", str(out), "--hub", "no/network"]) == 2
    assert "hub: no/network took nothing (TimeoutException: Name or service" in capsys.readouterr().err
    for name in ("numbers", "a/b/c", "../x", "a/" + "x" * 97, "ü/numbers"):
        assert main(["publish", str(root), "--out", str(tmp_path / "other"), "--hub", name]) == 2
        assert f"hub: expected ORGANIZATION/NAME, got {name!r}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "missing: roots"),
        (["ROOT", "ROOT"], "two folders are called run: rename one"),
        (["ROOT/none"], "expected a run's folder with measurements.jsonl"),
        (["ROOT", "--out", "ROOT"], "out: expected a new folder, or a data set that this command made"),
    ],
)
def test_what_cannot_be_published_is_refused(arguments, sentence, root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["publish", *(each.replace("ROOT", str(root)) for each in arguments)]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "published").exists()
    assert (root / "measurements.jsonl").is_file()


@pytest.mark.parametrize("card", [None, "# Mine\n", 'lit_layers_runs: ["../mine"]\n', "lit_layers_runs: [1]\n"])
def test_a_folder_of_somebody_with_numbers_in_it_keeps_them(card, root, tmp_path, capsys):
    mine = tmp_path / "mine/numbers/mine.parquet"
    mine.parent.mkdir(parents=True)
    (tmp_path / "mine/measurements").mkdir()
    mine.write_bytes(b"years of work")
    if card is not None:
        (tmp_path / "mine/README.md").write_text(card)
    assert main(["publish", str(root), "--out", str(tmp_path / "mine")]) == 2
    assert "out: expected a new folder, or a data set that this command made" in capsys.readouterr().err
    assert mine.is_file()
    assert card is None or (tmp_path / "mine/README.md").read_text() == card


def test_a_data_set_is_written_again_without_the_runs_that_left_and_with_nothing_foreign(root, tmp_path, capsys):
    other, out = shutil.copytree(root, tmp_path / "other"), tmp_path / "data"
    assert main(["publish", str(root), str(other), "--out", str(out)]) == 0
    assert main(["publish", str(root), "--out", str(out)]) == 0
    assert [path.name for path in sorted(out.rglob("*.parquet"))] == ["run.parquet"] * 2
    card = (out / "README.md").read_text()
    (out / "README.md").write_text(card.replace('runs: ["run"]', r'runs: ["run", "gone", "\u0000"]'))
    assert main(["publish", str(root), "--out", str(out)]) == 0
    assert (out / "README.md").read_text() == card
    (out / "numbers" / "mine.parquet").write_bytes(b"years of work")
    assert main(["publish", str(other), "--out", str(out)]) == 2
    assert "this command did not write numbers/mine.parquet" in capsys.readouterr().err
    assert len([*out.rglob("*.parquet")]) == 3
