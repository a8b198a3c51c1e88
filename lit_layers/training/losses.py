"""The next-token loss, computed in place, and means of losses over batches of different sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torchmetrics import Metric

# Number of logits that are processed at once, so that they remain in the CPU cache from one operation to the next
# (2^17 x 4 B = 0.5 MB).
_CHUNK = 2**17


def next_token_loss(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy in nats over the first `vocab_size` columns; the other columns are padding.

    On a CPU with gradients, the logits are overwritten: their memory then holds their own gradient. That saves three
    tensors of that size (batch x tokens x vocabulary): a float32 copy, the log-probabilities and a separate gradient.
    On other devices, without gradients, and under `torch.compile`, torch's own cross-entropy is used.

    Args:
        logits: (batch, tokens, columns), in any floating dtype.
        targets: (batch, tokens), ids below `vocab_size`.
    """
    rows, targets = logits.flatten(0, -2), targets.flatten()
    has_gradient = torch.is_grad_enabled() and rows.requires_grad
    if torch.compiler.is_compiling() or (has_gradient and rows.device.type != "cpu"):
        return F.cross_entropy(_mask_padding(rows, vocab_size), targets)
    if has_gradient:
        return _InPlaceCrossEntropy.apply(rows, targets, vocab_size)  # pyright: ignore[reportReturnType]
    return F.cross_entropy(rows[:, :vocab_size].float(), targets)


def _mask_padding(rows: Tensor, vocab_size: int) -> Tensor:
    """Return the logits in float32, with -inf in padding columns."""
    # Keep the padding columns. A slice without them would be three times slower, because kernels cannot use vector
    # loads for rows of odd length (50,257).
    real = torch.arange(rows.shape[1], device=rows.device) < vocab_size
    return torch.where(real, rows.float(), -torch.inf)


def network_loss(network: Callable[..., Any], input_ids: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the `next_token_loss` of a causal language model.

    The forward pass and the loss are in one function so that `torch.compile` makes one graph of both.
    """
    return next_token_loss(network(input_ids=input_ids, use_cache=False).logits, targets, vocab_size)


class _InPlaceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        # `detach` shares memory and version counter: if another operation saved these logits for its backward pass,
        # autograd notices the overwriting and raises.
        gradient = logits.detach()
        ctx.save_for_backward(gradient)
        gradient[:, vocab_size:] = 0
        rows = max(1, _CHUNK // logits.shape[1])
        losses = []
        for stored, target in zip(gradient[:, :vocab_size].split(rows), targets.unsqueeze(1).split(rows), strict=True):
            chunk = stored.to(torch.promote_types(stored.dtype, torch.float32))  # no copy if it is float32 already
            chunk.sub_(chunk.amax(1, keepdim=True))  # leaves the softmax unchanged, and exp cannot overflow
            at_target = chunk.gather(1, target)
            total = chunk.exp_().sum(1, keepdim=True)
            losses.append((total.log() - at_target).sum())  # -log softmax = log sum exp - logit of the target
            chunk.div_(total)
            chunk.scatter_(1, target, chunk.gather(1, target) - 1)  # gradient: softmax - one-hot
            if chunk.dtype != stored.dtype:
                stored.copy_(chunk)
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        # Divide by the number of rows only here: in float16, `grad_loss` contains the loss scale, which keeps tiny
        # entries from underflowing to 0.
        return gradient.mul_(grad_loss / len(gradient)), None, None


def mean_of_step(losses: Sequence[Tensor], accumulate: int) -> Tensor:
    """Return the mean loss of the micro-batches of an optimizer step.

    Lightning has divided each loss by `accumulate`, so the mean is usually the sum of these losses. But the last step
    of an epoch may have fewer micro-batches, and this sum would then be too small.
    """
    return torch.stack([*losses]).sum() * (accumulate / len(losses))


class WeightedMean(Metric):
    """A weighted mean in float64: sum of weight x value over sum of weights. It is NaN if a value is NaN.

    The default of torchmetrics' `MeanMetric` would drop NaN values.
    """

    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_dtype(torch.float64)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: float) -> None:
        """Add the mean of one batch, weighted by `weight`."""
        self.total = self.total + weight * value.detach().double()
        self.weight = self.weight + weight

    def compute(self) -> Tensor:
        return self.total / self.weight
