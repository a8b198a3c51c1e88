"""How far each layer's readout is from what the last few tokens alone predict in a corpus."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.blockwise import Key, joined
from lit_layers.analyses.readouts.readout_scores import MAX_LOGITS
from lit_layers.analyses.states import evenly_spread, real_tokens
from lit_layers.analyses.statistics import mean_of_defined, summarize_layers
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.ngrams import Distribution, NgramTable, count_ngrams, ngram_divergence
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.models.workload import Part, Work
from lit_layers.records import Record


@dataclass(kw_only=True)
class NgramAgreement(DividedAnalysis):
    """`ngram_divergence` of every layer: KL from the unigrams, bigrams and trigrams of a corpus (tag `order`) to its
    readout, the model's own norm and head.

    Of `num_tokens` tokens of each prompt, evenly spread from the second on, then the mean over prompts, with intervals;
    means over layers 1..L have no layer. `random_ngram_divergence`, for orders above 1, has at each token the n-gram of
    another token of the prompt: below it, the prediction knows the tokens before it. The tag `num_undefined_tokens`
    counts tokens whose context the corpus does not have; counts are not smoothed. The model runs in float32 or wider.
    Source: as `lit_layers.functional.ngram_divergence` says.

    Args:
        batches: what is measured on.
        corpus: where n-grams are counted: windows of the training text, as many as are affordable.
        orders: of the n-grams, 1 to 3.
        num_tokens: of each prompt: each is read once a layer, 13 x 8 x 2 x 768 x 50,257 FLOP in GPT-2 small.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"orders": 1, "num_tokens": 2}
    LISTS: ClassVar = ("orders",)

    batches: Batches
    corpus: Batches
    name: str = "ngrams"
    orders: tuple[int, ...] = (1, 2, 3)
    num_tokens: int = 8

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if max(self.orders) > 3:
            raise InputError(f"{self.name}: expected orders from 1 to 3, got {list(self.orders)}")

    def extra_work(self, model: LayeredModel, passes: Work) -> Work:
        rows = passes.texts * min(self.num_tokens, passes.tokens // passes.texts)
        return Work(parts=(Part("head", rows * (model.num_layers + 1)), Part("steps", 11 * rows)))

    @functools.cached_property
    def _counted(self) -> dict[int, dict[int, NgramTable]]:
        """By the size of the vocabulary: one table for all parts and checkpoints."""
        return {}

    @functools.cached_property
    def _texts(self) -> list[np.ndarray]:
        return [text.numpy() for batch in self.corpus for text in real_tokens(batch)]

    def tables(self, model: LayeredModel) -> dict[int, NgramTable]:
        """The n-grams of the corpus, by order.

        Raises:
            InputError: tokens that the model does not have, or texts that are too short.
        """
        size = model.vocab_size or 0
        if (most := max((int(text.max()) for text in self._texts if len(text)), default=0)) >= size:
            raise InputError(
                f"{self.name}: the corpus has token {most}, {type(model.model).__name__} knows {size}: use "
                "its tokenizer"
            )
        if not any(len(text) >= max(self.orders) for text in self._texts):
            raise InputError(f"{self.name}: the corpus has no text of {max(self.orders)} tokens")
        if size not in self._counted:
            self._counted[size] = {order: count_ngrams(self._texts, order, size) for order in self.orders}
        return self._counted[size]

    def of_part(self, model: LayeredModel, part: Batch) -> dict[Key, Tensor]:
        trajectory, tables = model.trajectory(part), self.tables(model)
        prompts: list[dict[Key, Tensor]] = []
        for row, real in enumerate(trajectory.mask):
            tokens = real.nonzero()[:, 0]
            ids = part["input_ids"][row, tokens.cpu()].tolist()
            places = evenly_spread(1, len(ids) - 1, self.num_tokens) if len(ids) > 1 else []
            after = {
                order: [table.after(ids[place + 2 - order : place + 1]) for place in places]
                for order, table in tables.items()
            }
            prompts.append(self._of_prompt(model, trajectory.hidden[:, row, tokens[places]], after))
        return {key: torch.stack([prompt[key] for prompt in prompts], 1) for key in prompts[0]}

    def _of_prompt(
        self, model: LayeredModel, states: Tensor, after: dict[int, list[Distribution | None]]
    ) -> dict[Key, Tensor]:
        """Values (layers + 1,) of the states (layers + 1, tokens, dim) of some tokens, and of chance."""
        values: dict[Key, list[Tensor]] = {}
        at_once = max(1, MAX_LOGITS // max(1, states.shape[1] * (model.vocab_size or 1)))
        for some in states.split(at_once):
            with torch.no_grad():
                logits = model.readout(some) if states.shape[1] else some.new_zeros(len(some), 0, 1)
            log_proba = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            for order, distributions in after.items():
                counted = [each for each in distributions if each is not None]
                others = iter(counted[1:] + counted[:1] if len(counted) > 1 else [None])  # one has no other
                chance = [None if each is None else next(others) for each in distributions]
                kinds = {"ngram_divergence": distributions} | ({"random_ngram_divergence": chance} if order > 1 else {})
                for metric, each in kinds.items():
                    divergences = ngram_divergence(log_proba, each)
                    values.setdefault((metric, order), []).append(mean_of_defined(divergences).cpu())
                    values.setdefault((metric, order, "missing"), []).append(divergences.isnan().sum(-1).cpu())
        return {key: torch.cat(parts) for key, parts in values.items()}

    def combine(self, model: LayeredModel, results: list[dict[Key, Tensor]]) -> Iterator[Record]:
        by_key = joined(results)
        for (metric, order, *missing), values in by_key.items():
            if not missing:
                counts = {"num_undefined_tokens": by_key[metric, order, "missing"]}
                yield from summarize_layers(str(metric), values, tags={"order": int(order or 0)}, counts=counts)
