"""A run that starts from a checkpoint continues its steps, its tokens and its weights."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_layers import records
from lit_layers.analyses import Trajectory
from lit_layers.errors import InputError
from lit_layers.models import load, weights_hash
from lit_layers.series import StepFolders
from lit_layers.series.opening import find_checkpoint
from lit_layers.training import EmergenceCallback, LitCausalLM, SeriesCheckpoint
from lit_layers.training.resuming import ResumeCheckpoint, resume_point
from lit_layers.training.run_folder import (
    Origin,
    RunFolder,
    check_tokenizer,
    find_origin,
    own_origin,
    saved_steps,
    step_folder,
)
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import StepSampler, StepSeed
from tests.support.random_text import RandomText
from tests.support.series_hub import make_series, make_step, served, template
from tests.support.tiny_training import RandomTokens, fit, module

PER_STEP = RandomTokens.tokens_per_step


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    """Train for four steps with known tokens, and return the root."""
    root = tmp_path_factory.mktemp("runs") / "earlier"
    steps = {"every": 2}
    folder = RunFolder(root, config="", options={"steps": steps}, mirror=None)
    fit(root, [folder, SeriesCheckpoint(steps, root)], steps=4)
    return root


def train_on(root: Path, start: str, steps: int, *, resume: bool = False, **options):
    """Train from a checkpoint, with every callback that counts steps and tokens."""
    schedule = {"every": 2}
    lit = LitCausalLM(init_from=start, lr=1e-2, warmup_steps=1, decay_steps=9, **options)
    state = None
    if resume:
        begun = own_origin(root, json.loads((root / "run.json").read_text())["origin"])
        assert begun is not None
        lit.start, point = begun, resume_point(root, "last")
        assert point is not None
        state = point.state
    log, first = RunLog(root, resume=resume), {"config": "", "options": {"steps": schedule}, "mirror": None}
    watch = EmergenceCallback([Trajectory(batches=RandomText())], schedule, root, watchers=[log])
    callbacks = [RunFolder(root, **first, resume=resume), StepSeed(0), log, SeriesCheckpoint(schedule, root), watch]
    callbacks.append(ResumeCheckpoint(root, every=None))
    fit(root, callbacks, steps=steps, module=lit, log_every_n_steps=1, resume_from=state)


@pytest.fixture(scope="module")
def later(earlier, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "later"
    train_on(root, str(step_folder(earlier, 2)), 3)
    return root


def test_steps_and_tokens_count_on_from_the_checkpoint(later, earlier):
    assert saved_steps(later) == [2, 4, 5]  # its start, a scheduled step, its end
    rows = records.rows(later / "metrics.jsonl")
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert [row["tokens"] for row in rows] == [3 * PER_STEP, 4 * PER_STEP, 5 * PER_STEP]
    measured = records.read(later / "measurements.jsonl")
    assert [(m.step, m.tokens) for m in measured] == [(step, step * PER_STEP) for step in (2, 4, 5)]
    assert saved_steps(later / "resume") == [5]
    about = json.loads((later / "run.json").read_text())
    assert about["max_steps"] == 5
    assert (about["origin"]["step"], about["origin"]["tokens"]) == (2, 2 * PER_STEP)
    assert about["origin"]["init_from"] == str(step_folder(earlier, 2))
    assert measured[0].provenance["init_from"]["weight_files"] == about["origin"]["weight_files"]


def test_training_starts_from_the_weights_of_the_checkpoint(later, earlier):
    given, first, last = (load(step_folder(root, step)) for root, step in ((earlier, 2), (later, 2), (later, 5)))
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name
    assert not torch.equal(first.state_dict()["lm_head.weight"], last.state_dict()["lm_head.weight"])


def test_the_learning_rate_and_the_data_start_fresh(earlier, tmp_path):
    """The first step has the checkpoint's loss on the first batch, and the first rate of the warm-up."""
    start = step_folder(earlier, 2)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    train_on(tmp_path, str(start), 1, config=still)
    (row,) = records.rows(tmp_path / "metrics.jsonl")
    blocks = RandomTokens().blocks
    first = StepSampler(len(blocks), global_batch_size=RandomTokens.global_batch_size).global_batch(0)
    tokens = torch.stack([blocks[index]["input_ids"] for index in first])
    logits = load(start)(input_ids=tokens[:, :-1]).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["train/learning_rate"] == pytest.approx(1e-2)


def test_the_series_of_such_a_run_knows_its_tokens_and_lacks_no_step(later):
    series = StepFolders(later)
    assert [(found.step, found.tokens) for found in series] == [(s, s * PER_STEP) for s in (2, 4, 5)]
    assert series.listing.expected == (2, 4, 5)


