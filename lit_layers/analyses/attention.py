"""What attention heads attend to, which of them continue repeated text, and what a model gains by context."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Rows, Values
from lit_layers.analyses.states import special_tokens
from lit_layers.analyses.statistics import Sample, Tags, left_out, summarize, summarize_all, summarize_layers
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.attention_patterns import (
    attention_entropy,
    prefix_matching_score,
    previous_token_score,
    sink_mass,
    uniform_attention,
)
from lit_layers.functional.jacobian.block_attention import read_attention
from lit_layers.functional.jacobian.block_call import Unsupported
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

PATTERNS = attention_entropy, sink_mass, previous_token_score
BEST = {"previous_token_score", "prefix_matching_score"}  # scores that also have a record of the best head


Score = Callable[..., Tensor]  # (heads,) from weights (heads, tokens, tokens)


def _scores_of_heads(name: str, seen: Trajectory, batch: Batch, scores: Sequence[Score]) -> Values:
    """Return scores (heads, prompts) by name and block, and those of uniform attention on the same tokens."""
    values, reasons = Values(), list[str]()
    for layer in range(1, seen.num_layers + 1):
        try:
            attention = read_attention(seen.block(layer), seen.hidden[layer - 1])
        except Unsupported as error:
            reasons.append(str(error))
            continue
        found: dict[str, list[Tensor]] = {}
        for prompt, length in enumerate(seen.mask.sum(-1).tolist()):
            weights = attention.map_of(prompt)[:, :length, :length]  # real tokens come before padding
            for kind, each in (("", weights), ("random_", _chance(weights))):
                for score in scores:
                    given = {"input_ids": batch["input_ids"][prompt]} if score is prefix_matching_score else {}
                    of_heads = score(each, undefined="nan", **given).cpu()
                    found.setdefault(kind + score.__name__, []).append(of_heads)
        values |= {(score, layer): torch.stack(of_prompts, -1) for score, of_prompts in found.items()}
    if not values:
        raise InputError(
            f"{name}: {type(seen.model.model).__name__} has no attention weights to read ({reasons[0]}): "
            "leave this analysis out"
        )
    return values


def _records_of_heads(
    model: LayeredModel, values: Values, scores: Sequence[Score], heads: bool, tags: Tags
) -> Iterator[Record]:
    """Yield for each block the mean over heads, the best head and, with `heads`, each head; and the whole model's.

    The best head is the one whose mean over prompts is the highest, of a block and (without a layer) of the model.
    """
    by_key = {key: of_block.T.contiguous() for key, of_block in values.items()}
    nothing = torch.full((len(next(iter(by_key.values()))), 1), torch.nan, dtype=torch.float64)
    layers = range(1, model.num_layers + 1)
    for metric in (score.__name__ for score in scores):
        # (prompts, heads) of each block
        blocks, chance = ([by_key.get((kind + metric, n), nothing) for n in layers] for kind in ("", "random_"))
        yield from _mean_over_heads(metric, blocks, tags)
        samples: list[Sample] = []
        if metric in BEST:
            best = [each[:, each.nanmean(0).nan_to_num(-1).argmax()] for each in blocks]
            samples += [Sample(f"best_{metric}", each, layer, tags=tags) for layer, each in enumerate(best, 1)]
            missing = left_out("layers", sum(bool(each.isnan().all()) for each in best))
            whole = max(best, key=lambda each: each.nanmean().nan_to_num(-1).item())
            whole = torch.full_like(whole, torch.nan) if missing else whole  # the best of fewer: another number
            samples.append(Sample(f"best_{metric}", whole, tags={**tags, **missing}))
        for layer, each in enumerate(blocks if heads else (), start=1):
            samples += [
                Sample(metric, column, layer, tags={"head": head, **tags}) for head, column in enumerate(each.mT)
            ]
        yield from summarize_all(samples)
        yield from _mean_over_heads(f"random_{metric}", chance, tags)


@dataclass(kw_only=True)
class AttentionPatterns(Analysis):
    """What each head attends to: `attention_entropy`, `sink_mass` and `previous_token_score`.

    Of each prompt, the mean over the queries of its real tokens after the first, then over prompts, with intervals. At
    layer l the records are of block l: the mean over its heads, each head (tag `head`, from 0; not with `heads:
    false`), and as `best_previous_token_score` the head that scores highest. Means over blocks, and the best head of
    all, have no layer. `random_...` are the scores of uniform attention on the same tokens.

    The weights follow from the queries, keys and masks of the block itself, which runs as far as its attention on the
    states of the shared pass: at most 0.4 of a pass. A block without attention is a gap; a model without any (Mamba) is
    refused. The model runs in float32 or wider.
    Source: as the functions of `lit_layers.functional.attention_patterns` say.

    Args:
        batches: what is measured on.
        heads: whether each head has numbers of its own.
    """

    batches: Batches
    name: str = "attention"
    heads: bool = True

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return _scores_of_heads(self.name, seen, batch, PATTERNS)

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        return _records_of_heads(model, batches, PATTERNS, self.heads, {})


@dataclass(kw_only=True)
class Induction(Analysis):
    """Which heads continue a repeated sequence: `prefix_matching_score` of each head.

    Measured on `num_prompts` sequences of `num_tokens` different random tokens of the model's vocabulary, each repeated
    `repeats` times. If a model takes fewer tokens, the sequences are shorter (tag `num_tokens`). Records, intervals,
    `best_...` and `random_...` as in `AttentionPatterns`. An untrained model is a further baseline: step 0 of a run.

    Source: Olsson et al. 2022, In-context learning and induction heads, appendix "head activation evaluators": 25
    random tokens four times in a row. Not theirs: no token that begins a sequence comes first, and the tokens with a
    meaning of their own are left out of the vocabulary, not the most and least frequent ones.

    Args:
        num_prompts: sequences.
        num_tokens: different tokens of a sequence.
        repeats: how often they are repeated.
        heads: whether each head has numbers of its own.
        seed: of the tokens.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"num_prompts": 1, "num_tokens": 2, "repeats": 2}

    name: str = "induction"
    num_prompts: int = 16
    num_tokens: int = 25
    repeats: int = 4
    heads: bool = True
    seed: int = 0

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"batches": Rows([{"input_ids": self.sequences(model)}])}

    def sequences(self, model: LayeredModel) -> Tensor:
        """Return the repeated tokens (prompts, tokens)."""
        period, generator = self._period(model), torch.Generator().manual_seed(self.seed)
        usable = torch.tensor([*{*range(model.vocab_size or 0)} - special_tokens(model)]).sort().values
        drawn = [usable[torch.randperm(len(usable), generator=generator)[:period]] for _ in range(self.num_prompts)]
        return torch.stack(drawn).repeat(1, self.repeats)

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        return _scores_of_heads(self.name, seen, batch, [prefix_matching_score])

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        tags = {"num_tokens": self._period(model), **self.tags_of("repeats")}
        return _records_of_heads(model, batches, [prefix_matching_score], self.heads, tags)

    def _period(self, model: LayeredModel) -> int:
        return min(self.num_tokens, (model.max_tokens or 2**31) // self.repeats)


def _chance(weights: Tensor) -> Tensor:
    """Return uniform attention (1, tokens, tokens) on the tokens of a prompt; NaN if its weights are not finite."""
    causal = not bool((weights.triu(1) > 0).any())
    chance = uniform_attention(weights.shape[-1], causal=causal).to(weights.device)
    return chance.masked_fill(~weights.isfinite().all(), torch.nan)


def _mean_over_heads(metric: str, blocks: Sequence[Tensor], tags: Tags) -> Iterator[Record]:
    """Yield the records of the values (prompts, heads) of each block."""
    means = [each.mean(1) for each in blocks]
    yield from summarize_layers(metric, torch.stack([torch.full_like(means[0], torch.nan), *means]), tags=tags)


@dataclass(kw_only=True)
class InContext(Analysis):
    """What a model gains by context: `in_context_score`, its loss at token `late` minus its loss at token `early`.

    In nats, the mean over texts, with an interval. 0 is a model that makes nothing of context, as before training;
    negative values say that context helps. Texts that end before `late` are counted in `num_undefined`. The readout of
    two tokens of each text is all that it adds to the shared pass.
    Source: Olsson et al. 2022, in-context learning score, at tokens 50 and 500.

    Args:
        batches: what is measured on.
        early, late: the tokens whose losses are compared, counted from 1.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"early": 2, "late": 3}

    batches: Batches
    name: str = "in_context"
    early: int = 50
    late: int = 500

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        longest = model.max_tokens or self.late
        if not self.early < self.late <= longest:
            raise InputError(f"{self.name}: expected late from {self.early + 1} to {longest} tokens, got {self.late}")

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
