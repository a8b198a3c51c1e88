"""Pretend accelerator: computes on the CPU, enforces the rules of a GPU, and counts synchronizations by line.

Inside `Pretend()`, a tensor on `DEVICE` holds a CPU tensor and behaves like a GPU tensor. An operation that mixes
devices raises, also for a generator of the other device, and so does `.numpy()`. Pickling is recorded as a violation.
Values are real, so code that depends on them runs normally. There are no streams, no memory limit and no kernels: an
error here is an error on a GPU, but code that passes here may still be slow there.

Importing this module registers the backend for the rest of the process, so import it only in a forked process.
"""

import collections
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import lit_layers

PACKAGE = str(Path(lit_layers.__file__).parent) + "/"
aten = torch.ops.aten
violations: collections.Counter[str] = collections.Counter()  # "file:line description"
waits: collections.Counter[str] = collections.Counter()  # the host waits for the device at "file:line operation"


class _Backend(backend_registration._DummyBackendModule):
    """Functions that torch expects in the module of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def set_device(self, index: int) -> None:
        pass

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, *state: Any) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def synchronize(self, *device: Any) -> None:
        pass


backend_registration._setup_privateuseone_for_python_backend("pretend", backend_module=_Backend())
DEVICE = torch.device("pretend", 0)
_COPIES = (aten.copy_.default, aten._to_copy.default, aten.copy.default)
_INDEXING = (
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
    *(aten._unsafe_index.Tensor, aten._unsafe_index_put.default),
)
# The host must wait for the device to know the size or the value of these results.
_WAITING = (
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default),
    *(aten.repeat_interleave.Tensor, aten.allclose.default),
    *(aten.linalg_eig.default, aten._linalg_eigh.default, aten._linalg_svd.default),
)
# These and all pointwise operations accept a 0-dimensional CPU tensor as a number.
_ACCEPT_NUMBERS = ("where", "masked_fill", "fill_", "lift_fresh", "searchsorted", "addmm")


def reset() -> None:
    violations.clear()
    waits.clear()


class DeviceTensor(torch.Tensor):
    """A tensor on `DEVICE` with the values of the CPU tensor `held`."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "DeviceTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
        )
        tensor.held = held
        return tensor

    def __init__(self, held: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("data_ptr", "storage", "untyped_storage", "_typed_storage"):
            return getattr(args[0].held, name)()
        if name == "tolist":
            waits[_call_site("tolist")] += 1
            return args[0].held.tolist()
        if name in ("numpy", "__array__"):
            violations[_call_site("numpy() of a tensor on the device")] += 1
            raise TypeError("can't convert pretend:0 device type tensor to numpy: copy it to host memory first")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not any(name.endswith("torch/serialization.py") for name, _ in _stack()):  # torch.save handles devices
            violations[_call_site("pickled a tensor on the device")] += 1
        return DeviceTensor, (self.held,)

    def __deepcopy__(self, memo: dict) -> Any:
        with torch.no_grad():
            copied: Any = DeviceTensor(self.held.clone())
        if isinstance(self, torch.nn.Parameter) or getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied


class Pretend(TorchDispatchMode):
    """Mode in which `DEVICE` exists."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_device(kwargs.get("device")) or any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves(args)):
            return _dispatch(func, args, kwargs)
        return func(*args, **kwargs)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "pretend"


def _stack() -> list[tuple[str, int]]:
    """Return files and lines of all callers, the innermost first."""
    files, frame = [], sys._getframe(1)
    while frame is not None:
        files.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return files


def _call_site(event: str) -> str:
    """Return "file:line event" for the innermost line of the package, or else of a library other than torch."""
    files = _stack()
    for root in (PACKAGE, "/site-packages/"):
        for name, number in files:
            inner = name.rpartition(root)[2]
            if root in name and not inner.startswith("torch/"):
                return f"{'lit_layers/' if root == PACKAGE else ''}{inner}:{number} {event}"
    return f"? {event}"


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    target = kwargs.get("device")
    _check_devices(func, args, leaves, on_device)
    _check_generators(func, leaves, bool(on_device) or _is_device(target))
    _count_waits(func, args, kwargs, bool(on_device))
    plain_args, plain = tree_map(lambda leaf: leaf.held if isinstance(leaf, DeviceTensor) else leaf, (args, kwargs))
    if target is not None:
        plain["device"] = torch.device("cpu") if _is_device(target) else target
    if plain.get("pin_memory"):
        plain["pin_memory"] = False
    result = func(*plain_args, **plain)
    if func in (*_INDEXING, aten.copy_.default, aten.set_.source_Tensor):
        stays = isinstance(args[0], DeviceTensor)
    else:
        stays = _is_device(target) if target is not None else bool(on_device)
    if not stays or func is aten._local_scalar_dense.default:
        return args[0] if not func.is_view and func._schema.name.endswith("_") else result
    written = {id(tensor.held): tensor for tensor in on_device} if func._schema.is_mutable else {}

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        return written[id(value)] if id(value) in written else DeviceTensor(value)

    return tree_map(placed, result)


def _check_devices(func: Any, args: Any, leaves: list[Any], on_device: list[DeviceTensor]) -> None:
    on_cpu = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)]
    if not on_device or not on_cpu or func in (*_COPIES, aten.set_.source_Tensor):
        return
    wrong = None
    if func in _INDEXING:
        values = args[2] if len(args) > 2 else None
        if not isinstance(args[0], DeviceTensor):
            wrong = "a CPU tensor indexed by one on the device"
        elif any(isinstance(index, torch.Tensor) and not isinstance(index, DeviceTensor) for index in args[1]):
            waits[_call_site("index on the CPU")] += 1
        if isinstance(values, torch.Tensor) and not isinstance(values, DeviceTensor) and values.ndim:
            wrong = "values on the CPU put into one on the device"
    elif large := [tensor for tensor in on_cpu if tensor.ndim]:
        wrong = f"a CPU tensor of shape {tuple(large[0].shape)} meets one on the device"
    elif not _accepts_numbers(func):
        wrong = "a 0-dimensional CPU tensor in an operation that is not pointwise"
    if wrong:
        violations[_call_site(f"{func}: {wrong}")] += 1
        raise RuntimeError(f"expected all tensors to be on the same device: {func}: {wrong}")


def _accepts_numbers(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return torch.Tag.pointwise in func.tags or name.startswith((*_ACCEPT_NUMBERS, "_foreach", "_fused"))


def _check_generators(func: Any, leaves: list[Any], works_on_device: bool) -> None:
    expected = "pretend" if works_on_device else "cpu"
    for leaf in leaves:
        if isinstance(leaf, torch.Generator) and leaf.device.type != expected:
            violations[_call_site(f"{func}: a generator of {leaf.device}")] += 1
            raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{leaf.device.type}'")


def _count_waits(func: Any, args: Any, kwargs: dict[str, Any], has_device: bool) -> None:
    target = kwargs.get("device")
    if not has_device:
        pinned = kwargs.get("non_blocking") and getattr(args[0], "pretends_pinned", False) if args else False
        if func is aten._to_copy.default and _is_device(target) and not pinned:
            waits[_call_site("copy to the device")] += 1
    elif (
        func in _WAITING
        or (func is aten._to_copy.default and target is not None and not _is_device(target))
        or (func is aten.copy_.default and not isinstance(args[0], DeviceTensor))
        or (func in _INDEXING and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]))
    ):
        waits[_call_site(str(func))] += 1


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy marked as pinned: as on a GPU, only pinned memory is copied without a wait of the host."""
    copy: Any = tensor.clone()
    copy.pretends_pinned = True
    return copy


torch.Tensor.pin_memory = pinned  # pyright: ignore[reportAttributeAccessIssue]


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "held", tensor)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return DeviceTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, DeviceTensor) and not isinstance(source, DeviceTensor):
        waits[_call_site("copy to the device")] += 1
    _held(target).copy_(_held(source))
    return target


