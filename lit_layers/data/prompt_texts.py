"""Texts that analyses measure on, their batches and perturbed copies, and the prompts of six common benchmarks."""

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
    """A fixed list of texts, the same at every checkpoint. Constructors are cheap; the data is loaded on first use."""

    @abstractmethod
    def texts(self) -> Sequence[str]:
        """Return the texts. None of them is blank.

        Raises:
            InputError: The data is missing, or a text is blank.
        """

    def labels(self) -> Tensor | None:
        """Return the class of each text, (texts,) int64, or None if the texts have no classes."""
        return None

    def content_hash(self) -> str:
        """Return a hash of the texts, as 16 hex digits."""
        return sha16(json.dumps(list(self.texts())))


class GivenTexts(Texts):
    """A list of texts in memory. The config of an analysis contains only their hash.

    Raises:
        InputError: The list is empty, or a text is blank.
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
        task: A name in the catalogue, or a `ProbeTask`.
        folder: A folder of local data with the task's files. None means the Hub.
        part: The split: `train`, `validation` or `test`.
        num_texts: Number of texts; a split with fewer gives all it has. None means all texts.
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
    """Windows of a prepared corpus, drawn as in `EvalText` and decoded to text.

    A window that contains only white space, such as indentation in source code, is replaced by the next one drawn.

    Args:
        corpus, tokenizer, split, documents, seed: As in `EvalText`.
        num_texts: Number of windows.
        num_tokens: Tokens per window, counted by this tokenizer.
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
        self._windows()  # called only to raise an error if an option is out of range

    def texts(self) -> Sequence[str]:
        return self._texts

    @functools.cached_property
    def _texts(self) -> list[str]:
        tokenizer = load_tokenizer(tokenizer_of(self.tokenizer, self.corpus)).tokenizer
        num, drawn, texts = self.num_texts, 0, list[str]()
        while len(texts) < self.num_texts:
            # Draw more windows until enough are not blank. A larger draw begins with the windows of a smaller one, so
            # earlier texts stay.
            windows = self._windows(num).windows()
            if len(windows) == drawn:
                there = f"the {self.split} split of {self.corpus} has {len(texts)} windows with words"
                raise InputError(f"texts: {there}, expected {self.num_texts}: ask for fewer")
            texts = [text for text in tokenizer.decode_batch(windows.tolist()) if text.strip()]
            drawn, num = len(windows), num + self.num_texts - len(texts)
        return texts

    def _windows(self, num: int = 0) -> EvalText:
        return EvalText(
            self.corpus,
            self.tokenizer,
            split=self.split,
            documents=self.documents,
            num_sequences=num or self.num_texts,
            min_sequences=self.num_texts if num > self.num_texts else None,
            num_tokens=self.num_tokens,
            seed=self.seed,
        )


class _EncodedBatches(Batches):
    """Base class of batches that are made from texts and a tokenizer, in the order of the texts."""

    batch_size: int
    _encoded: functools.cached_property[EncodedTexts]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._encoded.split(self.batch_size)

    def content_hash(self) -> str:
        return sha16(f"{self._encoded.content_hash()} {self.batch_size}")

    def tokenizer_hash(self) -> str | None:
        """Return the hash of the tokenizer. The first call loads the texts."""
        return self._encoded.tokenizer_hash


