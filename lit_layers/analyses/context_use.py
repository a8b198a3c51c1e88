"""Use of context in a model: attention patterns, induction, the gain from context, and agreement with n-grams."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Key, Rows, Values
from lit_layers.analyses.statistics import (
    Sample,
    Tags,
    mean_of_defined,
    missing_tag,
    summarize,
    summarize_all,
    summarize_layers,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.context import (
    Distribution,
    NgramTable,
    attention_entropy,
    count_ngrams,
    ngram_divergence,
    prefix_matching_score,
    previous_token_score,
    sink_mass,
    uniform_attention,
)
from lit_layers.functional.jacobian.block_call import Unsupported, read_attention
from lit_layers.models.view import Batch, LayeredModel, Trajectory, evenly_spread, real_tokens, special_tokens
from lit_layers.records import Record

PATTERNS = attention_entropy, sink_mass, previous_token_score
BEST = {"previous_token_score", "prefix_matching_score"}  # scores that also have a record for the best head


Score = Callable[..., Tensor]  # from attention weights (heads, tokens, tokens) to a score of each head (heads,)


def _head_scores(name: str, seen: Trajectory, batch: Batch, scores: Sequence[Score]) -> Values:
    """Return scores (heads, prompts), keyed by the name of the score and the block.

    The names that begin with `random_` are scores of uniform attention on the same tokens.
    """
    found, reason = defaultdict[Key, list[Tensor]](list), ""
    for layer in range(1, seen.num_layers + 1):
        try:
            attention = read_attention(seen.block(layer), seen.hidden[layer - 1])
        except Unsupported as error:
            reason = reason or str(error)
            continue
        for prompt, length in enumerate(seen.mask.sum(-1).tolist()):
            weights = attention.pattern(prompt)[:, :length, :length]  # cut off the padding
            for (kind, each), score in itertools.product((("", weights), ("random_", _uniform(weights))), scores):
                ids = {"input_ids": batch["input_ids"][prompt]} if score is prefix_matching_score else {}
                found[kind + score.__name__, layer].append(score(each, undefined="nan", **ids).cpu())
    if not found:
        kind = type(seen.model.model).__name__
        raise InputError(f"{name}: {kind} has no attention weights to read ({reason}): leave this analysis out")
    return {key: torch.stack(rows, -1) for key, rows in found.items()}


def _head_records(
    model: LayeredModel, values: Values, scores: Sequence[Score], heads: bool, tags: Tags
) -> Iterator[Record]:
    """Yield records of each block and of the model: the mean over heads, and the score of the best head.

    If `heads` is True, each head of a block also has a record.

    Records of the whole model have no `layer`. The best head is the one with the highest mean over prompts.
    """
    by_key = {key: of_block.T.contiguous() for key, of_block in values.items()}
    nothing = torch.full((len(next(iter(by_key.values()))), 1), torch.nan, dtype=torch.float64)
    layers = range(1, model.num_layers + 1)
    for metric in (score.__name__ for score in scores):
        # the scores (prompts, heads) of each block, then those of uniform attention
        blocks, chance = ([by_key.get((kind + metric, n), nothing) for n in layers] for kind in ("", "random_"))
        yield from _head_means(metric, blocks, tags)
        samples: list[Sample] = []
        if metric in BEST:
            best = [each[:, each.nanmean(0).nan_to_num(-1).argmax()] for each in blocks]
            samples += [Sample(f"best_{metric}", each, layer, tags=tags) for layer, each in enumerate(best, 1)]
            missing = missing_tag("layers", sum(bool(each.isnan().all()) for each in best))
            whole = max(best, key=lambda each: each.nanmean().nan_to_num(-1).item())
            # The best head of the model is unknown if a block has no values.
            whole = torch.full_like(whole, torch.nan) if missing else whole
            samples.append(Sample(f"best_{metric}", whole, tags={**tags, **missing}))
        for layer, each in enumerate(blocks if heads else (), start=1):
            for head, column in enumerate(each.mT):
                samples.append(Sample(metric, column, layer, tags={"head": head, **tags}))
        yield from summarize_all(samples)
        yield from _head_means(f"random_{metric}", chance, tags)


@dataclass(kw_only=True)
class AttentionPatterns(Analysis):
    """Attention patterns of each head: `attention_entropy`, `sink_mass` and `previous_token_score`.

    Each score is the mean over a prompt's real tokens after the first, as queries, then over prompts, with intervals.
    Records at layer l belong to block l. They are the mean over its heads, the value of each head (tag `head`, from 0;
    left out with `heads: false`), and `best_previous_token_score`, the score of the head with the highest score.
    Records of means over blocks and of the best head of the model have no layer. `random_...` are the scores of uniform
    attention on the same tokens.

    The weights are computed from the block's own queries, keys and masks. For this, each block runs again up to its
    attention, on the states of the forward pass that analyses share. This costs at most 0.4 of a forward pass. A block
    without attention has no records, and a model without any (Mamba) is refused. The model runs in float32 or wider.

    Source: as in the functions of `lit_layers.functional.context`.

    Args:
        batches: the data to measure on.
        heads: whether each head has its own records.
    """

    batches: Batches
    name: str = "attention"
    heads: bool = True

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return _head_scores(self.name, seen, batch, PATTERNS)

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        return _head_records(model, batches, PATTERNS, self.heads, {})


@dataclass(kw_only=True)
class Induction(Analysis):
    """`prefix_matching_score` of each head, which finds induction heads: heads that continue a repeated sequence.

    Each of `num_prompts` sequences holds `num_tokens` different random tokens of the model's vocabulary, `repeats`
    times in a row. The sequences are shorter (tag `num_tokens`) if the model reads fewer tokens. Records, intervals,
    `best_...` and `random_...` are as in `AttentionPatterns`. An untrained model, such as step 0 of a run, is a further
    baseline.

    Source: Olsson et al. 2022, In-context learning and induction heads, appendix "head activation evaluators": 25
    random tokens four times in a row. Departures: there is no beginning-of-sequence token. The random tokens exclude
    special tokens, not the most and least frequent tokens.

    Args:
        num_prompts: number of sequences.
        num_tokens: different tokens per sequence.
        repeats: how often these tokens occur in a row.
        heads: whether each head has its own records.
        seed: seed of the random tokens.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"num_tokens": 2, "repeats": 2}

    name: str = "induction"
    num_prompts: int = 16
    num_tokens: int = 25
    repeats: int = 4
    heads: bool = True
    seed: int = 0

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"batches": Rows([{"input_ids": self.sequences(model)}])}

    def sequences(self, model: LayeredModel) -> Tensor:
        """Return token ids (prompts, tokens): each row is a sequence of random tokens, `repeats` times in a row."""
        period, generator = self._period(model), torch.Generator().manual_seed(self.seed)
        usable = torch.tensor([*{*range(model.vocab_size or 0)} - special_tokens(model)]).sort().values
        drawn = [usable[torch.randperm(len(usable), generator=generator)[:period]] for _ in range(self.num_prompts)]
        return torch.stack(drawn).repeat(1, self.repeats)

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return _head_scores(self.name, seen, batch, [prefix_matching_score])

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        tags = {"num_tokens": self._period(model), **self.tags_of("repeats")}
        return _head_records(model, batches, [prefix_matching_score], self.heads, tags)

    def _period(self, model: LayeredModel) -> int:
        return min(self.num_tokens, (model.max_tokens or 2**31) // self.repeats)


def _uniform(weights: Tensor) -> Tensor:
    """Return uniform attention (1, tokens, tokens), causal if `weights` are, or NaN if `weights` are not finite."""
    causal = not bool((weights.triu(1) > 0).any())
    chance = uniform_attention(weights.shape[-1], causal=causal).to(weights.device)
    return chance.masked_fill(~weights.isfinite().all(), torch.nan)


def _head_means(metric: str, blocks: Sequence[Tensor], tags: Tags) -> Iterator[Record]:
    """Yield the records of the mean over heads, from the values (prompts, heads) of each block."""
    means = [each.mean(1) for each in blocks]
    yield from summarize_layers(metric, torch.stack([torch.full_like(means[0], torch.nan), *means]), tags=tags)


@dataclass(kw_only=True)
class InContext(Analysis):
    """Gain from context: `in_context_score`, the loss at token `late` minus the loss at token `early`.

    The score is in nats and averaged over texts, with an interval. It is negative if context helps, and 0 for a model
    that does not use context, such as an untrained one. Texts that end before `late` are counted in `num_undefined`.
    The cost is the readout of two tokens per text, in addition to the forward pass that analyses share.

    Source: Olsson et al. 2022, in-context learning score, at tokens 50 and 500.

    Args:
        batches: the data to measure on.
        early, late: the tokens whose losses are compared, counted from 1.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
    batches: Batches
    name: str = "in_context"
    early: int = 50
    late: int = 500

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        longest = model.max_tokens or self.late
        if not 2 <= self.early < self.late <= longest:
            got = f"early {self.early} and late {self.late}"
            raise InputError(f"{self.name}: expected tokens from 2 to {longest}, early before late, got {got}")

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        early, late = self.early, self.late
        scores = torch.full((len(seen.mask),), torch.nan, dtype=torch.float64)
        for text in (seen.mask.sum(-1) >= late).nonzero()[:, 0].tolist():
            tokens = seen.mask[text].nonzero()[[early - 2, early - 1, late - 2, late - 1], 0]
            logits = seen.logits_of((torch.full_like(tokens[::2], text), tokens[::2])).double()
            targets = batch["input_ids"][text].to(logits.device)[tokens[1::2]]
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            scores[text] = losses[1] - losses[0]
        return {"score": scores.where(scores.isfinite(), torch.nan)}

    def compute(self, model: LayeredModel, batches: Values) -> Iterable[Record]:
        return summarize("in_context_score", batches["score"], tags={"early": self.early, "late": self.late})


@dataclass(kw_only=True)
class NgramAgreement(Analysis):
    """`ngram_divergence` of every layer: KL(n-grams of a corpus || the layer's readout).

    The readout applies the model's own norm and head. The tag `order` is the n of the n-grams. The divergence is
    averaged over `num_tokens` tokens of each prompt, evenly spread from its second token on. It is then averaged over
    prompts, with intervals. Records of means over layers 1..L have no `layer`. `random_ngram_divergence`, for orders
    above 1, compares each token with the n-gram of another token of the prompt. If `ngram_divergence` is lower, the
    prediction uses the preceding tokens. The tag `num_undefined_tokens` counts tokens whose context does not occur in
    the corpus, as counts are not smoothed. The model runs in float32 or wider.

    Source: as in `lit_layers.functional.ngram_divergence`.

    Args:
        batches: the data to measure on.
        corpus: the data in which n-grams are counted: windows of the training text, the more the better.
        orders: orders of the n-grams, 1 to 3.
        num_tokens: tokens per prompt. Each is read out once per layer. In GPT-2 small, a prompt takes 13 layers x 8
            tokens x 2 x 768 x 50,257 FLOP.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
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
        """Return the values (layers + 1,) of one prompt, keyed by metric and order of the n-grams.

        A value is the mean over the measured tokens of the prompt. A key that ends with "missing" holds the number of
        tokens without a value.
        """
        positions = evenly_spread(1, len(ids) - 1, self.num_tokens) if len(ids) > 1 else []
        compared: dict[Key, list[Distribution | None]] = {}
        for order, table in self._tables.items():
            after = [table.shares(ids[position + 2 - order : position + 1]) for position in positions]
            compared["ngram_divergence", order] = after
            if order > 1:
                counted = [each for each in after if each is not None]
                # A single token has no other token to be compared with.
                others = iter(counted[1:] + counted[:1] if len(counted) > 1 else [None])
                compared["random_ngram_divergence", order] = [each and next(others) for each in after]
        values = defaultdict[Key, list[Tensor]](list)
        for states in seen.hidden[:, row, seen.mask[row].nonzero()[positions, 0]]:
            with torch.no_grad():
                logits = seen.model.readout(states[None])[0] if positions else states.new_zeros(0, 1)
            log_proba = logits.double().log_softmax(-1)
            for key, counts in compared.items():
                divergences = ngram_divergence(log_proba, counts)
                values[key].append(mean_of_defined(divergences).cpu())
                values[*key, "missing"].append(divergences.isnan().sum().cpu())
        return {key: torch.stack(rows) for key, rows in values.items()}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        for (metric, order, *missing), values in batches.items():
            if not missing:
                counts = {"num_undefined_tokens": batches[metric, order, "missing"]}
                yield from summarize_layers(str(metric), values, tags={"order": int(order or 0)}, counts=counts)
