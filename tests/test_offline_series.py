"""A series is measured as training measured it, once, without its suspects, whatever breaks on the way."""

import shutil
from pathlib import Path

import pytest
import torch

from lit_layers import records
from lit_layers.analyses import Coupling, Trajectory
from lit_layers.errors import InputError
from lit_layers.offline_series import analyze_series
from lit_layers.series import Checkpoint, HubRevisions, Models, Retry, StepFolders
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from tests.support.listed_batches import Listed
from tests.support.series_hub import make_series, served, template
from tests.support.tiny_training import RandomText, fit


def analyses(k: int = 2) -> list:
    return [Trajectory(batches=RandomText()), Coupling(batches=RandomText(), k=(k,))]


def few() -> list:
    ids = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(2))
    return [Trajectory(batches=Listed({"input_ids": ids}))]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that training saved and measured."""
    root = tmp_path_factory.mktemp("runs") / "run"
    steps = {"every": 2}
    fit(root, [SeriesCheckpoint(steps, root), EmergenceCallback(analyses(), steps, root)], steps=4)
    return root


def lines(root: Path) -> list:
    return records.read(root / "measurements.jsonl")


def test_a_trained_series_gives_exactly_the_numbers_that_training_wrote(run, tmp_path):
    result = analyze_series(StepFolders(run), analyses(), root=tmp_path / "run")
    assert result.failures == []
    found, written = lines(tmp_path / "run"), lines(run)
    assert [(m.run, m.step, m.analysis) for m in found] == [(m.run, m.step, m.analysis) for m in written]
    assert [m.records for m in found] == [m.records for m in written]
    assert [m.provenance["weights_hash"] for m in found] == [m.provenance["weights_hash"] for m in written]
    assert {m.provenance["audit"] for m in found} == {"clean"}


def test_in_the_runs_own_folder_nothing_is_measured_twice(run, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    result = analyze_series(StepFolders(root), analyses(), root=root)
    assert result.measurements == []
    assert result.num_known == 6
    assert len(lines(root)) == 6


def test_again_it_loads_nothing_and_another_option_or_weight_is_measured(run, tmp_path, monkeypatch):
    root = tmp_path / "out"
    assert len(analyze_series(StepFolders(run), analyses(), root=root).measurements) == 6
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("a checkpoint was loaded"))
        again = analyze_series(StepFolders(run), analyses(), root=root)
    assert (again.measurements, again.num_known) == ([], 6)
    other = analyze_series(StepFolders(run), analyses(k=3), root=root)
    assert [(m.step, m.analysis) for m in other.measurements] == [(step, "coupling") for step in (0, 2, 4)]


def test_a_suspect_is_left_out_and_its_verdict_stands_in_the_measurement_if_insisted_on(run, tmp_path):
    series = tmp_path / "series"
    shutil.copytree(run, series)
    shutil.copy(series / "step-000000004" / "model.safetensors", series / "step-000000002")
    result = analyze_series(StepFolders(series), few(), root=tmp_path / "out")
    assert "step-000000002" in {found.name for found in result.left_out}
    assert 2 not in {m.step for m in lines(tmp_path / "out")}
    analyze_series(StepFolders(series), few(), root=tmp_path / "insisted", allow_suspect=True)
    verdicts = {m.step: m.provenance["audit"] for m in lines(tmp_path / "insisted")}
    assert verdicts[0] == "clean"
    assert verdicts[2].startswith("suspect: ")


def test_a_damaged_checkpoint_is_named_and_the_others_are_measured(run, tmp_path):
    series = tmp_path / "series"
    shutil.copytree(run, series)
    path = series / "step-000000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    result = analyze_series(StepFolders(series), few(), root=tmp_path / "out")
    assert [m.step for m in lines(tmp_path / "out")] == [0, 4]
    (sentence,) = result.failures
    assert "step-000000002 cannot be loaded" in sentence


def test_two_shards_measure_every_checkpoint_once_in_one_table(run, tmp_path):
    for index in range(2):
        analyze_series(StepFolders(run), few(), root=tmp_path / "out", shard=(index, 2))
    assert sorted(m.step for m in lines(tmp_path / "out")) == [0, 2, 4]
    with pytest.raises(InputError, match="shard: expected i/n with i from 0 to n - 1, got 2/2"):
        analyze_series(StepFolders(run), few(), root=tmp_path / "out", shard=(2, 2))


def test_models_without_steps_are_runs_of_their_own(run, tmp_path):
    names = [str(run / "step-000000000"), str(run / "step-000000004")]
    analyze_series(Models(names), few(), root=tmp_path / "out")
    assert [(m.run, m.step) for m in lines(tmp_path / "out")] == [(name, None) for name in names]


def test_a_series_of_the_hub_is_measured_interrupted_and_continued(tmp_path, monkeypatch):
    steps = (0, 1, 2, 4, 8, 16)
    make_series(template(tmp_path / "model"), tmp_path / "hub" / "lab" / "tiny", steps)
    with served(tmp_path / "hub", tmp_path / "cache", monkeypatch) as hub:
        series = HubRevisions("lab/tiny", retry=Retry(attempts=2, sleep=lambda _: None))
        loads = []
        real = Checkpoint.load

        def interrupted(self, **options):
            loads.append(self.step)
            if len(loads) == 4:
                raise KeyboardInterrupt
            return real(self, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                analyze_series(series, few(), root=tmp_path / "out", keep_downloads=False)
        assert [m.step for m in lines(tmp_path / "out")] == [0, 1, 2]
        hub.fail(r"model\.safetensors", 503, times=1)
        result = analyze_series(series, few(), root=tmp_path / "out", keep_downloads=False)
        assert [m.step for m in lines(tmp_path / "out")] == list(steps)
        assert (result.failures, result.num_known) == ([], 3)
    assert all(m.provenance["commit"] for m in lines(tmp_path / "out"))
    assert not [path for path in (tmp_path / "cache").rglob("*.safetensors") if path.exists()]
