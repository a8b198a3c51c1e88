"""A GPT-2 of two attention-only blocks whose weights are an induction circuit, written by hand."""

import torch
from torch import nn

TOKENS, PLACES = 16, 40
SHARP = 1e4  # of scores: softmax then attends to one token


def induction_model(*, sharp: float = SHARP) -> nn.Module:
    """Block 1 writes each token's predecessor beside it; block 2 attends where the predecessor is its own token.

    One head a block; the state has a part for the token, for its predecessor and for the place, each one-hot. With
    `sharp` 0 both heads attend uniformly.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    dim = 2 * TOKENS + PLACES
    config = GPT2Config(
        vocab_size=TOKENS, n_embd=dim, n_layer=2, n_head=1, n_positions=PLACES, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double().eval()
    token, before, place = slice(0, TOKENS), slice(TOKENS, 2 * TOKENS), slice(2 * TOKENS, dim)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(name.endswith("weight") and "ln_" in name))
        model.get_parameter("transformer.wte.weight")[:, token] = torch.eye(TOKENS, dtype=torch.double)
        model.get_parameter("transformer.wpe.weight")[:, place] = torch.eye(PLACES, dtype=torch.double)
        # queries, keys and values stand side by side in the columns of c_attn: (dim, 3 x dim)
        first, second = (
            model.get_parameter(f"transformer.h.{n}.attn.c_attn.weight").unflatten(1, (3, dim)) for n in (0, 1)
        )
        first[place, 0, place] = sharp * torch.diag(torch.ones(PLACES - 1, dtype=torch.double), -1)  # asks for the last
        first[place, 1, place] = torch.eye(PLACES, dtype=torch.double)
        first[token, 2, before] = torch.eye(TOKENS, dtype=torch.double)
        second[token, 0, before] = sharp * torch.eye(TOKENS, dtype=torch.double)
        second[before, 1, before] = torch.eye(TOKENS, dtype=torch.double)
        second[place.start, 1, place.start] = -5.0  # the first token has no predecessor and found itself:
        model.get_parameter("transformer.h.1.attn.c_attn.bias")[place.start] = sharp  # no query wants it
        second[token, 2, token] = torch.eye(TOKENS, dtype=torch.double)
        for number, part in enumerate((before, token)):
            out = model.get_parameter(f"transformer.h.{number}.attn.c_proj.weight")
            out[part, part] = torch.eye(TOKENS, dtype=torch.double) * (1.0 if number == 0 else 5.0)
    return model
