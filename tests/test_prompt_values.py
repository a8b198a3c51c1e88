"""Files with values of prompts: correct values, in the right order, of bounded size."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from lit_layers import measure, records
from lit_layers.analyses import Coupling, Lens, Representation, Trajectory
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Record, Store, key, read_values, values_path, write_values
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


@pytest.mark.parametrize("make", [Trajectory, Representation, lambda **given: Coupling(**given, k=[2])])
def test_the_value_of_a_prompt_equals_the_analysis_of_only_that_prompt(make):
    model, batches = tiny("gpt2", torch.float64), [*RandomText(num_batches=2)]
    found = measure(model, make(batches=Listed(*batches)), run="r", step=0)
    rows = [{name: part[row : row + 1] for name, part in batch.items()} for batch in batches for row in range(4)]
    alone = [measure(model, make(batches=Listed(row)), run="r", step=0).records for row in rows]
    values = [{key("a", record): record.value for record in of_row} for of_row in alone]
    of_prompts = [record for record in found.records if record.by_prompt is not None]
    assert len(of_prompts) > 5
    for record in of_prompts:
        truth = [of_row[key("a", record)] for of_row in values]
        np.testing.assert_allclose(record.by_prompt, truth, rtol=2e-5, atol=1e-6)


def test_values_of_a_ratio_have_its_mean_and_error_in_the_order_of_prompts():
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


def test_a_watched_run_stores_values_of_prompts(tmp_path):
    analyses = [Trajectory(batches=RandomText()), Lens(batches=RandomText())]
    watch = EmergenceCallback(analyses, [0, 2, 4], tmp_path, run="r")
    fit(tmp_path, [watch], steps=4)
    lines = records.read(watch.measurer.file)
    assert "by_prompt" not in watch.measurer.file.read_text()
    assert len([*(tmp_path / "values").rglob("*.safetensors")]) == 6
    for m in lines:
        there = read_values(tmp_path, m)
        assert len(there) > 5
        for record in (each for each in m.records if key(m.analysis, each) in there):
            values = there[key(m.analysis, record)].astype(np.float64)
            assert len(values) == 8
            assert np.nanstd(values, ddof=1) / np.sqrt((~np.isnan(values)).sum()) == pytest.approx(
                record.stderr, rel=1e-3
            )


def test_a_step_that_is_measured_again_replaces_its_file_and_a_stale_one_is_ignored(tmp_path):
    store = Store(tmp_path / "measurements.jsonl")
    first, again = measured(), measured(seed=1)
    told = store.add(first)
    assert all(record.by_prompt is None for record in told.records)
    path = values_path(tmp_path, first)
    store.add(again)
    assert [*tmp_path.rglob("*.safetensors")] == [path]
    (line,) = store
    there = read_values(tmp_path, line)
    for record in again.records:
        np.testing.assert_array_equal(there[key("a", record)], record.by_prompt)
    store.add(replace(line, provenance={**line.provenance, "audit": "clean"}))  # a verdict is written later
    assert len(read_values(tmp_path, line)) == 3
    other = replace(line, provenance={**line.provenance, "weights_hash": "another"})
    assert read_values(tmp_path, other) == {}
    store.add(replace(measured(seed=2), provenance=other.provenance))
    assert [*tmp_path.rglob("*.safetensors")] == [path]
    assert read_values(tmp_path, line) == {}


def test_only_means_that_form_curves_are_stored_and_vectors_are_not_values(tmp_path):
    m = measured(curves=2)
    one, two = m.records
    others = [replace(one, metric="pair", other_layer=2), replace(one, tags={"row": 1}), replace(one, value=9.0)]
    others += [replace(one, tags={"split": "train"}), replace(one, metric="none", by_prompt=None)]
    states = np.arange(6, dtype=np.float32).reshape(3, 2)
    write_values(tmp_path, replace(m, records=[*others, one, replace(two, states=states)]))
    kept = load_file(values_path(tmp_path, m))
    assert kept.keys() == {"a/m/k=2/layer_00", "a/m/k=2/layer_01", "layer-1"}
    np.testing.assert_array_equal(kept["layer-1"], states)
    assert read_values(tmp_path, m).keys() == {"a/m/k=2/layer_00", "a/m/k=2/layer_01"}


def test_a_full_disk_loses_only_the_values_of_prompts_and_lines_never_contain_them(tmp_path, caplog):
    (tmp_path / "values").write_text("a file in the way")
    store = Store(tmp_path / "measurements.jsonl")
    store.add(measured(0))
    assert len(records.read(store.path)) == 1
    assert "the values of prompts cannot be written" in caplog.text
    line = json.loads(store.path.read_text())
    line["records"][0]["by_prompt"] = [1.0]
    store.path.write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match="by_prompt"):
        records.read(store.path)


def test_a_damaged_file_is_reported_and_replaced(tmp_path, caplog):
    m = measured()
    write_values(tmp_path, m)
    path = values_path(tmp_path, m)
    whole = path.read_bytes()
    for number, damaged in enumerate((b"", whole[: len(whole) // 2], b"no tensors"), start=1):
        path.write_bytes(damaged)
        assert read_values(tmp_path, m) == {}
        assert caplog.text.count("is damaged") == number
    write_values(tmp_path, m)
    assert len(read_values(tmp_path, m)) == 3
