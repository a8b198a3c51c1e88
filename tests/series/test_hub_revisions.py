"""Series of the Hub are listed, loaded, retried and refused. A local stand-in Hub serves the real client."""

import hashlib
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.series import HubRevisions, Models, audit, open_series
from lit_layers.series.checkpoint_sources import HubSource, ModelFiles
from tests.support.fake_hub import FakeHub
from tests.support.series_hub import TWELVE, make_series, make_step


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Remove all waiting, in our code and in huggingface_hub, which retries some requests itself."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def gets(hub: FakeHub, part: str) -> list[dict]:
    return [request for request in hub.requests if part in request["path"] and request["method"] == "GET"]


def test_a_series_is_listed_with_one_request_and_in_step_order(hub, root, model):
    make_series(model, root / "org" / "tiny")
    series = HubRevisions("org/tiny")
    assert not hub.requests
    assert [found.step for found in series] == list(TWELVE)
    assert [found.name for found in series][-1] == "step1000"
    assert len(gets(hub, "/api/models/")) == 1
    assert {found.tokens for found in series} == {None}
    assert {found.series for found in series} == {"org/tiny"}


def test_a_checkpoint_is_loaded_from_its_commit_and_reports_its_origin(hub, root, model):
    make_series(model, root / "org" / "tiny", [0, 1, 2])
    checkpoint = HubRevisions("org/tiny", [1]).checkpoints[0]
    weights = root / "org" / "tiny" / "step1" / "model.safetensors"
    loaded = checkpoint.load()
    assert not loaded.training
    state = loaded.state_dict()
    expected = AutoModelForCausalLM.from_pretrained(weights.parent).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert checkpoint.provenance() == {
        "series": "org/tiny",
        "checkpoint": "org/tiny",
        "revision": "step1",
        "commit": checkpoint.fetch().name,
        "weight_files": {"model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()},
    }
    requests = len(hub.requests)
    checkpoint.load()
    assert len(hub.requests) == requests


def test_drop_removes_only_what_was_downloaded(hub, root, model, tmp_path):
    make_series(model, root / "org" / "tiny", [0, 1, 2], values={0: 1.0, 1: 1.0})
    (root / "org" / "tiny" / "step0" / "README.md").write_text("two commits, then, of the same weights")
    first, same, other = HubRevisions("org/tiny").checkpoints
    for checkpoint in (first, same, other):
        checkpoint.fetch()
    weights = {path.resolve() for path in (tmp_path / "home" / "hub").rglob("*.safetensors")}
    assert len(weights) == 2
    first.source.drop()
    assert all(path.exists() for path in weights)  # the second step uses the same file
    other.source.drop()
    assert len([path for path in weights if path.exists()]) == 1
    assert (other.fetch() / "config.json").is_file()
    assert (other.fetch() / "model.safetensors").is_file()
    again = HubRevisions("org/tiny").checkpoints[2]
    folder = again.fetch()
    again.source.drop()
    assert (folder / "model.safetensors").is_file()  # this file was there before


def test_only_the_first_stage_begins_with_a_learning_rate_of_zero(hub, root, model, tmp_path):
    make_series(model, root / "org" / "stages", [2], name="stage1-step{}-tokens1B")
    make_step(model, root / "org" / "stages" / "stage2-step2-tokens1B", 0.5)
    manifest = tmp_path / "facts.yaml"
    manifest.write_text("repositories: [{names: org/stages, warm_up: 3}]")
    first, second = (
        HubRevisions("org/stages", grammar=grammar, manifest=manifest).find()
        for grammar in ("auto", "stage2-step{step}-*")
    )
    assert (first.warm_up, second.warm_up) == (3, 0)


@pytest.mark.usefixtures("impatient")
def test_requests_to_a_failing_hub_are_repeated(hub, root, model):
    make_series(model, root / "org" / "tiny", [0, 1])
    for where, status in (("/tree/", 429), (r"resolve/.*config\.json", 503), ("/_cdn/", 429)):
        hub.fail(where, status=status, times=3)
    checkpoint = HubRevisions("org/tiny").checkpoints[1]
    assert (checkpoint.fetch() / "model.safetensors").stat().st_size > 100_000
    assert [rule.left for rule in hub.rules] == [0, 0, 0]


@pytest.mark.usefixtures("impatient")
def test_a_truncated_download_is_repeated_and_then_reported(hub, root, model):
    make_series(model, root / "org" / "tiny", [0, 1])
    first, second = HubRevisions("org/tiny").checkpoints
    hub.truncate("safetensors", at=50_000, times=4)
    assert first.load() is not None
    hub.truncate("_cdn", at=0, times=1000)
    with pytest.raises(InputError, match=r"cannot download model.safetensors of org/tiny at step1 .*again later"):
        second.fetch()


@pytest.mark.usefixtures("impatient")
def test_a_branch_that_changed_after_the_listing_is_reported(hub, root, model):
    repository = make_series(model, root / "org" / "tiny", [0, 1])
    checkpoint = HubRevisions("org/tiny").checkpoints[1]
    assert isinstance(checkpoint.source, HubSource)
    shutil.rmtree(repository / "step1")
    make_step(model, repository / "step1", 9.0)
    shutil.rmtree(repository / "main")  # main also held the old weights
    make_step(model, repository / "main", 9.0)
    with pytest.raises(InputError, match=r"at step1 \(RevisionNotFoundError: .*check the name, the revision"):
        checkpoint.fetch()
    assert HubRevisions("org/tiny").checkpoints[1].load() is not None


def test_errors_that_waiting_does_not_solve_are_reported(hub, root, model):
    make_series(model, root / "org" / "tiny", [0, 1])
    (root / "org" / "plain" / "main").mkdir(parents=True)
    (root / "org" / "plain" / "main" / "config.json").write_text("{}")
    for series, sentence in (
        (HubRevisions("org/nobody"), "cannot list the branches of org/nobody .RepositoryNotFoundError"),
        (HubRevisions("org/plain"), "org/plain has no branch that is a step .1 branches: main"),
        (HubRevisions("org/tiny", [5]), "steps: org/tiny has no step 5; it has 2 steps from 0 to 1"),
    ):
        with pytest.raises(InputError, match=sentence):
            list(series)
    hub.set_token("secret")
    with pytest.raises(InputError, match="cannot list the files of org/tiny at step0 .GatedRepoError"):
        HubRevisions("org/tiny").checkpoints[0].fetch()


def test_a_plain_pickle_is_read(hub, root, model):
    folder = root / "org" / "old" / "step0"
    make_series(model, root / "org" / "old", [0, 1])
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "training_args.bin").write_bytes(pickle.dumps(object()))
    checkpoint = HubRevisions("org/old").checkpoints[0]
    loaded = checkpoint.load().state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert not (checkpoint.fetch() / "training_args.bin").exists()
    assert not gets(hub, "training_args")


