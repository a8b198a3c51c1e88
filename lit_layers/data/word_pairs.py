"""Word pairs of relations such as singular and plural, tokenized word by word."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_layers.data.batches import Batches, tokenizer_of
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, tokenizer_hash, tokenizer_threads
from lit_layers.errors import InputError
from lit_layers.identity import sha16
from lit_layers.schema import refuse_below_one

# Accepted names of the two columns of words: those of BATS, and those of the counterfactual pairs of Park et al.
KNOWN_COLUMNS = (("word", "answers"), ("word1", "word2"))
LABELS = ["category", "category_id", "group"]
MIN_PAIRS = 3  # smallest number of word pairs of a category, because analyses average over pairs of word pairs


@dataclass(frozen=True, eq=False)
class Category:
    """The word pairs of one relation. `first` and `second` are indices of their words in `WordPairs.words()`."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    first: Tensor  # (pairs,)
    second: Tensor  # (pairs,)
    num_dropped: int  # number of pairs dropped because both words have the same token ids
    id: str | None = None
    group: str | None = None


class Word(NamedTuple):
    ids: tuple[int, ...]
    position: int  # index in `ids` of the word's last sub-token, before any final special token


@dataclass
class WordPairs(Batches):
    """Word pairs by category: BATS 3.0, or any parquet, CSV or TSV file of pairs.

    Each word is tokenized separately with a leading space and the tokenizer's special tokens, such as BOS. Its position
    is that of its last sub-token. If a row has several answers (a list, or separated by "/"), the first is used. The
    order inside a pair is that of the file. Pairs whose words have the same token ids are dropped and counted.

    The batches contain every distinct word once. Words in a batch have the same number of tokens, so nothing is padded,
    and a word has the same hidden states in all its pairs. `"positions"` (batch,) holds the positions.

    Args:
        source: Path of the file. BATS has the columns `word` and `answers`; other files have `word1` and `word2`. A
            column `category` defines the categories; without it all pairs are one category.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE`.
        corpus: The corpus that the tokenizer `bpe:SIZE` is trained on.
        categories: Ids (`I01`), names or groups of the categories to use. None means all categories.
        batch_size: Words per batch.

    Raises:
        InputError: An option is out of range. On the first iteration: a file or column is missing, a category is
            unknown, a word is empty, or a category has fewer than 3 pairs.
    """

    source: str
    tokenizer: str
    _: KW_ONLY
    corpus: str | None = None
    categories: tuple[str, ...] | None = None
    batch_size: int = 256

    def __post_init__(self) -> None:
        refuse_below_one(batch_size=self.batch_size)
        self.categories = None if self.categories is None else tuple(self.categories)  # recipes pass a list

    def words(self) -> list[Word]:
        """Return the distinct words, in the order of the batches."""
        return self._loaded[0]

    def category_pairs(self) -> tuple[Category, ...]:
        """Return the word pairs of each category, in the order of the file."""
        return self._loaded[1]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for words in self._chunks():
            ids = torch.tensor([word.ids for word in words])  # (batch, tokens)
            positions = torch.tensor([word.position for word in words])
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "positions": positions}

    def __len__(self) -> int:
        return sum(1 for _ in self._chunks())

    def content_hash(self) -> str:
        """Return a hash of the words, the categories with their pairs, and the batch size, as 16 hex digits."""
        pairs = [
            (c.name, c.id, c.group, c.num_dropped, c.first.tolist(), c.second.tolist()) for c in self.category_pairs()
        ]
        return sha16(f"{self.batch_size} {[tuple(word) for word in self.words()]} {pairs}")

    def tokenizer_hash(self) -> str | None:
        """Return the hash of the tokenizer. The first call loads the words."""
        return self._loaded[2]

    def _chunks(self) -> Iterator[list[Word]]:
        for _, same in groupby(self.words(), key=lambda word: len(word.ids)):
            group = list(same)
            yield from (group[start : start + self.batch_size] for start in range(0, len(group), self.batch_size))

    @functools.cached_property
    def _pairs(self) -> Any:
        return self._selected(_read(Path(self.source)))

    @functools.cached_property
    def _loaded(self) -> tuple[list[Word], tuple[Category, ...], str]:
        table, tokenizer = self._pairs, load_tokenizer(tokenizer_of(self.tokenizer, self.corpus))
        spelled = list(dict.fromkeys(table[["first", "second"]].to_numpy().ravel()))
        encoded = dict(zip(spelled, _encode(spelled, tokenizer), strict=True))
        # Sort by number of tokens. The sort is stable, so words of equal length stay in the order of the file.
        words = sorted(dict.fromkeys(encoded.values()), key=lambda word: len(word.ids))
        index = {word: row for row, word in enumerate(words)}
        groups = table.groupby(LABELS, sort=False, dropna=False)
        categories = tuple(self._category(rows, encoded, index) for _, rows in groups)
        return words, categories, tokenizer_hash(tokenizer.tokenizer)

    def _category(self, rows: Any, encoded: dict[str, Word], index: dict[Word, int]) -> Category:
        name, id, group = rows[LABELS].iloc[0]
        pairs = zip(rows["first"], rows["second"], strict=True)
        distinct = [pair for pair in pairs if encoded[pair[0]].ids != encoded[pair[1]].ids]
        if len(distinct) < MIN_PAIRS:
            there = f"category {name!r} has {len(distinct)} pairs of different token ids"
            raise InputError(f"{self.source}: {there}, expected {MIN_PAIRS}: leave it out of categories")
        first, second = (torch.tensor([index[encoded[pair[side]]] for pair in distinct]) for side in (0, 1))
        return Category(name, tuple(distinct), first, second, len(rows) - len(distinct), id, group)

    def _selected(self, table: Any) -> Any:
        if self.categories is None:
            return table
        for category in self.categories:
            if not (table[LABELS] == category).any(axis=None):
                names = ", ".join(dict.fromkeys(table["category_id"].fillna(table["category"])))
                raise InputError(f"categories: {self.source} has no {category!r}; it has {names}")
        return table[table[LABELS].isin(self.categories).any(axis=1)]


