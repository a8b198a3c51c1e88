"""Two CPU ranks with sharded weights train, save and measure the same as one rank."""

import errno
import functools
import json
import os
import shutil
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from lit_layers import records
from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, weights_hash
from lit_layers.models.saved import load
from lit_layers.training import EmergenceCallback, LitCausalLM, SeriesCheckpoint, modules, resuming, sharding
from lit_layers.training.resuming import ResumeCheckpoint, resume_point
from lit_layers.training.run_folder import saved_steps, step_folder
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import StepSeed
from tests.support import tiny_images
from tests.support.forked import run_ranks
from tests.support.random_text import RandomText
from tests.support.tiny_training import CONFIG, VOCABULARY, fit, module
from tests.training.test_callbacks import Failing, Noisy

pytestmark = [pytest.mark.soak, pytest.mark.slow]
STEPS = [1, 2]
VALIDATED: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 1, "check_val_every_n_epoch": None}
CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


def analyses() -> list[Analysis]:
    text = RandomText()
    return [Failing(), Trajectory(batches=text), Lens(batches=text)]


def watching(root: Path, found: Sequence[Analysis]) -> list[L.Callback]:
    """Return the callbacks of a watched run."""
    run_log = RunLog(root)
    callback = EmergenceCallback(found, STEPS, root, watchers=[run_log], null="blocks")
    return [run_log, SeriesCheckpoint(STEPS, root), callback]


def strategy(ranks: int = 2) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo")


def sharded(root: Path, callbacks: list[L.Callback], *, ranks: int = 2, **options: Any) -> tuple[L.Trainer, Any]:
    settings = {"devices": ranks, "strategy": strategy(ranks), "log_every_n_steps": 1}
    return fit(root, callbacks, **settings, **options)


def watched(root: Path) -> dict[str, Any]:
    """Train three steps with a validation after each, and return facts about the weights in memory."""
    trainer, lit = sharded(root, watching(root, analyses()), steps=3, module=module(dropout=0.0), **VALIDATED)
    lit.model.state_dict()  # shards the root again, which validation leaves gathered
    return {
        "shards": all(isinstance(parameter, DTensor) for parameter in lit.model.parameters()),
        "numbers_here": sum(parameter.to_local().numel() for parameter in lit.model.parameters()),
        "numbers": sum(parameter.numel() for parameter in lit.model.parameters()),
        "norm": type(lit.grad_norm).__name__,
        "validation": float(trainer.callback_metrics["validation/loss"]),
    }


def dropping_out(root: Path, found: Sequence[Analysis]) -> None:
    """Train with uneven shards (61 tokens on two ranks), accumulation, and dropout without `StepSeed`."""
    lit = module(dropout=0.2, pad_vocab_to=None)
    callbacks: list[L.Callback] = watching(root, found) if found else [SeriesCheckpoint([0], root)]
    sharded(root, callbacks, steps=4, module=lit, accumulate_grad_batches=2)


def part(
    root: Path, steps: int, *, resume: bool = False, every: int | None = None, dropout: float = 0.2, **options: Any
) -> None:
    torch.manual_seed(17 + steps)  # earlier draws must not matter
    if resume:
        point = resume_point(root, "last", verify=os.environ["RANK"] == "0")
        assert point is not None
        options["resume_from"] = point.state
    callbacks = [StepSeed(1), RunLog(root, resume=resume), SeriesCheckpoint([0], root)]
    callbacks.append(ResumeCheckpoint(root, every=every))
    lit = module(dropout=dropout, decay_steps=6, pad_vocab_to=None)
    sharded(root, callbacks, steps=steps, module=lit, **{"accumulate_grad_batches": 2, **options})


def torn(root: Path) -> None:
    """Add a newer checkpoint whose state file is truncated."""
    if torch.distributed.get_rank() == 0:
        newer = step_folder(root / "resume", 5)
        shutil.copytree(step_folder(root / "resume", 3), newer)
        state = newer / "trainer.ckpt"
        os.truncate(state, state.stat().st_size - 100)
    torch.distributed.barrier()


