"""A series on a simulated Ray cluster: what is sent to workers, what comes back, and refusals."""

import contextlib
import pickle
import shutil
import sys
from types import SimpleNamespace

import pytest

from lit_layers import identity
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.measuring import engine
from lit_layers.measuring.offline import analyze_series
from lit_layers.series import HubRevisions, OneModel, StepFolders
from tests.support.every_analysis import image_analyses, prompt_analyses, prompts, save_inputs, text_analyses
from tests.support.measured_series import new_recipe, sorted_lines, trained, two_groups
from tests.support.series_hub import make_series, served, template


class RayError(Exception):
    pass


class Pretended:
    """A simulated Ray that runs a task when its result is requested. Tasks of `lost` checkpoints never end.

    Arguments and results of tasks are pickled.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {}))
    cloudpickle = pickle

    def __init__(self) -> None:
        self.sent, self.lost = [], ""
        self.resources = {"CPU": 4.0}

    def nodes(self):
        return [{"Alive": True, "Resources": self.resources}]

    def put(self, value):
        return value

    def remote(self, **resources):
        def made(function):
            def call(*given):
                self.sent.append(given[2])
                return given[2], lambda: pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(given)))))

            return SimpleNamespace(remote=call)

        return made

    def wait(self, tasks, **_):
        return tasks[-1:], tasks[:-1]

    def get(self, task):
        name, result = task
        if name == self.lost:
            raise RayError("the node is gone")
        return result()

    def cancel(self, task, force):
        pass


@pytest.fixture
def ray(monkeypatch):
    made = Pretended()
    monkeypatch.setattr(engine, "cluster", lambda: contextlib.nullcontext(made))
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run")


def test_the_records_equal_those_of_one_process_with_their_values_of_prompts(run, tmp_path, ray):
    alone = analyze_series(StepFolders(run), two_groups(), root=tmp_path / "alone" / "run")
    carried = analyze_series(StepFolders(run), two_groups(), root=tmp_path / "carried" / "run", engine="ray")
    assert sorted_lines(tmp_path / "carried" / "run") == sorted_lines(tmp_path / "alone" / "run")
    assert (carried.num_known, carried.failures, len(carried.measurements)) == (0, [], 9)
    assert (carried.settings, carried.audit) == (alone.settings, alone.audit)
    assert ray.sent == ["step-000000000", "step-000000002", "step-000000004"]
    values = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("values/*/*.safetensors")}
        for root in (tmp_path / "alone", tmp_path / "carried")
    ]
    assert values[0] == values[1] != {}
    one = analyze_series(OneModel(run / "step-000000004"), two_groups(), root=tmp_path / "one", engine="ray")
    of_last = [m.records for m in sorted_lines(tmp_path / "alone" / "run") if m.step == 4]
    assert [m.records for m in sorted(one.measurements, key=lambda m: m.analysis)] == of_last
    assert len(ray.sent) == 4, "one model is one task"


def test_completed_measurements_are_not_repeated(run, tmp_path, ray):
    root = tmp_path / "run"
    analyze_series(StepFolders(run), two_groups()[:2], root=root)
    again = analyze_series(StepFolders(run), two_groups(), root=root, engine="ray")
    assert sorted((m.step, m.analysis) for m in again.measurements) == [(step, "coupling") for step in (0, 2, 4)]
    assert analyze_series(StepFolders(run), two_groups(), root=root, engine="ray").num_known == 9
    assert len(ray.sent) == 3


def test_a_checkpoint_that_cannot_be_loaded_or_loses_its_workers_is_named_and_the_others_are_measured(
    run, tmp_path, ray
):
    series = tmp_path / "series"
    shutil.copytree(run, series)
    (series / "step-000000002" / "config.json").write_text('{"model_type": "gpt2",')
    ray.lost = "step-000000004"
    result = analyze_series(StepFolders(series), two_groups(), root=tmp_path / "out", engine="ray")
    assert {each.step for each in sorted_lines(tmp_path / "out")} == {0}
    damaged, lost = sorted(result.failures)
    assert "step-000000002 cannot be loaded" in damaged
    assert lost.startswith("step-000000004: 4 workers were lost that measured it")


def test_a_worker_with_other_versions_is_refused_before_a_number_is_written(run, tmp_path, ray, monkeypatch):
    here = identity.versions()
    monkeypatch.setattr(engine, "versions", lambda: {**here, "torch": "1.0"})
    with pytest.raises(InputError, match=r"^engine: a worker has torch 1.0, and this command has torch"):
        analyze_series(StepFolders(run), two_groups(), root=tmp_path / "out", engine="ray")
    assert not (tmp_path / "out" / "measurements.jsonl").exists()


def test_options_that_a_cluster_cannot_serve_are_refused(run, tmp_path, ray, monkeypatch):
    def refuses(match, **options):
        with pytest.raises(InputError, match=match):
            analyze_series(StepFolders(run), two_groups(), root=tmp_path / "out", engine="ray", **options)

    refuses("device: cuda was asked for and no machine of the Ray cluster has a GPU", device="cuda")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses(r"engine: ray is not installed: pip install 'lit_layers\[ray\]'")


@pytest.mark.soak
def test_workers_fetch_a_series_of_the_hub_and_their_fingerprints_are_audited(tmp_path, monkeypatch, ray):
    make_series(template(tmp_path / "model"), tmp_path / "hub" / "lab" / "tiny", (0, 1, 2, 4))
    results = {}
    for how in ("process", "ray"):
        with served(tmp_path / "hub", tmp_path / how / "cache", monkeypatch):
            series, root = HubRevisions("lab/tiny"), tmp_path / how / "run"
            results[how] = analyze_series(series, two_groups(), root=root, engine=how, keep_downloads=False)
        assert not [path for path in (tmp_path / how / "cache").rglob("*.safetensors") if path.exists()]
    assert sorted_lines(tmp_path / "ray" / "run") == sorted_lines(tmp_path / "process" / "run")
    assert results["ray"].audit == results["process"].audit
    assert results["ray"].audit.level == "weights"


def test_every_analysis_can_be_sent_to_a_worker(tmp_path):
    analyses = [*prompt_analyses(prompts()), *image_analyses(), *text_analyses(save_inputs(tmp_path / "inputs"))]
    assert len(analyses) > 30
    for one in analyses:
        there = pickle.loads(pickle.dumps(one))
        assert (there.name, there.config_hash(), there.data_hash()) == (one.name, one.config_hash(), one.data_hash())


def test_a_recipe_may_name_the_engine(tmp_path, ray, capsys):
    run = make_series(template(tmp_path / "model", vocab_size=300), tmp_path / "run", (0, 4), name="step-{:09d}")
    shutil.rmtree(run / "main")
    recipe = tmp_path / "engine.yaml"
    recipe.write_text("engine: ray\n")
    command = ["analyze", str(run), "--steps", "[0, 4]", "--config", str(new_recipe(tmp_path)), "--config", str(recipe)]
    assert main([*command, "--root", str(tmp_path / "out" / "run")]) == 0
    assert "2 measured" in capsys.readouterr().out
    assert len(ray.sent) == 2
