"""Texts that an analysis measures on, their batches and perturbed copies; the prompts of the six usual benchmarks."""

import functools
import json
import math
import random
import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from lit_layers.data.batches import (
    Batches,
    EncodedTexts,
    EvalText,
    draw_indices,
    encode_texts,
    tokenizer_of,
)
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.identity import sha16
from lit_layers.schema import refuse_below_one
from lit_layers.tasks.catalogue import ScoredTask, find, find_task, tasks_of
from lit_layers.tasks.probe_task import ProbeTask, TaskSplit, draw


class Texts(ABC):
    """The same texts in the same order at every checkpoint. Constructors are cheap; data loads on first use."""

    @abstractmethod
    def texts(self) -> Sequence[str]:
        """The texts, none of them empty.

        Raises:
            InputError: data that is not there, or a text without a word.
        """

    def labels(self) -> Tensor | None:
        """The class of each text, (texts,) of int64; None where there are none."""
        return None

    def content_hash(self) -> str:
        """Sixteen hex digits over the texts."""
        return sha16(json.dumps(list(self.texts())))


class GivenTexts(Texts):
    """Texts at hand. The config of an analysis holds their hash and not them.

    Raises:
        InputError: no text, or one without a word.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise InputError("texts: expected a list of texts, got one text")
        self._texts = checked(list(texts))
        self.hash = self.content_hash()

    def texts(self) -> Sequence[str]:
        return self._texts


@dataclass
class TaskTexts(Texts):
    """Texts of a downstream task, drawn without replacement.

    Args:
        task: A name of the catalogue, or a `ProbeTask`.
        folder: Local data, where the task's files lie; None: the Hub.
        part: `train`, `validation` or `test`.
        num_texts: Number of texts; of a part with fewer, all. None: all.
        seed: Decides which texts are drawn.
    """

    task: str | ProbeTask
    _: KW_ONLY
    folder: str | None = None
    part: Literal["train", "validation", "test"] = "test"
    num_texts: int | None = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below_one(num_texts=self.num_texts)

    def texts(self) -> Sequence[str]:
        return self._drawn[0]

    def labels(self) -> Tensor | None:
        return self._drawn[1]

    @functools.cached_property
    def _drawn(self) -> tuple[list[str], Tensor | None]:
        data = find_task(self.task).load(self.folder)
        split: TaskSplit = getattr(data, self.part)
        rows, labels = list(split.texts), split.targets if data.classes is not None else None
        if self.num_texts is not None and self.num_texts < len(rows):
            drawn = draw(rows, self.num_texts, seed=self.seed, purpose="texts")
            rows, labels = [rows[row] for row in drawn], None if labels is None else labels[drawn]
        return checked(rows), labels


@dataclass
class CorpusTexts(Texts):
    """Windows of a prepared corpus, as `EvalText` draws them, turned back into text; the next one in place of one
    without a word, such as the blank lines and indents of source code.

    Args:
        corpus, tokenizer, split, documents, seed: As of `EvalText`.
        num_texts: Number of windows.
        num_tokens: Tokens a window, of this tokenizer.
    """

    corpus: str
    tokenizer: str
    _: KW_ONLY
    split: str = "validation"
    documents: tuple[float, float] = (0.0, 1.0)
    num_texts: int = 1000
    num_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below_one(num_texts=self.num_texts)
        self._windows()  # refuses what is out of range

    def texts(self) -> Sequence[str]:
        return self._texts

    @functools.cached_property
    def _texts(self) -> list[str]:
        tokenizer = load_tokenizer(tokenizer_of(self.tokenizer, self.corpus)).tokenizer
        number, drawn, texts = self.num_texts, 0, list[str]()
        while len(texts) < self.num_texts:
            windows = self._windows(number).windows()  # begin with those of a smaller number
            if len(windows) == drawn:
                there = f"the {self.split} split of {self.corpus} has {len(texts)} windows with words"
                raise InputError(f"texts: {there}, expected {self.num_texts}: ask for fewer")
            texts = [text for text in tokenizer.decode_batch(windows.tolist()) if text.strip()]
            drawn, number = len(windows), number + self.num_texts - len(texts)
        return texts

    def _windows(self, number: int = 0) -> EvalText:
        return EvalText(
            self.corpus,
            self.tokenizer,
            split=self.split,
            documents=self.documents,
            num_sequences=number or self.num_texts,
            min_sequences=self.num_texts if number > self.num_texts else None,
            num_tokens=self.num_tokens,
            seed=self.seed,
        )


class _EncodedBatches(Batches):
    """Batches of encoded texts, in their order."""

    batch_size: int
    _encoded: functools.cached_property[EncodedTexts]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._encoded.split(self.batch_size)

    def content_hash(self) -> str:
        return sha16(f"{self._encoded.content_hash()} {self.batch_size}")

    def tokenizer_hash(self) -> str | None:
        """Load the texts on the first call."""
        return self._encoded.tokenizer_hash


@dataclass
class TextBatches(_EncodedBatches):
    """Texts of differing lengths as padded batches, in their order.

    Args:
        texts: The texts.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE`.
        corpus: Which the tokenizer bpe:SIZE is trained on.
        max_tokens: A longer text loses its end. The model's own limit is for the user to keep.
        batch_size: Texts a batch; the last batch may be smaller.
    """

    texts: Texts
    tokenizer: str
    _: KW_ONLY
    corpus: str | None = None
    max_tokens: int = 512
    batch_size: int = 16

    def __post_init__(self) -> None:
        refuse_below_one(max_tokens=self.max_tokens, batch_size=self.batch_size)

    @functools.cached_property
    def _encoded(self) -> EncodedTexts:
        return encode_texts(tokenizer_of(self.tokenizer, self.corpus), self.texts.texts(), max_tokens=self.max_tokens)

    def __len__(self) -> int:
        return -(-len(self._encoded) // self.batch_size)


@dataclass
class LabelledTexts(TextBatches):
    """`TextBatches` of texts that have classes, such as `TaskTexts`, each batch with their `labels`, (batch,) of int64.

    Raises:
        InputError: on the first walk for texts without classes.
    """

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        labels = self._classes.split(self.batch_size)
        yield from ({**batch, "labels": part} for batch, part in zip(super().__iter__(), labels, strict=True))

    def content_hash(self) -> str:
        return sha16(f"{super().content_hash()} {self._classes.tolist()}")

    @functools.cached_property
    def _classes(self) -> Tensor:
        if (labels := self.texts.labels()) is None:
            raise InputError("labels: expected the texts of a classification task, these have no classes")
        return labels


def checked(texts: list[str]) -> list[str]:
    """The texts.

    Raises:
        InputError: there is none, or one without a word.
    """
    if not texts:
        raise InputError("texts: expected at least one text, got none")
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"texts: expected a text with words, text {row} is {text!r}: leave it out")
    return texts


BENCHMARKS = tuple(tasks_of("prompts").values())


@dataclass
class BenchmarkPrompts(_EncodedBatches):
    """Prompts from ARC (Challenge), GSM8K, HellaSwag, MMLU, TruthfulQA and Winogrande: 200 of each, in turn.

    Prompt i comes from benchmark i mod 6, so that the first prompts are of all six as well, and a larger set begins
    with the prompts of a smaller one. Which rows are drawn depends on `seed` and the benchmark alone: every model is
    measured on the same texts, in its own tokens, with the special tokens that its tokenizer adds to any text.
    Source of the protocol (1,200 prompts of these test sets; which rows and columns is not published): Aubry, Meng,
    Sugolov, Papyan, arXiv 2407.07810.

    Args:
        tokenizer: A local path, or a name on the Hub.
        folder: Local data, whose `tasks.yaml` says where the prompts lie; None for the data sets of the Hub.
        num_prompts: Number of prompts, over all benchmarks.
        max_tokens: A longer prompt loses its end.
        batch_size: Prompts a batch, in their order; 1 needs no padding.
        seed: Decides which rows are drawn, and their order.

    Raises:
        InputError: for options out of range, and on the first walk for a missing file or column, or too few rows.
    """

    tokenizer: str
    _: KW_ONLY
    folder: str | None = None
    num_prompts: int = 1200
    max_tokens: int = 512
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below_one(num_prompts=self.num_prompts, max_tokens=self.max_tokens, batch_size=self.batch_size)

    def texts(self) -> list[str]:
        """The prompts as text, in their order."""
        shares = [
            _drawn(benchmark, self.folder, -(-(self.num_prompts - place) // len(BENCHMARKS)), self.seed)
            for place, benchmark in enumerate(BENCHMARKS[: self.num_prompts])
        ]
        return [shares[number % len(shares)][number // len(shares)] for number in range(self.num_prompts)]

    def __len__(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    @functools.cached_property
    def _encoded(self) -> EncodedTexts:
        return encode_texts(self.tokenizer, self.texts(), max_tokens=self.max_tokens)


def _drawn(benchmark: ScoredTask, folder: str | None, number: int, seed: int) -> list[str]:
    """`number` different rows of a benchmark; more of them begin with the same."""
    texts, place = _texts(benchmark.name, folder)
    if len(texts) < number:
        raise InputError(f"num_prompts: {place} has {len(texts)} prompts, {number} are needed: ask for fewer")
    return [texts[row] for row in draw_indices(len(texts), number, f"{seed}/{benchmark.name}")]


@functools.lru_cache(maxsize=2 * len(BENCHMARKS))  # every model of a suite is measured on the same texts
def _texts(name: str, folder: str | None) -> tuple[tuple[str, ...], str]:
    """The prompts of a benchmark, those left out that hold nothing but space; and where they are from."""
    benchmark = find("prompts", name).localized(folder)
    (column,) = benchmark.text
    rows = benchmark.read([benchmark.split], {column: "text"})
    return tuple(text for text in rows.values[column] if text and text.strip()), rows.origin


# ------------------------------------------------------------------------------------------------ views


MIN_CHARACTERS = 4
MAX_EQUAL = 0.05  # share of texts with two equal views, above which views are refused

_LETTERS = string.ascii_letters + string.digits
_ROWS = ("1234567890-", "qwertyuiop[", "asdfghjkl;'", "zxcvbnm,./")


def _neighbours() -> dict[str, str]:
    """Keys that touch, on a US keyboard whose rows are shifted by half a key each."""
    neighbours: dict[str, str] = {}
    for number, row in enumerate(_ROWS):
        for place, key in enumerate(row):
            beside = [row[place - 1 : place], row[place + 1 : place + 2]]
            above = _ROWS[number - 1][place : place + 2] if number else ""
            below = _ROWS[number + 1][max(place - 1, 0) : place + 1] if number + 1 < len(_ROWS) else ""
            keys = "".join(beside) + above + below
            neighbours[key] = keys
            neighbours[key.upper()] = keys.upper() if key.isalpha() else keys
    return neighbours


_NEIGHBOURS = _neighbours()


@dataclass(frozen=True, eq=False)
class Views:
    """The views of texts, and how far they are from them."""

    texts: list[list[str]]  # texts[v][i]: view v of text i
    num_equal: int  # texts with two equal views
    num_unchanged: int  # texts none of whose words has four characters: their views are the text
    changed_fraction: float  # of the words of all texts, how many a view changes, on average


def make_views(
    texts: Sequence[str], num_views: int = 2, *, seed: int = 0, share: float = 0.3, max_words: int = 10
) -> Views:
    """Return `num_views` copies of each text with typing errors, which readers still understand.

    A view is made in three steps: `split` puts a space into words, `random character` puts a letter or digit in the
    place of characters, `keyboard` the character of a key beside. Each step takes ceil(share x words) of the words of a
    text, at least one and at most `max_words`, among those of 4 or more characters; the last two change ceil(share x
    length) characters of each. Each view depends on the seed, its number and its text's place.

    White space between words stays as it is. A text whose words all have fewer than 4 characters has no word to change:
    its views are the text itself, and it counts among those with equal views.

    Source: the defaults of Skean et al., arXiv 2502.02013, appendix D.

    Raises:
        InputError: more than 5% of the texts have two equal views.
    """
    views = [
        [make_view(text, (seed, number, row), share=share, max_words=max_words) for row, text in rows]
        for number, rows in ((number, enumerate(texts)) for number in range(num_views))
    ]
    num_equal = sum(len({view[row] for view in views}) < num_views for row in range(len(texts)))
    if num_equal > MAX_EQUAL * len(texts):
        what = f"{num_equal} of {len(texts)} texts have two equal views, expected at most {MAX_EQUAL:.0%}"
        raise InputError(f"views: {what}: give texts with words of {MIN_CHARACTERS} or more characters")
    changed = [  # how many words of each text its views lack
        (Counter(text.split()) - Counter(view[row].split())).total() for view in views for row, text in enumerate(texts)
    ]
    num_words = num_views * sum(len(text.split()) for text in texts)
    return Views(
        views,
        num_equal,
        num_unchanged=sum(not any(map(_is_long, text.split())) for text in texts),
        changed_fraction=sum(changed) / max(num_words, 1),
    )


def make_view(text: str, random_state: tuple[int, int, int], *, share: float = 0.3, max_words: int = 10) -> str:
    """One view of a text; `random_state` is (seed, number of the view, place of the text) and decides all of it."""
    draw = random.Random("/".join(map(str, random_state)))
    for step in ("split", "random character", "keyboard"):
        pieces = re.split(r"(\s+)", text)  # words at even places, white space between them
        places = [place for place, piece in enumerate(pieces) if piece and not piece.isspace()]
        long = [place for place in places if _is_long(pieces[place])]
        count = min(max(1, math.ceil(share * len(places))), max_words, len(long))
        for place in sorted(draw.sample(long, count)):
            word = pieces[place]
            if step == "split":
                middle = draw.randrange(1, len(word))
                pieces[place] = f"{word[:middle]} {word[middle:]}"
            else:
                pieces[place] = _perturbed(word, draw, share, _LETTERS if step != "keyboard" else None)
        text = "".join(pieces)
    return text


def _perturbed(word: str, draw: random.Random, share: float, letters: str | None) -> str:
    """A word with other characters in a share of its places: of `letters`, or keys beside theirs."""
    characters = list(word)
    for place in sorted(draw.sample(range(len(word)), math.ceil(share * len(word))), reverse=True):
        choices = _NEIGHBOURS.get(word[place], "") if letters is None else letters.replace(word[place], "")
        characters[place] = draw.choice(choices) if choices else word[place]  # no key has it
    return "".join(characters)


def _is_long(word: str) -> bool:
    return len(word) >= MIN_CHARACTERS