def full_disk(root: Path) -> str:
    """Return the error that this rank gets if the first rank cannot write."""
    save = resuming._save

    def no_space(path: Path, content: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    resuming._save = no_space
    try:
        part(root, 3)
    except InputError as error:
        return str(error)
    finally:
        resuming._save = save
    return ""


def roomless(root: Path) -> None:
    """Train like `watched`, on a machine with almost no free memory."""
    enough, sharding.free_memory = sharding.free_memory, lambda device: 10_000
    sharded(root, watching(root, analyses()), steps=3, module=module(dropout=0.0))
    sharding.free_memory = enough


def rotary() -> LitCausalLM:
    """Return a model whose blocks need rotary frequencies, a buffer that no checkpoint contains."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LitCausalLM("llama", {**sizes, "max_position_embeddings": 12}, lr=1e-2, warmup_steps=2)


def other_ways(root: Path) -> dict[str, Any]:
    """Train with mixed precision, with clipping by value, with activation checkpointing, and with rotary positions."""
    lit, gathered = module(dropout=0.0), set()

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            first = pl_module.model.transformer.h[0].mlp.c_fc
            first.register_forward_hook(lambda part, *_: gathered.add(str(part.weight.dtype)))

    sharded(root / "mixed", [RunLog(root / "mixed"), Look()], steps=3, module=lit, precision="bf16-mixed")
    again = module(dropout=0.0, activation_checkpointing=True)
    sharded(root / "again", [RunLog(root / "again")], steps=3, module=again)
    sharded(root / "rotary", [RunLog(root / "rotary")], steps=3, module=rotary())
    dtypes = {str(parameter.dtype) for parameter in lit.model.parameters()}
    sharded(root / "by_value", [RunLog(root / "by_value")], steps=3, module=module(dropout=0.0), **CLIPPED)
    return {"dtypes": sorted(dtypes), "gathered": sorted(gathered)}


def compiled_run(root: Path) -> int:
    warnings.simplefilter("ignore")  # warnings between Lightning and torch
    torch.compile = functools.partial(torch.compile, backend="eager")
    modules._EAGER_LOSS = ()  # as on a GPU: the loss is in the graph
    sharded(root, [RunLog(root)], steps=3, module=module(dropout=0.0, compile=True))
    return 0


def runs(folder: Path) -> int:
    warnings.simplefilter("ignore")  # warnings between Lightning and torch
    facts = watched(folder / "watched")
    first = torch.distributed.get_rank() == 0
    begun = LitCausalLM(init_from=str(step_folder(folder / "watched", 3)), lr=1e-2, warmup_steps=2)
    sharded(folder / "begun", [SeriesCheckpoint([0], folder / "begun")], steps=1, module=begun)
    images = tiny_images.module(drop_path_rate=0.0)
    tiny_images.fit(folder / "images", lit=images, steps=1, devices=2, strategy=strategy(), inference_mode=False)
    part(folder / "whole", 6)
    part(folder / "parts", 3)
    if first:
        shutil.rmtree(step_folder(folder / "parts", 0))  # a run that starts from 0 would write it again
    torn(folder / "parts")
    part(folder / "parts", 6, resume=True)
    facts["refusals"] = ["", ""]
    torch.distributed.all_gather_object(facts["refusals"], full_disk(folder / "full"))
    reduce, reductions = _fsdp_param_group.foreach_reduce, []
    _fsdp_param_group.foreach_reduce = lambda *args, **options: reductions.append(1) or reduce(*args, **options)
    dropping_out(folder / "bare", [])
    _fsdp_param_group.foreach_reduce = reduce
    dropping_out(folder / "seen", [Noisy(), Trajectory(batches=RandomText()), Coupling(batches=RandomText(), k=(2,))])
    roomless(folder / "roomless")
    facts |= {"reductions": len(reductions), **other_ways(folder)}
    if first:
        (folder / "facts.json").write_text(json.dumps(facts))
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run all sharded trainings in one start of two processes, and return their folder."""
    folder = tmp_path_factory.mktemp("sharded")
    assert run_ranks(lambda: runs(folder)) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def facts(folder) -> dict[str, Any]:
    return json.loads((folder / "facts.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train the watched run on one rank with all weights, and return its folder and validation loss."""
    root = tmp_path_factory.mktemp("alone")
    lit = module(dropout=0.0)
    trainer, _ = fit(root, watching(root, analyses()), module=lit, steps=3, log_every_n_steps=1, **VALIDATED)
    return root, float(trainer.callback_metrics["validation/loss"])


def column(root: Path, name: str) -> list[float]:
    return [row[name] for row in records.rows(root / "metrics.jsonl")]


def weights(root: Path, step: int) -> bytes:
    return (step_folder(root, step) / "model.safetensors").read_bytes()


def test_every_rank_holds_half_of_the_weights_even_after_validation_and_measuring(facts):
    assert facts["shards"]
    assert facts["numbers_here"] * 2 == facts["numbers"]


def test_sharded_training_has_the_losses_and_gradient_norms_of_one_rank(folder, facts, alone):
    root, validation = alone
    for name in ("train/loss", "train/grad_norm"):
        assert column(folder / "watched", name) == pytest.approx(column(root, name), abs=1e-5)
        assert len(column(root, name)) == 3
    assert facts["norm"] == "Tensor"
    assert facts["validation"] == pytest.approx(validation, abs=1e-5)


def test_saved_folders_are_plain_and_hold_the_whole_model_without_padding(folder, alone):
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


def test_sharded_measurements_equal_those_of_one_rank_and_have_the_hash_of_the_saved_weights(folder, alone):
    one, two = (records.read(root / "measurements.jsonl") for root in (alone[0], folder / "watched"))
    assert [(m.step, m.analysis) for m in one] == [(m.step, m.analysis) for m in two]
    assert [m.error for m in two] == ["RuntimeError: no numbers", None, None] * 4
    assert one[1].records
    assert [m.records for m in one[:3]] == [m.records for m in two[:3]]  # the same weights: the same bits
    for measurement in two:
        if measurement.error is None:
            saved = load(step_folder(folder / "watched", measurement.step or 0))
            assert measurement.provenance["weights_hash"] == weights_hash(saved)
    nulls = [[m.analysis for m in records.read_nulls(root)] for root in (alone[0], folder / "watched")]
    assert nulls == [["trajectory", "lens"]] * 2


def test_sharded_training_ends_in_equal_bits_with_and_without_analyses(folder):
    assert weights(folder / "bare", 4) == weights(folder / "seen", 4)
    seen = records.read(folder / "seen" / "measurements.jsonl")
    assert [m.error for m in seen] == [None] * 12


def saved_state(root: Path, step: int) -> dict[str, Any]:
    """Return the state in a resume checkpoint."""
    return torch.load(step_folder(root / "resume", step) / "trainer.ckpt", weights_only=True)


def test_a_resumed_sharded_run_ends_in_the_state_of_an_uninterrupted_one(folder):
    """The newest checkpoint is truncated, and only the first rank checks for that."""
    assert saved_steps(folder / "parts") == [3, 6]  # it did not start from 0
    assert weights(folder / "whole", 6) == weights(folder / "parts", 6)
    losses = [column(folder / root, "train/loss") for root in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    states = [saved_state(folder / root, 6) for root in ("parts", "whole")]
    for part in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        for value, right in zip(*(tree_leaves(state[part]) for state in states), strict=True):
            assert torch.equal(value, right) if isinstance(value, torch.Tensor) else value == right, part


def test_a_resume_checkpoint_of_a_sharded_run_holds_plain_full_tensors(folder):
    files = step_folder(folder / "parts" / "resume", 6).iterdir()
    assert {file.name for file in files} == {"meta.json", "trainer.ckpt"}
    state = saved_state(folder / "parts", 6)
    saved = load(step_folder(folder / "parts", 6)).state_dict()
    for name, tensor in saved.items():
        assert torch.equal(state["state_dict"][f"model.{name}"], tensor), name
    moments = {tuple(entry["exp_avg"].shape) for entry in state["optimizer_states"][0]["state"].values()}
    assert moments == {tuple(tensor.shape) for tensor in saved.values()}


def test_one_rank_can_resume_with_the_weights_and_moments_of_a_sharded_run(folder, tmp_path):
    path = step_folder(folder / "parts" / "resume", 3) / "trainer.ckpt"
    lit = module(dropout=0.2, decay_steps=6, pad_vocab_to=None)
    trainer, _ = fit(tmp_path, [ResumeCheckpoint(tmp_path, every=None)], module=lit, steps=3, resume_from=path)
    saved = load(step_folder(folder / "parts", 3)).state_dict()
    optimizer = trainer.optimizers[0]
    entries = saved_state(folder / "parts", 3)["optimizer_states"][0]["state"]  # in the order of the model
    for number, (key, parameter) in enumerate(lit.model.named_parameters()):
        assert torch.equal(parameter, saved[key]), key
        moments = entries[number]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][moment], moments[moment]), key


def test_a_write_error_of_one_rank_reaches_both_and_leaves_no_partial_checkpoint(folder, facts):
    assert all("step-000000003: no space left on device; what was saved" in each for each in facts["refusals"])
    assert not list((folder / "full" / "resume").iterdir())


def test_without_room_for_the_whole_model_every_analysis_fails_and_the_series_is_saved(folder):
    roomless, root = folder / "roomless", folder / "watched"
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


def test_sharded_mixed_precision_keeps_float32_weights_and_the_losses_of_one_rank(folder, facts, tmp_path):
    fit(tmp_path, [RunLog(tmp_path)], module=module(dropout=0.0), steps=3, precision="bf16-mixed")
    assert facts["dtypes"] == ["torch.float32"]
    assert facts["gathered"] == ["torch.bfloat16"]
    mixed = column(folder / "mixed", "train/loss")
    # Weights and sums between blocks are also rounded to 8 bits: an error of 2^-9 for logits below 1.
    assert mixed == pytest.approx(column(tmp_path, "train/loss"), abs=2e-3)
    assert mixed != column(folder / "watched", "train/loss")


def test_a_sharded_run_starts_from_the_weights_of_a_checkpoint_on_all_ranks(folder):
    given, first = (load(step_folder(folder / name, 3)).state_dict() for name in ("watched", "begun"))
    assert all(torch.equal(tensor, first[name]) for name, tensor in given.items())
    after = load(step_folder(folder / "begun", 4)).state_dict()
    assert all(not torch.equal(tensor, after[name]) for name, tensor in given.items())


def test_rotary_tables_value_clipping_and_activation_checkpointing_have_the_losses_of_one_rank(folder, tmp_path):
    fit(tmp_path / "rotary", [RunLog(tmp_path / "rotary")], module=rotary(), steps=3, log_every_n_steps=1)
    fit(tmp_path / "by_value", [RunLog(tmp_path / "by_value")], module=module(dropout=0.0), steps=3, **CLIPPED)
    for name in ("rotary", "by_value"):
        losses = column(tmp_path / name, "train/loss")
        assert column(folder / name, "train/loss") == pytest.approx(losses, abs=1e-5), name
    assert column(folder / "again", "train/loss") == column(folder / "watched", "train/loss")


def test_gradients_are_reduced_once_per_step_with_accumulation(facts):
    assert facts["reductions"] == 4 * 3  # steps x (two blocks and the rest), not x 2 micro-batches


def test_compiled_sharded_training_has_the_losses_of_eager_training(folder, tmp_path):
    """Sharding could only disturb the graph capture, so no code is generated, which takes half a minute."""
    assert run_ranks(lambda: compiled_run(tmp_path)) == [0, 0]
    compiled, eager = (column(root, "train/loss") for root in (tmp_path, folder / "watched"))
    assert compiled == pytest.approx(eager, abs=1e-5)


STILL = {"dropout": 0.0, "accumulate_grad_batches": 1}  # each rank draws its own dropout


def part_on(ranks: int, root: Path, steps: int, **options) -> list[int]:
    def fit() -> int:
        part(root, steps, ranks=ranks, **STILL, **options)
        return 0

    return run_ranks(fit, ranks)


@pytest.mark.parametrize("ranks", [(2, 4), (4, 1)])
def test_a_sharded_run_resumes_on_another_number_of_ranks(ranks, tmp_path):
    before, after = ranks
    assert set(part_on(before, tmp_path / "parts", 3) + part_on(after, tmp_path / "whole", 6)) == {0}
    assert set(part_on(after, tmp_path / "parts", 6, resume=True)) == {0}
    losses = [column(tmp_path / root, "train/loss") for root in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)  # gradients are summed in another order
    assert len(losses[1]) == 6


def test_after_a_rank_dies_in_a_save_the_run_resumes_from_the_checkpoint_before(tmp_path):
    def dies() -> int:
        save, count = resuming._save, [0]

        def dying(path: Path, content) -> str:
            count[0] += 1
            if count[0] > 1:
                path.write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            return save(path, content)

        resuming._save = dying
        part(tmp_path / "parts", 6, every=2)
        return 0

    codes = run_ranks(dies)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0
    assert saved_steps(tmp_path / "parts" / "resume") == [2]

    def whole() -> int:
        part(tmp_path / "parts", 6, resume=True)
        part(tmp_path / "whole", 6)
        return 0

    assert run_ranks(whole) == [0, 0]
    assert weights(tmp_path / "parts", 6) == weights(tmp_path / "whole", 6)
    assert not list((tmp_path / "parts" / "resume").glob(".tmp*"))