def test_a_run_resumes_without_the_checkpoint_that_it_started_from(later, earlier, tmp_path):
    gone = tmp_path / "step-000000002"
    shutil.copytree(step_folder(earlier, 2), gone)
    root = tmp_path / "parts"
    train_on(root, str(gone), 1)
    about = json.loads((root / "run.json").read_text())
    assert about["origin"]["step"] == 2
    shutil.rmtree(gone)
    train_on(root, str(gone), 3, resume=True)
    whole, parts = (records.rows(each / "metrics.jsonl") for each in (later, root))
    assert [(row["step"], row["train/loss"]) for row in parts] == [(row["step"], row["train/loss"]) for row in whole]
    first, second = (step_folder(each, 5) / "model.safetensors" for each in (later, root))
    assert first.read_bytes() == second.read_bytes()


def test_a_published_checkpoint_is_found_with_step_tokens_and_commit(tmp_path, monkeypatch):
    make_series(template(tmp_path / "model"), tmp_path / "hub" / "EleutherAI" / "pythia-70m", (0, 512, 1000))
    with served(tmp_path / "hub", tmp_path / "cache", monkeypatch):
        checkpoint, origin = find_origin("EleutherAI/pythia-70m@step1000")
        assert (origin.step, origin.tokens) == (1000, 1000 * 2_097_152)
        assert origin.source["revision"] == "step1000"
        assert len(origin.source["commit"]) == 40
        assert checkpoint.load().config.model_type == "gpt_neox"
        with pytest.raises(InputError, match="has no branch step7"):
            find_origin("EleutherAI/pythia-70m@step7")


def test_a_model_without_a_known_step_starts_at_zero(tmp_path):
    make_step(template(tmp_path / "model"), tmp_path / "elsewhere" / "mine", 0.5)
    _, origin = find_origin(str(tmp_path / "elsewhere" / "mine"))
    assert (origin.step, origin.tokens) == (0, 0)
    assert origin.tokens_at(3, 10) == 30


def test_unknown_tokens_stay_unknown():
    assert Origin(1000, None).tokens_at(1001, 10) is None
    assert Origin(1000, 500).tokens_at(1002, 10) == 520


def test_a_name_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for name in ("/nowhere/model", "lab tiny", "lab/tiny@", str(tmp_path / "model.safetensors")):
        with pytest.raises(InputError, match="NAME@REVISION"):
            find_checkpoint(name)


def test_options_that_change_the_model_are_refused(earlier, tmp_path):
    """Options that the weights fit are also refused if they change the meaning of the weights."""
    for field, value in (("n_embd", 32), ("n_head", 1), ("activation_function", "relu")):
        lit = module(init_from=str(step_folder(earlier, 2)))
        lit.config = {field: value, "n_layer": 2, "resid_pdrop": 0.3}
        with pytest.raises(InputError, match=rf"model.config.{field}: .* keeps it, got {value}: leave it out"):
            fit(tmp_path, [], steps=1, module=lit)


def test_half_precision_weights_are_trained_in_float32(earlier, tmp_path):
    half, dtype = tmp_path / "half", torch.bfloat16
    load(step_folder(earlier, 2)).to(dtype).save_pretrained(half)
    assert json.loads((half / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    root = tmp_path / "run"
    train_on(root, str(half), 1)
    first = next(iter(records.read(root / "measurements.jsonl"))).provenance
    assert first["dtype"] == "float32"
    assert first["weights_hash"] == weights_hash(load(half))  # `analyze` has the same hash
    assert {tensor.dtype for tensor in load(step_folder(root, 1), dtype=torch.float32).parameters()} == {torch.float32}
    assert json.loads((step_folder(root, 1) / "config.json").read_text())["dtype"] == "float32"


def test_text_of_another_tokenizer_is_refused(tmp_path):
    from lit_layers.data.tokenization import save_tokenizer, tokenizer_hash, train_bpe

    found = train_bpe(["how many words are there in this text, and how many pairs" * 9], 270)
    save_tokenizer(found, tmp_path)
    own = tokenizer_hash(found.tokenizer)
    same, other = (SimpleNamespace(tokenizer="bpe:270", shards=SimpleNamespace(tokenizer_hash=h)) for h in (own, "x"))
    check_tokenizer(tmp_path, same, "lab/tiny")
    with pytest.raises(InputError, match="tokenizer: lab/tiny was trained with another one than bpe:270"):
        check_tokenizer(tmp_path, other, "lab/tiny")