def test_a_checkpoint_without_weights_or_config_is_refused(hub, root, model):
    make_series(model, root / "org" / "tiny", [0, 1])
    (root / "org" / "tiny" / "step0" / "model.safetensors").unlink()
    (root / "org" / "tiny" / "step1" / "config.json").unlink()
    first, second = HubRevisions("org/tiny").checkpoints
    with pytest.raises(InputError, match=r"cannot be loaded: OSError"):
        first.load()
    with pytest.raises(InputError, match=r"expected a model in org/tiny at step1, found no config.json there"):
        second.fetch()


def test_a_set_of_models_mixes_folders_and_repositories(hub, root, model):
    make_series(model, root / "org" / "tiny", [0, 1])
    series = Models([str(model), "org/tiny", "org/tiny@step0"])
    assert [found.name for found in series] == [str(model), "org/tiny", "org/tiny@step0"]
    assert {found.step for found in series} == {None}
    assert all(found.load() is not None for found in series)
    assert [found.provenance().get("revision") for found in series] == [None, "main", "step0"]
    for models, sentence in (
        ("org/tiny", "models: expected a list of folders or names on the Hub, got 'org/tiny'"),
        (["org/tiny@step7"], "models: org/tiny has no branch step7; it has 3"),
    ):
        with pytest.raises(InputError, match=sentence):
            list(Models(models))


def test_the_tokenizer_of_a_model_comes_from_its_folder_or_its_commit(hub, root, model, tmp_path):
    make_series(model, root / "org" / "tiny", [0, 1])
    here = Path(shutil.copytree(model, tmp_path / "here"))
    for folder in (root / "org" / "tiny" / "step0", root / "org" / "tiny" / "main", here):
        (folder / "tokenizer.json").write_text("{}")
    one = ModelFiles("org/tiny", revision="step0")
    assert one.tokenizer() == f"org/tiny@{one.commit}"
    assert [ModelFiles(name).tokenizer() for name in ("org/tiny", here)] == ["org/tiny", str(here)]


def test_repositories_that_hold_one_step_each_are_one_series(hub, root, model, tmp_path):
    for step in (0, 20, 40):
        make_step(model, root / "org" / f"bert-seed_0-step_{step}k" / "main", step / 64)
    make_step(model, root / "org" / "bert-seed_0" / "main", 40 / 64)
    manifest = tmp_path / "own.yaml"
    entry = 'names: org/bert-seed_0, repositories: "{repo}-step_{thousands}k", ranges: [[0, 40000, 20000]]'
    manifest.write_text(f"repositories: [{{{entry}, main_is_last: true, tokens_per_step: 1000}}]")
    (series,) = open_series(str(manifest))
    assert series.name == "org/bert-seed_0"
    assert [(each.name, each.step, each.tokens) for each in series] == [
        (f"org/bert-seed_0-step_{step // 1000}k", step, 1000 * step) for step in (0, 20000, 40000)
    ]
    assert audit(series).is_clean
    assert series.checkpoints[1].provenance()["checkpoint"] == "org/bert-seed_0-step_20k"
    assert weights_hash(series.checkpoints[1].load()) != weights_hash(series.checkpoints[2].load())


def test_trainings_in_branches_of_one_repository_are_separate_series(hub, root, model, tmp_path):
    make_step(model, root / "org" / "data" / "main", 27 / 64)
    for seed, steps in {"default": (0, 10, 20), "small-aux-2": (0, 10)}.items():
        for step in steps:
            make_step(model, root / "org" / "data" / f"step{step}-seed-{seed}", (step + len(seed)) / 64)
    manifest = tmp_path / "own.yaml"
    manifest.write_text(
        'repositories: [{names: org/data, grammar: ["step{step}-seed-default", "step{step}-seed-small-aux-2"]}]'
    )
    default, other = open_series(str(manifest))
    assert [each.step for each in default] == [0, 10, 20]
    assert [each.step for each in other] == [0, 10]
    assert default.name == "org/data step{step}-seed-default"
    assert all(audit(each).is_clean for each in (default, other))
    assert len(HubRevisions("org/data", manifest=manifest)) == 3
