"""Sharded training with FSDP2.

Each rank holds a shard of every weight. Whole weights are gathered only while the model is measured or saved.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lit_layers.errors import InputError
from lit_layers.models.offload import free_memory
from lit_layers.models.view import LayeredModel

# Key in a resume checkpoint: whether its run sharded the weights.
SHARDED = "sharded"
# Attribute of a sharded model: its unsharded copy with parameters on the meta device (`_skeleton`).
_SKELETON = "_skeleton"


class NoRoomError(RuntimeError):
    """The gathered model does not fit into the free memory of at least one rank. All ranks raise this error."""


def shards_weights(strategy: Any) -> bool:
    """Return whether a strategy shards the weights over the ranks."""
    return isinstance(strategy, ModelParallelStrategy)


def sharding_mesh(strategy: Any) -> DeviceMesh | None:
    """Return the mesh of ranks over which weights are sharded, or None if every rank holds all weights.

    Raises:
        InputError: if the strategy uses tensor parallelism or the older FSDP1.
    """
    # FSDP1 flattens the weights of a module into one vector: single weights lose their names and shapes.
    if isinstance(strategy, FSDPStrategy):
        raise InputError(
            "trainer.strategy: expected ModelParallelStrategy for sharded weights (recipes/trainer/fsdp.yaml), got fsdp"
        )
    if not shards_weights(strategy):
        return None
    # Tensor parallelism would split weights along a second axis of the mesh, which `shard_` does not use.
    if (size := strategy.device_mesh["tensor_parallel"].size()) > 1:
        raise InputError(
            f"trainer.strategy.tensor_parallel_size: expected 1, got {size}; set data_parallel_size to all devices"
        )
    return strategy.device_mesh["data_parallel"]


def shard_(model: nn.Module, mesh: DeviceMesh, precision: str = "32-true") -> None:
    """Shard each block over the ranks of `mesh`, then the remaining weights.

    All ranks get the weights and buffers of the first rank. With a bf16 `precision`, blocks are gathered and computed
    in bfloat16 and gradients are reduced in float32. The sharded weights keep their dtype.
    """
    policy = MixedPrecisionPolicy()
    if "bf16" in precision:
        # Gathering in bfloat16 halves the traffic. Gradients are reduced in float32, because a bfloat16 sum over many
        # ranks loses small terms.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = LayeredModel(model).blocks
    _broadcast_(model.buffers(), mesh)
    # Copy the model first: `fully_shard` changes its class in place, and FSDP modules refuse `deepcopy`.
    skeleton = _skeleton(model)
    # Blocks come before the model: each call of `fully_shard` takes all parameters that no earlier call has taken.
    for part in (*blocks, model):
        # Weights move to the device block by block, so that the whole model never has to fit into its memory.
        _broadcast_(part.parameters(), mesh)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    # Bypass `nn.Module.__setattr__`, which would register the skeleton as a submodule: the state dict and the optimizer
    # would then contain the parameters of the skeleton.
    model.__dict__[_SKELETON] = skeleton


def _broadcast_(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Move the tensors that are not sharded to this rank's device, and give them the first rank's values."""
    device = _device(mesh)
    for tensor in tensors:
        # Skip DTensors: they belong to a block that is already sharded, and were broadcast before that.
        if not isinstance(tensor, DTensor):
            # Assign to `.data`, so that the parameter remains the same object and tied weights remain tied.
            tensor.data = tensor.data.to(device)
            distributed.broadcast(tensor.data, group=mesh.get_group(), group_src=0)


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def set_gradient_sync_(model: nn.Module, on: bool) -> None:
    """Set whether the next backward passes reduce gradients over the ranks.

    While `on` is False, each rank accumulates its own gradients. They are not sharded and need as much memory as the
    whole model.
    """
    # It is enough to reduce the gradients of a step once: reduction is linear, so reducing their sum over micro-batches
    # equals adding up the reduced gradients of each micro-batch.
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks; return any other tensor unchanged. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_copy(model: nn.Module, strategy: ModelParallelStrategy) -> nn.Module:
    """Return on each rank an unsharded copy of the model with all weights, on the rank's device.

    Every rank must call this. The sharded model does not change.

    Raises:
        NoRoomError: on every rank, if the copy does not fit on one of them.
        InputError: if `shard_` did not shard the model.
    """
    if _SKELETON not in model.__dict__:
        raise InputError(
            f"model: this {type(model).__name__} was sharded by other means; "
            "call lit_layers.training.sharding.shard_ in configure_model"
        )
    # Check before gathering, with the minimum over ranks: if only one rank raised, the others would wait forever.
    _check_room(model.__dict__[_SKELETON], _min_free(strategy), strategy.root_device, strategy.num_processes)
    whole = _gather(model, strategy.root_device, keep=True)
    assert whole is not None
    return whole


