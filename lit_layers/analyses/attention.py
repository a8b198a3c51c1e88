"""What attention heads attend to, which of them complete repeated text, and what a model gains by context."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.blockwise import Key, joined
from lit_layers.analyses.readouts.readout_scores import MAX_LOGITS
from lit_layers.analyses.states import special_tokens
from lit_layers.analyses.statistics import Sample, Tags, left_out, summarize, summarize_all, summarize_layers
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional._checks import widened
from lit_layers.functional.attention_patterns import (
    attention_entropy,
    copying_score,
    in_context_score,
    prefix_matching_score,
    previous_token_score,
    sink_mass,
    uniform_attention,
)
from lit_layers.functional.jacobian.block_attention import Heads, read_heads
from lit_layers.functional.jacobian.block_call import Unsupported, evaluating
from lit_layers.models.shared_pass import pieces
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.models.workload import Part, Work, passes
from lit_layers.records import Record

SCORES = {
    "attention_entropy": attention_entropy,
    "sink_mass": sink_mass,
    "previous_token_score": previous_token_score,
}
BEST = {"previous_token_score", "prefix_matching_score", "copying_score"}  # which have a record of the best head, too
OF_A_BLOCK = 0.4  # of a pass through a block, at most: what reading its heads takes


@dataclass(kw_only=True)
class HeadAnalysis(DividedAnalysis):
    """An analysis of attention heads: for each block the mean over heads, the best one, and each."""

    heads: bool

    def records_of_heads(self, metric: str, values: Sequence[Tensor], tags: Tags) -> Iterator[Record]:
        """Of the values (prompts, heads) of each block: `metric` of blocks, with a tag `head` of each head.

        `best_METRIC` is the head whose mean over prompts is the highest, of a block and of the whole model.
        """
        yield from _mean_over_heads(metric, values, tags)
        samples: list[Sample] = []
        if metric in BEST:
            best = [each[:, each.nanmean(0).nan_to_num(-1).argmax()] for each in values]
            samples += [Sample(f"best_{metric}", each, layer, tags=tags) for layer, each in enumerate(best, start=1)]
            missing = left_out("layers", sum(bool(each.isnan().all()) for each in best))
            whole = max(best, key=lambda each: each.nanmean().nan_to_num(-1).item())
            whole = torch.full_like(whole, torch.nan) if missing else whole  # the best of fewer is another number
            samples.append(Sample(f"best_{metric}", whole, tags={**tags, **missing}))
        for layer, each in enumerate(values if self.heads else (), start=1):
            samples += [
                Sample(metric, column, layer, tags={"head": head, **tags}) for head, column in enumerate(each.mT)
            ]
        yield from summarize_all(samples)

    def of_blocks(self, model: LayeredModel, trajectory: Trajectory) -> Iterator[tuple[int, Heads]]:
        """Of each block that has some its number and its heads; real tokens stand in front of padding.

        Raises:
            InputError: no block has attention whose weights can be read.
        """
        reason, has_heads = "", False
        for layer in range(1, model.num_layers + 1):
            call, hidden = trajectory.block(layer), trajectory.hidden[layer - 1]
            if call.alignment is not None:
                hidden, call = call.alignment.moved(hidden), call.aligned()
            try:
                heads = read_heads(call, hidden)
            except Unsupported as error:
                reason = str(error)
                continue
            has_heads = True
            yield layer, heads
        if not has_heads:
            raise InputError(
                f"{self.name}: {type(model.model).__name__} has no attention weights to read ({reason}): leave this "
                "analysis out"
            )


@dataclass(kw_only=True)
class AttentionPatterns(HeadAnalysis):
    """What each head attends to: `attention_entropy`, `sink_mass` and `previous_token_score`.

    Of each prompt, the mean over the queries of its real tokens behind the first, then over prompts, with intervals.
    At a layer l they are of block l: the mean over its heads, each head (tag `head`, from 0; not with `heads: false`),
    and as `best_previous_token_score` the head that scores highest; means over blocks, and the best head of all, have
    no layer. `random_...` are those of uniform attention on the same tokens.

    The weights follow from the queries, keys and masks of the block itself, which runs as far as its attention on the
    states of the shared pass: at most 0.4 of a pass. A block without attention is a gap; a model without any (Mamba) is
    refused. The model runs in float32 or wider.
    Source: as the functions of `lit_layers.functional.attention_patterns` say.

    Args:
        batches: what is measured on.
        heads: whether each head has numbers of its own, too.
    """

    batches: Batches
    name: str = "attention"
    heads: bool = True

    def extra_work(self, model: LayeredModel, passes: Work) -> Work:
        calls = Part(
            "calls", passes.texts * model.num_layers, (passes.tokens // passes.texts,), _Scoring(_num_heads(model))
        )
        return _reading(model, passes) + Work(parts=(calls,))

    def of_part(self, model: LayeredModel, part: Batch) -> dict[Key, Tensor]:
        trajectory = model.trajectory(part)
        values: dict[Key, Tensor] = {}
        num_prompts = len(trajectory.mask)
        for layer in range(1, model.num_layers + 1):
            for metric in SCORES:
                values[f"random_{metric}", layer] = torch.full((num_prompts, 1), torch.nan, dtype=torch.float64)
                values[metric, layer] = values[f"random_{metric}", layer]
        lengths = trajectory.mask.sum(-1).tolist()
        of_chance: dict[tuple[int, bool], dict[str, Tensor]] = {}
        for layer, heads in self.of_blocks(model, trajectory):
            maps = (heads.attention.map_of(prompt)[:, :length, :length] for prompt, length in enumerate(lengths))
            rows = [_scores(weights, of_chance) for weights in maps]
            values |= {(metric, layer): torch.stack([row[metric] for row in rows]) for metric in rows[0]}
        return values

    def combine(self, model: LayeredModel, results: list[dict[Key, Tensor]]) -> Iterator[Record]:
        by_key = joined(results, dim=0)
        layers = range(1, model.num_layers + 1)
        for metric in SCORES:
            yield from self.records_of_heads(metric, [by_key[metric, layer] for layer in layers], {})
            random = f"random_{metric}"
            yield from _mean_over_heads(random, [by_key[random, layer] for layer in layers], {})


@dataclass(kw_only=True)
class Induction(HeadAnalysis):
    """Which heads complete a repeated sequence: `prefix_matching_score` and `copying_score` of each head.

    Measured on `num_prompts` sequences of `num_tokens` different random tokens of the model's vocabulary, each repeated
    `repeats` times; of a model that takes fewer tokens the sequences are shorter (tag `num_tokens`). Records, intervals
    and `best_...` as in `AttentionPatterns`; `random_prefix_matching_score` is that of uniform attention on the same
    tokens, `random_copying_score` 1 / `num_tokens`. An untrained model is a further baseline: step 0 of a run.

    A head's writing is its value of a token through its part of the output projection, read by the model's own final
    norm and head less what these make of nothing: the direct path, without the bias and without the norm that some
    families put behind their attention. Where that cannot be read `copying_score` is a gap.
    Source: Olsson et al. 2022, In-context learning and induction heads, appendix "head activation evaluators": from
    them are 25 random tokens, for prefix matching four times in a row, and both scores as
    `lit_layers.functional.attention_patterns` says. Not from them: no token that begins a sequence stands in front, and
    of the vocabulary the tokens with a meaning of their own are left out, not the most and least frequent ones.

    Args:
        num_prompts: sequences.
        num_copied: of these for `copying_score`, which reads out what each head writes of each token: where the model's
            head is one product, for the tokens of the sequence alone and for the mean over the vocabulary.
        num_tokens: different tokens of a sequence.
        repeats: how often it stands there.
        heads: whether each head has numbers of its own, too.
        seed: of the tokens.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"num_prompts": 1, "num_copied": 1, "num_tokens": 2, "repeats": 2}

    name: str = "induction"
    num_prompts: int = 16
    num_copied: int = 4
    num_tokens: int = 25
    repeats: int = 4
    heads: bool = True
    seed: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        self._period(model)

    def work(self, model: LayeredModel) -> Work:
        period = self._period(model)
        work = passes(model, texts=self.num_prompts, tokens=period * self.repeats, batch=self.num_prompts)
        heads = _num_heads(model)
        read = min(self.num_copied, self.num_prompts) * period * model.num_layers * heads
        if model.family.linear_head(model.model) is not None:
            read *= (period + 1) / (model.vocab_size or 1)
        calls = Part(
            "calls", self.num_prompts * model.num_layers, (period * self.repeats,), _Scoring(heads, repeats=True)
        )
        steps = Part("steps", (5 * self.num_prompts + 15 * min(self.num_copied, self.num_prompts)) * model.num_layers)
        return work + _reading(model, work) + Work(parts=(Part("head", read), calls, steps))

    def parts(self, model: LayeredModel) -> Iterator[Batch]:
        return pieces(model, [{"input_ids": self.sequences(model)}])

    def sequences(self, model: LayeredModel) -> Tensor:
        """The repeated tokens (prompts, tokens)."""
        period, generator = self._period(model), torch.Generator().manual_seed(self.seed)
        usable = torch.tensor(self._usable(model))
        drawn = [usable[torch.randperm(len(usable), generator=generator)[:period]] for _ in range(self.num_prompts)]
        return torch.stack(drawn).repeat(1, self.repeats)

    def of_part(self, model: LayeredModel, part: Batch) -> dict[Key, Tensor]:
        ids, values = part["input_ids"], {}
        trajectory, period, added = model.trajectory(part), self._period(model), _Added(model)
        nothing = torch.full((len(ids), 1), torch.nan, dtype=torch.float64)
        for layer in range(1, model.num_layers + 1):
            values |= {(metric, layer): nothing for metric in ("prefix_matching_score", "copying_score")}
            values["random_prefix_matching_score", layer] = nothing
        for layer, heads in self.of_blocks(model, trajectory):
            maps = [heads.attention.map_of(prompt) for prompt in range(len(ids))]
            pairs = [(weights, _chance(weights)) for weights in maps]
            of = {"prefix_matching_score": 0, "random_prefix_matching_score": 1}
            for metric, which in of.items():
                scores = [
                    prefix_matching_score(p[which], row, undefined="nan") for p, row in zip(pairs, ids, strict=True)
                ]
                values[metric, layer] = torch.stack(scores).cpu()
            values["copying_score", layer] = self._copying(added, heads, ids[:, :period])
        values["input_ids",] = ids
        return values

    def _copying(self, added: "_Added", heads: Heads, ids: Tensor) -> Tensor:
        """(prompts, heads) of as many prompts as are read; NaN where nothing can be."""
        values = torch.full((len(ids), heads.num_heads), torch.nan, dtype=torch.float64)
        try:
            written = heads.written()[:, :, : ids.shape[1]]  # (prompts, heads, tokens, dim)
        except Unsupported:
            return values
        for prompt in range(min(self.num_copied, len(ids))):
            scores = [
                copying_score(logits, row, mean=mean, undefined="nan").cpu()
                for logits, row, mean in added(written[prompt], ids[prompt])
            ]
            values[prompt] = torch.cat(scores)
        return values

    def combine(self, model: LayeredModel, results: list[dict[Key, Tensor]]) -> Iterator[Record]:
        by_key, layers = joined(results, dim=0), range(1, model.num_layers + 1)
        period = self._period(model)
        tags: dict[str, Any] = {"num_tokens": period, **self.tags_of("repeats")}
        matching = [by_key["prefix_matching_score", layer] for layer in layers]
        yield from self.records_of_heads("prefix_matching_score", matching, tags)
        chance = [by_key["random_prefix_matching_score", layer] for layer in layers]
        yield from _mean_over_heads("random_prefix_matching_score", chance, tags)
        copying = [by_key["copying_score", layer][: self.num_copied] for layer in layers]
        yield from self.records_of_heads("copying_score", copying, tags)
        chance = [
            torch.full((len(each), 1), 1 / period, dtype=torch.float64).masked_fill(each.isnan().all(), torch.nan)
            for each in copying
        ]
        yield from _mean_over_heads("random_copying_score", chance, tags)

    def _period(self, model: LayeredModel) -> int:
        longest = min(self.num_tokens, len(self._usable(model)), (model.max_tokens or 2**31) // self.repeats)
        if longest < 2:
            raise InputError(
                f"{self.name}: {type(model.model).__name__} takes {model.max_tokens} tokens, too few to repeat two of "
                f"them {self.repeats} times"
            )
        return longest

    @staticmethod
    def _usable(model: LayeredModel) -> list[int]:
        """The vocabulary without the tokens that its config gives a meaning."""
        special = special_tokens(model)
        return [token for token in range(model.vocab_size or 0) if token not in special]


@dataclass(kw_only=True)
class InContext(DividedAnalysis):
    """What a model gains by context: `in_context_score`, its loss at token `late` less that at token `early`.

    Of each text, then the mean over texts, with an interval; 0 is a model that makes nothing of context, as one that
    was never trained. Texts that end before `late` are counted in `num_undefined`. Of a model, or of texts, that end
    before it, `late` is their last token and `early` moves with it: the tags `early` and `late` say so. The readout of
    two tokens of each text is all that it adds to the shared pass.
    Source: Olsson et al. 2022, in-context learning score.

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
        if self.early >= self.late:
            raise InputError(f"{self.name}: expected late above early {self.early}, got {self.late}")
        self.places(model)

    def extra_work(self, model: LayeredModel, passes: Work) -> Work:
        return Work(parts=(Part("head", 2 * passes.texts),))

    @functools.cached_property
    def _longest(self) -> int | None:
        """Tokens of a text, where it is known: asking goes through the files of a corpus."""
        size = self.batches.size()
        return size.tokens if size else None

    def places(self, model: LayeredModel) -> tuple[int, int]:
        """The tokens early and late that this model and these texts have."""
        longest = min(model.max_tokens or self.late, self._longest or self.late)
        if longest >= self.late:
            return self.early, self.late
        early = max(2, round(longest * self.early / self.late))
        if early >= longest:
            raise InputError(f"{self.name}: texts of {longest} tokens have no context: give longer ones")
        return early, longest

    def of_part(self, model: LayeredModel, part: Batch) -> Tensor:
        trajectory, places = model.trajectory(part), self.places(model)
        mask = trajectory.mask
        losses = torch.full((len(mask), places[1] - 1), torch.nan, dtype=torch.float64)
        ids = part["input_ids"].to(mask.device)
        long = (mask.sum(-1) >= places[1]).nonzero()[:, 0]
        if not len(long):
            return in_context_score(losses, early=places[0], late=places[1], undefined="nan")
        tokens = torch.stack([mask[row].nonzero()[: places[1], 0] for row in long])  # (texts, late)
        before = [place - 2 for place in places]
        rows, at = long[:, None].expand(-1, 2).flatten(), tokens[:, before].flatten()
        targets = ids[rows, tokens[:, [place - 1 for place in places]].flatten()]
        loss = torch.nn.functional.cross_entropy(trajectory.logits_of((rows, at)).double(), targets, reduction="none")
        losses[long[:, None].cpu(), torch.tensor(before)] = loss.view(-1, 2).cpu()
        return in_context_score(losses, early=places[0], late=places[1], undefined="nan")

    def combine(self, model: LayeredModel, results: list[Tensor]) -> Iterable[Record]:
        early, late = self.places(model)
        yield from summarize("in_context_score", torch.cat(results), tags={"early": early, "late": late})


def _reading(model: LayeredModel, work: Work) -> Work:
    """What reading the heads of all blocks takes beside a pass."""
    texts = max(1, work.texts)
    blocks = Part("products", OF_A_BLOCK * 24.0 * work.tokens * model.dim**2 * model.num_layers, (model.dim,))
    longest = work.tokens // texts
    return Work(parts=(blocks,), device=4.0 * longest**2 * max(1, model.dim // 64) * 4)


class _Added:
    """What heads add to a model's logits by what they write, through its own final norm and head.

    Where the head is one product, it is taken with the rows of a sequence's tokens and with the mean of all rows.
    """

    def __init__(self, model: LayeredModel) -> None:
        self.model, self.head = model, model.family.linear_head(model.model)
        if self.head is not None:
            self.rows = self.head.weight.detach()[: model.vocab_size]
            parts = self.rows.split(4096)  # no copy of all rows in float64
            total = torch.stack([widened("rows", part).sum(0) for part in parts]).sum(0)
            # A mean of many rows is small beside them: in half precision it would be off by more than they are.
            self.mean = (total / len(self.rows)).to(torch.promote_types(self.rows.dtype, torch.float32))
            self.norm = model.family.final_norm(model.model) or torch.nn.Identity()

    def __call__(self, written: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Of (heads, tokens, dim), some heads at a time: logits (heads, tokens, vocabulary), the places of the tokens
        of the sequence in them, and, where they are of these alone, the mean over the vocabulary."""
        if self.head is None:
            nothing = self.model.readout(written.new_zeros(1, 1, written.shape[-1]))[0]
            for some in written.split(max(1, MAX_LOGITS // (len(ids) * nothing.shape[-1]))):
                yield self.model.readout(some) - nothing, ids, None
            return
        with evaluating(self.model.model), torch.no_grad():
            added = self.norm(written) - self.norm(torch.zeros_like(written[:1, :1]))  # the biases drop out
            rows = torch.cat([self.rows[ids.to(self.rows.device)].to(self.mean), self.mean[None]])
            logits = added.to(rows) @ rows.T
        yield logits[..., :-1], torch.arange(len(ids)), logits[..., -1]


def _num_heads(model: LayeredModel) -> int:
    """Of a block; where its config does not say, as many as there are of 64 each."""
    heads = getattr(getattr(model.model, "config", None), "num_attention_heads", None)
    return heads if heads and isinstance(heads, int) else max(1, model.dim // 64)


@dataclass(frozen=True)
class _Scoring:
    """What scoring the heads of one prompt takes: a plan times it on states (tokens, dim)."""

    num_heads: int
    repeats: bool = False  # the scores of repeated tokens

    def __call__(self, states: Tensor) -> None:
        weights = (states @ states.mT).float().softmax(-1).tril().repeat(self.num_heads, 1, 1)
        if not self.repeats:
            _scores(weights, {})
            return
        ids = torch.arange(len(states), device=states.device) % max(1, len(states) // 4)
        for each in (weights, _chance(weights)):
            prefix_matching_score(each, ids, undefined="nan")


def _scores(weights: Tensor, of_chance: dict[tuple[int, bool], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of the heads of a prompt, and of chance, which is the same for all prompts of a length and kind."""
    key = weights.shape[-1], _is_causal(weights)
    if key not in of_chance:
        chance = uniform_attention(_all_real(weights), causal=key[1])
        of_chance[key] = {f"random_{m}": score(chance, undefined="nan").cpu() for m, score in SCORES.items()}
    random = of_chance[key]
    if not weights.isfinite().all():
        random = {metric: torch.full_like(values, torch.nan) for metric, values in random.items()}
    return random | {metric: score(weights, undefined="nan").cpu() for metric, score in SCORES.items()}


def _chance(weights: Tensor) -> Tensor:
    """Attention to all tokens alike, where that of a prompt is finite: (1, tokens, tokens)."""
    chance = uniform_attention(_all_real(weights), causal=_is_causal(weights))
    return chance.masked_fill(~weights.isfinite().all(), torch.nan)  # of the same prompts


def _all_real(weights: Tensor) -> Tensor:
    return torch.ones(weights.shape[-1], dtype=torch.bool, device=weights.device)


def _is_causal(weights: Tensor) -> bool:
    return not bool((weights.triu(1) > 0).any())


def _mean_over_heads(metric: str, blocks: Sequence[Tensor], tags: Tags) -> Iterator[Record]:
    """Of the values (prompts, heads) of each block."""
    nothing = torch.full((1, len(blocks[0])), torch.nan, dtype=torch.float64)
    yield from summarize_layers(metric, torch.cat([nothing, *(each.mean(1)[None] for each in blocks)]), tags=tags)
