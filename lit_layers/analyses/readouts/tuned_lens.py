"""The affine maps of the tuned lens: trained, a layer each, to give the model's own output."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.readouts.lens_fit import places_of
from lit_layers.models.view import Batch, LayeredModel

ROWS = 256  # tokens of a training step, whose logits are held


class AffineMap(NamedTuple):
    """h + A h + b of a layer, on the CPU; without any where no token has finite states and logits."""

    matrix: Tensor | None  # A (dim, dim)
    bias: Tensor | None  # (dim,)
    num_undefined: int  # tokens that are left out

    def on(self, view: LayeredModel) -> Callable[[Tensor], Tensor]:
        if self.matrix is None or self.bias is None:
            return lambda hidden: torch.full_like(hidden, torch.nan)
        matrix, bias = self.matrix.to(view.device), self.bias.to(view.device)
        return lambda hidden: hidden + hidden @ matrix.T + bias


class Tuning:
    """Training the affine maps: every process passes the prompts once for all layers that it trains."""

    def __init__(self, view: LayeredModel, prompts: list[Batch], skip_first: int, steps: int, seed: int) -> None:
        self._view, self._prompts, self._skip_first, self._steps, self._seed = view, prompts, skip_first, steps, seed

    @functools.cached_property
    def _tokens(self) -> tuple[Tensor, Tensor, int]:
        """States (layers + 1, tokens, dim), the model's own logits (tokens, vocabulary), and how many are left out."""
        states, logits = [], []
        for prompt in self._prompts:
            trajectory = self._view.trajectory(prompt)
            places = places_of(trajectory, self._skip_first)
            states.append(trajectory.hidden[:, 0, places])
            logits.append(trajectory.logits_of((torch.zeros_like(places), places)))
        hidden, target = torch.cat(states, 1), torch.cat(logits)
        defined = hidden.isfinite().all(-1).all(0) & target.isfinite().all(-1)
        return hidden[:, defined], target[defined], int((~defined).sum())

    def of_layer(self, layer: int) -> AffineMap:
        hidden, target, num_undefined = self._tokens
        if not len(target):
            return AffineMap(None, None, num_undefined)
        matrix, bias = _trained(self._view, hidden[layer], target, self._steps, self._seed)
        return AffineMap(matrix.cpu(), bias.cpu(), num_undefined)

    def let_go(self) -> None:
        self.__dict__.pop("_tokens", None)


def _trained(view: LayeredModel, hidden: Tensor, target: Tensor, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """A and b of h + A h + b with the least KL from the model's own output, by Adam from A = 0, b = 0.

    Source: Belrose et al., the tuned lens, arXiv 2303.08112, section 3: without its weight decay, which matters over
    many more tokens than these.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.zeros(view.dim, view.dim, device=hidden.device, dtype=hidden.dtype, requires_grad=True)
    bias = torch.zeros(view.dim, device=hidden.device, dtype=hidden.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([matrix, bias], lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        rows = torch.randint(len(hidden), (min(ROWS, len(hidden)),), generator=generator).to(hidden.device)
        with torch.enable_grad():
            carried = hidden[rows] + hidden[rows] @ matrix.T + bias
            log_proba = view.readout(carried[None])[0].log_softmax(-1)
            loss = torch.nn.functional.kl_div(
                log_proba, target[rows].log_softmax(-1), log_target=True, reduction="batchmean"
            )
            matrix.grad, bias.grad = torch.autograd.grad(loss, [matrix, bias])  # the model's own have none
        optimizer.step()
    return matrix.detach(), bias.detach()
