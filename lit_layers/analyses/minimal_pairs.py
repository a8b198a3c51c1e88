"""Minimal pairs: whether each layer gives a grammatical sentence more probability than an ungrammatical one."""

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Rows, Values
from lit_layers.analyses.readout_scores import layer_sums
from lit_layers.analyses.statistics import Sample, Tags, summarize_all
from lit_layers.data.batches import BATCH_TOKENS, EncodedTexts, encode_texts, tokenizer_of
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer
from lit_layers.data.word_pairs import read_table
from lit_layers.errors import InputError
from lit_layers.identity import sha16
from lit_layers.models.families import text_config
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

DATA = Path(__file__).parents[1] / "data"
OWN_PAIRS = {"english": DATA / "minimal_pairs.csv", "python": DATA / "minimal_pairs_python.csv"}
COLUMNS = ["good", "bad", "condition"]
NO_LIMIT = 2**20  # tokens per sentence when it is tokenized; `_texts` then compares with the limit of the model


@dataclass(kw_only=True)
class MinimalPairs(Analysis):
    """Choice between a grammatical and an ungrammatical sentence, by the model and by the readout of each layer 0..L.

    The log-probability of a sentence is the sum over its tokens, in nats, from a log-softmax in float32 or wider. A
    layer is read out by the final norm and the head (logit lens), as in `Lens`. Records without a layer
    describe the model's own output, which layer L equals. For each condition (tag `condition`) and over all pairs:

    - `minimal_pair_accuracy`: the share of pairs whose good sentence has the larger log-probability. A tie counts half.
    - `minimal_pair_difference`: the mean of log p(good) - log p(bad), in nats.

    `stderr`, intervals and `n` are over pairs. Values of single pairs, in the order of the file, are stored for the
    records over all conditions. A pair with a log-probability that is not finite is left out and counted in
    `num_undefined`.

    Sentences are tokenized with the tokenizer's special tokens. If it adds none at the start, its `bos_token` is put
    before each sentence, so that the first token is also predicted. If it has no `bos_token`, the `bos_token_id` of the
    model's config is used, if it is a special token of the tokenizer. Otherwise the first token of each sentence is not
    scored, and the tag `num_without_bos` counts the pairs. No sentence is padded.

    The package has 72 English pairs (five kinds of agreement, and negative polarity) and 36 pairs of lines of Python.
    In each condition, every pair has a mirror pair, or its sentences have the same tokens in another order. In its
    mirror, the wrong word is correct, and the correct one is wrong. A model that knows only the frequencies of tokens
    therefore has an accuracy of 0.5 and a mean difference of 0.

    Source: Warstadt et al., BLiMP, arXiv 1912.00582: accuracy from the probabilities of whole sentences.

    Args:
        tokenizer: a local path, a name on the Hub, or bpe:SIZE.
        corpus: the text on which the tokenizer bpe:SIZE is trained.
        pairs: "english", "python", or a CSV, TSV or parquet file with the columns `good`, `bad` and `condition`.

    Raises:
        InputError: on the first use: the file has no pairs, lacks a column or a text, has a pair of equal sentences, or
            has a sentence longer than the model reads.
    """

    SEES: ClassVar = "text"
    NEXT_TOKEN = True
    PRECISION = "own"
    UNMEASURED = ("pairs",)  # `data_hash` covers the file

    tokenizer: str
    corpus: str | None = None
    pairs: str = "english"
    name: str = "minimal_pairs"

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        for batch in self._batches(model):
            model.check_tokens(batch["input_ids"])

    def data_hash(self) -> str | None:
        """Return a hash of the conditions, of the token ids of all sentences, and of the tokenizer's BOS token."""
        return sha16(f"{json.dumps(self._rows)} {self._encoded.content_hash()} {self._tokenizer.bos_id}")

    def tokenizer_hash(self) -> str | None:
        return self._encoded.tokenizer_hash

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"sentences": Rows(self._batches(model), precision="own")}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        sums = layer_sums(self.name, seen, batch)
        # A sentence of a single token that is not scored has no log-probability.
        return {"scores": (-sums.loss).where(sums.num_rows > 0, torch.nan), "row": batch["row"].cpu()}

    def compute(self, model: LayeredModel, sentences: Values) -> Iterator[Record]:
        scores = sentences["scores"][:, sentences["row"].argsort()]  # (layers + 1, 2 x pairs), all good ones first
        good, bad = scores.unflatten(1, (2, -1)).unbind(1)
        difference = good - bad  # (layers + 1, pairs)
        difference = difference.where(difference.isfinite(), torch.nan)
        conditions = [condition for *_, condition in self._rows]
        uncounted = not (self._adds_start or self._start(model))
        for condition in (None, *dict.fromkeys(conditions)):
            members = torch.tensor([condition in (None, each) for each in conditions])
            tags: Tags = {} if condition is None else {"condition": condition}
            tags = {**tags, **({"num_without_bos": int(members.sum())} if uncounted else {})}
            for record in summarize_all(_samples(difference[:, members], tags)):
                yield record if condition is None else replace(record, by_prompt=None)

    def _batches(self, model: LayeredModel) -> list[dict[str, Tensor]]:
        """Return batches of sentences with equal numbers of tokens; `row` is a sentence's index, good sentences first.

        Raises:
            InputError: if a sentence is longer than the model reads.
        """
        start, longest = self._start(model), model.max_tokens or NO_LIMIT
        texts = [[*start, *ids.tolist()] for ids in self._encoded.ids]
        for index, text in enumerate(texts):
            if len(text) > longest:
                row, side = index % len(self._rows), index // len(self._rows)
                raise InputError(
                    f"{self.name}: expected sentences of at most {longest} tokens, {COLUMNS[side]} of row {row} of "
                    f"{self._file} has {len(text)}: shorten or remove it"
                )
        order, batches = sorted(range(len(texts)), key=lambda row: len(texts[row])), []
        for length, rows in itertools.groupby(order, key=lambda row: len(texts[row])):
            for part in torch.tensor(list(rows)).split(max(1, BATCH_TOKENS // length)):
                ids = torch.tensor([texts[row] for row in part.tolist()])
                batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "row": part})
        return batches

    def _start(self, model: LayeredModel) -> list[int]:
        """Return the BOS token to put before each sentence; [] if the tokenizer adds one itself, or there is none."""
        of_model = getattr(text_config(model.model.config), "bos_token_id", None)
        bos = of_model if self._tokenizer.bos_id is None else self._tokenizer.bos_id
        # A default config names a BOS token (Llama: 1) that may be an ordinary token of another tokenizer.
        is_special = bos in self._tokenizer.tokenizer.get_added_tokens_decoder()
        return [bos] if is_special and not self._adds_start else []

    @property
    def _file(self) -> Path:
        return OWN_PAIRS.get(self.pairs, Path(self.pairs))

    @functools.cached_property
    def _rows(self) -> list[list[str]]:
        return _read(self.name, self._file)

    @functools.cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(tokenizer_of(self.tokenizer, self.corpus))

    @property
    def _adds_start(self) -> bool:
        """Whether the tokenizer adds a special token at the start of each text."""
        return self._tokenizer.tokenizer.encode("a").special_tokens_mask[0] == 1

    @functools.cached_property
    def _encoded(self) -> EncodedTexts:
        sentences = [row[side] for side in (0, 1) for row in self._rows]
        return encode_texts(self._tokenizer, sentences, max_tokens=NO_LIMIT)


