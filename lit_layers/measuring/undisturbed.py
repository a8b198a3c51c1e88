"""Measuring a model in training without changing it: modes, gradients and random states are restored."""

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

SEED = 0  # of every global generator inside an analysis, so that its numbers do not depend on where training stands


class DisturbedError(RuntimeError):
    """An analysis changed the model it was to look at."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let training go on afterwards as if nothing had happened inside.

    Inside: evaluation mode, derivatives on, no parameter asks for a gradient (one that is asked for by hand starts from
    None), fixed seeds, no autocast, full float32 precision. Restored: the mode of every submodule, `.grad` (the same
    tensors with the same values), `requires_grad`, attention implementation, hooks, the random state of torch, CUDA,
    numpy and python, the default dtype, the precision of float32 products.

    Raises:
        DisturbedError: a parameter or buffer was written to or exchanged, or a hook was left behind; it names which.
            (Hooks are taken off again, written values cannot be brought back.)
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
    """Return, as a sentence, what an analysis did to the model that it must not do."""
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
    """Restore gradients: a backward pass would add to those that training accumulates."""
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
        for module, name, grad, requires_grad in before:  # accelerate exchanges offloaded parameters at each call
            parameter = module.get_parameter(name)
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


@contextmanager
def restore_attention(model: Network) -> Iterator[None]:
    """Restore the attention: an analysis may switch a transformers model to eager, or timm's blocks to unfused."""
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
    """Start every global generator from a fixed seed, and let it go on from where it was afterwards."""
    # Asking for the state of a GPU that is not in use would start it.
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
    """Switch derivatives on, autocast off, and float32 products to full precision, whatever surrounds the analysis."""
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
    """Allow no TF32 and no bfloat16 in products of float32, by whichever interface of torch they were switched on."""
    mkldnn: Any = torch.backends.mkldnn
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    backends = (mkldnn.conv, mkldnn.rnn, mkldnn.matmul, cuda.matmul, cudnn.conv, cudnn.rnn)
    before, older = [backend.fp32_precision for backend in backends], older_precision()
    if older:  # then both interfaces must agree inside as well: asking the older one raises where they do not
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
    """Return the settings of torch's older interface; None if the newer one was used, which the older cannot read."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None
