"""A model as lm-eval takes it.

lm-eval is optional and takes seconds to import: functions do, where they need it.
"""

import functools
import inspect
from typing import Any

import torch

from lit_layers.errors import InputError
from lit_layers.models.build import true_vocab_size


@functools.cache
def lm_eval_class() -> Any:
    """Return lm-eval's wrapper of transformers' models, made so that a model is scored quickly and often.

    Texts become tokens once, logits are computed where a continuation stands, and padding rows of the vocabulary take
    no part.
    """
    from lm_eval.models.huggingface import HFLM

    base: Any = HFLM

    class Speaker(base):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._encoded: dict[tuple[str, bool | None], list[int]] = {}
            self._takes_keep = "logits_to_keep" in inspect.signature(self.model.forward).parameters
            self._keep = 0  # the last positions whose logits are needed

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            key = (string, add_special_tokens)
            if key not in self._encoded:
                self._encoded[key] = super().tok_encode(string, add_special_tokens=add_special_tokens, **options)
            return self._encoded[key]

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            likelihoods: list[Any] = [None] * len(requests)
            lengths = [len(context) + len(continuation) for _, context, continuation in requests]
            order = sorted(range(len(requests)), key=lambda row: (-lengths[row], *requests[row][1:]))
            for start in range(0, len(order), int(self.batch_size)):
                rows = order[start : start + int(self.batch_size)]
                longest = min(lengths[rows[0]], self.max_length + 1)
                self._keep = max(longest - min(lengths[row], longest) + len(requests[row][2]) for row in rows)
                found = super()._loglikelihood_tokens([requests[row] for row in rows], disable_tqdm=True)
                for row, likelihood in zip(rows, found, strict=True):
                    likelihoods[row] = likelihood
            return likelihoods

        def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
            options = {"logits_to_keep": self._keep} if self._takes_keep else {}
            with torch.no_grad():
                return self.model(inps, use_cache=False, **options).logits[..., : true_vocab_size(self.model)]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            longest = max(request.args[1].get("max_gen_toks", self.max_gen_toks) for request in requests)
            if longest >= self.max_length:
                raise InputError(
                    f"max_new_tokens: {longest} leave no room for a prompt in a model of {self.max_length} tokens"
                )
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
            padding = list(range(true_vocab_size(self.model), self.model.config.vocab_size)) or None
            return super()._model_generate(context, max_length, stop, suppress_tokens=padding, **options)

    return Speaker
