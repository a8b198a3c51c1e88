"""Sharded training with FSDP2.

Each rank holds a shard of every weight. The weights are gathered into a plain model only while it is measured or saved.
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
# Attribute of a sharded model: its plain copy with parameters on the meta device.
_SKELETON = "_skeleton"


class NoRoomError(RuntimeError):
    """The gathered model does not fit into the free memory of at least one rank. All ranks raise it."""


def shards_weights(strategy: Any) -> bool:
    """Return whether a strategy shards the weights over the ranks."""
    return isinstance(strategy, ModelParallelStrategy)


def sharding_mesh(strategy: Any) -> DeviceMesh | None:
    """Return the mesh of ranks that share the weights, or None if every rank holds all weights.

    Raises:
        InputError: if the strategy uses tensor parallelism or the older FSDP1.
    """
    # FSDP1 flattens the weights of a module into one vector, so that single weights have neither name nor shape.
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
        # Half the traffic of float32. The reduction stays float32: a bfloat16 sum over many ranks loses small terms.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = LayeredModel(model).blocks
    _broadcast_(model.buffers(), mesh)
    # Copied first: `fully_shard` changes the class of the module in place, and FSDP modules refuse `deepcopy`.
    skeleton = _skeleton(model)
    # Blocks come before the model: `fully_shard` takes all parameters below a module that no earlier call has taken.
    for shard in (*blocks, model):
        # Weights move to the device block by block, so that the whole model never has to fit there.
        _broadcast_(shard.parameters(), mesh)
        fully_shard(shard, mesh=mesh, mp_policy=policy)
    # Past `nn.Module.__setattr__`: a registered submodule would add its parameters to the state dict and the optimizer.
    model.__dict__[_SKELETON] = skeleton


def _broadcast_(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Move plain tensors to this rank's device and give them the first rank's values."""
    device = _device(mesh)
    for tensor in tensors:
        # A DTensor was broadcast with its block, before that was sharded.
        if not isinstance(tensor, DTensor):
            # Through `.data` the parameter stays the same object: tied weights stay tied.
            tensor.data = tensor.data.to(device)
            distributed.broadcast(tensor.data, group=mesh.get_group(), group_src=0)


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def set_gradient_sync_(model: nn.Module, on: bool) -> None:
    """Set whether the next backward passes reduce gradients over the ranks.

    While `on` is False, each rank adds up its own gradients. They are not sharded and take the size of the whole model.
    """
    # Reduction is linear: one reduction of the sum over micro-batches equals the sum of one reduction each.
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def full(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered from all ranks, and any other tensor as it is. Every rank must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_copy(model: nn.Module, strategy: ModelParallelStrategy) -> nn.Module:
    """Return a plain copy of the model with all weights, on the device of each rank.

    Every rank must call. The sharded model does not change.

    Raises:
        NoRoomError: on every rank, if the copy does not fit on one of them.
        InputError: if `shard_` did not shard the model.
    """
    if _SKELETON not in model.__dict__:
        raise InputError(
            f"model: this {type(model).__name__} was sharded by other means; "
            "call lit_layers.training.sharding.shard_ in configure_model"
        )
    # Before the gathering, with the minimum over ranks: if only one rank raised, the others would wait for it forever.
    _check_room(model.__dict__[_SKELETON], _min_free(strategy), strategy.root_device, strategy.num_processes)
    whole = _gather(model, strategy.root_device, keep=True)
    assert whole is not None
    return whole


def whole_on_first_rank(model: nn.Module, strategy: ModelParallelStrategy) -> nn.Module | None:
    """Gather a plain copy of the model on the CPU of the first rank, weight by weight. Return None on other ranks.

    Every rank must call.
    """
    return _gather(model, torch.device("cpu"), keep=strategy.is_global_zero)


def _skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose parameters are on the meta device. Ties between parameters stay."""
    # `deepcopy` takes an object that is in `memo` from there. One entry per parameter: tied weights stay one tensor.
    # Buffers are copied with their values, as `state_dict` leaves out those that are not persistent (rotary tables).
    memo = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def _gather(model: nn.Module, device: torch.device, *, keep: bool) -> nn.Module | None:
    """Return a copy of the skeleton with all weights on `device`, or None if not `keep`.

    Every rank must call. A rank without `keep` holds one gathered weight at a time.
    """
    copies: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    # After a forward pass without backward the root's weights stay gathered. A hook of `state_dict` shards them again.
    # `keep_vars` returns the parameters themselves: without it tied weights would be two tensors with different ids.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            # An all-gather: all ranks must walk through the same names in the same order.
            value = full(tensor.detach())
            # An unsharded buffer is returned as it is: without a copy, training would change the measured model.
            value = value.to(device, copy=True) if keep else value.to("meta")
            copies[id(tensor)] = (
                nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            )
        state[name] = copies[id(tensor)]
    if not keep:
        return None
    plain = copy.deepcopy(model.__dict__[_SKELETON])
    # `assign`: the default would copy values into the skeleton's parameters, which have no memory on the meta device.
    plain.load_state_dict(state, assign=True)
    return plain.to(device).eval()


def _min_free(strategy: ModelParallelStrategy) -> float:
    """Return the free bytes on the rank that has the fewest: the same number on all ranks, inf if unknown."""
    free = free_memory(strategy.root_device)
    least = torch.tensor(float("inf") if free is None else free, dtype=torch.float64, device=strategy.root_device)
    return float(strategy.reduce(least, reduce_op="min"))


def _check_room(skeleton: nn.Module, free: float, device: torch.device, num_ranks: int) -> None:
    """Refuse a copy that does not fit into `free` bytes.

    Args:
        num_ranks: ranks on this machine.

    Raises:
        NoRoomError: naming the needed and the free memory.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*skeleton.parameters(), *skeleton.buffers())]
    copies = num_ranks if device.type == "cpu" else 1  # CPU ranks of one machine share its memory
    needed = copies * (sum(sizes) + max(sizes))  # a gathered weight exists twice while it is copied
    if needed > free:
        raise NoRoomError(
            f"a whole model on each rank takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on "
            f"{device.type}: measure the saved checkpoints with lit-layers analyze FOLDER --offload SCRATCH"
        )
