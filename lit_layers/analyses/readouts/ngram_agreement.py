"""How far each layer's readout is from what the last few tokens alone predict in a corpus."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Key, Values
from lit_layers.analyses.states import evenly_spread, real_tokens
from lit_layers.analyses.statistics import mean_of_defined, summarize_layers
from lit_layers.data.batches import Batches
from lit_layers.functional.ngrams import Distribution, NgramTable, count_ngrams, ngram_divergence
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record


@dataclass(kw_only=True)
class NgramAgreement(Analysis):
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
    orders: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    num_tokens: int = 8

    @functools.cached_property
    def _tables(self) -> dict[int, NgramTable]:
        texts = [text.numpy() for batch in self.corpus for text in real_tokens(batch)]
        return {order: count_ngrams(texts, order) for order in self.orders}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        seen.model.check_tokens(torch.tensor([[max(table.num_ids for table in self._tables.values()) - 1]]))
        prompts = [self._prompt_values(seen, row, ids.tolist()) for row, ids in enumerate(real_tokens(batch))]
        return {key: torch.stack([prompt[key] for prompt in prompts], 1) for key in prompts[0]}

    def _prompt_values(self, seen: Trajectory, row: int, ids: list[int]) -> dict[Key, Tensor]:
        """Return the mean over tokens of each metric and order, (layers + 1,), and how many tokens are left out."""
        positions = evenly_spread(1, len(ids) - 1, self.num_tokens) if len(ids) > 1 else []
        compared: dict[Key, list[Distribution | None]] = {}
        for order, table in self._tables.items():
            after = [table.after(ids[position + 2 - order : position + 1]) for position in positions]
            compared["ngram_divergence", order] = after
            if order > 1:
                counted = [each for each in after if each is not None]
                others = iter(counted[1:] + counted[:1] if len(counted) > 1 else [None])  # one has no other
                compared["random_ngram_divergence", order] = [each and next(others) for each in after]
        values: dict[Key, list[Tensor]] = {}
        for states in seen.hidden[:, row, seen.mask[row].nonzero()[positions, 0]]:
            with torch.no_grad():
                logits = seen.model.readout(states[None])[0] if positions else states.new_zeros(0, 1)
            log_proba = logits.double().log_softmax(-1)
            for key, distributions in compared.items():
                divergences = ngram_divergence(log_proba, distributions)
                values.setdefault(key, []).append(mean_of_defined(divergences).cpu())
                values.setdefault((*key, "missing"), []).append(divergences.isnan().sum().cpu())
        return {key: torch.stack(of_layers) for key, of_layers in values.items()}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        for (metric, order, *missing), values in batches.items():
            if not missing:
                counts = {"num_undefined_tokens": batches[metric, order, "missing"]}
                yield from summarize_layers(str(metric), values, tags={"order": int(order or 0)}, counts=counts)