@dataclass
class TextBatches(_EncodedBatches):
    """Texts of different lengths as padded batches, in their order.

    Args:
        texts: The texts.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE`.
        corpus: The corpus that the tokenizer `bpe:SIZE` is trained on.
        max_tokens: Longer texts are truncated to this number of tokens, which must not exceed the model's limit.
        batch_size: Texts per batch; the last batch may be smaller.
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
    """`TextBatches` that also contain the classes of the texts as `labels`, (batch,) int64.

    The texts must have classes, as the texts of a classification task (`TaskTexts`) do.

    Raises:
        InputError: On the first iteration: the texts have no classes.
    """

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        labels = self._classes.split(self.batch_size)
        yield from ({**batch, "labels": chunk} for batch, chunk in zip(super().__iter__(), labels, strict=True))

    def content_hash(self) -> str:
        return sha16(f"{super().content_hash()} {self._classes.tolist()}")

    @functools.cached_property
    def _classes(self) -> Tensor:
        if (labels := self.texts.labels()) is None:
            raise InputError("labels: expected the texts of a classification task, these have no classes")
        return labels


def checked(texts: list[str]) -> list[str]:
    """Return the texts after checking them.

    Raises:
        InputError: The list is empty, or a text is blank.
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
    """Prompts from ARC (Challenge), GSM8K, HellaSwag, MMLU, TruthfulQA and Winogrande, interleaved, 200 of each.

    Prompt i comes from benchmark i mod 6, so any number of prompts covers the benchmarks evenly. A larger set begins
    with the prompts of a smaller one. The rows drawn depend only on `seed` and the benchmark, so every model is
    measured on the same texts. `tokenizer` tokenizes them, with its special tokens.

    Source: Aubry, Meng, Sugolov, Papyan, arXiv 2407.07810, with 1,200 prompts from these test sets. The paper does not
    say which rows and columns it used.

    Args:
        tokenizer: A local path, or a name on the Hub.
        folder: A folder of local data, whose `tasks.yaml` names the files of the prompts. None means the Hub.
        num_prompts: Number of prompts over all benchmarks.
        max_tokens: Longer prompts are truncated.
        batch_size: Prompts per batch, in their order; 1 needs no padding.
        seed: Decides which rows are drawn, and their order.

    Raises:
        InputError: An option is out of range. On the first iteration: a file or column is missing, or a benchmark has
            too few rows.
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
        """Return the prompts as text, in their order."""
        shares = [
            _draw_prompts(benchmark, self.folder, -(-(self.num_prompts - offset) // len(BENCHMARKS)), self.seed)
            for offset, benchmark in enumerate(BENCHMARKS[: self.num_prompts])
        ]
        return [shares[index % len(shares)][index // len(shares)] for index in range(self.num_prompts)]

    def __len__(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    @functools.cached_property
    def _encoded(self) -> EncodedTexts:
        return encode_texts(self.tokenizer, self.texts(), max_tokens=self.max_tokens)


def _draw_prompts(benchmark: ScoredTask, folder: str | None, num: int, seed: int) -> list[str]:
    """Draw `num` different prompts of a benchmark. A larger draw begins with the prompts of a smaller one."""
    texts, origin = _read_prompts(benchmark.name, folder)
    if len(texts) < num:
        raise InputError(f"num_prompts: {origin} has {len(texts)} prompts, {num} are needed: ask for fewer")
    return [texts[row] for row in draw_indices(len(texts), num, f"{seed}/{benchmark.name}")]


@functools.lru_cache(maxsize=2 * len(BENCHMARKS))  # cached, so that several models in one process read each file once
def _read_prompts(name: str, folder: str | None) -> tuple[tuple[str, ...], str]:
    """Return the prompts of a benchmark without blank ones, and the name of their file or split for error messages."""
    benchmark = find("prompts", name).localized(folder)
    (column,) = benchmark.text
    rows = benchmark.read([benchmark.split], {column: "text"})
    return tuple(text for text in rows.values[column] if text and text.strip()), rows.origin


# ------------------------------------------------------------------------------------------------ views


MIN_CHARACTERS = 4
MAX_EQUAL = 0.05  # largest accepted share of texts with two identical perturbed copies

_LETTERS = string.ascii_letters + string.digits
_ROWS = ("1234567890-", "qwertyuiop[", "asdfghjkl;'", "zxcvbnm,./")


def _neighbours() -> dict[str, str]:
    """Return the neighbouring keys of each key of a US keyboard, for typing errors.

    Each row of keys is half a key to the right of the row above.
    """
    near: dict[str, str] = {}
    for y, row in enumerate(_ROWS):
        for x, key in enumerate(row):
            sides = [row[x - 1 : x], row[x + 1 : x + 2]]
            above = _ROWS[y - 1][x : x + 2] if y else ""
            below = _ROWS[y + 1][max(x - 1, 0) : x + 1] if y + 1 < len(_ROWS) else ""
            keys = "".join(sides) + above + below
            near[key] = keys
            near[key.upper()] = keys.upper() if key.isalpha() else keys
    return near


_NEIGHBOURS = _neighbours()


@dataclass(frozen=True, eq=False)
class Views:
    """Perturbed copies ("views") of texts, with statistics of how much they differ from the original texts."""

    texts: list[list[str]]  # texts[v][i]: view v of text i
    num_equal: int  # number of texts with at least two identical perturbed copies
    num_unchanged: int  # number of texts without a word of 4 or more characters, which are not perturbed
    changed_fraction: float  # fraction of all words that a view changes, averaged over views


def make_views(
    texts: Sequence[str], num_views: int = 2, *, seed: int = 0, share: float = 0.3, max_words: int = 10
) -> Views:
    """Return `num_views` copies of each text with typing errors that leave it readable.

    A view is made in three steps. `split` inserts a space into words, `random character` replaces characters by a
    random letter or digit, and `keyboard` replaces characters by a neighbouring key. Each step changes ceil(share x
    words) random words of a text, at least one and at most `max_words`, all of 4 or more characters. The last two steps
    change ceil(share x length) characters of each of these words. All draws depend on the seed, the view's index and
    the text's index.

    White space between words is preserved. If all words of a text have fewer than 4 characters, its views equal the
    text, and it counts as a text with equal views.

    Source: The defaults of Skean et al., arXiv 2502.02013, appendix D.

    Raises:
        InputError: More than 5% of the texts have two equal views.
    """
    views = [
        [make_view(text, (seed, view, row), share=share, max_words=max_words) for row, text in rows]
        for view, rows in ((view, enumerate(texts)) for view in range(num_views))
    ]
    num_equal = sum(len({view[row] for view in views}) < num_views for row in range(len(texts)))
    if num_equal > MAX_EQUAL * len(texts):
        what = f"{num_equal} of {len(texts)} texts have two equal views, expected at most {MAX_EQUAL:.0%}"
        raise InputError(f"views: {what}: give texts with words of {MIN_CHARACTERS} or more characters")
    changed = [  # number of words of each text that are missing in each of its views
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
    """Return one view of a text: a copy with typing errors, made as in `make_views`.

    `random_state` is (seed, index of the view, index of the text).
    """
    draw = random.Random("/".join(map(str, random_state)))
    for step in ("split", "random character", "keyboard"):
        pieces = re.split(r"(\s+)", text)  # words at even indices, white space at odd ones
        words = [index for index, piece in enumerate(pieces) if piece and not piece.isspace()]
        long_words = [index for index in words if _is_long(pieces[index])]
        count = min(max(1, math.ceil(share * len(words))), max_words, len(long_words))
        for index in sorted(draw.sample(long_words, count)):
            word = pieces[index]
            if step == "split":
                middle = draw.randrange(1, len(word))
                pieces[index] = f"{word[:middle]} {word[middle:]}"
            else:
                pieces[index] = _perturbed(word, draw, share, _LETTERS if step != "keyboard" else None)
        text = "".join(pieces)
    return text


def _perturbed(word: str, draw: random.Random, share: float, letters: str | None) -> str:
    """Return a word with a share of its characters replaced by other characters.

    They are drawn from `letters` or, if `letters` is None, from the neighbouring keys on a keyboard.
    """
    chars = list(word)
    for index in sorted(draw.sample(range(len(word)), math.ceil(share * len(word))), reverse=True):
        choices = _NEIGHBOURS.get(word[index], "") if letters is None else letters.replace(word[index], "")
        # Leave a character unchanged if nothing can replace it, because it is not on the keyboard.
        chars[index] = draw.choice(choices) if choices else word[index]
    return "".join(chars)


def _is_long(word: str) -> bool:
    return len(word) >= MIN_CHARACTERS
