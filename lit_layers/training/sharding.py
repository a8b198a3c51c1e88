"""Sharded training (FSDP2): every rank holds a part of each weight, and the whole model only while it is measured."""

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

SHARDED = "sharded"  # entry of a checkpoint to resume from
_SKELETON = "_skeleton"  # attribute of a sharded model: the plain one, its parameters without memory


class NoRoomError(RuntimeError):
    """The whole model does not fit into what is free on some rank; raised on all of them."""


def shards_weights(strategy: Any) -> bool:
    """Whether a strategy spreads the weights over the ranks."""
    return isinstance(strategy, ModelParallelStrategy)


def sharding_mesh(strategy: Any) -> DeviceMesh | None:
    """The ranks over which the weights are to be sharded; None where every rank holds them all.

    Raises:
        InputError: tensor parallelism, or the older FSDP, which shards in a way that cannot be looked into.
    """
    if isinstance(strategy, FSDPStrategy):
        raise InputError(
            "trainer.strategy: expected ModelParallelStrategy for sharded weights (recipes/trainer/fsdp.yaml), got fsdp"
        )
    if not shards_weights(strategy):
        return None
    if (size := strategy.device_mesh["tensor_parallel"].size()) > 1:
        raise InputError(
            f"trainer.strategy.tensor_parallel_size: expected 1, got {size}; set data_parallel_size to all devices"
        )
    return strategy.device_mesh["data_parallel"]


def shard_(model: nn.Module, mesh: DeviceMesh, precision: str = "32-true") -> None:
    """Shard each block, then what is left, over the ranks of `mesh`; a block is whole only while it computes.

    Weights and buffers are those of the first rank, whatever the others have. One block at a time is whole on a device.
    With a bf16 `precision` blocks are gathered and computed in bfloat16, and gradients summed in float32; the weights
    keep their type.
    """
    policy = MixedPrecisionPolicy()
    if "bf16" in precision:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = LayeredModel(model).blocks
    _broadcast_(model.buffers(), mesh)
    skeleton = _skeleton(model)
    for shard in (*blocks, model):
        _broadcast_(shard.parameters(), mesh)
        fully_shard(shard, mesh=mesh, mp_policy=policy)
    model.__dict__[_SKELETON] = skeleton


def _broadcast_(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Move whole tensors to the device of this rank, with the values of the first one."""
    device = _device(mesh)
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
            distributed.broadcast(tensor.data, group=mesh.get_group(), group_src=0)


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def set_gradient_sync_(model: nn.Module, on: bool) -> None:
    """Whether the next backward pass sums gradients over the ranks, or adds them to this rank's own, kept whole."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def full(tensor: Tensor) -> Tensor:
    """A plain tensor: where `tensor` is spread over ranks, all of it. Every rank must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_copy(model: nn.Module, strategy: ModelParallelStrategy) -> nn.Module:
    """Return the plain, whole model on the device of each rank.

    Every rank must call. The sharded model stays as it is.

    Raises:
        NoRoomError: on every rank, where the copy does not fit on one of them.
    """
    if _SKELETON not in model.__dict__:
        raise InputError(
            f"model: this {type(model).__name__} was sharded by other means; "
            "call lit_layers.training.sharding.shard_ in configure_model"
        )
    _check_room(model.__dict__[_SKELETON], _min_free(strategy), strategy.root_device, strategy.num_processes)
    whole = _gather(model, strategy.root_device, keep=True)
    assert whole is not None
    return whole


def whole_on_first_rank(model: nn.Module, strategy: ModelParallelStrategy) -> nn.Module | None:
    """The plain, whole model on the CPU of the first rank, gathered weight by weight; None on the others.

    Every rank must call.
    """
    return _gather(model, torch.device("cpu"), keep=strategy.is_global_zero)


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy whose parameters take no memory; ties between them hold, buffers are copied."""
    memo = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def _gather(model: nn.Module, device: torch.device, *, keep: bool) -> nn.Module | None:
    """A filled copy of the skeleton; every rank calls, and those that do not keep it hold one weight at a time."""
    copies: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    # A hook of `state_dict` first shards again what a validation has left whole.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:  # tied weights stay one
            value = full(tensor.detach())
            value = value.to(device, copy=True) if keep else value.to("meta")
            copies[id(tensor)] = (
                nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            )
        state[name] = copies[id(tensor)]
    if not keep:
        return None
    plain = copy.deepcopy(model.__dict__[_SKELETON])
    plain.load_state_dict(state, assign=True)
    return plain.to(device).eval()


def _min_free(strategy: ModelParallelStrategy) -> float:
    """Bytes that are free on the rank that has least of them, on every rank the same number."""
    free = free_memory(strategy.root_device)
    least = torch.tensor(float("inf") if free is None else free, dtype=torch.float64, device=strategy.root_device)
    return float(strategy.reduce(least, reduce_op="min"))


def _check_room(skeleton: nn.Module, free: float, device: torch.device, num_ranks: int) -> None:
    """Refuse a copy that would not fit; `num_ranks` are those of this machine.

    Raises:
        NoRoomError: naming what is needed and what is free.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*skeleton.parameters(), *skeleton.buffers())]
    copies = num_ranks if device.type == "cpu" else 1  # the ranks of one machine share its memory
    needed = copies * (sum(sizes) + max(sizes))  # one weight is there twice while it is copied
    if needed > free:
        raise NoRoomError(
            f"a whole model on each rank takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on "
            f"{device.type}: measure the saved checkpoints with lit-layers analyze FOLDER --offload SCRATCH"
        )
