"""The attention of a training step: causal by the kernel's flag, without a mask."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# A name that transformers knows an attention function for, but no function that builds its mask: it then builds none.
_BY_FLAG = "sdpa_causal_by_flag"
_WHOLE_PAST = ("gpt2", "gpt_neox", "llama")  # model types whose every block attends to all earlier tokens


@contextmanager
def causal_by_flag(model: Any) -> Iterator[None]:
    """Inside, `model` takes full batches only (no padding) and builds no attention mask for them.

    transformers finds out by itself that such batches need no mask, but it looks at the position ids for that: once a
    forward pass it waits for the GPU, and under `torch.compile`, where values cannot be looked at, it hands an explicit
    mask to every block, which rules the flash kernel out. Other model types and other attention implementations than
    sdpa stay as they are.
    """
    config = model.config
    if config.model_type not in _WHOLE_PAST or config._attn_implementation != "sdpa":
        yield
        return
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_BY_FLAG, sdpa_attention_forward)
    config._attn_implementation = _BY_FLAG
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
