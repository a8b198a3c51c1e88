"""What tells that a model was written to, or hooked: of parameters, buffers and modules."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def fingerprints(model: nn.Module) -> dict[str, tuple]:
    """For each parameter and buffer what changes when it is written to (version) or exchanged (identity, memory); of
    rotary frequencies, which some models write anew at each call, the values."""
    seen: set[int] = set()  # a tied one once
    prints: dict[str, tuple] = {}
    for module, path in _modules(model):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    prints[path + name] = "meta", tensor.shape  # accelerate exchanges it at each call
                elif tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    is_table = name in module._non_persistent_buffers_set and tensor.ndim == 1
                    prints[path + name] = id(tensor), tensor.data_ptr(), _written(tensor, is_table)
    return prints


def _written(tensor: Tensor, is_table: bool) -> int | bytes:
    if is_table:
        return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return 0 if tensor.is_inference() else tensor._version


def hook_ids(model: nn.Module) -> dict[str, set]:
    """Of the modules that bear hooks."""
    return {path + kind: set(of) for part, path in _modules(model) for kind in HOOKS if (of := getattr(part, kind))}


def _modules(model: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """`named_modules` without a generator for each level, as every update of an analysis asks; paths end in a dot."""
    paths: dict[nn.Module, str] = {}
    waiting = [(model, "")]
    while waiting:
        module, path = waiting.pop()
        if module not in paths:
            paths[module] = path
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    waiting.append((child, f"{path}{name}."))
    return paths.items()


def remove_new_hooks_(model: nn.Module, before: dict[str, set]) -> list[str]:
    """Takes off the hooks that were not there before; the modules that bore them."""
    left = []
    for part, path in _modules(model):
        for kind in HOOKS:
            hooks = getattr(part, kind)
            for key in set(hooks) - before.get(path + kind, set()):
                del hooks[key]
                left.append(path.removesuffix(".") or type(model).__name__)
    return left
