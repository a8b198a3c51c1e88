"""Tokenizers: loading, training on a corpus, saving next to a checkpoint, and hashing."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lit_layers import schema
from lit_layers.errors import InputError, refuse_odd_files
from lit_layers.files.durable import naming
from lit_layers.files.hub import hub_errors
from lit_layers.identity import hash_of

END_OF_TEXT = "<|endoftext|>"
# End tokens that are tried, in this order, if the tokenizer names none.
ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "[SEP]")
MAIN, CONFIG = "tokenizer.json", "tokenizer_config.json"
COMPANIONS = (CONFIG, "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja")
BYTES, MOST_TOKENS = 256, 2_000_000
LONG_WORD = 1000  # maximum characters per word in BPE training, which takes time quadratic in the length of a word
_PARALLEL = "TOKENIZERS_PARALLELISM"
# The id of the process that imported this module, to recognise forked processes, which have another id. They must use a
# single thread, because they lack the threads of `tokenizers` and would wait for them forever.
_PID = os.getpid()


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, the token that ends a document, and a dict from names to paths of the tokenizer's other files."""

    tokenizer: Tokenizer
    end_of_text: str
    companions: dict[str, Path] = field(default_factory=dict)
    bos_id: int | None = None  # id of the `bos_token` in tokenizer_config.json, if it names one

    @property
    def end_of_text_id(self) -> int:
        index = self.tokenizer.token_to_id(self.end_of_text)
        assert index is not None, "checked when the tokenizer was loaded"
        return index

    @property
    def vocab_size(self) -> int:
        """Return the largest token id plus one, including added tokens: the number of rows that an embedding needs."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def bpe_size(spec: str) -> int | None:
    """Return the size in `bpe:SIZE`, or None for any other tokenizer."""
    if not spec.startswith("bpe:"):
        return None
    if not re.fullmatch(r"bpe:[0-9]{1,9}", spec) or not BYTES < int(spec[4:]) <= MOST_TOKENS:
        raise InputError(f"expected bpe:SIZE with a size over {BYTES} and at most {MOST_TOKENS:,}, not {spec!r}")
    return int(spec[4:])


def train_bpe(texts: Iterable[str], size: int) -> TextTokenizer:
    """Train a byte-level BPE of exactly `size` tokens. `<|endoftext|>` has id 0.

    Training is deterministic.

    Raises:
        InputError: The texts have too few repeated pairs of tokens to reach `size` tokens by merging.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with tokenizer_threads():
        tokenizer.train_from_iterator(_split_long_words(texts), trainer)
    if tokenizer.get_vocab_size() < size:
        most = tokenizer.get_vocab_size()
        raise InputError(f"the corpus has pairs for {most} tokens only, not for bpe:{size}: ask for bpe:{most} or less")
    return TextTokenizer(tokenizer, END_OF_TEXT)


def _split_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts with a very long word into pieces, because training BPE on a word of megabytes would take days."""
    for text in texts:
        if len(text) < LONG_WORD or max(map(len, text.split()), default=0) < LONG_WORD:
            yield text
        else:
            yield from (text[start : start + LONG_WORD] for start in range(0, len(text), LONG_WORD))


def load_tokenizer(spec: str) -> TextTokenizer:
    """Load the tokenizer at a path (`tokenizer.json`, or a folder with it), or NAME[@REVISION] from the Hub.

    Raises:
        InputError: There is no such tokenizer, or it has no token that ends a document.
    """
    path = Path(spec)
    if path.is_file():
        return _load(path, {})
    if not spec or not path.exists():  # Path('') is the working directory, which exists
        if path.suffix == ".json" or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(@[\w./-]+)?", spec):
            raise InputError(f"no tokenizer {spec!r}: expected an existing path, a name on the Hub, or bpe:SIZE")
        path = _download(spec)
    refuse_odd_files(path)
    if not (path / MAIN).is_file():
        raise InputError(f"the tokenizer {spec!r} has no {MAIN} (in {path}): save it as a fast tokenizer")
    return _load(path / MAIN, {name: path / name for name in COMPANIONS if (path / name).is_file()})


class TokenizerMixin:
    """Mixin for analyses that read texts with the tokenizer in their option `tokenizer`."""

    tokenizer: str

    @cached_property
    def text_tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.tokenizer)

    def tokenizer_hash(self) -> str | None:
        return tokenizer_hash(self.text_tokenizer.tokenizer)


def save_tokenizer(loaded: TextTokenizer, folder: Path) -> None:
    """Write the tokenizer to a folder that `AutoTokenizer` can open."""
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder / MAIN):
        loaded.tokenizer.save(str(folder / MAIN))
    for name, path in loaded.companions.items():
        shutil.copyfile(path, folder / name)
    config = _read_json(folder / CONFIG) if CONFIG in loaded.companions else {}
    if "tokenizer_class" not in config:
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": loaded.end_of_text}
    config.setdefault("eos_token", loaded.end_of_text)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a hash of everything that affects the ids of a text, as 16 hex digits.

    Copies of a tokenizer that were saved in different ways have equal hashes.
    """
    return _content_hash(tokenizer.to_str())


