import json
import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Record, ScalarLog


def make(step: int | None = 0, *values: float, analysis: str = "a", error: str | None = None, **tags) -> Measurement:
    found = [Record(metric="m", value=value, layer=layer, tags=tags) for layer, value in enumerate(values)]
    about = {"tokens": None if step is None else step * 10, "seconds": 1.5, "analysis": analysis, "error": error}
    provenance = {"config_hash": "c", "weights_hash": f"w{step}"}
    return Measurement(run="r", step=step, records=found, provenance=provenance, **about)  # type: ignore[arg-type]


def test_appended_measurements_are_read_back_equal_including_nan_and_infinity(tmp_path: Path) -> None:
    ends = {"stderr": 1e-300, "low": -math.inf, "high": math.inf}
    tags = {"k": 12, "p": 0.5, "task": "a/b \u2028 <é>"}
    full = Record(metric="m", value=0.1 + 0.2, layer=1, other_layer=2, n=3, tags=tags, **ends)
    first = Measurement(run="r", step=1, tokens=2, analysis="a", records=[full], seconds=0.5, provenance={"x": [1, {}]})
    second = make(None, math.inf)
    file = tmp_path / "new" / "m.jsonl"
    records.append(file, first)
    records.append(file, second)
    assert records.read(file) == [first, second]
    one, _, end = file.read_text().split("\n")
    assert (json.loads(one, parse_constant=pytest.fail)["records"][0]["low"], end) == ("-inf", "")
    undecodable = b"caf\xe9".decode("utf-8", "surrogateescape")
    numpy = np.float32(0.5), np.float64("nan")
    records.append(file, make(3, math.nan, *numpy, k=np.int64(4), category=undecodable))  # type: ignore[arg-type]
    found = records.read(file)[2].records
    assert [str(record.value) for record in found] == ["nan", "0.5", "nan"], "scalars of numpy are plain numbers"
    assert found[0].tags == {"k": 4, "category": "caf?"}


def test_a_file_cut_at_any_byte_loses_at_most_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    one, two, three = make(1, 0.1), make(2, 0.2, 0.3), make(3, 0.4)
    records.append(file, one)
    start = file.stat().st_size
    records.append(file, two)
    whole = file.read_bytes()
    for cut in range(start, len(whole) + 1):
        file.write_bytes(whole[:cut])
        kept = [one, two] if cut >= len(whole) - 1 else [one]
        assert records.read(file) == kept
        records.append(file, three)
        assert records.read(file) == [*kept, three]


def verdict(text: str, *values: float, step: int = 3, **tags) -> Measurement:
    judged = make(step, *values, **tags)
    return replace(judged, provenance=judged.provenance | {"audit": text})


def test_a_table_has_audit_verdicts_only_if_a_checkpoint_is_suspect() -> None:
    clean = [verdict("clean", 0.1, step=0), verdict("note: identical weights", 0.2, step=1), make(2, 0.3)]
    assert list(records.frame(clean).columns) == list(records.COLUMNS)
    assert not any(map(records.is_suspect, clean))
    suspect = "suspect: equal to main"
    bad = verdict(suspect, 0.4, 0.5)
    assert records.is_suspect(bad)
    table = records.frame([*clean, bad])
    assert list(table.columns) == [*records.COLUMNS, "audit"]
    assert table["audit"].fillna("nobody").tolist() == ["clean", "note: identical weights", "nobody", suspect, suspect]
    assert "audit" not in records.frame([*clean, replace(bad, error="no")]).columns, "a failed one has no rows"
    assert "audit" not in records.frame([bad, verdict("clean", 0.4)]).columns, "what is measured anew is judged anew"
    tagged = records.frame([verdict(suspect, 0.4, audit="x")])
    assert tagged[["tag_audit", "audit"]].values.tolist() == [["x", suspect]]


