"""Each known defect of published series is found on a local stand-in Hub without a download of weights."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lit_layers.series import Audit, Finding, HubRevisions, Models, audit
from tests.support.series_hub import make_series, make_step, template


def only(found: Audit) -> Finding:
    (finding,) = found.findings
    return finding


def make_pythia(root: Path, model: Path, **options) -> str:
    make_series(model, root / "org" / "tiny", **options)
    return "org/tiny"


def test_a_clean_series_has_no_findings_and_its_weights_are_not_downloaded(hub, root, model):
    found = audit(HubRevisions(make_pythia(root, model)))
    assert found.findings == ()
    assert found.is_clean
    assert found.suspect_steps == ()
    assert found.num_checked == 12
    api = [request for request in hub.requests if request["path"].startswith("/api/models")]
    assert len(api) == 1 + 12 + 1  # the branches, then the files of each step and of main
    assert not [request for request in hub.requests if "resolve" in request["path"] or "_cdn" in request["path"]]


def test_identical_weights_at_two_steps_make_both_suspect(hub, root, model):
    series = HubRevisions(make_pythia(root, model, values={16: 3.0, 256: 3.0}))
    found = audit(series)
    assert (only(found).kind, only(found).steps) == ("identical weights", (16, 256))
    assert found.suspect_steps == (16, 256)
    assert not found.is_clean
    verdicts = {checkpoint.step: found.verdict(checkpoint) for checkpoint in series}
    assert verdicts.pop(16) == verdicts.pop(256) == "suspect: identical weights"
    assert set(verdicts.values()) == {"clean (level: listing)"}


def test_only_first_steps_may_be_identical(hub, root, model):
    series = HubRevisions(make_pythia(root, model, values={0: 3.0, 1: 3.0}))
    found = audit(series)
    assert (only(found).kind, only(found).steps, only(found).note) == ("identical weights", (0, 1), True)
    assert found.is_clean
    assert found.suspect_steps == ()
    assert found.verdict(series.checkpoints[1]) == "note: identical weights (level: listing)"
    make_series(model, root / "org" / "other", values={0: 3.0, 1: 3.0, 8: 3.0})
    assert audit(HubRevisions("org/other")).suspect_steps == (0, 1, 8)


def test_a_step_equal_to_the_last_or_to_main_is_suspect_and_the_last_is_not(hub, root, model):
    repo = make_pythia(root, model, values={64: 5.0, 128: 5.0, 1000: 5.0})
    found = audit(HubRevisions(repo))
    assert (only(found).kind, only(found).steps) == ("equal to the final step", (64, 128))
    assert only(found).message == "serve the weights of step 1000"
    # This also holds if neither the last step nor its copy was requested.
    assert audit(HubRevisions(repo, [0, 64])).suspect_steps == (64,)
    make_series(model, root / "org" / "other", values={64: 5.0}, main=5.0)
    found = audit(HubRevisions("org/other"))
    assert {(finding.kind, finding.steps, finding.note) for finding in found.findings} == {
        ("equal to main", (64,), False),
        ("main differs", (1000,), True),
    }
    assert found.suspect_steps == (64,)


def test_a_main_that_should_equal_the_last_step_and_differs_is_a_finding(hub, root, model):
    make_series(model, root / "EleutherAI" / "pythia-14m", [0, 1, 143000], main=7.0)
    found = audit(HubRevisions("EleutherAI/pythia-14m", [0, 143000]))
    defects = [finding for finding in found.findings if not finding.note]
    assert [(finding.kind, finding.steps) for finding in defects] == [("main differs", (143000,))]


def test_the_manifest_knows_the_154_steps_of_pythia(hub, root, model):
    make_series(model, root / "EleutherAI" / "pythia-12b", [0, 50000, 143000])
    found = audit(HubRevisions("EleutherAI/pythia-12b"))
    gap = next(finding for finding in found.findings if finding.kind == "gap")
    assert len(gap.steps) == 154 - 3
    assert not gap.names
    assert found.suspect_steps == ()


def test_a_defect_that_no_hash_shows_is_found_with_the_manifest(hub, root, model):
    make_series(model, root / "EleutherAI" / "pythia-160m-weight-seed1", [0, 1, 2])
    found = audit(HubRevisions("EleutherAI/pythia-160m-weight-seed1"))
    assert found.suspect_steps == (0,)
    assert "EleutherAI/pythia issue 203" in found.findings[-1].message


def test_one_shared_shard_makes_steps_suspect(hub, root, tmp_path):
    repository = root / "org" / "tiny"
    make_series(template(tmp_path / "shards", shard="60KB"), repository)
    shards = sorted(path.name for path in (repository / "step8").glob("model-0*.safetensors"))
    assert len(shards) > 1
    shutil.copy(repository / "step1000" / shards[0], repository / "step32" / shards[0])
    shutil.copy(repository / "step4" / shards[1], repository / "step8" / shards[1])
    found = audit(HubRevisions("org/tiny"))
    assert {(finding.kind, finding.steps, finding.message) for finding in found.findings} == {
        ("shared shard", (32,), f"{shards[0]} is one file in step 32, step 1000"),
        ("shared shard", (4, 8), f"{shards[1]} is one file in step 4, step 8"),
    }
    assert found.suspect_steps == (4, 8, 32)


def test_a_branch_without_weights_or_config_is_found(hub, root, model):
    repository = root / "org" / "tiny"
    make_series(model, repository)
    (repository / "step8" / "model.safetensors").unlink()
    (repository / "step16" / "config.json").unlink()
    found = audit(HubRevisions("org/tiny"))
    assert {(finding.kind, finding.steps) for finding in found.findings} == {("no weights", (8,)), ("no config", (16,))}


def test_missing_steps_in_an_even_spacing_are_a_gap(hub, root, model):
    found = audit(HubRevisions(make_pythia(root, model, steps=[0, 1, 2, 4, 500, 1000, 1500, 3000, 3500, 4000])))
    assert (only(found).kind, only(found).steps) == ("gap", (2000, 2500))
    assert found.suspect_steps == ()
    assert not found.is_clean


def test_bursts_of_steps_are_not_a_spacing_with_gaps(hub, root, model):
    steps = [*range(5), *range(100, 104), *range(200, 204), 300]
    found = audit(HubRevisions(make_pythia(root, model, steps=steps)))
    assert found.findings == ()


def test_the_longer_name_is_used_if_two_branches_have_the_same_step(hub, root, model):
    repository = root / "org" / "tiny"
    make_series(model, repository)
    make_step(model, repository / "step-0008", 0.77)
    series = HubRevisions("org/tiny")
    assert [each.name for each in series if each.step == 8] == ["step-0008"]
    assert audit(series).is_clean


def save_pickle(folder: Path, value: float) -> None:
    state = {name: tensor + value for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.save(state, folder / "pytorch_model.bin")


def test_pickles_are_compared_only_for_steps_without_safetensors(hub, root, model):
    repository = root / "org" / "tiny"
    make_series(model, repository, [0, 1, 2, 4, 8])
    for step in (0, 1, 2, 4, 8):
        save_pickle(repository / f"step{step}", float(step))
    for step in (1, 2):
        shutil.copy(repository / "step4" / "pytorch_model.bin", repository / f"step{step}" / "pytorch_model.bin")
    assert audit(HubRevisions("org/tiny")).findings == ()
    (repository / "step2" / "model.safetensors").unlink()
    found = audit(HubRevisions("org/tiny"))
    assert (only(found).kind, only(found).steps) == ("identical weights", (1, 2, 4))


def test_a_step_whose_weight_file_is_shorter_is_found_without_a_download(hub, root, model):
    file = root / make_pythia(root, model) / "step16" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    found = audit(HubRevisions("org/tiny"))
    assert (only(found).kind, only(found).steps) == ("other size", (16,))


def test_files_of_different_formats_are_not_compared(hub, root, model):
    repository = root / "org" / "tiny"
    make_series(model, repository, [0, 1], main=9.0)
    save_pickle(repository / "main", 0.0)
    (repository / "main" / "model.safetensors").unlink()
    assert audit(HubRevisions("org/tiny")).findings == ()


def test_the_same_model_under_two_names_is_found_in_a_set(hub, root, model):
    make_series(model, root / "org" / "one", [0, 1])
    make_step(model, root / "org" / "other" / "main", 2 / 64)  # equal to step 1 of org/one
    series = Models(["org/one", "org/one@step0", "org/other"])
    found = audit(series)
    assert only(found).names == ("org/one", "org/other")
    assert only(found).steps == ()
    assert found.suspect_names == {"org/one", "org/other"}
    assert found.verdict(series.checkpoints[1]) == "clean (level: listing)"