# Cached, because each analysis needs the hash of the tokenizer, and hashing takes six times as long as `to_str`.
@lru_cache(maxsize=4)
def _content_hash(text: str) -> str:
    parts = json.loads(text)
    model = {
        key: value
        for key, value in parts["model"].items()
        if key in ("type", "vocab", "merges", "unk_token", "byte_fallback")
    }
    model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
    added = [[token["id"], token["content"], token["special"]] for token in parts["added_tokens"]]
    content = [model, added, _drop_offsets(parts["normalizer"]), _drop_offsets(parts["pre_tokenizer"])]
    return hash_of(content)


@contextlib.contextmanager
def tokenizer_threads(*, every_core: bool = False) -> Iterator[None]:
    """Restrict `tokenizers` to the calling thread. With `every_core`, let it use all cores, except in a forked process.

    Once `tokenizers` has started threads, it warns in every forked data loader, unless the environment variable
    TOKENIZERS_PARALLELISM is set. The variable therefore stays set after a use with `every_core`.
    """
    before = os.environ.get(_PARALLEL, "false" if every_core else None)
    os.environ[_PARALLEL] = "true" if every_core and os.getpid() == _PID else "false"
    try:
        yield
    finally:
        os.environ.pop(_PARALLEL)
        os.environ.update({} if before is None else {_PARALLEL: before})


def _load(main: Path, companions: dict[str, Path]) -> TextTokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(main))
    except Exception as error:  # `tokenizers` raises only bare Exceptions
        raise InputError(f"{main} is no fast tokenizer of the `tokenizers` library ({error})") from error
    config = _read_json(companions[CONFIG]) if CONFIG in companions else {}
    named = (config.get(name) for name in ("bos_token", "eos_token"))
    bos, eos = (token.get("content") if isinstance(token, dict) else token for token in named)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = (token for token in (eos, *ENDS) if isinstance(token, str))
    end = next((token for token in tokens if tokenizer.token_to_id(token) is not None), None)
    if end is None:
        raise InputError(f"the tokenizer {main} has no token to end a document: name one as eos_token in {CONFIG}")
    loaded = TextTokenizer(tokenizer, end, companions, tokenizer.token_to_id(bos) if isinstance(bos, str) else None)
    if config.get("add_eos_token") is True and eos == loaded.end_of_text:
        _add_end(loaded)
    return loaded


def _add_end(loaded: TextTokenizer) -> None:
    """Make the tokenizer append the end token when it adds special tokens, unless it already does.

    This obeys the option add_eos_token in tokenizer_config.json, as transformers 4 did. transformers 5 only reads
    tokenizer.json, but encoders that pool the last token were trained with the end token.
    """
    tokenizer, end = loaded.tokenizer, loaded.end_of_text
    if tokenizer.encode("a").ids[-1:] != [loaded.end_of_text_id]:
        last = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, loaded.end_of_text_id)]
        )
        before = tokenizer.post_processor
        tokenizer.post_processor = last if before is None else processors.Sequence([before, last])


def _download(spec: str) -> Path:
    """Download the tokenizer files of a Hub repository, or find them in the local cache if there is no network."""
    from huggingface_hub import snapshot_download

    name, _, revision = spec.partition("@")
    what = f"the tokenizer {spec!r} is no local path and cannot be had from the Hub"
    with hub_errors(what, "check the name and the network, or give a local folder"):
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=[MAIN, *COMPANIONS]))


def _read_json(path: Path) -> dict[str, Any]:
    return schema.read(path, dict[str, Any], "mend it or copy it again")


def _drop_offsets(node: Any) -> Any:
    """Return a part of a tokenizer's JSON without options that affect only the offsets of tokens, not their ids."""
    if isinstance(node, dict):
        return {key: _drop_offsets(value) for key, value in node.items() if key != "trim_offsets"}
    return [_drop_offsets(value) for value in node] if isinstance(node, list) else node