_library = torch.library.Library("aten", "IMPL")  # deleting it would remove its operations
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")


def strategy() -> Any:
    """Return Lightning's strategy for one process on `DEVICE`, and make models on it savable."""
    import safetensors.torch
    import transformers.modeling_utils
    import transformers.pytorch_utils
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class PretendAccelerator(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            pass

        @staticmethod
        def get_parallel_devices(devices: Any) -> Any:
            return [DEVICE]

        @staticmethod
        def name() -> str:
            return "pretend"

    class OneDevice(SingleDeviceStrategy):
        """Strategy that records CPU tensors in a reduction, which NCCL would refuse with several ranks."""

        def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DeviceTensor):
                violations[_call_site("a tensor of the CPU in a collective of training")] += 1
            return super().reduce(tensor, *args, **kwargs)

    # Both libraries find shared weights by storage address, which a tensor on the device lacks.
    pointer, size = safetensors.torch.storage_ptr, safetensors.torch.storage_size
    identity = transformers.pytorch_utils.id_tensor_storage
    safetensors.torch.storage_ptr = lambda tensor: pointer(_held(tensor))
    safetensors.torch.storage_size = lambda tensor: size(_held(tensor))
    for module in (transformers.modeling_utils, transformers.pytorch_utils):
        module.id_tensor_storage = lambda tensor: identity(_held(tensor))  # pyright: ignore
    return OneDevice(device=DEVICE, accelerator=PretendAccelerator())