def test_a_torn_line_longer_than_a_block_is_removed_whole(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    records.append(file, make(1, 0.1))
    with file.open("ab") as torn:
        torn.write(b'{"run": "' + b"x" * 300_000)
    records.append(file, make(2, 0.2))
    assert records.read(file) == [make(1, 0.1), make(2, 0.2)]


TORN = ('{"run": "r", "ste', "\0\0", "[" * 5000, '{"run": "\\ud800"}', '{"step": ' + "9" * 5000)


def test_a_corrupt_line_is_refused_by_number_and_a_last_line_that_is_no_json_is_torn(tmp_path):
    file = tmp_path / "m.jsonl"
    for damage in (*TORN, "[1]", '{"run": "r"}'):
        file.unlink(missing_ok=True)
        records.append(file, make(1, 0.1))
        with file.open("a") as lines:
            lines.write(damage)
        if damage in TORN:
            assert records.read(file) == [make(1, 0.1)], damage[:20]
        with file.open("a") as lines:
            lines.write("\n")
        records.append(file, make(2, 0.2))
        with pytest.raises(InputError, match=r"m\.jsonl, line 2: .*delete that line to go on"):
            records.read(file)


def test_a_missing_file_reads_as_empty_but_gives_no_table(tmp_path: Path) -> None:
    assert records.read(tmp_path / "none.jsonl") == []
    assert records.rows(tmp_path / "none.jsonl") == []
    with pytest.raises(InputError, match="expected a file of measurements"):
        records.frame(tmp_path / "none.jsonl")
    table = records.frame([])
    assert list(table.columns) == list(records.COLUMNS)
    assert (len(table), str(table["step"].dtype)) == (0, "Int64")


def test_an_unwritable_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "m.jsonl"
    for write in (
        lambda: records.append(path, make(1)),
        lambda: logged(path, {1: {"a": 1.0}}),
        lambda: records.export(records.frame([make(1, 0.1)]), path.with_suffix(".csv")),
    ):
        with pytest.raises(InputError, match=r"cannot write .*file/m\..*: not a directory"):
            write()


def logged(path: Path, rows: dict[int, dict[str, float]]) -> ScalarLog:
    log = ScalarLog(path)
    for step, row in rows.items():
        log.log(step, row)
    log.close()
    return log


def test_a_writer_waits_for_another_one_whose_line_is_not_whole_yet(tmp_path: Path) -> None:
    import fcntl

    file = tmp_path / "m.jsonl"
    records.append(file, make(1, 0.1))
    whole = file.read_bytes()
    with file.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(whole[:9])
        waiting = threading.Thread(target=records.append, args=(file, make(2, 0.2)))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        other.write(whole[9:])
    waiting.join(10)
    assert records.read(file) == [make(1, 0.1), make(1, 0.1), make(2, 0.2)]


def test_the_last_line_of_a_key_wins_and_a_failed_one_gives_no_rows() -> None:
    lines = [make(1, 0.1, 0.2), make(1, 0.3, analysis="b"), make(1, 0.4), make(2, 0.5)]
    lines += [make(2, 0.7, error="RuntimeError: after the first record"), make(3, error="RuntimeError: no")]
    table = records.frame([*lines, make(3, 0.6)])
    columns = table["step"], table["analysis"], table["value"], table["tokens"]
    assert list(zip(*columns, strict=True)) == [(1, "b", 0.3, 10), (1, "a", 0.4, 10), (3, "a", 0.6, 30)]


def test_tags_become_columns_of_their_own_kind() -> None:
    rows = [
        Record(metric="m", value=1.0, layer=2, other_layer=3, n=4, tags={"k": 4, "p": 2.0, "task": "x", "mixed": 1}),
        Record(metric="m", value=math.inf, tags={"k": 12, "mixed": "one", "layer": "top"}),
    ]
    table = records.frame([replace(make(None), records=rows)])
    assert list(table.columns) == [*records.COLUMNS, "k", "p", "task", "mixed", "tag_layer"]
    assert (table["k"].tolist(), str(table["k"].dtype)) == ([4, 12], "Int64")
    assert table.loc[table["k"] == 12, "value"].tolist() == [math.inf]
    assert table["p"].isna().tolist() == [False, True]
    assert table["mixed"].tolist() == [1, "one"]
    assert table["step"].isna().all()
    assert (table["layer"][0], table["task"][0]) == (2, "x")


def test_an_exported_table_holds_the_same_numbers_and_leaves_nothing_else(tmp_path: Path) -> None:
    table = records.frame([make(1, 0.1, 1e-17, k=4), make(2, 0.3, k="all")])
    for name, read in {"t.csv": pd.read_csv, "t.parquet": pd.read_parquet}.items():
        records.export(table, tmp_path / name)
        back = read(tmp_path / name)
        assert list(back.columns) == list(table.columns), name
        columns = {column: back[column].tolist() for column in ("value", "step", "k")}
        assert columns == {"value": table["value"].tolist(), "step": [1, 1, 2], "k": ["4", "4", "all"]}, name
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "t.parquet"}
    with pytest.raises(InputError, match=r"expected a file that ends in \.parquet or \.csv, got 't\.xlsx'"):
        records.export(table, tmp_path / "t.xlsx")


