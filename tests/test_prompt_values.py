"""The values of prompts in files beside the measurements: right, in place and within their size."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lit_layers import measure, records
from lit_layers.analyses import Coupling, Lens, Representation, Trajectory
from lit_layers.errors import InputError
from lit_layers.prompt_values import ValueFiles, key_of, path_of, read_values
from lit_layers.records import Measurement, Record, Store
from lit_layers.training import EmergenceCallback
from tests.support.listed_batches import Listed
from tests.support.random_text import RandomText
from tests.support.tiny_models import tiny
from tests.support.tiny_training import fit


def measured(step: int = 0, *, prompts: int = 40, curves: int = 3, seed: int = 0, analysis: str = "a") -> Measurement:
    rng = np.random.default_rng([seed, step])
    found = []
    for layer in range(curves):
        values = rng.normal(size=prompts).astype(np.float32)
        record = Record(metric="m", value=float(values.astype(np.float64).mean()), layer=layer, n=prompts)
        found.append(replace(record, tags={"k": 2}, by_prompt=values))
    provenance = {"config_hash": "c", "data_hash": "d"}
    about = {"run": "r", "step": step, "tokens": None, "seconds": 0.1, "provenance": provenance}
    return Measurement(analysis=analysis, records=found, **about)


def kept(root: Path, measurement: Measurement):
    (found,) = read_values(root, [measurement])
    return found


@pytest.mark.parametrize("make", [Trajectory, Representation, lambda **given: Coupling(**given, k=[2])])
def test_the_value_of_a_prompt_is_what_the_analysis_finds_on_it_alone(make):
    model, batches = tiny("gpt2", torch.float64), [*RandomText(num_batches=2)]
    found = measure(model, make(batches=Listed(*batches)), run="r", step=0)
    rows = [{name: part[row : row + 1] for name, part in batch.items()} for batch in batches for row in range(4)]
    alone = [measure(model, make(batches=Listed(row)), run="r", step=0).records for row in rows]
    values = [{place(record): record.value for record in of_row} for of_row in alone]
    of_prompts = [record for record in found.records if record.by_prompt is not None]
    assert len(of_prompts) > 5
    for record in of_prompts:
        truth = [of_row[place(record)] for of_row in values]
        np.testing.assert_allclose(record.by_prompt, truth, rtol=2e-5, atol=1e-6)


def place(record: Record) -> tuple:
    """Without what tags count."""
    tags = {name: tag for name, tag in record.tags.items() if not name.startswith("num_")}
    return (*key_of(replace(record, tags=tags)), record.other_layer)


def test_values_of_a_ratio_have_its_mean_and_error_and_stand_at_their_prompts():
    ids = torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    mask[2, 1:] = 0  # one token: nothing to predict
    found = measure(tiny("gpt2"), Lens(batches=Listed({"input_ids": ids, "attention_mask": mask})), run="r", step=0)
    losses = [record for record in found.records if record.metric == "logit_lens_loss"]
    assert losses
    for record in [*losses, *(each for each in found.records if each.metric == "logit_lens_perplexity")]:
        assert record.by_prompt is not None
        assert np.isnan(record.by_prompt).tolist() == [False, False, True, False, False]
        of_prompts = record.by_prompt[[0, 1, 3, 4]].astype(np.float64)
        assert of_prompts.mean() == pytest.approx(record.value, rel=1e-5)
        assert of_prompts.std(ddof=1) / 2 == pytest.approx(record.stderr, rel=1e-4)


def test_a_watched_run_keeps_them_beside_its_lines(tmp_path):
    analyses = [Trajectory(batches=RandomText()), Lens(batches=RandomText())]
    watch = EmergenceCallback(analyses, [0, 2, 4], tmp_path, run="r")
    fit(tmp_path, [watch], steps=4)
    lines = records.read(watch.measurer.file)
    assert "by_prompt" not in watch.measurer.file.read_text()
    assert len([*(tmp_path / "values").rglob("*.parquet")]) == 6
    for m, there in zip(lines, read_values(tmp_path, lines), strict=True):
        assert not isinstance(there, str), there
        assert len(there) > 5
        for record in (each for each in m.records if key_of(each) in there):
            values = there[key_of(record)].astype(np.float64)
            assert len(values) == 8
            assert np.nanstd(values, ddof=1) / np.sqrt((~np.isnan(values)).sum()) == pytest.approx(
                record.stderr, rel=1e-3
            )


@pytest.mark.soak
def test_a_step_that_is_measured_again_replaces_its_file_and_a_stale_one_is_ignored(tmp_path):
    store = Store(tmp_path / "measurements.jsonl", values=ValueFiles(tmp_path))
    first, again = measured(), measured(seed=1)
    told = store.add(first)
    assert all(record.by_prompt is None for record in told.records)
    path = path_of(tmp_path, first)
    old = path.read_bytes()
    store.add(again)
    assert [*tmp_path.rglob("*.parquet")] == [path]
    (line,) = store
    there = kept(tmp_path, line)
    for record in again.records:
        np.testing.assert_array_equal(there[key_of(record)], record.by_prompt)
    store.add(replace(line, provenance={**line.provenance, "audit": "clean"}))  # a verdict is written later
    assert len(kept(tmp_path, line)) == 3
    path.write_bytes(old)
    assert "of other weights" in kept(tmp_path, line)


def test_what_makes_no_curve_or_is_no_mean_is_not_kept(tmp_path):
    m = measured()
    one = m.records[0]
    others = [replace(one, metric="pair", other_layer=2), replace(one, tags={"row": 1}), replace(one, value=9.0)]
    others += [replace(one, tags={"split": "train"}), replace(one, metric="none", by_prompt=None)]
    ValueFiles(tmp_path).write(replace(m, records=[*others, one]))
    assert pq.read_table(path_of(tmp_path, m)).num_rows == 1


def test_a_disk_that_takes_nothing_costs_the_values_alone(tmp_path, caplog):
    (tmp_path / "values").write_text("a file in the way")
    store = Store(tmp_path / "measurements.jsonl", values=ValueFiles(tmp_path))
    store.add(measured(0))
    store.add(measured(1))
    assert len(records.read(store.path)) == 2
    assert len(caplog.records) == 1


def parquet(table: pa.Table, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def test_files_that_are_not_of_this_measurement_are_told_in_a_sentence_each_and_replaced(tmp_path):
    files, steps = ValueFiles(tmp_path), [measured(step) for step in range(5)]
    for m in steps:
        files.write(m)
    paths = [path_of(tmp_path, m) for m in steps]
    whole, good = paths[0].read_bytes(), pq.read_table(paths[0])
    zeros = pa.array([[0.0] * 40] * 3, pa.list_(pa.float32()))
    paths[0].write_bytes(b"")
    paths[1].write_bytes(whole[: len(whole) // 2])
    paths[2].write_bytes(parquet(good.drop_columns("tags")))
    paths[3].write_bytes(parquet(good.set_column(3, "values", zeros)))
    *found, last = read_values(tmp_path, steps)
    for sentence, told in zip(["is damaged"] * 3 + ["of other weights"], found, strict=True):
        assert isinstance(told, str)
        assert sentence in told
    assert len(last) == 3
    files.write(steps[2])
    assert len(kept(tmp_path, steps[2])) == 3


def test_a_file_without_rows_has_no_values_and_the_next_one_is_read(tmp_path):
    steps = [measured(step) for step in range(2)]
    for m in steps:
        ValueFiles(tmp_path).write(m)
    path = path_of(tmp_path, steps[0])
    path.write_bytes(parquet(pq.read_table(path).slice(0, 0), store_schema=False))
    assert [len(found) for found in read_values(tmp_path, steps)] == [0, 3]


def test_a_line_cannot_bring_values_with_it(tmp_path):
    store = Store(tmp_path / "measurements.jsonl")
    store.add(measured())
    line = json.loads(store.path.read_text())
    line["records"][0]["by_prompt"] = [1.0]
    store.path.write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match="by_prompt"):
        records.read(store.path)
