"""Two ranks with sharded weights on the CPU: what one rank trains, saves and measures, and not a bit more."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from lit_layers import records
from lit_layers.cli.options import Recipe
from lit_layers.cli.verbs import fit as verb
from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, weights_hash
from lit_layers.models.saved import load
from lit_layers.training import resuming, sharding
from lit_layers.training.resuming import ResumeCheckpoint
from lit_layers.training.run_folder import saved_steps, step_folder
from lit_layers.training.run_log import RunLog
from tests.support import sharded_run
from tests.support.forked import run_ranks
from tests.support.sharded_run import analyses, watching
from tests.support.tiny_training import CONFIG, VOCABULARY, fit, module

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The sharded runs of the quick tests, by one start of two processes."""
    folder = tmp_path_factory.mktemp("sharded")
    assert run_ranks(lambda: sharded_run.run(folder)) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def facts(folder) -> dict[str, Any]:
    return json.loads((folder / "facts.json").read_text())


@pytest.fixture(scope="module")
def more(folder) -> Path:
    """The others beside them."""
    assert run_ranks(lambda: sharded_run.run_more(folder)) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def more_facts(more) -> dict[str, Any]:
    return json.loads((more / "more.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The watched run on one rank, which holds all weights; its folder and its validation loss."""
    root = tmp_path_factory.mktemp("alone")
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 1, "check_val_every_n_epoch": None}
    lit = module(dropout=0.0)
    trainer, _ = fit(root, watching(root, analyses()), module=lit, steps=3, log_every_n_steps=1, **options)
    return root, float(trainer.callback_metrics["validation/loss"])


def column(root: Path, name: str) -> list[float]:
    return [row[name] for row in records.rows(root / "metrics.jsonl")]


def weights(root: Path, step: int) -> bytes:
    return (step_folder(root, step) / "model.safetensors").read_bytes()


@pytest.mark.soak
def test_every_rank_holds_half_of_the_weights_also_after_validation_and_measuring(facts):
    assert facts["shards"]
    assert facts["numbers_here"] * 2 == facts["numbers"]


@pytest.mark.soak
def test_sharded_training_has_the_losses_and_gradient_norms_of_one_rank(folder, facts, alone):
    root, validation = alone
    for name in ("train/loss", "train/grad_norm"):
        assert column(folder / "watched", name) == pytest.approx(column(root, name), abs=1e-5)
        assert len(column(root, name)) == 3
    assert facts["norm"] == "Tensor"
    assert facts["validation"] == pytest.approx(validation, abs=1e-5)


@pytest.mark.soak
def test_the_saved_folders_are_plain_and_hold_the_whole_model_without_padding(folder, alone):
    root = folder / "watched"
    assert saved_steps(root) == [0, 1, 2, 3]
    config: dict[str, Any] = {**CONFIG, "vocab_size": VOCABULARY}
    start = causal_lm("gpt2", seed=0, **config).state_dict()
    saved: Any = AutoModelForCausalLM.from_pretrained(step_folder(root, 0))
    assert type(saved) is GPT2LMHeadModel
    assert saved.config.vocab_size == VOCABULARY
    assert saved.lm_head.weight is saved.transformer.wte.weight
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, start[name]), name
    assert weights(root, 0) == weights(alone[0], 0)
    whole, trained = load(step_folder(alone[0], 3)), load(step_folder(root, 3))
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[name], atol=1e-5, rtol=0)


@pytest.mark.soak
def test_sharded_measurements_are_those_of_one_rank_and_name_the_saved_weights(folder, alone):
    one, two = (records.read(root / "measurements.jsonl") for root in (alone[0], folder / "watched"))
    assert [(m.step, m.analysis) for m in one] == [(m.step, m.analysis) for m in two]
    assert [m.error for m in two] == ["RuntimeError: no numbers", None, None] * 4
    assert one[1].records
    assert [m.records for m in one[:3]] == [m.records for m in two[:3]]  # the same weights: the same bits
    for measurement in two:
        if measurement.error is None:
            saved = load(step_folder(folder / "watched", measurement.step or 0))
            assert measurement.provenance["weights_hash"] == weights_hash(saved)


@pytest.mark.soak
def test_sharded_training_with_analyses_and_without_ends_in_equal_bits(more):
    assert weights(more / "bare", 4) == weights(more / "seen", 4)
    seen = records.read(more / "seen" / "measurements.jsonl")
    assert [m.error for m in seen] == [None] * 12


def saved_state(root: Path, step: int) -> dict[str, Any]:
    """A checkpoint to resume from."""
    return torch.load(step_folder(root / "resume", step) / "trainer.ckpt", weights_only=True)


