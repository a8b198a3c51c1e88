"""Vector-Jacobian products of many output coordinates at once, and with them Jacobians of any block."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def jacobians_by_reverse_mode(
    block: Callable[[Tensor], Tensor], hidden: Tensor, outs: Tensor, ins: Tensor, chunk_size: int | None = None
) -> Tensor:
    """d block(X)[out] / d X[in], (batch, out, in, dim, dim), for places (batch, out) and (batch, out, in)."""
    batch, tokens, dim = hidden.shape
    # 8,192 rows a chunk keep the backward's buffers in cache: measured best at dim 128 and 768 on CPU
    chunk = chunk_size or max(1, min(dim, 8192 // (batch * tokens)))
    prompts = torch.arange(batch, device=hidden.device)
    result = hidden.new_empty(batch, outs.shape[1], ins.shape[2], dim, dim)
    # the fused attention kernels have no rule for vmap, the plain one has
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        leaf = hidden.detach().clone().requires_grad_()
        output = block(leaf)
        if not isinstance(output, Tensor) or output.shape != hidden.shape:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"expected the block to return a tensor of shape {tuple(hidden.shape)}, got {got}")
        if not output.requires_grad:  # a constant block, or one that detaches its input
            return result.zero_()
        for item in range(outs.shape[1]):
            selected = output[prompts, outs[:, item]]  # (batch, dim)
            for start in range(0, dim, chunk):
                rows = slice(start, min(start + chunk, dim))
                (grads,) = pull_back([selected], [leaf], [basis_rows(selected, rows)])  # (rows, batch, tokens, dim)
                result[:, item, :, rows] = grads[:, prompts[:, None], ins[:, item]].permute(1, 2, 0, 3)
    return result


def basis_rows(output: Tensor, rows: slice) -> Tensor:
    """The chosen unit vectors as cotangents of an output (batch, dim): the same for every prompt."""
    basis = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)[rows]
    return basis[:, None].expand(-1, output.shape[0], -1)  # (rows, batch, dim)


def pull_back(outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Gradients at the leaves for every row of cotangents (rows, *output), summed over outputs: each (rows, *leaf)."""
    call = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return list(torch.autograd.grad(outputs, leaves, cotangents, is_grads_batched=True, **call))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # an autograd function of the block's own without a rule for vmap
        if "vmap" not in str(error) and "functorch" not in str(error):
            raise
        single = [torch.autograd.grad(outputs, leaves, rows, **call) for rows in zip(*cotangents, strict=True)]
        return [torch.stack(grads) for grads in zip(*single, strict=True)]