def test_a_curves_name_tells_analysis_metric_sorted_tags_and_layers() -> None:
    def key(analysis: str, **options) -> str:
        return records.key(analysis, Record(value=0.0, **options))

    assert key("trajectory", metric="line_shape_score", layer=3) == "trajectory/line_shape_score/layer_03"
    assert key("coupling", metric="coupling", tags={"k": 12}) == "coupling/coupling/k=12"
    assert (
        key("coupling", metric="pair", layer=3, other_layer=112, tags={"p": 0.1, "k": 4, "num_undefined": 7})
        == "coupling/pair/k=4/p=0.1/layer_03/other_layer_112"
    )


def asked(config: str = "c", data: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(name="a", config_hash=lambda: config, data_hash=lambda: data)


def test_the_last_line_with_these_options_and_weights_decides_whether_an_analysis_is_done() -> None:
    one, failed = make(1, 0.1), make(1, error="no")
    in_part = replace(one, records=[Record(metric="x", value=1.0), Record(metric="failed", value=1.0)])
    for is_done, lines, step, analysis, weights in (
        (True, [one], 1, asked(), "w1"),
        (False, [], 1, asked(), "w1"),
        (False, [one], 2, asked(), "w1"),
        (False, [one], 1, asked(config="other"), "w1"),
        (False, [one], 1, asked(data="other"), "w1"),
        (False, [one], 1, asked(), "other"),
        (False, [one, failed], 1, asked(), "w1"),
        (True, [failed, one, make(2, error="no")], 1, asked(), "w1"),
        (True, [make(None, 0.1)], None, asked(), "wNone"),
        (False, [in_part], 1, asked(), "w1"),  # a partly failed measurement is repeated
    ):
        store = records.Store("none.jsonl", lines)
        assert store.is_done("r", step, analysis, weights_hash=weights) == is_done, (lines, step, weights)


def test_new_metrics_can_be_requested_of_a_completed_analysis(tmp_path: Path) -> None:
    store, one = records.Store(tmp_path / "m.jsonl"), make(1, 0.1)
    store.add(one)
    assert not store.is_done("r", 1, asked(), weight_files={"a": "1"})
    store.add(replace(one, provenance=one.provenance | {"weight_files": {"a": "1"}}))
    for again in (store, records.Store(store.path)):
        assert again.is_done("r", 1, asked(), weight_files={"a": "1"})
        assert not again.is_done("r", 1, asked(), weight_files={"a": "2"})
        assert len([*again]) == 1, "the last of each identity"


def test_a_step_logged_in_parts_is_one_row(tmp_path: Path) -> None:
    log = ScalarLog(tmp_path / "metrics.jsonl")
    log.log(1, {"tokens": 8, "loss": 2.0, "skipped": True})
    log.log(1, {"lr": np.float32(0.5), "loss": 1.5})
    assert records.rows(log.path) == []
    log.log(2, {"loss": math.nan})
    assert records.rows(log.path) == [{"step": 1, "tokens": 8, "loss": 1.5, "skipped": 1, "lr": 0.5}]
    log.close()
    log.log(2, {"late": 7.0})  # after a checkpoint has closed the row
    log.close()
    log.close()
    row = records.rows(log.path)[-1]
    assert (row["step"], row["late"], math.isnan(row["loss"])) == (2, 7.0, True)
    assert isinstance(records.rows(log.path)[0]["tokens"], int)
    with pytest.raises(ValueError, match="cannot be named 'step'"):
        log.log(3, {"step": 1.0})


def test_truncating_to_an_offset_forgets_exactly_what_came_after_it(tmp_path: Path) -> None:
    assert ScalarLog(tmp_path / "metrics.jsonl").offset == 0
    log = logged(tmp_path / "metrics.jsonl", {step: {"loss": 1 / step} for step in range(1, 6)})
    kept, offset = records.rows(log.path), log.offset
    assert offset == log.path.stat().st_size
    for step, grows in ((6, False), (7, True)):
        log.log(step, {"loss": 0.0})
        assert (log.offset > offset) == grows
    ScalarLog(log.path).truncate(offset)
    assert records.rows(log.path) == kept
    resumed = logged(log.path, {6: {"loss": 9.0}})
    assert records.rows(log.path) == [*kept, {"step": 6, "loss": 9.0}]
    resumed.truncate(0)
    assert records.rows(log.path) == []


def test_going_back_or_to_an_offset_of_another_file_is_refused_and_nothing_is_cut(tmp_path: Path) -> None:
    log = logged(tmp_path / "metrics.jsonl", {5: {"loss": 1.0}})
    for again in (log, ScalarLog(log.path)):
        with pytest.raises(ValueError, match="has step 5 already, got 4: truncate it"):
            again.log(4, {"loss": 1.0})
    for offset in (3, 10_000):
        with pytest.raises(InputError, match=f"no row that ends at byte {offset}: restore it"):
            log.truncate(offset)
    assert records.rows(log.path) == [{"step": 5, "loss": 1.0}]


def test_a_torn_row_is_repaired_before_the_next_and_not_counted(tmp_path: Path) -> None:
    log = logged(tmp_path / "metrics.jsonl", {1: {"loss": 1.0}})
    with log.path.open("ab") as torn:
        torn.write(b'{"step": 2, "lo')
    assert len(records.rows(log.path)) == 1
    assert ScalarLog(log.path).offset == log.offset
    logged(log.path, {2: {"loss": 2.0}})
    assert [row["loss"] for row in records.rows(log.path)] == [1.0, 2.0]


LINE = {"run": "r", "step": 1, "tokens": 2, "analysis": "a", "seconds": 1.5, "records": [{"metric": "m", "value": 1}]}
RECORD = LINE["records"][0]  # type: ignore[index]
WRONG_MEASUREMENTS = [
    ({"run": 3}, "run: Input should be a valid string, got 3"),
    ({"step": 1e20}, "step: Input should be a valid integer, got 1e+20"),
    ({"step": -1}, "step: Input should be greater than or equal to 0, got -1"),
    ({"step": True}, "step: Input should be a valid integer, got True"),
    ({"seconds": -2}, "seconds: Input should be greater than or equal to 0, got -2"),
    ({"seconds": "inf"}, "seconds: Input should be a valid number, got 'inf'"),
    ({"provenance": {"audit": [1]}}, "provenance.audit: Input should be a valid string, got [1]"),
    ({"provenance": {"config_hash": {}}}, "provenance.config_hash: Input should be a valid string, got {}"),
    ({"records": [3]}, "records.0: Input should be an object, got 3"),
    ({"more": 1}, "more: Unexpected keyword argument, got 1"),
]


WRONG_RECORDS = [
    ({"metric": None}, "metric: Input should be a valid string, got None"),
    ({"value": "1.5"}, "value: Input should be a number, got '1.5'"),
    ({"stderr": []}, "stderr: Input should be a number, got []"),
    ({"layer": 1.5}, "layer: Input should be a valid integer, got 1.5"),
    ({"n": 2**70}, f"n: Input should be less than 9223372036854775808, got {2**70}"),
    ({"tags": {"k": {}}}, "tags.k: Input should be text or a number, got {}"),
]


def test_a_measurement_of_another_shape_is_refused_by_line_field_and_value(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    wrong = [({**LINE, **change}, says) for change, says in WRONG_MEASUREMENTS]
    wrong += [
        ({**LINE, "records": [RECORD, {**RECORD, **change}]}, f"records.1.{says}") for change, says in WRONG_RECORDS
    ]
    for line, says in wrong:
        file.write_text(f"{json.dumps(LINE)}\n{json.dumps(line)}\n")
        with pytest.raises(InputError, match=rf"m\.jsonl, line 2: {re.escape(says)}; restore the file from a copy"):
            records.read(file)
    for field in LINE:
        file.write_text(json.dumps({name: value for name, value in LINE.items() if name != field}) + "\n")
        with pytest.raises(InputError, match=f"line 1: {field}: Field required"):
            records.read(file)


def test_scalars_that_are_no_numbers_are_refused_and_integers_stay_integers(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "tokens": 9007199254740993, "loss": "nan", "low": "-inf", "count": 3}\n')
    (row,) = records.rows(file)
    assert math.isnan(row.pop("loss"))
    assert row == {"step": 1, "tokens": 2**53 + 1, "low": -math.inf, "count": 3}
    for line, says in (
        ('{"step": 1, "loss": "low"}', "loss: Input should be a number, got 'low'"),
        ('{"step": 1, "loss": null}', "loss: Input should be a number, got None"),
        ('{"step": 1, "loss": true}', "loss: Input should be a number, got True"),
        ('{"step": "1"}', "step: Input should be a valid integer, got '1'"),
        ('{"loss": 2}', "step: Field required"),
        ('{"step": 1, "tokens": "nan"}', "tokens: Input should be a valid integer, got 'nan'"),
        ("[1]", "Input should be an object, got [1]"),
    ):
        file.write_text(line + "\n")
        with pytest.raises(InputError, match=rf"metrics\.jsonl, line 1: {re.escape(says)}; restore"):
            records.rows(file)
