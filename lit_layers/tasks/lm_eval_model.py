"""A model as lm-eval takes it, in many orders of its blocks at once, and what it said, kept in a file batch by batch.

lm-eval is optional and takes seconds to import: functions do, where they need it.
"""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_layers.errors import InputError, refused
from lit_layers.functional.block_schedules import Schedule, format_schedule
from lit_layers.identity import sha16
from lit_layers.models.build import true_vocab_size
from lit_layers.models.running_order import SharedPrefixes
from lit_layers.models.view import LayeredModel

Likelihood = tuple[float, bool]  # of a continuation in nats, and whether the model would say it
Request = tuple[object, Sequence[int], Sequence[int]]  # as lm-eval has it: texts, and the tokens of both


class OrderLikelihoods:
    """The likelihoods of requests in orders, as far as they are known: those of an interrupted run are there again.

    Args:
        folder: of the file, which bears a hash of the orders and requests.
        schedules: the orders.
        requests: in any order; equal ones are one.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, folder: Path, schedules: Sequence[Schedule], requests: Sequence[Request]) -> None:
        self.schedules = [*schedules]
        self.requests = {_key(request): request for request in requests}
        self._rows = {key: row for row, key in enumerate(self.requests)}
        self.path = folder / f"likelihoods-{sha16(json.dumps([*map(format_schedule, schedules), *self._rows]))}.npy"
        shape = (len(self.schedules), len(self._rows), 2)
        self._values: Any = np.zeros(shape)  # the second number is 0 if unknown, 1 if not greedy, 2 if greedy
        if self._rows:
            with refused(f"results: cannot write {self.path}"):
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    self._values = np.lib.format.open_memmap(self.path, "r+")
                except (FileNotFoundError, ValueError):
                    self._values = np.lib.format.open_memmap(self.path, "w+", float, shape)

    def waiting(self) -> list[Request]:
        """The requests that some order lacks."""
        lacking = (self._values[..., 1] == 0).any(0)
        return [request for request, lacks in zip(self.requests.values(), lacking, strict=True) if lacks]

    def add(self, requests: Sequence[Request], likelihoods: Mapping[int, Sequence[Likelihood]]) -> None:
        """Keep the likelihoods of a batch by the index of each order; return when they are on the disk."""
        rows = [self._rows[_key(request)] for request in requests]
        for order, pairs in likelihoods.items():
            self._values[order, rows] = [(value, 1 + said) for value, said in pairs]
        self._values.flush()

    def of(self, schedule: Schedule) -> Callable[[Request], Likelihood | None]:
        """Return what is known of a request in one order."""
        values = self._values[self.schedules.index(schedule)]

        def likelihood(request: Request) -> Likelihood | None:
            row = self._rows.get(_key(request))
            return None if row is None or not values[row, 1] else (float(values[row, 0]), bool(values[row, 1] > 1))

        return likelihood

    def close(self, finished: Callable[[Schedule], bool]) -> None:
        """Remove the file, if all orders are finished."""
        if all(map(finished, self.schedules)):
            self.path.unlink(missing_ok=True)


def _key(request: Request) -> str:
    _, context, continuation = request
    return hashlib.sha256(f"{[*context]} {[*continuation]}".encode()).hexdigest()[:24]


# ------------------------------------------------------------------------------------------------ the model


def num_tokens(request: Request) -> int:
    return len(request[1]) + len(request[2])


def longest_first(request: Request) -> tuple[int, Sequence[int], Sequence[int]]:
    return -num_tokens(request), request[1], request[2]


@functools.cache
def lm_eval_class() -> Any:
    """lm-eval's wrapper of transformers' models, made so that many orders of one model are scored quickly.

    Texts become tokens once, logits are computed where a continuation stands alone, and padding rows of the vocabulary
    take no part.
    """
    from lm_eval.models.huggingface import HFLM

    base: Any = HFLM

    class Speaker(base):
        computed: Callable[[Request], Likelihood | None]
        _keep: int | None = None  # the last positions whose logits are needed
        _next_logits: Callable[[torch.Tensor], torch.Tensor] | None = None  # in place of the model's, of many orders

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.computed = lambda request: None
            self._encoded: dict[tuple[str, bool | None], list[int]] = {}
            self._takes_keep = "logits_to_keep" in inspect.signature(self.model.forward).parameters

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            key = (string, add_special_tokens)
            if key not in self._encoded:
                self._encoded[key] = super().tok_encode(string, add_special_tokens=add_special_tokens, **options)
            return self._encoded[key]

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            likelihoods = [self.computed(request) for request in requests]
            missing = [row for row, likelihood in enumerate(likelihoods) if likelihood is None]
            missing.sort(key=lambda row: longest_first(requests[row]))
            for start in range(0, len(missing), int(self.batch_size)):
                rows = missing[start : start + int(self.batch_size)]
                for row, likelihood in zip(rows, self._of_batch([requests[row] for row in rows]), strict=True):
                    likelihoods[row] = likelihood
            return likelihoods

        def encoded(self, requests: Any) -> list[Request]:
            """Requests as `_loglikelihood_tokens` is given them."""
            encoded: list[Request] = []
            self.computed = lambda request: encoded.append(request) or (0.0, False)
            self.loglikelihood(requests, disable_tqdm=True)
            self.computed = lambda request: None
            return encoded

        def in_orders(
            self, requests: list[Request], orders: SharedPrefixes, model: LayeredModel, *, in_tuple: bool
        ) -> dict[int, list[Likelihood]]:
            """The likelihoods of one batch in each order, by its number: of each, the base is given the next state."""
            walk: list[Iterator[tuple[tuple[int, ...], torch.Tensor]]] = []
            by_order: dict[int, list[Likelihood]] = {}
            indices: tuple[int, ...] = ()

            def next_logits(ids: torch.Tensor) -> torch.Tensor:
                nonlocal indices
                if not walk:
                    walk.append(orders.states(model.embedded({"input_ids": ids}, in_tuple=in_tuple)))
                indices, hidden = next(walk[0])
                return model.readout(hidden[:, -(self._keep or 0) :])

            self._next_logits = next_logits
            try:
                while len(by_order) < orders.num_orders:
                    likelihoods = self._of_batch(requests)
                    by_order |= dict.fromkeys(indices, likelihoods)
            finally:
                self._next_logits = None
            return by_order

        def _of_batch(self, requests: list[Request]) -> list[Likelihood]:
            lengths = [*map(num_tokens, requests)]
            longest = min(max(lengths), self.max_length + 1)
            needed = [
                longest - min(length, longest) + len(request[2])
                for length, request in zip(lengths, requests, strict=True)
            ]
            self._keep = max(needed)
            try:
                return super()._loglikelihood_tokens(requests, disable_tqdm=True)
            finally:
                self._keep = None

        def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
            if self._next_logits is not None:
                with torch.no_grad():
                    return self._next_logits(inps)
            options = {} if self._keep is None or not self._takes_keep else {"logits_to_keep": self._keep}
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