def _samples(difference: Tensor, tags: Tags) -> Iterator[Sample]:
    """Yield the samples of both metrics for the model (its last layer), then for layers 0..L."""
    hits = (difference > 0) + (difference == 0) / 2
    for metric, values in (
        ("minimal_pair_accuracy", hits.where(difference.isfinite(), torch.nan)),
        ("minimal_pair_difference", difference),
    ):
        yield Sample(metric, values[-1], tags=tags)
        yield from (Sample(metric, row, layer, tags=tags) for layer, row in enumerate(values))


def _read(name: str, path: Path) -> list[list[str]]:
    """Return the rows of a file of minimal pairs: good sentence, bad sentence, condition."""
    table = read_table(path, "minimal pairs")
    if missing := [column for column in COLUMNS if column not in table]:
        raise InputError(f"{name}: {path}: expected the columns {', '.join(COLUMNS)}, it lacks {', '.join(missing)}")
    rows: Sequence[list[str]] = table[COLUMNS].fillna("").astype(str).to_numpy().tolist()
    if not rows:
        raise InputError(f"{name}: {path}: expected one pair or more, got none")
    for index, row in enumerate(rows):
        if not all(cell.strip() for cell in row):
            raise InputError(f"{name}: {path}, row {index}: expected two sentences and a condition, got {row}")
        if row[0] == row[1]:
            raise InputError(f"{name}: {path}, row {index}: expected two different sentences, got {row[0]!r} twice")
    return list(rows)
