"""The next-token loss, in place, and the mean of losses over batches of differing size."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torchmetrics import Metric

# Elements taken at a time: they stay in the cache from one operation to the next (2^17 x 4 B = 0.5 MB).
_CHUNK = 2**17


def next_token_loss(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy in nats over the first `vocab_size` columns; the others are padding.

    Where a gradient is wanted on a CPU the logits are used up: their memory takes in their own gradient. Neither a
    float32 copy of them nor log-probabilities nor a second gradient of that size (batch x tokens x vocabulary) ever
    exist. Elsewhere, and in a graph that is being compiled, it is the plain formula.
    """
    rows, targets = logits.flatten(0, -2), targets.flatten()
    has_gradient = torch.is_grad_enabled() and rows.requires_grad
    if torch.compiler.is_compiling() or (has_gradient and rows.device.type != "cpu"):
        return F.cross_entropy(_mask_padding(rows, vocab_size), targets)
    if has_gradient:
        return _InPlaceCrossEntropy.apply(rows, targets, vocab_size)  # pyright: ignore[reportReturnType]
    return F.cross_entropy(rows[:, :vocab_size].float(), targets)


def _mask_padding(rows: Tensor, vocab_size: int) -> Tensor:
    """In float32, padding as likely as nothing. Not cut off: rows of odd length (50,257) are not read in vectors, which
    makes the kernels of a GPU three times as slow."""
    words = torch.arange(rows.shape[1], device=rows.device) < vocab_size
    return torch.where(words, rows.float(), -torch.inf)


def network_loss(network: Callable[..., Any], input_ids: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the `next_token_loss` of what a causal language model predicts: one function, for one compiled graph."""
    return next_token_loss(network(input_ids=input_ids, use_cache=False).logits, targets, vocab_size)


class _InPlaceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        # `detach` shares the version counter: an operation that saved these logits for its backward pass will raise.
        gradient = logits.detach()
        ctx.save_for_backward(gradient)
        gradient[:, vocab_size:] = 0
        rows = max(1, _CHUNK // logits.shape[1])
        losses = []
        for stored, target in zip(gradient[:, :vocab_size].split(rows), targets.unsqueeze(1).split(rows), strict=True):
            chunk = stored.to(torch.promote_types(stored.dtype, torch.float32))  # no copy where it is float32 already
            chunk.sub_(chunk.amax(1, keepdim=True))
            at_target = chunk.gather(1, target)
            total = chunk.exp_().sum(1, keepdim=True)
            losses.append((total.log() - at_target).sum())
            chunk.div_(total)
            chunk.scatter_(1, target, chunk.gather(1, target) - 1)  # softmax - one-hot
            if chunk.dtype != stored.dtype:
                stored.copy_(chunk)
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        # The mean is taken only here: in float16 the scale of the loss comes in with `grad_loss` and keeps tiny
        # entries from vanishing.
        return gradient.mul_(grad_loss / len(gradient)), None, None


def mean_of_step(losses: Sequence[Tensor], accumulate: int) -> Tensor:
    """Return the mean loss of a step's micro-batches, of losses that Lightning has divided by `accumulate` each.

    The last step of an epoch may have fewer micro-batches than that.
    """
    return torch.stack([*losses]).sum() * (accumulate / len(losses))


class WeightedMean(Metric):
    """Sum of weight x value over sum of weights, in float64; not a number where one of the values is none.

    torchmetrics' own mean leaves such values out, or else only the weights.
    """

    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_dtype(torch.float64)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: float) -> None:
        """Add one batch's mean."""
        self.total = self.total + weight * value.detach().double()
        self.weight = self.weight + weight

    def compute(self) -> Tensor:
        """The mean of all batches so far."""
        return self.total / self.weight
