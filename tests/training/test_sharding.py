"""Sharded training checks its strategy, the free memory and the states that it resumes from."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from lit_layers.cli.options import Recipe
from lit_layers.cli.verbs import fit as verb
from lit_layers.errors import InputError
from lit_layers.training import resuming, sharding
from lit_layers.training.resuming import ResumeCheckpoint
from tests.support.tiny_training import fit

ROOT = Path(__file__).parents[2]


def test_a_sharded_run_refuses_the_state_of_an_unsharded_one(tmp_path):
    fit(tmp_path, [ResumeCheckpoint(tmp_path, every=None)], steps=1)
    state = tmp_path / "resume" / "step-000000001" / "trainer.ckpt"
    with pytest.raises(InputError, match="was saved by a run without sharded weights; go on with the strategy of"):
        resuming._load(strategy(), state)


def strategy(tensor_parallel_size: int = 1, **options: Any) -> ModelParallelStrategy:
    """Return a strategy that believes that its processes have started."""
    built = ModelParallelStrategy(**options)
    sizes = {"data_parallel": 2, "tensor_parallel": tensor_parallel_size}
    mesh: Any = {name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()}
    built._device_mesh = mesh
    return built


def test_weights_are_sharded_over_data_parallel_ranks_and_other_strategies_are_refused():
    mesh: Any = sharding.sharding_mesh(strategy())
    assert mesh.size() == 2
    assert sharding.sharding_mesh(SimpleNamespace()) is None
    with pytest.raises(InputError, match=re.escape("trainer.strategy.tensor_parallel_size: expected 1, got 4; set ")):
        sharding.sharding_mesh(strategy(4))
    with pytest.raises(InputError, match="trainer.strategy: expected ModelParallelStrategy .* got fsdp"):
        sharding.sharding_mesh(FSDPStrategy())


@pytest.mark.parametrize(("kind", "needed"), [("cuda", "10.00"), ("cpu", "20.00")])
def test_the_error_without_room_names_needed_and_free_memory(kind, needed):
    # Two weights of 0.75e9 float32 values take 6 GB, a buffer takes 1 GB. One weight exists twice while it is copied.
    # The two CPU ranks share the memory of the machine.
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


def test_a_model_sharded_by_other_means_is_refused_with_advice():
    with pytest.raises(InputError, match="shard_ in configure_model"):
        sharding.whole_copy(nn.Linear(2, 2), strategy())
