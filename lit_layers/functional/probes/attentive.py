"""A probe that chooses its tokens: one learned query for each head, over the states of a row's tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class AttentiveProbe:
    """What `fit_attentive_probe` has fitted."""

    mean: Float[Tensor, " dim"]
    scale: Float[Tensor, " dim"]
    query: Float[Tensor, "heads head_dim"]
    key: Float[Tensor, "dim dim"]
    value: Float[Tensor, "dim dim"]
    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    def log_proba(
        self, states: Float[Tensor, "rows tokens dim"], mask: Bool[Tensor, "rows tokens"]
    ) -> Float[Tensor, "rows classes"]:
        """Log-probabilities of the classes, of rows with at least one real token; padding is never attended to."""
        standard = (_wide(states) - self.mean) / self.scale
        heads, head_dim = self.query.shape
        keys, values = ((standard @ each.T).unflatten(-1, (heads, head_dim)) for each in (self.key, self.value))
        scores = torch.einsum("nthd,hd->nht", keys, self.query) / head_dim**0.5
        share = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)  # (rows, heads, tokens)
        pooled = torch.einsum("nht,nthd->nhd", share, values).flatten(1)
        return (pooled @ self.weight.T + self.bias).log_softmax(-1)


def fit_attentive_probe(
    states: Float[Tensor, "rows tokens dim"],
    mask: Bool[Tensor, "rows tokens"],
    labels: Int[Tensor, " rows"],
    *,
    num_classes: int,
    num_heads: int = 4,
    steps: int = 500,
    batch_size: int = 64,
    lr: float = 3e-3,
    weight_decay: float = 0.01,
    seed: int = 0,
) -> AttentiveProbe:
    """Fits W [sum_t a_ht V_h x_t]_h + b, where head h attends by a_h = softmax_t(q_h . K_h x_t / sqrt(dim / heads)).

    These are the logits of a row; x are its states, standardised over all real tokens of the rows. What a linear probe
    of mean states cannot read, since it stands at a token that differs from row to row, this one can. By AdamW with a
    cosine schedule, from one seed: with the same inputs on the same device the same probe. float32 or wider.

    Source: El-Nouby et al., Scalable pre-training of large autoregressive image models, arXiv 2401.08541, section 4,
    after Chen et al., Context autoencoder, arXiv 2202.03026: cross-attention with a learned query, then a linear map.

    Raises:
        ValueError: no two labels, rows without a real token, states that are not finite, or heads that do not divide
            the width.
    """
    rows, _, dim = states.shape
    if dim % num_heads:
        raise ValueError(f"expected num_heads that divides the width {dim}, got {num_heads}")
    if len(labels) != rows or mask.shape != states.shape[:2] or not mask.any(-1).all():
        raise ValueError(f"expected a label and a real token for each of {rows} rows")
    if len(labels.unique()) < 2 or labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"expected labels of 0..{num_classes - 1}, of two classes or more")
    states = _wide(states)
    real = states[mask]
    if not real.isfinite().all():
        raise ValueError("expected finite states at real tokens")
    states = states.masked_fill(~mask[..., None], 0.0)
    mean = real.mean(0)
    scale = (real - mean).square().mean(0).sqrt().clamp_min(1e-6)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, size: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * size).to(states).requires_grad_()

    learned = [
        drawn(num_heads, dim // num_heads, size=1.0),
        drawn(dim, dim, size=dim**-0.5),
        drawn(dim, dim, size=dim**-0.5),
        drawn(num_classes, dim, size=0.02),
        torch.zeros(num_classes).to(states).requires_grad_(),
    ]
    optimizer = torch.optim.AdamW(learned, lr=lr, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(steps):
            chosen = torch.randint(rows, (min(batch_size, rows),), generator=generator).to(labels.device)
            log_proba = AttentiveProbe(mean, scale, *learned).log_proba(states[chosen], mask[chosen])
            loss = -log_proba.gather(1, labels[chosen, None]).mean()
            for tensor, grad in zip(learned, torch.autograd.grad(loss, learned), strict=True):
                tensor.grad = grad
            optimizer.step()
            schedule.step()
    return AttentiveProbe(mean, scale, *(tensor.detach() for tensor in learned))


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))