@pytest.mark.soak
def test_a_resumed_sharded_run_ends_in_the_state_of_an_uninterrupted_one(folder):
    """Also where the newest checkpoint is torn, which only the first rank has looked for."""
    assert saved_steps(folder / "parts") == [3, 6]  # it did not start again
    assert weights(folder / "whole", 6) == weights(folder / "parts", 6)
    losses = [column(folder / root, "train/loss") for root in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    states = [saved_state(folder / root, 6) for root in ("parts", "whole")]
    for part in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        for value, right in zip(*(tree_leaves(state[part]) for state in states), strict=True):
            assert torch.equal(value, right) if isinstance(value, torch.Tensor) else value == right, part


@pytest.mark.soak
def test_a_resume_checkpoint_of_a_sharded_run_holds_plain_whole_tensors(folder):
    files = step_folder(folder / "parts" / "resume", 6).iterdir()
    assert {file.name for file in files} == {"meta.json", "trainer.ckpt"}
    state = saved_state(folder / "parts", 6)
    saved = load(step_folder(folder / "parts", 6)).state_dict()
    for name, tensor in saved.items():
        assert torch.equal(state["state_dict"][f"model.{name}"], tensor), name
    moments = {tuple(entry["exp_avg"].shape) for entry in state["optimizer_states"][0]["state"].values()}
    assert moments == {tuple(tensor.shape) for tensor in saved.values()}


@pytest.mark.soak
def test_one_rank_can_go_on_with_the_weights_and_moments_of_a_sharded_run(folder, tmp_path):
    path = step_folder(folder / "parts" / "resume", 3) / "trainer.ckpt"
    lit = module(dropout=0.2, decay_steps=6, pad_vocab_to=None)
    trainer, _ = fit(tmp_path, [ResumeCheckpoint(tmp_path, every=None)], module=lit, steps=3, resume_from=path)
    saved = load(step_folder(folder / "parts", 3)).state_dict()
    optimizer = trainer.optimizers[0]
    entries = saved_state(folder / "parts", 3)["optimizer_states"][0]["state"]  # numbered in the model's order
    for number, (key, parameter) in enumerate(lit.model.named_parameters()):
        assert torch.equal(parameter, saved[key]), key
        moments = entries[number]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][moment], moments[moment]), key


@pytest.mark.soak
def test_what_one_rank_cannot_write_both_are_told_and_no_half_checkpoint_is_left(folder, facts):
    assert all("step-000000003: no space left on device; what was saved" in each for each in facts["refusals"])
    assert not list((folder / "full" / "resume").iterdir())


def test_a_sharded_run_refuses_the_state_of_an_unsharded_one(tmp_path):
    fit(tmp_path, [ResumeCheckpoint(tmp_path, every=None)], steps=1)
    state = tmp_path / "resume" / "step-000000001" / "trainer.ckpt"
    with pytest.raises(InputError, match="was saved by a run without sharded weights; go on with the strategy of"):
        resuming._load(strategy(), state)


@pytest.mark.soak
def test_where_the_whole_model_does_not_fit_every_analysis_says_so_and_the_series_is_saved(more):
    roomless, root = more / "roomless", more / "watched"
    found = records.read(roomless / "measurements.jsonl")
    assert [(m.step, m.analysis) for m in found] == [
        (step, name) for step in range(4) for name in ("failing", "trajectory", "lens")
    ]
    assert all("--offload" in (m.error or "") and not m.records for m in found)
    assert saved_steps(roomless) == [0, 1, 2, 3]
    assert weights(roomless, 3) == weights(root, 3)
    assert (step_folder(roomless, 3) / "config.json").read_bytes() == (
        step_folder(root, 3) / "config.json"
    ).read_bytes()


@pytest.mark.soak
def test_sharded_mixed_precision_keeps_float32_weights_and_the_losses_of_one_rank(more, more_facts, tmp_path):
    fit(tmp_path, [RunLog(tmp_path)], module=module(dropout=0.0), steps=3, precision="bf16-mixed")
    assert more_facts["dtypes"] == ["torch.float32"]
    assert more_facts["gathered"] == ["torch.bfloat16"]
    mixed = column(more / "mixed", "train/loss")
    # Weights and the sums between blocks are rounded to 8 bits too: 2^-9 of logits below 1.
    assert mixed == pytest.approx(column(tmp_path, "train/loss"), abs=2e-3)
    assert mixed != column(more / "watched", "train/loss")


@pytest.mark.soak
def test_a_sharded_run_begins_with_the_weights_of_a_checkpoint_on_all_ranks(folder):
    given, first = (load(step_folder(folder / name, 3)).state_dict() for name in ("watched", "begun"))
    assert all(torch.equal(tensor, first[name]) for name, tensor in given.items())
    after = load(step_folder(folder / "begun", 4)).state_dict()
    assert all(not torch.equal(tensor, after[name]) for name, tensor in given.items())


