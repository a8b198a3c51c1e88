"""Measuring a series gives the numbers of training, once each, without suspects, also after interruptions."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from lit_layers import identity, records
from lit_layers.analyses import Coupling, Trajectory
from lit_layers.errors import InputError
from lit_layers.measuring.offline import analyze_series
from lit_layers.series import Checkpoint, Models, StepFolders
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.run_folder import RunFolder
from tests.support.listed_batches import Listed
from tests.support.random_text import RandomText
from tests.support.rounding import assert_same_numbers
from tests.support.series_hub import make_series, template
from tests.support.tiny_training import fit


def analyses(k: int = 2) -> list:
    return [Trajectory(batches=RandomText()), Coupling(batches=RandomText(), k=(k,))]


def few() -> list:
    ids = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(2))
    return [Trajectory(batches=Listed({"input_ids": ids}))]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a run that training saved and measured."""
    root = tmp_path_factory.mktemp("runs") / "run"
    steps = {"every": 2}
    fit(root, [SeriesCheckpoint(steps, root), EmergenceCallback(analyses(), steps, root)], steps=4)
    return root


def lines(root: Path) -> list:
    return records.read(root / "measurements.jsonl")


def test_a_trained_series_gives_the_numbers_that_training_wrote(run, tmp_path):
    result = analyze_series(StepFolders(run), analyses(), root=tmp_path / "run")
    assert result.failures == []
    found, written = lines(tmp_path / "run"), lines(run)
    assert [(m.run, m.step, m.analysis) for m in found] == [(m.run, m.step, m.analysis) for m in written]
    assert_same_numbers(found, written)
    assert [m.provenance["weights_hash"] for m in found] == [m.provenance["weights_hash"] for m in written]
    assert {m.provenance["audit"] for m in found} == {"clean (level: weights)"}


def test_a_renamed_run_folder_is_not_measured_twice(tmp_path):
    root, steps = tmp_path / "before", {"every": 2}
    about = RunFolder(root, config="", options={"steps": steps}, mirror=None)
    fit(root, [about, SeriesCheckpoint(steps, root), EmergenceCallback(analyses(), steps, root)], steps=4)
    moved = root.rename(tmp_path / "after")
    result = analyze_series(StepFolders(moved), analyses(), root=moved)
    assert (result.measurements, result.num_known, len(lines(moved))) == ([], 6, 6)
    assert {m.run for m in lines(moved)} == {"before"}


def test_a_second_call_loads_nothing_and_other_options_or_precisions_are_measured(run, tmp_path, monkeypatch):
    root = tmp_path / "out"
    assert len(analyze_series(StepFolders(run), analyses(), root=root).measurements) == 6
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("a checkpoint was loaded"))
        again = analyze_series(StepFolders(run), analyses(), root=root)
    assert (again.measurements, again.num_known) == ([], 6)
    other = analyze_series(StepFolders(run), analyses(k=3), root=root)
    assert [(m.step, m.analysis) for m in other.measurements] == [(step, "coupling") for step in (0, 2, 4)]
    wide = analyze_series(StepFolders(run), analyses()[:1], root=root, dtype="float64")
    assert ([m.provenance["dtype"] for m in wide.measurements], wide.num_known) == (["float64"] * 3, 0)
    assert analyze_series(StepFolders(run), analyses()[:1], root=root, dtype="float64").num_known == 3


def test_one_warning_names_both_versions_of_a_series_continued_with_another_version(run, tmp_path, monkeypatch, caplog):
    analyze_series(StepFolders(run, steps=[0]), few(), root=tmp_path / "out")
    analyze_series(StepFolders(run, steps=[2]), few(), root=tmp_path / "out")
    assert not caplog.records
    now = identity.versions()
    monkeypatch.setattr(identity, "versions", lambda: {**now, "transformers": "99.1.0"})
    analyze_series(StepFolders(run), few(), root=tmp_path / "out")
    expected = f"out was measured with transformers {now['transformers']} and goes on with transformers 99.1.0"
    assert [each.getMessage().startswith(expected) for each in caplog.records] == [True]
    assert len(lines(tmp_path / "out")) == 3


