"""A GPT-2 as a training script would write it: of no library, and given the weights of one of transformers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.queries_keys_values(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Called with token ids it scores the token behind the last one alone, and called with targets every token."""

    def __init__(
        self, vocab_size: int, block_size: int, width: int, heads: int, depth: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, -1:]), None
        scores = self.head(x)
        return scores, F.cross_entropy(scores.view(-1, scores.shape[-1]), targets.view(-1))


def like(model: nn.Module) -> GPT:
    """The same function as a GPT2LMHeadModel."""
    config, theirs = model.config, model.state_dict()
    own = GPT(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer)
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "queries_keys_values": "attn.c_attn", "out": "attn.c_proj"}
    names |= {"wide": "mlp.c_fc", "narrow": "mlp.c_proj"}
    state = {"tokens": "wte", "places": "wpe", "norm": "ln_f"}
    for number in range(config.n_layer):
        state |= {f"blocks.{number}.{mine}": f"h.{number}.{name}" for mine, name in names.items()}
    with torch.no_grad():
        for mine, name in state.items():
            for kind, parameter in own.get_submodule(mine).named_parameters():
                value = theirs[f"transformer.{name}.{kind}"]
                parameter.copy_(value.T if value.ndim == 2 and mine.startswith("blocks") else value)
    return own.train(model.training)
