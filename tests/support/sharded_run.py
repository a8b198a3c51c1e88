"""On two ranks with sharded weights, every run that a test looks at, for its forked processes."""

import errno
import functools
import json
import os
import random
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.records import Record
from lit_layers.training import EmergenceCallback, LitCausalLM, SeriesCheckpoint, modules, resuming, sharding
from lit_layers.training.resuming import ResumeCheckpoint, resume_point
from lit_layers.training.run_folder import step_folder
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import StepSeed
from tests.support import tiny_images
from tests.support.random_text import RandomText
from tests.support.tiny_training import fit, module

STEPS = [1, 2]


@dataclass(kw_only=True)
class Noisy(Analysis):
    """Draws random numbers and runs backward through the model."""

    name: str = "noisy"

    def compute(self, model):
        model.model.train().requires_grad_(True)
        batch = next(iter(RandomText()))
        model.model(input_ids=batch["input_ids"]).logits.square().mean().backward()
        yield Record(metric="noise", value=float(torch.rand(())) + random.random())


@dataclass(kw_only=True)
class Failing(Analysis):
    name: str = "failing"

    def compute(self, model):
        raise RuntimeError("no numbers")


def analyses() -> list[Analysis]:
    text = RandomText()
    return [Failing(), Trajectory(batches=text), Lens(batches=text)]


def watching(root: Path, found: Sequence[Analysis]) -> list[L.Callback]:
    """The callbacks of a watched run."""
    run_log = RunLog(root)
    return [run_log, SeriesCheckpoint(STEPS, root), EmergenceCallback(found, STEPS, root, watchers=[run_log])]


def strategy(ranks: int = 2) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo")


def sharded(root: Path, callbacks: list[L.Callback], *, ranks: int = 2, **options: Any) -> tuple[L.Trainer, Any]:
    settings = {"devices": ranks, "strategy": strategy(ranks), "log_every_n_steps": 1}
    return fit(root, callbacks, **settings, **options)


def watched(root: Path) -> dict[str, Any]:
    """Three steps with a validation after each, and what is looked for in memory afterwards."""
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer, lit = sharded(root, watching(root, analyses()), steps=3, module=module(dropout=0.0), **options)
    lit.model.state_dict()  # shards the root again, which a validation leaves whole
    return {
        "shards": all(isinstance(parameter, DTensor) for parameter in lit.model.parameters()),
        "numbers_here": sum(parameter.to_local().numel() for parameter in lit.model.parameters()),
        "numbers": sum(parameter.numel() for parameter in lit.model.parameters()),
        "norm": type(lit.grad_norm).__name__,
        "validation": float(trainer.callback_metrics["validation/loss"]),
    }


def dropping_out(root: Path, found: Sequence[Analysis]) -> None:
    """Uneven shards (61 words on two ranks), accumulation, and dropout that nothing seeds."""
    lit = module(dropout=0.2, pad_vocab_to=None)
    callbacks: list[L.Callback] = watching(root, found) if found else [SeriesCheckpoint([0], root)]
    sharded(root, callbacks, steps=4, module=lit, accumulate_grad_batches=2)


def part(
    root: Path, steps: int, *, resume: bool = False, every: int | None = None, dropout: float = 0.2, **options: Any
) -> None:
    torch.manual_seed(17 + steps)  # what was drawn before must not matter
    if resume:
        point = resume_point(root, "last", hashed=os.environ["RANK"] == "0")
        assert point is not None
        options["resume_from"] = point.state
    callbacks = [StepSeed(1), RunLog(root, resume=resume), SeriesCheckpoint([0], root)]
    callbacks.append(ResumeCheckpoint(root, every=every))
    lit = module(dropout=dropout, decay_steps=6, pad_vocab_to=None)
    sharded(root, callbacks, steps=steps, module=lit, **{"accumulate_grad_batches": 2, **options})


def torn(root: Path) -> None:
    """A newer checkpoint beside the last one, whose state lacks its end."""
    if torch.distributed.get_rank() == 0:
        newer = step_folder(root / "resume", 5)
        shutil.copytree(step_folder(root / "resume", 3), newer)
        state = newer / "trainer.ckpt"
        os.truncate(state, state.stat().st_size - 100)
    torch.distributed.barrier()


def full_disk(root: Path) -> str:
    """What a rank is told where the first cannot write."""
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
    """As `watched`, on a machine whose memory is full."""
    enough, sharding.free_memory = sharding.free_memory, lambda device: 10_000
    sharded(root, watching(root, analyses()), steps=3, module=module(dropout=0.0))
    sharding.free_memory = enough


def rotary() -> LitCausalLM:
    """A model whose blocks need what no checkpoint holds: the frequencies of its positions."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LitCausalLM("llama", {**sizes, "max_position_embeddings": 12}, lr=1e-2, warmup_steps=2)


def other_ways(root: Path) -> dict[str, Any]:
    """Mixed precision, clipping by value, activations computed again."""
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
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    sharded(root / "by_value", [RunLog(root / "by_value")], steps=3, module=module(dropout=0.0), **options)
    return {"dtypes": sorted(dtypes), "gathered": sorted(gathered)}


def compiled(root: Path) -> int:
    warnings.simplefilter("ignore")  # of Lightning and torch among themselves
    torch.compile = functools.partial(torch.compile, backend="eager")
    modules._EAGER_LOSS = ()  # as on a GPU: the loss is in the graph
    sharded(root, [RunLog(root)], steps=3, module=module(dropout=0.0, compile=True))
    return 0


def run(folder: Path) -> int:
    warnings.simplefilter("ignore")  # of Lightning and torch among themselves
    facts = watched(folder / "watched")
    begun = LitCausalLM(init_from=str(step_folder(folder / "watched", 3)), lr=1e-2, warmup_steps=2)
    sharded(folder / "begun", [SeriesCheckpoint([0], folder / "begun")], steps=1, module=begun)
    images = tiny_images.module(drop_path_rate=0.0)
    tiny_images.fit(folder / "images", lit=images, steps=1, devices=2, strategy=strategy(), inference_mode=False)
    part(folder / "whole", 6)
    stopped(folder / "parts")
    torn(folder / "parts")
    part(folder / "parts", 6, resume=True)
    facts["refusals"] = ["", ""]
    torch.distributed.all_gather_object(facts["refusals"], full_disk(folder / "full"))
    return written(folder / "facts.json", facts)


def run_more(folder: Path) -> int:
    """What stands beside the runs above, for the tests that take longer."""
    warnings.simplefilter("ignore")
    reduce, reductions = _fsdp_param_group.foreach_reduce, []
    _fsdp_param_group.foreach_reduce = lambda *args, **options: reductions.append(1) or reduce(*args, **options)
    dropping_out(folder / "bare", [])
    _fsdp_param_group.foreach_reduce = reduce
    dropping_out(folder / "seen", [Noisy(), Trajectory(batches=RandomText()), Coupling(batches=RandomText(), k=(2,))])
    roomless(folder / "roomless")
    return written(folder / "more.json", {"reductions": len(reductions), **other_ways(folder)})


def stopped(root: Path) -> None:
    part(root, 3)
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(step_folder(root, 0))  # a run that starts again would write it again


def written(file: Path, facts: dict[str, Any]) -> int:
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(facts))
    return 0
