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

SEED = 0  # for every global generator inside an analysis, so that its numbers do not depend on the training step


class DisturbedError(RuntimeError):
    """An analysis changed the model that it measures."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the model and all global state afterwards, so that training continues unchanged.

    Inside: evaluation mode, gradients enabled, no parameter requires a gradient (its `.grad` is None), fixed seeds, no
    autocast, full float32 precision.

    Restored afterwards:

    - the mode of every submodule, hooks, and the attention implementation;
    - `requires_grad` and `.grad` (the same tensors with the same values);
    - the random states of torch, CUDA, numpy and python;
    - the default dtype, and the precision of float32 products.

    Raises:
        DisturbedError: if a parameter or buffer was written to or replaced, or a hook was left behind; it names which.
            Such hooks are removed, but written values cannot be restored.
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
    """Return a sentence that says how an analysis changed the model, or None."""
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
    """Restore gradients afterwards, as a backward pass would add to the gradients that training accumulates."""
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
        # Looked up by name, because accelerate replaces offloaded parameters at each call.
        for module, name, grad, requires_grad in before:
            parameter = module.get_parameter(name)
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


@contextmanager
def restore_attention(model: Network) -> Iterator[None]:
    """Restore the attention afterwards: an analysis may switch it to eager (transformers) or unfused (timm)."""
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
    """Seed every global generator with a fixed value, and restore its state afterwards."""
    # Reading the random state of an unused GPU would initialize it.
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
    """Enable gradients, disable autocast and use full float32 precision, whatever surrounds the analysis."""
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
    """Disallow TF32 and bfloat16 in float32 products, whichever interface of torch enabled them."""
    mkldnn: Any = torch.backends.mkldnn
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    backends = (mkldnn.conv, mkldnn.rnn, mkldnn.matmul, cuda.matmul, cudnn.conv, cudnn.rnn)
    before, older = [backend.fp32_precision for backend in backends], older_precision()
    if older:  # reading the older interface raises if the two disagree, so both are set
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
    """Return the settings of torch's older interface; None if the newer one was used, which makes it unreadable."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None
