"""Measuring a model during training without changing it: modes, gradients and random states are restored."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from lit_layers.errors import kind_and_words
from lit_layers.models.block_calls import fingerprints, hook_ids, remove_new_hooks_
from lit_layers.models.families import Network
from lit_layers.models.offload import execution_device
from lit_layers.models.view import evaluating

# Seed of every global random generator inside an analysis, so that its numbers do not depend on the training step.
SEED = 0


class DisturbedError(RuntimeError):
    """An analysis changed the model that it measures."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the code inside the context under fixed conditions, and restore the model and all global state afterwards.

    Inside the context, the model is in evaluation mode and gradients are enabled. No parameter requires a gradient, and
    each `.grad` is None. Random generators have fixed seeds, autocast is off, and float32 products have full precision.

    Afterwards, training continues unchanged, because the following are restored:

    - the mode of every submodule, hooks, and the attention implementation;
    - `requires_grad` and `.grad` (the same tensors with the same values);
    - the random states of torch, CUDA, numpy and python;
    - the default dtype, and the precision of float32 products.

    Raises:
        DisturbedError: if a parameter or buffer was written to or replaced, or a hook was left behind. The message
            names it. Such hooks are removed, but overwritten values cannot be restored.
    """
    before, hooks = fingerprints(model), hook_ids(model)
    with (
        evaluating(model),
        restore_gradients(model),
        restore_attention(model),
        restore_random_state(),
        default_numerics(execution_device(model)),
    ):
        try:
            yield
        except Exception as failure:
            if change := disturbance(model, before, hooks):
                raise DisturbedError(f"{change}; it also failed with {kind_and_words(failure)}") from failure
            raise
        if change := disturbance(model, before, hooks):
            raise DisturbedError(change)


def disturbance(model: nn.Module, before: dict[str, tuple], hooks: dict[str, set]) -> str | None:
    """Return a sentence that says how an analysis changed the model, or None if it did not.

    Hooks that the analysis left on the model are removed.

    Args:
        before: the `fingerprints` of the model before the analysis.
        hooks: the `hook_ids` of the model before the analysis.
    """
    after, left = fingerprints(model), remove_new_hooks_(model, hooks)
    if changed := [name for name in before | after if before.get(name) != after.get(name)]:
        return f"the analysis changed {name_list(changed)}: an analysis must not write to the model"
    if left:
        return f"the analysis left hooks on {name_list(left)}: remove every hook that is added"
    return None


def name_list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def restore_gradients(model: nn.Module) -> Iterator[None]:
    """Set gradients to None inside the context, and restore them afterwards.

    Otherwise, a backward pass inside would add to the gradients that training accumulates.
    """
    before = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            before.append((module, name, parameter.grad, parameter.requires_grad))
    for parameter in model.parameters():
        parameter.grad = None
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        # Look up each parameter by name, because accelerate replaces offloaded parameters at each call.
        for module, name, grad, requires_grad in before:
            parameter = module.get_parameter(name)
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


@contextmanager
def restore_attention(model: Network) -> Iterator[None]:
    """Restore the attention implementation after the context.

    An analysis may switch it to eager (in models of transformers) or to unfused (in models of timm).
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    fused = [(module, module.fused_attn) for module in model.modules() if hasattr(module, "fused_attn")]
    try:
        yield
    finally:
        if implementation is not None and model.config._attn_implementation != implementation:
            model.set_attn_implementation(implementation)
        for module, value in fused:
            module.fused_attn = value


@contextmanager
def restore_random_state() -> Iterator[None]:
    """Seed every global random generator with a fixed value inside the context, and restore its state afterwards."""
    # Leave out GPUs that are not in use yet, because reading their random state would initialize them.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(gpus):
            torch.default_generator.manual_seed(SEED)
            if gpus:
                torch.cuda.manual_seed_all(SEED)
            np.random.seed(SEED)  # noqa: NPY002
            random.seed(SEED)
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


@contextmanager
def default_numerics(device: torch.device) -> Iterator[None]:
    """Inside the context, enable gradients, disable autocast and use full float32 precision.

    The numbers of an analysis then do not depend on the precision and autocast settings of the calling code.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(device.type, enabled=False) if device.type != "cpu" else nullcontext(),
            full_float32_precision(),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def full_float32_precision() -> Iterator[None]:
    """Inside the context, compute float32 products without TF32 or bfloat16.

    Torch has an older and a newer interface for this setting. This function works whichever of them the caller has
    used.
    """
    mkldnn: Any = torch.backends.mkldnn
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    backends = (mkldnn.conv, mkldnn.rnn, mkldnn.matmul, cuda.matmul, cudnn.conv, cudnn.rnn)
    before, older = [backend.fp32_precision for backend in backends], older_precision()
    # Set torch's older interface as well: reading it raises an error if `fp32_precision`, the newer one, disagrees.
    if older:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
    for backend in backends[:2] if older else backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def older_precision() -> tuple[str, bool] | None:
    """Return the settings of torch's older interface for the precision of float32 products.

    Return None if they cannot be read, because the newer interface was used.
    """
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None