def test_a_damaged_checkpoint_is_named_and_the_others_are_measured(run, tmp_path):
    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-50])

    for name, damage in (
        ("model.safetensors", cut),
        ("config.json", lambda path: path.write_text('{"model_type": "gpt2",')),
    ):
        series = tmp_path / name / "series"
        shutil.copytree(run, series)
        damage(series / "step-000000002" / name)
        result = analyze_series(StepFolders(series), few(), root=tmp_path / name / "out")
        assert [m.step for m in lines(tmp_path / name / "out")] == [0, 4], name
        (sentence,) = result.failures
        assert "step-000000002 cannot be loaded" in sentence, name


def test_changed_data_is_measured_again_and_old_measurements_stay(run, tmp_path, monkeypatch):
    root = tmp_path / "out"
    for content, num_known in (("old", 0), ("new", 0), ("old", 3)):
        monkeypatch.setattr(Listed, "content_hash", lambda self, content=content: content)
        assert analyze_series(StepFolders(run), few(), root=root).num_known == num_known
    assert len(lines(root)) == 6


def test_a_later_suspicion_marks_old_measurements_and_only_an_audit_of_all_clears_it(tmp_path):
    series, root = tmp_path / "series", tmp_path / "out"
    make_series(template(tmp_path / "model"), series, (0, 2, 4, 8), values={2: 2.5 / 64, 4: 2.5 / 64})
    analyze_series(StepFolders(series, [0, 2]), few(), root=root)
    first = lines(root)
    assert all(m.provenance["audit"].startswith("clean") for m in first)
    found = analyze_series(StepFolders(series), few(), root=root)
    assert [left.step for left in found.left_out] == [2, 4]
    corrected = {m.step: m for m in records.latest(lines(root))}
    assert corrected[2].provenance["audit"] == "suspect: identical weights"
    other = {**corrected[2].provenance, "audit": first[1].provenance["audit"]}
    assert dataclasses.replace(corrected[2], provenance=other) == first[1]
    assert len(lines(root)) == 4  # 0 and 2, 2 again, 8
    analyze_series(StepFolders(series), few(), root=tmp_path / "insisted", allow_suspect=True)
    verdicts = {m.step: m.provenance["audit"] for m in lines(tmp_path / "insisted")}
    assert {step for step, verdict in verdicts.items() if verdict.startswith("suspect: ")} == {2, 4}
    narrow = analyze_series(StepFolders(series, [0, 2]), few(), root=root)
    assert [left.step for left in narrow.left_out] == [2]
    assert len(lines(root)) == 4
    shutil.rmtree(series / "step4")
    whole = analyze_series(StepFolders(series), few(), root=root)
    assert (whole.left_out, whole.measurements, whole.num_known) == ([], [], 3)
    assert {m.step for m in records.latest(lines(root)) if m.provenance["audit"].startswith("clean")} == {0, 2, 8}


def test_measurements_of_training_are_marked_when_their_checkpoint_becomes_suspect(run, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    shutil.copytree(root / "step-000000002", root / "step-000000003")
    result = analyze_series(StepFolders(root), analyses(), root=root)
    assert [left.step for left in result.left_out] == [2, 3]
    before, after = lines(run), lines(root)
    assert after[: len(before)] == before
    assert [(m.step, m.analysis, m.provenance["audit"]) for m in after[len(before) :]] == [
        (2, name, "suspect: identical weights") for name in ("trajectory", "coupling")
    ]
    assert [m.records for m in after[len(before) :]] == [m.records for m in before if m.step == 2]


def test_two_series_do_not_become_one_curve_and_each_model_without_steps_is_a_run(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    analyze_series(StepFolders(run, [0, 2]), few(), root=tmp_path / "out")
    before = (tmp_path / "out" / "measurements.jsonl").read_bytes()
    with pytest.raises(InputError, match="holds measurements of .*run, and .*other would be drawn as one curve"):
        analyze_series(StepFolders(other), few(), root=tmp_path / "out")
    assert (tmp_path / "out" / "measurements.jsonl").read_bytes() == before
    names = [str(run / "step-000000000"), str(run / "step-000000004")]
    analyze_series(Models(names), few(), root=tmp_path / "models")
    assert [(m.run, m.step) for m in lines(tmp_path / "models")] == [(name, None) for name in names]


def test_two_shards_measure_every_checkpoint_once_in_one_table(run, tmp_path):
    for index, measured in enumerate(([0, 4], [0, 2, 4])):
        analyze_series(StepFolders(run), few(), root=tmp_path / "out", shard=f"{index}/2")
        assert sorted(m.step for m in lines(tmp_path / "out")) == measured