def _encode(words: Sequence[str], tokenizer: TextTokenizer) -> list[Word]:
    """Tokenize each word with a leading space, and find the position of its last sub-token.

    No space is added if the tokenizer itself adds one to every text.
    """
    with tokenizer_threads():
        bare = tokenizer.tokenizer.encode("a", add_special_tokens=False).tokens
        space = "" if bare and bare[0].startswith(("\u2581", "\u0120")) else " "
        encodings = tokenizer.tokenizer.encode_batch([space + word for word in words])
    result = []
    for encoding in encodings:
        positions = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        result.append(Word(tuple(encoding.ids), positions[-1]))
    return result


def _read(path: Path) -> Any:
    """Read a file of word pairs into a table with the columns `first`, `second` and `LABELS`, one row per pair.

    Columns of `LABELS` that the file lacks contain None, except that a missing category becomes the name of the file.
    """
    import pandas as pd

    table = read_table(path, "word pairs")
    names = [str(name) for name in table.columns]
    if (found := next((pair for pair in KNOWN_COLUMNS if set(pair) <= set(names)), None)) is None:
        expected = " or ".join(map(" and ".join, KNOWN_COLUMNS))
        raise InputError(f"{path}: expected the columns {expected}, it has {', '.join(names)}")
    first, second = found
    pairs = [(_word(one), _word(other)) for one, other in zip(table[first], table[second], strict=True)]
    for row, pair in enumerate(pairs):
        if not all(pair):
            raise InputError(f"{path}, row {row}: expected two words in {first!r} and {second!r}, got {pair}")
    labels = {name: list(map(str, table[name])) if name in names else None for name in LABELS}
    labels["category"] = [name or path.stem for name in labels["category"] or [""] * len(pairs)]
    return pd.DataFrame(pairs, columns=["first", "second"], dtype=object).assign(**labels)


def _word(value: Any) -> str:
    """Return the word in a cell of the file, or the first of several answers, or an empty string if there is none."""
    if not isinstance(value, str):
        try:
            value = next(iter(value), "")
        except TypeError:  # `value` is a number or missing, and not a list
            return ""
    return str(value).split("/")[0].strip()


def read_table(path: Path, kind: str) -> Any:
    """Return a parquet, CSV or TSV file as a table; cells of CSV and TSV files are strings.

    Raises:
        InputError: if the file cannot be read. The message contains `kind`, for example "word pairs".
    """
    import pandas as pd
    import pyarrow as pa

    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        separator = "\t" if path.suffix == ".tsv" else ","
        return pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)  # "null" and "nan" are words
    except (pa.ArrowInvalid, pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} is no table of {kind} ({error}): copy it again") from error