@pytest.mark.soak
def test_what_no_checkpoint_holds_comes_from_the_first_rank_too(more, tmp_path):
    fit(tmp_path, [RunLog(tmp_path)], module=sharded_run.rotary(), steps=3, log_every_n_steps=1)
    assert column(more / "rotary", "train/loss") == pytest.approx(column(tmp_path, "train/loss"), abs=1e-5)


@pytest.mark.soak
def test_gradients_are_reduced_once_a_step_however_batches_accumulate(more_facts):
    assert more_facts["reductions"] == 4 * 3  # steps x (two blocks and the rest), not x 2 micro-batches


@pytest.mark.soak
def test_sharded_training_that_computes_activations_again_has_the_same_losses(more):
    assert column(more / "again", "train/loss") == column(more / "watched", "train/loss")


@pytest.mark.soak
def test_sharded_clipping_by_value_trains_as_one_rank_does(more, tmp_path):
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    fit(tmp_path, [RunLog(tmp_path)], module=module(dropout=0.0), steps=3, **options)
    assert column(more / "by_value", "train/loss") == pytest.approx(column(tmp_path, "train/loss"), abs=1e-5)


@pytest.mark.soak
def test_compiled_sharded_training_has_the_losses_of_the_eager_one(folder, tmp_path):
    """The capture of the graph is what sharding could upset; generating code for it takes half a minute."""
    assert run_ranks(lambda: sharded_run.compiled(tmp_path)) == [0, 0]
    compiled, eager = (column(root, "train/loss") for root in (tmp_path, folder / "watched"))
    assert compiled == pytest.approx(eager, abs=1e-5)


def strategy(tensor_parallel_size: int = 1, **options: Any) -> ModelParallelStrategy:
    """One that believes its processes have started."""
    built = ModelParallelStrategy(**options)
    sizes = {"data_parallel": 2, "tensor_parallel": tensor_parallel_size}
    mesh: Any = {name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()}
    built._device_mesh = mesh
    return built


def test_weights_are_sharded_over_the_data_parallel_ranks_and_other_ways_are_refused():
    mesh: Any = sharding.sharding_mesh(strategy())
    assert mesh.size() == 2
    assert sharding.sharding_mesh(SimpleNamespace()) is None
    with pytest.raises(InputError, match=re.escape("trainer.strategy.tensor_parallel_size: expected 1, got 4; set ")):
        sharding.sharding_mesh(strategy(4))
    with pytest.raises(InputError, match="trainer.strategy: expected ModelParallelStrategy .* got fsdp"):
        sharding.sharding_mesh(FSDPStrategy())


@pytest.mark.parametrize(("kind", "needed"), [("cuda", "10.00"), ("cpu", "20.00")])
def test_the_sentence_where_there_is_no_room_names_needed_and_free_memory(kind, needed):
    # Two weights of 0.75e9 float32 numbers are 6 GB, a buffer is 1 GB; one weight is there twice while it is copied.
    # The two ranks of a CPU take from the same memory.
    model = nn.ParameterList(nn.Parameter(torch.empty(750, 1_000_000, device="meta")) for _ in range(2))
    model.register_buffer("table", torch.empty(250, 1_000_000, device="meta"))
    with pytest.raises(sharding.NoRoomError) as raised:
        sharding._check_room(model, 9_990_000_000, torch.device(kind), 2)
    assert f"takes {needed} GB " in str(raised.value)
    assert f"9.99 GB are free on {kind}" in str(raised.value)
    sharding._check_room(model, 20_000_000_000, torch.device(kind), 2)


def test_the_recipe_turns_a_run_into_a_sharded_one(tmp_path):
    precision = "bf16-mixed"
    files = [ROOT / "recipes" / "gpt2" / "124m_openwebtext.yaml", ROOT / "recipes" / "trainer" / "fsdp.yaml"]
    options = {"root": tmp_path, "trainer.accelerator": "cpu", "trainer.devices": 2, "trainer.precision": precision}
    arguments = [f"--config={file}" for file in files] + [f"--{name}={value}" for name, value in options.items()]
    recipe = Recipe(verb.fit, arguments)
    with contextlib.ExitStack() as held:
        trainer = verb.Run(recipe, held).trainer
    built: Any = trainer.strategy
    assert isinstance(built, ModelParallelStrategy)
    assert (built._data_parallel_size, built._tensor_parallel_size, built.num_processes) == (2, 1, 2)
    assert trainer.precision == precision


def test_a_model_that_was_sharded_by_other_means_is_told_what_to_call():
    with pytest.raises(InputError, match="shard_ in configure_model"):
        sharding.whole_copy(nn.Linear(2, 2), strategy())