def whole_on_first_rank(model: nn.Module, strategy: ModelParallelStrategy) -> nn.Module | None:
    """Gather an unsharded copy of the model on the CPU of the first rank, weight by weight.

    Return None on other ranks.

    Every rank must call this.
    """
    return _gather(model, torch.device("cpu"), keep=strategy.is_global_zero)


def _skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose parameters are on the meta device. Tied parameters remain tied."""
    # `deepcopy` replaces each object whose id is in `memo` by its entry. Tied weights have one entry and stay tied.
    # Buffers are copied with their values, as `state_dict` leaves out those that are not persistent (rotary tables).
    memo = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def _gather(model: nn.Module, device: torch.device, *, keep: bool) -> nn.Module | None:
    """Return an unsharded copy of a sharded model with all weights on `device`, or None if `keep` is False.

    Every rank must call this. A rank on which `keep` is False holds only one gathered weight at a time.
    """
    copies: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    # After a forward pass without a backward pass, the weights outside the blocks are still gathered. `state_dict` has
    # a hook that shards them again. With `keep_vars` it returns the parameters themselves, so that tied weights are
    # one tensor with one id.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            # `full` is a collective operation, so all ranks must visit the same names in the same order.
            value = full(tensor.detach())
            # Copy the value, because `full` returns an unsharded buffer itself, and training would then change the
            # buffer of the measured model.
            value = value.to(device, copy=True) if keep else value.to("meta")
            copies[id(tensor)] = (
                nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            )
        state[name] = copies[id(tensor)]
    if not keep:
        return None
    plain = copy.deepcopy(model.__dict__[_SKELETON])
    # `assign=True` makes these tensors the parameters. By default, their values would be copied into the parameters of
    # the skeleton, which have no memory on the meta device.
    plain.load_state_dict(state, assign=True)
    return plain.to(device).eval()


def _min_free(strategy: ModelParallelStrategy) -> float:
    """Return the smallest number of free bytes over all ranks, inf if it is unknown. Every rank must call this."""
    free = free_memory(strategy.root_device)
    least = torch.tensor(float("inf") if free is None else free, dtype=torch.float64, device=strategy.root_device)
    return float(strategy.reduce(least, reduce_op="min"))


def _check_room(skeleton: nn.Module, free: float, device: torch.device, num_ranks: int) -> None:
    """Refuse to gather an unsharded copy that does not fit into `free` bytes.

    Args:
        num_ranks: number of ranks on this machine.

    Raises:
        NoRoomError: if the copy does not fit. The message names the needed and the free memory.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*skeleton.parameters(), *skeleton.buffers())]
    copies = num_ranks if device.type == "cpu" else 1  # CPU ranks of one machine share its memory
    needed = copies * (sum(sizes) + max(sizes))  # a gathered weight exists twice while it is copied
    if needed > free:
        raise NoRoomError(
            f"a whole model on each rank takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on "
            f"{device.type}: measure the saved checkpoints with lit-layers analyze FOLDER --offload SCRATCH"
        )
